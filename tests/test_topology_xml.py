"""Topology files: the form NCCL's lexer reads, and nothing that is not known."""

from pathlib import Path

import msgspec
import pytest

from tccl_py.errors import InputError
from tccl_py.model.machine import Knowledge, Nic, NvLink, NvSwitch
from tccl_py.nccl.graph_file import read_elements
from tccl_py.nccl.graph_search import default_rings
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.versions import version_facts
from tccl_py.nccl.view import view
from tccl_py.readers.nccl_topology import parse_nccl_topology, read_nccl_topology
from tccl_py.simulator.descriptions import load_bundled
from tests.topology_writer import topology_xml
from tests.toy import toy_machine

CASES = Path(__file__).parent / "cases"
GOLDEN = CASES / "topology-files"
FILES = sorted([*CASES.glob("topologies/*.xml"), *CASES.glob("nccl-verdicts/topologies/*.xml")])
OURS = [
    path
    for path in FILES
    if not path.name.startswith("rccl") and "graph" not in path.name and "oneway" not in path.name
]


def count(element, name):
    """Elements of this name at or below one."""
    return (element.name == name) + sum(count(child, name) for child in element.children)


# As NCCL's handlers for a topology (graph/xml.cc).
INSIDE = {
    "": ("system",),
    "system": ("cpu",),
    "cpu": ("pci", "nic"),
    "pci": ("pci", "gpu", "nic", "pcilink"),
    "gpu": ("nvlink", "c2c"),
    "nic": ("net",),
}


def again(machine, text):
    return parse_nccl_topology(text, where=machine.name)


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_what_a_file_said_is_what_its_machine_says_again(path):
    machine = read_nccl_topology(path)
    assert again(machine, topology_xml(machine)) == machine


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_nccls_own_lexer_takes_it(path):
    machine = read_nccl_topology(path)
    text = topology_xml(machine, comment=["rates -> measured -- here"])
    assert text.startswith("<!-- rates -) measured - here -->\n<system ")
    (system,) = read_elements(text, version_facts("2.30"), INSIDE, where=path.name)
    assert count(system, "gpu") == len(machine.gpus)
    assert count(system, "net") == len([nic for nic in machine.nics if nic.name != nic.bus_id])
    assert count(system, "nvlink") == len(machine.nvlinks)
    for line in text.splitlines():
        assert "\t" not in line
        assert "  " not in line.strip()


@pytest.mark.parametrize(
    "name", ["asus-esc8000a-e13p", "dual-turin-direct", "supermicro-h12dsg-8x3090", "h200x4-vm"]
)
def test_it_is_what_it_was(name):
    path = CASES / "topologies" / f"{name}.xml"
    machine = read_nccl_topology(path) if path.exists() else load_bundled(name).machine
    assert topology_xml(machine) == (GOLDEN / f"{name}.xml").read_text()


def test_a_virtual_machine_keeps_what_it_does_not_know():
    machine = read_nccl_topology(CASES / "topologies" / "h200x4-vm.xml")
    text = topology_xml(machine)
    assert '<cpu numaid="-1" ' in text
    assert 'link_width="0"' in text
    assert '<nvlink target="fffffff:ff:ff.0" count="18" tclass="0x068000"/>' in text


def test_nothing_is_said_of_what_is_not_known():
    machine = toy_machine(gpus=2)
    gpus = tuple(msgspec.structs.replace(gpu, sm=None) for gpu in machine.gpus)
    port = Nic(index=0, name="mlx5_0", parent="C0", bus_id="0000:41:00.0")
    text = topology_xml(msgspec.structs.replace(machine, gpus=gpus, nics=(port,)))
    # NCCL would believe a gdr of 0, a speed of 0 and a guid of 0, and look nothing up.
    for unknown in ("sm=", "gdr=", "speed=", "guid=", "rank=", "host_hash="):
        assert f" {unknown}" not in text
    assert '<gpu dev="0"/>' in text
    assert '<net name="mlx5_0" dev="0" port="0"/>' in text


def test_ports_of_one_card_stand_in_one_card():
    machine = toy_machine(gpus=2)
    ports = tuple(
        Nic(
            index=number,
            name=f"mlx5_{number}",
            parent="C0",
            bus_id="0000:41:00.0",
            speed_mbps=100_000,
            gdr=True,
            guid="0x1234",
            port=number + 1,
        )
        for number in range(2)
    )
    machine = msgspec.structs.replace(machine, nics=ports)
    text = topology_xml(machine)
    assert text.count("<nic>") == 1
    assert text.count('gdr="1"') == 2
    assert again(machine, text) == machine


def test_an_nvlink_that_goes_one_way_is_never_written():
    machine = toy_machine(gpus=2)
    machine = msgspec.structs.replace(machine, nvlinks=(NvLink(source="G0", target="G1", count=4),))
    with pytest.raises(InputError, match=r"from G0 to G1 but not"):
        topology_xml(machine)


def test_links_of_other_vendors_are_refused():
    machine = toy_machine(gpus=2)
    link = NvLink(source="G0", target="G1", count=1, kind="xgmi")
    with pytest.raises(InputError, match="XGMI"):
        topology_xml(msgspec.structs.replace(machine, nvlinks=(link,)))


def test_c2c_links_are_left_to_nvml():
    machine = toy_machine(gpus=1)
    link = NvLink(source="G0", target="C0", count=10, kind="c2c")
    assert "c2c" not in topology_xml(msgspec.structs.replace(machine, nvlinks=(link,)))


def test_switches_are_named_where_they_can_be_seen():
    machine = toy_machine(gpus=2)
    machine = msgspec.structs.replace(
        machine,
        nvswitches=(NvSwitch(index=0, bus_id="0000:c1:00.0"),),
        nvlinks=tuple(NvLink(source=f"G{one}", target="S0", count=12) for one in range(2)),
    )
    text = topology_xml(machine)
    assert text.count('target="0000:c1:00.0" count="12" tclass="0x068000"') == 2
    assert again(machine, text) == machine


@pytest.mark.parametrize("name", ['mlx"5', "mlx<5", "m" * 255, "mlx\n5"])
def test_names_that_the_lexer_cannot_read_are_refused(name):
    port = Nic(index=0, name=name, parent="C0")
    machine = msgspec.structs.replace(toy_machine(gpus=2), nics=(port,))
    with pytest.raises(InputError, match="name of <net>"):
        topology_xml(machine)


def test_nccl_chooses_the_same_by_a_file_as_by_the_machine():
    machine = read_nccl_topology(CASES / "topologies" / "wrx90-16gpu-4switch.xml")
    gpus = range(6)
    for settings in (Settings(), Settings(p2p_level="SYS")):
        own = default_rings(view(machine, Knowledge(), settings, gpus=gpus))
        theirs = default_rings(
            view(again(machine, topology_xml(machine)), Knowledge(), settings, gpus=gpus)
        )
        assert own == theirs
