"""The smallest slow parts of a set of flows, by removing flows and measuring again.

Supersets of slow sets are slow. So what is known of parts and of wholes answers most questions;
then pairs that share something are tried, then QuickXplain halves what is left
(`search/conflicts.py`). Other causes are found in what is left without a flow of every cause known
so far: the hitting-set tree of Reiter (Artificial Intelligence 32, 1987), depth first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations

import msgspec

from tccl_py.explain.probing import Asker, Rate
from tccl_py.model.transfer import Flow, TransferSet, transfer_set
from tccl_py.search.evaluator import BudgetSpentError, smallest_slow_part

HURT = 0.95
"""Flows that get less than this share of what the slowest gets alone hurt each other."""
NEAR = 1.1
"""A part shows the slowdown if it is no faster than this times the whole."""
CERTAIN = 2.0
"""Standard errors that must lie between a rate and the limit; else it is measured again."""
AGAIN = 3
"""Measurements at most of one set."""
PAIRS = 24
"""Pairs that are tried before the set is halved."""
NODES = 200
"""States of the hitting-set tree looked at; most cost no measurement."""

Label = Callable[[Sequence[Flow]], object]
Part = frozenset[int]
"""Positions of flows in the whole."""


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """A slow part of a set; `minimal` says that no flow of it can be left out.

    `alike` more parts of the whole look the same.
    """

    flows: tuple[Flow, ...]
    minimal: bool
    alike: int = 0


class Causes(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, the worst first, and what is left without it.

    `rest` are flows that none of the causes is whole in; `spent` says that the budget ended first.
    """

    found: tuple[Cause, ...]
    rest: tuple[Flow, ...]
    spent: bool


class ContradictionError(Exception):
    """A set that must be slow by what was measured before is not."""


def find_causes(
    asker: Asker,
    flows: Sequence[Flow],
    *,
    most: int,
    related: Callable[[Flow, Flow], int],
    label: Label | None = None,
) -> Causes:
    """Up to `most` different causes for flows that are slower together than alone.

    Flows without the first causes have a higher rate, and are looked at for what limits that.

    Args:
        asker: answers sets within its budget.
        flows: what runs together.
        most: how many causes are wanted.
        related: how much two flows share; pairs that share most are tried first.
        label: parts of one rate with one label are one cause; those that a symmetry exchanges are,
            if it is not given.

    Raises:
        MeasurementError: the source cannot measure a part.
        ContradictionError: measurements contradict each other, twice.
    """
    found: list[Cause] = []
    rest = tuple(flows)
    try:
        while len(found) < most and is_hurt(asker, rest):
            level = _Level(asker, rest, related, label or asker.likeness.key)
            more, rest = level.causes(most - len(found))
            found += more
            if not more:
                break
    except _SpentError as spent:
        return Causes(found=(*found, *spent.found), rest=spent.rest, spent=True)
    except BudgetSpentError:
        return Causes(found=tuple(found), rest=rest, spent=True)
    return Causes(found=tuple(found), rest=rest, spent=False)


def is_hurt(asker: Asker, flows: Sequence[Flow]) -> bool:
    """Whether flows together are slower than the slowest of them alone."""
    if len(flows) < 2:
        return False
    together = asker.rate(flows)
    alone = alone_rate(asker, flows)
    doubt = CERTAIN * (together.error + alone.error)
    return together.gbps < HURT * alone.gbps * (1 - min(doubt, 1.0))


def alone_rate(asker: Asker, flows: Sequence[Flow]) -> Rate:
    """The slowest flow with each alone."""
    return min((asker.rate([flow]) for flow in flows), key=lambda rate: rate.gbps)


class _SpentError(Exception):
    """The budget ended within a level; what it had found goes along."""

    def __init__(self, found: Sequence[Cause], rest: tuple[Flow, ...]) -> None:
        super().__init__()
        self.found, self.rest = tuple(found), rest


