"""Jobs as processes: what they answer, how they fail, and that nothing of them is left.

What needs torch runs over gloo, and is skipped by name where torch is not installed.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tccl_py.rank_processes.starting import Nursery
from tccl_py.verify.jobs import JobError, run_jobs
from tccl_py.verify.orders import Order
from tccl_py.verify.surroundings import job_surroundings

REPOSITORY = Path(__file__).parent.parent
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="needs torch, which is not here"
)
PROGRAM = "tests.rank_programs"


def surroundings(**variables):
    found = job_surroundings(dict(os.environ), gpus=None, variables=variables)
    paths = [str(REPOSITORY), str(REPOSITORY / "profiler"), found.get("PYTHONPATH", "")]
    return {**found, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def job(words, tmp_path, *, timeout=60.0, **more):
    order = Order(backend="host", world=len(words.split()), **more)
    told = surroundings(TCCL_TEST_RANKS=words, TCCL_TEST_PIDS=str(tmp_path))
    return run_job(order, told, timeout=timeout, program=PROGRAM)


def run_job(order, told, **more):
    (outcome,) = run_jobs(order, [told], **more)
    return outcome


def alive(pid):
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ended(folder):
    """Whether all processes whose numbers lie in a folder are gone, at once or soon."""
    for _ in range(1200):
        if not any(alive(int(path.read_text())) for path in folder.glob("pid-*")):
            return True
        time.sleep(0.05)
    return False


def test_answers_come_back_in_the_order_of_ranks(tmp_path):
    found = job("answer answer answer", tmp_path, sizes=(4, 8))
    assert [one.rank for one in found.answers] == [0, 1, 2]
    assert all(len(one.timings) == 2 for one in found.answers)
    assert 0 < found.seconds < 60


def test_a_failing_rank_is_named_with_its_cause_and_the_others_end(tmp_path):
    with pytest.raises(JobError, match=r"^rank 1 ended with code 1: .*dev 2 not found$"):
        job("victim fail", tmp_path)
    assert ended(tmp_path)


@pytest.mark.parametrize(
    ("words", "sentence", "timeout"),
    [
        ("answer nothing", "^rank 1 ended without an answer$", 60.0),
        ("answer die", "^rank 1 was killed by signal 6", 60.0),
        # On a busy machine the other may not have answered by then.
        ("answer hang", r"^rank\(s\) (0, )?1 did not end within 4 s$", 4.0),
    ],
)
def test_silent_dying_and_hanging_ranks_are_named_and_gone(words, sentence, timeout, tmp_path):
    with pytest.raises(JobError, match=sentence):
        job(words, tmp_path, timeout=timeout)
    assert ended(tmp_path)


def test_after_ctrl_c_no_rank_is_left(tmp_path):
    program = (
        f"from tests.test_verification_jobs import *\njob('hang hang', Path({str(tmp_path)!r}))\n"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=surroundings(),
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for _ in range(1200):
        if len(list(tmp_path.glob("pid-*-child"))) == 2:
            break
        time.sleep(0.05)
    started.send_signal(signal.SIGINT)
    assert started.wait(60) != 0
    assert ended(tmp_path)


@pytest.fixture(scope="module")
def nursery():
    """Has imported torch for the ranks of several jobs."""
    with Nursery() as found:
        yield found


@needs_torch
def test_a_rank_whose_standard_input_ends_is_gone(tmp_path):
    order = tmp_path / "order.json"
    order.write_text('{"backend": "host", "world": 2}')
    rank = subprocess.Popen(
        [sys.executable, "-m", "tccl_py.verify.rank", str(order), "0"],
        cwd=REPOSITORY, env=surroundings(), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    rank.stdin.close()
    assert rank.wait(60) == 3


@needs_torch
def test_collectives_over_gloo_are_right_and_timed(nursery):
    order = Order(
        backend="host", world=3, checks=True, sizes=(1024, 100_001), seconds=0.02,
        training=True,
    )  # fmt: skip
    found = run_job(order, surroundings(), start=nursery)
    for rank, answer in enumerate(found.answers):
        assert (answer.rank, answer.wrong, answer.left_out) == (rank, (), ())
        assert answer.checked > 500
        assert [len(one) for one in answer.timings] == [9, 9]
        assert all(seconds > 0 for one in answer.timings for seconds in one)
        assert list(answer.training) == ["eager"]


@needs_torch
def test_smaller_communicators_are_timed_in_turns_but_not_under_a_graph_file(nursery):
    groups = (((0, 1),), ((0, 2), (1,)))
    order = Order(
        backend="host", world=3, sizes=(1024,), groups=groups, group_sizes=(2048, 70_000),
        seconds=0.02, collective="broadcast",
    )  # fmt: skip
    told = [surroundings(), surroundings(NCCL_GRAPH_FILE="/none"), surroundings()]
    plain, graph, other = run_jobs(order, told, start=nursery)
    for outcome in (plain, other):
        counts = [[len(one) for one in answer.timings] for answer in outcome.answers]
        # A rank that is in no group, or alone in its group, has no times of it.
        assert counts == [[9, 9, 9, 9, 9], [9, 9, 9, 0, 0], [9, 0, 0, 9, 9]]
        assert all(seconds > 0 for answer in outcome.answers for row in answer.timings
                   for seconds in row)  # fmt: skip
    assert [[len(one) for one in answer.timings] for answer in graph.answers] == [
        [9, 0, 0, 0, 0]
    ] * 3


@needs_torch
def test_jobs_at_once_take_turns_and_have_logs_and_environments_of_their_own(nursery):
    order = Order(backend="host", world=2, sizes=(1024, 5000), seconds=0.02, training=True)
    told = [surroundings(NCCL_DEBUG="WARN"), surroundings(), surroundings(NCCL_ALGO="Ring")]
    found = run_jobs(order, told, start=nursery)
    assert len(found) == 3
    for outcome in found:
        assert [one.rank for one in outcome.answers] == [0, 1]
        assert [len(one) for one in outcome.answers[1].timings] == [9, 9]
        assert len(outcome.answers[0].training["eager"]) == 20


def test_where_one_of_several_jobs_fails_all_are_ended(tmp_path):
    words = ["hang hang", "answer fail"]
    folders = [tmp_path / str(number) for number in range(2)]
    for folder in folders:
        folder.mkdir()
    told = [
        surroundings(TCCL_TEST_RANKS=one, TCCL_TEST_PIDS=str(folder))
        for one, folder in zip(words, folders, strict=True)
    ]
    with pytest.raises(JobError, match=r"^rank 1 ended with code 1: .*dev 2 not found$"):
        run_jobs(Order(backend="host", world=2), told, timeout=60.0, program=PROGRAM)
    assert all(map(ended, folders))


@needs_torch
@pytest.mark.parametrize("collective", ["reduce_scatter", "all_to_all"])
def test_other_collectives_are_timed_too(nursery, collective):
    order = Order(backend="host", world=2, sizes=(1000,), seconds=0.01, collective=collective)
    found = run_job(order, surroundings(), start=nursery)
    assert [len(one) for one in found.answers[0].timings] == [9]


@needs_torch
def test_wrong_values_are_found_and_told_by_their_place():
    order = Order(backend="host", world=2, checks=True)
    spoilt = "all_reduce all_to_all_single broadcast reduce_scatter_tensor"
    found = run_job(order, surroundings(TCCL_TEST_WRONG=spoilt), program="tests.wrong_ranks")
    wrong = [one for answer in found.answers for one in answer.wrong]
    assert {one.case.split(",")[0] for one in wrong} == {
        "all-reduce", "all-to-all", "broadcast", "reduce-scatter",
    }  # fmt: skip
    assert {one.rank for one in wrong} == {1}
    assert any("values are wrong, the first at 2: " in one.what for one in wrong)
