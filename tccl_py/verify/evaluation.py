"""Evaluation of a plan: collectives by size, over several sets of GPUs and hosts, in every arm."""

from __future__ import annotations

import csv
import io
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from tccl_py.plan.beside import keep_beside_plan, read_beside_plan
from tccl_py.plan.plan import ChoiceName
from tccl_py.verify.jobs import Arm, ConcurrentJobs, JobError, Launcher
from tccl_py.verify.record import EQUAL, LEAST_ROUNDS
from tccl_py.verify.spec import (
    COLLECTIVES,
    KIB,
    MIB,
    Backend,
    Collective,
    Dtype,
    JobSpec,
    WrongValue,
    bus_gbps,
)
from tccl_py.verify.verify import RunBudget, Watcher, row_seconds, run_rounds

FORMAT_VERSION = 1
EVALUATION_FILE = "evaluate.json"
SWEEP_SIZES = (64 * KIB, MIB, 16 * MIB, 256 * MIB)
DEFAULT_SECONDS = 1200.0
_CHECK_S, _START_S, _ROW_S = 10.0, 5.0, 0.12
"""Estimates: seconds of checks, of starting the jobs of a round, and of a row of a job."""


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of an evaluation, and its work.

    `gpus` is a list of numbers and sets of GPUs, None the usual ones. `rounds` are run over
    each set of GPUs; after `seconds` no further set is begun, and no round beyond LEAST_ROUNDS.
    """

    collectives: tuple[Collective, ...] = COLLECTIVES
    dtype: Dtype = "float32"
    sizes: tuple[int, ...] = SWEEP_SIZES
    gpus: str | None = None
    rounds: int = LEAST_ROUNDS
    seconds: float = DEFAULT_SECONDS
    checks: bool = True

    @property
    def spec(self) -> JobSpec:
        """Return the timed work of each job."""
        return JobSpec(collectives=self.collectives, dtypes=(self.dtype,), sizes=self.sizes)


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A collective of a size in an arm, over these GPUs of each of these hosts (none: one machine).

    `bytes` is 0 for large messages of no certain size, as the simulator has them, and `us` None.
    `gbps` is bus bandwidth; `ratio`, with its 95 % interval, is over default NCCL, None where
    default NCCL has no rate.
    """

    hosts: tuple[str, ...] = ()
    gpus: tuple[int, ...]
    collective: Collective
    dtype: Dtype = "float32"
    bytes: int = 0
    arm: ChoiceName
    us: float | None = None
    gbps: float
    ratio: float | None = 1.0
    low: float | None = None
    high: float | None = None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Ratios of an arm to default NCCL: their number, geometric mean, minimum and maximum."""

    arm: ChoiceName
    cells: int
    mean: float
    least: float
    most: float


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All cells of a plan's evaluation.

    `wrong` are wrong values by arm, `failures` why sets of GPUs, or arms over them, have no cells.
    `left_out` are sets that the time did not suffice for.
    """

    machine: str
    backend: Backend
    simulated: bool
    assumed: bool = False
    recommended: ChoiceName
    cells: tuple[Cell, ...]
    wrong: dict[ChoiceName, tuple[WrongValue, ...]] = {}
    failures: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    seconds: float = 0.0
    plan_digest: str = ""
    format_version: int = FORMAT_VERSION

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
        return tuple(found for arm in arms if (found := self.summary(arm)))


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs of each of some hosts, the arms of jobs over them, and their launcher."""

    hosts: tuple[str, ...] = ()
    gpus: tuple[int, ...]
    arms: tuple[Arm, ...]
    launcher: Launcher

    @property
    def name(self) -> str:
        """Return the GPUs and hosts in words."""
        gpus = f"GPUs {','.join(map(str, self.gpus))}"
        return f"{gpus} of {len(self.hosts)} hosts" if self.hosts else gpus

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return sum(len(host.ranks) for host in self.launcher.hosts)


def estimated_seconds(parts: Sequence[Part], sweep: Sweep) -> float:
    """Estimate the duration of all rounds over all parts."""
    rows = len(sweep.spec.rows)
    return sum(
        _CHECK_S * sweep.checks + sweep.rounds * (_START_S + _ROW_S * rows * len(part.arms))
        for part in parts
    )


def run_parts(
    parts: Sequence[Part], sweep: Sweep, base: Evaluation, *, watch: Watcher = lambda _: None
) -> Evaluation:
    """Run jobs over all parts, as far as the time suffices, and add their cells to `base`."""
    begun = time.monotonic()
    cells: list[Cell] = []
    failures: list[str] = []
    left_out: list[str] = []
    wrong: dict[ChoiceName, tuple[WrongValue, ...]] = {}
    for number, part in enumerate(parts):
        left = begun + sweep.seconds - time.monotonic()
        if left <= 0 and number:
            left_out.append(part.name)
            continue
        watch(f"{part.name} ({number + 1} of {len(parts)})")
        run = _Run(part, sweep, left / (len(parts) - number))
        try:
            run.check()
            cells += run.cells()
        except JobError as error:
            failures.append(f"{part.name}: {error}")
        failures += [f"{part.name}, {arm}: {why}" for arm, why in run.failures.items()]
        for arm, found in run.wrong.items():
            wrong[arm] = (*wrong.get(arm, ()), *found)
    return msgspec.structs.replace(
        base,
        cells=tuple(cells),
        wrong=wrong,
        failures=tuple(failures),
        left_out=tuple(left_out),
        seconds=time.monotonic() - begun,
    )


class _Run:
    """Jobs over a part; `check` and `cells` raise JobError if a job of default NCCL fails."""

    def __init__(self, part: Part, sweep: Sweep, seconds: float) -> None:
        self._part, self._sweep = part, sweep
        self._seconds, self._begun = seconds, time.monotonic()
        self.failures: dict[ChoiceName, str] = {}
        self.wrong: dict[ChoiceName, tuple[WrongValue, ...]] = {}

    def check(self) -> None:
        """Compare the values of all collectives in every arm."""
        if not self._sweep.checks:
            return
        jobs = ConcurrentJobs(self._part.launcher, ()).run(self._part.arms, JobSpec(checks=True))
        for arm, outcome in zip(self._part.arms, jobs, strict=True):
            if isinstance(outcome, JobError):
                if arm.name == "default":
                    raise outcome
                self.failures[arm.name] = str(outcome)
            elif found := tuple(one for rank in outcome.results for one in rank.wrong):
                self.wrong[arm.name] = found

    def cells(self) -> Iterable[Cell]:
        """Time all rows in interleaved rounds."""
        part, spec = self._part, self._sweep.spec
        arms = [arm for arm in part.arms if arm.name not in self.failures]
        budget = RunBudget(
            rounds=self._sweep.rounds, sizes=self._sweep.sizes, seconds=self._seconds, extra=1
        )
        rounds = run_rounds(part.launcher, arms, budget, spec, begun=self._begun)
        self.failures |= rounds.failures
        for arm in arms:
            jobs = [job for name, job in rounds.jobs if name == arm.name]
            for row, taken in row_seconds(spec, jobs).items():
                seconds = statistics.median(taken)
                compared = rounds.compared.get((arm.name, row), EQUAL)
                yield Cell(
                    hosts=part.hosts,
                    gpus=part.gpus,
                    collective=row.collective,
                    dtype=row.dtype,
                    bytes=row.bytes,
                    arm=arm.name,
                    us=seconds * 1e6,
                    gbps=bus_gbps(row.collective, part.world, row.bytes, seconds),
                    ratio=compared.ratio,
                    low=compared.low,
                    high=compared.high,
                )


def csv_text(found: Evaluation) -> str:
    """Return all cells as CSV, a row each."""
    text = io.StringIO()
    names = Cell.__struct_fields__
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*names, "simulated"])
    for cell in found.cells:
        values = [getattr(cell, name) for name in names]
        texts = [" ".join(map(str, one)) if isinstance(one, tuple) else one for one in values]
        writer.writerow([*texts, found.simulated])
    return text.getvalue()


def keep_evaluation(found: Evaluation, directory: Path) -> Evaluation:
    """Write evaluate.json beside a plan, whole or not at all, and return its content."""
    return keep_beside_plan(found, directory / EVALUATION_FILE)


def load_evaluation(directory: Path) -> Evaluation | None:
    """Return the evaluation of the plan in a directory; None if none, or of an earlier plan."""
    path = directory / EVALUATION_FILE
    return read_beside_plan(path, Evaluation, version=FORMAT_VERSION) if path.exists() else None
