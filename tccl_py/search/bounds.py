"""Measured sets of hops, each once up to symmetry, and the upper bounds that follow from subsets.

Adding transfers never helps, so the rate of a subset, or of a subset's symmetric image, bounds a
set. Single hops and pairs are looked up in a vector and a matrix; larger subsets ("patterns") are
bit masks, one bit for each copy of a hop that a set may hold.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tccl_py.model.measurement import BandwidthSource, Measurement
from tccl_py.model.rings import HopSpace
from tccl_py.model.symmetry import Symmetry, keeping, smallest_row
from tccl_py.search.problem import Budget, HopIndex
from tccl_py.sources.bench import Allowance, bench_of

SAFETY = 3.0
"""Standard errors by which a noisy rate is raised before it counts as an upper bound."""
DIFFERENCE = 0.05
"""Rates that a symmetry calls equal may differ this much (relative)."""

IsSlow = Callable[[Sequence[int]], bool]
"""Tells whether hops are slow together; supersets of slow sets are slow."""
Floats = npt.NDArray[np.float64]
Masks = npt.NDArray[np.uint64]


class Evaluator:
    """Measures sets of hops by a source, remembers the results, and counts the cost.

    `noise` is the relative standard deviation of a measurement that does not state its own;
    `measured` is called after each measurement. `bounds_hold` tells that the source's rates are
    such that bounds from parts and from images need no assumption; `taken_as_exact` that there are
    single samples whose error nobody states.
    """

    def __init__(
        self,
        source: BandwidthSource,
        *,
        budget: Budget,
        noise: float,
        measured: Callable[[], None] = lambda: None,
    ) -> None:
        self._bench, self._noise, self._measured = bench_of(source), noise, measured
        self._noise_of_one = noise or self._bench.noise
        self._by_text: dict[str, Measurement] = {}
        self.allowance = Allowance(budget.sets, budget.seconds)
        self.sets_by_symmetry = 0
        self.bounds_hold = self._bench.bounds_hold
        self.assumed = self.taken_as_exact = False
        self._remembered_before = self._bench.sets_remembered

    @property
    def sets_measured(self) -> int:
        """Number of sets that the search has asked for."""
        return self.allowance.spent

    @property
    def sets_remembered(self) -> int:
        """The part of `sets_measured` that the bench had in memory."""
        return self._bench.sets_remembered - self._remembered_before

    def rate(self, index: HopIndex, hops: Sequence[int]) -> float:
        """Return the slowest hop's rate with all `hops` running, GB/s."""
        return self.measurement(index, hops).rate_gbps

    def upper(self, index: HopIndex, hops: Sequence[int]) -> float:
        """Return the raised rate: an upper bound for supersets, GB/s."""
        return self.raise_rate(self.measurement(index, hops))

    def raise_rate(self, measurement: Measurement) -> float:
        """Return a rate raised by its possible noise, GB/s."""
        return measurement.rate_gbps * (1 + SAFETY * self.relative_error(measurement))

    def relative_error(self, measurement: Measurement) -> float:
        """Return a rate's relative standard error: its own, or what problem or source state."""
        stated = self._noise if _is_repeated(measurement) else self._noise_of_one or 0.0
        return max(measurement.relative_error, stated)

    def measurement(self, index: HopIndex, hops: Sequence[int]) -> Measurement:
        """Return the measurement of the smallest symmetric image of `hops`."""
        smallest = index.canonical(hops)
        if index.text(smallest) in self._by_text:
            self.sets_by_symmetry += 1
        return self.measurement_as_is(index, smallest)

    def measurement_as_is(self, index: HopIndex, hops: Sequence[int]) -> Measurement:
        """Return the measurement of `hops` themselves, not of an image."""
        key = index.text(hops)
        if key not in self._by_text:
            self.allowance.check()
            (measurement,) = self._bench.measure([index.transfer_set(hops)])
            self._by_text[key] = measurement
            self.allowance.spent += 1
            self.assumed |= measurement.assumed
            is_stated = self._noise_of_one is not None or measurement.assumed
            self.taken_as_exact |= not is_stated and not _is_repeated(measurement)
            self._measured()
        return self._by_text[key]

    def known_rate(self, index: HopIndex, hops: Sequence[int]) -> float | None:
        """Return the rate of `hops` themselves if they were measured, GB/s."""
        measurement = self._by_text.get(index.text(hops))
        return None if measurement is None else measurement.rate_gbps

    def further_rates(self, index: HopIndex, hops: Sequence[int], numbers: range) -> list[float]:
        """Return the rates of further samples of `hops` themselves, by their numbers, GB/s."""
        transfers = index.transfer_set(hops)
        rates = [self._bench.sample(transfers, number).rate_gbps for number in numbers]
        self.allowance.spent += len(numbers)
        return rates


