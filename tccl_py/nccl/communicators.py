"""Communicators of the installed NCCL: the program of one rank, and the reader of NCCL's logs.

usage: tccl_py.nccl.communicators FOLDER/spec.json RANK   (by `asked.py`, a process for each GPU)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import re
import sys
import threading
import time
from itertools import product
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from tccl_py.errors import MeasurementError, TcclError, require, size_text
from tccl_py.files import write_atomically
from tccl_py.model.links import LinkVerdict
from tccl_py.nccl.settings import GRAPH_VARIABLE
from tccl_py.nccl.tuner import COLLECTIVES, PARTED, SizeChoice, TunedCollective
from tccl_py.nccl_library import Library, check_cuda, cuda_driver, version_text
from tccl_py.rank_processes.forkserver import remove_segments
from tccl_py.rank_processes.rank import JobSlot, read_spec, slots_file, time_slots, write_result

SIZES = (8 << 10, 1 << 20, 64 << 20)
"""Bytes of the messages: LL, LL128 or Simple, and what no cache hides."""
REPEATS = 10
"""Of the largest all-reduce, for its rate."""
HANG_S = 6.0
"""A collective of these sizes takes milliseconds; NCCL connects within a second or two."""
_POLL_S, _LOOK_S = 1e-4, 0.02
_Bytes = npt.NDArray[np.uint8]


class RankProof(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank saw of a job whose values were compared."""

    verdict: LinkVerdict
    what: str = ""
    """The first collective that hung or was wrong, or NCCL's words."""
    seconds: float = 0.0
    """That the collectives took, with comparing."""
    repeats: tuple[float, ...] = ()
    """Seconds of each repeat of the largest all-reduce."""


def prove_values(library: Library, communicator: int, *, rank: int, ranks: int) -> RankProof:
    """Run collectives and compare what arrives; a hang ends it, wrong values do not.

    Ranks go on together after wrong values: a rank that stopped would hang the others.
    """
    begun = time.monotonic()
    job = _Job(library, communicator, rank, ranks)
    # A call can wait for ranks that hang in an earlier one: it has a thread of its own.
    context = ctypes.c_void_p()
    check_cuda("cuCtxGetCurrent", cuda_driver().cuCtxGetCurrent(ctypes.byref(context)))
    done = queue.SimpleQueue[RankProof]()

    def prove() -> None:
        cuda_driver().cuCtxSetCurrent(context)
        try:
            done.put(job.prove())
        except Exception as error:
            done.put(RankProof(verdict="fails", what=str(error) or type(error).__name__))

    threading.Thread(target=prove, daemon=True).start()
    while True:
        with contextlib.suppress(queue.Empty):
            return msgspec.structs.replace(
                done.get(timeout=_LOOK_S), seconds=time.monotonic() - begun
            )
        if time.monotonic() - job.since > HANG_S:
            what = f"{job.step} does not end"
            return RankProof(verdict="hangs", what=what, seconds=time.monotonic() - begun)


