"""Graph files that NCCL does not survive are never called used, and plans make none of them.

`scripts/judge-rules plans` and `mutants` compare plans' files and mutants with released libraries.
"""

import pytest

from tccl_py.model.machine import Knowledge
from tccl_py.nccl.settings import Settings, environment
from tccl_py.nccl.transport import hop_space, pair_mechanism
from tccl_py.nccl.validator import validate
from tccl_py.nccl.view import view
from tccl_py.readers.nccl_topology import read_nccl_topology
from tests.nccl_cases import CASES

FILES = CASES / "nccl-cases"
LOCAL = {"NCCL_NET_DISABLE_INTRA": "1"}


def judge(graph, machine, *, nodes=1, gpus=None, **variables):
    return validate(
        (FILES / f"{graph}.xml").read_text(),
        read_nccl_topology(FILES / f"{machine}.xml"),
        Knowledge(),
        gpus=gpus,
        nodes=nodes,
        environment=variables,
    )


@pytest.mark.parametrize("machine", ["amd4", "amd4nogdr", "skl4nogdr"])
def test_a_file_over_a_node_that_nccl_cuts_is_rejected(machine):
    found = judge("g4", machine)
    assert found.verdict == "rejected"
    assert "NCCL_NET_DISABLE_INTRA=1" in found.reason
    assert judge("g4", machine, **LOCAL).verdict == "used"


def test_p2p_across_the_sockets_does_not_keep_nics_from_cutting_a_node():
    assert judge("g4", "intel4", NCCL_P2P_LEVEL="SYS").verdict == "rejected"
    assert judge("g4", "intel4", NCCL_P2P_LEVEL="SYS", **LOCAL).verdict == "used"


def test_pairs_without_p2p_are_cut_apart_where_shared_memory_is_disabled():
    found = judge("g4", "amd4", NCCL_SHM_DISABLE="1", **LOCAL)
    assert found.verdict == "rejected" and "unset NCCL_SHM_DISABLE" in found.reason
    node = read_nccl_topology(FILES / "amd4.xml")
    without = Settings(shm_disable=True, net_disable_intra=True)
    assert environment(without)["NCCL_SHM_DISABLE"] == "1"
    assert pair_mechanism(view(node, Knowledge(), without), 0, 1) == "network"
    assert len(view(node, Knowledge(), without).parts) == 4


def test_settings_under_which_nccl_cuts_the_node_leave_no_hop():
    node = read_nccl_topology(FILES / "amd4nogdr.xml")
    assert view(node, Knowledge(), Settings()).parts == (("G0", "G1"), ("G2", "G3"))
    assert not hop_space(view(node, Knowledge(), Settings())).hops
    assert len(hop_space(view(node, Knowledge(), Settings(net_disable_intra=True))).hops) == 12


@pytest.mark.parametrize("graph", ["tree-misses-gpu", "tree-empty", "tree-doubles-gpu"])
def test_a_tree_that_does_not_span_the_gpus_is_not_used(graph):
    found = judge(graph, "amd4", **LOCAL)
    assert (found.verdict, found.rings) == ("crash", ())


def test_a_ring_that_lists_a_gpu_twice_is_not_used():
    assert judge("ring-doubles-gpu", "amd4", gpus=(0, 1), **LOCAL).verdict == "rejected"


@pytest.mark.parametrize(
    ("graph", "nodes", "verdict"),
    [
        ("unknown-net", 2, "rejected"),
        ("unknown-net", 1, "used"),
        ("pattern5", 2, "rejected"),
        ("value-253", 1, "used"),
        ("value-254", 1, "rejected"),
        ("channels-66-nets", 2, "crash"),
        ("nchannels-negative", 1, "crash"),
    ],
)
def test_other_files_that_nccl_refuses_or_that_corrupt_it(graph, nodes, verdict):
    assert judge(graph, "amd4", nodes=nodes, **LOCAL).verdict == verdict
