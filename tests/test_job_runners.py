"""What every runner of jobs keeps to: forks here and agents of hosts, torch's ranks and nccl-tests.

Stand-ins are no torch programs (rank_programs.py): they answer, fail, hang, or stay.
"""

import os
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from tccl_profiler.cluster.agents import RankJobs
from tccl_py.errors import MeasurementError
from tccl_py.experiments.jobs import Arm, HostRanks, Launcher, LocalRunner, rank_environment
from tccl_py.experiments.spec import JobSpec, WrongValue, rows_of
from tccl_py.nccl.settings import Settings
from tccl_py.rank_processes.forkserver import ForkServer
from tests.processes import alive
from tests.profiler_clusters import agents_in_processes
from tests.skips import needs
from tests.test_nccl_tests import program
from tests.verified import FakeJobs, by_plan

REPOSITORY = Path(__file__).parent.parent


def environment():
    """What ranks have whose modules are those of this checkout."""
    found = rank_environment(dict(os.environ), gpus=None, variables={})
    # It names each test anew, and a fork server is one environment's: it would import torch again.
    found.pop("PYTEST_CURRENT_TEST", None)
    paths = [str(REPOSITORY), str(REPOSITORY / "profiler"), found.get("PYTHONPATH", "")]
    return {**found, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run_jobs(launcher, spec, *variables):
    """Run concurrent jobs of this specification, each with its variables."""
    settings, graphs = Settings(), {"": "<graphs/>"}
    arms = [
        Arm(name="default", variables=own, settings=settings, graphs=graphs) for own in variables
    ]
    return launcher.run(arms, spec)


def on_this_host(world, server=None, **more):
    """A launcher of ranks on this host."""
    ranks = tuple(range(world))
    host = HostRanks(ranks=ranks, gpus=ranks, environment=environment())
    return Launcher(backend="host", hosts=(host,), runner=LocalRunner(server), **more)


@contextmanager
def forks():
    with ForkServer() as server:
        yield on_this_host(4, server)


@contextmanager
def hosts():
    """Two ranks on each of two hosts, whose agents are processes here."""
    ranks = {"north": (0, 1), "south": (2, 3)}
    with agents_in_processes(ranks) as job:
        places = tuple(
            HostRanks(name=name, ranks=own, gpus=(0, 1), environment=environment())
            for name, own in ranks.items()
        )
        yield Launcher(backend="host", hosts=places, job=job, runner=RankJobs(job))


@pytest.fixture(scope="module", params=[forks, hosts])
def launcher(request):
    with request.param() as made:
        yield replace(made, program="tests.rank_programs")


@pytest.fixture
def run(launcher, tmp_path):
    """Runs jobs at once, of four stand-ins each, which do what their words say."""

    def started(*jobs, timeout=60.0, **more):
        told = []
        for number, words in enumerate(jobs):
            (folder := tmp_path / f"job{number}").mkdir(exist_ok=True)
            told.append({"NCCL_TEST_RANKS": words, "NCCL_TEST_PIDS": str(folder)})
        return run_jobs(replace(launcher, timeout=timeout), JobSpec(**more), *told)

    return started


def all_ended(folder):
    """Whether all processes whose numbers lie below a folder are gone, at once or soon."""
    for _ in range(1200):
        if not any(alive(int(path.read_text())) for path in folder.rglob("pid-*")):
            return True
        time.sleep(0.05)
    return False


SOUND = "answer answer answer answer"


def test_ranks_answer_in_order_and_each_of_several_jobs_has_its_own_variables_and_logs(run):
    rows = rows_of((4, 8))
    outcomes = run(SOUND, f"{SOUND} second", rows=rows)
    for outcome, words in zip(outcomes, (SOUND, f"{SOUND} second"), strict=True):
        assert [one.rank for one in outcome.results] == [0, 1, 2, 3]
        assert all([times.row for times in one.times] == [*rows] for one in outcome.results)
        assert outcome.log.splitlines() == [f"{rank}: {words}" for rank in range(4)]


@pytest.mark.parametrize(
    ("words", "sentence", "timeout"),
    [
        # Whose last words name a cause is told, not who fails for another's failure.
        ("victim fail answer hang", r"rank 1: ended with code 1; .*dev 2 not found$", 60.0),
        ("hang hang answer fail", r"rank 3: ended with code 1; .*dev 2 not found$", 60.0),
        ("answer nothing answer answer", "rank 1: ended without a result", 60.0),
        ("answer answer answer die", "rank 3: .* signal 6", 60.0),
        # On a busy machine others may not have answered by then.
        ("hang hang hang hang", r"rank [0-9, ]+: did not end within 1 s", 1.0),
    ],
)
def test_ranks_that_fail_are_named_with_their_cause_and_all_are_gone(
    run, tmp_path, words, sentence, timeout
):
    with pytest.raises(MeasurementError, match=f"(^|: ){sentence}"):
        run(words, timeout=timeout)
    assert all_ended(tmp_path)
    # What runs them is as before.
    assert len(run(SOUND)[0].results) == 4


def test_where_one_of_several_jobs_fails_all_are_ended(run, tmp_path):
    with pytest.raises(MeasurementError, match=r"rank 3: .*dev 2 not found$"):
        run("hang hang hang hang", "answer answer answer fail")
    assert all_ended(tmp_path)


@pytest.fixture(scope="module")
def server():
    with ForkServer() as found:
        yield found


@pytest.fixture(params=["torch", "nccl-tests", "stand-ins"])
def measure(request, tmp_path, server):
    """Runs a job of collectives by a program, or by what stands in for it in other tests."""

    def by_torch(spec, *, wrong=False):
        needs("torch")
        own = {"program": "tests.wrong_ranks"} if wrong else {}
        spoilt = {"NCCL_TEST_WRONG": " ".join(SPOILT)} if wrong else {}
        (outcome,) = run_jobs(on_this_host(2, server, **own), spec, spoilt)
        return outcome

    def by_nccl_tests(spec, *, wrong=False):
        path = program(tmp_path / "plan", wrong="7" if wrong else "0")
        (outcome,) = run_jobs(on_this_host(2, nccl_tests=path), spec, {})
        return outcome

    def by_stand_ins(spec, *, wrong=False):
        value = WrongValue(case="all-reduce, float32", rank=0, what="2 of 3 values are wrong")
        jobs = FakeJobs(by_plan(lambda _: 1.0), wrong=(value,))
        launcher = replace(on_this_host(2), runner=jobs)
        (outcome,) = run_jobs(launcher, spec, {"NCCL_GRAPH_FILE": "x"} if wrong else {})
        return outcome

    programs = {"torch": by_torch, "nccl-tests": by_nccl_tests, "stand-ins": by_stand_ins}
    return programs[request.param]


SPOILT = ("all_reduce", "all_to_all_single", "broadcast", "reduce_scatter_tensor")
SPOILT_CASES = {"all-reduce", "all-reduce of maxima", "all-to-all", "broadcast", "reduce-scatter"}
ROWS = (*rows_of((4096, 8192, 16384)), *rows_of((4096,), groups=(((1,),),)))


def test_each_program_answers_by_rank_with_times_of_every_row_that_a_rank_has(measure):
    outcome = measure(JobSpec(checks=True, rows=ROWS, seconds=0.01))
    assert [one.rank for one in outcome.results] == [0, 1]
    assert sum(one.checked for one in outcome.results) >= 5
    assert outcome.wrong == ()
    for answer in outcome.results:
        assert answer.torch
        assert [times.row for times in answer.times] == [*ROWS]
        # A rank that is alone in its group, or in none, has no times of it.
        assert [bool(times.seconds) for times in answer.times] == [True, True, True, False]
        assert all(seconds > 0 for times in answer.times for seconds in times.seconds)


def test_each_program_tells_wrong_values_by_their_case_and_place(measure):
    wrong = measure(JobSpec(checks=True), wrong=True).wrong
    cases = {value.case.replace("_", "-").partition(",")[0] for value in wrong}
    assert cases in ({"all-reduce"}, SPOILT_CASES)
    assert all("values are wrong" in value.what for value in wrong)
    assert len({value.rank for value in wrong}) == 1
    assert cases == {"all-reduce"} or any("the first at 2: " in value.what for value in wrong)
