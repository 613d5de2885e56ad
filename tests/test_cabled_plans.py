"""Plans for hosts that cables join: chains, files, variables, and what NCCL makes of them."""

import itertools
import json
import random
import re
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path, PurePosixPath

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tccl_py.errors import InputError, SearchError
from tccl_py.experiments.target import read_target
from tccl_py.merge.cables import steps_between
from tccl_py.model.cluster import Cable, Cluster, Host, NodeClass, check_cluster
from tccl_py.nccl.network import route_nics
from tccl_py.nccl.settings import Settings, environment
from tccl_py.nccl.view import usable_nics
from tccl_py.plan.directory import write_plan
from tccl_py.plan.host_files import ClusterFiles, host_graphs
from tccl_py.plan.tables import table_files
from tccl_py.planning.cables import notices_of_cables
from tccl_py.planning.handle import load_plan
from tccl_py.planning.jobs import plan_of_job
from tccl_py.planning.opening_hosts import simulated_cluster
from tccl_py.planning.planner import make_cluster_plan
from tccl_py.readers.hosts import HostSlots
from tccl_py.search.problem import Budget
from tccl_py.simulator.descriptions import load_bundled, load_machine, model_for
from tccl_py.simulator.source import Simulator
from tests.cables.cases import CLUSTERS, DOUBLED, MIRRORED, MODEL, cluster, hand_made, planned, ring
from tests.cables.network import PORTS
from tests.commands import tccl
from tests.nccl_cases import CASES

MODEL_SETTINGS = Settings()


def graphs(text):
    """The graphs of a file by number: attributes, and channels as numbers of NICs in and out."""
    return {
        graph.get("id"): (
            graph.attrib,
            [tuple(int(net.get("dev"), 0) for net in part.findall("net")) for part in graph],
        )
        for graph in ET.fromstring(text).findall("graph")
    }


def ring_channels(plan, host):
    return graphs(ClusterFiles(plan).texts(PurePosixPath("/plan"))[f"hosts/{host}.xml"])["0"][1]


def test_files_of_three_hosts_equal_the_hand_made_ones_but_for_true_speeds_and_a_tree():
    plan = planned(ring(leave=1))
    assert plan.host_order == ("spark0", "spark1", "spark2")
    files = ClusterFiles(plan).texts(PurePosixPath("/plan"))
    public, channels = graphs(hand_made())["0"]
    for host in plan.host_order:
        written = graphs(files[f"hosts/{host}.xml"])
        head, ours = written["0"]
        assert ours == channels == [(0, 1), (2, 3)] * 4
        differing = {name for name in head | public if head.get(name) != public.get(name)}
        # NCCL chooses protocols by the speed of all channels. The public file repeats what NCCL's
        # own search finds, 8 x 0.24 = 1.92 GB/s; owners measured 13.86 GB/s with it.
        assert differing == {"speedintra", "speedinter"}
        assert head["speedintra"] == head["speedinter"]
        assert float(head["speedintra"]) * 8 == pytest.approx(23.7, rel=1e-4)
        # Without a tree in the file NCCL searches one, and takes no more channels than that has.
        assert written.keys() == {"0", "1"}
        assert written["1"][0]["nchannels"] == "8"


def test_along_the_cables_of_the_tutorial_nccl_makes_the_connections_of_the_hand_made_files():
    plan = planned(ring())
    (_, channels), steps = graphs(hand_made())["0"], steps_between(plan.cluster.cables)
    for host, following in zip(plan.host_order, [*plan.host_order[1:], "spark0"], strict=True):
        ours = ring_channels(plan, host)
        # Data enters by port 1 there: the public channels with their ends exchanged.
        assert ours == [(out, into) for into, out in channels]
        # NCCL knows a host's only GPU by the first NIC of a channel, and corrects either end.
        for (by, _), (public, _) in zip(ours, channels, strict=True):
            step = steps[host, following]
            connections = {route_nics(nic, nic, step, subnet_routing=True) for nic in (by, public)}
            assert len(connections) == 1
            assert connections <= set(step)


def test_functions_of_a_port_alternate_in_plans_of_more_rings_too():
    plan = planned(ring(3, 1), ring_counts=(4,))
    assert plan.ring_count == 4
    for host in plan.host_order:
        assert ring_channels(plan, host) == [(0, 1), (2, 3)] * 2
    assert plan.proven


def test_the_variables_are_those_of_the_public_launchers_but_for_nccls_defaults():
    plan = planned(ring())
    for choice in ("variables", "graph"):
        assert environment(plan.choices[choice].settings) == {
            "NCCL_ALGO": "Ring",
            "NCCL_CROSS_NIC": "1",
            "NCCL_IB_HCA": "=rocep1s0f0:1,rocep1s0f1:1,roceP2p1s0f0:1,roceP2p1s0f1:1",
            "NCCL_IB_MERGE_NICS": "0",
            "NCCL_IB_SUBNET_AWARE_ROUTING": "1",
        }
    assert plan.choices["default"].rate_gbps is None
    assert "which no cable joins" in plan.choices["default"].note


