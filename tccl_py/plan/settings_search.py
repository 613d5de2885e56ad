"""The search over settings: rings inside each, the best settings win, stock is never undercut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import chain
from math import gcd
from typing import TypeVar

import msgspec

from tccl_py.chains.rules import EvenUse
from tccl_py.errors import MeasurementError, SearchError
from tccl_py.measurements.measurement import BandwidthSource, Measurement
from tccl_py.runtimes.nccl.candidates import candidates
from tccl_py.runtimes.nccl.chain_hops import chain_hop_space
from tccl_py.runtimes.nccl.settings import Settings
from tccl_py.runtimes.nccl.stock import StockChains, StockChoice, stock_default
from tccl_py.runtimes.nccl.transport import hop_space
from tccl_py.runtimes.nccl.versions import version_facts
from tccl_py.search.problem import Budget, Reporter, SearchProblem, SearchResult, SetRule
from tccl_py.search.strategies import find_rings
from tccl_py.topology.cuts import natural_cuts
from tccl_py.topology.knowledge import Knowledge
from tccl_py.topology.machine import Machine
from tccl_py.topology.symmetry import automorphisms
from tccl_py.transfers.hops import (
    HopSpace,
    Ring,
    RingSet,
    nics_of,
    ring_from_order,
    ring_like,
    ring_set,
)
from tccl_py.transfers.transfer import DEFAULT_FIFO_BYTES

Order = tuple[int, ...]
Rings = Sequence[Ring]
"""Rings that may have been found under other settings: their GPUs and NICs count."""

Alike = TypeVar("Alike", bound=Hashable)

BASE_CHANNELS = 8
"""Channels under which mechanisms are compared first; the number is settled afterwards."""
CHANNELS = (1, 2, 4, 8, 16)
SLOW_NETWORK_MBPS, SLOW_NETWORK_CHANNELS = 50_000, 2
"""Below this speed of all NICs together no more channels are tried."""
BUFFSIZES = tuple(DEFAULT_FIFO_BYTES >> shift for shift in range(6))
"""4 MiB, NCCL's default, down to 128 KiB."""
MIN_SETS = 40
"""Sets that the search under any one choice may measure at least."""
WORTH = 0.01
"""Settings farther from NCCL's defaults must promise this much more (relative)."""
CAREFUL = 8
"""Measurements of stock's rings and of the plan's where samples spread."""


class NetworkUse(msgspec.Struct, frozen=True, kw_only=True):
    """That the machine is one of several nodes: its rings are chains, closed through the world.

    `nics` are those to use, by index; `same_nic` has chains leave by the NIC they enter by.
    """

    nodes: int
    nics: tuple[int, ...]
    same_nic: bool = False


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be planned, and by which means.

    `spaces` keeps hop spaces that were made: a search asks for the same ones again and again.
    """

    machine: Machine
    knowledge: Knowledge
    source: BandwidthSource
    gpus: tuple[int, ...]
    version: str
    ring_counts: tuple[int, ...]
    strategy: str
    budget: Budget
    reporter: Reporter
    network: NetworkUse | None = None
    spaces: dict[tuple[object, ...], HopSpace] = msgspec.field(default_factory=dict)


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Settings with the best ring set found under them; `result` is None if none was searched."""

    settings: Settings
    rings: RingSet
    rate_gbps: float
    result: SearchResult | None = None

    @property
    def orders(self) -> tuple[Order, ...]:
        """GPU orders of the rings."""
        return tuple(one.gpus for one in self.rings.rings)


class Stock(msgspec.Struct, frozen=True, kw_only=True):
    """NCCL's own choice and what the source says of it."""

    choice: StockChoice | StockChains
    rings: RingSet
    settings: Settings
    measurement: Measurement

    @property
    def rate_gbps(self) -> float:
        """The score of NCCL's own rings, GB/s."""
        return len(self.rings.rings) * self.measurement.rate_gbps


