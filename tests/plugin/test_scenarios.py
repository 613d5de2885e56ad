"""Communicators get exactly the graph file of their GPUs, or none.

A few of the cases of tests/plugin/cases.py; `scripts/judge-plugin cases` runs all.
"""

import pytest

from tests.plugin.cases import CASES, run_case
from tests.plugin.runs import needs_release

pytestmark = pytest.mark.gpu(count=8)

SAMPLE = {
    "world3": "2.30.7",
    "many4": "2.28.9",
    "share": "2.28.9",
    "own file later": "2.28.9",
    "rank without plugin": "2.28.9",
    "contradicting variable of one rank": "2.30.7",
}


@pytest.mark.parametrize("name", SAMPLE)
def test_each_communicator_gets_the_file_of_its_gpus(tmp_path, name):
    needs_release(SAMPLE[name])
    case = next(case for case in CASES if case.name == name)
    assert run_case(case, tmp_path / "case", SAMPLE[name]) == []
