"""Whether this is the machine a plan was measured on."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tccl_py.model.knowledge import Fingerprint
from tccl_py.model.machine import Machine


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
