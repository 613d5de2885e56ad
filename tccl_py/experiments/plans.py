"""Verification of a plan in its directory, here or on the hosts of an MPI job; its record."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tccl_py.delivery.fit import check_same_machine, why_not_of_class, why_not_with
from tccl_py.errors import (
    CTRL_C_AND_SIGTERM,
    InputError,
    MeasurementError,
    TcclError,
    Terminated,
    defer_signals,
    interrupts_put_off,
    require,
)
from tccl_py.experiments.communication import Communications, keep_communication
from tccl_py.experiments.comparison import RunBudget
from tccl_py.experiments.jobs import THIS_HOST, HostRanks, Launcher, LocalRunner, Say
from tccl_py.experiments.means_table import MeansTable, measure_means
from tccl_py.experiments.record import Verification
from tccl_py.experiments.sizes import SIZE_SECONDS, tune_by_size
from tccl_py.experiments.spec import SIZES
from tccl_py.experiments.target import Target, read_target
from tccl_py.experiments.verify import (
    COMPARISON_SECONDS,
    SWEEP_SECONDS,
    Interrupted,
    run_tuning,
    verify_target,
)
from tccl_py.files import SPACE
from tccl_py.nccl.settings import environment, shell_text
from tccl_py.nccl.variables import HOST_VARIABLES
from tccl_py.nccl_conf import HOST_FILE, why_no_default
from tccl_py.plan.directory import files_of
from tccl_py.plan.load import load_plan
from tccl_py.plan.plan import Plan
from tccl_py.plan.staging import check_files
from tccl_py.plan.text import CHOICE_WORDS, choice_words, plan_name, why_not_default
from tccl_py.rank_processes.forkserver import ForkServer
from tccl_py.readers.live import driver_version
from tccl_py.sources.hosts import rank_jobs
from tccl_py.sources.profiled import measured_machine

if TYPE_CHECKING:
    from tccl_py.sources.hosts import HostFacts, Job

_LONGEST_S, _TUNING_S = 0.1, 90.0
"""Tuning over hosts: the longest call of its jobs, each of which makes some ten calls of each size,
and seconds of each comparison."""
_NEEDED = ("torch",)
_PLANNED_HOSTS = (
    "start a rank on each host that the plan has by mpirun or srun, none for one machine, or plan "
    "these hosts"
)


def check_torch() -> None:
    """Check that torch is installed."""
    if importlib.util.find_spec("torch") is None:
        raise InputError("torch", "is not installed", "`pip install torch`")


def check_tuning(job: Job | None = None) -> None:
    """Check for torch on the hosts of an MPI job, or for GPUs and torch here, before planning."""
    if job is not None:
        rank_jobs(job).surroundings(modules=_NEEDED)
        return
    try:
        measured_machine()
    except InputError as error:
        raise InputError(
            "`tune`",
            f"runs NCCL's collectives, and {error.what}",
            "leave it out; `tccl verify DIR --backend host --tune` is a dry run over gloo",
        ) from error
    check_torch()


def tuning_budget(plan: Plan) -> RunBudget:
    """Return the work of tuning a plan over hosts that was just written: no long sizes."""
    seconds = {size: 2 * size / (plan.rate_gbps * 1e9) for size in SIZES}
    sizes = tuple(size for size in SIZES if seconds[size] <= _LONGEST_S) or SIZES[:1]
    return RunBudget(sizes=sizes, seconds=_TUNING_S)


def verify_plan(
    directory: Path,
    budget: RunBudget,
    launcher: Launcher,
    *,
    tune: bool = False,
    interrupted: Interrupted = lambda _: None,
) -> Verification:
    """Verify a plan on this machine, or a cluster's on the hosts of a job; keep the result.

    See `run`. Raises InputError: the plan is for another machine or other hosts, or torch is
    missing.
    """
    with _open_plan(directory, launcher) as (target, ready):
        return run(target, ready, budget, tune=tune, interrupted=interrupted)


def compare_means(
    directory: Path, launcher: Launcher, *, seconds: float, sizes: Sequence[int] | None = None
) -> MeansTable:
    """Time NCCL and other means on a plan's machine, and keep the table; see `measure_means`."""
    require(launcher.job is None, "`means`", "are compared on one host", "leave mpirun or srun out")
    with _open_plan(directory, launcher) as (target, ready), interrupts_put_off(CTRL_C_AND_SIGTERM):
        table = measure_means(target, ready, seconds=seconds, sizes=sizes)
    return table.keep(directory, launcher.say)


