"""Hosts on rails, where a NIC reaches only the same NIC of other hosts: no choice leaves them."""

import functools
import json
import shutil
from pathlib import PurePosixPath

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tccl_py.delivery.job import JobRequest, deliver
from tccl_py.delivery.scripts import script
from tccl_py.errors import InputError, SearchError
from tccl_py.experiments.target import read_target
from tccl_py.model.cluster import Cluster, Host, NodeClass
from tccl_py.model.machine import Knowledge
from tccl_py.model.reports import HostReport, cluster_of, with_rails
from tccl_py.nccl.connections import HostChannels, ring_connections, tree_connections
from tccl_py.nccl.graph_file import parse_graph_file
from tccl_py.nccl.graph_search import DefaultChain, search_ring, search_tree
from tccl_py.nccl.plugin import LIBRARY
from tccl_py.nccl.settings import Settings, environment
from tccl_py.nccl.view import usable_nics, view
from tccl_py.plan.chains import Choice
from tccl_py.plan.directory import write_new_plan
from tccl_py.plan.host_files import ClusterFiles
from tccl_py.plan.load import check_plan, load_plan
from tccl_py.plan.text import advice, show_plan
from tccl_py.planning.cables import failing
from tccl_py.planning.jobs import as_achieved, plan_of_job
from tccl_py.planning.planner import make_cluster_plan
from tccl_py.readers.cables import rails_by_name, rails_of_subnets
from tccl_py.readers.hosts import HostSlots
from tccl_py.search.problem import Budget
from tccl_py.simulator.descriptions import load_machine
from tccl_py.simulator.source import Simulator
from tests.nccl_cases import CASES, machine
from tests.nccl_exchange import Graph, connections, off_rails
from tests.nccl_nodes import with_nics
from tests.planned import needing_a_graph, rebind, replace_plan
from tests.test_cli_plan import done
from tests.test_cluster_directory import named_host, sourced
from tests.toy import toy_machine

REPORT = CASES / "clusters" / "nvl4_2rails.xml"


def product(rings, trees):
    """Return the connections of rings and of trees by the product, of the same graphs."""
    hosts = [
        HostChannels(
            rings=tuple(DefaultChain(a, tuple(g), b) for g, (a, b) in zip(*ring[:2], strict=True)),
            trees=tuple(map(tuple, tree.inter)),
            cross_nic=ring.crossnic,
            spreads=tree.balanced,
        )
        for ring, tree in zip(rings, trees, strict=True)
    ]
    links = {tuple(link) for links in ring_connections(hosts) for link in links}
    return links, set(map(tuple, tree_connections(hosts)))


@st.composite
def graphs(draw, gpus, nics, channels):
    """Any graphs of a host, whether NCCL's search would find them or not."""
    orders = st.lists(st.permutations(range(gpus)), min_size=channels, max_size=channels)
    ends = st.lists(
        st.tuples(*[st.integers(0, nics - 1)] * 2), min_size=channels, max_size=channels
    )
    crossnic, balanced = draw(st.sampled_from([0, 1, 2])), draw(st.booleans()) and gpus > 1
    ring = Graph(draw(orders), draw(ends), crossnic)
    return ring, Graph(draw(orders), draw(ends), balanced=balanced)


@given(st.data(), st.integers(2, 9), st.integers(1, 8), st.integers(1, 4), st.integers(1, 4))
def test_any_rings_and_trees_are_connected_as_nccl_connects_them(data, hosts, nics, gpus, channels):
    made = [data.draw(graphs(gpus, nics, channels)) for _ in range(hosts)]
    rings, trees = zip(*made, strict=True)
    expected = connections(rings, trees)
    assert product(rings, trees) == expected


@functools.cache
def searched(gpus, rails, kind, **settings):
    """NCCL's own ring graph and tree graph on hosts with as many rails."""
    if kind == "switches":
        node = toy_machine(gpus=gpus, numa_nodes=min(2, gpus), per_switch=2)
        node = with_nics(node, {rail: f"G{rail % gpus}" for rail in range(rails)})
        settings["net_disable_intra"] = True
    else:
        node = machine("e_hgx_h100.xml")
        settings["ib_hca"] = tuple(f"mlx5_{rail}" for rail in range(rails))
    seen = view(node, Knowledge(), Settings(**settings), gpus=tuple(range(gpus)))
    ring = search_ring(seen, nodes=2)
    tree = search_tree(seen, nodes=2, channels=len(ring.orders))
    balanced = tree.pattern == "balanced tree"
    return (
        Graph(ring.orders, ring.nics, ring.cross_nic),
        Graph(tree.orders, tree.nics, balanced=balanced),
    )