class _Job:
    """One rank's memory and calls: rank r sends base * (r + 1) + r, modulo 256."""

    def __init__(self, library: Library, communicator: int, rank: int, ranks: int) -> None:
        self._library, self._communicator = library, communicator
        self._rank, self._ranks = rank, ranks
        self._sent, self._kept = (library.allocate(SIZES[-1]) for _ in range(2))
        self._host = np.zeros(SIZES[-1], np.uint8)
        self.step, self.since = "the first collective", time.monotonic()

    def prove(self) -> RankProof:
        """Run and compare all collectives, then time the largest all-reduce.

        Each call starts one, and returns where what is to arrive.
        """
        calls = {
            "all-reduce": self._all_reduce,
            "send/recv": self._ring,
            "all-to-all": self._all_to_all,
        }
        wrong = ""
        for seed, (size, name) in enumerate(product(SIZES, calls)):
            self.step, self.since = f"{name} of {size_text(size)}", time.monotonic()
            address, expected = calls[name](seed, size)
            self._wait()
            arrived = self._host[: expected.size]
            _copy("cuMemcpyDtoH_v2", arrived.ctypes.data, address, expected.size)
            if count := np.count_nonzero(arrived != expected):
                wrong = wrong or f"{count} bytes of {self.step} are wrong"
        verdict: LinkVerdict = "wrong values" if wrong else "sound"
        return RankProof(verdict=verdict, what=wrong, repeats=self._time())

    def _data(self, seed: int, size: int, rank: int) -> _Bytes:
        generator = np.random.Generator(np.random.SFC64(seed))
        base = np.frombuffer(generator.bytes(size), np.uint8)
        data: _Bytes = base * np.uint8(rank + 1) + np.uint8(rank)
        return data

    def _put(self, data: _Bytes) -> None:
        self._host[: data.size] = data
        _copy("cuMemcpyHtoD_v2", self._sent, self._host.ctypes.data, data.size)

    def _all_reduce(self, seed: int, size: int) -> tuple[int, _Bytes]:
        n = self._ranks
        base = self._data(seed, size, 0)
        self._put(base * np.uint8(self._rank + 1) + np.uint8(self._rank))
        self._library.collective("ncclAllReduce", self._sent, size, self._communicator)
        total = base * np.uint8(n * (n + 1) // 2 % 256) + np.uint8(n * (n - 1) // 2 % 256)
        return self._sent, total

    def _ring(self, seed: int, size: int) -> tuple[int, _Bytes]:
        after, before = (self._rank + 1) % self._ranks, (self._rank - 1) % self._ranks
        self._put(self._data(seed, size, self._rank))
        self._library.exchange(
            [(self._sent, size, after)], [(self._kept, size, before)], self._communicator
        )
        return self._kept, self._data(seed, size, before)

    def _all_to_all(self, seed: int, size: int) -> tuple[int, _Bytes]:
        part = size // self._ranks
        self._put(self._data(seed, size, self._rank))
        sends = [(self._sent + peer * part, part, peer) for peer in range(self._ranks)]
        receives = [(self._kept + peer * part, part, peer) for peer in range(self._ranks)]
        self._library.exchange(sends, receives, self._communicator)
        base = self._data(seed, size, 0)[self._rank * part : (self._rank + 1) * part]
        parts = [base * np.uint8(peer + 1) + np.uint8(peer) for peer in range(self._ranks)]
        return self._kept, np.concatenate(parts)

    def _wait(self) -> None:
        while self._library.is_busy():
            time.sleep(_POLL_S)

    def _time(self) -> tuple[float, ...]:
        """Return the seconds of each repeat of the largest all-reduce."""
        seconds = []
        for _ in range(REPEATS + 1):
            self.since, begun = time.monotonic(), time.perf_counter()
            self._library.collective("ncclAllReduce", self._sent, SIZES[-1], self._communicator)
            self._wait()
            seconds.append(time.perf_counter() - begun)
        return tuple(seconds[1:])


def _copy(name: str, to: int, of: int, size: int) -> None:
    arguments = ctypes.c_void_p(to), ctypes.c_void_p(of), ctypes.c_size_t(size)
    check_cuda(name, getattr(cuda_driver(), name)(*arguments))


_POLL_S = 0.005
_ABORT_S, _COLLECTIVES_S = 5.0, 20.0
PROOF_S = 50.0
"""Seconds after which a rank whose values are compared gives up, and says so."""
# Numbers are bounded, because a torn log joins digits of several.
_CHANNEL = re.compile(
    r"NCCL INFO Channel (?P<number>\d{2,3})/(?P<count>\d{2,3}) :(?P<ranks>(?: +\d{1,7})+) *$",
    re.ASCII,
)
_LINK = re.compile(
    r"NCCL INFO Channel (?P<number>\d{2,3})(?:/\d+)? : "
    r"(?P<source>\d{1,7})\[[0-9a-f]+\] -> (?P<target>\d{1,7})\[[0-9a-f]+\]"
    r"(?: \[(?:send|receive)\])? via (?P<via>\S+)",
    re.ASCII,
)
CHOICE = re.compile(
    r"NCCL INFO (?P<name>\w{1,16}): (?P<bytes>\d{1,16}) Bytes -> Algo (?P<algorithm>\w{1,16}) "
    r"proto (?P<protocol>\w{1,16}) "
    r"(?:channel\{Lo\.\.Hi\}=\{(?P<first>\d{1,3})\.\.(?P<last>\d{1,3})\})?",
    re.ASCII,
)
"""NCCL's choice for a collective; releases before 2.28 write numbers, and no channels."""
VERSION = re.compile(r"NCCL version (?P<version>\d{1,3}\.\d{1,3}\.\d{1,3})", re.ASCII)
MAX_LOG_CHARACTERS = 512 * 1024 * 1024


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A communicator over GPUs in rank order."""

    gpus: tuple[int, ...]
    graph: str | None = None
    """The text of a graph file; None: no file."""
    topology: str | None = None
    """The text of a topology file; without one the process's variables hold."""
    sizes: tuple[int, ...] = ()
    """Bytes of the messages for which collectives run in it."""
    proof: JobSlot | None = None
    """The job's time slot among those whose values are compared; None: nothing is compared."""

    @property
    def calls(self) -> list[tuple[TunedCollective, int, int]]:
        """The collectives in their order: name, bytes of the message, bytes of a rank's part."""
        return [
            (name, size, size // len(self.gpus) if name in PARTED else size)
            for name in COLLECTIVES
            for size in self.sizes
        ]


class CommunicatorsSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The GPU of each rank, and communicators to make one after another."""

    gpus: tuple[int, ...]
    questions: tuple[Question, ...]


class CommunicatorLog(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """NCCL's log of a communicator in this rank; its rank 0 adds the dumped graphs."""

    log: str
    dump: str = ""
    proof: RankProof | None = None


class RankResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """NCCL's version, and its log of each communicator with this rank, by number."""

    version: str
    logs: dict[int, CommunicatorLog]


def main() -> None:
    """Make the communicators; exit with code 1 and NCCL's message if NCCL refuses one."""
    spec, rank, folder = read_spec(CommunicatorsSpec)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, spec.gpus))
    # NVML's order, which the GPUs' indices have.
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["NCCL_DEBUG_FILE"] = str(folder / f"nccl-{rank}")
    number = -1
    try:
        library = Library()
        library.use_gpu(rank)
        logs = {}
        for number, question in enumerate(spec.questions):
            if spec.gpus[rank] in question.gpus:
                # Names the communicator in case NCCL crashes.
                print(f"communicator {number}", flush=True)
                if question.proof is not None:
                    ends = folder, rank, version_text(library.version), number
                    threading.Thread(target=_give_up_late, args=ends, daemon=True).start()
                logs[number] = _make(library, spec, number, rank, folder)
    except TcclError as error:
        where = f"communicator {number}: " if number >= 0 else ""
        print(f"error: {where}{error}", flush=True)
        os._exit(1)
    _end(folder, rank, RankResult(version=version_text(library.version), logs=logs))


