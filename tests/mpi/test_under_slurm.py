"""Under srun: hosts are measured and planned, and the files for SLURM do what they are for."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.namespaces import ended
from tests.skips import unless_busy
from tests.slurm import NODES, slurm  # noqa: F401 (a fixture)

pytestmark = pytest.mark.mpi
ONE_EACH = ("--nodes=2", "--ntasks-per-node=1")
HOST = ("--backend", "host", "--devices", "1", "--interfaces", "lo")
FLOW = (
    "gpu01.C0->gpu01.N0->gpu02.N0->gpu02.N0->gpu02.C0{blocks=1,fifo=128K}",
    "gpu02.C0->gpu02.N0->gpu01.N0->gpu01.N0->gpu01.C0{blocks=1,fifo=128K}",
)


@pytest.fixture(scope="module")
def pmix(slurm):  # noqa: F811
    """SLURM that starts ranks of an MPI by PMIx."""
    ran = slurm.run(*ONE_EACH, "--mpi=pmix", "true")
    if ran.code:
        pytest.skip(f"SLURM here has no PMIx: {ran.stderr.splitlines()[0]}")
    return slurm


def tccl_processes():
    """Command lines of this program's processes, by their number."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.startswith(b"tccl_profiler") for word in words) or b"lo" in words:
            found[int(path.parent.name)] = b" ".join(words).decode(errors="replace")
    return found


def test_sets_over_nodes_are_measured_and_one_rank_answers(pmix):
    with unless_busy(workers=4):
        ran = pmix.run(*ONE_EACH, "--mpi=pmix", "tccl", "measure", *HOST, "--json", " ".join(FLOW))
        assert ran.code == 0, ran.stderr
    (entry,) = json.loads(ran.stdout)
    assert not entry["simulated"]
    assert min(entry["gbps"]) > 0


def test_tasks_that_know_nothing_of_each_other_are_told_how_to_be_started(slurm):  # noqa: F811
    ran = slurm.run(*ONE_EACH, "--mpi=none", "tccl", "measure", *HOST, FLOW[0])
    assert ran.code == 2
    said = [line for line in ran.stderr.splitlines() if line.startswith("tccl:")]
    assert said == [
        "tccl: this MPI job: has 2 tasks that know nothing of each other; start them by the "
        "launcher of the MPI that mpi4py was built for, as mpirun or srun --mpi=pmix"
    ]


def test_a_task_that_dies_is_named_by_its_host_and_nothing_is_left(pmix):
    before = set(tccl_processes())
    words = ("tccl", "measure", *HOST, "--target", "0.0001", *FLOW * 40)
    process = pmix.begin(*ONE_EACH, "--mpi=pmix", "--kill-on-bad-exit=0", *words)
    victim = None
    until = time.monotonic() + 90
    while victim is None and time.monotonic() < until:
        time.sleep(0.2)
        workers = [p for p, line in tccl_processes().items() if "profiler.worker" in line]
        victim = next((p for p in map(rank_above, workers) if p and host_name(p) == "gpu02"), None)
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    ran = ended(process, 120)
    assert ran.code != 0
    assert re.search(r"host gpu02: its agent", ran.stderr), ran.stderr
    end = time.monotonic() + 30
    while (left := set(tccl_processes()) - before) and time.monotonic() < end:
        time.sleep(0.2)
    assert not left, tccl_processes()


def rank_above(worker):
    """The rank whose agent started a worker, if that agent is the rank itself."""
    try:
        status = Path(f"/proc/{worker}/status").read_text()
        parent = int(re.search(r"PPid:\s+(\d+)", status)[1])
        line = Path(f"/proc/{parent}/cmdline").read_bytes()
    except (OSError, TypeError):
        return None
    return parent if b"measure" in line else None


def host_name(process):
    """What a task's SLURM calls its node."""
    try:
        told = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    names = [one.partition(b"=")[2].decode() for one in told if one.startswith(b"SLURMD_NODENAME=")]
    return next(iter(names), None)


@pytest.mark.parametrize("order", [NODES, NODES[::-1]], ids=" ".join)
def test_the_hostfile_for_slurm_starts_ranks_in_the_planned_order(slurm, order, tmp_path):  # noqa: F811
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("\n".join(order) + "\n")
    words = ("tccl", "plan", tmp_path / "plan", "--simulate", "amd-v100", "--keep-order")
    made = slurm.run("--ntasks=1", *words, "--hosts", hosts, "--rings", "1", "--max-sets", "20")
    assert made.code == 0, made.stderr
    files = tmp_path / "plan" / "nccl"
    command = re.search(
        r"srun (--distribution=arbitrary \S+) ", (files / "order/launch.txt").read_text()
    )
    script = (
        f'. {files}/env.sh; echo "$SLURM_PROCID $(hostname) $(basename "$NCCL_GRAPH_FILE" .xml)"'
    )
    ran = slurm.run(
        *command[1].split(),
        "sh",
        "-c",
        script,
        environment={"SLURM_HOSTFILE": str(files / "order" / "hostfile.slurm")},
    )
    assert ran.code == 0, ran.stderr
    found = sorted(line.split() for line in ran.stdout.splitlines())
    # Four GPUs a host; every rank loads the file of the host that it runs on.
    assert found == [[str(rank), order[rank // 4], order[rank // 4]] for rank in range(8)]


def test_a_task_knows_how_many_of_the_step_are_on_its_node(slurm):  # noqa: F811
    script = (
        "from tccl_py.delivery.launched import launched as of; print(of().rank, of().elsewhere)"
    )
    ran = slurm.run("--nodes=2", "--ntasks=3", sys.executable, "-c", script)
    of_nodes = "SLURM_STEP_TASKS_PER_NODE says"
    right = [f"0 {of_nodes} 1 of 3", f"0 {of_nodes} 2 of 3", f"1 {of_nodes} 2 of 3"]
    assert sorted(ran.stdout.splitlines()) == right, ran.stderr


def test_a_batch_script_makes_the_files_of_its_own_nodes(slurm, tmp_path):  # noqa: F811
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("gpu[01-04]\n")
    words = ("tccl", "plan", tmp_path / "plan", "--simulate", "amd-v100", "--hosts", hosts)
    made = slurm.run("--ntasks=1", *words, "--rings", "1", "--max-sets", "20")
    assert made.code == 0, made.stderr
    job = tmp_path / "job"
    # As docs/tutorial/slurm.md has it.
    script = (
        f'tccl export {tmp_path}/plan --hosts "$SLURM_JOB_NODELIST" --gpus 0-1 -o {job}\n'
        f"export SLURM_HOSTFILE={job}/nccl/order/hostfile.slurm\n"
        "unset SLURM_NNODES\n"
        f"srun --distribution=arbitrary --ntasks=4 sh -c '. {job}/nccl/env.sh; "
        'echo "$SLURM_PROCID $(hostname) $(basename "$NCCL_GRAPH_FILE" .xml)"\'\n'
    )
    batch = tmp_path / "batch.sh"
    batch.write_text(f"#!/bin/sh\n{script}")
    state = slurm.batch("--nodes=2", f"--output={tmp_path}/out", batch)
    said = (tmp_path / "out").read_text()
    assert state == "COMPLETED 0:0", said
    assert "wrote" in said
    order = (job / "nccl" / "order" / "hosts.txt").read_text().split()
    assert sorted(order) == list(NODES)
    found = sorted(line.split() for line in said.splitlines() if line[:1].isdigit())
    assert found == [[str(rank), order[rank // 2], order[rank // 2]] for rank in range(4)]
