"""Scripts that give a plan to jobs of a host: a SLURM task prolog, and an environment module."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from tccl_py.delivery.fit import ALIKE_VARIABLE
from tccl_py.delivery.job import Delivery
from tccl_py.errors import InputError
from tccl_py.model.machine import Fingerprint
from tccl_py.plan.host_files import own_variables
from tccl_py.plan.plan import Plan
from tccl_py.plan.results import planned_fingerprint

Form = Literal["slurm-prolog", "module"]
FORMS: tuple[Form, ...] = get_args(Form)
_PLAIN = "_-./+@%:,="


def script(
    form: Form, plan: Plan, directory: Path, delivery: Delivery, *, equal_hosts: bool
) -> str:
    """Return a script that sets what a host's jobs get.

    With `equal_hosts` it is for all hosts whose GPUs are equal to the plan's.
    """
    if own_variables(plan, delivery.choice.settings):
        fault = "is for hosts that need unlike names of NICs"
        raise InputError("a script for all hosts", fault, "run `tccl install` on each of them")
    more = {ALIKE_VARIABLE: "1"} if equal_hosts else {}
    variables = {**delivery.variables, **more}
    if form == "module":
        return module(variables, provenance=delivery.provenance)
    planned = None if plan.simulated else planned_fingerprint(plan, directory)
    uuids = {} if planned is None or equal_hosts else planned.uuids(plan.machine)
    gpus = [uuids[gpu] for gpu in plan.class_gpus[0] if gpu in uuids]
    # Ranks on other hosts may be without the plan: unlike variables hang.
    one_node = '    [ "${SLURM_JOB_NUM_NODES:-1}" -eq 1 ] || exit 0\n' * plan.cluster.closes
    guard = one_node + _same_host(planned, gpus)
    return prolog(variables, guard, provenance=delivery.provenance)


def module(variables: Mapping[str, str], *, provenance: str) -> str:
    """Return a module file in Tcl, which Lmod reads as well."""
    lines = "".join(f"setenv {name} {_tcl_word(value)}\n" for name, value in variables.items())
    return f"#%Module1.0\n# tccl-py, rates {provenance}.\n{lines}"


def prolog(variables: Mapping[str, str], guard: str, *, provenance: str) -> str:
    """Return a TaskProlog, whose output SLURM adds to the task's environment.

    Variables that the job sets stay. The prolog runs before every task, so it needs no Python and
    never fails, because SLURM would end the task. `guard` are shell lines that exit where the plan
    does not hold.
    """
    exports = "".join(
        f'    [ -n "${{{name}+x}}" ] || printf "%s\\n" {shlex.quote(f"export {name}={value}")}\n'
        for name, value in variables.items()
    )
    return (
        f"#!/bin/sh\n# tccl-py, rates {provenance}; for TaskProlog= in slurm.conf, or srun "
        f"--task-prolog.\n(\n{guard}{exports}) || :\n"
    )


def _same_host(planned: Fingerprint | None, gpus: Sequence[str]) -> str:
    """Return shell lines that exit on machines other than the plan's; `gpus` are UUIDs."""
    if planned is None:
        return ""
    uuids = "".join(
        f'    grep -qsF -- {shlex.quote(uuid)} "$gpus"/*/information || exit 0\n' for uuid in gpus
    )
    major = planned.driver.partition(".")[0]
    pattern = shlex.quote(f"[[:space:]]{major}[.][0-9]")
    return (
        "    # Only with the GPUs, driver and NUMA nodes that the plan was measured on.\n"
        f"    gpus=/proc/driver/nvidia/gpus\n{uuids}"
        f"    grep -qs {pattern} /proc/driver/nvidia/version || exit 0\n"
        "    nodes=0\n"
        "    for list in /sys/devices/system/node/node[0-9]*/cpulist; do\n"
        '        ! grep -qs "[0-9]" "$list" || nodes=$((nodes + 1))\n'
        "    done\n"
        f'    [ "$nodes" -eq {planned.numa_count} ] || exit 0\n'
    )


def _tcl_word(text: str) -> str:
    r"""Return a Tcl word for any text.

    >>> _tcl_word("/a b/$x")
    '/a\\ b/\\$x'
    """
    return "".join(char if char.isalnum() or char in _PLAIN else f"\\{char}" for char in text)
