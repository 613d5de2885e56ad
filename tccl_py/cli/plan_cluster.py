"""`tccl plan` for several nodes: a simulated cluster, or the hosts of an MPI job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from tccl_py.cli.output import ProgressLine
from tccl_py.cli.streams import notice_each
from tccl_py.cluster_plan.placed import PlacedSource, placements, whole_ring_rate
from tccl_py.cluster_plan.planner import make_cluster_plan
from tccl_py.cluster_plan.uplinks import with_measured_uplinks
from tccl_py.errors import InputError, MeasurementError
from tccl_py.model.cluster import Cluster, HostReport, cluster_of
from tccl_py.model.measurement import BandwidthSource
from tccl_py.plan.plan import Plan
from tccl_py.readers.hosts import HostSlots, read_host_list
from tccl_py.readers.switches import Network, read_switches
from tccl_py.search.problem import Budget
from tccl_py.simulator.model import MachineModel
from tccl_py.sources.hosts import HostsSource, sampled_links
from tccl_py.sources.opening import open_source

MANY_NODES = 16_384
SPOT_CHECKS = 16
"""Pairs of hosts measured beside one for each kind, to find hosts that are unlike others."""
WHOLE_RING_HOSTS = 64
"""On more hosts the rings are not measured all at once."""


_ASSUMED = {
    "tcp": "what NICs move to and from GPU memory was not measured, but taken to run at their "
    "ports' speed; all else was measured (NCCL measures it: leave out --network tcp)",
    "nccl": "what GPUs send by another GPU's memory was not measured, but taken to run at the "
    "speed of the NICs' ports; all else was measured",
}


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the options of `tccl plan` say of a cluster; None is "not given"."""

    nodes: int | None = None
    hosts: Path | None = None
    switches: Path | None = None
    keep_order: bool = False
    gid_index: int | None = None
    interfaces: str | None = None
    network: str | None = None

    @property
    def given(self) -> dict[str, object]:
        """The options by name that make sense for several nodes only."""
        return {
            "--hosts": self.hosts,
            "--switches": self.switches,
            "--keep-order": self.keep_order or None,
            "--gid-index": self.gid_index,
            **self.measured,
        }

    @property
    def measured(self) -> dict[str, object]:
        """Those of `given` that say how the hosts of an MPI job are measured."""
        return {"--interfaces": self.interfaces, "--network": self.network}


