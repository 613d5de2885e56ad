"""The proof of links by kernels: the program of one rank, and what its results say of each pair.

usage: tccl_profiler.links FOLDER/spec.json RANK   (a process for each GPU)

Each GPU maps the memory of every GPU that it can access, by CUDA IPC and by cuMem handles over file
descriptors, as NCCL does. All ranks go through the same list of steps and meet at each.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import numpy as np

from tccl_profiler.cuda_device import OPTIONS, source_text
from tccl_py.errors import MeasurementError
from tccl_py.files import write_atomically
from tccl_py.model.links import LinkVerdict, PairProof
from tccl_py.nccl_library import check_cuda, cuda_driver
from tccl_py.rank_processes.rank import read_spec, write_result

PROGRAM = "tccl_profiler.links"
MEETING = "meeting"
"""The file of words by which ranks meet: zeros, `meeting_bytes` of them."""
LIMIT_S = 40.0
"""Seconds after which a rank writes what it has and ends."""

Mapping = Literal["cumem", "cuda-ipc"]
Test = Literal["map", "write", "read", "together"]
State = Literal["sound", "late", "wrong", "refused"]

_BYTES = 547 * 480
"""Of data a protocol: 256 KiB, in whole lines of LL128 and warps."""
_LL, _LL128, _SIMPLE = 0, 1, 2
_NAMES = ("LL", "LL128", "Simple")
_WRITE, _COMPARE = 0, 1
_AT = (0, 540_672, 851_968)
"""Where each protocol's data are in the memory that one GPU offers to one other."""
_READ_AT, _FLAG_AT, _READ_FLAG_AT, _RATE_AT = 1_179_648, 1_445_888, 1_450_000, 2 << 20
"""Data that stay for a reader, the two flags, and where rates are taken."""
_RATE_BLOCKS, _RATE_BYTES = 16, 4369 * 480
_THREADS = 256
_PATIENCE_NS, _LONGER_NS = 100_000_000, 1_000_000_000
"""Bytes arrive in microseconds. What was late is tried once more, with more patience."""
_MOST_RETRIES = 8
_DAMAGE_S = 0.002
"""Data are compared again after this time: what overwrites them may come later."""
_MEET_S, _START_S = 10.0, 60.0
_STEP_BYTES = 6 * 8
_FOUND = np.dtype([("state", "u8"), ("wrong", "u8"), ("begin", "u8"), ("end", "u8")])
_REFUSED, _LATE = 1, 2
_LAZY_PEER_ACCESS, _TO_DEVICE, _TO_HOST = 1, 1, 2
_PINNED, _FILE_DESCRIPTOR, _OF_DEVICE, _READ_WRITE = 1, 1, 1, 3
_RECOMMENDED = 1  # CU_MEM_ALLOC_GRANULARITY_RECOMMENDED


class LinksSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is proven; ranks are the places of `gpus`."""

    gpus: tuple[int, ...]
    bus_ids: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]
    """Ordered pairs of ranks: the one that maps, and the one whose memory it is."""
    ll128: tuple[tuple[int, int], ...] = ()
    """Those of `pairs` over which NCCL's rules allow LL128."""


class LinkRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One test of one mapping: `source` maps the memory of `target` (ranks)."""

    source: int
    target: int
    mapping: Mapping
    test: Test
    state: State
    what: str = ""
    """The protocol and the count of wrong packs, or CUDA's words."""
    gbps: tuple[float, float] | None = None
    """Rates of writing and reading by the mapping, of the test `read`."""


class LinksResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank found; `error` ended it early, at the step `at`."""

    records: tuple[LinkRecord, ...]
    error: str = ""
    at: str = ""


def meeting_bytes(ranks: int) -> int:
    """Return the size of the file by which ranks meet: a word each, and each pair's states."""
    return 8 * ranks + len(get_args(Mapping)) * ranks * ranks


def main() -> None:
    """Prove the links of this rank's GPU; the result is written whatever happens."""
    spec, rank, folder = read_spec(LinksSpec)
    os.chdir(folder)  # Addresses of sockets are short
    prover = _Prover(spec, rank, folder)

    def give_up() -> None:
        time.sleep(LIMIT_S)
        prover.end("did not end in time")

    threading.Thread(target=give_up, daemon=True).start()
    try:
        prover.run()
    except Exception as error:
        prover.end(str(error) or type(error).__name__)
    prover.end("")


