"""The pool and the profiler over the host backend: real processes, real copies."""

import contextlib
import os
import statistics
import time

import numpy as np
import pytest

from tccl_profiler import session as session_module
from tccl_profiler.compiler import program_for
from tccl_profiler.linux import host_fingerprint, host_machine
from tccl_profiler.messages import DeviceSpec, Pace
from tccl_profiler.pool import Execution, Memory, Pool, RunSpec
from tccl_profiler.precision import Stopping
from tccl_profiler.profiler import Profiler
from tccl_profiler.protocol import WorkerLost
from tccl_profiler.rates import sample_of
from tccl_profiler.session import Session
from tccl_profiler.watch import GpuConditions
from tccl_py.errors import MeasurementError
from tccl_py.model.machine import Fingerprint
from tccl_py.model.measurement import faults
from tccl_py.model.transfer import parse_set
from tccl_py.sources.opening import open_source
from tccl_py.sources.profiled import measured_machine
from tests.processes import alive, children
from tests.profiler_pools import (
    BOUNCE,
    REPEATS,
    SMALL,
    SOON,
    moving,
    options,
    pool_of,
    shared_mappings,
    workers_of,
)
from tests.skips import needs_idle_cores, unless_busy

pytestmark = pytest.mark.timeout(120)

BOTH_WAYS = "G0->G0->C0->G1->G1{blocks=2,fifo=128K} G1->G1->C0->G0->G0{blocks=2,fifo=128K}"
MEMORY = Memory(arena_bytes=80 << 20, user_bytes=4 << 20)
DIRECT = "G0->G0->G1{blocks=1,fifo=256K}"


@pytest.fixture(scope="module")
def pool():
    """One pool for all tests that leave it as it was."""
    with pool_of(memory=MEMORY) as made:
        pids = set(made.pids)
        yield made
        assert made.pids == pids, "some test had the workers started anew"


@pytest.fixture
def profiler(pool):
    few = Stopping(minimum=2, limit=2)
    return Profiler(pool, options=options(stopping=few), source="host backend")


def one(profiler, text):
    (measurement,) = profiler.measure(text)
    return measurement


@pytest.mark.parametrize(
    "text",
    [
        str(BOUNCE),
        BOTH_WAYS,
        DIRECT,
        "G0->G1->G1{blocks=2,fifo=256K}",
        "G0->G0->C0{blocks=1}",
        "C0->G1->G1{blocks=1} G0->G0->C0{blocks=1}",
        "G0->G0->G1",
        "G0->D0->C0->D1->G1{blocks=1,fifo=256K}",
        "G0->D0->C0->G1->G1{blocks=1,fifo=256K}",
        "G0->G0->C0->D1->G1{blocks=1,fifo=256K}",
        "G0->D0->C0->D1->G1{blocks=1,fifo=256K} G1->G1->C0->G0->G0{blocks=1,fifo=256K}",
    ],
)
def test_every_kind_of_flow_has_a_rate(pool, text):
    measurement = moving(pool, text)
    assert list(faults(measurement)) == []
    assert str(measurement.transfers) == str(parse_set(text))
    assert {len(row) for row in measurement.samples_gbps} == {REPEATS}
    assert 0 <= measurement.overlap <= 1
    assert measurement.skew_us >= 0
    assert measurement.skew_error_us >= 0
    assert 1000 <= measurement.window_us <= 500_000
    assert not measurement.simulated
    assert measurement.source == "host backend"


def test_workers_are_started_once_and_measure_many_sets(pool, profiler):
    before, workers = set(pool.pids), workers_of()
    assert len(before) == 2
    assert before <= set(workers)
    sets = [parse_set(f"G0->G0->C0->G1->G1{{blocks=1,fifo={i}K}}") for i in range(64, 72)]
    answers = profiler.measure(sets)
    assert [one.transfers for one in answers] == sets
    assert profiler.sets_run == 8
    assert profiler.notices == []
    assert (pool.pids, workers_of()) == (before, workers)


def test_flows_of_a_set_run_together(pool):
    needs_idle_cores()
    with unless_busy():
        assert statistics.median(moving(pool, BOTH_WAYS).overlap for _ in range(9)) > 0.5


def test_flows_that_meet_pass_on_or_are_independent(pool):
    for meeting in ("pass-on", "independent"):
        assert moving(pool, BOTH_WAYS, meeting=meeting).overlap > 0