class ClusterTask(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for, whichever cluster it is."""

    options: ClusterOptions
    version: str
    counts: tuple[int, ...] | None
    strategy: str
    budget: Budget
    kept: dict[str, str] = {}

    def plan(
        self, cluster: Cluster, sources: Sequence[BandwidthSource], line: ProgressLine
    ) -> Plan:
        """The plan that these sources' answers make."""
        return make_cluster_plan(
            cluster,
            sources,
            version=self.version,
            ring_counts=self.counts,
            strategy=self.strategy,
            budget=self.budget,
            keep_order=self.options.keep_order,
            ib_gid_index=self.options.gid_index,
            reporter=line,
            pinned_env=self.kept,
        )

    def network(self, hosts: Sequence[str]) -> Network | None:
        """The switches between these hosts, if a file tells of them."""
        path = self.options.switches
        return read_switches(path, hosts) if path is not None else None


class SimulatedCluster:
    """Equal nodes, by a model."""

    def __init__(self, model: MachineModel, task: ClusterTask, *, noise: float, seed: int) -> None:
        options = task.options
        self._model = model
        self._task = task
        self._source = open_source(model, noise=noise, seed=seed)
        hosts = _listed(options)
        _refuse_uneven(hosts, len(model.machine.gpus), where=str(options.hosts))
        network = task.network([host.name for host in hosts])
        reports = [
            HostReport(
                host=host.name,
                machine=model.machine,
                knowledge=model.knowledge,
                slots=host.slots,
            )
            for host in hosts
        ]
        self.cluster = cluster_of(
            reports,
            switches=network.switches if network is not None else None,
            rails=network.rails if network is not None else "any",
            where=str(options.hosts) if options.hosts is not None else "cluster",
        )

    def planned(self, journal: Path, *, force: bool) -> Plan:
        """The plan by simulation; one that a journal tells of is gone on with."""
        with ProgressLine() as line, self._source as source:
            notice_each(source.keep_in(journal, replace=force))
            return self._task.plan(self.cluster, [source], line)

    @property
    def models(self) -> dict[str, MachineModel]:
        """The model of each class by its name."""
        return {one.name: self._model for one in self.cluster.classes}


def _listed(options: ClusterOptions) -> tuple[HostSlots, ...]:
    """The hosts that are simulated: those of a file, or as many as --nodes says.

    Raises:
        InputError: neither or too few, too many, or both and they differ.
    """
    if options.hosts is not None:
        hosts = read_host_list(options.hosts)
        if options.nodes not in (None, len(hosts)):
            what = f"is {options.nodes}, but {options.hosts} has {len(hosts)} hosts"
            raise InputError("--nodes", what, "give one of the two, or equal numbers")
        return hosts
    if options.nodes is None or not 2 <= options.nodes <= MANY_NODES:
        raise InputError("--nodes", f"is {options.nodes}", f"2 to {MANY_NODES} nodes")
    width = len(str(options.nodes))
    return tuple(HostSlots(f"node{number + 1:0{width}d}") for number in range(options.nodes))


def _refuse_uneven(hosts: Sequence[HostSlots], gpus: int, *, where: str) -> None:
    """Refuse a list in which a host has other numbers of ranks than others by standing there again.

    Raises:
        InputError: that is so; equal machines need equal numbers of ranks.
    """
    ranks = {host.name: gpus if host.slots is None else host.slots for host in hosts}
    for one in hosts:
        other = next((name for name, count in ranks.items() if count != ranks[one.name]), None)
        if one.times > 1 and other is not None:
            raise InputError(
                where,
                f"names {one.name} {one.times} times, which makes {ranks[one.name]} ranks, and "
                f"{other} has {ranks[other]}",
                f"a host that is named once has one for each of its {gpus} GPUs: name each once, "
                "or give all as many",
            )


class MeasuredCluster:
    """The hosts of an MPI job, to plan by measuring them."""

    def __init__(self, source: HostsSource, task: ClusterTask) -> None:
        session = source.session
        self._session, self._task, self._source = session, task, source
        names = [host.name for host in session.hosts]
        network = task.network(names)
        self.cluster = cluster_of(
            [
                HostReport(
                    host=host.name,
                    machine=host.machine,
                    knowledge=host.knowledge,
                    # One rank on a host is its agent; more are the ranks of a job.
                    slots=len(host.ranks) if len(host.ranks) > 1 else None,
                )
                for host in session.hosts
            ],
            switches=network.switches if network is not None else None,
            rails=network.rails if network is not None else "any",
            where="this MPI job",
        )
        self.models: dict[str, MachineModel] = {}

    def planned(self, journal: Path, *, force: bool) -> Plan:
        """The plan by measurements; what was noticed meanwhile stands in it."""
        source = self._source
        with ProgressLine() as line:
            source.watch(line.measured)
            notice_each(source.keep_in(journal, replace=force))
            odd = self._sampled(source)
            notice_each(odd)
            places = placements(
                self.cluster,
                over_sockets=self._session.over_sockets,
                addressed=self._addressed,
                carried=self._session.network == "nccl",
            )
            made = self._task.plan(
                self.cluster, [PlacedSource(source, place) for place in places], line
            )
            if made.assumed:
                odd += (_ASSUMED[self._session.network],)
            elif not made.cancelled:
                made = _with_whole_ring(made, source)
            source.close()
        # What the journal answered was measured by an earlier run.
        asked = made.sets_measured + made.sets_remembered
        made = msgspec.structs.replace(
            made,
            sets_measured=source.measuring.count,
            sets_remembered=max(0, asked - source.measuring.count),
        )
        noticed = source.measuring.summary(source.conditions)
        notices = (*made.notices, *odd, *noticed)
        return msgspec.structs.replace(made, notices=tuple(dict.fromkeys(notices)))

    @property
    def _addressed(self) -> dict[str, tuple[int, ...]]:
        """By host the NICs that TCP reaches."""
        return {host.name: tuple(host.addresses) for host in self._session.hosts}

    def _sampled(self, source: BandwidthSource) -> tuple[str, ...]:
        """Measure some pairs of hosts; what is odd of them, a sentence each.

        Pairs across switches tell what uplinks carry, where no file did.
        """
        network = self._session.network
        if network == "tcp" and not all(self._addressed.values()):
            return ("hosts have NICs without an address for TCP: the network was not sampled",)
        tree = self.cluster.switches
        under = {
            host: switch.name
            for switch in (tree.all_switches if tree is not None else ())
            for host in switch.hosts
        }
        report = sampled_links(
            source,
            self._session.hosts,
            [self.cluster.host_classes[host.name] for host in self._session.hosts],
            switches=under,
            spot_checks=min(SPOT_CHECKS, len(self.cluster.hosts) // 2),
            network=network,
        )
        told = [str(one) for one in report.odd]
        if tree is not None:
            pairs = [(one.sender, one.receiver, one.gbps) for one in report.pairs]
            known = with_measured_uplinks(tree, pairs)
            told += [
                f"the uplink of switch {new.name} carries {new.uplink_gbps:.3g} GB/s each way, as "
                "pairs of hosts across it were measured"
                for old, new in zip(tree.all_switches, known.all_switches, strict=True)
                if new.uplink_gbps != old.uplink_gbps
            ]
            self.cluster = msgspec.structs.replace(self.cluster, switches=known)
        return tuple(told)


def _with_whole_ring(made: Plan, source: BandwidthSource) -> Plan:
    """The plan with what all its rings carry at once, where the hosts are not too many."""
    if len(made.hosts) > WHOLE_RING_HOSTS:
        return made
    try:
        rate = whole_ring_rate(made, source)
    except MeasurementError as error:
        text = f"the rings could not be measured all at once: {error}"
        return msgspec.structs.replace(made, notices=(*made.notices, text))
    return msgspec.structs.replace(made, whole_ring_gbps=rate)
