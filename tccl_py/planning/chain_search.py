"""A class of hosts: the best settings, and chains under any settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from tccl_py.errors import BudgetSpentError, InputError, MeasurementError, SearchError
from tccl_py.model.cluster import NodeClass
from tccl_py.model.machine import Machine, Nic
from tccl_py.model.measurement import Measurement
from tccl_py.model.rings import HopSpace, RingSet
from tccl_py.model.symmetry import Symmetry, automorphisms
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
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.view import NcclView, usable_nics
from tccl_py.plan.chains import Choice, ChoiceName
from tccl_py.plan.tables import ClassRates, KeptChains, KeptTable, Most, NicPairs
from tccl_py.planning.choices import WORTH, rate_default, rate_own
from tccl_py.planning.request import Rings, Task, rings_under
from tccl_py.planning.study import (
    SIMPLE_ORDER,
    Candidate,
    answer_under,
    candidate_of,
    condensed_rings,
    hop_rates,
    interval,
    measured_well,
    not_below,
    search_under,
)
from tccl_py.search.problem import SearchResult, SetRule

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
        plain, nics = super().default_settings, self.machine.nics
        names = tuple(nic.name for nic in nics if nic.index in self.nics and nic.has_name)
        if plain.ib_hca or not self.cabled or len(names) in (0, len(nics)):
            return plain
        rdma = all(nic.rdma for nic in nics)
        return msgspec.structs.replace(plain, **{"ib_hca" if rdma else "socket_ifname": names})

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
        nics = tuple(nic.index for nic in self.machine.nics)
        task = msgspec.structs.replace(self, nics=nics)
        chains = chains_as_rings(task.space(settings, 1), nccl.chains)
        return rings_under(task, settings, condensed_rings(chains))

    def hops(self, host_view: NcclView, count: int) -> HopSpace:
        """Return the hops of a view, with those over the network."""
        return chain_hop_space(host_view, nics=self.nics, chains_in_set=count)

    @property
    def symmetry(self) -> Symmetry:
        """The symmetry of the machine that keeps the pairing."""
        symmetry = automorphisms(self.machine, self.knowledge, gpus=self.gpus)
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
        fault = "has no NIC" if pinned is None or not pinned.ib_hca else "has no NIC that is pinned"
        raise InputError(f"machine {machine.name}", fault, "a node of several needs one that is up")
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
        self.task = task
        self._left = task.budget.sets
        self._more = 0
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
        search = rate_own(task, needed_variables)
        default, variables = search.own.get("default"), search.own["variables"]
        if task.sound is not None:
            (variables,) = needed_variables(task, default)
        space = task.space(variables.settings, 1)
        known = [set_ for n in task.ring_counts for set_ in initial_chains(space, task.nics, n)]
        search.run(sets=task.budget.sets or 1, known=known)
        self.cancelled, results = search.cancelled, search.results
        choices: list[Candidate] = [search.best, *search.searched, variables]
        for settings, result in () if self.cancelled else self._search_gdr(search.best):
            results.append(result)
            choices.append(candidate_of(settings, result))
        self._searched = sorted(choices, key=lambda choice: -choice.rate_gbps)
        self.sets_by_symmetry = sum(result.sets_by_symmetry for result in results)
        # Half of the budget at least is left for chains shared by all classes.
        for result in results:
            self._spend(result)
        if task.budget.sets is not None:
            self._left = max(self._left or 0, task.budget.sets // 2)
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
            railed=self._rate_railed(variables.settings) if task.railed else None,
            notices=tuple(dict.fromkeys(note for result in results for note in result.notices)),
        )

    def _rate_railed(self, settings: Settings) -> Choice | None:
        """Rate NCCL's own chains that leave hosts by the NIC of their entry; None if that fails."""
        under = msgspec.structs.replace(settings, cross_nic=0, min_channels=None)
        with suppress(SearchError, MeasurementError):
            own = rate_default(self.task, under, self.task.default_rings(under), well=True)
            return _own("variables", own)
        return None

    def _search_gdr(self, best: Candidate) -> Iterator[tuple[Settings, SearchResult]]:
        """Search for the best chains with other NIC buffer placements."""
        rings, floor = [best.rings.rings], best.rate_gbps * (1 + WORTH)
        for gdr in gdr_variants(self.task.view(best.settings), nics=self.task.nics):
            sets = self._few_sets
            result = search_under(self.task, gdr, known=rings, floor=floor, sets=sets)
            if result is not None:
                yield gdr, result

    def _spend(self, result: SearchResult) -> None:
        # What the journal answers counts as well: a resumed run goes the same way.
        if self._left is not None:
            self._left -= result.sets_measured + result.sets_remembered

    @property
    def cut_short(self) -> bool:
        """Whether the limit of sets is spent."""
        return self._left is not None and self._left <= 0

    @property
    def _few_sets(self) -> int:
        """The limit of sets for a further search: without any, there might be no plan."""
        return PAIRED_SETS if self._left is None else max(1, min(PAIRED_SETS, self._left))

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
        task = msgspec.structs.replace(self.task, ring_counts=(count,))
        rings = [c.rings.rings for c in self._searched if len(c.rings.rings) == count]
        if not self._searched:
            rings = list(initial_chains(task.space(settings, count), task.nics, count))
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
        task = msgspec.structs.replace(self.task, ring_counts=(count,), uneven=True)
        best = self.best_under(settings, count)
        known = [] if best is None else [self.rings_of(best)]
        result = self._search(task, settings, known)
        if result is None or result.bound_gbps is None:
            return None
        return result.bound_gbps, result.assumptions

    def _search(
        self, task: HostTask, settings: Settings, rings: Sequence[Rings]
    ) -> SearchResult | None:
        """Search with a part of the budget that is left."""
        result = answer_under(task, settings, rings, sets=self._few_sets)
        if result is not None:
            self._spend(result)
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
        alone = msgspec.structs.replace(self.task, nics=(), uneven=True, ring_counts=(1,))
        result = self._search(alone, settings, []) if len(self.gpus) > 1 else None
        if result is not None:
            with suppress(BudgetSpentError):
                measurement = measured_well(self.task.source, result.rings)
                self.closed = self._rated_chains(settings, result.rings, measurement)
        pairs = ((self.nics[0],) * 2,)
        chains = self.between(settings, pairs)
        ends = () if chains is None else self.rings_of(chains)[0].hops
        if any(hop.flow.through is None and WORLD in (hop.source, hop.target) for hop in ends):
            self.between(msgspec.structs.replace(settings, net_gdr_level="LOC"), pairs)

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
        task = msgspec.structs.replace(
            task, ring_counts=(len(pairs),), pairing=Pairing(pairs), strategy="best-first"
        )
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
        alone = msgspec.structs.replace(usual.settings, net_disable_intra=True)
        yield rate_default(task, alone, task.default_rings(alone), well=True)


def _own(name: ChoiceName, own: Candidate) -> Choice:
    return own.as_choice(name, SIMPLE_ORDER if own.nccl is not None and own.nccl.fallback else "")
