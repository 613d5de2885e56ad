"""Verification of a plan in its directory, here or on the hosts of an MPI job; its record."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from tccl_py.errors import (
    CTRL_C_AND_SIGTERM,
    InputError,
    TcclError,
    Terminated,
    interrupts_put_off,
    undisturbed,
)
from tccl_py.health.fitness import check_same_machine, why_not_of_class, why_not_with
from tccl_py.plan.again import known_model
from tccl_py.plan.directory import subset_graph
from tccl_py.plan.load import load_plan
from tccl_py.plan.parts import ChoiceName
from tccl_py.plan.plan import Plan
from tccl_py.plan.planner import subsets
from tccl_py.plan.staging import check_files
from tccl_py.plan.tables import gpus_text, job_gpus
from tccl_py.plan.words import choice_words
from tccl_py.plan.writing import host_graphs
from tccl_py.rank_processes.forkserver import ForkServer
from tccl_py.readers.live import driver_version
from tccl_py.simulator.source import Simulator
from tccl_py.sources.opening import rank_jobs
from tccl_py.sources.profiled import Backend, measured_machine
from tccl_py.verify.evaluation import (
    Cell,
    Evaluation,
    Part,
    estimated_seconds,
    jobs_of_tables,
    predicted_cells,
    run_parts,
    simulated_cells,
)
from tccl_py.verify.jobs import THIS_HOST, HostRanks, Launcher, LocalRunner, Say
from tccl_py.verify.record import Verification
from tccl_py.verify.sizes import SIZE_SECONDS, tune_by_size
from tccl_py.verify.spec import SIZES
from tccl_py.verify.target import Target, read_target
from tccl_py.verify.tuning import COMPARISON_SECONDS, SWEEP_SECONDS, run_tuning
from tccl_py.verify.verify import RunBudget, verify_target

if TYPE_CHECKING:
    from tccl_py.sources.opening import HostFacts, Job

_SYSTEM_CONF = Path("/etc/nccl.conf")
_LONGEST_S, _TUNING_S = 0.1, 90.0
"""Tuning over hosts: the longest call of its jobs, each of which makes a dozen calls of each size,
and seconds of each comparison."""
_NEEDED = ("torch",)
_OTHERS = "start a rank on each host that the plan has, or plan these hosts"


class JobOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a plan's jobs run: here, or on the hosts of an MPI `job`.

    Without a `backend` jobs run on GPUs, and a simulated plan is evaluated by its model. `pinned`
    are caller's variables that jobs get; jobs are of a `program` of nccl-tests, if one is given.
    `say` receives notices for the user, `watch` a line on the current work.
    """

    job: Any = None
    backend: Backend | None = None
    pinned: tuple[str, ...] = ()
    program: Path | None = None
    say: Say = lambda _: None
    watch: Say = lambda _: None

    def launcher(self, hosts: Iterable[HostRanks], **more: Any) -> Launcher:
        """Return a launcher of jobs on these hosts."""
        return Launcher(
            backend=self.backend or "cuda",
            hosts=tuple(hosts),
            keep=self.pinned,
            say=self.say,
            watch=self.watch,
            **more,
        )


def check_torch() -> None:
    """Check that torch is installed."""
    if importlib.util.find_spec("torch") is None:
        raise InputError("torch", "is not installed", "`pip install torch`")


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


def tuning_budget(plan: Plan) -> RunBudget:
    """Return the work of tuning a plan that was just written: of a cluster's, no long sizes."""
    if not plan.is_cluster:
        return RunBudget()
    seconds = {size: 2 * size / (plan.rate_gbps * 1e9) for size in SIZES}
    sizes = tuple(size for size in SIZES if seconds[size] <= _LONGEST_S) or SIZES[:1]
    return RunBudget(sizes=sizes, seconds=_TUNING_S)


def verify_plan(
    directory: Path,
    budget: RunBudget,
    options: JobOptions,
    *,
    tune: bool = False,
    only: ChoiceName | None = None,
) -> Verification:
    """Verify a plan on this machine, or a cluster's on the hosts of a job; keep the result.

    See `run`. Raises InputError: the plan is for another machine or other hosts, or torch is
    missing.
    """
    plan = load_plan(directory)
    check_files(directory)
    with launcher_of(plan, directory, options) as launcher:
        return run(read_target(plan, directory), launcher, budget, tune=tune, only=only)


