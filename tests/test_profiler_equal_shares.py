"""The rate of a flow whose bytes lanes get in equal parts, against lanes that move bit by bit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tccl_profiler.equal_shares import equal_shares_gbps

RATES = st.lists(st.floats(0.5, 40.0), min_size=1, max_size=12)


def moved_bit_by_bit(rates, step=2e-5):
    """Lanes in small steps of time: what all had together goes to those not done."""
    fastest, total = max(rates), sum(rates)
    left, now = [1.0] * len(rates), 0.0
    while any(one > 0 for one in left):
        working = [i for i, one in enumerate(left) if one > 0]
        together, speeds = min(total, fastest * len(working)), {}
        # Those whose part would be beyond the fastest have that, and the others the rest.
        open_ = set(working)
        while True:
            rest = together - fastest * (len(working) - len(open_))
            scale = rest / sum(rates[i] for i in open_) if open_ else 0.0
            over = {i for i in open_ if rates[i] * scale > fastest * (1 + 1e-9)}
            if not over:
                break
            open_ -= over
        speeds = {i: rates[i] * scale if i in open_ else fastest for i in working}
        for i in working:
            left[i] -= speeds[i] * step
        now += step
    return len(rates) / now


@pytest.mark.parametrize(
    "rates", [[1.0, 3.0], [2.0, 2.0, 5.0], [0.5, 4.0, 4.0, 4.0], [7.0, 8.0, 9.0, 16.0, 16.0]]
)
def test_it_is_what_lanes_moved_bit_by_bit_come_to(rates):
    assert equal_shares_gbps(np.array(rates)) == pytest.approx(moved_bit_by_bit(rates), rel=2e-3)


@given(RATES)
def test_it_is_between_the_slowest_lane_everywhere_and_the_sum(rates):
    found = equal_shares_gbps(np.array(rates))
    assert len(rates) * min(rates) <= found * (1 + 1e-9)
    assert found <= sum(rates) * (1 + 1e-9)


@given(RATES, st.floats(0.1, 10.0), st.randoms(use_true_random=False))
def test_neither_unit_nor_order_of_lanes_matters(rates, unit, order):
    found = equal_shares_gbps(np.array(rates))
    mixed = list(rates)
    order.shuffle(mixed)
    assert equal_shares_gbps(np.array(mixed) * unit) == pytest.approx(found * unit, rel=1e-9)


@given(st.floats(0.5, 40.0), st.integers(1, 12))
def test_equal_lanes_are_their_sum(rate, count):
    assert equal_shares_gbps(np.full(count, rate)) == pytest.approx(rate * count)


def test_lanes_between_two_h200_predict_what_nccl_had():
    # 24 lanes as measured there, sum 357; NCCL's all-reduce of 512 MiB over 24 channels: 312.
    slow = [10.43, 10.44, 10.47, 10.51, 10.58, 11.04, 11.83, 12.25, 12.31, 14.74]
    more = [16.67, 16.68, 16.69, 16.69, 16.7, 16.76, 16.82, 16.9, 16.98, 17.1]
    rates = np.array([*slow, *more, 18.53, 18.63, 18.78, 18.81])
    assert equal_shares_gbps(rates) == pytest.approx(312, rel=0.02)


def test_a_lane_that_moved_nothing_leaves_the_sum():
    assert equal_shares_gbps(np.array([0.0, 4.0, 4.0])) == 8.0