@contextmanager
def _open_plan(directory: Path, launcher: Launcher) -> Iterator[tuple[Target, Launcher]]:
    """Yield the plan of a directory with a launcher on its hosts, and say what is left out.

    Raises InputError: the directory cannot be written, jobs cannot have default NCCL, with which
    others are compared, or as `launcher_of`.
    """
    plan = load_plan(directory)
    check_files(directory)
    # Jobs take minutes, and a result that is not kept installs nothing.
    require(os.access(directory, os.W_OK), str(directory), "cannot be written", SPACE)
    why = why_no_default() if launcher.backend == "cuda" else ""
    right = f"`tccl uninstall {HOST_FILE}`, and install the plan again afterwards"
    require(not why, "default NCCL", f"cannot run: {why}", right)
    with launcher_of(plan, directory, launcher) as ready:
        target = read_target(plan, directory)
        for name, error in target.left_out.items():
            launcher.say(f"without {CHOICE_WORDS[name]}: {error}")
        yield target, ready


@contextmanager
def launcher_of(plan: Plan, directory: Path, launcher: Launcher) -> Iterator[Launcher]:
    """Yield the launcher with the hosts of a plan; see `verify_plan`."""
    if launcher.job is not None:
        yield _hosts_launcher(plan, launcher)
        return
    check_hosts(plan, [THIS_HOST])
    launcher = machine_launcher(plan, directory, launcher)
    if launcher.nccl_tests is None:
        check_torch()
    with ForkServer() as server:
        yield replace(launcher, runner=LocalRunner(server))


def run(
    plan: Target,
    launcher: Launcher,
    budget: RunBudget,
    *,
    tune: bool = False,
    interrupted: Interrupted = lambda _: None,
) -> Verification:
    """Verify a plan's choices; tune if asked to, unless that fails; keep the result.

    Tuning a machine's plan ends with its table by message size.
    """
    if tune:
        is_measured = not (plan.plan.simulated or plan.plan.dry_run)
        of_gpus = is_measured or Verification.is_of_gpus(plan.directory)
        what = f"is a dry run, and {plan.directory} is a plan with results of GPUs"
        right = "leave `backend` out, or tune a simulated plan"
        require(launcher.backend != "host" or not of_gpus, "`tune`", what, right)
        budget = replace(budget, seconds=min(budget.seconds, COMPARISON_SECONDS))
    by_size = tune and files_of(plan.plan).for_all_jobs
    # Between hosts the first comparison serves the sweep alone: the fewest rounds do.
    first = replace(budget, seconds=0.0) if tune and not by_size else budget
    say, state = launcher.say, f"nothing in {plan.directory} was changed"
    # One that cannot be read is refused before jobs run.
    known = Communications.load(plan.directory)
    with interrupts_put_off(CTRL_C_AND_SIGTERM):
        try:
            plan, result = _compare(plan, launcher, first, interrupted)
            tuned = plan
            if tune:
                _add_notices(plan, launcher, result).keep(plan.directory)
                state = "the plan is as it was, and its verification is kept"
                seconds = min(SWEEP_SECONDS, budget.seconds)
                try:
                    tuned, result = run_tuning(plan, launcher, budget, result, seconds=seconds)
                except TcclError:
                    say(f"not tuned: {state}")
                    raise
                if tuned is plan:
                    say("tuned: nothing that was tried is better, the plan is as it was")
            result = _add_notices(plan, launcher, result)
            for text in result.notices:
                say(text)
            alone = tune or budget.only is not None or launcher.nccl_tests is not None
            with defer_signals():
                if tuned is not plan:
                    tuned.write()
                    taken = tuned.plan.choices != plan.plan.choices
                    words = choice_words(result.chosen, result.judged.settings)
                    say(f"tuned: {words}" if taken else f"the plan recommends {words} now")
                saved = _save(plan, result, known, say, alone=alone)
            if by_size:
                state = "the verification is kept, without a table by message size"
                target = read_target(load_plan(plan.directory), plan.directory)
                longest = min(budget.seconds, SIZE_SECONDS)
                sizes, job = budget.sizes, budget.workload
                tune_by_size(target, launcher, sizes, seconds=longest, workload=job)
        except (KeyboardInterrupt, Terminated):
            say(f"interrupted: {state}")
            raise
    return saved


