"""The reader of `nvidia-smi topo -m`: real shapes of output, and what no PCI tree can be."""

from itertools import combinations, permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tccl_py.errors import InputError
from tccl_py.files import encode_json
from tccl_py.model.machine import Machine, NvLink
from tccl_py.nccl.paths import path_types
from tccl_py.nccl.system import PathType
from tccl_py.readers.nvidia_smi import parse_nvidia_smi, read_nvidia_smi
from tests.effort import calls_at_most
from tests.toy import machine_from_json

CASES = Path(__file__).parent / "cases"
H200 = CASES / "h200x4-vm" / "topo-m.txt"

# Eight A100 behind NVSwitches on two EPYC with four NUMA nodes each, cut to four GPUs.
A100 = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tNIC2\tNIC3\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV12\tNV12\tNV12\tPXB\tPXB\tSYS\tSYS\t48-63,176-191\t3
GPU1\tNV12\t X \tNV12\tNV12\tPXB\tPXB\tSYS\tSYS\t48-63,176-191\t3
GPU2\tNV12\tNV12\t X \tNV12\tSYS\tSYS\tPIX\tSYS\t16-31,144-159\t1
GPU3\tNV12\tNV12\tNV12\t X \tSYS\tSYS\tNODE\tSYS\t16-31,144-159\t1
NIC0\tPXB\tPXB\tSYS\tSYS\t X \tPIX\tSYS\tSYS\t\t
NIC1\tPXB\tPXB\tSYS\tSYS\tPIX\t X \tSYS\tSYS\t\t
NIC2\tSYS\tSYS\tPIX\tNODE\tSYS\tSYS\t X \tSYS\t\t
NIC3\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\t X \t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
  NIC2: mlx5_2
  NIC3: mlx5_bond_0
"""

# An older driver: NIC names in the columns, no NUMA affinity, spaces for tabs.
V100 = """\
        GPU0    GPU1    GPU2    GPU3    mlx5_0  CPU Affinity
