"""Means beside NCCL: what disqualifies one, and which is best for which size."""

import os

import msgspec
import pytest

from tccl_py.errors import InputError, MeasurementError
from tccl_py.experiments.collectives import COLLECTIVES
from tccl_py.experiments.jobs import HostRanks, Launcher, LocalRunner
from tccl_py.experiments.means import MEANS, NCCL
from tccl_py.experiments.means_table import MeansTable, means_rows, measure_means
from tccl_py.experiments.spec import BATCHES, MIB, JobResult, JobSpec, batches
from tccl_py.experiments.target import target_of
from tccl_py.files import decode_json, encode_json
from tccl_py.model.links import Proof
from tccl_py.plan.directory import write_plan
from tccl_py.plan.results import ProvenLinks
from tccl_py.rank_processes.forkserver import ForkServer
from tccl_py.rank_processes.tasks import RankOutput, RanksError
from tests.planned import SMALL, plan_of
from tests.skips import mark_needs
from tests.stand_in_means import STAND_INS

RANKS = 4
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
KNOWN = {NCCL: MEANS[NCCL], **STAND_INS}


@pytest.fixture
def target(tmp_path):
    plan = plan_of(SMALL)
    write_plan(plan, tmp_path)
    return target_of(plan, tmp_path)


def launcher(runner=None, *, environment=ENVIRONMENT, **more):
    host = HostRanks(ranks=tuple(range(RANKS)), gpus=tuple(range(RANKS)), environment=environment)
    return Launcher(hosts=(host,), runner=runner, **{"backend": "host", **more})


@pytest.fixture(scope="module")
def server():
    with ForkServer() as found:
        yield found


@mark_needs("torch")
def test_a_means_that_hangs_is_wrong_or_cannot_run_is_out_by_name_and_the_rest_is_right(
    target, server
):
    own = launcher(LocalRunner(server), program="tests.stand_in_means")
    known = {name: KNOWN[name] for name in ("hangs", "wrong", "absent", NCCL)}
    found = measure_means(target, own, seconds=0.1, sizes=(4096,), known=known)
    assert found.out["absent"] == "cannot run: it is not installed"
    assert found.out["hangs"].startswith("hangs: all-reduce of 4 KiB")
    assert found.out["wrong"].startswith("wrong values: 1 of 2048 values are wrong, the first at 3")
    assert {name for row in found.rows for name in row.us} == {NCCL}
    assert {row.best for row in found.rows} == {NCCL}


@mark_needs("torch")
def test_copies_through_host_memory_and_nccl_give_right_values_in_every_row(target, server):
    known = {name: MEANS[name] for name in (NCCL, "host-copies")}
    own = launcher(LocalRunner(server))
    # 1 MiB has several pieces, more than there are slots.
    found = measure_means(target, own, seconds=0.1, sizes=(65536, MIB), known=known)
    assert found.out == {} and found.dry_run
    for row in found.rows:
        able = {name for name in known if row.collective in known[name].collectives}
        assert set(row.us) == able
        assert set(row.gemm) == (able if row.beside_gemm else set())
    assert {row.collective for row in found.rows} == {
        "all_reduce",
        "send",
        "send_recv",
        "all_gather",
    }
    assert found.keep(target.directory) == MeansTable.load(target.directory)


@mark_needs("torch")
def test_a_rank_without_a_partner_takes_part_in_nothing(target, server):
    host = HostRanks(ranks=(0, 1, 2), gpus=(0, 1, 2), environment=ENVIRONMENT)
    own = Launcher(backend="host", hosts=(host,), runner=LocalRunner(server))
    rows = tuple(row for row in means_rows(3, [65536]) if row.collective == "send")
    for name in (NCCL, "host-copies"):
        (job,) = own.run(target.arms[:1], JobSpec(rows=rows, means=name))
        for rank in job.results:
            assert [len(times.seconds) for times in rank.times] == [BATCHES * (rank.rank < 2)] * 2


