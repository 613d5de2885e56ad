"""Several hosts: chains of each class, rings over all, and tables for jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import combinations, combinations_with_replacement, islice
from math import inf
from typing import Any

from msgspec.structs import replace

from tccl_py.errors import BudgetSpentError, InputError, MeasurementError, SearchError, require
from tccl_py.files import pick
from tccl_py.merge.cables import cabled_ring
from tccl_py.model.cluster import Cluster, Host, NodeClass, cabled_nics, gpus_text
from tccl_py.model.machine import Machine, Nic
from tccl_py.model.measurement import Measurement
from tccl_py.model.reports import part_of
from tccl_py.model.rings import HopSpace, RingSet
from tccl_py.model.symmetry import Symmetry, automorphisms, images_of_gpus
from tccl_py.nccl.graph_search import DefaultRings, default_rings, default_rings_or_sys
from tccl_py.nccl.network import (
    WORLD,
    EvenUse,
    Pairing,
    chain_hop_space,
    chains_as_rings,
    gdr_variants,
    initial_chains,
    nic_pair,
    paired_chain_set,
    symmetry_keeping,
)
from tccl_py.nccl.settings import Settings, check_settings
from tccl_py.nccl.transport import blocks_of_ring
from tccl_py.nccl.view import NcclView, usable_nics, view
from tccl_py.plan.chains import Choice, ChoiceName, Order
from tccl_py.plan.plan import Plan
from tccl_py.plan.tables import FORK_CHANNELS, ClassRates, KeptChains, KeptTable, Most, NicPairs
from tccl_py.planning.join import best_rings, plan_over
from tccl_py.planning.parts import answer_sets, job_gpus
from tccl_py.planning.request import EVERY_SET, PlanRequest, Rings, Task, of_transports
from tccl_py.planning.settings_search import (
    SIMPLE_ORDER,
    WORTH,
    Candidate,
    candidate_of,
    condensed_rings,
    hop_rates,
    interval,
    measured_well,
    mechanisms,
    not_below,
    own_gbps,
    rate_default,
    settings_search,
)
from tccl_py.search.problem import SearchResult, SetRule
from tccl_py.sources.bench import Allowance, Bench

SLOW_NIC = 0.5
"""A NIC with less than this share of the fastest one's speed is no part of rings."""
CABLED_CHANNELS = 8
"""Channels of the graph files with which owners measured hosts of one GPU along cables."""
PAIRED_SETS = 150
"""Sets that one search for chains with given NICs may measure, while the budget lasts."""
MORE_SETS = 160
"""Measured sets that compare how functions of cables are dealt to rings."""


class HostTask(Task, frozen=True, kw_only=True):
    """The search on a host of several: rings are chains by NICs, closed through the world
    outside."""

    pairing: Pairing | None = None
    """The pairs of NICs that the chains have, if these are given."""
    uneven: bool = False
    """Whether chains may use NICs unevenly."""
    cabled: bool = False
    """Whether cables join the hosts: they leave by another NIC than their entry."""
    sound: Settings | None = None
    """The settings for NCCL's own chains, where default NCCL uses links on some class that no plan
    may use."""
    railed: bool = False
    """Whether a NIC reaches only the same NIC of other hosts, and NCCL's own chains may have to
    leave by that of their entry."""

    @property
    def default_settings(self) -> Settings:
        """The settings of default NCCL; of hosts with cables it has no NIC without one."""
        plain, nics = super().default_settings, self.host.machine.nics
        names = tuple(nic.name for nic in nics if nic.index in self.nics and nic.has_name)
        if plain.ib_hca or not self.cabled or len(names) in (0, len(nics)):
            return plain
        rdma = all(nic.rdma for nic in nics)
        return replace(plain, **{"ib_hca" if rdma else "socket_ifname": names})

    @property
    def same_nic(self) -> bool:
        """Return whether chains leave by the NIC of their entry, as NCCL does on hosts of a GPU."""
        return len(self.gpus) == 1 and not self.cabled

    @property
    def least_channels(self) -> int:
        """Return 1, or what is known to work along cables: no source tells few from many there."""
        return CABLED_CHANNELS if self.cabled and len(self.gpus) == 1 else 1

    def default_rings(self, settings: Settings) -> DefaultRings:
        """Return NCCL's own chains; for its search any number of hosts above 1 is equal."""
        return default_rings(self.view(settings), nodes=2)

    def own_ring_set(self, nccl: DefaultRings, settings: Settings) -> RingSet:
        """Return NCCL's own chains by the mechanisms of settings.

        Raises SearchError: a hop is missing.
        """
        # NCCL may use NICs that we leave alone.
        nics = tuple(nic.index for nic in self.host.machine.nics)
        task = replace(self, nics=nics)
        chains = chains_as_rings(task.space(settings, 1), nccl.chains)
        return task.rings_under(settings, condensed_rings(chains))

    def seeds(self, settings: Settings, /) -> Sequence[Rings]:
        """Return sets of chains to begin with, of each number."""
        space = self.space(settings, 1)
        return [s for count in self.ring_counts for s in initial_chains(space, self.nics, count)]

    def hops(self, host_view: NcclView, count: int) -> HopSpace:
        """Return the hops of a view, with those over the network."""
        return chain_hop_space(host_view, nics=self.nics, chains_in_set=count)

    @property
    def symmetry(self) -> Symmetry:
        """The symmetry of the machine that keeps the pairing."""
        symmetry = automorphisms(self.host.machine, self.host.knowledge, gpus=self.gpus)
        return symmetry if self.pairing is None else symmetry_keeping(symmetry, self.pairing)

    def rule(self, _settings: Settings, count: int, /) -> SetRule | None:
        """Return the rule for the NICs."""
        return (
            None if self.uneven else self.pairing or EvenUse(self.nics, count, same=self.same_nic)
        )


