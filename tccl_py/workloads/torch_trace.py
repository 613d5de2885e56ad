"""Reader of traces of PyTorch's profiler: Chrome's JSON, plain or by gzip, one file a rank.

Each call of a process group is an event `record_param_comms` with the arguments of
torch/csrc/profiler/util.cpp: name, number of elements, dtype, and the group's ranks in the job. The
profiler marks its steps. Events are decoded one after the other, so memory holds one and the calls.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from tccl_py.errors import InputError, require, spell
from tccl_py.files import reading
from tccl_py.workloads.recording import (
    COPIED,
    Event,
    RecordedCommunicator,
    RecordedRank,
    Recording,
    Side,
    Transfer,
    Transfers,
    call,
    list_rooted,
)
from tccl_py.workloads.workload import ELEMENT_BYTES, MAX_RANKS, WorkloadCollective, WorkloadDtype

GZIP = b"\x1f\x8b"
_BLOCK = 1 << 20
_MOST_HELD = 1 << 24
"""Characters of one event, or of what stands before the events."""
_WHOLE = "give a whole trace of torch.profiler (export_chrome_trace) of each rank"
_DTYPES: dict[str, WorkloadDtype] = {
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Double": "float64",
    "Int": "int32",
    "Long": "int64",
    "Byte": "uint8",
    "Bool": "uint8",
    "Char": "int8",
    "Float8_e4m3fn": "float8_e4m3fn",
    "Float8_e5m2": "float8_e5m2",
}
_NAMES: dict[str, WorkloadCollective] = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_gather": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "broadcast": "broadcast",
    "_broadcast_oop": "broadcast",
    "reduce": "reduce",
    "_reduce_oop": "reduce",
    "all_to_all": "all_to_all",
    "all_to_allv": "all_to_all",
}
_INFO = re.compile(r'"distributedInfo"\s*:\s*(?=\{)')
_SILENT = ("wait", "init", "coalesc")
"""Names, or parts of them, of events that communicate nothing themselves."""
_TRANSFERS: dict[str, Side] = {"send": "send", "recv": "recv"}
_UNREADABLE = (ValueError, KeyError, TypeError, OverflowError)
"""Errors of values of another form; Python's JSON has infinite numbers."""
_Args = Mapping[str, Any]
_ARGUMENTS = (
    "Collective name", "dtype", "In msg nelems", "Out msg nelems", "Group size", "Rank", "Src Rank",
    "Dst Rank", "Process Group Name", "Process Group Ranks", "Global rank start",
    "Global rank stride",
)  # fmt: skip


class _Call(NamedTuple):
    """A call with its time, and the number by which its kernel is told.

    Equal calls share the values of their `_ARGUMENTS`.
    """

    time: float
    external: object
    values: tuple[Any, ...]


def read_torch_traces(paths: Sequence[Path]) -> Recording:
    """Read the traces of all ranks of a job (InputError)."""
    recording = Recording(paths)
    steps, graphs = set(), 0
    for path in paths:
        with reading(path) as handle:
            trace = _Trace(str(path), handle)
            _add_calls(recording, trace)
        steps.add(len(trace.steps))
        # Without kernels a trace does not say what a graph runs.
        graphs += trace.graphs if trace.replayed or not trace.kernels else 0
    for key, made in recording.communicators.items():
        # A rank may make no call of a group that it is in.
        for place, number in enumerate(cast(tuple[int, ...], key)[1:]):
            if number in recording.ranks:
                made.members[place] = recording.ranks[number]
    recording.steps = min(steps) if len(steps) == 1 else 0
    if graphs:
        text = f"CUDA graphs were launched {spell(graphs, 'time')}: what they communicate"
        recording.notices.append(f"{text} is not in the traces.")
    return recording


class _Trace:
    """A trace: its rank, calls, streams of kernels by external number, and marked steps."""

    def __init__(self, where: str, handle: BufferedReader) -> None:
        self.where = where
        self.rank = -1
        self.calls: list[_Call] = []
        self._values: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self.streams: dict[object, object] = {}
        self.steps: set[str] = set()
        self.graphs = self.replayed = self.bare = 0
        self.kernels = False
        packed = handle.peek(2)[:2] == GZIP
        try:
            with gzip.GzipFile(fileobj=handle) if packed else handle as unpacked:
                for event in self._events(cast(IO[bytes], unpacked)):
                    self._keep(event)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(where, f"is cut or damaged ({error})", _WHOLE) from error
        except (*_UNREADABLE, RecursionError, AttributeError) as error:
            reason = error if isinstance(error, ValueError) else "its events are of another form"
            fault = f"is no trace of PyTorch's profiler ({reason})"
            raise InputError(where, fault[:300], _WHOLE) from error

    def _events(self, unpacked: IO[bytes]) -> Iterator[Any]:
        """Yield the events one after the other (ValueError where the JSON ends or is none)."""
        decoder = json.JSONDecoder()
        text = ""
        while (begin := re.search(r'"traceEvents"\s*:\s*\[', text)) is None:
            text = self._more(unpacked, text)
        head = text[: begin.start()]
        at = begin.end()
        while True:
            while (start := re.compile(r"[\s,]*([^\s,])").match(text, at)) is None:
                text, at = self._more(unpacked, text[at:]), 0
            if start[1] == "]":
                break
            try:
                event, end = decoder.raw_decode(text, start.start(1))
            except ValueError:
                text, at = self._more(unpacked, text[start.start(1) :]), 0
                continue
            yield event
            at = end
            if at > _BLOCK:
                text, at = text[at:], 0
        # The rank may also stand after the events.
        if _INFO.search(head) is None:
            head = text[at:] + unpacked.read(_MOST_HELD).decode("latin-1")
        self.rank = _rank_in(head, decoder)

    def _more(self, unpacked: IO[bytes], text: str) -> str:
        block = unpacked.read(_BLOCK)
        if not block or len(text) > _MOST_HELD:
            raise ValueError("its events do not end" if block else "it ends too early")
        return text + block.decode("latin-1")

    def _keep(self, event: Any) -> None:
        name, kind = event.get("name", ""), event.get("cat", "")
        args = event.get("args") or {}
        if kind == "user_annotation" and name.startswith("ProfilerStep"):
            self.steps.add(name)
        elif name == "cudaGraphLaunch":
            self.graphs += 1
        elif kind == "kernel" and "Collective name" not in args:
            self.kernels = True
            self.replayed += name.startswith("ncclDevKernel")
        elif name == "record_param_comms" and "Collective name" not in args:
            self.bare += 1
        elif "Collective name" in args:
            if kind == "kernel":
                self.streams[args.get("External id")] = args.get("stream")
            elif name == "record_param_comms":
                given = (args.get(name) for name in _ARGUMENTS)
                # Ranks are a text, or a list in traces that other programs wrote.
                values = tuple(str(value) if isinstance(value, list) else value for value in given)
                values = self._values.setdefault(values, values)
                self.calls.append(_Call(float(event["ts"]), args.get("External id"), values))