@contextmanager
def launcher_of(plan: Plan, directory: Path, options: JobOptions) -> Iterator[Launcher]:
    """Yield the launcher of a plan's jobs here, or on the hosts of a job; see `verify_plan`."""
    if plan.is_cluster:
        yield _hosts_launcher(plan, options)
        return
    launcher = machine_launcher(plan, directory, options)
    if options.program is None:
        check_torch()
    else:
        launcher = replace(launcher, nccl_tests=options.program, most_at_once=1)
    with ForkServer() as server:
        yield replace(launcher, runner=LocalRunner(server))


def run(
    plan: Target,
    launcher: Launcher,
    budget: RunBudget,
    *,
    tune: bool = False,
    only: ChoiceName | None = None,
) -> Verification:
    """Verify all choices, or `only` one; tune if asked to, unless that fails; keep the result.

    Tuning a machine's plan ends with its table by message size.
    """
    if tune:
        budget = replace(budget, seconds=min(budget.seconds, COMPARISON_SECONDS))
    # Between hosts the first comparison serves the sweep alone: the fewest rounds do.
    first = replace(budget, seconds=0.0) if tune and plan.hosts else budget
    left = f"nothing in {plan.directory} was changed"
    with interrupts_put_off(CTRL_C_AND_SIGTERM):
        try:
            found, tuned = verify_target(plan, launcher, first, only=only), plan
            if tune:
                left = "the plan is as it was, and its verification is kept"
                seconds = min(SWEEP_SECONDS, budget.seconds)
                try:
                    tuned, found = run_tuning(plan, launcher, budget, found, seconds=seconds)
                except (KeyboardInterrupt, Terminated, TcclError) as error:
                    _kept(found, plan, launcher.say)
                    if isinstance(error, TcclError):
                        launcher.say(f"not tuned: {left}")
                    raise
                if tuned is plan:
                    launcher.say("tuned: nothing that was tried is better, the plan is as it was")
            kept = _kept(found, tuned, launcher.say, tuned=tuned is not plan)
            if tune and not plan.hosts:
                left = "the verification is kept, without a table by message size"
                target = read_target(load_plan(plan.directory), plan.directory)
                longest = min(budget.seconds, SIZE_SECONDS)
                tune_by_size(target, launcher, budget.sizes, seconds=longest)
        except (KeyboardInterrupt, Terminated):
            launcher.say(f"interrupted: {left}")
            raise
    return kept


def evaluate_plan(
    directory: Path, budget: RunBudget, options: JobOptions, *, gpus: str | None = None
) -> Evaluation:
    """Evaluate all arms of a plan over sets of GPUs and hosts, and keep the result.

    `gpus` lists numbers and sets of GPUs, None the usual ones. Raises InputError: as `verify_plan`;
    there is no set of GPUs, or no model of a simulated plan.
    """
    plan = load_plan(directory)
    check_files(directory)
    simulated = plan.simulated and options.backend is None
    base = Evaluation(
        machine=f"{len(plan.hosts)} hosts" if plan.is_cluster else plan.machine.name,
        backend=options.backend or "cuda",
        simulated=simulated,
        assumed=plan.assumed and simulated,
        recommended=plan.recommended,
        cells=(),
    )
    if simulated:
        cells = _simulated(plan, directory, budget, gpus)
        if not cells:
            right = "over several hosts all_reduce, all_gather and reduce_scatter can be"
            raise InputError(str(directory), "has nothing of it that can be simulated", right)
        return replace(base, cells=cells).keep(directory, options.say)
    with ExitStack() as stack:
        if plan.is_cluster:
            parts: list[Part] = [
                (
                    _hosts_launcher(made, options, some=True),
                    Target(plan=made, directory=directory, graphs=host_graphs(made)).arms,
                )
                for made, _ in jobs_of_tables(plan, directory, gpus)
            ]
        else:
            launcher = stack.enter_context(launcher_of(plan, directory, options))
            parts = _machine_parts(plan, directory, _gpu_sets(plan, gpus), launcher)
        if all(len(arms) == 1 for _, arms in parts):
            what = "sets nothing that default NCCL has not"
            raise InputError(str(directory), what, "evaluate a plan with variables or a graph file")
        minutes = estimated_seconds(parts, budget) / 60
        options.say(f"{len(parts)} sets of GPUs in about {minutes:.0f} min, if the time suffices")
        names = {arm.name for _, arms in parts for arm in arms}
        recommended = plan.recommended if plan.recommended in names else "default"
        found = run_parts(parts, budget, replace(base, recommended=recommended))
    return found.keep(directory, options.say)


