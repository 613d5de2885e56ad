"""Recordings of a job of eight ranks: calls and bytes are those of the program."""

import os
import subprocess
import sys

import pytest

from tccl_py.experiments.jobs import Arm, HostRanks, Launcher
from tccl_py.experiments.spec import JobSpec, calls_of
from tccl_py.nccl.settings import Settings
from tccl_py.workloads.recording import GRAPHS
from tccl_py.workloads.workload import read_workload
from tests.gpu.ranks import CHANNELS, REAL, REPOSITORY
from tests.recorded_ranks import calls_of as calls_by_group
from tests.recorded_ranks import counted_by

pytestmark = [pytest.mark.gpu(count=8), pytest.mark.timeout(300)]
RANKS, TRACED = 8, 4
FEW = {} if REAL else {"NCCL_MAX_NCHANNELS": "2", "NCCL_NVLS_ENABLE": "0"}
"""Blocks of all kernels at a time have to fit on the one real GPU."""


def tccl(*words):
    done = subprocess.run(
        [sys.executable, "-m", "tccl_py", *map(str, words)],
        cwd=REPOSITORY,
        env={**os.environ, **FEW, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    print(done.stdout[-4000:], done.stderr[-4000:])
    assert done.returncode == 0
    return done


def job(*words):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    return *torchrun, "--nproc-per-node", RANKS, "-m", "tests.gpu.recorded_job", *words


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The folder of a recording by NCCL's log, and of what the ranks counted."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "counts").mkdir()
    tccl("run", "--record", folder / "job.json", "--", *job(folder / "counts"))
    return folder


def test_a_recorded_job_has_exactly_the_calls_and_bytes_that_its_ranks_counted(recorded):
    expected = counted_by(recorded / "counts")
    workload = read_workload(recorded / "job.json")
    assert len(expected) > 20
    assert calls_by_group(workload) == expected
    assert (workload.ranks, workload.steps >= 11, workload.notices) == (RANKS, True, (GRAPHS,))


def test_the_profilers_traces_of_the_same_job_say_the_same(tmp_path):
    for name in ("counts", "traces"):
        (tmp_path / name).mkdir()
    subprocess.run(
        list(map(str, job(tmp_path / "counts", tmp_path / "traces"))),
        cwd=REPOSITORY,
        env={**os.environ, **FEW, "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=240,
    )
    tccl("workload", tmp_path / "traces", "-o", tmp_path / "job.json")
    workload = read_workload(tmp_path / "job.json")
    assert calls_by_group(workload) == counted_by(tmp_path / "counts")
    assert (workload.ranks, workload.steps) == (RANKS, TRACED)


def test_the_rows_of_a_recorded_job_give_right_values_in_all_groups(recorded):
    calls = calls_of(read_workload(recorded / "job.json"))
    groups = tuple(dict.fromkeys(row.groups for row in calls if row.groups))
    ranks = tuple(range(RANKS))
    host = HostRanks(ranks=ranks, gpus=ranks, environment={**os.environ, **FEW})
    launcher = Launcher(hosts=(host,), keep=(*FEW, *CHANNELS))
    default = Arm(name="default", variables={}, settings=Settings())
    spec = JobSpec(checks=True, check_groups=groups, rows=tuple(calls), seconds=0.01)
    (outcome,) = launcher.run([default], spec)
    assert len(groups) == 5
    for rank, result in enumerate(outcome.results):
        assert (result.wrong, result.left_out) == ((), ())
        inside = [not row.groups or any(rank in part for part in row.groups) for row in calls]
        assert [bool(times.seconds) for times in result.times] == inside
