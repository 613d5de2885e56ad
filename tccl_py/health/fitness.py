"""Whether a plan still fits where it is to be used: the GPUs, the driver, NUMA nodes, and NCCL."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from tccl_py.cluster_plan.plan import ClusterPlan
from tccl_py.errors import InputError
from tccl_py.model.knowledge import Fingerprint
from tccl_py.model.machine import Machine
from tccl_py.nccl.settings import Settings
from tccl_py.plan.directory import machine_file, planned_fingerprint
from tccl_py.plan.plan import Plan
from tccl_py.readers.nvml import GpuFacts

# Whether this is the machine a plan was measured on.


class Differences(msgspec.Struct, frozen=True, kw_only=True):
    """How a machine differs from a plan's, a clause each.

    With any of `another` rates cannot be compared; `notes` may explain a change.
    """

    another: tuple[str, ...]
    notes: tuple[str, ...]


def differences(
    machine: Machine, planned: Fingerprint, here: Fingerprint, *, gpus: tuple[int, ...]
) -> Differences:
    """Compare the machine that a plan was measured on with this one, by the plan's GPUs."""
    another = [*_gpus(machine, planned, here, gpus)]
    old, new = planned.driver, here.driver
    if old.partition(".")[0] != new.partition(".")[0]:
        another.append(f"the driver was {old} and is {new}")
    if planned.numa_count != here.numa_count:
        another.append(
            f"it had {planned.numa_count} NUMA node(s) and has {here.numa_count} (the BIOS's "
            "NPS or SNC setting?)"
        )
    notes = []
    if not another and old != new:
        notes.append(f"the driver was {old} and is {new}")
    if planned.kernel != here.kernel:
        notes.append(f"the kernel was {planned.kernel} and is {here.kernel}")
    return Differences(another=tuple(another), notes=tuple(notes))


def _gpus(
    machine: Machine, planned: Fingerprint, here: Fingerprint, gpus: tuple[int, ...]
) -> Iterator[str]:
    # A fingerprint has the UUIDs in the machine's order of GPUs.
    was = dict(zip(machine.gpu_indices, planned.gpu_uuids, strict=False))
    for place, (index, uuid) in enumerate(was.items()):
        now = here.gpu_uuids[place] if place < len(here.gpu_uuids) else None
        if index not in gpus or now == uuid:
            continue
        if now is None:
            yield f"GPU {index} ({uuid}) is gone"
        elif uuid in here.gpu_uuids:
            yield f"GPU {index} ({uuid}) has another index"
        else:
            yield f"GPU {index} was {uuid} and is {now}"


ALIKE_VARIABLE = "TCCL_ALIKE"
"""Set to 1 where jobs use the plan of another host that is like theirs."""
_VERSION = re.compile(r"v?([0-9]{1,3})\.([0-9]{1,3})(?![0-9])")


def why_not_here(plan: Plan, directory: Path, here: Fingerprint) -> str:
    """Why a plan's rates are not this host's, in a clause or several; "" if they are, or if the
    plan is simulated and so nobody's.

    Args:
        plan: of one machine.
        directory: where it is.
        here: the host as it is now.

    Raises:
        InputError: the plan was measured and its machine's file is gone or damaged.
    """

    def another(planned: Fingerprint) -> tuple[str, ...]:
        return differences(plan.machine, planned, here, gpus=plan.gpus).another

    return _why_not(plan, directory, another)


def why_not_alike(plan: Plan, directory: Path, here: Fingerprint, gpus: Sequence[GpuFacts]) -> str:
    """Why a host is not like the one that a plan was measured on, in a clause or several; "" if it
    is: GPUs of the same kinds at the same places, the same driver and NUMA nodes.

    For the plan of one of many equal hosts, whose GPUs have other UUIDs.

    Args:
        plan: of one machine.
        directory: where it is.
        here: the host as it is now.
        gpus: its GPUs.

    Raises:
        InputError: the plan was measured and its machine's file is gone or damaged.
    """
    now = {gpu.index: f"{gpu.name} at {gpu.bus_id}" for gpu in gpus}
    was = {gpu.index: f"{gpu.name} at {gpu.bus_id}" for gpu in plan.machine.gpus}

    def another(planned: Fingerprint) -> tuple[str, ...]:
        # Without GPUs to compare, what is left is the driver and the NUMA nodes.
        rest = differences(plan.machine, planned, here, gpus=()).another
        return (_changed(was, now, plan.gpus), *rest)

    return _why_not(plan, directory, another)


def _why_not(plan: Plan, directory: Path, another: Callable[[Fingerprint], tuple[str, ...]]) -> str:
    """What is `another` than on the host that a plan was measured on, in a clause or several."""
    if plan.simulated:
        return ""
    planned = planned_fingerprint(plan, directory)
    if planned is None:
        return f"{machine_file(plan, directory)} does not say whose it is"
    return "; ".join(one for one in another(planned) if one)


def why_not_of_class(plan: ClusterPlan, host: str, gpus: Sequence[GpuFacts]) -> str:
    """Why a host's GPUs are not those that a cluster's plan was measured with, in a clause or
    several; "" if they are of the same kinds, or if the plan is simulated.

    Hosts of a class share what was measured on one of them, so that no host's UUIDs are known.

    Args:
        plan: of several hosts.
        host: one of them, by the plan's name for it.
        gpus: its GPUs as they are now.
    """
    if plan.simulated:
        return ""
    number = plan.cluster.host_classes[host]
    now = {gpu.index: gpu.name for gpu in gpus}
    was = {gpu.index: gpu.name for gpu in plan.cluster.classes[number].machine.gpus}
    return _changed(was, now, plan.gpus[number])


def _changed(was: Mapping[int, str], now: Mapping[int, str], gpus: Sequence[int]) -> str:
    return "; ".join(
        f"GPU {index} was {was[index] or 'unnamed'} and is {now.get(index, 'gone')}"
        for index in gpus
        if now.get(index) != was[index]
    )


def why_not_with(settings: Settings, nccl: str) -> str:
    """Why a plan's settings are not for this version of NCCL, in a clause; "" if they are.

    >>> from tccl_py.nccl.settings import Settings
    >>> why_not_with(Settings(version="2.28"), "2.28.9")
    ''
    >>> why_not_with(Settings(version="2.30"), "2.28.9")
    'it is for NCCL 2.30 and this is 2.28.9 (plan again with --nccl 2.28)'

    Raises:
        InputError: `nccl` is no version.
    """
    planned, used = _VERSION.match(settings.version), _VERSION.match(nccl)
    if used is None:
        raise InputError(
            f"NCCL version {nccl[:40]!r}", "is no version", "give a number such as 2.28.9"
        )
    if planned is not None and planned.groups() == used.groups():
        return ""
    again = ".".join(used.groups())
    return f"it is for NCCL {settings.version} and this is {nccl} (plan again with --nccl {again})"
