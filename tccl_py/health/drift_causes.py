"""The part of a machine that changed sets have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tccl_py.health.drift_statistics import Comparison
from tccl_py.model.machine import Machine
from tccl_py.model.paths import PathType, path_type
from tccl_py.model.transfer import Flow, Place, TransferSet

_EVEN = 0.1
"""Changes whose ratios differ by no more than this share are equal."""
_NEARLY_ALL = 0.8
_NAMED = 3
_FASTER = (
    "what changed became faster: the cause of lower rates when the plan was measured is gone, or "
    "clocks are higher; plan again"
)
_EVERYTHING = (
    "nearly everything changed alike: clocks, a power limit, heat, or other work on this "
    "machine rather than one link (`tccl doctor`, nvidia-smi -q -d PERFORMANCE)"
)
_SEVERAL = "no one link or memory explains all of it: more than one thing changed"


class Part(NamedTuple):
    """A link or memory on a flow's path; of tied parts of one `device` the lowest `rank` is named.

    A link explains more than one direction of it, and both more than the whole GPU.
    """

    words: str
    device: str
    rank: int = 0
    doubt: str = ""


def points_to(machine: Machine, rows: Sequence[Comparison]) -> str:
    """Return a clause on the cause of the changes among `rows`; "" if nothing changed."""
    changed = [row for row in rows if row.alarming]
    if not changed:
        return ""
    if all(row.ratio > 1 for row in changed):
        return _FASTER
    sets, hit = ({row.transfers for row in part} for part in (rows, changed))
    users, blamed = _sets_by_part(machine, rows), _sets_by_part(machine, changed)
    # The suspects: parts of all changed sets, and of the fewest unchanged sets.
    shares = {part: len(hit) / len(users[part]) for part, used in blamed.items() if used == hit}
    share = max(shares.values(), default=0.0)
    tied = [part for part in shares if shares[part] == share]
    # A part of the changed sets alone explains more than "nearly everything".
    exact = share == 1 and len(hit) < len(sets)
    ratios = [row.ratio for row in changed]
    alike = max(ratios) <= min(ratios) * (1 + _EVEN)
    if not exact and len(hit) > 1 and len(hit) >= len(sets) * _NEARLY_ALL and alike:
        return _EVERYTHING
    if not tied:
        return _SEVERAL
    ranks = {part.device: min(p.rank for p in tied if p.device == part.device) for part in tied}
    best = [part for part in tied if part.rank == ranks[part.device]]
    best.sort(key=lambda part: not part.words.startswith("GPU"))
    words = " or ".join(part.words for part in best[:_NAMED]) + best[:_NAMED][-1].doubt
    used = len(users[best[0]])
    if used == 1:
        return f"{words}: the changed set uses it, and no other measured set does"
    return (
        f"{words}: all sets that changed use it, and {len(hit)} of the {used} that use it changed"
    )


def _sets_by_part(machine: Machine, rows: Sequence[Comparison]) -> dict[Part, set[TransferSet]]:
    found: dict[Part, set[TransferSet]] = {}
    for row in rows:
        for part in _parts(machine, row.flow):
            found.setdefault(part, set()).add(row.transfers)
    return found


def _parts(machine: Machine, flow: Flow) -> Iterator[Part]:
    """Yield the links and memories on a flow's path."""
    for transfer in flow.transfers:
        source, destination = transfer.source, transfer.destination
        nvlinked = path_type(machine, str(source), str(destination)) <= PathType.NVB
        for place, direction in ((source, "out of it"), (destination, "into it")):
            if place.kind == "G":
                yield from _of_gpu(f"GPU {place.index}", nvlinked, direction)
            elif place.kind == "C":
                words = f"host memory of NUMA node {place.index}"
                yield Part(words, words)
        if not nvlinked:
            for words in _above(machine, source, destination):
                yield Part(words, words)


def _of_gpu(gpu: str, nvlinked: bool, direction: str) -> Iterator[Part]:
    link, doubt = (
        (f"{gpu}'s NVLinks", "") if nvlinked else (f"{gpu}'s PCIe link", " (downtrained?)")
    )
    yield Part(link, gpu, 0, doubt)
    yield Part(f"{link}, the way {direction}", gpu, 1)
    yield Part(f"{gpu}, by any way", gpu, 2, " (its clocks, power limit or heat?)")


def _above(machine: Machine, source: Place, destination: Place) -> Iterator[str]:
    """Yield the switches, links and CPUs between two places."""
    ends = (str(source), str(destination))
    first, second = (set(machine.ancestors(end) or (end,)) for end in ends)
    common = first & second
    bridges = {bridge.id for bridge in machine.bridges}
    for bridge in sorted((first ^ second) & bridges):
        yield f"the link above PCIe switch {bridge}"
    for bridge in sorted(common & bridges):
        yield f"PCIe switch {bridge}"
    nodes = {machine.numa_of(end) if end in machine.parents else int(end[1:]) for end in ends}
    if len(nodes) == 2:
        low, high = sorted(nodes)
        yield f"what joins NUMA nodes {low} and {high}"
    elif not common:
        yield f"the CPU of NUMA node {nodes.pop()}"
