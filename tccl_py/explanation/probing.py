"""Rates of sets of flows from as few measurements as possible: journal and symmetry come first."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt

from tccl_py.model.measurement import Measurement
from tccl_py.model.symmetry import Symmetry
from tccl_py.model.transfer import Flow, Place, TransferSet, transfer_set
from tccl_py.search.evaluator import BudgetSpentError
from tccl_py.search.problem import Budget
from tccl_py.sources.journal import RememberingSource

Flows = Sequence[Flow]
Key = tuple[int, ...]

_FEW_FLOWS = 6
"""Larger sets are hardly ever images of others, and cost more to compare."""
_ROWS = 4096
"""Elements of a large group that are compared; fewer images are recognised then."""


class SymmetryKeys:
    """Keys of sets: sets with equal keys are images of one another.

    Where the symmetry lists only part of its group, some images have different keys.
    """

    def __init__(self, symmetry: Symmetry) -> None:
        self._position = {point: i for i, point in enumerate(symmetry.points)}
        # The last column stands for places that no symmetry moves.
        elements = symmetry.elements[:_ROWS].astype(np.int64)
        fixed = np.full((len(elements), 1), len(symmetry.points), dtype=np.int64)
        self._rows = np.hstack([elements, fixed])
        self._forms: dict[str, int] = {}

    def trust_nothing(self) -> None:
        """From here on let each set be the image of itself alone."""
        self._rows = self._rows[:1]

    def key(self, flows: Flows) -> Key:
        """Return the key of a set; the order of its flows has no meaning."""
        images = self._images(flows, self._rows[:1] if len(flows) > _FEW_FLOWS else self._rows)
        # The first in lexicographic order, without sorting all of them.
        for column in range(images.shape[1]):
            images = images[images[:, column] == images[:, column].min()]
        return tuple(int(code) for code in images[0])

    def images_within(self, part: Flows, whole: Flows) -> list[frozenset[int]]:
        """Return the images of `part` in `whole`, itself included, as positions of flows."""
        waiting: dict[int, list[int]] = {}
        for position, flow in enumerate(whole):
            (code,) = self._images([flow], self._rows[:1])[0]
            waiting.setdefault(int(code), []).append(position)
        images = self._images(part, self._rows)
        inside = np.isin(images, list(waiting)).all(axis=1)
        found = []
        for row in np.unique(images[inside], axis=0).tolist():
            counts = Counter(row)
            if all(count <= len(waiting[code]) for code, count in counts.items()):
                taken = (waiting[code][:count] for code, count in counts.items())
                found.append(frozenset(chain.from_iterable(taken)))
        return found

    def _images(self, flows: Flows, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return a row of sorted flow codes for each image of the set."""
        base = len(self._position) + 1
        columns = []
        for flow in flows:
            parts = flow.transfers
            places = [p for one in parts for p in (one.source, one.executor, one.destination)]
            # A relabelling keeps the kinds of places and the options.
            form = f"{''.join(place.kind for place in places)} {flow.blocks} {flow.fifo}"
            number = self._forms.setdefault(form, len(self._forms) + 1)
            codes = np.full(len(rows), number, dtype=np.int64)
            for place in places:
                codes = codes * base + rows[:, self._column(place)]
            columns.append(codes)
        return np.sort(np.stack(columns, axis=1), axis=1)

    def _column(self, place: Place) -> int:
        name = f"{'G' if place.kind == 'D' else place.kind}{place.index}"
        return self._position.get(name, len(self._position))


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """The rate of a set's slowest flow, GB/s, its relative standard error, and all flows' rates."""

    gbps: float
    error: float
    each: tuple[tuple[Flow, float], ...]


