"""What was published in words about the machines, as tests of the bundled models."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from tccl_py.model.rings import bounce, direct_read, direct_write
from tccl_py.model.transfer import Flow, parse_set, transfer_set
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator


def rate(machine: str, text: str) -> float:
    return Simulator(load_bundled(machine)).measure([parse_set(text)])[0].rate_gbps


def rate_by_sharing_alone(machine: str, text: str) -> float:
    model = msgspec.structs.replace(load_bundled(machine), congestion=())
    return Simulator(model).measure([parse_set(text)])[0].rate_gbps


def transfers_at(machine: str, gpu: int) -> list[Flow]:
    """Every single transfer that GPU `gpu` executes."""
    model = load_bundled(machine).machine
    others = [index for index in model.gpu_indices if index != gpu]
    found = [direct_write(gpu, other) for other in others]
    found += [direct_read(other, gpu) for other in others]
    for node in model.numa_nodes:
        found += parse_set(f"G{gpu}->G{gpu}->{node.id} {node.id}->G{gpu}->G{gpu}").flows
    return found


def test_amd_v100_reading_own_host_memory_while_writing_to_another_numa_node_is_the_worst_pattern():
    simulator = Simulator(load_bundled("amd-v100"))
    pairs = list(itertools.combinations(transfers_at("amd-v100", 0), 2))
    rates = {str(one): simulator.measure([one])[0].rate_gbps for one in map(transfer_set, pairs)}
    slowest = min(rates.values())
    worst = {text for text, value in rates.items() if value < 1.01 * slowest}
    # GPU 0 is alone on NUMA node 3, so every other GPU is on another.
    assert worst == {f"C3->G0->G0 G0->G0->G{target}" for target in (1, 2, 3)}


def test_amd_v100_the_worst_pattern_holds_where_the_read_is_half_of_a_bounce():
    assert rate("amd-v100", "G1->G1->C3->G0->G0 G0->G0->G3") < 0.5 * rate(
        "amd-v100", "G1->G1->C0->G0->G0 G0->G0->G3"
    )


def test_intel_v100_a_direct_transfer_across_numa_nodes_is_very_slow_and_a_bounce_is_not():
    for direct in ("G0->G0->G2", "G0->G2->G2"):
        for numa in (0, 2):
            assert rate("intel-v100", direct) < rate("intel-v100", f"G0->G0->C{numa}->G2->G2") / 4


def test_intel_v100_a_direct_transfer_within_a_numa_node_is_fast():
    assert rate("intel-v100", "G0->G0->G1") > 10


@pytest.mark.parametrize("machine", ["amd-v100", "amd-3090", "intel-v100"])
def test_rates_fall_when_many_transfers_use_the_host_memory_of_one_numa_node(machine):
    ring = [(0, 1), (1, 2), (2, 3), (3, 0)]
    nodes = [node.index for node in load_bundled(machine).machine.numa_nodes]
    crowded = transfer_set(bounce(a, b, nodes[0]) for a, b in ring)
    spread = transfer_set(bounce(a, b, k) for (a, b), k in zip(ring, nodes, strict=True))
    one, other = Simulator(load_bundled(machine)).measure([crowded, spread])
    assert one.rate_gbps < other.rate_gbps / 2


@pytest.mark.parametrize("machine", ["amd-v100", "amd-3090", "intel-v100", "nvswitch-8gpu-8nic"])
def test_figures_nobody_published_are_marked_assumed(machine):
    for text in ("G0->G0->C0", "G0->G0->C0->G2->G2", "N0->N0->G0"):
        (answer,) = Simulator(load_bundled(machine)).measure([parse_set(text)])
        assert answer.assumed


def test_asus_the_collapsing_pattern_collapses_when_bounced_through_host_memory_too():
    for near, far in (("C0", "C0"), ("C1", "C1"), ("C0", "C1")):
        text = f"G0->G0->{near}->G4->G4 G1->G1->{far}->G6->G6"
        assert rate("asus-esc8000a-e13p", text) < (
            rate_by_sharing_alone("asus-esc8000a-e13p", text) / 2
        )


def test_asus_bounces_of_two_gpus_to_one_root_port_do_not_collapse():
    text = "G0->G0->C1->G4->G4 G1->G1->C1->G5->G5"
    assert rate("asus-esc8000a-e13p", text) == rate_by_sharing_alone("asus-esc8000a-e13p", text)


def test_asus_reads_of_the_collapsing_pairs_do_not_collapse():
    text = "G0->G4->G4 G1->G6->G6"
    assert rate("asus-esc8000a-e13p", text) == rate_by_sharing_alone("asus-esc8000a-e13p", text)


def test_asus_virtual_switches_of_one_chip_do_not_use_their_uplinks():
    (answer,) = Simulator(load_bundled("asus-esc8000a-e13p")).measure(
        [parse_set("G0->G0->G2 G1->G1->G4")]
    )
    assert answer.gbps[0] > 50 and answer.gbps[1] > 35


def test_3090s_reach_each_other_directly_over_nvlink_only():
    assert rate("supermicro-h12dsg-8x3090", "G0->G0->G1") > 40
    with pytest.raises(Exception, match=r"no direct access to GPU 2"):
        rate("supermicro-h12dsg-8x3090", "G0->G0->G2")


def test_more_fifos_than_the_cache_holds_slow_a_bounced_ring_down():
    ring = [(0, 1), (1, 2), (2, 3), (3, 0)]

    def bounced(options: str) -> float:
        text = " ".join(f"G{a}->G{a}->C0->G{b}->G{b}{{{options}}}" for a, b in ring)
        return rate("h200x4-vm", text)

    assert bounced("blocks=16,fifo=512K") > 1.3 * bounced("blocks=16,fifo=4M")
    assert bounced("blocks=16,fifo=512K") == pytest.approx(bounced("blocks=32,fifo=256K"), rel=0.05)
    assert bounced("blocks=2,fifo=512K") < bounced("blocks=4,fifo=512K")
