"""Reference plans against answers of NCCL's own code (2.30.7): default rings, and graph files.

`scripts/judge-rules ask` has NCCL on GPUs run the graph files.
"""

import json
from pathlib import Path

import pytest

from tccl_py.plan.load import load_plan
from tests.nccl_cases import CASES

PLANS = Path(__file__).parents[1] / "plans"
RECORDED = CASES / "reference-plans-by-nccl.json"
MACHINES = sorted(path.stem for path in PLANS.glob("*.json"))


def from_zero(ring):
    start = ring.index(0)
    return [*ring[start:], *ring[:start]]


def expected(name):
    """Return the GPU order of each channel by choice, the order in which NCCL doubles them."""
    plan = load_plan(PLANS / f"{name}.json")
    return {
        choice: [from_zero(list(ring)) for ring in rated.rings]
        for choice, rated in plan.choices.items()
    }


def same(planned, final):
    """Return whether NCCL's final channels take the planned rings in turn."""
    return len(final) % len(planned) == 0 and all(
        ring == planned[channel % len(planned)] for channel, ring in enumerate(final)
    )


@pytest.mark.parametrize("name", MACHINES)
def test_nccl_gets_the_rings_that_a_reference_plan_says(name):
    recorded = json.loads(RECORDED.read_text())[name]
    for choice, planned in expected(name).items():
        assert same(planned, recorded[choice]), choice
