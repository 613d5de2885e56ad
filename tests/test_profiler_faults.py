"""What becomes of a pool when workers die, hang or are interrupted: all of it done, none mocked."""

import contextlib
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tccl_profiler.compiler import program_for
from tccl_profiler.linux import host_fingerprint, host_machine
from tccl_profiler.pool import Memory, Pool, RunSpec
from tccl_profiler.profiler import Profiler
from tccl_profiler.protocol import Connection, Peers, WorkerLost
from tccl_profiler.session import Session
from tccl_py.errors import MeasurementError
from tests.profiler_pools import (
    BOUNCE,
    SMALL,
    SOON,
    descriptors,
    is_running,
    measured_or_failed,
    moving,
    options,
    pool_of,
    shared_mappings,
    stopping,
    until,
    workers_of,
    zombies_of,
)

pytestmark = pytest.mark.timeout(120)

LONG = RunSpec(repeats=1, warm_us=0.0, window_us=60e6)
"""Longer than any test: whoever runs it is stopped."""


@pytest.fixture(autouse=True)
def _nothing_is_left():
    gc.collect()
    before, mapped, fds = workers_of(), shared_mappings(), descriptors()
    yield
    assert workers_of() == before
    assert zombies_of(os.getpid()) == []
    gc.collect()
    assert shared_mappings() == mapped
    assert descriptors() == fds


def profiler_of(pool, **more):
    return Profiler(pool, options=options(**more))


def worker_of(pool, index):
    return pool.workers.processes[f"G{index}"].process.pid


def long_run(pool):
    """Run a set that lasts for ever, until somebody ends it."""
    return pool.run(program_for(BOUNCE, lanes=pool.lanes), LONG)


def is_moving(pool):
    """Whether lanes have been released."""
    return pool.control is not None and pool.control.flag.value not in (0, 2**64 - 1)


@contextlib.contextmanager
def meanwhile(pool, act):
    """Do something as soon as a set runs."""

    def watch():
        with contextlib.suppress(AttributeError, MeasurementError):  # closed while we look
            until(lambda: is_moving(pool))
            act()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        thread.join()


class Sabotage:
    """Runs of a pool in whose midst something is done, as often as asked."""

    def __init__(self, monkeypatch, pool, act, *, times):
        self.left, self.pool, self.act = times, pool, act
        self.restarts = 0
        run, restart = Pool.run, Pool.restart

        def sabotaged(pool, program, timing):
            if not self.left or timing.check:
                return run(pool, program, timing)
            self.left -= 1
            with meanwhile(pool, self.act):
                return run(pool, program, LONG)

        def counted(pool):
            self.restarts += 1
            restart(pool)

        monkeypatch.setattr(Pool, "run", sabotaged)
        monkeypatch.setattr(Pool, "restart", counted)


# Workers that die.


def test_a_worker_killed_between_sets_is_replaced_and_the_set_measured():
    with pool_of() as pool:
        profiler = profiler_of(pool)
        profiler.measure([BOUNCE])
        victim, before = worker_of(pool, 1), set(pool.pids)
        os.kill(victim, signal.SIGKILL)
        (answer,) = profiler.measure([BOUNCE])
        assert str(answer.transfers) == str(BOUNCE)
        (notice,) = profiler.notices
        assert "G1 was killed by SIGKILL" in notice
        assert f"{BOUNCE} measured again" in notice
        assert len(pool.pids - before) == 2
        assert not is_running(victim)
        assert moving(pool, str(BOUNCE))


def test_a_worker_killed_in_the_middle_of_a_set_is_replaced(monkeypatch):
    with pool_of() as pool:
        profiler = profiler_of(pool)
        for index in (0, 1):
            with monkeypatch.context() as patch:
                sabotage = Sabotage(
                    patch, pool, lambda at=index: os.kill(worker_of(pool, at), 9), times=1
                )
                (answer,) = profiler.measure([BOUNCE])
            assert str(answer.transfers) == str(BOUNCE)
            assert sabotage.restarts == 1
            assert len(profiler.notices) == index + 1
            assert f"G{index} was killed by SIGKILL" in profiler.notices[index]


