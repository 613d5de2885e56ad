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
from tccl_py.plan.directory import nccl_files, planned_fingerprint, planned_model, write_plan
from tccl_py.plan.plan import Plan, PlanHop, PlanRing
from tccl_py.plan.staging import write_file
from tccl_py.runtimes.nccl.settings import Settings, check_settings, final_channels
from tccl_py.runtimes.nccl.transport import View, mechanism_flow, pair_mechanism, view
from tccl_py.simulator.model import MachineModel
from tccl_py.temporary import temporary_folder
from tccl_py.verification.subjects import Subject, cluster_subject, machine_subject

MACHINE_CHANNELS = (8, 16, 4, 32)
CLUSTER_CHANNELS = (8, 4, 16, 2, 32, 1)
"""Most promising first, should the time be up before all are tried. Between hosts fewer may do: all
wait for the network."""
_NOTE = "settings tuned: rates, stock's too, are shares of what jobs achieved, not predictions"


class Achieved(msgspec.Struct, frozen=True, kw_only=True):
    """Bus bandwidth of jobs, GB/s: with the plan's rings under some settings, and of stock NCCL."""

    gbps: float
    stock_gbps: float


class Tunable(Protocol):
    """A plan as tuning sees it: what may be tried, its jobs, and its place.

    `channels` are numbers of channels worth trying, most promising first.
    """

    @property
    def settings(self) -> Settings:
        """Those that it has."""

    @property
    def channels(self) -> Sequence[int]:
        """Numbers of them that give every ring as many as any other."""

    def kinds(self, settings: Settings) -> set[str]:
        """The mechanisms of its hops from GPU to GPU under these settings."""

    def other_landings(self, settings: Settings) -> Sequence[Settings]:
        """Settings that differ by where bytes land between GPUs and NICs; none of one machine."""

    def permits(self, settings: Settings) -> bool:
        """Whether its rings are possible under them, with as many channels as they say."""

    def retuned(self, settings: Settings, *, achieved: Achieved | None = None) -> Tunable:
        """The same rings under other settings, at the rates achieved; None keeps the plan's.

        Raises:
            InputError: settings that the version does not have.
        """

    def in_place(self) -> Subject:
        """The plan by its files in its directory, where it is or will be.

        Raises:
            InputError: they are not all there.
        """

    def elsewhere(self) -> AbstractContextManager[Subject]:
        """The plan by files of its own, which are there for as long as the block lasts."""

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
    def settings(self) -> Settings:
        """Those that the plan has."""
        return self.plan.settings

    @property
    def channels(self) -> tuple[int, ...]:
        """As Tunable; every ring of each subset gets as many as any other as well."""
        subsets = [len(one.rings) for one in self.plan.subsets]
        unit = math.lcm(len(self.plan.rings), *subsets)
        return tuple(count for count in MACHINE_CHANNELS if count % unit == 0)

    def kinds(self, settings: Settings) -> set[str]:
        """As Tunable."""
        seen = view(self.plan.machine, self.plan.knowledge, settings, gpus=self.plan.gpus)
        hops = [hop for ring in self.plan.rings for hop in ring.hops]
        return _kinds(seen, [(hop.source, hop.target) for hop in hops])

    def other_landings(self, settings: Settings) -> tuple[Settings, ...]:  # noqa: ARG002
        """None: nothing of it goes by NICs."""
        return ()

    def permits(self, settings: Settings) -> bool:  # noqa: ARG002
        """All: on one machine NCCL has some way from any GPU to any other."""
        return True

    def retuned(self, settings: Settings, *, achieved: Achieved | None = None) -> TunableMachine:
        """As Tunable; a free choice of mechanisms is a prediction, and goes."""
        rates = achieved or _rates(self.plan)
        made = retuned(self.plan, settings, rate_gbps=rates.gbps)
        stock = msgspec.structs.replace(made.stock, rate_gbps=rates.stock_gbps)
        tuned = made.tuned or achieved is not None
        variables = made.variables
        if achieved is not None:
            # A prediction beside rates that jobs achieved would compare what cannot be compared.
            note = "not run when the graph file was tuned"
            variables = msgspec.structs.replace(variables, rate_gbps=None, note=note)
        made = msgspec.structs.replace(
            made, stock=stock, variables=variables, free=None, tuned=tuned
        )
        return msgspec.structs.replace(self, plan=made)

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
    def settings(self) -> Settings:
        """Those that the plan has."""
        return self.plan.settings

    @property
    def channels(self) -> tuple[int, ...]:
        """As Tunable."""
        return tuple(count for count in CLUSTER_CHANNELS if count % self.plan.ring_count == 0)

    def kinds(self, settings: Settings) -> set[str]:
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

    def other_landings(self, settings: Settings) -> tuple[Settings, ...]:
        """As Tunable."""
        return other_landings(self.plan, settings)

    def permits(self, settings: Settings) -> bool:
        """As Tunable; NCCL doubles few and quick channels once more between hosts."""
        return keeps_rings(self.plan, settings)

    def retuned(self, settings: Settings, *, achieved: Achieved | None = None) -> TunableCluster:
        """As Tunable."""
        rates = achieved or _rates(self.plan)
        made = cluster_retuned(self.plan, settings, rate_gbps=rates.gbps)
        stock = msgspec.structs.replace(made.stock, rate_gbps=rates.stock_gbps)
        tuned = made.tuned or achieved is not None
        notices = _noted(self.plan.notices)
        made = msgspec.structs.replace(made, stock=stock, notices=notices, tuned=tuned)
        return msgspec.structs.replace(self, plan=made, graphs=host_graphs(made))

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


def _rates(plan: Plan | ClusterPlan) -> Achieved:
    return Achieved(gbps=plan.rate_gbps, stock_gbps=plan.stock.rate_gbps or plan.rate_gbps)


def _noted(notices: Sequence[str]) -> tuple[str, ...]:
    return (*(one for one in notices if one != _NOTE), _NOTE)


def _kinds(seen: View, pairs: Sequence[tuple[int, int]]) -> set[str]:
    return {pair_mechanism(seen, *pair).kind for pair in pairs}
