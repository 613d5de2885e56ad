"""All pairs of GPUs: bandwidth and latency of each, as a table, CSV and JSON."""

import json

import pytest
from typer.testing import CliRunner

from tccl_py.cli.main import app
from tccl_py.model.transfer import parse_set
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator
from tests.gpu.ranks import REAL, SHARE

BOX = "asus-esc8000a-e13p"


def tccl(*arguments):
    return CliRunner().invoke(app, ["measure", "--all-pairs", *map(str, arguments)])


def pairs(*arguments):
    result = tccl(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return {(one.pop("from"), one.pop("to")): one for one in json.loads(result.stdout)}


def rates(name, *sets):
    measured = Simulator(load_bundled(name)).measure([parse_set(text) for text in sets])
    return [one.gbps for one in measured]


def test_every_ordered_pair_has_the_rate_of_a_direct_write_alone():
    found = pairs("--simulate", BOX)
    assert set(found) == {(a, b) for a in range(8) for b in range(8) if a != b}
    for (a, b), one in found.items():
        assert one == {
            "gbps": rates(BOX, f"{a}:{b}")[0][0],
            "latency_us": None,
            "via": "direct",
            "simulated": True,
            "dry_run": False,
        }


def test_pairs_without_direct_access_and_all_pairs_via_host_bounce_on_the_receivers_node():
    model = load_bundled("amd-3090")
    for more, name in (((), "amd-3090"), (("--via", "host"), BOX)):
        machine = load_bundled(name).machine
        for (a, b), one in pairs("--simulate", name, *more).items():
            direct = not more and model.knowledge.can_access(machine, a, b)
            node = machine.numa_of(f"G{b}")
            assert one["via"] == ("direct" if direct else f"C{node}")
            way = f"{a}:{b}" if direct else f"{a}:C{node}:{b}"
            assert one["gbps"] == pytest.approx(rates(name, way)[0][0])


@pytest.mark.parametrize("columns", ["40", "80"])
def test_the_table_shows_every_pair_at_any_width(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    lines = tccl("--simulate", "wrx90-16gpu-4switch").stdout.splitlines()
    rows = [line.split() for line in lines if line.lstrip()[1:2].isdigit()]
    assert [len(row) for row in rows] == [16] + [17] * 16


def test_a_dry_run_has_latencies_and_a_journal_answers_again(tmp_path):
    command = ("--backend", "host", "--devices", "2", "--target", "0.5")
    journal = ("--journal", tmp_path / "pairs.jsonl")
    first = pairs(*command, *journal)
    assert all(one["gbps"] > 0 and one["latency_us"] > 0 for one in first.values())
    assert all(one["dry_run"] for one in first.values())
    assert pairs(*command, *journal) == first


@pytest.mark.gpu(count=2)
def test_on_gpus_latencies_are_microseconds(monkeypatch):
    for name, part in SHARE.items():
        monkeypatch.setenv(name, part)
    for one in pairs("--gpus", "0,1").values():
        assert min(one["gbps"], one["latency_us"]) > 0
        if REAL:
            assert one["gbps"] > 1
            assert 0.2 < one["latency_us"] < 50