def test_a_worker_that_dies_twice_is_named_with_how_it_died(monkeypatch):
    with pool_of() as pool:
        profiler = profiler_of(pool)
        sabotage = Sabotage(
            monkeypatch, pool, lambda: os.kill(worker_of(pool, 1), signal.SIGSEGV), times=2
        )
        with pytest.raises(MeasurementError) as caught:
            profiler.measure([BOUNCE])
        assert not isinstance(caught.value, WorkerLost)
        assert str(BOUNCE) in str(caught.value)
        assert str(caught.value).count("G1 was killed by SIGSEGV") == 2
        assert sabotage.restarts == 1
        # The next set is not blamed.
        assert moving(pool, str(BOUNCE))
        assert sabotage.restarts == 2


def test_all_workers_may_die_at_once():
    with pool_of() as pool:
        profiler = profiler_of(pool)
        for index in (0, 1):
            os.kill(worker_of(pool, index), signal.SIGKILL)
        (answer,) = profiler.measure([BOUNCE])
        assert str(answer.transfers) == str(BOUNCE)
        assert len(profiler.notices) == 1


def test_what_a_worker_said_last_is_in_the_sentence():
    with pool_of() as pool:
        worker = pool.workers.processes["G0"]
        os.write(worker.stderr_fd, b"x" * 100_000 + b"\nand then:\nout of cheese  \n\n")
        os.kill(worker.process.pid, signal.SIGABRT)
        with pytest.raises(WorkerLost, match=r"G0 was killed by SIGABRT \(out of cheese\)$"):
            pool.ping()


def test_a_worker_whose_message_cannot_be_read_is_named_and_replaced():
    with pool_of() as pool:
        profiler = profiler_of(pool)
        # As its answer to the next question would be, were its memory spoilt.
        theirs, ours = socket.socketpair()
        connections = pool.workers.connections
        usual, connections["G1"] = connections["G1"], Connection(ours, peer="G1")
        body = b"\x82\xa4type\xa6failed\xa4what\xa3\xff\xfe\xfd"
        theirs.sendall(struct.pack("!IH", len(body), 0) + body)
        (answer,) = profiler.measure([BOUNCE])
        assert str(answer.transfers) == str(BOUNCE)
        (notice,) = profiler.notices
        assert notice.startswith("the worker of G1 sent a message that cannot be read")
        theirs.close()
        usual.close()


# Workers that hang.


def test_a_stopped_worker_is_replaced_and_really_gone():
    with pool_of(timeouts=SOON) as pool:
        profiler = profiler_of(pool)
        victim = worker_of(pool, 1)
        os.kill(victim, signal.SIGSTOP)
        (answer,) = profiler.measure([BOUNCE])
        assert str(answer.transfers) == str(BOUNCE)
        (notice,) = profiler.notices
        assert notice.startswith("the worker of G1 has not")
        assert not is_running(victim)
        assert victim not in workers_of()


def test_a_worker_stopped_in_the_middle_of_a_set_is_named(monkeypatch):
    with pool_of(timeouts=SOON) as pool:
        profiler = profiler_of(pool)
        victims = []

        def stop():
            victims.append(worker_of(pool, 1))
            os.kill(victims[0], signal.SIGSTOP)

        program = program_for(BOUNCE, lanes=pool.lanes)
        timing = RunSpec(repeats=1, warm_us=0.0, window_us=0.2e6)
        with (
            meanwhile(pool, stop),
            pytest.raises(WorkerLost, match=r"^G1 did not finish"),
        ):
            pool.run(program, timing)
        profiler.measure([BOUNCE])
        assert not is_running(victims[0])


@pytest.mark.parametrize("for_s, times", [(0.6, 1), (0.05, 10)])
def test_a_worker_that_stands_still_in_the_middle_of_a_set_makes_no_answer(for_s, times, tmp_path):
    with pool_of() as pool:
        profiler = profiler_of(pool)
        for index in (0, 1):
            with stopping([worker_of(pool, index)], for_s=for_s, times=times):
                measured_or_failed(profiler, BOUNCE, tmp_path / f"journal-{index}.jsonl")
        assert moving(pool, str(BOUNCE))