def test_repeats_of_one_run_each_have_counters_records_and_stamps(pool):
    program = program_for(parse_set(BOTH_WAYS), lanes=pool.lanes)
    timing = RunSpec(repeats=12, warm_us=300.0, window_us=3000.0, check=True)
    outcomes = pool.run(program, timing)
    assert len(outcomes) == 12
    starts = [outcome.records["G0"]["start"].min() for outcome in outcomes]
    assert starts == sorted(starts)
    assert all((rows["errors"] == 0).all() for one in outcomes for rows in one.records.values())
    to_host = {device: lambda stamp: (int(stamp), 0) for device in pool.lanes}
    for outcome in outcomes:
        assert not any(sample_of(program, outcome, timing, to_host).wrong)


REFUSED = {
    "G0->G0->C7->G1->G1{blocks=1}": r"^C7 is no NUMA node of this machine; there are C0",
    "G0->G0->G1{blocks=64}": r"^G1 would hold 256 MiB of FIFOs and buffers, its arena has 80 ",
    "G1->G1->G0 G1->G1->G0": r"^G0 would hold 128 MiB .* 80 MiB: name blocks, fewer of them, or",
    "G0->G0->G5{blocks=1}": r"G5 is not measured here; there are G0, G1$",
    "G0->N0->N0{blocks=1}": r"N0 is not measured here; there are G0, G1$",
    "G0->G0->C0{blocks=64} G0->G0->C0{blocks=2}": r"^G0 would run 66 blocks at once, it can run 64",
    "G0->D0->C0": r"^G0: slices of 67108864 bytes do not fit the 4194304 bytes that it sends",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_set_that_cannot_be_measured_is_refused_and_the_next_one_is_measured(
    pool, profiler, text
):
    before = set(pool.pids)
    with pytest.raises(MeasurementError, match=REFUSED[text]):
        one(profiler, text)
    assert moving(pool, str(BOUNCE))
    assert pool.pids == before
    assert profiler.notices == []


def test_a_copy_that_its_lane_has_left_holds_a_repeat_up_for_no_second_window(pool):
    program = program_for(parse_set("G0->D0->C0->G1->G1{blocks=1,fifo=64K}"), lanes=pool.lanes)
    paces = {"G0": (Pace(groups=120, slices=200),)}
    window_s = 0.4

    def lasting():
        begun = time.monotonic()
        pool.run(program, RunSpec(repeats=1, warm_us=0.0, window_us=window_s * 1e6, paces=paces))
        return time.monotonic() - begun

    # The copies of the rest, 375 MiB, take a while too.
    needs_idle_cores()
    with unless_busy():
        assert window_s < lasting() < 2 * window_s


def test_a_pool_is_started_once(pool):
    assert pool.lanes == {"G0": 64, "G1": 64}
    with pytest.raises(MeasurementError, match=r"^the pool has been"):
        pool.start()


def test_workers_that_were_prepared_are_those_that_measure():
    pool = pool_of(memory=MEMORY)
    pool.prepare()
    pids = set(pool.pids)
    with pool:
        assert moving(pool, str(BOUNCE))
    assert pool.pids == pids and len(pids) == 2


def test_of_workers_that_were_prepared_for_nothing_none_stays():
    others = shared_mappings()
    before = set(children(os.getpid()))
    with open_source(measured_machine("host", 2)) as source:
        source.prepare()
        pids = set(children(os.getpid())) - before
        assert len(pids) == 2
    assert not any(map(alive, pids))
    assert shared_mappings() == others


def test_host_memory_is_kept_and_grows_for_a_set_that_needs_more():
    others = shared_mappings()
    with pool_of() as pool:
        profiler = Profiler(pool, options=options())
        pids = set(pool.pids)
        sizes = []
        for blocks in (1, 4, 24, 2):
            text = f"G0->G0->C0->G1->G1{{blocks={blocks}}}"
            assert str(one(profiler, text).transfers) == text
            # The control segment and C0; arenas are mapped by workers only.
            own = [line for line in shared_mappings() if line not in others]
            (ends,) = [line.split()[0] for line in own if "tccl-C0" in line]
            begin, end = (int(address, 16) for address in ends.split("-"))
            sizes.append((end - begin) >> 20)
            assert len(own) == 2
        assert sizes == [64, 64, 128, 128]
        assert moving(pool, str(BOUNCE))
        assert pool.pids == pids


def test_a_copy_engine_moves_what_no_fifo_bounds():
    with pool_of(memory=Memory(arena_bytes=80 << 20, user_bytes=64 << 20)) as pool:
        assert list(faults(moving(pool, "G0->D0->C0"))) == []


def test_a_closed_pool_says_so():
    pool, program = pool_of(), program_for(BOUNCE, lanes={"G0": 64, "G1": 64})
    with pytest.raises(MeasurementError, match=r"^the pool is closed"):
        pool.run(program, RunSpec(repeats=1, warm_us=0.0, window_us=1e3))


@pytest.mark.parametrize("devices", [0, 65])
def test_so_many_devices_are_refused(devices):
    with pytest.raises(MeasurementError, match=rf"^{devices} devices: 1 to 64 can be measured$"):
        Pool("host", [DeviceSpec(device="G0", bus_id="", cpus=(0,))] * devices, {})


# Sessions.


def session_of(devices=2, **more):
    machine = host_machine(devices)
    more = {"memory": SMALL, "options": options(), "backend": "host", **more}
    return Session(machine, host_fingerprint(machine), **more)


def test_a_session_measures_and_leaves_nothing():
    before = workers_of()
    with session_of() as session:
        assert len(workers_of()) == len(before) + 2
        assert str(one(session.profiler, str(BOUNCE)).transfers) == str(BOUNCE)
        session.profiler.exercise(BOUNCE)
        session.look()
        assert (session.conditions, session.notices) == ("", [])
        assert session.notices is session.profiler.notices
    assert workers_of() == before


def test_a_session_ends_when_its_block_fails():
    before = workers_of()
    with pytest.raises(ZeroDivisionError), session_of():
        raise ZeroDivisionError
    assert workers_of() == before


def watched_by(watch, monkeypatch):
    """Have sessions on GPUs, which alone are watched, run over the host backend."""
    monkeypatch.setattr(session_module, "watching", lambda gpus, own_pids: watch)
    monkeypatch.setattr(
        session_module, "Pool", lambda backend, *given, **more: Pool("host", *given, **more)
    )


class BrokenWatch:
    """A driver that has stopped answering."""

    exits, broken = 0, False

    def __enter__(self):
        return self.look

    def look(self):
        if self.broken:
            raise MeasurementError("GPU 0: does not answer")
        return (GpuConditions(gpu=0),)

    def __exit__(self, *exception):
        self.exits += 1


@pytest.mark.parametrize(
    ("error", "seen"), [(None, MeasurementError), (KeyboardInterrupt, KeyboardInterrupt)]
)
def test_a_session_whose_watch_fails_ends_the_watch_and_the_workers(error, seen, monkeypatch):
    before, watch = workers_of(), BrokenWatch()
    watched_by(watch, monkeypatch)
    with pytest.raises(seen), session_of(backend="cuda") as session:
        watch.broken = True
        if error:
            raise error
    assert (workers_of(), watch.exits) == (before, 1)
    session.look()


@pytest.mark.parametrize("ends_at", [1980, 210])
def test_what_idle_gpus_do_is_no_change_and_what_they_do_under_load_is(ends_at, monkeypatch):
    clocks = [210, 1980, 210, ends_at]  # idle, under load, and both again at the end

    def look():
        return (GpuConditions(gpu=0, sm_mhz=clocks.pop(0)),)

    watched_by(contextlib.nullcontext(look), monkeypatch)
    with session_of(backend="cuda") as session:
        pass
    fell = [note for note in session.notices if "SM clock fell" in note]
    assert (len(fell), clocks) == (int(ends_at == 210), [])


def test_some_devices_are_measured_and_named_alone_in_a_journal():
    with session_of(3, gpus=(2, 0, 2)) as session:
        assert set(session.pool.lanes) == {"G0", "G2"}
        assert moving(session.pool, "G0->G0->C0->G2->G2{blocks=1,fifo=256K}")
        with pytest.raises(MeasurementError, match=r"G1 is not measured"):
            one(session.profiler, str(BOUNCE))


def test_a_journal_is_of_the_whole_machine_whichever_devices_are_measured():
    machine = host_machine(4, cpus=[0])
    print_ = Fingerprint(gpu_uuids=tuple("abcd"), driver="d", numa_count=1, kernel="k")
    header = Session(machine, print_, backend="host", gpus=(3, 1), options=options()).header
    assert (header.machine, header.simulated) == ("host-4", False)
    assert "GPUs a, b, c, d" in header.identity
    assert Session(machine, print_, backend="host", options=options()).header == header


def test_blocks_that_do_not_start_are_counted(monkeypatch):
    """As where another program has some of a GPU's multiprocessors."""
    records = Execution._records

    def half(execution, repeat):
        views = records(execution, repeat)
        return views | {"G1": np.concatenate((views["G1"][:1], np.zeros_like(views["G1"][1:])))}

    with pool_of(timeouts=SOON) as pool:
        program = program_for(parse_set("G0->G0->C0->G1->G1{blocks=2}"), lanes=pool.lanes)
        monkeypatch.setattr(Execution, "_records", half)
        with pytest.raises(WorkerLost, match=r"^G1 \([01] of 2\) did not start all blocks"):
            pool.run(program, RunSpec(repeats=1, warm_us=0.0, window_us=1e3))