def _simulated(
    plan: Plan, directory: Path, budget: RunBudget, gpus: str | None
) -> tuple[Cell, ...]:
    if plan.is_cluster:
        return tuple(predicted_cells(jobs_of_tables(plan, directory, gpus), budget.collectives))
    sets = [plan.gpus, *subsets(plan.machine, plan.gpus)]
    if gpus is not None:
        sets = _gpu_sets(plan, gpus)
    source = Simulator(known_model(plan, directory))
    return tuple(simulated_cells(plan, source, sets, budget.collectives))


def _machine_parts(
    plan: Plan, directory: Path, sets: Sequence[tuple[int, ...]], launcher: Launcher
) -> list[Part]:
    """Return a part for each set of GPUs; without planned rings it has no graph file."""
    target, parts = read_target(plan, directory), list[Part]()
    for gpus in sets:
        planned, graphs = plan.subset(gpus), target.graphs
        if planned and gpus != plan.gpus:
            graphs = {THIS_HOST: subset_graph(plan, planned)}
        arms = [
            replace(arm, graphs=dict(graphs)) if arm.name == "graph" else arm
            for arm in target.arms
            if planned or arm.name != "graph"
        ]
        parts.append((launcher.over(gpus), arms))
    return parts


def _gpu_sets(plan: Plan, text: str | None) -> list[tuple[int, ...]]:
    sets = job_gpus(text, plan.gpus)
    if len(sets) == 1:
        what = f"{text!r:.40} names no numbers or sets of GPUs {gpus_text(plan.gpus)}"
        raise InputError("--gpus-per-job", what, "name some, as 4,2,0+2")
    return [gpus for gpus in sets if len(gpus) > 1]


def _kept(found: Verification, plan: Target, say: Say, *, tuned: bool = False) -> Verification:
    """Write the result with versions and notices, after the plan if that was tuned."""
    cuda = found.backend == "cuda"
    versions = {**found.versions, **({"driver": driver_version()} if cuda else {})}
    nccl = found.versions.get("nccl", "")
    said = [*found.notices, *found.transfer_notices]
    if not cuda:
        said.append("a dry run over gloo: its rates say nothing about GPUs or NCCL")
    elif other := (why_not_with(found.judged.settings, nccl) if nccl else ""):
        said.append(f"jobs here get default NCCL instead of the plan: {other}")
    if cuda and _SYSTEM_CONF.exists():
        said.append(f"{_SYSTEM_CONF} holds for all arms, default NCCL as well")
    for text in said:
        say(text)
    found = replace(found, versions=versions, notices=tuple(said))
    with undisturbed():
        if tuned:
            plan.write()
            say(f"tuned: {choice_words(found.chosen, found.judged.settings)}")
        return found.keep(plan.directory, say)


def machine_launcher(plan: Plan, directory: Path, options: JobOptions) -> Launcher:
    """Return the launcher of a plan's jobs on this machine, if the plan is for it."""
    if options.backend != "host":
        _check_here(plan, directory, options.say)
    ranks = tuple(range(len(plan.gpus)))
    return options.launcher([HostRanks(ranks=ranks, gpus=plan.gpus, environment=dict(os.environ))])


def _check_here(plan: Plan, directory: Path, say: Say) -> None:
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
            say(f"GPU {found.index} is {planned.bus_id} in the plan and {found.bus_id} here")


def _hosts_launcher(plan: Plan, options: JobOptions, *, some: bool = False) -> Launcher:
    """Return the launcher of a plan's jobs on the hosts, or `some`, of an MPI job."""
    jobs = rank_jobs(options.job)
    here, planned = set(jobs.hosts), set(plan.host_order)
    for host in sorted(planned - here if some else here ^ planned):
        what = "runs a rank and is not in the plan"
        what = "is in the plan, and no rank runs there" if host in planned else what
        raise InputError(f"host {host}", what, _OTHERS)
    dry_run = options.backend == "host"
    facts = jobs.described(options.backend or "cuda", interfaces=plan.settings.socket_ifname)
    callers = jobs.surroundings(modules=_NEEDED)
    parts = []
    for place in plan.hosts:
        name, gpus = place.name, plan.gpus_of(place)
        if not dry_run:
            _check_gpus(plan, facts[name])
        environment = callers[name] | (_gloo(facts[name], callers[name]) if dry_run else {})
        ranks = tuple(range(place.first_rank, place.first_rank + len(gpus)))
        parts.append(HostRanks(name=name, ranks=ranks, gpus=gpus, environment=environment))
    return options.launcher(parts, runner=jobs)


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
        return {name: address.name}
    raise InputError(f"host {facts.name}", "has no NIC with an address", f"set {name}")
