"""`tccl advise`: ten lines on a machine, by a model anywhere, in time."""

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from tccl_py.cli.main import app
from tccl_py.health.advice import advice_by, advice_request
from tccl_py.health.doctor import Diagnosis
from tccl_py.health.host import Defect
from tccl_py.planning.handle import load_plan
from tccl_py.planning.opening import machine_subject
from tccl_py.sources.profiled import measured_machine
from tests.planned import SEVERAL_GPUS
from tests.test_reference_plans import PLANS


def advise(subject, diagnosis=None):
    return advice_by(subject.search(), subject, diagnosis)


def request_of(name, seconds=1000):
    request = advice_request(name)
    return replace(request, budget=replace(request.budget, seconds=seconds))


def model_of(name, seconds=1000):
    return machine_subject(request_of(name, seconds), pytest.fail)


@pytest.mark.parametrize("name", SEVERAL_GPUS)
def test_the_advice_on_a_machine_is_that_of_its_plan_in_at_most_ten_lines(name):
    found = advise(model_of(name))
    plan = load_plan(PLANS / f"{name}.json")
    assert (found.recommended, found.advice) == (plan.recommended, plan.advice)
    assert found.default_gbps == pytest.approx(plan.choices["default"].rate_gbps)
    assert found.rate_gbps == pytest.approx(plan.choices[plan.recommended].rate_gbps)
    assert len([*found.lines()]) > 4
    small_terminal = CliRunner(env={"COLUMNS": "80"})
    assert len(small_terminal.invoke(app, ["advise", name]).stdout.splitlines()) <= 10


def test_rules_that_were_not_checked_for_a_release_are_an_assumption():
    request = replace(request_of("amd-v100"), version="2.35.1")
    found = advise(machine_subject(request, pytest.fail))
    assert any("NCCL 2.35.1 is newer than 2.32" in text for text in found.assumptions)


def test_problems_of_the_host_come_with_their_fix():
    words = {"what": "ACS is on", "where": "bridge", "why": "detours", "source": "lspci"}
    kinds = {kind: Defect(severity=kind, fix=f"fix {kind}", **words) for kind in ("slow", "note")}
    diagnosis = Diagnosis(findings=tuple(kinds.values()), unseen=())
    found = advise(model_of("amd-v100"), diagnosis)
    assert found.problems == ("SLOW ACS is on; fix slow",)
    assert ("Fix first", found.problems[0]) in found.lines()


def test_when_the_time_is_up_the_advice_says_that_a_full_plan_may_find_more():
    found = advise(model_of("amd-3090", 1e-9))
    assert found.default_gbps
    assert "cut short: `tccl plan`" in found.sure
    assert "ended early" in found.advice


def test_this_machine_is_measured_as_its_plan_measures_it(monkeypatch):
    host = measured_machine("host", 2)
    monkeypatch.setattr("tccl_py.sources.profiled.measured_machine", lambda *_: host)
    found = advise(machine_subject(request_of(None, 1e-9), lambda _: None))
    assert (found.simulated, found.assumptions) == (False, ())
    assert found.default_gbps > 0
    assert "host memory" in found.sure
