"""What a lane moves where few others do: of which sets it is asked, how often, and what if not."""

import os
import signal

import numpy as np
import pytest

from tccl_profiler.compiler import program_for
from tccl_profiler.pool import Memory, Pool
from tccl_profiler.precision import ChannelRate, Stopping
from tccl_profiler.profiler import Options, Profiler
from tccl_profiler.protocol import WorkerLost
from tccl_profiler.rates import straggler_gbps, uncontended_gbps, with_few_channels
from tccl_py.errors import MeasurementError
from tccl_py.model.measurement import JournalHeader
from tccl_py.model.transfer import parse_flow, parse_set, transfer_set
from tccl_py.sources.bench import Bench
from tccl_py.sources.journal import JournalFile, read_journal
from tests.fakes import FakePool
from tests.profiler_pools import is_running, options, pool_of, until, workers_of

FEW = "G0->G0->G1{blocks=4,fifo=256K} G1->G1->G0{blocks=4,fifo=256K}"
LONE = 20.0


def ring(lanes):
    return f"G0->G0->G1{{blocks={lanes},fifo=256K}} G1->G1->G0{{blocks={lanes},fifo=256K}}"


def unequal(lanes):
    """Half of the lanes have 8 GB/s and half 14; four have LONE each."""
    return [LONE] * lanes if lanes <= 4 else [8.0, 14.0] * (lanes // 2)


class Rates:
    """Rates for a fake pool, which also remembers the set of every repeat."""

    def __init__(self, of=unequal):
        self.of, self.texts = of, []

    def __call__(self, text, number):
        self.texts.append(text)
        return [self.of(flow.blocks) for flow in parse_set(text).flows]

    @property
    def few(self):
        return self.texts.count(FEW)


def profiler_of(pool, **more):
    settings = {"stopping": Stopping(limit=6), **more}
    return Profiler(pool, options=Options(**settings), clock=pool.clock)


def one(profiler, text):
    (measurement,) = profiler.measure([parse_set(text)])
    return measurement


def expected(lanes, most):
    return pytest.approx((straggler_gbps(np.array(unequal(lanes)), most),) * 2, rel=1e-4)


# Which set it is.


@pytest.mark.parametrize(
    ("text", "few"),
    [
        (ring(24), FEW),
        (ring(5), FEW),
        (ring(4), None),
        (ring(1), None),
        # Flows of few lanes stay as they are beside one of many.
        (
            "G0->G0->G1{blocks=24} G1->G1->G0{blocks=2}",
            "G0->G0->G1{blocks=4} G1->G1->G0{blocks=2}",
        ),
        # All else as well: bounces, copy engines, lanes as many as it takes, host memory, NICs.
        (
            "G0->G1->G1{blocks=8} G1->G1->C0->G0->G0{blocks=16}",
            "G0->G1->G1{blocks=4} G1->G1->C0->G0->G0{blocks=16}",
        ),
        ("G0->G0->C0->G1->G1{blocks=16}", None),
        ("G0->D0->G1{blocks=8}", None),
        ("G0->G0->G1", None),
        ("G0->G0->C0{blocks=8}", None),
        ("h0.G0->h0.N0->h1.N0->h1.N0->h1.G0{blocks=8}", None),
        ("h0.G0->h0.G0->h0.G1{blocks=8}", "h0.G0->h0.G0->h0.G1{blocks=4}"),
    ],
)
def test_the_same_set_with_few_lanes_where_many_share_links(text, few):
    found = transfer_set(map(with_few_channels, parse_set(text).flows))
    assert str(found) == (few or str(parse_set(text)))


def test_a_lanes_rate_is_its_flows_median_whatever_the_order_and_the_copies_of_flows():
    text = "G0->G0->C0{blocks=1} G0->G0->G1{blocks=2} G0->G0->G1{blocks=2} G1->G1->G0{blocks=1}"
    program = program_for(parse_set(text), lanes={"G0": 64, "G1": 64})
    lanes = [ChannelRate(slice_bytes=1, gbps=rate, fifo_slices=4) for rate in (9, 1, 2, 3, 4, 7)]
    assert uncontended_gbps(program, lanes) == {
        parse_flow("G0->G0->G1{blocks=2}"): 2.5,
        parse_flow("G1->G1->G0{blocks=1}"): 7.0,
    }


# The profiler over a pool without processes.


@pytest.mark.parametrize("lanes", [8, 16, 24, 32])
def test_slow_lanes_go_on_as_fast_as_one_of_few(lanes):
    rates = Rates()
    measurement = one(profiler_of(FakePool(rates)), ring(lanes))
    assert str(measurement.transfers) == ring(lanes)
    assert measurement.gbps == expected(lanes, LONE)
    assert sum(unequal(lanes)) > measurement.gbps[0] > 1.02 * expected(lanes, None).expected[0]
    assert {len(row) for row in measurement.samples_gbps} == {6}


def test_sets_that_differ_in_lanes_alone_share_one_short_look_at_few():
    rates = Rates()
    profiler = profiler_of(FakePool(rates))
    sets = [parse_set(ring(lanes)) for lanes in (8, 16, 24, 32, 8)]
    answers = profiler.measure(sets)
    assert [answer.transfers for answer in answers] == sets
    # A trial, and three repeats.
    assert rates.few == 4
    assert profiler.sets_run == len(sets)
    assert profiler.notices == []


@pytest.mark.parametrize("text", [ring(4), "G0->G0->C0->G1->G1{blocks=16,fifo=256K}"])
def test_a_set_that_gains_nothing_by_it_costs_nothing_more(text):
    pool = FakePool(Rates())
    one(profiler_of(pool), text)
    assert [timing.repeats for timing in pool.timings] == [1, 6]


def test_lanes_that_are_slower_among_few_change_nothing():
    rates = Rates(lambda lanes: [1.0] * lanes if lanes <= 4 else unequal(lanes))
    assert one(profiler_of(FakePool(rates)), ring(8)).gbps == expected(8, None)


def test_a_worker_lost_while_few_lanes_run_costs_a_restart_and_a_notice():
    pool = FakePool(Rates())
    # After the set's own check.
    pool.faults = [None, WorkerLost("G1 did not answer")]
    profiler = profiler_of(pool)
    assert one(profiler, ring(8)).gbps == expected(8, LONE)
    assert pool.restarts == 1
    (notice,) = profiler.notices
    assert notice.startswith("G1 did not answer")
    assert notice.endswith(f"{FEW} measured again")


@pytest.mark.parametrize(
    ("faults", "why"),
    [
        ([MeasurementError("G0 has no memory left")], "G0 has no memory left"),
        (
            [WorkerLost("G1 is gone"), WorkerLost("G0 is gone")],
            f"{FEW}: G1 is gone; then",
        ),
    ],
)
def test_where_few_lanes_cannot_be_measured_the_set_is_and_all_of_its_kind_alike(faults, why):
    rates = Rates()
    pool = FakePool(rates)
    pool.faults = [None, *faults]
    profiler = profiler_of(pool)
    for lanes in (8, 24):
        assert one(profiler, ring(lanes)).gbps == expected(lanes, None)
    assert rates.few == 0
    assert "; without this set" in profiler.notices[-1]
    assert pool.restarts == len(faults) - 1


def test_what_was_seen_outlives_the_workers():
    rates = Rates()
    pool = FakePool(rates)
    profiler = profiler_of(pool)
    one(profiler, ring(8))
    pool.faults = [WorkerLost("G1 is gone")]
    assert one(profiler, ring(24)).gbps == expected(24, LONE)
    assert (pool.restarts, rates.few) == (1, 4)


def test_an_interruption_while_few_lanes_run_passes_through():
    pool = FakePool(Rates())
    pool.faults = [None, KeyboardInterrupt()]
    profiler = profiler_of(pool)
    with pytest.raises(KeyboardInterrupt):
        one(profiler, ring(8))
    assert one(profiler, ring(8)).gbps == expected(8, LONE)


def test_a_journal_has_only_the_sets_that_were_asked_for(tmp_path):
    path = tmp_path / "journal.jsonl"
    header = JournalHeader(machine="fake", identity="fake", simulated=False)
    with Bench(profiler_of(FakePool(Rates())), journal=JournalFile(path, header)) as source:
        source.measure([parse_set(ring(8)), parse_set(ring(24))])
    assert set(map(str, read_journal(path).measurements)) == {ring(8), ring(24)}


# Over the host backend.

HOST = Memory(arena_bytes=8 << 20, user_bytes=1 << 20)
HOST_RING = "G0->G0->G1{blocks=6,fifo=64K} G1->G1->G0{blocks=6,fifo=64K}"
HOST_FEW = HOST_RING.replace("blocks=6", "blocks=4")


pytestmark = pytest.mark.timeout(120)


def before_runs(monkeypatch, act):
    """Have something done with the set that is about to run, each time."""
    run = Pool.run

    def watched(self, program, timing):
        act(str(program.transfers))
        return run(self, program, timing)

    monkeypatch.setattr(Pool, "run", watched)


@pytest.mark.parametrize("times", [1, 2])
def test_a_worker_killed_while_few_lanes_run_is_replaced_and_the_set_measured(monkeypatch, times):
    with pool_of(memory=HOST) as pool:
        killed = []

        def kill(text):
            if text == HOST_FEW and len(killed) < times:
                killed.append(pool.workers.processes["G0"].process.pid)
                os.kill(killed[-1], signal.SIGKILL)
                until(lambda: not is_running(killed[-1]))

        before_runs(monkeypatch, kill)
        profiler = Profiler(pool, options=options())
        (measurement,) = profiler.measure([parse_set(HOST_RING)])
        assert str(measurement.transfers) == HOST_RING
        assert "was killed by SIGKILL" in profiler.notices[0]
        assert profiler.notices[0].endswith(f"{HOST_FEW} measured again")
        assert len(profiler.notices) == times
        assert len(workers_of()) == 2
        assert not set(workers_of()) & set(killed)
