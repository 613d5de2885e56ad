"""Recordings of a job of eight ranks, by NCCL's log: calls and bytes are those of the program."""

import json
import os
import subprocess
import sys

import pytest

from tccl_py.workloads.recording import GRAPHS
from tccl_py.workloads.workload import read_workload
from tests.gpu.ranks import REAL, REPOSITORY
from tests.recorded_ranks import calls_of

pytestmark = [pytest.mark.gpu(count=8), pytest.mark.timeout(300)]
RANKS, TRACED = 8, 4
FEW = {} if REAL else {"NCCL_MAX_NCHANNELS": "2", "NCCL_NVLS_ENABLE": "0"}
"""Blocks of all kernels at a time have to fit on the one real GPU."""


def tccl(*words, **variables):
    done = subprocess.run(
        [sys.executable, "-m", "tccl_py", *map(str, words)],
        cwd=REPOSITORY,
        env={**os.environ, **FEW, "OMP_NUM_THREADS": "1", **variables},
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


def counted_by(folder):
    """The same as the ranks of the program counted it; an all-to-all has its largest rank's."""
    calls, all_to_alls = {}, {}
    for path in folder.glob("*.json"):
        own = json.loads(path.read_text())
        for collective, dtype, size, ranks, count in own:
            if collective == "all_to_all":
                place = sum(
                    call[0] == "all_to_all"
                    for call in own[: own.index([collective, dtype, size, ranks, count])]
                )
                key = (*ranks,), place
                all_to_alls[key] = max(all_to_alls.get(key, 0), size)
            else:
                call = collective, dtype, size, (*ranks,)
                assert calls.setdefault(call, count) == count
    for (ranks, _), size in all_to_alls.items():
        calls["all_to_all", "int8", size, ranks] = 1
    return calls


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
    assert calls_of(workload) == expected
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
    assert calls_of(workload) == counted_by(tmp_path / "counts")
    assert (workload.ranks, workload.steps) == (RANKS, TRACED)
