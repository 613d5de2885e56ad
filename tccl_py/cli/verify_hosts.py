"""`tccl verify` of a cluster's plan: the hosts of an MPI job run real collectives with it.

The profiler, which has the hosts' agents, is imported inside what needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tccl_py.cli.arguments import notices
from tccl_py.cli.jobs import job_of_ranks
from tccl_py.cli.verified import verified
from tccl_py.cli.verify_text import print_verification
from tccl_py.cluster_plan.plan import ClusterPlan, is_cluster_plan, load_cluster_plan
from tccl_py.errors import InputError
from tccl_py.files import read_text
from tccl_py.plan.directory import check_plan_directory
from tccl_py.plan.files import host_graph_file
from tccl_py.plan.staging import check_files, locked
from tccl_py.verify.jobs import HostRanks, Launcher
from tccl_py.verify.record import Verification
from tccl_py.verify.spec import SIZES, Backend
from tccl_py.verify.target import tunable_cluster
from tccl_py.verify.verify import RunBudget

if TYPE_CHECKING:
    from tccl_profiler.cluster.agents import RankJobs
    from tccl_profiler.cluster.facts import HostFacts
    from tccl_profiler.cluster.job import Job

_LONGEST_S = 0.5
"""A job makes a dozen calls of each size, and a comparison a dozen jobs."""
_NEEDED = ("torch",)
_AGAIN = "start a rank on each host that the plan has, or plan these hosts"


def verify_hosts(
    directory: Path, budget: RunBudget, backend: Backend, keep: tuple[str, ...], *, also_tune: bool
) -> Verification:
    """Verify the plan of this MPI job's hosts, tune it if asked to, and keep what was found.

    On all ranks but the first this does not return.

    Raises:
        InputError: the plan of one machine, hosts other than the plan's, or one without torch.
        JobError: default NCCL's job failed.
    """
    with job_of_ranks() as job:
        check_plan_directory(directory)
        if not is_cluster_plan(directory):
            raise InputError(
                str(directory), "is the plan of one machine", "start the command by itself there"
            )
        # Who plans into it meanwhile would get the verdict of another plan.
        with locked(directory):
            return _verified(directory, job, budget, backend, keep, also_tune=also_tune)


def check_tuning_hosts(job: Job) -> None:
    """Refuse to tune where no collective can run, before anything is planned.

    Raises:
        InputError: a host without torch.
    """
    _rank_jobs(job).surroundings(modules=_NEEDED)


def tuned_hosts(directory: Path, job: Job, backend: Backend) -> ClusterPlan:
    """Verify a plan that was just written, by its hosts' job, and try other settings; the plan that
    is there then.

    Sizes of which a call would take long at the plan's rate are left out.
    """
    rate = load_cluster_plan(directory).rate_gbps
    sizes = tuple(size for size in SIZES if 2 * size / (rate * 1e9) <= _LONGEST_S) or SIZES[:1]
    found = _verified(directory, job, RunBudget(sizes=sizes), backend, (), also_tune=True)
    print_verification(found, notices())
    return load_cluster_plan(directory)


def _verified(
    directory: Path,
    job: Job,
    budget: RunBudget,
    backend: Backend,
    keep: tuple[str, ...],
    *,
    also_tune: bool,
) -> Verification:
    plan = load_cluster_plan(directory)
    check_files(directory)
    target = tunable_cluster(plan, directory, _graphs(plan, directory))
    launcher = _launcher(plan, _rank_jobs(job), backend, keep)
    return verified(target, directory, launcher, budget, also_tune=also_tune)


def _rank_jobs(job: Job) -> RankJobs:
    from tccl_profiler.cluster.agents import RankJobs  # noqa: PLC0415

    return RankJobs(job)


def _graphs(plan: ClusterPlan, directory: Path) -> dict[str, str]:
    """The text of each host's graph file, as jobs would read it."""
    return {
        host.name: read_text(directory / "nccl" / host_graph_file(host.name)) for host in plan.hosts
    }


def _launcher(
    plan: ClusterPlan, jobs: RankJobs, backend: Backend, keep: tuple[str, ...]
) -> Launcher:
    _check_hosts(plan, jobs.hosts)
    facts = jobs.described(backend, interfaces=plan.settings.socket_ifname)
    callers = jobs.surroundings(modules=_NEEDED)
    parts = []
    for host in plan.hosts:
        number = plan.passages[host.passage].node_class
        gpus = plan.gpus[number]
        if backend == "cuda":
            _check_gpus(plan, number, facts[host.name])
        variables = {} if backend == "cuda" else _gloo(facts[host.name], callers[host.name])
        parts.append(
            HostRanks(
                name=host.name,
                ranks=tuple(range(host.first_rank, host.first_rank + len(gpus))),
                gpus=gpus,
                environment={**callers[host.name], **variables},
            )
        )
    return Launcher(backend=backend, hosts=tuple(parts), keep=keep, runner=jobs)


def _check_hosts(plan: ClusterPlan, there: Sequence[str]) -> None:
    """Refuse a job on other hosts than the plan's.

    Raises:
        InputError: one too few or too many.
    """
    for host in plan.host_order:
        if host not in there:
            raise InputError(f"host {host}", "is in the plan, and no rank runs there", _AGAIN)
    for host in there:
        if host not in plan.host_order:
            raise InputError(f"host {host}", "runs a rank and is not in the plan", _AGAIN)


def _check_gpus(plan: ClusterPlan, number: int, facts: HostFacts) -> None:
    """Refuse a host that has other GPUs than the plan's.

    Raises:
        InputError: one is missing, or of another kind.
    """
    here = {gpu.index: gpu.name for gpu in facts.machine.gpus}
    planned = plan.cluster.classes[number].machine
    for index in plan.gpus[number]:
        where = f"host {facts.name}"
        if index not in here:
            raise InputError(where, f"lacks GPU {index}, which the plan is for", _AGAIN)
        name = planned.gpu(index).name
        if not plan.simulated and name != here[index]:
            raise InputError(where, f"has GPU {index} {here[index]}, planned was {name}", _AGAIN)


def _gloo(facts: HostFacts, caller: Mapping[str, str]) -> dict[str, str]:
    """By which interface gloo is to talk: the caller's choice, or that of its first NIC.

    Raises:
        InputError: none is known.
    """
    name = "GLOO_SOCKET_IFNAME"
    if caller.get(name):
        return {}
    for one in facts.addresses.values():
        return {name: one.interface}
    raise InputError(f"host {facts.name}", "has no NIC with an address", f"set {name}")
