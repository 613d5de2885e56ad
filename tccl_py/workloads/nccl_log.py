"""Reader of NCCL's logs of calls: NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=INIT,COLL, 2.18 to 2.32.

NCCL logs each call when the program makes it (enqueue.cc), and each communicator when it is ready
(init.cc); formats of split communicators differ by release. Those of later releases have no id:
they are told by their parent, the number of the split and its color.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple, get_args

from tccl_py.errors import require, spell
from tccl_py.files import reading
from tccl_py.workloads.recording import (
    COLLECTIVES,
    GRAPHS,
    RecordedCommunicator,
    RecordedRank,
    Recording,
    Side,
    Transfer,
    Transfers,
    call,
    list_rooted,
)
from tccl_py.workloads.workload import ELEMENT_BYTES, TIMES_RANKS, WorkloadDtype

_BLOCK = 1 << 20
_LINE = 1 << 16
"""Bytes of a line without its end that are held; NCCL's own have at most 1024."""
_WHERE = rb"(?P<host>[^\s:]{1,255}):(?P<pid>\d{1,10}):\d{1,10} \[-?\d{1,4}\] NCCL INFO "
COMMUNICATOR = re.compile(
    _WHERE + rb"(?:\w{1,40} )?comm (?P<comm>0x[0-9a-f]{1,16}) rank (?P<rank>\d{1,7}) "
    rb"nranks (?P<ranks>\d{1,7}) cudaDev \d{1,4} (?:nvmlDev \d{1,4} )?busId (?P<bus>[0-9a-f]{1,16})"
    rb"(?: parent (?P<parent>0x[0-9a-f]{1,16}))?(?: (?:split|child)Count (?P<split>\d{1,9}))?"
    rb"(?: color (?P<color>-?\d{1,11}) key -?\d{1,11})?(?: commId (?P<id>0x[0-9a-f]{1,16}))?"
    rb" ?- Init (?P<state>COMPLETE|START)"
)
_CALL = re.compile(
    _WHERE + rb"(?P<name>\w{1,30}): opCount (?P<op>[0-9a-f]{1,16}) sendbuff (?P<sent>\S{1,18}) "
    rb"recvbuff (?P<received>\S{1,18}) count (?P<count>\d{1,18}) datatype (?P<dtype>\d{1,2}) "
    rb"op \d{1,10} root (?P<root>-?\d{1,7}) comm (?P<comm>0x[0-9a-f]{1,16}) "
    rb"\[nranks=\d{1,7}\] stream (?P<stream>\S{1,18})"
)
_SENDER = re.compile(rb"[^\s:]:\d{1,10}:\d{1,10} \[-?\d{1,4}\] NCCL ")
ONE_FILE_A_RANK = "write one file a rank, by NCCL_DEBUG_FILE=nccl.%h.%p.log"
_LINES = re.compile(rb"^[^\n]*(?:: opCount |- Init COMPLETE)[^\n]*", re.MULTILINE)
_TRANSFERS: dict[str, Side] = {"Send": "send", "Recv": "recv"}
_KNOWN = {*COLLECTIVES, *_TRANSFERS, "Gather", "Scatter"}
_DTYPES: tuple[WorkloadDtype, ...] = get_args(WorkloadDtype)
_Process = tuple[int, bytes, bytes]
"""Number of the file, host and process: one file may have several."""


def is_torn(line: bytes) -> bool:
    """Return whether a line of one process stands inside that of another one."""
    return len(_SENDER.findall(line)) > 1


class _Operations:
    """NCCL's count of a communicator's operations, as a rank's calls have it.

    Where it counts (between hosts, or beside a profiler), each call or group adds 1 when it runs: a
    call that a CUDA graph captures none, and each replay all of its calls.
    """

    def __init__(self) -> None:
        self.without_line = 0
        self.uncounted = False
        self._last, self._transfers = -1, False

    def add(self, count: int, *, transfer: bool) -> None:
        """Add the next call; sends and receives of a group have one count."""
        self.without_line += max(0, count - self._last - 1)
        again = count == self._last and not (transfer and self._transfers)
        self.uncounted = self.uncounted or again
        self._last, self._transfers = count, transfer

    @property
    def used(self) -> bool:
        """Return whether there were calls."""
        return self._last >= 0

    @property
    def certain(self) -> bool:
        """Return whether each call ran once, when it was logged."""
        return self._last > 0 and not self.uncounted


class _Made(NamedTuple):
    """A communicator of a process; `key` tells it from others."""

    communicator: RecordedCommunicator
    place: int
    rank: RecordedRank
    key: object
    group: Transfers
    operations: _Operations


def read_nccl_logs(paths: Sequence[Path]) -> Recording:
    """Read the logs of all ranks of a job, in any order (InputError)."""
    reader = _Reader(Recording(paths))
    for number, path in enumerate(paths):
        with reading(path) as handle:
            for line in _lines(handle):
                reader.read(line, number)
    reader.finish()
    return reader.recording


