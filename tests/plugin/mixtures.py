"""Random mixtures of ranks: with the plugin or not, with other indices, on one host or two.

As a program, plays mixtures with stand-ins for NCCL, a process for each rank, and prints what ranks
of one communicator are given unlike, a line each:

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
from tests.plugin.runs import make_plan

RANKS = 8
VARIABLES = ("NCCL_P2P_LEVEL", "NCCL_BUFFSIZE", "NCCL_MIN_NCHANNELS", "NCCL_ALGO")
HASH_AT = (1 << 20) + 3192


class RankKind(msgspec.Struct, frozen=True):
    """What is special about a rank: `index` names a plan, or is "" without the plugin."""

    index: str = "whole"
    env: dict[str, str] = {}
    readable: bool = True


KINDS = (
    *[RankKind()] * 12,
    RankKind(index=""),
    RankKind(env={"TCCL_DISABLE": "1"}),
    RankKind(index="other"),
    RankKind(index="part"),
    RankKind(index="missing"),
    RankKind(env={"NCCL_CROSS_NIC": "1"}),
    RankKind(readable=False),
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
        host = {"NCCL_HOSTID": f"host{rank * self.hosts // len(self.ranks)}"}
        return self.launcher | host | self.ranks[rank].env


def settings_of(version):
    """Return settings with variables of each kind: for processes, and for communicators."""
    return Settings(version=version, p2p_level="SYS", buffsize=131072, min_channels=4, algo="Ring")


def draw(seed, version="2.28.9"):
    """Return a random mixture: a few special ranks, and at times a launcher without variables."""
    source = random.Random(seed)
    ranks = [RankKind()] * RANKS
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
    """Make the plans of mixtures: of all GPUs, the same with other rings, and of the first four.

    Return their indices by name, also of one that is missing.
    """
    needed, given = plugin_environment(settings_of(version))
    fields = {"needed": needed, "given": given, "forbid": ("NCCL_CROSS_NIC",)}
    four = {gpu: buses[gpu] for gpu in range(4)}
    plans = {
        "whole": make_plan(folder / "whole", buses=buses, sizes=(2, 4, 8), **fields),
        "other": make_plan(folder / "other", buses=buses, sizes=(2, 8), missing=[(0, 1)], **fields),
        "part": make_plan(folder / "part", buses=four, sizes=(2, 4), **fields),
    }
    found = {name: str(plan.index) for name, plan in plans.items()}
    return found | {"missing": "/nowhere/plugin.index"}


# The program.


class Spec(msgspec.Struct):
    """Mixtures to play: indices by name, the plugin, and libcuda and libnvidia-ml as made up."""

    mixtures: list[Mixture]
    indices: dict[str, str]
    plugin: str
    libraries: list[str]
    record: str
    version: str
    asks_no_cache: bool = True


class Given(msgspec.Struct):
    """What a rank is given: the graph file of a communicator, and the variables in force there."""

    graph: str
    variables: dict[str, str | None]


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


class StandIn:
    """NCCL on one rank: asks in the recorded order, and reads variables once per process."""

    def __init__(self, spec, mixture, rank):
        self._kind, self._values = mixture.ranks[rank], {}
        for name in [name for name in os.environ if name.startswith(("NCCL_", "TCCL_"))]:
            del os.environ[name]
        os.environ.update(mixture.env(rank))
        self._get, self._network = os.environ.get, None
        if self._kind.index:
            os.environ["TCCL_INDEX"] = spec.indices[self._kind.index]
            for library in spec.libraries:
                ctypes.CDLL(library, ctypes.RTLD_GLOBAL).fake_use(rank)
            plugin = ctypes.CDLL(spec.plugin)
            environment = Environment.in_dll(plugin, "ncclEnvPlugin_v2")
            environment.init(*map(int, spec.version.split(".")), None, None)
            self._network = _Network.in_dll(plugin, "ncclNetPlugin_v12")
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
        if self._kind.readable:
            head = number.to_bytes(8, "little") + place.to_bytes(4, "little")
            memory[HASH_AT : HASH_AT + 16] = head + count.to_bytes(4, "little")
        graph, waited = "", False
        for name in self._first or self._order:
            if name == "net":
                if self._network is not None:
                    self._network.init(ctypes.addressof(memory), number, None, None, None)
                continue
            if not waited and name in ("NCCL_P2P_DISABLE", "NCCL_TOPO_DUMP_FILE"):
                barrier.wait(60)
                waited = True
            self._values[name] = self._get(name)
            if name == "NCCL_GRAPH_FILE" and self._values[name]:
                graph = Path(self._values[name]).read_text()
        self._first = None
        return Given(graph=graph, variables={name: self._values[name] for name in VARIABLES})


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


def complaints(mixture, given):
    """Yield what ranks of a communicator are given unlike, and variables where no plan applies."""
    for number, (ranks, by_rank) in enumerate(zip(mixture.communicators, given, strict=True)):
        where = f"mixture {mixture.seed}, communicator {number} over {ranks}"
        for name in VARIABLES:
            values = {by_rank[rank].variables[name] for rank in ranks}
            if len(values) > 1:
                yield f"{where}: {name} is {values}"
            if values != {None} and name not in mixture.launcher and not by_rank[ranks[0]].graph:
                yield f"{where}: {name} is {values} without the plan"
        if len({by_rank[rank].graph for rank in ranks}) > 1:
            yield f"{where}: unlike graph files"


def main():
    spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Spec)
    planned = tuned = 0
    for mixture in spec.mixtures:
        given = play(spec, mixture)
        for line in complaints(mixture, given):
            print(line)
        first = [next(iter(by_rank.values())) for by_rank in given]
        planned += sum(bool(one.graph) for one in first)
        tuned += sum(one.variables["NCCL_BUFFSIZE"] is not None for one in first)
    print(f"{len(spec.mixtures)} mixtures, {planned} graph files, {tuned} buffer sizes")


if __name__ == "__main__":
    main()
