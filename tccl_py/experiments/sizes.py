"""Tuning by message size: all GPUs of a plan, then smaller sets; tuning.json.

Choices are relative to the recommended choice of the plan without a table, whose jobs they share. A
sweep of choices runs in one job, and fresh jobs confirm or reject.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tccl_py.delivery.plugin import PLUGIN_VARIABLE
from tccl_py.errors import InputError, MeasurementError, defer_signals
from tccl_py.experiments.calls import GRAPHED_BYTES
from tccl_py.experiments.collectives import COLLECTIVES
from tccl_py.experiments.communication import timed_calls
from tccl_py.experiments.jobs import THIS_HOST, Arm, ConcurrentJobs, Launcher
from tccl_py.experiments.size_table import (
    NO_HARM,
    SWEPT,
    SizeRow,
    SizeTuning,
    confirm,
    covers,
    entries,
    predict,
    read_tunings,
    row_untried,
    table_order,
)
from tccl_py.experiments.spec import (
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
from tccl_py.files import encode_line, temporary_folder
from tccl_py.model.symmetry import automorphisms, images_of_gpus
from tccl_py.nccl.plugin import found_library
from tccl_py.nccl.plugin.build import BuildError, build_plugin
from tccl_py.nccl.plugin.index import INDEX_FILE, INDEX_VARIABLE
from tccl_py.nccl.settings import GRAPH_VARIABLE
from tccl_py.nccl.tuner import TunerTable
from tccl_py.plan.chains import ChoiceName
from tccl_py.plan.directory import files_of
from tccl_py.plan.machine_files import subset_graph
from tccl_py.plan.results import Tuning, keep_tuning
from tccl_py.planning.parts import subsets
from tccl_py.workloads.workload import Workload

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
LEAST_JOBS, MOST_JOBS = 6, 10
_START_S = 60.0
"""Time for the start of a job's ranks and its first collectives."""
_REFUSED = "the plugin refused it, as TCCL_DEBUG=1 would tell"

EqualSets = dict[tuple[int, ...], set[tuple[int, ...]]]
"""The sets of GPUs that equal each measured set, itself included."""


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
    named = launcher.with_name(f"fresh jobs of {len(contests)} rows")
    jobs = ConcurrentJobs(named, JobSpec(rows=contests))
    times: dict[ChoiceName, list[Sequence[RowTimes]]] = {arm.name: [] for arm in arms}
    for ended in jobs.rounds(arms, least, max(least, most)) if contests else ():
        for arm, outcome in ended:
            if isinstance(outcome, MeasurementError):
                raise outcome
            if log not in outcome.log:
                raise MeasurementError(_REFUSED)
            times[arm.name].append(outcome.results[0].times)
        if len(times[arms[0].name]) >= least and time.monotonic() >= until:
            break
    return times


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
