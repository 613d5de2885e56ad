"""Steps of a small GPT on real NCCL without P2P, in every arm. Needs two GPUs or more and torch."""

import os

import pytest

from tccl_py.experiments.jobs import HostRanks, Launcher
from tccl_py.experiments.spec import PARALLEL, JobSpec, training_rows
from tccl_py.experiments.target import read_target
from tccl_py.plan.load import load_plan
from tests.gpu.ranks import PINNED

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.timeout(600)]


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