def _compare(
    plan: Target, launcher: Launcher, budget: RunBudget, interrupted: Interrupted
) -> tuple[Target, Verification]:
    """Compare a plan's choices; where default NCCL fails, with a job without P2P in its place.

    Return the plan as it is known then. Raises MeasurementError: a job of default NCCL failed, and
    none without P2P ends well.
    """
    failed: MeasurementError | None = None
    if plan.plan.choices["default"].fails:
        text = shell_text(plan.arms[0].variables)
        launcher.say(f"{why_not_default(plan.plan)}; compared with {text} in its place")
    try:
        result = verify_target(plan, launcher, budget, interrupted=interrupted)
        wrong = result.arms[0].wrong
        why = f"{len(wrong)} values are wrong, as {wrong[0].what}" if wrong else ""
    except MeasurementError as error:
        why, failed = str(error), error
    known = plan.without_p2p(why) if why and launcher.backend == "cuda" else None
    if known is not None:
        launcher.say(f"default NCCL fails: {why}; compared with NCCL_P2P_DISABLE=1 in its place")
        with suppress(MeasurementError):
            sound = verify_target(known, launcher, budget, interrupted=interrupted)
            named = plan.plan.recommended
            chosen = known.arm(named).name if budget.only is None else sound.chosen
            sound = replace(sound, recommended=named, chosen=chosen, default_fails=why)
            return known, sound
    if failed is not None:
        raise failed
    return plan, result


def _save(
    plan: Target, result: Verification, known: Communications | None, say: Say, *, alone: bool
) -> Verification:
    """Keep a verification, and what it says of a workload; return the answer.

    Where jobs on GPUs say that the plan's choice may not be used, the plan gets the winner, and
    what is `known` of workloads stays, unless it stands `alone`. A dry run takes no place of jobs
    on GPUs.
    """
    if result.gives_way(plan.directory):
        return result.keep(plan.directory, say)
    answer, fails = result, bool(result.default_fails)
    if not (alone or result.dry_run) and (fails or not result.accepted):
        winner = result.by_winner()
        settled = plan.settle(winner)
        recommended = settled.plan.recommended
        if fails or recommended != plan.plan.recommended:
            answer = replace(winner, recommended=recommended)
            settled.write()
            say(f"the plan recommends {choice_words(recommended, answer.judged.settings)} now")
            if known is not None:
                known.keep(plan.directory)
    kept = answer.keep(plan.directory, say)
    if kept.workload is not None:
        keep_communication(kept.workload, plan.directory)
    # More than default NCCL is a yes, and less than the plan had a no.
    if plan.plan.recommended == "default":
        return kept
    return replace(kept, recommended=result.recommended, chosen=result.chosen)


def _add_notices(plan: Target, launcher: Launcher, result: Verification) -> Verification:
    """Return a verification with the driver's version, and with all notices."""
    cuda = result.backend == "cuda"
    nccl = result.versions.get("nccl", "")
    notices = list(result.notices)
    if not cuda:
        notices.append("a dry run over gloo: its rates say nothing about GPUs or NCCL")
    elif mismatch := (why_not_with(result.judged.settings, nccl) if nccl else ""):
        notices.append(f"jobs here get default NCCL instead of the plan: {mismatch}")
    if cuda and HOST_FILE.exists():
        notices.append(f"{HOST_FILE} holds for all arms, default NCCL as well")
    choices = (environment(choice.settings) for choice in plan.plan.choices.values())
    own = {*HOST_VARIABLES, *plan.plan.pinned_env, *chain.from_iterable(choices)}
    given = result.arms[0].environment.items()
    if pinned := [f"{k}={v}" for k, v in given if k in launcher.keep and k not in own]:
        notices.append(
            f"the answer is for jobs with {' '.join(pinned)}, which the plan does not set"
        )
    versions = {**result.versions, **({"driver": driver_version()} if cuda else {})}
    return replace(result, versions=versions, notices=tuple(notices))


def machine_launcher(plan: Plan, directory: Path, launcher: Launcher) -> Launcher:
    """Return the launcher with this machine, if the plan is for it."""
    if launcher.backend != "host":
        _check_here(plan, directory, launcher)
    ranks = tuple(range(len(plan.gpus)))
    host = HostRanks(ranks=ranks, gpus=plan.gpus, environment=dict(os.environ))
    return _with_hosts(launcher, [host])


