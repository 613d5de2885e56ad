"""The profiler on real GPUs: every kind of transfer, its faults, and a plan by measuring.

How good it is (prediction, repeatability, speed) is `scripts/judge-profiler`'s to say.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tccl_profiler import rates as rates_module
from tccl_profiler.pool import Memory
from tccl_profiler.precision import Stopping
from tccl_profiler.profiler import Options
from tccl_profiler.rates import median_channels, sample_of
from tccl_profiler.session import Session
from tccl_profiler.watch import watching
from tccl_py.errors import MeasurementError
from tccl_py.model.transfer import parse_set
from tccl_py.plan.load import load_plan
from tccl_py.readers.live import discover_machine
from tests.gpu.ranks import BRIEF, REAL, REPOSITORY

pytestmark = [
    pytest.mark.gpu(count=2),
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("sharing"),
]
QUICK = Options(stopping=Stopping(limit=6), check=True)


def tccl(*words):
    command = [sys.executable, "-m", "tccl_py.cli.main", *map(str, words)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def workers():
    """Process ids of this host's workers; on virtual GPUs those of the same run of virtual GPUs."""
    run = os.environ.get("VGPU_WORK")
    mark = f"VGPU_WORK={run}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"tccl_profiler.worker" in words and (run is None or mark in variables):
            found.append(int(folder.name))
    return found


def used_mib():
    """Memory in use on the fullest GPU."""
    found = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    )
    return max(int(line) for line in found.stdout.split())


def eventually(condition, seconds=15.0):
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture(scope="module")
def here():
    return discover_machine()


# Before the session opens: one GPU is behind all virtual ones, and has queues for one pool.


def test_tccl_plan_measures_and_a_second_run_measures_nothing_again(measured, tmp_path):
    folder = tmp_path / "plan"
    shutil.copytree(measured, folder)
    plan = load_plan(folder)
    assert not plan.simulated
    assert plan.rate_gbps >= plan.choices["default"].rate_gbps
    print(
        f"plan: {plan.sets_measured} sets, {plan.rate_gbps:.1f} GB/s, default "
        f"{plan.choices['default'].rate_gbps:.1f}, {plan.settings}"
    )
    again = tccl("plan", folder, "--force", "--json", *BRIEF)
    assert again.returncode == 0, again.stderr
    print(again.stderr, made := json.loads(again.stdout), flush=True)
    # A plan that was cut short has sets to measure yet.
    assert made["sets_measured"] <= (plan.sets_measured if plan.cut_short else 0)


def test_too_little_gpu_memory_is_said_by_name_and_nothing_is_left(here):
    machine, _, fingerprint = here
    memory = Memory(arena_bytes=1 << 42)
    already = len(workers())
    with (
        pytest.raises(MeasurementError, match=r"^GPU \d has no \d+ MiB for the arena: \d+ of"),
        Session(machine, fingerprint, memory=memory),
    ):
        pass
    assert eventually(lambda: len(workers()) == already)


CHILD = """
from tccl_profiler.rates import median_channels, sample_of
from tccl_profiler.session import Session
from tccl_py.readers.live import discover_machine
from tccl_py.model.transfer import parse_set
machine, _, fingerprint = discover_machine()
with Session(machine, fingerprint) as session:
    while True:
        session.profiler.measure([parse_set("G0->G0->C0->G1->G1{blocks=8}")])
        print("measured", flush=True)
"""


def measuring_child():
    """Return a process that measures.

    Virtual GPUs are not available for a moment after a process on them was killed.
    """
    for _ in range(1 if REAL else 5):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
        )
        if child.stdout.readline() == "measured\n":
            return child
        child.wait(30)
    pytest.fail("no process could measure")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_the_parent_is_killed(here, how):
    already, memory = len(workers()), used_mib()
    shared = set(Path("/dev/shm").iterdir())
    child = measuring_child()
    assert len(workers()) == already + len(here[0].gpus)
    child.send_signal(how)
    child.wait(30)
    assert eventually(lambda: len(workers()) == already)
    assert eventually(lambda: used_mib() <= memory + 16)
    assert set(Path("/dev/shm").iterdir()) == shared


@pytest.fixture(scope="module")
def session(here):
    machine, _, fingerprint = here
    with Session(machine, fingerprint, options=QUICK) as opened:
        yield opened


