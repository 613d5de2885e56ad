"""The plan of a cluster: rings over all hosts, the order of hosts, and what each host does."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec

from tccl_py.cluster_plan.checks import check_cluster_plan
from tccl_py.errors import InputError
from tccl_py.files import decode_json, encode_json, read_text, write_atomically
from tccl_py.model.cluster import Cluster
from tccl_py.nccl.settings import Settings
from tccl_py.plan.plan import plan_file
from tccl_py.plan.staging import PLAN_FILE, settle

FORMAT_VERSION = 1


class PlanChain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ring's way through a node: NICs by index, GPUs in order, and the rate of each flow, GB/s.

    The first flow enters the node, the last one leaves it.
    """

    entry_nic: int
    gpus: tuple[int, ...]
    exit_nic: int
    flows: tuple[str, ...]
    gbps: tuple[float, ...]

    @property
    def bottleneck(self) -> tuple[str, float]:
        """The slowest flow and its rate."""
        return min(zip(self.flows, self.gbps, strict=True), key=lambda one: one[1])


class PlanPassage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How all rings go through a node of a class, a chain for each; hosts share passages.

    Types are the farthest paths inside the node and to its NICs, as NCCL's tuner wants to know.
    """

    node_class: int
    chains: tuple[PlanChain, ...]
    rate_gbps: float
    type_intra: str
    type_inter: str

    @property
    def changes_nics(self) -> bool:
        """Whether a ring leaves by another NIC than it came in by."""
        return any(chain.entry_nic != chain.exit_nic for chain in self.chains)


class PlannedHost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A host in ring order: its class, its passage, and the first of its ranks."""

    name: str
    passage: int
    first_rank: int


class ClusterStock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What NCCL does by itself, hosts in the order given: its rate from the same sources.

    `channels` is how many different chains it has in each class, by class.
    """

    rate_gbps: float
    channels: tuple[int, ...]
    assumed: bool
    note: str = ""


class ClusterPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Rings for a cluster. Rates are GB/s of all rings together, as a collective's bus bandwidth.

    `cluster` has the hosts in the order in which they were given; `hosts` in the order planned,
    which ranks have to follow. `whole_ring_gbps` is what all rings carried when they were measured
    at once, None if they were not. `kept` are NCCL variables, by name, that all jobs have, with the
    plan or without. Rates of a `tuned` plan, stock's too, are what a job of each achieved.
    """

    kind: Literal["cluster"] = "cluster"
    format_version: int = FORMAT_VERSION
    cluster: Cluster
    gpus: tuple[tuple[int, ...], ...]
    hosts: tuple[PlannedHost, ...]
    passages: tuple[PlanPassage, ...]
    settings: Settings
    settings_verified: bool
    rate_gbps: float
    bound_gbps: float | None
    proven: bool
    whole_ring_gbps: float | None = None
    simulated: bool
    assumed: bool
    strategy: str
    sets_measured: int
    sets_remembered: int
    sets_by_symmetry: int
    stock: ClusterStock
    notices: tuple[str, ...] = ()
    kept: dict[str, str] = {}
    cancelled: bool = False
    tuned: bool = False

    @property
    def job_settings(self) -> Settings:
        """The settings of jobs, as a machine's plan has them."""
        return self.settings

    @property
    def provenance(self) -> str:
        """What the rates rest on, as `measured` or `simulated from assumed figures`."""
        if not self.simulated:
            return "measured, the network assumed" if self.assumed else "measured"
        return "simulated from assumed figures" if self.assumed else "simulated"

    @property
    def ring_count(self) -> int:
        """How many different rings there are; channels take them in turn."""
        return len(self.passages[0].chains)

    @property
    def host_order(self) -> tuple[str, ...]:
        """The hosts in the order in which ranks have to be."""
        return tuple(host.name for host in self.hosts)

    @property
    def order_changed(self) -> bool:
        """Whether that is another order than the one they were given in."""
        return self.host_order != self.cluster.names

    @cached_property
    def rings(self) -> tuple[tuple[int, ...], ...]:
        """Global ranks in ring order, for each of the different rings."""
        rank_of = [{gpu: at for at, gpu in enumerate(gpus)} for gpus in self.gpus]
        return tuple(
            tuple(
                host.first_rank + rank_of[self.passages[host.passage].node_class][gpu]
                for host in self.hosts
                for gpu in self.passages[host.passage].chains[number].gpus
            )
            for number in range(self.ring_count)
        )

    @property
    def channel_rings(self) -> tuple[tuple[int, ...], ...]:
        """Global ranks in ring order, one ring for each channel of the graph files."""
        rings = self.rings
        return tuple(rings[number % len(rings)] for number in range(self.settings.channels))

    @property
    def off_rails(self) -> bool:
        """Whether a ring crosses from a NIC to another NIC of the next node."""
        for host, following in zip(self.hosts, (*self.hosts[1:], self.hosts[0]), strict=True):
            one, other = self.passages[host.passage], self.passages[following.passage]
            for out, into in zip(one.chains, other.chains, strict=True):
                if out.exit_nic != into.entry_nic:
                    return True
        return False

    @property
    def bottleneck(self) -> tuple[str, str, float]:
        """The slowest flow of all: the class it is in, the flow, and its rate."""
        slowest = [
            (*chain.bottleneck, self.cluster.classes[passage.node_class].name)
            for passage in self.passages
            for chain in passage.chains
        ]
        flow, gbps, name = min(slowest, key=lambda one: one[1])
        return name, flow, gbps

    def save(self, path: Path | str) -> None:
        """Write the plan as JSON, whole or not at all.

        Raises:
            InputError: the place cannot be written.
        """
        write_atomically(Path(path), encode_json(self))


def load_cluster_plan(path: Path | str) -> ClusterPlan:
    """Read a cluster's plan file, or `plan.json` in a directory.

    Raises:
        InputError: unreadable, of one machine, of another format version, damaged, or parts that do
            not fit together.
    """
    path = plan_file(Path(path))
    if not is_cluster_plan(path):
        raise InputError(str(path), "is no plan of a cluster", "name one that was made for several")
    text = read_text(path)
    version = decode_json(text, _Head, where=str(path), name="Plan").format_version
    if version != FORMAT_VERSION:
        what = f"has format version {version}"
        raise InputError(str(path), what, f"this program reads version {FORMAT_VERSION}")
    return check_cluster_plan(decode_json(text, ClusterPlan, where=str(path)), where=str(path))


def is_cluster_plan(path: Path | str) -> bool:
    """Whether a plan file, or the one in a directory, is of a cluster; False too if there is none.

    Raises:
        InputError: it is there and cannot be read, or is no JSON.
    """
    path = Path(path)
    if path.is_dir():
        settle(path)
        path /= PLAN_FILE
    if not path.is_file():
        return False
    return decode_json(read_text(path), _Head, where=str(path), name="Plan").kind == "cluster"


class _Head(msgspec.Struct):
    """The part of a plan file that all kinds and versions have."""

    format_version: int = 0
    kind: str = "machine"