@pytest.mark.parametrize("name", CLUSTERS)
def test_nccl_uses_the_cables_of_any_cabling(name):
    plan = planned(*CLUSTERS[name])
    assert all(used == named for used, named in used_by_nccl(plan))


def used_by_nccl(plan):
    """The NICs that each connection of the files' channels gets, by NCCL's rule, in host order."""
    steps = steps_between(plan.cluster.cables)
    order, count = plan.host_order, plan.ring_count
    entries = {host.name: plan.paths[host.path].chains for host in plan.hosts}
    for at, host in enumerate(order):
        following = order[(at + 1) % len(order)]
        for number in range(count):
            sender, listener = entries[host][number], entries[following][number]
            step = steps[host, following]
            # NCCL gives a host's only GPU the entry in both directions.
            pair = route_nics(sender.entry_nic, listener.entry_nic, step, subnet_routing=True)
            yield pair, (sender.exit_nic, listener.entry_nic)


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=3, max_size=5))
def test_nccl_uses_the_cables_of_a_plan_whichever_ports_they_join(turns):
    hosts = len(turns)
    enters = [into for into, _ in turns]
    # Each host has a cable at both ports; the hosts' ends are turned at random.
    cables = [(h, 1 - enters[h], (h + 1) % hosts, enters[(h + 1) % hosts]) for h in range(hosts)]
    plan = planned(cables, hosts, ring_counts=(2,))
    for used, named in used_by_nccl(plan):
        assert used == named


def test_ports_that_face_their_like_get_files_of_their_own_where_nccls_own_rings_fail():
    plan = planned(MIRRORED)
    first = [ring_channels(plan, f"spark{host}")[0] for host in range(3)]
    assert first == [(1, 0), (0, 1), (1, 0)]
    assert plan.choices["variables"].rate_gbps is None
    assert plan.recommended == "graph"


PUBLISHED = json.loads((CASES / "published" / "cabled-hosts.json").read_text())


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row['hosts']}-{row['gbps']}")
def test_published_rates_are_predicted_by_their_own_configuration_and_no_bound_is_below(row):
    cables = {"ring": ring(row["hosts"]), "one": [(0, 0, 1, 1)], "two": DOUBLED}[row["cables"]]
    ports = PORTS if row["functions"] == "both of each port" else tuple(p[:1] for p in PORTS)
    plan = planned(cables, row["hosts"], ports)
    assert row["gbps"] * 0.99 <= plan.rate_gbps <= row["gbps"] * 1.15
    assert plan.bound_gbps >= row["gbps"] * 0.99


def test_both_functions_of_a_port_are_used_where_that_is_faster():
    plan = planned(ring())
    ends = {(chain.entry_nic, chain.exit_nic) for path in plan.paths for chain in path.chains}
    assert ends == {(1, 0), (3, 2)}


def test_jobs_over_parts_of_the_hosts_are_planned_from_the_tables(tmp_path):
    tables = []
    plan = planned(ring(), tables=tables)
    write_plan(plan, tmp_path, tables=table_files(tables))
    hosts = [HostSlots("spark2"), HostSlots("spark0")]
    job = plan_of_job(load_plan(tmp_path), tmp_path, hosts)
    assert job.rate_gbps == pytest.approx(23.7, rel=0.01)
    assert all(used == named for used, named in used_by_nccl(job))


def test_a_cabling_without_a_ring_names_the_hosts_without_two_ways_before_any_measurement():
    with pytest.raises(SearchError, match=r"no two lead to spark0, spark2"):
        make_cluster_plan(cluster(ring()[:2]), [None])


def test_nccl_that_cannot_follow_subnets_is_refused():
    for version in ("2.28.9", "2.30.4"):
        with pytest.raises(InputError, match=r"NCCL 2\.30\.7 is the first"):
            planned(ring(), version=version)
    assert planned(ring(), version="2.30.7").settings.subnet_routing


def test_a_search_under_one_choice_of_settings_keeps_to_a_small_limit_of_sets(monkeypatch):
    few = planned(ring(), budget=Budget(sets=1))
    monkeypatch.setattr("tccl_py.planning.settings_search.MIN_SETS", 1)
    assert planned(ring(), budget=Budget(sets=1)).sets_measured == few.sets_measured
    assert few.rate_gbps == planned(ring()).rate_gbps


def test_the_bound_of_a_cabled_plan_is_not_below_any_order():
    plan = planned(ring(4), 4)
    assert plan.bound_gbps is None or plan.bound_gbps >= plan.rate_gbps


