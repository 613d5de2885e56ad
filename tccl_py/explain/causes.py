"""The smallest slow parts of a set of flows, by removing flows and measuring again.

Supersets of slow sets are slow, so known rates of parts and of wholes answer most questions. Next,
pairs that share a link or memory are measured, then QuickXplain halves the rest
(`search/evaluator.py`). Further causes are found in the rest without a flow of every known cause:
the hitting-set tree of Reiter (Artificial Intelligence 32, 1987), depth first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations

import msgspec

from tccl_py.explain.probing import Flows, Prober
from tccl_py.model.transfer import Flow, TransferSet, transfer_set
from tccl_py.search.evaluator import BudgetSpentError, smallest_slow_part

HURT = 0.95
"""Flows with less than this share of the slowest's rate alone slow each other."""
NEAR = 1.1
"""A part shows the slowdown if its rate is at most this times the whole's."""
CERTAIN = 2.0
"""Standard errors between a rate and the limit; closer rates are measured again."""
AGAIN = 3
"""Measurements of one set, at most."""
PAIRS = 24
"""Pairs measured before the set is halved."""
NODES = 200
"""States of the hitting-set tree, at most; most cost no measurement."""

Label = Callable[[Flows], object]
Related = Callable[[Flow, Flow], int]
Part = frozenset[int]
"""Positions of flows in the whole."""


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """A slow part of a set, `minimal` if no flow can be left out; `alike` more parts are equal."""

    flows: tuple[Flow, ...]
    minimal: bool
    alike: int = 0


class Causes(msgspec.Struct, frozen=True, kw_only=True):
    """The causes found, the worst first, and the rest, which contains none of them as a whole.

    `spent` is true if the budget ended first.
    """

    found: tuple[Cause, ...]
    rest: tuple[Flow, ...]
    spent: bool


class ContradictionError(Exception):
    """A set is fast although earlier measurements make it slow."""


def find_causes(
    prober: Prober, flows: Flows, *, most: int, related: Related, label: Label | None = None
) -> Causes:
    """Find up to `most` different causes for flows that are slower together than alone.

    Flows without the first causes have a higher rate, whose causes are found next. Pairs that
    share most by `related` are measured first; parts of one rate with one `label` (by default the
    symmetry key) are one cause. Raises MeasurementError or ContradictionError: a part cannot be
    measured, or measurements contradict each other, twice.
    """
    found: list[Cause] = []
    rest, spent = tuple(flows), False
    try:
        while not spent and len(found) < most and is_hurt(prober, rest):
            level = _Level(prober, rest, related, label or prober.symmetry.key)
            more, rest, spent = level.causes(most - len(found))
            found += more
            if not more:
                break
    except BudgetSpentError:
        spent = True
    return Causes(found=tuple(found), rest=rest, spent=spent)


def is_hurt(prober: Prober, flows: Flows) -> bool:
    """Return whether flows together are slower than the slowest of them alone."""
    if len(flows) < 2:
        return False
    together, alone = prober.rate(flows), prober.slowest_alone(flows)
    doubt = CERTAIN * (together.error + alone.error)
    return together.gbps < HURT * alone.gbps * (1 - min(doubt, 1.0))


