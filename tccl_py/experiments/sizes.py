"""Tuning by message size: all GPUs of a plan, then smaller sets; tuning.json.

Choices are relative to the recommended choice of the plan without a table, whose jobs they share.

1. A sweep of one job leaves few choices of each row, and predicts the best, and whether the row
   gains by it. Of small messages, whose times depend on the process, jobs with the finalists alone
   predict that.
2. Fresh jobs time just NCCL's own choice and that one. A predicted gain stays if the lower end of
   its interval is above 1. So a choice that a sweep picked by luck is not believed twice.
3. Adjacent sizes with the same choice make a range. A range ends at a measured size, or half-way to
   the next one where the same choice was not slower there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, pairwise
from pathlib import Path
from statistics import geometric_mean
from typing import cast

import msgspec
from msgspec.structs import asdict, replace

from tccl_py.delivery.plugin import PLUGIN_VARIABLE
from tccl_py.errors import InputError, MeasurementError, defer_signals
from tccl_py.experiments.calls import GRAPHED_BYTES
from tccl_py.experiments.communication import timed_calls
from tccl_py.experiments.comparison import Rounds
from tccl_py.experiments.jobs import THIS_HOST, Arm, Launcher
from tccl_py.experiments.spec import (
    COLLECTIVES,
    FINAL_ROUNDS,
    KIB,
    SIZES,
    Contest,
    Dtype,
    JobSpec,
    Row,
    RowTimes,
    TunerChoice,
    rows_of,
)
from tccl_py.experiments.target import Target
from tccl_py.files import decode_json, encode_line, temporary_folder
from tccl_py.model.symmetry import automorphisms, images_of_gpus
from tccl_py.nccl.plugin import found_library
from tccl_py.nccl.plugin.build import BuildError, build_plugin
from tccl_py.nccl.plugin.index import INDEX_FILE, INDEX_VARIABLE
from tccl_py.nccl.settings import GRAPH_VARIABLE
from tccl_py.nccl.tuner import COLLECTIVES as TUNED
from tccl_py.nccl.tuner import TunedCollective, TunerEntry, TunerTable
from tccl_py.plan.chains import ChoiceName
from tccl_py.plan.directory import files_of
from tccl_py.plan.machine_files import subset_graph
from tccl_py.plan.results import Tuning, keep_tuning
from tccl_py.planning.parts import subsets
from tccl_py.statistics import Interval, ratio_interval, ratios_of
from tccl_py.workloads.workload import Workload

LEAST_GAIN, MISSED_GAIN = 1.01, 1.02
"""A gain is predicted if its interval lies above the first, which fresh jobs have to reach as well,
as a table is an intervention, too. A prediction of none is wrong if the interval of fresh jobs lies
above the second."""
_SURE = 0.99
"""Level of the intervals of a sweep, which has many choices to be lucky with."""
NO_HARM = 0.99
"""Least ratio at neighbouring sizes, in the other dtype, and beside matrix multiplications."""
_CLOSE = 0.95
"""Share of the best ratio within which multiplications decide between numbers of channels."""
LEAST_JOBS, MOST_JOBS = 6, 10
SWEPT: Dtype = "bfloat16"
"""Elements of the sweep, whose predictions count."""

NOTHING = Interval(middle=1.0, low=1.0, high=1.0)
Jobs = Sequence[Sequence[RowTimes]]
TUNER_VARIABLE = "NCCL_TUNER_PLUGIN"
FURTHER = tuple(
    name for name, facts in COLLECTIVES.items() if facts.algorithms and name != "all_reduce"
)
_MOST_SUBSETS = 3
"""Smaller sets of GPUs that are measured: pairs and halves, one of each kind."""
SIZE_SECONDS, _SUBSET_SECONDS = 300.0, 90.0
"""No fresh jobs start later: of all-reduce, of the other collectives, and of a smaller set."""
ALL_SIZES = tuple(KIB << shift for shift in range(21))
"""1 KiB to 1 GiB in powers of two."""
_DENSE_SIZES = (*ALL_SIZES, *(math.isqrt(low * high) for low, high in pairwise(ALL_SIZES)))
"""The same, and sizes half-way between them."""
_SPOT: Dtype = "float32"
_NOISY = 512 * KIB
_ROUNDS = {_NOISY: (12, 16), GRAPHED_BYTES: (FINAL_ROUNDS, 8), math.inf: (10, 5)}
"""Rounds up to a size in bytes, in the sweep and in a fresh job. Without P2P, CUDA graphs of the
same calls differed by 8 % at 16 KiB, 3 % at 512 KiB, and less above (two H200). Up to _NOISY bytes
a choice was 28 % faster in all graphs of one process, and no faster in ten others."""
_AGAIN_JOBS, _AGAIN_ROUNDS = 12, 6
_START_S = 60.0
"""Time for the start of a job's ranks and its first collectives."""
_REFUSED = "the plugin refused it, as TCCL_DEBUG=1 would tell"
EqualSets = dict[tuple[int, ...], set[tuple[int, ...]]]
"""The sets of GPUs that equal each measured set, itself included."""


