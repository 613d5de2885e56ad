"""Chains over every set of GPUs of one node, between all places where bytes come in and go out.

The flows over the network run in every measured set. What a chain gets depends on where bytes land
on this node, not on where they leave the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from tccl_py.chains.space import WORLD, Chain, chain_of, chain_space, entry, leave, ring_of
from tccl_py.errors import MeasurementError, SearchError
from tccl_py.plan.database_search import DatabaseTask, agrees, fixing
from tccl_py.plan.tasks import Order, measured_well
from tccl_py.search.problem import Budget, SearchProblem
from tccl_py.topology.cuts import natural_cuts
from tccl_py.topology.machine import Nic
from tccl_py.topology.symmetry import Symmetry, automorphisms
from tccl_py.transfers.canonical import relabelled_hop
from tccl_py.transfers.hops import HopSpace, ring_set
from tccl_py.transfers.transfer import Fifo, Flow, entering, leaving

BEST_BUDGET = Budget(sets=2000, idle_sets=100)
"""For the best chain of one set of GPUs, wherever it begins and ends."""
LANDING_BUDGET = Budget(sets=1000, idle_sets=60)
"""For each place to begin and to end."""


class Landing(msgspec.Struct, frozen=True, order=True):
    """Memory that a NIC fills or empties: a GPU's, or a NUMA node's for a kernel to go on from."""

    in_gpu: bool
    index: int

    @property
    def point(self) -> str:
        """The device, as symmetries name it."""
        return f"{'G' if self.in_gpu else 'C'}{self.index}"


class Ends(msgspec.Struct, frozen=True, order=True):
    """The GPUs of a chain, and where bytes come in and go out."""

    gpus: Order
    entry: Landing
    exit: Landing


class SearchedChain(msgspec.Struct, frozen=True, kw_only=True):
    """The best chain found between two landings; no other exceeds `bound_gbps` (None: unknown)."""

    chain: Chain
    rate_gbps: float
    bound_gbps: float | None

    @property
    def ends(self) -> Ends:
        """What it joins."""
        entry, way_out = self.chain.entry, self.chain.exit
        return Ends(
            tuple(sorted(self.chain.gpus)),
            _landing(entry.flow, entry.target),
            _landing(way_out.flow, way_out.source),
        )


class SearchedChains(msgspec.Struct, frozen=True, kw_only=True):
    """The best chain of each set of GPUs, those between given landings, and sets without, why."""

    best: Mapping[Order, SearchedChain]
    between: Mapping[Ends, SearchedChain]
    missing: Mapping[Order, str]

    @property
    def listed(self) -> Mapping[Ends, SearchedChain]:
        """Those between all landings if they were searched, else the best."""
        return self.between or {one.ends: one for one in self.best.values()}


def _landing(flow: Flow, gpu: int) -> Landing:
    hosts = [p.index for t in flow.transfers for p in (t.source, t.destination) if p.kind == "C"]
    return Landing(False, hosts[0]) if hosts else Landing(True, gpu)


def landings(task: DatabaseTask, nic: Nic, gpus: Sequence[int]) -> tuple[Landing, ...]:
    """Where a NIC can put bytes for some GPUs: in their memory, if both can, or in the host's."""
    direct = [Landing(True, gpu) for gpu in gpus if nic.gdr and task.machine.gpu(gpu).gdr]
    return (*direct, *(Landing(False, node.index) for node in task.machine.numa_nodes))


def all_ends(task: DatabaseTask, nic: Nic, gpus: Order) -> Iterator[Ends]:
    """The pairs of landings that a chain over these GPUs can have and the fork can set up."""
    places = landings(task, nic, gpus)
    for lands, leaves in itertools.product(places, repeat=2):
        same_gpu = lands.in_gpu and lands == leaves
        # Over one GPU it would have no transfer, and over more it would visit that one twice.
        if not same_gpu:
            yield Ends(gpus, lands, leaves)


def searched_chains(
    task: DatabaseTask, nic: Nic, wanted: Sequence[Order], *, every_landing: bool
) -> SearchedChains:
    """Find a chain over each wanted set of GPUs; what a symmetry exchanges shares one search.

    Args:
        task: what to search.
        nic: the one that all bytes come and go by.
        wanted: sets of GPUs.
        every_landing: whether to find one for every pair of landings besides the best.

    Raises:
        SourceLostError: the source has no answers any more.
        KeyboardInterrupt: it was interrupted.
    """
    search = _Search(task, nic)
    for gpus in wanted:
        search.find_best(gpus)
        if every_landing and gpus not in search.missing:
            for ends in all_ends(task, nic, gpus):
                search.find_between(ends)
    return SearchedChains(best=search.best, between=search.between, missing=search.missing)


