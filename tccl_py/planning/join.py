"""A plan over hosts from the rates of their classes: the best graph files, and NCCL's own rings.

Classes are searched and measured while this asks them, or answer from kept tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from math import inf

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tccl_py.errors import SearchError
from tccl_py.merge.cables import CabledRing, NicMap, Nics, Rate, cabled_ring
from tccl_py.merge.rings import ChainTable, MergedRing, merge_with_switches, passes, uplink_limit
from tccl_py.model.cluster import Cluster, NodeClass, SwitchTree
from tccl_py.model.transfer import index_of
from tccl_py.nccl.connections import (
    HostChannels,
    default_channels,
    swaps_pairs,
    tree_connections,
)
from tccl_py.nccl.graph_search import default_rings
from tccl_py.nccl.network import EvenUse, NicPair
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.view import usable_nics, view
from tccl_py.plan.chains import AS_GOOD as WORTH
from tccl_py.plan.chains import (
    Choice,
    ChoiceName,
    PlanChain,
    condense,
    failure_over,
    prefer,
)
from tccl_py.plan.plan import Plan
from tccl_py.plan.retuning import ends_as_measured
from tccl_py.plan.tables import ClassRates, KeptChains, NicPairs, pairs_of
from tccl_py.planning.cables import (
    channels_on,
    choices_along_cables,
    failing,
    notices_of_cables,
)
from tccl_py.planning.request import PlanRequest
from tccl_py.planning.settings_search import Candidate, assemble_plan, not_below

MANY_TUPLES = 24
"""Up to so many even tuples are all tried; of more, those that the best chains lead to."""
CANDIDATES = 12
"""Choices of settings that are merged over all classes, the most promising first, and the most
promising one of each number of rings."""


def plan_over(cluster: Cluster, nodes: Sequence[ClassRates], request: PlanRequest) -> Plan:
    """Return the best plan over a cluster's hosts, with a node for each of its classes.

    An interruption ends it with the best so far. The counts of sets are left 0.

    Raises SearchError: no ring exists. MeasurementError: a source cannot measure a needed set.
    """
    best, cancelled = best_rings(cluster, nodes, keep_order=request.keep_order)
    settings = _with_nics(cluster, best, nodes, request)
    class_nics = () if request.default_settings.ib_hca else _class_nics(nodes, settings)
    default, variables = _own_choices(cluster, nodes)
    if cluster.cables:
        default, variables = choices_along_cables(default, variables, cluster, nodes, settings)
    elif cluster.rails == "only":
        default, variables = _on_rails(default, variables, cluster, nodes)
    used = {cluster.host_classes[name] for name in best.hosts}
    return assemble_plan(
        cluster,
        tuple(node.gpus for node in nodes),
        replace(best, settings=settings),
        (default, variables),
        request,
        views=[node.view(best.settings) for node in nodes],
        notices=(
            *_notices(cluster, best, nodes),
            *notices_of_cables(cluster, settings),
            *_notices_of_names(nodes, class_nics, settings),
            *_notices_of_rails(default, cluster, nodes),
        ),
        class_nics=class_nics,
        simulated=any(nodes[number].kept.simulated for number in used),
        dry_run=any(nodes[number].kept.dry_run for number in used),
        cancelled=cancelled,
    )


def best_rings(
    cluster: Cluster, nodes: Sequence[ClassRates], *, keep_order: bool = False
) -> tuple[Candidate, bool]:
    """Return the best rings over all hosts, and whether an interruption ended the search.

    Raises SearchError: no ring exists. MeasurementError: a source cannot measure a needed set.
    """
    best: Candidate | None = None
    cancelled = False
    try:
        for settings, count, promise in _candidates(nodes):
            if best is not None and promise <= best.rate_gbps * (1 + WORTH):
                break
            search = RingSearch(
                cluster=cluster, nodes=nodes, settings=settings, keep_order=keep_order
            )
            rings = _realisable(search, count)
            if best is not None and any(node.stopped for node in nodes):
                break
            if rings is None:
                continue
            cost = rings.ring_count, rings.settings.channels
            less = best is not None and cost < (best.ring_count, best.settings.channels)
            if best is None or prefer(rings.rate_gbps, best.rate_gbps, less=less):
                best = rings
        if best is not None and cluster.cables and not any(node.stopped for node in nodes):
            best = _of_all_dealings(cluster, nodes, best, keep_order=keep_order)
    except KeyboardInterrupt:
        if best is None:
            raise
        cancelled = True
    cancelled |= any(node.stopped for node in nodes)
    if best is None and cancelled:  # There is nothing to return.
        raise KeyboardInterrupt
    if best is None:
        raise SearchError(f"no ring over all hosts was found: {_why_none(cluster, nodes)}")
    return best, cancelled


def _why_none(cluster: Cluster, nodes: Sequence[ClassRates]) -> str:
    """Return why there is no ring: a class's NICs on rails that another class has not."""
    on = [{node.node_class.rail(nic): nic for nic in node.nics} for node in nodes]
    for node, rails in zip(nodes, on, strict=True) if cluster.rails == "only" else ():
        alone = sorted(nic for rail, nic in rails.items() if any(rail not in of for of in on))
        if alone:
            nics = node.node_class.machine.nics
            names = ", ".join(nic.name for nic in nics if nic.index in alone)
            return (
                f"{names} of {node.node_class.name} {'is' if len(alone) == 1 else 'are'} on rails "
                "that other hosts have no fast NIC on; name the NICs of rails in the switches file"
            )
    return "no settings suit every class"


