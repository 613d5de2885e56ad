"""Random mixtures of ranks: with the plugin or not, with other indices, releases, GPUs and hosts.

As a program, plays mixtures with stand-ins for NCCL, a process for each rank, and prints what ranks
of one communicator are given unlike, or other than they should be, a line each:

    python -m tests.plugin.mixtures SPEC.json
"""

import ctypes
import multiprocessing
import os
import random
import sys
from pathlib import Path

import msgspec

from tccl_py.nccl.plugin.index import plugin_environment
from tccl_py.nccl.settings import Settings
from tests.plugin.runs import make_plan, random_tables

RANKS = 8
VARIABLES = ("NCCL_P2P_LEVEL", "NCCL_BUFFSIZE", "NCCL_MIN_NCHANNELS", "NCCL_ALGO")
HASH_AT = (1 << 20) + 3192


class RankKind(msgspec.Struct, frozen=True):
    """What is special about a rank: `index` names a plan, or is "" without the plugin.

    `gpu` is another one than its own, `patch` of another release. A `plain` rank has no plan, and
    one that is `untuned` no tuner of ours.
    """

    index: str = "whole"
    env: dict[str, str] = {}
    plain: bool = False
    untuned: bool = False
    gpu: int | None = None
    patch: int | None = None


HIDES_RANKS = "STAND_IN_HIDES_RANKS"
KINDS = (
    RankKind(index=""),
    RankKind(env={"TCCL_DISABLE": "1"}, plain=True),
    RankKind(index="other"),
    RankKind(index="part"),
    RankKind(index="missing"),
    RankKind(env={"NCCL_CROSS_NIC": "1"}, plain=True),
    RankKind(env={"NCCL_COMM_ID": "host:1"}, plain=True),
    RankKind(env={HIDES_RANKS: "1"}, plain=True),
    RankKind(env={"NCCL_TUNER_PLUGIN": "none"}, untuned=True),
    RankKind(env={"NCCL_CTA_POLICY": "0"}, untuned=True),
    RankKind(gpu=0),
    RankKind(gpu=RANKS + 1, plain=True),
    RankKind(patch=8),
)


class Mixture(msgspec.Struct, frozen=True):
    """Ranks and the communicators that they make, in this order; `launcher` holds for all ranks."""

    seed: int
    ranks: tuple[RankKind, ...]
    hosts: int
    launcher: dict[str, str]
    communicators: tuple[tuple[int, ...], ...]

    def env(self, rank):
        """Return the variables of a rank, without those that load the plugin."""
        return self.launcher | {"NCCL_HOSTID": self.host(rank)} | self.ranks[rank].env

    def host(self, rank):
        return f"host{rank * self.hosts // len(self.ranks)}"


def settings_of(version):
    """Return settings with variables of each kind: for processes, and for communicators."""
    return Settings(version=version, p2p_level="SYS", buffsize=131072, min_channels=4, algo="Ring")


def draw(seed, version="2.28.9"):
    """Return a random mixture: a few special ranks, and at times a launcher without variables."""
    source = random.Random(seed)
    ranks = [RankKind(index="part" if source.random() < 0.15 else "whole")] * RANKS
    for rank in source.sample(range(RANKS), source.choice((0, 1, 1, 2, 4))):
        ranks[rank] = source.choice(KINDS)
    needed, _ = plugin_environment(settings_of(version))
    sizes = (2, 2, 2, 4, 4, 8, 8)
    communicators = [
        tuple(source.sample(range(RANKS), source.choice(sizes)))
        for _ in range(source.randint(2, 7))
    ]
    return Mixture(
        seed=seed,
        ranks=tuple(ranks),
        hosts=source.choice((1, 1, 2)),
        launcher=needed if source.random() < 0.85 else {},
        communicators=(*communicators, tuple(range(RANKS))),
    )


def indices(folder, version, buses):
    """Make the plans of mixtures: of all GPUs, the same with other rings, and of the first four."""
    needed, given = plugin_environment(settings_of(version))
    fields = {"needed": needed, "given": given, "forbid": ("NCCL_CROSS_NIC",)}
    four = {gpu: buses[gpu] for gpu in range(4)}
    tables = [one for one in random_tables(1, RANKS) if len(one.gpus) in (2, 8)]
    made = {
        "whole": make_plan(folder / "whole", buses=buses, sizes=(2, 4, 8), tables=tables, **fields),
        "other": make_plan(folder / "other", buses=buses, sizes=(2, 8), missing=[(0, 1)], **fields),
        "part": make_plan(folder / "part", buses=four, sizes=(2, 4), **fields),
    }
    return {
        name: Index(
            path=str(plan.index),
            files={str(gpus): str(plan.folder / plan.file(gpus)) for gpus in plan.orders},
            tuned=[str(one.gpus) for one in tables if name == "whole"],
        )
        for name, plan in made.items()
    } | {"missing": Index(path="/nowhere/plugin.index")}