class SizeRow(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of the sweep, with the speed of a choice over NCCL's own choice."""

    plan: ChoiceName = "default"
    """The arm whose jobs follow choices."""
    choice: TunerChoice | None = None
    swept: Interval = NOTHING
    """The sweep's ratio."""
    near: Interval | None = None
    """The sweep's ratio beside matrix multiplications."""
    harms: bool = False
    """Whether these are slower."""
    gains: bool = False
    """The prediction that follows from the sweep."""
    fresh: Interval | None = None
    """The ratio of the fresh jobs, one value a job; None where none ran."""
    seconds: dict[str, tuple[float, ...]] = msgspec.field(default_factory=dict)
    """Seconds per call by arm, one value a fresh job."""
    kept: bool = False
    """Whether the table has an entry for the row."""

    @property
    def gained(self) -> bool:
        """Return whether fresh jobs gained."""
        return self.fresh is not None and self.fresh.low > 1 and self.fresh.middle >= LEAST_GAIN

    @property
    def tuned_seconds(self) -> tuple[float, ...]:
        """Return the seconds with the table: NCCL's own choice under `plan` without an entry."""
        return self.seconds.get("tuned" if self.kept else self.plan, ())

    def over(self, arm: str) -> Interval | None:
        """Return the speed with the table over an arm's, None without jobs."""
        slow, fast = self.seconds.get(arm, ()), self.tuned_seconds
        return ratio_interval(ratios_of(slow, fast)) if slow and fast else None

    @property
    def right(self) -> bool:
        """Return whether fresh jobs gained where the sweep predicted a gain, and not elsewhere."""
        if self.fresh is None:
            return False
        return self.fresh.low > 1 if self.gains else self.fresh.low <= MISSED_GAIN


class SizeTuning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rows of a set of GPUs, and the entries for the tuner that follow."""

    gpus: tuple[int, ...]
    arm: ChoiceName
    """The choice under which rows were timed."""
    backend: str
    nccl: str
    rows: tuple[SizeRow, ...]
    entries: tuple[TunerEntry, ...]
    jobs: int
    """Fresh jobs of each arm."""
    by_plugin: tuple[SizeRow, ...] = ()
    """Rows under the plugin's own table, whose `fresh` is the speed over NCCL's own choice."""
    skew: float = 0.0
    """The largest median difference between ranks in a sweep, as a share of the seconds."""
    seconds: float = 0.0

    @property
    def predictions(self) -> tuple[int, int]:
        """Return how many predictions fresh jobs found right, of how many."""
        judged = [row for row in self.rows if row.dtype == SWEPT and row.fresh is not None]
        return sum(row.right for row in judged), len(judged)


def read_tunings(text: str, where: str) -> tuple[SizeTuning, ...]:
    """Read tunings from JSON. Raises InputError: the text is something else."""
    return decode_json(text, tuple[SizeTuning, ...], where=where, name="tuning")


def predict(sweep: Sequence[RowTimes], jobs: Jobs = ()) -> list[SizeRow]:
    """Return each row of a sweep with its predicted best choice.

    `jobs` have the finalists of some rows, whose sweep does not count then.
    """
    again = _by_row(jobs)
    return [_best(times.row, list(_scores(times, again.get(times.row, ())))) for times in sweep]


def _best(row: Row, scores: Sequence[SizeRow]) -> SizeRow:
    """Return the fastest choice that gains and does no harm, else the fastest."""
    usable = [score for score in scores if score.gains and not score.harms]
    best = max(usable or scores, key=lambda score: score.swept.middle, default=row_untried(row))
    # Channels take multiprocessors: multiplications beside the calls choose their number.
    near = [score for score in usable if score.swept.middle >= _CLOSE * best.swept.middle]
    close = [score for score in near if _kind(score) == _kind(best)]
    return max(
        close, key=lambda s: (s.near.middle if s.near else 0.0, s.swept.middle), default=best
    )


def row_untried(row: Row) -> SizeRow:
    """Return a row without a choice."""
    return SizeRow(**asdict(row.plain))


def _kind(score: SizeRow) -> tuple[str, str] | None:
    return (score.choice.algorithm, score.choice.protocol) if score.choice else None


def _scores(times: RowTimes, jobs: Sequence[RowTimes]) -> Iterator[SizeRow]:
    """Yield a row for each finalist, with ratios by rounds of the sweep or by jobs, if enough ran.

    A choice gains if it is faster beyond chance, and harms if multiplications beside the calls are
    slower beyond chance.
    """
    default = times.variants[0]
    for variant in times.finalists:
        ratios = ratios_of(default.seconds, variant.seconds)[-times.final :]
        if len(jobs) >= LEAST_JOBS:
            ratios = [_ratio(job, variant.choice) for job in jobs]
            if not all(ratios):
                continue  # NCCL did not allow it in every job.
        swept = ratio_interval(ratios, level=_SURE)
        near = ratio_interval(ratios_of(default.beside, variant.beside)) if variant.beside else None
        yield replace(
            row_untried(times.row),
            choice=variant.choice,
            swept=swept,
            near=near,
            harms=near is not None and near.middle < NO_HARM and near.high < 1,
            gains=swept.low >= LEAST_GAIN,
        )


def confirm(
    rows: Sequence[SizeRow], jobs: Mapping[ChoiceName, Jobs], *, plan: ChoiceName
) -> list[SizeRow]:
    """Return the rows with the ratios of fresh jobs, and with what stays in the table.

    Each job of an arm has the times of rows under NCCL's own choice and the predicted one, which
    only those of the arm `plan` follow. A row stays only if the same collective and size of another
    dtype is not slower.
    """
    timed = {name: _by_row(of_arm) for name, of_arm in jobs.items()}
    confirmed = [
        _fresh(row, {name: of.get(row.plain, ()) for name, of in timed.items()}, plan)
        for row in rows
    ]
    lost = (row for row in confirmed if row.fresh is not None and row.fresh.middle < NO_HARM)
    slower = {(row.collective, row.bytes) for row in lost}
    for at, row in enumerate(confirmed):
        sound = row.gained and (row.collective, row.bytes) not in slower
        confirmed[at] = replace(row, kept=sound and row.gains and not row.harms)
    return confirmed


def _by_row(jobs: Jobs) -> dict[Row, list[RowTimes]]:
    by_row: dict[Row, list[RowTimes]] = {}
    for times in chain.from_iterable(jobs):
        by_row.setdefault(times.row, []).append(times)
    return by_row


def _fresh(
    row: SizeRow, jobs: Mapping[ChoiceName, Sequence[RowTimes]], plan: ChoiceName
) -> SizeRow:
    seconds: dict[str, tuple[float, ...]] = {}
    for name, of_arm in jobs.items():
        # All calls of the arms beside the plan's are NCCL's own choice.
        pooled = (times.variants[: 1 if name == plan else None] for times in of_arm)
        seconds[name] = tuple(_middle(sum((v.seconds for v in of), ())) for of in pooled)
    chosen = [times for times in jobs[plan] if len(times.variants) > 1]
    fresh = None
    if len(chosen) >= LEAST_JOBS:
        seconds["tuned"] = tuple(_middle(times.variants[1].seconds) for times in chosen)
        fresh = ratio_interval([_ratio(times, times.variants[1].choice) for times in chosen])
    return replace(row, plan=plan, seconds=seconds, fresh=fresh)


def _ratio(times: RowTimes, choice: TunerChoice | None) -> float:
    """Return the speed of a choice, or of the plugin's table (None), over NCCL's own in a job."""
    baseline, *variants = times.variants
    rival = next((rival for rival in variants if rival.choice == choice), None)
    return _middle(ratios_of(baseline.seconds, rival.seconds)) if rival and rival.seconds else 0.0


def _middle(values: Sequence[float]) -> float:
    """Return the geometric mean without the smallest and the largest value, if there are three."""
    return geometric_mean(sorted(values)[1:-1] or values)


def entries(rows: Sequence[SizeRow], sweep: Sequence[RowTimes]) -> tuple[TunerEntry, ...]:
    """Return the entries of the rows of a sweep that stay, as ranges of sizes."""
    choices = {row.plain: row.choice for row in rows if row.kept}
    ranges = []
    for collective in dict.fromkeys(times.row.collective for times in sweep):
        series = [times for times in sweep if times.row.collective == collective]
        series.sort(key=lambda times: times.row.bytes)
        for choice, run in groupby(series, key=lambda times: choices.get(times.row)):
            if choice is not None:
                ranges.append(_entry(series, list(run), choice))
    return tuple(sorted(ranges, key=table_order))


def covers(entry: TunerEntry, row: Row) -> bool:
    """Return whether an entry of the tuner is for a row."""
    inside = entry.from_bytes <= row.bytes <= entry.to_bytes
    return inside and entry.collective == row.collective


def table_order(entry: TunerEntry) -> tuple[int, int]:
    """Return the place of an entry in its table, for sorting."""
    return TUNED.index(entry.collective), entry.from_bytes


def _entry(series: Sequence[RowTimes], run: Sequence[RowTimes], choice: TunerChoice) -> TunerEntry:
    """Return the entry of a run; it reaches half-way to the next sizes if it does no harm there."""
    ends = [run[0].row.bytes, run[-1].row.bytes]
    for end, at in enumerate((series.index(run[0]) - 1, series.index(run[-1]) + 1)):
        if 0 <= at < len(series) and _ratio(series[at], choice) >= NO_HARM:
            ends[end] = math.isqrt(series[at].row.bytes * ends[end]) + (end == 0)
    return TunerEntry(
        collective=cast(TunedCollective, run[0].row.collective),
        from_bytes=ends[0],
        to_bytes=ends[1],
        **asdict(choice),
    )


def load_sizes(directory: Path) -> tuple[SizeTuning, ...]:
    """Return the tunings of the plan in a directory; () if none, or of an earlier plan.

    The first is of all-reduce over all GPUs, the last are of smaller sets.
    """
    saved = Tuning.load(directory)
    if saved is None:
        return ()
    return read_tunings(bytes(saved.tunings).decode(), str(directory / saved.FILE))


def tune_by_size(
    target: Target,
    launcher: Launcher,
    sizes: Sequence[int],
    *,
    seconds: float,
    workload: Workload | None = None,
) -> tuple[SizeTuning, ...]:
    """Tune all collectives of a machine's plan by message size, and keep the tables.

    `sizes` in bytes are for all-reduce, SIZES for all sizes; every second one is for other
    collectives and smaller sets. Of a `workload` these are the sizes that it has, in its groups. No
    fresh jobs of a tuning start after `seconds`. A set of GPUs whose job fails has no table.
    """
    work = list(_work(target, sizes, workload))
    equal = _equal_sets(target, (gpus for gpus, _ in work))
    tunings: list[SizeTuning] = []
    with temporary_folder("tccl-plugin-") as folder:
        try:
            library = plugin_library(folder) if launcher.backend == "cuda" else None
        except BuildError as error:
            launcher.say(f"not tuned by message size, which needs the NCCL plugin: {error}")
            return ()
        for gpus, rows in work:
            if gpus not in equal:
                continue
            # Rows of sets that equal it are its own.
            others = (of for sets, of in work if sets != gpus and sets in equal[gpus])
            together = tuple(dict.fromkeys(chain(rows, *others)))
            over = launcher.over(gpus), arms_of(target, library, gpus)
            longest = seconds if gpus == target.gpus else min(seconds, _SUBSET_SECONDS)
            try:
                tunings.append(tune_sizes(*over, together, longest)[0])
            except MeasurementError as error:
                launcher.say(f"not tuned by message size: {error}")
        if tunings and _keep(target, launcher, tunings, equal) and library is not None:
            tunings = _check_table(target, launcher, tunings, library)
            _keep(target, launcher, tunings, equal)
    return tuple(tunings)


def plugin_library(folder: Path) -> Path:
    """Return the plugin's library, built in `folder` where the installation has none."""
    return found_library() or build_plugin(folder)


def arms_of(target: Target, library: Path | None, gpus: tuple[int, ...]) -> tuple[Arm, ...]:
    """Return a plan's arms over a set of GPUs, the recommended choice first.

    That one has the plugin's tuner, and the set's own graph file if the plugin gives one.
    """
    first = target.arm(target.plan.recommended)
    others = {"default", "variables"} - {first.name}
    further = (arm for arm in target.arms if arm.name in others)
    variables, graphs = dict(first.variables), first.graphs
    if library is not None:
        variables[TUNER_VARIABLE] = str(library.resolve())
    if graphs and gpus != target.gpus:
        planned, graphs = target.plan.subset(gpus), {}
        if planned is not None and planned.gains:
            graphs = {THIS_HOST: subset_graph(target.plan, planned)}
        else:
            del variables[GRAPH_VARIABLE]
    return replace(first, variables=variables, graphs=graphs), *further


def _work(
    target: Target, sizes: Sequence[int], workload: Workload | None
) -> Iterator[tuple[tuple[int, ...], Sequence[Row]]]:
    """Yield sets of GPUs with rows to tune, all GPUs first."""
    every = ALL_SIZES if tuple(sizes) == SIZES else tuple(sizes)
    if workload is None:
        yield target.gpus, rows_of(every, ("all_reduce",), SWEPT)
        yield target.gpus, rows_of(every[::2], FURTHER, SWEPT)
        for gpus in subsets(target.plan.machine, target.gpus):
            yield gpus, rows_of(every[::2], ("all_reduce",), SWEPT)
        return
    rows: dict[tuple[int, ...], dict[Row, None]] = {}
    for row in sorted(timed_calls(workload, len(target.gpus)), key=lambda row: row.groups != ()):
        for group in row.groups or (range(workload.ranks),):
            if COLLECTIVES[row.collective].algorithms:
                gpus = tuple(sorted(target.gpus[rank] for rank in group))
                rows.setdefault(gpus, {})[replace(row, dtype=SWEPT, groups=())] = None
    yield from ((gpus, tuple(of_set)) for gpus, of_set in rows.items())


def _equal_sets(target: Target, sets: Iterable[tuple[int, ...]]) -> EqualSets:
    """Return all GPUs, and pairs and halves of `sets` to measure, with the sets that equal each.

    Sets are equal where a symmetry of the machine exchanges their GPUs.
    """
    plan = target.plan
    node = plan.cluster.classes[0]
    symmetry = automorphisms(node.machine, node.knowledge, gpus=plan.gpus)
    equal: EqualSets = {target.gpus: {target.gpus}}
    for gpus in sets:
        usual = len(gpus) in (2, (len(plan.gpus) + 1) // 2) and len(equal) <= _MOST_SUBSETS
        if usual and not any(gpus in images for images in equal.values()):
            equal[gpus] = set(images_of_gpus(symmetry, gpus))
    return equal


def tune_sizes(
    launcher: Launcher, arms: tuple[Arm, ...], rows: Sequence[Row], seconds: float
) -> tuple[SizeTuning, tuple[RowTimes, ...]]:
    """Find choices of algorithm, protocol and channels that are faster than NCCL's own.

    Choices are timed in the first arm, NCCL's own choice in all. The sweep has half of `seconds`;
    after all of them no fresh jobs start beyond LEAST_JOBS. Also returns all times of the sweep.

    Raises MeasurementError: the sweep's job failed, or too many fresh jobs.
    """
    begun, plan = time.monotonic(), arms[0]
    launcher = replace(launcher, timeout=max(launcher.timeout, seconds / 2 + _START_S))
    # 1. Sweep over all choices in one job.
    launcher.watch(f"trying algorithms, protocols and channels of {plan.name}")
    contests = tuple(replace(row, contest=Contest(rounds=_rounds(row.bytes)[0])) for row in rows)
    (job,) = launcher.run([plan], JobSpec(rows=contests, limit=seconds / 2))
    sweep = job.results[0].times
    # 2. Small messages depend on the process: time their finalists in several ones.
    again = _fresh_jobs(launcher, (plan,), contests_again(sweep), least=_AGAIN_JOBS)
    predicted = with_spots(predict(sweep, again[plan.name]))
    # 3. Time the predicted choices in fresh jobs, which decide.
    contests = tuple(_fresh_contest(row, row.choice) for row in predicted)
    fresh = _fresh_jobs(launcher, arms, contests, most=MOST_JOBS, until=begun + seconds)
    confirmed = confirm(predicted, fresh, plan=plan.name)
    tuning = SizeTuning(
        gpus=tuple(gpu for host in launcher.hosts for gpu in host.gpus),
        arm=plan.name,
        backend=launcher.backend,
        nccl=job.results[0].nccl,
        rows=tuple(confirmed),
        entries=entries(confirmed, sweep),
        jobs=len(fresh[plan.name]),
        skew=max((times.skew for times in sweep), default=0.0),
        seconds=time.monotonic() - begun,
    )
    return tuning, sweep


def _rounds(size: int) -> tuple[int, int]:
    return next(rounds for most, rounds in _ROUNDS.items() if size <= most)


def _fresh_contest(row: Row, choice: TunerChoice | None, *, table: bool = False) -> Row:
    choices = (choice,) if choice else ()
    contest = Contest(choices=choices, rounds=_rounds(row.bytes)[1], table=table)
    return replace(row.plain, contest=contest)


def contests_again(sweep: Sequence[RowTimes]) -> tuple[Row, ...]:
    """Return contests of the finalists of small messages."""
    small = {times.row: times.finalists for times in sweep if times.row.bytes <= _NOISY}
    choices = {
        row: tuple(v.choice for v in variants if v.choice) for row, variants in small.items()
    }
    return tuple(
        replace(row, contest=Contest(choices=tried, rounds=_AGAIN_ROUNDS))
        for row, tried in choices.items()
    )


def with_spots(rows: Sequence[SizeRow]) -> list[SizeRow]:
    """Return the rows, and all-reduces of the other dtype where the first one is to gain.

    NCCL does not tell a tuner the dtype: an entry holds for all of them.
    """
    spots = (
        replace(row, dtype=_SPOT)
        for row in rows
        if row.gains and not row.harms and row.collective == "all_reduce"
    )
    return [*rows, *spots]


def _fresh_jobs(
    launcher: Launcher,
    arms: tuple[Arm, ...],
    contests: tuple[Row, ...],
    *,
    least: int = LEAST_JOBS,
    most: int = 0,
    until: float = 0.0,
    log: str = "",
) -> dict[ChoiceName, list[Sequence[RowTimes]]]:
    """Return the times of `least` fresh jobs of each arm, of up to `most` if it is not late.

    Raises MeasurementError: a job failed, or its log lacks `log`.
    """
    name = f"fresh jobs of {len(contests)} rows"
    named = replace(launcher, watch=lambda text: launcher.watch(f"{name}: {text}"))
    rounds = Rounds(named, arms, JobSpec(rows=contests), needed=[arm.name for arm in arms])
    for count in rounds.repeat(least, max(least, most)) if contests else ():
        if not all(log in job.log for _, job in rounds.jobs):
            raise MeasurementError(_REFUSED)
        if count >= least and time.monotonic() >= until:
            break
    return {arm.name: [job.results[0].times for job in rounds.of(arm.name)] for arm in arms}


def _keep(
    target: Target, launcher: Launcher, tunings: Sequence[SizeTuning], equal: EqualSets
) -> bool:
    """Write the rows, and the plugin's tables of the sets measured on GPUs, and of their equals.

    Return whether the plugin gets tables.
    """
    plan, tables = target.plan, list[TunerTable]()
    for measured, sets in equal.items():
        of_set = chain.from_iterable(each.entries for each in tunings if each.gpus == measured)
        if entries := tuple(sorted(of_set, key=table_order)):
            table = TunerTable(gpus=measured, measured_on=measured, entries=entries)
            tables += [replace(table, gpus=gpus) for gpus in sorted(sets)]
    tuning = Tuning(
        choice=plan.recommended,
        nccl=tunings[0].nccl,
        tables=tuple(tables),
        simulated=plan.simulated,
        tunings=msgspec.Raw(encode_line(tunings)),
    )
    with defer_signals():
        try:
            if launcher.backend == "cuda":
                keep_tuning(tuning, plan, target.directory)
                return True
        except InputError as error:
            launcher.say(f"the plugin gets no table by message size: {error}")
        replace(tuning, nccl="", tables=()).keep(target.directory, launcher.say)
    return False


def _check_table(
    target: Target, launcher: Launcher, tunings: Sequence[SizeTuning], library: Path
) -> list[SizeTuning]:
    """Time what all GPUs get by the plugin, and return the tunings without entries that harm.

    Each job compares the table with NCCL's own choice: at measured sizes, half-way between them,
    and at the ends of each entry. The plan's tables must be in its directory.
    """
    timed_rows: dict[Row, None] = {}
    for tuning in tunings:
        for entry in tuning.entries if tuning.gpus == target.gpus else ():
            sizes = sorted({*_DENSE_SIZES, entry.from_bytes, entry.to_bytes})
            rows = rows_of(sizes, (entry.collective,), SWEPT)
            timed_rows |= dict.fromkeys(row for row in rows if covers(entry, row))
    plan = target.arm(target.plan.recommended)
    index = target.directory.resolve() / "nccl" / INDEX_FILE
    variables = {n: v for n, v in plan.variables.items() if n != GRAPH_VARIABLE}
    variables |= {PLUGIN_VARIABLE: str(library), INDEX_VARIABLE: str(index)}
    variables |= files_of(target.plan).variables[0]
    arm = replace(plan, variables=variables, graphs={})
    contests = tuple(_fresh_contest(row, None, table=True) for row in timed_rows)
    try:
        jobs = _fresh_jobs(launcher, (arm,), contests, log="tuned by")
    except MeasurementError as error:
        launcher.say(f"the plugin's table was not timed: {error}")
        return list(tunings)
    timed = confirm(list(map(row_untried, timed_rows)), jobs, plan=arm.name)
    return [_without_harm(each, timed) if each.gpus == target.gpus else each for each in tunings]


def _without_harm(tuning: SizeTuning, timed: Sequence[SizeRow]) -> SizeTuning:
    """Return a tuning with the rows by the plugin, without entries that these found slower."""
    slow = [row for row in timed if row.fresh is not None and row.fresh.middle < NO_HARM]
    entries = [each for each in tuning.entries if not any(covers(each, row) for row in slow)]

    def may_keep(row: SizeRow) -> bool:
        return row.kept and any(covers(entry, row) for entry in entries)

    collectives = {entry.collective for entry in tuning.entries}
    return replace(
        tuning,
        rows=tuple(replace(row, kept=may_keep(row)) for row in tuning.rows),
        entries=tuple(entries),
        by_plugin=tuple(row for row in timed if row.collective in collectives),
    )