def _of_all_dealings(
    cluster: Cluster, nodes: Sequence[ClassRates], best: Candidate, *, keep_order: bool
) -> Candidate:
    """Return the best of rings along cables, and of fewer, with their functions in any order."""
    search = RingSearch(
        cluster=cluster, nodes=nodes, settings=best.settings, keep_order=keep_order, thorough=True
    )
    for count in range(best.ring_count, 0, -1):
        rings = _realisable(search, count) if best.settings.channels % count == 0 else None
        if rings is None or rings.settings != best.settings:
            continue
        if prefer(rings.rate_gbps, best.rate_gbps, less=False):
            best = rings
        elif count == best.ring_count:
            # The first dealing is as fast, and bounded now.
            best = replace(best, bound_gbps=rings.bound_gbps, bound_assumptions=())
    if best.bound_gbps is None:
        # Dealings may be too many questions, but no chains of a host exceed this.
        bounds = [node.most(best.settings, best.ring_count) for node in nodes]
        if None not in bounds:
            most, assumptions = min(bound for bound in bounds if bound is not None)
            most = max(most, best.rate_gbps)
            best = replace(best, bound_gbps=most, bound_assumptions=assumptions)
    return best


def _candidates(nodes: Sequence[ClassRates]) -> Iterator[tuple[Settings, int, float]]:
    """Yield settings and ring counts, each with an upper estimate of its rate, best first.

    A class that was not searched under them may still turn out to be slower.
    """
    promises: dict[tuple[Settings, int], float] = {}
    for node in nodes:
        for settings, chains in node.choices:
            key = (settings, len(chains.pairs))
            promises[key] = min(promises.get(key, float("inf")), chains.rate_gbps)
    least = min(node.choices[0][1].rate_gbps for node in nodes)
    # Of equal promises the rates that are known decide, so that the order of classes does not.
    ranked = sorted(promises.items(), key=lambda row: (-min(row[1], least), row[0][1], -row[1]))
    usable = [row for row in ranked if all(node.may_answer(*row[0]) for node in nodes)]
    # NCCL's own chains are always among them: a plan is never below them.
    own = [(node.rated_default, node.default_rings(node.rated_default).chains) for node in nodes]
    defaults = {(default.settings, len(condense(chains))) for default, chains in own}
    counts = set[int]()
    for number, ((settings, count), promise) in enumerate(usable):
        if number < CANDIDATES or (settings, count) in defaults or count not in counts:
            counts.add(count)
            yield settings, count, min(promise, least)


def _realisable(search: RingSearch, count: int) -> Candidate | None:
    """Return the best rings under settings with which NCCL runs the measured channels.

    Between hosts NCCL doubles few and quick channels once more. Then the file asks for as many.
    """
    settings, hosts = search.settings, len(search.cluster.hosts)
    sm = min(node.view(settings).system.sm_min for node in search.nodes)
    while True:
        rings = replace(search, settings=settings).rings(count)
        if rings is None or ends_as_measured(
            settings, sm=sm, hosts=hosts, rate_gbps=rings.rate_gbps
        ):
            return rings
        settings = replace(settings, channels=2 * settings.channels)


