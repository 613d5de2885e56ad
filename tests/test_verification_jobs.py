"""Jobs as processes: what they answer, how they fail, and that nothing of them is left.

What needs torch runs over gloo, and is skipped by name where torch is not installed.
"""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from msgspec.structs import replace

from tccl_py.experiments.calls import Tensors, time_threads, transfers
from tccl_py.experiments.comparison import RunBudget
from tccl_py.experiments.spec import (
    BATCHES,
    COLLECTIVES,
    Collective,
    Contest,
    JobSpec,
    Row,
    TunerChoice,
    calls_of,
    rows_of,
    training_rows,
)
from tccl_py.nccl.tuner import COLLECTIVES as TUNED
from tccl_py.rank_processes.forkserver import ForkServer
from tccl_py.rank_processes.rank import Communicator
from tccl_py.workloads.workload import Workload, WorkloadDtype, WorkloadRow
from tests import test_job_runners as runners
from tests.skips import mark_needs
from tests.test_job_runners import all_ended, environment

REPOSITORY = Path(__file__).parent.parent
needs_torch = mark_needs("torch")
PROGRAM = "tests.rank_programs"


@pytest.fixture(scope="module")
def server():
    """Has imported what ranks of any job need, once."""
    with ForkServer() as found:
        words = {"NCCL_TEST_RANKS": "answer"}
        run_job(
            JobSpec(rows=(Row(mode="ddp-eager"),)),
            1,
            words,
            server=found,
            timeout=60.0,
            program=PROGRAM,
        )
        yield found


def steps_of(world):
    """Training steps of a dry run."""
    return JobSpec(rows=training_rows(world, "host"))


def job(words, tmp_path, server, *, timeout=60.0, **more):
    variables = {"NCCL_TEST_RANKS": words, "NCCL_TEST_PIDS": str(tmp_path)}
    spec = JobSpec(**more)
    return run_job(
        spec, len(words.split()), variables, server=server, timeout=timeout, program=PROGRAM
    )


def run_job(spec, world, variables=None, **more):
    (outcome,) = run_jobs(spec, world, [variables or {}], **more)
    return outcome


def run_jobs(spec, world, variables, *, server=None, **more):
    """Run concurrent jobs of this specification over gloo, each with its variables."""
    return runners.run_jobs(runners.on_this_host(world, server, **more), spec, *variables)


