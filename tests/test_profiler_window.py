"""How long a window is, and that no set goes back and forth."""

import math

from hypothesis import given
from hypothesis import strategies as st

from tccl_profiler.precision import (
    LONGER,
    ChannelRate,
    Window,
    WindowLimits,
    choose_window,
    needs_longer,
)

LIMITS = WindowLimits()
LANES = st.builds(
    ChannelRate,
    slice_bytes=st.integers(1, 1 << 24),
    gbps=st.just(0.0) | st.floats(1e-6, 1000.0),
    fifo_slices=st.integers(1, 64),
)
SETS = st.lists(LANES, min_size=1, max_size=6)
START_ERRORS_US = st.floats(0.0, 1e4)


def lane(slice_us, fifo_slices=8):
    """A lane of 1 GB/s, which is 1000 bytes a microsecond."""
    return ChannelRate(slice_bytes=slice_us * 1000, gbps=1.0, fifo_slices=fifo_slices)


def test_quick_lanes_get_the_minimum():
    window = choose_window(channels=[lane(5), lane(10)], start_error_us=2.0)
    assert window == Window(warm_us=300.0, window_us=2000.0)


def test_the_slowest_lane_ends_ten_slices_after_the_first_in_the_window():
    window = choose_window(channels=[lane(5), lane(1000)], start_error_us=2.0)
    assert window == Window(warm_us=8002.0, window_us=11000.0)


def test_a_start_error_is_a_hundredth_of_the_window():
    assert choose_window(channels=[lane(5)], start_error_us=60.0).window_us == 6000.0


def test_a_lane_that_did_not_move_gets_the_maximum():
    resting = ChannelRate(slice_bytes=1 << 20, gbps=0.0, fifo_slices=8)
    window = choose_window(channels=[lane(5), resting], start_error_us=2.0)
    assert window == Window(warm_us=25000.0, window_us=50000.0)
    assert not needs_longer(window, channels=[resting], start_error_us=2.0)


@given(SETS, START_ERRORS_US)
def test_a_window_holds_what_was_asked_or_is_the_maximum(lanes, start_error_us):
    window = choose_window(channels=lanes, start_error_us=start_error_us)
    longest_slice_us = max(one.slice_us for one in lanes)
    round_us = max(one.slice_us * one.fifo_slices for one in lanes)
    assert LIMITS.minimum_ms * 1e3 <= window.window_us <= LIMITS.maximum_ms * 1e3
    assert LIMITS.warm_minimum_ms * 1e3 <= window.warm_us <= LIMITS.maximum_ms * 1e3 / 2
    if window.window_us < 50_000 and window.warm_us < 25_000:
        assert window.window_us // longest_slice_us > LIMITS.slices - 1e-9
        assert start_error_us <= LIMITS.start_error_share * window.window_us * (1 + 1e-9)
        assert window.warm_us >= round_us
        assert all(one.gbps > 0 for one in lanes)


@given(SETS, LANES, START_ERRORS_US)
def test_one_more_lane_never_shortens_a_window(lanes, more, start_error_us):
    fewer = choose_window(channels=lanes, start_error_us=start_error_us)
    window = choose_window(channels=[*lanes, more], start_error_us=start_error_us)
    assert window.window_us >= fewer.window_us
    assert window.warm_us >= fewer.warm_us


@given(SETS, START_ERRORS_US)
def test_a_window_is_long_enough_for_what_it_was_chosen_for(lanes, start_error_us):
    window = choose_window(channels=lanes, start_error_us=start_error_us)
    assert not needs_longer(window, channels=lanes, start_error_us=start_error_us)


@given(SETS, START_ERRORS_US, st.floats(1.0, LONGER - 0.01))
def test_lanes_slower_by_less_than_a_quarter_ask_for_nothing(lanes, start_error_us, slower):
    window = choose_window(channels=lanes, start_error_us=start_error_us)
    seen = [
        ChannelRate(
            slice_bytes=one.slice_bytes, gbps=one.gbps / slower, fifo_slices=one.fifo_slices
        )
        for one in lanes
    ]
    assert not needs_longer(window, channels=seen, start_error_us=start_error_us)


def test_a_lane_found_slower_asks_for_a_longer_window():
    window = choose_window(channels=[lane(500)], start_error_us=2.0)
    assert needs_longer(window, channels=[lane(700)], start_error_us=2.0)
    assert not needs_longer(window, channels=[lane(600)], start_error_us=2.0)


def test_a_longer_fifo_round_asks_for_a_longer_warm_up():
    window = choose_window(channels=[lane(100)], start_error_us=2.0)
    assert needs_longer(window, channels=[lane(100, fifo_slices=64)], start_error_us=2.0)


@given(st.lists(st.tuples(SETS, START_ERRORS_US), min_size=1, max_size=60))
def test_a_set_whose_lanes_do_as_they_like_is_chosen_for_a_few_times_only(repeats):
    window = choose_window(channels=repeats[0][0], start_error_us=repeats[0][1])
    choices = 0
    for lanes, start_error_us in repeats:
        if needs_longer(window, channels=lanes, start_error_us=start_error_us):
            before, choices = window, choices + 1
            window = choose_window(channels=lanes, start_error_us=start_error_us, at_least=before)
            assert window.window_us >= before.window_us
            assert window.warm_us >= before.warm_us
            assert not needs_longer(window, channels=lanes, start_error_us=start_error_us)
    growths = math.log(50 / 2, LONGER) + math.log(25 / 0.3, LONGER)
    assert choices <= growths


def test_a_set_whose_lanes_take_turns_in_being_slow_does_not_alternate():
    long_slices, long_fifo = [lane(1000, fifo_slices=1)], [lane(10, fifo_slices=500)]
    window = choose_window(channels=long_slices, start_error_us=0.0)
    window = choose_window(channels=long_fifo, start_error_us=0.0, at_least=window)
    assert not needs_longer(window, channels=long_slices, start_error_us=0.0)
    assert not needs_longer(window, channels=long_fifo, start_error_us=0.0)
