"""Evaluation without GPUs: large messages in every arm, by a model of the machine or by tables.

Latency is not simulated, so no size has a time. A ring collective has the bandwidth of the arm's
rings; broadcast and reduce leave out the hop back to the root, and take every root in turn.
Transfers of send/recv and all-to-all run at once, and the slowest decides.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations
from pathlib import Path

import msgspec

from tccl_py.errors import InputError, MeasurementError, SearchError
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.rings import Hop
from tccl_py.model.transfer import transfer_set
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.variables import pinned_level
from tccl_py.plan.choices import own_rings
from tccl_py.plan.plan import ChoiceName, Plan
from tccl_py.plan.table_jobs import plan_of_job
from tccl_py.plan.tables import job_gpus
from tccl_py.plan.tasks import Order, Task, condensed, orders_under
from tccl_py.readers.hosts import HostSlots
from tccl_py.search.problem import Budget
from tccl_py.sources.journal import remembering
from tccl_py.verify.evaluation import Cell
from tccl_py.verify.spec import Collective

_BY_RINGS: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter")


def simulated_cells(
    plan: Plan,
    source: BandwidthSource,
    gpu_sets: Iterable[Order],
    collectives: Sequence[Collective],
) -> Iterator[Cell]:
    """Yield large messages over sets of a machine's GPUs, by the rings of every arm."""
    remembered = remembering(source)
    for gpus in gpu_sets:
        task = Task(
            machine=plan.machine,
            knowledge=plan.knowledge,
            source=remembered,
            gpus=gpus,
            version=plan.settings.version,
            ring_counts=(1,),
            strategy=plan.strategy,
            budget=Budget(),
            p2p_level=pinned_level(plan.pinned_env),
        )
        rates = {name: _rates(task, plan, name, collectives) for name in plan.choices}
        for name, found in rates.items():
            for collective, gbps in found.items():
                default = rates["default"].get(collective)
                ratio = gbps / default if default else None
                yield Cell(gpus=gpus, collective=collective, arm=name, gbps=gbps, ratio=ratio)


def _rates(
    task: Task, plan: Plan, name: ChoiceName, collectives: Sequence[Collective]
) -> dict[Collective, float]:
    """Return the bus bandwidth of each collective in an arm; none where its rings have no rate."""
    settings, planned = plan.choices[name].settings, plan.subset(task.gpus)
    try:
        if name != "graph" or planned is None or not planned.gains:
            # A set of GPUs without a graph file gets the variables alone.
            settings = msgspec.structs.replace(settings, shm_placement=False)
            own = own_rings(task, settings)
            # NCCL doubles the channels of its own search as it does a graph file's.
            settings = msgspec.structs.replace(settings, channels=max(1, own.channels // 2))
            orders = condensed(own.rings)
        else:
            orders = planned.rings
            nodes = dict(zip(planned.gpus, planned.nodes, strict=False))
            task = msgspec.structs.replace(task, nodes=nodes, spaces={})
        rings = orders_under(task, settings, orders).rings
        hops = [hop for ring in rings for hop in ring.hops]
        return {one: _gbps(task, settings, hops, len(rings), one) for one in collectives}
    except (SearchError, MeasurementError):
        return {}


def _gbps(
    task: Task, settings: Settings, hops: Sequence[Hop], rings: int, collective: Collective
) -> float:
    gpus = task.gpus

    def slowest(moved: Iterable[Hop]) -> float:
        (found,) = task.source.measure([transfer_set(hop.flow for hop in moved)])
        return found.rate_gbps

    if collective in _BY_RINGS:
        return rings * slowest(hops)
    if collective == "broadcast":
        return rings * statistics.harmonic_mean(
            [slowest(hop for hop in hops if hop.target != root) for root in gpus]
        )
    if collective == "reduce":
        return rings * statistics.harmonic_mean(
            [slowest(hop for hop in hops if hop.source != root) for root in gpus]
        )
    if collective == "send_recv":
        space = task.space(settings, 1)
        after = zip(gpus, (*gpus[1:], gpus[0]), strict=True)
        return slowest(space.between(*pair)[0] for pair in after)
    # The transfers to all peers share the channels.
    peers = len(gpus) - 1
    space = task.space(settings, peers)
    return peers * slowest(space.between(*pair)[0] for pair in permutations(gpus, 2))


def jobs_of_tables(plan: Plan, directory: Path, text: str | None) -> Iterator[tuple[Plan, Order]]:
    """Yield plans of jobs over all hosts of a cluster, halves and so on to two, with their GPUs.

    `text` lists numbers and sets of GPUs of a host; None is the usual sets that have tables.
    """
    names, classes = plan.host_order, plan.cluster.host_classes
    counts = [len(names) >> times for times in range(len(names).bit_length() - 1)]
    of_class = [job_gpus(text, gpus, where="--gpus-per-job") for gpus in plan.class_gpus]
    for count in counts:
        hosts = [HostSlots(name) for name in names[:count]]
        for sets in zip(*of_class, strict=False):
            gpus = {name: sets[classes[name]] for name in names[:count]}
            try:
                yield plan_of_job(plan, directory, hosts, gpus)[0], sets[classes[names[0]]]
            except InputError:
                if text is not None:
                    raise


def predicted_cells(
    jobs: Iterable[tuple[Plan, Order]], collectives: Sequence[Collective]
) -> Iterator[Cell]:
    """Yield large messages of ring collectives over hosts, by the choices of jobs' plans."""
    for made, gpus in jobs:
        default = made.stock.rate_gbps
        for collective in (one for one in _BY_RINGS if one in collectives):
            for name, choice in made.choices.items():
                if choice.rate_gbps:
                    yield Cell(
                        hosts=made.host_order,
                        gpus=gpus,
                        collective=collective,
                        arm=name,
                        gbps=choice.rate_gbps,
                        ratio=choice.rate_gbps / default if default else None,
                    )
