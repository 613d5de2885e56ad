"""Fitness of a plan for a host and its NCCL: GPUs, driver, NUMA nodes and version."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from tccl_py.errors import InputError
from tccl_py.model.machine import Fingerprint, Gpu, Machine
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.versions import has_rules, release
from tccl_py.plan.directory import files_of, machine_file
from tccl_py.plan.machine_files import ANY_HOST
from tccl_py.plan.plan import Plan
from tccl_py.plan.results import known_fingerprint, planned_fingerprint
from tccl_py.readers.hosts import names_of_this_host
from tccl_py.readers.live import GpuFacts, driver_facts, fingerprint_of

ALIKE_VARIABLE = "TCCL_ALIKE"
"""Set to 1 in jobs that use the plan of another, equal host."""


def differences(
    machine: Machine,
    planned: Fingerprint,
    present: Fingerprint,
    *,
    gpus: Sequence[int],
    present_gpus: Sequence[GpuFacts | Gpu] | None = None,
) -> tuple[list[str], list[str]]:
    """Compare this machine with the plan's by the plan's GPUs; return two lists of clauses.

    By the first this is another machine, whose rates are not comparable; the second may explain a
    change of rates. With its `present_gpus`, for the plan of one of many equal hosts,
    UUIDs may differ: GPUs of the same kinds at the same places will do.
    """
    another: list[str] = []
    notes: list[str] = []
    if present_gpus is not None:
        another += _list_changes(_places(machine.gpus), _places(present_gpus), gpus)
    uuids = planned.uuids(machine) if present_gpus is None else {}
    for place, (index, uuid) in enumerate(uuids.items()):
        present_uuid = present.gpu_uuids[place] if place < len(present.gpu_uuids) else None
        if index in gpus and present_uuid != uuid:
            changed = f"GPU {index} was {uuid} and is {present_uuid}"
            if present_uuid is None:
                changed = f"GPU {index} ({uuid}) is gone"
            elif uuid in present.gpu_uuids:
                changed = f"GPU {index} ({uuid}) has another index"
            another.append(changed)
    if planned.driver != present.driver:
        equal_major = planned.driver.partition(".")[0] == present.driver.partition(".")[0]
        clause = f"the driver was {planned.driver} and is {present.driver}"
        (notes if equal_major else another).append(clause)
    if planned.numa_count != present.numa_count:
        another.append(
            f"it had {planned.numa_count} NUMA node(s) and has {present.numa_count} (the BIOS's "
            "NPS or SNC setting?)"
        )
    if planned.kernel != present.kernel:
        notes.append(f"the kernel was {planned.kernel} and is {present.kernel}")
    return another, notes


def check_same_machine(
    plan: Plan,
    directory: Path,
    present: Fingerprint,
    *,
    right: str,
    present_gpus: Sequence[Gpu] | None = None,
) -> list[str]:
    """Check that a plan was measured on this machine; return notes on smaller differences.

    `present_gpus` are as for `differences`. Raises InputError: it is another machine, with the
    remedy `right`, or the plan has no fingerprint.
    """
    planned = known_fingerprint(plan, directory)
    another, notes = differences(
        plan.machine, planned, present, gpus=plan.gpus, present_gpus=present_gpus
    )
    if another:
        fault = f"was measured on another machine: {'; '.join(another)}"
        raise InputError(str(directory), fault, right)
    return notes


def host_here(plan: Plan, host: str | None = None) -> str | None:
    """Return the plan's name of a host, this one if not given; None if it has no such host.

    The only host of a plan is ANY_HOST. The plan may have it with a domain that is left out here.
    """
    graphs = files_of(plan).graphs
    names = names_of_this_host() if host is None else (host, host.partition(".")[0])
    named = next((name for name in chain([ANY_HOST], names) if name in graphs), None)
    if named is not None:
        return named
    # A hostfile may have the name with a domain that the host does not know itself by.
    own = socket.gethostname() if host is None else host
    longer = [name for name in graphs if name.startswith(f"{own}.")]
    return longer[0] if len(longer) == 1 else None


def why_elsewhere(
    plan: Plan, directory: Path, *, equal_hosts: bool, say: Callable[[str], None]
) -> str:
    """Return why a plan's rates do not hold on this host, in clauses; "" also without a driver.

    A simulated plan belongs to no host, so nothing speaks against it. With `equal_hosts` GPUs of
    the same kinds at the same places will do, as on hosts of a cluster's plan.
    """
    if plan.simulated:
        return ""
    try:
        facts = driver_facts()
    except InputError as error:
        say(f"whether this is the plan's machine was not checked: {error.what}")
        return ""
    host = host_here(plan)
    if host is None:
        return "the plan has no such host"
    if host != ANY_HOST:
        return why_not_of_class(plan, host, facts.gpus)
    planned = planned_fingerprint(plan, directory)
    if planned is None:
        return f"{machine_file(plan, directory)} has no fingerprint of its host"
    gpus, present = facts.gpus if equal_hosts else None, fingerprint_of(facts)
    another, _ = differences(plan.machine, planned, present, gpus=plan.gpus, present_gpus=gpus)
    return "; ".join(another)


def why_not_of_class(plan: Plan, host: str, gpus: Sequence[GpuFacts | Gpu]) -> str:
    """Return which of a host's GPUs are of other kinds than a cluster plan's, in clauses; or "".

    Hosts of a class share the measurements of one of them, so no host's UUIDs are known. `host` is
    the plan's name for a host, `gpus` are its present GPUs. A simulated plan belongs to no host.
    """
    if plan.simulated:
        return ""
    number = plan.cluster.host_classes[host]
    present = {gpu.index: gpu.name for gpu in gpus}
    planned = {gpu.index: gpu.name for gpu in plan.cluster.classes[number].machine.gpus}
    return "; ".join(_list_changes(planned, present, plan.class_gpus[number]))


def _places(gpus: Sequence[GpuFacts | Gpu]) -> dict[int, str]:
    return {gpu.index: f"{gpu.name} at {gpu.bus_id}" for gpu in gpus}


def _list_changes(
    planned: Mapping[int, str], present: Mapping[int, str], gpus: Sequence[int]
) -> list[str]:
    return [
        f"GPU {index} was {planned[index] or 'unnamed'} and is {present.get(index, 'gone')}"
        for index in gpus
        if present.get(index) != planned[index]
    ]


def why_not_with(settings: Settings, nccl: str) -> str:
    """Return why a plan's settings are for another version of NCCL, in a clause; "" if they fit.

    >>> why_not_with(Settings(version="2.30"), "2.28.9")
    'it is for NCCL 2.30 and this is 2.28.9 (plan again by `tccl plan DIR --force --nccl 2.28`)'
    """
    planned, used = (release(version)[:2] for version in (settings.version, nccl))
    if planned == used:
        return ""
    minor = ".".join(map(str, used))
    again = f" (plan again by `tccl plan DIR --force --nccl {minor}`)" if has_rules(nccl) else ""
    return f"it is for NCCL {settings.version} and this is {nccl}{again}"
