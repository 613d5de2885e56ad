"""The proof of links on the GPUs that are here; `scripts/test-gpu --part proof` adds faults.

TCCL_TEST_FAULT is the fault that virtual GPUs have, as `mirror:1`; without it they are sound.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu.ranks import PINNED, REPOSITORY, SHARE, run_ranks
from tests.gpu.test_profiler_on_gpus import eventually, used_mib

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.timeout(150)]
KIND, _, LISTED = os.environ.get("TCCL_TEST_FAULT", "").partition(":")
FAULTY = {int(gpu) for gpu in LISTED.split(",") if gpu}
VERDICTS = {"": "sound", "mirror": "hangs", "damage": "wrong values"}
LEFT_MIB = 200
"""What MPS keeps of the one real GPU."""


def tccl(*words, **variables):
    """Run a command; return its exit code, its output and its seconds."""
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tccl_py", *map(str, words)],
        cwd=REPOSITORY,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - begun
    print(f"{seconds:.1f} s, {done.returncode}: $ tccl", *words)
    print(done.stdout[-3000:], done.stderr[-3000:], flush=True)
    assert "Traceback" not in done.stderr
    return done, seconds


def left_behind():
    """What a proof could leave: processes of ranks, and NCCL's files in shared memory."""
    ranks = subprocess.run(
        ["pgrep", "-f", "tccl_py.rank_processes"], capture_output=True, text=True, check=False
    )
    return ranks.stdout.split(), sorted(Path("/dev/shm").glob("nccl-*"))


def test_the_verdict_names_the_faulty_gpus_and_nothing_is_left():
    before = used_mib()
    done, _ = tccl("doctor", "--json")
    links = json.loads(done.stdout)["links"]
    assert links["verdict"] == VERDICTS[KIND], links
    bad = {(pair["from"], pair["to"]) for pair in links["pairs"] if pair["verdict"] != "sound"}
    assert bool(bad) == bool(FAULTY)
    assert all(FAULTY & set(pair) for pair in bad)
    assert done.returncode == (1 if FAULTY else done.returncode)
    assert left_behind() == ([], [])
    eventually(lambda: used_mib() <= before + LEFT_MIB)


@pytest.mark.skipif(not FAULTY, reason="needs virtual GPUs with a fault")
def test_a_plan_of_faulty_links_runs_without_them(tmp_path):
    done, _ = tccl(
        "plan", tmp_path / "plan", "--json", "--max-sets", 20, "--max-seconds", 20, **SHARE
    )
    assert done.returncode == 0
    plan = json.loads(done.stdout)
    # Default NCCL fails where it takes P2P.
    jobs = {"".join(job["environment"]): job["verdict"] for job in plan["links"]["by_nccl"]}
    fails = plan["choices"]["default"].get("fails")
    assert (fails["verdict"] if fails else "sound") == jobs[""]
    assert jobs["NCCL_P2P_DISABLE"] == "sound"
    chosen = plan["choices"][plan["recommended"]]
    assert chosen["rate_gbps"] > 0
    # A job by the plan: its values are right, though those by default NCCL are not.
    ranks = range(len(plan["rings"][0]))
    words = ("run", tmp_path / "plan", "--", sys.executable, "-m", "tests.gpu.collective")
    job = [sys.executable, "-m", "tccl_py", *map(str, words)]
    commands = [[*job, rank, len(ranks), tmp_path / "meet", 32 << 20, 2] for rank in ranks]
    of_all = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, ranks))}
    environments = [{**os.environ, **of_all, "LOCAL_RANK": str(rank)} for rank in ranks]
    codes, outputs = run_ranks(commands, environments, timeout=60)
    assert codes == [0] * len(ranks), outputs
    assert all(json.loads(out.splitlines()[-1])["right"] for out, _ in outputs)
    done, _ = tccl("verify", tmp_path / "plan", "--json", "--rounds", 6, "--sizes", "1M", *PINNED)
    assert done.returncode in (0, 1)
    verified = json.loads(done.stdout)
    assert not any(arm["wrong"] for arm in verified["arms"] if arm["name"] == plan["recommended"])
    assert left_behind()[0] == []