def of_classes(models, cables):
    """Plan for hosts of a class each, with cables (host, NICs, host, NICs)."""
    kinds = [
        NodeClass(name=f"class{n}", machine=model.machine, knowledge=model.knowledge)
        for n, model in enumerate(models)
    ]
    made = Cluster(
        hosts=tuple(Host(name=f"spark{n}", node_class=n, slots=1) for n in range(len(kinds))),
        classes=tuple(kinds),
        cables=tuple(Cable.between(f"spark{a}", x, f"spark{b}", y) for a, x, b, y in cables),
    )
    return make_cluster_plan(check_cluster(made, where="cluster"), list(map(Simulator, models)))


def test_hosts_whose_cables_are_at_other_nics_are_told_their_own():
    # The last has no cable at two of the NICs that the others use.
    plan = of_classes([MODEL] * 3, [(0, (0, 2), 1, (1, 3)), (1, (0,), 2, (1,)), (2, (0,), 0, (1,))])
    variables = plan.choices["variables"]
    assert variables.fails is None and variables.rate_gbps
    for number, ends in enumerate([{0, 1, 2}, {0, 1, 3}, {0, 1}]):
        own = plan.settings_on(number, variables.settings)
        assert set(usable_nics(plan.cluster.classes[number].machine, own)) == ends


def test_default_nccl_has_no_rate_where_hosts_of_any_class_have_nics_without_cable(tmp_path):
    text = (Path(__file__).parent / "cables" / "host.xml").read_text()
    # The first card of two.
    (tmp_path / "host.xml").write_text(
        re.sub(r'<pci busid="0000:02.*?</pci>', "", text, flags=re.S)
    )
    small = load_machine(str(tmp_path / "host.xml"))
    for models in ((small, MODEL), (MODEL, small)):
        plan = of_classes(models, [(0, (nic,), 1, (nic,)) for nic in range(2)])
        assert plan.choices["default"].rate_gbps is None
        assert plan.recommended == "variables"


def test_rings_over_the_same_gpus_are_rated_by_the_nics_of_each_planned_chain():
    plan, source = planned(ring(), ring_counts=(2,)), Simulator(MODEL)
    ends = {(c.entry_nic, c.exit_nic) for host in plan.hosts for c in plan.paths[host.path].chains}
    assert len(set(plan.orders)) == 1 and len(ends) == 2
    for rings in (plan.orders, plan.channel_rings):
        assert plan.rate(rings, source=source) == pytest.approx(plan.rate_gbps)


def test_what_nccl_cannot_do_over_cables_is_told():
    (reasons,) = planned(ring()).notices
    assert all(name in reasons for name in environment(planned(ring()).settings))
    pair = planned(ring()[:1], 2)
    assert [name in pair.notices[0] for name in ("NCCL_CROSS_NIC", "NCCL_IB_HCA")] == [False, True]
    _, apart = planned(ring(4), 4).notices
    assert "spark0 and spark2, spark1 and spark3" in apart
    _, facing = planned(MIRRORED).notices
    assert "spark0 to spark1 by rocep1s0f1, roceP2p1s0f1" in facing


def test_the_variables_of_sockets_are_told_where_sockets_are_used():
    plan = planned(ring())
    sockets = msgspec.structs.replace(plan.settings, ib_hca=(), socket_ifname=("p0", "p1"))
    reasons = next(notices_of_cables(plan.cluster, sockets))
    assert "NCCL_SOCKET_IFNAME fixes" in reasons and "NCCL_IB_HCA" not in reasons


def test_hosts_with_cables_at_different_ports_are_planned_apart(tmp_path):
    file = tmp_path / "cables.yaml"
    file.write_text("cables: [[a:rocep1s0f0, b:rocep1s0f1]]")
    made = simulated_cluster(load_bundled("gb10-2port"), None, "a,b", file)
    assert [one.name for one in made.classes] == ["gb10-2port", "gb10-2port-a"]
    plan = make_cluster_plan(made, [Simulator(load_bundled("gb10-2port"))] * 2)
    ends = [(c.entry_nic, c.exit_nic) for host in plan.hosts for c in plan.paths[host.path].chains]
    assert set(ends) == {(0, 0), (1, 1)}
    assert plan.choices["default"].rate_gbps is None
    assert plan.choices["variables"].rate_gbps == pytest.approx(13.86, rel=0.01)


@pytest.mark.parametrize(
    ("cables", "names"), [(ring(), {"default"}), (MIRRORED, {"default", "graph"})]
)
def test_every_arm_of_a_verification_has_the_variables_without_which_nothing_connects(
    cables, names, tmp_path
):
    write_plan(planned(cables), tmp_path)
    target = read_target(load_plan(tmp_path), tmp_path)
    assert names <= {arm.name for arm in target.arms}
    assert all("NCCL_IB_SUBNET_AWARE_ROUTING" in arm.variables for arm in target.arms)


