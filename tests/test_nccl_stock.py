"""NCCL's own search, emulated, against what NCCL's own graph code chose."""

import pytest

from tccl_py.errors import InputError
from tccl_py.model.machine import Knowledge
from tccl_py.nccl.graph_search import (
    DefaultChain,
    default_rings,
    default_rings_or_sys,
    search_ring,
    search_tree,
)
from tccl_py.nccl.settings import Settings, settings_from_environment
from tccl_py.nccl.transport import pair_mechanism
from tccl_py.nccl.view import view
from tests.effort import calls_at_most
from tests.nccl_cases import CASES, case_name, machine, on_node, read_graph_file, stock_choices
from tests.nccl_nodes import with_nics
from tests.toy import toy_machine


def searched(seen, nodes=1):
    """Return the rate of a channel inside a node, and the types of the paths there and between."""
    ring = search_ring(seen, nodes=nodes)
    return ring.rate_intra, ring.type_intra.name, ring.type_inter.name


@pytest.mark.parametrize("choice", stock_choices(), ids=case_name)
def test_channels_rate_type_and_rings_are_those_nccl_chose(choice):
    settings = settings_from_environment(choice["environment"])
    seen = view(machine(choice["topology"]), Knowledge(), settings)
    found = default_rings(seen)
    assert len(found.rings) == choice["nchannels"]
    rate, intra, _ = searched(seen)
    assert (round(rate, 3), intra) == (choice["bw_intra"], choice["type_intra"])
    rings = [list(ring) for ring in found.rings]
    assert rings[: len(choice["rings"])] == choice["rings"]


def test_four_h200_get_the_ring_and_the_tree_that_nccl_dumped():
    dump = read_graph_file(CASES / "h200x4-vm" / "graph.xml", version="2.28.9")
    ring, tree = dump[0], dump[1]
    h200 = machine("h200x4-vm.xml")
    seen = view(h200, Knowledge(), Settings(version="2.28.9"))
    found = default_rings(seen)
    assert (len(found.rings), found.channels) == (12, 24)
    assert searched(seen)[:2] == (30, "NVL")
    assert found.rings == tuple(channel.gpus for channel in ring.channels)
    trees = search_tree(view(h200, Knowledge(), Settings()), channels=12)
    assert len(trees.orders) == tree.nchannels == 12
    assert trees.rate_intra == tree.speedintra


def test_where_the_search_falls_back_by_default_level_sys_makes_all_hops_direct():
    node = machine("asus-esc8000a-e13p.xml")
    assert default_rings(view(node, Knowledge())).fallback
    seen = view(node, Knowledge(), Settings(p2p_level="SYS"))
    found = default_rings(seen)
    assert found.settings.p2p_level == "SYS"
    (ring, *_) = found.rings
    hops = zip(ring, (*ring[1:], ring[0]), strict=True)
    assert {pair_mechanism(seen, *pair) for pair in hops} == {"write"}


def test_the_search_finds_rings_by_default_where_pairs_meet_below_host_bridges():
    seen = view(machine("wrx90-16gpu-4switch.xml"), Knowledge())
    assert (default_rings(seen).fallback, searched(seen)[0]) == (False, 24.0)


def test_a_subset_is_searched_by_itself():
    seen = view(machine("a_4gpu_2numa_pcie.xml"), Knowledge(), gpus=[0, 1])
    assert default_rings(seen).rings == ((0, 1),)
    assert searched(seen)[:2] == (10.0, "PHB")


def test_one_gpu_alone_is_a_ring_of_itself():
    found = default_rings(view(toy_machine(gpus=2), Knowledge(), gpus=[1]))
    assert set(found.rings) == {(1,)}


def test_several_nodes_are_searched_from_their_nics():
    found = hgx()
    assert (len(found.rings), found.channels) == (8, 16)
    assert all(len(set(ring)) == 8 for ring in found.rings)


def test_half_of_each_of_two_nodes_finds_as_many_trees_as_rings():
    # The tree search climbs through every path type here.
    found = default_rings(view(machine("e_hgx_h100.xml"), Knowledge(), gpus=[0, 2, 4, 6]), nodes=2)
    assert (len(found.rings), found.channels) == (8, 16)


@pytest.mark.parametrize(
    "node",
    [
        toy_machine(gpus=64, numa_nodes=4, per_switch=8),
        toy_machine(gpus=64, numa_nodes=2),
        toy_machine(gpus=32, numa_nodes=2, per_switch=4),
    ],
    ids=["64 below switches", "64 below CPUs", "32 below switches"],
)
def test_large_nodes_take_few_calls(node):
    with calls_at_most(3_500_000):
        found = default_rings(view(node, Knowledge()))
    assert sorted(found.rings[0]) == list(node.gpu_indices)


