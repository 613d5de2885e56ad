"""`tccl verify`: real collectives by default NCCL and by the other choices of a plan."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
import typer

from tccl_py.cli import options
from tccl_py.cli.measure import controlled_job
from tccl_py.cli.options import flag, in_range, one_of, opt, refuse
from tccl_py.cli.output import notices, results
from tccl_py.cli.process import (
    ANSWER_IS_NO,
    CTRL_C_AND_SIGTERM,
    Terminated,
    interrupts_put_off,
    notice,
    notice_each,
    print_json,
    undisturbed,
)
from tccl_py.cli.verify_text import print_verification, verification_json
from tccl_py.errors import InputError, TcclError
from tccl_py.health.fitness import check_same_machine, why_not_of_class, why_not_with
from tccl_py.plan.directory import check_plan_directory
from tccl_py.plan.load import load_plan
from tccl_py.plan.plan import ChoiceName, Plan
from tccl_py.plan.staging import check_files, locked
from tccl_py.rank_processes.forkserver import ForkServer
from tccl_py.readers.nvml import driver_version
from tccl_py.report.words import choice_words
from tccl_py.sources.opening import in_job, rank_jobs
from tccl_py.sources.profiled import Backend, check_backend, measured_machine
from tccl_py.verify.jobs import HostRanks, Launcher, LocalRunner
from tccl_py.verify.record import LEAST_ROUNDS, MAX_ROUNDS, Verification, keep_verification
from tccl_py.verify.spec import COLLECTIVES, SIZES, Collective
from tccl_py.verify.target import Target, read_target
from tccl_py.verify.tuning import COMPARISON_SECONDS, SWEEP_SECONDS, run_tuning
from tccl_py.verify.verify import DEFAULT_ROUNDS, DEFAULT_SECONDS, RunBudget, Watcher, verify_target

if TYPE_CHECKING:
    from tccl_py.sources.opening import HostFacts, Job

_SIZE = re.compile(r"([0-9]{1,12}) ?([kmg]?)(?:i?b)?", re.ASCII)
_MAX_BYTES = 16 << 30
_MAX_SIZES = 32
_NAME = re.compile(r"NCCL_[A-Z0-9_]{1,60}", re.ASCII)
_SYSTEM_CONF = Path("/etc/nccl.conf")
_LONGEST_S, _TUNING_S = 0.1, 90.0
"""Tuning over hosts: the longest call of its jobs, each of which makes a dozen calls of each size,
and seconds of each comparison."""
_NEEDED = ("torch",)
_OF_ONE = ("is the plan of one machine", "start the command by itself there")
_OF_SEVERAL = (
    "is the plan of a cluster",
    "start the command by mpirun or srun, with a rank on each host",
)
_OTHERS = "start a rank on each host that the plan has, or plan these hosts"


def verify(
    directory: options.Directory,
    *,
    choice: Annotated[str | None, opt("variables|graph", "Compare this choice alone.")] = None,
    rounds: Annotated[int, opt("N", "Rounds with a job of each choice.")] = DEFAULT_ROUNDS,
    sizes: Annotated[str | None, opt("LIST", "As 4K,1M,256M; 1K to 1G if not given.")] = None,
    seconds: Annotated[float, opt("S", "After this no round begins.")] = DEFAULT_SECONDS,
    collective: Annotated[str, opt("NAME", f"One of {', '.join(COLLECTIVES)}.")] = "all_reduce",
    training: Annotated[bool, flag("--training", "Also time steps of a small model.")] = False,
    tune: Annotated[bool, flag("--tune", "Try other settings, and keep better ones.")] = False,
    no_checks: Annotated[bool, flag("--no-checks", "Do not compare results' values.")] = False,
    pin_env: Annotated[list[str] | None, opt("NCCL_NAME", "Variables that all jobs get.")] = None,
    backend: options.Backend = None,
    json: options.Json = False,
) -> None:
    """Run real collectives by default NCCL and by the plan's choices, and name the winner.

    Arms of a machine's plan are default NCCL, variables alone, and the graph file with its
    variables; choices of equal environment share an arm. First the values of all collectives are
    compared with computed values. Then jobs of fresh processes, one a GPU, time all-reduce from
    1 KiB to 1 GiB in interleaved rounds, with three GPUs or more over pairs and halves of GPUs as
    well. A size is better or worse than default NCCL if the difference is beyond chance and more
    than 1 %. Last, the rings of NCCL's log are compared with the graph file's. Needs torch and idle
    GPUs.

    The winner is the smallest intervention (default, then variables, then graph) whose bandwidth at
    64 MiB and above is within 1 % of the best, or within a wider interval, and which loses at no
    size. Rounds end early where all is clear, and go on, up to four times as many, where a verdict
    is open; 6 are always run.

    A cluster's plan is verified under mpirun or srun, with a rank on each host, from a directory
    that the first rank sees.

    Your own NCCL_ variables are not used, except NCCL_NVLS_ENABLE, names of interfaces, and
    variables of --pin-env. With --tune the best other settings are verified as well, and written to
    DIR if better. DIR/verify.json has all results.

    Exit codes: 0 the recommended choice, or that of --choice, may be used; 1 no (it is worse at a
    size or in smaller communicators, has other rings than planned or wrong values, or its job
    failed); 2 wrong use, or no plan for this machine.

    --json has the keys `machine`, `accepted`, `winner`, `recommended`, `chosen`, `arms` (a list of
    `name`, `accepted`, `objections`, `gbps`, `ratio`, `low`, `high`, `predicted_gbps`,
    `environment`, `settings`, `sizes` (a list of `bytes`, `us`, `gbps`, `ratio`, `low`, `high`,
    `verdict`), `groups`, `training`, `not_recommended` (sizes in bytes), `checked`, `wrong`,
    `rings` (`same`, `differences`), `failure`), `simulated`, `tried`, `rounds`, `seconds`, `hosts`
    (in rank order; none of a single machine).

    Examples:

        tccl verify my-plan
        tccl verify my-plan --choice variables --sizes 64M,256M,1G --rounds 20
        mpirun -N 1 tccl verify my-cluster
    """
    in_range("--rounds", rounds, MAX_ROUNDS // 2, least=LEAST_ROUNDS)
    in_range("--seconds", seconds, 86_400, least=0)
    one_of("--collective", collective, COLLECTIVES)
    budget = RunBudget(
        rounds=rounds,
        sizes=_sizes(sizes),
        seconds=seconds,
        collective=cast(Collective, collective),
        checks=not no_checks,
        training=training,
    )
    kind = check_backend(backend)
    pinned = _pinned(pin_env or ())
    if choice is not None:
        one_of("--choice", choice, ("variables", "graph"))
    if choice is not None and tune:
        raise InputError("--choice with --tune", "contradict", "--tune compares all choices")
    only = cast("ChoiceName | None", choice)
    job = None
    with ExitStack() as stack:
        several = in_job()
        if several:
            refuse({"--choice": choice}, ("", "is for the plan of one machine", "leave it out"))
            job = stack.enter_context(controlled_job())
        check_plan_directory(directory)
        if load_plan(directory).is_cluster != several:
            raise InputError(str(directory), *(_OF_ONE if several else _OF_SEVERAL))
        # A plan that is written into it meanwhile would get the verdict of another one.
        stack.enter_context(locked(directory))
        found = _verified(directory, job, budget, kind, pinned, tune=tune, only=only)
    if json:
        print_json(verification_json(found))
    else:
        print_verification(found, results())
    notice(f"wrote {directory / 'verify.json'}")
    if not found.accepted:
        raise typer.Exit(ANSWER_IS_NO)


def check_tuning(job: Job | None = None) -> None:
    """Check for torch on the hosts of an MPI job, or for torch and GPUs here, before planning."""
    if job is not None:
        rank_jobs(job).surroundings(modules=_NEEDED)
        return
    check_torch()
    try:
        measured_machine()
    except InputError as error:
        raise InputError(
            "--tune",
            f"runs NCCL's collectives, and {error.what}",
            "leave it out; `tccl verify DIR --backend host --tune` is a dry run over gloo",
        ) from error


def tuned_plan(directory: Path, job: Job | None = None, backend: Backend = "cuda") -> Plan:
    """Verify a plan that was just written, tune it, and return it.

    A cluster's plan is tuned on the hosts of `job`, without sizes that take long.
    """
    plan, budget = load_plan(directory), RunBudget()
    if plan.is_cluster:
        seconds = {size: 2 * size / (plan.rate_gbps * 1e9) for size in SIZES}
        sizes = tuple(size for size in SIZES if seconds[size] <= _LONGEST_S) or SIZES[:1]
        budget = RunBudget(sizes=sizes, seconds=_TUNING_S)
    print_verification(_verified(directory, job, budget, backend, tune=True), notices())
    return load_plan(directory)


def _verified(
    directory: Path,
    job: Any,
    budget: RunBudget,
    backend: Backend,
    pinned: tuple[str, ...] = (),
    *,
    tune: bool,
    only: ChoiceName | None = None,
) -> Verification:
    """Verify a plan on this machine, or a cluster's on the hosts of an MPI job."""
    plan = load_plan(directory)
    check_files(directory)
    with ExitStack() as stack:
        if plan.is_cluster:
            launcher = hosts_launcher(plan, job, backend, pinned)
        else:
            launcher = machine_launcher(plan, directory, backend, pinned)
            runner = LocalRunner(stack.enter_context(ForkServer()))
            launcher = msgspec.structs.replace(launcher, runner=runner)
        target = read_target(plan, directory)
        return verified(target, directory, launcher, budget, only=only, tune=tune)


