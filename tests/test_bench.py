"""The bench: samples, memory and limits of measurements, and sources that are not as agreed."""

from contextlib import suppress

import pytest

from tccl_py import make_plan
from tccl_py.errors import BudgetSpentError, InputError, MeasurementError
from tccl_py.model.measurement import Measurement
from tccl_py.model.transfer import parse_set
from tccl_py.search.problem import Budget
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator
from tccl_py.sources.bench import Allowance, Bench

BOX = load_bundled("h200x4-vm")
ONE, TWO = parse_set("G0->G0->G1"), parse_set("G1->G1->G0")


class Growing:
    """Every sample is faster than the one before."""

    simulated = True

    def __init__(self):
        self.count = 0

    def measure(self, sets):
        self.count += len(sets)
        return [sample_of(key, self.count) for key in sets]


def sample_of(key, gbps, **more):
    rows = ((float(gbps),),) * len(key)
    return Measurement(transfers=key, samples_gbps=rows, **{"simulated": True, **more})


def test_a_further_sample_is_asked_for_by_its_number_and_stays():
    bench = Bench(Growing())
    assert [bench.sample(ONE, number).rate_gbps for number in (0, 1, 0, 1)] == [1, 2, 1, 2]
    assert [sample.rate_gbps for sample in bench.samples(ONE, 3)] == [1, 2, 3]
    assert [sample.rate_gbps for sample in bench.measure([ONE, ONE])] == [1, 1]
    assert bench.again(ONE).rate_gbps == 4
    assert len(bench.recall(ONE)) == bench.times_measured == 4
    assert (bench.sets_measured, list(bench.sets)) == (1, [ONE])


def test_samples_of_an_earlier_run_come_first():
    bench = Bench(Growing(), {ONE: [sample_of(ONE, 7), sample_of(ONE, 8)]})
    assert [sample.rate_gbps for sample in bench.samples(ONE, 3)] == [7, 8, 1]


def test_a_bench_without_a_source_has_only_its_memory():
    bench = Bench(None, {ONE: [sample_of(ONE, 7)]})
    assert bench.measure([ONE])[0].rate_gbps == 7 and bench.simulated
    with pytest.raises(MeasurementError, match="not in the journal"):
        bench.measure([TWO])


def test_further_samples_of_a_set_are_no_further_sets_of_a_limit():
    bench = Bench(Growing())
    with bench.limit(Allowance(1)):
        assert len(bench.samples(ONE, 3)) == 3
        with pytest.raises(BudgetSpentError):
            bench.measure([TWO])
    assert bench.cut_short
    bench.measure([TWO])


@pytest.mark.parametrize("stored", [True, False])
def test_a_set_counts_once_for_a_limit_whether_a_journal_answers_or_a_source(stored):
    sets = [parse_set(f"G0->G0->G{gpu}") for gpu in (1, 2, 3)]
    bench = Bench(Growing(), {sets[0]: [sample_of(sets[0], 7)]} if stored else {})
    with bench.limit(Allowance(2)):
        bench.measure(sets[1:2])
        for _ in range(4):
            bench.measure(sets[:1])
        with pytest.raises(BudgetSpentError):
            bench.measure(sets[2:])


@pytest.mark.parametrize(
    ("seconds", "begun"), [(5, 1), (19, 1), (20, 2), (29, 2), (30, 3), (31, 3)]
)
def test_no_set_is_begun_that_would_not_end_in_time(monkeypatch, seconds, begun):
    clock = [0.0]

    class Slow(Growing):
        def measure(self, sets):
            clock[0] += 10.0
            return super().measure(sets)

    monkeypatch.setattr("tccl_py.sources.bench.time.monotonic", lambda: clock[0])
    bench, sets = Bench(Slow()), [parse_set(f"G0->G0->G{gpu}") for gpu in range(1, 6)]
    with bench.limit(Allowance(seconds=seconds)), suppress(BudgetSpentError):
        for one in sets:
            bench.measure([one])
    assert (bench.times_measured, bench.cut_short) == (begun, True)


@pytest.mark.parametrize(("sets", "parts", "shares"), [(10, 3, [3, 3, 4]), (2, 3, [0, 1, 1])])
def test_parts_of_an_allowance_are_equal_and_spend_all(sets, parts, shares):
    allowance, spent = Allowance(sets), []
    for turn in range(parts):
        allowance.allot(parts=parts - turn)
        before = allowance.spent
        while allowance.covers():
            allowance.spent += 1
        spent.append(allowance.spent - before)
    assert spent == shares


class Broken(Growing):
    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def measure(self, sets):
        return self.answer(sets)


def raises(_):
    raise KeyError("no such row")


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (lambda _: None, "returned a NoneType"),
        (lambda _: [], "returned 0 measurements for 1 set"),
        (lambda sets: [sample_of(key, 1) for key in sets] * 2, "returned 2 measurements"),
        (lambda _: [1.5], "returned a float instead of a Measurement"),
        (lambda _: [sample_of(TWO, 1)], "returned a measurement of G1"),
        (lambda _: [sample_of(ONE, 1, simulated=False)], "simulated"),
        (lambda _: [Measurement(transfers=ONE, samples_gbps=(), simulated=True)], "of 0 flows"),
        (raises, "raised KeyError: 'no such row'"),
    ],
)
def test_an_answer_that_does_not_fit_is_one_clear_error(answer, fault):
    with pytest.raises(MeasurementError, match=rf"^G0->G0->G1: Broken\.measure .*{fault}"):
        Bench(Broken(answer)).measure([ONE])


@pytest.mark.parametrize("lacks", ["simulated", "measure"])
def test_a_source_without_a_property_is_refused_before_anything_is_measured(lacks):
    members = {"simulated": True, "measure": raises}
    del members[lacks]
    with pytest.raises(InputError, match=f"without `{lacks}`"):
        make_plan(BOX.machine, BOX.knowledge, type("Table", (), members)())


class Table:
    """Measured rates by set, without those of bare copies, as a user's table may be."""

    simulated = True

    def __init__(self, most=None):
        self._simulator, self._left = Simulator(BOX), most

    def measure(self, sets):
        if self._left == 0 or any(not flow.blocks for key in sets for flow in key.flows):
            raise KeyError("no row")
        self._left = None if self._left is None else self._left - 1
        return self._simulator.measure(sets)


def test_a_table_without_bare_copies_gives_a_plan_without_a_limit():
    plan = make_plan(BOX.machine, BOX.knowledge, Table())
    whole = make_plan(BOX.machine, BOX.knowledge, Simulator(BOX))
    assert (plan.rate_gbps, plan.limit_gbps) == (whole.rate_gbps, None)
    assert whole.limit_gbps


def test_a_source_that_fails_within_a_search_loses_nothing_that_was_found():
    whole = make_plan(BOX.machine, BOX.knowledge, Simulator(BOX), budget=Budget(sets=200))
    plan = make_plan(BOX.machine, BOX.knowledge, Table(30), budget=Budget(sets=200))
    assert plan.sets_measured == 30
    assert plan.choices["variables"].rate_gbps <= plan.rate_gbps <= whole.rate_gbps
    assert any("no row" in notice for notice in plan.notices)
