"""Search of the fork's database: a ring, and chains between NICs, for each set of GPUs of a node.

A chain is a ring through the world outside, so both are found alike. Each hop takes the fastest of
its mechanisms, because the fork's runtime moves each hop as its file says.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from tccl_py.errors import MeasurementError, SearchError
from tccl_py.model.machine import Knowledge, Machine, Nic
from tccl_py.model.paths import natural_cuts
from tccl_py.model.rings import Hop, HopSpace, Ring, ring, ring_set
from tccl_py.model.symmetry import Symmetry, automorphisms, keeping, relabelled_hop
from tccl_py.model.transfer import Fifo, Flow, bounce, direct_read, direct_write, entering, leaving
from tccl_py.nccl.versions import Level
from tccl_py.nccl.view import direct_pairs
from tccl_py.plan.tasks import Order, measured_well
from tccl_py.search.chains import WORLD, Chain, chain_of, chain_space, entry, leave, ring_of
from tccl_py.search.problem import Budget, Reporter, SearchProblem
from tccl_py.search.strategies import AGREEMENT, find_rings
from tccl_py.sources.memory import RememberingSource

ALL_SETS_UP_TO = 8  # 8 GPUs have 247 sets of two or more; above only requested sets
LEAST_IDLE = 10  # Sets without a better ring that any search may measure before it gives up
LARGE_BUDGET, SMALL_BUDGET = Budget(sets=2000, idle_sets=100), Budget(sets=1000, idle_sets=50)
WORTH = 1.01  # A known ring gives way to a ring that is faster by more than this factor


class Landing(msgspec.Struct, frozen=True, order=True):
    """Memory that a NIC fills or empties: a GPU's, or a NUMA node's."""

    in_gpu: bool
    index: int

    @property
    def point(self) -> str:
        """The device's name in symmetries."""
        return f"{'G' if self.in_gpu else 'C'}{self.index}"


