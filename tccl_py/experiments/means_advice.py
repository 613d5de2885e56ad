"""Advice on means: by a table measured on a machine, else by published figures of others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby, permutations
from pathlib import Path
from typing import Literal

import msgspec

from tccl_py.errors import size_text
from tccl_py.experiments.collectives import Collective
from tccl_py.experiments.means import NCCL
from tccl_py.experiments.means_table import MeansRow, MeansTable
from tccl_py.model.machine import Knowledge, Machine

Links = Literal["nvlink", "pcie", "none"]
"""P2P between all GPUs over NVLink, over PCIe, or not between all."""
Lines = Iterator[tuple[str, str]]
_SERVERS = ("vLLM", "SGLang")
_KINDS: dict[str, tuple[Collective, str, range]] = {
    "tensor-parallel-decode": ("all_reduce", "graph", range(4 << 10, (1 << 20) + 1)),
    "pipeline": ("send", "eager", range(64 << 10, (256 << 20) + 1)),
}
"""The calls that a bundled workload is about: collective, mode and sizes in bytes."""


class Published(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Published times of a means beside default NCCL's on a named machine."""

    collective: Collective
    links: Links
    means: str
    machine: str
    source: str
    rows: tuple[tuple[int, float, float], ...]
    """Bytes, and microseconds by NCCL and by the means."""


class _Known(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is published, and how vLLM and SGLang are told; texts are for each of _SERVERS."""

    published: tuple[Published, ...]
    notes: dict[Links, str]
    serving: dict[Links, tuple[str, str]]
    """What is on by default."""
    flags: dict[str, tuple[str, str]]
    """What takes a means."""


@cache
def _known() -> _Known:
    text = (Path(__file__).parent / "means.json").read_bytes()
    return msgspec.json.decode(text, type=_Known)


def links_of(machine: Machine, knowledge: Knowledge) -> Links:
    """Return how the GPUs of a machine reach each other's memory."""
    pairs = list(permutations(machine.gpu_indices, 2))
    if all(machine.has_nvlink(*pair) for pair in pairs):
        return "nvlink"
    return "pcie" if all(knowledge.can_access(machine, *pair) for pair in pairs) else "none"


def means_lines(workload: str, links: Links, table: MeansTable | None) -> Lines:
    """Yield a name and a text for each line on the means for a bundled workload, if any.

    Without a `table` of the machine these are published figures of machines with such `links`.
    """
    if workload not in _KINDS:
        return
    collective, mode, sizes = _KINDS[workload]
    rows = [
        row
        for row in (table.rows if table is not None else ())
        if (row.collective, row.mode) == (collective, mode) and row.bytes in sizes
        if not row.beside_gemm
    ]
    if table is None or not rows:
        yield from _published_lines(collective, links)
        yield "Measure", "`tccl plan DIR`, `tccl verify DIR --means`: which means is best here"
        return
    dry = " (a DRY RUN over gloo)" * table.dry_run
    for name, same in groupby(rows, key=lambda row: row.best):
        yield "By size", f"{_span_words(list(same), name)}, measured here{dry}"
    if workload in table.workloads:
        best, default = table.workloads[workload]
        of_nccl = f", {default * 1e3:.2f} ms by default NCCL" if default else ""
        yield "A step", f"{best * 1e3:.2f} ms by the best means of each size{of_nccl}"
    most = max(rows, key=lambda row: (row.default_us or 0) - row.best_us).best
    if collective == "all_reduce" and not table.dry_run:
        flags = _known().flags[NCCL if most.startswith(NCCL) else most]
        defaults = _known().serving[links]
        for server, usual, flag in zip(_SERVERS, defaults, flags, strict=True):
            yield server, f"{usual}; for {most}: {flag}"


def _span_words(rows: Sequence[MeansRow], name: str) -> str:
    """Return the sizes for which a means is best, with its times and default NCCL's."""
    default = [row.default_us for row in rows if row.default_us is not None]
    nccl = "" if name == NCCL or not default else f", default NCCL {_range_words(default)}"
    sizes = [row.bytes for row in rows]
    return f"{_sizes_words(sizes)}: {name}, {_range_words([r.best_us for r in rows])}{nccl}"


def _published_lines(collective: Collective, links: Links) -> Lines:
    known = _known()
    for one in known.published:
        if (one.collective, one.links) == (collective, links):
            parts = []
            for faster, rows in groupby(one.rows, key=lambda row: row[2] < row[1]):
                sizes, nccl, us = zip(*rows, strict=True)
                name, other = (one.means, "NCCL") if faster else ("NCCL", one.means)
                first, second = (us, nccl) if faster else (nccl, us)
                times = f"{name} {_range_words(first)}, {other} {_range_words(second)}"
                parts.append(f"{_sizes_words(sizes)}: {times}")
            yield "Published", f"{'; '.join(parts)} on {one.machine} ({one.source})"
    if collective == "all_reduce":
        if known.notes[links]:
            yield "Note", known.notes[links]
        yield from zip(_SERVERS, known.serving[links], strict=True)
    elif links != "none":
        yield "Note", "no figures of other means than NCCL are known for such links"


def _sizes_words(sizes: Sequence[int]) -> str:
    return " to ".join(dict.fromkeys((size_text(sizes[0]), size_text(sizes[-1]))))


def _range_words(us: Sequence[float]) -> str:
    """Return times of the first and the last size."""
    return (
        " to ".join(dict.fromkeys(f"{value:.{value < 100:d}f}" for value in (us[0], us[-1])))
        + " us"
    )