# Rings over all hosts under one choice of settings, and with one number of rings.
#
# A NIC map is a pair of NIC tuples, the exits of a host and the entries of the next, with an
# element for each ring. Over switches it has their rails: if no other is reached, both are equal.


def free_maps(pairings: Sequence[Sequence[NicPair]]) -> tuple[NicMap, ...]:
    """Return the NIC maps from the best chains of each class to those of each class.

    Any NIC reaches any other, so every host can have its best chains.
    """
    exits = [tuple(pair[1] for pair in sorted(pairs)) for pairs in pairings]
    entries = [tuple(pair[0] for pair in sorted(pairs)) for pairs in pairings]
    return tuple(dict.fromkeys(NicMap(out, into) for out in exits for into in entries))


def rail_tuples(
    pairings: Sequence[Sequence[NicPair]], nics: Sequence[Sequence[int]]
) -> tuple[Nics, ...]:
    """Return the NIC tuples of rings on rails between hosts.

    `pairings` has the NIC pairs of the best chains of each class, `nics` the NICs of each. All even
    tuples are taken where there are no more than MANY_TUPLES of them; else those to which the best
    chains of any class lead, from the first class's on.

    >>> rail_tuples([[(0, 1), (1, 0)]], [(0, 1)])
    ((0, 1), (1, 0))
    """
    rings = len(pairings[0])
    rules = [EvenUse(nics=used, chains=rings) for used in sorted(set(map(tuple, nics)))]
    even = {nics for rule in rules for nics in islice(_even_tuples(rule), MANY_TUPLES + 1)}
    if len(even) <= MANY_TUPLES:
        return tuple(sorted(even))
    tuples = list(dict.fromkeys(tuple(sorted(pair[0] for pair in pairs)) for pairs in pairings))
    for entered in tuples:
        for pairs in pairings:
            for image in (
                _exits_of(entered, pairs),
                _exits_of(entered, [(b, a) for a, b in pairs]),
            ):
                if image is not None and image not in tuples and len(tuples) < MANY_TUPLES:
                    tuples.append(image)
    return tuple(tuples)


def _even_tuples(rule: EvenUse, begun: Nics = ()) -> Iterator[Nics]:
    """Yield the tuples in which no NIC comes twice more often than another."""
    if len(begun) == rule.chains:
        yield begun
        return
    for nic in rule.nics:
        if rule.even((*begun, nic)):
            yield from _even_tuples(rule, (*begun, nic))


def _exits_of(nics: Nics, pairs: Iterable[NicPair]) -> Nics | None:
    """The exits of chains with these NIC pairs for rings that enter by `nics`; None if none fit."""
    remaining = sorted(pairs)
    out = []
    for nic in nics:
        match = next((pair for pair in remaining if pair[0] == nic), None)
        if match is None:
            return None
        remaining.remove(match)
        out.append(match[1])
    return tuple(out)


Joined = tuple[MergedRing | CabledRing, tuple[NicMap, ...]]
"""A ring of hosts, and its NIC maps."""


