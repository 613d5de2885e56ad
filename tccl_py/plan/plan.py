"""The Plan: rings over one host or several, their settings, and their bandwidth.

A single host is a cluster of one, whose rings close inside it. Over several hosts a ring is an open
chain on each host, from an entry NIC to an exit NIC.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import encode_json, write_atomically
from tccl_py.model.cluster import Cluster, Host, NodeClass, check_cluster, class_name
from tccl_py.model.machine import Knowledge, Machine
from tccl_py.model.rings import Hop, Ring
from tccl_py.model.transfer import Flow, receiving_nic, sending_nic
from tccl_py.nccl.settings import Settings, environment_text
from tccl_py.nccl.system import PathType
from tccl_py.nccl.versions import version_facts, why_no_plugin

if TYPE_CHECKING:
    import networkx as nx

    from tccl_py.model.measurement import BandwidthSource

FORMAT_VERSION = 2
_SHOWN_GPUS = 16
AS_GOOD = 0.01
"""A choice this much slower than the best (relative) is as good."""
PROOF = 0.0101
"""A plan counts as proven best if its bound is no farther above it (relative).

It is what a search calls proven, and a little for rounding.
"""
WORLD = -1
"""The source of the hop by which a chain enters a host, and the target of the one that leaves."""
Rate = Annotated[float, msgspec.Meta(gt=0, lt=1e6)]
"""A bandwidth, GB/s."""
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
Gpu = Annotated[int, msgspec.Meta(ge=WORLD, lt=1 << 24)]
"""An index, a rank, or WORLD."""
PathName = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(PathType.__members__)})?$")]


class PlanHop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A hop of a ring: its flow, and the bandwidth with all other flows running, GB/s."""

    source: Gpu
    target: Gpu
    flow: Flow
    gbps: Rate

    @property
    def ends(self) -> tuple[int, int]:
        """The GPU before the hop and the GPU after it, or WORLD."""
        return self.source, self.target


class PlanChain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A ring's hops on a host, closed from the lowest GPU on, or open from NIC to NIC.

    NICs are indices, None in a closed ring. The first hop of an open chain enters the host, from
    WORLD; the last hop leaves it, to WORLD.
    """

    hops: tuple[PlanHop, ...]
    entry_nic: Number | None = None
    exit_nic: Number | None = None

    @property
    def gpus(self) -> tuple[int, ...]:
        """GPU indices in ring order."""
        return tuple(hop.source for hop in self.hops if hop.source != WORLD)

    @property
    def bottleneck(self) -> PlanHop:
        """The class with the slowest hop of all, and the hop."""
        return min(self.hops, key=lambda hop: hop.gbps)

    @property
    def rate(self) -> float:
        """The bandwidth of this ring beside the others, GB/s: that of its slowest hop."""
        return self.bottleneck.gbps


class HostPath(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All rings on a host of one class, a chain for each; equal hosts share paths.

    Types are the farthest NCCL paths inside the host and to its NICs, as NCCL's tuner reads them;
    `type_inter` is "" on a single host.
    """

    node_class: Number
    chains: tuple[PlanChain, ...]
    type_intra: PathName
    type_inter: PathName = ""

    @property
    def rate_gbps(self) -> float:
        """The bandwidth of all rings together on this host, GB/s."""
        return len(self.chains) * min(chain.rate for chain in self.chains)


class PlannedHost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A host in ring order: the number of its path, and the first of its ranks."""

    name: str
    path: Number
    first_rank: Number


ChoiceName = Literal["default", "variables", "graph"]
CHOICES: tuple[ChoiceName, ...] = get_args(ChoiceName)
"""Ways to run NCCL, the smallest intervention first."""


class PlanChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to run NCCL over the plan's GPUs.

    `rings` has an order for each channel: GPU indices of a single host; over several hosts ranks,
    in the order of hosts given for default NCCL and variables, in the planned one for graph files.
    `rate_gbps` is the predicted bus bandwidth in GB/s, None where no source can rate it, and
    `error` half its 95 % interval, relative. `achieved_gbps` is the bus bandwidth of real
    collectives, None until jobs ran. `note` says what is special.
    """

    settings: Settings
    rings: tuple[tuple[Gpu, ...], ...]
    rate_gbps: Rate | None
    error: float = 0.0
    achieved_gbps: Rate | None = None
    assumed: bool = False
    note: str = ""

    @property
    def best_known_gbps(self) -> float | None:
        """The achieved bandwidth, or the predicted one where none is known."""
        return self.rate_gbps if self.achieved_gbps is None else self.achieved_gbps


