"""The ring of every set of GPUs of one node, with free choice of mechanism for every hop."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from tccl_py.errors import MeasurementError, SearchError
from tccl_py.model.knowledge import Knowledge
from tccl_py.model.machine import Machine
from tccl_py.model.paths import natural_cuts
from tccl_py.model.rings import HopSpace, Ring, ring, ring_set
from tccl_py.model.symmetry import Symmetry, automorphisms, keeping, relabelled_hop
from tccl_py.nccl.pinned_env import direct_pairs
from tccl_py.nccl.versions import Level
from tccl_py.plan.tasks import Order, measured_well
from tccl_py.search.problem import Budget, Reporter, SearchProblem, SearchResult
from tccl_py.search.strategies import AGREEMENT, find_rings
from tccl_py.sources.memory import RememberingSource
from tccl_py.tccl_fork.hops import free_hop_space

# What the searches for a database's rings and chains share: the task, its budget, symmetry.


ALL_SETS_UP_TO = 8
"""So many GPUs have 247 sets of two or more; of more GPUs only the sets asked for are searched."""
LEAST_IDLE = 10
"""Sets without a better ring that any search may measure before it gives up."""


class DatabaseTask(msgspec.Struct, frozen=True, kw_only=True):
    """What a database is to be made of.

    `gpus` are all GPUs it is for; `subsets` those of them that jobs use, None being all subsets, as
    far as those are few. Each hop is moved by `blocks` thread blocks through FIFOs of `fifo_bytes`.
    `rings` are rings known beforehand: they stay unless one over their GPUs is better.
    After `max_sets` measured sets only what is known beforehand is tried. `p2p_level` is the one
    that all jobs have, if they do.
    """

    machine: Machine
    knowledge: Knowledge
    source: RememberingSource
    gpus: Order
    subsets: tuple[Order, ...] | None
    blocks: int
    fifo_bytes: int
    rings: tuple[Ring, ...]
    max_sets: int
    reporter: Reporter
    p2p_level: Level | None = None

    def hop_space(self, gpus: Sequence[int]) -> HopSpace:
        """The hops between some of the GPUs."""
        return free_hop_space(
            self.machine,
            self.knowledge,
            gpus=gpus,
            blocks=self.blocks,
            fifo_bytes=self.fifo_bytes,
            direct=direct_pairs(self.machine, self.knowledge, self.p2p_level, gpus=self.gpus),
        )

    def sets_of_gpus(self, *, least: int) -> tuple[Order, ...]:
        """The sets of `least` GPUs or more to search, largest first."""
        if self.subsets is None and len(self.gpus) <= ALL_SETS_UP_TO:
            sizes = range(len(self.gpus), least - 1, -1)
            return tuple(one for size in sizes for one in itertools.combinations(self.gpus, size))
        named = {tuple(sorted(one)) for one in (self.gpus, *(self.subsets or ()))}
        wanted = [one for one in named if len(one) >= least]
        return tuple(sorted(wanted, key=lambda one: (-len(one), one)))

    def found(self, problem: SearchProblem) -> SearchResult:
        """The answer of a search, cut short where the sets are used up.

        Raises:
            SearchError: there is no ring.
            MeasurementError: a set could not be measured.
            KeyboardInterrupt: it was interrupted; half a database fails jobs.
        """
        left = self.max_sets - self.source.sets_measured
        if left <= 0:
            known = msgspec.structs.replace(problem, budget=Budget())
            result = find_rings(known, strategy="nccl-order", reporter=self.reporter)
        else:
            # The fewer sets are left, the sooner a search gives up: others come after it.
            idle = int((problem.budget.idle_sets or 0) * left / self.max_sets)
            sets = min(problem.budget.sets or left, left)
            budget = Budget(sets=sets, idle_sets=max(LEAST_IDLE, idle))
            limited = msgspec.structs.replace(problem, budget=budget)
            result = find_rings(limited, reporter=self.reporter)
        if result.cancelled:
            raise KeyboardInterrupt
        return result


def fixing(symmetry: Symmetry, points: Sequence[str]) -> Symmetry:
    """The listed elements that keep a set of points as it is."""
    columns = [symmetry.points.index(point) for point in points]
    moved = np.sort(symmetry.elements[:, columns], axis=1)
    return keeping(symmetry, (moved == np.sort(columns)).all(axis=1))


def agrees(rate_gbps: float, expected_gbps: float, relative_error: float) -> bool:
    """Whether a rate is what a symmetry says, as far as noise lets tell."""
    allowed = AGREEMENT + 6 * relative_error
    return abs(rate_gbps - expected_gbps) <= allowed * expected_gbps


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
