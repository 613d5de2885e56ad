"""A job of eight ranks on virtual GPUs, recorded in several ways: each has what its ranks counted.

tests/gpu/recorded_job.py ran with torch 2.11 and NCCL 2.28.9, once on one host with NCCL's log and
PyTorch's profiler, and once on two hosts. Two ranks replayed a CUDA graph of four calls ten times.
Lines and events that no reader looks at were left out.
"""

import tarfile
from pathlib import Path

import pytest

from tccl_py.errors import InputError
from tccl_py.workloads.recording import GRAPHS
from tccl_py.workloads.sources import open_workload
from tests.commands import tccl
from tests.recorded_ranks import calls_of, counted_by

CASES = Path(__file__).parent / "cases" / "workloads"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    for path in CASES.glob("*.tar.xz"):
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")
    return folder


def opened(folder, *names):
    return open_workload([str(folder / name) for name in names])


@pytest.mark.parametrize(
    ("names", "steps"), [(["logs"], 13), (["traces"], 4), (["host0", "host1"], 13)]
)
def test_calls_bytes_and_groups_are_exactly_what_the_ranks_counted(job, names, steps):
    workload = opened(job, *names)
    expected = counted_by(job / "counts")
    assert calls_of(workload) == expected
    assert len(expected) == 29
    assert (workload.ranks, workload.steps) == (8, steps)
    assert {row.collective for row in workload.rows} == {
        "all_gather", "all_reduce", "all_to_all", "reduce_scatter", "send", "send_recv",
    }  # fmt: skip


def test_the_page_on_jobs_shows_what_the_recording_says(job, tmp_path):
    file = tmp_path / "job.json"
    recorded = tccl("workload", str(job / "logs"), "-o", str(file))
    assert recorded.exit_code == 0
    shown = tccl("workload", str(file), env={"COLUMNS": "120"})
    page = (Path(__file__).parents[1] / "docs" / "will-my-job-be-faster.md").read_text()
    assert all(f"    {line}\n" in page for line in shown.stdout.splitlines())
    assert "│ all_to_all" in shown.stdout


def test_replays_of_a_cuda_graph_are_counted_and_named(job):
    (notice,) = opened(job, "graphs").notices
    assert "40 operations of a communicator ran without a line" in notice
    (notice,) = opened(job, "graph-traces").notices
    assert "CUDA graphs were launched 12 times" in notice
    # Within a host NCCL counts where a profiler's plugin is loaded, as it was for these logs.
    assert opened(job, "logs").notices == ()
    assert opened(job, "host0", "host1").notices == (GRAPHS,)


def test_logs_of_one_of_two_hosts_are_no_job(job):
    with pytest.raises(InputError, match="has 4 of the 8 ranks"):
        opened(job, "host1")


def test_a_log_and_traces_of_one_job_are_not_mixed(job):
    with pytest.raises(InputError, match="name the files of one job"):
        opened(job, "logs", "traces")


def test_cut_recordings_of_a_real_job_are_read_or_refused_in_one_sentence(job, tmp_path):
    for kind in ("logs", "traces"):
        for path in sorted((job / kind).iterdir()):
            whole = path.read_bytes()
            (tmp_path / path.name).write_bytes(whole[: len(whole) // 2])
        try:
            workload = open_workload([str(path) for path in tmp_path.iterdir()])
        except InputError as error:
            assert "\n" not in str(error)
        else:
            assert kind != "traces" and workload.steps > 0
        for path in tmp_path.iterdir():
            path.unlink()