class Recorded:
    """Jobs whose rows take the recorded microseconds by means; a text is how a job fails."""

    def __init__(self, us):
        self.us, self.jobs = us, []

    def rendezvous(self, host, count):
        return [None] * count

    def run(self, tasks):
        ((host, (task,)),) = tasks.items()
        spec = decode_json(task.spec, JobSpec, where="spec")
        self.jobs.append((spec.means, dict(task.environment)))
        us = self.us[spec.means]
        if isinstance(us, str):
            raise RanksError([0], "ended with code 1", us)
        times = [batches(row, [us(row) * 1e-6] * BATCHES) for row in spec.rows]
        times = [
            msgspec.structs.replace(one, gemms=(1.25,) * BATCHES) if one.row.beside else one
            for one in times
        ]
        results = [
            encode_json(JobResult(rank=rank, torch="2.11", times=tuple(times)))
            for rank in range(spec.world)
        ]
        return {host: [RankOutput(results=tuple(results), log="")]}


RECORDED = {
    NCCL: lambda row: 20 + row.bytes / 4e4,
    "one-shot": lambda row: 5 + row.bytes / 1e4,
    "two-shot": lambda row: 12 + row.bytes / 4.05e4,
    "multimem": "error: NVLink has no multicast here",
    "vllm": "error: vllm is not installed",
    "flashinfer": "error: hangs: all-reduce of 4 KiB did not end in 20 s",
    "peer-copies": lambda row: 10 + row.bytes / 4.1e4,
    "host-copies": lambda row: 40 + row.bytes / 3e4,
}


def proven(target, verdict="sound"):
    ProvenLinks(proof=Proof(verdict=verdict, what="nothing arrives")).keep(target.directory)
    return target


def on_gpus(jobs, **environment):
    environment = {"PATH": "/bin", **environment}
    return launcher(jobs, environment=environment, backend="cuda", keep=tuple(environment)[1:])


def test_recorded_rows_decide_by_size_and_default_nccl_stays_where_it_is_as_good(target):
    found = measure_means(proven(target), on_gpus(Recorded(RECORDED)), seconds=1e3)
    best = {row.bytes: row.best for row in found.rows if row.mode == "graph"}
    assert (best[4096], best[256 << 10], best[64 * MIB]) == ("one-shot", "two-shot", NCCL)
    # The fastest at 64 MiB is not 2 % faster.
    (last,) = (row for row in found.rows if (row.mode, row.bytes) == ("graph", 64 * MIB))
    assert (last.best_us, last.default_us) == (last.us[NCCL],) * 2
    assert last.us["two-shot"] < last.best_us
    regret = {(one.collective, one.mode, one.name): one for one in found.regrets}
    assert regret["all_reduce", "graph", "one-shot"].worst == pytest.approx(3.02, rel=0.01)
    assert 0 < regret["all_reduce", "graph", "two-shot"].mean < 1
    assert found.out["multimem"] == "cannot run: NVLink has no multicast here"
    assert found.out["flashinfer"] == "hangs: all-reduce of 4 KiB did not end in 20 s"
    assert {row.gemm[NCCL] for row in found.rows if row.beside_gemm} == {1.25}
    # 160 all-reduces of 512 KiB, between sizes that were timed, and a gather.
    step = found.workloads["tensor-parallel-decode"]
    assert 0.0002 < step.best_s < step.default_s < 0.02
    assert found.rounds == 3


@pytest.mark.parametrize(
    ("verdict", "variables", "words"),
    [
        ("wrong values", {}, "wrong values: nothing arrives"),
        ("inconclusive", {}, "inconclusive"),
        (None, {}, "not proven"),
        ("sound", {"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE=1 disables P2P"),
    ],
)
def test_means_that_need_p2p_do_not_run_where_it_is_not_proven(target, verdict, variables, words):
    jobs = Recorded(RECORDED)
    if verdict:
        proven(target, verdict)
    found = measure_means(target, on_gpus(jobs, **variables), seconds=1e-9)
    assert {name for name, _ in jobs.jobs} == {NCCL, "host-copies"}
    assert {words in found.out[name] for name in KNOWN_P2P} == {True}
    assert found.rounds == 1


KNOWN_P2P = [name for name, one in MEANS.items() if one.p2p]


def test_without_right_values_there_is_no_table(target):
    jobs = Recorded(dict.fromkeys(MEANS, "error: hangs: at once"))
    with pytest.raises(MeasurementError, match="nccl: hangs: at once"):
        measure_means(proven(target), on_gpus(jobs), seconds=1.0)
    with pytest.raises(InputError):
        measure_means(target, on_gpus(jobs), seconds=1.0, sizes=(3,))


def test_every_means_has_rows_and_every_row_a_means():
    rows = {row.collective for row in means_rows(2)}
    assert rows == {name for one in MEANS.values() for name in one.collectives}
    assert rows <= set(COLLECTIVES)
