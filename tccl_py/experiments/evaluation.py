"""Evaluation of a plan: collectives by size, over several sets of GPUs and hosts, in every arm."""

from __future__ import annotations

import csv
import io
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations, product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import structs
from msgspec.structs import replace

from tccl_py.errors import InputError, MeasurementError, SearchError
from tccl_py.experiments.collectives import COLLECTIVES, PROGRAMS, Collective
from tccl_py.experiments.jobs import Arm, Launcher
from tccl_py.experiments.rounds import (
    EQUAL,
    LEAST_ROUNDS,
    UNRATED,
    Rounds,
    RunBudget,
    Timed,
    run_rounds,
)
from tccl_py.experiments.spec import KIB, MIB, JobSpec, WrongValue
from tccl_py.files import picked
from tccl_py.model.measurement import Backend, BandwidthSource
from tccl_py.model.rings import Hop, Ring, neighbours
from tccl_py.model.transfer import transfer_set
from tccl_py.nccl.settings import Settings, pinned_level
from tccl_py.plan.chains import ChoiceName, Order, condensed
from tccl_py.plan.plan import Plan
from tccl_py.plan.results import Kept
from tccl_py.planning.choices import own_rings
from tccl_py.planning.jobs import plan_of_job
from tccl_py.planning.parts import job_gpus
from tccl_py.planning.request import Task, rings_under
from tccl_py.readers.hosts import HostSlots
from tccl_py.sources.bench import Bench, bench_of

_CHECK_S, _START_S, _ROW_S = 10.0, 5.0, 0.12
"""Estimates: seconds of checks, of starting the jobs of a round, and of a row of a job."""


EVALUATED = RunBudget(
    collectives=tuple(PROGRAMS.values()),
    sizes=(64 * KIB, MIB, 16 * MIB, 256 * MIB),
    rounds=LEAST_ROUNDS,
    seconds=1200.0,
    extra=1,
)
"""Work of an evaluation, if nothing else is asked for: `rounds` over each set of GPUs. After
`seconds` no further set is begun, and no round beyond LEAST_ROUNDS."""


