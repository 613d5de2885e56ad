"""What a model, or a plan's own rates, say of a job's communication without jobs.

Latency is not simulated. A ring collective has the bandwidth of the arm's rings; broadcast and
reduce leave out the hop back to the root, and take every root in turn. Transfers of send/recv and
all-to-all run at once, and the slowest decides.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import groupby, permutations
from typing import NamedTuple

from msgspec.structs import replace

from tccl_py.errors import MeasurementError, SearchError
from tccl_py.experiments.communication import Communication, communication_of, timed_calls
from tccl_py.experiments.spec import COLLECTIVES, MIB, Collective, Row, bus_gbps
from tccl_py.model.measurement import IN_DRY_RUN, BandwidthSource, mark
from tccl_py.model.rings import Hop, Ring, neighbours
from tccl_py.model.transfer import transfer_set
from tccl_py.nccl.settings import Settings
from tccl_py.plan.chains import ChoiceName, Order, condense
from tccl_py.plan.plan import Plan
from tccl_py.planning.request import PlanRequest, Task
from tccl_py.sources.bench import Bench, bench_of
from tccl_py.workloads.workload import Workload

_LEAST_BYTES = 16 * MIB
"""Bandwidth decides from this size on; what smaller messages take no rate tells."""


def predicted_communication(
    plan: Plan, workload: Workload, source: BandwidthSource | None = None
) -> Communication | None:
    """Predict a workload's communication by each choice; None where nothing can be said.

    Without a `source`, which is of a single host, ring collectives over all GPUs have the plan's
    own rates, and other rows none. Raises InputError: the workload is of another number of ranks.
    """
    calls = timed_calls(workload, len(plan.orders[0]))
    bench = None if source is None else bench_of(source)
    times: dict[ChoiceName, dict[Row, list[float]]] = {name: {} for name in plan.choices}
    large = sorted((row for row in calls if row.bytes >= _LEAST_BYTES), key=lambda row: row.groups)
    for groups, grouped in groupby(large, key=lambda row: row.groups):
        rows, gpus = list(grouped), () if bench is None else plan.gpus
        sets = [tuple(gpus[rank] for rank in group) for group in groups if gpus] or [gpus]
        ranks = max(map(len, groups), default=workload.ranks)
        for name, of in times.items():
            # A graph file fails communicators over fewer GPUs.
            if not groups or (bench is not None and name != "graph"):
                rates = _rates(plan, bench, sets, name, {row.collective for row in rows})
                for row in (row for row in rows if row.collective in rates):
                    seconds = bus_gbps(row.collective, ranks, row.bytes, 1.0)
                    of[row] = [seconds / rates[row.collective]]
    known = {row: count for row, count in calls.items() if row in times["default"]}
    if not known:
        return None
    measured = "predicted from measurements" + IN_DRY_RUN * plan.dry_run
    simulated = mark(simulated=True, assumed=plan.any_assumed, dry_run=plan.dry_run)
    basis = simulated if plan.simulated else measured
    return communication_of(workload, known, times, basis=basis)


class _Part(NamedTuple):
    """Rings over a set of GPUs under an arm's settings."""

    task: Task
    settings: Settings
    rings: Sequence[Ring]


def _rates(
    plan: Plan,
    source: Bench | None,
    gpu_sets: Iterable[Order],
    name: ChoiceName,
    collectives: Iterable[Collective],
) -> dict[Collective, float]:
    """Return the bus bandwidth of large collectives in an arm, in all sets of GPUs at once.

    None where its rings have no rate. Without a source, ring collectives have the plan's own.
    """
    if source is None:
        rate = plan.choices[name].rate_gbps
        return {c: rate for c in collectives if rate and COLLECTIVES[c].pattern == "ring"}
    try:
        parts = [_part(plan, source, gpus, name) for gpus in gpu_sets]
        return {collective: _gbps(parts, source, collective) for collective in collectives}
    except (SearchError, MeasurementError):
        return {}


def _part(plan: Plan, source: Bench, gpus: Order, name: ChoiceName) -> _Part:
    task = Task(
        host=plan.cluster.classes[0],
        source=source,
        gpus=gpus,
        request=PlanRequest(version=plan.settings.version, pinned_env=plan.pinned_env),
    )
    settings, planned = plan.choices[name].settings, plan.subset(gpus)
    if name != "graph" or planned is None or not planned.gains:
        # A set of GPUs without a graph file gets the variables alone.
        settings = replace(settings, shm_placement=False)
        rings_alone = task.default_rings(settings)
        # NCCL doubles the channels of its own search as it does a graph file's.
        settings = replace(settings, channels=max(1, rings_alone.channels // 2))
        orders = condense(rings_alone.rings)
    else:
        orders = planned.rings
        nodes = dict(zip(planned.gpus, planned.nodes, strict=False))
        task = replace(task, nodes=nodes, spaces={})
    return _Part(task, settings, task.rings_under(settings, orders).rings)


def _gbps(parts: Sequence[_Part], source: Bench, collective: Collective) -> float:
    def slowest(moved: Iterable[Hop]) -> float:
        (measurement,) = source.measure([transfer_set(hop.flow for hop in moved)])
        return measurement.rate_gbps

    pattern, count = COLLECTIVES[collective].pattern, min(len(part.rings) for part in parts)
    hops = [hop for part in parts for ring in part.rings for hop in ring.hops]
    if pattern == "ring":
        return count * slowest(hops)
    if pattern in ("from root", "to root"):
        back = "target" if pattern == "from root" else "source"
        roots = zip(*(part.task.gpus for part in parts), strict=False)
        without = ([hop for hop in hops if getattr(hop, back) not in of] for of in roots)
        return count * statistics.harmonic_mean(map(slowest, without))
    # The transfers to all peers share the channels.
    moved: list[Hop] = []
    peers = 1
    for task, settings, _ in parts:
        gpus = task.gpus
        pairs: Iterable[Order] = neighbours(gpus)
        if pattern == "to all":
            pairs = permutations(gpus, 2)
        elif collective == "send":
            pairs = [gpus[:2]]
        peers = len(gpus) - 1 if pattern == "to all" else 1
        space = task.space(settings, peers)
        moved += [space.between(pair[0], pair[1])[0] for pair in pairs]
    return peers * slowest(moved)