class Alternative(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Other settings that were searched, and the best bandwidth found under them, GB/s."""

    settings: Settings
    rings_in_set: int
    rate_gbps: Rate


class SubsetRings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rings for a communicator over some of the GPUs, under the plan's settings; rate in GB/s.

    `nodes` has the NUMA node of each GPU's bounce buffers; () leaves them where NCCL puts them.
    Without `gains` NCCL's own rings are as fast, and no communicator gets the rings unasked.
    """

    gpus: tuple[Gpu, ...]
    rings: tuple[tuple[Gpu, ...], ...]
    rate_gbps: Rate
    nodes: tuple[Number, ...] = ()
    gains: bool = True


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Rings over the GPUs of one host or several, and NCCL's bandwidth with and without them.

    `cluster` has the hosts in the order given, `hosts` in the planned order, which ranks have to
    follow; `class_gpus` the GPUs that are joined on hosts of each class, and `paths` the rings'
    hops. `stock` is default NCCL, `variables` the best by environment variables alone, and the rest
    is about graph files; `recommended` names the smallest of the three that is as good as the best.

    Channels take the rings in turn. `rate_gbps` is the predicted bus bandwidth of a collective,
    `error` half its 95 % interval (relative), `achieved_gbps` the bandwidth of real collectives. No
    ring set searched exceeds `bound_gbps` under these settings. `limit_gbps` is the rate of bare
    concurrent copies over the hops of the recommended choice, and `whole_ring_gbps` that of all
    rings measured at once over all hosts; None is not measured. `pinned_env` are NCCL variables
    that all jobs have, with the plan or without. `simulated` and `assumed` say what the rates rest
    on. `winner` is the choice that jobs found best.
    """

    format_version: int = FORMAT_VERSION
    cluster: Cluster
    class_gpus: tuple[tuple[Gpu, ...], ...]
    hosts: tuple[PlannedHost, ...]
    paths: tuple[HostPath, ...]
    settings: Settings
    settings_verified: bool
    rate_gbps: Rate
    error: float = 0.0
    achieved_gbps: Rate | None = None
    bound_gbps: Rate | None
    proven: bool
    limit_gbps: Rate | None = None
    whole_ring_gbps: Rate | None = None
    simulated: bool
    assumed: bool
    strategy: str
    sets_measured: Number
    sets_remembered: Number
    sets_by_symmetry: Number
    stock: PlanChoice
    variables: PlanChoice
    alternatives: tuple[Alternative, ...] = ()
    subsets: tuple[SubsetRings, ...] = ()
    notices: tuple[str, ...] = ()
    pinned_env: dict[str, str] = {}
    cancelled: bool = False
    winner: ChoiceName | None = None

    def __repr__(self) -> str:
        """Describe the plan in three lines."""
        where = f"{len(self.hosts)} hosts with {self.cluster.ranks} GPUs"
        if not self.is_cluster:
            where = f"{self.machine.name}, GPUs {','.join(map(str, self.gpus))}"
        name, slowest = self.bottleneck
        order = " ".join(map(str, self.orders[0][:_SHOWN_GPUS]))
        more = " ..." if len(self.orders[0]) > _SHOWN_GPUS else ""
        count = f"{self.ring_count} rings, the first" if self.ring_count > 1 else "ring"
        return (
            f"Plan for {where}: {self.provenance}\n{self.advice}\n"
            f"{count} {order}{more}: {self.rate_gbps:.2f} GB/s, slowest {slowest.flow} on {name}"
        )

    def write(self, directory: Path | str) -> None:
        """Write all files of a machine's plan into a new directory.

        Raises InputError: a plan of several hosts, or the directory is not new.
        """
        from tccl_py.plan.directory import write_new_plan  # noqa: PLC0415

        self.check_single("plan", "write it by tccl_py.write_plan, with the tables of its hosts")
        write_new_plan(self, Path(directory))

    def what_if(self, order: Sequence[int], source: BandwidthSource) -> float:
        """Return the bandwidth of another ring order; see `tccl_py.plan.study.what_if`."""
        from tccl_py.plan.study import what_if  # noqa: PLC0415

        return what_if(self, order, source)

    def to_dict(self) -> list[dict[str, Any]]:
        """Return a row for each hop; see `tccl_py.plan.study.rows`."""
        from tccl_py.plan.study import rows  # noqa: PLC0415

        return rows(self)

    def to_networkx(self) -> nx.MultiDiGraph:
        """Return the rings as a graph; see `tccl_py.plan.study.graph`."""
        from tccl_py.plan.study import graph  # noqa: PLC0415

        return graph(self)

    @property
    def is_cluster(self) -> bool:
        """Return whether the plan is for several hosts."""
        return len(self.cluster.hosts) > 1

    def check_single(self, where: Path | str, right: str) -> None:
        """Refuse a plan of several hosts; `right` is the remedy.

        Raises InputError: a plan of several hosts.
        """
        if self.is_cluster:
            raise InputError(str(where), "is the plan of a cluster", right)

    @property
    def machine(self) -> Machine:
        """The single host's machine."""
        return self._single_class.machine

    @property
    def knowledge(self) -> Knowledge:
        """The knowledge of the single host's machine."""
        return self._single_class.knowledge

    @property
    def _single_class(self) -> NodeClass:
        self.check_single("plan", "name one of its classes")
        return self.cluster.classes[0]

    @property
    def gpus(self) -> tuple[int, ...]:
        """The GPUs of the single host."""
        self.check_single("plan", "name one of its classes")
        return self.class_gpus[0]

    @property
    def rings(self) -> tuple[PlanChain, ...]:
        """The rings of the single host."""
        self.check_single("plan", "name one of its paths")
        return self.paths[0].chains

    @property
    def ring_count(self) -> int:
        """The number of different rings; channels take them in turn."""
        return len(self.paths[0].chains)

    @property
    def host_order(self) -> tuple[str, ...]:
        """The hosts in the order in which ranks have to be."""
        return tuple(host.name for host in self.hosts)

    @property
    def order_changed(self) -> bool:
        """Return whether the planned order differs from the given order."""
        return self.host_order != self.cluster.names

    def class_number(self, host: PlannedHost) -> int:
        """Return the number of a host's class."""
        return self.paths[host.path].node_class

    def host_named(self, names: Iterable[str]) -> str | None:
        """Return the first of these names that is one of several hosts'; None if none is."""
        known = self.cluster.host_classes if self.is_cluster else ()
        return next((name for name in names if name in known), None)

    def gpus_of(self, host: PlannedHost) -> tuple[int, ...]:
        """Return the GPUs of a host, one for each of its ranks."""
        return self.class_gpus[self.class_number(host)]

    @cached_property
    def orders(self) -> tuple[tuple[int, ...], ...]:
        """The order of each ring: GPU indices of a single host, ranks over several hosts."""
        if not self.is_cluster:
            return tuple(ring.gpus for ring in self.rings)
        rank_of = [{gpu: at for at, gpu in enumerate(gpus)} for gpus in self.class_gpus]
        return tuple(
            tuple(
                host.first_rank + rank_of[self.class_number(host)][gpu]
                for host in self.hosts
                for gpu in self.paths[host.path].chains[number].gpus
            )
            for number in range(self.ring_count)
        )

    @property
    def channel_rings(self) -> tuple[tuple[int, ...], ...]:
        """The same for each channel of the graph files."""
        return per_channel(self.orders, self.settings.channels)

    @property
    def off_rails(self) -> bool:
        """Return whether a ring crosses from a NIC to another NIC of the next host."""
        around = [self.paths[host.path].chains for host in (*self.hosts, self.hosts[0])]
        return any(
            out.exit_nic != into.entry_nic
            for chains, following in pairwise(around)
            for out, into in zip(chains, following, strict=True)
        )

    @property
    def bottleneck(self) -> tuple[str, PlanHop]:
        """The slowest hop of all, and the class that it is in."""
        slowest = [(path.node_class, one.bottleneck) for path in self.paths for one in path.chains]
        number, hop = min(slowest, key=lambda found: found[1].gbps)
        return self.cluster.classes[number].name, hop

    @property
    def provenance(self) -> str:
        """The basis of the rates, as `measured` or `simulated from assumed figures`."""
        if not self.simulated:
            return (
                "measured, the network assumed" if self.assumed and self.is_cluster else "measured"
            )
        return "simulated from assumed figures" if self.assumed else "simulated"

    @property
    def choices(self) -> dict[ChoiceName, PlanChoice]:
        """The three ways to run NCCL, the smallest intervention first."""
        graph = PlanChoice(
            settings=self.settings,
            rings=self.channel_rings,
            rate_gbps=self.rate_gbps,
            error=self.error,
            achieved_gbps=self.achieved_gbps,
            assumed=self.assumed,
        )
        return {"default": self.stock, "variables": self.variables, "graph": graph}

    @property
    def best_known_gbps(self) -> float:
        """The achieved bandwidth of the graph files, or the predicted one where none is known."""
        return self.rate_gbps if self.achieved_gbps is None else self.achieved_gbps

    @property
    def tuned(self) -> bool:
        """Return whether jobs ran: `achieved_gbps` of a choice is known."""
        return any(choice.achieved_gbps is not None for choice in self.choices.values())

    @property
    def recommended(self) -> ChoiceName:
        """The winner of jobs, or the smallest choice as good as the best; see `as_good`."""
        return self.winner or as_good(self._rates)

    @property
    def _rates(self) -> dict[ChoiceName, tuple[float, float]]:
        """The bandwidth of each choice and its relative error: all achieved, or all predicted."""
        return {
            name: (choice.achieved_gbps or 0.0, 0.0)
            if self.tuned
            else (choice.rate_gbps or 0.0, choice.error)
            for name, choice in self.choices.items()
        }

    @property
    def job_settings(self) -> Settings:
        """The settings of the recommended choice."""
        return self.choices[self.recommended].settings

    @property
    def needs_plugin(self) -> bool:
        """Whether the recommended choice needs the NCCL plugin, or else `tccl run`."""
        return self.job_settings.shm_placement

    @property
    def names_graph(self) -> bool:
        """Whether jobs get the graph file by their environment."""
        return self.recommended == "graph" and not self.needs_plugin

    @property
    def plain_settings(self) -> Settings:
        """The settings of jobs without the plugin and without a graph file."""
        return self.variables.settings if self.needs_plugin else self.job_settings

    @property
    def advice(self) -> str:
        """The recommendation, in a sentence or two."""
        name, gain = self.recommended, self.gain(self.recommended)
        times = "" if gain is None else f": {gain:.2f}x default NCCL ({self.expected})"
        variables = environment_text(self.job_settings)
        file = "graph files" if self.is_cluster else "graph file"
        offered = self.gain("variables") if self.winner == name == "default" else None
        if offered is not None and offered > 1 + AS_GOOD and self.variables.note:
            variables = environment_text(self.variables.settings)
            return (
                f"Leave NCCL as it is, or set {variables} where large messages decide: "
                f"{offered:.2f}x default NCCL ({self.expected}), but {self.variables.note}."
            )
        if name == "default":
            return f"Leave NCCL as it is. No variable or {file} is clearly faster."
        if name == "variables":
            return f"Set {variables}{times}. No {file} is needed."
        if self.needs_plugin:
            by = "Load the NCCL plugin"
            if why_no_plugin(self.settings.version):
                by = "Start each rank by `tccl run`"
            return f"{by}, which places bounce buffers on NUMA nodes{times}."
        if not variables:
            return f"Use the {file}{times}."
        return f"Use the {file} and set {variables}{times}."

    @property
    def expected(self) -> str:
        """The basis of `gain`."""
        if self.tuned:
            return "achieved by jobs"
        return self.provenance if self.simulated else "predicted from measurements"

    def gain(self, name: ChoiceName) -> float | None:
        """Return the ratio of a choice to default NCCL, of achieved bandwidths if jobs ran.

        None where one of the two is not known.
        """
        rate, default = self._rates[name][0], self._rates["default"][0]
        return None if not rate or not default else rate / default

    @property
    def limit_text(self) -> str:
        """The meaning of the limit, and the recommended choice's share of it; "" if not known."""
        rate = self._rates[self.recommended][0]
        if not rate or not self.limit_gbps:
            return ""
        if rate > self.limit_gbps * (1 + AS_GOOD):
            return "bare copies over the same hops, no faster than the plan"
        share = min(1.0, rate / self.limit_gbps)
        return f"bare copies over the same hops; the plan gets {share:.0%} of it"

    @property
    def proof(self) -> str:
        """Whether the plan is proven best, and among which rings."""
        if not self.proven:
            return "not proven best"
        among = "single rings" if self.ring_count == 1 else f"sets of {self.ring_count} rings"
        return f"proven best within 1 % among {among} under these settings"

    def subset(self, gpus: Iterable[int]) -> SubsetRings | None:
        """Return the rings planned for exactly these GPUs of a single host, or None."""
        wanted = tuple(sorted(gpus))
        if wanted == self.gpus:
            nodes = sender_nodes(self.machine, self.rings) if self.settings.shm_placement else ()
            return SubsetRings(
                gpus=wanted, rings=self.orders, rate_gbps=self.rate_gbps, nodes=nodes
            )
        return next((one for one in self.subsets if one.gpus == wanted), None)

    def save(self, path: Path | str) -> None:
        """Write the plan as JSON, whole or not at all.

        Raises InputError: the place cannot be written.
        """
        write_atomically(Path(path), encode_json(self))


def plan_chain(hops: Sequence[Hop], rates: Sequence[float]) -> PlanChain:
    """Return a ring, or a chain between NICs, of hops with these rates."""
    planned = tuple(
        PlanHop(source=hop.source, target=hop.target, flow=hop.flow, gbps=rate)
        for hop, rate in zip(hops, rates, strict=True)
    )
    into, out = receiving_nic(hops[0].flow), sending_nic(hops[-1].flow)
    return PlanChain(hops=planned, entry_nic=into, exit_nic=out)


def as_good(rates: dict[ChoiceName, tuple[float, float]]) -> ChoiceName:
    """Return the first choice within AS_GOOD of the best, or within its error if that is wider.

    >>> as_good({"default": (99.5, 0.0), "variables": (100.0, 0.0), "graph": (100.0, 0.0)})
    'default'
    """
    best = max(rate for rate, _ in rates.values())
    return next(
        name for name, (rate, error) in rates.items() if rate * (1 + max(AS_GOOD, error)) >= best
    )


def preferred(rate: float, than: float, *, less: bool) -> bool:
    """Return whether a rate is clearly higher, or as high with fewer rings or channels (`less`)."""
    return rate > than * (1 + AS_GOOD) or (less and rate >= than * (1 - AS_GOOD / 2))


def is_proven(rate_gbps: float, bound_gbps: float | None) -> bool:
    """Return whether a bound shows that no rings are clearly faster; None shows nothing."""
    return bound_gbps is not None and bound_gbps <= rate_gbps * (1 + PROOF)


def version_notices(version: str) -> tuple[str, ...]:
    """Return a notice where the rules of another version of NCCL stand for this version's."""
    facts = version_facts(version)
    known = f"NCCL {version} is taken for {facts.name}, the nearest version that was checked"
    return () if facts.verified else (known,)


def sender_nodes(machine: Machine, rings: Iterable[Ring | PlanChain]) -> tuple[int, ...]:
    """Return the NUMA node through which each GPU's bounces go, by GPU; its own without a bounce.

    >>> from tccl_py.model.rings import Hop, Ring
    >>> from tccl_py.model.transfer import bounce
    >>> from tccl_py.simulator.descriptions import load_bundled
    >>> ring = Ring((Hop(0, 1, bounce(0, 1, 2)), Hop(1, 0, bounce(1, 0, 0))))
    >>> sender_nodes(load_bundled("amd-3090").machine, [ring])
    (2, 0)
    """
    nodes: dict[int, int] = {}
    for hop in (hop for ring in rings for hop in ring.hops):
        through = hop.flow.through
        if through is not None or hop.source not in nodes:
            own = machine.numa_of(f"G{hop.source}")
            nodes[hop.source] = own if through is None else through
    return tuple(node for _, node in sorted(nodes.items()))


def single_host(machine: Machine, knowledge: Knowledge, gpus: Iterable[int]) -> Cluster:
    """Return a machine as a cluster of one host, named after it, with a rank for each GPU."""
    name = class_name(machine.name)
    host = Host(name=name, node_class=0, slots=len(tuple(gpus)))
    known = NodeClass(name=name, machine=machine, knowledge=knowledge)
    return check_cluster(Cluster(hosts=(host,), classes=(known,)), where="cluster")


def per_channel(rings: Iterable[tuple[int, ...]], channels: int) -> tuple[tuple[int, ...], ...]:
    """Deal rings out to channels in turn.

    >>> per_channel([(0, 1), (1, 0)], 4)
    ((0, 1), (1, 0), (0, 1), (1, 0))
    """
    orders = list(rings)
    return tuple(orders[channel % len(orders)] for channel in range(channels))
