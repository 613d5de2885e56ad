"""Graph files of several nodes: what is written closes into the rings that were planned."""

import itertools
import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tccl_py.errors import InputError
from tccl_py.model.machine import Knowledge
from tccl_py.nccl.communicators import parse_log, same_rings
from tccl_py.nccl.graph_file import parse_graph_file
from tccl_py.nccl.graph_search import default_rings, search_ring, search_tree
from tccl_py.nccl.network import node_rings
from tccl_py.nccl.settings import Settings, environment
from tccl_py.nccl.validator import NodeJob, validate, validate_cluster
from tccl_py.nccl.versions import known_versions
from tccl_py.nccl.view import net_devices, view
from tccl_py.plan.host_files import node_graph_text
from tccl_py.readers.nccl_topology import read_nccl_topology
from tests.effort import calls_at_most
from tests.nccl_cases import CASES, graph_text, graph_verdicts, machine, on_node, read_graph_file
from tests.nccl_nodes import with_nics
from tests.toy import toy_machine

NOTHING = Knowledge()
HGX = machine("e_hgx_h100.xml")
PAIR = with_nics(toy_machine(gpus=2, numa_nodes=2), {0: "G0", 1: "G1"}, speed_mbps=100_000)
FOUR = with_nics(
    toy_machine(gpus=4, numa_nodes=2, per_switch=2), {0: "G0", 1: "G2"}, speed_mbps=100_000
)
ONE = with_nics(toy_machine(gpus=1), {0: "G0", 1: "G0"})


def facts_of(seen, orders, ends):
    return node_rings(seen, orders, ends, speed_gbps=1.0)


def written(node, orders, ends, *, gpus=None, rate=10.0, **options):
    seen = view(node, NOTHING, Settings(**options), gpus=gpus)
    return node_graph_text(seen, orders, ends, rate_gbps=rate, provenance="measured")


def job(node, orders, ends, *, gpus=None, **options):
    text = written(node, orders, ends, gpus=gpus, **options)
    return NodeJob(machine=node, knowledge=NOTHING, gpus=gpus, graph=text)


def used(found, channel=0):
    return [(nics.entry, nics.exit) for nics in found.nics[channel]]


def test_nodes_of_different_gpu_counts_close_into_one_ring_in_host_order():
    nodes = [
        job(FOUR, [(2, 3, 1, 0)], [(1, 0)]),
        job(ONE, [(0,)], [(1, 1)]),
        job(PAIR, [(1, 0)], [(1, 0)]),
    ]
    found = validate_cluster(nodes)
    assert (found.verdict, found.reason) == ("used", "1 channel of the files, 2 in the end")
    assert found.rings == ((0, 4, 6, 5, 2, 3, 1),) * 2
    assert used(found) == used(found, 1) == [(1, 0), (1, 1), (1, 0)]


CLASSES = (ONE, PAIR, FOUR)


@st.composite
def clusters(draw):
    """Chains of each class for some channels, and the class of every host."""
    channels = draw(st.integers(1, 4))
    chains = []
    for node in CLASSES:
        orders, ends = [], []
        for _ in range(channels):
            order = tuple(draw(st.permutations(node.gpu_indices)))
            entry, leave = (draw(st.integers(0, 1)) for _ in range(2))
            orders.append(order)
            ends.append((entry, entry if len(order) == 1 else leave))
        chains.append((orders, ends))
    hosts = draw(st.lists(st.integers(0, len(CLASSES) - 1), min_size=2, max_size=6))
    return chains, hosts


@settings(max_examples=150, deadline=None)
@given(clusters(), st.sampled_from(known_versions()))
def test_any_chains_written_for_each_class_close_into_exactly_these_rings(cluster, version):
    chains, hosts = cluster
    files = [job(node, *chains[number], version=version) for number, node in enumerate(CLASSES)]
    found = validate_cluster([files[number] for number in hosts], version=version)
    assert found.verdict == "used", found.reason
    channels = len(chains[0][0])
    assert len(found.rings) == channels * 2
    for channel, ring in enumerate(found.rings):
        expected, start = [], 0
        for number in hosts:
            expected += [start + gpu for gpu in chains[number][0][channel % channels]]
            start += len(CLASSES[number].gpus)
        assert same_rings(ring, tuple(expected))
        assert used(found, channel) == [chains[number][1][channel % channels] for number in hosts]


