"""Search of the fork's database: a ring, and chains between NICs, for each set of GPUs of a node.

A chain is a ring through the world outside, so both are found alike. Each hop takes the fastest of
its mechanisms, because the fork's runtime moves each hop as its file says.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import msgspec

from tccl_py.errors import InputError, MeasurementError, SearchError, require
from tccl_py.model.machine import Knowledge, Machine, Nic, parse_gpus
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.rings import (
    Hop,
    HopSpace,
    Options,
    Ring,
    bounce,
    direct_read,
    direct_write,
    entering,
    leaving,
    ring,
    ring_set,
)
from tccl_py.model.symmetry import (
    Symmetry,
    automorphisms,
    images_of_gpus,
    keeping,
    natural_cuts,
    onto,
    relabelled_hop,
)
from tccl_py.model.transfer import Fifo, Flow, Place
from tccl_py.nccl.network import WORLD, chain_space
from tccl_py.nccl.settings import pinned_level
from tccl_py.nccl.transport import blocks_of_ring
from tccl_py.nccl.versions import Level
from tccl_py.nccl.view import direct_pairs
from tccl_py.plan.directory import class_view
from tccl_py.plan.parts import PlanChain
from tccl_py.plan.plan import Plan
from tccl_py.plan.tasks import Order, measured_well
from tccl_py.search.problem import Budget, Reporter, SearchProblem
from tccl_py.search.strategies import AGREEMENT, find_rings
from tccl_py.sources.remembering import RememberingSource, remembering

MOST_CHANNELS = 15  # Besides NCCL's own: the fork has 32 less one for both
DEFAULT_MAX_SETS = 10_000
LARGEST_INDEX = 21  # Of a GPU: the fork's table has 32-bit numbers
ALL_SETS_UP_TO = 8  # 8 GPUs have 247 sets of two or more; above only requested sets
LEAST_IDLE = 10  # Sets without a better ring that any search may measure before it gives up
LARGE, SMALL = (2000, 100), (1000, 50)  # Sets of a search, and sets without a better ring


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The best ring, or chain as a ring; rates in GB/s, `bound_gbps` None where unknown."""

    ring: Ring
    rate_gbps: float
    bound_gbps: float | None

    @property
    def landings(self) -> tuple[Place, Place]:
        """Return the memory that the NIC fills for a chain, and the memory that the NIC empties."""
        into, out = self.ring.hops[0], self.ring.hops[-1]
        return _landing(into.flow, into.target), _landing(out.flow, out.source)


class DatabaseTask(msgspec.Struct, frozen=True, kw_only=True):
    """Input of a database: a node, its GPUs, and limits of the search.

    `subsets` are the sets of GPUs that jobs use, None being all subsets, as far as those are few.
    Each hop is moved by `blocks` thread blocks through FIFOs of `fifo_bytes`. `rings` are known
    rings, by any blocks. After `max_sets` measured sets only known rings are tried. `p2p_level` is
    pinned.
    """

    machine: Machine
    knowledge: Knowledge
    source: RememberingSource
    gpus: Order
    subsets: tuple[Order, ...] | None
    blocks: int
    fifo_bytes: int
    max_sets: int
    rings: tuple[Ring, ...] = ()
    reporter: Reporter | None = None
    p2p_level: Level | None = None

    @property
    def options(self) -> Options:
        """Blocks and FIFO of every flow."""
        return {"blocks": self.blocks, "fifo": Fifo(bytes=self.fifo_bytes)}

    def hop_space(self, gpus: Sequence[int]) -> HopSpace:
        """Return direct writes and reads of the pairs that may, and all bounces, between GPUs."""
        machine, knowledge, order = self.machine, self.knowledge, tuple(sorted(gpus))
        direct = direct_pairs(machine, knowledge, self.p2p_level, gpus=self.gpus)

        def flows(source: int, target: int) -> Iterator[Flow]:
            if direct is None or (source, target) in direct:
                if knowledge.can_access(machine, source, target):
                    yield direct_write(source, target, **self.options)
                if knowledge.can_access(machine, target, source):
                    yield direct_read(source, target, **self.options)
            for node in machine.numa_nodes:
                yield bounce(source, target, node.index, **self.options)

        hops = {
            pair: tuple(Hop(*pair, flow) for flow in flows(*pair))
            for pair in itertools.permutations(order, 2)
        }
        return HopSpace(name="tccl", gpus=order, hops=hops)

    def sets_of_gpus(self, *, least: int) -> tuple[Order, ...]:
        """Return the sets of `least` GPUs or more to search, largest first."""
        if self.subsets is None and len(self.gpus) <= ALL_SETS_UP_TO:
            sizes = range(len(self.gpus), least - 1, -1)
            return tuple(one for size in sizes for one in itertools.combinations(self.gpus, size))
        named = {tuple(sorted(subset)) for subset in (self.gpus, *(self.subsets or ()))}
        wanted = [gpus for gpus in named if len(gpus) >= least]
        return tuple(sorted(wanted, key=lambda gpus: (-len(gpus), gpus)))