class RingSearch(Struct, frozen=True, kw_only=True):
    """The search for rings over all hosts, with a node for each class, under some settings."""

    cluster: Cluster
    nodes: Sequence[ClassRates]
    settings: Settings
    keep_order: bool = False
    thorough: bool = False

    def rings(self, count: int) -> Candidate | None:
        """Return the best rings over all hosts; None if a class has none.

        Rings stay on rails (a NIC reaches the same NIC of the next host) unless leaving them gains
        more than WORTH and the network lets any NIC reach any other. Cables decide where hosts are
        joined by these; a `thorough` search compares all dealings of their functions to rings.
        """
        choices = [node.best_under(self.settings, count) for node in self.nodes]
        best = [choice for choice in choices if choice is not None]
        if len(best) < len(choices):
            return None
        pairs = [
            tuple(sorted((node.rail(a), node.rail(b)) for a, b in choice.pairs))
            for node, choice in zip(self._classes, best, strict=True)
        ]
        ceiling = min(choice.rate_gbps for choice in best) * (1 - WORTH)
        along = self._along_cables(count) if self.cluster.cables else self._free(pairs, ceiling)
        if along is None:
            return None
        ring, nic_maps = along
        bounds = [choice.bound_gbps for choice in best if choice.bound_gbps is not None]
        bound = min(bounds) if len(bounds) == len(best) else None
        assumptions = [text for choice in best for text in choice.bound_assumptions]
        if self.cluster.cables:
            bound, assumptions = self._bound_along_cables(count), []
        if bound is not None and (tree := self.cluster.switches) is not None:
            bound = min(bound, uplink_limit(tree, tuple(tree.all_hosts)))
        order = [self.cluster.host_classes[host] for host in ring.hosts]
        ways = list(zip(order, (nic_maps[-1], *nic_maps[:-1]), nic_maps, strict=True))
        rated = {way: self._between(*way) for way in dict.fromkeys(ways)}
        chains = {way: self._in_order(*way, row) for way, row in rated.items() if row is not None}
        return Candidate(
            settings=self.settings,
            hosts={host: chains[way] for host, way in zip(ring.hosts, ways, strict=True)},
            rate_gbps=float(ring.rate_gbps),
            error=max(row.error for row in rated.values() if row is not None),
            assumed=any(row.assumed for row in rated.values() if row is not None),
            # With noise, chains with other NICs may do better than the best of all were thought to.
            bound_gbps=not_below(bound, float(ring.rate_gbps)),
            bound_assumptions=() if bound is None else tuple(dict.fromkeys(assumptions)),
            order_bound_gbps=None if ring.is_proven else float(ring.bound_gbps),
        )

    def _free(self, best: Sequence[NicPairs], ceiling: float) -> Joined | None:
        """Return the best ring of hosts over a network of switches, and its NIC maps."""
        rails = rail_tuples(
            best, [tuple(sorted(map(node.node_class.rail, node.nics))) for node in self.nodes]
        )
        merged = self._merge(best, ceiling, [NicMap(nics, nics) for nics in rails])
        if self.cluster.rails == "any" and (merged is None or merged[0].rate_gbps < ceiling):
            free = self._merge(best, ceiling, free_maps(best))
            worth = 0.0 if merged is None else merged[0].rate_gbps * (1 + WORTH)
            merged = free if free is not None and free[0].rate_gbps > worth else merged
        return merged

    def _along_cables(self, count: int) -> Joined | None:
        """Return the best ring of hosts along cables, and its NIC maps."""

        def rate(host: str, entries: Nics, exits: Nics) -> float:
            chains = self._over_cables(host, entries, exits)
            return 0.0 if chains is None else chains.rate_gbps

        ring = self._ring_by(rate, count, keep_order=self.keep_order)
        if ring is not None and ring.hosts != self.cluster.names:
            with suppress(SearchError):
                given = self._ring_by(rate, count, keep_order=True)
                if given and not prefer(ring.rate_gbps, given.rate_gbps, less=False):
                    ring = replace(given, bound_gbps=given.rate_gbps)
        return None if ring is None else (ring, ring.crossings)

    def _bound_along_cables(self, count: int) -> float | None:
        """Return the rate that no order of hosts and no dealing exceeds; None if it is unknown."""

        def most(host: str, entries: Nics, exits: Nics) -> float:
            chains = self._over_cables(host, entries, exits)
            if chains is None or chains.bound_gbps is None or chains.bound_assumptions:
                return inf
            return max(chains.bound_gbps, chains.rate_gbps)

        ring = self._ring_by(most, count) if self.thorough else None
        return ring.bound_gbps if ring and ring.complete and ring.bound_gbps < inf else None

    def _ring_by(self, rate: Rate, count: int, *, keep_order: bool = False) -> CabledRing | None:
        cluster, thorough = self.cluster, self.thorough
        how = {"keep_order": keep_order, "thorough": thorough}
        return cabled_ring(cluster.names, cluster.cables, count, rate, **how)

    def _over_cables(self, host: str, entries: Nics, exits: Nics) -> KeptChains | None:
        node = self.nodes[self.cluster.host_classes[host]]
        pairs = pairs_of(entries, exits)
        return node.between(self.settings, pairs, only_few=self.thorough)

    def _between(self, node_class: int, into: NicMap, out: NicMap) -> KeptChains | None:
        node = self.nodes[node_class]
        # A table has NCCL's own chains too, which may use NICs that are left out of rings.
        if not {*into.entries, *out.exits} <= set(map(node.node_class.rail, node.nics)):
            return None
        return node.between(self.settings, pairs_of(*self._nics(node_class, into, out)))

    def _nics(self, node_class: int, into: NicMap, out: NicMap) -> tuple[Nics, Nics]:
        """Return the NICs of a class by which rings enter and leave over these rails."""
        nic_on = self._classes[node_class].nic_on
        return tuple(map(nic_on, into.entries)), tuple(map(nic_on, out.exits))

    @property
    def _classes(self) -> list[NodeClass]:
        return [node.node_class for node in self.nodes]

    def _in_order(
        self, node_class: int, into: NicMap, out: NicMap, answer: KeptChains
    ) -> tuple[PlanChain, ...]:
        """Return the chains in the order of the rings that take them."""
        remaining = list(self.nodes[node_class].plan_chains(answer))
        chains = []
        for nics in zip(*self._nics(node_class, into, out), strict=True):
            chains.append(next(c for c in remaining if (c.entry_nic, c.exit_nic) == nics))
            remaining.remove(chains[-1])
        return tuple(chains)

    def _merge(
        self, best: Sequence[NicPairs], enough: float, nic_maps: Sequence[NicMap]
    ) -> Joined | None:
        """Return the best ring of hosts over these NIC maps, and its maps.

        The `best` chains of every class are tried alone first: if they close to a ring fast
        `enough`, no other chains between the same NICs need be searched.
        """
        merged = None
        for only in (best, [None] * len(best)):
            tables = [self._table(number, nic_maps, pairs) for number, pairs in enumerate(only)]
            with suppress(SearchError):
                ring = self._order_hosts(tables)
                merged = ring, tuple(nic_maps[number] for number in ring.crossings)
                if ring.rate_gbps >= enough:
                    break
        return merged

    def _table(
        self, node_class: int, nic_maps: Sequence[NicMap], only: NicPairs | None
    ) -> ChainTable:
        """Return the bandwidth of all rings together on a host, by NIC map in and out, GB/s.

        Where `only` is given, chains between other NICs have none.
        """
        rates = np.zeros((len(nic_maps), len(nic_maps)))
        for x, into in enumerate(nic_maps):
            for y, out in enumerate(nic_maps):
                if only in (None, pairs_of(into.entries, out.exits)):
                    answer = self._between(node_class, into, out)
                    rates[x, y] = 0.0 if answer is None else answer.rate_gbps
        return ChainTable(name=self.nodes[node_class].node_class.name, rates=rates)

    def _order_hosts(self, tables: Sequence[ChainTable]) -> MergedRing:
        """Return the ring in the given order of hosts, unless another order is better.

        Raises SearchError: there is no ring.
        """
        names, classes = self.cluster.names, self.cluster.host_classes
        tree = self.cluster.switches or SwitchTree(name="", hosts=names)
        crossed = passes(tree, names)
        try:
            fixed = merge_with_switches(tables, classes, tree, given_order=names)
        except SearchError:
            if self.keep_order:
                raise
            fixed = None
        if fixed is not None and (self.keep_order or (not crossed and _is_best(fixed, tables))):
            return fixed
        free = merge_with_switches(tables, classes, tree)
        if fixed is None or fixed.rate_gbps < free.rate_gbps or crossed > passes(tree, free.hosts):
            return free
        return replace(fixed, bound_gbps=free.bound_gbps)


