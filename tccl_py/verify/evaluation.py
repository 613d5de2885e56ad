"""Evaluation of a plan: collectives by size, over several sets of GPUs and hosts, in every arm."""

from __future__ import annotations

import csv
import io
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tccl_py.plan.beside import keep_beside_plan, read_beside_plan
from tccl_py.plan.plan import ChoiceName
from tccl_py.verify.jobs import Arm, JobError, Launcher
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
from tccl_py.verify.verify import Rounds, RunBudget, check_arms, row_seconds, run_rounds

FORMAT_VERSION = 1
EVALUATION_FILE = "evaluate.json"
_CHECK_S, _START_S, _ROW_S = 10.0, 5.0, 0.12
"""Estimates: seconds of checks, of starting the jobs of a round, and of a row of a job."""


EVALUATED = RunBudget(
    collectives=COLLECTIVES,
    sizes=(64 * KIB, MIB, 16 * MIB, 256 * MIB),
    rounds=LEAST_ROUNDS,
    seconds=1200.0,
    extra=1,
)
"""Work of an evaluation, if nothing else is asked for: `rounds` over each set of GPUs. After
`seconds` no further set is begun, and no round beyond LEAST_ROUNDS."""


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


def estimated_seconds(parts: Sequence[Part], budget: RunBudget) -> float:
    """Estimate the duration of all rounds over all parts."""
    rows = len(budget.spec.rows)
    first = _CHECK_S if budget.checks else _START_S
    return sum(
        first + budget.rounds * (_START_S + _ROW_S * rows * len(part.arms)) for part in parts
    )


def run_parts(parts: Sequence[Part], budget: RunBudget, base: Evaluation) -> Evaluation:
    """Run jobs over all parts, as far as the time suffices, and add their cells to `base`."""
    begun = time.monotonic()
    cells: list[Cell] = []
    failures: list[str] = []
    left_out: list[str] = []
    wrong: dict[ChoiceName, tuple[WrongValue, ...]] = {}
    for number, part in enumerate(parts):
        started, launcher = time.monotonic(), part.launcher
        left = begun + budget.seconds - started
        if left <= 0 and number:
            left_out.append(part.name)
            continue
        launcher.watch(f"{part.name} ({number + 1} of {len(parts)})")
        own = msgspec.structs.replace(budget, seconds=left / (len(parts) - number))
        failed: dict[ChoiceName, str] = {}
        try:
            checked, failed = check_arms(launcher, part.arms, checks=budget.checks)
            for arm, outcome in checked.items():
                if found := tuple(value for rank in outcome.results for value in rank.wrong):
                    wrong[arm] = (*wrong.get(arm, ()), *found)
            running = [arm for arm in part.arms if arm.name in checked]
            rounds = run_rounds(launcher, running, own, budget.spec, begun=started)
            failed |= rounds.failures
            cells += _cells(part, budget.spec, rounds)
        except JobError as error:
            failures.append(f"{part.name}: {error}")
        failures += [f"{part.name}, {arm}: {why}" for arm, why in failed.items()]
    return msgspec.structs.replace(
        base,
        cells=tuple(cells),
        wrong=wrong,
        failures=tuple(failures),
        left_out=tuple(left_out),
        seconds=time.monotonic() - begun,
    )


def _cells(part: Part, spec: JobSpec, rounds: Rounds) -> Iterator[Cell]:
    """Yield the cells of all arms' jobs over a part."""
    for arm in part.arms:
        for row, taken in row_seconds(spec, rounds.of(arm.name)).items():
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
                gbps=bus_gbps(row.collective, part.launcher.world, row.bytes, seconds),
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
