"""NCCL's own search, emulated, against what NCCL's own graph code chose."""

import time

import pytest

from tccl_py.runtimes.nccl.graph_file import read_graph_file
from tccl_py.runtimes.nccl.settings import Settings, settings_from_environment
from tccl_py.runtimes.nccl.stock import search_tree, stock_choice, stock_default
from tccl_py.runtimes.nccl.transport import view
from tccl_py.topology.knowledge import Knowledge
from tccl_py.topology.machine import toy_machine
from tests.nccl_cases import CASES, case_name, machine, stock_choices


@pytest.mark.parametrize("choice", stock_choices(), ids=case_name)
def test_channels_rate_type_and_rings_are_those_nccl_chose(choice):
    settings = settings_from_environment(choice["environment"])
    found = stock_choice(machine(choice["topology"]), Knowledge(), settings)
    assert found.nchannels == choice["nchannels"]
    assert round(found.bw_intra, 3) == choice["bw_intra"]
    assert found.type_intra == choice["type_intra"]
    rings = [list(ring) for ring in found.rings]
    assert rings[: len(choice["rings"])] == choice["rings"]


def test_four_h200_get_the_ring_and_the_tree_that_nccl_dumped():
    dump = read_graph_file(CASES / "h200x4-vm" / "graph.xml", version="2.28.9")
    ring, tree = dump.graph(0), dump.graph(1)
    h200 = machine("h200x4-vm.xml")
    found = stock_choice(h200, Knowledge(), Settings(version="2.28.9"))
    assert (found.nchannels, found.bw_intra, found.type_intra, found.channels) == (
        12,
        30,
        "NVL",
        24,
    )
    assert found.rings == tuple(channel.gpus for channel in ring.channels)
    trees = search_tree(view(h200, Knowledge(), Settings()), channels=12)
    assert len(trees.orders) == tree.nchannels == 12
    assert trees.rate_intra == tree.speedintra


def test_where_the_default_falls_back_stock_is_the_choice_under_level_sys():
    found = stock_default(machine("asus-esc8000a-e13p.xml"), Knowledge())
    assert found.assumed_sys
    assert found.settings.p2p_level == "SYS"
    assert {str(hop.mechanism) for hop in found.hops} == {"P2P/write"}


def test_where_the_search_succeeds_stock_is_the_default():
    found = stock_default(machine("wrx90-16gpu-4switch.xml"), Knowledge())
    assert (found.assumed_sys, found.fallback, found.bw_intra) == (False, False, 24.0)


def test_a_subset_is_searched_by_itself():
    found = stock_choice(machine("a_4gpu_2numa_pcie.xml"), Knowledge(), gpus=[0, 1])
    assert (found.rings, found.bw_intra, found.type_intra) == (((0, 1),), 10.0, "PHB")


def test_one_gpu_alone_is_a_ring_of_itself():
    found = stock_choice(toy_machine(gpus=2), Knowledge(), gpus=[1])
    assert set(found.rings) == {(1,)}
    assert found.hops == ()


def test_several_nodes_are_searched_from_their_nics():
    found = stock_choice(machine("e_hgx_h100.xml"), Knowledge(), nodes=2)
    assert (found.nchannels, found.bw_intra, found.channels) == (8, 48.0, 16)
    assert all(len(set(ring)) == 8 for ring in found.rings)


def test_half_of_each_of_two_nodes_finds_as_many_trees_as_rings():
    # The tree search climbs through every path type here; equal searches are made once only,
    # so that its emulation ends before MAX_TAKES.
    found = stock_choice(machine("e_hgx_h100.xml"), Knowledge(), gpus=[0, 2, 4, 6], nodes=2)
    assert (found.nchannels, found.channels) == (8, 16)


@pytest.mark.parametrize(
    "node",
    [
        toy_machine(gpus=64, numa_nodes=4, per_switch=8),
        toy_machine(gpus=64, numa_nodes=2),
        toy_machine(gpus=32, numa_nodes=2, per_switch=4),
    ],
    ids=["64 below switches", "64 below CPUs", "32 below switches"],
)
def test_large_nodes_take_seconds(node):
    start = time.process_time()
    found = stock_choice(node, Knowledge())
    assert time.process_time() - start < 10
    assert sorted(found.rings[0]) == list(node.gpu_indices)