def condensed(orders: Sequence[Alike]) -> tuple[Alike, ...]:
    """The shortest list of rings with the same shares: equal channels of one ring are one ring.

    >>> condensed([(0, 1), (1, 0), (0, 1), (1, 0)])
    ((0, 1), (1, 0))
    """
    counts = Counter(orders)
    share = gcd(*counts.values())
    return tuple(order for order, count in counts.items() for _ in range(count // share))


def condensed_rings(rings: Rings) -> tuple[Ring, ...]:
    """The same of rings, which are equal if they go over the same GPUs and NICs."""
    routes = {route(one): one for one in rings}
    return tuple(routes[one] for one in condensed([route(one) for one in rings]))


def route(ring: Ring) -> tuple[tuple[object, ...], ...]:
    """What stays of a ring under other settings: its GPUs in order, and the NICs between."""
    return tuple((hop.source, *nics_of(hop)) for hop in ring.hops)


def space_under(task: Task, settings: Settings, count: int) -> HopSpace:
    """The hops open to each ring of a set of `count`, with the network's if there is one."""
    key = (settings, count, task.gpus, task.network)
    if key not in task.spaces:
        task.spaces[key] = _space(task, settings, count)
    return task.spaces[key]


def _space(task: Task, settings: Settings, count: int) -> HopSpace:
    if task.network is None:
        return hop_space(task.machine, task.knowledge, settings, gpus=task.gpus, rings_in_set=count)
    return chain_hop_space(
        task.machine,
        task.knowledge,
        settings,
        nics=task.network.nics,
        gpus=task.gpus,
        chains_in_set=count,
    )


def rules_under(task: Task, counts: Sequence[int]) -> dict[int, SetRule]:
    """What rings of a set must keep to, by the size of the set."""
    network = task.network
    if network is None:
        return {}
    return {one: EvenUse(network.nics, one, same=network.same_nic) for one in counts}


def stock_settings(choice: StockChoice | StockChains) -> Settings:
    """NCCL's own settings as for a graph file: its search's doubling of channels is undone,
    because `hop_space` doubles a file's channels itself.
    """
    return msgspec.structs.replace(choice.settings, channels=max(1, choice.channels // 2))


def measured_stock(task: Task) -> Stock:
    """Measure what NCCL would do by itself.

    Raises:
        MeasurementError: the source cannot measure it.
    """
    choice = stock_default(task.machine, task.knowledge, gpus=task.gpus, version=task.version)
    orders = condensed(choice.rings)
    settings = stock_settings(choice)
    rings = orders_under(task, settings, orders)
    return Stock(
        choice=choice,
        rings=rings,
        settings=settings,
        measurement=measured_well(task.source, rings),
    )


def measured_well(source: BandwidthSource, rings: RingSet) -> Measurement:
    """Measure a ring set; where samples spread, several times, all samples in one measurement.

    A choice among many noisy rates prefers those that were lucky: what a plan says of its rings
    must come from more than the measurement they were chosen by.

    Raises:
        MeasurementError: the source cannot measure it.
    """
    (first,) = source.measure([rings.flows])
    if not first.relative_error:
        return first
    again = source.measure([rings.flows] * CAREFUL)
    rows = zip(*(one.samples_gbps for one in again), strict=True)
    samples = tuple(tuple(chain.from_iterable(row)) for row in rows)
    return msgspec.structs.replace(
        first,
        samples_gbps=samples,
        settled=all(one.settled for one in again),
        outliers=_outliers(again),
    )


def _outliers(measurements: Sequence[Measurement]) -> tuple[int, ...]:
    """The suspect repeats of several measurements, numbered through."""
    found: list[int] = []
    before = 0
    for one in measurements:
        found += [before + repeat for repeat in one.outliers]
        before += len(one.samples_gbps[0])
    return tuple(found)


def rings_under(task: Task, settings: Settings, rings: Rings) -> RingSet:
    """The ring set over the same GPUs and NICs with the mechanisms that the settings give each hop.

    Raises:
        SearchError: a pair of neighbours has no hop.
    """
    space = space_under(task, settings, len(rings))
    return ring_set([ring_like(space, one) for one in rings])


def orders_under(task: Task, settings: Settings, orders: Sequence[Order]) -> RingSet:
    """The ring set of these orders with the first mechanism there is for each hop.

    Raises:
        SearchError: a pair of neighbours has no hop.
    """
    space = space_under(task, settings, len(orders))
    return ring_set([ring_from_order(space, order) for order in orders])


def search_under(
    task: Task,
    settings: Settings,
    *,
    orders: Sequence[Sequence[Order]] = (),
    known: Sequence[Rings] = (),
    floor: float,
    sets: int,
) -> SearchResult:
    """Search for rings under one choice of settings.

    Args:
        task: what to plan.
        settings: the choice; ring counts that do not divide its channels are left out.
        orders: ring sets known beforehand by their GPU orders.
        known: ring sets known from other settings.
        floor: scores up to this, GB/s, are of no interest.
        sets: how many sets may be measured.
    """
    counts = [count for count in task.ring_counts if settings.channels % count == 0]
    problem = SearchProblem(
        spaces={count: space_under(task, settings, count) for count in counts},
        source=task.source,
        symmetry=automorphisms(task.machine, task.knowledge, gpus=task.gpus),
        orders=tuple(tuple(one) for one in orders),
        known=tuple(tuple(one) for one in known),
        rules=rules_under(task, counts),
        cuts=natural_cuts(task.machine, task.knowledge, gpus=task.gpus),
        floor_gbps=floor,
        budget=msgspec.structs.replace(task.budget, sets=sets),
    )
    return find_rings(problem, strategy=task.strategy, reporter=task.reporter)


class SettingsSearch:
    """The search over settings; what it has found so far outlives an interruption.

    `best` is the best choice, `searched` all settings that were searched, `cancelled` says whether
    it was interrupted.
    """

    def __init__(self, task: Task, stock: Stock) -> None:
        self.best = Choice(settings=stock.settings, rings=stock.rings, rate_gbps=stock.rate_gbps)
        self.searched: list[Choice] = []
        self.cancelled = False
        self._task = task
        self._known: list[Rings] = [stock.rings.rings]

    def offer(self, sets: Sequence[Rings]) -> None:
        """Ring sets to be tried under every choice of settings; before `run`."""
        self._known.extend(sets)

    def run(self, *, sets: int) -> None:
        """Find the best settings with their rings; KeyboardInterrupt ends it with the best so far.

        Mechanisms are compared under a fixed number of channels. The one under which the rings
        known so far do best is searched next; each search may spend half of what is left of `sets`
        and gives up as soon as it cannot beat the best so far; what it finds is tried under all the
        others. Channels and FIFO size are settled for the rings that each search finds.
        """
        try:
            left = self._explore(sets)
            if not self.cancelled:
                self._settle(max(left, sets // 2))
        except KeyboardInterrupt:
            self.cancelled = True

    def _explore(self, left: int) -> int:
        """Search under one mechanism after the other; how many sets are left at the end."""
        task, waiting = self._task, list(_mechanisms(self._task))
        while waiting and left > 0 and not self.cancelled:
            settings = max(waiting, key=lambda one: _promise(task, one, self._known))
            waiting.remove(settings)
            share = max(MIN_SETS, left // 2)
            floor = self.best.rate_gbps
            result = _searched(task, settings, self._known, floor=floor, sets=share)
            if result is None:
                continue
            # What the journal answers counts as well: a resumed run goes the same way.
            left -= result.sets_measured + result.sets_remembered
            self.cancelled = result.cancelled
            self._note(_chosen(settings, result))
        return left

    def _note(self, found: Choice) -> None:
        tuned = found if self.cancelled else _tuned(self._task, found)
        self.searched.append(tuned)
        self._known.append(tuned.rings.rings)
        if tuned.rate_gbps > self.best.rate_gbps * (1 + WORTH):
            self.best = tuned

    def _settle(self, sets: int) -> None:
        """The best rings under exactly the chosen settings, with a bound that holds for them."""
        best = self.best
        settings, known = best.settings, [best.rings.rings]
        result = _searched(self._task, settings, known, floor=0.0, sets=sets)
        if result is None:
            return
        self.cancelled = result.cancelled
        if result.rate_gbps > best.rate_gbps * (1 + WORTH):
            self.best = _chosen(settings, result)
        else:
            self.best = msgspec.structs.replace(best, result=result)


def _mechanisms(task: Task) -> tuple[Settings, ...]:
    """Settings that give pairs different mechanisms, the nearest to NCCL's defaults first."""
    kinds = candidates(
        task.machine,
        task.knowledge,
        task.version,
        gpus=task.gpus,
        channels=(_base_channels(task),),
        buffsizes=(DEFAULT_FIFO_BYTES,),
    )
    # NCCL's copies by copy engine go through its proxy threads, slot by slot. Neither a model nor
    # plain copies on hardware predict that: only running NCCL itself could choose them.
    return tuple(
        kind for kind in kinds if not kind.p2p_copy_engine and kind.shm_copy_engine is None
    )


def _promise(task: Task, settings: Settings, known: Sequence[Rings]) -> tuple[float, int]:
    """The best score of the known rings under these settings, roughly; then few bounces."""
    best = 0.0
    bounces = sum(hop.flow.is_bounce for hop in space_under(task, settings, 1))
    for rings in known:
        try:
            (measurement,) = task.source.measure([rings_under(task, settings, rings).flows])
        except (SearchError, MeasurementError):
            continue
        best = max(best, len(rings) * measurement.rate_gbps)
    return float(f"{best:.2g}"), -bounces


def _chosen(settings: Settings, result: SearchResult) -> Choice:
    return Choice(settings=settings, rings=result.rings, rate_gbps=result.rate_gbps, result=result)


def _base_channels(task: Task) -> int:
    return max(one for one in _channel_counts(task) if one <= BASE_CHANNELS)


def _channel_counts(task: Task) -> tuple[int, ...]:
    """Numbers of channels worth trying: many FIFOs in turn for a slow network only wait for it."""
    most = version_facts(task.version).max_channels
    if task.network is not None:
        speeds = [nic.speed_mbps for nic in task.machine.nics if nic.index in task.network.nics]
        if sum(speeds) < SLOW_NETWORK_MBPS:
            most = min(most, SLOW_NETWORK_CHANNELS)
    return tuple(count for count in CHANNELS if count <= most)


def _searched(
    task: Task, settings: Settings, known: Sequence[Rings], *, floor: float, sets: int
) -> SearchResult | None:
    """The best rings under these settings; None where they leave a GPU without a hop."""
    try:
        return search_under(task, settings, known=known, floor=floor, sets=sets)
    except (SearchError, MeasurementError):
        return None


def _tuned(task: Task, choice: Choice) -> Choice:
    """The same rings with the channels and FIFO size that suit them best, fewest and largest."""
    known = condensed_rings(choice.rings.rings)
    bounces = any(hop.flow.is_bounce for one in choice.rings.rings for hop in one.hops)
    best = choice
    for channels in (count for count in _channel_counts(task) if count % len(known) == 0):
        for size in BUFFSIZES if bounces else BUFFSIZES[:1]:
            settings = msgspec.structs.replace(choice.settings, channels=channels, buffsize=size)
            rings = rings_under(task, settings, known)
            try:
                (measurement,) = task.source.measure([rings.flows])
            except MeasurementError:
                # Many channels of large FIFOs may be more than hardware has room for.
                continue
            tried = Choice(
                settings=settings,
                rings=rings,
                rate_gbps=len(known) * measurement.rate_gbps,
                result=choice.result,
            )
            if _preferred(tried, best):
                best = tried
    return best


def _preferred(one: Choice, other: Choice) -> bool:
    """Whether `one` is clearly faster, or as fast with fewer rings or channels."""
    if one.rate_gbps > other.rate_gbps * (1 + WORTH):
        return True
    if one.rate_gbps < other.rate_gbps * (1 - WORTH / 2):
        return False
    return (len(one.orders), one.settings.channels, -one.settings.buffsize) < (
        len(other.orders),
        other.settings.channels,
        -other.settings.buffsize,
    )