def _is_best(ring: MergedRing, tables: Sequence[ChainTable]) -> bool:
    """Return whether no order is better: equal hosts, or a class whose best chain is no faster."""
    used = set(ring.order)
    return len(used) == 1 or ring.rate_gbps >= min(tables[number].rates.max() for number in used)


# Choices.


def _with_nics(
    cluster: Cluster, joined: Candidate, nodes: Sequence[ClassRates], request: PlanRequest
) -> Settings:
    """Return the settings with the NICs for NCCL, and leave for rings to change NICs."""
    nics = [n for node in nodes for n in node.node_class.machine.nics if n.index in node.nics]
    rdma, named = all(nic.rdma for nic in nics), all(nic.has_name for nic in nics)
    names = chain.from_iterable(_own_names(node, rdma=rdma) for node in nodes if named)
    listed = request.default_settings.ib_hca or tuple(dict.fromkeys(names))
    chains, settings = chain.from_iterable(joined.hosts.values()), joined.settings
    return replace(
        settings,
        ib_hca=listed if rdma else (),
        ib_gid_index=request.ib_gid_index if rdma else None,
        socket_ifname=() if rdma else listed,
        # By itself NCCL lets rings change NICs only where it finds that better.
        cross_nic=1 if any(c.entry_nic != c.exit_nic for c in chains) else settings.cross_nic,
        subnet_routing=bool(cluster.cables),
        subnet_prefix=request.subnet_prefix,
        # Trees join hosts that no cable joins, and the entries of hosts, on whichever rails.
        algo="Ring" if cluster.cables or _trees_cross(cluster, joined) else settings.algo,
    )


