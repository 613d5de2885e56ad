"""What is verified: a plan of one machine, or of several hosts, as the comparison sees both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

import msgspec

from tccl_py.cluster_plan.plan import ClusterPlan
from tccl_py.errors import InputError
from tccl_py.nccl.conf import job_environment
from tccl_py.nccl.settings import Settings
from tccl_py.plan.files import GRAPH_FILE, HOSTS_FOLDER
from tccl_py.plan.plan import ChoiceName, Plan
from tccl_py.verify.arms import Arm
from tccl_py.verify.host_rings import cluster_rings_found
from tccl_py.verify.rings import RingsFound, rings_found

FindRings = Callable[[str, Mapping[str, str]], RingsFound]
"""Of NCCL's log and a job's NCCL variables: what its rings are, beside those planned."""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A plan to verify: who it is for, what its arms are, and what is expected of them.

    `arms` begin with default NCCL, the baseline, and have no two of the same environment. `chosen`
    is the arm that is asked about. `gpus` are the GPUs of one machine; of several hosts there are
    only their names, in rank order.
    """

    name: str
    world: int
    gpus: tuple[int, ...]
    hosts: tuple[str, ...]
    arms: tuple[Arm, ...]
    recommended: ChoiceName
    chosen: ChoiceName
    simulated: bool
    assumed: bool
    tuned: bool
    find_rings: FindRings

    def arm(self, name: ChoiceName) -> Arm:
        """Return the arm of a choice: default NCCL's where the choice sets nothing else."""
        return next((one for one in self.arms if one.name == name), self.arms[0])

    def narrowed(self, name: ChoiceName) -> Subject:
        """Return default NCCL against one choice.

        Raises:
            InputError: the choice has default NCCL's environment.
        """
        arm = self.arm(name)
        if arm is self.arms[0]:
            raise InputError(
                f"--choice {name}", "sets nothing that default NCCL has not", "leave it out"
            )
        return msgspec.structs.replace(self, arms=(self.arms[0], arm), chosen=name)


def machine_subject(plan: Plan, directory: Path) -> Subject:
    """Return the plan of one machine with its three choices.

    Raises:
        InputError: its files are not all there.
    """
    graph = directory.resolve() / "nccl" / GRAPH_FILE
    if not graph.is_file():
        raise InputError(str(graph), "is missing", "plan again, or `tccl export` it")
    arms: dict[tuple[tuple[str, str], ...], Arm] = {}
    for name, choice in plan.choices.items():
        variables = dict(plan.kept)
        if name != "default":
            file = PurePosixPath(graph) if name == "graph" else None
            variables |= job_environment(choice.settings, graph=file)
        arm = Arm(
            name=name,
            variables=variables,
            settings=choice.settings,
            predicted_gbps=choice.rate_gbps,
        )
        arms.setdefault(tuple(sorted(variables.items())), arm)
    names = [one.name for one in arms.values()]
    return Subject(
        name=plan.machine.name,
        world=len(plan.gpus),
        gpus=plan.gpus,
        hosts=(),
        arms=tuple(arms.values()),
        recommended=plan.recommended,
        chosen=plan.recommended if plan.recommended in names else "default",
        simulated=plan.simulated,
        assumed=plan.assumed,
        tuned=plan.tuned,
        find_rings=lambda log, variables: rings_found(plan, log, variables),
    )


def cluster_subject(plan: ClusterPlan, directory: Path, graphs: Mapping[str, str]) -> Subject:
    """Return the plan of several hosts with two arms: default NCCL and its graph files.

    Args:
        plan: of them.
        directory: where it is; jobs' records name files in it.
        graphs: the text of each host's graph file, by the host's name.
    """
    folder = PurePosixPath(directory.resolve() / "nccl" / HOSTS_FOLDER)
    default = Arm(
        name="default",
        variables=dict(plan.kept),
        settings=Settings(version=plan.settings.version),
        predicted_gbps=plan.stock.rate_gbps,
    )
    graph = Arm(
        name="graph",
        # Each host gets the file of its own name, by the place where its ranks have it.
        variables={**plan.kept, **job_environment(plan.settings, graph=folder / "HOST.xml")},
        settings=plan.settings,
        predicted_gbps=plan.rate_gbps,
        graphs=dict(graphs),
    )
    return Subject(
        name=f"{len(plan.hosts)} hosts",
        world=sum(len(plan.gpus[plan.passages[host.passage].node_class]) for host in plan.hosts),
        gpus=(),
        hosts=plan.host_order,
        arms=(default, graph),
        recommended="graph",
        chosen="graph",
        simulated=plan.simulated,
        assumed=plan.assumed,
        tuned=plan.tuned,
        find_rings=lambda log, variables: cluster_rings_found(plan, graphs, log, variables),
    )
