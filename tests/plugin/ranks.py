"""Ranks over NCCL by ctypes: a process each, on a GPU each, forked from a process without NCCL.

Run as `python -m tests.plugin.ranks SPEC.json`; NCCL is the first of LD_LIBRARY_PATH, else the
installed one. Each rank runs the scenario of the spec and writes its records to `result.RANK`.
"""

import ctypes
import json
import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path

import msgspec

from tccl_py.nccl_library import find_library

UNDEFINED = -(1 << 31)
NO_COLOR = -1
MAGIC = 0xCAFEBEEF
IN_PROGRESS = 7
SUMMED, WRONG_SUM = 1 << 20, 99
_GRAPH = re.compile(r"tccl: rank \d+ of (\d+): graph file (\S+) of ")
_DEFAULT = re.compile(r"tccl: rank \d+ of (\d+): default NCCL: (.*)")
_RING = re.compile(r"Ring (\d+) : -?\d+ -> (\d+) -> (\d+)")
_READ = re.compile(r"(NCCL_(?:BUFFSIZE|MIN_NCHANNELS)) set by environment to (\d+)")
_SHOWN = re.compile(r"NCCL_GRAPH_FILE set by environment to (\S+)")


class Spec(msgspec.Struct, kw_only=True):
    """A run: a scenario of tests.plugin.scenarios, its ranks, and their environments.

    `gpus` has each rank's GPU, by default its own number, and `devices` CUDA's number of it.
    `rank_env` has variables of single ranks; None takes one away. `kills` are (rank, seconds)
    after the start, or after as many boards were seen in /dev/shm as `after_boards` says.
    """

    scenario: str
    size: int
    folder: str
    version: str
    argument: int = 0
    gpus: list[int] = []
    devices: list[int] = []
    env: dict[str, str] = {}
    rank_env: dict[int, dict[str, str | None]] = {}
    kills: list[tuple[int, float]] = []
    after_boards: int = 0
    timeout: float = 120.0


class Made(msgspec.Struct, kw_only=True):
    """A communicator as one rank saw it.

    `gpus` has NVML indices by rank, `files` NCCL's values of NCCL_GRAPH_FILE, `graph` the plugin's
    choice, `rings` this rank's next rank for each channel, and `variables` what NCCL read of the
    variables that plans give to single communicators. A record of a group, behind those of
    its communicators, has the GPUs of each in `group` and all their choices.
    """

    name: str
    gpus: list[int]
    rank: int
    code: int
    shared: bool = False
    group: list[list[int]] = []
    files: list[str] = []
    graph: str = ""
    reason: str = ""
    rings: dict[int, int] = {}
    seconds: float = 0.0
    variables: dict[str, str] = {}


class Record(msgspec.Struct, kw_only=True):
    """Everything that one rank saw, and its Python error."""

    made: list[Made]
    error: str = ""


class Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.28, which 2.30 reads too."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
        ("traffic_class", ctypes.c_int),
        ("comm_name", ctypes.c_char_p),
        ("collnet", ctypes.c_int),
        ("cta_policy", ctypes.c_int),
        ("shrink_share", ctypes.c_int),
        ("nvls_ctas", ctypes.c_int),
        ("per_net_peer", ctypes.c_int),
        ("nvlink_centric", ctypes.c_int),
    )

    def __init__(self, *, blocking=True, share=False):
        unset = {name: UNDEFINED for name, kind in self._fields_ if kind is ctypes.c_int}
        super().__init__(**unset)
        self.size, self.magic, self.version = ctypes.sizeof(self), MAGIC, 22800
        self.blocking, self.split_share = int(blocking), int(share)


def cuda_runtime():
    """Return the library of the CUDA runtime: of a Python package, or the loader's."""
    places = (Path(place) for place in sys.path)
    found = (path for place in places for path in place.glob("nvidia/*/lib/libcudart.so.1[0-9]"))
    return str(next(found, "libcudart.so.13"))


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


class Comm(msgspec.Struct):
    """A communicator of this process."""

    handle: ctypes.c_void_p
    made: Made
    ranks: list[int]
    share: bool = False


