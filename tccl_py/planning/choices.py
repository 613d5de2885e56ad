"""Choices of settings: the search for rings of graph files, and NCCL without a graph file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any, cast

import msgspec

from tccl_py.errors import MeasurementError, SearchError
from tccl_py.files import pick
from tccl_py.nccl.graph_search import DefaultRings
from tccl_py.nccl.settings import Settings, environment
from tccl_py.nccl.transport import candidates, chunk_bytes, values_of
from tccl_py.nccl.versions import version_facts
from tccl_py.plan.chains import AS_GOOD, ChoiceName, prefer, why_unsound
from tccl_py.planning.request import Rings, Task, of_transports, rings_under
from tccl_py.planning.study import (
    SIMPLE_ORDER,
    Candidate,
    candidate_of,
    condensed_rings,
    measured_well,
    rate_rings,
    search_under,
)
from tccl_py.search.problem import SearchResult

BASE_CHANNELS = 8
"""Channels under which mechanisms are compared first; the number is settled afterwards."""
CHANNELS: Sequence[int] = values_of("channels", "rings")
SLOW_NETWORK_MBPS, SLOW_NETWORK_CHANNELS = 50_000, 2
"""Below this speed of all NICs together no more channels are tried."""
BUFFSIZES: Sequence[int] = values_of("buffsize", "rings")
MIN_SETS = 40
"""Sets that the search under any one choice may measure at least, of a budget of as many."""
WORTH = AS_GOOD
"""Settings farther from NCCL's defaults must promise this much more (relative)."""
WORTH_ALL = 0.05
"""The same where jobs that are not known shall have them: more channels slow send/recv too."""
_NO_BOUND: Mapping[str, Any] = {"bound_gbps": None, "bound_assumptions": ()}


