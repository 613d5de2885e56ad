"""Default rings, trees and channels against NCCL's own graph code (2.30.7).

The recorded cases are some of ../shared's, each with a class of machines that an emulation may get
wrong, and random ones; `scripts/compare-with-nccl` compares as many as one likes.
"""

import json
import random

import pytest

from tests.effort import soon
from tests.graph_judge import judged, needs_judge
from tests.nccl_cases import CASES
from tests.nccl_defaults import NET_PAIRS, Case, difference, ours, random_case, theirs

RECORDED = CASES / "nccl-defaults"
SEARCHES_LONG = 1187
"""A seed of 9 GPUs on two nodes, for which NCCL's search uses up its steps again and again."""

UNLIKE_DIRECTIONS = 987111


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDED.glob("*.json")))
def test_a_recorded_default_is_found(name):
    case = json.loads((RECORDED / f"{name}.json").read_text())
    topology = (RECORDED / f"{name}.xml").read_text()
    found = ours(Case(topology, case["gpus"], case["environment"], case["nodes"]))
    assert found == case["answer"]


@needs_judge
def test_defaults_of_random_machines_are_those_of_nccl():
    cases = [random_case(random.Random(seed)) for seed in range(22)]
    differences = {}
    for seed, (case, answer) in enumerate(
        zip(cases, judged([case.question() for case in cases]), strict=True)
    ):
        # A node that NCCL cuts in parts, or whose pairs go by NET, is another question.
        if answer["rc"] == 0 and answer["nNodes"] == case.nodes:
            differences[seed] = difference(ours(case), theirs(case, answer))
    assert len(differences) >= 18
    assert {seed: name for seed, name in differences.items() if name not in (None, NET_PAIRS)} == {}


def test_a_tree_takes_the_faster_direction_of_nvlinks_between_unlike_gpus():
    # GPU 0 (sm 80) counts its NVLink as 20 GB/s, GPU 2 (sm 100) as 40.1.
    found = ours(random_case(random.Random(UNLIKE_DIRECTIONS)))
    assert (found["ring"]["orders"], found["ring"]["rate inside"]) == ([[0, 2]], 20.0)
    assert (found["tree"]["orders"], found["tree"]["rate inside"]) == ([[2, 0]], 40.0)


def test_a_long_search_takes_seconds():
    case = random_case(random.Random(SEARCHES_LONG))
    with soon(6):
        ours(case)
