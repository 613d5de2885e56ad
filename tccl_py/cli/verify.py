"""`tccl verify`: real collectives by default NCCL and a plan's choices."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer
from msgspec.structs import replace
from rich.console import Console

from tccl_py.cli import options
from tccl_py.cli.measure import controlled_job
from tccl_py.cli.options import flag, opt, parse_sizes, refuse
from tccl_py.cli.output import BAD, GOOD, ProgressLine, print_table, results
from tccl_py.cli.process import (
    ANSWER_IS_NO,
    notice,
    notice_each,
    print_json,
)
from tccl_py.errors import InputError, check_choice, check_range
from tccl_py.experiments.comparison import LEAST_ROUNDS, MAX_ROUNDS, RunBudget, budget_of
from tccl_py.experiments.jobs import RANK_VARIABLES, Launcher
from tccl_py.experiments.means import NCCL
from tccl_py.experiments.nccl_tests import find_program, size_options
from tccl_py.experiments.plans import compare_means, tuning_budget, verify_plan
from tccl_py.experiments.record import Verification
from tccl_py.experiments.sizes import SizeTuning, load_sizes
from tccl_py.experiments.spec import PROGRAMS, Collective
from tccl_py.launchers import in_job
from tccl_py.model.measurement import Backend
from tccl_py.nccl.settings import GRAPH_VARIABLE
from tccl_py.plan.chains import CHOICES, ChoiceName
from tccl_py.plan.load import load_plan
from tccl_py.plan.plan import Plan
from tccl_py.plan.results import plan_in
from tccl_py.plan.staging import lock_directory
from tccl_py.report.sizes import SIZES, entry_lines, tuning_facts
from tccl_py.report.tables import (
    MEANS,
    TRIED,
    communication_line,
    lines,
    means_facts,
    size_lines,
)
from tccl_py.report.verification import (
    facts_of,
    headline,
    report_verification,
)
from tccl_py.sources.profiled import check_backend
from tccl_py.workloads.sources import open_workload

if TYPE_CHECKING:
    from tccl_py.sources.hosts import Job

_COLLECTIVES = tuple(PROGRAMS.values())
_NAME = re.compile(r"NCCL_[A-Z0-9_]{1,60}", re.ASCII)


def verify(
    directory: Path = options.DIRECTORY,
    *,
    choice: str | None = opt("|".join(CHOICES[1:]), "Compare this choice alone."),
    rounds: int = opt("N", "Rounds with a job of each choice.", default=RunBudget().rounds),
    sizes: str | None = opt("LIST", "As 4K,1M,256M; 1K to 1G if not given, in a dry run to 4M."),
    seconds: float | None = opt("S", "No round after this but the first 7; 300, in a dry run 30."),
    collective: str = opt("NAME", f"One of {', '.join(_COLLECTIVES)}.", default="all_reduce"),
    training: bool = flag("--training", "Also time steps of a small GPT."),
    every: bool = flag("--all", "Also time more collectives, and all pairs."),
    tune: bool = flag("--tune", "Keep better settings: 10 minutes or more."),
    means: bool = flag("--means", "Instead compare NCCL with other means, by message size."),
    no_checks: bool = flag("--no-checks", "Do not compare results' values."),
    pin_env: list[str] | None = opt("NCCL_NAME", "Variables that all jobs get."),
    workload: str | None = options.WORKLOAD,
    with_: str | None = opt("PROGRAM", "Run this program of nccl-tests; needs no torch.", "--with"),
    backend: str | None = options.BACKEND,
    json: bool = options.JSON,
) -> None:
    """Run real collectives by default NCCL and by the plan's choices, and name the winner.

    Needs torch, or a program of nccl-tests (--with), and idle GPUs; for a cluster mpirun or srun.

    Exit codes: 0 the recommended choice, or that of --choice, wins or is as good, or with
    --workload; 1 no, or with --means default NCCL fails; 2 wrong use, or no plan for this machine.

    Examples:

        tccl verify my-plan
        tccl verify my-plan --choice variables --sizes 64M,256M,1G --rounds 20
        tccl verify my-plan --all
        tccl verify my-plan --means
        tccl verify my-plan --workload job.json
        tccl verify my-plan --with all_reduce_perf
        mpirun -N 1 tccl verify my-cluster
    """
    check_range("--rounds", rounds, LEAST_ROUNDS, MAX_ROUNDS // 2)
    usual = budget_of(backend)
    seconds = usual.seconds if seconds is None else seconds
    check_range("--seconds", seconds, 0, 86_400, above=True)
    check_choice("--collective", collective, _COLLECTIVES)
    if means:
        wanted = None if sizes is None else parse_sizes(sizes, "--sizes")
        _verify_means(directory, backend, pin_env, wanted, seconds, json=json)
        return
    program = None
    if with_ is not None:
        program = find_program(with_)
        of_program = PROGRAMS[program.name]
        check_choice("--collective", collective, ("all_reduce", of_program))
        collective = of_program
    budget = replace(
        usual,
        rounds=rounds,
        sizes=usual.sizes if sizes is None else parse_sizes(sizes, "--sizes"),
        seconds=seconds,
        collectives=(cast(Collective, collective),),
        checks=not no_checks,
        training=training,
        every=every,
        only=cast("ChoiceName | None", choice),
    )
    if program is not None:
        size_options(budget.sizes)
    if in_job():
        refuse({"--with": program}, "is for the plan of one machine", "leave it out")

    def show(result: Verification) -> None:
        if json:
            print_json(report_verification(result, load_sizes(directory)))
        else:
            print_verification(result, results())

    with _job_options(directory, backend, pin_env, program=program) as launcher:
        if workload is not None:
            ranks = len(plan_in(directory).orders[0])
            budget = replace(budget, workload=open_workload([workload], ranks=ranks))

        def note_interrupt(result: Verification) -> None:
            notice_each(result.notices)
            show(result)

        result = verify_plan(directory, budget, launcher, tune=tune, interrupted=note_interrupt)
    show(result)
    if tune and not json:
        print_sizes(load_sizes(directory), results())
    if not result.accepted and (result.workload is None or result.best.faults):
        raise typer.Exit(ANSWER_IS_NO)


def _verify_means(
    directory: Path,
    backend: str | None,
    pin_env: Sequence[str] | None,
    sizes: Sequence[int] | None,
    seconds: float,
    *,
    json: bool,
) -> None:
    with _job_options(directory, backend, pin_env) as launcher:
        table = compare_means(directory, launcher, seconds=seconds, sizes=sizes)
    if json:
        print_json(table)
    else:
        print_table(results(), lines(MEANS, table.rows))
        for line in means_facts(table):
            results().print(line)
    if NCCL in table.out:
        raise typer.Exit(ANSWER_IS_NO)


@contextmanager
def _job_options(
    directory: Path,
    backend: str | None,
    pin_env: Sequence[str] | None,
    *,
    program: Path | None = None,
) -> Iterator[Launcher]:
    """Hold a plan's directory against other runs, and yield how jobs of the plan run."""
    kind = None if backend is None else check_backend(backend)
    for name in pin_env or ():
        if _NAME.fullmatch(name) is None:
            where = f"--pin-env {name[:40]!r}"
            raise InputError(where, "is no NCCL variable", "a name such as NCCL_P2P_DISABLE")
        if name == GRAPH_VARIABLE:
            raise InputError(f"--pin-env {name}", "is what is compared", "leave it out")
        if name in (*RANK_VARIABLES, "NCCL_DEBUG_FILE"):
            raise InputError(f"--pin-env {name}", "is set by the jobs themselves", "leave it out")
    with ExitStack() as stack:
        job = stack.enter_context(controlled_job()) if in_job() else None
        plan_in(directory)
        # A plan that is written into it meanwhile would get the results of another one.
        stack.enter_context(lock_directory(directory))
        yield Launcher(
            job=job,
            backend=kind or "cuda",
            keep=tuple(pin_env or ()),
            nccl_tests=program,
            say=notice,
            watch=stack.enter_context(ProgressLine()).say,
        )


