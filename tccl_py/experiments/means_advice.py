"""Advice on means: by a table measured on a machine, else by published figures of others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby, permutations
from pathlib import Path
from typing import Any

import msgspec

from tccl_py.errors import size_text
from tccl_py.experiments.means import NCCL
from tccl_py.experiments.means_table import CALLS, MeansTable
from tccl_py.model.machine import Knowledge, Machine

_LARGEST = {"tensor-parallel-decode": ("all_reduce", 1 << 20), "pipeline": ("send", 256 << 20)}
"""What bundled workloads are about: a collective of 4 KiB up to so many bytes."""
Line = tuple[str, str]
_WORDS = {NCCL: "default NCCL"}


@cache
def _known() -> Any:
    """Return means.json: `published` rows of bytes and us by NCCL and by a means; texts by links.

    Of two texts the first is on vLLM, the second on SGLang: `serving` tells what is on by default,
    `flags` what takes a means.
    """
    return msgspec.json.decode((Path(__file__).parent / "means.json").read_bytes())


def links_of(machine: Machine, knowledge: Knowledge) -> str:
    """Return how all GPUs of a machine reach each other's memory: "nvlink", "pcie" or "none"."""
    pairs = list(permutations(machine.gpu_indices, 2))
    if all(machine.has_nvlink(*pair) for pair in pairs):
        return "nvlink"
    return "pcie" if all(knowledge.can_access(machine, *pair) for pair in pairs) else "none"


def means_lines(workload: str, links: str, table: MeansTable | None) -> Iterator[Line]:
    """Yield a name and a text for each line on the means for a bundled workload, if any.

    Without a `table` of the machine these are published figures of machines with such `links`.
    """
    if workload not in _LARGEST:
        return
    (collective, most), known = _LARGEST[workload], _known()
    rows = [
        row
        for row in (table.rows if table is not None else ())
        if row.calls == CALLS[collective] and 4 << 10 <= row.bytes <= most
    ]
    servers = dict(zip(("vLLM", "SGLang"), known["serving"][links], strict=True))
    if table is None or not rows:
        yield from _published_lines(collective, links)
        if collective == "all_reduce":
            yield from servers.items()
        yield "Measure", "`tccl plan DIR`, `tccl verify DIR --means`: which means is best here"
        return
    dry = " in a DRY RUN over gloo" * table.dry_run
    for best, group in groupby(rows, key=lambda row: row.best):
        same = list(group)
        names = [name for name in (best, NCCL) if all(name in row.us for row in same)]
        times = {_WORDS.get(name, name): [row.us[name] for row in same] for name in names}
        yield "By size", f"{_span([row.bytes for row in same], times)}, measured here{dry}"
    gains = {row.best: row.us.get(NCCL, 0) - row.us[row.best] for row in rows}
    chosen = max(gains, key=lambda name: gains[name])
    if collective == "all_reduce" and not table.dry_run:
        flags = known["flags"][NCCL if chosen.startswith(NCCL) else chosen]
        for (server, usual), flag in zip(servers.items(), flags, strict=True):
            yield server, f"{usual}; for {chosen}: {flag}"


def _published_lines(collective: str, links: str) -> Iterator[Line]:
    known = _known()
    for one in known["published"]:
        if (one["collective"], one["links"]) == (collective, links):
            parts = []
            for faster, group in groupby(one["rows"], key=lambda row: row[2] < row[1]):
                sizes, nccl, us = zip(*group, strict=True)
                both = [(one["means"], us), ("NCCL", nccl)]
                parts.append(_span(sizes, dict(both if faster else reversed(both))))
            yield "Published", f"{'; '.join(parts)} on {one['machine']} ({one['source']})"
    if note := known["notes"][collective][links]:
        yield "Note", note


def _span(sizes: Sequence[int], named: Mapping[str, Sequence[float]]) -> str:
    """Return the first and the last size, with the times of each means there."""
    times = []
    for name, us in named.items():
        texts = (f"{value:.{value < 100:d}f}" for value in (us[0], us[-1]))
        times.append(f"{name} {' to '.join(dict.fromkeys(texts))} us")
    ends = dict.fromkeys((size_text(sizes[0]), size_text(sizes[-1])))
    return f"{' to '.join(ends)}: {', '.join(times)}"
