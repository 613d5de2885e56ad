"""The decision between choices: harm in a row, a step's communication, and trade-offs."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tccl_py.decision import best_for, drop_worse, harm, step_times
from tccl_py.experiments.comparison import LEAST_ROUNDS, MAX_ROUNDS
from tccl_py.experiments.record import Verification
from tccl_py.files import decode_json
from tccl_py.plan.chains import CHOICES
from tccl_py.statistics import unpaired_interval

RECORDED = Path(__file__).parent / "cases" / "verification"
SECONDS = st.floats(1e-6, 1.0)
SPEEDS = st.floats(0.5, 2.0)


def jobs(random, noise, rounds):
    """Seconds of jobs; of two kinds, as small messages have them, where `noise` is None."""
    if noise is None:
        kinds = np.where(random.random(rounds) < 0.25, 15.0, 17.3)
        return kinds * np.exp(random.normal(0, 0.01, rounds))
    return np.exp(random.normal(0, noise, rounds))


def verdicts(speed, noise, rounds, *, runs=200):
    random = np.random.default_rng(1)
    found = [
        harm(jobs(random, noise, rounds) / speed, *(jobs(random, noise, rounds) for _ in range(2)))
        for _ in range(runs)
    ]
    return {kind: found.count(kind) / runs for kind in ("none", "open", "loses")}


@pytest.mark.parametrize(("noise", "rounds"), [(0.005, 7), (0.02, 10), (0.05, 20), (None, 40)])
def test_equal_arms_are_harmless_and_a_loss_of_five_percent_is_seen_in_four_of_five(noise, rounds):
    assert verdicts(1.0, noise, rounds)["none"] >= 0.8
    assert verdicts(0.95, noise, rounds)["none"] <= 0.2
    assert verdicts(0.75, noise, rounds)["loses"] >= 0.95


def recorded_noise():
    """Seconds of each recorded row of jobs on H200, over their median."""
    for path in sorted(RECORDED.glob("*.json")):
        result = decode_json(path.read_text(), Verification, where=str(path))
        for row in (row for arm in result.arms for row in arm.rows):
            yield np.array(row.seconds) / np.median(row.seconds)


def verdict_in_rounds(random, noise, speed):
    """What is said of an arm when rounds are added for as long as its row is open."""
    seconds = random.choice(noise, size=(3, MAX_ROUNDS))
    seconds[0] /= speed
    rounds = range(LEAST_ROUNDS, MAX_ROUNDS + 1)
    verdicts = (harm(*seconds[:, :count]) for count in rounds)
    return next((verdict for verdict in verdicts if verdict != "open"), "open")


def test_with_recorded_noise_rounds_are_added_until_a_loss_of_five_percent_is_seen():
    random = np.random.default_rng(1)
    rows = sorted(recorded_noise(), key=lambda noise: float(np.std(np.log(noise))))
    assert len(rows) > 100
    # Also among the noisiest fifth, whose jobs differ by 4 % and more.
    for part in (rows, rows[-len(rows) // 5 :]):
        found = {
            speed: [verdict_in_rounds(random, noise, speed) for noise in part for _ in range(3)]
            for speed in (1.0, 0.95, 0.9)
        }
        shares = {speed: np.mean([v == "none" for v in of]) for speed, of in found.items()}
        assert shares[1.0] >= 0.98
        assert shares[0.95] <= 0.06
        assert shares[0.9] <= 0.02


def test_where_default_nccl_differs_from_itself_few_rounds_show_nothing():
    assert verdicts(1.0, 0.08, 7)["open"] >= 0.8
    assert verdicts(0.9, 0.08, 7)["none"] <= 0.05


def test_a_row_that_runs_evenly_needs_its_whole_interval():
    even = [1.0] * 8
    slow = [1 / 0.94] * 3 + [1 / 0.985] * 5
    assert harm(slow, even, even) == "open"
    assert harm([1 / 0.975] * 8, even, even) == "none"
    assert harm([1 / 0.96] * 8, even, even) == "loses"


@given(st.lists(SECONDS, min_size=18, max_size=36), st.integers(-20, 20), SPEEDS)
def test_units_of_time_and_the_order_of_jobs_do_not_matter_for_harm(seconds, power, speed):
    third = len(seconds) // 3
    arm, default, again = (seconds[at * third : (at + 1) * third] for at in range(3))
    arm = [value / speed for value in arm]
    verdict = harm(arm, default, again)
    assert (
        harm(*[[2.0**power * value for value in row] for row in (arm, default, again)]) == verdict
    )
    assert harm(arm[::-1], default, again) == verdict


def test_a_noisy_row_that_is_always_a_little_slower_is_not_called_harmless():
    random = np.random.default_rng(1)
    default, again = np.exp(random.normal(0, 0.07, (2, 40)))
    assert harm(default, default, again) == "none"
    # Above LEAST_RATIO, and below 1 beyond chance.
    slower = np.sort(np.concatenate([default, again]))[::2] / 0.972
    assert harm(slower, default, again) == "open"


def test_of_all_orders_of_equal_jobs_5_percent_at_most_have_an_interval_without_1():
    times = [1.01**rank for rank in range(18)]
    without = 0
    for fast in itertools.combinations(range(18), 6):
        slow = [times[rank] for rank in range(18) if rank not in fast]
        interval = unpaired_interval(slow, [times[rank] for rank in fast])
        without += not interval.low <= 1 <= interval.high
    assert 0.04 < without / math.comb(18, 6) <= 0.05


def test_drift_that_all_arms_have_is_no_loss():
    random = np.random.default_rng(1)
    heat = np.linspace(1.0, 1.03, 10)
    for speed, verdict in ((1.0, "none"), (0.9, "loses")):
        noise = np.exp(random.normal(0, 0.005, (3, 10)))
        assert harm(heat * noise[0] / speed, heat * noise[1], heat * noise[2]) == verdict


@pytest.mark.parametrize("rounds", [7, 9, 12])
@pytest.mark.parametrize("name", ["large-buffers", "usual"])
def test_large_buffers_on_four_gpus_are_harmless_from_the_first_rounds_that_can_show_it(
    name, rounds
):
    path = RECORDED / f"h200x4-vm-no-p2p-{name}.json"
    found = decode_json(path.read_text(), Verification, where=str(path))

    def times(rows):
        named = {(row.collective, row.bytes, row.groups): row.seconds[:rounds] for row in rows}
        return [named[key] for key in sorted(named)]

    default, large, variables = (times((*arm.rows, *arm.transfers)) for arm in found.arms)
    for arm, shown in ((large, "none"), (variables, "loses")):
        harms = list(map(harm, arm, default, times(found.again)))
        # Small buffers lose send/recv and all-to-all from 1 MiB on.
        assert harms.count(shown) >= (31 if shown == "none" else 6)


# A step's communication.


def test_a_step_by_hand():
    """8 all-reduces and 3 all-to-alls: 8 x 1.5 + 3 x 0.1 = 12.3, and 8 x 1.05 + 3 x 0.16 = 8.88."""
    times = {
        "default": {"all-reduce": [1.5] * 6, "all-to-all": [0.1] * 6},
        "variables": {"all-reduce": [1.05] * 6, "all-to-all": [0.16] * 6},
        "graph": {"all-reduce": [1.047] * 6},
    }
    steps = step_times({"all-reduce": 8, "all-to-all": 3}, times)
    assert {name: step.seconds for name, step in steps.items()} == pytest.approx(
        {"default": 12.3, "variables": 8.88}
    )
    assert steps["variables"].speed.middle == pytest.approx(12.3 / 8.88)
    assert best_for(steps) == "variables"
    assert best_for(step_times({"all-to-all": 3}, times)) == "default"
    # A graph file has no times in the groups of all-to-all; for 0.3 % it is not worth it.
    assert best_for(step_times({"all-reduce": 8}, times)) == "variables"


def test_a_gain_that_may_be_chance_leaves_default_nccl():
    noisy = [0.5, 0.5, 0.5, 0.5, 0.5, 1.1]
    times = {"default": {"row": [1.0] * 6}, "variables": {"row": noisy}}
    assert best_for(step_times({"row": 1}, times)) == "default"
    # A model's times have no rounds.
    times = {"default": {"row": [1.0]}, "variables": {"row": [0.5]}}
    assert best_for(step_times({"row": 1}, times)) == "variables"


@st.composite
def tables(draw, *, arms=CHOICES, rows="abcd", rounds=6, noise=True):
    """Calls of rows, and seconds of each row in each arm."""

    def seconds():
        return draw(st.lists(SECONDS, min_size=rounds, max_size=rounds))

    def equal():
        return [draw(SECONDS)] * rounds

    times = {arm: {row: (seconds if noise else equal)() for row in rows} for arm in arms}
    calls = {row: draw(st.floats(0.1, 100)) for row in draw(st.sets(st.sampled_from(rows[:-1])))}
    return calls or {rows[0]: 1.0}, times


def won_by(name, times, row, *, extra=1.0):
    """Whether a choice is the fastest of all in each round of a row, as the decision counts."""

    def counted(arm):
        return [value * 1.01 ** CHOICES.index(arm) for value in times[arm][row]]

    others = [counted(arm) for arm in times if arm != name]
    return all(own * extra < min(them) for own, *them in zip(counted(name), *others, strict=True))


@given(tables(), st.floats(0.1, 1000))
def test_calls_of_a_row_that_a_choice_wins_never_turn_the_decision_against_it(table, count):
    calls, times = table
    before = best_for(step_times(calls, times))
    for row in "abcd":
        if won_by(before, times, row):
            more = {**calls, row: calls.get(row, 0.0) + count}
            after = best_for(step_times(more, times))
            assert (after == "default") == (before == "default")


@given(tables(noise=False), st.floats(0.1, 1000))
def test_without_noise_the_decision_stays_with_the_choice_exactly(table, count):
    calls, times = table
    before = best_for(step_times(calls, times))
    for row in "abcd":
        if won_by(before, times, row, extra=1 + 1e-9):
            more = {**calls, row: calls.get(row, 0.0) + count}
            assert best_for(step_times(more, times)) == before


@given(tables(noise=False), st.sampled_from([1e-3, 8.0, 1e6]))
def test_neither_the_unit_of_time_nor_of_a_step_changes_the_decision(table, unit):
    calls, times = table
    scaled = {
        arm: {row: [unit * value for value in seconds] for row, seconds in rows.items()}
        for arm, rows in times.items()
    }
    longer = {row: unit * count for row, count in calls.items()}
    steps = step_times(calls, times)
    best = best_for(steps)
    for other in (step_times(calls, scaled), step_times(longer, times)):
        assert other["default"].seconds == pytest.approx(unit * steps["default"].seconds)
        again = best_for(other)
        assert again == best or steps[again].seconds == pytest.approx(steps[best].seconds, rel=0.03)


# Trade-offs.


@given(st.dictionaries(st.integers(), st.lists(SPEEDS, min_size=3, max_size=3), min_size=1))
def test_a_dominated_choice_never_appears_and_each_left_out_has_one_that_dominates(table):
    speeds = {name: dict(zip("xyz", row, strict=True)) for name, row in table.items()}
    shown = drop_worse(speeds)

    def dominates(ours, theirs):
        return all(ours[key] >= theirs[key] for key in "xyz")

    assert shown
    for one, other in itertools.permutations(shown, 2):
        assert not dominates(speeds[one], speeds[other])
    for name in speeds.keys() - set(shown):
        assert any(dominates(speeds[one], speeds[name]) for one in shown)


@pytest.mark.parametrize(
    ("variables", "graph", "best"),
    [
        (0.995, 0.993, "default"),
        (0.98, 0.975, "variables"),
        (0.98, 0.96, "graph"),
        (1.0, 0.985, "default"),
        (1.0, 0.96, "graph"),
        (1.2, 1.1, "default"),
    ],
)
def test_each_larger_intervention_has_to_be_faster_by_more_than_a_percent(variables, graph, best):
    seconds = {"default": 1.0, "variables": variables, "graph": graph}
    times = {name: {"row": [value] * 6} for name, value in seconds.items()}
    assert best_for(step_times({"row": 3.0}, times)) == best


@pytest.mark.parametrize("rows", [("a",), ("b",), ("a", "b"), ()])
def test_a_choice_without_times_of_every_row_is_left_out(rows):
    times = {"default": dict.fromkeys("ab", [1.0] * 6), "graph": dict.fromkeys(rows, [0.5] * 6)}
    steps = step_times({"a": 1.0, "b": 2.0}, times)
    assert ("graph" in steps) == (len(rows) == 2) and "default" in steps
