"""Path types against what NCCL's own graph code reported, and against machines drawn by hand."""

import json
from itertools import combinations
from pathlib import Path

import pytest

from tccl_py.model.machine import Gpu, Machine, Nic, NumaNode, NvLink, PciBridge, PciLink
from tccl_py.nccl.paths import path_types
from tccl_py.nccl.system import PathType
from tccl_py.readers.nccl_topology import read_nccl_topology
from tests.toy import toy_machine

CASES = Path(__file__).parent / "cases"
CHOICES = json.loads((CASES / "nccl-verdicts" / "stock-choices.json").read_text())
# One is a graph file, and on the other NCCL fails.
NO_MACHINES = ("ncv4-graph.xml", "x_fake_nvlink_oneway.xml")
FILES = [file for file in sorted(CASES.rglob("topologies/*.xml")) if file.name not in NO_MACHINES]
GEN4 = PciLink(speed_gts=16.0, width=16)


def topology(name: str) -> Machine:
    folders = (CASES / "topologies", CASES / "nccl-verdicts" / "topologies")
    return read_nccl_topology(next(folder / name for folder in folders if (folder / name).exists()))


@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: f"{c['topology']}-{c['environment']}")
def test_every_hop_nccl_reported_has_the_path_type_it_reported(choice):
    machine = topology(choice["topology"])
    # With P2P off NCCL reroutes every pair through the CPU and reports that path.
    rerouted = choice["environment"].get("NCCL_P2P_DISABLE") == "1"
    for hop in choice["hops"]:
        source, target = f"G{hop['src']}", f"G{hop['dst']}"
        found = path_types(machine)[source, target]
        same = machine.numa_of(source) == machine.numa_of(target)
        over_cpu = PathType.PHB if same else PathType.SYS
        assert (over_cpu if rerouted else found).name == hop["path"], (source, target)


def test_path_types_compare_in_nccls_order():
    names = ["LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS", "NET", "DIS"]
    assert [kind.name for kind in sorted(PathType)] == names


def test_a_device_is_local_to_itself():
    assert path_types(toy_machine(gpus=2))["G1", "G1"] is PathType.LOC


def test_one_shared_bridge_is_pix_and_a_shared_cpu_phb_and_two_cpus_sys():
    machine = toy_machine(gpus=8, numa_nodes=2, per_switch=2)
    assert path_types(machine)["G0", "G1"] is PathType.PIX
    assert path_types(machine)["G0", "G2"] is PathType.PHB
    assert path_types(machine)["G0", "G4"] is PathType.SYS
    assert path_types(machine)["G0", "C0"] is PathType.PHB
    assert path_types(machine)["C1", "G0"] is PathType.SYS
    assert path_types(machine)["C0", "C1"] is PathType.SYS


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
    assert path_types(machine)["G0", "G1"] is PathType.PXB
    assert path_types(machine)["G0", "N0"] is PathType.PXB


@pytest.mark.parametrize(
    ("device", "parts"), [("0xc010", ("0xa096", "0xa096")), ("0xc030", ("0x0000", "0x1000"))]
)
def test_broadcom_switches_of_two_levels_are_one_as_in_nccl(device, parts):
    machine = two_level_switch(parts=parts, device=device)
    assert path_types(machine)["G0", "G1"] is PathType.PIX
    assert path_types(machine)["N0", "G1"] is PathType.PIX


def test_gen5_broadcom_switches_of_the_same_level_stay_apart():
    machine = two_level_switch(parts=("0x0000", "0x0000"))
    assert path_types(machine)["G0", "G1"] is PathType.PXB


def test_amd_bridges_below_a_flattened_broadcom_switch_still_make_pxb():
    machine = topology("rccl-topo_16p1h.xml")
    # No XGMI joins GPU 0 and 3; both keep a bridge of their own below the merged switch.
    bare = Machine(
        name="bare", numa_nodes=machine.numa_nodes, gpus=machine.gpus, bridges=machine.bridges
    )
    assert path_types(bare)["G0", "G3"] is PathType.PXB


def test_nvlink_through_a_switch_is_nvl():
    machine = topology("e_hgx_h100.xml")
    assert path_types(machine)["G0", "G7"] is PathType.NVL
    assert path_types(machine)["G0", "N0"] is PathType.PIX
    assert path_types(machine)["G0", "N1"] is PathType.PHB
    assert path_types(machine)["N7", "G0"] is PathType.SYS


def test_two_nvlinks_over_a_gpu_are_nvb_and_three_are_not_taken():
    machine = topology("x_fake_nvchain.xml")
    assert path_types(machine)["G0", "G1"] is PathType.NVL
    assert path_types(machine)["G0", "G2"] is PathType.NVB
    assert path_types(machine)["G0", "G3"] is PathType.SYS


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


def test_c2c_leads_to_the_cpu_and_not_to_nics():
    machine = superchips()
    assert path_types(machine)["G0", "C0"] is PathType.C2C
    assert path_types(machine)["G0", "N0"] is PathType.PHB
    assert path_types(machine)["N0", "G0"] is PathType.PHB
    assert path_types(machine)["G0", "N1"] is PathType.SYS
    assert path_types(machine)["G0", "G1"] is PathType.SYS


def test_ports_of_one_card_are_local_to_each_other():
    machine = toy_machine(gpus=1)
    ports = tuple(
        Nic(index=i, name=f"mlx5_0:{i}", parent="C0", bus_id="0000:99:00.0", port=i)
        for i in range(2)
    )
    both = Machine(name="x", numa_nodes=machine.numa_nodes, gpus=machine.gpus, nics=ports)
    assert path_types(both)["N0", "N1"] is PathType.LOC
    assert path_types(both)["N0", "G0"] is PathType.PHB


@pytest.mark.parametrize(
    "node", [*map(read_nccl_topology, FILES), superchips()], ids=lambda node: node.name
)
def test_paths_are_the_same_both_ways(node):
    devices = [one.id for one in (*node.gpus, *node.nics)]
    for a, b in combinations(devices, 2):
        assert path_types(node)[a, b] is path_types(node)[b, a]
