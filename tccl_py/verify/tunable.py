"""What can be tuned: the plan of one machine, or of several hosts, under other settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import msgspec

from tccl_py.cluster_plan.directory import graph_texts, planned_models, write_cluster_plan
from tccl_py.cluster_plan.plan import ClusterPlan
from tccl_py.cluster_plan.retuned import keeps_rings, other_landings
from tccl_py.cluster_plan.retuned import retuned as cluster_retuned
from tccl_py.model.transfer import DEFAULT_FIFO_BYTES
from tccl_py.nccl.candidates import candidates
from tccl_py.nccl.pinned_env import kept_level
from tccl_py.nccl.settings import Settings, check_settings, final_channels
from tccl_py.nccl.transport import View, mechanism_flow, pair_mechanism, view
from tccl_py.plan.choices import own_rings
from tccl_py.plan.directory import nccl_files, planned_fingerprint, planned_model, write_plan
from tccl_py.plan.plan import ChoiceName, Plan, PlanHop, PlanRing
from tccl_py.plan.staging import write_file
from tccl_py.simulator.model import MachineModel
from tccl_py.temporary import temporary_folder
from tccl_py.verify.record import Verification
from tccl_py.verify.rings import neighbours
from tccl_py.verify.subjects import Subject, cluster_subject, machine_subject

MACHINE_CHANNELS = (8, 16, 4, 32)
CLUSTER_CHANNELS = (8, 4, 16, 2, 32, 1)
"""Most promising first, should the time be up before all are tried. Between hosts fewer may do: all
wait for the network."""
_NOTE = "settings tuned: all rates are shares of what jobs achieved, not predictions"


Choices = Mapping[ChoiceName, Settings]
Rates = Mapping[ChoiceName, float]
"""Bus bandwidth that jobs of each choice achieved, GB/s."""


class Tunable(Protocol):
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

    def retuned(self, changes: Choices, rates: Rates | None = None) -> Tunable:
        """Return the plan with other settings of some choices, and with rates that jobs achieved.

        Raises:
            InputError: settings that the version does not have.
        """

    def settled(self, found: Verification) -> Tunable:
        """Return the plan with what its jobs achieved, and with the winner as its choice."""

    def in_place(self) -> Subject:
        """Return the plan by its files in its directory, where it is or will be.

        Raises:
            InputError: they are not all there.
        """

    def elsewhere(self) -> AbstractContextManager[Subject]:
        """Return the plan by files of its own, which are there for as long as the block lasts."""

    def write(self) -> None:
        """Write it in the place of the plan that it was made from.

        Raises:
            InputError: a file cannot be written; what was there before is still there.
        """


class TunableMachine(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one machine, and its directory."""

    plan: Plan
    directory: Path

    @property
    def choices(self) -> Choices:
        """As Tunable."""
        return {"variables": self.plan.variables.settings, "graph": self.plan.settings}

    def channels(self, name: ChoiceName) -> Sequence[int]:
        """As Tunable; every ring of each subset gets as many as any other as well."""
        subsets = [len(one.rings) for one in self.plan.subsets]
        unit = math.lcm(len(self.plan.rings), *subsets) if name == "graph" else 1
        return tuple(count for count in MACHINE_CHANNELS if count % unit == 0)

    def kinds(self, name: ChoiceName, settings: Settings) -> set[str]:
        """As Tunable."""
        seen = view(self.plan.machine, self.plan.knowledge, settings, gpus=self.plan.gpus)
        rings = self.plan.choices[name].rings
        return _kinds(seen, [pair for ring in rings for pair in neighbours(ring)])

    def other_paths(self, name: ChoiceName, settings: Settings) -> Sequence[Settings]:
        """As Tunable: P2P levels that make a difference, where variables alone choose the rings."""
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
            p2p_level=kept_level(plan.kept),
        )
        levels = dict.fromkeys(one.p2p_level for one in found)
        return [msgspec.structs.replace(settings, p2p_level=level) for level in levels]

    def permits(self, settings: Settings) -> bool:  # noqa: ARG002
        """All: on one machine NCCL has some way from any GPU to any other."""
        return True

    def retuned(self, changes: Choices, rates: Rates | None = None) -> TunableMachine:
        """As Tunable; the limit is of the earlier settings, and goes."""
        made, variables = self.plan, self.plan.variables
        if "variables" in changes:
            settings = changes["variables"]
            rings = own_rings(made, settings).rings
            variables = msgspec.structs.replace(variables, settings=settings, rings=rings)
        if "graph" in changes or rates:
            rate = (rates or {}).get("graph", made.rate_gbps)
            made = retuned(made, changes.get("graph", made.settings), rate_gbps=rate)
        if rates:
            default = rates["default"]
            equal = default if variables.settings == made.stock.settings else None
            variables = msgspec.structs.replace(
                variables, rate_gbps=rates.get("variables", equal), error=0.0
            )
            stock = msgspec.structs.replace(made.stock, rate_gbps=default, error=0.0)
            made = msgspec.structs.replace(made, stock=stock, error=0.0, tuned=True)
        made = msgspec.structs.replace(made, variables=variables, limit_gbps=None)
        return msgspec.structs.replace(self, plan=made)

    def settled(self, found: Verification) -> TunableMachine:
        """As Tunable."""
        rates = {arm.name: arm.gbps for arm in found.arms if arm.gbps is not None}
        made = self.retuned({}, rates).plan
        return msgspec.structs.replace(
            self, plan=msgspec.structs.replace(made, winner=found.winner)
        )

    def in_place(self) -> Subject:
        """As Tunable."""
        return machine_subject(self.plan, self.directory)

    @contextmanager
    def elsewhere(self) -> Iterator[Subject]:
        """As Tunable."""
        with temporary_folder("tccl-tune-") as folder:
            for file, text in nccl_files(self.plan, folder).items():
                write_file(folder / "nccl" / file, text)
            yield machine_subject(self.plan, folder)

    def write(self) -> None:
        """As Tunable; also if the machine's file is damaged, nothing is written."""
        model = planned_model(self.plan, self.directory)
        fingerprint = None if model else planned_fingerprint(self.plan, self.directory)
        write_plan(self.plan, self.directory, model=model, fingerprint=fingerprint)


