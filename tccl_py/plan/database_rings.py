"""The ring of every set of GPUs of one node, with free choice of mechanism for every hop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
import numpy as np

from tccl_py.errors import MeasurementError, SearchError
from tccl_py.plan.database_search import DatabaseTask, agrees, fixing
from tccl_py.plan.tasks import Order, measured_well
from tccl_py.search.problem import Budget, SearchProblem
from tccl_py.topology.cuts import natural_cuts
from tccl_py.topology.symmetry import Symmetry, automorphisms
from tccl_py.transfers.canonical import relabelled_hop
from tccl_py.transfers.hops import Ring, ring, ring_set

RING_BUDGET = Budget(sets=1000, idle_sets=50)
"""For one set of GPUs."""
WHOLE_BUDGET = Budget(sets=2000, idle_sets=100)
"""For all GPUs together."""
WORTH = 1.01
"""A ring known beforehand gives way to one that is better by more."""


class SearchedRing(msgspec.Struct, frozen=True, kw_only=True):
    """The best ring found over some GPUs; no other exceeds `bound_gbps` (None: nobody knows)."""

    ring: Ring
    rate_gbps: float
    bound_gbps: float | None


class SearchedRings(msgspec.Struct, frozen=True, kw_only=True):
    """Rings by their GPUs; `missing` are sets that have none, and why."""

    rings: Mapping[Order, SearchedRing]
    missing: Mapping[Order, str]


def searched_rings(task: DatabaseTask) -> SearchedRings:
    """Find a ring for each set of GPUs; sets that a symmetry exchanges share one search.

    What symmetry says of a set is measured there, and where that disagrees the set gets a search of
    its own.

    Raises:
        SourceLostError: the source has no answers any more.
        KeyboardInterrupt: it was interrupted; half a database fails jobs.
    """
    search = _Search(task)
    for gpus in task.sets_of_gpus(least=2):
        search.find(gpus)
    return SearchedRings(rings=search.rings, missing=search.missing)


class _Search:
    """The sets that have a ring by now, and those that images of these may suit."""

    def __init__(self, task: DatabaseTask) -> None:
        self.rings: dict[Order, SearchedRing] = {}
        self.missing: dict[Order, str] = {}
        self._task = task
        self._symmetry = automorphisms(task.machine, task.knowledge)
        self._images: dict[Order, SearchedRing] = {}

    def find(self, gpus: Order) -> None:
        """Find a ring over these GPUs, or note why there is none."""
        try:
            found = self._image(gpus) or self._searched(gpus)
        except (SearchError, MeasurementError) as error:
            self.missing[gpus] = str(error)
            return
        self.rings[gpus] = found

    def _image(self, gpus: Order) -> SearchedRing | None:
        """The image of another set's ring, if its own measurement agrees with that one's."""
        image = self._images.get(gpus)
        if image is None:
            return None
        measurement = measured_well(self._task.source, ring_set([image.ring]))
        if not agrees(measurement.rate_gbps, image.rate_gbps, measurement.relative_error):
            return None
        return msgspec.structs.replace(image, rate_gbps=measurement.rate_gbps)

    def _searched(self, gpus: Order) -> SearchedRing:
        task = self._task
        result = task.found(
            SearchProblem(
                spaces={1: task.hop_space(gpus)},
                source=task.source,
                symmetry=fixing(self._symmetry, [f"G{gpu}" for gpu in gpus]),
                orders=self._known_orders(gpus),
                cuts=natural_cuts(task.machine, task.knowledge, gpus=gpus),
                budget=WHOLE_BUDGET if gpus == task.gpus else RING_BUDGET,
            )
        )
        (best,) = result.rings.rings
        rate = measured_well(task.source, result.rings).rate_gbps
        for known in task.rings:
            if tuple(sorted(known.gpus)) == gpus:
                other = measured_well(task.source, ring_set([known])).rate_gbps
                if other * WORTH >= rate:
                    best, rate = known, other
        found = SearchedRing(ring=best, rate_gbps=rate, bound_gbps=result.bound_gbps)
        for image in images(best, self._symmetry):
            same = msgspec.structs.replace(found, ring=image)
            self._images.setdefault(tuple(sorted(image.gpus)), same)
        return found

    def _known_orders(self, gpus: Order) -> tuple[tuple[Order, ...], ...]:
        """Rings known beforehand, and the one over all GPUs, without the GPUs that are missing."""
        whole = self.rings.get(self._task.gpus)
        known = [*self._task.rings, *([whole.ring] if whole is not None else [])]
        orders = [tuple(gpu for gpu in one.gpus if gpu in gpus) for one in known]
        whole_orders = [one for one in orders if len(one) == len(gpus)]
        return tuple((one,) for one in dict.fromkeys(whole_orders))


def images(one: Ring, symmetry: Symmetry) -> Iterator[Ring]:
    """The images of a ring over other GPUs, one for each set of them."""
    columns = [symmetry.points.index(f"G{gpu}") for gpu in one.gpus]
    moved = np.sort(symmetry.elements[:, columns], axis=1)
    _, rows = np.unique(moved, axis=0, return_index=True)
    for row in symmetry.elements[rows].tolist():
        names = {point: symmetry.points[to] for point, to in zip(symmetry.points, row, strict=True)}
        yield ring([relabelled_hop(hop, names) for hop in one.hops])
