"""Plans for clusters: against brute force, and what they promise of order, rails and NICs."""

import functools
import itertools
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tccl_profiler.compiler import program_for
from tccl_profiler.nccl_links import process_variables
from tccl_py.errors import InputError
from tccl_py.merge.rings import uplink_limit
from tccl_py.model.cluster import Cable, SwitchTree
from tccl_py.model.machine import Knowledge
from tccl_py.model.measurement import NIC_TRANSPORTS
from tccl_py.model.reports import HostReport, cluster_of
from tccl_py.model.rings import Ring, RingSet
from tccl_py.model.transfer import parse_set
from tccl_py.nccl.network import chain_hop_space, nic_pair
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.transport import final_channels
from tccl_py.nccl.view import view
from tccl_py.plan.chains import Choice
from tccl_py.plan.load import load_plan, off_rails
from tccl_py.plan.tables import KeptTable
from tccl_py.planning.cluster_planner import ClassStudy, HostTask, used_nics
from tccl_py.planning.join import RingSearch, best_rings, rail_tuples
from tccl_py.planning.opening_hosts import whole_ring
from tccl_py.planning.plan_sources import (
    PlacedSource,
    estimate_uplinks,
    gpus_beside_nics,
    placements,
)
from tccl_py.planning.planner import make_cluster_plan, make_plan
from tccl_py.planning.request import PlanRequest
from tccl_py.readers.nvidia_smi import parse_nvidia_smi
from tccl_py.search.problem import Budget
from tccl_py.simulator.descriptions import load_bundled, load_machine, model_for
from tccl_py.simulator.source import Simulator
from tccl_py.sources.bench import Bench
from tests.fakes import Impatient
from tests.networked import MadeUp, all_chains, networked_machine
from tests.planned import task_on

SETTINGS = Settings(channels=1)
SMALL = Budget(sets=120, idle_sets=15)
EXACT = Budget(sets=None, idle_sets=15)


def cluster_with(machines, *, rails="any", switches=None, slots=None):
    reports = [
        HostReport(host=f"h{number}", machine=machine, slots=slots)
        for number, machine in enumerate(machines)
    ]
    return cluster_of(reports, rails=rails, switches=switches, where="test")


def task_of(node_class, source, *, budget=SMALL, **more):
    machine, request = node_class.machine, PlanRequest(version=SETTINGS.version)
    how = {"budget": budget, "nics": used_nics(machine), "request": request, **more}
    return task_on(machine, node_class.knowledge, source, kind=HostTask, **how)


def node_of(node_class, source, *, budget=SMALL, **more):
    """A node without a table: all answers are searched."""
    task = task_of(node_class, source, budget=budget, **more)
    empty = KeptTable(
        node_class=node_class.name,
        gpus=task.gpus,
        nics=task.nics,
        simulated=True,
        default_settings=SETTINGS,
        rated_default=Choice(name="variables", settings=SETTINGS, predicted_gbps=1.0),
        default=Choice(name="default", settings=SETTINGS, note="not asked"),
    )
    return ClassStudy(node_class, task, empty)


@functools.cache
def _space(gpus, nics):
    machine = networked_machine(gpus=gpus, nics=nics, numa_nodes=2)
    return chain_hop_space(view(machine, Knowledge(), SETTINGS))


def chain_rates(gpus, nics, source):
    """The best chain's rate for each pair of NICs, of all chains there are."""
    best = {}
    for hops in all_chains(_space(gpus, nics)):
        entered = hops[0].flow.transfers[0].executor.index
        left = hops[-1].flow.transfers[-1].executor.index
        if gpus > 1 or entered == left:
            rate = min(source.rate(hop.flow) for hop in hops)
            best[entered, left] = max(rate, best.get((entered, left), 0.0))
    return best


def best_of_all_orders(classes, rates, *, rails):
    """The best ring over nodes, every order and every crossing tried."""
    first, *rest = range(len(classes))
    best = 0.0
    for order in set(itertools.permutations([classes[one] for one in rest])):
        tables = [rates[one] for one in (classes[first], *order)]
        if rails == "any":
            best = max(best, min(max(table.values()) for table in tables))
        for crossings in itertools.product((0, 1), repeat=len(tables)):
            found = [
                table.get((crossings[at - 1], crossings[at]), 0.0)
                for at, table in enumerate(tables)
            ]
            best = max(best, min(found))
    return best


