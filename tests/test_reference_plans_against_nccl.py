"""Reference plans against NCCL's own graph code (2.30.7): default rings, and rings of graph files.

`tests/cases/reference-plans-by-nccl.json` keeps the answers, so that plans are compared where
NCCL's code is not at hand. `python -m tests.test_reference_plans_against_nccl` records them again.
"""

import json
from pathlib import Path

import pytest

from tccl_py.nccl.settings import environment
from tccl_py.plan.load import load_plan
from tccl_py.plan.writing import nccl_files
from tests.graph_judge import judged, needs_judge
from tests.nccl_cases import CASES
from tests.topology_writer import topology_xml

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


def answers_of_nccl(folder):
    """Return the final rings of every plan and choice, as NCCL's own code builds them."""
    questions = {}
    for name in MACHINES:
        plan = load_plan(PLANS / f"{name}.json")
        graph = folder / f"{name}.xml"
        graph.write_text(nccl_files(plan, Path("/"))["graph.xml"])
        # NCCL's graph code takes every pair for able to do P2P.
        without = {} if plan.knowledge.peer_access_default else {"NCCL_P2P_DISABLE": "1"}
        for choice, rated in plan.choices.items():
            variables = {**without, **environment(rated.settings), "ORACLE_DISCOVER": "1"}
            file = str(graph) if choice == "graph" else None
            node = (topology_xml(plan.machine), plan.gpus, file)
            questions[name, choice] = (variables, [node])
    answers = judged(list(questions.values()))
    found = {}
    for (name, choice), answer in zip(questions, answers, strict=True):
        assert answer["rc"] == 0, (name, choice, answer)
        rings = [from_zero(ring) for ring in answer["rings"]]
        found.setdefault(name, {})[choice] = rings
    return found


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


@needs_judge
def test_the_recorded_rings_are_those_of_nccl(tmp_path):
    assert answers_of_nccl(tmp_path) == json.loads(RECORDED.read_text())


def main():
    import tempfile  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        found = answers_of_nccl(Path(folder))
    RECORDED.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
