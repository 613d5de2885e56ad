"""Tuning a plan's directory by message size: all GPUs, then smaller sets; sizes.json."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from tccl_py.errors import InputError, undisturbed
from tccl_py.files import read_text
from tccl_py.model.symmetry import automorphisms, equal_sets
from tccl_py.nccl.plugin import found_library
from tccl_py.nccl.plugin.build import BuildError, build_plugin
from tccl_py.nccl.plugin.index import INDEX_FILE, INDEX_VARIABLE
from tccl_py.nccl.tuner import TunerTable
from tccl_py.plan.beside import (
    PLUGIN_VARIABLE,
    Tuning,
    keep_beside_plan,
    keep_tuning,
    read_beside_plan,
)
from tccl_py.plan.files import graph_files
from tccl_py.plan.plan import Plan
from tccl_py.plan.planner import subsets
from tccl_py.verify.jobs import GRAPH_VARIABLE, THIS_HOST, JobError, Launcher
from tccl_py.verify.size_table import NO_HARM, SizeRow, confirm, table_order
from tccl_py.verify.sizes import (
    ALL_SIZES,
    SizeArms,
    SizeBudget,
    SizeTuning,
    arms_of,
    run_jobs,
    table_contests,
    table_rows,
    tune_sizes,
    without,
)
from tccl_py.verify.spec import SIZES, Collective
from tccl_py.verify.target import Target

SIZES_FILE = "sizes.json"
FORMAT_VERSION = 1
OTHERS: tuple[Collective, ...] = ("all_gather", "reduce_scatter", "broadcast", "reduce")
_MOST_SUBSETS = 3
"""Smaller sets of GPUs that are measured: pairs and halves, one of each kind."""
SIZE_SECONDS, _SUBSET_SECONDS = 300.0, 90.0
"""No fresh jobs start later: of all-reduce, of the other collectives, and of a smaller set."""

Say = Callable[[str], None]
EqualSets = dict[tuple[int, ...], set[tuple[int, ...]]]
"""The sets of GPUs that equal each measured set, itself included."""


class SizeTunings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tunings of a plan: of all GPUs, the first of all-reduce, then of smaller sets."""

    tunings: tuple[SizeTuning, ...]
    plan_digest: str = ""
    format_version: int = FORMAT_VERSION


def load_sizes(directory: Path) -> tuple[SizeTuning, ...]:
    """Return the tunings of the plan in a directory; () if none, or of an earlier plan."""
    path = directory / SIZES_FILE
    if not path.exists():
        return ()
    found = read_beside_plan(path, SizeTunings, version=FORMAT_VERSION)
    return () if found is None else found.tunings


def tune_by_size(
    target: Target,
    launcher: Launcher,
    sizes: Sequence[int],
    *,
    seconds: float,
    say: Say = lambda _: None,
    watch: Say = lambda _: None,
) -> tuple[SizeTuning, ...]:
    """Tune all collectives of a machine's plan by message size, and keep the tables.

    `sizes` in bytes are for all-reduce, SIZES for all sizes; every second one is for other
    collectives and smaller sets. No fresh jobs of a tuning start after `seconds`. A set of GPUs
    whose job fails has no table.
    """
    every = ALL_SIZES if tuple(sizes) == SIZES else tuple(sizes)
    whole = SizeBudget(sizes=every, sweep_seconds=seconds / 2, seconds=seconds)
    replace = msgspec.structs.replace
    fewer = replace(whole, sizes=every[::2])
    found: list[SizeTuning] = []
    with tempfile.TemporaryDirectory(prefix="tccl-plugin-") as folder:
        library = plugin_library(Path(folder), say) if launcher.backend == "cuda" else None
        if library is None and launcher.backend == "cuda":
            return ()
        arms = arms_of(target, library)
        work = [(arms, launcher, whole), (arms, launcher, replace(fewer, collectives=OTHERS))]
        small = replace(
            fewer,
            sweep_seconds=min(seconds, _SUBSET_SECONDS) / 2,
            seconds=min(seconds, _SUBSET_SECONDS),
        )
        equal = dict(_measured_sets(target.plan))
        work += [(*_over(target, launcher, arms, gpus), small) for gpus in equal]
        for each in work:
            try:
                found.append(tune_sizes(*each, watch=watch)[0])
            except JobError as error:
                say(f"not tuned by message size: {error}")
        equal[target.gpus] = {target.gpus}
        try:
            _keep(target, found, equal, tables=library is not None)
            if library is not None and found:
                found = _checked(target, launcher, found, library, say=say, watch=watch)
                _keep(target, found, equal, tables=True)
        except InputError as error:
            say(f"the plugin gets no table by message size: {error}")
    return tuple(found)


