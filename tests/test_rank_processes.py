"""Ranks as processes, whoever runs them: their numbers, their causes, their answers."""

import os
import socket

import pytest

from tccl_py.errors import InputError
from tccl_py.rank_processes.task import FOLDER, Left, RanksError, Task, decoded, run_task


def run(folder, text, ranks, *, timeout=60.0, **more):
    """Run ranks whose program is `text`."""
    (folder / "stand_in.py").write_text(text)
    task = Task(
        program="stand_in",
        order="{}",
        ranks=ranks,
        surroundings={
            **os.environ,
            "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}",
            "OWN": f"{FOLDER}/log-x",
        },
        timeout=timeout,
        files={"graph.xml": "<graphs/>"},
    )
    return run_task(task, **more)


ANSWERING = """
import os, pathlib, sys
folder = pathlib.Path(sys.argv[1]).parent
(folder / f'answer-{sys.argv[2]}.json').write_text(sys.argv[2])
open(os.environ['OWN'], 'a').write((folder / 'graph.xml').read_text())
"""


def test_ranks_have_their_numbers_and_leave_answers_and_logs(tmp_path):
    left = run(tmp_path, ANSWERING, (4, 6))
    assert decoded(left, (4, 6), int) == (4, 6)
    assert left.log == "<graphs/>" * 2


def test_the_first_rank_inherits_where_all_meet(tmp_path):
    text = ANSWERING + (
        "import socket\nname = 'TCCL_MEETING_DESCRIPTOR'\nsaid = os.environ.get(name, '0')\n"
        "if said != '0': said = socket.socket(fileno=int(said)).getsockname()[1]\n"
        "(folder / f'answer-{sys.argv[2]}.json').write_text(str(said))"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = run(tmp_path, text, (0, 1), listener=listener)
        assert decoded(left, (0, 1), int) == (listener.getsockname()[1], 0)


def test_what_is_raised_meanwhile_ends_the_ranks(tmp_path):
    def leave():
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        run(tmp_path, "import time\ntime.sleep(600)", (0, 1), meanwhile=leave)


def test_the_rank_whose_last_words_name_a_cause_is_told(tmp_path):
    text = (
        "import sys\nsaid = {'2': 'goodbye', '3': 'ValueError: no   room\\nbye'}[sys.argv[2]]\n"
        "print(said)\nsys.exit(7)"
    )
    with pytest.raises(RanksError) as caught:
        run(tmp_path, text, (2, 3))
    error = caught.value
    assert (error.ranks, error.late) == ((3,), False)
    assert str(error) == "rank 3: ended with code 7; ValueError: no room"


def test_without_a_cause_whoever_said_something_is_told(tmp_path):
    text = "import sys\nif sys.argv[2] == '1': print('goodbye')\nsys.exit(7)"
    with pytest.raises(RanksError, match=r"^rank 1: ended with code 7; goodbye$"):
        run(tmp_path, text, (0, 1))


def test_ranks_that_are_late_are_all_named(tmp_path):
    text = "import sys, time\nif sys.argv[2] != '1': time.sleep(600)"
    with pytest.raises(RanksError) as caught:
        run(tmp_path, text, (0, 1, 2), timeout=3.0)
    # On a busy machine the one that ends may not have begun.
    assert {0, 2} <= set(caught.value.ranks)
    assert caught.value.late
    assert caught.value.what == "did not end within 3 s"


def test_a_missing_answer_and_one_that_is_none_are_told(tmp_path):
    with pytest.raises(RanksError, match=r"^rank 5: ended without an answer; it said nothing$"):
        run(tmp_path, "pass", (5,))
    with pytest.raises(InputError, match=r"^answer of rank 5: does not fit int"):
        decoded(Left(answers=('"x"',), log=""), (5,), int)