class Job:
    """One rank of a scenario."""

    def __init__(self, spec, rank):
        self.rank, self.size, self.argument = rank, spec.size, spec.argument
        self.folder, self.made, self._read = Path(spec.folder), [], 0
        self._log = self.folder / f"log.{rank}"
        self._gpus = spec.gpus or list(range(max(spec.size, spec.argument)))
        self._nccl = ctypes.CDLL(find_library())
        self._cuda = ctypes.CDLL(cuda_runtime(), ctypes.RTLD_GLOBAL)
        self.use((spec.devices or self._gpus)[rank])

    def use(self, device):
        # A library that makes virtual GPUs is preloaded, and found in the whole process alone.
        assert ctypes.CDLL(None).cudaSetDevice(device) == 0

    def init(self, name, ranks, *, blocking=True, share=False):
        """Return a communicator over some ranks (None for the other ranks), ready or failed."""
        if self.rank not in ranks:
            return None
        comm = self.begin(name, ranks, blocking=blocking, share=share)
        return self.finish(comm)

    def begin(self, name, ranks, *, blocking=True, share=False, at=None):
        rank = ranks.index(self.rank) if at is None else at
        made = self._new(name, ranks, rank)
        comm = Comm(ctypes.c_void_p(), made, list(ranks), share)
        config = Config(blocking=blocking, share=share)
        unique = self._unique_id(name, owner=rank == 0)
        self._read_log()
        made.seconds = -time.monotonic()
        made.code = self._nccl.ncclCommInitRankConfig(
            ctypes.byref(comm.handle), len(ranks), unique, rank, ctypes.byref(config)
        )
        return comm

    def split(self, name, parent, color, ranks, *, key=0, share=False):
        """Split a communicator; `ranks` are those of this rank's color, in order of keys.

        Its parent's configuration decides whether the child shares the parent's network.
        """
        config = Config(share=share)
        rank = ranks.index(self.rank) if color != NO_COLOR else -1
        separate = os.environ.get("NCCL_COMM_SPLIT_SHARE_RESOURCES") == "0"
        made = self._new(name, ranks, rank, shared=parent.share and not separate)
        comm = Comm(ctypes.c_void_p(), made, list(ranks), share)
        self._read_log()
        made.seconds = -time.monotonic()
        made.code = self._nccl.ncclCommSplit(
            parent.handle, color, key, ctypes.byref(comm.handle), ctypes.byref(config)
        )
        self._settle(parent)
        if color == NO_COLOR:
            return None
        return self.finish(comm)

    def shrink(self, name, parent, excluded):
        """Shrink a communicator to the ranks that stay; ranks of `excluded` do not call."""
        ranks = [rank for rank in parent.ranks if rank not in excluded]
        made = self._new(name, ranks, ranks.index(self.rank))
        comm = Comm(ctypes.c_void_p(), made, ranks)
        numbers = [parent.ranks.index(rank) for rank in excluded]
        array = (ctypes.c_int * len(numbers))(*numbers)
        self._read_log()
        made.seconds = -time.monotonic()
        made.code = self._nccl.ncclCommShrink(
            parent.handle, array, len(numbers), ctypes.byref(comm.handle), None, 0
        )
        self._settle(parent)
        return self.finish(comm)

    def _settle(self, parent):
        """Wait for a parent that does not block: its child is there when the parent is ready."""
        state = ctypes.c_int(IN_PROGRESS)
        while state.value == IN_PROGRESS:
            self._nccl.ncclCommGetAsyncError(parent.handle, ctypes.byref(state))
            time.sleep(0.001 * (state.value == IN_PROGRESS))

    def finish_group(self, name, comms):
        """Wait for the communicators of a group, and record them and what they got together."""
        for comm in comms:
            self.finish(comm, alone=False)
        made = Made(name=name, gpus=[], rank=0, code=0)
        made.group = [comm.made.gpus for comm in comms]
        self._describe(made)
        self.made.append(made)

    def finish(self, comm, *, alone=True):
        """Wait for a communicator and record it; `alone`: the log since its start is its own."""
        made = comm.made
        state = ctypes.c_int(IN_PROGRESS)
        while made.code in (0, IN_PROGRESS) and state.value == IN_PROGRESS:
            made.code = self._nccl.ncclCommGetAsyncError(comm.handle, ctypes.byref(state))
            if state.value == IN_PROGRESS:
                time.sleep(0.001)
        made.code = made.code or state.value
        made.seconds += time.monotonic()
        made.code = made.code or self._sum(comm)
        if alone:
            self._describe(made)
        self.made.append(made)
        return comm

    def _sum(self, comm):
        """Add ones of all ranks by an all-reduce of bytes; return its error, or WRONG_SUM."""
        data, buffer = ctypes.create_string_buffer(SUMMED), ctypes.c_void_p()
        self._cuda.cudaMalloc(ctypes.byref(buffer), ctypes.c_size_t(SUMMED))
        self._cuda.cudaMemset(buffer, 1, ctypes.c_size_t(SUMMED))
        values = buffer, buffer, ctypes.c_size_t(SUMMED), 0, 0, comm.handle, None
        code = self._nccl.ncclAllReduce(*values)
        while code == IN_PROGRESS:  # a communicator that does not block
            state = ctypes.c_int(IN_PROGRESS)
            self._nccl.ncclCommGetAsyncError(comm.handle, ctypes.byref(state))
            code = state.value
        code = code or self._cuda.cudaMemcpy(data, buffer, ctypes.c_size_t(SUMMED), 2)
        self._cuda.cudaFree(buffer)
        return code or (0 if data.raw == bytes([len(comm.ranks)]) * SUMMED else WRONG_SUM)

    def _new(self, name, ranks, rank, *, shared=False):
        gpus = [self._gpus[other] for other in ranks]
        return Made(name=name, gpus=gpus, rank=rank, code=0, shared=shared)

    def group(self, start):
        call = self._nccl.ncclGroupStart if start else self._nccl.ncclGroupEnd
        return call()

    def init_all(self, name, count):
        """ncclCommInitAll: one process, all GPUs."""
        handles = (ctypes.c_void_p * count)()
        code = self._nccl.ncclCommInitAll(handles, count, None)
        self.made.append(self._new(name, range(count), 0))
        self.made[-1].code = code
        self._describe(self.made[-1])

    def destroy(self, comm, *, how="Destroy"):
        code = getattr(self._nccl, f"ncclComm{how}")(comm.handle)
        if code:
            self.made.append(Made(name=f"{how} {comm.made.name}", gpus=[], rank=0, code=code))

    def collective(self, comm, name, size):
        """Enqueue a collective of bytes, of `size` in all."""
        buffer, share = ctypes.c_void_p(), size // len(comm.ranks)
        self._cuda.cudaMalloc(ctypes.byref(buffer), ctypes.c_size_t(size))
        count = share if name in ("AllGather", "ReduceScatter") else size
        sums = name not in ("Broadcast", "AllGather")
        ends = {"Broadcast": [0], "Reduce": [0]}.get(name, [])
        values = [*[0] * sums, *ends]  # ncclSum, and the root
        made = Made(name=f"{name} {size}", gpus=[], rank=0, code=0)
        made.code = getattr(self._nccl, f"nccl{name}")(
            buffer, buffer, ctypes.c_size_t(count), 0, *values, comm.handle, None
        )
        self._cuda.cudaFree(buffer)
        self.made.append(made)

    def time_calls(self, comm, size, count):
        """Record the least mean seconds of a call of ten times `count` all-reduces of bytes."""
        buffer, least = ctypes.c_void_p(), float("inf")
        self._cuda.cudaMalloc(ctypes.byref(buffer), ctypes.c_size_t(size))
        values = buffer, buffer, ctypes.c_size_t(size), 0, 0, comm.handle, None
        for _ in range(10):
            start = time.perf_counter()
            codes = {self._nccl.ncclAllReduce(*values) for _ in range(count)}
            least = min(least, (time.perf_counter() - start) / count)
        self.made.append(Made(name="calls", gpus=[], rank=0, code=max(codes), seconds=least))

    def barrier(self, name):
        """Wait for all ranks of the job."""
        (self.folder / f"at.{name}.{self.rank}").touch()
        for rank in range(self.size):
            self._wait_for(self.folder / f"at.{name}.{rank}")

    def _unique_id(self, name, *, owner):
        path, unique = self.folder / f"id.{name}", UniqueId()
        if owner:
            code = self._nccl.ncclGetUniqueId(ctypes.byref(unique))
            assert code == 0, f"ncclGetUniqueId: {code}"
            (self.folder / f"new.{name}").write_bytes(bytes(unique))
            (self.folder / f"new.{name}").rename(path)
        self._wait_for(path)
        return UniqueId.from_buffer_copy(path.read_bytes())

    def _wait_for(self, path):
        while not path.exists():
            time.sleep(0.001)

    def _read_log(self):
        try:
            with self._log.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return ""
        self._read += len(data)
        return data.decode(errors="replace")

    def _describe(self, made):
        text = self._read_log()
        made.files = _SHOWN.findall(text)
        made.graph = " ".join(graph for _, graph in _GRAPH.findall(text))
        made.variables = dict(_READ.findall(text))
        made.reason = " | ".join(reason for _, reason in _DEFAULT.findall(text))
        found = [(int(c), int(rank), int(to)) for c, rank, to in _RING.findall(text)]
        made.rings = {c: to for c, rank, to in found if rank == made.rank}

    def save(self, error=""):
        result = Record(made=self.made, error=error)
        (self.folder / f"result.{self.rank}").write_bytes(msgspec.json.encode(result))


