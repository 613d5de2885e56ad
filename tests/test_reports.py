"""Inputs as people post them, each with its right value (tests/cases/reports)."""

import json
import re
from pathlib import Path

import pytest

from tccl_py.errors import InputError
from tccl_py.model.cards import card_of, cards
from tccl_py.nccl.paths import path_types
from tccl_py.nccl.system import PathType
from tccl_py.readers.switches import read_switches
from tccl_py.simulator.descriptions import parse_description, read_description
from tccl_py.workloads.sources import open_workload
from tccl_py.workloads.torch_trace import read_torch_traces
from tests.commands import tccl

REPORTS = Path(__file__).parent / "cases" / "reports"


def advise(name, *options):
    result = tccl("advise", str(REPORTS / name), *options, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def described(name):
    found = read_description(REPORTS / name)
    return found.machine, found.knowledge


def p2p(name):
    machine, knowledge = described(name)
    gpus = machine.gpu_indices
    return sum(knowledge.can_access(machine, a, b) for a in gpus for b in gpus if a != b)


def test_a_card_has_the_link_and_the_compute_capability_of_its_name():
    named = {
        "NVIDIA H100 80GB HBM3": (90, 5, 16, True),
        "Tesla V100-SXM2-16GB": (70, 3, 16, True),
        "NVIDIA GeForce RTX 4060 Ti": (89, 4, 8, False),
        "NVIDIA RTX 6000 Ada Generation": (89, 4, 16, True),
        "Quadro RTX 6000": (75, 3, 16, True),
        "NVIDIA A100-SXM4-80GB": (80, 4, 16, True),
        "NVIDIA L40S": (89, 4, 16, True),
    }
    for name, facts in named.items():
        card = card_of(name)
        assert (card.sm, card.pcie, card.lanes, card.p2p) == facts
        assert card.source
    assert card_of("NVIDIA A100X5") is card_of("") is None
    assert len({card.name for card in cards()}) == len(cards()) > 80


@pytest.mark.parametrize(
    ("lines", "vendor"),
    [
        (
            "Vendor ID:                       AuthenticAMD\nCPU family: 25\nModel: 17",
            "AuthenticAMD",
        ),
        ("vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143", "GenuineIntel"),
        ("Model name: AMD EPYC 7763 64-Core Processor", "AuthenticAMD"),
        ("it has an AMD EPYC and an Intel(R) Xeon", ""),
    ],
)
def test_the_cpu_is_read_from_lscpu_and_cpuinfo(lines, vendor):
    text = (REPORTS / "pro6000x2_phb.txt").read_text() + lines
    (node,) = parse_description(text, where="box.txt").machine.numa_nodes
    assert node.vendor == vendor
    assert (node.model is None) == (":" not in lines or "name" in lines)


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("pro6000x2_amd.xml", 2),
        ("4090x8_two_switches.xml", 0),
        ("4090x4_pix_nop2p.txt", 0),
        ("p2p_all_caps.txt", 2),
        ("mixed_two_gens.txt", 0),
        ("paste_vllm_collect_env.txt", 2),
        ("paste_p2p_bandwidth_test.txt", 2),
        ("paste_nvidia_smi_table.txt", 0),
        ("a100x4_bridges_uneven.xml", 12),
    ],
)
def test_p2p_is_what_was_said_or_what_one_rule_assumes(name, pairs):
    assert p2p(name) == pairs


def test_a_virtual_machine_that_does_not_say_so_has_no_p2p():
    text = (REPORTS / "paste_vllm_collect_env.txt").read_text() + "Hypervisor vendor: KVM\n"
    found = parse_description(text, where="box.txt")
    assert not found.knowledge.can_access(found.machine, 0, 1)


def test_numa_affinities_decide_where_gpus_lie_and_a_contradiction_is_noted():
    machine, knowledge = described("sys_within_numa.txt")
    assert [machine.numa_of(f"G{i}") for i in range(4)] == [0, 0, 1, 1]
    assert path_types(machine)["G0", "G1"] is PathType.PHB
    assert any("SYS" in note for note in knowledge.notes)
    machine, _ = described("cpu_affinity_only.txt")
    assert [machine.numa_of(f"G{i}") for i in range(4)] == [0, 0, 1, 1]