def used_nics(machine: Machine, pinned: Settings | None = None) -> tuple[int, ...]:
    """Return the NICs of rings: of the kind NCCL takes, not much slower than the fastest.

    `pinned` settings may name some. Raises InputError: there is none.
    """
    rdma = tuple(nic for nic in machine.nics if nic.rdma)
    usable = usable_nics(machine, pinned or Settings())
    nics: Sequence[Nic] = [nic for nic in rdma or machine.nics if nic.index in usable]
    if not nics:
        where, names = f"machine {machine.name}", ", ".join(nic.name for nic in machine.nics)
        if pinned is not None and pinned.ib_hca:
            fault = f"has none of {', '.join(pinned.ib_hca)}, which NCCL_IB_HCA pins"
            raise InputError(where, fault, f"it has {names or 'no NIC'}")
        raise InputError(where, "has no NIC", "a node of several needs one that is up")
    fastest = max(nic.speed_mbps for nic in nics)
    return tuple(nic.index for nic in nics if nic.speed_mbps >= SLOW_NIC * fastest)


class ClassStudy(ClassRates):
    """The rates of chains on hosts of a class that searches, and measures, when it is asked.

    Without a `kept` table NCCL's own chains are rated first, and settings and chains searched;
    `allow` is called before results are measured, of which symmetry may have told the rates.

    Raises SearchError: no chains can be built. MeasurementError: the source cannot measure them.
    """

    searches = True

    def __init__(
        self,
        node_class: NodeClass,
        task: HostTask,
        kept: KeptTable | None = None,
        *,
        allow: Callable[[], object] = lambda: None,
    ) -> None:
        self.task, self._more = task, 0
        self._allowance = Allowance(task.budget.sets)
        self._searched: list[Candidate] = []
        table = self._explore(node_class.name) if kept is None else kept
        super().__init__(node_class, table)
        bests: dict[tuple[Settings, int], Candidate] = {}
        for choice in self._searched:
            bests.setdefault((choice.settings, len(choice.rings.rings)), choice)
        allow()
        for choice in bests.values():
            with suppress(BudgetSpentError):
                best = self._best_of(choice, chosen=True)
                self._best[choice.settings, len(best.pairs)] = best

    def _explore(self, node_class: str) -> KeptTable:
        """Search over settings; return a table without the answers, which are `_searched`."""
        task = self.task
        search = settings_search(task, needed_variables)
        default, variables = search.own.get("default"), search.own["variables"]
        if task.sound is not None:
            (variables,) = needed_variables(task, default)
        self.cancelled, results = search.cancelled, search.results
        choices: list[Candidate] = [search.best, *search.searched, variables]
        for settings, result in () if self.cancelled else self._search_gdr(search.best):
            results.append(result)
            choices.append(candidate_of(settings, result))
        self._searched = sorted(choices, key=lambda choice: -choice.rate_gbps)
        self.sets_by_symmetry = sum(result.sets_by_symmetry for result in results)
        # Half of the budget at least is left for chains shared by all classes.
        spent, most = sum(result.sets for result in results), task.budget.sets or 0
        self._allowance.spent = min(spent, most - most // 2)
        return KeptTable(
            node_class=node_class,
            gpus=task.gpus,
            nics=task.nics,
            simulated=task.source.simulated,
            dry_run=task.source.dry_run,
            default_settings=task.default_settings,
            rated_default=_own("variables", variables),
            default=Choice(name="default", settings=task.default_settings, note=search.note)
            if default is None
            else _own("default", default),
            railed=self._rate_railed(variables.settings),
            notices=tuple(dict.fromkeys(note for result in results for note in result.notices)),
        )

    def _rate_railed(self, settings: Settings) -> Choice | None:
        """Rate NCCL's own chains that leave hosts by the NIC of their entry, where that matters."""
        under = replace(settings, cross_nic=0, min_channels=None)
        if self.task.railed:
            with suppress(SearchError, MeasurementError):
                own = rate_default(self.task, under, self.task.default_rings(under), well=True)
                return _own("variables", own)
        return None

    def _search_gdr(self, best: Candidate) -> Iterator[tuple[Settings, SearchResult]]:
        """Search for the best chains with other NIC buffer placements."""
        rings, floor = [best.rings.rings], best.rate_gbps * (1 + WORTH)
        for gdr in gdr_variants(self.task.view(best.settings), nics=self.task.nics):
            result = self.task.search(gdr, known=rings, floor=floor, sets=self._few_sets)
            if result is not None:
                yield gdr, result

    @property
    def cut_short(self) -> bool:
        """Whether the limit of sets is spent."""
        return self._allowance.left <= 0

    @property
    def _few_sets(self) -> int:
        """The limit of sets for a further search: without any, there might be no plan."""
        return max(1, int(min(PAIRED_SETS, self._allowance.left)))

    def _best_of(self, choice: Candidate, *, chosen: bool = False) -> KeptChains:
        """Return the best chains under their settings."""
        (measurement,) = self.task.source.measure([choice.rings.flows])
        return self._rated_chains(
            choice.settings,
            choice.rings,
            measurement,
            rate_gbps=choice.rate_gbps,
            bound_gbps=not_below(choice.bound_gbps, choice.rate_gbps),
            bound_assumptions=choice.bound_assumptions,
            best=True,
            chosen=chosen,
        )

    def best_under(self, settings: Settings, count: int) -> KeptChains | None:
        """Return the best set of so many chains, searched for where it is not known."""
        key = settings, count
        if key in self._best or settings.channels % count:
            return self._best.get(key)
        task = replace(self.task, ring_counts=(count,))
        searched = (choice.rings.rings for choice in self._searched)
        rings: Sequence[Rings] = [rings for rings in searched if len(rings) == count]
        if not self._searched:
            rings = task.seeds(settings)
        result, best = self._search(task, settings, rings), None
        if result is not None:
            with suppress(BudgetSpentError):
                best = self._best_of(candidate_of(settings, result))
        self._best[key] = best
        return best

    def most(self, settings: Settings, count: int, /) -> Most | None:
        """Search for what no chains exceed, whichever NICs they use; None if it is not known."""
        if not self.task.source.simulated:
            return None
        task = replace(self.task, ring_counts=(count,), uneven=True)
        best = self.best_under(settings, count)
        known = [] if best is None else [self.rings_of(best)]
        result = self._search(task, settings, known)
        if result is None or result.bound_gbps is None:
            return None
        return result.bound_gbps, result.assumptions

    def _search(
        self, task: HostTask, settings: Settings, rings: Sequence[Rings]
    ) -> SearchResult | None:
        """Search with a part of the budget that is left, and stop if the search was interrupted."""
        result = task.search(settings, known=rings, sets=self._few_sets)
        if result is not None:
            self._allowance.spent += result.sets
            if result.cancelled:
                self.stopped = task.source.allowance.stopped = True
        return result

    def _answers_more(self) -> bool:
        """Return whether another question costs a single set, and few were asked."""
        self._more += 1
        most = min(MORE_SETS, self.task.budget.sets or MORE_SETS)
        few = self.task.source.simulated or self._more <= most
        return few and len(self.task.gpus) == 1

    def between(
        self, settings: Settings, pairs: NicPairs, *, only_few: bool = False
    ) -> KeptChains | None:
        """Return the best chains between exactly these NICs, searched for as `best_under`."""
        key = settings, pairs
        if key in self._between or (only_few and not self._answers_more()):
            return self._between.get(key)
        (rings, bound), rated = self._rings_between(settings, pairs), None
        if rings is not None:
            with suppress(BudgetSpentError):
                measurement = measured_well(self.task.source, rings)
                # Between two NICs there is one chain over one GPU.
                bound = rings.rate(measurement) if len(self.task.gpus) == 1 else bound
                rated = self._rated_chains(settings, rings, measurement, bound_gbps=bound)
        self._between[key] = rated
        return rated

    def answer_fork(self, settings: Settings) -> None:
        """Search for what the TCCL fork has: a ring inside the host, and a chain by the first NIC.

        Buffers of a NIC that reaches GPU memory are tried in host memory too: the fork sets up a
        GPU by what it copies.
        """
        alone = replace(self.task, nics=(), uneven=True, ring_counts=(1,))
        result = self._search(alone, settings, []) if len(self.gpus) > 1 else None
        if result is not None:
            with suppress(BudgetSpentError):
                measurement = measured_well(self.task.source, result.rings)
                self.closed = self._rated_chains(settings, result.rings, measurement)
        pairs = ((self.nics[0],) * 2,)
        chains = self.between(settings, pairs)
        ends = () if chains is None else self.rings_of(chains)[0].hops
        if any(hop.flow.through is None and WORLD in (hop.source, hop.target) for hop in ends):
            self.between(replace(settings, net_gdr_level="LOC"), pairs)

    def _rings_between(
        self, settings: Settings, pairs: NicPairs
    ) -> tuple[RingSet | None, float | None]:
        """Return the best chains, and what no others exceed without an assumption, if known."""
        task = self.task
        if not {nic for pair in pairs for nic in pair} <= set(task.nics):
            return None, None
        if task.same_nic and any(entered != exit_nic for entered, exit_nic in pairs):
            return None, None
        best = self.best_under(settings, len(pairs))
        if best is not None and best.pairs == pairs:
            bound = None if best.bound_assumptions else best.bound_gbps
            return RingSet(self.rings_of(best)), bound
        request = replace(task.request, strategy="best-first")
        counts = (len(pairs),)
        task = replace(task, request=request, ring_counts=counts, pairing=Pairing(pairs))
        seed = paired_chain_set(task.space(settings, len(pairs)), pairs)
        candidates = [*([seed] if seed else []), *(choice.rings.rings for choice in self._searched)]
        result = self._search(task, settings, candidates)
        if result is None:
            return None, None
        return result.rings, None if result.assumptions else result.bound_gbps

    def _rated_chains(
        self, settings: Settings, rings: RingSet, measurement: Measurement, **marks: Any
    ) -> KeptChains:
        """Return measured chains by the table's numbers of settings and hops."""
        return KeptChains(
            under=self._settings.setdefault(settings, len(self._settings)),
            pairs=tuple(sorted(nic_pair(c.hops) for c in rings.rings if c.hops[0].source == WORLD)),
            chains=tuple(
                tuple(self._hops.setdefault(hop, len(self._hops)) for hop in chain.hops)
                for chain in rings.rings
            ),
            gbps=tuple(hop_rates(rings, measurement)),
            error=interval(measurement),
            assumed=measurement.assumed,
            **{"rate_gbps": rings.rate(measurement), **marks},
        )


def needed_variables(task: Task, default: Candidate | None) -> Iterator[Candidate]:
    """Yield NCCL's own chains under the variables without which they have no rate, if any."""
    if isinstance(task, HostTask) and task.sound is not None:
        yield rate_default(task, task.sound, task.default_rings(task.sound), well=True)
        return
    usual = default_rings_or_sys(task.view(task.default_settings), nodes=2)
    if default is not None and not usual.assumed_sys:
        return
    try:
        yield rate_default(task, usual.settings, usual, well=True)
    except SearchError:
        # Over NICs NCCL would go from GPU to GPU here, and no source says at which rate.
        alone = replace(usual.settings, net_disable_intra=True)
        yield rate_default(task, alone, task.default_rings(alone), well=True)


def _own(name: ChoiceName, own: Candidate) -> Choice:
    return own.as_choice(name, SIMPLE_ORDER if own.nccl is not None and own.nccl.fallback else "")


FEW_RINGS = 4
"""Beyond a ring for each NIC, sets of up to so many are tried."""
MAX_RINGS = 8
MOST_JOBS = 100
"""Small jobs that are planned, so that tables have answers for them."""
NO_TABLE = "no jobs can be planned"
"""A notice, with the GPUs before it, and then why."""


class SeveralHosts:
    """Several hosts: the chains of their classes are joined to rings over all of them.

    `sources` are of the classes, within the limit of `allowance`. `kept` are tables of earlier, and
    `tables` takes those of every class, if it is a list.
    """

    def __init__(
        self,
        request: PlanRequest,
        cluster: Cluster,
        gpus: Sequence[Order],
        sources: Sequence[Bench | None],
        *,
        allowance: Allowance,
        kept: Sequence[ClassRates],
        tables: list[KeptTable] | None,
    ) -> None:
        self.request, self.cluster, self.gpus = request, cluster, gpus
        self.allowance, self.tables, self.nodes = allowance, tables, list[ClassRates]()
        if cluster.cables:
            check_settings(Settings(version=request.default_settings.version, subnet_routing=True))
            # Without a ring nothing need be measured.
            keep_order = request.keep_order
            cabled_ring(cluster.names, cluster.cables, 1, lambda *_: 1, keep_order=keep_order)
        # A ring on each NIC, among others.
        pinned = request.default_settings
        nics = [_nics(cluster, node_class, pinned) for node_class in cluster.classes]
        here = {nic.name for of in cluster.classes for nic in of.machine.nics}
        for name in pinned.ib_hca:
            fault = f"names {name}, which no host has"
            require(name.partition(":")[0] in here, "pinned NCCL_IB_HCA", fault, "leave it out")
        counts = {1, 2, FEW_RINGS} | {min(len(used), MAX_RINGS) for used in nics}
        more: dict[str, Any] = {
            "ring_counts": request.ring_counts or tuple(sorted(counts)),
            "cabled": bool(cluster.cables),
            "railed": cluster.rails == "only",
        }
        # Their time is limited all together.
        untimed = replace(request, budget=replace(request.budget, seconds=None))
        # By the number of a class: its task if it has a source, and kept tables by GPUs.
        self.tasks, self.kept = list[HostTask | None](), list[dict[Order, ClassRates]]()
        for host, source, ids, used in zip(cluster.classes, sources, gpus, nics, strict=True):
            self.kept.append({t.gpus: t for t in kept if t.node_class.name == host.name})
            task = None
            if source is not None:
                task = HostTask.of(untimed, host, source, ids, nics=used, **more)
            elif ids not in self.kept[-1]:
                fault = "has no table, and no host to measure"
                raise InputError(f"class {host.name}", fault, "start a rank on a host of it")
            self.tasks.append(task)
        # Kept tables grow with the cluster.
        known = all(ids in of for ids, of in zip(gpus, self.kept, strict=True))
        self.growing = not known or request.gpus_per_job == EVERY_SET

    def __iter__(self) -> Iterator[Plan]:
        """Yield the plan of the best rings over all hosts, and again once tables are made."""
        benches = [task.source for task in self.tasks if task is not None]
        self._study()
        self.allowance.allow(3 / 4)
        try:
            plan = plan_over(self.cluster, self.nodes, self.request)
        except SearchError:
            if not any(bench.cut_short for bench in benches):
                raise
            # No settings were rated on all classes. Rings over all get the whole limit once more
            # beside what is remembered, and a new set of each class in any case.
            self._study()
            budget = self.request.budget
            with ExitStack() as limits:
                again = Allowance(budget.sets, budget.seconds)
                for bench in benches:
                    limits.enter_context(bench.limit(again))
                plan = plan_over(self.cluster, self.nodes, self.request)
        plan = replace(plan, cancelled=plan.cancelled or any(node.cancelled for node in self.nodes))
        yield self._count_sets(plan)
        if self.tables is not None:
            yield self._count_sets(replace(plan, notices=(*plan.notices, *self._fill_tables())))

    def _count_sets(self, plan: Plan) -> Plan:
        """Return a plan with the sets that symmetries spared; note searches over all GPUs cut."""
        for node in self.nodes[: len(self.gpus)]:
            # Beyond a bound that is reached, further sets of a search would find nothing.
            if isinstance(node, ClassStudy) and node.cut_short and not plan.at_bound:
                node.task.source.cut_short = True
        return replace(plan, sets_by_symmetry=sum(node.sets_by_symmetry for node in self.nodes))

    def _study(self) -> None:
        """Search every class, each in its part of the first half of the time."""
        self.nodes.clear()
        sound = self._sound_settings()
        self.tasks = [task and replace(task, sound=sound) for task in self.tasks]
        for number, ids in enumerate(self.gpus):
            self.allowance.allow((number + 1) / len(self.gpus) / 2)
            allow = partial(self.allowance.allow, 3 / 4)
            self.nodes.append(self._node(number, ids, allow=allow))

    def _sound_settings(self) -> Settings | None:
        """Return the variables under which NCCL's own rings are fastest over sound links alone.

        None is default NCCL, which uses no link on any class that no plan may use.
        """
        tasks = [task for task in self.tasks if task is not None]
        hosts = list(zip(self.cluster.classes, self.gpus, strict=True))

        def is_unsound(settings: Settings) -> bool:
            views = (view(h.machine, h.knowledge, settings, gpus=ids) for h, ids in hosts)
            return any(topo.unsound for topo in views)

        if not tasks or not is_unsound(tasks[0].default_settings):
            return None
        kinds = (of_transports(kind) for task in tasks for kind in mechanisms(task))
        changes = ("p2p_level", "net_disable_intra")
        settings = dict.fromkeys(
            replace(tasks[0].default_settings, **pick(kind, *changes)) for kind in kinds
        )
        # Of equal ones that without P2P.
        rates = {
            kind: min(rate if (rate := own_gbps(task, kind)) < inf else 0.0 for task in tasks)
            for kind in sorted(settings, key=lambda kind: kind.p2p_level != "LOC")
            if not is_unsound(kind)
        }
        return max(rates, key=rates.__getitem__, default=None)

    def _fill_tables(self) -> list[str]:
        """Search for what jobs need, for the tables; return notices on those that get none."""
        notices, asked = list[str](), self.request.gpus_per_job
        assert self.tables is not None
        try:
            for number, (_, *subsets) in enumerate(job_gpus(asked, *self.gpus)):
                # Tables of earlier get further sets of GPUs only if these are named.
                named = [] if self.kept[number] and asked is None else subsets
                if asked == EVERY_SET:
                    named = list(self._unlike(number, subsets))
                others = self._others(number, named, notices)
                self.nodes += others
                if asked == EVERY_SET:
                    self._answer_fork((self.nodes[number], *others))
            # Jobs are asked about, so that tables have answers for them.
            for job, nodes in islice(_small_jobs(self.cluster, self.nodes), MOST_JOBS):
                with suppress(SearchError, MeasurementError):
                    if self.allowance.stopped or best_rings(job, nodes)[1]:
                        break
        finally:
            self.tables += [node.table() for node in self.nodes]
        return notices

    def _unlike(self, number: int, gpu_sets: Sequence[Order]) -> Iterator[Order]:
        """Yield sets of a class's GPUs that no symmetry of its machine maps to an earlier one.

        The NIC of chains for the TCCL fork stays.
        """
        host, nic = self.cluster.classes[number], self.nodes[number].nics[0]
        symmetry = automorphisms(host.machine, host.knowledge)
        symmetry = symmetry_keeping(symmetry, Pairing(((nic, nic),)))
        images: set[Order] = set()
        for gpus in gpu_sets:
            if gpus not in images:
                images |= images_of_gpus(symmetry, gpus).keys()
                yield gpus

    def _answer_fork(self, nodes: Sequence[ClassRates]) -> None:
        """Ask each node of a class what the TCCL fork needs, under settings of the first."""
        settings = nodes[0].choices[0][0]
        counts = (2**power for power in range(settings.channels.bit_length()))
        fits = [
            count
            for count in counts
            if blocks_of_ring(nodes[0].view(replace(settings, channels=count)), 1) <= FORK_CHANNELS
        ]
        settings = replace(settings, channels=fits[-1], min_channels=None)
        for node in nodes:
            if isinstance(node, ClassStudy):
                node.answer_fork(settings)

    def _node(
        self,
        number: int,
        gpus: Order,
        *,
        parts: int = 1,
        allow: Callable[[], object] = lambda: None,
    ) -> ClassRates:
        """Return the table for GPUs of a class, or a search with one of `parts` of its budget.

        Raises MeasurementError: there is neither, or the source cannot measure what is needed.
        """
        task, table = self.tasks[number], self.kept[number].get(gpus)
        if table is not None and (task is None or not self.growing):
            return table
        if task is None:
            raise MeasurementError("no host of the class is at hand")
        sets = task.budget.sets
        few = replace(task.budget, sets=sets and max(1, sets // parts))
        task = replace(task.over(gpus), budget=few)
        kept = None if table is None else table.kept
        return ClassStudy(self.cluster.classes[number], task, kept, allow=allow)

    def _others(
        self, number: int, gpu_sets: Sequence[Order], notices: list[str]
    ) -> tuple[ClassRates, ...]:
        """Return nodes for other GPUs of a class: `gpu_sets` without table, and kept ones.

        The notices get the reason where a search fails. Each gets an equal part of the time that
        is left.
        """
        kept, classes = self.kept[number], len(self.gpus) - number
        new = [gpus for gpus in gpu_sets if gpus not in kept]

        def search_class(gpus: Order) -> ClassRates | None:
            if gpus in kept:
                return self._node(number, gpus)
            if self.allowance.stopped:
                return None
            self.allowance.allot(parts=classes * (len(new) - new.index(gpus)))
            try:
                node = self._node(number, gpus, parts=len(new))
            except (InputError, SearchError, MeasurementError) as error:
                name = f"{self.cluster.classes[number].name}, GPUs {gpus_text(gpus)}"
                notices.append(f"{name}: {NO_TABLE} ({error})")
                return None
            self.allowance.stopped |= node.cancelled
            return node

        others = (gpus for gpus in kept if gpus != self.gpus[number])
        return answer_sets([*new, *others], search_class)


def _nics(cluster: Cluster, node_class: NodeClass, pinned: Settings) -> tuple[int, ...]:
    """Return the NICs of rings: with cables, those that have one."""
    used, of = used_nics(node_class.machine, pinned), cluster.host_classes
    if not cluster.cables:
        return used
    ends = cabled_nics(cluster.cables)
    cabled = {nic for host, nic, _ in ends if cluster.classes[of[host]].name == node_class.name}
    return tuple(nic for nic in used if nic in cabled)


def _small_jobs(
    cluster: Cluster, nodes: Sequence[ClassRates]
) -> Iterator[tuple[Cluster, Sequence[ClassRates]]]:
    """Yield small jobs, of which those without a ring are none, with the nodes of their classes.

    Along cables they are parts of the hosts, small ones first; else two hosts of every pair of
    nodes, those with equal numbers of GPUs first. Two tables have answered already.
    """
    if cluster.cables:
        names, of = cluster.names, cluster.host_classes
        for count in range(2, len(names)):
            for part in combinations(names, count):
                yield part_of(cluster, part), [nodes[n] for n in {of[name]: 0 for name in part}]
        return
    combined = combinations_with_replacement(nodes, 2)
    pairs = [pair for pair in combined if any(node.searches for node in pair)]
    for pair in sorted(pairs, key=lambda pair: abs(len(pair[0].gpus) - len(pair[1].gpus))):
        used = list(dict.fromkeys(pair))
        hosts = tuple(
            Host(name=str(n), node_class=n % len(used), slots=len(pair[n].gpus)) for n in range(2)
        )
        classes = tuple(node.node_class for node in used)
        yield Cluster(hosts=hosts, classes=classes, rails=cluster.rails), used