class _Level:
    """The causes of one rate: all parts about as slow as the whole.

    `limit` is between the whole's rate and each flow's own, so no single flow is slow.
    """

    def __init__(
        self, prober: Prober, flows: tuple[Flow, ...], related: Related, label: Label
    ) -> None:
        self._prober, self._flows, self._related, self._label = prober, flows, related, label
        whole, alone = prober.rate(flows).gbps, prober.slowest_alone(flows).gbps
        self.limit = min(NEAR * whole, (whole * alone) ** 0.5)
        self._rates: list[tuple[Counter[Flow], float]] = []
        self._remember_known()
        self._parts: list[Part] = []
        self._causes: dict[object, Cause] = {}
        self._counted: set[TransferSet] = set()

    def _remember_known(self) -> None:
        whole = Counter(self._flows)
        for known in self._prober.known:
            if whole.keys() >= set(known.flows) and Counter(known.flows) <= whole:
                self._rates.append((Counter(known.flows), self._prober.exact(known.flows).gbps))

    def causes(self, most: int) -> tuple[list[Cause], tuple[Flow, ...], bool]:
        """Return up to `most` causes, the first rest without any, and whether the budget ended."""
        first: tuple[Flow, ...] | None = None
        waiting: list[Part] = [frozenset()]
        seen: set[Part] = set()
        spent = False
        try:
            while waiting and len(seen) < NODES and len(self._causes) < most:
                removed = waiting.pop()
                if removed in seen:
                    continue
                seen.add(removed)
                part = self._part_without(removed)
                if part is None:
                    first = first or self._without(removed)
                else:
                    waiting += [removed | {flow} for flow in self._least_needed_first(part)]
        except BudgetSpentError:
            spent = True
        found = list(self._causes.values())
        if spent and not found:
            found = self._smallest_known()
        return found, first or self._greedy_rest(), spent

    def _without(self, removed: Part) -> tuple[Flow, ...]:
        return tuple(flow for i, flow in enumerate(self._flows) if i not in removed)

    def _greedy_rest(self) -> tuple[Flow, ...]:
        removed: set[int] = set()
        for part in self._parts:
            if not part & removed:
                removed.add(self._least_needed_first(part)[-1])
        return self._without(frozenset(removed))

    def _least_needed_first(self, part: Part) -> list[int]:
        return sorted(part, key=lambda flow: (sum(flow in found for found in self._parts), flow))

    def _part_without(self, removed: Part) -> Part | None:
        """Return a slow part without these flows, or None."""
        for part in self._parts:
            if not part & removed:
                return part
        rest = [i for i in range(len(self._flows)) if i not in removed]
        if not rest or not self._slow(rest):
            return None
        part = frozenset(self._smallest(rest))
        flows = tuple(self._flows[i] for i in sorted(part))
        self._parts += [part, *self._prober.symmetry.images_within(flows, self._flows)]
        # A part whose flows are in the whole twice counts once.
        sets = {transfer_set(self._flows[i] for i in found) for found in self._parts}
        label = self._label(flows)
        cause = self._causes.get(label) or Cause(flows=flows, minimal=True, alike=-1)
        more = cause.alike + len(sets - self._counted)
        self._causes[label] = msgspec.structs.replace(cause, alike=more)
        self._counted |= sets
        return part

    def _smallest(self, rest: Sequence[int]) -> tuple[int, ...]:
        """Return a minimal slow part of `rest`, which is slow; checked without any symmetry."""
        for _ in range(2):
            part = self._slow_pair(rest) or smallest_slow_part(rest, self._slow)
            # Noise may have kept flows that are not needed.
            for flow in part:
                less = tuple(i for i in part if i != flow)
                if len(less) > 1 and self._slow(less):
                    part = less
            if self._measured_slow(part, exact=True):
                return part
            # An image was slow and this part is not: the symmetry does not hold for rates.
            self._prober.symmetry.trust_nothing()
            self._rates.clear()
            self._remember_known()
        names = " ".join(str(self._flows[i]) for i in part)
        raise ContradictionError(f"{names} is slow in some measurements and fast in others")

    def _slow_pair(self, rest: Sequence[int]) -> tuple[int, ...] | None:
        shared = {
            pair: self._related(self._flows[pair[0]], self._flows[pair[1]])
            for pair in combinations(rest, 2)
        }
        likely = sorted((pair for pair in shared if shared[pair]), key=lambda pair: -shared[pair])
        tried: set[tuple[int, ...]] = set()
        for pair in likely:
            key = self._prober.symmetry.key([self._flows[i] for i in pair])
            if key in tried:
                continue
            if len(tried) >= PAIRS:
                break
            tried.add(key)
            if self._slow(pair):
                return pair
        return None

    def _slow(self, part: Sequence[int]) -> bool:
        if len(part) < 2:
            return False
        flows = Counter(self._flows[i] for i in part)
        if any(gbps <= self.limit and known <= flows for known, gbps in self._rates):
            return True
        if any(gbps > self.limit and flows <= known for known, gbps in self._rates):
            return False
        return self._measured_slow(part, exact=False)

    def _measured_slow(self, part: Sequence[int], *, exact: bool) -> bool:
        flows = [self._flows[i] for i in part]
        rate = self._prober.exact(flows) if exact else self._prober.rate(flows)
        for _ in range(AGAIN - 1):
            if abs(rate.gbps - self.limit) >= CERTAIN * rate.error * rate.gbps:
                break
            rate = self._prober.again(flows)
        self._rates.append((Counter(flows), rate.gbps))
        return bool(rate.gbps <= self.limit)

    def _smallest_known(self) -> list[Cause]:
        slow = [known for known, gbps in self._rates if gbps <= self.limit]
        smallest = min(slow, key=lambda known: known.total(), default=None)
        if smallest is None or smallest.total() >= len(self._flows):
            return []
        return [Cause(flows=transfer_set(smallest.elements()).flows, minimal=False)]