def test_a_nic_that_is_sys_to_all_makes_no_numa_node():
    machine, knowledge = described("h100x8_9nic.txt")
    assert (len(machine.numa_nodes), len(machine.nics)) == (2, 9)
    assert any("NIC0" in note for note in knowledge.notes)


def test_a_net_below_each_cpu_in_nccls_dump_is_one_net():
    machine, _ = described("virtual_nics_each_cpu.xml")
    assert [nic.name for nic in machine.nics] == ["br-lan"]


def test_an_accelerators_class_is_a_gpu():
    text = (REPORTS / "pro6000x2_amd.xml").read_text().replace("0x030000", "0x120000")
    bare = re.sub(r"<gpu [^>]*/>", "", text)
    for form in (text, bare):
        assert len(parse_description(form, where="box.xml").machine.gpus) == 2


@pytest.mark.parametrize(
    ("name", "count", "first", "bus_id"),
    [
        ("paste_vllm_collect_env.txt", 2, "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", ""),
        ("paste_nvidia_smi_table.txt", 2, "NVIDIA GeForce RTX 3090", "0000:41:00.0"),
        ("paste_p2p_bandwidth_test.txt", 2, "NVIDIA GeForce RTX 3090", "0000:41:00.0"),
        ("paste_link_query.csv", 2, "NVIDIA GeForce RTX 3090", "0000:08:00.0"),
        ("paste_markdown_table.txt", 3, "", ""),
        ("prose_before.txt", 2, "", ""),
    ],
)
def test_names_and_bus_ids_are_read_from_what_stands_around_the_matrix(name, count, first, bus_id):
    gpus = described(name)[0].gpus
    assert (len(gpus), gpus[0].name) == (count, first)
    assert gpus[0].bus_id == (bus_id or "ffff:00:00.0")


def test_names_that_the_table_cuts_and_bold_cells_are_read():
    text = (REPORTS / "paste_nvidia_smi_table.txt").read_text()
    cut = text.replace("NVIDIA GeForce RTX 3090", "GeForce RTX 309...    ")
    assert [gpu.link.speed_gts for gpu in parse_description(cut, where="t").machine.gpus] == [
        16,
        16,
    ]
    bold = "| | **GPU0** | **GPU1** |\n|---|---|---|\n| **GPU0** | X | PHB |\n| `GPU1` | PHB | X |"
    assert len(parse_description(bold, where="t").machine.gpus) == 2


def test_prose_about_a_gpu_is_no_name():
    text = (REPORTS / "prose_before.txt").read_text() + "\nGPU 2: was taken out\nGPU 0: is hot\n"
    assert [gpu.name for gpu in parse_description(text, where="t").machine.gpus] == ["", ""]


def test_one_line_may_have_the_commands_of_all_matrices_below_it():
    text = (REPORTS / "pro6000x2_phb.txt").read_text()
    commands = "$ (nvidia-smi topo -m; nvidia-smi topo -p2p r; nvidia-smi -L) > box.txt\n"
    found = parse_description(commands + text, where="box.txt")
    assert found.knowledge.can_access(found.machine, 0, 1)
    assert found.machine == parse_description(text, where="box.txt").machine


def test_matrices_of_two_machines_are_refused_and_a_repeated_one_is_read():
    box, other = ((REPORTS / name).read_text() for name in ("prose_before.txt", "h100x8_9nic.txt"))
    assert len(parse_description(box + box, where="box.txt").machine.gpus) == 2
    with pytest.raises(InputError, match="which"):
        parse_description(box + other, where="box.txt")


def workload_of(name):
    return open_workload([str(REPORTS / name)])


def test_a_line_behind_a_progress_bars_text_is_read():
    (row,) = workload_of("glued.log").rows
    assert (row.collective, row.bytes, row.calls, row.groups) == ("all_reduce", 16384, 1, ((0, 1),))


def test_the_rank_of_a_trace_may_stand_after_its_events():
    recording = read_torch_traces([REPORTS / "dist_after.json"])
    assert list(recording.ranks) == [0]


def test_slurms_own_topology_yaml_is_read_as_switches(tmp_path):
    tree = read_switches(REPORTS / "topology.yaml").switches
    assert (tree.name, [below.hosts for below in tree.switches]) == (
        "root",
        [("n1", "n2"), ("n3", "n4")],
    )
    blocks = tmp_path / "topology.yaml"
    blocks.write_text("- topology: a\n  flat: true\n")
    with pytest.raises(InputError, match="no tree"):
        read_switches(blocks)
