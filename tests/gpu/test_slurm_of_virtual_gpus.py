"""SLURM whose nodes are hosts of several virtual GPUs: srun plans them, and starts planned jobs.

`scripts/test-gpu --part clusters` starts it in the namespaces of the first host.
"""

import json
import sys

import msgspec
import pytest

from tccl_py.nccl.plugin.build import build_plugin
from tccl_py.plan.directory import write_new_plan
from tccl_py.plan.load import load_plan
from tests import slurm as slurm_here
from tests.gpu.ranks import REPOSITORY, SHARE
from tests.gpu.test_hosts_of_virtual_gpus import (
    AGENT,
    HOSTS,
    INTERFACE,
    NAMES,
    TIME,
    assert_rings_by_the_plugin,
)

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.timeout(240)]
TCCL = (AGENT, "--rank", sys.executable, "-m", "tccl_py")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """SLURM, running; a node's tasks are in the namespaces of its host."""
    if HOSTS < 2:
        pytest.skip("needs several hosts of virtual GPUs (scripts/test-gpu --part clusters)")
    nodes = {
        name: ("env", f"OMPI_COMM_WORLD_RANK={number}", AGENT, "--rank")
        for number, name in enumerate(NAMES)
    }
    with slurm_here.running(tmp_path_factory.mktemp("slurm"), nodes) as made:
        if (ran := made.run(f"--nodes={HOSTS}", "--mpi=pmix", "true")).code:
            pytest.skip(f"SLURM here has no PMIx: {ran.stderr.splitlines()[0]}")
        yield made


@pytest.fixture(scope="module")
def planned(slurm, tmp_path_factory):
    """The directory of a measured plan of all hosts."""
    place = tmp_path_factory.mktemp("srun") / "plan"
    words = ("plan", place, "--interfaces", INTERFACE, "--no-tune", "--rings", "1", *TIME)
    one_each = (f"--nodes={HOSTS}", "--ntasks-per-node=1", "--mpi=pmix", f"--chdir={REPOSITORY}")
    ran = slurm.run(*one_each, *TCCL, *words, "--target", "0.05", environment=SHARE)
    print(ran.stdout[-3000:], ran.stderr[-5000:], flush=True)
    assert ran.code == 0
    return place


def test_srun_plans_the_gpus_of_all_nodes(planned):
    plan = load_plan(planned)
    assert not plan.simulated
    assert sorted(host.name for host in plan.hosts) == NAMES


def test_a_job_that_srun_starts_in_the_plans_order_runs_its_rings(slurm, planned, tmp_path):
    # Indices are made for jobs that get the graph file: here whatever jobs found best.
    job, place = msgspec.structs.replace(load_plan(planned), winner="graph"), tmp_path / "job"
    write_new_plan(job, place)
    build_plugin(place / "nccl")
    ranks = job.cluster.ranks
    arguments = f"$SLURM_PROCID {ranks} {tmp_path}/meet 1048576 3"
    program = f"{sys.executable} -m tests.gpu.collective {arguments}"
    log = f"NCCL_DEBUG_FILE={tmp_path}/log$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID"
    script = f"{log} exec {' '.join(TCCL)} run {place} --plugin -- {program}"
    variables = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,ENV,NET"}
    variables |= {"NCCL_SOCKET_IFNAME": f"={INTERFACE}", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    variables["SLURM_HOSTFILE"] = str(place / "nccl" / "order" / "hostfile.slurm")
    order = ("--distribution=arbitrary", f"--ntasks={ranks}", f"--chdir={REPOSITORY}")
    ran = slurm.run(*order, "sh", "-c", script, environment=variables)
    assert ran.code == 0, ran.stderr[-3000:]
    answers = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert len(answers) == ranks and all(answer["right"] for answer in answers)
    assert_rings_by_the_plugin(job, (tmp_path / "log0").read_text())
