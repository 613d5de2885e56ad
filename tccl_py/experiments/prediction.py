"""A job's communication as a plan predicts it, without jobs: large messages alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from tccl_py.experiments.collectives import COLLECTIVES, bus_gbps
from tccl_py.experiments.communication import Communication, communication_of, timed_calls
from tccl_py.experiments.evaluation import arm_rates
from tccl_py.experiments.spec import MIB, Groups, Row
from tccl_py.model.measurement import BandwidthSource
from tccl_py.plan.chains import ChoiceName
from tccl_py.plan.plan import Plan
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
    rates: dict[ChoiceName, dict[Row, list[float]]] = {name: {} for name in plan.choices}
    large = sorted((row for row in calls if row.bytes >= _LEAST_BYTES), key=lambda row: row.groups)
    for groups, rows in groupby(large, key=lambda row: row.groups):
        for name, row, gbps in _rates(plan, bench, groups, list(rows)):
            ranks = max(map(len, groups), default=workload.ranks)
            rates[name][row] = [bus_gbps(row.collective, ranks, row.bytes, 1.0) / gbps]
    known = {row: count for row, count in calls.items() if row in rates["default"]}
    if not known:
        return None
    basis = plan.provenance if plan.simulated else "predicted from measurements"
    return communication_of(workload, known, rates, basis=basis)


def _rates(
    plan: Plan, bench: Bench | None, groups: Groups, rows: Sequence[Row]
) -> Iterator[tuple[ChoiceName, Row, float]]:
    """Yield the bus bandwidth of rows in groups of ranks by each choice that can run them."""
    for name, choice in plan.choices.items():
        if bench is not None:
            # A graph file fails communicators over fewer GPUs.
            sets = [tuple(plan.gpus[rank] for rank in group) for group in groups] or [plan.gpus]
            wanted = dict.fromkeys(row.collective for row in rows)
            found = {} if groups and name == "graph" else arm_rates(plan, bench, sets, name, wanted)
        else:
            rings = [] if groups else [n for n, f in COLLECTIVES.items() if f.pattern == "ring"]
            found = {} if choice.rate_gbps is None else dict.fromkeys(rings, choice.rate_gbps)
        yield from ((name, row, found[row.collective]) for row in rows if row.collective in found)