class _Search:
    """The chains found by now, and those that images of these may suit."""

    def __init__(self, task: DatabaseTask, nic: Nic) -> None:
        self.best: dict[Order, SearchedChain] = {}
        self.between: dict[Ends, SearchedChain] = {}
        self.missing: dict[Order, str] = {}
        self._task, self._nic = task, nic
        symmetry = automorphisms(task.machine, task.knowledge)
        self._symmetry = fixing(symmetry, [f"N{nic.index}"])
        self._best_images: dict[Order, SearchedChain] = {}
        self._images: dict[Ends, SearchedChain] = {}

    def find_best(self, gpus: Order) -> None:
        """Find the best chain over these GPUs, or note why there is none."""
        places = landings(self._task, self._nic, gpus)
        try:
            found = self._confirmed(self._best_images.get(gpus))
            if found is None:
                found = self._searched(gpus, places, places, BEST_BUDGET)
                for image in _images(found, self._symmetry):
                    self._best_images.setdefault(image.ends.gpus, image)
        except (SearchError, MeasurementError) as error:
            self.missing[gpus] = str(error)
            return
        self.best[gpus] = found

    def find_between(self, ends: Ends) -> None:
        """Find the best chain between two landings; where there is none, none is listed."""
        best = self.best[ends.gpus]
        if best.ends == ends:
            self.between[ends] = best
            return
        try:
            found = self._confirmed(self._images.get(ends))
            if found is None:
                found = self._searched(ends.gpus, [ends.entry], [ends.exit], LANDING_BUDGET)
                for image in _images(found, self._symmetry):
                    self._images.setdefault(image.ends, image)
        except (SearchError, MeasurementError):
            return
        self.between[ends] = found

    def _confirmed(self, image: SearchedChain | None) -> SearchedChain | None:
        """The image of another chain, if its own measurement agrees with that one's."""
        if image is None:
            return None
        measurement = measured_well(self._task.source, ring_set([ring_of(image.chain)]))
        if not agrees(measurement.rate_gbps, image.rate_gbps, measurement.relative_error):
            return None
        return msgspec.structs.replace(image, rate_gbps=measurement.rate_gbps)

    def _searched(
        self, gpus: Order, entries: Sequence[Landing], exits: Sequence[Landing], budget: Budget
    ) -> SearchedChain:
        task = self._task
        if len(gpus) == 1:
            return self._over_one(gpus[0], entries, exits)
        points = [f"G{gpu}" for gpu in gpus]
        symmetry = fixing(self._symmetry, points)
        for places in (entries, exits):
            symmetry = fixing(symmetry, sorted({place.point for place in places}))
        result = task.found(
            SearchProblem(
                spaces={1: self._space(gpus, entries, exits)},
                source=task.source,
                symmetry=symmetry,
                orders=self._known_orders(gpus),
                cuts=natural_cuts(task.machine, task.knowledge, gpus=gpus),
                budget=budget,
            )
        )
        (best,) = result.rings.rings
        rate = measured_well(task.source, result.rings).rate_gbps
        return SearchedChain(chain=chain_of(best), rate_gbps=rate, bound_gbps=result.bound_gbps)

    def _over_one(
        self, gpu: int, entries: Sequence[Landing], exits: Sequence[Landing]
    ) -> SearchedChain:
        """The best way in and out of one GPU: few enough to measure all."""
        space = self._space((gpu,), entries, exits)
        ways = itertools.product(space.between(WORLD, gpu), space.between(gpu, WORLD))
        chains = [Chain(into, (), out) for into, out in ways]
        found = []
        for chain in chains:
            # The fork sets up a GPU by the transfers that name it: one must.
            if chain.entry.flow.transfers[1:] or chain.exit.flow.transfers[1:]:
                rate = measured_well(self._task.source, ring_set([ring_of(chain)])).rate_gbps
                found.append(SearchedChain(chain=chain, rate_gbps=rate, bound_gbps=rate))
        if not found:
            raise SearchError(f"GPU {gpu}: no chain has a transfer to set it up by")
        return max(found, key=lambda one: one.rate_gbps)

    def _space(self, gpus: Order, entries: Sequence[Landing], exits: Sequence[Landing]) -> HopSpace:
        nic, blocks, fifo = self._nic.index, self._task.blocks, Fifo(bytes=self._task.fifo_bytes)
        return chain_space(
            self._task.hop_space(gpus),
            [
                entry(gpu, entering(nic, gpu, through=node, blocks=blocks, fifo=fifo))
                for gpu in gpus
                for node in _ways(gpu, entries)
            ],
            [
                leave(gpu, leaving(gpu, nic, through=node, blocks=blocks, fifo=fifo))
                for gpu in gpus
                for node in _ways(gpu, exits)
            ],
        )

    def _known_orders(self, gpus: Order) -> tuple[tuple[Order, ...], ...]:
        """Chains over more GPUs, without those that are missing."""
        whole = self.best.get(self._task.gpus)
        known = [self.best[gpus]] if gpus in self.best else [whole] if whole else []
        orders = [(WORLD, *(gpu for gpu in one.chain.gpus if gpu in gpus)) for one in known]
        return (*((one,) for one in orders), ((WORLD, *gpus),))


def _ways(gpu: int, places: Sequence[Landing]) -> list[int | None]:
    """NUMA nodes through which, and None if directly, a GPU is reached by these landings."""
    direct: list[int | None] = [None] if Landing(True, gpu) in places else []
    return direct + [place.index for place in places if not place.in_gpu]


def _images(chain: SearchedChain, symmetry: Symmetry) -> Iterator[SearchedChain]:
    """The images of a chain, one for each set of GPUs and landings."""
    ends = chain.ends
    at = {point: i for i, point in enumerate(symmetry.points)}
    moved = symmetry.elements[:, [at[f"G{gpu}"] for gpu in ends.gpus]]
    far = symmetry.elements[:, [at[ends.entry.point], at[ends.exit.point]]]
    keys = np.concatenate([np.sort(moved, axis=1), far], axis=1)
    _, rows = np.unique(keys, axis=0, return_index=True)
    for row in symmetry.elements[rows].tolist():
        names = {point: symmetry.points[to] for point, to in zip(symmetry.points, row, strict=True)}
        hops = [relabelled_hop(hop, names) for hop in chain.chain.all_hops]
        image = Chain(hops[0], tuple(hops[1:-1]), hops[-1])
        yield msgspec.structs.replace(chain, chain=image)
