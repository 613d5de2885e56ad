"""A program driven stage by stage, as by somebody who has several pools to start together."""

import os
import signal
import time

import pytest

from tccl_profiler.compiler import program_for
from tccl_profiler.pool import RunSpec
from tccl_profiler.protocol import WorkerLost
from tccl_py.errors import MeasurementError
from tccl_py.model.transfer import parse_set
from tests.profiler_pools import BOUNCE, moving, pool_of, workers_of

pytestmark = pytest.mark.timeout(120)

TIMING = RunSpec(repeats=3, warm_us=100.0, window_us=2000.0)
FOREVER = RunSpec(repeats=2, warm_us=0.0, window_us=60e6)
MS = 1_000_000


@pytest.fixture(scope="module")
def pool():
    with pool_of() as made:
        yield made


def program_of(pool, text=str(BOUNCE)):
    return program_for(parse_set(text), lanes=pool.lanes)


def test_repeats_start_at_the_time_they_are_released_for_and_not_before(pool):
    late_ns = []
    with pool.begin(program_of(pool), TIMING) as running:
        for repeat in range(TIMING.repeats):
            running.wait_resident(repeat)
            at_ns = time.monotonic_ns() + 30 * MS
            stored_ns = running.release(repeat, at_ns)
            outcome = running.collect(repeat)
            starts = [int(rows["start"].min()) for rows in outcome.records.values()]
            assert min(starts) >= at_ns
            assert stored_ns >= at_ns
            late_ns.append(stored_ns - at_ns)
        running.finish()
    # On cores that others use as well, a core may be had a while later.
    assert min(late_ns) < 1000 * MS


def test_two_pools_are_released_together(pool):
    with pool_of() as other:
        program, skews = program_of(pool), []
        with pool.begin(program, TIMING) as one, other.begin(program, TIMING) as two:
            for repeat in range(TIMING.repeats):
                one.wait_resident(repeat)
                two.wait_resident(repeat)
                # One caller releases both here, so one after the other.
                stored = [running.release(repeat) for running in (one, two)]
                starts = [
                    int(rows["start"].min())
                    for running in (one, two)
                    for rows in running.collect(repeat).records.values()
                ]
                skews.append(abs(max(starts) - min(starts) - (stored[1] - stored[0])))
            one.finish()
            two.finish()
        assert min(skews) < 1000 * MS


def test_leaving_before_the_end_stops_the_lanes_and_keeps_the_workers(pool):
    before = workers_of()
    for stages in range(4):
        with pool.begin(program_of(pool), FOREVER) as running:
            if stages > 0:
                running.wait_resident(0)
            if stages > 1:
                running.release(0)
            if stages > 2:
                time.sleep(0.01)
    assert moving(pool, str(BOUNCE))
    assert workers_of() == before


class CalledOffError(Exception):
    """The controller of several pools says that one of the others failed."""


@pytest.mark.parametrize("stage", ["resident", "release", "collect"])
def test_a_wait_ends_with_what_is_raised_meanwhile(pool, stage):
    before, calls = workers_of(), []

    def meanwhile():
        calls.append(time.monotonic())
        if len(calls) > 2:
            raise CalledOffError

    program = program_of(pool)
    with (
        pytest.raises(CalledOffError),
        pool.begin(program, FOREVER, meanwhile=meanwhile) as running,
    ):
        if stage == "resident":
            running.wait_resident(1)  # the second repeat comes after the first only
        running.wait_resident(0)
        running.release(0, time.monotonic_ns() + (1000 * MS if stage == "release" else 0))
        running.collect(0)
    assert 0.03 < calls[-1] - calls[0] < 2
    assert moving(pool, str(BOUNCE))
    assert workers_of() == before


def test_a_worker_that_dies_between_stages_is_named_and_replaced():
    with pool_of() as pool:
        with (
            pytest.raises(WorkerLost, match=r"^the worker of G1"),
            pool.begin(program_of(pool), FOREVER) as running,
        ):
            running.wait_resident(0)
            os.kill(pool.workers.processes["G1"].process.pid, signal.SIGKILL)
            running.release(0)
            running.collect(0)
        before = set(pool.pids)
        assert moving(pool, str(BOUNCE))
        assert len(pool.pids - before) == 2


def test_a_release_later_than_lanes_wait_is_refused(pool):
    with pool.begin(program_of(pool), TIMING) as running:
        running.wait_resident(0)
        with pytest.raises(MeasurementError, match=r"^a release in 60\.0 s"):
            running.release(0, time.monotonic_ns() + 60_000 * MS)
