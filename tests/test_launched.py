"""What is known of a job by the variables of its launchers, and by torchrun's options."""

import os

import pytest

from tccl_py.delivery.launched import launched


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in os.environ:
        if name.startswith(("SLURM", "OMPI_", "PM", "MPI_", "LOCAL_", "CUDA_VISIBLE")):
            monkeypatch.delenv(name)


@pytest.fixture
def known(monkeypatch):
    def launched_with(*command, **variables):
        for name, text in variables.items():
            monkeypatch.setenv(name, text)
        return launched(command)

    return launched_with


@pytest.mark.parametrize(
    ("node", "tasks", "ranks", "others"),
    [
        *[("0", "4(x2),3", 4, True), ("1", "4(x2),3", 4, True), ("2", "4(x2),3", 3, True)],
        *[("3", "4(x2),3", None, False), ("", "8", 8, False), ("x", "8", 8, False)],
        *[("0", "1(x2)", None, True), ("0", "", None, False), ("0", "many", None, False)],
    ],
)
def test_slurm_says_how_many_ranks_of_a_step_are_on_each_node(known, node, tasks, ranks, others):
    variables = {"SLURM_LOCALID": "0", "SLURM_NODEID": node, "SLURM_STEP_TASKS_PER_NODE": tasks}
    job = known(**variables)
    assert (job.ranks, bool(job.elsewhere)) == (ranks, others)
    assert job.is_script is False


def test_a_batch_script_is_no_rank_whatever_its_submitter_left(known):
    left = {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_TASKS_PER_NODE": "8"}
    job = known(SLURM_LOCALID="0", SLURM_JOB_NUM_NODES="1", **left)
    assert (job.rank, job.ranks, job.elsewhere, job.is_alone) == (None, None, "", True)
    of_two = known(SLURM_JOB_NUM_NODES="2")
    assert of_two.is_script and of_two.elsewhere == "SLURM_JOB_NUM_NODES=2"


def test_ranks_elsewhere_are_believed_of_any_launcher(known):
    left = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "8"}
    step = {"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_NODEID": "1"}
    job = known(**left, **step)
    assert (job.ranks, job.elsewhere) == (8, "SLURM_STEP_TASKS_PER_NODE says 8 of 16")


def test_the_gpu_of_a_rank_is_that_of_its_number_or_the_only_one_that_it_sees(known):
    rank = {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert known().gpu_of_rank((4, 5)) is None
    assert known(**rank).gpu_of_rank((4, 5)) == 5
    assert known(CUDA_VISIBLE_DEVICES="7").gpu_of_rank((4, 5)) == 7
    assert known(CUDA_VISIBLE_DEVICES="5,4").gpu_of_rank((4, 5)) == 4
    # One that may start the others is no rank of a GPU.
    alone = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    assert known(**alone).gpu_of_rank((4, 5)) is None


@pytest.mark.parametrize(
    ("command", "ranks", "others"),
    [
        (("torchrun", "--nproc-per-node", "4", "t.py"), 4, False),
        (("/a/torchrun", "--nproc_per_node=auto", "-nnodes=2", "t.py"), None, True),
        (("python", "-m", "torch.distributed.run", "--nproc-per-node=8", "t.py"), 8, False),
        (("python", "t.py", "--nproc-per-node=8"), None, False),
        (("torchrun", "t.py"), None, False),
        ((), None, False),
    ],
)
def test_torchrun_in_a_command_says_how_many_ranks_it_starts(known, command, ranks, others):
    job = known(*command)
    assert (job.ranks, bool(job.elsewhere)) == (ranks, others)
