"""What part of a machine the sets that changed have in common, in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from tccl_py.health.drift_statistics import Comparison
from tccl_py.model.machine import Machine
from tccl_py.model.paths import PathType, path_type
from tccl_py.model.transfer import Flow, Place, TransferSet

_EVEN = 0.1
"""Changes whose ratios differ by no more than this share are one change."""
_NEARLY_ALL = 0.8
_NAMED = 3
_AS_A_WHOLE = ", by any way"
_DOUBTS = {
    "'s PCIe link": " (downtrained?)",
    _AS_A_WHOLE: " (its clocks, power limit or heat?)",
}


class _Suspect(msgspec.Struct, frozen=True, kw_only=True):
    """A part that may have changed, with how many sets use it and how many of them changed."""

    words: str
    used: int
    changed: int

    @property
    def share(self) -> float:
        return self.changed / self.used


def points_to(machine: Machine, rows: Sequence[Comparison]) -> str:
    """What the changes among `rows`, all flows compared, point to; "" if nothing changed."""
    changed = [row for row in rows if row.alarming]
    if not changed:
        return ""
    sets = {row.transfers for row in rows}
    hit = {row.transfers for row in changed}
    if all(row.ratio > 1 for row in changed):
        return (
            "what changed became faster: something that slowed it when the plan was measured is "
            "gone, or clocks are higher; plan again"
        )
    best = _best(machine, rows, changed)
    # A part that only what is unchanged does not use explains more than "nearly everything".
    told = bool(best) and best[0].share == 1 and len(hit) < len(sets)
    if not told and len(hit) > 1 and len(hit) >= len(sets) * _NEARLY_ALL and _alike(changed):
        return (
            "nearly everything changed alike: clocks, a power limit, heat, or other work on this "
            "machine rather than one link (`tccl doctor`, nvidia-smi -q -d PERFORMANCE)"
        )
    if not best:
        return "no one link or memory explains all of it: more than one thing changed"
    words = " or ".join(one.words for one in best)
    doubt = "".join(text for end, text in _DOUBTS.items() if words.endswith(end))
    return f"{words}{doubt}: {_counted(best[0])}"


def _alike(changed: Sequence[Comparison]) -> bool:
    ratios = [row.ratio for row in changed]
    return max(ratios) <= min(ratios) * (1 + _EVEN)


def _counted(suspect: _Suspect) -> str:
    if suspect.used == 1:
        return "the set that changed uses it, and no other that was measured"
    return (
        f"all sets that changed use it, and {suspect.changed} of the {suspect.used} "
        "that use it changed"
    )


def _best(
    machine: Machine, rows: Sequence[Comparison], changed: Sequence[Comparison]
) -> list[_Suspect]:
    """The part that all changed sets use and that the fewest unchanged ones do.

    Several if these sets do not tell them apart, but no more than `_NAMED`.
    """
    users, blamed = _sets_by_part(machine, rows), _sets_by_part(machine, changed)
    hit = {row.transfers for row in changed}
    suspects = [
        _Suspect(words=words, used=len(users[words]), changed=len(sets))
        for words, sets in blamed.items()
        if sets == hit
    ]
    most = max((one.share for one in suspects), default=0.0)
    tied = {one.words for one in suspects if one.share == most}
    return [
        one
        for one in sorted(suspects, key=lambda one: not one.words.startswith("GPU"))
        if one.words in tied and not _said_by_another(one.words, tied)
    ][:_NAMED]


def _said_by_another(words: str, tied: set[str]) -> bool:
    """Whether one way of a link, or a GPU as a whole, explains no more than that link does."""
    link, way, _ = words.partition(", the way")
    if way:
        return link in tied
    gpu, whole, _ = words.partition(_AS_A_WHOLE)
    return bool(whole) and any(one.startswith(f"{gpu}'s") for one in tied)


def _sets_by_part(machine: Machine, rows: Sequence[Comparison]) -> dict[str, set[TransferSet]]:
    found: dict[str, set[TransferSet]] = {}
    for row in rows:
        for words in parts_used(machine, row.flow):
            found.setdefault(words, set()).add(row.transfers)
    return found


def parts_used(machine: Machine, flow: Flow) -> dict[str, None]:
    """The links and memories that a flow's bytes pass, in words."""
    parts = (_parts(machine, one.source, one.destination) for one in flow.transfers)
    return dict.fromkeys(words for part in parts for words in part)


def _parts(machine: Machine, source: Place, destination: Place) -> Iterator[str]:
    ends = (str(source), str(destination))
    nvlinked = path_type(machine, *ends) <= PathType.NVB
    kind = "NVLinks" if nvlinked else "PCIe link"
    for place, way in ((source, "out of it"), (destination, "into it")):
        if place.kind == "G":
            yield f"GPU {place.index}{_AS_A_WHOLE}"
            yield f"GPU {place.index}'s {kind}"
            yield f"GPU {place.index}'s {kind}, the way {way}"
        elif place.kind == "C":
            yield f"host memory of NUMA node {place.index}"
    if not nvlinked:
        yield from _above(machine, ends)


def _above(machine: Machine, ends: tuple[str, str]) -> Iterator[str]:
    above = {end: machine.ancestors(end) or (end,) for end in ends}
    one, other = (set(above[end]) for end in ends)
    common = one & other
    for bridge in sorted((one ^ other) & {bridge.id for bridge in machine.bridges}):
        yield f"the link above PCIe switch {bridge}"
    for bridge in sorted(common & {bridge.id for bridge in machine.bridges}):
        yield f"PCIe switch {bridge}"
    nodes = {machine.numa_of(end) if end in machine.parents else int(end[1:]) for end in ends}
    if len(nodes) == 2:
        low, high = sorted(nodes)
        yield f"what joins NUMA nodes {low} and {high}"
    elif not common:
        yield f"the CPU of NUMA node {nodes.pop()}"


def worst_of_each_set(rows: Iterable[Comparison]) -> list[Comparison]:
    """The flow of each set that fell most (or rose least), the worst set first."""
    worst: dict[TransferSet, Comparison] = {}
    for row in sorted(rows, key=lambda row: row.ratio):
        worst.setdefault(row.transfers, row)
    return list(worst.values())
