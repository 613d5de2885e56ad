"""What is known of a job by the variables of its launchers, and by those in its command."""

import os

import pytest

from tccl_py.delivery.launched import find_launch


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in os.environ:
        if name.startswith(("SLURM", "OMPI_", "PM", "MPI_", "LOCAL_", "CUDA_VISIBLE", "PET_")):
            monkeypatch.delenv(name)


@pytest.fixture
def known(monkeypatch):
    def launched_with(*command, **variables):
        for name, text in variables.items():
            monkeypatch.setenv(name, text)
        return find_launch(command)

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
        ("torchrun --nproc-per-node 4 t.py", 4, ""),
        ("/a/torchrun --nproc_per_node=auto -nnodes=2 t.py", None, "torchrun -nnodes says 2"),
        ("python -m torch.distributed.run --nproc-per-node=8 t.py", 8, ""),
        ("python t.py --nproc-per-node=8", None, ""),
        ("torchrun t.py", None, ""),
        ("", None, ""),
        ("mpirun -n 8 --oversubscribe t.py -n 2", 8, ""),
        ("mpirun --bind-to none -np 2 t.py : -np 6 t.py", 8, ""),
        ("mpirun -np 2 t.py : t.py", None, ""),
        ("mpirun t.py", None, ""),
        ("mpirun -H a:4,b:4 -n 8 t.py", 4, "mpirun -H says 2"),
        ("mpirun -H a:4,a:4 -n 8 t.py", 8, ""),
        ("mpiexec -ppn 4 -n 8 t.py", 4, "mpiexec -ppn says 4 of 8"),
        ("srun -N2 -n16 t.py", 8, "srun -N says 2"),
        ("srun --nodes=1-2 --ntasks-per-node=8 t.py", 8, "srun --nodes says 2"),
        ("srun -w node[01-02] t.py", None, "srun -w says 2"),
        ("srun -n 2 torchrun --nproc-per-node 4 t.py", 8, ""),
        ("srun -N 2 --ntasks-per-node 1 torchrun --nnodes 2 --nproc-per-node 4 t.py", 4, "srun"),
        ("numactl -N 0 mpirun -n 1 accelerate launch --num_processes 4 t.py", 4, ""),
        ("accelerate launch --num_machines=2 --num_processes=16 t.py", 8, "accelerate"),
        ("deepspeed --num_gpus 4 t.py", 4, ""),
        ("horovodrun -np 8 -H a:4,b:4 python t.py", 4, "horovodrun -H says 2"),
    ],
)
def test_launchers_in_a_command_say_how_many_ranks_they_start(known, command, ranks, others):
    job = known(*command.split())
    assert (job.ranks, bool(job.elsewhere)) == (ranks, bool(others))
    assert job.elsewhere.startswith(others)
    # Ranks of torchrun on other hosts have a command of their own; Open MPI's have no variables.
    own = "torchrun -nnodes", "accelerate"
    assert job.is_script == bool(others and not others.startswith(own))
    assert job.unlike == others.startswith(("mpirun", "mpiexec", "horovodrun"))


def test_a_file_of_hosts_and_variables_that_stand_for_options_count_too(known, tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# two of them\nnode1 slots=4\n\nnode2:4\n")
    job = known("mpirun", "--hostfile", str(file), "-n", "8", "t.py")
    assert (job.ranks, job.elsewhere, job.unlike) == (4, "mpirun --hostfile says 2", True)
    file.write_text("node1 slots=8\n")
    assert known("mpirun", "--hostfile", str(file), "-n", "8").elsewhere == ""
    # What is not understood may be other hosts.
    file.write_text("rank 0=node1 slot=0\n")
    job = known("mpirun", "--hostfile", str(file), "-n", "8")
    assert "--hostfile says" in job.elsewhere and job.unlike
    job = known("srun", "t.py", SLURM_NTASKS="4")
    assert (job.ranks, job.source) == (4, "SLURM_NTASKS")
    job = known("srun", "-n", "2", "torchrun", "t.py", PET_NPROC_PER_NODE="4")
    assert (job.ranks, job.source) == (8, "srun -n times PET_NPROC_PER_NODE")
