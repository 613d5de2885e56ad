"""`tccl advise`: ten lines on a machine, by a model anywhere, in time."""

import json
import time

import pytest
from typer.testing import CliRunner

from tccl_py.cli.main import app
from tccl_py.errors import MeasurementError
from tccl_py.health.advice import advise
from tccl_py.health.doctor import Diagnosis
from tccl_py.health.host import Finding
from tccl_py.plan.load import load_plan
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator
from tests.nccl_cases import CASES
from tests.test_reference_plans import PLANS


def tccl(*arguments):
    return CliRunner().invoke(app, ["advise", *map(str, arguments)])


@pytest.mark.parametrize("name", ["amd-v100", "asus-esc8000a-e13p", "h200x4-vm"])
def test_the_answer_has_at_most_ten_lines_and_a_figure_that_a_plan_confirms(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    model = load_bundled(name)
    lines = tccl(name).stdout.splitlines()
    assert 5 < len(lines) <= 10
    found = advise(model, Simulator(model))
    plan = load_plan(PLANS / f"{name}.json")
    assert found.default_gbps == pytest.approx(plan.stock.rate_gbps)
    assert found.rate_gbps <= max(one.rate_gbps or 0 for one in plan.choices.values()) * 1.02
    assert found.rate_gbps >= found.default_gbps * 0.99


def test_a_topology_file_of_nccl_is_enough():
    result = tccl(CASES / "topologies" / "h200x4-vm.xml", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["simulated"]) == (0, True)
    assert found["sure"].startswith("low")
    assert "4 GPUs" in found["machine"]


def test_problems_of_the_host_come_with_their_fix():
    words = {"what": "ACS is on", "where": "bridge", "why": "detours", "source": "lspci"}
    kinds = {kind: Finding(severity=kind, fix=f"fix {kind}", **words) for kind in ("slow", "note")}
    model = load_bundled("amd-v100")
    diagnosis = Diagnosis(findings=tuple(kinds.values()), unseen=())
    found = advise(model, Simulator(model), diagnosis)
    assert found.problems == ("SLOW ACS is on; fix slow",)
    assert ("Fix first", found.problems[0]) in found.lines()


class Slow:
    simulated = False

    def __init__(self, model, wait):
        self.source, self.wait = Simulator(model), wait

    def measure(self, sets):
        time.sleep(self.wait)
        return self.source.measure(sets)


def test_the_answer_comes_in_time_also_where_sets_take_long():
    model = load_bundled("asus-esc8000a-e13p")
    begun = time.monotonic()
    found = advise(model, Slow(model, 0.02), seconds=1.0)
    assert time.monotonic() - begun < 10
    assert found.default_gbps
    assert "cut short" in found.sure


def test_no_answer_in_time_is_an_error_and_no_interrupt():
    model = load_bundled("asus-esc8000a-e13p")
    try:
        found = advise(model, Slow(model, 0.0), seconds=-1.0)
    except MeasurementError:
        return
    assert "cut short" in found.sure


@pytest.mark.parametrize("arguments", [(), ("no-such-machine",), ("/dev/null",)])
def test_without_gpus_or_with_no_machine_the_error_is_one_line(arguments):
    result = tccl(*arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "--simulate" not in result.stderr
