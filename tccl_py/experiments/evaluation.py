"""Evaluation of a plan: collectives by size, over several sets of GPUs and hosts, in every arm."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import structs
from msgspec.structs import replace

from tccl_py.errors import MeasurementError
from tccl_py.experiments.collectives import PROGRAMS
from tccl_py.experiments.comparison import LEAST_ROUNDS, Timed
from tccl_py.experiments.jobs import Arm, Launcher
from tccl_py.experiments.rounds import LARGEST_DRY, RunBudget, least_rounds, run_rounds
from tccl_py.experiments.spec import BATCHES, KIB, MIB, WrongValue
from tccl_py.model.measurement import Backend
from tccl_py.plan.chains import ChoiceName
from tccl_py.plan.results import Kept

_START_S, _CHECK_S, _HOST_CHECK_S = 5.0, 5.0, 2.5
"""Estimates: seconds of starting the jobs of a round and of checks; of a rank's in host memory."""
_ROW_S, CALLS = 0.085, 3 + BATCHES
"""Least seconds of a row in a job, and its calls where these take long: to connect, two probes, and
batches of one call."""
_HOST_GBPS = 1.2
"""GB/s of ranks in host memory, which share two cores (measured with gloo, 16 and 256 MiB)."""


EVALUATED = RunBudget(
    collectives=tuple(PROGRAMS.values()),
    sizes=(64 * KIB, MIB, 16 * MIB, 256 * MIB),
    rounds=LEAST_ROUNDS,
    seconds=1200.0,
    extra=1,
)
"""Work of an evaluation, if nothing else is asked for: `rounds` over each set of GPUs. After
`seconds` no further set is begun, and no round beyond LEAST_ROUNDS."""
EVALUATED_DRY = replace(
    EVALUATED, sizes=tuple(size for size in EVALUATED.sizes if size <= LARGEST_DRY)
)
"""The same in host memory, where long messages take minutes and say nothing."""


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

    def fault(self) -> str:
        """Return what makes it no evaluation."""
        return "has a ratio below 0" * any(cell.compared.ratio < 0 for cell in self.cells)

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


def part_name(launcher: Launcher) -> str:
    """Return the GPUs and hosts of jobs in words."""
    gpus = f"GPUs {','.join(map(str, launcher.hosts[0].gpus))}"
    return f"{gpus} of {len(launcher.hosts)} hosts" if launcher.hosts[0].name else gpus


def estimated_seconds(parts: Sequence[Part], budget: RunBudget) -> float:
    """Estimate the duration of all rounds over all parts, whether the time suffices or not."""
    whole = 0.0
    for launcher, arms in parts:
        world, rounds = launcher.world, max(budget.rounds, least_rounds(len(arms)))
        start, check, gbps = _START_S, _CHECK_S, max(arm.predicted_gbps or 0.0 for arm in arms)
        if launcher.backend == "host":
            start, check, gbps = 0.0, _HOST_CHECK_S * world * len(arms), _HOST_GBPS / world
        # By calls of a second, a row's bus bandwidth is what a call has to move.
        calls = (row.bus_gbps(world, 1.0) / (gbps or _HOST_GBPS) for row in budget.rows)
        job = sum(max(_ROW_S, CALLS * seconds) for seconds in calls)
        whole += start + check * budget.checks + rounds * (start + job * len(arms))
    return whole


def run_parts(parts: Sequence[Part], budget: RunBudget, base: Evaluation) -> Evaluation:
    """Run jobs over all parts, as far as the time suffices, and add their cells to `base`."""
    begun = time.monotonic()
    cells, failures, left_out = list[Cell](), list[str](), list[str]()
    wrong: dict[ChoiceName, tuple[WrongValue, ...]] = {}
    for number, (launcher, arms) in enumerate(parts):
        name, started = part_name(launcher), time.monotonic()
        remaining = begun + budget.seconds - started
        if remaining <= 0 and number:
            left_out.append(name)
            continue
        named = launcher.named(f"{name} ({number + 1} of {len(parts)})")
        share = replace(budget, seconds=remaining / (len(parts) - number))
        try:
            rounds = run_rounds(named, arms, share, budget.rows, begun=started)
        except MeasurementError as error:
            failures.append(f"{name}: {error}")
            continue
        for arm, job in rounds.checked.items():
            wrong[arm] = (*wrong.get(arm, ()), *job.wrong)
        hosts = tuple(host.name for host in launcher.hosts if host.name)
        for arm, rows in rounds.table.items():
            where: dict[str, Any] = {"hosts": hosts, "gpus": launcher.hosts[0].gpus, "arm": arm}
            cells += [Cell(**structs.asdict(row), **where) for row in rows.values()]
        failures += [f"{name}, {arm}: {why}" for arm, why in rounds.failures.items()]
    return replace(
        base,
        cells=tuple(cells),
        wrong={arm: values for arm, values in wrong.items() if values},
        failures=tuple(failures),
        left_out=tuple(left_out),
        seconds=time.monotonic() - begun,
    )
