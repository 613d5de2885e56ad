"""Rings for communicators over some of the GPUs, planned once for each class of equal subsets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np

from tccl_py.errors import MeasurementError, SearchError
from tccl_py.measurements.measurement import BandwidthSource
from tccl_py.measurements.memory import RememberingSource
from tccl_py.plan.plan import Plan, SubsetRings
from tccl_py.plan.tasks import Order, Task, search_under
from tccl_py.runtimes.nccl.kept import kept_level
from tccl_py.runtimes.nccl.settings import Settings
from tccl_py.search.problem import Budget, SilentReporter
from tccl_py.topology.symmetry import Symmetry, automorphisms

ALL_SUBSETS_UP_TO = 8
"""Machines with more GPUs have too many subsets: theirs are planned when they are asked for."""
SUBSET_BUDGET = Budget(sets=60, idle_sets=15)
SUBSET_RING_COUNTS = (1, 2)


def subset_rings(
    task: Task, settings: Settings, orders: Sequence[Order]
) -> tuple[SubsetRings, ...]:
    """Rings for every proper subset of two GPUs or more, under the plan's settings.

    Subsets that a symmetry of the machine exchanges share one search. Empty on machines with more
    than ALL_SUBSETS_UP_TO GPUs.
    """
    if len(task.gpus) > ALL_SUBSETS_UP_TO:
        return ()
    symmetry = automorphisms(task.machine, task.knowledge)
    found: dict[Order, SubsetRings] = {}
    for size in range(2, len(task.gpus)):
        for subset in itertools.combinations(task.gpus, size):
            if subset not in found:
                planned = plan_subset(task, settings, orders, subset)
                if planned is not None:
                    found.update(_images(planned, symmetry))
    # A symmetry of the whole machine may take a subset to GPUs that are not planned for.
    inside = [subset for subset in found if set(subset) <= set(task.gpus)]
    return tuple(found[subset] for subset in sorted(inside, key=lambda s: (len(s), s)))


def plan_subset(
    task: Task, settings: Settings, orders: Sequence[Order], subset: Sequence[int]
) -> SubsetRings | None:
    """Rings over exactly these GPUs; None where the settings leave one without a hop."""
    gpus = tuple(sorted(subset))
    part = msgspec.structs.replace(
        task, gpus=gpus, ring_counts=SUBSET_RING_COUNTS, budget=SUBSET_BUDGET
    )
    # The whole machine's rings without the GPUs that are missing are a good beginning.
    known = [tuple(_without(order, gpus) for order in orders)]
    try:
        result = search_under(part, settings, orders=known, floor=0.0, sets=SUBSET_BUDGET.sets or 1)
    except (SearchError, MeasurementError):
        return None
    if result.cancelled:
        raise KeyboardInterrupt
    rings = tuple(one.gpus for one in result.rings.rings)
    return SubsetRings(gpus=gpus, rings=rings, rate_gbps=result.rate_gbps)


def subset_on_demand(
    plan: Plan, source: BandwidthSource, subset: Sequence[int]
) -> SubsetRings | None:
    """Rings over some of a plan's GPUs, under its settings; None where they allow none.

    Args:
        plan: of all the GPUs.
        source: answers transfer sets of the plan's machine.
        subset: two or more of its GPUs.
    """
    task = Task(
        machine=plan.machine,
        knowledge=plan.knowledge,
        source=RememberingSource(source),
        gpus=plan.gpus,
        version=plan.settings.version,
        ring_counts=SUBSET_RING_COUNTS,
        strategy="best-first",
        budget=SUBSET_BUDGET,
        reporter=SilentReporter(),
        p2p_level=kept_level(plan.kept),
    )
    return plan_subset(task, plan.settings, [ring.gpus for ring in plan.rings], subset)


def _without(order: Order, gpus: Sequence[int]) -> Order:
    return tuple(gpu for gpu in order if gpu in gpus)


def _images(planned: SubsetRings, symmetry: Symmetry) -> dict[Order, SubsetRings]:
    """The plan of a subset carried over to all subsets that look the same."""
    column = {int(p[1:]): i for i, p in enumerate(symmetry.points) if p.startswith("G")}
    gpu_at = {i: gpu for gpu, i in column.items()}
    moved = symmetry.elements[:, [column[gpu] for gpu in planned.gpus]]
    _, rows = np.unique(np.sort(moved, axis=1), axis=0, return_index=True)
    images = {planned.gpus: planned}
    for row in symmetry.elements[rows].tolist():
        rings = tuple(tuple(gpu_at[row[column[gpu]]] for gpu in ring) for ring in planned.rings)
        gpus = tuple(sorted(rings[0]))
        images.setdefault(gpus, SubsetRings(gpus=gpus, rings=rings, rate_gbps=planned.rate_gbps))
    return images
