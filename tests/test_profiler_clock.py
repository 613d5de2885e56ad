"""Device stamps on the host's clock, against simulated clocks whose offset is known."""

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tccl_profiler.clocks import Clock, ClockReading, offset_from_pings
from tccl_py.errors import MeasurementError

MICROSECOND, SECOND = 1_000, 1_000_000_000


def drift_ppm(clock):
    """The device's rate beyond the host's, by two stamps far apart."""
    return (10**15 / (clock.host_ns(10**15)[0] - clock.host_ns(0)[0]) - 1) * 1e6


class FakeDevice:
    """A counter with a known offset, drift and step, read by pings of random and unequal ways."""

    def __init__(self, *, offset_ns, drift_ppb, seed=0, step_ns=1, out_share=0.5, wander_ppb=0):
        self.offset_ns, self.drift_ppb, self.step_ns = offset_ns, drift_ppb, step_ns
        self.out_share, self.wander_ppb = out_share, wander_ppb
        self.random = random.Random(seed)
        self.began_ns = 10**15 + 123_456_789

    def exact(self, host_ns):
        """The count without steps; the wander turns round after 10 s."""
        since = host_ns - self.began_ns
        strayed = Fraction(since * (10 * SECOND - since), 10 * SECOND) * self.wander_ppb
        drifted = (since * self.drift_ppb + strayed) / Fraction(SECOND)
        return host_ns + self.offset_ns + drifted

    def stamp(self, host_ns):
        return int(self.exact(host_ns) // self.step_ns) * self.step_ns

    def burst(self, host_ns, pings=50, round_trip_ns=3_000):
        """Pings one after another from a time on; each tenth is held up on one of its ways."""
        t0s, ds, t1s = [], [], []
        for _ in range(pings):
            out = round(round_trip_ns * self.out_share) + self.random.randrange(300)
            back = round(round_trip_ns * (1 - self.out_share)) + self.random.randrange(300)
            if self.random.random() < 0.1:
                slow = self.random.randrange(200_000)
                out, back = self.random.choice([(out + slow, back), (out, back + slow)])
            t0s.append(host_ns)
            ds.append(self.stamp(host_ns + out))
            t1s.append(host_ns + out + back)
            host_ns += out + back + 200
        return offset_from_pings(t0s, ds, t1s, resolution_ns=self.step_ns)

    def clock(self, seconds=10, **kwargs):
        clock = Clock(device="G0")
        for second in range(seconds + 1):
            clock.add(self.burst(self.began_ns + second * SECOND, **kwargs))
        return clock


DEVICES = st.builds(
    FakeDevice,
    offset_ns=st.integers(-(10**18), 10**18),
    drift_ppb=st.integers(-200_000, 200_000),
    seed=st.integers(0, 1000),
    step_ns=st.sampled_from([1, 32, 1000, 1024]),
    out_share=st.floats(0.0, 1.0),
)


@given(DEVICES, st.integers(1, 60))
def test_the_true_offset_lies_within_the_error_of_a_reading(device, pings):
    reading = device.burst(device.began_ns, pings)
    off = device.exact(reading.at_ns) - reading.at_ns - reading.offset_ns
    assert abs(off) <= reading.error_ns


@given(DEVICES)
def test_a_reading_is_never_worse_than_half_its_shortest_round_trip(device):
    # 3.6 us at most if one ping was quick; drift over the burst and the counter's step come on top.
    assert device.burst(device.began_ns).error_ns <= 1_800 + device.step_ns + 500


def test_pings_slow_on_different_ways_together_say_more_than_each():
    # Offset 1000: one ping was slow on its way out, the other on its way back.
    slow_out, slow_back = (0, 1_090, 100), (200, 1_210, 300)
    alone = offset_from_pings(*([part] for part in slow_out))
    both = offset_from_pings(*zip(slow_out, slow_back, strict=True))
    assert (alone.error_ns, alone.offset_ns) == (51, 1_040)
    assert both.error_ns < 15
    assert abs(both.offset_ns - 1_000) <= both.error_ns


def test_a_jump_within_the_burst_leaves_the_shortest_ping():
    reading = offset_from_pings([0, 1_000], [5_010, 9_001_030], [20, 1_060])
    assert reading == ClockReading(at_ns=10, offset_ns=5_000, error_ns=11)


@settings(max_examples=40)
@given(DEVICES, st.integers(1, 12), st.lists(st.integers(-2 * SECOND, 14 * SECOND), max_size=5))
def test_the_true_time_of_a_stamp_lies_within_its_error(device, seconds, moments):
    clock = device.clock(seconds, pings=20)
    for moment in moments:
        host_ns = device.began_ns + moment
        converted_ns, error_ns = clock.host_ns(device.stamp(host_ns))
        assert abs(converted_ns - host_ns) <= error_ns + device.step_ns


@settings(max_examples=40)
@given(
    st.integers(-(10**18), 10**18),
    st.integers(-200_000, 200_000),
    st.integers(0, 1000),
    st.floats(0.35, 0.65),
    st.integers(0, 10 * SECOND),
)
def test_ten_seconds_of_pings_of_3_us_convert_to_a_microsecond(offset, drift, seed, share, moment):
    device = FakeDevice(offset_ns=offset, drift_ppb=drift, seed=seed, out_share=share)
    clock, host_ns = device.clock(), device.began_ns + moment
    converted_ns, error_ns = clock.host_ns(device.stamp(host_ns))
    assert abs(converted_ns - host_ns) < 1 * MICROSECOND
    assert error_ns < 3 * MICROSECOND
    assert drift_ppm(clock) == pytest.approx(drift / 1e3, abs=0.1)


def test_one_way_ten_times_longer_stays_within_the_error_however_many_readings():
    device = FakeDevice(offset_ns=10**18, drift_ppb=50_000, out_share=0.9)
    clock, host_ns = device.clock(30), device.began_ns + 15 * SECOND
    converted_ns, error_ns = clock.host_ns(device.stamp(host_ns))
    assert 1 * MICROSECOND < abs(converted_ns - host_ns) <= error_ns


def test_one_reading_converts_with_an_error_that_grows_with_the_drift_possible():
    device = FakeDevice(offset_ns=10**18, drift_ppb=200_000)
    clock = device.clock(0)
    assert drift_ppm(clock) == pytest.approx(0, abs=1e-6)
    for away, error_us in ((0, 3), (SECOND // 10, 60), (-SECOND, 520)):
        host_ns = device.began_ns + away
        converted_ns, error_ns = clock.host_ns(device.stamp(host_ns))
        assert abs(converted_ns - host_ns) <= error_ns < error_us * MICROSECOND


def test_a_clock_that_wanders_as_it_warms_up_stays_within_the_error():
    device = FakeDevice(offset_ns=0, drift_ppb=20_000, wander_ppb=800)
    clock = device.clock()
    for tenth in range(100):
        host_ns = device.began_ns + tenth * SECOND // 10
        converted_ns, error_ns = clock.host_ns(device.stamp(host_ns))
        assert abs(converted_ns - host_ns) <= error_ns


def test_a_clock_that_was_never_read_converts_nothing():
    with pytest.raises(MeasurementError, match=r"^G3: its clock was"):
        Clock(device="G3").host_ns(5)


@settings(max_examples=40)
@given(DEVICES, st.integers(0, 12))
def test_an_even_drift_is_no_jump(device, seconds):
    clock = device.clock(seconds, pings=20)
    assert Clock().find_jump(device.burst(device.began_ns)) is None
    assert clock.find_jump(device.burst(device.began_ns + (seconds + 3) * SECOND)) is None


@given(st.sampled_from([-(10**18), -(10**7), -15_000, 15_000, 10**7, 10**18]))
def test_a_jump_is_told_by_its_size(jump_ns):
    device = FakeDevice(offset_ns=10**17, drift_ppb=-30_000)
    clock = device.clock()
    device.offset_ns += jump_ns
    told = clock.find_jump(device.burst(device.began_ns + 11 * SECOND))
    assert told.startswith("G0: its clock jumped by ")
    jumped_us = float(told.split("by ")[1].split(" us")[0].replace(",", ""))
    assert jumped_us == pytest.approx(jump_ns / 1e3, abs=3)


def test_a_coarse_reading_does_not_spoil_fine_ones():
    device = FakeDevice(offset_ns=10**18, drift_ppb=0)
    clock = Clock()
    for second in range(3):
        clock.add(device.burst(device.began_ns + second * SECOND))
    for second in (3, 4, 5):
        coarse = device.began_ns + second * SECOND
        clock.add(ClockReading(at_ns=coarse, offset_ns=10**18 + 80_000, error_ns=100_000))
    host_ns = device.began_ns + SECOND
    converted_ns, error_ns = clock.host_ns(device.stamp(host_ns))
    assert abs(converted_ns - host_ns) <= error_ns < 5 * MICROSECOND


def test_old_readings_are_forgotten():
    clock = Clock()
    for second in range(100):
        drifted = 0 if second < 60 else (second - 60) * 100 * MICROSECOND
        clock.add(ClockReading(at_ns=second * SECOND, offset_ns=drifted, error_ns=500))
    assert drift_ppm(clock) == pytest.approx(100, abs=0.01)