clusters = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 2)), min_size=1, max_size=2, unique=True
).flatmap(
    lambda kinds: st.tuples(
        st.just(kinds), st.lists(st.integers(0, len(kinds) - 1), min_size=2, max_size=5)
    )
)


@settings(max_examples=120, deadline=None)
@given(clusters, st.integers(0, 10**6), st.sampled_from(["any", "only"]))
def test_rings_over_nodes_equal_brute_force_over_chains_crossings_and_orders(case, seed, rails):
    kinds, hosts = case
    machines = [networked_machine(gpus=g, nics=n, numa_nodes=2) for g, n in kinds]
    cluster = cluster_with([machines[kind] for kind in hosts], rails=rails)
    used = list(dict.fromkeys(hosts))
    sources = [MadeUp(seed + kind) for kind in used]
    nodes = [
        node_of(one, source, budget=EXACT)
        for one, source in zip(cluster.classes, sources, strict=True)
    ]
    rates = [chain_rates(*kinds[kind], source) for kind, source in zip(used, sources, strict=True)]
    classes = [host.node_class for host in cluster.hosts]
    best = best_of_all_orders(classes, rates, rails=rails)
    found = RingSearch(cluster=cluster, nodes=nodes, settings=SETTINGS).rings(1)
    assert (found.rate_gbps if found is not None else 0.0) == best
    if found is not None:
        assert sorted(found.hosts) == sorted(cluster.names)
        chains = [chain for (chain,) in found.hosts.values()]
        assert min(chain.rate_gbps for chain in chains) == found.rate_gbps
        if rails == "only":
            assert all(
                a.exit_nic == b.entry_nic
                for a, b in zip(chains[-1:] + chains, chains, strict=False)
            )