@given(st.permutations(range(3)), st.integers(1, 8))
@settings(max_examples=20, deadline=None)
def test_equal_nodes_are_what_validate_judges(order, nodes):
    text = written(FOUR, [(*order, 3)], [(0, 1)])
    one = validate(text, FOUR, NOTHING, nodes=nodes)
    job_ = NodeJob(machine=FOUR, knowledge=NOTHING, graph=text)
    many = validate_cluster([job_] * nodes)
    assert (one.verdict, one.reason, one.rings) == (many.verdict, many.reason, many.rings)


@pytest.mark.parametrize("case", [case for case in graph_verdicts() if case["nodes"] > 1])
def test_separate_nodes_with_the_same_file_have_the_verdict_that_nccl_gave(case):
    node = machine(case["topology"])
    nodes = [
        NodeJob(machine=msgspec.structs.replace(node), knowledge=NOTHING, graph=text)
        for text in [graph_text(case["graph"])] * case["nodes"]
    ]
    found = validate_cluster(nodes)
    assert found.verdict == case["verdict"]
    expected = [tuple(ring) for ring in case["channels"] if ring != "..."]
    assert list(found.rings[: len(expected)]) == expected


def test_a_node_without_a_file_runs_what_it_searched_for_itself():
    file = job(FOUR, [(0, 1, 2, 3)], [(0, 0)])
    bare = msgspec.structs.replace(file, graph="")
    found = validate_cluster([file, bare, bare])
    assert found.verdict == "clipped"
    assert found.reason.startswith("nodes 1, 2: ")
    stock = default_rings(view(FOUR, NOTHING), nodes=3)
    assert found.rings[0][4:8] == tuple(4 + gpu for gpu in stock.chains[0].gpus)


def test_without_files_the_job_runs_stocks_chains_with_stocks_nics():
    bare = NodeJob(machine=HGX, knowledge=NOTHING)
    found = validate_cluster([bare] * 4)
    stock = default_rings(view(HGX, NOTHING), nodes=4)
    assert (found.verdict, len(found.rings)) == ("ignored", stock.channels)
    for channel in range(8):
        here = [on_node(stock, node)[channel] for node in range(4)]
        ring = [8 * node + gpu for node, chain in enumerate(here) for gpu in chain.gpus]
        assert same_rings(found.rings[channel], tuple(ring))
        assert used(found, channel) == [(chain.entry, chain.exit) for chain in here]


def test_the_fewest_channels_of_all_nodes_are_run():
    many = job(PAIR, [(0, 1), (1, 0)], [(0, 0), (1, 1)])
    few = job(PAIR, [(1, 0)], [(0, 0)])
    found = validate_cluster([many, few])
    assert found.verdict == "clipped"
    assert found.reason.startswith("node 0: another node has 1 of 2 ")
    assert found.rings == ((0, 1, 3, 2),) * 2


def test_a_fault_names_its_node():
    good = job(PAIR, [(0, 1)], [(0, 0)])
    bad = msgspec.structs.replace(good, graph=written(FOUR, [(0, 1, 2, 3)], [(0, 0)]))
    found = validate_cluster([good, good, bad])
    assert (found.verdict, found.rings) == ("rejected", ())
    assert found.reason.startswith("node 2: ")
    assert "names GPU 2" in found.reason
    crash = msgspec.structs.replace(good, graph=good.graph.replace(' typeintra="SYS"', ""))
    assert validate_cluster([bad, crash, good]).verdict == "crash"


def test_hosts_in_another_order_make_another_ring():
    four, pair = job(FOUR, [(3, 2, 1, 0)], [(1, 0)]), job(PAIR, [(0, 1)], [(0, 1)])
    assert validate_cluster([pair, four]).rings[0] == (0, 1, 5, 4, 3, 2)
    assert validate_cluster([four, pair]).rings[0] == (0, 4, 5, 3, 2, 1)