def _keep(target: Target, found: Sequence[SizeTuning], equal: EqualSets, *, tables: bool) -> None:
    """Write the rows, and the plugin's tables if asked to."""
    plan = target.plan
    with undisturbed():
        keep_beside_plan(SizeTunings(tunings=tuple(found)), target.directory / SIZES_FILE)
        if tables and found:
            tuning = Tuning(
                choice=plan.recommended,
                nccl=found[0].nccl,
                tables=_tables(found, equal),
                simulated=plan.simulated,
            )
            keep_tuning(tuning, plan, target.directory)


def _checked(
    target: Target,
    launcher: Launcher,
    found: Sequence[SizeTuning],
    library: Path,
    *,
    say: Say,
    watch: Say,
) -> list[SizeTuning]:
    """Time what all GPUs get by the plugin, and return the tunings without entries that harm.

    Each job compares the table with NCCL's own choice: at measured sizes, half-way between them,
    and at the ends of each entry. The plan's tables must be in its directory.
    """
    entries = [entry for one in found if one.gpus == target.gpus for entry in one.entries]
    if not entries:
        return list(found)
    asked = {row: entry for entry in entries for row in table_rows(entry)}
    plan = target.arm(target.plan.recommended)
    index = target.directory.resolve() / "nccl" / INDEX_FILE
    variables = {n: v for n, v in plan.variables.items() if n != GRAPH_VARIABLE}
    variables |= {PLUGIN_VARIABLE: str(library), INDEX_VARIABLE: str(index)}
    arm = msgspec.structs.replace(plan, variables=variables, graphs={})
    watch("timing the plugin's table")
    try:
        jobs = run_jobs(launcher, arm, table_contests(list(asked)))
    except JobError as error:
        say(f"the plugin's table was not timed: {error}")
        return list(found)
    if not all("tuned by" in job.log for job in jobs):
        say("the plugin's table was not timed: the plugin refused it, as TCCL_DEBUG=1 would tell")
        return list(found)
    timed = confirm(
        [SizeRow(row=row) for row in asked],
        {arm.name: [job.results[0].contests for job in jobs]},
        plan=arm.name,
    )
    harmful = [
        asked[row.row] for row in timed if row.fresh is not None and row.fresh.middle < NO_HARM
    ]
    return [without(one, harmful, timed if one.gpus == target.gpus else ()) for one in found]


def plugin_library(folder: Path, say: Say) -> Path | None:
    """Return the plugin's library, built in `folder` where the installation has none."""
    try:
        return found_library() or build_plugin(folder)
    except BuildError as error:
        say(f"not tuned by message size, which needs the NCCL plugin: {error}")
        return None


def _measured_sets(plan: Plan) -> Iterator[tuple[tuple[int, ...], set[tuple[int, ...]]]]:
    """Yield pairs and halves of a plan's GPUs to measure, and the sets that equal each.

    Sets are equal where a symmetry of the machine exchanges their GPUs.
    """
    node = plan.cluster.classes[0]
    symmetry = automorphisms(node.machine, node.knowledge, gpus=plan.gpus)
    known: set[tuple[int, ...]] = set()
    count = 0
    for gpus in subsets(node.machine, plan.gpus):
        usual = len(gpus) in (2, (len(plan.gpus) + 1) // 2)
        if usual and gpus not in known and count < _MOST_SUBSETS:
            equal = equal_sets(symmetry, gpus)
            known |= equal
            count += 1
            yield gpus, equal


def _over(
    target: Target, launcher: Launcher, arms: SizeArms, gpus: tuple[int, ...]
) -> tuple[SizeArms, Launcher]:
    """Return arms and launcher of a smaller set, with its own graph file where the plan has one."""
    replace = msgspec.structs.replace
    (host,) = launcher.hosts
    part = replace(host, ranks=tuple(range(len(gpus))), gpus=gpus)
    plan = arms.plan
    if plan.graphs:
        file = graph_files(target.plan).get(gpus)
        variables = {
            name: value for name, value in plan.variables.items() if name != GRAPH_VARIABLE
        }
        graphs = {}
        if file is not None:
            path = target.directory.resolve() / "nccl" / file
            variables[GRAPH_VARIABLE] = str(path)
            graphs = {THIS_HOST: read_text(path)}
        plan = replace(plan, variables=variables, graphs=graphs)
    return replace(arms, plan=plan), replace(launcher, hosts=(part,))


def _tables(found: Sequence[SizeTuning], equal: EqualSets) -> tuple[TunerTable, ...]:
    """Return the tables of all sets: those measured, and those equal to them."""
    tables = []
    for measured, images in equal.items():
        of = [entry for tuning in found if tuning.gpus == measured for entry in tuning.entries]
        entries = tuple(sorted(of, key=table_order))
        if entries:
            tables += [
                TunerTable(gpus=gpus, measured_on=measured, entries=entries)
                for gpus in sorted(images)
            ]
    return tuple(tables)
