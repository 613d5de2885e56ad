"""Reader of NCCL Inspector's files: lines of JSON by NVIDIA's profiler plugin, since NCCL 2.28.

A line is a call with its bytes, or a send or receive with its peer. Datatypes are not in it, nor
which sends and receives run together. Lines of a communicator's collectives stand in their order.
Sends and receives are written in any order, and numbered in theirs from 1. A rank's own block of an
all-to-all has two numbers and no lines. Those of several communicators have no common order.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tccl_py.errors import InputError, counted
from tccl_py.files import reading
from tccl_py.workloads.recording import COLLECTIVES, Recording, Side, Transfer, Transfers, call
from tccl_py.workloads.workload import MAX_RANKS, TIMES_RANKS

_LINE = 1 << 20
_WINDOW = 1 << 12
"""Lines by which a send or receive may be late."""
_ASSUMED = "bfloat16"
_Bytes = Annotated[int, Meta(ge=0, le=1 << 50)]


class _Header(msgspec.Struct, frozen=True):
    id: str
    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    n_ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)]


class _Metadata(msgspec.Struct, frozen=True):
    hostname: str
    pid: int


class _Collective(msgspec.Struct, frozen=True):
    coll: str
    coll_sn: int
    coll_msg_size_bytes: _Bytes


class _Transfer(msgspec.Struct, frozen=True):
    p2p: Literal["Send", "Recv"]
    p2p_sn: int
    p2p_peer: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    p2p_msg_size_bytes: _Bytes


class _Line(msgspec.Struct, frozen=True):
    header: _Header
    metadata: _Metadata
    coll_perf: _Collective | None = None
    p2p_perf: _Transfer | None = None


class _InOrder:
    """Sends and receives of a rank on a communicator, put into the order of their numbers."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._waiting: list[tuple[int, Transfer]] = []
        self._last = self._missing = 0

    def add(self, number: int, transfer: Transfer) -> None:
        heapq.heappush(self._waiting, (number, transfer))
        if len(self._waiting) > _WINDOW:
            self._add_first()

    def close(self) -> int:
        """Give all their events, and return how many are missing."""
        while self._waiting:
            self._add_first()
        self._transfers.close()
        return self._missing + self._transfers.lost

    def _add_first(self) -> None:
        number, transfer = heapq.heappop(self._waiting)
        skipped, self._last = number - self._last - 1, number
        if skipped > 1:
            self._transfers.close()
        if skipped == 2:
            self._transfers.hidden = True
        else:
            self._missing += max(skipped, 0)
        self._transfers.add(transfer, None, 0)


def read_inspector(paths: Sequence[Path]) -> Recording:
    """Read the files of all processes of a job (InputError)."""
    recording = Recording(paths)
    recording.in_order = False
    recording.notices.append(
        f"NCCL Inspector logs no datatypes: {_ASSUMED} is assumed where values are added up. "
        "Messages below NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES, 8192 by default, are not in its files."
    )
    groups: dict[tuple[int, int], _InOrder] = {}
    numbers: dict[tuple[object, ...], list[int]] = {}
    decoder = msgspec.json.Decoder(_Line)
    for path in paths:
        with reading(path) as handle:
            for at, text in _lines(handle):
                try:
                    line = decoder.decode(text)
                except (msgspec.MsgspecError, RecursionError) as error:
                    fault = f"is no line of NCCL Inspector ({error})"
                    raise InputError(f"{path} line {at}", fault, "give its whole files") from error
                _add(recording, line, groups, numbers)
    missing = sum(last - first + 1 - count for first, last, count in numbers.values())
    missing += sum(group.close() for group in groups.values())
    if missing > 0:
        recording.notices.append(
            f"By their numbers up to {counted(missing, 'call')} are missing, of groups above all: "
            "record with NCCL_INSPECTOR_REQUIRE_KERNEL_TIMING=0 and "
            "NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES=0."
        )
    return recording


def _lines(handle: BufferedReader) -> Iterator[tuple[int, bytes]]:
    """Yield lines with their numbers; a last one without its end is cut."""
    at = 0
    while text := handle.readline(_LINE):
        at += 1
        if text.endswith(b"\n") and text.strip():
            yield at, text
        elif len(text) == _LINE:
            yield at, b""


def _add(
    recording: Recording,
    line: _Line,
    groups: dict[tuple[int, int], _InOrder],
    numbers: dict[tuple[object, ...], list[int]],
) -> None:
    header, process = line.header, (line.metadata.hostname, line.metadata.pid)
    rank = recording.rank(process, process)
    on = recording.join(header.id, header.n_ranks, header.rank, rank)
    key = on.number, header.rank
    if (sent := line.p2p_perf) is not None:
        if key not in groups:
            groups[key] = _InOrder(Transfers(recording, rank, on, header.rank))
        side: Side = "send" if sent.p2p == "Send" else "recv"
        made = Transfer(side, sent.p2p_peer, sent.p2p_msg_size_bytes)
        groups[key].add(sent.p2p_sn, made)
    elif (called := line.coll_perf) is not None:
        collective = COLLECTIVES.get(called.coll)
        if collective is None:
            recording.left_out[called.coll[:40]] += 1
            return
        at = called.coll_sn
        name = (*key, called.coll)
        first, last, count = numbers.get(name, (at, at, 0))
        numbers[name] = [min(first, at), max(last, at), count + 1]
        size = called.coll_msg_size_bytes * (on.size if collective in TIMES_RANKS else 1)
        recording.add(rank, call(on, collective, _ASSUMED, size, 0))
