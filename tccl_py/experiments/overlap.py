"""A job of `tccl overlap`: the sets of transfers, the specification, the run, and the table."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from tccl_py.errors import InputError, MeasurementError, require
from tccl_py.files import encode_json
from tccl_py.model.rings import direct_write
from tccl_py.model.transfer import flow_texts, parse_flow
from tccl_py.rank_processes.forkserver import ForkServer
from tccl_py.rank_processes.tasks import (
    TORCH,
    RanksError,
    Task,
    decoded,
    run_tasks,
    torch_environment,
)
from tccl_py.statistics import median_interval

Backend = Literal["nccl", "gloo"]
Kind = Literal["messages", "copies"]
"""Messages between ranks, one rank a GPU; or copies by one process between all GPUs."""
Mode = Literal["sequential", "concurrent"]
Works = tuple[tuple[float, ...], ...]
"""One rank's times: ms of each repeat by work, () for other ranks' work. The works are a set's
pairs, or a GEMM and the transfer beside it."""
Timings = dict[Mode, Works]
_TOTAL: dict[Mode, Callable[[tuple[float, ...]], float]] = {"sequential": sum, "concurrent": max}
ALL_REDUCE = "all-reduce"
_PAIR = re.compile(r"^G([0-9]{1,4})->G([0-9]{1,4})$", re.ASCII)
_MOST_PAIRS = 8


class Pair(NamedTuple):
    """A transfer between two of the job's GPUs, numbered from 0."""

    source: int
    target: int

    def text(self, gpus: Sequence[int]) -> str:
        """Return the pair by indices of GPUs, as `G4->G6`."""
        return f"G{gpus[self.source]}->G{gpus[self.target]}"


Pairs = tuple[Pair, ...]


class OverlapSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Specification of a job: each set of pairs, then transfers beside a GEMM.

    `places` is the number of GPUs. A transfer is `messages` of `message_bytes`, and everything is
    timed `repeats` times.
    """

    backend: Backend
    kind: Kind
    places: int
    sets: tuple[Pairs, ...]
    message_bytes: int
    messages: int
    repeats: int

    @property
    def world(self) -> int:
        """Return the number of processes."""
        return self.places if self.kind == "messages" else 1

    @property
    def beside_gemm(self) -> tuple[Pair | None, ...]:
        """Return the transfers beside a GEMM; None is an all-reduce."""
        first = self.sets[0][0]
        return (first, None) if self.kind == "messages" else (first,)


class OverlapResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result of one rank: each set's timings, and those of each of `beside_gemm` with a GEMM.

    `right` is false if received bytes differ from sent bytes.
    """

    rank: int
    torch: str
    device: str
    right: bool
    sets: tuple[Timings, ...]
    products: tuple[Timings, ...]


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A median and the 95 % interval, ms; the whole range of fewer than 6 samples."""

    median_ms: float
    low_ms: float
    high_ms: float


Row = dict[str, Any]
"""A row of a table, with the keys of `--json`."""


def default_sets(places: int) -> tuple[Pairs, ...]:
    """Return sets of two pairs: both ways, one way twice; from 3 GPUs on out, in and through one.

    >>> [len(default_sets(places)) for places in (2, 3, 4)]
    [2, 5, 6]
    """
    chosen = [((0, 1), (1, 0)), ((0, 1), (0, 1))]
    if places > 2:
        chosen += [((0, 1), (0, 2)), ((1, 0), (2, 0)), ((1, 0), (0, 2))]
    if places > 3:
        chosen.append(((0, 1), (2, 3)))
    return tuple(tuple(itertools.starmap(Pair, pairs)) for pairs in chosen)


def parse_sets(texts: Sequence[str], gpus: Sequence[int]) -> tuple[Pairs, ...]:
    """Return sets such as `G0->G2 G0->G3`, by places in `gpus`.

    >>> parse_sets(["G4->G6"], (4, 6))
    ((Pair(source=0, target=1),),)
    """
    parsed = []
    for text in texts:
        where, words = f"set {text[:60]!r}", flow_texts(text)
        right = f"1 to {_MOST_PAIRS}, as 'G0->G1 G2->G3'"
        require(1 <= len(words) <= _MOST_PAIRS, where, f"has {len(words)} pairs", right)
        parsed.append(tuple(_parse_pair(word, gpus, where) for word in words))
    return tuple(parsed)


def _parse_pair(word: str, gpus: Sequence[int], where: str) -> Pair:
    flow = parse_flow(_PAIR.sub(r"\1:\2", word))
    ends = flow.source.index, flow.destination.index
    if str(flow) != str(direct_write(*ends)):
        raise InputError(where, f"has {word[:30]!r}", "write pairs of GPUs, as G0->G1 or 0:1")
    if unknown := [gpu for gpu in ends if gpu not in gpus]:
        right = f"the job has {', '.join(map(str, gpus))}"
        raise InputError(where, f"names GPU {unknown[0]}", right)
    return Pair(*map(gpus.index, ends))


def time_overlap(
    backend: Backend, gpus: Sequence[int], sets: tuple[Pairs, ...], *, timeout: float, **counts: int
) -> tuple[list[Row], list[Row], OverlapResult]:
    """Run a job of messages and one of copies here; return their rows, and a rank's result.

    `counts` are as in OverlapSpec. Raises MeasurementError: a rank fails, or as `rows_of`.
    """
    environment = torch_environment(os.environ, gpus if backend == "nccl" else None)
    pairs: list[Row] = []
    products: list[Row] = []
    kinds: tuple[tuple[str, Kind], ...] = ((backend, "messages"), ("memcpy", "copies"))
    with ForkServer() as server:
        for by, kind in kinds:
            spec = OverlapSpec(backend=backend, kind=kind, places=len(gpus), sets=sets, **counts)
            task = Task(
                program="tccl_py.experiments.overlap_rank",
                spec=encode_json(spec),
                ranks=tuple(range(spec.world)),
                environment=environment,
                timeout=timeout,
                imports=TORCH,
            )
            try:
                (output,) = run_tasks([task], server=server)
            except RanksError as error:
                if error.late:
                    raise MeasurementError(f"{error}; raise `timeout`") from error
                raise
            results = decoded(output, task.ranks, OverlapResult)
            tables = rows_of(by, spec, results, gpus)
            pairs += tables[0]
            products += tables[1]
    return pairs, products, results[0]


def span(samples: Iterable[float]) -> Span:
    """Return the median of times in ms, and the interval."""
    interval = median_interval(list(samples))
    return Span(median_ms=interval.middle, low_ms=interval.low, high_ms=interval.high)


def rows_of(
    by: str, spec: OverlapSpec, results: Sequence[OverlapResult], gpus: Sequence[int]
) -> tuple[list[Row], list[Row]]:
    """Return a job's rows; `by` is `nccl`, `gloo` or `memcpy`, `gpus` the index of each place.

    Wrong bytes are a MeasurementError.
    """
    wrong = [str(result.rank) for result in results if not result.right]
    if wrong:
        what = f"gave rank {', '.join(wrong)} wrong bytes: times are void"
        raise MeasurementError(f"transfers by {by}: {what}")
    pairs, products = [], []
    for at, places in enumerate(spec.sets):
        for mode, times in _slowest([result.sets[at] for result in results]):
            row: Row = {"by": by, "mode": mode, "set": [pair.text(gpus) for pair in places]}
            row["message"] = [span(ms / spec.messages for ms in work) for work in times]
            row["total"] = span(map(_TOTAL[mode], zip(*times, strict=True)))
            pairs.append(row)
    for at, transfer in enumerate(spec.beside_gemm):
        name = ALL_REDUCE if transfer is None else transfer.text(gpus)
        for mode, times in _slowest([result.products[at] for result in results]):
            row = {"by": by, "mode": mode, "transfer": name}
            row["transfer_time"], row["product_time"] = span(times[1]), span(times[0])
            row["total"] = span(map(_TOTAL[mode], zip(*times, strict=True)))
            products.append(row)
    return pairs, products


def _slowest(ranks: Sequence[Timings]) -> Iterator[tuple[Mode, Works]]:
    """Yield each mode, and the times of each work on the slowest rank that reports it."""
    for mode in ranks[0]:
        works = zip(*(rank[mode] for rank in ranks), strict=True)
        yield mode, tuple(tuple(map(max, zip(*filter(None, work), strict=True))) for work in works)