def best_of_all_orders_of_hosts(cluster, rates):
    """The best ring over hosts on rails, every order and every crossing tried, uplinks counted."""
    first, *rest = cluster.names
    tables, best, of = {}, 0.0, cluster.host_classes
    for others in itertools.permutations(rest):
        order = (first, *others)
        classes = tuple(of[name] for name in order)
        if classes not in tables:
            tables[classes] = max(
                min(
                    rates[one].get((crossings[at - 1], crossings[at]), 0.0)
                    for at, one in enumerate(classes)
                )
                for crossings in itertools.product((0, 1), repeat=len(classes))
            )
        best = max(best, min(tables[classes], uplink_limit(cluster.switches, order)))
    return best


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([(2, 2), (3, 2), (2, 1)]), min_size=3, max_size=5),
    st.integers(0, 10**6),
    st.lists(st.none() | st.integers(1, 12).map(float), min_size=2, max_size=2),
)
def test_under_switches_no_order_of_hosts_is_above_the_bound_and_none_above_what_is_proven(
    kinds, seed, uplinks
):
    names = [f"h{number}" for number in range(len(kinds))]
    halves = (tuple(names[: len(kinds) // 2]), tuple(names[len(kinds) // 2 :]))
    below = [
        SwitchTree(name=f"s{number}", hosts=hosts, uplink_gbps=uplink)
        for number, (hosts, uplink) in enumerate(zip(halves, uplinks, strict=True))
    ]
    tree = SwitchTree(name="top", switches=tuple(below))
    machines = [networked_machine(gpus=g, nics=n, numa_nodes=2) for g, n in kinds]
    cluster = cluster_with(machines, rails="only", switches=tree)
    used = list(dict.fromkeys(kinds))
    sources = [MadeUp(seed + number) for number in range(len(used))]
    nodes = [
        node_of(one, source, budget=EXACT)
        for one, source in zip(cluster.classes, sources, strict=True)
    ]
    rates = [chain_rates(*kind, source) for kind, source in zip(used, sources, strict=True)]
    best = best_of_all_orders_of_hosts(cluster, rates)
    found = RingSearch(cluster=cluster, nodes=nodes, settings=SETTINGS).rings(1)
    assert (found is None) == (best == 0)
    if found is not None:
        assert found.rate_gbps <= best <= found.bound_gbps
        if found.order_bound_gbps is None:
            assert found.rate_gbps == best


def set_rates(gpus, nics, source, settings, count):
    """The best set of chains for each dealing of NICs, of all sets there are."""
    machine, best = networked_machine(gpus=gpus, nics=nics, numa_nodes=2), {}
    space = chain_hop_space(view(machine, Knowledge(), settings), chains_in_set=count)
    for hops in itertools.product(list(all_chains(space)), repeat=count):
        rings = RingSet(tuple(Ring(tuple(chain)) for chain in hops))
        pairs = tuple(nic_pair(chain) for chain in hops)
        rate = rings.rate(source.measure([rings.flows])[0])
        best[pairs] = max(rate, best.get(pairs, 0.0))
    return best


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 2), st.integers(0, 10**6))
def test_no_dealing_of_doubled_cables_exceeds_the_bound_of_hosts_of_several_gpus(gpus, count, seed):
    machine, source = networked_machine(gpus=gpus, nics=2, numa_nodes=2), MadeUp(seed)
    cluster = cluster_with([machine, machine])
    cables = tuple(Cable.between("h0", [nic], "h1", [1 - nic]) for nic in range(2))
    cluster = msgspec.structs.replace(cluster, cables=cables)
    under = msgspec.structs.replace(SETTINGS, channels=count)
    node = node_of(cluster.classes[0], source, budget=EXACT, cabled=True)
    node.best_under(under, count)
    table = node.table()
    chosen = tuple(msgspec.structs.replace(row, chosen=row.best) for row in table.answers)
    table = msgspec.structs.replace(table, answers=chosen)
    node = ClassStudy(cluster.classes[0], node.task, table)
    rings, _ = best_rings(cluster, [node])
    rates = set_rates(gpus, 2, source, under, rings.ring_count)
    best = 0.0
    for out, into in itertools.product(
        itertools.product(range(2), repeat=rings.ring_count), repeat=2
    ):
        first = rates.get(tuple(zip((1 - nic for nic in into), out, strict=True)), 0.0)
        second = rates.get(tuple(zip((1 - nic for nic in out), into, strict=True)), 0.0)
        best = max(best, min(first, second))
    assert rings.bound_gbps is not None
    assert rings.rate_gbps <= best <= rings.bound_gbps


def test_tuples_of_few_nics_are_all_tried_and_of_many_those_that_chains_lead_to():
    assert set(rail_tuples([[(0, 1), (1, 0)]], [(0, 1)])) == {(0, 1), (1, 0)}
    nics = range(8)
    turned = [(nic, (nic + 1) % 8) for nic in nics]
    found = rail_tuples([turned], [tuple(nics)])
    assert len(found) == 8
    assert tuple(nics) in found
    assert (1, 2, 3, 4, 5, 6, 7, 0) in found


# Whole plans, simulated


@pytest.fixture(scope="module")
def rails():
    """Four nodes of eight GPUs with a NIC each."""
    model = load_bundled("nvswitch-8gpu-8nic")
    reports = [HostReport(host=f"n{i}", machine=model.machine) for i in range(4)]
    cluster = cluster_of(reports, where="test")
    return make_cluster_plan(cluster, [Simulator(model)], ring_counts=(8,), budget=SMALL)


def test_every_nic_carries_one_ring_in_each_direction_on_every_node(rails):
    for passage in rails.paths:
        assert sorted(chain.entry_nic for chain in passage.chains) == list(range(8))
        assert sorted(chain.exit_nic for chain in passage.chains) == list(range(8))
    assert not off_rails(rails)


def test_rings_of_a_cluster_go_over_all_ranks_host_by_host(rails):
    assert len(rails.channel_rings) == rails.settings.channels
    for ring in rails.orders:
        assert sorted(ring) == list(range(32))
        assert [rank // 8 for rank in ring] == sorted(rank // 8 for rank in ring)


def test_a_cluster_plan_is_never_below_stock_and_says_that_it_is_simulated(rails):
    assert rails.rate_gbps >= rails.choices["default"].rate_gbps
    assert rails.simulated
    assert rails.assumed
    assert rails.provenance == "simulated from assumed values"


def test_nccl_is_told_of_the_nics_and_that_rings_change_them(rails):
    assert rails.settings.ib_hca == tuple(f"mlx5_{i}:1" for i in range(8))
    assert rails.settings.cross_nic == 1


def mixed(rails="any", switches=None, **more):
    machines = [
        networked_machine(gpus=2, nics=1, name="two"),
        networked_machine(gpus=4, nics=1, numa_nodes=2, name="four"),
        networked_machine(gpus=1, nics=1, name="one"),
        networked_machine(gpus=2, nics=1, name="two"),
    ]
    cluster = cluster_with(machines, rails=rails, switches=switches)
    sources = [Simulator(model_for(one.machine)) for one in cluster.classes]
    return make_cluster_plan(cluster, sources, budget=SMALL, **more)


def test_nodes_of_different_gpu_counts_are_in_one_ring():
    plan = mixed()
    assert len(plan.cluster.classes) == 3
    assert {len(ring) for ring in plan.orders} == {9}
    for ring in plan.orders:
        assert sorted(ring) == list(range(9))
    # Ranks follow the order planned.
    assert [host.first_rank for host in plan.hosts] == [
        sum(len(plan.class_gpus[plan.cluster.host_classes[name]]) for name in plan.host_order[:at])
        for at in range(4)
    ]


def test_default_nccl_is_as_fast_as_on_its_slowest_class_of_hosts():
    machines = [
        networked_machine(gpus=2, nics=1, mbps=mbps, name=f"at{mbps}") for mbps in (10_000, 100_000)
    ]
    rates = []
    for hosts in ([machines[0]] * 2, [machines[1]] * 2, machines, machines[::-1]):
        cluster = cluster_with(hosts)
        sources = [Simulator(model_for(one.machine)) for one in cluster.classes]
        rates.append(make_cluster_plan(cluster, sources, budget=SMALL).choices["default"].rate_gbps)
    assert rates[0] < rates[1]
    assert rates[2:] == pytest.approx([rates[0]] * 2)


def switches(uplink=None):
    return SwitchTree(
        name="top",
        switches=(
            SwitchTree(name="left", hosts=("h0", "h2"), uplink_gbps=uplink),
            SwitchTree(name="right", hosts=("h1", "h3"), uplink_gbps=uplink),
        ),
    )


def test_hosts_under_one_switch_stay_together_though_they_are_given_apart():
    plan = mixed(switches=switches())
    order = plan.host_order
    assert {frozenset(order[at : at + 2]) for at in range(4)} | {
        frozenset((order[-1], order[0]))
    } >= {frozenset(("h0", "h2")), frozenset(("h1", "h3"))}
    assert plan.order_changed


def test_the_given_order_is_kept_where_that_is_asked_and_shares_the_uplinks():
    kept = mixed(switches=switches(uplink=2.0), keep_order=True)
    free = mixed(switches=switches(uplink=2.0))
    assert kept.host_order == ("h0", "h1", "h2", "h3")
    assert kept.rate_gbps == pytest.approx(1.0)
    assert free.rate_gbps == pytest.approx(2.0)
    assert free.bound_gbps == pytest.approx(2.0)
    # Default NCCL joins the hosts as they are given, and passes each uplink twice.
    for plan in (kept, free):
        assert [
            plan.choices["default"].rate_gbps,
            plan.choices["variables"].rate_gbps,
        ] == pytest.approx([1.0, 1.0])
    # The bound is about all orders, so that a kept one is not proven where another is better.
    assert kept.bound_gbps >= free.rate_gbps
    assert not kept.proven


def test_slow_nics_and_those_of_another_kind_are_left_out():
    machine = networked_machine(gpus=2, nics=2)
    first, second = machine.nics
    slow = msgspec.structs.replace(second, speed_mbps=first.speed_mbps // 10)
    other = msgspec.structs.replace(second, guid="", port=0, speed_mbps=first.speed_mbps * 2)
    for odd in (slow, other):
        assert used_nics(msgspec.structs.replace(machine, nics=(first, odd))) == (0,)


def test_a_nic_with_a_guid_of_zeros_is_one_for_sockets():
    # NCCL writes guid="0x0" for interfaces that it talks to by TCP.
    machine = networked_machine(gpus=2)
    (nic,) = machine.nics
    socket = msgspec.structs.replace(nic, name="eth0", guid="0x0", port=0)
    machine = msgspec.structs.replace(machine, nics=(socket,))
    plan = make_cluster_plan(
        cluster_with([machine, machine]), [Simulator(model_for(machine))], budget=SMALL
    )
    assert (plan.settings.ib_hca, plan.settings.socket_ifname) == ((), ("eth0",))
    rdma = msgspec.structs.replace(nic, index=1, speed_mbps=nic.speed_mbps // 10)
    both = msgspec.structs.replace(machine, nics=(socket, rdma))
    assert used_nics(both) == (1,)


@pytest.mark.parametrize(("sets", "cut_short"), [(3, True), (2000, False)])
def test_a_plan_of_hosts_says_that_the_limit_of_sets_ended_searches(sets, cut_short):
    model = load_bundled("amd-v100")
    cluster = cluster_with([model.machine, model.machine], slots=2)
    plan = make_cluster_plan(cluster, [Simulator(model)], budget=Budget(sets=sets))
    assert plan.cut_short == cut_short


@pytest.mark.parametrize(("legend", "hcas"), [("  NIC0: mlx5_2\n", ("mlx5_2:1",)), ("", ())])
def test_nics_in_nvidia_smi_are_rdma_devices_and_a_label_is_no_name(legend, hcas):
    matrix = "\tGPU0\tGPU1\tNIC0\nGPU0\t X \tPHB\tPHB\nGPU1\tPHB\t X \tPHB\nNIC0\tPHB\tPHB\t X \n"
    machine, _ = parse_nvidia_smi(f"{matrix}\nNIC Legend:\n\n{legend}", where="box.txt")
    cluster = cluster_with([machine, machine])
    plan = make_cluster_plan(cluster, [Simulator(model_for(machine))], budget=SMALL)
    assert (plan.settings.ib_hca, plan.settings.socket_ifname) == (hcas, ())
    assert any("no names of NICs" in notice for notice in plan.notices) == (not hcas)


def test_a_plan_of_nics_that_a_topology_does_not_name_can_be_written(tmp_path):
    machine = load_machine("tests/cases/topologies/ndv4-topo.xml").machine
    machine = msgspec.structs.replace(machine, gpus=machine.gpus[:2])
    cluster = cluster_with([machine, machine])
    plan = make_cluster_plan(cluster, [Simulator(model_for(machine))], budget=SMALL)
    plan.write(tmp_path / "plan", Simulator(model_for(machine)))
    assert load_plan(tmp_path / "plan").settings == plan.settings


def test_a_cluster_of_one_host_is_planned_as_the_machine_is():
    model = load_bundled("h200x4-vm")
    report = HostReport(host="alone", machine=model.machine, knowledge=model.knowledge, slots=2)
    plan = make_cluster_plan(cluster_of([report], where="test"), [Simulator(model)])
    machine = make_plan(model.machine, model.knowledge, Simulator(model), gpus=[0, 1])
    assert plan.host_order == ("alone",)
    assert msgspec.structs.replace(plan, cluster=machine.cluster, hosts=machine.hosts) == machine


def test_hosts_without_nics_are_refused():
    bare = load_bundled("asus-esc8000a-e13p").machine
    with pytest.raises(InputError, match="has no NIC"):
        make_cluster_plan(cluster_with([bare, bare]), [MadeUp(0)])


def test_hosts_of_a_class_with_unequal_ranks_are_refused_by_name():
    machine = networked_machine(gpus=4)
    reports = [
        HostReport(host="a", machine=machine),
        HostReport(host="b", machine=machine, slots=2),
    ]
    with pytest.raises(InputError, match=r"host b: has 2 ranks"):
        make_cluster_plan(cluster_of(reports, where="test"), [MadeUp(0)])


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.99])
def test_an_interrupted_search_gives_the_best_so_far_and_searches_no_more(share):
    machine = networked_machine(gpus=4, nics=2, numa_nodes=2)
    cluster, source = cluster_with([machine, machine]), Simulator(model_for(machine))

    def planned(reporter):
        tables = []
        return make_cluster_plan(cluster, [source], reporter=reporter, tables=tables), tables

    whole = Impatient()
    planned(whole)
    impatient = Impatient(int(share * whole.updates))
    plan, tables = planned(impatient)
    assert plan.cancelled
    assert plan.rate_gbps >= plan.choices["default"].rate_gbps * 0.99
    # While tables are made, nothing more is searched for.
    assert impatient.updates == impatient.at or not tables


# Placing a node's sets on hosts


class Written:
    """Remembers what it was asked, and answers each flow with a rate of its own."""

    simulated = True

    def __init__(self):
        self.sets = []
        self.made_up = MadeUp(3)

    def measure(self, sets):
        self.sets += [str(one) for one in sets]
        return self.made_up.measure(sets)


def test_a_set_that_is_asked_for_again_is_measured_again():
    machine = networked_machine(gpus=1)
    cluster = cluster_with([machine, machine])
    (placement,) = placements(cluster)
    journal = Bench(Simulated())
    placed = Bench(PlacedSource(journal, placement))
    leaving = parse_set("G0->G0->C0->N0->N0")
    first = placed.samples(leaving, 2)
    assert journal.times_measured == 2
    assert first[0].gbps != first[1].gbps
    assert placed.measure([leaving, leaving]) == [first[0], first[0]]
    # Another run over the same journal measures nothing, and gets the same.
    again = Bench(PlacedSource(journal, placement))
    assert again.samples(leaving, 2) == first
    assert journal.times_measured == 2


class Simulated:
    """Every measurement gives another rate."""

    simulated = True

    def __init__(self):
        self._count = 0

    def measure(self, sets):
        self._count += 1
        return MadeUp(self._count, high=1000).measure(sets)


def test_a_nodes_set_is_measured_between_a_host_and_its_partner():
    machine = networked_machine(gpus=2, nics=2, numa_nodes=2)
    cluster = cluster_with([machine, machine])
    (placement,) = placements(cluster)
    below = Written()
    text = "N1->N1->C0->G0->G0 G0->G0->C1->G1->G1 G1->G1->C1->N0->N0"
    (answer,) = PlacedSource(Bench(below), placement).measure([parse_set(text)])
    placed = {
        "h1.C1->h1.N1->h0.N1->h0.N1->h0.C0->h0.G0->h0.G0": "N1->N1->C0->G0->G0",
        "h0.G0->h0.G0->h0.C1->h0.G1->h0.G1": "G0->G0->C1->G1->G1",
        "h0.G1->h0.G1->h0.C1->h0.N0->h1.N0->h1.N0->h1.C0": "G1->G1->C1->N0->N0",
    }
    assert below.sets == [" ".join(sorted(placed))]
    assert str(answer.transfers) == str(parse_set(text))
    rates = dict(zip(str(answer.transfers).split(), answer.gbps, strict=True))
    for there, here in placed.items():
        (flow,) = parse_set(there).flows
        assert rates[here] == below.made_up.rate(flow)


LANES = {f"h{host}.G{gpu}": 64 for host in range(2) for gpu in range(4)}


class CarriedOnly:
    """As NCCL: both ends are GPUs, and all that receive land alike, as do all that send."""

    simulated = False

    def __init__(self):
        self.made_up = MadeUp(5, high=40)

    def measure(self, sets):
        for one in sets:
            between = [flow for flow in one.flows if flow.is_network]
            links = program_for(one, lanes=LANES, network="nccl").links
            assert len(links) == len(between)
            assert all(link.carrier for link in links)
            process_variables(links)
        return [msgspec.structs.replace(one, simulated=False) for one in self.made_up.measure(sets)]


def test_where_nccl_carries_them_flows_end_in_gpus_of_the_partner_and_land_as_one_rule_has_it():
    machine = networked_machine(gpus=4, nics=2, numa_nodes=2, gdr=True)
    cluster = cluster_with([machine, machine])
    (placement,) = placements(cluster, NIC_TRANSPORTS["nccl"])
    # Each beside its NIC, on its NUMA node.
    assert {nic: end.gpu for nic, end in placement.ends.items()} == {0: 0, 1: 2}
    source = PlacedSource(Bench(CarriedOnly()), placement)
    texts = [
        "N0->N0->G0 G0->G0->G1 G1->N1->N1",
        "N0->N0->C0->G0->G0 G1->G1->C1->N1->N1",
        "N0->N0->G0 G0->G0->G1 G1->G1->C1->N1->N1",
        "G1->N1->N1",
        "N1->N1->C0->G3->G3",
    ]
    for found in source.measure([parse_set(text) for text in texts]):
        assert not found.assumed
        assert not found.simulated
        assert min(found.gbps) > 0


def test_what_goes_by_another_gpus_memory_is_taken_from_the_port_where_nccl_carries():
    machine = networked_machine(gpus=2, nics=1, gdr=True)
    cluster = cluster_with([machine, machine])
    (placement,) = placements(cluster, NIC_TRANSPORTS["nccl"])
    source = PlacedSource(Bench(CarriedOnly()), placement)
    (found,) = source.measure([parse_set("G0->G0->G1->N0->N0 N0->N0->G1")])
    assert found.assumed
    assert (
        dict(zip(str(found.transfers).split(), found.gbps, strict=True))["G0->G0->G1->N0->N0"]
        == 12.5
    )


def test_nics_have_gpus_of_their_own_while_there_are_enough_beside_them():
    machine = networked_machine(gpus=4, nics=4, numa_nodes=2)
    assert gpus_beside_nics(machine, (0, 1, 2, 3)) == {0: 0, 1: 1, 2: 2, 3: 3}
    few = networked_machine(gpus=2, nics=4, numa_nodes=2)
    assert gpus_beside_nics(few, (0, 1, 2, 3)) == {0: 0, 1: 0, 2: 1, 3: 1}


class Constant(MadeUp):
    """Every flow has the same rate."""

    def rate(self, flow):
        return self._high


@pytest.mark.parametrize(("sm", "channels"), [(80, 1), (90, 2)])
def test_the_channels_that_were_measured_are_those_that_nccl_ends_up_with(sm, channels):
    machine = networked_machine(gpus=2, nics=1)
    machine = msgspec.structs.replace(
        machine, gpus=tuple(msgspec.structs.replace(gpu, sm=sm) for gpu in machine.gpus)
    )
    cluster = cluster_with([machine, machine])
    made = make_cluster_plan(cluster, [Constant(1, high=60.0)], ring_counts=(1,), budget=SMALL)
    assert made.rate_gbps == 60
    # Fewest channels would do; but one of 60 GB/s NCCL doubles twice on several nodes of sm 90.
    assert made.settings.channels == channels
    speed = made.rate_gbps / channels
    assert (
        final_channels(Settings(channels=channels), sm=sm, nodes=2, speed_intra=speed)
        == 2 * channels
    )
    flow = made.paths[0].chains[0].hops[0].flow
    assert flow.blocks == 2 * channels


def test_few_sets_are_measured_where_few_are_allowed():
    model = load_bundled("amd-3090")
    cluster = cluster_with([model.machine] * 3)
    few = make_cluster_plan(cluster, [Simulator(model)], budget=Budget(sets=1))
    usual = make_cluster_plan(cluster, [Simulator(model)], budget=Budget(sets=200))
    assert few.sets_measured < usual.sets_measured / 2


def test_chains_between_given_nics_share_what_is_left_of_the_budget():
    machine = networked_machine(gpus=6, nics=4, numa_nodes=2)
    one = cluster_with([machine, machine]).classes[0]
    study = ClassStudy(one, task_of(one, MadeUp(7), budget=Budget(sets=100, idle_sets=40)))
    before = study.task.source.sets_measured
    ends = itertools.combinations(itertools.product(range(4), repeat=2), 2)
    pairs = [tuple(sorted(pair)) for pair in itertools.islice(ends, 40)]
    found = [study.between(study.choices[0][0], each) for each in pairs]
    # A search that has nothing left measures one set, so that a plan is possible all the same.
    assert study.task.source.sets_measured - before < 100 + len(pairs)
    assert None not in found


def test_a_ring_count_that_does_not_come_about_is_told():
    model = load_bundled("amd-3090")
    cluster = cluster_with([model.machine] * 2)
    plan = make_cluster_plan(cluster, [Simulator(model)], ring_counts=(3,), budget=SMALL)
    assert plan.ring_count != 3
    assert any("sets of 3 rings were asked" in notice for notice in plan.notices)


def partners(placement):
    return placement.host, {end.host for end in placement.ends.values()}


def test_partners_are_under_the_same_switch_and_of_the_same_class_where_there_are_such():
    one, other = networked_machine(gpus=2), networked_machine(gpus=4)
    cluster = cluster_with([one, other, one, one, other])
    tree = SwitchTree(
        name="top",
        switches=(
            SwitchTree(name="a", hosts=("h0", "h3")),
            SwitchTree(name="b", hosts=("h2", "h4", "h1")),
        ),
    )
    assert [partners(p) for p in placements(cluster)] == [("h0", {"h2"}), ("h1", {"h4"})]
    under = msgspec.structs.replace(cluster, switches=tree)
    assert [partners(p) for p in placements(under)] == [("h0", {"h3"}), ("h1", {"h4"})]


def test_the_whole_ring_has_every_flow_of_every_host_and_crosses_to_the_next():
    plan = mixed()
    flows = whole_ring(plan).flows
    hops = sum(len(chain.gpus) - 1 for h in plan.hosts for chain in plan.paths[h.path].chains)
    assert len(flows) == hops + 4 * plan.ring_count
    crossing = [flow.hosts for flow in flows if flow.is_network]
    order = plan.host_order
    expected = {(one, other) for one, other in zip(order, (*order[1:], order[0]), strict=True)}
    assert set(crossing) == expected


# Uplinks that were measured


def test_uplinks_get_a_rate_only_where_pairs_across_them_are_slower():
    tree = switches()
    beside = [("h0", "h2", 10.0), ("h3", "h1", 10.0)]
    slow = estimate_uplinks(tree, [*beside, ("h0", "h1", 4.0), ("h2", "h3", 5.0)])
    assert [one.uplink_gbps for one in slow.switches] == [5.0, 5.0]
    both_ways = estimate_uplinks(tree, [*beside, ("h0", "h1", 4.0), ("h3", "h2", 3.0)])
    assert [one.uplink_gbps for one in both_ways.switches] == [3.0, 3.0]
    quick = estimate_uplinks(tree, [*beside, ("h0", "h1", 9.5)])
    assert quick == tree
    told = estimate_uplinks(switches(uplink=2.0), [*beside, ("h0", "h1", 4.0)])
    assert told == switches(uplink=2.0)


class Slow(Simulator):
    """Each set takes so many seconds of a clock that stands still otherwise."""

    set_s, now_s = 1.0, 0.0

    def measure(self, sets):
        type(self).now_s += self.set_s * len(sets)
        return super().measure(sets)


@pytest.mark.parametrize(
    ("names", "set_s", "most_s"),
    [
        (("h200x4-vm", "h200x4-vm"), 0.1, 20.0),
        (("h200x4-vm", "nvswitch-8gpu-8nic"), 0.5, 20.0),
        (("h200x4-vm", "h200x4-vm"), 10.0, 1.0),
    ],
)
def test_measuring_hosts_ends_in_time_and_leaves_some_to_all_classes_and_tables(
    names, set_s, most_s, monkeypatch
):
    monkeypatch.setattr(Slow, "set_s", set_s)
    monkeypatch.setattr(Slow, "now_s", 100.0)
    monkeypatch.setattr(time, "monotonic", lambda: Slow.now_s)
    models = {name: load_bundled(name) for name in names}
    cluster = cluster_with([models[name].machine for name in names])
    sources = [Slow(models[part.machine.name], noise=0.05) for part in cluster.classes]
    tables, budget = [], Budget(seconds=most_s)
    plan = make_cluster_plan(cluster, sources, budget=budget, gpus_per_job="2", tables=tables)
    assert 0 < Slow.now_s - 100.0 <= max(most_s, set_s)
    assert plan.choices["default"].rate_gbps
    assert any("limit of sets or seconds" in text for text in plan.notices)
    assert len(tables) == (1 if set_s > most_s else 2) * len(cluster.classes)


UNLIKE = ("h200x4-vm", "nvswitch-8gpu-8nic")


@pytest.mark.parametrize("names", [UNLIKE, UNLIKE[::-1]])
@pytest.mark.parametrize("set_s", [1e-9, 1.0, 10.0])
def test_unlike_classes_without_time_get_the_limit_once_more_and_a_set_each(
    names, set_s, monkeypatch
):
    monkeypatch.setattr(Slow, "set_s", set_s)
    monkeypatch.setattr(Slow, "now_s", 100.0)
    monkeypatch.setattr(time, "monotonic", lambda: Slow.now_s)
    models, limit_s = [load_bundled(name) for name in names], set_s / 10
    cluster = cluster_with([model.machine for model in models])
    sources = [Slow(model) for model in models]
    plan = make_cluster_plan(cluster, sources, budget=Budget(seconds=limit_s), tables=[])
    assert plan.rate_gbps >= plan.choices["default"].rate_gbps > 0
    assert Slow.now_s - 100.0 <= 2 * (limit_s + len(names) * set_s)
    assert plan.cut_short
