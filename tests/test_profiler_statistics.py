"""Intervals of medians, odd repeats, and when to stop."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import quantile_test

from tccl_profiler.precision import Stopping, outliers, relative_width
from tccl_py.statistics import median_interval

RATES = st.floats(0.0, 1000.0, allow_subnormal=False)
MANY = st.lists(RATES, min_size=6, max_size=40)


def two_modes(generator, size, low_share):
    """Rates in [20, 20.1] with that share, else in [24, 24.1]; the share is over a half."""
    low = generator.random(size) < low_share
    return np.where(low, 20.0, 24.0) + 0.1 * generator.random(size)


DISTRIBUTIONS = {
    "normal": (lambda g, size: g.normal(24.0, 0.2, size), 24.0),
    "skewed": (lambda g, size: 24.0 - g.exponential(1.0, size), 24.0 - math.log(2)),
    "heavy-tailed": (lambda g, size: g.standard_cauchy(size), 0.0),
    "even modes": (lambda g, size: two_modes(g, size, 0.52), 20 + 0.05 / 0.52),
    "uneven modes": (lambda g, size: two_modes(g, size, 0.7), 20 + 0.05 / 0.7),
    "quantised": (lambda g, size: np.round(g.normal(24.0, 0.2, size), 1), 24.0),
}


@pytest.mark.parametrize("repeats", [6, 7, 9, 12, 20, 30])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_interval_holds_the_median_as_often_as_it_says(name, repeats):
    draw, median = DISTRIBUTIONS[name]
    samples = draw(np.random.default_rng(repeats), (5000, repeats)).tolist()
    intervals = [median_interval(row) for row in samples]
    assert np.mean([found.low <= median <= found.high for found in intervals]) >= 0.94


@pytest.mark.parametrize(("limit", "stated"), [(30, 0.92), (10, 0.94)])
def test_stopping_at_a_narrow_interval_leaves_the_coverage_that_the_method_states(limit, stated):
    draws = {
        "normal": (lambda g, size: g.normal(0.0, 1.0, size), 0.0),
        "skewed": (lambda g, size: -g.exponential(1.0, size), -math.log(2)),
        "heavy-tailed": (lambda g, size: g.standard_t(3, size), 0.0),
    }
    rule, covered = Stopping(limit=limit), []
    for draw, median in draws.values():
        for deviation in (0.005, 0.01, 0.02):
            rows = 1 + deviation * draw(np.random.default_rng(0), (2000, limit))
            found = []
            for row in rows.tolist():
                count = rule.minimum
                while not rule.enough([row[:count]]):
                    count = min(count + 4, limit)
                found.append(median_interval(row[:count]))
            truth = 1 + deviation * median
            covered.append(np.mean([one.low <= truth <= one.high for one in found]))
    assert min(covered) == pytest.approx(stated, abs=0.01)


@given(MANY)
def test_the_interval_lies_around_the_median_and_within_the_samples(samples):
    found = median_interval(samples)
    assert min(samples) <= found.low <= np.median(samples) * (1 + 1e-12)
    assert max(samples) >= found.high >= np.median(samples) * (1 - 1e-12)


@given(MANY, st.randoms())
def test_the_order_of_repeats_does_not_matter(samples, shuffler):
    shuffled = list(samples)
    shuffler.shuffle(shuffled)
    assert median_interval(shuffled) == median_interval(samples)


@given(st.lists(RATES, min_size=6, max_size=40, unique=True))
def test_the_interval_is_at_most_a_rank_narrower_than_the_one_scipy_gives(samples):
    found, ordered = median_interval(samples), sorted(samples)
    theirs = quantile_test(samples, p=0.5).confidence_interval(0.95)
    assert theirs.low <= found.low <= ordered[ordered.index(theirs.low) + 1]
    assert theirs.high >= found.high >= ordered[ordered.index(theirs.high) - 1]


def test_the_width_shrinks_with_every_sample_and_not_in_steps():
    spread = [relative_width(np.linspace(23, 25, n)) for n in range(6, 41)]
    assert all(after < before for before, after in itertools.pairwise(spread))


def test_a_gap_between_modes_is_not_interpolated_across():
    assert median_interval([20.0, 24.0, 24.1, 24.2, 24.3, 24.4]).low == 20.0


@pytest.mark.parametrize("samples", [[], [24.0], [24.0] * 5])
def test_fewer_than_six_samples_say_nothing_about_the_median(samples):
    assert relative_width(samples) == math.inf


def test_fewer_than_six_values_lie_between_their_ends():
    found = median_interval([3.0, 1.0, 2.0])
    assert (found.middle, found.low, found.high) == (2.0, 1.0, 3.0)


def test_a_flow_that_moved_nothing_has_no_rate_that_could_be_known():
    assert relative_width([0.0] * 6) == math.inf
    assert relative_width([9.0, 9.0, 9.0, 11.0, 11.0, 11.0]) == pytest.approx(0.2)
    assert relative_width([1.0]) == math.inf


def test_one_slow_repeat_is_flagged_and_normal_noise_is_not():
    assert outliers([24.0, 24.1, 23.9, 24.0, 12.0, 24.05]) == (4,)
    assert outliers([24.0, 24.1, 23.9, 24.2, 23.8, 24.05]) == ()


def test_equal_samples_off_by_one_step_of_the_timer_are_not_flagged():
    assert outliers([24.0] * 9 + [24.1]) == ()
    assert outliers([24.0] * 9 + [24.3]) == (9,)
    assert outliers([0.0] * 5 + [3.0]) == (5,)
    assert outliers([]) == ()


@given(st.lists(RATES, max_size=40), st.floats(0.01, 100))
def test_outliers_are_few_and_depend_on_no_unit(samples, unit):
    flagged = outliers(samples)
    assert len(flagged) <= len(samples) // 2
    median = np.median(samples) if samples else 0.0
    # A score exactly at the limit may round either way.
    distances = np.abs(np.array(samples) - median)
    spread = max(np.median(distances), 0.001 * median) if samples else 0.0
    assume(not np.any(np.isclose(0.6745 * distances, 3.5 * spread, rtol=1e-6) & (distances > 0)))
    assume(not samples or spread > 1e-9 or np.all(distances == 0))
    assert outliers([unit * sample for sample in samples]) == flagged


def steady(repeats, centre=24.0):
    return [centre + 0.01 * (i % 3) for i in range(repeats)]


def test_a_quiet_set_stops_at_the_minimum():
    rule = Stopping()
    assert not rule.enough([steady(5), steady(5)])
    assert rule.enough([steady(6), steady(6)])
    assert rule.is_reached([steady(6), steady(6)])


def test_one_noisy_flow_keeps_the_set_going_until_the_limit():
    noisy = [20.0, 28.0] * 15
    assert not Stopping().enough([steady(29), noisy[:29]])
    assert Stopping().enough([steady(30), noisy])
    assert not Stopping().is_reached([steady(30), noisy])


def test_a_set_in_which_a_flow_moved_nothing_does_not_settle():
    assert not Stopping().is_reached([steady(6), [0.0] * 6])
    assert not Stopping().is_reached([steady(6), [0.0] * 3 + [5.0] * 3])


def test_a_minimum_below_six_waits_for_an_interval_all_the_same():
    assert not Stopping(minimum=2).enough([steady(5)])
    assert Stopping(minimum=2, limit=5).enough([steady(5)])
    assert not Stopping(minimum=2, limit=5).is_reached([steady(5)])


@given(st.lists(RATES, max_size=40), st.floats(0.001, 0.5))
def test_no_set_stops_before_the_minimum_or_goes_on_beyond_the_limit(samples, target):
    rule = Stopping(target=target)
    assert not (rule.enough([samples]) and len(samples) < rule.minimum)
    assert rule.enough([samples]) or len(samples) < rule.limit
    assert rule.enough([samples]) or not rule.is_reached([samples])
