"""What a plan is asked for, as one value."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import permutations
from math import factorial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec.structs import replace

from tccl_py.errors import InputError, MeasurementError, SearchError, check_type, require, spell
from tccl_py.files import check_value
from tccl_py.model.cluster import Cluster, NodeClass, parse_gpus
from tccl_py.model.links import LinkFact
from tccl_py.model.machine import Knowledge, Machine
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.rings import Hop, HopSpace, Ring, RingSet, ring_like, ring_set
from tccl_py.model.symmetry import Symmetry, automorphisms, natural_cuts
from tccl_py.nccl.graph_search import DefaultRings, default_rings
from tccl_py.nccl.settings import (
    PINNABLE,
    Settings,
    check_pinnable,
    check_settings,
    pinned_level,
    pinned_values,
    settings_from_environment,
    shell_text,
)
from tccl_py.nccl.system import PathType
from tccl_py.nccl.transport import hop_space
from tccl_py.nccl.versions import ASSUMED, plain_version
from tccl_py.nccl.view import NcclView, view
from tccl_py.plan.chains import Order, condense, why_unsound
from tccl_py.search.problem import (
    Budget,
    Reporter,
    SearchProblem,
    SearchResult,
    SetRule,
    check_budget,
)
from tccl_py.search.strategies import Strategy, find_rings, strategy_name
from tccl_py.sources.bench import Bench, bench_for

if TYPE_CHECKING:
    from tccl_py.sources.profiled import MeasurementOptions

EVERY_SET = "all"
"""The list of GPUs for jobs that names all sets."""
MOST_SETS = 2000
DEFAULT_BUDGET = Budget(sets=MOST_SETS, idle_sets=100)


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is planned for, what gives the rates, and how rings are searched; None is not given.

    The fields from `version` on are all that `plan_hosts` reads.
    """

    simulate: str | None = None
    """A model by its name or file; without it rates are measured here, or by the hosts of a job."""
    p2p: bool | None = None
    """Whether the model's GPUs have P2P, if it does not say."""
    cpu: str | None = None
    """The vendor of its CPUs, if it does not say."""
    noise: float | None = None
    """The relative spread of simulated samples."""
    seed: int | None = None
    """The seed of the noise."""
    backend: str | None = None
    """The backend "cuda", or "host" for host memory in the place of GPUs."""
    devices: int | None = None
    """How many devices the host backend has."""
    target: float | None = None
    """The width of rates' 95 % interval, relative, up to which a set is repeated."""
    interfaces: str | None = None
    """The network interfaces that are NICs N0, N1, ..., with commas."""
    nodes: int | None = None
    """How many hosts are simulated."""
    hosts: str | None = None
    """Hosts that are simulated, those of a job, or those that a plan is to have; or their file."""
    switches: Path | None = None
    """A file of switches or cables."""
    gpus: str | None = None
    """GPUs of a single host, as "0-3"."""
    version: str | None = None
    """NCCL's version."""
    pinned_env: Mapping[str, str] = {}
    """NCCL_P2P_DISABLE, NCCL_P2P_LEVEL or NCCL_IB_HCA as all jobs have it, with the plan or
    without: no settings go beyond it, default NCCL's included."""
    ring_counts: tuple[Annotated[int, msgspec.Meta(ge=1)], ...] | None = None
    """How many rings a set may have; None is 1, 2 and, up to 8 GPUs, 4, over hosts one for each NIC
    as well."""
    strategy: str | Strategy = "best-first"
    """Of the search: a name in `STRATEGIES`, or a function with the signature of `find_rings`."""
    budget: Budget = DEFAULT_BUDGET
    """Of the whole plan; over several hosts sets are of each class."""
    subsets: bool | None = None
    """Whether smaller sets of GPUs get rings; None is only where graph files are recommended."""
    keep_order: bool = False
    """Whether hosts stay in the given order."""
    ib_gid_index: int | None = None
    """The address of RoCE ports for NCCL."""
    subnet_prefix: int | None = None
    """The bits of addresses by which NCCL tells cables apart."""
    gpus_per_job: str | None = None
    """Sets of GPUs of a host that tables for jobs are for, as `job_gpus` reads them."""
    prove: bool = False
    """Whether P2P that may do harm is tried as well."""
    reporter: Reporter | None = None
    """Watches the search; KeyboardInterrupt ends it with the best so far."""

    def __post_init__(self) -> None:
        strategy_name(self.strategy)  # Raises InputError
        check_budget(self.budget)
        for field in msgspec.structs.fields(self):
            if field.name not in ("strategy", "budget", "reporter"):
                check_value(getattr(self, field.name), field.type, where=f"`{field.name}`")
        if self.target is not None:
            _ = self.options  # Raises InputError

    @property
    def options(self) -> MeasurementOptions:
        """The options of measurements."""
        from tccl_py.sources.profiled import search_options  # noqa: PLC0415 (of hardware)

        return search_options(self.backend, self.target)

    @property
    def default_settings(self) -> Settings:
        """The settings of default NCCL: its defaults, and what is pinned."""
        version = plain_version(self.version or ASSUMED)
        return settings_from_environment(self.pinned_env, version=version)

    @property
    def names_hosts(self) -> bool:
        """Whether several hosts are simulated or named, where no job has them."""
        return self.nodes not in (None, 1) or self.hosts is not None


