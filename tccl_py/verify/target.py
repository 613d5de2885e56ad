"""What is verified and tuned: the arms of a plan, of one machine or of several hosts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Protocol

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import read_text
from tccl_py.model.transfer import DEFAULT_FIFO_BYTES
from tccl_py.nccl.candidates import candidates
from tccl_py.nccl.conf import job_environment
from tccl_py.nccl.pinned_env import pinned_level
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.transport import pair_mechanism
from tccl_py.nccl.view import NcclView, view
from tccl_py.plan.choices import own_rings
from tccl_py.plan.directory import planned_fingerprint, planned_model, planned_models, write_plan
from tccl_py.plan.files import GRAPH_FILE, HOSTS_FOLDER, host_graphs, nccl_files
from tccl_py.plan.plan import ChoiceName, Plan
from tccl_py.plan.variants import gdr_variants, keeps_rings, retuned
from tccl_py.simulator.model import MachineModel
from tccl_py.verify.host_rings import cluster_rings_found
from tccl_py.verify.jobs import THIS_HOST, Arm
from tccl_py.verify.record import Verification
from tccl_py.verify.rings import RingsFound, neighbours, rings_found

MACHINE_CHANNELS = (8, 16, 4, 32)
CLUSTER_CHANNELS = (8, 4, 16, 2, 32, 1)
"""Most promising first, should the time be up before all are tried. Fewer may do between hosts,
where all channels wait for the network."""

Choices = Mapping[ChoiceName, Settings]
Rates = Mapping[ChoiceName, float]
"""Bus bandwidth that jobs of each choice achieved, GB/s."""
FindRings = Callable[[str, Mapping[str, str]], RingsFound]
"""Compares NCCL's log of a job with these NCCL variables with the planned rings."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A plan to verify.

    `arms` begin with default NCCL, the baseline, and differ in their environments. `chosen` is the
    arm in question. `gpus` are those of one machine; several hosts have names, in rank order.
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
        return next((arm for arm in self.arms if arm.name == name), self.arms[0])

    def narrowed(self, name: ChoiceName) -> Target:
        """Return default NCCL against one choice.

        Raises:
            InputError: the choice has default NCCL's environment.
        """
        arm = self.arm(name)
        if arm is self.arms[0]:
            what = "sets nothing that default NCCL has not"
            raise InputError(f"--choice {name}", what, "leave it out")
        return msgspec.structs.replace(self, arms=(self.arms[0], arm), chosen=name)


