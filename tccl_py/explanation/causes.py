"""The smallest slow parts of a set of flows, from as few measurements as possible.

Journal and symmetry come first. Parts are found by removing flows and measuring again. Supersets of
slow sets are slow, so known rates of parts and of wholes answer most questions. Next, pairs that
share a link or memory are measured, then QuickXplain halves the rest (`search/bounds.py`).
Further causes are found in the rest without a flow of every known cause: the hitting-set tree of
Reiter (Artificial Intelligence 32, 1987), depth first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, combinations

import msgspec
import numpy as np

from tccl_py.errors import BudgetSpentError
from tccl_py.model.measurement import Measurement
from tccl_py.model.symmetry import FlowCodes, Symmetry, smallest_row
from tccl_py.model.transfer import Flow, TransferSet, transfer_set
from tccl_py.search.bounds import smallest_slow_part
from tccl_py.sources.bench import Allowance, Bench

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
_FEW_FLOWS = 6
"""Larger sets are hardly ever images of others, and cost more to compare."""
_ROWS = 4096
"""Elements of a large group that are compared; fewer images are recognised then."""

Flows = Sequence[Flow]
Key = tuple[int, ...]
Label = Callable[[Flows], object]
Related = Callable[[Flow, Flow], int]
Positions = frozenset[int]
"""Positions of flows in the whole."""


class SymmetryKeys:
    """Keys of sets: sets with equal keys are images of one another.

    Where the symmetry lists only part of its group, some images have different keys.
    """

    def __init__(self, symmetry: Symmetry) -> None:
        self._codes, self._elements = FlowCodes(symmetry), symmetry.elements[:_ROWS]

    def trust_nothing(self) -> None:
        """From here on let each set be the image of itself alone."""
        self._elements = self._elements[:1]

    def key(self, flows: Flows) -> Key:
        """Return the key of a set; the order of its flows has no meaning."""
        elements = self._elements[:1] if len(flows) > _FEW_FLOWS else self._elements
        return smallest_row(np.sort(self._codes.images(flows, elements), axis=1))

    def images_within(self, part: Flows, flows: Flows) -> list[frozenset[int]]:
        """Return the images of `part` in `flows`, itself included, as positions of flows."""
        waiting: dict[int, list[int]] = {}
        (codes,) = self._codes.images(flows, self._elements[:1])
        for position, code in enumerate(codes.tolist()):
            waiting.setdefault(code, []).append(position)
        images = np.sort(self._codes.images(part, self._elements), axis=1)
        inside = np.isin(images, list(waiting)).all(axis=1)
        images_found = []
        for row in np.unique(images[inside], axis=0).tolist():
            counts = Counter(row)
            if all(count <= len(waiting[code]) for code, count in counts.items()):
                members = (waiting[code][:count] for code, count in counts.items())
                images_found.append(frozenset(chain.from_iterable(members)))
        return images_found


class Prober:
    """Asks a source for up to `max_sets` sets (None: any number), and remembers the answers.

    `symmetry` has keys of sets with equal rates. Without `network`, for rings without NICs, sets
    with NICs, as for a cluster, are ignored.
    """

    def __init__(
        self,
        source: Bench,
        symmetry: SymmetryKeys,
        *,
        max_sets: int | None = None,
        network: bool = False,
    ) -> None:
        self.source, self.symmetry = source, symmetry
        self.assumed = False
        self.known: list[TransferSet] = []
        self.allowance = Allowance(max_sets)
        self._rates: dict[TransferSet, Measurement] = {}
        self._images: dict[Key, TransferSet] = {}
        for transfers in source.sets:
            if network or not any(flow.is_network for flow in transfers.flows):
                self._note(transfers)

    def exact(self, flows: Flows) -> Measurement:
        """Return the rate of exactly these flows, over all measurements of them."""
        transfers = transfer_set(flows)
        if transfers not in self._rates:
            measurements = self.source.recall(transfers)
            if not measurements:
                return self.again(flows)
            rows = zip(*(measurement.samples_gbps for measurement in measurements), strict=True)
            samples = tuple(tuple(chain.from_iterable(row)) for row in rows)
            pooled = msgspec.structs.replace(measurements[0], samples_gbps=samples, outliers=())
            self.assumed |= pooled.assumed
            self._rates[transfers] = pooled
        return self._rates[transfers]

    def again(self, flows: Flows) -> Measurement:
        """Measure exactly these flows once more, and return the rate over all measurements."""
        transfers = transfer_set(flows)
        self.allowance.check()
        self.source.again(transfers)
        self.allowance.spent += 1
        self._rates.pop(transfers, None)
        if len(self.source.recall(transfers)) == 1:
            self._note(transfers)
        return self.exact(flows)

    def rate(self, flows: Flows) -> Measurement:
        """Return the rate of these flows, or of a known image if theirs is unknown."""
        return self.if_known(flows) or self.exact(flows)

    def best(self, flows: Flows) -> Measurement:
        """Return the rate of exactly these flows within the budget, else of a known image."""
        try:
            return self.exact(flows)
        except BudgetSpentError:
            return self.rate(flows)

    def if_known(self, flows: Flows) -> Measurement | None:
        """Return the rate of these flows or of an image, without a measurement."""
        transfers = transfer_set(flows)
        image = transfers
        if not self.source.recall(transfers):
            image = self._images.get(self.symmetry.key(flows), image)
        return self.exact(image.flows) if self.source.recall(image) else None

    def slowest_alone(self, flows: Flows) -> Measurement:
        """Return the rate of the slowest flow, each alone."""
        return min((self.rate([flow]) for flow in flows), key=lambda rate: rate.rate_gbps)

    def _note(self, transfers: TransferSet) -> None:
        self.known.append(transfers)
        self._images.setdefault(self.symmetry.key(transfers.flows), transfers)


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """A slow part of a set."""

    flows: tuple[Flow, ...]
    minimal: bool
    """Whether no flow can be left out."""
    alike: int = 0
    """The number of further parts that are equal to it."""


class Causes(msgspec.Struct, frozen=True, kw_only=True):
    """The causes of a set, and what is left of it."""

    causes: tuple[Cause, ...]
    """The worst first."""
    remaining: tuple[Flow, ...]
    """The flows that contain no cause as a whole."""
    spent: bool
    """Whether the budget ended first."""


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
    causes: list[Cause] = []
    remaining, spent = tuple(flows), False
    try:
        while not spent and len(causes) < most and is_hurt(prober, remaining):
            level = _RateLevel(prober, remaining, related, label or prober.symmetry.key)
            more, remaining, spent = level.causes(most - len(causes))
            causes += more
            if not more:
                break
    except BudgetSpentError:
        spent = True
    return Causes(causes=tuple(causes), remaining=remaining, spent=spent)


def is_hurt(prober: Prober, flows: Flows) -> bool:
    """Return whether flows together are slower than the slowest of them alone."""
    if len(flows) < 2:
        return False
    together, alone = prober.rate(flows), prober.slowest_alone(flows)
    doubt = CERTAIN * (together.relative_error + alone.relative_error)
    return together.rate_gbps < HURT * alone.rate_gbps * (1 - min(doubt, 1.0))


class _RateLevel:
    """The causes of one rate: all parts about as slow as the whole.

    `limit` is between the whole's rate and each flow's own, so no single flow is slow.
    """

    def __init__(
        self, prober: Prober, flows: tuple[Flow, ...], related: Related, label: Label
    ) -> None:
        self._prober, self._flows, self._related, self._label = prober, flows, related, label
        together, alone = prober.rate(flows).rate_gbps, prober.slowest_alone(flows).rate_gbps
        self.limit = min(NEAR * together, (together * alone) ** 0.5)
        self._rates: list[tuple[Counter[Flow], float]] = []
        self._remember_known()
        self._parts: list[Positions] = []
        self._causes: dict[object, tuple[tuple[Flow, ...], set[TransferSet]]] = {}

    def _remember_known(self) -> None:
        counts = Counter(self._flows)
        for transfers in self._prober.known:
            if counts.keys() >= set(transfers.flows) and Counter(transfers.flows) <= counts:
                rate = self._prober.exact(transfers.flows).rate_gbps
                self._rates.append((Counter(transfers.flows), rate))

    def causes(self, most: int) -> tuple[list[Cause], tuple[Flow, ...], bool]:
        """Return up to `most` causes, a rest without any, and whether the budget ended."""
        waiting: list[Positions] = [frozenset()]
        visited: set[Positions] = set()
        spent = False
        try:
            while waiting and len(visited) < NODES and len(self._causes) < most:
                removed = waiting.pop()
                if removed not in visited:
                    visited.add(removed)
                    part = self._part_without(removed)
                    waiting += [removed | {flow} for flow in self._least_needed_first(part)]
        except BudgetSpentError:
            spent = True
        causes = [
            Cause(flows=flows, minimal=True, alike=len(sets) - 1)
            for flows, sets in self._causes.values()
        ]
        if spent and not causes:
            causes = self._smallest_known()
        gone: set[int] = set()
        for part in self._parts:
            if not part & gone:
                gone.add(self._least_needed_first(part)[-1])
        return causes, tuple(flow for i, flow in enumerate(self._flows) if i not in gone), spent

    def _least_needed_first(self, part: Positions) -> list[int]:
        return sorted(part, key=lambda flow: (sum(flow in slow for slow in self._parts), flow))

    def _part_without(self, removed: Positions) -> Positions:
        """Return a slow part without these flows; empty if there is none."""
        for part in self._parts:
            if not part & removed:
                return part
        remaining = [i for i in range(len(self._flows)) if i not in removed]
        if not self._slow(remaining):
            return frozenset()
        part = frozenset(self._smallest(remaining))
        flows = tuple(self._flows[i] for i in sorted(part))
        parts = [part, *self._prober.symmetry.images_within(flows, self._flows)]
        self._parts += parts
        # A part whose flows are in the whole twice counts once.
        _, sets = self._causes.setdefault(self._label(flows), (flows, set()))
        sets.update(transfer_set(self._flows[i] for i in image) for image in parts)
        return part

    def _smallest(self, remaining: Sequence[int]) -> tuple[int, ...]:
        """Return a minimal slow part of `remaining`, checked without any symmetry."""
        for _ in range(2):
            part = self._slow_pair(remaining) or smallest_slow_part(remaining, self._slow)
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

    def _slow_pair(self, remaining: Sequence[int]) -> tuple[int, ...] | None:
        """Return a slow pair of flows that share a part, if few measurements tell one."""
        pairs: dict[Key, tuple[int, int, int]] = {}
        for first, second in combinations(remaining, 2):
            flows = self._flows[first], self._flows[second]
            if shared := self._related(*flows):
                pairs.setdefault(self._prober.symmetry.key(flows), (-shared, first, second))
        likely = (pair[1:] for pair in sorted(pairs.values())[:PAIRS])
        return next((pair for pair in likely if self._slow(pair)), None)

    def _slow(self, part: Sequence[int]) -> bool:
        if len(part) < 2:
            return False
        flows = Counter(self._flows[i] for i in part)
        if any(gbps <= self.limit and measured <= flows for measured, gbps in self._rates):
            return True
        if any(gbps > self.limit and flows <= measured for measured, gbps in self._rates):
            return False
        return self._measured_slow(part, exact=False)

    def _measured_slow(self, part: Sequence[int], *, exact: bool) -> bool:
        flows = [self._flows[i] for i in part]
        rate = self._prober.exact(flows) if exact else self._prober.rate(flows)
        for _ in range(AGAIN - 1):
            if abs(rate.rate_gbps - self.limit) >= CERTAIN * rate.relative_error * rate.rate_gbps:
                break
            rate = self._prober.again(flows)
        self._rates.append((Counter(flows), rate.rate_gbps))
        return bool(rate.rate_gbps <= self.limit)

    def _smallest_known(self) -> list[Cause]:
        slow = [measured for measured, gbps in self._rates if gbps <= self.limit]
        smallest = min(slow, key=lambda measured: measured.total(), default=None)
        if smallest is None or smallest.total() >= len(self._flows):
            return []
        return [Cause(flows=transfer_set(smallest.elements()).flows, minimal=False)]
