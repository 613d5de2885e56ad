"""Rates of sets of flows, asked for as seldom as possible: the journal and symmetry come first."""

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
from tccl_py.sources.memory import RememberingSource

# Which sets of flows look the same by a machine's symmetry.


Key = tuple[int, ...]

_FEW_FLOWS = 6
"""Larger sets hardly ever come back as images of others, and cost more to compare."""
_ROWS = 4096
"""Elements of a large group that are looked at; fewer images are recognised then."""


class Likeness:
    """Keys of sets: sets with equal keys are images of one another.

    Where the symmetry lists only part of its group, some images have different keys.
    """

    def __init__(self, symmetry: Symmetry) -> None:
        self._position = {point: i for i, point in enumerate(symmetry.points)}
        # The last column stands for what no symmetry moves.
        elements = symmetry.elements[:_ROWS].astype(np.int64)
        fixed = np.full((len(elements), 1), len(symmetry.points), dtype=np.int64)
        self._rows = np.hstack([elements, fixed])
        self._forms: dict[str, int] = {}

    def trust_nothing(self) -> None:
        """From here on every set is like itself alone."""
        self._rows = self._rows[:1]

    def key(self, flows: Sequence[Flow]) -> Key:
        """The key of a set; the order of its flows has no meaning."""
        rows = self._rows[:1] if len(flows) > _FEW_FLOWS else self._rows
        images = self._images(flows, rows)
        # The first in lexicographic order, without sorting all of them.
        for column in range(images.shape[1]):
            images = images[images[:, column] == images[:, column].min()]
        return tuple(int(code) for code in images[0])

    def images_within(self, part: Sequence[Flow], whole: Sequence[Flow]) -> list[frozenset[int]]:
        """The images of `part` in `whole`, itself included, as positions of their flows."""
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

    def _images(self, flows: Sequence[Flow], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """One row of sorted flow codes for each image of the set."""
        base = len(self._position) + 1
        columns = []
        for flow in flows:
            codes = np.full(len(rows), self._form(flow), dtype=np.int64)
            for place in _places(flow):
                codes = codes * base + rows[:, self._column(place)]
            columns.append(codes)
        return np.sort(np.stack(columns, axis=1), axis=1)

    def _column(self, place: Place) -> int:
        name = f"{'G' if place.kind == 'D' else place.kind}{place.index}"
        return self._position.get(name, len(self._position))

    def _form(self, flow: Flow) -> int:
        """A number for all that a relabelling leaves as it is: kinds of places and options."""
        kinds = "".join(place.kind for place in _places(flow))
        return self._forms.setdefault(f"{kinds} {flow.blocks} {flow.fifo}", len(self._forms) + 1)


def _places(flow: Flow) -> list[Place]:
    return [
        place for one in flow.transfers for place in (one.source, one.executor, one.destination)
    ]


Flows = Sequence[Flow]


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """A set's slowest flow, GB/s, with its relative standard error, and each flow's rate."""

    gbps: float
    error: float
    each: tuple[tuple[Flow, float], ...]


class Asker:
    """Asks a source for sets within a budget, and knows what it and its journal were asked.

    Args:
        source: answers; what it remembers costs nothing.
        likeness: which sets look the same.
        budget: how many sets may be measured, and for how long.
    """

    def __init__(self, source: RememberingSource, likeness: Likeness, *, budget: Budget) -> None:
        self.source, self.likeness = source, likeness
        self.assumed = False
        self._before = source.sets_measured
        self._limit = self._share = budget.sets
        self._until = time.monotonic() + (budget.seconds or float("inf"))
        self._rates: dict[TransferSet, Rate] = {}
        self._alike: dict[Key, TransferSet] = {}
        self._times: dict[TransferSet, int] = {}
        for known, times in source.times_known.items():
            flows = known.flows
            # A journal may have been a cluster's before; rings of one machine use no NIC.
            if not any(flow.is_network for flow in flows):
                self._times[known] = times
                self._note(known)

    @property
    def sets_measured(self) -> int:
        """What was measured for this, beyond what was known."""
        return self.source.sets_measured - self._before

    @property
    def known(self) -> tuple[TransferSet, ...]:
        """All sets with a rate."""
        return tuple(self._times)

    def share_out(self, parts: int) -> None:
        """From here on, let one of `parts` equal parts of what is left be spent."""
        if self._limit is not None:
            left = self._limit - self.sets_measured
            self._share = self.sets_measured + left // parts

    def exact(self, flows: Flows) -> Rate:
        """The rate of these very flows.

        Raises:
            BudgetSpentError: it would have to be measured and may not.
            MeasurementError: the source cannot measure it.
        """
        wanted = transfer_set(flows)
        if wanted not in self._times:
            self._measure(wanted)
        if wanted not in self._rates:
            self._rates[wanted] = self._rate(wanted)
        return self._rates[wanted]

    def rate(self, flows: Flows) -> Rate:
        """The rate of these flows or, if that is known and theirs is not, of an image of them.

        Raises:
            BudgetSpentError, MeasurementError: as `exact`.
        """
        image = self._image(flows)
        return self.exact(flows if image is None else image)

    def best(self, flows: Flows) -> Rate:
        """The rate of these very flows if the budget allows it, else of a known image."""
        try:
            return self.exact(flows)
        except BudgetSpentError:
            return self.rate(flows)

    def if_known(self, flows: Flows) -> Rate | None:
        """The rate of these flows or of an image, if that costs nothing."""
        image = self._image(flows)
        return None if image is None else self.exact(image)

    def again(self, flows: Flows) -> Rate:
        """The rate of these very flows with one more measurement in it.

        Raises:
            BudgetSpentError, MeasurementError: as `exact`.
        """
        wanted = transfer_set(flows)
        self._measure(wanted)
        self._rates[wanted] = self._rate(wanted)
        return self._rates[wanted]

    def _image(self, flows: Flows) -> Flows | None:
        if transfer_set(flows) in self._times:
            return flows
        image = self._alike.get(self.likeness.key(flows))
        return None if image is None else image.flows

    def _measure(self, wanted: TransferSet) -> None:
        if self._share is not None and self.sets_measured >= self._share:
            raise BudgetSpentError
        if time.monotonic() > self._until:
            raise BudgetSpentError
        times = self._times.get(wanted, 0) + 1
        self.source.measure([wanted] * times)
        self._times[wanted] = times
        self._note(wanted)

    def _note(self, known: TransferSet) -> None:
        self._alike.setdefault(self.likeness.key(known.flows), known)

    def _rate(self, wanted: TransferSet) -> Rate:
        pooled = _pooled(self.source.measure([wanted] * self._times[wanted]))
        self.assumed |= pooled.assumed
        return Rate(
            gbps=pooled.rate_gbps,
            error=_error(pooled),
            each=tuple(zip(wanted.flows, pooled.gbps, strict=True)),
        )


def _pooled(measurements: Sequence[Measurement]) -> Measurement:
    """All samples of several measurements of one set in one."""
    rows = zip(*(one.samples_gbps for one in measurements), strict=True)
    samples = tuple(tuple(chain.from_iterable(row)) for row in rows)
    return msgspec.structs.replace(measurements[0], samples_gbps=samples, outliers=())


def _error(pooled: Measurement) -> float:
    """The relative standard error; of a rate of 0 among others it is unknown, so all of it."""
    stalled = pooled.rate_gbps <= 0 and any(any(row) for row in pooled.samples_gbps)
    return 1.0 if stalled else pooled.relative_error