def test_a_file_says_how_far_its_nics_are_and_whether_channels_change_them():
    text = written(FOUR, [(0, 1, 2, 3), (3, 2, 1, 0)], [(0, 1), (1, 1)], rate=24.0)
    file = parse_graph_file(text, where="graph.xml")
    ring, tree = file[0], file[1]
    assert (ring.typeintra, ring.typeinter, ring.crossnic) == ("SYS", "SYS", 1)
    assert (ring.speedintra, ring.speedinter, ring.nchannels) == (12, 12, 2)
    assert [channel.nets for channel in ring.channels] == [(0, 1), (1, 1)]
    # The tree comes and goes by the entry, near which its first two GPUs are.
    assert (tree.pattern, tree.typeinter, tree.crossnic) == (1, "PIX", 0)
    assert [channel.nets for channel in tree.channels] == [(0, 0), (1, 1)]


def test_a_channel_that_another_gpu_sends_for_is_pxn():
    seen = view(HGX, NOTHING, Settings(cross_nic=0))
    facts = facts_of(seen, [tuple(range(8))], [(0, 0)])
    assert (facts.type_intra, facts.type_inter) == ("NVL", "PXN")


def test_a_tree_hangs_from_its_second_gpu_too_only_where_that_is_as_near_to_the_nic():
    near = facts_of(view(FOUR, NOTHING, Settings()), [(0, 1, 2, 3)], [(0, 0)])
    assert (near.tree_type_inter, near.tree_spreads) == ("PIX", True)
    # As NCCL's own on Hopper: "Pattern 3", with NICs that are nearest to one GPU each
    rails = facts_of(view(HGX, NOTHING, Settings()), [tuple(range(8))], [(0, 1)])
    assert (rails.tree_type_inter, rails.tree_spreads) == ("PIX", False)
    text = written(HGX, [tuple(range(8))], [(0, 1)])
    assert parse_graph_file(text, where="graph.xml")[1].pattern == 3


def test_one_gpu_a_node_has_a_tree_of_pattern_3():
    text = written(ONE, [(0,)], [(1, 1)])
    file = parse_graph_file(text, where="graph.xml")
    assert (file[0].pattern, file[1].pattern) == (4, 3)
    assert (file[0].typeintra, file[0].channels[0].nets) == ("LOC", (1, 1))
    balanced = text.replace('pattern="3"', 'pattern="1"')
    node = NodeJob(machine=ONE, knowledge=NOTHING, graph=balanced)
    # Two nodes of one H200 summed rightly with it.
    assert validate_cluster([node] * 2).verdict == "used"
    found = validate_cluster([node] * 3)
    assert (found.verdict, found.reason) == (
        "clipped",
        "the node has one GPU: a tree of pattern 1 hangs other nodes from a second",
    )


def test_a_node_of_one_gpu_is_left_by_the_nic_it_is_entered_by():
    with pytest.raises(InputError) as error:
        written(ONE, [(0,)], [(0, 1)])
    assert error.value.where == "graph file"
    assert "one GPU" in error.value.what
    text = written(ONE, [(0,)], [(0, 0)]).replace('<net dev="0x0"/>', '<net dev="0x1"/>', 1)
    node = NodeJob(machine=ONE, knowledge=NOTHING, graph=text)
    found = validate_cluster([node, node])
    assert (found.verdict, used(found)) == ("clipped", [(1, 1), (1, 1)])


H200 = CASES / "h200x2-two-nodes"
"""Two nodes of one H200 each, with two interfaces, under NCCL 2.28.9."""


def h200_nodes(*files):
    machines = [read_nccl_topology(H200 / f"topology{rank}.xml") for rank in range(2)]
    return [
        NodeJob(machine=node, knowledge=NOTHING, gpus=node.gpu_indices, graph=file)
        for node, file in zip(machines, files, strict=True)
    ]


def assert_as_in_log(found, name):
    text = (H200 / name).read_text()
    (rings,) = parse_log(text, where=name).communicators
    assert rings == found.rings
    form = r"Channel (\d+)/0 : (\d)\[.\] -> (\d)\[.\] \[(send|receive)\] via NET/Socket/(\d)"
    seen = re.findall(form, text)
    assert len(seen) == 4 * len(rings)
    for channel, source, target, way, nic in seen:
        row = found.nics[int(channel)]
        used = row[int(source)].exit if way == "send" else row[int(target)].entry
        assert used == int(nic)


