"""`tccl validate`: NCCL's verdict on a graph file as JSON, as text and as an exit code."""

import json

import pytest

from tccl_py.plan.text import ring_lines
from tests.commands import tccl
from tests.nccl_cases import VERDICTS, case_name, graph_verdicts

GRAPHS = VERDICTS / "graphs"
FOUR = VERDICTS / "topologies" / "a_4gpu_2numa_pcie.xml"


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


def test_bytes_that_are_no_utf8_are_read_as_nccl_reads_them(tmp_path):
    graph = tmp_path / "graph.xml"
    graph.write_bytes(b"<!-- \xff -->\n" + (GRAPHS / "a_ok1.xml").read_bytes())
    assert (
        json.loads(tccl("validate", graph, "--machine", FOUR, "--json").stdout)["verdict"] == "used"
    )
    graph.write_bytes(b"\xff")
    found = tccl("validate", graph, "--machine", FOUR)
    assert (found.exit_code, found.stdout.splitlines()[0]) == (1, f"{graph}: rejected")


def test_equal_rings_share_a_line_and_long_ones_are_cut():
    assert ring_lines([(0, 1)] * 2) == ["channels 0 1: 0 1"]
    (line,) = ring_lines([tuple(range(100))])
    assert line.endswith(" 30 31 ... (100 ranks)")
