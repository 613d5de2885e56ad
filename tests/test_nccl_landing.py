"""Where NCCL's network transport has its buffers, and the flows that leave and enter a node."""

import msgspec
import pytest

from tccl_py.errors import InputError
from tccl_py.model.machine import Knowledge, NvLink
from tccl_py.nccl.network import entry_flow, exit_flow, net_buffer_numa, relay
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.view import net_path, usable_nics, view
from tests.nccl_cases import machine
from tests.nccl_nodes import with_nics
from tests.toy import toy_machine


def lands(node, gpu, nic, direction="send", *, gpus=None, **settings):
    return net_buffer_numa(
        view(node, Knowledge(), Settings(**settings), gpus=gpus), gpu, nic, direction
    )


SWITCHED = with_nics(toy_machine(gpus=4, numa_nodes=2, per_switch=2), {0: "G0", 1: "G2"})
"""Two sockets, below each a switch with two GPUs and a NIC."""


def test_by_default_nics_reach_gpus_below_the_same_switch_and_no_others():
    found = {(gpu, nic): lands(SWITCHED, gpu, nic) for gpu in range(4) for nic in range(2)}
    assert found == {
        (0, 0): None, (1, 0): None, (2, 0): 1, (3, 0): 1,
        (0, 1): 0, (1, 1): 0, (2, 1): None, (3, 1): None,
    }  # fmt: skip


def test_a_host_buffer_lies_with_the_gpu_not_with_the_nic():
    assert lands(SWITCHED, 3, 0, "send") == lands(SWITCHED, 3, 0, "receive") == 1


@pytest.mark.parametrize(("level", "direct"), [("LOC", 0), ("PIX", 4), ("PHB", 4), ("SYS", 8)])
def test_the_level_says_how_far_nics_reach(level, direct):
    seen = view(SWITCHED, Knowledge(), Settings(net_gdr_level=level))
    ends = [net_buffer_numa(seen, gpu, nic, "receive") for gpu in seen.gpus for nic in seen.nics]
    assert ends.count(None) == direct


def test_below_the_cpu_level_phb_lets_a_nic_reach_its_own_socket():
    node = with_nics(toy_machine(gpus=4, numa_nodes=2), {0: "G0"})
    assert [lands(node, gpu, 0) for gpu in range(4)] == [0, 0, 1, 1]
    near = [lands(node, gpu, 0, net_gdr_level="PHB") for gpu in range(4)]
    assert near == [None, None, 1, 1]


def test_both_gpu_and_nic_have_to_support_it():
    plain = with_nics(toy_machine(gpus=2, per_switch=2), {0: "G0"}, gdr=False)
    assert lands(plain, 0, 0, net_gdr_level="SYS") == 0
    v100 = machine("b_epyc_nps4_v100.xml")
    assert lands(v100, 3, 0, net_gdr_level="PHB", net_gdr_read=True) is None


def older(node, sm=70):
    gpus = tuple(msgspec.structs.replace(gpu, sm=sm) for gpu in node.gpus)
    return msgspec.structs.replace(node, gpus=gpus)


def test_nics_do_not_read_old_gpus_that_talk_over_pci_but_write_to_them():
    old = older(SWITCHED)
    assert lands(old, 0, 0, "send") == 0
    assert lands(old, 0, 0, "receive") is None
    assert lands(old, 0, 0, "send", net_gdr_read=True) is None
    assert lands(older(SWITCHED, sm=80), 0, 0, "send", net_gdr_read=False) == 0
    # NCCL cannot know of other communicators: a single GPU is read.
    assert lands(old, 0, 0, "send", gpus=[0]) is None


def linked(node, *pairs):
    both = [*pairs, *((other, one) for one, other in pairs)]
    links = tuple(NvLink(source=f"G{a}", target=f"G{b}", count=4) for a, b in both)
    return msgspec.structs.replace(node, nvlinks=links)


