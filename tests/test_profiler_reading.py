"""From records to rates, and how the profiler goes about it, with a pool that has no processes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tccl_profiler.compiler import program_for
from tccl_profiler.messages import Pace
from tccl_profiler.pool import RunResult, RunSpec
from tccl_profiler.precision import ChannelRate, Stopping, WindowLimits, paces_for
from tccl_profiler.profiler import Options, Profiler
from tccl_profiler.protocol import WorkerLost
from tccl_profiler.rates import median_channels, sample_of
from tccl_profiler.shared_memory import MAX_STAMPS, RECORD
from tccl_py.errors import BrokenLinkError, BudgetSpentError, MeasurementError
from tccl_py.model.measurement import TOGETHER
from tccl_py.model.transfer import parse_set
from tests.fakes import FakePool

BOUNCE = "G0->G0->C0->G1->G1{blocks=2,fifo=256K}"
DIRECT = "G0->G0->G1{blocks=1,fifo=256K}"
COPIES = "G0->D0->C0->D1->G1{blocks=1,fifo=256K}"
SLICE = 64 * 1024
MS = 1_000_000
TIMING = RunSpec(repeats=1, warm_us=1000.0, window_us=10_000.0)
SAME_CLOCK = {"G0": lambda stamp: (stamp, 100), "G1": lambda stamp: (stamp, 300)}


TCP = "tcp"


def program_of(text):
    return program_for(parse_set(text), lanes={"G0": 64, "G1": 64})


def record(side="", *, start=5 * MS, first=0, last=0, count=0, **more):
    row = np.zeros(1, RECORD)
    row["start"], row["end"] = start, last
    if side:
        row[f"{side}_first"], row[f"{side}_last"], row[f"{side}_count"] = first, last, count
    for name, value in more.items():
        row[name] = value
    return row


def outcome(records, stamps=None):
    return RunResult(
        records={i: np.concatenate(rows) for i, rows in records.items()}, stamps=stamps or {}
    )


def bounceoutcome(**more):
    """Two blocks: one moves 100 slices in 8 ms, the other 50 in 4 ms."""
    sending = [
        record("out", first=6 * MS, last=14 * MS, count=101),
        record("out", start=5 * MS + 4000, first=7 * MS, last=15 * MS, count=51),
    ]
    receiving = [
        record("in", start=5 * MS + 9000, first=6 * MS, last=14 * MS, count=100, **more),
        record("in", start=5 * MS + 2000, first=7 * MS, last=11 * MS, count=50),
    ]
    return outcome({"G0": sending, "G1": receiving})


def test_a_flows_rate_is_what_arrives_between_two_ends_of_slices():
    reading = sample_of(program_of(BOUNCE), bounceoutcome(), TIMING, SAME_CLOCK)
    each = 100 * SLICE / (8 * MS)
    assert reading.gbps == pytest.approx((2 * each,))
    assert [lane.gbps for lane in reading.channels] == pytest.approx([each, each])
    assert {(lane.slice_bytes, lane.fifo_slices) for lane in reading.channels} == {(SLICE, 4)}
    assert reading.wrong == (0,)
    assert not reading.ended_early


def test_packs_that_arrived_wrong_are_told_by_flow():
    program = program_of(f"{DIRECT} {BOUNCE}")
    found = outcome(
        {
            "G0": [record("out", errors=9), record("out"), record("out")],
            "G1": [record("in", errors=3), record("in"), record("in", errors=4)],
        }
    )
    reading = sample_of(program, found, TIMING, SAME_CLOCK)
    # The set's flows are in the order of their text; only who reads compares.
    assert [str(flow) for flow in program.transfers.flows] == [BOUNCE, DIRECT]
    assert reading.wrong == (3, 4)


@pytest.mark.parametrize("count", [0, 1])
def test_a_lane_that_moved_nothing_in_its_window_has_rate_0(count):
    silent = [record("out"), record("out")]
    # One slice that ended in the window is no duration.
    rows = [record("in", first=7 * MS, last=7 * MS, count=count), record("in")]
    found = outcome({"G0": silent, "G1": rows})
    reading = sample_of(program_of(BOUNCE), found, TIMING, SAME_CLOCK)
    assert reading.gbps == (0.0,)
    assert [lane.gbps for lane in reading.channels] == [0.0, 0.0]
    assert reading.overlap == 0.0


def test_skew_and_overlap_are_on_the_hosts_clock():
    ahead = {"G0": lambda stamp: (stamp - 1000, 100), "G1": lambda stamp: (stamp + 2000, 300)}
    for to_host, shift_us in ((SAME_CLOCK, 0.0), (ahead, 3.0)):
        reading = sample_of(program_of(BOUNCE), bounceoutcome(), TIMING, to_host)
        # G0 starts at 5 ms and ends at 15 ms; G1 starts at 2 and 9 us after and ends at 14 ms.
        assert reading.skew_us == pytest.approx(9.0 + shift_us)
        assert reading.skew_error_us == pytest.approx(0.6)
        together = 14e3 - 5e3 - 9.0
        assert reading.overlap == pytest.approx(together / 10e3, rel=1e-3)


def test_one_device_needs_no_other_clock():
    found = outcome({"G0": [record("out", first=6 * MS, last=14 * MS, count=100)]})
    reading = sample_of(program_of("G0->G0->C0{blocks=1}"), found, TIMING, SAME_CLOCK)
    assert (reading.skew_us, reading.skew_error_us, reading.overlap) == (0.0, 0.0, 1.0)
    assert reading.gbps == pytest.approx((100 * 256 * 1024 / (8 * MS),))


def copied(sent, received, *, timing=TIMING, slices=2):
    pace = {
        name: (Pace(groups=len(rows) - 1, slices=slices),)
        for name, rows in (("G0", sent), ("G1", received))
    }
    timing = RunSpec(repeats=1, warm_us=timing.warm_us, window_us=timing.window_us, paces=pace)
    stamps = {
        "G0": (np.array(sent, np.uint64) + np.uint64(5 * MS),),
        "G1": (np.array(received, np.uint64) + np.uint64(5 * MS),),
    }
    nobody = {i: np.zeros(0, RECORD) for i in ("G0", "G1")}
    found = RunResult(records=nobody, stamps=stamps)
    return sample_of(program_of(COPIES), found, timing, SAME_CLOCK)


EVEN = [0, *(MS // 2 * i for i in range(1, 25))]


def test_a_copys_rate_is_of_groups_that_ended_in_the_window():
    # Twice as fast in the warm-up and after the window, which is from 1 to 11 ms.
    received = [0, MS // 4, MS // 2, *range(MS, 11 * MS + 1, MS // 2), 11 * MS + 9, 11 * MS + 10]
    reading = copied(EVEN, received)
    assert reading.gbps == pytest.approx((2 * SLICE / (MS // 2),))
    (lane,) = reading.channels
    # Stamped by groups of two slices: that is how coarse it is; its FIFO holds two such groups.
    assert (lane.slice_bytes, lane.fifo_slices) == (2 * SLICE, 2)
    assert not reading.ended_early
    assert reading.overlap == pytest.approx(1.0)


def test_a_copy_that_was_let_go_after_its_window_moved_nothing():
    reading = copied(EVEN, [0, 40 * MS, 40 * MS + 5, 40 * MS + 9])
    assert reading.gbps == (0.0,)


def test_a_copy_that_had_nothing_left_to_move_is_told_of():
    assert copied(EVEN[:-4], EVEN).ended_early
    assert copied(EVEN, EVEN[:-4]).ended_early
    assert not copied(EVEN, EVEN).ended_early


# Paces.


def lane(gbps, slice_bytes=SLICE):
    return ChannelRate(slice_bytes=slice_bytes, gbps=gbps, fifo_slices=4)


def lasting_us(pace, gbps):
    return pace.groups * pace.slices * SLICE / (gbps * 1e3)


def test_kernels_have_no_pace():
    assert paces_for(program_of(BOUNCE), None, 1e4) == {}
    assert paces_for(program_of(BOUNCE), [lane(1.0)] * 2, 1e4) == {}


@pytest.mark.parametrize("lanes", [None, [lane(0.0)]])
def test_a_copy_of_unknown_rate_goes_through_its_fifo_twice_and_more(lanes):
    expected = (Pace(groups=14),)
    assert paces_for(program_of(COPIES), lanes, 1e4) == {"G0": expected, "G1": expected}


@pytest.mark.parametrize("gbps", [0.05, 1.0, 5.0, 12.5, 25.0])
@pytest.mark.parametrize("window_us", [1e3, 1e4, 7.5e4])
def test_a_copy_lasts_a_little_longer_than_its_window(gbps, window_us):
    (pace,) = paces_for(program_of(COPIES), [lane(gbps)], window_us)["G0"]
    if (pace.groups, pace.slices) == (120, 200):
        return  # as much as is ever queued
    assert 1.1 * window_us <= lasting_us(pace, gbps)
    # A group more, at most two, each of which is half a millisecond or one slice.
    spare_us = 3 * max(501.0, 1.1 * window_us / 118, SLICE / (gbps * 1e3)) + SLICE / gbps / 1e3
    assert lasting_us(pace, gbps) <= 1.1 * window_us + spare_us + 3 * SLICE / gbps / 1e3
    assert pace.groups + 2 <= 122


def test_a_pace_is_of_slices_however_they_were_counted():
    """Rates of copies are read by groups; the next pace must not take a group for a slice."""
    first = paces_for(program_of(COPIES), [lane(5.0)], 1e4)
    again = paces_for(program_of(COPIES), [lane(5.0, first["G0"][0].slices * SLICE)], 1e4)
    assert first == again
    assert first["G0"][0].slices > 1


def test_both_ends_move_as_much_in_the_order_of_copies():
    program = program_of(f"{COPIES} G0->D0->C0->G1->G1{{blocks=1,fifo=64K}}")
    paces = paces_for(program, [lane(1.0), lane(4.0)], 1e4)
    assert (len(paces["G0"]), len(paces["G1"])) == (2, 1)
    assert paces["G0"][0] == paces["G1"][0]
    assert paces["G0"][0] != paces["G0"][1]


def test_many_copies_fit_the_stamps_of_a_device():
    program = program_of("G0->D0->C0->D1->G1{blocks=16,fifo=1M,slots=1024}")
    for lanes in (None, [lane(0.01)] * 16, [lane(10.0)] * 16):
        for found in paces_for(program, lanes, 7.5e4).values():
            assert len(found) == 16
            assert sum(pace.groups + 2 for pace in found) <= MAX_STAMPS


def test_lanes_are_known_by_their_median():
    timing = RunSpec(repeats=3, warm_us=1000.0, window_us=10_000.0)
    pool = FakePool(lambda text, number: [(2.0, 9.0, 4.0)[number]])
    program = program_of(DIRECT)
    readings = [sample_of(program, one, timing, SAME_CLOCK) for one in pool.run(program, timing)]
    (found,) = median_channels(readings)
    assert found.gbps == pytest.approx(4.0)


# The profiler over a pool without processes.


def profiler_of(pool, **more):
    options = Options(**more)
    return Profiler(pool, options=options, clock=pool.clock)


def one(profiler, text=DIRECT):
    (measurement,) = profiler.measure([parse_set(text)])
    return measurement


def steady(text, number):
    return [20.0] * len(parse_set(text))


def swinging(text, number):
    return [20.0 * (1.0 + 0.05 * (-1) ** number)] * len(parse_set(text))


def noisy(share):
    random = np.random.default_rng(1)
    return lambda text, number: [20.0 * (1 + share * random.standard_normal())]


def test_a_steady_set_is_measured_six_times():
    pool = FakePool(steady, skew_us=3.0)
    measurement = one(profiler_of(pool))
    assert measurement.gbps == pytest.approx((20.0,), rel=1e-5)
    assert len(measurement.samples_gbps[0]) == 6
    assert (measurement.settled, measurement.outliers) == (True, ())
    assert measurement.window_us == 2000.0
    assert measurement.skew_us == pytest.approx(3.0, abs=2.1)
    assert 0 < measurement.skew_error_us < 50
    assert measurement.overlap > 0.9
    # A trial, and six repeats at once.
    assert [timing.repeats for timing in pool.timings] == [1, 6]
    assert len(pool.checked) == 1


def test_repeats_go_on_until_the_interval_is_narrow():
    counts = {}
    for share in (0.001, 0.008, 0.012):
        measurement = one(profiler_of(FakePool(noisy(share))))
        assert measurement.settled
        counts[share] = len(measurement.samples_gbps[0])
    assert counts[0.001] == 6
    assert 6 < counts[0.012] <= 30


def test_a_set_that_does_not_settle_ends_at_the_limit():
    measurement = one(profiler_of(FakePool(swinging)))
    assert len(measurement.samples_gbps[0]) == 30
    assert not measurement.settled


@pytest.mark.parametrize(("minimum", "limit"), [(6, 7), (6, 8), (1, 1), (20, 23), (13, 13)])
def test_the_limit_is_never_exceeded(minimum, limit):
    pool = FakePool(swinging)
    stopping = Stopping(minimum=minimum, limit=limit)
    assert len(one(profiler_of(pool, stopping=stopping)).samples_gbps[0]) == limit
    assert all(timing.repeats <= 12 for timing in pool.timings)


class TimedPool(FakePool):
    """Notes when its last run ended."""

    def run(self, program, timing):
        outcomes = super().run(program, timing)
        self.ended = self.clock()
        return outcomes


def test_no_run_begins_that_would_end_after_the_deadline():
    pool = TimedPool(swinging)
    profiler = profiler_of(pool, limits=WindowLimits(minimum_ms=50.0, maximum_ms=60.0))
    repeats, counts = len(one(profiler).samples_gbps[0]), []
    for left_s in (0.01, 0.5, 1.0, 2.0, 3.0, 30.0):
        profiler.deadline = pool.clock() + left_s
        try:
            counts.append(len(one(profiler).samples_gbps[0]))
        except BudgetSpentError:
            counts.append(0)
        assert pool.ended <= profiler.deadline
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, repeats)
    assert any(6 <= count < repeats for count in counts)


def test_workers_are_not_started_anew_after_the_deadline():
    pool = FakePool(steady)
    profiler = profiler_of(pool)
    one(profiler)
    pool.faults, profiler.deadline = [WorkerLost("gone")], pool.clock() - 1.0
    with pytest.raises(BudgetSpentError):
        one(profiler)
    assert pool.restarts == 0


def test_a_set_has_its_time_and_always_its_minimum():
    measurement = one(profiler_of(FakePool(swinging, run_s=0.2), stopping=Stopping(seconds=2.0)))
    assert len(measurement.samples_gbps[0]) == 10
    assert not measurement.settled
    measurement = one(profiler_of(FakePool(swinging, run_s=10.0), stopping=Stopping(seconds=2.0)))
    assert len(measurement.samples_gbps[0]) == 6
    measurement = one(profiler_of(FakePool(steady, run_s=10.0), stopping=Stopping(seconds=2.0)))
    assert measurement.settled


def test_a_longer_window_begins_the_set_anew():
    def slower_later(text, number):
        return [20.0 if number < 3 else 0.2]

    pool = FakePool(slower_later)
    measurement = one(profiler_of(pool))
    assert measurement.samples_gbps[0] == pytest.approx((0.2,) * 6, rel=1e-4)
    # 64 KiB at 0.2 GB/s are 0.33 ms: eleven of them are 3.6 ms.
    assert measurement.window_us == pytest.approx(11 * SLICE / 200, rel=1e-2)
    windows = [timing.window_us for timing in pool.timings]
    assert windows == sorted(windows)


def failure_of(profiler, text=DIRECT):
    with pytest.raises(MeasurementError) as caught:
        one(profiler, text)
    return str(caught.value)


@pytest.mark.parametrize("maximum_ms", [1, 5, 50])
def test_a_set_that_does_not_move_fails_by_name_at_the_longest_window(maximum_ms):
    pool = FakePool(lambda text, number: [0.0])
    limits = WindowLimits(minimum_ms=1, maximum_ms=maximum_ms)
    assert ": 6 of 6" in failure_of(profiler_of(pool, limits=limits))
    # After three trials.
    windows = [timing.window_us for timing in pool.timings[3:]]
    assert windows == sorted(windows)
    assert len(windows) < 9


def test_flows_that_never_run_together_fail_by_name():
    pool = FakePool(steady, skew_us=632_000.0)
    failure = failure_of(profiler_of(pool), f"{DIRECT} {BOUNCE}")
    assert failure.startswith(f"{BOUNCE} {DIRECT}: 6 of 6 repeats of 400 ms")
    assert "its flows ran together" in failure
    # The next set is measured.
    pool.skew_us = 0.0
    assert one(profiler_of(pool)).settled


def test_flows_that_start_apart_are_measured_in_longer_windows():
    pool = FakePool(steady, skew_us=9_000.0)
    measurement = one(profiler_of(pool))
    assert measurement.settled
    assert measurement.window_us == 200_000.0
    assert measurement.overlap > 0.9


def test_a_window_in_which_a_flow_stood_still_is_made_longer():
    def still_at_first(text, number):
        return [0.0 if number in (3, 9) else 20.0]

    pool = FakePool(still_at_first)
    measurement = one(profiler_of(pool))
    assert measurement.samples_gbps[0] == pytest.approx((20.0,) * 6, rel=1e-4)
    assert [timing.window_us for timing in pool.timings[1:]] == [2000.0, 8000.0, 32_000.0]
    assert measurement.window_us == 32_000.0


def test_at_the_longest_window_only_repeats_that_are_measurements_count():
    def still_at_times(text, number):
        return [0.0 if number % 3 == 0 else 20.0]

    measurement = one(profiler_of(FakePool(still_at_times)))
    assert measurement.samples_gbps[0] == pytest.approx((20.0,) * 6, rel=1e-4)
    assert measurement.window_us == 400_000.0


@pytest.mark.parametrize(("apart", "window_us", "repeats"), [(2, 2000.0, 8), (4, 8000.0, 12)])
def test_only_where_most_repeats_ran_apart_is_the_window_made_longer(apart, window_us, repeats):
    def apart_at_first(text, number):
        # The trial is repeat 0.
        pool.skew_us = 1000.0 if 1 <= number <= apart else 0.0
        return [20.0]

    pool = FakePool(apart_at_first)
    limits = WindowLimits(start_error_share=1.0, warm_minimum_ms=2.0)
    measurement = one(profiler_of(pool, limits=limits))
    assert measurement.samples_gbps[0] == pytest.approx((20.0,) * 6, rel=1e-4)
    assert (measurement.window_us, measurement.overlap > 0.9) == (window_us, True)
    assert pool.repeats == 1 + repeats


@given(
    still=st.lists(st.booleans(), min_size=1, max_size=9),
    skew_us=st.floats(0.0, 1e6),
    limit=st.integers(6, 12),
)
@settings(max_examples=50)
def test_a_set_fails_or_all_its_repeats_are_measurements(still, skew_us, limit):
    rates = lambda text, number: [0.0 if still[number % len(still)] else 20.0]  # noqa: E731
    profiler = profiler_of(FakePool(rates, skew_us=skew_us), stopping=Stopping(limit=limit))
    try:
        measurement = one(profiler)
    except MeasurementError as error:
        assert str(error).startswith(f"{DIRECT}: ")
    else:
        assert min(measurement.samples_gbps[0]) > 0
        assert measurement.overlap >= TOGETHER
        assert 6 <= len(measurement.samples_gbps[0]) <= limit


MIXED = "G0->D0->G1 G0->G0->C0{blocks=1}"


class LateStamps(FakePool):
    """Stamps of copies that wait for kernels, in the second half of their window."""

    def outcome(self, program, timing):
        found = super().outcome(program, timing)
        for rows in found.stamps.values():
            for row in rows:
                row[len(row) // 2 :] = row[-1] + np.uint64(timing.window_us * 1e3)
        return found


@pytest.mark.parametrize("kind", [FakePool, LateStamps])
def test_the_overlap_of_copies_beside_kernels_of_their_gpu_is_a_bound(kind):
    measurement = one(profiler_of(kind(steady), stopping=Stopping(limit=6)), MIXED)
    assert min(map(min, measurement.samples_gbps)) > 0
    assert measurement.overlap_at_least is (kind is LateStamps)
    assert (measurement.overlap < TOGETHER) is (kind is LateStamps)


def test_copies_beside_kernels_that_move_nothing_fail_all_the_same():
    assert "nothing arrived by G0->D0->G1" in failure_of(
        profiler_of(FakePool(lambda text, number: [0.0, 20.0])), MIXED
    )


def test_windows_that_keep_growing_end():
    """A set that is slower each time it is looked at."""
    pool = FakePool(lambda text, number: [20.0 * 0.93**number], skew_us=10.0)
    measurement = one(profiler_of(pool, stopping=Stopping(seconds=1e6)))
    assert len(pool.timings) < 40
    assert measurement.window_us <= 50_000


def test_a_set_asked_for_again_begins_with_its_window():
    pool = FakePool(steady)
    profiler = profiler_of(pool)
    one(profiler)
    one(profiler)
    assert [timing.repeats for timing in pool.timings] == [1, 6, 6]
    assert len(pool.checked) == 1


def test_outliers_are_flagged_and_kept():
    rates = [20.0, 20.01, 20.0, 19.99, 12.0, 20.0, 20.01]
    pool = FakePool(lambda text, number: [rates[number]])
    measurement = one(profiler_of(pool, stopping=Stopping(minimum=6, limit=6)))
    assert measurement.samples_gbps[0] == pytest.approx(rates[1:], rel=1e-4)
    assert measurement.outliers == (3,)


def test_a_lost_worker_costs_a_restart_and_a_notice():
    pool = FakePool(steady)
    pool.faults = [None, None, WorkerLost("G1 did not answer")]
    profiler = profiler_of(pool)
    assert len(one(profiler).samples_gbps[0]) == 6
    assert pool.restarts == 1
    (notice,) = profiler.notices
    assert notice.startswith("G1 did not answer")
    assert notice.endswith(f"{DIRECT} measured again")
    # Clocks of new workers are new.
    assert pool.pings == 2


def test_a_worker_lost_twice_is_an_error_and_the_next_set_is_measured():
    pool = FakePool(steady)
    pool.faults = [WorkerLost("G1 is gone"), WorkerLost("G0 is gone")]
    profiler = profiler_of(pool)
    with pytest.raises(MeasurementError) as caught:
        one(profiler)
    assert ": G1 is gone" in str(caught.value)
    assert pool.restarts == 1
    assert one(profiler).settled


def test_a_refused_set_costs_no_restart():
    pool = FakePool(steady)
    pool.faults = [MeasurementError("G0 cannot reach G1")]
    profiler = profiler_of(pool)
    with pytest.raises(MeasurementError, match=r"^G0 cannot reach G1$"):
        one(profiler)
    assert (pool.restarts, profiler.notices) == (0, [])


def test_a_clock_that_jumps_is_noted_and_read_anew():
    pool = FakePool(steady)
    profiler = profiler_of(pool)
    one(profiler)
    pool.now_ns += 1000 * MS
    pool.offsets_ns["G1"] += 50 * MS
    measurement = one(profiler)
    (notice,) = profiler.notices
    assert notice.startswith("G1: its clock jumped by +")
    assert measurement.skew_us < 100
    pool.now_ns += 1000 * MS
    one(profiler)
    assert profiler.notices == [notice]


def test_a_flow_that_damages_data_is_named():
    pool = FakePool(steady)
    pool.wrong_packs = 7
    with pytest.raises(BrokenLinkError) as caught:
        one(profiler_of(pool))
    assert caught.value.flows == (DIRECT,)
    assert caught.value.verdict == "wrong values"
    assert "damages data: 7 packs of 16 bytes" in str(caught.value)
    assert not pool.timings
    # What bounces off host memory says nothing of a link between GPUs.
    with pytest.raises(MeasurementError) as caught:
        profiler_of(pool).measure([parse_set(BOUNCE)])
    assert not isinstance(caught.value, BrokenLinkError)


@pytest.mark.parametrize(("check", "checks"), [(False, 2), (True, 4)])
def test_flows_are_checked_once_or_always(check, checks):
    pool = FakePool(steady)
    profiler = profiler_of(pool, check=check)
    # The last set has no flow that is new.
    for text in (DIRECT, DIRECT, f"{BOUNCE} {DIRECT}", BOUNCE):
        one(profiler, text)
    assert len(pool.checked) == checks


def test_copies_are_paced_by_what_they_did():
    pool = FakePool(lambda text, number: [5.0])
    measurement = one(profiler_of(pool), COPIES)
    assert measurement.gbps == pytest.approx((5.0,), rel=1e-3)
    trial, *rest = pool.timings
    assert trial.warm_us == 0
    assert trial.paces["G0"] == (Pace(groups=14),)
    # Their stamps ask for a longer window than their slices did.
    assert [timing.repeats for timing in rest] == [6, 6]
    assert measurement.window_us == pytest.approx(11 * 500, rel=0.1)
    assert lasting_us(rest[-1].paces["G1"][0], 5.0) >= 1.1 * measurement.window_us


def test_repeats_whose_copies_ended_early_are_discarded_but_not_for_ever():
    def quicker(text, number):
        return [1.0 if number < 1 else 5.0]

    pool = FakePool(quicker)
    measurement = one(profiler_of(pool), COPIES)
    assert len(measurement.samples_gbps[0]) == 6
    assert lasting_us(pool.timings[-1].paces["G0"][0], 5.0) >= 1.1 * measurement.window_us
    assert len(pool.timings) == 4
    pool = FakePool(lambda text, number: [2.0 ** (number // 6)])
    assert len(one(profiler_of(pool, stopping=Stopping(limit=6)), COPIES).samples_gbps[0]) == 6
    assert len(pool.timings) <= 6


def test_exercise_runs_a_set_and_measures_nothing():
    pool = FakePool(steady)
    profiler = profiler_of(pool)
    profiler.exercise(parse_set(BOUNCE))
    assert [timing.window_us for timing in pool.timings] == [20_000.0]
    assert (profiler.sets_run, pool.checked) == (0, [])


def test_answers_are_in_the_order_given_and_a_set_listed_twice_is_measured_twice():
    pool = FakePool(lambda text, number: [20.0 + number] * len(parse_set(text)))
    sets = [parse_set(text) for text in (BOUNCE, DIRECT, BOUNCE, COPIES)]
    answers = profiler_of(pool, stopping=Stopping(limit=6)).measure(sets)
    assert [answer.transfers for answer in answers] == sets
    assert answers[0].gbps != answers[2].gbps


# Flows over the network.


def network_reading(*lanes):
    text = f"h0.C0->h0.N0->h1.N0->h1.N0->h1.C0{{blocks={len(lanes)},fifo=256K}}"
    program = program_for(parse_set(text), lanes={"h0.N0": 64, "h1.N0": 64}, network=TCP)
    sending = [record("in", last=14 * MS) for _ in lanes]
    rows = {"h0.N0": sending, "h1.N0": [record("out", **lane) for lane in lanes]}
    same_clock = {device: lambda stamp: (stamp, 100) for device in rows}
    return sample_of(program, outcome(rows), TIMING, same_clock)


def test_a_steady_flow_over_the_network_is_rated_as_others_are():
    reading = network_reading({"first": 6 * MS, "last": 15 * MS + MS // 2, "count": 9, "errors": 2})
    assert reading.gbps == pytest.approx((9 * SLICE / (9.5 * MS),))
    assert reading.wrong == (2,)


def test_lanes_that_take_turns_or_come_in_bursts_seem_no_quicker_than_they_are():
    # The window is 10 ms long; each is quick while it moves, and both together move 200 slices.
    turns = [
        {"first": 6 * MS, "last": 10 * MS, "count": 99},
        {"first": 10 * MS, "last": 14 * MS, "count": 99},
    ]
    reading = network_reading(*turns)
    assert reading.gbps == pytest.approx((200 * SLICE / (10 * MS),), rel=0.02)
    burst = network_reading({"first": 9 * MS, "last": 9 * MS + 10, "count": 9})
    assert burst.gbps == pytest.approx((11 * SLICE / (10 * MS),))