def cluster(node, hosts, **changes):
    node_class = NodeClass(name="box", machine=node)
    gpus = len(node.gpus)
    names = [Host(name=f"n{n}", node_class=0, slots=gpus) for n in range(1, hosts + 1)]
    return Cluster(hosts=tuple(names), classes=(node_class,), rails="only", **changes)


@pytest.mark.parametrize("rails", range(1, 9))
@pytest.mark.parametrize(("kind", "gpus"), [("switches", 1), ("switches", 2), ("hgx", 8)])
def test_a_choice_fails_exactly_where_nccl_would_leave_a_rail(kind, gpus, rails):
    node = with_nics(toy_machine(gpus=1), dict.fromkeys(range(8), "G0"))
    outcomes = set()
    for cross_nic in (None, 0, 1):
        ring, tree = searched(gpus, rails, kind, cross_nic=cross_nic)
        for hosts in range(2, 10):
            by_rings, by_trees = map(off_rails, connections([ring] * hosts, [tree] * hosts))
            channels = HostChannels(
                rings=tuple(DefaultChain(a, g, b) for g, (a, b) in zip(*ring[:2], strict=True)),
                trees=tree.inter,
                cross_nic=ring.crossnic,
                spreads=tree.balanced,
            )
            for algo, crossed in ((None, by_rings | by_trees), ("Ring", by_rings)):
                choice = Choice(name="default", settings=Settings(algo=algo), predicted_gbps=1.0)
                judged = failing(choice, cluster(node, hosts), [[channels]])
                assert (judged.fails is not None) == bool(crossed)
                if judged.fails:
                    assert judged.rate_gbps is None
                    named = {(pair.source, pair.target) for pair in judged.fails.pairs}
                    ends = {(f"n{a + 1} N{x}", f"n{b + 1} N{y}") for a, x, b, y in crossed}
                    assert named <= ends and (len(named) == 16 or named == ends)
                outcomes.add(bool(crossed))
    assert outcomes == ({False} if rails == 1 or gpus == 1 else {False, True})


@functools.cache
def planned(hosts):
    """A plan over hosts on two rails whose own rings cross in the host, and its tables."""
    model = load_machine(REPORT, p2p=True)
    tables = []
    budget = Budget(sets=60, idle_sets=10)
    plan = make_cluster_plan(
        cluster(model.machine, hosts), [Simulator(model)], budget=budget, tables=tables
    )
    return plan, tables