GPU0     X      NV1     NV1     SYS     NODE    0-11,24-35
GPU1    NV1      X      NV2     SYS     NODE    0-11,24-35
GPU2    NV1     NV2      X      NV2     PIX     0-11,24-35
GPU3    SYS     SYS     NV2      X      SYS     12-23,36-47
mlx5_0  NODE    NODE    PIX     SYS      X
"""


def matrix(cells: dict[tuple[int, int], str], gpus: int, numa: list[str] | None = None) -> str:
    """A matrix in which unnamed pairs are SYS."""
    lines = ["\t" + "\t".join(f"GPU{i}" for i in range(gpus)) + "\tCPU Affinity\tNUMA Affinity"]
    for i in range(gpus):
        row = [" X " if i == j else cells.get((min(i, j), max(i, j)), "SYS") for j in range(gpus)]
        affinity = numa[i] if numa else "N/A"
        lines.append(f"GPU{i}\t" + "\t".join(row) + f"\t0-7\t{affinity}")
    return "\n".join(lines)


def mesh(kind: str, gpus: int) -> dict[tuple[int, int], str]:
    return dict.fromkeys(combinations(range(gpus), 2), kind)


def parse(text: str) -> Machine:
    return parse_nvidia_smi(text, where="topo.txt")[0]


def p2p(text: str) -> tuple[set[tuple[int, int]], tuple[str, ...]]:
    """The pairs with P2P, and what is assumed."""
    machine, knowledge = parse_nvidia_smi(text, where="topo.txt")
    pairs = permutations(machine.gpu_indices, 2)
    direct = {pair for pair in pairs if knowledge.can_access(machine, *pair)}
    return direct, knowledge.assumptions(machine)


def refusal(text: str) -> tuple[str, str]:
    with pytest.raises(InputError) as caught:
        parse(text)
    return caught.value.where, caught.value.what


def test_a_virtual_machine_with_nv18_all_to_all_has_an_nvlink_switch():
    machine, _ = read_nvidia_smi(H200)
    assert machine.name == "topo-m"
    assert machine.nvlinks == tuple(NvLink(source=f"G{i}", target="S0", count=18) for i in range(4))
    (node,) = machine.numa_nodes
    assert node.numa_id == 0
    assert [gpu.parent for gpu in machine.gpus] == ["C0"] * 4
    assert machine.bridges == ()


def test_what_the_text_does_not_say_stays_unknown():
    gpu = read_nvidia_smi(H200)[0].gpu(1)
    assert (gpu.sm, gpu.name, gpu.link.speed_gts, gpu.link.width) == (None, "", None, None)
    assert gpu.bus_id == "ffff:01:00.0"


def test_underlined_headers_prompts_and_carriage_returns_do_not_matter():
    text = H200.read_text().replace("GPU0\tGPU1", "\x1b[4mGPU0\tGPU1", 1)
    text = "$ nvidia-smi topo -m\r\n" + text.replace("NUMA ID\n", "NUMA ID\x1b[0m\n").replace(
        "\n", "\r\n"
    )
    assert parse(text).nvlinks == read_nvidia_smi(H200)[0].nvlinks


def test_nics_decide_where_nvlinked_gpus_lie_on_pci():
    machine = parse(A100)
    assert [nic.name for nic in machine.nics] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_bond_0"]
    # NIC3 is SYS to all, which makes no third node.
    assert [node.numa_id for node in machine.numa_nodes] == [1, 3]
    assert path_types(machine)["G0", "N0"] is PathType.PXB
    assert path_types(machine)["N0", "N1"] is PathType.PIX
    assert path_types(machine)["G2", "N2"] is PathType.PIX
    assert path_types(machine)["G3", "N2"] is PathType.PHB
    assert path_types(machine)["N3", "G0"] is PathType.SYS
    assert path_types(machine)["G0", "G3"] is PathType.NVL


def test_old_output_with_nic_names_in_the_columns_is_read():
    machine = parse(V100)
    assert [nic.name for nic in machine.nics] == ["mlx5_0"]
    assert NvLink(source="G1", target="G2", count=2) in machine.nvlinks
    assert len(machine.nvlinks) == 8
    assert path_types(machine)["G2", "N0"] is PathType.PIX
    assert path_types(machine)["G0", "N0"] is PathType.PHB
    assert path_types(machine)["G0", "G3"] is PathType.NVB
    assert [machine.numa_of(f"G{i}") for i in range(4)] == [0, 0, 0, 1]
    assert [node.numa_id for node in machine.numa_nodes] == [-1, -1]


@pytest.mark.parametrize(
    ("told", "found"), [("PIX", "PIX"), ("PXB", "PXB"), ("PHB", "PHB"), ("NODE", "PHB"),
                        ("SYS", "SYS"), ("SOC", "SYS"), ("NV4", "NVL")]
)  # fmt: skip
def test_two_gpus_get_the_path_type_the_text_tells(told, found):
    machine = parse(matrix({(0, 1): told}, 2))
    assert path_types(machine)["G0", "G1"].name == found


def test_a_pair_with_one_gpu_is_read():
    assert parse("\tGPU0\tCPU Affinity\nGPU0\t X \t0-3").gpu_indices == (0,)


def test_four_a100_with_four_links_to_each_other_are_linked_directly():
    machine = parse(matrix(mesh("NV4", 4), 4))
    assert machine.nvswitches == ()
    assert len(machine.nvlinks) == 12


def test_more_links_than_a_gpu_has_mean_a_switch():
    assert parse(matrix(mesh("NV6", 16), 16)).nvlinks[0].target == "S0"
    assert parse(matrix(mesh("NV12", 3), 3)).nvlinks[0].target == "S0"
    assert parse(matrix(mesh("NV6", 4), 4)).nvswitches == ()
    assert parse(matrix(mesh("NV12", 2), 2)).nvswitches == ()


def test_nvlinked_gpus_share_a_numa_node_unless_their_affinities_differ():
    cells = {(0, 1): "NV4", (2, 3): "NV4"}
    machine = parse(matrix(cells, 4, ["0", "0", "1", "2"]))
    assert [machine.numa_of(f"G{i}") for i in range(4)] == [0, 0, 1, 2]
    unknown = parse(matrix(cells, 4))
    assert [unknown.numa_of(f"G{i}") for i in range(4)] == [0, 0, 1, 1]


def test_several_numa_affinities_of_a_gpu_leave_its_node_unnamed():
    machine = parse(matrix({(0, 1): "PHB"}, 2, ["0-1", "0-1"]))
    assert [node.numa_id for node in machine.numa_nodes] == [-1]


def test_a_matrix_that_is_not_symmetric_is_refused():
    text = matrix({(0, 1): "PIX"}, 2).replace("GPU1\tPIX", "GPU1\tPHB")
    assert refusal(text) == ("topo.txt", "relates GPU0 and GPU1 by PIX one way, PHB the other")


def test_relations_that_are_no_tree_are_refused_by_the_two_devices():
    text = matrix({(0, 1): "PIX", (1, 2): "PIX", (0, 2): "PHB"}, 3)
    assert refusal(text)[1].startswith("relates GPU0 and GPU2 by PHB")


def test_truncated_output_is_refused():
    text = H200.read_text()
    lines = text.splitlines()
    assert refusal("\n".join(lines[:3])) == ("topo.txt", "has 2 rows for 4 devices")
    where, what = refusal("\n".join([*lines[:4], "GPU3\tNV18"]))
    assert (where, "1 of GPU3's 4" in what) == ("topo.txt:5", True)
    assert "GPU0" in refusal("")[1]


def test_cells_rows_and_columns_that_are_wrong_are_refused_where_they_stand():
    wrong = {
        matrix({(0, 1): "WARP"}, 2): ("topo.txt:2", "'WARP'"),
        matrix({(0, 1): "X"}, 2): ("topo.txt", "GPU0 and GPU1 by X"),
        matrix({}, 2).replace("\nGPU1", "\nGPU7"): ("topo.txt:3", "GPU7"),
        "\tGPU0\tGPU0\n": ("topo.txt:1", "GPU0 twice"),
        "GPU0 NIC0\nGPU0 X NV2\nNIC0 NV2 X": ("topo.txt", "GPU0 and NIC0 by NVLinks"),
    }
    for text, (place, words) in wrong.items():
        where, what = refusal(text)
        assert where == place
        assert words in what


def test_lines_that_are_cut_lose_no_device_in_silence():
    text = "\n".join("\t".join(line.split("\t")[:3]) for line in matrix({}, 4).splitlines())
    assert refusal(text) == ("topo.txt:4", "is a row of 'GPU2', which has no column")
    wrapped = matrix({}, 4).replace("SYS\t", "SYS\n")
    assert "GPU0" in refusal(wrapped)[1]


def names(name: str, gpus: int) -> str:
    return "".join(f"GPU {i}: {name} (UUID: GPU-{i}e0f)\n" for i in range(gpus))


READ = """\
$ nvidia-smi topo -p2p r
 \tGPU0\tGPU1\tGPU2\t
 GPU0\tX\tOK\tCNS\t
 GPU1\tOK\tX\tTNS\t
 GPU2\tOK\tDR\tX\t

Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
"""
WRITE = READ.replace("GPU2\tOK", "GPU2\tGNS").replace("p2p r", "p2p w")


@pytest.mark.parametrize("known", [True, False])
def test_without_names_or_on_geforce_no_p2p_is_assumed_where_no_nvlink_is(known):
    text = matrix({(0, 1): "NV4", (1, 2): "PHB"}, 3)
    text += "\n" + names("NVIDIA GeForce RTX 3090", 3) * known
    direct, assumed = p2p(text)
    assert direct == {(0, 1), (1, 0)}
    assert [one.startswith("no P2P between 4 ordered pairs") for one in assumed] == [True]


def test_p2p_is_assumed_between_gpus_whose_product_line_has_it():
    direct, assumed = p2p(matrix({}, 2) + "\n" + names("NVIDIA RTX PRO 6000 Blackwell", 2))
    assert direct == {(0, 1), (1, 0)}
    assert assumed[0].startswith("P2P between 2 ordered pairs")


def test_p2p_matrices_in_the_same_text_are_the_drivers_word_in_any_order():
    text = matrix({(0, 1): "PHB"}, 3) + "\n"
    assert p2p(text + READ) == p2p(READ + text) == ({(0, 1), (1, 0), (2, 0)}, ())
    pasted = "\x1b[4m" + (names("Tesla V100", 3) + WRITE + text + READ).replace("\n", "\r\n")
    assert p2p(pasted) == ({(0, 1), (1, 0)}, ())


def test_pairs_that_the_p2p_matrix_lacks_stay_assumed():
    direct, assumed = p2p(matrix({}, 4) + "\n" + READ)
    assert direct == {(0, 1), (1, 0), (2, 0)}
    assert "between 6 ordered pairs" in assumed[0]


@pytest.mark.parametrize(
    "text",
    [
        names("NVIDIA H100 80GB HBM3", 2),
        "name\nNVIDIA H100 80GB HBM3\nNVIDIA H100 80GB HBM3\n",
        "1, NVIDIA H100 80GB HBM3\n0, NVIDIA H100 80GB HBM3, 00000000:1A:00.0\n",
    ],
)
def test_names_of_gpus_come_from_a_list_or_a_query_in_the_same_text(text):
    machine = parse(text + matrix({}, 2))
    assert [gpu.name for gpu in machine.gpus] == ["NVIDIA H100 80GB HBM3"] * 2


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (READ, "GPU2"),
        (READ.replace("\tTNS", "\tPIX").replace("\tGPU2", "\tGPU1"), "GPU1 twice"),
        (READ.replace("\tTNS", "\tWARP"), "'WARP'"),
        (READ[: READ.index("TNS")], "2 rows for 3 devices"),
        (names("NVIDIA L40S", 3), "GPU 2"),
        ("NVIDIA L40S\n", "names 1 GPU,"),
    ],
)
def test_p2p_and_names_of_other_gpus_or_cut_off_are_refused(more, words):
    assert words in refusal(matrix({}, 2) + "\n" + more)[1]


def test_ten_to_the_five_gpus_are_refused_with_few_calls():
    text = "\t".join(f"GPU{i}" for i in range(10**5))
    with calls_at_most(200_000):
        said = refusal(text)
    assert said == ("topo.txt:1", "names 1000 GPUs and 99000 other devices")


LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")


@st.composite
def trees(draw):
    """Relations of a random PCI tree: each device has a place at every level."""
    count = draw(st.integers(1, 8))
    place = st.integers(0, 1)
    places = draw(st.lists(st.tuples(place, place, place, place), min_size=count, max_size=count))
    cells = {}
    for a, b in combinations(range(count), 2):
        same = next((n for n in range(4) if places[a][n] != places[b][n]), 4)
        cells[a, b] = LEVELS[4 - same]
    return cells, count


@settings(max_examples=100, derandomize=True)
@given(tree=trees())
def test_the_tree_that_is_built_has_the_relations_that_were_told(tree):
    cells, count = tree
    machine = parse(matrix(cells, count))
    assert machine_from_json(encode_json(machine), where="json") == machine
    for (a, b), told in cells.items():
        expected = "PHB" if told == "NODE" else told
        assert path_types(machine)[f"G{a}", f"G{b}"].name == expected


@settings(max_examples=200, derandomize=True)
@given(
    text=st.sampled_from([A100, V100, H200.read_text(), matrix({}, 3) + "\n" + WRITE + READ]),
    edits=st.lists(
        st.tuples(
            st.floats(0, 1),
            st.integers(0, 30),
            st.sampled_from(["\t", "\n", " X ", "NV18", "SYS", "GPU0", "N/A", "\x1b[4m", "٣"])
            | st.text(max_size=4),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_damaged_text_gives_a_machine_or_a_sentence(text, edits):
    for place, length, piece in edits:
        at = int(place * len(text))
        text = text[:at] + piece + text[at + length :]
    try:
        machine = parse(text)
    except InputError as error:
        assert str(error).startswith("topo.txt")
    else:
        assert machine.gpus


IBSTAT = """\
CA 'mlx5_0'
	CA type: MT4129
	Port 1:
		State: Active
		Rate: 200
