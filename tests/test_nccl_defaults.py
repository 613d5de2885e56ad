"""Default rings, trees and channels against recorded answers of NCCL's own graph code (2.30.7).

Each of the first cases is a class of machines that an emulation may get wrong; the others are
random, of one or two nodes. `scripts/judge-rules code` compares as many nodes as one likes.
"""

import json
import random

import pytest

from tests.effort import calls_at_most
from tests.nccl_cases import CASES
from tests.nccl_defaults import Case, ours, random_case

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


def test_a_tree_takes_the_faster_direction_of_nvlinks_between_unlike_gpus():
    # GPU 0 (sm 80) counts its NVLink as 20 GB/s, GPU 2 (sm 100) as 40.1.
    found = ours(random_case(random.Random(UNLIKE_DIRECTIONS)))
    assert (found["ring"]["orders"], found["ring"]["rate inside"]) == ([[0, 2]], 20.0)
    assert (found["tree"]["orders"], found["tree"]["rate inside"]) == ([[2, 0]], 40.0)


def test_a_long_search_takes_few_calls():
    case = random_case(random.Random(SEARCHES_LONG))
    with calls_at_most(5_000_000):
        ours(case)
