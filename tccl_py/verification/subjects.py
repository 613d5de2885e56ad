"""What is verified: a plan of one machine, or of several hosts, as the comparison sees both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

import msgspec

from tccl_py.cluster_plan.plan import ClusterPlan
from tccl_py.emitters.cluster_files import HOSTS_FOLDER
from tccl_py.emitters.nccl_conf import job_environment
from tccl_py.plan.plan import Plan
from tccl_py.runtimes.nccl.settings import Settings
from tccl_py.verification.host_rings import cluster_rings_found
from tccl_py.verification.rings import RingsFound, rings_found
from tccl_py.verification.sides import STOCK, Side, plan_side

FindRings = Callable[[str, Mapping[str, str]], RingsFound]
"""Of NCCL's log and a job's NCCL variables: what its rings are, beside those planned."""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A plan to verify: who it is for, what its jobs are told, and what is expected of them.

    `gpus` are the GPUs of one machine; of several hosts there are only their names, in rank order.
    `stock` is what it is compared with: NCCL as it is, with what all jobs of its hosts have.
    """

    name: str
    world: int
    gpus: tuple[int, ...]
    hosts: tuple[str, ...]
    side: Side
    settings: Settings
    predicted_gbps: float
    simulated: bool
    assumed: bool
    tuned: bool
    find_rings: FindRings
    stock: Side = STOCK


def machine_subject(plan: Plan, directory: Path) -> Subject:
    """The plan of one machine.

    Raises:
        InputError: its files are not all there.
    """
    return Subject(
        name=plan.machine.name,
        world=len(plan.gpus),
        gpus=plan.gpus,
        hosts=(),
        side=plan_side(plan, directory),
        settings=plan.settings,
        predicted_gbps=plan.rate_gbps,
        simulated=plan.simulated,
        assumed=plan.assumed,
        tuned=plan.tuned,
        find_rings=lambda log, variables: rings_found(plan, log, variables),
        stock=_stock(plan),
    )


def cluster_subject(plan: ClusterPlan, directory: Path, graphs: Mapping[str, str]) -> Subject:
    """The plan of several hosts.

    Args:
        plan: of them.
        directory: where it is; jobs' records name files in it.
        graphs: the text of each host's graph file, by the host's name.
    """
    folder = PurePosixPath(directory.resolve() / "nccl" / HOSTS_FOLDER)
    return Subject(
        name=f"{len(plan.hosts)} hosts",
        world=sum(len(plan.gpus[plan.passages[host.passage].node_class]) for host in plan.hosts),
        gpus=(),
        hosts=plan.host_order,
        side=Side(
            name="plan",
            # Each host gets the file of its own name, by the place where its ranks have it.
            variables=job_environment(plan.settings, graph=folder / "HOST.xml"),
            graphs=dict(graphs),
        ),
        settings=plan.settings,
        predicted_gbps=plan.rate_gbps,
        simulated=plan.simulated,
        assumed=plan.assumed,
        tuned=plan.tuned,
        find_rings=lambda log, variables: cluster_rings_found(plan, graphs, log, variables),
        stock=_stock(plan),
    )


def _stock(plan: Plan | ClusterPlan) -> Side:
    return msgspec.structs.replace(STOCK, variables=dict(plan.kept))
