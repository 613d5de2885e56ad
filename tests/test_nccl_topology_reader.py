"""The reader of NCCL topology XML: real files of three vendors, and what it refuses and how."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tccl_py.errors import InputError
from tccl_py.files import encode_json
from tccl_py.model.machine import (
    Gpu,
    Knowledge,
    Machine,
    Nic,
    NumaNode,
    NvLink,
    NvSwitch,
    PciLink,
)
from tccl_py.nccl.versions import pci_gbps
from tccl_py.readers.nccl_topology import parse_nccl_topology, read_nccl_topology
from tccl_py.simulator.descriptions import model_for
from tccl_py.simulator.model import facts
from tests.effort import calls_at_most
from tests.toy import machine_from_json

CASES = Path(__file__).parent / "cases"
FILES = [
    CASES / "h200x4-vm" / "topo.xml",
    *sorted((CASES / "nccl-verdicts" / "topologies").glob("*.xml")),
    *sorted((CASES / "topologies").glob("*-topo.xml")),
    *sorted((CASES / "topologies").glob("[!n]*.xml")),
]
TEXTS = [path.read_text() for path in FILES]


def read(name: str) -> Machine:
    return read_nccl_topology(next(path for path in FILES if path.name == name))


def gpu_xml(dev: str = "0", bus: str = "0000:01:00.0", inner: str = "") -> str:
    return (
        f'<pci busid="{bus}" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">'
        f'<gpu dev="{dev}" sm="86" gdr="1">{inner}</gpu></pci>'
    )


def system(body: str, numa: str = "0") -> str:
    return f'<system version="1">\n<cpu numaid="{numa}" arch="x86_64">\n{body}\n</cpu>\n</system>'


def refusal(text: str) -> tuple[str, str]:
    """The place and the fault of the error."""
    with pytest.raises(InputError) as caught:
        parse_nccl_topology(text, where="topo.xml")
    return caught.value.where, caught.value.what


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_topology_file_is_read_and_survives_json(path):
    machine = read_nccl_topology(path)
    assert machine.name == path.stem
    assert machine_from_json(encode_json(machine), where="json") == machine
    assert list(machine.gpu_indices) == list(range(len(machine.gpus)))


def test_a_graph_is_refused_with_a_sentence():
    path = CASES / "topologies" / "ncv4-graph.xml"
    with pytest.raises(InputError) as caught:
        read_nccl_topology(path)
    assert caught.value.where == f"{path}:1 <graphs>"
    assert "NCCL_TOPO_DUMP_FILE" in caught.value.right


def test_a_virtual_machine_keeps_numa_minus_one_and_unknown_links():
    machine = read("h200x4-vm.xml")
    assert machine.numa_nodes == (
        NumaNode(index=0, numa_id=-1, vendor="GenuineIntel", family=6, model=207),
    )
    assert machine.gpus[3] == Gpu(
        index=3, bus_id="0000:00:09.0", parent="C0", link=PciLink(speed_gts=32.0), sm=90, gdr=True
    )
    assert machine.nics == (Nic(index=0, name="eth0", parent="C0", speed_mbps=10000, guid="0x0"),)
    assert machine.nvswitches == (NvSwitch(index=0),)
    assert machine.nvlinks[0] == NvLink(source="G0", target="S0", count=18)


def test_all_planes_of_an_nvswitch_fabric_are_one_switch_with_summed_counts():
    machine = read("e_hgx_h100.xml")
    assert machine.nvswitches == (NvSwitch(index=0, bus_id="0000:05:00.0"),)
    assert machine.nvlinks == tuple(NvLink(source=f"G{i}", target="S0", count=18) for i in range(8))
    assert machine.nics[3].parent == machine.gpus[3].parent == "0000:5d:00.0"


def test_bridges_keep_their_vendor_and_device():
    bridge = read("asus-esc8000a-e13p.xml").bridges[0]
    assert (bridge.bus_id, bridge.parent) == ("0000:11:00.0", "C0")
    assert (bridge.vendor, bridge.device) == ("0x1000", "0xc030")
    assert (bridge.subsystem_vendor, bridge.subsystem_device) == ("0x1000", "0x0000")
    assert bridge.link == PciLink(speed_gts=32.0, width=16)


@pytest.mark.parametrize(
    ("width", "lanes", "gbps"), [("0", None, 24.0), ("255", None, 382.5), ("8", 8, 12.0)]
)
def test_nccl_takes_the_kernels_255_for_lanes_and_0_for_16(width, lanes, gbps):
    text = system(gpu_xml()).replace('link_width="16"', f'link_width="{width}"')
    link = parse_nccl_topology(text, where="topo.xml").gpu(0).link
    assert (link.lanes, pci_gbps(link)) == (lanes, gbps)


def test_azure_files_without_gpus_number_them_by_bus_id():
    machine = read("ndv4-topo.xml")
    assert machine.gpu(0).bus_id == "0001:00:00.0"
    assert machine.gpu(2).bus_id == "0003:00:00.0"
    assert machine.gpu(2).parent == "ffff:ff:01.0"
    assert [nic.bus_id for nic in machine.nics][:2] == ["0101:00:00.0", "0102:00:00.0"]
    assert len(machine.gpus) == len(machine.nics) == 8


@pytest.mark.parametrize("name", ["ndv2-topo.xml", "ndv4-topo.xml", "ndv5-topo.xml"])
def test_files_that_do_not_describe_gpus_are_not_said_to_have_no_nvlinks(name):
    # These machines have NVLinks, which NCCL adds to the file by the driver.
    machine = read(name)
    assert any("no NVLinks" in text for text in Knowledge().assumptions(machine))
    assert dict(facts(model_for(machine)))["NVLinks"] == "none (assumed)"


@pytest.mark.parametrize("name", ["ncv4-topo.xml", "asus-esc8000a-e13p.xml"])
def test_files_that_describe_gpus_tell_that_there_are_no_nvlinks(name):
    assert not any("NVLinks" in text for text in Knowledge().assumptions(read(name))[:-1])
    assert dict(facts(model_for(read(name))))["NVLinks"] == "none"


def test_azures_links_from_a_gpu_to_itself_form_no_nvlink():
    machine = read("ncv4-topo.xml")
    assert machine.nvlinks == ()
    assert [node.numa_id for node in machine.numa_nodes] == [0, 1, 2, 3]


def test_one_way_nvlinks_stay_one_way():
    assert read("x_fake_nvlink_oneway.xml").nvlinks == (NvLink(source="G1", target="G2", count=1),)


def test_rccl_files_give_xgmi_links_and_no_compute_capability():
    machine = read("rccl-topo_16p1h.xml")
    assert NvLink(source="G0", target="G1", count=4, kind="xgmi") in machine.nvlinks
    assert {gpu.sm for gpu in machine.gpus} == {None}
    assert machine.gpus[0].name == "gcn910"
    assert len(machine.nics) == 8


def test_numa_nodes_are_numbered_in_the_systems_order_not_the_files():
    machine = read("rccl-topo_8p_ts1_n4_1.xml")
    assert [(node.id, node.numa_id) for node in machine.numa_nodes][:2] == [("C0", 0), ("C1", 1)]
    assert machine.gpu(0).parent == "0000:41:00.0"
    assert machine.numa_of("G0") == 1


def test_cpu_attributes_are_kept():
    node = read("wrx90-16gpu-4switch.xml").numa_nodes[0]
    assert (node.arch, node.vendor, node.family, node.model) == ("x86_64", "AuthenticAMD", 25, 24)
    assert node.affinity == "00000000,0000000f"


@pytest.mark.parametrize(("old", "new"), [(143, 23), (175, 25), (191, 26), (25, 25), (6, 6)])
def test_a_family_is_the_kernels_number_whichever_nccl_wrote_the_file(old, new):
    text = system(gpu_xml()).replace("<cpu ", f'<cpu familyid="{old}" ')
    assert parse_nccl_topology(text, where="t.xml").numa_nodes[0].family == new


def test_two_nets_of_a_card_are_two_nics_at_one_bus_id():
    nets = '<net name="a" dev="1" port="1" speed="-1"/><net name="b" dev="0" port="2"/>'
    card = f'<pci busid="0000:40:00.0" class="0x020700"><nic>{nets}</nic></pci>'
    machine = parse_nccl_topology(system(gpu_xml() + card), where="t.xml")
    assert [(n.id, n.name, n.bus_id, n.port, n.speed_mbps) for n in machine.nics] == [
        ("N0", "b", "0000:40:00.0", 2, 0),
        ("N1", "a", "0000:40:00.0", 1, 0),
    ]


def test_bare_cards_beside_nets_take_the_free_numbers():
    nics = (
        '<nic><net name="eth0" dev="1"/></nic>'
        '<pci busid="0000:50:00.0" class="0x020700"/><pci busid="0000:40:00.0" class="0x020000"/>'
    )
    machine = parse_nccl_topology(system(gpu_xml() + nics), where="t.xml")
    assert [nic.name for nic in machine.nics] == ["0000:40:00.0", "eth0", "0000:50:00.0"]


def test_c2c_joins_a_gpu_and_its_cpu():
    body = gpu_xml(inner='<c2c bw="44712" count="10"/>')
    machine = parse_nccl_topology(system(body), where="t.xml")
    assert machine.nvlinks == (NvLink(source="G0", target="C0", count=10, kind="c2c"),)


def test_display_adapters_and_childless_strangers_are_passed_over():
    body = (
        gpu_xml()
        + '<pci busid="0000:02:00.0" class="0x030000" vendor="0x1a03"/>'
        + '<pci busid="0000:03:00.0" class="0x010802"/>'
        + '<pci busid="0000:05:00.0" class="0x068000"/>'
    )
    machine = parse_nccl_topology(system(body), where="t.xml")
    assert (len(machine.gpus), machine.bridges) == (1, ())


def test_links_to_gpus_that_are_not_in_the_file_make_no_link():
    link = '<nvlink target="0000:99:00.0" count="4" tclass="0x030200"/>'
    assert parse_nccl_topology(system(gpu_xml(inner=link)), where="t.xml").nvlinks == ()


def test_a_link_without_a_class_leads_to_a_known_gpu_or_a_hidden_switch():
    body = gpu_xml(inner='<nvlink target="0000:02:00.0" count="1"/>') + gpu_xml(
        "1", "0000:02:00.0", '<nvlink target="fffffff:ff:ff.0" count="2"/>'
    )
    machine = parse_nccl_topology(system(body), where="t.xml")
    assert [(link.source, link.target) for link in machine.nvlinks] == [("G0", "G1"), ("G1", "S0")]


def test_comments_unknown_attributes_and_an_xml_line_do_not_matter():
    text = '<?xml version="1.0"?>\n<!-- dumped -->\n' + system(gpu_xml()).replace(
        "<cpu ", '<cpu new_in_2_40="x" '
    )
    assert len(parse_nccl_topology(text, where="t.xml").gpus) == 1


PCI = '<pci busid="0000:01:00.0" class="0x030200" {}><gpu dev="0"/></pci>'
REFUSED = {
    "two gpus of one number": (
        gpu_xml() + "\n" + gpu_xml(bus="0000:02:00.0"),
        ("topo.xml:4 <gpu>", "dev 0"),
    ),
    "two devices at one bus id": (gpu_xml() + gpu_xml(dev="1"), ("topo.xml", "bus id")),
    "an unknown element": ("<pcie/>", ("topo.xml:3 <pcie>", "unknown")),
    "an unknown element in a gpu": (gpu_xml(inner="<nvlnk/>"), ("topo.xml:3 <nvlnk>", "unknown")),
    "a number that is none": (gpu_xml(dev="zero"), ("topo.xml:3 <gpu>", '"zero"')),
    "a negative number": (gpu_xml(dev="-1"), ("topo.xml:3 <gpu>", '"-1"')),
    "a NaN width": (PCI.format('link_width="nan"'), ("topo.xml:3 <pci>", '"nan"')),
    "a width no slot has": (PCI.format('link_width="256"'), ("topo.xml:3 <pci>", '"256"')),
    "a NaN speed": (PCI.format('link_speed="nan GT/s"'), ("topo.xml:3 <pci>", '"nan GT/s"')),
    "a negative speed": (PCI.format('link_speed="-8 GT/s"'), ("topo.xml:3 <pci>", '"-8 GT/s"')),
    "a bus id that is none": (gpu_xml(bus="1:2"), ("topo.xml:3 <pci>", '"1:2"')),
    "a link of no count": (
        gpu_xml(inner='<nvlink target="0000:02:00.0" count="0" tclass="0x03"/>'),
        ("topo.xml:3 <nvlink>", '"0"'),
    ),
    "a link to a disk": (
        gpu_xml(inner='<nvlink target="0000:02:00.0" count="1" tclass="0x010802"/>'),
        ("topo.xml:3 <nvlink>", '"0x010802"'),
    ),
    "text between elements": ("hello", ("topo.xml:2 <cpu>", '"hello"')),
    "no gpu": ("", ("topo.xml", "no GPU")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused_by_file_line_and_element(case):
    body, (place, word) = REFUSED[case]
    where, what = refusal(system(body))
    assert where == place
    assert word in what.replace("'", '"')


def test_a_wrong_root_version_or_numa_node_is_refused():
    assert refusal("<a/>")[0] == "topo.xml:1 <a>"
    where, what = refusal('<system version="3"/>')
    assert (where, "version 3" in what) == ("topo.xml:1 <system>", True)
    where, what = refusal(system(gpu_xml(), numa="-2"))
    assert (where, "numaid='-2'" in what) == ("topo.xml:2 <cpu>", True)
    twice = '<system version="1"><cpu numaid="0"/>\n<cpu numaid="0"/></system>'
    assert refusal(twice) == ("topo.xml:2 <cpu>", "repeats numaid 0")


def test_a_file_of_several_hosts_is_refused():
    text = (
        '<system version="1"><cpu numaid="0" host_hash="0x1"/>'
        '<cpu numaid="1" host_hash="0x2"/></system>'
    )
    assert refusal(text) == ("topo.xml:1 <system>", "describes several hosts")


def test_a_truncated_file_is_refused_with_its_line():
    text = (CASES / "topologies" / "asus-esc8000a-e13p.xml").read_text()
    assert refusal(text[: len(text) // 2])[0] == "topo.xml:19"
    assert refusal("")[0] == "topo.xml:1"


def test_entity_bombs_and_external_entities_are_refused():
    bomb = (
        '<!DOCTYPE a [<!ENTITY b "ha">'
        + "".join(f'<!ENTITY b{i} "&b{i - 1 if i else ""};' * 9 + '">' for i in range(9))
        + "]><system>&b8;</system>"
    )
    outside = '<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><system>&x;</system>'
    for text in (bomb, outside):
        where, what = refusal(text)
        assert where == "topo.xml:1"
        assert "entities" in what


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("<system>" * 10**5, ("topo.xml:1 <system>", "too deep")),
        (
            system("".join(gpu_xml(dev=str(i)) for i in range(10**5))),
            ("topo.xml:3 <pci>", "element number 10001"),
        ),
        (
            system("".join(gpu_xml(str(i), f"0000:{i:02x}:00.0") for i in range(65))),
            ("topo.xml", "has 65 GPUs"),
        ),
    ],
    ids=["deep", "wide", "65 GPUs"],
)
def test_too_much_is_refused_with_few_calls(text, refused):
    with calls_at_most(150_000):
        where, what = refusal(text)
    assert where == refused[0]
    assert refused[1] in what


def machine_or_sentence(text: str) -> None:
    try:
        machine = parse_nccl_topology(text, where="topo.xml")
    except InputError as error:
        assert str(error).startswith("topo.xml")
    else:
        assert machine.gpus


QUICK = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
PIECES = [
    '"',
    "<",
    ">",
    "/>",
    "</pci>",
    "&",
    "\0",
    "é",
    "-1",
    "nan",
    "1e9",
    "0x",
    '="',
    "\n",
    "<!--",
]


@QUICK
@given(
    text=st.sampled_from(TEXTS),
    edits=st.lists(
        st.tuples(
            st.floats(0, 1), st.integers(0, 40), st.sampled_from(PIECES) | st.text(max_size=4)
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_a_damaged_file_gives_a_machine_or_a_sentence(text, edits):
    for place, length, piece in edits:
        at = int(place * len(text))
        text = text[:at] + piece + text[at + length :]
    machine_or_sentence(text)


@QUICK
@given(
    text=st.sampled_from(TEXTS),
    place=st.integers(0, 2000),
    value=st.sampled_from(["", "-1", "nan", "999999999999999999999", "0x", "٣", "1_0", " 1"])
    | st.text("0123456789abcdefx.:-", max_size=12),
)
def test_any_value_in_place_of_another_gives_a_machine_or_a_sentence(text, place, value):
    parts = text.split('"')
    at = (place * 2 + 1) % (len(parts) - 1)
    parts[at] = value
    machine_or_sentence('"'.join(parts))


@QUICK
@given(text=st.text(max_size=300))
def test_any_text_gives_a_machine_or_a_sentence(text):
    machine_or_sentence(text)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_nccl_topology(tmp_path / "none.xml")