CA 'mlx5_5'
	Port 1:
		State: Down
		Rate: 100
"""
IBSTATUS = """\
Infiniband device 'mlx5_0' port 1 status:
	state:		 4: ACTIVE
	rate:		 200 Gb/sec (4X HDR)

Infiniband device 'mlx5_5' port 1 status:
	rate:		 100 Gb/sec (2X HDR)
"""


@pytest.mark.parametrize("more", ["", IBSTAT, IBSTATUS])
def test_nics_have_the_rates_that_a_text_tells_or_those_usual_beside_such_gpus(more):
    text = (CASES / "reports" / "cluster" / "h100_4nic.txt").read_text()
    machine, knowledge = parse_nvidia_smi(text + more, where="box.txt")
    rates = {nic.name: nic.speed_mbps // 1000 for nic in machine.nics}
    told = {"mlx5_0": 200, "mlx5_5": 100} if more else {}
    assert rates == {**dict.fromkeys(("mlx5_0", "mlx5_1", "mlx5_4", "mlx5_5"), 400), **told}
    assert all(part.gdr for part in (*machine.nics, *machine.gpus))
    assumed = next(note for note in knowledge.notes if "400 Gbit/s" in note)
    assert ("mlx5_0" in assumed) == (not more)
    assert "mlx5_1" in assumed


def test_nics_beside_cards_without_gpu_direct_have_none():
    text = (CASES / "reports" / "cluster" / "h100_4nic.txt").read_text()
    text = text.replace("NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090")
    machine, knowledge = parse_nvidia_smi(text, where="box.txt")
    assert not any(part.gdr for part in (*machine.nics, *machine.gpus))
    assert any(note.startswith("no GPU Direct") for note in knowledge.notes)