def verified(
    plan: Target,
    directory: Path,
    launcher: Launcher,
    budget: RunBudget,
    *,
    tune: bool,
    only: ChoiceName | None = None,
) -> Verification:
    """Verify all choices, or `only` one; tune if asked to, unless that fails; keep the result."""
    if tune:
        budget = msgspec.structs.replace(budget, seconds=min(budget.seconds, COMPARISON_SECONDS))
    with _watcher() as watch, interrupts_put_off(CTRL_C_AND_SIGTERM):
        try:
            target = plan if only is None else plan.narrowed(only)
            # Between hosts the first comparison serves the sweep alone: the fewest rounds do.
            quick = msgspec.structs.replace(budget, seconds=0.0)
            first = quick if tune and plan.hosts else budget
            found = verify_target(target, launcher, first, watch=watch)
        except (KeyboardInterrupt, Terminated):
            notice(f"interrupted: nothing in {directory} was changed")
            raise
        if not tune:
            return _kept(found, directory)
        try:
            seconds = min(SWEEP_SECONDS, budget.seconds)
            tuned = run_tuning(plan, launcher, budget, found, seconds=seconds, watch=watch)
        except (KeyboardInterrupt, Terminated, TcclError) as error:
            _kept(found, directory)
            why = "not tuned" if isinstance(error, TcclError) else "interrupted"
            notice(f"{why}: the plan is as it was, and its verification is kept")
            raise
    if tuned.plan is plan:
        notice("tuned: nothing that was tried is better, and the plan stays as it is")
        return _kept(tuned.verification, directory)
    return _kept(tuned.verification, directory, tuned=tuned.plan)