def _is_repeated(measurement: Measurement) -> bool:
    return len(measurement.samples_gbps[0]) > 1


# The symmetry check: symmetries are spot-checked by measurements before they are used.
def checked_index(
    space: HopSpace, symmetry: Symmetry, evaluator: Evaluator, *, checks: int | None
) -> HopIndex:
    """Index the space under the part of the symmetry that measurements of single hops confirm.

    One hop of each class is measured, and `checks` more members of the class (None: all).
    """
    index = HopIndex(space, symmetry)
    rates = np.full(len(index.hops), np.nan)
    errors = [0.0]
    for smallest in np.unique(index.images.min(axis=0)):
        orbit = np.unique(index.images[:, smallest])
        for hop in _spread(orbit, checks):
            measurement = evaluator.measurement_as_is(index, [hop])
            rates[hop] = measurement.rate_gbps
            errors.append(evaluator.relative_error(measurement))
        rates[orbit] = np.where(np.isnan(rates[orbit]), rates[orbit[0]], rates[orbit])
    classes = _classes(rates, max(DIFFERENCE, 2 * SAFETY * max(errors)))
    confirmed = (classes[index.images] == classes[None, :]).all(axis=1)
    if confirmed.all():
        return index
    # Elements that take a hop out of the space have no row in `images`, and are dropped too.
    keep = np.zeros(len(symmetry.elements), dtype=bool)
    keep[np.flatnonzero(index.inside)] = confirmed
    return HopIndex(space, keeping(symmetry, keep))


def _spread(orbit: npt.NDArray[np.int32], checks: int | None) -> list[int]:
    """Return the first member and `checks` others, evenly spread."""
    count = len(orbit) if checks is None else min(checks + 1, len(orbit))
    picked: list[int] = orbit[np.linspace(0, len(orbit) - 1, count).astype(int)].tolist()
    return picked


def _classes(rates: npt.NDArray[np.float64], allowed: float) -> npt.NDArray[np.int64]:
    """Number rates so that neighbours in size, closer than `allowed`, have one number."""
    order = np.argsort(rates)
    ordered = rates[order]
    jumps = ordered[1:] > ordered[:-1] * (1 + allowed)
    classes = np.empty(len(rates), dtype=np.int64)
    classes[order] = np.concatenate([[0], np.cumsum(jumps)])
    return classes


# QuickXplain (Junker 2004): the smallest slow part of a slow set, with few measurements.
def smallest_slow_part(hops: Sequence[int], is_slow: IsSlow) -> tuple[int, ...]:
    """Return a slow subset without a slow proper subset; `hops` themselves must be slow.

    >>> smallest_slow_part([1, 2, 3, 4, 5], lambda part: {2, 5} <= set(part))
    (2, 5)
    """
    return tuple(sorted(_quickxplain([], False, list(hops), _without_repetition(is_slow))))


def _quickxplain(background: list[int], grown: bool, hops: list[int], is_slow: IsSlow) -> list[int]:
    """Return the part of `hops` that is slow together with `background`."""
    # 1. If the background grew and is slow by itself, no hop is needed.
    if grown and is_slow(background):
        return []
    # 2. A single hop is needed.
    if len(hops) == 1:
        return hops
    # 3. Find what is needed of each half beside the other half.
    half = len(hops) // 2
    first, second = hops[:half], hops[half:]
    from_second = _quickxplain(background + first, True, second, is_slow)
    from_first = _quickxplain(background + from_second, bool(from_second), first, is_slow)
    return from_first + from_second


