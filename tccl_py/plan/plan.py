"""The Plan: rings over one host or several, their settings, and their bandwidth.

Rings close inside a single host; over several a ring is an open chain on each, from NIC to NIC.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tccl_py.errors import check_type, require
from tccl_py.files import encode_json, write_named
from tccl_py.model.cluster import Cluster, NodeClass
from tccl_py.model.machine import Knowledge, Machine
from tccl_py.model.measurement import IN_DRY_RUN, mark
from tccl_py.nccl.settings import Settings
from tccl_py.plan.chains import (
    BY_VARIABLES,
    CUT_SHORT,
    Choice,
    ChoiceName,
    Gpu,
    HostPath,
    Number,
    PlanChain,
    PlanHop,
    PlannedHost,
    Rate,
    SizeAnswer,
    SubsetRings,
    as_good,
    is_at_bound,
    per_channel,
    ring_over_hosts,
    sender_nodes,
    slowest_first,
)

FORMAT_VERSION = 3
P = TypeVar("P", bound="Plan")


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Rings over the GPUs of one host or several, and NCCL's bandwidth with and without them."""

    format_version: int = FORMAT_VERSION
    cluster: Cluster
    """The hosts in the order given, and their classes."""
    class_gpus: tuple[tuple[Gpu, ...], ...]
    """The GPUs that are joined on hosts of each class."""
    class_nics: tuple[tuple[str, ...], ...] = ()
    """The names of the NICs for NCCL on hosts of each class, where one list for all hosts would
    name others too; () where it suits all."""
    hosts: tuple[PlannedHost, ...]
    """The hosts in the planned order, which ranks have to follow."""
    paths: tuple[HostPath, ...]
    """The hops of the rings, which channels of the graph files take in turn."""
    choices: dict[ChoiceName, Choice]
    """The ways to run NCCL by name, the smallest intervention first.

    `large-buffers` is there if `variables` cut the chunks of send/recv: the best variables that do
    not.
    """
    settings_verified: bool
    file_gbps: Rate | msgspec.UnsetType = msgspec.UNSET
    """The rate in the graph files of several hosts, where jobs ran with another than the best
    known: NCCL's channels follow from it."""
    bound_gbps: Rate | None
    """No ring set searched under the settings of the graph files exceeds it."""
    proven: bool
    """Whether the rings reach the bound, which rests on no assumption."""
    bound_assumptions: tuple[str, ...] = ()
    """What the bound assumes, and was not checked for all sets."""
    limit_gbps: Rate | None = None
    """The rate of bare concurrent copies over the hops of the choice predicted to be fastest."""
    whole_ring_gbps: Rate | None = None
    """The rate of all rings measured at once over all hosts."""
    simulated: bool
    dry_run: bool = False
    """Whether transfers or jobs ran in host memory."""
    strategy: str
    sets_measured: Number
    sets_remembered: Number
    sets_by_symmetry: Number
    alternatives: tuple[Choice, ...] = ()
    """Graph files under other settings that were searched, with a ring of each kind."""
    subsets: tuple[SubsetRings, ...] = ()
    notices: tuple[str, ...] = ()
    pinned_env: dict[str, str] = {}
    """NCCL variables that all jobs have, with the plan or without."""
    sizes: dict[ChoiceName, SizeAnswer] = {}
    """NCCL's own answers, where it was asked, on default NCCL and the recommended choice."""
    cancelled: bool = False
    winner: ChoiceName | None = None
    """The choice that jobs found best, or what is recommended before jobs have run."""

    def with_choice(self: P, name: ChoiceName, **changes: Any) -> P:
        """Return the plan with changes of a choice; rings of graph files follow its settings."""
        if name == "graph" and "settings" in changes:
            changes["rings"] = per_channel(self.orders, changes["settings"].channels)
        choice = msgspec.structs.replace(self.choices[name], **changes)
        return msgspec.structs.replace(self, choices={**self.choices, name: choice})

    @property
    def settings(self) -> Settings:
        """The settings of the graph files."""
        return self.choices["graph"].settings

    @property
    def rate_gbps(self) -> float:
        """The predicted bandwidth of the rings, whether or not jobs with graph files run."""
        rate = self.choices["graph"].predicted_gbps
        assert rate is not None  # plan/load.py checks it
        return rate

    @property
    def assumed(self) -> bool:
        """Whether assumed values lie behind the rate of the rings."""
        return self.choices["graph"].assumed

    @property
    def machine(self) -> Machine:
        """The machine of all hosts."""
        return self._only_class.machine

    @property
    def knowledge(self) -> Knowledge:
        """The knowledge of the machine of all hosts."""
        return self._only_class.knowledge

    @property
    def gpus(self) -> tuple[int, ...]:
        """The GPUs that are joined on each host."""
        return self.class_gpus[self.cluster.classes.index(self._only_class)]

    @property
    def _only_class(self) -> NodeClass:
        classes = self.cluster.classes
        require(
            len(classes) == 1, "plan", f"has {len(classes)} classes of hosts", "name one of them"
        )
        return classes[0]

    @cached_property
    def rings(self) -> tuple[PlanChain, ...]:
        """The rings: of a single host, or closed over all hosts, with ranks in the GPUs' place."""
        hosts = [(*self.in_rings(host), self.paths[host.path].chains) for host in self.hosts]
        return tuple(
            ring_over_hosts([(name, numbers, chains[at]) for name, numbers, chains in hosts])
            for at in range(self.ring_count)
        )

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

    def gpus_of(self, host: PlannedHost) -> tuple[int, ...]:
        """Return the GPUs of a host, one for each of its ranks."""
        return self.class_gpus[self.class_number(host)]

    def settings_on(self, number: int, settings: Settings) -> Settings:
        """Return settings as hosts of a class have them: with the names of their own NICs."""
        names = self.class_nics[number] if self.class_nics else ()
        field = "ib_hca" if settings.ib_hca else "socket_ifname"
        own = names if getattr(settings, field) else ()
        return msgspec.structs.replace(settings, **{field: own}) if own else settings

    def shared_settings(self, settings: Settings) -> Settings:
        """Return settings without the names of NICs, where no list suits all hosts."""
        if not self.class_nics:
            return settings
        return msgspec.structs.replace(settings, ib_hca=(), socket_ifname=())

    @property
    def as_shown(self: P) -> P:
        """The plan for people, whose choices have what all hosts share."""
        for name, way in self.choices.items() if self.class_nics else ():
            self = self.with_choice(name, settings=self.shared_settings(way.settings))  # noqa: PLW0642
        return self

    def in_rings(self, host: PlannedHost) -> tuple[str, dict[int, int]]:
        """Return what rings call a host and its GPUs: "" and indices on a single host, or ranks."""
        gpus = self.gpus_of(host)
        if self.cluster.closes:
            return "", dict(zip(gpus, gpus, strict=True))
        return host.name, dict(zip(gpus, count(host.first_rank), strict=False))

    @cached_property
    def orders(self) -> tuple[tuple[int, ...], ...]:
        """The order of each ring: GPU indices of a single host, ranks over several hosts."""
        hosts = [(*self.in_rings(host), self.paths[host.path].chains) for host in self.hosts]
        return tuple(
            tuple(numbers[gpu] for _, numbers, chains in hosts for gpu in chains[at].gpus)
            for at in range(self.ring_count)
        )

    @property
    def channel_rings(self) -> tuple[tuple[int, ...], ...]:
        """The same for each channel of the graph files."""
        return per_channel(self.orders, self.settings.channels)

    @property
    def bottleneck(self) -> tuple[str, PlanHop]:
        """The slowest hop of all, and the class that it is in."""
        slowest = [(path.node_class, c.bottleneck) for path in self.paths for c in path.chains]
        number, hop = min(slowest, key=lambda pair: slowest_first(pair[1].rate_gbps, pair[1].flow))
        return self.cluster.classes[number].name, hop

    @property
    def provenance(self) -> str:
        """The basis of the recommended choice's rate; see `provenance_of`."""
        return self.provenance_of(self.recommended)

    def provenance_of(self, name: ChoiceName) -> str:
        """Return the basis of a choice's rate, as `measured` or `simulated from assumed values`.

        Without a rate it is that of the graph file.
        """
        choice = self.choices[name]
        assumed = self.assumed if choice.rate_gbps is None else choice.assumed
        basis = mark(simulated=self.simulated, assumed=assumed, dry_run=self.dry_run)
        # Of measured rates only those of a network are assumed.
        return f"{basis}, the network assumed" if assumed and not self.simulated else basis

    @property
    def any_assumed(self) -> bool:
        """Whether assumed values lie behind the rate of any choice; `assumed` is of graph files."""
        return any(choice.assumed for choice in self.choices.values())

    @property
    def best_known_gbps(self) -> float:
        """The achieved bandwidth of the graph files, or the predicted one where none is known."""
        return self.choices["graph"].achieved_gbps or self.rate_gbps

    @property
    def jobs_ran(self) -> bool:
        """Return whether jobs ran: `achieved_gbps` of a choice is known."""
        return any(choice.achieved_gbps is not None for choice in self.choices.values())

    @property
    def recommended(self) -> ChoiceName:
        """The winner of jobs, or the smallest choice as good as the best; see `as_good`.

        A choice that runs is better than any that fails.
        """
        running = {name: self.rates[name] for name in self.running}
        name = self.winner or as_good(running or self.rates)
        return self.control if name == "default" or name not in running else name

    @property
    def is_by_variables(self) -> bool:
        """Whether variables alone are recommended."""
        return self.recommended in BY_VARIABLES

    @property
    def control(self) -> ChoiceName:
        """The smallest choice that runs, as far as is known, with whose jobs others are compared.

        It is default NCCL unless that fails, or makes connections only with variables.
        """
        default, variables = self.choices["default"], self.choices["variables"]
        if self.cluster.cables and default.rate_gbps is None and not variables.fails:
            return "variables"
        return next(iter(self.running), "default")

    @property
    def running(self) -> list[ChoiceName]:
        """Choices that run; one without a rate may not, where some links may not be used."""
        doubtful = any(host.knowledge.links for host in self.cluster.classes)
        ways = self.choices.items()
        return [n for n, way in ways if not (way.fails or (doubtful and way.rate_gbps is None))]

    @property
    def rates(self) -> dict[ChoiceName, tuple[float, float]]:
        """The bandwidth of each choice and its relative error: all achieved, or all predicted."""
        if self.jobs_ran:
            return {name: (way.achieved_gbps or 0.0, 0.0) for name, way in self.choices.items()}
        return {name: (way.rate_gbps or 0.0, way.error) for name, way in self.choices.items()}

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
    def plain_choice(self) -> Choice:
        """The choice of jobs without the plugin and without a graph file."""
        return self.choices["variables" if self.needs_plugin else self.recommended]

    @property
    def cut_short(self) -> bool:
        """Whether a limit of sets or seconds ended the search."""
        return CUT_SHORT in self.notices

    @property
    def at_bound(self) -> bool:
        """Whether no rings are clearly faster, as far as the bound holds."""
        return is_at_bound(self.rate_gbps, self.bound_gbps)

    def basis_of_gain(self, name: ChoiceName) -> str:
        """Return the basis of a choice's `gain`: of default NCCL's rate as well."""
        if self.jobs_ran:
            return "achieved by jobs" + IN_DRY_RUN * self.dry_run
        if not (self.simulated or self.dry_run):
            return "predicted from measurements"
        return self.provenance_of("default" if self.choices["default"].assumed else name)

    def gain(self, name: ChoiceName) -> float | None:
        """Return the ratio of a choice to default NCCL, of achieved bandwidths if jobs ran.

        None where one of the two is not known.
        """
        rate, default = self.rates[name][0], self.rates["default"][0]
        return None if not rate or not default else rate / default

    @cached_property
    def parts(self) -> dict[tuple[int, ...], SubsetRings]:
        """The answers for all GPUs (ranks over several hosts) and for sets of them, by set."""
        nodes = sender_nodes(self.machine, self.rings) if self.settings.shm_placement else ()
        gpus = tuple(sorted(self.orders[0]))
        full = SubsetRings(gpus=gpus, rings=self.orders, rate_gbps=self.rate_gbps, nodes=nodes)
        return {part.gpus: part for part in (full, *self.subsets)}

    def subset(self, gpus: Iterable[int]) -> SubsetRings | None:
        """Return the rings planned for exactly these GPUs (ranks over several hosts), or None."""
        check_type(gpus, "gpus", Iterable)
        part = self.parts.get(tuple(sorted(gpus)))
        return part if part is not None and part.rings else None

    def save(self, path: Path | str) -> None:
        """Write the plan as JSON, whole or not at all.

        Raises InputError: the place cannot be written.
        """
        check_type(path, "path", str, Path)
        write_named(Path(path), encode_json(self))
