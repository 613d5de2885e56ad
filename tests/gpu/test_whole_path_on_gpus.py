"""All that a user does with a machine, one command after another, and nothing left behind.

`scripts/test-gpu --part path --topology FILE` walks it on the virtual GPUs of any NCCL topology.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tccl_py.plan.load import load_plan
from tccl_py.simulator.descriptions import load_machine
from tests.gpu.ranks import BRIEF, PINNED, REAL, REPOSITORY, SHARE, run_ranks
from tests.gpu.test_profiler_on_gpus import eventually, used_mib, workers

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.timeout(580)]

JOBS = () if REAL else ("--sizes", "1M", "--seconds", "10")


@pytest.fixture
def tccl(tmp_path):
    """Run a command with a home of its own; return its output."""

    def run(*words, codes=(0,), **variables):
        surroundings = {**os.environ, "HOME": str(tmp_path), **variables}
        surroundings |= {"XDG_CONFIG_HOME": f"{tmp_path}/config", "XDG_STATE_HOME": f"{tmp_path}/s"}
        command = [sys.executable, "-m", "tccl_py", *map(str, words)]
        done = subprocess.run(
            command, cwd=REPOSITORY, env=surroundings, capture_output=True, text=True, check=False
        )
        print(f"$ tccl {' '.join(map(str, words))}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        assert done.returncode in codes, (words, done.returncode, done.stderr[-3000:])
        assert "Traceback" not in done.stderr
        return done.stdout

    return run


def test_a_user_plans_verifies_installs_runs_checks_and_uninstalls(tccl, tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    shared, temporary = set(Path("/dev/shm").iterdir()), left_in_temporary_folders()
    memory, already = used_mib(), len(workers())
    directory, conf = tmp_path / "plan", tmp_path / "nccl.conf"
    # 1. What is here.
    tccl("discover", "-o", tmp_path / "machine.json")
    findings = tccl("doctor", "--json", codes=(0, 1))
    assert "run it as root" not in findings
    tccl("advise", **SHARE)
    # 2. The plan and what it says of itself.
    tccl("plan", "-o", directory, *BRIEF, **SHARE)
    plan = load_plan(directory)
    size = len(load_machine(tmp_path / "machine.json").machine.gpus)
    assert plan.gpus == tuple(range(size))
    assert not plan.simulated
    for command in ("show", "explain", "report"):
        tccl(command, directory, **SHARE)
    # 3. Real jobs by each choice: no wrong value, and the rings in NCCL's log are the plan's.
    verified = json.loads(
        tccl("verify", directory, "--json", "--rounds", "6", *JOBS, *PINNED, codes=(0, 1))
    )
    for arm in verified["arms"]:
        assert (arm["wrong"], arm["failure"]) == ([], "")
        assert (arm["rings"] or {"same": True})["same"], arm["rings"]
    # 4. Installed, all communicators of an unmodified program sum rightly.
    tccl("install", directory, "--conf", conf, "--force")
    environment = {**os.environ, "NCCL_CONF_FILE": str(conf), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(size)))
    program = [sys.executable, "-m", "tests.gpu.plugin_rank", "eager"]
    commands = [[*program, rank, size, tmp_path] for rank in range(size)]
    codes, outputs = run_ranks(commands, [environment] * size)
    assert codes == [0] * size, [error[-2000:] for _, error in outputs]
    assert all(out.strip().endswith("all sums are right") for out, _ in outputs)
    # 5. Later days.
    tccl("check", directory, "--max-seconds", "30", codes=(0, 1), **SHARE)
    tccl("check", directory, "--preflight", "--json", codes=(0, 1), **(SHARE | dict(_pinned())))
    tccl("uninstall", conf)
    assert not conf.exists()
    # 6. Nothing is left.
    assert eventually(lambda: len(workers()) == already)
    assert eventually(lambda: used_mib() <= memory + 16)
    assert set(Path("/dev/shm").iterdir()) <= shared
    assert left_in_temporary_folders() <= temporary


def _pinned():
    name = "NCCL_MAX_P2P_NCHANNELS"
    return {name: os.environ[name]} if name in os.environ else {}


def left_in_temporary_folders():
    """Files and folders of this project in folders for temporary files."""
    folders = {Path("/tmp"), Path(os.environ.get("TMPDIR", "/tmp"))}
    return {path for folder in folders for path in folder.glob("*tccl*")}
