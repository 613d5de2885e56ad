"""Ranks as processes, whoever runs them: their numbers, their causes, their answers."""

import os

import pytest

from tccl_py.errors import InputError
from tccl_py.rank_processes.places import answer_file, order_file
from tccl_py.rank_processes.run import RanksError, answer_of, run_ranks


def run(folder, text, ranks, *, timeout=60.0):
    """Run ranks whose program is `text`."""
    (folder / "stand_in.py").write_text(text)
    order_file(folder).write_text("{}")
    surroundings = {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
    run_ranks("stand_in", folder, ranks, surroundings, timeout=timeout)


def test_ranks_have_the_numbers_asked_for_and_leave_answers(tmp_path):
    text = (
        "import sys, pathlib\nfolder = pathlib.Path(sys.argv[1]).parent\n"
        "(folder / f'answer-{sys.argv[2]}.json').write_text(sys.argv[2])"
    )
    run(tmp_path, text, (4, 6))
    assert [answer_of(tmp_path, rank, int) for rank in (4, 6)] == [4, 6]
    assert not answer_file(tmp_path, 0).exists()


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
        answer_of(tmp_path, 5, int)
    answer_file(tmp_path, 5).write_text('"x"')
    with pytest.raises(InputError, match=r"^answer of rank 5: does not fit int"):
        answer_of(tmp_path, 5, int)
