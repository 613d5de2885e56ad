"""`tccl validate`: NCCL's verdict on a graph file as JSON, as text and as an exit code."""

import json

import pytest
from typer.testing import CliRunner

from tccl_py.cli.main import app
from tccl_py.plan.text import ring_lines
from tests.nccl_cases import CASES, VERDICTS, case_name, graph_verdicts

GRAPHS = VERDICTS / "graphs"
FOUR = VERDICTS / "topologies" / "a_4gpu_2numa_pcie.xml"


def tccl(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def answer(case):
    arguments = ["validate", GRAPHS / case["graph"], "--machine"]
    arguments += [VERDICTS / "topologies" / case["topology"], "--nodes", case["nodes"], "--json"]
    if case["communicator_gpus"] != "all":
        arguments += ["--gpus", case["communicator_gpus"]]
    return tccl(*arguments)


@pytest.mark.parametrize("case", graph_verdicts(), ids=case_name)
def test_the_exit_code_says_whether_nccl_uses_the_file(case):
    result = answer(case)
    found = json.loads(result.stdout)
    assert list(found) == ["verdict", "reason", "rings"]
    assert found["verdict"] == case["verdict"]
    assert result.exit_code == (0 if case["verdict"] == "used" else 1)
    assert result.stderr == ""


def test_gpus_are_taken_in_rank_order():
    graph = CASES / "h200x4-vm" / "graph.xml"
    found = tccl("validate", graph, "--machine", "h200x4-vm", "--gpus", "3,1,0,2", "--json")
    assert json.loads(found.stdout)["rings"][0] == [0, 2, 1, 3]


def test_a_topology_file_of_the_job_is_what_nccl_sees(tmp_path):
    graph, told = GRAPHS / "a_ok1.xml", tmp_path / "topo.xml"
    told.write_text(FOUR.read_text())
    words = ("validate", graph, "--machine", FOUR, "--json", "--env")
    plain = tccl(*words, "NCCL_DEBUG=INFO")
    same = tccl(*words, f"NCCL_TOPO_FILE={told}")
    assert same.stdout == plain.stdout
    assert "NCCL takes the machine" in same.stderr and f"{told}" in same.stderr
    eight = CASES / "topologies" / "asus-esc8000a-e13p.xml"
    other = tccl(*words, f"NCCL_TOPO_FILE={eight}")
    assert (other.exit_code, other.stdout) == (2, "")
    assert f"{eight}: has other GPUs than " in other.stderr


def test_variables_of_the_job_count():
    graph = GRAPHS / "a_ok1.xml"
    plain = tccl("validate", graph, "--machine", FOUR, "--json")
    clipped = tccl("validate", graph, "--machine", FOUR, "--env", "NCCL_MIN_NCHANNELS=6", "--json")
    assert len(json.loads(clipped.stdout)["rings"]) == 6 > len(json.loads(plain.stdout)["rings"])


def test_bytes_that_are_no_utf8_are_read_as_nccl_reads_them(tmp_path):
    graph = tmp_path / "graph.xml"
    graph.write_bytes(b"<!-- \xff -->\n" + (GRAPHS / "a_ok1.xml").read_bytes())
    assert (
        json.loads(tccl("validate", graph, "--machine", FOUR, "--json").stdout)["verdict"] == "used"
    )
    graph.write_bytes(b"\xff")
    found = tccl("validate", graph, "--machine", FOUR)
    assert (found.exit_code, found.stdout.splitlines()[0]) == (1, f"{graph}: rejected")


def test_misspelt_variables_are_refused_and_misspelt_values_told():
    words = ("validate", GRAPHS / "a_ok1.xml", "--machine", FOUR, "--json", "--env")
    wrong = tccl(*words, "NCCL_P2P_LEVLE=SYS")
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "write NCCL_P2P_LEVEL\n" in wrong.stderr
    told = tccl(*words, "NCCL_P2P_LEVEL=BANANA")
    assert told.stdout == tccl(*words, "NCCL_DEBUG=INFO").stdout
    assert "ignores NCCL_P2P_LEVEL=BANANA" in told.stderr


def test_an_unchecked_version_is_said_to_be_one():
    result = tccl("validate", GRAPHS / "a_ok1.xml", "--machine", FOUR, "--nccl", "2.29", "--json")
    assert "2.29 is taken for 2.28" in result.stderr
    assert json.loads(result.stdout)["verdict"]


def test_the_text_has_the_file_the_verdict_and_the_reason():
    graph = GRAPHS / "a_unknown_dev.xml"
    result = tccl("validate", graph, "--machine", FOUR)
    first, second = result.stdout.splitlines()
    assert (result.exit_code, first) == (1, f"{graph}: rejected")
    assert "not found" in second


def test_equal_rings_share_a_line_and_long_ones_are_cut():
    assert ring_lines([(0, 1)] * 2) == ["channels 0 1: 0 1"]
    (line,) = ring_lines([tuple(range(100))])
    assert line.endswith(" 30 31 ... (100 ranks)")