def _make(
    library: Library, spec: CommunicatorsSpec, number: int, rank: int, folder: Path
) -> CommunicatorLog:
    """Make one communicator with the other ranks, end it, and return its log."""
    question, gpus = spec.questions[number], spec.gpus
    place = question.gpus.index(gpus[rank])
    dump, log = folder / f"dump-{number}.xml", folder / f"nccl-{rank}"
    # 1. Name the files that NCCL reads and writes with every communicator.
    os.environ["NCCL_GRAPH_DUMP_FILE"] = str(dump)
    os.environ.pop(GRAPH_VARIABLE, None)
    for name, text in (("GRAPH", question.graph), ("TOPO", question.topology)):
        if text is not None:
            path = folder / f"{name.lower()}-{number}.xml"
            write_atomically(path, text)
            os.environ[f"NCCL_{name}_FILE"] = str(path)
    # 2. Join by the id of rank 0.
    id_file = folder / f"id-{number}"
    if place == 0:
        write_atomically(id_file, library.unique_id().hex())
    _wait_for(id_file)
    begun = log.stat().st_size if log.exists() else 0
    unique_id = bytes.fromhex(id_file.read_text())
    made, proof = _prove(library, question, unique_id, place, folder)
    if made is not None and (proof is None or proof.verdict == "sound"):
        _run_collectives(library, question, made)
    # 3. Abort once all ranks have it: until then they need this rank.
    (folder / f"made-{number}-{rank}").touch()
    for gpu in question.gpus:
        _wait_for(folder / f"made-{number}-{gpus.index(gpu)}")
    if made is not None:
        _abort(library, made)
    text = log.read_bytes()[begun:].decode(errors="replace") if log.exists() else ""
    dumped = dump.read_text(errors="replace") if place == 0 and dump.exists() else ""
    return CommunicatorLog(log=text, dump=dumped, proof=proof)