class SettingsSearch:
    """The search over settings: NCCL's own rings, as `rate_own` has them, then graph files.

    Its results outlive an interruption: `best` is the best choice, `searched` all settings
    searched, and `results` of what searches.
    """

    def __init__(
        self, task: Task, own: Mapping[ChoiceName, Candidate], note: str = "", *, cancelled: bool
    ) -> None:
        self.own = own
        """The choices without a graph file, but default NCCL where it has no rate."""
        self.note = note
        """Why default NCCL has no rate, or what is special about it."""
        self.cancelled = cancelled
        """Whether an interruption ended the search."""
        self.best = as_graph(own["variables"])
        self.searched: list[Candidate] = []
        self.results: list[SearchResult] = []
        self._task = task
        # Each ring set is tried under every choice of settings.
        self._known: list[Rings] = [self.best.rings.rings]

    def run(
        self,
        *,
        sets: int,
        known: Sequence[Rings] = (),
        allow: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Find the best settings with their rings; KeyboardInterrupt ends it with the best so far.

        1. Compare mechanisms under a fixed number of channels, and search the most promising one
           next, by the best rings known so far. Each search may spend half of the sets left, and
           gives up as soon as it cannot beat the best. Its rings are tried under all other
           mechanisms.
        2. Settle channels and FIFO size for the rings of each search.

        Args:
            sets: the limit of measured sets.
            known: ring sets to try beside NCCL's own.
            allow: sets a share of the plan's budget, of which a part is left to each step.
        """
        default = self.own.get("default")
        if default is not None and default is not self.own["variables"]:
            self._known.append(default.rings.rings)
        self._known += known
        try:
            remaining = 0
            if not self.cancelled:
                allow(5 / 8)
                remaining = self._explore([*mechanisms(self._task), *placements(self._task)], sets)
            if not self.cancelled:
                allow(7 / 8)
                self._settle(max(remaining, sets // 2))
        except KeyboardInterrupt:
            self.cancelled = True

    def _explore(self, waiting: list[Settings], remaining: int) -> int:
        """Search under one mechanism after the other; return the number of sets left."""
        task, least = self._task, min(MIN_SETS, remaining)
        while waiting and remaining > 0 and not self.cancelled and task.source.has_time():
            settings = max(waiting, key=lambda settings: _promise(task, settings, self._known))
            waiting.remove(settings)
            share = max(least, remaining // 2)
            floor = self.best.rate_gbps
            result = search_under(task, settings, known=self._known, floor=floor, sets=share)
            if result is None:
                continue
            # What the journal answers counts as well: a resumed run goes the same way.
            remaining -= result.sets_measured + result.sets_remembered
            choice = self._note(settings, result)
            tuned = choice if self.cancelled else _tune(task, choice)
            self.searched.append(tuned)
            self._known.append(tuned.rings.rings)
            if tuned.rate_gbps > self.best.rate_gbps * (1 + WORTH):
                self.best = tuned
        return remaining

    def _note(self, settings: Settings, result: SearchResult) -> Candidate:
        self.results.append(result)
        self.cancelled = result.cancelled
        return candidate_of(settings, result)

    def _settle(self, sets: int) -> None:
        """Search under exactly the chosen settings, for a bound that holds for them."""
        best = self.best
        rings = [best.rings.rings]
        result = search_under(
            self._task, best.settings, known=rings, floor=0.0, sets=sets, check_bound=True
        )
        if result is None:
            return
        choice = self._note(best.settings, result)
        # NCCL's own rings may be another number than any that was searched.
        if choice.rate_gbps <= best.rate_gbps * (1 + WORTH):
            counted = best.ring_count in self._task.ring_counts
            bound = pick(choice, "bound_gbps", "bound_assumptions") if counted else _NO_BOUND
            choice = msgspec.structs.replace(best, **bound)
        self.best = choice


def mechanisms(task: Task) -> tuple[Settings, ...]:
    """Settings that give pairs different mechanisms, the nearest to NCCL's defaults first."""
    kinds = candidates(
        task.machine,
        task.knowledge,
        task.version,
        gpus=task.gpus,
        channels=max(count for count in _channel_counts(task) if count <= BASE_CHANNELS),
        p2p_level=task.p2p_level,
    )
    # NCCL's copies by copy engine go through its proxy threads, slot by slot. Neither a model nor
    # plain copies on hardware predict that: only running NCCL itself could choose them.
    return tuple(
        msgspec.structs.replace(kind, ib_hca=task.ib_hca)
        for kind in kinds
        if not kind.p2p_copy_engine and kind.shm_copy_engine is None
    )


def placements(task: Task) -> tuple[Settings, ...]:
    """Return settings under which the NCCL plugin places bounce buffers, if nodes differ."""
    nodes = {node.numa_id for node in task.machine.numa_nodes}
    if not task.placement or len(nodes) < 2 or -1 in nodes:
        return ()
    replace = msgspec.structs.replace
    bouncing = (
        replace(kind, shm_locality="sender", shm_placement=True)
        for kind in mechanisms(task)
        if any(hop.flow.is_bounce for hop in task.space(kind, 1))
    )
    return tuple(dict.fromkeys(bouncing))


def _promise(task: Task, settings: Settings, candidates: Sequence[Rings]) -> tuple[float, int]:
    """Return the best rough score of the known rings under these settings, and the bounces."""
    best = 0.0
    bounces = sum(hop.flow.is_bounce for hop in task.space(settings, 1))
    for rings in candidates:
        try:
            under = rings_under(task, settings, rings)
            (measurement,) = task.source.measure([under.flows])
        except (SearchError, MeasurementError):
            continue
        best = max(best, under.rate(measurement))
    return float(f"{best:.2g}"), -bounces


def _channel_counts(task: Task) -> tuple[int, ...]:
    """Return the numbers of channels worth trying: on a slow network many FIFOs only wait."""
    most = version_facts(task.version).max_channels
    if task.nics:
        speeds = [nic.speed_mbps for nic in task.machine.nics if nic.index in task.nics]
        if sum(speeds) < SLOW_NETWORK_MBPS:
            most = min(most, SLOW_NETWORK_CHANNELS)
    return tuple(count for count in CHANNELS if min(task.least_channels, most) <= count <= most)


def _tune(task: Task, choice: Candidate) -> Candidate:
    """Return the same rings with the best channels and FIFO size, fewest and largest first."""
    distinct = condensed_rings(choice.rings.rings)
    best = choice
    for channels in (count for count in _channel_counts(task) if count % len(distinct) == 0):
        for size in BUFFSIZES if choice.bounces else BUFFSIZES[:1]:
            settings = msgspec.structs.replace(choice.settings, channels=channels, buffsize=size)
            rings = rings_under(task, settings, distinct)
            try:
                (measurement,) = task.source.measure([rings.flows])
            except MeasurementError:
                # Many channels of large FIFOs may be more than hardware has room for.
                continue
            bound = pick(choice, *_NO_BOUND) if settings == choice.settings else _NO_BOUND
            rate = rings.rate(measurement)
            tried = Candidate(settings=settings, rings=rings, rate_gbps=rate, **bound)
            costs = [
                (option.ring_count, option.settings.channels, -option.settings.buffsize)
                for option in (tried, best)
            ]
            if prefer(tried.rate_gbps, best.rate_gbps, less=costs[0] < costs[1]):
                best = tried
    return best


# NCCL without a graph file: by default, and with the best environment variables.


MOST_CHANNELS = max(values_of("min_channels", "rings"))
"""Final channels that variables ask for at most."""
COMPARED_CHANNELS = 16
"""Final channels with which mechanisms are compared, if NCCL picks no more by itself."""
FINALISTS = 2
"""Mechanisms for which numbers of channels and FIFO sizes are tried."""


Variables = Callable[[Task, Candidate | None], Iterable[Candidate]]
"""Yields NCCL's own rings under environment variables, where default NCCL is rated so."""


def rate_own(task: Task, variables: Variables | None = None) -> SettingsSearch:
    """Rate default NCCL, and the best of NCCL under environment variables alone.

    Return the search over settings that goes on from them. "large-buffers" are the best variables
    that leave the chunks of send/recv as they are, where "variables" do not and these gain.

    Args:
        task: the input of planning.
        variables: yields what is compared with default NCCL; None is `by_mechanisms`.

    KeyboardInterrupt ends it with the best so far, if anything is rated. Raises SearchError: no
    setting gives every hop a mechanism that can be rated. MeasurementError: the source cannot
    measure a needed set.
    """
    settings = task.default_settings
    if task.own_rings is not None:
        # An installed NCCL is asked now: later the source may have the GPUs to itself.
        asked = (kind for kind in (settings, *mechanisms(task)) if not task.find_unsound(kind))
        task.own_rings([of_transports(kind) for kind in asked])
    default, note = _default(task, settings)
    tried = [] if default is None else [default]
    cancelled = False
    try:
        for choice in (variables or by_mechanisms)(task, default):
            tried.append(choice)
    except KeyboardInterrupt:
        if not tried:
            raise
        cancelled = True
    if not tried:
        facts = task.find_unsound(settings)
        why = f": {why_unsound(facts)}" if facts else ""
        raise SearchError(f"no settings of NCCL give every GPU a hop that can be measured{why}")
    best = _smallest(tried)
    # Between hosts NCCL has buffers of other sizes as well.
    large = None if task.nics else _large_buffers(task, best, default, tried)
    if best is not default and not cancelled:
        best = _rate_well(task, best)
        large = None if large is None else _rate_well(task, large)
    rated = {"default": default, "large-buffers": large, "variables": best}
    own = {name: choice for name, choice in rated.items() if choice is not None}
    return SettingsSearch(task, cast(dict[ChoiceName, Candidate], own), note, cancelled=cancelled)


def _large_buffers(
    task: Task, best: Candidate, default: Candidate | None, tried: Sequence[Candidate]
) -> Candidate | None:
    """Return the best variables that keep default NCCL's chunks, if `best` does not; or None.

    Where links keep default NCCL from a rate, they are the fewest variables.
    """
    if default is None:
        few = _fewest(tried) if task.find_unsound(task.default_settings) else best
        return None if few.settings == best.settings else few
    chunk = chunk_bytes(task.view(default.settings))

    def keeps_chunks(choice: Candidate) -> bool:
        return chunk_bytes(task.view(choice.settings)) >= chunk

    if keeps_chunks(best):
        return None
    large = _smallest([choice for choice in tried if keeps_chunks(choice)], WORTH_ALL)
    return None if large is default else large


def _smallest(tried: Sequence[Candidate], worth: float = WORTH) -> Candidate:
    """Return of the choices within `worth` of the best the one with fewest variables, channels."""
    most = max(choice.rate_gbps for choice in tried)
    return min((choice for choice in tried if choice.rate_gbps * (1 + worth) >= most), key=_cost)


def _fewest(tried: Sequence[Candidate]) -> Candidate:
    """Return of the choices with the fewest variables the fastest."""
    return min(tried, key=lambda choice: (_cost(choice)[0], -choice.rate_gbps))


def _cost(choice: Candidate) -> tuple[int, int]:
    own = 0 if choice.nccl is None else choice.nccl.channels
    return len(environment(choice.settings)), max(own, choice.settings.min_channels or 0)


def _rate_well(task: Task, choice: Candidate) -> Candidate:
    answer = measured_well(task.source, choice.rings)
    return rate_rings(choice.settings, choice.rings, answer, nccl=choice.nccl)


def _default(task: Task, settings: Settings) -> tuple[Candidate | None, str]:
    """Rate NCCL as it runs without this project, with a note on anything special."""
    if facts := task.find_unsound(settings):
        return None, why_unsound(facts)
    by_network, nccl = task.view(settings).by_network, task.default_rings(settings)
    unknown = "NCCL joins {} and {} over their NICs, at a rate that is not known"
    if by_network and not task.nics:
        return None, unknown.format(*min(by_network))
    try:
        note = SIMPLE_ORDER if nccl.fallback else ""
        return rate_default(task, settings, nccl, well=True), note
    except SearchError:
        relayed = "NCCL joins GPUs through the memory of another one, at a rate that is not known"
        return None, unknown.format(*min(by_network)) if by_network else relayed


def by_mechanisms(task: Task, _: Candidate | None) -> Iterator[Candidate]:
    """Yield NCCL's own rings by all mechanisms, with numbers of channels and FIFO sizes."""
    # 1. Compare mechanisms, each with NCCL's own number of channels and with many.
    compared: list[tuple[float, Candidate, DefaultRings]] = []
    for settings in mechanisms(task):
        nccl, rated = task.default_rings(settings), list[Candidate]()
        counts = [count for count in _counts(nccl) if count <= COMPARED_CHANNELS]
        for choice in _with_channels(task, settings, nccl, counts[:1] + counts[1:][-1:]):
            rated.append(choice)
            yield choice
        if rated:
            compared.append((max(choice.rate_gbps for choice in rated), rated[0], nccl))
    # 2. Try all numbers of channels and FIFO sizes with the best mechanisms.
    compared.sort(key=lambda row: -row[0])
    for _rate, first, nccl in compared[:FINALISTS]:
        for size in BUFFSIZES if first.bounces else BUFFSIZES[:1]:
            sized = msgspec.structs.replace(first.settings, buffsize=size)
            yield from _with_channels(task, sized, nccl, _counts(nccl))


def _counts(nccl: DefaultRings) -> list[int]:
    """Return NCCL's own number of final channels, and doubles of it up to `MOST_CHANNELS`."""
    counts = [nccl.channels]
    while counts[-1] * 2 <= MOST_CHANNELS:
        counts.append(counts[-1] * 2)
    return counts


def _with_channels(
    task: Task, settings: Settings, nccl: DefaultRings, counts: Sequence[int]
) -> Iterator[Candidate]:
    """Yield NCCL's own rings with these numbers of final channels, as far as that is possible."""
    for count in counts:
        with suppress(SearchError, MeasurementError):
            yield rate_default(task, settings, nccl, channels=count)


def rate_default(
    task: Task,
    settings: Settings,
    nccl: DefaultRings,
    *,
    channels: int | None = None,
    well: bool = False,
) -> Candidate:
    """Rate NCCL's own rings, `nccl` under the settings.

    `channels` are final channels, by NCCL_MIN_NCHANNELS; None is NCCL's own number. With `well` a
    measurement whose samples spread is repeated.
    """
    more = channels is not None and channels > nccl.channels
    # A graph file's channels are doubled, and so are those of NCCL's search.
    settings = msgspec.structs.replace(
        settings, channels=max(1, nccl.channels // 2), min_channels=channels if more else None
    )
    rings = task.own_ring_set(nccl, settings)
    answer = measured_well(task.source, rings) if well else task.source.measure([rings.flows])[0]
    return rate_rings(settings, rings, answer, nccl=nccl)


def own_gbps(task: Task, settings: Settings) -> float:
    """Return the bandwidth of NCCL's own rings under settings.

    It is 0.0 where pairs talk over NICs and are not rated, and infinite where it is not known: no
    further set may be measured, the measurement fails, or they pass the memory of another GPU.
    """
    if not task.source.has_time():
        return inf
    try:
        return rate_default(task, settings, task.default_rings(settings)).rate_gbps
    except SearchError:
        return 0.0 if task.view(settings).by_network else inf
    except MeasurementError:
        return inf


def sound_gpus(task: Task) -> tuple[int, ...]:
    """Return the GPUs between which default NCCL uses sound links alone.

    One after the other that has the most links which are not is left out.
    """
    gpus = task.gpus
    while facts := task.over(gpus).find_unsound(task.default_settings):
        counts = Counter(gpu for fact in facts for gpu in (fact.one, fact.other))
        worst = max(counts, key=lambda gpu: (counts[gpu], gpu))
        gpus = tuple(gpu for gpu in gpus if gpu != worst)
    return gpus


def as_graph(choice: Candidate) -> Candidate:
    """Return NCCL's own rings for a graph file with as many final channels."""
    settings = choice.settings
    if settings.min_channels is None:
        return choice
    channels = settings.min_channels // 2
    settings = msgspec.structs.replace(settings, channels=channels, min_channels=None)
    return msgspec.structs.replace(choice, settings=settings)