def of_file(text):
    """Return the ring graph and the tree graph of a graph file."""
    made = parse_graph_file(text, where="graph file")
    return tuple(
        Graph(
            [channel.gpus for channel in made[number].channels],
            [channel.nets for channel in made[number].channels],
            made[number].crossnic,
            made[number].pattern == 1,
        )
        for number in (0, 1)
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of a plan over nine hosts, as an earlier program and a verification left it."""
    plan, tables = planned(9)
    directory = tmp_path_factory.mktemp("rails") / "plan"
    plan.write(directory, [Simulator(load_machine(REPORT, p2p=True))], tables=tables)
    return directory


def links_of(plan, name):
    """Return all connections of a plan's choice between hosts, by NCCL's rules."""
    machine, gpus = plan.machine, plan.gpus
    choice, hosts = plan.choices[name], len(plan.hosts)
    if name == "graph":
        texts = ClusterFiles(plan).texts(PurePosixPath("/plan"))
        files = [of_file(texts[f"hosts/{host}.xml"]) for host in plan.host_order]
        rings, trees = zip(*files, strict=True)
    else:
        whole = view(machine, plan.knowledge, choice.settings, gpus=gpus)
        rings, trees = [], []
        # NCCL makes hosts of the parts in which it cuts one.
        for part in whole.parts:
            some = tuple(int(gpu[1:]) for gpu in part)
            seen = view(machine, plan.knowledge, choice.settings, gpus=some)
            ring = search_ring(seen, nodes=2)
            tree = search_tree(seen, nodes=2, channels=len(ring.orders))
            balanced = tree.pattern == "balanced tree"
            rings.append(Graph(ring.orders, ring.nics, ring.cross_nic))
            trees.append(Graph(tree.orders, tree.nics, balanced=balanced))
        rings, trees = rings * hosts, trees * hosts
    by_rings, by_trees = connections(rings, trees)
    return by_rings | (set() if choice.settings.algo == "Ring" else by_trees)


@pytest.mark.parametrize("hosts", range(2, 10))
def test_jobs_of_any_number_of_hosts_get_a_choice_that_stays_on_its_rails(saved, hosts):
    plan = planned(9)[0]
    names = [HostSlots(f"n{number}") for number in range(1, hosts + 1)]
    made = plan_of_job(plan, saved, names)
    tuned = msgspec.structs.replace(plan, winner="graph")
    for job in (made, as_achieved(made, tuned, {"graph": 30.0, "variables": 20.0}, "default")):
        for name, choice in job.choices.items():
            crossed = off_rails(links_of(job, name))
            assert (choice.fails is not None) == bool(crossed), (name, crossed)
            assert choice.fails is None or choice.rate_gbps is None
        assert job.choices["default"].fails.verdict == "cannot connect"
        assert environment(job.choices["variables"].settings)["NCCL_CROSS_NIC"] == "0"
        assert job.recommended in ("variables", "graph")


def test_of_choices_that_connect_the_smallest_that_is_as_good_is_recommended():
    plan = planned(3)[0]
    assert plan.recommended == "graph"
    slower = replace_plan(plan, rate_gbps=plan.choices["variables"].rate_gbps, bound_gbps=None)
    assert slower.recommended == "variables"
    assert "NCCL_CROSS_NIC=0: default NCCL cannot connect here" in slower.advice


def test_hosts_whose_nics_reach_each_other_are_planned_as_before():
    model = load_machine(REPORT, p2p=True)
    anywhere = msgspec.structs.replace(cluster(model.machine, 3), rails="any")
    plan = make_cluster_plan(anywhere, [Simulator(model)], budget=Budget(sets=20, idle_sets=5))
    assert not any(choice.fails for choice in plan.choices.values())


def test_a_job_without_a_table_gets_variables_that_connect_or_no_files(saved, tmp_path):
    some = ["--hosts", "n[1-3]", "--gpus", "0,2,3"]
    said = done("export", saved, *some, "-o", tmp_path / "job").stderr
    text = (tmp_path / "job" / "nccl" / "env.sh").read_text()
    plan = planned(9)[0]
    machine, knowledge = plan.machine, plan.knowledge
    for cross_nic in (None, 0):
        seen = view(machine, knowledge, Settings(cross_nic=cross_nic), gpus=(0, 2, 3))
        ring = search_ring(seen, nodes=2)
        tree = search_tree(seen, nodes=2, channels=len(ring.orders))
        rings = [Graph(ring.orders, ring.nics, ring.cross_nic)] * 3
        trees = [Graph(tree.orders, tree.nics, balanced=tree.pattern == "balanced tree")] * 3
        if not any(map(off_rails, connections(rings, trees))):
            assert ("NCCL_CROSS_NIC=0" in text) == ("Set NCCL_CROSS" in said) == (cross_nic == 0)
            break
    else:
        pytest.fail("files were written for a job that cannot connect")


def test_a_plan_of_an_even_number_of_hosts_says_that_jobs_on_fewer_need_its_files():
    model = load_machine("nvswitch-8gpu-8nic")
    hosts = cluster(model.machine, 4)
    plan = make_cluster_plan(hosts, [Simulator(model)], budget=Budget(sets=10, idle_sets=5))
    assert plan.choices["default"].fails is None and plan.recommended == "default"
    assert any("as 3 of them, need the files" in notice for notice in plan.notices)


def test_a_job_by_tables_of_an_earlier_program_gets_the_graph_file(saved, tmp_path):
    directory = tmp_path / "earlier"
    shutil.copytree(saved, directory)
    for path in (directory / "tables").iterdir():
        table = json.loads(path.read_text())
        del table["railed"]
        path.write_text(json.dumps(table))
    rebind(directory)
    job = plan_of_job(planned(9)[0], directory, [HostSlots(f"n{n}") for n in (1, 2, 3)])
    assert job.choices["variables"].fails and job.recommended == "graph"


# Rails by name, and by subnets: hosts whose NICs of a rail have unlike places.


UNLIKE = [load_machine(CASES / "clusters" / f"mix{kind}.xml") for kind in "AB"]
"""The fast NICs of one kind are mlx5_0 and mlx5_3, of the other mlx5_0 and mlx5_1."""
BY_NAME = {"first": ["mlx5_0"], "second": ["h0:mlx5_3", "h2:mlx5_3", "h1:mlx5_1", "h3:mlx5_1"]}


def unlike_hosts(rails=BY_NAME):
    machines = {f"h{number}": UNLIKE[number % 2].machine for number in range(4)}
    reports = [HostReport(host=host, machine=machine) for host, machine in machines.items()]
    hosts = cluster_of(reports, rails="only")
    return hosts if rails is None else with_rails(hosts, rails_by_name(rails, machines, where="f"))


def plan_unlike(hosts):
    return make_cluster_plan(hosts, [Simulator(model) for model in UNLIKE])


@pytest.fixture(scope="module")
def unlike():
    return plan_unlike(unlike_hosts())


def test_hosts_whose_fast_nics_sit_at_other_places_are_planned_by_the_names_of_their_rails(unlike):
    # 2 NICs of 400 Gbit/s a host.
    assert unlike.rate_gbps == pytest.approx(100.0)
    fast = [{"mlx5_0", "mlx5_3"}, {"mlx5_0", "mlx5_1"}]
    for here, there in zip(unlike.hosts, (*unlike.hosts[1:], unlike.hosts[0]), strict=True):
        ends = []
        for host, end in ((here, "exit_nic"), (there, "entry_nic")):
            path = unlike.paths[host.path]
            names = [nic.name for nic in unlike.cluster.classes[path.node_class].machine.nics]
            ends.append([names[getattr(chain, end)] for chain in path.chains])
            assert {*ends[-1]} == fast[int(host.name[1:]) % 2]
        assert all((a == "mlx5_0") == (b == "mlx5_0") for a, b in zip(*ends, strict=True))


HCAS = {"h0": "=mlx5_0:1,mlx5_3:1", "h1": "=mlx5_0:1,mlx5_1:1"}
HCAS |= {"h2": HCAS["h0"], "h3": HCAS["h1"]}


def test_each_host_gets_the_names_of_its_own_nics(unlike, tmp_path):
    plan, directory = needing_a_graph(unlike), tmp_path / "plan"
    [notice] = [text for text in plan.notices if "NCCL_IB_HCA" in text]
    assert all(hcas in notice for hcas in HCAS.values())
    tables = {node.name: "{}" for node in plan.cluster.classes}
    write_new_plan(plan, directory, tables)
    assert load_plan(directory) == plan
    (directory / "nccl" / LIBRARY).touch()
    for host, hcas in HCAS.items():
        # 1. What a rank sources, and what `tccl env`, `run` and `install` give.
        (place := tmp_path / host).mkdir()
        tools = named_host(place, host, None)
        found, said = sourced("sh", directory / "nccl" / "env.sh", tools)
        graph = str(directory / "nccl" / "hosts" / f"{host}.xml")
        assert (found["NCCL_IB_HCA"], found["NCCL_GRAPH_FILE"], said) == (hcas, graph, "")
        for plugin in (False, True):
            request = JobRequest(host=host, plugin=plugin, nccl="2.30.4" if plugin else None)
            given = deliver(plan, directory, request, say=pytest.fail)
            assert given.variables["NCCL_IB_HCA"] == given.choice.environment["NCCL_IB_HCA"] == hcas
        # 2. What the plugin asks for there.
        index = (directory / "nccl" / "hosts" / f"{host}.index").read_text().splitlines()
        assert f"need NCCL_IB_HCA {hcas}" in index
    # 3. Jobs of `tccl verify`, and NCCL's own view of the files there.
    target = read_target(plan, directory)
    arm = target.arm("graph")
    assert {host: own["NCCL_IB_HCA"] for host, own in arm.of_hosts.items() if own} == HCAS
    verdict = target.verdict(plan.settings.version, arm.variables)
    assert verdict.verdict == "used", verdict
    # 4. What is shown is what all share, and another host gets no list.
    shown = show_plan(plan)
    assert not any("NCCL_IB_HCA" in way.environment for way in shown.choices.values())
    assert "NCCL_IB_HCA" not in shown.environment and "NCCL_IB_HCA" not in advice(plan)
    elsewhere = deliver(plan, directory, JobRequest(host="other"), say=lambda _: None)
    assert "NCCL_IB_HCA" not in elsewhere.variables
    (place := tmp_path / "other").mkdir()
    found, _ = sourced("sh", directory / "nccl" / "env.sh", named_host(place, "other", None))
    assert "NCCL_IB_HCA" not in found
    # 5. One script for all hosts cannot say it.
    with pytest.raises(InputError):
        script("module", plan, directory, given, equal_hosts=False)


@pytest.mark.parametrize("names", ["=mlx5_0:1,mlx5_3:1", "=mlx5_0", "=mlx5_0:1,mlx5_1:1,mlx5_3:1"])
def test_pinned_nics_are_those_of_every_choice(names, tmp_path):
    pinned = {"NCCL_IB_HCA": names}
    machines = {f"h{number}": UNLIKE[0].machine for number in range(3)}
    hosts = cluster_of([HostReport(host=h, machine=m) for h, m in machines.items()])
    plan = make_cluster_plan(hosts, [Simulator(UNLIKE[0])], pinned_env=pinned)
    write_new_plan(plan, tmp_path / "plan")
    assert load_plan(tmp_path / "plan") == plan
    listed = usable_nics(plan.machine, plan.settings)
    for choice in plan.choices.values():
        assert choice.environment["NCCL_IB_HCA"] == names
    ends = {end for path in plan.paths for c in path.chains for end in (c.entry_nic, c.exit_nic)}
    assert ends <= {*listed} and len(listed) == len(names.split(","))
    assert "left out" not in " ".join(plan.notices) or "mlx5_1" in names
    # A slow one that is pinned carries no ring of the graph file.
    assert plan.rate_gbps == pytest.approx(50.0 * len(ends))
    assert not any("NCCL_IB_HCA" in notice for notice in plan.notices)


@pytest.mark.parametrize("names", ["=mlx5_9", "=mlx5_0,mlx5_9:1"])
def test_pinned_nics_that_a_host_does_not_have_are_refused(names):
    sources, pinned = list(map(Simulator, UNLIKE)), {"NCCL_IB_HCA": names}
    with pytest.raises(InputError) as refused:
        make_cluster_plan(unlike_hosts(), sources, pinned_env=pinned)
    assert "mlx5_9" in refused.value.what


def test_names_for_another_number_of_classes_are_refused(unlike):
    for names in (unlike.class_nics[:1], (("mlx5_0:1",), ("a b",)), (("mlx5_9:1",), ())):
        damaged = msgspec.structs.replace(unlike, class_nics=names)
        with pytest.raises(InputError):
            check_plan(damaged, where="plan")


def test_without_names_such_hosts_share_no_second_rail():
    with pytest.raises(SearchError, match="mlx5_3 of mixA is on rails that other hosts have no"):
        plan_unlike(unlike_hosts(None))


def test_a_plan_that_leaves_named_rails_is_refused(unlike, tmp_path):
    directory = tmp_path / "plan"
    write_new_plan(unlike, directory)
    assert load_plan(directory).cluster == unlike.cluster
    changed = json.loads((directory / "plan.json").read_text())
    # As if the two rails of one kind were exchanged.
    rails = changed["cluster"]["classes"][0]["rails"]
    rails[0], rails[3] = rails[3], rails[0]
    (directory / "plan.json").write_text(json.dumps(changed))
    rebind(directory)
    with pytest.raises(InputError, match="change NICs"):
        load_plan(directory)


@pytest.mark.parametrize(
    ("rails", "where"),
    [
        ({"a": ["mlx5_9"]}, "rails.a"),
        ({"a": ["mlx5_0"], "b": ["h1:mlx5_0"]}, "rails.b"),
        ({"a": ["mlx5_0", "mlx5_1"]}, "rails.a"),
        ({"a": ["h9:mlx5_0"]}, "rails.a"),
    ],
)
def test_names_that_are_no_rails_are_refused(rails, where):
    with pytest.raises(InputError) as refused:
        unlike_hosts(rails)
    assert refused.value.where == f"f {where}"


def test_each_subnet_of_several_hosts_is_a_rail():
    machines = {f"h{number}": UNLIKE[number % 2].machine for number in range(4)}
    subnets = {
        host: {nic: f"10.0.{0 if nic == 0 else 1}.{number + 1}/24" for nic in (0, 3 - 2 * odd)}
        for number, (host, odd) in enumerate(zip(machines, (0, 1, 0, 1), strict=True))
    }
    assert rails_of_subnets(subnets, machines) == rails_by_name(BY_NAME, machines, where="f")
    one_subnet = {host: dict.fromkeys(nics, "10.0.0.1/24") for host, nics in subnets.items()}
    assert rails_of_subnets(one_subnet, machines) == {}
    # Routers join the subnets of two halves.
    routed = {
        host: {0: f"10.{n // 2}.0.{n + 1}/24", 1: "fe80::1/64"} for n, host in enumerate(machines)
    }
    assert rails_of_subnets(routed, machines) == {}
    alone = {host: {0: f"10.{number}.0.1/24"} for number, host in enumerate(machines)}
    assert rails_of_subnets(alone, machines) == {}
