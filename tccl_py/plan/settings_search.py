"""The search over settings: rings inside each, and the best settings win."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tccl_py.errors import MeasurementError, SearchError
from tccl_py.model.transfer import DEFAULT_FIFO_BYTES
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.transport import candidates
from tccl_py.nccl.versions import version_facts
from tccl_py.plan.plan import AS_GOOD
from tccl_py.plan.tasks import (
    Choice,
    Rings,
    Task,
    choice_found,
    condensed_rings,
    rings_under,
    search_under,
)

BASE_CHANNELS = 8
"""Channels under which mechanisms are compared first; the number is settled afterwards."""
CHANNELS = (1, 2, 4, 8, 16)
SLOW_NETWORK_MBPS, SLOW_NETWORK_CHANNELS = 50_000, 2
"""Below this speed of all NICs together no more channels are tried."""
BUFFSIZES = tuple(DEFAULT_FIFO_BYTES >> shift for shift in range(6))
"""4 MiB, NCCL's default, down to 128 KiB."""
MIN_SETS = 40
"""Sets that the search under any one choice may measure at least."""
WORTH = AS_GOOD
"""Settings farther from NCCL's defaults must promise this much more (relative)."""


class SettingsSearch:
    """The search over settings from `start`; its results outlive an interruption.

    `best` is the best choice, `searched` all settings searched, `cancelled` tells of an
    interruption. Ring sets `known` are tried under every choice of settings.
    """

    def __init__(self, task: Task, start: Choice, known: Sequence[Rings] = ()) -> None:
        self.best = start
        self.searched: list[Choice] = []
        self.cancelled = False
        self._task = task
        self._known = [start.rings.rings, *known]

    def run(self, *, sets: int) -> None:
        """Find the best settings with their rings; KeyboardInterrupt ends it with the best so far.

        1. Compare mechanisms under a fixed number of channels, and search the most promising one
           next, by the best rings known so far. Each search may spend half of the `sets` left, and
           gives up as soon as it cannot beat the best. Its rings are tried under all other
           mechanisms.
        2. Settle channels and FIFO size for the rings of each search.
        """
        try:
            left = self._explore(sets)
            if not self.cancelled:
                self._settle(max(left, sets // 2))
        except KeyboardInterrupt:
            self.cancelled = True

    def _explore(self, left: int) -> int:
        """Search under one mechanism after the other; return the number of sets left."""
        task, waiting = self._task, list(mechanisms(self._task))
        while waiting and left > 0 and not self.cancelled:
            settings = max(waiting, key=lambda one: _promise(task, one, self._known))
            waiting.remove(settings)
            share = max(MIN_SETS, left // 2)
            floor = self.best.rate_gbps
            result = search_under(task, settings, known=self._known, floor=floor, sets=share)
            if result is None:
                continue
            # What the journal answers counts as well: a resumed run goes the same way.
            left -= result.sets_measured + result.sets_remembered
            self.cancelled = result.cancelled
            self._note(choice_found(settings, result))
        return left

    def _note(self, found: Choice) -> None:
        tuned = found if self.cancelled else _tuned(self._task, found)
        self.searched.append(tuned)
        self._known.append(tuned.rings.rings)
        if tuned.rate_gbps > self.best.rate_gbps * (1 + WORTH):
            self.best = tuned

    def _settle(self, sets: int) -> None:
        """Search under exactly the chosen settings, for a bound that holds for them."""
        best = self.best
        settings, known = best.settings, [best.rings.rings]
        result = search_under(self._task, settings, known=known, floor=0.0, sets=sets)
        if result is None:
            return
        self.cancelled = result.cancelled
        if result.rate_gbps > best.rate_gbps * (1 + WORTH):
            self.best = choice_found(settings, result)
        else:
            # NCCL's own rings may be another number than any that was searched.
            counted = len(best.rings.rings) in self._task.ring_counts
            searched = settings if counted else None
            self.best = msgspec.structs.replace(best, result=result, searched=searched)


def mechanisms(task: Task) -> tuple[Settings, ...]:
    """Settings that give pairs different mechanisms, the nearest to NCCL's defaults first."""
    kinds = candidates(
        task.machine,
        task.knowledge,
        task.version,
        gpus=task.gpus,
        channels=(_base_channels(task),),
        buffsizes=(DEFAULT_FIFO_BYTES,),
        p2p_level=task.p2p_level,
    )
    # NCCL's copies by copy engine go through its proxy threads, slot by slot. Neither a model nor
    # plain copies on hardware predict that: only running NCCL itself could choose them.
    return tuple(
        kind for kind in kinds if not kind.p2p_copy_engine and kind.shm_copy_engine is None
    )


def _promise(task: Task, settings: Settings, known: Sequence[Rings]) -> tuple[float, int]:
    """Return the best rough score of the known rings under these settings, and the bounces."""
    best = 0.0
    bounces = sum(hop.flow.is_bounce for hop in task.space(settings, 1))
    for rings in known:
        try:
            under = rings_under(task, settings, rings)
            (measurement,) = task.source.measure([under.flows])
        except (SearchError, MeasurementError):
            continue
        best = max(best, under.rate(measurement))
    return float(f"{best:.2g}"), -bounces


def _base_channels(task: Task) -> int:
    return max(one for one in _channel_counts(task) if one <= BASE_CHANNELS)


def _channel_counts(task: Task) -> tuple[int, ...]:
    """Return the numbers of channels worth trying: on a slow network many FIFOs only wait."""
    most = version_facts(task.version).max_channels
    if task.nics:
        speeds = [nic.speed_mbps for nic in task.machine.nics if nic.index in task.nics]
        if sum(speeds) < SLOW_NETWORK_MBPS:
            most = min(most, SLOW_NETWORK_CHANNELS)
    return tuple(count for count in CHANNELS if count <= most)


def _tuned(task: Task, choice: Choice) -> Choice:
    """Return the same rings with the best channels and FIFO size, fewest and largest first."""
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
            tried = msgspec.structs.replace(
                choice, settings=settings, rings=rings, rate_gbps=rings.rate(measurement)
            )
            if _preferred(tried, best):
                best = tried
    return best


def _preferred(one: Choice, other: Choice) -> bool:
    costs = [(len(c.orders), c.settings.channels, -c.settings.buffsize) for c in (one, other)]
    return preferred(one.rate_gbps, other.rate_gbps, less=costs[0] < costs[1])


def preferred(rate: float, than: float, *, less: bool) -> bool:
    """Return whether a rate is clearly higher, or as high with fewer rings or channels (`less`)."""
    return rate > than * (1 + WORTH) or (less and rate >= than * (1 - WORTH / 2))