def _own_names(node: ClassRates, *, rdma: bool) -> tuple[str, ...]:
    """Return the names of the NICs that hosts of a class use, as one of NCCL's lists has them."""
    nics = [nic for nic in node.node_class.machine.nics if nic.index in node.nics]
    return tuple(f"{nic.name}:{nic.port or 1}" if rdma else nic.name for nic in nics)


def _class_nics(nodes: Sequence[ClassRates], settings: Settings) -> tuple[tuple[str, ...], ...]:
    """Return the names of NICs by class where one list for all names others too; () elsewhere."""
    if not (settings.ib_hca or settings.socket_ifname):
        return ()
    taken = (usable_nics(node.node_class.machine, settings) for node in nodes)
    if all(set(used) == set(node.nics) for used, node in zip(taken, nodes, strict=True)):
        return ()
    return tuple(_own_names(node, rdma=bool(settings.ib_hca)) for node in nodes)


def _notices_of_names(
    nodes: Sequence[ClassRates], class_nics: Sequence[Sequence[str]], settings: Settings
) -> Iterator[str]:
    """Yield the list of NICs of each class, where each has its own."""
    variable = "NCCL_IB_HCA" if settings.ib_hca else "NCCL_SOCKET_IFNAME"
    lists = (
        f"{node.node_class.name} ={','.join(names)}"
        for node, names in zip(nodes, class_nics, strict=False)
    )
    if class_nics:
        yield (
            f"{variable}, where it is set, differs between hosts: {'; '.join(lists)} (env.sh, "
            "`tccl env`, `run` and `install` set each host's own)"
        )


def _trees_cross(cluster: Cluster, joined: Candidate) -> bool:
    """Return whether trees of graph files, which use the entries of chains, would leave rails."""
    if cluster.rails == "any":
        return False
    entries = (
        tuple((cluster.classes[cluster.host_classes[name]].rail(c.entry_nic or 0),) for c in chains)
        for name, chains in joined.hosts.items()
    )
    hosts = [HostChannels(rings=(), trees=trees) for trees in entries]
    return any(link.nic != link.far for link in tree_connections(hosts))


def _own_choices(cluster: Cluster, nodes: Sequence[ClassRates]) -> tuple[Choice, Choice]:
    """Return default NCCL, and NCCL with the variables without which its rings have no rate.

    The slowest class decides, and uplinks in the order given. Both are equal where all classes are
    rated without variables.
    """
    variables = _own_choice("variables", cluster, nodes, [node.rated_default for node in nodes])
    unrated = [node.default for node in nodes if node.default.rate_gbps is None]
    if not unrated:
        return _own_choice("default", cluster, nodes, [node.default for node in nodes]), variables
    settings = nodes[0].kept.default_settings
    # It may fail over broken links, told of the first host of each class.
    firsts = {number: name for name, number in reversed(cluster.host_classes.items())}
    failures = (
        failure_over(nodes[number].view(settings).unsound, host)
        for number, host in sorted(firsts.items())
    )
    default = Choice(
        name="default",
        settings=settings,
        rings=variables.rings,
        note=_note(unrated),
        fails=next(filter(None, failures), None),
    )
    return default, variables


def _on_rails(
    default: Choice, variables: Choice, cluster: Cluster, nodes: Sequence[ClassRates]
) -> tuple[Choice, Choice]:
    """Return the choices, which fail where they leave rails.

    Variables include NCCL_CROSS_NIC=0 where only that connects, or is clearly faster.
    """
    default = failing(default, cluster, list(map(_default_channels, nodes)))
    own = [channels_on(node, node.rated_default) for node in nodes]
    variables = failing(variables, cluster, own)
    railed = [node.kept.railed for node in nodes if node.kept.railed is not None]
    if len(railed) == len(nodes):
        own = list(map(channels_on, nodes, railed))
        stays = failing(_own_choice("variables", cluster, nodes, railed), cluster, own)
        rate = variables.rate_gbps or 0.0
        if stays.rate_gbps is not None and prefer(stays.rate_gbps, rate, less=False):
            variables = stays
    return default, variables


