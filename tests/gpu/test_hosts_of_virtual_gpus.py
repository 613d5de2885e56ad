"""Hosts of several virtual GPUs each, all on one machine: measured, planned, verified, used.

`scripts/test-gpu --part clusters` starts it in the namespaces of the first host. Hosts have names,
GPUs and NVML of their own; NCCL takes them for nodes, which talk over TCP on loopback.
"""

import json
import os
import subprocess
import sys
import time

import msgspec
import pytest

from tccl_py.experiments.record import Verification
from tccl_py.nccl.communicators import parse_log, same_rings
from tccl_py.nccl.plugin.build import build_plugin
from tccl_py.plan.directory import write_new_plan
from tccl_py.plan.load import load_plan
from tests.gpu.ranks import PINNED, REPOSITORY, SHARE, run_ranks
from tests.gpu.test_profiler_on_gpus import eventually, used_mib, workers
from tests.skips import needs

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.timeout(240)]
HOSTS = int(os.environ.get("VGPU_HOSTS", "1"))
NAMES = [f"virtual-host{number}" for number in range(HOSTS)]
INTERFACE = "lo"
MOST_LEFT_MIB = 200
"""What MPS keeps of the one real GPU."""
TIME = ("--max-sets", "20", "--max-seconds", "32")
"""Of a plan: half is for all GPUs, and a quarter for jobs over some."""
AGENT = str(REPOSITORY / "tests" / "gpu" / "on-hosts")


@pytest.fixture(scope="module", autouse=True)
def _hosts():
    if HOSTS < 2:
        pytest.skip("needs several hosts of virtual GPUs (scripts/test-gpu --part clusters)")
    needs("mpirun")


def mpirun(*words, codes=(0,), timeout=140, **variables):
    """Run a command of `tccl` with a rank on each host; return what it printed."""
    begun = time.monotonic()
    launch = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    command = [*launch, "-n", HOSTS, AGENT, "--rank", sys.executable, "-m", "tccl_py", *words]
    try:
        done = subprocess.run(
            list(map(str, command)),
            cwd=REPOSITORY,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        print((error.stderr or b"").decode()[-5000:], flush=True)
        raise
    seconds = time.monotonic() - begun
    print(f"{seconds:.1f} s: tccl {words[0]}: {done.returncode}\n{done.stdout[-3000:]}", flush=True)
    print(done.stderr[-5000:], flush=True)
    assert done.returncode in codes, (words, done.stderr[-3000:])
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The directory of the plan of all hosts, measured, with tables for jobs over half the GPUs."""
    from tccl_py.readers.live import gpu_count  # noqa: PLC0415 (of the first host)

    directory = tmp_path_factory.mktemp("hosts") / "plan"
    half = gpu_count() // 2
    words = ("plan", directory, "--interfaces", INTERFACE, "--no-tune", "--rings", "1")
    mpirun(*words, "--gpus-per-job", half, *TIME, "--target", "0.05", "--json", **SHARE)
    return directory


def test_the_plan_has_all_gpus_of_all_hosts_and_nothing_is_left_of_its_making(planned):
    plan = load_plan(planned)
    assert not plan.simulated
    assert sorted(host.name for host in plan.hosts) == NAMES
    assert all(plan.gpus_of(host) == plan.class_gpus[0] for host in plan.hosts)
    print(plan.sets_measured, "sets;", plan.notices)
    assert eventually(lambda: not workers())


@pytest.fixture(scope="module")
def exported(planned):
    """The directory of a job over half of each host's GPUs, planned from the tables.

    Verification runs three jobs at the same time: of all GPUs their ranks would wait for cores.
    """
    half = range(len(load_plan(planned).class_gpus[0]) // 2)
    place = planned.parent / "job"
    words = ["--hosts", ",".join(NAMES), "--gpus", ",".join(map(str, half)), "-o", place]
    subprocess.run(
        [sys.executable, "-m", "tccl_py", "export", planned, *words], cwd=REPOSITORY, check=True
    )
    assert load_plan(place).cluster.ranks == HOSTS * len(half)
    return place


def test_a_job_over_half_of_the_gpus_runs_the_rings_planned_for_it_by_the_plugin(
    exported, tmp_path
):
    # Indices are made for jobs that get the graph file: here whatever jobs found best.
    job, place = msgspec.structs.replace(load_plan(exported), winner="graph"), tmp_path / "job"
    write_new_plan(job, place)
    build_plugin(place / "nccl")
    answers, log = all_reduce(job, place, tmp_path)
    assert all(answer["right"] for answer in answers)
    assert_rings_by_the_plugin(job, log)


def assert_rings_by_the_plugin(job, log):
    """The one communicator in rank 0's log has the rings of a job's plan."""
    assert log.count("tccl: rank 0 of") == 1
    (rings,) = parse_log(log, where="rank 0").communicators
    wanted = job.channel_rings
    assert rings
    for number, ring in enumerate(rings):
        assert same_rings(ring, wanted[number % len(wanted)]), (number, ring, wanted)


def all_reduce(job, place, folder):
    """A rank on each GPU of a job, started by `tccl run --plugin` on its host; rank 0's log."""
    environments, commands = [], []
    program = [sys.executable, "-m", "tccl_py", "run", place, "--plugin", "--"]
    program = [AGENT, "--rank", *program, sys.executable, "-m", "tests.gpu.collective"]
    for host in job.hosts:
        gpus = job.gpus_of(host)
        for local in range(len(gpus)):
            rank = host.first_rank + local
            environments.append(
                {
                    **os.environ,
                    "OMPI_COMM_WORLD_RANK": host.name.removeprefix("virtual-host"),
                    "LOCAL_RANK": str(local),
                    "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
                    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                    "NCCL_SOCKET_IFNAME": f"={INTERFACE}",
                    "NCCL_DEBUG": "INFO",
                    "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,ENV,NET",
                    "NCCL_DEBUG_FILE": str(folder / f"log{rank}"),
                }
            )
            commands.append([*program, rank, job.cluster.ranks, folder / "meet", 1 << 20, 3])
    codes, outputs = run_ranks(commands, environments)
    said = [error[-2000:] for _, error in outputs]
    assert codes == [0] * len(commands), said
    answers = [json.loads(out.strip().splitlines()[-1]) for out, _ in outputs]
    return answers, (folder / "log0").read_text()


def test_verify_runs_a_jobs_rings_over_all_hosts_and_every_sum_is_right(exported):
    brief = ("--choice", "graph", "--sizes", "1M", "--rounds", "6", "--seconds", "4", "--verbose")
    brief += (*PINNED, "--json")
    verified = json.loads(mpirun("verify", exported, *brief, codes=(0, 1)))
    graph = next(arm for arm in verified["arms"] if arm["name"] == "graph")
    assert graph["rings"] == {"same": True, "differences": []}
    assert all((arm["wrong"], arm["failure"]) == ([], "") for arm in verified["arms"])
    assert sorted(Verification.load(exported).hosts) == NAMES


def test_check_and_explain_measure_over_the_hosts_again(planned):
    mpirun("check", planned, "--max-seconds", "20", codes=(0, 1), **SHARE)
    mpirun("show", "--why", planned, "--max-sets", "4", "--max-causes", "1", **SHARE)
    assert eventually(lambda: not workers())
    assert eventually(lambda: used_mib() <= MOST_LEFT_MIB)