def machine_target(plan: Plan, directory: Path, *, graph: str | None = None) -> Target:
    """Return the three choices of one machine's plan.

    Args:
        plan: the plan.
        directory: its directory.
        graph: text of its graph file; None for the file in the directory.

    Raises:
        InputError: there is no such file.
    """
    file = directory.resolve() / "nccl" / GRAPH_FILE
    if graph is None:
        if not file.is_file():
            raise InputError(str(file), "is missing", "plan again, or `tccl export` it")
        graph = read_text(file)
    arms: dict[tuple[tuple[str, str], ...], Arm] = {}
    for name, choice in plan.choices.items():
        variables = dict(plan.pinned_env)
        if name != "default":
            named = PurePosixPath(file) if name == "graph" else None
            variables |= job_environment(choice.settings, graph=named)
        arm = Arm(
            name=name,
            variables=variables,
            settings=choice.settings,
            predicted_gbps=choice.best_known_gbps,
            graphs={THIS_HOST: graph},
        )
        arms.setdefault(tuple(sorted(variables.items())), arm)
    names = [arm.name for arm in arms.values()]
    return Target(
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


def cluster_target(plan: Plan, directory: Path, graphs: Mapping[str, str]) -> Target:
    """Return the plan of several hosts with two arms: default NCCL and its graph files.

    Args:
        plan: the plan.
        directory: its directory.
        graphs: the text of each host's graph file, by the host's name.
    """
    # Each host gets the file of its own name.
    file = PurePosixPath(directory.resolve() / "nccl" / HOSTS_FOLDER / "HOST.xml")
    default = Arm(
        name="default",
        variables=dict(plan.pinned_env),
        settings=Settings(version=plan.settings.version),
        predicted_gbps=plan.stock.best_known_gbps,
    )
    graph = Arm(
        name="graph",
        variables={**plan.pinned_env, **job_environment(plan.settings, graph=file)},
        settings=plan.settings,
        predicted_gbps=plan.choices["graph"].best_known_gbps,
        graphs=dict(graphs),
    )
    return Target(
        name=f"{len(plan.hosts)} hosts",
        world=plan.cluster.ranks,
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


class TuningTarget(Protocol):
    """A plan as tuning sees it: what may be tried, its jobs, and its place."""

    @property
    def choices(self) -> Choices:
        """The settings of each choice that may be tuned."""

    def channels(self, name: ChoiceName) -> Sequence[int]:
        """Return numbers of channels of a graph file worth trying, most promising first.

        Every ring gets as many as any other. NCCL ends up with twice as many.
        """

    def kinds(self, name: ChoiceName, settings: Settings) -> set[str]:
        """Return the mechanisms of hops from GPU to GPU under these settings."""

    def other_paths(self, name: ChoiceName, settings: Settings) -> Sequence[Settings]:
        """Return settings that differ by how far GPUs reach each other or NICs reach GPUs."""

    def permits(self, settings: Settings) -> bool:
        """Whether its rings are possible under them, with as many channels as they say."""

    def retuned(self, changes: Choices, rates: Rates | None = None) -> TuningTarget:
        """Return the plan with other settings of some choices, and with rates that jobs achieved.

        Raises:
            InputError: settings that the version does not have.
        """

    def settled(self, found: Verification) -> TuningTarget:
        """Return the plan with what its jobs achieved, and with the winner as its choice."""

    def target(self) -> Target:
        """Return the arms.

        Raises:
            InputError: the plan's files are not all there.
        """

    def write(self) -> None:
        """Write it in the place of the plan that it was made from.

        Raises:
            InputError: a file cannot be written; what was there before is still there.
        """


class TunableMachine(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one machine, its directory, and its graph file's text if that is not there."""

    plan: Plan
    directory: Path
    graph: str | None = None

    @property
    def choices(self) -> Choices:
        """As TuningTarget."""
        return {"variables": self.plan.variables.settings, "graph": self.plan.settings}

    def channels(self, name: ChoiceName) -> Sequence[int]:
        """As TuningTarget; every ring of each subset gets as many as any other as well."""
        subsets = [len(one.rings) for one in self.plan.subsets]
        unit = math.lcm(len(self.plan.rings), *subsets) if name == "graph" else 1
        return tuple(count for count in MACHINE_CHANNELS if count % unit == 0)

    def kinds(self, name: ChoiceName, settings: Settings) -> set[str]:
        """As TuningTarget."""
        seen = view(self.plan.machine, self.plan.knowledge, settings, gpus=self.plan.gpus)
        rings = self.plan.choices[name].rings
        return _kinds(seen, [pair for ring in rings for pair in neighbours(ring)])

    def other_paths(self, name: ChoiceName, settings: Settings) -> Sequence[Settings]:
        """As TuningTarget: P2P levels that differ, where variables alone choose the rings."""
        if name != "variables":
            return ()
        plan = self.plan
        found = candidates(
            plan.machine,
            plan.knowledge,
            settings.version,
            gpus=plan.gpus,
            channels=(1,),
            buffsizes=(DEFAULT_FIFO_BYTES,),
            p2p_level=pinned_level(plan.pinned_env),
        )
        levels = dict.fromkeys(one.p2p_level for one in found)
        return [msgspec.structs.replace(settings, p2p_level=level) for level in levels]

    def permits(self, settings: Settings) -> bool:  # noqa: ARG002
        """All: on one machine NCCL has some way from any GPU to any other."""
        return True

    def retuned(self, changes: Choices, rates: Rates | None = None) -> TunableMachine:
        """As TuningTarget; the limit is of the earlier settings, and goes."""
        made, variables = self.plan, self.plan.variables
        if "variables" in changes:
            settings = changes["variables"]
            rings = own_rings(made, settings).rings
            variables = msgspec.structs.replace(variables, settings=settings, rings=rings)
        if "graph" in changes or rates:
            settings = changes.get("graph", made.settings)
            made = retuned(made, settings, achieved_gbps=(rates or {}).get("graph"))
        if rates:
            default = rates["default"]
            equal = default if variables.settings == made.stock.settings else None
            variables = msgspec.structs.replace(
                variables, achieved_gbps=rates.get("variables", equal)
            )
            stock = msgspec.structs.replace(made.stock, achieved_gbps=default)
            made = msgspec.structs.replace(made, stock=stock)
        made = msgspec.structs.replace(made, variables=variables, limit_gbps=None)
        graph = nccl_files(made, self.directory)[GRAPH_FILE]
        return msgspec.structs.replace(self, plan=made, graph=graph)

    def settled(self, found: Verification) -> TunableMachine:
        """As TuningTarget."""
        rates = {arm.name: arm.gbps for arm in found.arms if arm.gbps is not None}
        made = self.retuned({}, rates).plan
        return msgspec.structs.replace(
            self, plan=msgspec.structs.replace(made, winner=found.winner)
        )

    def target(self) -> Target:
        """As TuningTarget."""
        return machine_target(self.plan, self.directory, graph=self.graph)

    def write(self) -> None:
        """As TuningTarget; also if the machine's file is damaged, nothing is written."""
        model = planned_model(self.plan, self.directory)
        fingerprint = None if model else planned_fingerprint(self.plan, self.directory)
        write_plan(self.plan, self.directory, model=model, fingerprint=fingerprint)


class TunableCluster(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of several hosts, its directory, and what is there: each host's graph file, by its
    name, and the models of classes."""

    plan: Plan
    directory: Path
    graphs: Mapping[str, str]
    models: Mapping[str, MachineModel]

    @property
    def choices(self) -> Choices:
        """As TuningTarget: hosts of several classes have no choice of variables alone."""
        return {"graph": self.plan.settings}

    def channels(self, name: ChoiceName) -> Sequence[int]:  # noqa: ARG002
        """As TuningTarget."""
        return tuple(count for count in CLUSTER_CHANNELS if count % self.plan.ring_count == 0)

    def kinds(self, name: ChoiceName, settings: Settings) -> set[str]:  # noqa: ARG002
        """As TuningTarget."""
        found: set[str] = set()
        for path in self.plan.paths:
            one = self.plan.cluster.classes[path.node_class]
            gpus = self.plan.class_gpus[path.node_class]
            seen = view(one.machine, one.knowledge, settings, gpus=gpus)
            found |= _kinds(seen, [pair for chain in path.chains for pair in pairwise(chain.gpus)])
        return found

    def other_paths(
        self,
        name: ChoiceName,  # noqa: ARG002
        settings: Settings,
    ) -> Sequence[Settings]:
        """As TuningTarget: where bytes land between GPUs and NICs."""
        return gdr_variants(self.plan, settings)

    def permits(self, settings: Settings) -> bool:
        """As TuningTarget; NCCL doubles few and quick channels once more between hosts."""
        return keeps_rings(self.plan, settings)

    def retuned(self, changes: Choices, rates: Rates | None = None) -> TunableCluster:
        """As TuningTarget."""
        if "graph" not in changes:
            return self
        known = rates or {}
        made = retuned(self.plan, changes["graph"], achieved_gbps=known.get("graph"))
        stock = msgspec.structs.replace(made.stock, achieved_gbps=known.get("default"))
        made = msgspec.structs.replace(made, stock=stock)
        return msgspec.structs.replace(self, plan=made, graphs=host_graphs(made))

    def settled(self, found: Verification) -> TunableCluster:  # noqa: ARG002
        """As TuningTarget; the channels follow from the rates in the verified files."""
        return self

    def target(self) -> Target:
        """As TuningTarget."""
        return cluster_target(self.plan, self.directory, self.graphs)

    def write(self) -> None:
        """As TuningTarget."""
        write_plan(self.plan, self.directory, models=self.models)


def tunable_cluster(plan: Plan, directory: Path, graphs: Mapping[str, str]) -> TunableCluster:
    """A cluster's plan with what its directory has.

    Raises:
        InputError: a machine's file in it is damaged.
    """
    models = planned_models(plan, directory)
    return TunableCluster(plan=plan, directory=directory, graphs=graphs, models=models)


def _kinds(seen: NcclView, pairs: Sequence[tuple[int, int]]) -> set[str]:
    return {pair_mechanism(seen, *pair).kind for pair in pairs}
