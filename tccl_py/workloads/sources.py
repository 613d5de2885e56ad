"""A workload from whatever a user names: a bundled name, its file, or files of a recording.

Recorded calls make a workload so:

1. Ranks are numbered as in the first communicator that has all of them.
2. The blocks of an all-to-all differ between ranks: its bytes are those of the largest rank.
3. Each rank's steady steps are found by repetition, and calls of a step are counted.
4. Equal calls of disjoint groups are one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from tccl_py.errors import InputError, require, spell
from tccl_py.files import reading
from tccl_py.workloads.nccl_log import read_nccl_logs
from tccl_py.workloads.recording import (
    Event,
    Op,
    RecordedCommunicator,
    RecordedRank,
    Recording,
)
from tccl_py.workloads.torch_trace import GZIP, read_torch_traces
from tccl_py.workloads.workload import (
    BUNDLED,
    MAX_ROWS,
    Workload,
    WorkloadRow,
    load_bundled,
    read_workload,
)

LEAST_STEPS = 3
_PARTS = 16
_WINDOW = 1 << 18
"""Calls after an anchor in which a step has to repeat."""
_NEARLY = 0.95
"""Of the longest run: a shorter step with such a run is preferred."""
Ints = NDArray[np.uint32]
Calls = Mapping[Op, float]
Numbers = Mapping[RecordedRank, int]
"""Of ranks in the job."""
_HOW = "record with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,COLL, or by `tccl run --record`"
_NO_CALLS = f"`tccl advise FILE` says what a log has; {_HOW}"
Key = tuple[Any, ...]
"""Collective, dtype and bytes."""
MAX_FILES = 1 << 16
_HEAD = 1 << 16
_LOGS, _TRACES = "NCCL's logs", "PyTorch's profiler"
_WORKLOAD = "a workload"
_OF_TRACES = (b'"traceEvents"', b'"schemaVersion"', b'"deviceProperties"', b'"distributedInfo"')
"""Keys with which a trace begins. Any other object is taken for a workload."""
_READERS = {_LOGS: read_nccl_logs, _TRACES: read_torch_traces}


class SteadyRun(NamedTuple):
    """Calls from `start` that repeat every `period` calls, `steps` times."""

    start: int
    period: int
    steps: int

    @property
    def stop(self) -> int:
        """Return the first call after the run's last whole step."""
        return self.start + self.period * self.steps


def steady_run(calls: NDArray[np.uint32], *, least_kinds: int = 1) -> SteadyRun | None:
    """Return the longest run of equal steps, at least three; None where steps are not told.

    A run that is short may be equal layers within one step. So it has to be at least half of the
    calls, or ten steps with an eighth of the calls, while three quarters of all calls are like
    those of its step. A step has `least_kinds` of calls that differ.

    >>> steady_run(np.array([9, 9, 8, 1, 2, 2, 1, 2, 2, 1, 2, 2, 7], np.uint32))
    SteadyRun(start=3, period=3, steps=3)
    """
    best = SteadyRun(0, 1, 0)
    for part in range(1, _PARTS):
        anchor = len(calls) * part // _PARTS
        if not best.start <= anchor < best.stop:
            run = _run_at(calls, anchor)
            best = max(best, run, key=lambda run: run.stop - run.start)
    step = calls[best.start : best.start + best.period]
    if best.steps < LEAST_STEPS or len(np.unique(step)) < least_kinds:
        return None
    share = (best.stop - best.start) / len(calls)
    alike = np.isin(calls, step).mean()
    return best if share >= 0.5 or (share >= 0.125 and best.steps >= 10 and alike >= 0.75) else None