class Cell(Timed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row in an arm, over these GPUs of each of these hosts (none: one machine).

    `bytes` is 0 for large messages of no certain size, as the simulator has them.
    """

    hosts: tuple[str, ...] = ()
    gpus: tuple[int, ...]
    arm: ChoiceName


_ROW, _RATES = ("collective", "dtype", "bytes"), ("us", "gbps", "ratio", "low", "high")
COLUMNS = ("hosts", "gpus", *_ROW, "arm", *_RATES)
"""What is printed of a cell."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Ratios of an arm to default NCCL: their number, geometric mean, minimum and maximum."""

    arm: ChoiceName
    cells: int
    mean: float
    least: float
    most: float


class Evaluation(Kept, frozen=True, kw_only=True):
    """All cells of a plan's evaluation.

    `wrong` are wrong values by arm, `failures` why sets of GPUs, or arms over them, have no cells.
    `left_out` are sets that the time did not suffice for.
    """

    FILE = "evaluate.json"
    machine: str
    backend: Backend
    simulated: bool
    assumed: bool = False
    recommended: ChoiceName
    cells: tuple[Cell, ...] = ()
    wrong: dict[ChoiceName, tuple[WrongValue, ...]] = msgspec.field(default_factory=dict)
    failures: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    seconds: float = 0.0
    format_version: int = 2

    @property
    def dry_run(self) -> bool:
        """Return whether jobs ran over gloo."""
        return self.backend == "host" and not self.simulated

    def summary(self, arm: ChoiceName, collective: str | None = None) -> Summary | None:
        """Return the ratios of an arm, of one collective or of all; None without any."""
        ratios = [
            cell.ratio
            for cell in self.cells
            if cell.arm == arm and cell.ratio and collective in (None, cell.collective)
        ]
        if not ratios:
            return None
        mean = statistics.geometric_mean(ratios)
        return Summary(arm=arm, cells=len(ratios), mean=mean, least=min(ratios), most=max(ratios))

    @property
    def summaries(self) -> tuple[Summary, ...]:
        """Return the ratios of every arm but default NCCL."""
        arms = dict.fromkeys(cell.arm for cell in self.cells if cell.arm != "default")
        return tuple(summary for arm in arms if (summary := self.summary(arm)))


Part = tuple[Launcher, Sequence[Arm]]
"""Jobs over a set of GPUs, and the arms to run there."""


def _name(launcher: Launcher) -> str:
    """Return the GPUs and hosts of jobs in words."""
    gpus = f"GPUs {','.join(map(str, launcher.hosts[0].gpus))}"
    return f"{gpus} of {len(launcher.hosts)} hosts" if launcher.hosts[0].name else gpus


def estimated_seconds(parts: Sequence[Part], budget: RunBudget) -> float:
    """Estimate the duration of all rounds over all parts."""
    rows = len(budget.rows)
    first = _CHECK_S if budget.checks else _START_S
    return sum(first + budget.rounds * (_START_S + _ROW_S * rows * len(arms)) for _, arms in parts)


def run_parts(parts: Sequence[Part], budget: RunBudget, base: Evaluation) -> Evaluation:
    """Run jobs over all parts, as far as the time suffices, and add their cells to `base`."""
    begun = time.monotonic()
    cells, failures, left_out = list[Cell](), list[str](), list[str]()
    wrong: dict[ChoiceName, tuple[WrongValue, ...]] = {}
    for number, (launcher, arms) in enumerate(parts):
        name, started = _name(launcher), time.monotonic()
        remaining = begun + budget.seconds - started
        if remaining <= 0 and number:
            left_out.append(name)
            continue
        named = launcher.named(f"{name} ({number + 1} of {len(parts)})")
        share = replace(budget, seconds=remaining / (len(parts) - number))
        try:
            rounds = run_rounds(named, arms, share, JobSpec(rows=budget.rows), begun=started)
        except MeasurementError as error:
            failures.append(f"{name}: {error}")
            continue
        for arm, job in rounds.checked.items():
            wrong[arm] = (*wrong.get(arm, ()), *job.wrong)
        cells += _cells(launcher, rounds)
        failures += [f"{name}, {arm}: {why}" for arm, why in rounds.failures.items()]
    return replace(
        base,
        cells=tuple(cells),
        wrong={arm: values for arm, values in wrong.items() if values},
        failures=tuple(failures),
        left_out=tuple(left_out),
        seconds=time.monotonic() - begun,
    )


def _cells(launcher: Launcher, rounds: Rounds) -> Iterator[Cell]:
    """Yield the cells of all arms' jobs over a set of GPUs."""
    hosts = tuple(host.name for host in launcher.hosts if host.name)
    for arm, rows in rounds.table.items():
        for row in rows.values():
            yield Cell(**structs.asdict(row), hosts=hosts, gpus=launcher.hosts[0].gpus, arm=arm)


# Without GPUs large messages alone have rates, by a model of the machine or by tables: latency is
# not simulated. A ring collective has the bandwidth of the arm's rings; broadcast and reduce leave
# out the hop back to the root, and take every root in turn. Transfers of send/recv and all-to-all
# run at once, and the slowest decides.


def simulated_cells(
    plan: Plan,
    source: BandwidthSource,
    gpu_sets: Iterable[Order],
    collectives: Sequence[Collective],
) -> Iterator[Cell]:
    """Yield large messages over sets of a machine's GPUs, by the rings of every arm."""
    remembered = bench_of(source)
    for gpus in gpu_sets:
        rates = {
            name: arm_rates(plan, remembered, [gpus], name, collectives) for name in plan.choices
        }
        yield from _large_cells(rates, gpus)


def _large_cells(
    rates: Mapping[ChoiceName, Mapping[Collective, float]], gpus: Order, hosts: tuple[str, ...] = ()
) -> Iterator[Cell]:
    for arm, gbps_of in rates.items():
        for collective, gbps in gbps_of.items():
            default = rates.get("default", {}).get(collective)
            over = replace(EQUAL, ratio=gbps / default) if default else UNRATED
            where: dict[str, Any] = {"hosts": hosts, "gpus": gpus, "arm": arm}
            yield Cell(**where, collective=collective, gbps=gbps, compared=over)


class _Part(NamedTuple):
    """Rings over a set of GPUs under an arm's settings."""

    task: Task
    settings: Settings
    rings: Sequence[Ring]


def arm_rates(
    plan: Plan,
    source: Bench,
    gpu_sets: Iterable[Order],
    name: ChoiceName,
    collectives: Iterable[Collective],
) -> dict[Collective, float]:
    """Return the bus bandwidth of large collectives in an arm, in all sets of GPUs at once.

    None where its rings have no rate.
    """
    try:
        parts = [_part(plan, source, gpus, name) for gpus in gpu_sets]
        return {collective: _gbps(parts, source, collective) for collective in collectives}
    except (SearchError, MeasurementError):
        return {}


def _part(plan: Plan, source: Bench, gpus: Order, name: ChoiceName) -> _Part:
    task = Task(
        machine=plan.machine,
        knowledge=plan.knowledge,
        source=source,
        gpus=gpus,
        version=plan.settings.version,
        p2p_level=pinned_level(plan.pinned_env),
    )
    settings, planned = plan.choices[name].settings, plan.subset(gpus)
    if name != "graph" or planned is None or not planned.gains:
        # A set of GPUs without a graph file gets the variables alone.
        settings = replace(settings, shm_placement=False)
        rings_alone = own_rings(task, settings)
        # NCCL doubles the channels of its own search as it does a graph file's.
        settings = replace(settings, channels=max(1, rings_alone.channels // 2))
        orders = condensed(rings_alone.rings)
    else:
        orders = planned.rings
        nodes = dict(zip(planned.gpus, planned.nodes, strict=False))
        task = replace(task, nodes=nodes, spaces={})
    return _Part(task, settings, rings_under(task, settings, orders).rings)


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


def jobs_of_tables(plan: Plan, directory: Path, text: str | None) -> Iterator[Plan]:
    """Yield plans of jobs over all hosts of a cluster, halves and so on to two.

    `text` lists numbers and sets of GPUs of a host; None is the usual sets that have tables. A plan
    over all its hosts and GPUs needs none.
    """
    names, classes = plan.host_order, plan.cluster.host_classes
    counts = [len(names) >> times for times in range(len(names).bit_length() - 1)]
    of_class = job_gpus(text, *plan.class_gpus)
    for count, sets in product(counts, zip(*of_class, strict=False)):
        hosts = [HostSlots(name) for name in names[:count]]
        gpus = {host.name: sets[classes[host.name]] for host in hosts}
        try:
            yield plan_of_job(plan, directory, hosts, gpus)
        except InputError:
            # A job's files have no tables: they are evaluated as a whole.
            if count == len(names) and sets == plan.class_gpus:
                yield plan
            elif text is not None:
                raise


def predicted_cells(jobs: Iterable[Plan], collectives: Sequence[Collective]) -> Iterator[Cell]:
    """Yield large messages of ring collectives over hosts, by the choices of jobs' plans."""
    ring_collectives = [name for name in collectives if COLLECTIVES[name].pattern == "ring"]
    for made in jobs:
        rates = {
            name: dict.fromkeys(ring_collectives, choice.rate_gbps)
            for name, choice in made.choices.items()
            if choice.rate_gbps
        }
        yield from _large_cells(rates, made.gpus_of(made.hosts[0]), made.host_order)


def csv_text(result: Evaluation) -> str:
    """Return all cells as CSV, a row each."""
    text = io.StringIO()
    names = (*COLUMNS, "simulated", "dry_run")
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for cell in result.cells:
        lists = {name: " ".join(map(str, getattr(cell, name))) for name in ("hosts", "gpus")}
        labels = picked(result, "simulated", "dry_run")
        writer.writerow(picked(cell, *COLUMNS) | lists | labels)
    return text.getvalue()