def test_two_nodes_of_one_h200_search_and_connect_as_their_dump_and_log_say():
    nodes = h200_nodes("", "")
    for rank, node in enumerate(nodes):
        dump = read_graph_file(H200 / f"graph{rank}.xml", version="2.28.9")
        ring, tree = dump[0], dump[1]
        seen = view(node.machine, NOTHING, Settings(version="2.28.9"))
        ours, trees = search_ring(seen, nodes=2), search_tree(seen, nodes=2, channels=2)
        for graph, found in ((ring, ours), (tree, trees)):
            channels = tuple((channel.gpus, channel.nets) for channel in graph.channels)
            assert channels == tuple(zip(found.orders, found.nics, strict=True))
            rates = found.rate_intra, found.rate_inter, found.cross_nic
            assert rates == (graph.speedintra, graph.speedinter, graph.crossnic)
            types = found.type_intra.name, found.type_inter.name
            assert types == (graph.typeintra, graph.typeinter)
        facts = facts_of(seen, [c.gpus for c in ring.channels], [c.nets for c in ring.channels])
        assert (facts.type_intra, facts.type_inter) == (ring.typeintra, ring.typeinter)
        assert (facts.tree_type_inter, facts.tree_spreads) == (tree.typeinter, tree.pattern == 1)
    assert_as_in_log(validate_cluster(nodes, version="2.28.9"), "stock.log")


def test_nccl_left_nodes_of_one_gpu_by_their_entry_though_the_file_named_another_nic():
    files = [(H200 / f"other-exit{rank}.xml").read_text() for rank in range(2)]
    found = validate_cluster(h200_nodes(*files), version="2.28.9")
    assert found.verdict == "clipped"
    assert_as_in_log(found, "other-exit.log")


def test_rails_are_not_changed_where_the_settings_forbid_it():
    with pytest.raises(InputError) as error:
        written(FOUR, [(0, 1, 2, 3)], [(0, 1)], cross_nic=0)
    assert error.value.where == "channels over several nodes"
    assert "NCCL_CROSS_NIC=0" in error.value.what
    crossing = job(FOUR, [(0, 1, 2, 3)], [(0, 1)])
    found = validate_cluster([crossing, crossing], environment={"NCCL_CROSS_NIC": "0"})
    assert found.verdict == "ignored"


def test_nics_that_are_left_out_move_the_others_up():
    chosen = Settings(ib_hca=("mlx5_1", "mlx5_5:1"))
    assert net_devices(HGX, chosen) == {1: 0, 5: 1}
    assert net_devices(HGX, Settings()) == {nic: nic for nic in range(8)}
    gpus = tuple(range(8))
    seen = view(HGX, NOTHING, chosen)
    text = node_graph_text(seen, [gpus], [(5, 1)], rate_gbps=40.0, provenance="measured")
    assert '<net dev="0x1"/>' in text
    assert '<net dev="0x5"/>' not in text
    node = NodeJob(machine=HGX, knowledge=NOTHING, graph=text)
    found = validate_cluster([node, node], environment=environment(chosen))
    assert (found.verdict, used(found)) == ("used", [(5, 1), (5, 1)])


def test_any_gpu_can_be_an_end_with_any_nic():
    seen = view(FOUR, NOTHING, Settings())
    for gpu, nic in itertools.product(seen.gpus, seen.nics):
        order = (gpu, *(one for one in range(4) if one != gpu))
        node = job(FOUR, [order], [(nic, 1 - nic)])
        found = validate_cluster([node, node])
        assert (found.verdict, used(found)) == ("used", [(nic, 1 - nic)] * 2)


def test_channels_above_45_gbps_are_doubled_twice_on_several_hopper_nodes():
    gpus = tuple(range(8))
    for rate, final in ((4 * 46.0, 16), (4 * 45.0, 8)):
        text = written(HGX, [gpus] * 4, [(nic, nic) for nic in range(4)], rate=rate)
        node = NodeJob(machine=HGX, knowledge=NOTHING, graph=text)
        assert len(validate_cluster([node, node]).rings) == final


def test_a_job_of_forty_classes_and_a_thousand_nodes_is_judged_with_few_calls():
    classes = [
        job(msgspec.structs.replace(FOUR, name=f"class {number}"), [(0, 1, 2, 3)], [(0, 1)])
        for number in range(40)
    ]
    with calls_at_most(150_000):
        found = validate_cluster([classes[number % 40] for number in range(1000)])
    assert (found.verdict, len(found.rings[0])) == ("used", 4000)


def test_a_job_has_nodes():
    with pytest.raises(InputError, match="`nodes`: is 0; 1 to 65536"):
        validate_cluster([])
