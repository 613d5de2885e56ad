"""Which sets of flows look the same by a machine's symmetry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from tccl_py.model.symmetry import Symmetry
from tccl_py.model.transfer import Flow, Place

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