def throughs(task: DatabaseTask, nic: Nic, gpu: int) -> list[int | None]:
    """Return the NUMA nodes through which a GPU can use a NIC; first None if it can directly."""
    direct: list[int | None] = [None] if nic.gdr and task.machine.gpu(gpu).gdr else []
    return direct + [node.index for node in task.machine.numa_nodes]


def gpu_sets(text: str | None) -> tuple[tuple[int, ...], ...] | None:
    """Parse sets of GPUs, as `0-3 4-7 0,4`; None stays None."""
    if text is None:
        return None
    lists = text.split()
    require(lists, "`subsets`", "names no set of GPUs", "write lists, as '0-3 4-7 0,4'")
    return tuple(tuple(sorted(parse_gpus(part, "`subsets`"))) for part in lists)


def check_plan_for_fork(plan: Plan, *, where: str = "plan") -> None:
    """Refuse a plan that one database cannot serve."""
    what = f"has hosts of {len(plan.cluster.classes)} classes"
    right = "the fork has one database for all nodes: plan hosts of one class"
    require(len(plan.cluster.classes) <= 1, where, what, right)


def task_of(
    plan: Plan,
    source: BandwidthSource,
    subsets: tuple[Order, ...] | None,
    max_sets: int,
    reporter: Reporter | None,
) -> DatabaseTask:
    """Return the task of a plan's database; InputError as `make_database`."""
    check_plan_for_fork(plan)
    (node,), (gpus,) = plan.cluster.classes, plan.class_gpus
    if max(gpus) > LARGEST_INDEX:
        why = "it makes a table of all sets of GPUs and counts its cells in 32 bits"
        raise InputError(
            f"GPU {max(gpus)}", "is too high an index for the fork", f"0 to {LARGEST_INDEX}: {why}"
        )
    known = ", ".join(map(str, gpus))
    for gpu in (gpu for subset in subsets or () for gpu in subset):
        require(gpu in gpus, f"GPU {gpu}", "is not in the plan", f"it has {known}")
    return DatabaseTask(
        machine=node.machine,
        knowledge=node.knowledge,
        source=remembering(source),
        gpus=gpus,
        subsets=subsets,
        blocks=min(plan_channels(plan), MOST_CHANNELS),
        fifo_bytes=plan.settings.buffsize,
        max_sets=max_sets,
        rings=() if plan.is_cluster else tuple(map(ring_of, plan.rings)),
        reporter=reporter,
        p2p_level=pinned_level(plan.pinned_env),
    )


def ring_of(chain: PlanChain) -> Ring:
    """Return a plan's ring, or chain closed through the world."""
    return Ring(tuple(Hop(*hop.ends, hop.flow) for hop in chain.hops))


def plan_channels(plan: Plan) -> int:
    """Return the number of channels that NCCL has under the plan's settings."""
    return blocks_of_ring(class_view(plan, 0, plan.settings), 1)