def chosen_gpus(machine: Machine, gpus: Sequence[int] | str | None) -> tuple[int, ...]:
    """Return GPUs to plan for in ascending order, given by indices or text; None is all.

    Raises InputError: unknown GPUs, or fewer than two.
    """
    check_type(gpus, "gpus", Iterable, type(None))
    where = f"machine {machine.name}" if gpus is None else "`gpus`"
    gpus = parse_gpus(gpus, where) if isinstance(gpus, str) else gpus
    indices = machine.gpu_indices if gpus is None else tuple(gpus)
    for index in indices:
        check_type(index, "gpus", int)
    chosen = tuple(sorted({machine.gpu(index).index for index in indices}))
    few = f"has {spell(len(chosen), 'GPU')} to plan for"
    require(len(chosen) > 1, where, few, "a ring joins 2 or more")
    return chosen


def gpus_of_classes(cluster: Cluster) -> tuple[Order, ...]:
    """Return the GPUs of each class: the lowest indices, as many as its hosts have ranks.

    Raises InputError: hosts of a class have unequal numbers of ranks.
    """
    slots: dict[int, tuple[str, int]] = {}
    for host in cluster.hosts:
        name, count = slots.setdefault(host.node_class, (host.name, host.slots))
        if host.slots != count:
            raise InputError(
                f"host {host.name}",
                f"has {host.slots} ranks, {name} of the same class has {count}",
                "give hosts with equal machines equal numbers of ranks",
            )
    return tuple(
        node_class.machine.gpu_indices[: slots[number][1]] if number in slots else ()
        for number, node_class in enumerate(cluster.classes)
    )


def pinned_here(names: Sequence[str]) -> dict[str, str]:
    """Return the variables of these names as they are set here, and as NCCL reads them."""
    for name in names:
        check_pinnable(name, where="`pin_env`")
        if name not in os.environ:
            right = f"set it as all jobs have it, as in `{name}=... tccl plan`"
            raise InputError(f"`pin_env` {name}", "is not set here", right)
    return pinned_values({name: os.environ[name] for name in names}, where="`pin_env`")


def not_pinned(names: Collection[str]) -> tuple[str, ...]:
    """Return notices on variables that are set here, and are not among the pinned `names`."""
    return tuple(
        f"{name}={os.environ[name][:20]} is set here and is not planned for: if all jobs have it, "
        f"pin it by `tccl plan --pin-env {name}`"
        for name in PINNABLE
        if name not in names and pinned_level({name: os.environ.get(name, "")}) is not None
    )


Rings = Sequence[Ring] | Sequence[Order]
"""Orders of GPUs, or rings that were found under other settings: their GPUs and NICs count."""