@pytest.mark.parametrize(
    "text",
    [
        "G0->G0->G1",
        "G0->G1->G1",
        "G0->D0->G1",
        "G0->D1->G1",
        "G0->G0->C0",
        "C0->G0->G0",
        "G0->D0->C0",
        "C0->D0->G0",
        "G0->G0->G1{blocks=8}",
        "G0->G1->G1{blocks=8,fifo=1M}",
        "G0->G0->C0->G1->G1",
        "G0->G0->C0->G1->G1{blocks=2,fifo=128K,slots=4}",
        "G0->D0->C0->D1->G1",
        "G0->G0->C0->D1->G1{blocks=2}",
        "G0->D0->C0->G1->G1{blocks=2}",
        "G0->G0->C0->G1->G1{blocks=8,fifo=512K} G1->G1->C0->G0->G0{blocks=8,fifo=512K}",
        "G0->G0->G1{blocks=8} G1->G1->C0->G0->G0{blocks=8}",
        "G0->G0->C0 C0->G1->G1",
    ],
)
def test_every_kind_of_transfer_is_measured_and_its_data_are_right(session, text):
    (found,) = session.profiler.measure([parse_set(text)])
    print(
        f"{text}: {[round(rate, 1) for rate in found.gbps]} GB/s, skew {found.skew_us:.1f} us, "
        f"overlap {found.overlap:.3f}"
    )
    assert not found.simulated
    assert len(found.samples_gbps[0]) >= 6
    if REAL:
        assert all(0.5 < rate < 2000 for rate in found.gbps)
        assert found.skew_us < 50
        assert found.overlap > 0.5


@pytest.mark.gpu(count=2, real=True)
def test_more_lanes_both_ways_predict_more_and_never_their_sum(session, monkeypatch):
    """Lanes share NVLink unequally; the slow ones go on faster when the others are done."""
    profiler, found, samples = session.profiler, {}, []

    def recorded(*arguments, **more):
        samples.append(sample_of(*arguments, **more))
        return samples[-1]

    monkeypatch.setattr(rates_module, "sample_of", recorded)
    for lanes in (16, 24, 32):
        ring = parse_set(f"G0->G0->G1{{blocks={lanes}}} G1->G1->G0{{blocks={lanes}}}")
        samples.clear()
        (measurement,) = profiler.measure([ring])
        seen = median_channels([one for one in samples if len(one.channels) == 2 * lanes][-4:])
        rates = [sorted(lane.gbps for lane in side) for side in (seen[:lanes], seen[lanes:])]
        found[lanes] = measurement.rate_gbps
        print(
            f"{lanes} lanes: {[round(rate, 1) for rate in measurement.gbps]} GB/s, lanes "
            f"{[(round(one[0], 1), round(one[-1], 1), round(sum(one), 1)) for one in rates]}"
        )
        # Those of one way and of the other: medians of the last repeats, not the same ones.
        for gbps, one in zip(measurement.gbps, rates, strict=True):
            assert lanes * one[0] * 0.95 < gbps < sum(one) * 1.01
        assert measurement.rate_gbps < max(sum(one) for one in rates)
    # The same direct set differs by some percent from time to time.
    assert found[16] < found[32]
    assert found[16] * 0.95 < found[24] < found[32] * 1.05
    assert not any("with few lanes" in notice for notice in session.notices)


def test_a_lost_worker_is_replaced_and_the_set_measured_again(session):
    before = set(session.pool.pids)
    victim = session.pool.workers.processes["G0"].process.pid
    os.kill(victim, signal.SIGKILL)
    (found,) = session.profiler.measure([parse_set("G0->G0->C0->G1->G1{blocks=4}")])
    assert found.rate_gbps > 0
    assert any("SIGKILL" in notice for notice in session.notices), session.notices
    assert victim not in workers()
    assert len(workers()) == len(session.machine.gpus)
    assert set(session.pool.pids) > before


def test_the_watch_finds_nothing_wrong_with_our_own_workers(session):
    # Other tests may have left a CUDA context in this process.
    with watching(session.machine.gpu_indices, {*session.pool.pids, os.getpid()}) as look:
        for one in look():
            assert not one.other_processes


def test_tccl_measure_prints_what_it_measured():
    answer = tccl("measure", "G0->G0->G1 G1->G1->G0", "G0->G0->C0->G1->G1{blocks=4}", "--json")
    assert answer.returncode == 0, answer.stderr
    for entry in json.loads(answer.stdout):
        assert entry["simulated"] is False
        assert entry["total_gbps"] == pytest.approx(sum(entry["gbps"]))