def ends(chains):
    return [(chain.entry, chain.gpus[0], chain.gpus[-1], chain.exit) for chain in chains]


def hgx(nodes=2, **settings):
    return default_rings(
        view(machine("e_hgx_h100.xml"), Knowledge(), Settings(**settings)), nodes=nodes
    )


def test_two_hgx_h100_get_the_channels_that_their_log_shows():
    # "Pattern 4, crossNic 2, nChannels 8, bw 48.000000/48.000000, type NVL/PIX", and rank 0 talks
    # to rank 8 in channels 0 and 1 only
    found = hgx()
    assert (found.cross_nic, len(found.chains), found.channels) == (2, 8, 16)
    seen = view(machine("e_hgx_h100.xml"), Knowledge())
    assert searched(seen, 2) == (48.0, "NVL", "PIX")
    assert ends(found.chains)[:4] == [(0, 0, 1, 1), (1, 1, 0, 0), (2, 2, 3, 3), (3, 3, 2, 2)]
    assert ends(on_node(found, 1))[:2] == [(1, 1, 0, 0), (0, 0, 1, 1)]
    assert on_node(found, 2) == found.chains


def test_channels_stay_on_their_rails_between_nodes():
    found = hgx(nodes=4)
    for node in range(4):
        after = on_node(found, (node + 1) % 4)
        for one, other in zip(on_node(found, node), after, strict=True):
            assert one.exit == other.entry


def test_cross_nic_0_returns_to_the_nic_of_the_entry_through_another_gpu():
    found = hgx(cross_nic=0)
    assert found.cross_nic == 0
    seen = view(machine("e_hgx_h100.xml"), Knowledge(), Settings(cross_nic=0))
    rate, _, inter = searched(seen, 2)
    assert (rate, inter) == (45.0, "PXN")
    assert ends(found.chains)[:2] == [(0, 0, 1, 0), (1, 1, 2, 1)]


@pytest.mark.parametrize("choice", [{"cross_nic": 1}, {"version": "2.18"}])
def test_channels_change_rails_without_swapping_with_cross_nic_1_and_in_2_18(choice):
    found = hgx(**choice)
    assert found.cross_nic == 1
    assert ends(found.chains)[:2] == [(0, 0, 1, 1), (1, 1, 2, 2)]
    assert on_node(found, 1) == found.chains


def test_only_the_nics_that_the_settings_name_are_used():
    found = hgx(ib_hca=("mlx5_0", "mlx5_4:1"))
    assert {chain.entry for chain in found.chains} == {0, 4}
    assert found.channels == 8


def test_one_gpu_a_node_gets_what_a_log_of_three_such_nodes_shows():
    # "Pattern 4, crossNic 0, nChannels 1, bw 0.240000/0.240000, type LOC/PHB" and
    # "Pattern 3, crossNic 0, nChannels 1, bw 1.200000/0.240000, type LOC/PHB"
    node = with_nics(toy_machine(gpus=1), {0: "G0"}, speed_mbps=2500, gdr=False)
    found = default_rings(view(node, Knowledge()), nodes=3)
    assert ends(found.chains) == [(0, 0, 0, 0)]
    assert searched(view(node, Knowledge()), 3) == (0.24, "LOC", "PHB")
    tree = search_tree(view(node, Knowledge(), Settings()), nodes=3, channels=1)
    assert (tree.rate_intra, tree.rate_inter, tree.nics) == (1.2, 0.24, ((0, 0),))


@pytest.mark.parametrize(("version", "way_out"), [("2.30.7", 1), ("2.28.9", 0)])
def test_a_network_slower_than_every_rate_of_the_search_gets_the_simple_order(version, way_out):
    node = with_nics(toy_machine(gpus=2), {1: "G0", 0: "G1"}, speed_mbps=100)
    seen = view(node, Knowledge(), Settings(version=version))
    found = default_rings_or_sys(seen, nodes=2)
    assert (found.fallback, found.assumed_sys, searched(seen, 2)[0]) == (True, False, 0.1)
    assert found.chains == (DefaultChain(entry=0, gpus=(0, 1), exit=way_out),)


def test_pcie_machines_need_no_help_over_nodes_as_their_channels_are_open():
    node = with_nics(machine("asus-esc8000a-e13p.xml"), {0: "G0", 1: "G4"}, speed_mbps=400_000)
    found = default_rings_or_sys(view(node, Knowledge()), nodes=2)
    assert (found.fallback, found.assumed_sys) == (False, False)
    assert searched(view(node, Knowledge()), 2)[0] == 15.0
    assert ends(found.chains) == [(0, 0, 7, 0)]


def test_several_nodes_need_a_nic():
    with pytest.raises(InputError) as error:
        default_rings(view(toy_machine(gpus=2), Knowledge()), nodes=2)
    assert "2 nodes of toy" in error.value.where
    assert "no network" in error.value.what