# The program.


class Index(msgspec.Struct):
    """What a plan has: graph files of sets, and sets with a table."""

    path: str
    files: dict[str, str] = {}
    tuned: list[str] = []


class Spec(msgspec.Struct):
    """Mixtures to play: indices by name, the plugin, and libcuda and libnvidia-ml as made up."""

    mixtures: list[Mixture]
    indices: dict[str, Index]
    plugin: str
    libraries: list[str]
    record: str
    version: str
    asks_no_cache: bool = True


class Given(msgspec.Struct):
    """What a rank is given: the graph file of a communicator, and the variables in force there."""

    graph: str
    variables: dict[str, str | None]
    tuned: bool = False


_POINTER = ctypes.c_void_p


class Environment(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("init", ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint8] * 3, *[_POINTER] * 2)),
        ("finalize", ctypes.c_void_p),
        ("get", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_char_p)),
    )


class _Network(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("init", ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, ctypes.c_uint64, *[_POINTER] * 3)),
    )


class _Tuner(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        (
            "init",
            ctypes.CFUNCTYPE(
                ctypes.c_int, _POINTER, ctypes.c_uint64, *[ctypes.c_size_t] * 2, *[_POINTER] * 3
            ),
        ),
    )


class StandIn:
    """NCCL on one rank: asks in the recorded order, and reads variables once per process."""

    def __init__(self, spec, mixture, rank):
        self._kind, self._values = mixture.ranks[rank], {}
        for name in [name for name in os.environ if name.startswith(("NCCL_", "TCCL_"))]:
            del os.environ[name]
        os.environ.update(mixture.env(rank))
        self._get, self._network = os.environ.get, None
        if self._kind.index:
            os.environ["TCCL_INDEX"] = spec.indices[self._kind.index].path
            for library in spec.libraries:
                gpu = rank if self._kind.gpu is None else self._kind.gpu
                ctypes.CDLL(library, ctypes.RTLD_GLOBAL).fake_use(gpu)
            plugin = ctypes.CDLL(spec.plugin)
            environment = Environment.in_dll(plugin, "ncclEnvPlugin_v2")
            *release, patch = map(int, spec.version.split("."))
            environment.init(*release, self._kind.patch or patch, None, None)
            self._network = _Network.in_dll(plugin, "ncclNetPlugin_v12")
            self._tuner = _Tuner.in_dll(plugin, "ncclTunerPlugin_v5")
            self._get = lambda name: (environment.get(name.encode()) or b"").decode() or None
        sections, section = {}, None
        for line in Path(spec.record).read_text().splitlines():
            word, _, name = line.partition(" ")
            if word in ("first", "later", "shared"):
                section = sections.setdefault(word, [])
            elif section is not None:
                section.append(name or word)
        uncached = set()
        if spec.version >= "2.29.7" and spec.asks_no_cache:
            uncached = set((self._get("NCCL_NO_CACHE") or "").split(","))
        again = {*sections["later"], *uncached}
        self._order = [name for name in sections["first"] if name in again]
        self._first = sections["first"]

    def make(self, number, place, count, barrier):
        """Make a communicator of `count` ranks; return what this rank is given."""
        memory = ctypes.create_string_buffer(HASH_AT + 64)
        if HIDES_RANKS not in self._kind.env:
            head = number.to_bytes(8, "little") + place.to_bytes(4, "little")
            memory[HASH_AT : HASH_AT + 16] = head + count.to_bytes(4, "little")
        graph, waited, tuned = "", False, False
        for name in self._first or self._order:
            if name == "net":
                if self._network is not None:
                    self._network.init(ctypes.addressof(memory), number, None, None, None)
                continue
            if not waited and name in ("NCCL_P2P_DISABLE", "NCCL_TOPO_DUMP_FILE"):
                barrier.wait(60)
                waited = True
            if name == "NCCL_PROTO" and self._network is not None:
                tuned = self._has_table(number, count)
            self._values[name] = self._get(name)
            if name == "NCCL_GRAPH_FILE" and self._values[name]:
                graph = Path(self._values[name]).read_text()
        self._first = None
        variables = {name: self._values[name] for name in VARIABLES}
        return Given(graph=graph, variables=variables, tuned=tuned)

    def _has_table(self, number, ranks):
        """Initialise the tuner, also as for other communicators, which have no table."""
        found = []
        for case in ((number, ranks, 2), (number + 1, ranks, 1), (number, ranks, 1)):
            context = ctypes.c_void_p()
            self._tuner.init(ctypes.addressof(context), *case, None, None, None)
            found.append(context.value is not None)
        assert found[:2] == [False, False]
        return found[2]


