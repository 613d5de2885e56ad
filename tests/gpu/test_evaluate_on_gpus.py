"""`tccl evaluate` on real NCCL without P2P: every collective by size, and the steps of a GPT.

Needs two GPUs or more and torch with NCCL; takes about four minutes.
"""

import csv
import json
import os
import shutil
import subprocess
import sys

import pytest

from tccl_py.experiments.collectives import PROGRAMS
from tccl_py.experiments.jobs import HostRanks, Launcher
from tccl_py.experiments.spec import PARALLEL, JobSpec, training_rows
from tccl_py.experiments.target import read_target
from tccl_py.plan.load import load_plan
from tests.gpu.ranks import PINNED, REAL, REPOSITORY

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.timeout(600)]
BY_RING = ("all_reduce", "all_gather", "reduce_scatter")
"""They gain from many channels with small FIFOs. Broadcast and reduce are as fast by default, and
transfers between pairs are slower: on two H200 0.75 times default NCCL."""
SIZES = "64K,16M,256M" if REAL else "64K,16M"
OFF = {"NCCL_P2P_DISABLE": "1"}


def tccl(*words):
    command = [sys.executable, "-m", "tccl_py.cli.main", *map(str, words)]
    return subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, **OFF}, stdout=subprocess.PIPE, text=True,
        check=False,
    )  # fmt: skip


def test_every_collective_has_a_ratio_at_every_size_and_no_value_is_wrong(without_p2p, tmp_path):
    rows = tmp_path / "rows.csv"
    brief = ("--sizes", SIZES, "--seconds", "75" if REAL else "20", *PINNED)
    done = tccl("evaluate", without_p2p, *brief, "--csv", rows, "--json")
    assert done.returncode == 0, done.stdout
    found = json.loads(done.stdout)
    print(json.dumps(found["arms"], indent=1), found["seconds"], "s")
    cells = list(csv.DictReader(rows.open()))
    arms = {cell["arm"] for cell in cells}
    assert len(cells) == len(PROGRAMS) * len(SIZES.split(",")) * len(arms)
    for cell in cells:
        if cell["arm"] != "default":
            print(*(cell[name] for name in ("arm", "collective", "bytes", "us", "gbps", "ratio")))
    if not REAL:
        return
    large = {
        cell["collective"]: cell
        for cell in found["cells"]
        if cell["bytes"] == 256 << 20 and cell["arm"] == "variables"
    }
    for collective in BY_RING:
        assert large[collective]["ratio"] > 1.05 and large[collective]["low"] > 1.0, collective
    # Where send/recv is slower, verification says so, and recommends something else.
    place = shutil.copytree(without_p2p, tmp_path / "plan")  # verification may rewrite it
    done = tccl("verify", place, "--sizes", "64M,256M", "--no-checks", "--seconds", "60", "--json")
    answer = json.loads(done.stdout)
    print(done.returncode, answer["winner"], [one["transfers"] for one in answer["arms"]])
    (variables,) = (one for one in answer["arms"] if one["name"] == "variables")
    slow = large["send_recv"]["high"] < 0.97
    assert any("send/recv" in text for text in variables["objections"]) == slow
    assert not (slow and answer["winner"] == "variables")
    assert load_plan(place).recommended == answer["winner"]


def test_a_gpt_learns_the_same_in_every_arm_eagerly_and_as_a_cuda_graph(without_p2p):
    plan = load_plan(without_p2p)
    target = read_target(plan, without_p2p)
    ranks = tuple(range(len(plan.gpus)))
    host = HostRanks(ranks=ranks, gpus=plan.gpus, environment=dict(os.environ))
    launcher = Launcher(backend="cuda", hosts=(host,), keep=PINNED[1:])
    steps = training_rows(len(ranks), "cuda")
    jobs = launcher.run(target.arms, JobSpec(rows=steps))
    for arm, job in zip(target.arms, jobs, strict=True):
        world = len(ranks)
        # A graph file fails communicators over fewer GPUs.
        parts = (1, world) if arm.graphs else range(1, world + 1)
        modes = [
            f"{name}-{how}"
            for name, part in PARALLEL.items()
            if part in parts and world % part == 0
            for how in ("eager", "graph")
        ]
        for rank, result in enumerate(job.results):
            times_of = {times.row.mode: times for times in result.times if times.trained}
            assert list(times_of) == modes
            for default in jobs[0].results[rank].times:
                mode, expected = default.row.mode, default.trained
                if mode not in times_of:
                    continue
                seconds = sorted(times_of[mode].seconds)
                print(arm.name, rank, mode, f"{seconds[len(seconds) // 2] * 1e3:.2f} ms", expected)
                found = times_of[mode].trained
                print(
                    "  relative differences",
                    [a / b - 1 for a, b in zip(found, expected, strict=True)],
                )
                # After a few steps only rounding differs, which more steps would amplify.
                assert found == pytest.approx(expected, rel=1e-3)
