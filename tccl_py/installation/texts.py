"""Texts of an installed plan: nccl.conf, a SLURM task prolog, an environment module.

None names a graph file, because these texts hold for all communicators of a job and a graph file
for communicators over exactly its GPUs. They set the plan's settings, and TCCL_PLAN, by which
tccl_py.torch finds the graph file of each group.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal

import msgspec

from tccl_py.health.fitness import ALIKE_VARIABLE
from tccl_py.installation.blocks import Comment
from tccl_py.model.machine import Fingerprint
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.variables import job_environment
from tccl_py.plan.files import conf_text

Kind = Literal["conf", "slurm-prolog", "module"]
PLAN_VARIABLE = "TCCL_PLAN"
_PLAIN = "_-./+@%:,="


class Installed(msgspec.Struct, frozen=True, kw_only=True):
    """A plan to install: its directory and settings, and the machine that it holds for.

    `gpu_uuids` are the plan's GPUs, none if it holds for all hosts that are `alike`. `fingerprint`
    is None for a plan without a measured machine, which holds wherever it is installed.
    """

    directory: Path
    settings: Settings
    provenance: str
    fingerprint: Fingerprint | None = None
    gpu_uuids: tuple[str, ...] = ()
    alike: bool = False

    @property
    def variables(self) -> dict[str, str]:
        """Return a job's settings."""
        return job_environment(self.settings)

    @property
    def environment(self) -> dict[str, str]:
        """Return a job's settings, and the variables by which tccl_py.torch finds the plan."""
        more = {ALIKE_VARIABLE: "1"} if self.alike else {}
        return {**self.variables, PLAN_VARIABLE: str(self.directory), **more}


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """The form of our block in a file: lines, comment mark, and the head and mode of a new file."""

    body: str
    comment: Comment = "#"
    head: str = ""
    mode: int = 0o644


HEADS = ("", "#!/bin/sh\n", "#%Module1.0\n")
"""Heads of files that we made."""


def form_of(plan: Installed, kind: Kind, path: Path) -> Form:
    """Return the block for a file of this kind; a module with the suffix .lua is for Lmod."""
    if kind == "conf":
        return Form(body=conf_text(plan.settings, provenance=plan.provenance))
    if kind == "slurm-prolog":
        return Form(body=_prolog(plan), head="#!/bin/sh\n", mode=0o755)
    said, first = plan.environment.items(), f" tccl-py, rates {plan.provenance}.\n"
    if path.suffix == ".lua":
        lines = [f"setenv({_lua_string(name)}, {_lua_string(text)})\n" for name, text in said]
        return Form(body=f"--{first}{''.join(lines)}", comment="--")
    lines = [f"setenv {name} {_tcl_word(value)}\n" for name, value in said]
    return Form(body=f"#{first}{''.join(lines)}", head="#%Module1.0\n")


def _prolog(plan: Installed) -> str:
    """Return lines for a TaskProlog, whose output SLURM adds to the task's environment.

    Variables that the job sets stay. The prolog runs before every task, so it needs no Python and
    never fails, because SLURM would end the task.
    """
    exports = "".join(
        f'    [ -n "${{{name}+x}}" ] || printf "%s\\n" {shlex.quote(f"export {name}={value}")}\n'
        for name, value in plan.environment.items()
    )
    return (
        f"# tccl-py, rates {plan.provenance}; for TaskProlog= in slurm.conf, or srun --task-prolog."
        f"\n(\n{_guard(plan)}{exports}) || :\n"
    )


def _guard(plan: Installed) -> str:
    """Return shell lines that exit on machines other than the plan's."""
    measured = plan.fingerprint
    if measured is None:
        return ""
    uuids = "".join(
        f'    grep -qsF -- {shlex.quote(uuid)} "$gpus"/*/information || exit 0\n'
        for uuid in plan.gpu_uuids
    )
    major = measured.driver.partition(".")[0]
    pattern = shlex.quote(f"[[:space:]]{major}[.][0-9]")
    return (
        "    # Only with the GPUs, driver and NUMA nodes that the plan was measured on.\n"
        f"    gpus=/proc/driver/nvidia/gpus\n{uuids}"
        f"    grep -qs {pattern} /proc/driver/nvidia/version || exit 0\n"
        "    nodes=0\n"
        "    for list in /sys/devices/system/node/node[0-9]*/cpulist; do\n"
        '        ! grep -qs "[0-9]" "$list" || nodes=$((nodes + 1))\n'
        "    done\n"
        f'    [ "$nodes" -eq {measured.numa_count} ] || exit 0\n'
    )


def _tcl_word(text: str) -> str:
    r"""Return a Tcl word for any text.

    >>> _tcl_word("/a b/$x")
    '/a\\ b/\\$x'
    """
    return "".join(char if char.isalnum() or char in _PLAIN else f"\\{char}" for char in text)


def _lua_string(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
