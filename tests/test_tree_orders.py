"""The trees of graph files, which follow the orders of the rings."""

import pytest

import tccl_py
from scripts.tree_orders import rates


@pytest.mark.parametrize("machine", ["amd-3090", "amd-v100", "intel-v100"])
def test_no_start_and_no_random_order_beats_the_tree_along_the_planned_rings(machine):
    model = tccl_py.load_machine(machine)
    source = tccl_py.Simulator(model)
    plan = tccl_py.make_plan(
        model.machine,
        model.knowledge,
        source,
        pinned_env={"NCCL_P2P_DISABLE": "1"},
        subsets=False,
    )
    assert plan.recommended == "graph"
    planned, *others = rates(plan, source)
    assert planned == pytest.approx(max(others))


def test_a_slower_start_is_seen():
    model = tccl_py.load_machine("intel-v100")
    source = tccl_py.Simulator(model)
    plan = tccl_py.make_plan(model.machine, model.knowledge, source, subsets=False)
    planned, _, worst, _ = rates(plan, source)
    assert worst < 0.95 * planned