def _lines(handle: BufferedReader) -> Iterator[bytes]:
    """Yield the lines of calls and communicators; memory is bounded also where no line ends."""
    rest = b""
    while block := handle.read(_BLOCK):
        block = rest + block
        end = block.rfind(b"\n") + 1
        rest = block[end:] if len(block) - end <= _LINE else b""
        yield from _LINES.findall(block, 0, end)
    # A last line without its end may be cut in a number.


class _Reader:
    """The state of reading: communicators by process and address."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._made: dict[tuple[_Process, bytes], _Made] = {}
        self._times: dict[object, int] = {}
        self._unknown = self._torn = 0
        self._hosts: dict[tuple[int, bytes], list[bytes]] = {}
        self._operations: list[_Operations] = []

    def read(self, line: bytes, file: int) -> None:
        """Read a line of file number `file`."""
        if is_torn(line):
            self._torn += 1
        elif (match := _CALL.search(line)) is not None:
            self._read_call(match, self._process(match, file))
        elif (match := COMMUNICATOR.search(line)) is not None:
            self._read_communicator(match, self._process(match, file))

    def _process(self, match: re.Match[bytes], file: int) -> _Process:
        """Return the process of a line, whatever text stands right before its host."""
        host, pid = match["host"], match["pid"]
        hosts = self._hosts.setdefault((file, pid), [])
        for known in hosts:
            if host.endswith(known) or known.endswith(host):
                return file, known, pid
        hosts.append(host)
        return file, host, pid

    def finish(self) -> None:
        """Close what is open, and check that all communicators were known."""
        fault = f"has {spell(self._torn, 'line')} of a rank torn into another's"
        require(not self._torn, self.recording.where, fault, ONE_FILE_A_RANK)
        for made in self._made.values():
            made.group.close()
        fault = f"has {spell(self._unknown, 'call')} of communicators whose creation it lacks"
        right = "record from the start of the job with NCCL_DEBUG_SUBSYS=INIT,COLL"
        require(not self._unknown, self.recording.where, fault, right)
        used = [operations for operations in self._operations if operations.used]
        if more := max((operations.without_line for operations in used), default=0):
            text = f"By NCCL's count {spell(more, 'operation')} of a communicator ran without a "
            text += "line in the log: parts of large groups, or replays of CUDA graphs, which are "
            text += "counted once."
            self.recording.notices.append(text)
        elif not all(operations.certain for operations in used):
            self.recording.notices.append(GRAPHS)

    def _read_communicator(self, match: re.Match[bytes], process: _Process) -> None:
        bus, place = match["bus"], int(match["rank"])
        fault = "is of an NCCL that does not log which ranks belong together (no commId)"
        right = "record with NCCL 2.18 or later, or take traces of PyTorch's profiler"
        require(match["id"] or match["parent"], self.recording.where, fault, right)
        rank = self.recording.rank(
            (*process, bus), (process[1], int(bus, 16), int(match["pid"]), process[0])
        )
        key: object = match["id"]
        parent = self._made.get((process, match["parent"] or b""))
        if key is None:
            key = (parent.key if parent is not None else None, match["split"], match["color"])
        # Of one parent NCCL 2.18 gives splits of one color the same id.
        again = self._times[rank, key] = self._times.get((rank, key), 0) + 1
        key = (key, again)
        communicator = self.recording.join(key, int(match["ranks"]), place, rank)
        if (old := self._made.get((process, match["comm"]))) is not None:
            old.group.close()
        group = Transfers(self.recording, rank, communicator, place)
        made = _Made(communicator, place, rank, key, group, _Operations())
        self._made[process, match["comm"]] = made
        self._operations.append(made.operations)

    def _read_call(self, match: re.Match[bytes], process: _Process) -> None:
        made = self._made.get((process, match["comm"]))
        if made is None:
            self._unknown += 1
            return
        name, root, dtype = match["name"].decode(), int(match["root"]), int(match["dtype"])
        if dtype >= len(_DTYPES) or name not in _KNOWN:
            unread = f" of the unknown datatype {dtype}" * (name in _KNOWN)
            self.recording.left_out[name + unread] += 1
            return
        made.operations.add(int(match["op"], 16), transfer=name in _TRANSFERS)
        own, stream = made.communicator, made.rank.stream(match["stream"])
        size = int(match["count"]) * ELEMENT_BYTES[_DTYPES[dtype]]
        if (side := _TRANSFERS.get(name)) is not None:
            # Between hosts calls of a group alone have one count of operations.
            made.group.add(Transfer(side, root, size), match["op"], stream)
            return
        made.group.close()
        if (collective := COLLECTIVES.get(name)) is not None:
            size *= own.size if collective in TIMES_RANKS else 1
            event = call(own, collective, _DTYPES[dtype], size, stream)
        else:
            gather = name == "Gather"
            event = list_rooted(own, made.place, root, size, stream, gather=gather)
        self.recording.add(made.rank, event)