def _notices_of_rails(
    default: Choice, cluster: Cluster, nodes: Sequence[ClassRates]
) -> Iterator[str]:
    """Yield that default NCCL fails on one host fewer, where it runs on all."""
    if cluster.rails == "any" or default.fails or len(cluster.hosts) < 3:
        return
    fewer = replace(cluster, hosts=cluster.hosts[:-1])
    if failing(default, fewer, list(map(_default_channels, nodes))).fails:
        count = len(fewer.hosts)
        yield (
            f"jobs on some of the hosts, as {count} of them, need the files that `tccl export` "
            "makes: default NCCL would connect NICs on different rails there"
        )


def _default_channels(node: ClassRates) -> list[HostChannels]:
    """Return the channels of default NCCL on a host of a class, or of each part that it cuts."""
    if node.default.rate_gbps is not None:
        return channels_on(node, node.default)
    topo, channels = node.view(node.kept.default_settings), list[HostChannels]()
    for gpus in sorted(tuple(sorted(map(index_of, part))) for part in topo.parts):
        part = view(topo.machine, topo.knowledge, topo.settings, gpus=gpus)
        own = default_rings(part, nodes=2)
        channels.append(default_channels(part, own.chains, own.cross_nic))
    return channels


def _own_choice(
    name: ChoiceName,
    cluster: Cluster,
    nodes: Sequence[ClassRates],
    defaults: Sequence[Choice],
) -> Choice:
    """Return NCCL's own rings over the hosts in the order given."""
    rate = min(default.rate_gbps or 0.0 for default in defaults)
    if cluster.switches is not None:
        rate = min(rate, uplink_limit(cluster.switches, cluster.names))
    settings = nodes[0].kept.default_settings
    for default in defaults:
        settings = replace(
            settings,
            p2p_level=default.settings.p2p_level or settings.p2p_level,
            net_disable_intra=default.settings.net_disable_intra or settings.net_disable_intra,
            cross_nic=default.settings.cross_nic,
        )
    # For each host the ranks of each channel that every class has.
    ranks: list[list[list[int]]] = []
    own = [node.default_rings(default) for node, default in zip(nodes, defaults, strict=True)]
    first, count = 0, min(len(rings.chains) for rings in own)
    for number, host in enumerate(cluster.hosts):
        at = {gpu: first + slot for slot, gpu in enumerate(nodes[host.node_class].gpus)}
        rings = own[host.node_class]
        swapped = swaps_pairs(rings.cross_nic, number, count)
        chains = (rings.chains[channel ^ swapped] for channel in range(count))
        ranks.append([[at[gpu] for gpu in own_chain.gpus] for own_chain in chains])
        first += host.slots
    return Choice(
        name=name,
        settings=settings,
        rings=tuple(tuple(chain.from_iterable(parts)) for parts in zip(*ranks, strict=True))
        or None,
        predicted_gbps=rate,
        error=max(default.error for default in defaults),
        assumed=any(default.assumed for default in defaults),
        note=_note(defaults),
    )


def _note(choices: Iterable[Choice]) -> str:
    return next((choice.note for choice in choices if choice.note), "")


def _notices(cluster: Cluster, best: Candidate, nodes: Sequence[ClassRates]) -> Iterator[str]:
    for node in nodes:
        yield from node.kept.notices
        machine = node.node_class.machine
        # Those that a pinned list leaves out are the user's choice.
        usable = {*usable_nics(machine, node.kept.default_settings)} - {*node.nics}
        names = ", ".join(nic.id for nic in machine.nics if nic.index in usable)
        if names and not cluster.cables:
            yield f"{node.node_class.name}: {names} left out, as too slow or of another kind"
        if not all(nic.has_name for nic in machine.nics if nic.index in node.nics):
            yield (
                f"{node.node_class.name}: its description has no names of NICs, so no variable "
                "tells NCCL which NICs to take"
            )
    most = best.order_bound_gbps
    if most is not None:
        yield f"another order of the hosts may reach up to {most:.2f} GB/s: not all were ruled out"
