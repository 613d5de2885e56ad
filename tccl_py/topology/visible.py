"""A machine as a job sees it that may use some of its GPUs only (CUDA_VISIBLE_DEVICES)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from tccl_py.errors import InputError
from tccl_py.topology.knowledge import Knowledge
from tccl_py.topology.machine import Machine

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_indices(machine: Machine, uuids: Sequence[str], text: str | None) -> tuple[int, ...]:
    """NVML indices of the GPUs that CUDA_VISIBLE_DEVICES leaves, ascending; all if it is not set.

    As CUDA reads it: indices or beginnings of UUIDs with commas between, and nothing counts from
    the first that is neither.

    >>> from tccl_py.topology.machine import toy_machine
    >>> visible_indices(toy_machine(gpus=4), (), "2,0,-1,3")
    (0, 2)

    Raises:
        InputError: it leaves none.
    """
    if text is None:
        return machine.gpu_indices
    found: set[int] = set()
    for part in (piece.strip() for piece in text.split(",")):
        index = _index(machine, uuids, part)
        if index is None:
            break
        found.add(index)
    if not found:
        known = ", ".join(map(str, machine.gpu_indices))
        raise InputError(VARIABLE, f"is {text[:40]!r}, which is no GPU here", f"there are {known}")
    return tuple(sorted(found))


def _index(machine: Machine, uuids: Sequence[str], part: str) -> int | None:
    if part.isascii() and part.isdigit() and len(part) < 6:
        return int(part) if int(part) in machine.gpu_indices else None
    named = [
        index
        for index, uuid in zip(machine.gpu_indices, uuids, strict=False)
        if len(part) > len("GPU-") and uuid.startswith(part)
    ]
    return named[0] if len(named) == 1 else None


def only_gpus(
    machine: Machine, knowledge: Knowledge, gpus: Collection[int]
) -> tuple[Machine, Knowledge]:
    """The machine with these GPUs alone, and what is known of them; indices stay as they are."""
    gone = {gpu.id for gpu in machine.gpus if gpu.index not in gpus}
    smaller = msgspec.structs.replace(
        machine,
        gpus=tuple(gpu for gpu in machine.gpus if gpu.id not in gone),
        nvlinks=tuple(link for link in machine.nvlinks if not {link.source, link.target} & gone),
    )
    facts = msgspec.structs.replace(
        knowledge,
        peer_access=tuple(
            fact for fact in knowledge.peer_access if {fact.source, fact.target} <= set(gpus)
        ),
        hidden_links=tuple(
            link for link in knowledge.hidden_links if not {link.one, link.other} & gone
        ),
    )
    return smaller, facts