class Ends(msgspec.Struct, frozen=True, order=True):
    """A set of GPUs, and the memory where bytes may come in and go out; a ring has neither."""

    gpus: Order
    entries: tuple[Landing, ...] = ()
    exits: tuple[Landing, ...] = ()

    @property
    def points(self) -> tuple[list[str], list[str], list[str]]:
        """The devices of the three parts, as symmetries name them."""
        far = ([place.point for place in places] for places in (self.entries, self.exits))
        return [f"G{gpu}" for gpu in self.gpus], *far  # type: ignore[return-value]


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The best ring, or chain as a ring; rates in GB/s, `bound_gbps` None where unknown."""

    ring: Ring
    rate_gbps: float
    bound_gbps: float | None

    @property
    def chain(self) -> Chain:
        """Return the chain, of a ring through the world."""
        return chain_of(self.ring)

    @property
    def ends(self) -> Ends:
        """Return the set of GPUs of a chain, and the memory where it begins and ends."""
        into, out = self.chain.entry, self.chain.exit
        landed = (_landing(into.flow, into.target), _landing(out.flow, out.source))
        return Ends(tuple(sorted(self.chain.gpus)), landed[:1], landed[1:])


class DatabaseTask(msgspec.Struct, frozen=True, kw_only=True):
    """Input of a database: a node, its GPUs, and limits of the search.

    `subsets` are the sets of GPUs that jobs use, None being all subsets, as far as those are few.
    Each hop is moved by `blocks` thread blocks through FIFOs of `fifo_bytes`. `rings` are known
    rings. After `max_sets` measured sets only known rings are tried. `p2p_level` is pinned.
    """

    machine: Machine
    knowledge: Knowledge
    source: RememberingSource
    gpus: Order
    subsets: tuple[Order, ...] | None
    blocks: int
    fifo_bytes: int
    rings: tuple[Ring, ...]
    max_sets: int
    reporter: Reporter
    p2p_level: Level | None = None

    def hop_space(self, gpus: Sequence[int]) -> HopSpace:
        """Return the hops between some of the GPUs."""
        return free_hop_space(
            self.machine,
            self.knowledge,
            gpus=gpus,
            blocks=self.blocks,
            fifo_bytes=self.fifo_bytes,
            direct=direct_pairs(self.machine, self.knowledge, self.p2p_level, gpus=self.gpus),
        )

    def sets_of_gpus(self, *, least: int) -> tuple[Order, ...]:
        """Return the sets of `least` GPUs or more to search, largest first."""
        if self.subsets is None and len(self.gpus) <= ALL_SETS_UP_TO:
            sizes = range(len(self.gpus), least - 1, -1)
            return tuple(one for size in sizes for one in itertools.combinations(self.gpus, size))
        named = {tuple(sorted(subset)) for subset in (self.gpus, *(self.subsets or ()))}
        wanted = [gpus for gpus in named if len(gpus) >= least]
        return tuple(sorted(wanted, key=lambda gpus: (-len(gpus), gpus)))


def free_hop_space(
    machine: Machine,
    knowledge: Knowledge,
    *,
    gpus: Sequence[int] | None = None,
    blocks: int | None = None,
    fifo_bytes: int | None = None,
    direct: frozenset[tuple[int, int]] | None = None,
) -> HopSpace:
    """Return direct writes and reads of `direct` pairs (None: all possible), and all bounces."""
    order = tuple(sorted(machine.gpu(gpu).index for gpu in gpus or machine.gpu_indices))
    fifo = Fifo() if fifo_bytes is None else Fifo(bytes=fifo_bytes)

    def flows(source: int, target: int) -> Iterator[Flow]:
        if direct is None or (source, target) in direct:
            if knowledge.can_access(machine, source, target):
                yield direct_write(source, target, blocks=blocks, fifo=fifo)
            if knowledge.can_access(machine, target, source):
                yield direct_read(source, target, blocks=blocks, fifo=fifo)
        for node in machine.numa_nodes:
            yield bounce(source, target, node.index, blocks=blocks, fifo=fifo)

    hops = {
        pair: tuple(Hop(*pair, flow) for flow in flows(*pair))
        for pair in itertools.permutations(order, 2)
    }
    return HopSpace(name="tccl", gpus=order, hops=hops)


def landings(task: DatabaseTask, nic: Nic, gpus: Sequence[int]) -> tuple[Landing, ...]:
    """Return where a NIC can put bytes for some GPUs: GPU memory if both can, and host memory."""
    direct = [Landing(True, gpu) for gpu in gpus if nic.gdr and task.machine.gpu(gpu).gdr]
    return (*direct, *(Landing(False, node.index) for node in task.machine.numa_nodes))


def all_ends(task: DatabaseTask, nic: Nic, gpus: Order) -> Iterator[Ends]:
    """Yield the pairs of landings that a chain over these GPUs can have and the fork can set up."""
    for lands, leaves in itertools.product(landings(task, nic, gpus), repeat=2):
        # Over one GPU such a chain would have no transfer; over more it would visit a GPU twice.
        if not (lands.in_gpu and lands == leaves):
            yield Ends(gpus, (lands,), (leaves,))


class DatabaseSearch:
    """Search rings, and chains by `nic`; symmetric results are measured before they are used."""

    def __init__(self, task: DatabaseTask, nic: Nic | None = None) -> None:
        self.rings: dict[Order, Found] = {}
        self.best: dict[Order, Found] = {}
        self.between: dict[Ends, Found] = {}
        self.missing_rings: dict[Order, str] = {}
        self.missing_chains: dict[Order, str] = {}
        self._task, self._nic = task, nic
        self._inside = self._through = automorphisms(task.machine, task.knowledge)
        if nic is not None:
            self._through = fixing(self._inside, [f"N{nic.index}"])
        self._images: dict[Ends, Found] = {}

    @property
    def listed(self) -> dict[Ends, Found]:
        """Return the chains between all landings if searched, else the best of each set."""
        return self.between or {found.ends: found for found in self.best.values()}

    def find_rings(self) -> None:
        """Find a ring over each set of GPUs; interrupts go on: half a database fails jobs."""
        for gpus in self._task.sets_of_gpus(least=2):
            try:
                self.rings[gpus] = self._find(Ends(gpus))
            except (SearchError, MeasurementError) as error:
                self.missing_rings[gpus] = str(error)

    def find_chains(self, nic: Nic, *, every_landing: bool) -> None:
        """Find the best chain of each set of GPUs, and one for each pair of landings if wanted."""
        for gpus in self._task.sets_of_gpus(least=1):
            places = tuple(sorted(landings(self._task, nic, gpus)))
            try:
                self.best[gpus] = self._find(Ends(gpus, places, places))
            except (SearchError, MeasurementError) as error:
                self.missing_chains[gpus] = str(error)
                continue
            for ends in all_ends(self._task, nic, gpus) if every_landing else ():
                try:
                    known = self.best[gpus]
                    self.between[ends] = known if known.ends == ends else self._find(ends)
                except (SearchError, MeasurementError):
                    continue

    def _find(self, ends: Ends) -> Found:
        image = self._images.get(ends)
        if image is not None:
            # 1. A symmetric result counts if its own measurement agrees.
            measured = measured_well(self._task.source, ring_set([image.ring]))
            allowed = AGREEMENT + 6 * measured.relative_error
            if abs(measured.rate_gbps - image.rate_gbps) <= allowed * image.rate_gbps:
                return msgspec.structs.replace(image, rate_gbps=measured.rate_gbps)
        # 2. Search, and keep the result for all images of these ends.
        symmetry = self._through if ends.entries else self._inside
        found = self._over_one(ends) if len(ends.gpus) == 1 else self._searched(ends, symmetry)
        for there, ring_there in images(ends, found.ring, symmetry):
            self._images.setdefault(there, msgspec.structs.replace(found, ring=ring_there))
        return found

    def _searched(self, ends: Ends, symmetry: Symmetry) -> Found:
        task = self._task
        for points in ends.points:
            symmetry = fixing(symmetry, sorted(points))
        large = ends.gpus == task.gpus if not ends.entries else len(ends.entries) > 1
        problem = SearchProblem(
            spaces={1: self._space(ends)},
            source=task.source,
            symmetry=symmetry,
            orders=self._known_orders(ends),
            cuts=natural_cuts(task.machine, task.knowledge, gpus=ends.gpus),
            budget=LARGE_BUDGET if large else SMALL_BUDGET,
        )
        result = self._limited(problem)
        (best,) = result.rings.rings
        rate = measured_well(task.source, result.rings).rate_gbps
        for known in task.rings:
            if not ends.entries and tuple(sorted(known.gpus)) == ends.gpus:
                other = measured_well(task.source, ring_set([known])).rate_gbps
                if other * WORTH >= rate:
                    best, rate = known, other
        return Found(ring=best, rate_gbps=rate, bound_gbps=result.bound_gbps)

    def _limited(self, problem: SearchProblem):  # type: ignore[no-untyped-def]
        """Search with the sets that are left; without any, only known orders are rated."""
        task = self._task
        left = task.max_sets - task.source.sets_measured
        if left <= 0:
            problem = msgspec.structs.replace(problem, budget=Budget())
            result = find_rings(problem, strategy="nccl-order", reporter=task.reporter)
        else:
            # The fewer sets are left, the sooner a search gives up: later searches need some.
            idle = int((problem.budget.idle_sets or 0) * left / task.max_sets)
            sets = min(problem.budget.sets or left, left)
            budget = Budget(sets=sets, idle_sets=max(LEAST_IDLE, idle))
            problem = msgspec.structs.replace(problem, budget=budget)
            result = find_rings(problem, reporter=task.reporter)
        if result.cancelled:
            raise KeyboardInterrupt
        return result

    def _over_one(self, ends: Ends) -> Found:
        (gpu,), space = ends.gpus, self._space(ends)
        found = []
        for into, out in itertools.product(space.between(WORLD, gpu), space.between(gpu, WORLD)):
            # The fork sets up a GPU by the transfers that name the GPU: one is needed.
            if into.flow.transfers[1:] or out.flow.transfers[1:]:
                closed = ring_of(Chain(into, (), out))
                rate = measured_well(self._task.source, ring_set([closed])).rate_gbps
                found.append(Found(ring=closed, rate_gbps=rate, bound_gbps=rate))
        if not found:
            raise SearchError(f"GPU {gpu}: no chain has a transfer to set it up by")
        return max(found, key=lambda chain: chain.rate_gbps)

    def _space(self, ends: Ends) -> HopSpace:
        inside, nic = self._task.hop_space(ends.gpus), self._nic
        if nic is None or not ends.entries:
            return inside
        more = {"blocks": self._task.blocks, "fifo": Fifo(bytes=self._task.fifo_bytes)}
        entries = [(gpu, node) for gpu in ends.gpus for node in _ways(gpu, ends.entries)]
        exits = [(gpu, node) for gpu in ends.gpus for node in _ways(gpu, ends.exits)]
        return chain_space(
            inside,
            [entry(g, entering(nic.index, g, through=n, **more)) for g, n in entries],  # type: ignore[arg-type]
            [leave(g, leaving(g, nic.index, through=n, **more)) for g, n in exits],  # type: ignore[arg-type]
        )

    def _known_orders(self, ends: Ends) -> tuple[tuple[Order, ...], ...]:
        """Return known orders over more GPUs, without the GPUs that are missing here."""
        task, gpus = self._task, ends.gpus
        if ends.entries:
            found = self.best.get(gpus) or self.best.get(task.gpus)
            orders = [tuple(gpu for gpu in found.chain.gpus if gpu in gpus)] if found else []
            return tuple(((WORLD, *order),) for order in (*orders, gpus))
        whole = self.rings.get(task.gpus)
        rings = [*task.rings, *([whole.ring] if whole else [])]
        orders = [tuple(gpu for gpu in known.gpus if gpu in gpus) for known in rings]
        return tuple((order,) for order in dict.fromkeys(orders) if len(order) == len(gpus))


def fixing(symmetry: Symmetry, points: Sequence[str]) -> Symmetry:
    """Return the listed elements that map a set of points onto itself."""
    columns = [symmetry.points.index(point) for point in points]
    moved = np.sort(symmetry.elements[:, columns], axis=1)
    return keeping(symmetry, (moved == np.sort(columns)).all(axis=1))


def images(ends: Ends, found: Ring, symmetry: Symmetry) -> Iterator[tuple[Ends, Ring]]:
    """Yield the images of a ring or chain, one for each image of its ends."""
    at = {point: column for column, point in enumerate(symmetry.points)}
    columns = [[at[point] for point in points] for points in ends.points]
    moved = [np.sort(symmetry.elements[:, part], axis=1) for part in columns if part]
    _, rows = np.unique(np.concatenate(moved, axis=1), axis=0, return_index=True)
    for row in symmetry.elements[rows].tolist():
        names = {point: symmetry.points[to] for point, to in zip(symmetry.points, row, strict=True)}
        gpus = tuple(sorted(int(names[point][1:]) for point in ends.points[0]))
        far = [
            tuple(sorted(Landing(place.in_gpu, int(names[place.point][1:])) for place in places))
            for places in (ends.entries, ends.exits)
        ]
        yield Ends(gpus, *far), ring([relabelled_hop(hop, names) for hop in found.hops])


def _landing(flow: Flow, gpu: int) -> Landing:
    hosts = [place.index for place in flow.places if place.kind == "C"]
    return Landing(False, hosts[0]) if hosts else Landing(True, gpu)


def _ways(gpu: int, places: Sequence[Landing]) -> list[int | None]:
    direct: list[int | None] = [None] if Landing(True, gpu) in places else []
    return direct + [place.index for place in places if not place.in_gpu]