def _run_at(calls: NDArray[np.uint32], anchor: int) -> SteadyRun:
    """Return the run around an anchor, with the shortest step of those that last nearly longest."""
    matches = _prefix_matches(calls[anchor : anchor + _WINDOW].tolist())
    lasting = [
        (period + count, period) for period, count in enumerate(matches) if count >= period > 0
    ]
    if not lasting:
        return SteadyRun(0, 1, 0)
    enough = _NEARLY * max(lasting)[0]
    period = min(period for length, period in lasting if length >= enough)
    differ = np.flatnonzero(calls[:-period] != calls[period:])
    after = int(np.searchsorted(differ, anchor))
    start = int(differ[after - 1]) + 1 if after else 0
    stop = int(differ[after]) + period if after < len(differ) else len(calls)
    return SteadyRun(start, period, (stop - start) // period)


def _prefix_matches(calls: list[int]) -> list[int]:
    """Return for each place how many calls from there equal those from the beginning.

    This is the Z-function (Gusfield, Algorithms on Strings, 1.4).
    """
    matches = [0] * len(calls)
    left = right = 0
    for at in range(1, len(calls)):
        count = min(right - at, matches[at - left]) if at < right else 0
        while at + count < len(calls) and calls[count] == calls[at + count]:
            count += 1
        if at + count > right:
            left, right = at, at + count
        matches[at] = count
    return matches


def workload_of(recording: Recording, *, name: str, source: str) -> Workload:
    """Return the workload of a recording (InputError where it is none, or misses ranks)."""
    where = recording.where
    communicators = list(recording.communicators.values())
    used = {op.communicator for event in recording.events for op in event}
    require(used, where, "has no calls of collectives over two ranks or more", _NO_CALLS)
    for communicator in communicators:
        found, size = len(communicator.members), communicator.size
        if communicator.number in used and found < size:
            fault = f"has {found} of the {size} ranks of a communicator"
            raise InputError(where, fault, "give the files of all ranks, of all hosts")
    ranks, assumed = _number(recording, communicators, used)
    notices = [*recording.notices, *filter(None, [assumed])]
    calls = {number: np.frombuffer(rank.events, np.uint32) for number, rank in ranks.items()}
    numbers = {rank: number for number, rank in ranks.items()}
    _use_largest_rank(recording, communicators, calls, numbers)
    steps, by_rank = _calls_of_steps(recording, calls)
    rows, unequal = _rows(communicators, by_rank, numbers)
    if unequal:
        notices.append(f"Ranks of a communicator differ in {spell(unequal, 'row')}: cut logs?")
    if not steps:
        notices.append("No steps were told by repetition: a step is all that is here.")
    for left_out, count in (+recording.left_out).items():
        notices.append(f"{spell(count, 'call')} of {left_out} left out.")
    if len(rows) > MAX_ROWS:
        fault = f"has {len(rows)} different rows in a step"
        raise InputError(where, fault, f"at most {MAX_ROWS}: record steps of equal sizes")
    count = max(ranks) + 1
    return Workload(
        name=name, source=source, ranks=count, rows=rows, steps=steps, notices=tuple(notices)
    )


def _number(
    recording: Recording, communicators: Sequence[RecordedCommunicator], used: Set[int]
) -> tuple[dict[int, RecordedRank], str]:
    """Return the ranks by their numbers in the job, and a notice if those are assumed."""
    everyone = list(recording.ranks.values())
    if all(rank.number is not None for rank in everyone):
        return {cast(int, rank.number): rank for rank in everyone}, ""
    # A rank without calls counts where others of a communicator have some.
    members = {rank for on in communicators if on.number in used for rank in on.members.values()}
    everyone = [rank for rank in everyone if rank.events or rank in members]
    for communicator in communicators:
        if set(communicator.members.values()).issuperset(everyone):
            return dict(communicator.members), ""
    everyone.sort(key=lambda rank: rank.place)
    why = "No communicator has all ranks: they are numbered by host, and there by GPU or process."
    return dict(enumerate(everyone)), why


def _use_largest_rank(
    recording: Recording,
    communicators: Iterable[RecordedCommunicator],
    calls: dict[int, Ints],
    numbers: Numbers,
) -> None:
    """Give each all-to-all the bytes of its largest rank; NCCL logs each rank's own."""
    events = recording.events
    of = [
        event[0].communicator if event and event[0].collective == "all_to_all" else -1
        for event in events
    ]
    owner, sizes = np.array(of), np.array([event[0].bytes if event else 0 for event in events])
    # Events that are made below are in neither of the two.
    before = dict(calls)
    for communicator in communicators:
        if communicator.number not in of:
            continue
        members = [numbers[rank] for rank in communicator.members.values()]
        places = [
            np.flatnonzero(owner[before[number]] == communicator.number) for number in members
        ]
        own = [sizes[before[number][at]] for number, at in zip(members, places, strict=True)]
        if len({len(each) for each in own}) > 1:
            continue
        largest = np.maximum.reduce(own)
        for number, at, mine in zip(members, places, own, strict=True):
            if (mine != largest).any():
                changed = calls[number].copy()
                for place, size in zip(at[mine != largest], largest[mine != largest], strict=True):
                    (op,) = events[changed[place]]
                    changed[place] = recording.number((op._replace(bytes=int(size)),))
                calls[number] = changed


def _calls_of_steps(
    recording: Recording, calls: Mapping[int, Ints]
) -> tuple[int, dict[int, dict[Op, float]]]:
    """Return the number of steady steps, and each rank's calls of a step in their order.

    Where no step repeats exactly, one may whose sizes differ.
    """
    events = recording.events
    kinds: dict[Event, int] = {}
    coarse = np.array(
        [
            kinds.setdefault(tuple(op._replace(bytes=0) for op in event), len(kinds))
            for event in events
        ],
        np.uint32,
    )
    windows: dict[int, tuple[Ints, int]] = {}
    for number, own in calls.items():
        run = None
        if not recording.steps:
            run = steady_run(own) or steady_run(coarse[own], least_kinds=2)
        windows[number] = (
            (own, recording.steps) if run is None else (own[run.start : run.stop], run.steps)
        )
    steps = min((count for _, count in windows.values() if count), default=0)
    result: dict[int, dict[Op, float]] = {number: {} for number in calls}
    for number, (window, count) in windows.items():
        if not count and len(window) < steps:
            calls_left_out = sum(bool(events[kind]) for kind in window)
            recording.left_out["ranks with fewer calls than steps"] += calls_left_out
            continue
        # A rank whose step is the half of others' has twice as many.
        times = max(1, round(count / steps)) if count else 1
        ops = result[number]
        kind, first, occurs = np.unique(window, return_index=True, return_counts=True)
        for at in np.argsort(first):
            for op in events[kind[at]]:
                ops[op] = ops.get(op, 0) + int(occurs[at]) * times / (count or steps or 1)
    return steps, result


def _rows(
    communicators: Sequence[RecordedCommunicator],
    by_rank: Mapping[int, Calls],
    numbers: Numbers,
) -> tuple[tuple[WorkloadRow, ...], int]:
    """Return the rows of all ranks' calls, and how many of them the ranks of a group differ in."""
    totals: dict[Key, float] = {}
    unequal = 0
    for on in communicators:
        members = [rank for _, rank in sorted(on.members.items())]
        group = tuple(numbers.get(rank, -1) for rank in members)
        own = [
            {op: n for op, n in by_rank.get(number, {}).items() if op.communicator == on.number}
            for number in group
        ]
        first, *others = map(_by_key, own)
        equal = {key for key, n in first.items() if all(each.get(key) == n for each in others)}
        for place, ops in enumerate(own):
            for op, count in ops.items():
                key = op.collective, op.dtype, op.bytes
                row: Key
                if op.collective == "send" or (op.collective == "send_recv" and key not in equal):
                    row = "send", *key[1:], op.stream, (group[place], group[op.peer])
                elif op.collective != "recv" and place == 0:
                    row = *key, op.stream, group
                    unequal += key not in equal
                else:
                    continue
                totals[row] = totals.get(row, 0) + count
    return _pack(totals), unequal


def _by_key(ops: Calls) -> dict[Key, float]:
    """Return calls by collective, dtype and bytes: numbers of streams may differ by rank."""
    totals: dict[Key, float] = {}
    for op, count in ops.items():
        key = op.collective, op.dtype, op.bytes
        totals[key] = totals.get(key, 0) + count
    return totals


def _pack(totals: Mapping[Key, float]) -> tuple[WorkloadRow, ...]:
    """Return rows of equal calls, each of groups that share no rank."""
    packed: dict[Key, list[tuple[set[int], list[tuple[int, ...]]]]] = {}
    for (*key, group), count in totals.items():
        rows = packed.setdefault((*key, count), [])
        fitting = (row for row in rows if row[0].isdisjoint(group))
        if (row := next(fitting, None)) is None:
            rows.append(row := (set(), []))
        row[0].update(group)
        row[1].append(group)
    streams = sorted({key[3] for key in packed})
    return tuple(
        WorkloadRow(
            collective=collective,
            dtype=dtype,
            bytes=size,
            groups=tuple(groups),
            calls=calls,
            stream=streams.index(stream),
        )
        for (collective, dtype, size, stream, calls), rows in packed.items()
        for _, groups in rows
    )


def open_workload(names: Sequence[str], *, name: str = "", ranks: int = 8) -> Workload:
    """Return the workload of one file, or of a job's logs or traces; folders stand for their files.

    A bundled one is for `ranks`. InputError: no such name or file, files of several kinds, or as
    their reader.
    """
    if len(names) == 1 and names[0] in BUNDLED:
        return load_bundled(names[0], ranks)
    missing = next((text for text in names if not Path(text).exists()), None)
    right = f"name one bundled workload, of {', '.join(BUNDLED)}, or files of a job"
    require(missing is None, f"workload {missing!r}", "is no file", right)
    paths = sorted(chain.from_iterable(_files(Path(text)) for text in names))
    require(paths, ", ".join(names), "has no files", "name the files of a job")
    require(len(paths) <= MAX_FILES, names[0], f"has {len(paths)} files", f"at most {MAX_FILES}")
    kinds = {path: _kind(path) for path in paths}
    if set(kinds.values()) == {_WORKLOAD} and len(paths) == 1:
        return read_workload(paths[0])
    stray = next((path for path in paths if kinds[path] == _WORKLOAD), None)
    right = "name a single workload, or the logs or traces of one job"
    require(stray is None, str(stray), "is neither a log nor a trace", right)
    first, *others = sorted(paths, key=lambda path: kinds[path] != kinds[paths[0]])
    if others and kinds[first] != kinds[others[-1]]:
        fault = f"is a file of {kinds[others[-1]]}, and {first} of {kinds[first]}"
        raise InputError(str(others[-1]), fault, "name the files of one job")
    kind = kinds[paths[0]]
    source = f"{kind} in {spell(len(paths), 'file')}"
    return workload_of(_READERS[kind](paths), name=name or paths[0].name, source=source)


def workload_for(text: str) -> Callable[[int], Workload]:
    """Return a workload by its number of ranks: a bundled one, or that of a file whatever it is.

    Raises InputError: no such name or file, or it is none.
    """
    if text in BUNDLED:
        return partial(load_bundled, text)
    made = open_workload([text])
    return lambda _: made


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = (file for file in path.iterdir() if not file.name.startswith("."))
    return [file for file in files if file.is_file() and file.stat().st_size]


def _kind(path: Path) -> str:
    """Return the kind of a file by its first bytes."""
    with reading(path) as handle:
        head = handle.read(_HEAD).lstrip()
    if head.startswith(GZIP):
        return _TRACES
    if not head.startswith(b"{"):
        return _LOGS
    return _TRACES if any(key in head for key in _OF_TRACES) else _WORKLOAD
