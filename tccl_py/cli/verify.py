"""`tccl verify` and `tccl evaluate`: real collectives by default NCCL and a plan's choices."""

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
from tccl_py.cli.options import flag, in_range, one_of, opt, refuse
from tccl_py.cli.output import BAD, GOOD, ProgressLine, print_table, results
from tccl_py.cli.process import ANSWER_IS_NO, notice, notice_each, print_json, write_result
from tccl_py.errors import InputError
from tccl_py.experiments.collectives import COLLECTIVES, PROGRAMS, Collective
from tccl_py.experiments.evaluation import EVALUATED, csv_text
from tccl_py.experiments.jobs import Launcher
from tccl_py.experiments.nccl_tests import find_program, size_options
from tccl_py.experiments.plans import evaluate_plan, tuning_budget, verify_plan
from tccl_py.experiments.record import Verification
from tccl_py.experiments.rounds import RunBudget, budget_of
from tccl_py.experiments.size_table import SizeTuning
from tccl_py.experiments.sizes import load_sizes
from tccl_py.experiments.spec import ELEMENT_BYTES, Dtype, parse_sizes
from tccl_py.experiments.table import LEAST_ROUNDS, MAX_ROUNDS
from tccl_py.plan.chains import ChoiceName
from tccl_py.plan.load import load_plan
from tccl_py.plan.plan import Plan
from tccl_py.plan.results import plan_in
from tccl_py.plan.staging import locked
from tccl_py.report.sizes import (
    COLUMNS,
    ENTRY_COLUMNS,
    entry_cells,
    size_cells,
    tuning_facts,
    tuning_json,
)
from tccl_py.report.verification import (
    evaluation_json,
    evaluation_lines,
    facts_of,
    headline,
    size_rows,
    verification_json,
)
from tccl_py.sources.opening import in_job
from tccl_py.sources.profiled import Backend, check_backend

if TYPE_CHECKING:
    from tccl_py.sources.opening import Job

_NAME = re.compile(r"NCCL_[A-Z0-9_]{1,60}", re.ASCII)
_OF_ONE = ("is the plan of one machine", "start the command by itself there")
_OF_SEVERAL = (
    "is the plan of a cluster",
    "start the command by mpirun or srun, with a rank on each host",
)