def _be_rank(spec, rank):
    from tests.plugin import scenarios  # noqa: PLC0415 (scenarios use this module)

    variables = dict(spec.env) | spec.rank_env.get(rank, {})
    variables["NCCL_DEBUG_FILE"] = f"{spec.folder}/log.{rank}"
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    with (Path(spec.folder) / f"err.{rank}").open("wb") as err:
        os.dup2(err.fileno(), 2)
    job = Job(spec, rank)
    try:
        getattr(scenarios, spec.scenario)(job)
        job.save()
    except BaseException:
        job.save(traceback.format_exc())
    (job.folder / f"done.{rank}").touch()
    # NCCL's threads of other ranks may still need this one.
    until = time.monotonic() + 20
    while time.monotonic() < until and not spec.kills:
        if all((job.folder / f"done.{other}").exists() for other in range(spec.size)):
            break
        time.sleep(0.002)
    # With atexit, as programs end: NCCL then finalizes the plugin.
    ctypes.CDLL(None).exit(0)


def boards():
    """Return the names of this user's boards in /dev/shm."""
    try:
        return set(os.listdir(f"/dev/shm/tccl-{os.geteuid()}"))  # noqa: PTH208
    except FileNotFoundError:
        return set()


def main(path):
    """Run the ranks of a spec; kill all at the time limit. Write their exit codes to `codes`."""
    spec = msgspec.json.decode(Path(path).read_bytes(), type=Spec)
    pids = {}
    for rank in range(spec.size):
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            _be_rank(spec, rank)
        pids[pid] = rank
    codes, start, kills = {}, time.monotonic(), sorted(spec.kills, key=lambda kill: kill[1])
    killed, seen, since = [], set(), None if spec.after_boards else start
    while len(codes) < spec.size:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pids[pid]] = os.waitstatus_to_exitcode(status)
            continue
        now = time.monotonic() - start
        if since is None:
            seen |= boards()
            if len(seen) >= spec.after_boards:
                since = time.monotonic()
        while kills and since is not None and kills[0][1] <= time.monotonic() - since:
            rank = kills.pop(0)[0]
            target = next(pid for pid, number in pids.items() if number == rank)
            if rank not in codes:
                os.kill(target, signal.SIGKILL)
                killed.append(rank)
        if now > spec.timeout:
            for pid, rank in pids.items():
                if rank not in codes:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.002 if since is not None and not kills else 0.0001)
    Path(spec.folder, "codes").write_text(json.dumps({"codes": codes, "killed": killed}))


if __name__ == "__main__":
    main(sys.argv[1])
