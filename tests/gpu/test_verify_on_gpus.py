"""`tccl verify` on real NCCL: right values, the plan's rings, and a winner that makes sense.

Needs two GPUs or more and torch with NCCL. NCCL_NVLS_ENABLE is taken from the environment as it is.
"""

import json
import os
import shutil
import time

import pytest

from tccl_py.experiments.jobs import HostRanks, Launcher
from tccl_py.experiments.means_table import MeansTable
from tccl_py.experiments.record import Verification
from tccl_py.experiments.spec import COLLECTIVES, JobSpec, groups_of, rows_of, training_rows
from tccl_py.experiments.target import read_target
from tccl_py.plan.load import load_plan
from tests.gpu.ranks import PINNED, REAL
from tests.gpu.test_nccl_loads_plans import tccl
from tests.verified import rings_in_log

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.timeout(600)]


BRIEF = ("--seconds", "60") if REAL else ("--sizes", "1M,16M", "--seconds", "15", *PINNED)
OPTIONS = ("--rounds", "6", *BRIEF)


def test_one_job_is_right_runs_the_plans_rings_and_trains(measured):
    plan = load_plan(measured)
    ranks = tuple(range(len(plan.gpus)))
    host = HostRanks(ranks=ranks, gpus=plan.gpus, environment=dict(os.environ))
    launcher = Launcher(backend="cuda", hosts=(host,), keep=PINNED[1:])
    arm = read_target(plan, measured).arm("graph")
    begun = time.monotonic()
    steps = training_rows(len(ranks), "cuda")
    (found,) = launcher.run([arm], JobSpec(checks=True, rows=steps))
    seconds = time.monotonic() - begun
    for answer in found.results:
        assert (answer.wrong, answer.left_out) == ((), ())
        assert answer.checked > 500
        # A graph file fails communicators over fewer GPUs.
        modes = {"ddp", *(f"tp{parts}" for parts in (2, 4) if parts == len(plan.gpus))}
        trained = {times.row.mode for times in answer.times if times.trained}
        assert trained == {f"{m}-{how}" for m in modes for how in ("eager", "graph")}
        print(answer.times)
    rings = rings_in_log(plan, {}, found.log, launcher.variables(arm))
    assert rings.differences == ()
    assert {link.via.split("/")[0] for link in rings.links} <= {"P2P", "SHM", "NET"}
    print("one job with checks and training:", f"{seconds:.1f} s")


def test_every_collective_is_right_and_timed_in_groups_that_overlap(measured):
    gpus = load_plan(measured).gpus
    ranks = tuple(range(len(gpus)))
    host = HostRanks(ranks=ranks, gpus=gpus, environment=dict(os.environ))
    launcher = Launcher(backend="cuda", hosts=(host,), keep=PINNED[1:])
    arm = read_target(load_plan(measured), measured).arm("default")
    # Tensor and data parallel groups, and a pair in the other order.
    groups = [*groups_of(len(gpus)), (ranks[::2], ranks[1::2]), ((1, 0),)]
    groups = tuple(parts for parts in groups if all(len(part) > 1 for part in parts))
    rows = rows_of((1024, 1 << 20), COLLECTIVES, "bfloat16", groups=groups)
    spec = JobSpec(checks=True, check_groups=groups, rows=rows, seconds=0.01)
    (found,) = launcher.run([arm], spec)
    for rank, answer in enumerate(found.results):
        assert (answer.wrong, answer.left_out) == ((), ())
        inside = [any(rank in part for part in row.groups) for row in rows]
        assert [bool(times.seconds) for times in answer.times] == inside
        print(rank, answer.checked, [min(times.seconds, default=0.0) for times in answer.times])


def verified(planned, *words):
    """What the command finds and keeps of a plan, printed size by size."""
    done = tccl("verify", planned, "--json", *words)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    for arm in found["arms"]:
        assert (arm["wrong"], arm["failure"]) == ([], "")
        assert (arm["rings"] or {"same": True})["same"], arm["rings"]
    kept = Verification.load(planned)
    assert kept.versions["nccl"]
    # The plan has the winner now, where its own choice may not be used.
    assert found["accepted"] == (done.returncode == 0)
    assert "--choice" in words or kept.accepted
    for arm in kept.arms:
        for one in arm.rows:
            c = one.compared
            numbers = f"{one.gbps:.2f} {c.ratio:.4f} {c.low:.4f} {c.high:.4f}"
            print(arm.name, one.bytes, one.groups, numbers, one.verdict)
        print(arm.name, arm.achieved_gbps, "predicted", arm.predicted_gbps, kept.objections(arm))
    print(kept.winner, "wins;", kept.rounds, "rounds took", kept.seconds, "s")
    return kept


def test_the_graph_file_is_nowhere_slower_than_default_nccl_and_faster_at_large_sizes(
    measured_for_jobs, tmp_path
):
    place = shutil.copytree(measured_for_jobs, tmp_path / "plan")
    found = verified(place, "--choice", "graph", *OPTIONS)
    assert found.at_once == 3
    graph = found.arm("graph")
    if REAL:
        assert found.accepted
        assert all(one.compared.ratio > 1.0 for one in graph.sizes if one.bytes >= 64 << 20)


def test_without_p2p_variables_are_much_faster_than_default_nccl(without_p2p, tmp_path):
    place = shutil.copytree(without_p2p, tmp_path / "plan")  # verification may rewrite it
    found = verified(place, *OPTIONS)
    assert all(one.environment["NCCL_P2P_DISABLE"] == "1" for one in found.arms)
    variables = found.arm("variables")
    if variables is not None and groups_of(len(found.gpus)):
        assert variables.groups
    if REAL:
        assert variables.large.low > 1.2
        slow = any("send/recv" in text for text in found.objections(variables))
        assert slow == (found.winner != "variables")


@pytest.mark.gpu(count=2)
def test_means_give_right_values_or_say_why_they_cannot_run(measured):
    done = tccl("verify", measured, "--means", "--seconds", "1", "--sizes", "4K,1M", "--json")
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    print(done.stdout)
    assert {"nccl", "host-copies"} <= set().union(*(row["us"] for row in table["rows"]))
    assert not [why for why in table["out"].values() if not why.startswith("cannot run")]
    kept = MeansTable.load(measured)
    assert kept.versions["nccl"] and len(kept.rows) == 9