class DatabaseSearch:
    """Search rings and chains; symmetric results are measured before they are used.

    The fork takes all nodes for equal, so each set of GPUs needs the best of its chains only.
    """

    def __init__(self, task: DatabaseTask) -> None:
        self.rings: dict[Order, Found] = {}
        self.chains: dict[Order, Found] = {}
        self.missing_rings: dict[Order, str] = {}
        self.missing_chains: dict[Order, str] = {}
        self.task = task
        self._symmetry = automorphisms(task.machine, task.knowledge)

    def find_rings(self) -> None:
        """Find a ring over each set of GPUs; interrupts go on: half a database fails jobs."""
        task = self.task

        def search(gpus: Order) -> Found:
            whole = self.rings.get(task.gpus)
            rings = [*task.rings, *([whole.ring] if whole else [])]
            # A plan's ring stands if no ring is faster by more than the search's tolerance.
            planned = [one for one in task.rings if sorted(one.gpus) == sorted(gpus)]
            orders = dict.fromkeys(tuple(gpu for gpu in one.gpus if gpu in gpus) for one in rings)
            space, limits = task.hop_space(gpus), LARGE if gpus == task.gpus else SMALL
            return self._searched(gpus, space, self._symmetry, [*planned, *orders], limits)

        sets = task.sets_of_gpus(least=2)
        self._find_all(sets, search, self._symmetry, self.rings, self.missing_rings)

    def find_chains(self, nic: Nic) -> None:
        """Find the best chain by a NIC over each set of GPUs."""
        task, symmetry = self.task, fixing(self._symmetry, [nic.id])

        def search(gpus: Order) -> Found:
            space = self._chain_space(gpus, nic)
            if len(gpus) == 1:
                return self._over_one(gpus[0], space)
            whole = self.chains.get(task.gpus)
            known = [tuple(gpu for gpu in whole.ring.gpus if gpu in gpus)] if whole else []
            orders = [(WORLD, *order) for order in (*known, gpus)]
            return self._searched(gpus, space, symmetry, orders, LARGE)

        self._find_all(
            task.sets_of_gpus(least=1), search, symmetry, self.chains, self.missing_chains
        )

    def _find_all(
        self,
        sets: Sequence[Order],
        search: Callable[[Order], Found],
        symmetry: Symmetry,
        found: dict[Order, Found],
        missing: dict[Order, str],
    ) -> None:
        known: dict[Order, Found] = {}
        for gpus in sets:
            try:
                result = self._confirmed(known[gpus]) if gpus in known else None
                if result is None:
                    result = search(gpus)
                    for image, names in images_of_gpus(symmetry, gpus).items():
                        there = ring([relabelled_hop(hop, names) for hop in result.ring.hops])
                        known.setdefault(image, msgspec.structs.replace(result, ring=there))
                found[gpus] = result
            except (SearchError, MeasurementError) as error:
                missing[gpus] = str(error)

    def _confirmed(self, image: Found) -> Found | None:
        """Return a symmetric result with its own rate; None if that is another."""
        measured = measured_well(self.task.source, ring_set([image.ring]))
        allowed = AGREEMENT + 6 * measured.relative_error
        if abs(measured.rate_gbps - image.rate_gbps) > allowed * image.rate_gbps:
            return None
        return msgspec.structs.replace(image, rate_gbps=measured.rate_gbps)

    def _searched(
        self,
        gpus: Order,
        space: HopSpace,
        symmetry: Symmetry,
        known: Sequence[Ring | Order],
        limits: tuple[int, int],
    ) -> Found:
        """Search with the sets that are left; without any, only known rings are rated."""
        task, (sets, idle) = self.task, limits
        left = max(0, task.max_sets - task.source.sets_measured)
        # The fewer sets are left, the sooner a search gives up: later searches need some.
        idle = max(LEAST_IDLE, int(idle * left / task.max_sets))
        problem = SearchProblem(
            spaces={1: space},
            source=task.source,
            symmetry=fixing(symmetry, [f"G{gpu}" for gpu in gpus]),
            known=tuple((one,) for one in known),
            cuts=natural_cuts(task.machine, task.knowledge, gpus=gpus),
            budget=Budget(sets=min(sets, left), idle_sets=idle) if left else Budget(),
        )
        strategy = "best-first" if left else "nccl-order"
        result = find_rings(problem, strategy=strategy, reporter=task.reporter)
        if result.cancelled:
            raise KeyboardInterrupt
        rate = measured_well(task.source, result.rings).rate_gbps
        return Found(ring=result.rings.rings[0], rate_gbps=rate, bound_gbps=result.bound_gbps)

    def _over_one(self, gpu: int, space: HopSpace) -> Found:
        found = []
        for into, out in itertools.product(space.between(WORLD, gpu), space.between(gpu, WORLD)):
            # The fork sets up a GPU by the transfers that name the GPU: one is needed.
            if into.flow.transfers[1:] or out.flow.transfers[1:]:
                closed = Ring((into, out))
                rate = measured_well(self.task.source, ring_set([closed])).rate_gbps
                found.append(Found(ring=closed, rate_gbps=rate, bound_gbps=rate))
        if not found:
            raise SearchError(f"GPU {gpu}: no chain has a transfer to set it up by")
        return max(found, key=lambda chain: chain.rate_gbps)

    def _chain_space(self, gpus: Order, nic: Nic) -> HopSpace:
        task, how = self.task, self.task.options
        ends = [(gpu, through) for gpu in gpus for through in throughs(task, nic, gpu)]
        return chain_space(
            task.hop_space(gpus),
            [(gpu, entering(nic.index, gpu, through=node, **how)) for gpu, node in ends],
            [(gpu, leaving(gpu, nic.index, through=node, **how)) for gpu, node in ends],
        )


def fixing(symmetry: Symmetry, points: Sequence[str]) -> Symmetry:
    """Return the listed elements that map a set of points onto itself."""
    return keeping(symmetry, onto(symmetry, points, points))


def _landing(flow: Flow, gpu: int) -> Place:
    return next((place for place in flow.places if place.kind == "C"), Place("G", gpu))