def test_a_pool_with_a_stopped_worker_closes():
    pool = pool_of(timeouts=SOON)
    pool.start()
    victim = worker_of(pool, 0)
    os.kill(victim, signal.SIGSTOP)
    pool.close()
    assert not is_running(victim)


def test_lanes_that_were_not_released_in_time_are_no_measurement(monkeypatch):
    """As where the controller itself was stopped for a while: its lanes have given up."""
    with pool_of(timeouts=SOON) as pool:
        release = type(pool.control).release

        def late(control, epoch):
            until(lambda: control.records(0, 0, 1)["finished"][0] == epoch)
            release(control, epoch)

        monkeypatch.setattr(type(pool.control), "release", late)
        with pytest.raises(WorkerLost, match=r"G0 was not released"):
            pool.run(
                program_for(BOUNCE, lanes=pool.lanes),
                RunSpec(repeats=1, warm_us=0.0, window_us=1e3),
            )


# Devices that do not open.


def test_a_device_that_does_not_open_is_named_in_one_sentence():
    pool = pool_of(memory=Memory(arena_bytes=1 << 50, user_bytes=1 << 20))
    with pytest.raises(MeasurementError, match=r"^shared memory G0, \d+ bytes") as caught:
        pool.start()
    assert "\n" not in str(caught.value)
    assert workers_of() == []
    pool.close()


def test_a_worker_that_cannot_begin_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(WorkerLost, match=r"G[01] ended with code 1$"):
        pool_of().start()


def test_an_executable_that_is_not_there_leaves_nothing(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(FileNotFoundError):
        pool_of().start()


def test_a_pool_that_cannot_start_anew_can_later(monkeypatch):
    with pool_of() as pool:
        profiler = profiler_of(pool)
        os.kill(worker_of(pool, 0), signal.SIGKILL)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/bin/false")
            for _ in range(2):
                with pytest.raises(MeasurementError, match=r"G[01] ended with code 1"):
                    profiler.measure([BOUNCE])
                assert workers_of() == []
        assert moving(pool, str(BOUNCE))


# Interruptions of the controller.


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interruption_in_the_middle_of_a_set_leaves_a_usable_pool():
    with pool_of() as pool:
        before = set(pool.pids)
        with meanwhile(pool, interrupt), pytest.raises(KeyboardInterrupt):
            long_run(pool)
        assert moving(pool, str(BOUNCE))
        assert pool.pids == before


def test_an_interruption_passes_through_a_profiler_and_its_session():
    machine = host_machine(2)
    session = Session(
        machine, host_fingerprint(machine), backend="host", options=options(), memory=SMALL
    )
    with pytest.raises(KeyboardInterrupt), session, meanwhile(session.pool, interrupt):
        while True:
            session.profiler.measure([BOUNCE])
    assert session.notices == []


def test_a_second_interruption_costs_the_workers_not_the_pool(monkeypatch):
    with pool_of() as pool:
        before = set(pool.pids)
        abort = type(pool.control).abort

        def interrupted(control):
            abort(control)
            raise KeyboardInterrupt

        with (
            monkeypatch.context() as patch,
            meanwhile(pool, interrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            patch.setattr(type(pool.control), "abort", interrupted)
            long_run(pool)
        assert moving(pool, str(BOUNCE))
        assert len(pool.pids - before) == 2


def test_an_interrupted_question_costs_nothing(monkeypatch):
    with pool_of() as pool:
        pids = set(pool.pids)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Peers, "heard", lambda *_: interrupt())
            pool.ping()
        assert set(pool.ping(7)) == {"G0", "G1"}
        assert {len(found.seen_ns) for found in pool.ping(7).values()} == {7}
        assert pool.pids == pids


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.4])
def test_an_interruption_while_workers_start_leaves_nothing(after_s):
    timer = threading.Timer(after_s, interrupt)
    pool = pool_of()
    with contextlib.suppress(KeyboardInterrupt):
        timer.start()
        with pool:
            timer.join()
            time.sleep(0.05)
    timer.join()


