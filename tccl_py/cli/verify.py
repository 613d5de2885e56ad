"""`tccl verify`: real collectives by default NCCL and by the other choices of a plan."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tccl_py.cli.arguments import (
    ANSWER_IS_NO,
    notice,
    notices,
    print_json,
    results,
)
from tccl_py.cli.cluster_kind import refuse_cluster
from tccl_py.cli.hardware import MeasuredMachine, measured_machine
from tccl_py.cli.jobs import in_job
from tccl_py.cli.verified import check_kept, verified
from tccl_py.cli.verify_hosts import verify_hosts
from tccl_py.cli.verify_text import print_verification, verification_json
from tccl_py.errors import InputError
from tccl_py.health.fitness import differences
from tccl_py.plan.directory import check_plan_directory, known_fingerprint
from tccl_py.plan.plan import ChoiceName, Plan, load_plan
from tccl_py.plan.staging import check_files, locked
from tccl_py.rank_processes.forkserver import ForkServer
from tccl_py.verify.jobs import HostRanks, Launcher, LocalRunner
from tccl_py.verify.record import LEAST_ROUNDS, MAX_ROUNDS, Verification
from tccl_py.verify.spec import COLLECTIVES, SIZES, Backend, Collective
from tccl_py.verify.target import TunableMachine
from tccl_py.verify.verify import DEFAULT_ROUNDS, DEFAULT_SECONDS, RunBudget

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SIZE = re.compile(r"(?P<number>[0-9]{1,12}) ?(?P<unit>[kmg]?)(?:i?b)?", re.ASCII | re.IGNORECASE)
_MAX_BYTES = 16 << 30
_MAX_SIZES = 32


def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A plan's directory.")],
    *,
    choice: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="variables or graph: compare default NCCL with this choice alone.",
        ),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(
            metavar="N",
            help=f"Rounds with a job of each choice; {LEAST_ROUNDS} or more. Fewer are run "
            "where all is clear before, up to four times as many where a verdict is open.",
        ),
    ] = DEFAULT_ROUNDS,
    sizes: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Sizes to time, as 4K,1M,256M; 1K to 1G by default."),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            metavar="S", help=f"After this no round begins, but {LEAST_ROUNDS} are always run."
        ),
    ] = DEFAULT_SECONDS,
    collective: Annotated[
        str, typer.Option(metavar="NAME", help=f"What to time: {', '.join(COLLECTIVES)}.")
    ] = "all_reduce",
    training: Annotated[
        bool,
        typer.Option(
            "--training", help="Also time steps of a small model, eager and in a CUDA graph."
        ),
    ] = False,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Then try other settings by jobs, for variables alone and for the graph file, and "
            "rewrite the plan where another choice is better.",
        ),
    ] = False,
    no_checks: Annotated[
        bool, typer.Option("--no-checks", help="Do not compare the values that collectives give.")
    ] = False,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NCCL_NAME",
            help="A variable of yours that all jobs get, as NCCL_P2P_DISABLE; may be repeated.",
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="cuda|host",
            help="GPUs and NCCL (the default), or, as a rehearsal, gloo in this host's memory.",
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", metavar=" ", help="Print JSON instead of text.")
    ] = False,
) -> None:
    """Run real collectives by default NCCL and by the plan's other choices, and name the winner.

    A machine's plan has up to three arms: default NCCL, variables alone (NCCL_GRAPH_FILE unset),
    and the graph file with its variables. Choices of one environment are one arm. First the values
    of broadcast, scatter, reduce, gather, all-reduce, all-gather, reduce-scatter, all-to-all and
    send/recv are compared with computed ones. Then jobs of fresh processes, one a GPU, time
    all-reduce from 1 KiB to 1 GiB in interleaved rounds. A size is better or worse than default
    NCCL if that is beyond chance and more than 1 %. Variables hold for all communicators of a
    process: with three GPUs or more, pairs and halves of them are timed as well. Last, the rings
    and transports that NCCL logged are compared with the graph file's. Needs torch. Nothing else
    should use the GPUs.

    The winner is the smallest intervention (default, then variables, then graph) whose bandwidth at
    64 MiB and above is within 1 % of the best, or within the interval if that is wider, and that
    loses at no size.

    The plan of a cluster is verified under mpirun or srun, with a rank on each of its hosts, from a
    directory that the first rank sees: every job's processes are started on each host anew, with
    that host's graph file or without, and meet over TCP. With --tune all hosts try one choice of
    settings at a time, where bytes land between GPUs and NICs among them.

    Your own NCCL_ variables are not used, except NCCL_NVLS_ENABLE, those that name interfaces, and
    what --keep names. With --tune the best other settings are verified as well, and DIR gets them
    where they are better, with the winner as its recommendation. DIR/verify.json has all figures
    afterwards, and `tccl report` shows them.

    Exit codes: 0 the recommended choice, or that of --choice, may be used; 1 no (it is worse at a
    size or in smaller communicators, has other rings than planned or wrong values, or its job
    failed); 2 wrong use, or no plan for this machine.

    --json has the keys `machine`, `accepted`, `winner`, `recommended`, `chosen`, `arms` (a list of
    `name`, `accepted`, `objections`, `gbps`, `ratio`, `low`, `high`, `predicted_gbps`,
    `environment`, `settings`, `sizes` (a list of `bytes`, `us`, `gbps`, `ratio`, `low`, `high`,
    `verdict`), `groups`, `training`, `not_recommended` (sizes in bytes), `checked`, `wrong`,
    `rings` (`same`, `differences`), `failure`), `simulated`, `tried`, `rounds`, `seconds`, `hosts`
    (in rank order; none of one machine).

    Examples:

        tccl verify my-plan
        tccl verify my-plan --choice variables --sizes 64M,256M,1G --rounds 20
        mpirun -N 1 tccl verify my-cluster
    """
    budget = RunBudget(
        rounds=_rounds(rounds),
        sizes=_sizes(sizes),
        seconds=_seconds(seconds),
        collective=_collective(collective),
        checks=not no_checks,
        training=training,
    )
    chosen = _backend(backend)
    check_kept(keep or ())
    only = _choice(choice, tune=tune)
    if in_job():
        if only is not None:
            raise InputError("--choice", "is for the plan of one machine", "leave it out")
        found = verify_hosts(directory, budget, chosen, tuple(keep or ()), also_tune=tune)
    else:
        check_plan_directory(directory)
        refuse_cluster(directory, "start the command by mpirun or srun, with a rank on each host")
        # Who plans into it meanwhile would get the verdict of another plan.
        with locked(directory):
            plan = load_plan(directory)
            check_files(directory)
            launcher = _launcher(plan, directory, chosen, keep or [])
            found = _verified(plan, directory, launcher, budget, only=only, also_tune=tune)
    if json:
        print_json(verification_json(found))
    else:
        print_verification(found, results())
    notice(f"wrote {directory / 'verify.json'}")
    if not found.accepted:
        raise typer.Exit(ANSWER_IS_NO)


def check_tuning() -> None:
    """Refuse to tune where no collective can run, before anything is planned.

    Raises:
        InputError: no torch, or no GPU.
    """
    _check_torch()
    try:
        measured_machine(None, None)
    except InputError as error:
        raise InputError(
            "--tune",
            f"runs NCCL's collectives, and {error.what}",
            "leave it out; `tccl verify DIR --backend host --tune` rehearses it over gloo",
        ) from error


def tuned_plan(plan: Plan, directory: Path) -> Plan:
    """Verify a plan that was just written, and try other settings; the plan that is there then."""
    launcher = _launcher(plan, directory, "cuda", [])
    found = _verified(plan, directory, launcher, RunBudget(), also_tune=True)
    print_verification(found, notices())
    return load_plan(directory)


def _verified(
    plan: Plan,
    directory: Path,
    launcher: Launcher,
    budget: RunBudget,
    *,
    also_tune: bool,
    only: ChoiceName | None = None,
) -> Verification:
    target = TunableMachine(plan=plan, directory=directory)
    with ForkServer() as server:
        launcher = msgspec.structs.replace(launcher, runner=LocalRunner(server))
        return verified(target, directory, launcher, budget, only=only, also_tune=also_tune)


def _launcher(plan: Plan, directory: Path, backend: Backend, keep: list[str]) -> Launcher:
    if backend == "cuda":
        _check_here(plan, directory, _here(plan))
    _check_torch()
    ranks = tuple(range(len(plan.gpus)))
    here = HostRanks(ranks=ranks, gpus=plan.gpus, environment=dict(os.environ))
    return Launcher(backend=backend, hosts=(here,), keep=tuple(keep))


def _check_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise InputError("torch", "is not installed", "`pip install torch`")


def _here(plan: Plan) -> MeasuredMachine:
    try:
        return measured_machine(None, None)
    except InputError as error:
        kind = "simulated" if plan.simulated else "measured"
        raise InputError(
            f"the plan of {plan.machine.name} ({kind})",
            f"cannot be verified here: {error.what}",
            "verify it on the machine that it is for; --backend host rehearses over gloo",
        ) from error


def _check_here(plan: Plan, directory: Path, here: MeasuredMachine) -> None:
    """Refuse a plan of another machine than this one.

    Raises:
        InputError: it was measured on another, or this one lacks a GPU that it names.
    """
    where = str(directory)
    right = "plan this machine, or verify it where it belongs"
    for index in plan.gpus:
        planned = plan.machine.gpu(index)
        mine = next((gpu for gpu in here.machine.gpus if gpu.index == index), None)
        if mine is None:
            raise InputError(where, f"is for GPU {index}, which is not here", right)
        if None not in (planned.sm, mine.sm) and planned.sm != mine.sm:
            raise InputError(
                where, f"is for a GPU {index} of sm {planned.sm}, here it has sm {mine.sm}", right
            )
        if plan.simulated and planned.bus_id != mine.bus_id:
            notice(f"GPU {index} is {planned.bus_id} in the plan and {mine.bus_id} here")
    if plan.simulated:
        return
    measured = known_fingerprint(plan, directory)
    found = differences(plan.machine, measured, here.fingerprint, gpus=plan.gpus)
    if found.another:
        raise InputError(
            where, f"was measured on another machine: {'; '.join(found.another)}", right
        )


def _rounds(count: int) -> int:
    if not LEAST_ROUNDS <= count <= MAX_ROUNDS // 2:
        raise InputError(
            "--rounds",
            f"is {count}",
            f"{LEAST_ROUNDS} to {MAX_ROUNDS // 2}; fewer have no 95 % interval",
        )
    return count


def _seconds(seconds: float) -> float:
    # The comparison is written so that NaN fails it.
    if not 0 < seconds <= 86_400:
        raise InputError("--seconds", f"is {seconds:g}", "above 0, at most 86400")
    return seconds


def _sizes(text: str | None) -> tuple[int, ...]:
    if text is None:
        return SIZES
    found = tuple(sorted({_size(part.strip()) for part in text.split(",")}))
    if len(found) > _MAX_SIZES:
        raise InputError("--sizes", f"has {len(found)} sizes", f"at most {_MAX_SIZES}")
    return found


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text)
    size = int(match["number"]) * _UNITS[match["unit"].lower()] if match else 0
    if not 4 <= size <= _MAX_BYTES:
        raise InputError(
            f"--sizes: {text[:20]!r}", "is no size", "bytes, as 4096, 4K, 1M or 1G; 4 to 16G"
        )
    return size


def _collective(text: str) -> Collective:
    if text not in COLLECTIVES:
        raise InputError(
            f"--collective {text[:20]!r}", "is not known", f"one of {', '.join(COLLECTIVES)}"
        )
    found: Collective = msgspec.convert(text, Collective)
    return found


def _choice(text: str | None, *, tune: bool) -> ChoiceName | None:
    if text not in (None, "variables", "graph"):
        raise InputError(f"--choice {text[:20]!r}", "is not known", "variables or graph")
    if text is not None and tune:
        raise InputError("--choice with --tune", "contradict", "--tune compares all choices")
    return "variables" if text == "variables" else "graph" if text else None


def _backend(text: str | None) -> Backend:
    if text not in (None, "cuda", "host"):
        raise InputError(f"--backend {text[:20]!r}", "is not known", "one of cuda, host")
    return "host" if text == "host" else "cuda"