def test_a_plan_whose_jobs_need_variables_never_recommends_to_leave_nccl_as_it_is():
    plan = msgspec.structs.replace(planned(ring()), winner="default")
    assert plan.recommended == "variables"
    facing = planned([(0, 0, 1, 0), (0, 1, 1, 1)], 2)
    assert facing.choices["default"].rate_gbps is not None
    assert facing.control == "default"


def test_the_plugin_of_a_job_has_the_file_of_each_host_and_needs_the_variables():
    plan = planned(MIRRORED)
    files = ClusterFiles(plan).plugin(ClusterFiles(plan).texts(PurePosixPath("/plan")))
    for host in plan.host_order:
        index = files[f"hosts/{host}.index"]
        assert "need NCCL_IB_SUBNET_AWARE_ROUTING 1" in index.splitlines()
        (name,) = re.findall(r"^set 0 (\S+)", index, re.MULTILINE)
        assert files[f"hosts/{name}"] == host_graphs(plan)[host]


def unlike_hosts(seed):
    """Three or four hosts in a ring of cables and some more, with ports of 100 and 200 Gbit/s."""
    rng = random.Random(seed)
    names = [f"h{n}" for n in range(rng.randrange(3, 5))]
    ports = {name: rng.randrange(2, 5) for name in names}
    pairs = list(zip(names, [*names[1:], names[0]], strict=True))
    more = list(itertools.combinations(names, 2))
    used, cables = Counter[str](), []
    for one, other in (*pairs, *rng.sample(more, len(more))):
        if used[one] < ports[one] and used[other] < ports[other]:
            cables.append(Cable.between(one, [used[one]], other, [used[other]]))
            used += Counter((one, other))
    classes = []
    for name in names:
        nics = tuple(
            msgspec.structs.replace(
                MODEL.machine.nics[0],
                index=n,
                name=f"m{n}",
                bus_id=f"000{n}:01:00.0",
                guid=f"0x{n + 1}",
                speed_mbps=rng.choice((100_000, 200_000)),
            )
            for n in range(used[name])
        )
        machine = msgspec.structs.replace(MODEL.machine, name=name, nics=nics)
        classes.append(NodeClass(name=name, machine=machine, knowledge=MODEL.knowledge))
    hosts = tuple(Host(name=name, node_class=n, slots=1) for n, name in enumerate(names))
    made = Cluster(hosts=hosts, classes=tuple(classes), cables=tuple(cables))
    return check_cluster(made, where="cluster")


@pytest.mark.parametrize("seed", range(4))
def test_no_number_of_rings_alone_is_faster_than_all_of_them(seed):
    cluster = unlike_hosts(seed)

    def rate(*counts):
        sources = [Simulator(model_for(one.machine, one.knowledge)) for one in cluster.classes]
        try:
            return make_cluster_plan(cluster, sources, ring_counts=counts).rate_gbps
        except SearchError:
            return 0.0

    counts = (1, 2, 3, 4)
    assert rate(*counts) >= max(map(rate, counts)) * 0.99


@pytest.mark.parametrize(("near", "far"), list(itertools.product(("p0", "p1"), repeat=2)))
def test_the_command_plans_two_hosts_whichever_ports_a_cable_joins(near, far, tmp_path):
    file = tmp_path / "cables.yaml"
    ports = "{p0: [rocep1s0f0, roceP2p1s0f0], p1: [rocep1s0f1, roceP2p1s0f1]}"
    file.write_text(f"ports: {ports}\ncables: [[a:{near}, b:{far}]]\n")
    words = ("--simulate", "gb10-2port", "--hosts", "a,b", "--switches", str(file), "--json")
    ran = tccl("plan", str(tmp_path / "plan"), *words)
    assert ran.exit_code == 0, ran.stderr
    made = json.loads(ran.stdout)
    assert made["choices"][made["recommended"]]["rate_gbps"] == pytest.approx(23.7)


@pytest.mark.parametrize(
    ("ports", "parts"),
    [
        (PORTS, []),
        (((0, 1), (2, 3)), ["two ports", "rocep1s0f0", "rocep1s0f1"]),
        (((0,), (1,)), ["half of a port", "roceP2p1s0f0", "roceP2p1s0f1"]),
    ],
)
def test_functions_of_two_ports_at_one_cable_and_half_ports_are_noticed(ports, parts):
    notices = list(notices_of_cables(cluster(DOUBLED, 2, ports), MODEL_SETTINGS))
    told = [one for one in notices if "two ports" in one or "half of a port" in one]
    assert len(told) == bool(parts)
    assert all(part in told[0] for part in parts)
