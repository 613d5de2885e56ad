"""`tccl measure`: figures, their order, their mark, and the journal."""

import json

import pytest
from typer.testing import CliRunner

from tccl_py.cli.main import app
from tccl_py.cli.measure import _measured_row
from tccl_py.model.measurement import Measurement
from tccl_py.model.transfer import parse_set
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator
from tccl_py.sources.journal import read_journal
from tests.nccl_cases import CASES

BOX = "asus-esc8000a-e13p"
SETS = ("G4->G4->G0 G0->G0->G1", "G0->G0->C1->G4->G4{fifo=512K,blocks=8}")


def tccl(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def entries(*arguments):
    result = tccl("measure", *arguments, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


def test_json_is_a_list_with_an_entry_for_each_set():
    found = entries(*SETS, "--simulate", BOX)
    assert [list(entry) for entry in found] == [
        ["set", "gbps", "total_gbps", "simulated", "assumed", "dry_run"]
    ] * 2
    assert [entry["set"] for entry in found] == list(SETS)
    assert [len(entry["gbps"]) for entry in found] == [2, 1]
    assert all(entry["simulated"] is True for entry in found)
    assert all(entry["total_gbps"] == pytest.approx(sum(entry["gbps"])) for entry in found)


def test_rates_are_those_of_the_simulator():
    (entry,) = entries(SETS[0], "--simulate", BOX)
    model = load_bundled(BOX)
    (measurement,) = Simulator(model).measure([parse_set(SETS[0])])
    assert entry["total_gbps"] == pytest.approx(measurement.total_gbps)
    assert entry["assumed"] == measurement.assumed


def test_rates_follow_the_order_in_which_flows_were_given():
    there = "G0->G0->G1  G2->G2->G6 G3->G3->G7"
    back = "G3->G3->G7 G2->G2->G6 G0->G0->G1"
    one, other = entries(there, back, "--simulate", BOX)
    assert one["gbps"] == other["gbps"][::-1]
    assert one["gbps"][0] > one["gbps"][1]
    assert one["set"].split() == ["G0->G0->G1", "G2->G2->G6", "G3->G3->G7"]


def test_flows_given_twice_keep_a_rate_each():
    text = "G2->G2->G3 G0->G0->G1 G2->G2->G3{blocks=4} G0->G0->G1"
    samples = {"G0->G0->G1": [1.0, 2.0], "G2->G2->G3": [3.0], "G2->G2->G3{blocks=4}": [4.0]}
    flows = str(parse_set(text)).split()
    rows = tuple((samples[flow].pop(0),) for flow in flows)
    measurement = Measurement(
        transfers=parse_set(" ".join(flows)), samples_gbps=rows, simulated=True
    )
    row = _measured_row(text.split(), measurement, dry_run=False)
    assert row.gbps == (3.0, 1.0, 4.0, 2.0)


def test_noise_follows_the_seed():
    noisy = ("G0->G0->G1", "--simulate", BOX, "--noise", "0.1", "--seed")
    assert entries(*noisy, "1") == entries(*noisy, "1")
    assert entries(*noisy, "1") != entries(*noisy, "2")


def test_every_line_of_the_table_says_that_it_is_simulated():
    result = tccl("measure", "G0->G0->G1", "--simulate", BOX)
    lines = [line for line in result.stdout.splitlines() if "G0->" in line or "together" in line]
    assert result.exit_code == 0
    assert len(lines) == 2
    assert all("simulated" in line for line in lines)


def test_a_machine_without_a_model_is_simulated_from_assumed_figures():
    topology = CASES / "topologies" / "ndv4-topo.xml"
    (entry,) = entries("G0->G0->G1", "--simulate", topology)
    assert (entry["simulated"], entry["assumed"]) == (True, True)
    result = tccl("measure", "G0->G0->G1", "--simulate", topology)
    assert "simulated from assumed values" in result.stdout


def test_a_journal_keeps_what_was_measured_and_is_not_asked_twice(tmp_path):
    path = tmp_path / "journal.jsonl"
    noisy = ("--simulate", BOX, "--noise", "0.1", "--journal", path)
    first = entries("G0->G0->G1", *noisy)
    length = path.stat().st_size
    again = entries("G0->G0->G1", "G1->G1->G0", *noisy)
    assert again[:1] == first
    contents = read_journal(path)
    assert list(map(str, contents.measurements)) == ["G0->G0->G1", "G1->G1->G0"]
    assert path.stat().st_size > length
    assert contents.header == Simulator(load_bundled(BOX), noise=0.1).header


def test_a_set_that_cannot_run_leaves_no_journal_behind(tmp_path):
    path = tmp_path / "journal.jsonl"
    result = tccl("measure", "G0->G0->G1", "G0->G0->G9", "--simulate", BOX, "--journal", path)
    assert result.exit_code == 2
    assert not path.exists()