OwnRings = Callable[[Sequence[Settings]], Sequence[DefaultRings]]
"""Returns NCCL's own rings under each of several settings."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The search for rings on a class of hosts."""

    host: NodeClass
    source: Bench
    gpus: tuple[int, ...]
    request: PlanRequest = PlanRequest()
    ring_counts: tuple[int, ...] = (1,)
    """How many rings a set may have."""
    fewest_first: bool = False
    """Whether more rings than the fewest are searched only where these may be faster; see
    `orders_alike`."""
    budget: Budget = Budget()
    """Of each search."""
    nics: tuple[int, ...] = ()
    """The NICs of chains over several hosts."""
    own_rings: OwnRings | None = None
    """Returns NCCL's own rings under each of several settings; None computes them by its rules."""
    nodes: Mapping[int, int] = {}
    """The NUMA node of each GPU's bounce buffers, where these are known."""
    spaces: dict[tuple[object, ...], HopSpace] = msgspec.field(default_factory=dict)
    """The hop spaces so far."""

    @classmethod
    def of(
        cls: type[T],
        request: PlanRequest,
        host: NodeClass,
        source: BandwidthSource,
        gpus: tuple[int, ...],
        **more: Any,
    ) -> T:
        """Return the task of planning for a class of hosts; half of the budget is for one search.

        Raises InputError: the pinned variables use links that no plan may.
        """
        sets = max(1, (request.budget.sets or MOST_SETS) // 2)
        task = cls(
            host=host,
            request=request,
            # A journal remembers, and must hear of it when a set is wanted once more.
            source=bench_for(source, host.machine.name),
            gpus=gpus,
            budget=replace(request.budget, sets=sets),
            **more,
        )
        pinned = task.default_settings.p2p_level is not None
        if pinned and (facts := task.find_unsound(task.default_settings)):
            fault = f"{shell_text(request.pinned_env)} uses links that no plan may: "
            right = "leave it out, or pin NCCL_P2P_DISABLE=1"
            raise InputError("pinned environment", fault + why_unsound(facts), right)
        return task

    @property
    def default_settings(self) -> Settings:
        """The settings of default NCCL: its defaults, and what is pinned."""
        return self.request.default_settings

    def over(self: T, gpus: tuple[int, ...]) -> T:
        """Return the task of searching some of the GPUs, of which no NCCL is asked."""
        return replace(self, gpus=gpus, own_rings=None)

    def find_unsound(self, settings: Settings) -> tuple[LinkFact, ...]:
        """Return the links that NCCL uses under these settings, and no plan may use."""
        return self.view(settings).unsound

    def view(self, settings: Settings) -> NcclView:
        """Return NCCL's view of the machine under these settings."""
        return view(self.host.machine, self.host.knowledge, settings, gpus=self.gpus)

    def space(self, settings: Settings, count: int) -> HopSpace:
        """Return the hops open to each ring of a set of `count`."""
        key = (settings, count, self.gpus, self.nics)
        if key not in self.spaces:
            self.spaces[key] = self.hops(self.view(settings), count)
        return self.spaces[key]

    def hops(self, host_view: NcclView, count: int) -> HopSpace:
        """Return the hops of a view; a host of several adds those over its NICs."""
        space = hop_space(host_view, rings_in_set=count)
        if not self.nodes:
            return space
        open_to = {gpu: (None, node) for gpu, node in self.nodes.items()}
        return space.only(lambda hop: hop.flow.through in open_to[hop.source])

    def rings_under(self, settings: Settings, rings: Rings) -> RingSet:
        """Return the ring set over the same GPUs and NICs by the mechanisms of these settings.

        Raises SearchError: a pair of neighbours has no hop.
        """
        space = self.space(settings, len(rings))
        return ring_set([ring_like(space, like) for like in rings])

    @property
    def least_channels(self) -> int:
        """Return the channels that a graph file has at least, on a network that is not slow."""
        return 1

    def default_rings(self, settings: Settings) -> DefaultRings:
        """Return NCCL's own choice; only settings of transports change it."""
        plain = of_transports(settings)
        # A job over links that are not sound may hang.
        if self.own_rings is not None and not self.find_unsound(plain):
            return self.own_rings([plain])[0]
        return default_rings(self.view(plain))

    def own_ring_set(self, nccl: DefaultRings, settings: Settings) -> RingSet:
        """Return the rings of NCCL's own choice by the mechanisms of settings.

        Raises SearchError: a pair of neighbours has no hop.
        """
        return self.rings_under(settings, condense(nccl.rings))

    def seeds(self, _settings: Settings, /) -> Sequence[Rings]:
        """Return ring sets to try under settings beside NCCL's own."""
        return ()

    @property
    def symmetry(self) -> Symmetry:
        """The symmetry of the machine as far as it exchanges the GPUs."""
        return automorphisms(self.host.machine, self.host.knowledge, gpus=self.gpus)

    def orders_alike(self, settings: Settings) -> bool:
        """Return whether the machine's description makes all orders of the GPUs equally fast.

        So it is where each pair of GPUs has one mechanism, and they talk through NVSwitches, or the
        machine's symmetry exchanges them all. Then one ring uses each GPU's way in and out as much
        as several rings would. Links that join two GPUs are used by some orders alone.
        """
        machine, names = self.host.machine, {f"G{gpu}" for gpu in self.gpus}
        hops = [hop for choices in self.space(settings, 1).hops.values() for hop in choices]
        bridged = any(
            link.joins_gpus and {link.source, link.target} <= names for link in machine.nvlinks
        )
        if bridged or len(hops) != len(names) * (len(names) - 1):
            return False
        paths = self.view(settings).paths
        if not any(hop.flow.is_bounce for hop in hops) and all(
            paths[pair].type == PathType.NVL for pair in permutations(names, 2)
        ):
            return True
        # A ring and its reverse use different links between NUMA nodes.
        if len(names) > 2 and len({machine.numa_of(name) for name in names}) > 1:
            return False
        others = len(machine.gpus) - len(names)
        return self.symmetry.order == factorial(len(names)) * factorial(others)

    def problem(self, settings: Settings, counts: Sequence[int], **more: Any) -> SearchProblem:
        """Return the search for sets of so many rings under settings; `more` are its fields."""
        rules = {count: self.rule(settings, count) for count in counts}
        return SearchProblem(
            spaces={count: self.space(settings, count) for count in counts},
            source=self.source,
            symmetry=self.symmetry,
            rules={count: rule for count, rule in rules.items() if rule is not None},
            cuts=natural_cuts(self.host.machine, self.host.knowledge, gpus=self.gpus),
            **{"budget": self.budget, **more},
        )

    def rule(self, settings: Settings, count: int, /) -> SetRule | None:
        """Return the rule for sets of so many rings, if any."""
        return OneNode() if settings.shm_placement and count > 1 else None

    def search(
        self,
        settings: Settings,
        *,
        known: Sequence[Rings] = (),
        floor: float = 0.0,
        sets: int | None,
        check_bound: bool = False,
    ) -> SearchResult | None:
        """Search for rings under settings; None without time, or if a GPU has no hop.

        Args:
            settings: ring counts that do not divide their channels are left out.
            known: ring sets known beforehand.
            floor: scores up to this, GB/s, are of no interest.
            sets: the limit of measured sets.
            check_bound: whether to measure more, as a check of what the bound assumes.
        """
        if not self.source.has_time():
            return None
        counts = [count for count in self.ring_counts if settings.channels % count == 0]

        def search(counts: Sequence[int]) -> SearchResult:
            problem = self.problem(
                settings,
                counts,
                known=tuple(map(tuple, known)),
                floor_gbps=floor,
                budget=replace(self.budget, sets=sets),
                check_bound=check_bound,
            )
            asked = self.request
            return find_rings(problem, strategy=asked.strategy, reporter=asked.reporter)

        try:
            if self.fewest_first and len(counts) > 1 and self.orders_alike(settings):
                result = search(counts[:1])
                if result.cancelled or result.symmetric:
                    return result
            return search(counts)
        except (SearchError, MeasurementError):
            return None


T = TypeVar("T", bound=Task)


class OneNode(SetRule):
    """All bounces from a GPU go through one NUMA node: its process places its buffers."""

    def mark(self, hop: Hop) -> tuple[int, int] | None:
        """Return a bounce's GPU and NUMA node."""
        node = hop.flow.through
        return None if node is None else (hop.source, node)

    def admits(self, rings: Sequence[Sequence[tuple[int, int]]]) -> bool:
        """Return whether no GPU bounces through two nodes."""
        bounces = set().union(*rings)
        return len({gpu for gpu, _ in bounces}) == len(bounces)


def of_transports(settings: Settings) -> Settings:
    """Return settings with those alone that change NCCL's search for rings in a host."""
    return Settings(
        version=settings.version,
        p2p_level=settings.p2p_level,
        net_disable_intra=settings.net_disable_intra,
    )


def search_problem(
    machine: Machine,
    knowledge: Knowledge,
    source: BandwidthSource,
    settings: Settings | None = None,
    *,
    gpus: Sequence[int] | str | None = None,
    ring_counts: Sequence[int] = (1,),
    budget: Budget = Budget(),  # noqa: B008 (is frozen)
) -> SearchProblem:
    """Return the search for rings under one choice of settings, for `find_rings`.

    Args:
        machine: the node.
        knowledge: what is known of it beyond structure.
        source: answers transfer sets.
        settings: NCCL's; None is its defaults.
        gpus: NVML indices of the GPUs to join, or text as `0-3`; None is all.
        ring_counts: how many rings a set may have.
        budget: limits of sets and seconds.

    Raises InputError: unknown GPUs, fewer than two, or settings that the version of NCCL does not
    have.
    """
    check_type(machine, "machine", Machine)
    check_type(knowledge, "knowledge", Knowledge)
    check_type(settings, "settings", Settings, type(None))
    check_budget(budget)
    host = NodeClass(name=machine.name, machine=machine, knowledge=knowledge)
    bench, chosen = bench_for(source, machine.name), chosen_gpus(machine, gpus)
    task = Task(host=host, source=bench, gpus=chosen, budget=budget)
    return task.problem(check_settings(settings or Settings()), ring_counts)