def _prove(
    library: Library, question: Question, unique_id: bytes, place: int, folder: Path
) -> tuple[int | None, RankProof | None]:
    """Return the communicator, and what a proof saw of it; None where NCCL makes none."""
    ranks = len(question.gpus)
    if question.proof is None:
        return library.communicator(unique_id, rank=place, ranks=ranks), None
    made, proof = None, RankProof(verdict="fails")
    try:
        made = library.communicator(unique_id, rank=place, ranks=ranks)
    except MeasurementError as error:
        proof = RankProof(verdict="fails", what=str(error))
    # A job that fails has its time slot, too: the others wait for it.
    with time_slots(slots_file(folder), question.proof, place)():
        if made is not None:
            try:
                proof = prove_values(library, made, rank=place, ranks=ranks)
            except MeasurementError as error:
                proof = RankProof(verdict="fails", what=str(error))
            if proof.verdict == "hangs":
                # Kernels that wait for ever would slow the jobs that have the next slots.
                _abort(library, made)
                made = None
    return made, proof


def _abort(library: Library, communicator: int) -> None:
    """End a communicator; an abort that hangs is left behind."""
    ending = threading.Thread(target=library.abort, args=(communicator,), daemon=True)
    ending.start()
    ending.join(_ABORT_S)


def _give_up_late(folder: Path, rank: int, version: str, number: int) -> None:
    """Write a result in the place of a proof that does not come to its end, and end the process."""
    time.sleep(PROOF_S)
    proof = RankProof(verdict="hangs", what="NCCL makes no communicator, or had no turn")
    log = CommunicatorLog(log="", proof=proof)
    _end(folder, rank, RankResult(version=version, logs={number: log}))


def _end(folder: Path, rank: int, result: RankResult) -> NoReturn:
    """Write the result and end the process: threads of NCCL may still run."""
    write_result(folder, rank, result)
    sys.stdout.flush()
    remove_segments(os.getpid())
    os._exit(0)


def _run_collectives(library: Library, question: Question, communicator: int) -> None:
    """Run a question's collectives; the abort ends those that hang, as on virtual GPUs."""
    buffer = library.allocate(max(question.sizes)) if question.sizes else 0
    for name, _, count in question.calls:
        library.collective(f"nccl{_nccl_name(name)}", buffer, count, communicator)
    end = time.monotonic() + _COLLECTIVES_S
    while question.sizes and library.is_busy() and time.monotonic() < end:
        time.sleep(_POLL_S)


def _nccl_name(collective: TunedCollective) -> str:
    """Return NCCL's own name.

    >>> _nccl_name("all_reduce")
    'AllReduce'
    """
    return collective.title().replace("_", "")


def _wait_for(path: Path) -> None:
    """Wait for a peer's file; the parent process limits the time."""
    while not path.exists():
        time.sleep(_POLL_S)