class _Level:
    """The causes of one rate: all parts that are about as slow as the whole.

    `limit` lies above the whole's rate and below each flow's own, so no single flow is slow.
    """

    def __init__(
        self,
        asker: Asker,
        flows: tuple[Flow, ...],
        related: Callable[[Flow, Flow], int],
        label: Label,
    ) -> None:
        self._asker, self._flows, self._related, self._label = asker, flows, related, label
        whole, alone = asker.rate(flows).gbps, alone_rate(asker, flows).gbps
        self.limit = min(NEAR * whole, (whole * alone) ** 0.5)
        self._rates: list[tuple[Counter[Flow], float]] = []
        self._remember_known()
        self._parts: list[Part] = []
        self._causes: dict[object, Cause] = {}
        self._counted: set[TransferSet] = set()

    def _remember_known(self) -> None:
        """What the journal holds of parts of the whole."""
        whole = Counter(self._flows)
        for known in self._asker.known:
            if whole.keys() >= set(known.flows) and Counter(known.flows) <= whole:
                self._rates.append((Counter(known.flows), self._asker.exact(known.flows).gbps))

    def causes(self, most: int) -> tuple[list[Cause], tuple[Flow, ...]]:
        """Up to `most` causes, and the first part found that has none of them."""
        first: tuple[Flow, ...] | None = None
        waiting: list[Part] = [frozenset()]
        seen: set[Part] = set()
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
                    waiting += [removed | {one} for one in self._least_needed_first(part)]
        except BudgetSpentError as error:
            fallback = list(self._causes.values()) or self._smallest_known()
            raise _SpentError(fallback, first or self._greedy_rest()) from error
        return list(self._causes.values()), first or self._greedy_rest()

    def _without(self, removed: Part) -> tuple[Flow, ...]:
        return tuple(flow for i, flow in enumerate(self._flows) if i not in removed)

    def _greedy_rest(self) -> tuple[Flow, ...]:
        """The whole without a flow of every part found."""
        removed: set[int] = set()
        for part in self._parts:
            if not part & removed:
                removed.add(self._least_needed_first(part)[-1])
        return self._without(frozenset(removed))

    def _least_needed_first(self, part: Part) -> list[int]:
        """Its flows; the last one is in the most parts found, so it is removed first."""
        return sorted(part, key=lambda one: (sum(one in other for other in self._parts), one))

    def _part_without(self, removed: Part) -> Part | None:
        """A slow part that has none of these flows, or None."""
        for part in self._parts:
            if not part & removed:
                return part
        rest = [i for i in range(len(self._flows)) if i not in removed]
        if not rest or not self._slow(rest):
            return None
        part = frozenset(self._smallest(rest))
        self._parts.append(part)
        flows = tuple(self._flows[i] for i in sorted(part))
        self._parts += self._asker.likeness.images_within(flows, self._flows)
        first = Cause(flows=flows, minimal=True, alike=-1)
        cause = self._causes.setdefault(self._label(flows), first)
        more = self._count(self._parts)
        self._causes[self._label(flows)] = msgspec.structs.replace(cause, alike=cause.alike + more)
        return part

    def _count(self, parts: Sequence[Part]) -> int:
        """How many parts are new; one whose flows are in the whole twice counts once."""
        sets = {transfer_set(self._flows[i] for i in part) for part in parts} - self._counted
        self._counted |= sets
        return len(sets)

    def _smallest(self, rest: Sequence[int]) -> tuple[int, ...]:
        """A minimal slow part of `rest`, which is slow; checked without any symmetry."""
        for _ in range(2):
            pair = self._slow_pair(rest)
            part = pair or smallest_slow_part(rest, self._slow)
            part = self._shrunk(part)
            if self._verdict(part, exact=True):
                return part
            # An image was slow and this is not: the symmetry does not hold for rates.
            self._asker.likeness.trust_nothing()
            self._rates.clear()
            self._remember_known()
        names = " ".join(str(self._flows[i]) for i in part)
        raise ContradictionError(f"{names} is slow in some measurements and quick in others")

    def _slow_pair(self, rest: Sequence[int]) -> tuple[int, ...] | None:
        shared = {
            pair: self._related(self._flows[pair[0]], self._flows[pair[1]])
            for pair in combinations(rest, 2)
        }
        likely = sorted((pair for pair in shared if shared[pair]), key=lambda one: -shared[one])
        tried: set[tuple[int, ...]] = set()
        for pair in likely:
            key = self._asker.likeness.key([self._flows[i] for i in pair])
            if key in tried:
                continue
            if len(tried) >= PAIRS:
                break
            tried.add(key)
            if self._slow(pair):
                return pair
        return None

    def _shrunk(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """The part without flows that it is slow without: noise may have kept some."""
        for one in part:
            less = tuple(i for i in part if i != one)
            if len(less) > 1 and self._slow(less):
                part = less
        return part

    def _slow(self, part: Sequence[int]) -> bool:
        if len(part) < 2:
            return False
        flows = Counter(self._flows[i] for i in part)
        if any(gbps <= self.limit and known <= flows for known, gbps in self._rates):
            return True
        if any(gbps > self.limit and flows <= known for known, gbps in self._rates):
            return False
        return self._verdict(part, exact=False)

    def _verdict(self, part: Sequence[int], *, exact: bool) -> bool:
        """Whether a measurement says slow; one that leaves it open is repeated."""
        flows = [self._flows[i] for i in part]
        rate = self._asker.exact(flows) if exact else self._asker.rate(flows)
        for _ in range(AGAIN - 1):
            if abs(rate.gbps - self.limit) >= CERTAIN * rate.error * rate.gbps:
                break
            rate = self._asker.again(flows)
        self._rates.append((Counter(flows), rate.gbps))
        return bool(rate.gbps <= self.limit)

    def _smallest_known(self) -> list[Cause]:
        """The smallest part that is known to be slow, if it is not the whole."""
        slow = [known for known, gbps in self._rates if gbps <= self.limit]
        smallest = min(slow, key=lambda known: known.total(), default=None)
        if smallest is None or smallest.total() >= len(self._flows):
            return []
        return [Cause(flows=transfer_set(smallest.elements()).flows, minimal=False)]