class Prober:
    """Asks a source for sets within a budget, and remembers the answers.

    `symmetry` has keys of sets with equal rates. Without `network`, for rings without NICs, sets
    with NICs, as for a cluster, are ignored.
    """

    def __init__(
        self,
        source: RememberingSource,
        symmetry: SymmetryKeys,
        *,
        budget: Budget,
        network: bool = False,
    ) -> None:
        self.source, self.symmetry = source, symmetry
        self.assumed = False
        self._before = source.sets_measured
        self._limit = self._share = budget.sets
        self._until = time.monotonic() + (budget.seconds or float("inf"))
        self._rates: dict[TransferSet, Rate] = {}
        self._images: dict[Key, TransferSet] = {}
        self._times: dict[TransferSet, int] = {}
        for known, times in source.times_known.items():
            if network or not any(flow.is_network for flow in known.flows):
                self._note(known, times)

    @property
    def sets_measured(self) -> int:
        """The number of sets measured, beyond the known ones."""
        return self.source.sets_measured - self._before

    @property
    def known(self) -> tuple[TransferSet, ...]:
        """All sets with a rate."""
        return tuple(self._times)

    def share_out(self, parts: int) -> None:
        """From here on allow one of `parts` equal parts of the rest of the budget."""
        if self._limit is not None:
            left = self._limit - self.sets_measured
            self._share = self.sets_measured + left // parts

    def exact(self, flows: Flows) -> Rate:
        """Return the rate of exactly these flows."""
        wanted = transfer_set(flows)
        if wanted not in self._times:
            self._measure(wanted)
        if wanted not in self._rates:
            self._rates[wanted] = self._pooled(wanted)
        return self._rates[wanted]

    def rate(self, flows: Flows) -> Rate:
        """Return the rate of these flows, or of a known image if theirs is unknown."""
        return self.exact(self._image(flows) or flows)

    def best(self, flows: Flows) -> Rate:
        """Return the rate of exactly these flows within the budget, else of a known image."""
        try:
            return self.exact(flows)
        except BudgetSpentError:
            return self.rate(flows)

    def if_known(self, flows: Flows) -> Rate | None:
        """Return the rate of these flows or of an image, without a measurement."""
        image = self._image(flows)
        return None if image is None else self.exact(image)

    def slowest_alone(self, flows: Flows) -> Rate:
        """Return the rate of the slowest flow, each alone."""
        return min((self.rate([flow]) for flow in flows), key=lambda rate: rate.gbps)

    def again(self, flows: Flows) -> Rate:
        """Measure exactly these flows once more, and return the rate over all measurements."""
        wanted = transfer_set(flows)
        self._measure(wanted)
        self._rates[wanted] = self._pooled(wanted)
        return self._rates[wanted]

    def _image(self, flows: Flows) -> Flows | None:
        if transfer_set(flows) in self._times:
            return flows
        image = self._images.get(self.symmetry.key(flows))
        return None if image is None else image.flows

    def _measure(self, wanted: TransferSet) -> None:
        spent = self._share is not None and self.sets_measured >= self._share
        if spent or time.monotonic() > self._until:
            raise BudgetSpentError
        times = self._times.get(wanted, 0) + 1
        self.source.measure([wanted] * times)
        self._note(wanted, times)

    def _note(self, known: TransferSet, times: int) -> None:
        self._times[known] = times
        self._images.setdefault(self.symmetry.key(known.flows), known)

    def _pooled(self, wanted: TransferSet) -> Rate:
        """Return the rate over the samples of all measurements of a set."""
        found: Sequence[Measurement] = self.source.measure([wanted] * self._times[wanted])
        rows = zip(*(one.samples_gbps for one in found), strict=True)
        samples = tuple(tuple(chain.from_iterable(row)) for row in rows)
        pooled = msgspec.structs.replace(found[0], samples_gbps=samples, outliers=())
        self.assumed |= pooled.assumed
        return Rate(
            gbps=pooled.rate_gbps,
            error=pooled.relative_error,
            each=tuple(zip(wanted.flows, pooled.gbps, strict=True)),
        )