# Logs of NCCL_DEBUG=INFO: final rings, and the transport of every connection.
def transport_of(via: str) -> str:
    """Return the transport of a connection by NCCL's name of it.

    >>> transport_of("P2P/CUMEM"), transport_of("SHM/direct")
    ('P2P', 'SHM')
    """
    return via.split("/", maxsplit=1)[0]


class LoggedConnection(msgspec.Struct, frozen=True, order=True):
    """One connection: channel, ranks, and NCCL's name for it (`P2P/CUMEM`, `SHM/direct`)."""

    channel: int
    source: int
    target: int
    via: str


class InitLog(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed log; `communicators` holds final rank orders, one tuple of rings for each."""

    version: str | None
    communicators: tuple[tuple[tuple[int, ...], ...], ...]
    connections: tuple[LoggedConnection, ...]

    def rings_over(self, ranks: int) -> tuple[tuple[int, ...], ...]:
        """Return the first rings over this many ranks; () unless every ring has each rank once."""
        rings = next((orders for orders in self.communicators if len(orders[0]) == ranks), ())
        every = list(range(ranks))
        return rings if all(sorted(ring) == every for ring in rings) else ()


def parse_log(text: str, *, where: str) -> InitLog:
    """Read final channels and connections from an INFO log of one or more ranks.

    Only rank 0 prints orders; a communicator begins with its channel 0 and ends with the last.
    """
    right = f"at most {MAX_LOG_CHARACTERS} characters"
    require(len(text) <= MAX_LOG_CHARACTERS, where, "is too large", right)
    version = VERSION.search(text)
    begun: list[tuple[int, list[tuple[int, ...]]]] = []
    connections = set()
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _CHANNEL.search(line.rstrip()):
            channel, count = int(match["number"]), int(match["count"])
            if channel == 0:
                begun.append((count, []))
            in_turn = bool(begun) and (begun[-1][0], len(begun[-1][1])) == (count, channel)
            fault = f"channel {channel} of {count} comes out of turn"
            require(in_turn, f"{where}:{number}", fault, "give the log of one job")
            begun[-1][1].append(tuple(map(int, match["ranks"].split())))
        elif link := _LINK.search(line):
            ends = int(link["number"]), int(link["source"]), int(link["target"])
            connections.add(LoggedConnection(*ends, link["via"]))
    for count, rings in begun:
        fault = f"shows {len(rings)} of {count} channels"
        require(len(rings) == count, where, fault, "give the whole log")
    return InitLog(
        version=version["version"] if version else None,
        communicators=tuple(tuple(rings) for _, rings in begun),
        connections=tuple(sorted(connections)),
    )


def logged_choices(question: Question, log: str) -> tuple[SizeChoice, ...]:
    """Return NCCL's choices for a question, of rank 0's log; MeasurementError: it has others."""
    found = [match for match in CHOICE.finditer(log) if match["last"]]
    expected = [(_nccl_name(name), str(count)) for name, _, count in question.calls]
    if question.proof is not None:
        # Collectives whose values are compared come before.
        found = found[len(found) - len(expected) :]
    if [match.group("name", "bytes") for match in found] != expected:
        raise MeasurementError("NCCL's log does not show the collectives that ran")
    try:
        return tuple(
            msgspec.convert(
                {
                    "collective": name,
                    "bytes": size,
                    "algorithm": match["algorithm"].lower(),
                    "protocol": match["protocol"].lower(),
                    "channels": int(match["last"]) - int(match["first"]) + 1,
                },
                SizeChoice,
            )
            for (name, size, _), match in zip(question.calls, found, strict=True)
        )
    except msgspec.ValidationError as error:
        raise MeasurementError(f"NCCL's log has a choice that is not known: {error}") from error


def same_rings(ring: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return whether two rank orders are the same ring, from any start.

    >>> same_rings((0, 2, 1, 3), (1, 3, 0, 2))
    True
    """
    if len(ring) != len(other) or set(ring) != set(other) or not ring:
        return ring == other
    start = other.index(ring[0])
    return ring == (*other[start:], *other[:start])


if __name__ == "__main__":
    main()
