"""Path types against what NCCL's own graph code reported, and against machines drawn by hand."""

import json
from pathlib import Path

import pytest

from tccl_py.errors import InputError
from tccl_py.topology.machine import (
    Gpu,
    Machine,
    Nic,
    NumaNode,
    NvLink,
    PciBridge,
    PciLink,
    toy_machine,
)
from tccl_py.topology.paths import (
    PathType,
    one_way_nvlinks,
    path_type,
    path_type_through_cpu,
    path_types,
)
from tccl_py.topology.readers.nccl_topology import read_nccl_topology

CASES = Path(__file__).parent / "cases"
CHOICES = json.loads((CASES / "nccl-verdicts" / "stock-choices.json").read_text())
GEN4 = PciLink(speed_gts=16.0, width=16)


def topology(name: str) -> Machine:
    folders = (CASES / "topologies", CASES / "nccl-verdicts" / "topologies")
    return read_nccl_topology(next(folder / name for folder in folders if (folder / name).exists()))


@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: f"{c['topology']}-{c['environment']}")
def test_every_hop_nccl_reported_has_the_path_type_it_reported(choice):
    machine = topology(choice["topology"])
    # With P2P off NCCL reroutes every pair through the CPU and reports that path.
    rerouted = choice["environment"].get("NCCL_P2P_DISABLE") == "1"
    of = path_type_through_cpu if rerouted else path_type
    for hop in choice["hops"]:
        source, target = f"G{hop['src']}", f"G{hop['dst']}"
        assert of(machine, source, target).name == hop["path"], (source, target)


def test_path_types_compare_in_nccls_order():
    names = ["LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS"]
    assert [kind.name for kind in sorted(PathType)] == names


def test_a_device_is_local_to_itself():
    assert path_type(toy_machine(gpus=2), "G1", "G1") is PathType.LOC


def test_one_shared_bridge_is_pix_and_a_shared_cpu_phb_and_two_cpus_sys():
    machine = toy_machine(gpus=8, numa_nodes=2, per_switch=2)
    assert path_type(machine, "G0", "G1") is PathType.PIX
    assert path_type(machine, "G0", "G2") is PathType.PHB
    assert path_type(machine, "G0", "G4") is PathType.SYS
    assert path_type(machine, "G0", "C0") is PathType.PHB
    assert path_type(machine, "C1", "G0") is PathType.SYS
    assert path_type(machine, "C0", "C1") is PathType.SYS


def two_level_switch(*, parts: tuple[str, str], device: str = "0xc030") -> Machine:
    """C0 - upper - (lower A - G0, lower B - G1, N0)."""
    upper, lower = parts
    ids = {"vendor": "0x1000", "device": device, "subsystem_vendor": "0x1000"}
    top = PciBridge(bus_id="0000:10:00.0", parent="C0", link=GEN4, subsystem_device=upper, **ids)
    below = [
        PciBridge(bus_id=bus, parent=top.id, link=GEN4, subsystem_device=lower, **ids)
        for bus in ("0000:11:00.0", "0000:12:00.0")
    ]
    return Machine(
        name="two-level",
        numa_nodes=(NumaNode(index=0, numa_id=0),),
        bridges=(top, *below),
        gpus=tuple(
            Gpu(index=i, bus_id=f"0000:2{i}:00.0", parent=bridge.id, link=GEN4, sm=90)
            for i, bridge in enumerate(below)
        ),
        nics=(Nic(index=0, name="n", parent=top.id, bus_id="0000:30:00.0", link=GEN4),),
    )


def test_several_bridges_are_pxb():
    machine = two_level_switch(parts=("0x0001", "0x0001"), device="0x8796")
    assert path_type(machine, "G0", "G1") is PathType.PXB
    assert path_type(machine, "G0", "N0") is PathType.PXB


@pytest.mark.parametrize(
    ("device", "parts"), [("0xc010", ("0xa096", "0xa096")), ("0xc030", ("0x0000", "0x1000"))]
)
def test_broadcom_switches_of_two_levels_are_one_as_in_nccl(device, parts):
    machine = two_level_switch(parts=parts, device=device)
    assert path_type(machine, "G0", "G1") is PathType.PIX
    assert path_type(machine, "N0", "G1") is PathType.PIX


def test_gen5_broadcom_switches_of_the_same_level_stay_apart():
    machine = two_level_switch(parts=("0x0000", "0x0000"))
    assert path_type(machine, "G0", "G1") is PathType.PXB