def _with_hosts(launcher: Launcher, hosts: Sequence[HostRanks]) -> Launcher:
    """Return the launcher with hosts, each of which has the variables that jobs are to keep."""
    for host, name in product(hosts, launcher.keep):
        if name not in host.environment:
            where = f"`pin_env` {name}" + f" on host {host.name}" * bool(host.name)
            raise InputError(where, "is not set", "set it as all jobs have it, or leave it out")
    return replace(launcher, hosts=tuple(hosts))


def _check_here(plan: Plan, directory: Path, launcher: Launcher) -> None:
    """Check that a plan was made for this machine: its GPUs, and what was measured."""
    try:
        place = measured_machine()
    except InputError as error:
        raise InputError(
            f"the plan of {plan.machine.name} ({plan.provenance})",
            f"cannot run here: {error.what}",
            "run it on its machine; `tccl verify --backend host` is a dry run over gloo",
        ) from error
    where, right = str(directory), "plan this machine, or run it where it belongs"
    if not plan.simulated:
        gpus = place.machine.gpus if launcher.alike else None
        check_same_machine(plan, directory, place.fingerprint, right=right, present_gpus=gpus)
        return
    gpus_here = {gpu.index: gpu for gpu in place.machine.gpus}
    for planned in map(plan.machine.gpu, plan.gpus):
        gpu, name = gpus_here.get(planned.index), f"GPU {planned.index}"
        if gpu is None:
            raise InputError(where, f"is for {name}, which is not here", right)
        if None not in (planned.sm, gpu.sm) and planned.sm != gpu.sm:
            what = f"is for {name} of sm {planned.sm}, here it has sm {gpu.sm}"
            raise InputError(where, what, right)
        if planned.bus_id != gpu.bus_id:
            launcher.say(f"{name} is {planned.bus_id} in the plan and {gpu.bus_id} here")


def _hosts_launcher(plan: Plan, launcher: Launcher) -> Launcher:
    """Return the launcher with the hosts of a plan, which are the MPI job's."""
    jobs, dry_run = rank_jobs(launcher.job), launcher.backend == "host"
    check_hosts(plan, jobs.hosts)
    facts = jobs.describe(launcher.backend, interfaces=plan.settings.socket_ifname)
    callers = jobs.surroundings(modules=_NEEDED)
    hosts = []
    for place in plan.hosts:
        name, gpus, environment = place.name, plan.gpus_of(place), callers[place.name]
        if dry_run:
            environment |= _gloo(facts[name], environment)
        else:
            gpus_there = facts[name].machine.gpus
            lacking = sorted(set(gpus) - {gpu.index for gpu in gpus_there})
            why = f"lacks GPU {lacking[0]}, which the plan is for" if lacking else ""
            if why := why or why_not_of_class(plan, name, gpus_there):
                raise InputError(f"host {name}", why, _PLANNED_HOSTS)
        ranks = tuple(range(place.first_rank, place.first_rank + len(gpus)))
        hosts.append(HostRanks(name=name, ranks=ranks, gpus=gpus, environment=environment))
    return replace(_with_hosts(launcher, hosts), runner=jobs)


def check_hosts(plan: Plan, hosts: Iterable[str]) -> None:
    """Check that ranks run on the hosts of a plan, and nowhere else."""
    ranked, planned = set(hosts), set(files_of(plan).graphs)
    # THIS_HOST, of a plan or ranks that need no name, comes last.
    for host in sorted(ranked ^ planned, key=lambda host: (host == THIS_HOST, host)):
        what = "runs a rank and is not in the plan"
        what = "is in the plan, and no rank runs there" if host in planned else what
        raise InputError(f"host {host or plan_name(plan)}", what, _PLANNED_HOSTS)


def _gloo(facts: HostFacts, caller: Mapping[str, str]) -> dict[str, str]:
    """Return the variable with gloo's interface: the caller's, or that of the first NIC."""
    name = "GLOO_SOCKET_IFNAME"
    if caller.get(name):
        return {}
    for address in facts.addresses.values():
        return {name: address.name}
    raise InputError(f"host {facts.name}", "has no NIC with an address", f"set {name}")
