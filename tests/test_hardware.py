"""What limits a machine before NCCL does: by its description alone, and where it is said."""

import msgspec
import pytest

from tccl_py.health.advice import advice_by, advice_request
from tccl_py.health.doctor import Diagnosis
from tccl_py.health.host import defect
from tccl_py.model.machine import (
    Gpu,
    Knowledge,
    Machine,
    NumaNode,
    NvLink,
    NvSwitch,
    PciBridge,
    PciLink,
)
from tccl_py.planning.hardware import hardware_limits
from tccl_py.planning.opening import machine_subject
from tccl_py.simulator.descriptions import bundled_names, load_bundled

FULL, HALF = PciLink(speed_gts=16.0, width=16), PciLink(speed_gts=16.0, width=8)
FEW = PciLink(speed_gts=5.0, width=4)


def machine(*links, nvlinks=(), switch=False, bridges=(), above=()):
    """GPUs with these links, below a CPU or a bridge."""
    return Machine(
        name="a test",
        numa_nodes=(NumaNode(index=0, numa_id=0, vendor="GenuineIntel"),),
        gpus=tuple(
            Gpu(
                index=i,
                bus_id=f"0000:0{i + 1}:00.0",
                parent=above[i] if above else "C0",
                link=link,
                sm=86,
            )
            for i, link in enumerate(links)
        ),
        bridges=bridges,
        nvlinks=nvlinks,
        nvswitches=(NvSwitch(index=0),) if switch else (),
    )


def limits(one):
    return [limit.where for limit in hardware_limits(one, Knowledge())]


@pytest.mark.parametrize(
    ("links", "where"),
    [
        ((FULL, FULL, FULL, FEW), ["GPU 3"]),
        ((FULL, HALF), ["GPU 1"]),
        ((FULL, HALF, HALF, FEW), ["GPU 3"]),
        ((HALF, HALF), []),
        ((FEW, FEW), ["GPU 0", "GPU 1"]),
        ((PciLink(), FULL), []),
    ],
)
def test_links_are_compared_with_their_siblings_and_with_a_card(links, where):
    assert limits(machine(*links)) == where


def test_no_bundled_machine_is_limited_by_a_part():
    models = [load_bundled(name) for name in bundled_names()]
    assert not [one for m in models for one in hardware_limits(m.machine, m.knowledge)]


def test_what_a_slow_link_costs_and_what_the_others_get_alone_is_simulated():
    (limit,) = hardware_limits(machine(FULL, FULL, FULL, FEW), Knowledge())
    assert "4 lanes of 5 GT/s (2.0 GB/s): every ring over it gets 1." in limit.what
    assert "GPUs 0, 1, 2 alone get " in limit.what
    assert limit.what.endswith("(simulated)")
    assert limit.fix.endswith("CUDA_VISIBLE_DEVICES=0,1,2")


def test_an_uplink_that_a_virtual_machine_pretends_is_named():
    ports = tuple(
        PciBridge(bus_id=f"0000:1{i}:00.0", parent="C0", link=link)
        for i, link in enumerate((FULL, PciLink(speed_gts=2.5, width=1)))
    )
    one = machine(*[FULL] * 4, bridges=ports, above=[ports[i // 2].bus_id for i in range(4)])
    (limit,) = hardware_limits(one, Knowledge())
    assert limit.where == "the link above the PCI switch 0000:11:00.0 (GPUs 2, 3)"
    assert "1 lane of 2.5 GT/s" in limit.what
    assert "virtual machine" in limit.fix


def test_fewer_nvlinks_than_the_twins_are_named_and_missing_bridges_are_not():
    def linked(*counts, switch=False):
        pairs = [("G0", "G1"), ("G1", "G0"), ("G2", "G3"), ("G3", "G2")]
        ends = [(source, "S0") if switch else (source, target) for source, target in pairs]
        nvlinks = tuple(
            NvLink(source=source, target=target, count=count)
            for (source, target), count in zip(ends, counts, strict=True)
            if count
        )
        return limits(machine(*[FULL] * 4, nvlinks=nvlinks, switch=switch))

    assert linked(12, 12, 8, 8) == ["GPUs 2, 3"]
    assert linked(12, 12, 0, 0) == linked(12, 12, 12, 12) == []
    assert linked(18, 18, 18, 0, switch=True) == ["GPU 3"]


def test_gpus_behind_the_chipset_of_a_board_are_named():
    port = PciBridge(
        bus_id="0000:0a:00.0", parent="C0", link=FULL, vendor="0x1022", device="0x57ad"
    )
    one = machine(FULL, FULL, bridges=(port,), above=["C0", port.bus_id])
    assert limits(one) == ["GPU 1"]


def test_where_something_hangs_its_fix_comes_before_any_advice():
    subject = machine_subject(advice_request("amd-v100"), print)
    made = subject.search()
    healthy = advice_by(made, subject)
    assert "first `tccl doctor`" in healthy.following
    hang = defect("translating", "GPU 0", severity="hang")
    ill = advice_by(made, subject, Diagnosis(findings=(hang,), unseen=()))
    names = [name for name, _ in ill.lines()]
    assert (names[0], "Try first" in names) == ("Fix first", False)
    assert "NCCL_P2P_LEVEL" in ill.advice
    assert [name for name, _ in healthy.lines()].count("Try first") == 1
    slow = msgspec.structs.replace(hang, severity="slow")
    later = advice_by(made, subject, Diagnosis(findings=(slow,), unseen=()))
    assert [name for name, _ in later.lines()][-2:] == ["Fix first", "Next"]
