"""Chains over every set of GPUs of one node, between all places where bytes come in and go out.

The flows over the network run in every measured set. What a chain gets depends on where bytes land
on this node, not on where they leave the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from tccl_py.errors import MeasurementError, SearchError
from tccl_py.model.knowledge import Knowledge
from tccl_py.model.machine import Machine, Nic
from tccl_py.model.paths import natural_cuts
from tccl_py.model.rings import HopSpace, ring_set
from tccl_py.model.symmetry import Symmetry, automorphisms, relabelled_hop
from tccl_py.model.transfer import Fifo, Flow, entering, leaving
from tccl_py.nccl.settings import Settings, final_channels
from tccl_py.plan.plan import PlanChain
from tccl_py.plan.tasks import Order, measured_well
from tccl_py.search.chains import WORLD, Chain, chain_of, chain_space, entry, leave, ring_of
from tccl_py.search.problem import Budget, SearchProblem
from tccl_py.tccl_fork.rings import ALL_SETS_UP_TO, DatabaseTask, SearchedRings, agrees, fixing

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


# What a database of the TCCL fork's runtime has less than the plan has, or than could be.


MUCH_MEMORY = 1 << 30
"""More than this in every process of a job is worth a word."""
_PROVEN = 1.01
_NAMED = 3
"""Sets of GPUs without a ring or chain that are named."""


class PlannedNode(Protocol):
    """What of a plan a database is made of: that of a machine, or of a cluster's equal nodes."""

    @property
    def machine(self) -> Machine:
        """The node."""

    @property
    def knowledge(self) -> Knowledge:
        """What is known of it."""

    @property
    def gpus(self) -> Order:
        """NVML indices of the GPUs that are planned for."""

    @property
    def settings(self) -> Settings:
        """NCCL's, for channels and FIFOs."""

    @property
    def pinned_env(self) -> Mapping[str, str]:
        """Variables that all jobs have."""

    @property
    def rings(self) -> tuple[PlanChain, ...]:
        """Rings over the GPUs of one node; none in a cluster's plan."""

    @property
    def rate_gbps(self) -> float:
        """What all rings have together."""

    @property
    def provenance(self) -> str:
        """Where rates come from."""


class FoundParts(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked and what was found; `table_bytes` is the fork's memory in each process.

    `no_chains` says why there are none, where that is so.
    """

    plan: PlannedNode
    task: DatabaseTask
    nic: Nic | None
    rings: SearchedRings
    chains: SearchedChains | None
    no_chains: str
    table_bytes: int


def plan_channels(plan: PlannedNode) -> int:
    """Channels that NCCL has under the plan's settings."""
    sm = min((plan.machine.gpu(gpu).sm or 0 for gpu in plan.gpus), default=0)
    return final_channels(plan.settings.channels, sm=sm, version=plan.settings.version)


def database_notes(parts: FoundParts) -> Iterator[str]:
    """Sentences for the user and for whoever reads the file, most important first."""
    plan, task = parts.plan, parts.task
    done = plan.provenance.partition(" ")[0].removesuffix(",")
    yield (
        f"rates {plan.provenance}, {task.source.sets_measured} sets {done} for this file; "
        f"run it with NCCL_ALGO=TCCL,RING NCCL_MIN_NCHANNELS={task.blocks} "
        f"NCCL_MAX_NCHANNELS={task.blocks} NCCL_BUFFSIZE={task.fifo_bytes}"
    )
    yield from _lost_of_the_plan(parts)
    yield from _left_out(parts)
    yield from _network(parts)
    yield from _without("ring", "a job over them fails", parts.rings.missing)
    if parts.chains is not None:
        yield from _without("chain", "a job with such a node fails", parts.chains.missing)
        chains = parts.chains.listed.values()
        yield from _unproven("chains", [(one.rate_gbps, one.bound_gbps) for one in chains])
    rings = parts.rings.rings.values()
    yield from _unproven("rings", [(one.rate_gbps, one.bound_gbps) for one in rings])
    if parts.table_bytes > MUCH_MEMORY:
        size = parts.table_bytes / 2**30
        yield f"the fork's runtime takes {size:.1f} GiB in every process for its table of chains"


def _lost_of_the_plan(parts: FoundParts) -> Iterator[str]:
    plan, whole = parts.plan, parts.rings.rings.get(parts.plan.gpus)
    if whole is None:
        return
    here = f"the ring here has {whole.rate_gbps:.2f}"
    if len(plan.rings) > 1:
        yield (
            f"the plan's {len(plan.rings)} rings together have {plan.rate_gbps:.2f} GB/s, but all "
            f"channels of the fork take one ring: {here}"
        )
    elif parts.task.blocks < plan_channels(plan):
        yield (
            f"the plan's {plan.rate_gbps:.2f} GB/s are those of {plan_channels(plan)} channels, "
            f"but the fork has room for {parts.task.blocks}: {here}"
        )


def _left_out(parts: FoundParts) -> Iterator[str]:
    task, total = parts.task, 2 ** len(parts.task.gpus) - len(parts.task.gpus) - 1
    searched = len(parts.rings.rings) + len(parts.rings.missing)
    if searched < total:
        why = (
            "as asked for"
            if len(task.gpus) <= ALL_SETS_UP_TO
            else f"above {ALL_SETS_UP_TO} GPUs only those that are asked for"
        )
        yield (
            f"{total - searched} of the {total} sets of GPUs that jobs can have are left out, "
            f"{why}: a job over one of them fails"
        )


def _network(parts: FoundParts) -> Iterator[str]:
    nic, chains = parts.nic, parts.chains
    if parts.no_chains:
        yield f"{parts.no_chains}: there are no chains, and a job of several nodes fails"
    elif nic is not None and chains is not None:
        count = len(parts.plan.machine.nics)
        if count > 1:
            yield (
                f"the fork's database knows one NIC a node, not {count}: run it with "
                f"NCCL_IB_HCA={nic.name}"
            )
        landed = [place for ends in chains.listed for place in (ends.entry, ends.exit)]
        if chains.listed and not any(place.in_gpu for place in landed):
            yield f"NIC {nic.name} does not reach GPU memory: all bytes land in host memory"
        if chains.best and not chains.between:
            yield (
                "each set of GPUs has the chain between its best landings only: between nodes that "
                "are alike the fork chooses no other"
            )


def _without(what: str, so: str, missing: Mapping[Order, str]) -> Iterator[str]:
    for gpus, why in list(missing.items())[:_NAMED]:
        yield f"no {what} over GPUs {_listed(gpus)}, and {so}: {why}"
    if len(missing) > _NAMED:
        yield f"no {what} either over {len(missing) - _NAMED} other sets of GPUs"


def _unproven(what: str, rates: Sequence[tuple[float, float | None]]) -> Iterator[str]:
    """What the limits of the search may have cost."""
    shares = [rate / bound for rate, bound in rates if bound is not None]
    low = [share for share in shares if share * _PROVEN * (1 + 1e-9) < 1]
    if low:
        yield (
            f"{len(low)} of {len(rates)} {what} are not proven best; each has at least "
            f"{100 * min(low):.0f} % of what could be"
        )
    if len(shares) < len(rates):
        yield (
            f"of {len(rates) - len(shares)} of {len(rates)} {what} it is not known what could be: "
            "the sets that may be measured were used up"
        )


def _listed(gpus: Iterable[int]) -> str:
    return ", ".join(map(str, gpus))