def _kept(found: Verification, directory: Path, *, tuned: Target | None = None) -> Verification:
    """Write the result with versions and notices, after the plan if that was tuned."""
    cuda = found.backend == "cuda"
    versions = {**found.versions, **({"driver": driver_version()} if cuda else {})}
    nccl = found.versions.get("nccl", "")
    said = [*found.notices]
    if not cuda:
        said.append("a dry run over gloo: its rates say nothing about GPUs or NCCL")
    elif other := (why_not_with(found.judged.settings, nccl) if nccl else ""):
        said.append(f"jobs here get default NCCL instead of the plan: {other}")
    if cuda and _SYSTEM_CONF.exists():
        said.append(f"{_SYSTEM_CONF} holds for all arms, default NCCL as well")
    notice_each(said)
    found = msgspec.structs.replace(found, versions=versions, notices=tuple(said))
    with undisturbed():
        if tuned is not None:
            tuned.write()
            notice(f"tuned: {choice_words(found.chosen, found.judged.settings)}")
        return keep_verification(found, directory)


@contextmanager
def _watcher() -> Iterator[Watcher]:
    """Show on a terminal which job runs."""
    console = notices()
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("starting") as status:
        yield status.update


def _pinned(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if _NAME.fullmatch(name) is None:
            where = f"--pin-env {name[:40]!r}"
            raise InputError(where, "is no NCCL variable", "a name such as NCCL_P2P_DISABLE")
        if name == "NCCL_GRAPH_FILE":
            raise InputError(f"--pin-env {name}", "is what is compared", "leave it out")
    return tuple(names)


def machine_launcher(
    plan: Plan, directory: Path, backend: Backend, pinned: tuple[str, ...]
) -> Launcher:
    """Return the launcher of a plan's jobs on this machine, if the plan is for it."""
    if backend == "cuda":
        _check_here(plan, directory)
    check_torch()
    ranks = tuple(range(len(plan.gpus)))
    here = HostRanks(ranks=ranks, gpus=plan.gpus, environment=dict(os.environ))
    return Launcher(backend=backend, hosts=(here,), keep=pinned)


def check_torch() -> None:
    """Check that torch is installed."""
    if importlib.util.find_spec("torch") is None:
        raise InputError("torch", "is not installed", "`pip install torch`")


def _check_here(plan: Plan, directory: Path) -> None:
    """Check that a plan was made for this machine: its GPUs, and what was measured."""
    try:
        place = measured_machine()
    except InputError as error:
        kind = "simulated" if plan.simulated else "measured"
        raise InputError(
            f"the plan of {plan.machine.name} ({kind})",
            f"cannot be verified here: {error.what}",
            "verify it on the machine that it is for; --backend host is a dry run over gloo",
        ) from error
    where, right = str(directory), "plan this machine, or verify it where it belongs"
    if not plan.simulated:
        check_same_machine(plan, directory, place.fingerprint, right=right)
        return
    here = {gpu.index: gpu for gpu in place.machine.gpus}
    for planned in map(plan.machine.gpu, plan.gpus):
        found = here.get(planned.index)
        if found is None:
            raise InputError(where, f"is for GPU {planned.index}, which is not here", right)
        if None not in (planned.sm, found.sm) and planned.sm != found.sm:
            what = f"is for a GPU {found.index} of sm {planned.sm}, here it has sm {found.sm}"
            raise InputError(where, what, right)
        if planned.bus_id != found.bus_id:
            notice(f"GPU {found.index} is {planned.bus_id} in the plan and {found.bus_id} here")


def hosts_launcher(plan: Plan, job: Job, backend: Backend, pinned: tuple[str, ...]) -> Launcher:
    """Return the launcher of a plan's jobs on the hosts of an MPI job, if they are the plan's."""
    jobs = rank_jobs(job)
    here, planned = set(jobs.hosts), set(plan.host_order)
    for host in sorted(here ^ planned):
        what = "runs a rank and is not in the plan"
        what = "is in the plan, and no rank runs there" if host in planned else what
        raise InputError(f"host {host}", what, _OTHERS)
    facts = jobs.described(backend, interfaces=plan.settings.socket_ifname)
    callers = jobs.surroundings(modules=_NEEDED)
    parts = []
    for place in plan.hosts:
        name, gpus = place.name, plan.gpus_of(place)
        if backend == "cuda":
            _check_gpus(plan, facts[name])
        variables = {} if backend == "cuda" else _gloo(facts[name], callers[name])
        ranks = tuple(range(place.first_rank, place.first_rank + len(gpus)))
        environment = {**callers[name], **variables}
        parts.append(HostRanks(name=name, ranks=ranks, gpus=gpus, environment=environment))
    return Launcher(backend=backend, hosts=tuple(parts), keep=pinned, runner=jobs)


def _check_gpus(plan: Plan, facts: HostFacts) -> None:
    """Check that a host has the plan's GPUs."""
    here = facts.machine.gpus
    planned = plan.class_gpus[plan.cluster.host_classes[facts.name]]
    lacking = sorted(set(planned) - {gpu.index for gpu in here})
    why = f"lacks GPU {lacking[0]}, which the plan is for" if lacking else ""
    if why := why or why_not_of_class(plan, facts.name, here):
        raise InputError(f"host {facts.name}", why, _OTHERS)


def _gloo(facts: HostFacts, caller: Mapping[str, str]) -> dict[str, str]:
    """Return the variable with gloo's interface: the caller's, or that of the first NIC."""
    name = "GLOO_SOCKET_IFNAME"
    if caller.get(name):
        return {}
    for address in facts.addresses.values():
        return {name: address.interface}
    raise InputError(f"host {facts.name}", "has no NIC with an address", f"set {name}")


def _sizes(text: str | None) -> tuple[int, ...]:
    if text is None:
        return SIZES
    found = tuple(sorted({_size(part.strip()) for part in text.split(",")}))
    if len(found) > _MAX_SIZES:
        raise InputError("--sizes", f"has {len(found)} sizes", f"at most {_MAX_SIZES}")
    return found


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.lower())
    size = int(match[1]) << 10 * " kmg".index(match[2] or " ") if match else 0
    if not 4 <= size <= _MAX_BYTES:
        right = "bytes, as 4096, 4K, 1M or 1G; 4 to 16G"
        raise InputError(f"--sizes: {text[:20]!r}", "is no size", right)
    return size