# The end of the controller.

CHILD = """
import os, sys
from tccl_profiler.linux import host_fingerprint, host_machine
from tccl_profiler.pool import Memory
from tccl_profiler.session import Session
from tests.profiler_pools import BOUNCE, SMALL, options

machine = host_machine(2)
session = Session(
    machine, host_fingerprint(machine), backend="host", options=options(), memory=SMALL
)
with session:
    print("ready", flush=True)
    how = sys.argv[1]
    if how == "leaves":
        os._exit(0)
    if how == "fails":
        session.__class__.__exit__ = lambda *_: None
        sys.exit("forgot to close")
    while True:
        session.profiler.measure([BOUNCE])
        print("measured", flush=True)
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGINT", "leaves", "fails"])
def test_nothing_outlives_the_controller(how):
    shm = shared_files()
    root = Path(__file__).parents[1]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=root,
    )
    assert child.stdout.readline() == "ready\n", child.stderr.read()
    if how.startswith("SIG"):
        until(lambda: len(workers_of(child.pid)) == 2)
        workers = workers_of(child.pid)
        assert child.stdout.readline() == "measured\n"
        child.send_signal(getattr(signal, how))
    else:
        workers = []
    _, errors = child.communicate(timeout=60)
    assert child.returncode != 0 or how == "leaves"
    until(lambda: not any(map(is_running, workers)), within_s=60)
    # Whoever ran without a parent has the test's reaper or init as one.
    until(lambda: not _orphans(root), within_s=60)
    assert shared_files() <= shm
    if how == "SIGINT":
        assert errors.rstrip().endswith("KeyboardInterrupt")


def shared_files():
    """Files in shared memory, but for those of Open MPI, NCCL and its plugin, and other tests."""
    foreign = ("sm_segment.", "nccl-", f"tccl-{os.getuid()}", "tccl-test-", "sem.mp-")
    return {one for one in Path("/dev/shm").iterdir() if not one.name.startswith(foreign)}


def _orphans(root):
    """Workers that no living process of ours has started."""
    parents = {os.getpid()}
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"tccl_profiler.worker" in (path / "cmdline").read_bytes():
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == 1 and (path / "cwd").readlink() == root:
                    found.append(int(path.name))
    return [pid for pid in found if pid not in parents]


# Closing, and what it gives back.


def test_a_broken_pool_that_is_closed_stays_closed():
    with pool_of() as pool:
        os.kill(worker_of(pool, 0), signal.SIGKILL)
        with pytest.raises(WorkerLost):
            pool.ping()
    with pytest.raises(MeasurementError, match=r"^the pool is closed"):
        pool.ping()


def test_a_closed_pool_can_be_closed_and_started_again():
    pool = pool_of()
    pool.close()
    for _ in range(2):
        with pool:
            assert moving(pool, str(BOUNCE))
        pool.close()
        with pytest.raises(MeasurementError, match=r"^the pool is closed"):
            pool.ping()


def test_two_pools_measure_at_once():
    with pool_of() as one, pool_of() as other:
        assert not one.pids & other.pids
        threads, answers = [], []
        for pool in (one, other):
            threads.append(
                threading.Thread(target=lambda p=pool: answers.append(moving(p, str(BOUNCE))))
            )
            threads[-1].start()
        for thread in threads:
            thread.join()
        assert [answer.transfers for answer in answers] == [BOUNCE] * 2


def test_starting_anew_again_and_again_leaks_nothing():
    with pool_of() as pool:
        profiler = profiler_of(pool)
        profiler.measure([BOUNCE])
        gc.collect()
        fds, mapped = descriptors(), len(shared_mappings())
        for _ in range(2):
            os.kill(worker_of(pool, 0), signal.SIGKILL)
            profiler.measure([BOUNCE])
            gc.collect()
            assert descriptors() == fds
            assert len(shared_mappings()) == mapped
            assert len(workers_of()) == 2