def _without_repetition(is_slow: IsSlow) -> IsSlow:
    """Return `is_slow`, but without calls for subsets of sets known to be fast."""
    fast: list[Counter[int]] = []

    def known_or_asked(part: Sequence[int]) -> bool:
        count = Counter(part)
        if any(count <= known for known in fast):
            return False
        slow = is_slow(part)
        if not slow:
            fast.append(count)
        return slow

    return known_or_asked


class Bounds:
    """Upper bounds for sets of `copies` rings, from sets of hops that are `learned`.

    `version` grows with every new bound.
    """

    def __init__(self, index: HopIndex, *, copies: int) -> None:
        count = len(index.hops)
        self._index, self._copies = index, copies
        self._words = -(-count * copies // 64)
        self.single: Floats = np.full(count, np.inf)
        self.pair: Floats = np.full((count, count), np.inf)
        self._masks: Masks = np.zeros((0, self._words), dtype=np.uint64)
        self._rates: Floats = np.zeros(0)
        self._with_hop: dict[int, npt.NDArray[np.int64]] = {}
        self.learned: list[tuple[int, ...]] = []
        self.version = 0

    def learn(self, hops: Sequence[int], upper: float) -> None:
        """Add an upper bound on the rate of `hops` and of all symmetric images."""
        orbit = self._index.orbit(hops)
        self.learned.append(tuple(hops))
        self.version += 1
        if len(hops) == 1:
            self.single[orbit[:, 0]] = np.minimum(self.single[orbit[:, 0]], upper)
            limit = np.minimum(self.single[:, None], self.single[None, :])
            np.minimum(self.pair, limit, out=self.pair)
        elif len(hops) == 2:
            for i, j in ((0, 1), (1, 0)):
                cells = (orbit[:, i], orbit[:, j])
                self.pair[cells] = np.minimum(self.pair[cells], upper)
        else:
            masks = np.stack([self.mask(image) for image in orbit.tolist()])
            self._masks = np.concatenate([self._masks, masks])
            self._rates = np.concatenate([self._rates, np.full(len(masks), upper)])
            self._with_hop.clear()

    def mask(self, hops: Sequence[int]) -> Masks:
        """Return the bits of `hops`: the second copy of a hop has a bit of its own."""
        bits = 0
        for hop in hops:
            first = hop * self._copies
            for bit in range(first, first + self._copies):
                if not bits >> bit & 1:
                    bits |= 1 << bit
                    break
        return np.frombuffer(bits.to_bytes(8 * self._words, "little"), dtype="<u8")

    def pattern_bound(self, hops: Sequence[int], newest: int | None = None) -> float:
        """Return the least rate of patterns inside `hops`, or only of those with `newest`."""
        if not len(self._rates):
            return float("inf")
        rows = slice(None) if newest is None else self._rows_with(newest)
        beyond = np.bitwise_or.reduce(self._masks[rows] & ~self.mask(hops), axis=1)
        return float(self._rates[rows][beyond == 0].min(initial=np.inf))

    def _rows_with(self, hop: int) -> npt.NDArray[np.int64]:
        if hop not in self._with_hop:
            word, bit = divmod(hop * self._copies, 64)
            held = self._masks[:, word] >> np.uint64(bit) & np.uint64(1)
            self._with_hop[hop] = np.flatnonzero(held)
        return self._with_hop[hop]

    def bound(self, hops: Sequence[int]) -> float:
        """Return an upper bound on the rate of `hops` together, GB/s."""
        (least,) = self.pair_bounds(np.array([hops], dtype=np.int64))
        return min(float(least), self.pattern_bound(hops))

    def pair_bounds(self, sets: npt.NDArray[np.int64]) -> Floats:
        """Return an upper bound for each row of hop numbers from singles and pairs alone, GB/s."""
        pairs = self.pair[sets[:, :, None], sets[:, None, :]]
        # A hop twice in the set has a pair off the diagonal too; the diagonal itself is no pair.
        diagonal = np.arange(sets.shape[1])
        pairs[:, diagonal, diagonal] = self.single[sets]
        least: Floats = pairs.min(axis=(1, 2), initial=np.inf)
        return least

    def beside(self, hops: Sequence[int]) -> Floats:
        """Return each hop's upper bound beside `hops`, from singles and pairs, GB/s."""
        if not hops:
            return self.single
        beside: Floats = np.minimum(np.minimum.reduce(self.pair[list(hops)]), self.single)
        return beside


# Upper bounds on all ring sets, from hops that every ring set must contain.

MAX_CHOICES = 5_000
"""Groups with more choices of hops are bounded by fewer hops at a time."""


Choices = npt.NDArray[np.int64]
"""Rows of hop numbers; every ring set contains at least one of the rows."""


def distinct_cuts(index: HopIndex, cuts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return one of the cuts that the symmetry exchanges."""
    names = [f"G{gpu}" for gpu in index.gpus]
    point = {name: i for i, name in enumerate(index.symmetry.points)}
    # The world outside, which chains pass through, is no device, and stays where it is.
    moving = [cut for cut in cuts if all(names[i] in point for i in cut)]
    elements = index.symmetry.elements[index.inside]
    distinct: dict[tuple[int, ...], tuple[int, ...]] = {}
    for cut in moving:
        columns = [point[names[i]] for i in cut]
        distinct.setdefault(smallest_row(np.sort(elements[:, columns], axis=1)), cut)
    return [cut for cut in cuts if cut not in moving] + list(distinct.values())


def crossings(index: HopIndex, group: Iterable[int], rings: int) -> list[Choices]:
    """List the hops by which `rings` rings can leave, enter, or do both at a group of GPUs."""
    inside = np.isin(np.arange(len(index.gpus)), list(group))
    out = np.flatnonzero(inside[index.source] & ~inside[index.target])
    back = np.flatnonzero(~inside[index.source] & inside[index.target])
    leaving, entering = _choices(out, rings), _choices(back, rings)
    # One direction has few choices and often bounds enough; both together bound more.
    found = [leaving, entering]
    if len(leaving) * len(entering) <= MAX_CHOICES:
        both = [np.concatenate(pair) for pair in itertools.product(leaving, entering)]
        found.append(np.sort(np.array(both), axis=1))
    return found


def _choices(hops: npt.NDArray[np.int64], count: int) -> Choices:
    """Return multisets of `count` hops, or of as many as MAX_CHOICES allows."""
    while count > 1 and math.comb(len(hops) + count - 1, count) > MAX_CHOICES:
        count -= 1
    return np.array(list(itertools.combinations_with_replacement(hops.tolist(), count)))


def crossing_bound(
    choices: Choices,
    bounds: Bounds,
    *,
    enough: float,
    measure: Callable[[Sequence[int]], float],
    limit: int,
) -> float:
    """Return an upper bound on all sets with one of the choices (rows of hop numbers), GB/s.

    `measure` gives an upper bound on the rate of hops, for at most `limit` choices (explaining a
    slow choice takes further sets) and none once the bound is `enough`; `bounds` grows.
    """
    least = bounds.pair_bounds(choices)
    exact: set[int] = set()
    while True:
        # Patterns are looked up only for the row that is best so far, and lower it.
        best = int(np.argmax(least))
        choice = tuple(choices[best].tolist())
        known = bounds.pattern_bound(choice)
        if known < least[best]:
            least[best] = known
            continue
        if least[best] <= enough or best in exact or limit == 0:
            return float(least[best])
        limit -= 1
        exact.add(best)
        upper = max(measure(choice), enough)
        if upper < least[best]:
            slow = smallest_slow_part(choice, lambda part: measure(part) <= upper)  # noqa: B023
            bounds.learn(slow, upper)
            np.minimum(least, bounds.pair_bounds(choices), out=least)


def connected_above(weights: Floats, least: float) -> bool:
    """Return whether hops of at least this rate connect all GPUs strongly (no cut is below).

    `weights[i, j]` is an upper bound on the rate of a hop from i to j, GB/s.
    """
    reach = weights >= least
    np.fill_diagonal(reach, True)
    steps = 1
    while steps < len(weights) and not reach.all():
        reach = reach @ reach
        steps *= 2
    return bool(reach.all())


def best_connected(weights: Floats) -> float:
    """Return the highest rate at which `connected_above` holds, by bisection over the rates."""
    rates = np.unique(weights[np.isfinite(weights)])
    if not len(rates):
        return float("inf")
    above = bisect.bisect_left(rates, True, key=lambda rate: not connected_above(weights, rate))
    return float(rates[above - 1]) if above else 0.0