class TunableCluster(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of several hosts, its directory, and what is there: each host's graph file, by its
    name, and the models of classes."""

    plan: ClusterPlan
    directory: Path
    graphs: Mapping[str, str]
    models: Mapping[str, MachineModel]

    @property
    def choices(self) -> Choices:
        """As Tunable: hosts of several classes have no choice of variables alone."""
        return {"graph": self.plan.settings}

    def channels(self, name: ChoiceName) -> Sequence[int]:  # noqa: ARG002
        """As Tunable."""
        return tuple(count for count in CLUSTER_CHANNELS if count % self.plan.ring_count == 0)

    def kinds(self, name: ChoiceName, settings: Settings) -> set[str]:  # noqa: ARG002
        """As Tunable."""
        found: set[str] = set()
        for passage in self.plan.passages:
            one = self.plan.cluster.classes[passage.node_class]
            gpus = self.plan.gpus[passage.node_class]
            seen = view(one.machine, one.knowledge, settings, gpus=gpus)
            found |= _kinds(
                seen, [pair for chain in passage.chains for pair in pairwise(chain.gpus)]
            )
        return found

    def other_paths(
        self,
        name: ChoiceName,  # noqa: ARG002
        settings: Settings,
    ) -> Sequence[Settings]:
        """As Tunable: where bytes land between GPUs and NICs."""
        return other_landings(self.plan, settings)

    def permits(self, settings: Settings) -> bool:
        """As Tunable; NCCL doubles few and quick channels once more between hosts."""
        return keeps_rings(self.plan, settings)

    def retuned(self, changes: Choices, rates: Rates | None = None) -> TunableCluster:
        """As Tunable."""
        if "graph" not in changes:
            return self
        known = rates or {"default": self.plan.stock.rate_gbps, "graph": self.plan.rate_gbps}
        made = cluster_retuned(self.plan, changes["graph"], rate_gbps=known["graph"])
        stock = msgspec.structs.replace(made.stock, rate_gbps=known["default"])
        made = msgspec.structs.replace(
            made, stock=stock, notices=_noted(self.plan.notices), tuned=made.tuned or bool(rates)
        )
        return msgspec.structs.replace(self, plan=made, graphs=host_graphs(made))

    def settled(self, found: Verification) -> TunableCluster:  # noqa: ARG002
        """As Tunable; NCCL's number of channels follows from the rates in the files verified."""
        return self

    def in_place(self) -> Subject:
        """As Tunable."""
        return cluster_subject(self.plan, self.directory, self.graphs)

    def elsewhere(self) -> AbstractContextManager[Subject]:
        """As Tunable; jobs get their files from here, wherever the plan is."""
        return nullcontext(self.in_place())

    def write(self) -> None:
        """As Tunable."""
        write_cluster_plan(self.plan, self.directory, models=self.models)


def tunable_cluster(
    plan: ClusterPlan, directory: Path, graphs: Mapping[str, str]
) -> TunableCluster:
    """A cluster's plan with what its directory has.

    Raises:
        InputError: a machine's file in it is damaged.
    """
    models = planned_models(plan, directory)
    return TunableCluster(plan=plan, directory=directory, graphs=graphs, models=models)


def host_graphs(plan: ClusterPlan) -> dict[str, str]:
    """The text of each host's graph file, by its name.

    Raises:
        InputError: chains that NCCL would not take as they are meant.
    """
    texts = graph_texts(plan, {host.passage for host in plan.hosts})
    return {host.name: texts[host.passage] for host in plan.hosts}


def retuned(plan: Plan, settings: Settings, *, rate_gbps: float) -> Plan:
    """The same rings of one machine under other settings, whose rate is what was achieved, GB/s.

    Raises:
        InputError: settings that the version does not have.
    """
    check_settings(settings)
    seen = view(plan.machine, plan.knowledge, settings, gpus=plan.gpus)
    channels = final_channels(settings.channels, sm=seen.system.sm_min, version=settings.version)
    blocks = max(1, channels // len(plan.rings))
    share = rate_gbps / len(plan.rings)

    def hop(old: PlanHop) -> PlanHop:
        way = pair_mechanism(seen, old.source, old.target)
        if way.kind == "network":
            return msgspec.structs.replace(old, gbps=share)
        flow = mechanism_flow(plan.machine, settings, way, old.source, old.target, blocks=blocks)
        return msgspec.structs.replace(old, flow=str(flow), gbps=share)

    return msgspec.structs.replace(
        plan,
        settings=settings,
        rings=tuple(PlanRing(hops=tuple(map(hop, ring.hops))) for ring in plan.rings),
        rate_gbps=rate_gbps,
        bound_gbps=None,
        proven=False,
        notices=_noted(plan.notices),
    )


def _noted(notices: Sequence[str]) -> tuple[str, ...]:
    return (*(one for one in notices if one != _NOTE), _NOTE)


def _kinds(seen: View, pairs: Sequence[tuple[int, int]]) -> set[str]:
    return {pair_mechanism(seen, *pair).kind for pair in pairs}