def test_after_ctrl_c_no_rank_is_left(tmp_path):
    call = f"job('hang hang', Path({str(tmp_path)!r}), None)"
    program = f"from tests.test_verification_jobs import *\n{call}\n"
    started = subprocess.Popen(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=environment(),
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for _ in range(1200):
        # A file may be there before its text.
        if sum(path.read_text() != "" for path in tmp_path.glob("pid-*-child")) == 2:
            break
        time.sleep(0.05)
    started.send_signal(signal.SIGINT)
    assert started.wait(60) != 0
    assert all_ended(tmp_path)


@needs_torch
def test_smaller_communicators_are_timed_in_turns_but_not_under_a_graph_file(server):
    groups = (((0, 1),), ((0, 2), (1,)))
    own = ("broadcast",)
    rows = rows_of((1024,), own) + rows_of((2048, 70_000), own, groups=groups)
    world, spec = 3, JobSpec(rows=rows, seconds=0.02)
    told = [{}, {"NCCL_GRAPH_FILE": "/none"}, {}]
    plain, graph, other = run_jobs(spec, world, told, server=server)
    for outcome in (plain, other):
        counts = [[len(one.seconds) for one in answer.times] for answer in outcome.results]
        # A rank that is in no group, or alone in its group, has no times of it.
        parts = [(1, 1, 1, 1, 1), (1, 1, 1, 0, 0), (1, 0, 0, 1, 1)]
        assert counts == [[BATCHES * part for part in rank] for rank in parts]
        assert all(seconds > 0 for answer in outcome.results for row in answer.times
                   for seconds in row.seconds)  # fmt: skip
    assert [[len(one.seconds) for one in answer.times] for answer in graph.results] == [
        [BATCHES, 0, 0, 0, 0]
    ] * 3


@needs_torch
def test_jobs_at_once_take_turns_and_have_logs_and_environments_of_their_own(server):
    rows = rows_of((1024, 5000)) + training_rows(2, "host")
    world, spec = 2, JobSpec(rows=rows, seconds=0.02)
    told = [{"NCCL_DEBUG": "WARN"}, {}, {"NCCL_ALGO": "Ring"}]
    found = run_jobs(spec, world, told, server=server)
    assert len(found) == 3
    for outcome in found:
        assert [one.rank for one in outcome.results] == [0, 1]
        for rank, answer in enumerate(outcome.results):
            assert [len(one.seconds) for one in answer.times] == [BATCHES, BATCHES, 20, 20]
            expected = [one.trained for one in found[0].results[rank].times]
            assert [one.trained for one in answer.times] == expected
            assert list(map(len, expected)) == [0, 0, 3, 3]


@needs_torch
def test_a_gpt_split_over_ranks_learns_what_the_whole_one_does_with_the_same_data(server):
    def trained(result):
        return {one.row.mode: one.trained for one in result.times if one.trained}

    (whole,) = map(trained, run_job(steps_of(1), 1, server=server).results)
    told = [{}, {"NCCL_GRAPH_FILE": "/none"}]
    split, under_graph_file = (
        list(map(trained, job.results)) for job in run_jobs(steps_of(4), 4, told, server=server)
    )
    loss, embeddings, blocks = whole["ddp-eager"]
    for mode, parts in (("tp2-eager", 2), ("tp4-eager", 4)):
        ranks = [answer[mode] for answer in split[:parts]]
        assert {one[:2] for one in ranks} == {ranks[0][:2]}
        assert ranks[0][:2] == pytest.approx((loss, embeddings), rel=1e-5)
        assert sum(one[2] ** 2 for one in ranks) ** 0.5 == pytest.approx(blocks, rel=1e-5)
    # Ranks of another replica have data of their own, and so have all data-parallel ranks.
    assert split[2]["tp2-eager"] != split[0]["tp2-eager"]
    assert len({answer["ddp-eager"][0] for answer in split}) == 4
    assert len({answer["ddp-eager"][1] for answer in split}) == 1
    # Communicators over fewer ranks would fail.
    assert list(under_graph_file[0]) == ["ddp-eager", "tp4-eager"]


@needs_torch
def test_every_collective_is_timed_in_one_job_in_both_dtypes_and_over_groups(server):
    rows = ()
    for dtype in ("float32", "bfloat16"):
        rows += rows_of((2, 1000), COLLECTIVES, dtype)
        rows += rows_of((1000,), COLLECTIVES, dtype, groups=[((2, 0),)])
    world, spec = 3, JobSpec(rows=rows, seconds=0.005)
    found = run_job(spec, world, server=server)
    assert len(set(spec.rows)) == len(spec.rows) == len(COLLECTIVES) * 2 * 3
    assert {row.collective for row in spec.rows} == set(COLLECTIVES)
    for rank, answer in enumerate(found.results):
        counts = [0 if row.groups and rank == 1 else BATCHES for row in spec.rows]
        assert [len(one.seconds) for one in answer.times] == counts


@needs_torch
@pytest.mark.parametrize("world", [2, 36, 64, 256])
def test_sums_of_as_many_ranks_are_exact_in_every_dtype(world):
    torch = pytest.importorskip("torch")
    ranks, device = tuple(range(world)), torch.device("cpu")
    own = Communicator(torch=torch, dist=None, rank=0, members=ranks, device=device)
    tensors = Tensors(own, torch.bfloat16, 1000, asynchronous=False)
    values = tensors.of_all()
    assert len(set(values[0].tolist())) > 1
    total = torch.zeros(1000, dtype=torch.bfloat16)
    for value in values:
        total += value.to(torch.bfloat16)
    assert tensors.compare(total, sum(values)) == ""


@needs_torch
def test_rows_of_a_workload_have_all_its_dtypes_and_calls(server):
    groups = ((1, 0), (2, 3))
    rows = tuple(
        WorkloadRow(collective=name, dtype=dtype, bytes=96, groups=groups, calls=2.0, stream=at)
        for dtype in get_args(WorkloadDtype)
        for at, name in enumerate(("all_reduce", "send", "all_to_all", "all_reduce"))
    )
    rows += (replace(rows[0], groups=((0, 1, 2, 3),)),)
    calls = calls_of(Workload(name="all", source="a formula", ranks=4, rows=rows))
    assert len(calls) == 3 * len(get_args(WorkloadDtype)) + 1
    assert {row.groups for row in calls} == {groups, ()}
    # Rows of two streams are the same calls.
    assert {count for row, count in calls.items() if row.collective == "all_reduce"} == {2.0, 4.0}
    result = run_job(JobSpec(rows=tuple(calls), seconds=0.001), 4, server=server)
    assert all(all(one.seconds for one in rank.times) for rank in result.results)


@needs_torch
def test_all_collectives_and_all_pairs_are_timed(server):
    rows = RunBudget(sizes=(1024,)).further_rows(3, pairs=True)
    assert {row.collective for row in rows} == set(COLLECTIVES) - {"send"}
    pairs = [group for row in rows if len(row.groups) == 1 for group in row.groups]
    assert set(pairs) == {(0, 1), (0, 2), (1, 2)}
    results = run_job(JobSpec(rows=rows, seconds=0.001), 3, server=server).results
    for rank, result in enumerate(results):
        assert [times.row for times in result.times] == list(rows)
        for times in result.times:
            groups = times.row.groups
            assert bool(times.seconds) == (not groups or rank in groups[0])


def test_pieces_of_work_run_at_the_same_time():
    # Each waits for the other: run one after the other, they would never meet.
    meeting = threading.Barrier(2)
    first, second = lambda: meeting.wait(100), lambda: (meeting.wait(100), time.sleep(0.1))
    times = time_threads([first, second])
    assert times[0] > 0
    assert times[1] >= 0.1


def test_an_error_in_a_piece_of_work_is_not_lost():
    with pytest.raises(ZeroDivisionError):
        time_threads([lambda: 1 / 0, lambda: None])


@pytest.mark.parametrize(
    ("collective", "rank", "ends"),
    [
        ("send", 2, [("send", 0)]),
        ("send", 0, [("recv", 2)]),
        ("send", 1, []),
        ("send_recv", 2, [("send", 0), ("recv", 1)]),
        ("send_recv", 1, [("send", 2), ("recv", 0)]),
    ],
)
def test_transfers_follow_the_order_of_a_groups_ranks(collective, rank, ends):
    made = []
    dist = SimpleNamespace(
        isend="send", irecv="recv",
        P2POp=lambda kind, tensor, peer, group: (kind, peer),
        batch_isend_irecv=lambda operations: made.extend(operations) or (),
    )  # fmt: skip
    device = SimpleNamespace(type="cpu")
    own = Communicator(torch=None, dist=dist, rank=rank, members=(0, 1, 2), device=device)
    transfers(own, collective, (2, 0, 1), None, None)()
    assert made == ends


@needs_torch
def test_values_are_checked_in_groups_of_ranks_of_any_order_and_size(server):
    unequal = ((0,), (3, 1, 2))
    spec = JobSpec(checks=True, check_groups=(((0, 1), (3, 2)), ((2, 0),), unequal))
    right = run_job(spec, 4, server=server)
    assert [answer.wrong for answer in right.results] == [()] * 4
    counts = [answer.checked for answer in right.results]
    # Rank 2 is in a group each time, the others twice.
    assert counts[0] == counts[1] == counts[3] < counts[2]
    spoilt = {"NCCL_TEST_WRONG": "reduce all_to_all_single"}
    wrong = run_job(spec, 4, spoilt, server=server, program="tests.wrong_ranks").results
    cases = [value.case for value in wrong[3].wrong]
    assert {case.partition(" over ")[2] for case in cases} == {
        "", "ranks (2, 3)", "ranks (1, 2, 3)",
    }  # fmt: skip
    assert not any(answer.wrong for answer in wrong[:3])
    under_graph_file = run_job(spec, 4, {"NCCL_GRAPH_FILE": "/none"}, server=server).results
    assert len({answer.checked for answer in under_graph_file}) == 1


@needs_torch
def test_concurrent_jobs_time_contests_of_all_choices_and_ranks_agree_on_the_times(server):
    row = Row(collective="all_gather", dtype="bfloat16", bytes=4096)
    choice = TunerChoice(algorithm="ring", protocol="ll", channels=2)
    other = Row(dtype="bfloat16", bytes=1 << 20, collective="reduce")
    rows = (
        replace(row, contest=Contest(choices=(choice,), rounds=3)),
        replace(other, contest=Contest(rounds=2)),
        replace(row, contest=Contest(choices=(), rounds=2, table=True)),
    )
    spec = JobSpec(rows=rows)
    for outcome in run_jobs(spec, 2, [{}, {}], server=server):
        one, same = (result.times for result in outcome.results)
        assert one == same
        # The results of a row have one name whatever contest it was in.
        assert [times.row for times in one] == [row, other, row]
        variants = [times.variants for times in one]
        assert [[len(v.seconds) for v in of] for of in variants] == [[3, 3], [2] * 4, [2, 2]]
        assert [len(v.beside) for v in variants[1]] == [12] * 4
        assert all(value > 0 for of in variants for v in of for value in v.seconds)


@needs_torch
def test_no_contest_begins_after_its_time(server):
    row = Row(bytes=1024, contest=Contest(choices=(), rounds=1))
    outcome = run_job(JobSpec(rows=(row,) * 3, limit=0.0), 2, server=server)
    assert outcome.results[0].times == ()


def test_a_collective_is_a_name_and_a_row_of_one_table():
    assert tuple(COLLECTIVES) == get_args(Collective)
    programs = [facts.program for facts in COLLECTIVES.values() if facts.program]
    assert len(set(programs)) == len(programs)
    # NCCL asks its tuner for these alone.
    assert {name for name, facts in COLLECTIVES.items() if facts.algorithms} == set(TUNED)
