"""The plans in plans/ are those that this program makes, and keep their promises."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tccl_py.model.transfer import transfer_set
from tccl_py.plan.load import load_plan
from tccl_py.plan.plan import Plan
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator
from tests.planned import SEVERAL_GPUS, WRX, plan_of

PLANS = Path(__file__).parent.parent / "plans"
SLOW = {WRX}
"""Planning takes half a minute: only the stored rings are asked of the simulator again."""
SAME = 1e-3
"""Rates of equal plans may differ this much (relative): libraries sum in different orders."""

every_machine = pytest.mark.parametrize("machine", SEVERAL_GPUS)


@cache
def stored(machine: str) -> Plan:
    return load_plan(PLANS / f"{machine}.json")


def hops_of(plan: Plan) -> list[list[tuple[int, int, str]]]:
    return [[(hop.source, hop.target, str(hop.flow)) for hop in ring.hops] for ring in plan.rings]


def test_there_is_a_plan_for_every_bundled_machine_and_no_other():
    assert sorted(path.stem for path in PLANS.glob("*.json")) == sorted(SEVERAL_GPUS)


@every_machine
def test_a_reference_plan_is_of_the_bundled_machine_and_says_simulated(machine):
    plan, model = stored(machine), load_bundled(machine)
    assert (plan.machine, plan.knowledge) == (model.machine, model.knowledge)
    assert plan.gpus == model.machine.gpu_indices
    assert plan.simulated
    assert plan.provenance.startswith("simulated")
    assert not plan.cancelled


@every_machine
def test_a_reference_plan_is_neither_below_stock_nor_above_its_bound(machine):
    plan = stored(machine)
    assert plan.rate_gbps >= plan.choices["default"].rate_gbps * (1 - 1e-9)
    assert plan.bound_gbps is not None
    assert plan.rate_gbps <= plan.bound_gbps * (1 + 1e-9)
    assert plan.proven == (plan.bound_gbps <= plan.rate_gbps * 1.0101)


def test_the_asus_machine_gains_a_quarter_over_stock():
    plan = stored("asus-esc8000a-e13p")
    assert plan.rate_gbps >= 1.25 * plan.choices["default"].rate_gbps


@every_machine
def test_the_simulator_still_gives_the_stored_rings_their_rate(machine):
    plan = stored(machine)
    hops = [hop for ring in plan.rings for hop in ring.hops]
    flows = transfer_set(hop.flow for hop in hops)
    (measurement,) = Simulator(load_bundled(machine)).measure([flows])
    assert measurement.assumed == plan.assumed
    assert len(plan.rings) * measurement.rate_gbps == pytest.approx(plan.rate_gbps, rel=SAME)
    assert sorted(measurement.gbps) == pytest.approx(
        sorted(hop.rate_gbps for hop in hops), rel=SAME
    )


@pytest.mark.parametrize("machine", [name for name in SEVERAL_GPUS if name not in SLOW])
def test_planning_again_gives_the_reference_plan(machine):
    plan = stored(machine)
    again = plan_of(machine)
    advice = "if that is meant, run scripts/regenerate-plans"
    assert again.settings == plan.settings, advice
    assert hops_of(again) == hops_of(plan), advice
    assert again.rate_gbps == pytest.approx(plan.rate_gbps, rel=SAME), advice
    assert again.bound_gbps == pytest.approx(plan.bound_gbps, rel=SAME), advice
    assert again.proven == plan.proven, advice
    assert again.choices["default"].rings == plan.choices["default"].rings, advice
    assert again.choices["default"].rate_gbps == pytest.approx(
        plan.choices["default"].rate_gbps, rel=SAME
    ), advice