class _Link(NamedTuple):
    mapping: Mapping
    source: int
    target: int

    @property
    def place(self) -> tuple[int, int, int]:
        """Where the states of a meeting have it."""
        return get_args(Mapping).index(self.mapping), self.source, self.target


class _Step(NamedTuple):
    act: int
    form: int
    data: int
    flag: int
    seed: int
    size: int = _BYTES


class _Meeting:
    """Barriers and shared states of the ranks, in a file that all of them map."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        with (folder / MEETING).open("r+b") as opened:
            data = mmap.mmap(opened.fileno(), 0)
        self._words = np.frombuffer(data, np.uint64, ranks)
        self.states = np.frombuffer(data, np.uint8, offset=8 * ranks).reshape(-1, ranks, ranks)
        self._rank, self._step = rank, 0

    def wait(self, limit_s: float = _MEET_S) -> None:
        """Wait until all ranks are here."""
        self._step += 1
        self._words[self._rank] = self._step
        until = time.monotonic() + limit_s
        while (self._words < self._step).any():
            if time.monotonic() > until:
                absent = int(np.argmin(self._words))
                raise MeasurementError(f"rank {absent} did not come")
            time.sleep(5e-5)


class _Prover:
    """One rank: its GPU, its own memory by each mapping, and what it maps of the others'."""

    def __init__(self, spec: LinksSpec, rank: int, folder: Path) -> None:
        self._spec, self._rank, self._folder = spec, rank, folder
        self._meeting = _Meeting(folder, rank, len(spec.gpus))
        self._records: list[LinkRecord] = []
        self._at = "its start"
        self._own: dict[tuple[Mapping, int], int] = {}
        self._no_cumem = ""
        self._counts = [0, 0]
        self._mapped: dict[tuple[Mapping, int], int] = {}
        self._seeds = count(0x51)
        self._lock = threading.Lock()

    def end(self, error: str) -> None:
        """Write the result and end the process: kernels and threads may still run."""
        with self._lock:
            at = self._at if error else ""
            result = LinksResult(records=tuple(self._records), error=error, at=at)
            write_result(self._folder, self._rank, result)
            os._exit(0)

    def run(self) -> None:
        """Prove all pairs one by one, what was late once more, and the sound ones all at once."""
        # 1. Take the GPU, allocate, compile, and launch once: a first launch takes its time.
        self._open()
        self._share()
        self._meeting.wait(_START_S)
        # 2. Map the others' memory.
        self._map_all()
        self._meeting.wait()
        # 3. Prove each link alone, and what was late once more.
        links = [
            _Link(mapping, *pair) for mapping in get_args(Mapping) for pair in self._spec.pairs
        ]
        for link in links:
            self._prove(link, _PATIENCE_NS)
        self._meeting.wait()
        states = self._meeting.states
        for link in [link for link in links if states[link.place] == _LATE][:_MOST_RETRIES]:
            self._prove(link, _LONGER_NS)
        # 4. Prove those without a fault at the same time, with reads that wait for a flag.
        self._meeting.wait()
        self._together([link for link in links if link.place[0] == 0 and not states[link.place]])
        self._meeting.wait()

    def _open(self) -> None:
        import cupy  # noqa: PLC0415 (only where there are GPUs)

        self._cupy, self._runtime = cupy, cupy.cuda.runtime
        number = self._runtime.deviceGetByPCIBusId(self._spec.bus_ids[self._rank])
        self._runtime.setDevice(number)
        self._number = number
        module = cupy.RawModule(code=source_text("memory.cu", "links.cu"), options=OPTIONS)
        self._kernel = module.get_function("prove")
        most = 4 * len(self._spec.gpus) * len(_NAMES) + _RATE_BLOCKS
        self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        sizes = _STEP_BYTES, 8, _FOUND.itemsize
        self._areas = [
            [int(self._runtime.malloc(most * size)) for size in sizes] for _ in self._streams
        ]
        self._launch([[]], 0)
        self._finish(0)

    # Memory, and the two ways to map it.
    def _share(self) -> None:
        """Allocate memory for each other GPU and mapping, as NCCL does, and offer it."""
        others = [source for source, target in self._spec.pairs if target == self._rank]
        for other in others:
            own = int(self._runtime.malloc(_RATE_AT))
            self._runtime.memset(own, 0, _RATE_AT)
            handle = bytes(self._runtime.ipcGetMemHandle(own))
            write_atomically(self._folder / f"handle-{self._rank}-{other}", handle.hex())
            self._own["cuda-ipc", other] = own
        try:
            descriptors = {other: self._offer(other) for other in others}
        except MeasurementError as error:
            self._no_cumem = str(error)
            return
        self._runtime.deviceSynchronize()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"memory-{self._rank}")
        listener.listen(len(self._spec.gpus))

        def give() -> None:
            while True:
                peer, _ = listener.accept()
                other = peer.recv(1)[0]
                socket.send_fds(peer, [b"m"], [descriptors[other]])
                peer.close()

        threading.Thread(target=give, daemon=True).start()

    def _offer(self, other: int) -> int:
        """Allocate memory for one other GPU by cuMem; return its file descriptor."""
        prop = _Allocation(_PINNED, _FILE_DESCRIPTOR, _OF_DEVICE, self._number, None, 0)
        unit, made, descriptor = ctypes.c_size_t(), ctypes.c_ulonglong(), ctypes.c_int()
        at, best = ctypes.byref, ctypes.c_int(_RECOMMENDED)
        _call("cuMemGetAllocationGranularity", at(unit), at(prop), best)
        self._unit = unit.value
        size, none = ctypes.c_size_t(self._cumem_bytes), ctypes.c_ulonglong(0)
        _call("cuMemCreate", at(made), size, at(prop), none)
        kind = ctypes.c_int(_FILE_DESCRIPTOR)
        _call("cuMemExportToShareableHandle", at(descriptor), made, kind, none)
        self._own["cumem", other] = address = self._place(made)
        self._runtime.memset(address, 0, self._cumem_bytes)
        return descriptor.value

    @property
    def _cumem_bytes(self) -> int:
        return -(-(_RATE_AT + _RATE_BLOCKS * _RATE_BYTES) // self._unit) * self._unit

    def _place(self, handle: ctypes.c_ulonglong) -> int:
        """Map memory of a handle, readable and writable by this GPU."""
        address, zero = ctypes.c_ulonglong(), ctypes.c_ulonglong(0)
        length, unit = ctypes.c_size_t(self._cumem_bytes), ctypes.c_size_t(self._unit)
        _call("cuMemAddressReserve", ctypes.byref(address), length, unit, zero, zero)
        _call("cuMemMap", address, length, ctypes.c_size_t(0), handle, zero)
        access = _Access(_OF_DEVICE, self._number, _READ_WRITE)
        _call("cuMemSetAccess", address, length, ctypes.byref(access), ctypes.c_size_t(1))
        return int(address.value)

    def _map_all(self) -> None:
        for mapping in get_args(Mapping):
            for link in (_Link(mapping, *pair) for pair in self._spec.pairs):
                if link.source != self._rank:
                    continue
                self._at = f"mapping memory of GPU {self._spec.gpus[link.target]}"
                try:
                    self._mapped[mapping, link.target] = self._map(mapping, link.target)
                except (MeasurementError, OSError, self._runtime.CUDARuntimeError) as error:
                    self._note(link, "map", "refused", str(error))
                    self._meeting.states[link.place] = _REFUSED

    def _map(self, mapping: Mapping, target: int) -> int:
        if mapping == "cuda-ipc":
            text = (self._folder / f"handle-{target}-{self._rank}").read_text()
            return int(self._runtime.ipcOpenMemHandle(bytes.fromhex(text), _LAZY_PEER_ACCESS))
        if self._no_cumem:
            raise MeasurementError(self._no_cumem)
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(_MEET_S)
            peer.connect(f"memory-{target}")
            peer.send(bytes([self._rank]))
            _, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
        handle = ctypes.c_ulonglong()
        given = ctypes.c_void_p(descriptors[0])
        _call("cuMemImportFromShareableHandle", ctypes.byref(handle), given, _FILE_DESCRIPTOR)
        os.close(descriptors[0])
        return self._place(handle)

    # The steps of a pair.
    def _prove(self, link: _Link, patience_ns: int) -> None:
        """Prove one GPU's access to another one's memory: all ranks meet, two of them act."""
        mapping, source, target = link
        gpus, (seed, kept) = self._spec.gpus, (next(self._seeds), next(self._seeds))
        self._at = f"GPU {gpus[source]} in the memory of GPU {gpus[target]} ({mapping})"
        refused = self._meeting.states[link.place] == _REFUSED
        forms = self._forms(source, target)
        own, there = self._own.get((mapping, source), 0), self._mapped.get((mapping, target), 0)
        maps, owns = source == self._rank and not refused, target == self._rank and not refused
        # 1. The receiver waits in its own memory, and the other GPU writes.
        if owns:
            self._launch([self._steps(_COMPARE, own, forms, seed)], 0, patience_ns)
        self._meeting.wait()
        if maps:
            self._run([self._steps(_WRITE, there, forms, seed)])
        # 2. The receiver compares again later, and leaves data to be read.
        if owns:
            found = self._finish(0)
            self._meeting.wait()
            time.sleep(_DAMAGE_S)
            again = self._run([self._steps(_COMPARE, own, forms, seed, waits=False)])
            self._run([[_Step(_WRITE, _SIMPLE, own + _READ_AT, 0, kept)]])
            self._judge(link, "write", forms, [found, again])
        else:
            self._meeting.wait()
        # 3. The other GPU reads them, and its rates are taken.
        self._meeting.wait()
        if maps:
            found = self._run([[_Step(_COMPARE, _SIMPLE, there + _READ_AT, 0, kept)]])
            rates = self._rates(there + _RATE_AT, kept) if mapping == "cumem" else None
            self._judge(link, "read", [_SIMPLE], [found], gbps=rates)

    def _forms(self, source: int, target: int) -> list[int]:
        return [_LL, *[_LL128] * ((source, target) in self._spec.ll128), _SIMPLE]

    @staticmethod
    def _steps(
        act: int, base: int, forms: Iterable[int], seed: int, *, waits: bool = True
    ) -> list[_Step]:
        flag = base + _FLAG_AT if waits else 0
        return [_Step(act, form, base + _AT[form], flag, seed) for form in forms]

    def _rates(self, base: int, seed: int) -> list[float]:
        """Return the rates of writing and reading, GB/s, by several blocks."""
        rates = []
        for act in (_WRITE, _COMPARE):
            found = self._run(
                [_Step(act, _SIMPLE, base + at * _RATE_BYTES, 0, seed, _RATE_BYTES)]
                for at in range(_RATE_BLOCKS)
            )
            taken_ns = int(found["end"].max()) - int(found["begin"].min())
            rates.append(_RATE_BLOCKS * _RATE_BYTES / max(1, taken_ns))
        return rates

    def _together(self, links: Sequence[_Link]) -> None:
        """Write and read over all links at once; readers wait for a flag in their own memory."""
        self._at = "all pairs at once"
        me, seed = self._rank, next(self._seeds)
        into = [link for link in links if link.target == me]
        out = [link for link in links if link.source == me]
        both = [link for link in out if (link.mapping, link.target, me) in into]
        awaited, written = list[list[_Step]](), list[list[_Step]]()
        for link in into:
            own = self._own[link.mapping, link.source]
            awaited.append(self._steps(_COMPARE, own, self._forms(link.source, me), seed))
        for link in out:
            there = self._mapped[link.mapping, link.target]
            written.append(self._steps(_WRITE, there, self._forms(me, link.target), seed))
        for link in both:
            end = link.mapping, link.target
            own, there = self._own[end], self._mapped[end]
            flags = own + _READ_FLAG_AT, there + _READ_FLAG_AT
            awaited.append([_Step(_COMPARE, _SIMPLE, there + _READ_AT, flags[0], seed)])
            written.append([_Step(_WRITE, _SIMPLE, own + _READ_AT, flags[1], seed)])
        self._meeting.wait()
        self._launch(awaited, 0, _LONGER_NS)
        self._meeting.wait()
        self._run(written)
        found = self._finish(0)
        at = 0
        for link, reads in [*((link, False) for link in into), *((link, True) for link in both)]:
            forms = [_SIMPLE] if reads else self._forms(link.source, me)
            self._judge(link, "together", forms, [found[at : at + len(forms)]])
            at += len(forms)

    def _judge(
        self, link: _Link, test: Test, forms: Sequence[int], found: Sequence[Any], **more: Any
    ) -> None:
        """Record a test by what its steps found, once or again: wrong, else late, else sound."""
        state, what = "sound", ""
        for form, *ones in zip(forms, *found, strict=True):
            if ones[0]["state"] != 1:
                state, what = "late", _NAMES[form]
                break
            if wrong := int(max(one["wrong"] for one in ones)):
                state, what = "wrong", f"{wrong} packs of {_NAMES[form]}"
                break
        mark = {"sound": 0, "late": _LATE, "wrong": 3}[state]
        if test == "write" or mark:
            self._meeting.states[link.place] = mark
        self._note(link, test, state, what, **more)

    def _note(self, link: _Link, test: str, state: str, what: str = "", **more: Any) -> None:
        record = {**link._asdict(), "test": test, "state": state, "what": what, **more}
        self._records.append(msgspec.convert(record, LinkRecord))

    # Launches: a block takes each list of steps, on stream 0 or 1.
    def _run(self, blocks: Iterable[Sequence[_Step]]) -> Any:
        self._launch(list(blocks), 1)
        return self._finish(1)

    def _launch(self, blocks: Sequence[Sequence[_Step]], lane: int, patience_ns: int = 0) -> None:
        steps = [step for block in blocks for step in block]
        words = np.array(steps, np.uint64)
        firsts = np.cumsum([0, *map(len, blocks)], dtype=np.uint64)
        at, first, found = self._areas[lane]
        for area, data in ((at, words), (first, firsts), (found, np.zeros(len(steps), _FOUND))):
            if data.nbytes:
                self._runtime.memcpy(area, data.ctypes.data, data.nbytes, _TO_DEVICE)
        self._counts[lane] = len(steps)
        if blocks:
            arguments = tuple(map(np.uint64, (at, first, found, patience_ns)))
            self._kernel((len(blocks),), (_THREADS,), arguments, stream=self._streams[lane])

    def _finish(self, lane: int) -> Any:
        """Return what the steps found; MeasurementError if their kernel does not end."""
        until = time.monotonic() + _MEET_S
        while not self._streams[lane].done:
            if time.monotonic() > until:
                raise MeasurementError("a kernel that ends by its clock does not end")
        found = np.zeros(self._counts[lane], _FOUND)
        if found.nbytes:
            self._runtime.memcpy(found.ctypes.data, self._areas[lane][2], found.nbytes, _TO_HOST)
        return found


def pair_proofs(spec: LinksSpec, results: Sequence[LinksResult]) -> tuple[PairProof, ...]:
    """Return what the ranks' results say of each ordered pair of GPUs by each mapping."""
    last = {
        (one.mapping, one.source, one.target, one.test): one
        for result in results
        for one in result.records
    }
    return tuple(
        _pair_proof(
            spec, mapping, pair, [last.get((mapping, *pair, test)) for test in get_args(Test)]
        )
        for mapping in get_args(Mapping)
        for pair in spec.pairs
    )


def _pair_proof(
    spec: LinksSpec,
    mapping: Mapping,
    pair: tuple[int, int],
    records: Sequence[LinkRecord | None],
) -> PairProof:
    source, target = (spec.gpus[rank] for rank in pair)
    refused, write, read, _ = records
    tried = [record for record in records if record is not None]
    written = f"GPU {source} writes"
    verdict: LinkVerdict = "sound"
    what = ""
    if refused is not None:
        verdict, what = (
            "not proven",
            f"GPU {source} cannot map memory of GPU {target}: {refused.what}",
        )
    elif write is None or read is None:
        verdict, what = "not proven", "the proof ended before"
    elif write.state == "late" and write.what == _NAMES[_LL]:
        verdict, what = "hangs", f"nothing that {written} arrives at GPU {target}"
    elif late := next((one for one in tried if one.state == "late"), None):
        verdict, what = "hangs", f"{late.what} that {written} comes late or never at GPU {target}"
    elif write.state == "wrong":
        verdict, what = "wrong values", f"what {written} arrives damaged at GPU {target}"
    elif wrong := next((one for one in tried if one.state == "wrong"), None):
        verb = "reads is damaged" if wrong is read else "writes beside others arrives damaged"
        verdict, what = "wrong values", f"what GPU {source} {verb} at GPU {target}"
    rates = (read and read.gbps) or (None, None)
    return PairProof(
        source=source,
        target=target,
        mapping=mapping,
        verdict=verdict,
        what=what,
        write_gbps=rates[0],
        read_gbps=rates[1],
    )


class _Allocation(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", ctypes.c_int),
        ("device", ctypes.c_int),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ulonglong),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int))


def _call(name: str, *arguments: Any) -> None:
    check_cuda(name, getattr(cuda_driver(), name)(*arguments))


if __name__ == "__main__":
    main()