def _rank_in(head: str, decoder: json.JSONDecoder) -> int:
    """Return the rank that stands before the events, or after them."""
    found = _INFO.search(head)
    if found is None:
        raise ValueError("it has no distributedInfo, so no rank")
    info, _ = decoder.raw_decode(head, found.end())
    return int(info["rank"])


def _add_calls(recording: Recording, trace: _Trace) -> None:
    """Add a trace's calls in the order of their times."""
    where, number = trace.where, trace.rank
    again = " again" * (number in recording.ranks)
    fits = 0 <= number < MAX_RANKS and not again
    require(fits, where, f"is of rank {number}{again}", "give one trace of each rank")
    fault = "is a trace of an older PyTorch: its calls have no sizes"
    right = "record with PyTorch 2.3 or later, or with NCCL_DEBUG=INFO"
    require(trace.calls or not trace.bare, where, fault, right)
    rank = recording.rank(number, (number,), number)
    groups: dict[int, Transfers] = {}
    for made in sorted(trace.calls, key=lambda made: made.time):
        args = dict(zip(_ARGUMENTS, made.values, strict=True))
        name = str(args["Collective name"])
        if any(part in name.lower() for part in _SILENT):
            continue
        try:
            on, ranks = _communicator(recording, rank, args)
            stream = rank.stream(trace.streams.get(made.external))
            place = ranks.index(number)
            if (side := _TRANSFERS.get(name)) is not None:
                group = groups.setdefault(on.number, Transfers(recording, rank, on, place))
                peer = ranks.index(int(args[f"{'Dst' if name == 'send' else 'Src'} Rank"]))
                transfer = Transfer(side, peer, _bytes(args, "In"))
                group.add(transfer, None, stream)
                continue
            if on.number in groups:
                groups[on.number].close()
            event = _event(on, place, name, args, stream)
        except _UNREADABLE as error:
            fault = f"has a call of {name[:40]} that is not understood ({error})"
            raise InputError(where, fault[:300], _WHOLE) from error
        if event is None:
            recording.left_out[name[:40]] += 1
        else:
            recording.add(rank, event)
    for group in groups.values():
        group.close()


def _communicator(
    recording: Recording, rank: RecordedRank, args: _Args
) -> tuple[RecordedCommunicator, list[int]]:
    """Return the communicator of a call's process group, and its ranks."""
    text, size = str(args["Process Group Ranks"]), int(args["Group size"])
    require(size <= MAX_RANKS, recording.where, f"has a group of {size} ranks", _WHOLE)
    ranks = [int(part) for part in re.findall(r"\d{1,7}", text)]
    if len(ranks) != size:
        # From 30 ranks on, the profiler leaves out some.
        start, stride = int(args["Global rank start"]), int(args["Global rank stride"])
        last = ranks[-1] if ranks else start
        ranks = list(range(start, start + stride * size, stride))
        require(ranks[-1:] == [last], recording.where, "leaves out ranks of a group", _WHOLE)
    place = ranks.index(cast(int, rank.number))
    return recording.join((args.get("Process Group Name"), *ranks), size, place, rank), ranks


def _bytes(args: _Args, side: str) -> int:
    dtype = _DTYPES[str(args["dtype"])]
    return int(args[f"{side} msg nelems"]) * ELEMENT_BYTES[dtype]


def _event(
    on: RecordedCommunicator, place: int, name: str, args: _Args, stream: int
) -> Event | None:
    """Return the event of a collective; None for one that is not known."""
    if name == "barrier":
        return call(on, "all_reduce", "float32", 4, stream)
    if name in ("gather", "scatter"):
        size = _bytes(args, "In" if name == "gather" else "Out")
        return list_rooted(on, place, int(args["Rank"]), size, stream, gather=name == "gather")
    collective = _NAMES.get(name)
    if collective is None:
        return None
    sent, received = _bytes(args, "In"), _bytes(args, "Out")
    if name == "all_gather" and received != sent * on.size:
        # Blocks that differ are broadcast, each a call of its own.
        return ()
    dtype = _DTYPES.get(str(args["dtype"]), COPIED)
    return call(on, collective, dtype, max(sent, received), stream)
