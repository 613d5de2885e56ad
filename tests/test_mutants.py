"""The list of small faults that tests must see: each still fits the code, and names tests."""

import ast
import shlex
from pathlib import Path

import msgspec
import pytest

from scripts.judge_tests import MUTANTS, ROOT, copy_checkout, judge, read_mutants

ROOMS = read_mutants(sorted(MUTANTS.glob("*.yaml")))


@pytest.mark.parametrize("room", ROOMS)
def test_each_fault_still_fits_its_function_and_names_tests_that_are_there(room):
    for mutant in ROOMS[room]:
        changed = mutant.changed(ROOT)
        if mutant.file.endswith(".py"):
            ast.parse(changed)
        words = shlex.split(mutant.tests)
        files = [word.partition("::")[0] for word in words if word.startswith("tests/")]
        assert files and all((ROOT / file).is_file() for file in files), mutant
        assert mutant.behaviour


def test_there_are_faults_enough_of_all_rooms():
    assert sum(map(len, ROOMS.values())) >= 150
    files = {Path(mutant.file).parts[1] for mutants in ROOMS.values() for mutant in mutants}
    assert files >= {"search", "merge", "nccl", "plan", "planning", "delivery", "installation"}
    assert files >= {"experiments", "health", "sources", "workloads", "readers", "simulator"}
    assert files >= {"model", "tccl_profiler"}


def test_a_fault_that_a_test_sees_is_told_from_one_that_lives(tmp_path):
    copy_checkout(tmp_path / "copy")
    (mutant,) = (one for one in ROOMS["model"] if one.function == "RingSet.rate")
    tests = tmp_path / "copy" / "tests" / "test_one.py"
    text = "from tccl_py.model.rings import RingSet\ndef test_one():\n    assert {}\n"
    for check, seen in (("RingSet.rate.__code__.co_names[0] == 'len'", True), ("RingSet", False)):
        tests.write_text(text.format(check))
        one = msgspec.structs.replace(mutant, tests="tests/test_one.py")
        good, line = judge(one, tmp_path / "copy")
        assert good is seen, line