def test_nics_read_old_gpus_that_have_an_nvlink():
    bridged = older(linked(SWITCHED, (0, 1)))
    assert [lands(bridged, gpu, gpu // 2) for gpu in range(4)] == [None, None, 1, 1]


def test_a_gpu_with_nvlink_to_the_one_beside_the_nic_sends_through_it_and_receives_alone():
    node = linked(SWITCHED, (0, 2))
    seen = view(node, Knowledge(), Settings())
    assert relay(seen, 2, 0) == 0
    assert relay(seen, 0, 0) is None
    assert net_path(seen, 2, 0, "send").name == "PXN"
    assert net_path(seen, 2, 0, "receive").name == "SYS"
    flow = exit_flow(view(node, Knowledge(), Settings(channels=4)), 2, 0, blocks=4)
    assert str(flow) == "G2->G2->G0->N0->N0{blocks=4}"
    # NCCL asks for the same path when it receives: the NIC writes across the sockets.
    into = entry_flow(view(node, Knowledge(), Settings()), 0, 2, blocks=4)
    assert str(into) == "N0->N0->G2{blocks=4}"


def test_a_gpu_that_is_not_of_the_communicator_sends_for_nobody():
    node = linked(SWITCHED, (0, 2))
    assert relay(view(node, Knowledge(), Settings(), gpus=[1, 2, 3]), 2, 0) is None


def test_since_2_30_only_gpus_that_the_nic_reads_send_for_others():
    node = linked(SWITCHED, (0, 2))
    off = Settings(net_gdr_read=False)
    assert relay(view(node, Knowledge(), off), 2, 0) is None
    before = msgspec.structs.replace(off, version="2.28")
    assert relay(view(node, Knowledge(), before), 2, 0) == 0
    # The buffer is then in host memory beside the GPU that sends.
    flow = exit_flow(view(node, Knowledge(), before), 2, 0, blocks=2)
    assert str(flow) == "G2->G2->C0->N0->N0{blocks=2}"


def test_flows_have_the_fifo_and_blocks_of_their_settings():
    settings = Settings(buffsize=512 * 1024)
    out = exit_flow(view(SWITCHED, Knowledge(), settings), 1, 0, blocks=8)
    assert str(out) == "G1->N0->N0{blocks=8,fifo=512K}"
    into = entry_flow(view(SWITCHED, Knowledge(), settings), 0, 3, blocks=8)
    assert str(into) == "N0->N0->C1->G3->G3{blocks=8,fifo=512K}"


def c2c(node):
    """Every GPU has C2C to its CPU, as on Grace Hopper."""
    pairs = [(gpu.id, f"C{node.numa_of(gpu.id)}") for gpu in node.gpus]
    links = tuple(NvLink(source=a, target=b, count=10, kind="c2c") for a, b in pairs)
    return older(msgspec.structs.replace(node, nvlinks=links), sm=90)


def test_over_c2c_a_nic_of_the_same_cpu_counts_as_near_since_2_27():
    node = c2c(with_nics(toy_machine(gpus=2, numa_nodes=2), {0: "G0", 1: "G1"}))
    seen = view(node, Knowledge(), Settings())
    assert net_path(seen, 0, 0, "send").name == "P2C"
    assert net_buffer_numa(seen, 0, 0, "send") is None
    assert lands(node, 0, 0, version="2.18") == 0
    assert lands(node, 0, 1) == 0


def test_nics_are_chosen_by_name_and_port_or_by_interface():
    assert usable_nics(SWITCHED, Settings()) == (0, 1)
    assert usable_nics(SWITCHED, Settings(ib_hca=("mlx5_1:1",))) == (1,)
    assert usable_nics(SWITCHED, Settings(ib_hca=("mlx5_1:2",))) == ()
    assert usable_nics(SWITCHED, Settings(socket_ifname=("eth9",))) == (0, 1)
    h200 = machine("h200x4-vm.xml")
    assert usable_nics(h200, Settings(socket_ifname=("lo",))) == ()
    assert usable_nics(h200, Settings(ib_hca=("mlx5_0",), socket_ifname=("eth0",))) == (0,)


def test_a_ring_ends_at_any_gpu_with_any_nic_that_is_used():
    seen = view(SWITCHED, Knowledge(), Settings(ib_hca=("mlx5_1",)), gpus=[0, 3])
    assert (seen.gpus, seen.nics) == ((0, 3), (1,))
    with pytest.raises(InputError) as error:
        net_buffer_numa(seen, 0, 0, "send")
    assert error.value.where == "end of a ring at GPU 0 and NIC 0"
    assert error.value.right == "there are G0, G3 and N1"