def test_amd_bridges_below_a_flattened_broadcom_switch_still_make_pxb():
    machine = topology("rccl-topo_16p1h.xml")
    # No XGMI joins GPU 0 and 3; both keep a bridge of their own below the merged switch.
    bare = Machine(
        name="bare", numa_nodes=machine.numa_nodes, gpus=machine.gpus, bridges=machine.bridges
    )
    assert path_type(bare, "G0", "G3") is PathType.PXB


def test_nvlink_through_a_switch_is_nvl():
    machine = topology("e_hgx_h100.xml")
    assert path_type(machine, "G0", "G7") is PathType.NVL
    assert path_type(machine, "G0", "N0") is PathType.PIX
    assert path_type(machine, "G0", "N1") is PathType.PHB
    assert path_type(machine, "N7", "G0") is PathType.SYS


def test_two_nvlinks_over_a_gpu_are_nvb_and_three_are_not_taken():
    machine = topology("x_fake_nvchain.xml")
    assert path_type(machine, "G0", "G1") is PathType.NVL
    assert path_type(machine, "G0", "G2") is PathType.NVB
    assert path_type(machine, "G0", "G3") is PathType.SYS


def test_without_p2p_an_nvlinked_pair_goes_over_the_cpu():
    machine = topology("d_8x3090_nvl.xml")
    assert path_type(machine, "G0", "G1") is PathType.NVL
    assert path_type_through_cpu(machine, "G0", "G1") is PathType.PHB
    assert path_type_through_cpu(machine, "G0", "G4") is PathType.SYS


def test_a_one_way_nvlink_is_reported_and_makes_no_path():
    machine = topology("x_fake_nvlink_oneway.xml")
    assert one_way_nvlinks(machine) == (NvLink(source="G1", target="G2", count=1),)
    assert path_type(machine, "G1", "G2") is PathType.SYS
    assert one_way_nvlinks(topology("d_8x3090_nvl.xml")) == ()


def superchips() -> Machine:
    """Two Grace Hoppers: C2C beside each CPU's own NIC and GPU."""
    return Machine(
        name="gh200x2",
        numa_nodes=tuple(NumaNode(index=i, numa_id=i, arch="arm64") for i in range(2)),
        gpus=tuple(
            Gpu(index=i, bus_id=f"000{i}:01:00.0", parent=f"C{i}", link=GEN4, sm=90)
            for i in range(2)
        ),
        nics=tuple(
            Nic(index=i, name=f"n{i}", parent=f"C{i}", bus_id=f"000{i}:02:00.0", link=GEN4)
            for i in range(2)
        ),
        nvlinks=tuple(
            NvLink(source=f"G{i}", target=f"C{i}", count=10, kind="c2c") for i in range(2)
        ),
    )


def test_c2c_leads_to_the_cpu_and_makes_the_nearest_nic_p2c():
    machine = superchips()
    assert path_type(machine, "G0", "C0") is PathType.C2C
    assert path_type(machine, "G0", "N0") is PathType.P2C
    assert path_type(machine, "N0", "G0") is PathType.P2C
    assert path_type(machine, "G0", "N1") is PathType.SYS
    assert path_type(machine, "G0", "G1") is PathType.SYS


def test_ports_of_one_card_are_local_to_each_other():
    machine = toy_machine(gpus=1)
    ports = tuple(
        Nic(index=i, name=f"mlx5_0:{i}", parent="C0", bus_id="0000:99:00.0", port=i)
        for i in range(2)
    )
    both = Machine(name="x", numa_nodes=machine.numa_nodes, gpus=machine.gpus, nics=ports)
    assert path_type(both, "N0", "N1") is PathType.LOC
    assert path_type(both, "N0", "G0") is PathType.PHB


@pytest.mark.parametrize("file", sorted((CASES / "topologies").glob("[!n]*.xml")), ids=str)
def test_paths_are_the_same_both_ways_and_agree_with_the_table(file):
    machine = read_nccl_topology(file)
    types = path_types(machine)
    for (a, b), kind in types.items():
        assert types[b, a] == kind
    some = sorted(types)[:: max(1, len(types) // 20)]
    assert all(types[a, b] == path_type(machine, a, b) for a, b in some)


def test_an_unknown_device_is_refused_by_name():
    with pytest.raises(InputError) as caught:
        path_type(toy_machine(gpus=2), "G0", "G7")
    assert str(caught.value) == (
        "G7: is no GPU, NIC or NUMA node of machine toy; it has G0, G1, C0"
    )