def _play(spec, mixture, rank, barriers, answers):
    standin = StandIn(spec, mixture, rank)
    for number, ranks in enumerate(mixture.communicators):
        if rank in ranks:
            identity = mixture.seed * 1000 + number + 1
            given = standin.make(identity, ranks.index(rank), len(ranks), barriers[number])
            answers.put((number, rank, msgspec.json.encode(given)))


def play(spec, mixture):
    """Return what each rank of each communicator is given."""
    context = multiprocessing.get_context("fork")
    barriers = [context.Barrier(len(ranks)) for ranks in mixture.communicators]
    answers = context.Queue()
    ranks = [
        context.Process(target=_play, args=(spec, mixture, rank, barriers, answers))
        for rank in range(len(mixture.ranks))
    ]
    for process in ranks:
        process.start()
    given = [{} for _ in barriers]
    for _ in range(sum(map(len, mixture.communicators))):
        number, rank, answer = answers.get(timeout=60)
        given[number][rank] = msgspec.json.decode(answer, type=Given)
    for process in ranks:
        process.join()
    return given


def right_answer(spec, mixture, ranks):
    """Return the graph file of a communicator, or "", and whether it has a table."""
    kinds = [mixture.ranks[rank] for rank in ranks]
    (index, *others), gpus = {kind.index for kind in kinds}, []
    for rank, kind in zip(ranks, kinds, strict=True):
        gpus.append(rank if kind.gpu is None else kind.gpu)
    equal = len({kind.patch for kind in kinds}) == len({mixture.host(rank) for rank in ranks}) == 1
    if others or not index or not equal or len(set(gpus)) < len(gpus) or not mixture.launcher:
        return "", False
    key = str(tuple(sorted(gpus)))
    if any(kind.plain for kind in kinds):
        return "", False
    file = spec.indices[index].files.get(key)
    tuned = key in spec.indices[index].tuned and not any(kind.untuned for kind in kinds)
    return Path(file).read_text() if file else "", tuned


def complaints(spec, mixture, given):
    """Yield what ranks of a communicator are given unlike, or other than they should be."""
    for number, (ranks, by_rank) in enumerate(zip(mixture.communicators, given, strict=True)):
        where = f"mixture {mixture.seed}, communicator {number} over {ranks}"
        right = right_answer(spec, mixture, ranks)
        for rank in ranks:
            if (by_rank[rank].graph, by_rank[rank].tuned) != right:
                got = by_rank[rank].graph[:300] or "default NCCL"
                yield f"{where}: rank {rank} got {got}, table {by_rank[rank].tuned}, not {right}"
        for name in VARIABLES:
            values = {by_rank[rank].variables[name] for rank in ranks}
            if len(values) > 1:
                yield f"{where}: {name} is {values}"
            if values != {None} and name not in mixture.launcher and not by_rank[ranks[0]].graph:
                yield f"{where}: {name} is {values} without the plan"


def main():
    spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Spec)
    planned = tuned = tables = 0
    for mixture in spec.mixtures:
        given = play(spec, mixture)
        for line in complaints(spec, mixture, given):
            print(line)
        first = [next(iter(by_rank.values())) for by_rank in given]
        planned += sum(bool(one.graph) for one in first)
        tuned += sum(one.variables["NCCL_BUFFSIZE"] is not None for one in first)
        tables += sum(one.tuned for one in first)
    counts = f"{planned} graph files, {tuned} buffer sizes, {tables} tables"
    print(f"{len(spec.mixtures)} mixtures, {counts}")


if __name__ == "__main__":
    main()
