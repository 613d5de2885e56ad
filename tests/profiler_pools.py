"""Pools of the host backend for tests: small, quick, and looked at from outside through /proc."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

from tccl_profiler.linux import cpus_of_devices, host_machine
from tccl_profiler.messages import DeviceSpec
from tccl_profiler.pool import Memory, Pool, Timeouts
from tccl_profiler.precision import Stopping, WindowLimits
from tccl_profiler.profiler import Options, Profiler
from tccl_py.errors import MeasurementError
from tccl_py.model.measurement import TOGETHER, JournalHeader
from tccl_py.model.transfer import parse_set
from tccl_py.sources.bench import Bench
from tccl_py.sources.journal import JournalFile, read_journal
from tests.skips import needs_idle_cores

LONG_S = 30.0
"""What a busy machine may take for anything."""
SMALL = Memory(arena_bytes=2 << 20, user_bytes=1 << 20)
PATIENT = Timeouts(start_s=100.0, answer_s=LONG_S, lanes_s=LONG_S, stop_s=10.0)
"""A worker that is only slow is let be."""
SOON = Timeouts(start_s=60.0, answer_s=1.5, lanes_s=1.5, stop_s=1.0)
LIMITS = WindowLimits(minimum_ms=1, maximum_ms=5)
REPEATS = 3
BOUNCE = parse_set("G0->G0->C0->G1->G1{blocks=1,fifo=256K}")


def options(**more):
    more = {"limits": LIMITS, "stopping": Stopping(minimum=REPEATS, limit=REPEATS), **more}
    return Options(**more)


def moving(pool, text, **more):
    """Measure a set with longer and longer windows, until all its flows have a sound rate."""
    for maximum_ms in (5, 50, 500):
        # Of windows that work on busy cores parts, each may count by itself.
        limits = WindowLimits(minimum_ms=1, maximum_ms=maximum_ms, longest_ms=maximum_ms)
        profiler = Profiler(pool, options=options(limits=limits, **more), source="host backend")
        with contextlib.suppress(MeasurementError):
            (measurement,) = profiler.measure([parse_set(text)])
            if not profiler.notices:
                return measurement
    needs_idle_cores()
    raise AssertionError(f"{text} does not move: {profiler.notices}")


def pool_of(devices=2, *, backend="host", **more):
    """A pool over some cores of this host, not started."""
    machine = host_machine(devices)
    cpus = cpus_of_devices(machine)
    specs = [
        DeviceSpec(device=f"G{gpu.index}", bus_id=gpu.bus_id, cpus=cpus[gpu.index])
        for gpu in machine.gpus
    ]
    numa_ids = {f"C{node.index}": node.numa_id for node in machine.numa_nodes}
    return Pool(backend, specs, numa_ids, **{"memory": SMALL, "timeouts": PATIENT, **more})


@contextlib.contextmanager
def stopping(pids, *, for_s, times, apart_s=0.02):
    """Stop processes for a while and let them go on, some times, while the block runs."""

    def stop_and_go():
        for _ in range(times):
            time.sleep(apart_s)
            for how, lasting_s in ((signal.SIGSTOP, for_s), (signal.SIGCONT, 0.0)):
                for pid in pids:
                    os.kill(pid, how)
                time.sleep(lasting_s)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def measured_or_failed(source, transfers, path):
    """Ask for a set by a journal: what it has of it is a whole measurement, or it has nothing."""
    header = JournalHeader(machine="host", identity="host backend", simulated=False, dry_run=True)
    with Bench(source, journal=JournalFile(path, header)) as journal:
        try:
            (answer,) = journal.measure([transfers])
        except MeasurementError as error:
            assert str(transfers) in str(error)
            assert not read_journal(path).measurements
            return None
    assert list(read_journal(path).measurements[transfers]) == [answer]
    assert read_journal(path).notices == ()
    assert all(rate > 0 for row in answer.samples_gbps for rate in row)
    assert answer.overlap >= TOGETHER
    return answer


def workers_of(parent=None):
    """Pids of live workers whose parent is a process; by default this one."""
    parent = os.getpid() if parent is None else parent
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        state = _state(path)
        if state is not None and state == ("worker", parent):
            found.append(int(path.name))
    return found


def _state(path):
    try:
        command = (path / "cmdline").read_bytes()
        parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return None
    return ("worker" if b"tccl_profiler.worker" in command else "other", parent)


def is_running(pid):
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def zombies_of(parent):
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, of = (path / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state == "Z" and int(of) == parent:
            found.append(int(path.name))
    return found


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def shared_mappings():
    """Mapped memory of this process that a segment made."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "tccl-" in line]


def until(satisfied, *, within_s=LONG_S):
    deadline = time.monotonic() + within_s
    while not satisfied():
        assert time.monotonic() < deadline, "not within the time of a busy machine"
        time.sleep(0.01)