def tuned_plan(directory: Path, job: Job | None = None, backend: Backend = "cuda") -> Plan:
    """Verify a plan that was just written, tune it, and return it."""
    budget = RunBudget() if job is None else tuning_budget(load_plan(directory))
    with ProgressLine() as line:
        launcher = Launcher(job=job, backend=backend, say=notice, watch=line.say)
        result = verify_plan(directory, budget, launcher, tune=True)
    console = results(stderr=True)
    print_verification(result, console)
    print_sizes(load_sizes(directory), console)
    return load_plan(directory)


def print_sizes(tunings: Sequence[SizeTuning], console: Console) -> None:
    """Print the rows of each tuning by message size, the tuner's entries, and the cost."""
    for tuning in tunings:
        print_table(console, lines(SIZES, tuning.rows))
        print_table(console, entry_lines([tuning]))
        for line in tuning_facts(tuning):
            console.print(line)


def print_verification(result: Verification, console: Console) -> None:
    """Print the winner, the sizes, and what the answer rests on."""
    winner, answer = headline(result)
    if result.workload is not None:
        console.print(communication_line(result.workload), style=GOOD)
    console.print(winner)
    console.print(answer, style=GOOD if result.accepted else BAD)
    if result.arms[0].sizes:
        print_table(console, size_lines([arm for arm in result.arms if arm.sizes]))
    print_table(console, lines(TRIED, result.tried), title="tuning: speeds over default NCCL")
    for line in facts_of(result):
        console.print(line)
