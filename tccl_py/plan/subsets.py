"""Rings for communicators over some of the GPUs, planned once for each class of equal subsets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import numpy as np

from tccl_py.errors import MeasurementError, SearchError
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.rings import RingSet
from tccl_py.model.symmetry import Symmetry, automorphisms
from tccl_py.model.transfer import Fifo, Flow, Place, Transfer, TransferSet, transfer_set
from tccl_py.nccl.settings import Settings
from tccl_py.plan.plan import SubsetRings
from tccl_py.plan.tasks import Order, Task, search_under
from tccl_py.search.problem import Budget

ALL_SUBSETS_UP_TO = 8
"""Machines with more GPUs have too many subsets."""
SUBSET_BUDGET = Budget(sets=60, idle_sets=15)
SUBSET_RING_COUNTS = (1, 2)


def subset_rings(
    task: Task, settings: Settings, orders: Sequence[Order]
) -> tuple[SubsetRings, ...]:
    """Return rings for every proper subset of two GPUs or more, under the plan's settings.

    Subsets that a symmetry of the machine exchanges share one search. Machines with more than
    ALL_SUBSETS_UP_TO GPUs have none.
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
    """Return rings over exactly these GPUs; None where the settings leave a GPU without a hop."""
    gpus = tuple(sorted(subset))
    part = msgspec.structs.replace(
        task, gpus=gpus, ring_counts=SUBSET_RING_COUNTS, budget=SUBSET_BUDGET
    )
    # The whole machine's rings without the GPUs that are missing are a good beginning.
    known = [tuple(tuple(gpu for gpu in order if gpu in gpus) for order in orders)]
    try:
        result = search_under(part, settings, orders=known, floor=0.0, sets=SUBSET_BUDGET.sets or 1)
    except (SearchError, MeasurementError):
        return None
    if result.cancelled:
        raise KeyboardInterrupt
    rings = tuple(one.gpus for one in result.rings.rings)
    return SubsetRings(gpus=gpus, rings=rings, rate_gbps=result.rate_gbps)


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


# The machine's limit for given rings: bare copies over the same hops, all at the same time.


def limit_gbps(source: BandwidthSource, rings: RingSet, *, assumed: bool) -> float | None:
    """Measure bare copies over the hops of a ring set, by copy engines and by kernels.

    Return the better of the two in GB/s, scored as the rings are; None if neither can be measured.
    With `assumed` assumed values may lie behind the limit, as they do behind the plan.
    """
    rates = []
    for copy_engine in (True, False):
        with suppress(MeasurementError):
            (found,) = source.measure([bare_copies(rings, copy_engine=copy_engine)])
            if assumed or not found.assumed:
                rates.append(rings.rate(found))
    return max(rates, default=None)


def bare_copies(rings: RingSet, *, copy_engine: bool) -> TransferSet:
    """Return a plain transfer for each transfer of the rings' hops.

    A bounce becomes an independent write and read of host memory as large as its FIFOs together:
    in a larger buffer the host's memory would decide, not its caches.
    """
    flows = []
    for flow in rings.flows.flows:
        size = (flow.blocks or 1) * (flow.fifo or Fifo()).bytes if flow.is_bounce else None
        for one in flow.transfers:
            executor = Place("D" if copy_engine else "G", one.executor.index)
            bare = Transfer(one.source, executor, one.destination)
            flows.append(Flow((bare,), buffer=size))
    return transfer_set(flows)