def verify(
    directory: Path = options.DIRECTORY,
    *,
    choice: str | None = opt("variables|graph", "Compare this choice alone."),
    rounds: int = opt("N", "Rounds with a job of each choice.", default=RunBudget().rounds),
    sizes: str | None = opt("LIST", "As 4K,1M,256M; 1K to 1G if not given, in a dry run to 4M."),
    seconds: float | None = opt("S", "After this no round begins; 300, in a dry run 30."),
    collective: str = opt("NAME", f"One of {', '.join(COLLECTIVES)}.", default="all_reduce"),
    training: bool = flag("--training", "Also time steps of a small GPT."),
    tune: bool = flag("--tune", "Keep better settings: 10 minutes or more."),
    no_checks: bool = flag("--no-checks", "Do not compare results' values."),
    pin_env: list[str] | None = opt("NCCL_NAME", "Variables that all jobs get."),
    with_: str | None = opt("PROGRAM", "Run this program of nccl-tests; needs no torch.", "--with"),
    backend: str | None = options.BACKEND,
    json: bool = options.JSON,
) -> None:
    """Run real collectives by default NCCL and by the plan's choices, and name the winner.

    Arms of a machine's plan are default NCCL, variables alone, and the graph file with its
    variables; choices of equal environment share an arm. First the values of all collectives are
    compared with computed values. Then jobs of fresh processes, one a GPU, time all-reduce from 1
    KiB to 1 GiB in interleaved rounds (over gloo, a dry run, to 4 MiB in about a minute), with
    three GPUs or more over pairs and halves of GPUs as well. A size is better or worse than default
    NCCL if the difference is beyond chance and more than 1 %. Last, the rings of NCCL's log are
    compared with the graph file's. Needs torch and idle GPUs.

    The winner is the smallest intervention (default, then variables, then graph) whose bandwidth at
    64 MiB and above is within 1 % of the best, or within a wider interval, and which loses at no
    size. Rounds end early where all is clear, and go on, up to four times as many, where a verdict
    is open; 6 are always run, with two choices beside default NCCL 7. Send/recv of 64 MiB is timed
    beside: if it is slower than by default NCCL, as with small FIFOs, a notice tells by how much,
    and the recommendation stays.

    `--with all_reduce_perf` runs jobs of nccl-tests, one process with all GPUs, one after another,
    on hosts without torch; the program has to be built with the NCCL of the jobs in question. Its
    own check of values counts, and smaller communicators are not timed.

    A cluster's plan is verified under mpirun or srun, with a rank on each host, from a directory
    that the first rank sees.

    Your own NCCL_ variables are not used, except NCCL_NVLS_ENABLE, names of interfaces, and
    variables of --pin-env. With --tune the best other settings are verified as well, and written to
    DIR if better. Then all-reduce, all-gather, reduce-scatter, broadcast and reduce are timed by
    every algorithm, protocol and number of channels, for each message size and over some smaller
    sets of GPUs; what gains in fresh jobs, and harms nowhere, gets an entry in the table of the
    plugin's tuner. DIR/verify.json has all results, DIR/sizes.json those by message size.

    Exit codes: 0 the recommended choice, or that of --choice, is the winner or as good; 1 no
    (another choice wins, it is worse at a size or in smaller communicators, has other rings than
    planned, its job failed, or a value of any choice is wrong); 2 wrong use, or no plan for this
    machine.

    --json has the keys `machine`, `accepted`, `winner`, `recommended`, `chosen`, `arms` (a list of
    `name`, `accepted`, `objections`, `gbps`, `ratio`, `low`, `high`, `predicted_gbps`,
    `environment`, `settings`, `sizes` (a list of `bytes`, `us`, `gbps`, `ratio`, `low`, `high`,
    `verdict`), `groups`, `training`, `transfers` (send/recv), `not_recommended` (sizes in bytes),
    `checked`, `wrong`, `rings` (`same`, `differences`), `failure`), `tunings` (a list of `gpus`,
    `arm`, `rows`, `entries`, `predictions`, `seconds`), `simulated`, `dry_run`, `tried`, `rounds`,
    `seconds`, `hosts` (in rank order; none of a single machine), `backend`, `collective`, `devices`
    (names in rank order), `versions`, `notices`.

    Examples:

        tccl verify my-plan
        tccl verify my-plan --choice variables --sizes 64M,256M,1G --rounds 20
        tccl verify my-plan --with all_reduce_perf
        mpirun -N 1 tccl verify my-cluster
    """
    in_range("--rounds", rounds, MAX_ROUNDS // 2, least=LEAST_ROUNDS)
    usual = budget_of(backend)
    seconds = usual.seconds if seconds is None else seconds
    in_range("--seconds", seconds, 86_400, least=0)
    one_of("--collective", collective, COLLECTIVES)
    program = None
    if with_ is not None:
        program = find_program(with_)
        of_program = PROGRAMS[program.name]
        refuse(
            {
                "--training": training,
                "--tune": tune,
                "--backend": backend,
                "--collective": None if collective in ("all_reduce", of_program) else collective,
            },
            ("beside --with", "is about jobs of torch", "leave one of the two out"),
        )
        collective = of_program
    budget = replace(
        usual,
        rounds=rounds,
        sizes=usual.sizes if sizes is None else parse_sizes(sizes, "--sizes"),
        seconds=seconds,
        collectives=(cast(Collective, collective),),
        checks=not no_checks,
        training=training,
    )
    if program is not None:
        size_options(budget.sizes)
    if choice is not None:
        one_of("--choice", choice, ("variables", "graph"))
    if choice is not None and tune:
        raise InputError("--choice with --tune", "contradict", "--tune compares all choices")
    if in_job():
        refuse(
            {"--choice": choice, "--with": program},
            ("", "is for the plan of one machine", "leave it out"),
        )
    with _job_options(directory, backend, pin_env, program=program) as launcher:
        only = cast("ChoiceName | None", choice)
        result = verify_plan(directory, budget, launcher, tune=tune, only=only)
    if json:
        tunings = [tuning_json(tuning) for tuning in load_sizes(directory)]
        print_json(verification_json(result) | {"tunings": tunings})
    else:
        print_verification(result, results())
        if tune:
            print_sizes(load_sizes(directory), results())
    if not result.accepted:
        raise typer.Exit(ANSWER_IS_NO)


def evaluate(
    directory: Path = options.DIRECTORY,
    *,
    gpus_per_job: str | None = opt("LIST", "Beside all GPUs: numbers and sets, as 4,2,4-7,0+2."),
    collectives: str | None = opt("LIST", f"Of {', '.join(COLLECTIVES)}."),
    sizes: str | None = opt("LIST", "64K,1M,16M,256M if not given."),
    dtype: str = opt("NAME", "float32 or bfloat16.", default="float32"),
    rounds: int = opt("N", "Rounds over each set of GPUs.", default=LEAST_ROUNDS),
    seconds: float = opt("S", "After this no set is begun.", default=EVALUATED.seconds),
    csv: Path | None = opt("FILE", "Write a row of each result as CSV."),
    no_checks: bool = flag("--no-checks", "Do not compare results' values."),
    pin_env: list[str] | None = opt("NCCL_NAME", "Variables that all jobs get."),
    backend: str | None = options.BACKEND,
    json: bool = options.JSON,
) -> None:
    """Evaluate a plan: all collectives by size over sets of GPUs, against default NCCL.

    Jobs of all arms are interleaved in rounds, as by `tccl verify`, over all GPUs of the plan,
    half, a quarter, or the sets of --gpus-per-job, after a check of every collective's values. For
    a cluster's plan, start it by mpirun or srun: sets are GPUs of each host, over all hosts, half
    of the hosts and so on. An estimate of the time is printed first; sets that --seconds do not
    suffice for are named.

    A simulated plan is evaluated by its model, unless --backend is given: large messages only,
    over every set of GPUs that a plan has rings for. Ring collectives have the bandwidth of each
    arm's rings; send/recv and all-to-all are transfers of all pairs at once. A cluster has ring
    collectives alone. Sizes and times are left out, as latency is not simulated.

    DIR/evaluate.json has all results; `tccl report` draws a heat map of them.

    Exit codes: 0; 1 wrong values or a failed job; 2 wrong use, or no plan for this machine.

    --json has the keys `machine`, `simulated`, `recommended`, `arms` (a list of `arm`, `cells`,
    `mean`, `least`, `most`: ratios to default NCCL), `cells` (a list of `hosts`, `gpus`,
    `collective`, `dtype`, `bytes`, `arm`, `us`, `gbps`, `ratio`, `low`, `high`), `wrong`,
    `failures`, `left_out`, `seconds`.

    Examples:

        tccl evaluate my-plan --csv my-plan.csv
        tccl evaluate my-plan --gpus-per-job 4,2,0+2 --collectives all_reduce --sizes 1M,256M
    """
    in_range("--rounds", rounds, MAX_ROUNDS // 2, least=LEAST_ROUNDS)
    in_range("--seconds", seconds, 86_400, least=0)
    one_of("--dtype", dtype, ELEMENT_BYTES)
    listed = COLLECTIVES if collectives is None else tuple(collectives.split(","))
    for name in listed:
        one_of("--collectives", name, COLLECTIVES)
    budget = replace(
        EVALUATED,
        collectives=cast("tuple[Collective, ...]", tuple(dict.fromkeys(listed))),
        dtype=cast(Dtype, dtype),
        rounds=rounds,
        seconds=seconds,
        checks=not no_checks,
    )
    if sizes is not None:
        budget = replace(budget, sizes=parse_sizes(sizes, "--sizes"))
    if csv is not None and (csv.is_dir() or not csv.absolute().parent.is_dir()):
        raise InputError(f"--csv {csv}", "is no file that can be made", "name a file in a folder")
    with _job_options(directory, backend, pin_env, by_model=True) as launcher:
        by_model = backend is None
        result = evaluate_plan(directory, budget, launcher, gpus=gpus_per_job, by_model=by_model)
    usual = replace(EVALUATED, collectives=budget.collectives)
    if result.simulated and (sizes is not None or budget != usual):
        notice("--sizes and options of jobs are without effect: a model rates large messages alone")
    if csv is not None:
        write_result(csv_text(result), csv)
        notice(f"wrote {csv}")
    if json:
        print_json(evaluation_json(result))
    else:
        for line in evaluation_lines(result):
            results().print(line, soft_wrap=True)
    notice_each(f"failed: {text}" for text in result.failures)
    notice_each(f"left out, the time is up: {text}" for text in result.left_out)
    if result.wrong or result.failures:
        raise typer.Exit(ANSWER_IS_NO)


@contextmanager
def _job_options(
    directory: Path,
    backend: str | None,
    pin_env: Sequence[str] | None,
    *,
    program: Path | None = None,
    by_model: bool = False,
) -> Iterator[Launcher]:
    """Hold a plan's directory against other runs, and yield how jobs of the plan run.

    Plans of several hosts need an MPI job, and plans of one machine none; without a backend a
    simulated plan needs neither where it is judged `by_model`.
    """
    kind = None if backend is None else check_backend(backend)
    for name in pin_env or ():
        if _NAME.fullmatch(name) is None:
            where = f"--pin-env {name[:40]!r}"
            raise InputError(where, "is no NCCL variable", "a name such as NCCL_P2P_DISABLE")
        if name == "NCCL_GRAPH_FILE":
            raise InputError(f"--pin-env {name}", "is what is compared", "leave it out")
    several = in_job()
    with ExitStack() as stack:
        job = stack.enter_context(controlled_job()) if several else None
        plan = plan_in(directory)
        anywhere = by_model and plan.simulated and kind is None
        if plan.is_cluster != several and not anywhere:
            raise InputError(str(directory), *(_OF_ONE if several else _OF_SEVERAL))
        # A plan that is written into it meanwhile would get the results of another one.
        stack.enter_context(locked(directory))
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
    budget = tuning_budget(load_plan(directory))
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
        print_table(console, [COLUMNS, *size_cells(tuning)])
        print_table(console, [ENTRY_COLUMNS, *entry_cells(tuning)])
        for line in tuning_facts(tuning):
            console.print(line)


def print_verification(result: Verification, console: Console) -> None:
    """Print the winner, the sizes, and what the answer rests on."""
    winner, answer = headline(result)
    console.print(winner)
    console.print(answer, style=GOOD if result.accepted else BAD)
    arms = [arm for arm in result.arms if arm.sizes]
    if result.arms[0].sizes:
        columns = ["size"]
        for arm in arms:
            columns += [f"{arm.name} us", "GB/s", *["ratio (95 %)"] * (arm is not arms[0])]
        print_table(console, [columns, *size_rows(arms)])
    for line in facts_of(result):
        console.print(line)
