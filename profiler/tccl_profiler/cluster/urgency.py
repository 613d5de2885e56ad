"""Processes that must not wait for a core while they wait for a release.

Where others compute on the same cores, a process that wakes up waits for milliseconds until it is
its turn; a set whose hosts start so far apart is not measured together. For the moments before and
after a release, those that wait for it go before others, where the kernel lets them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

AGENT, LANES = 1, 2
"""Real-time priorities. Lanes nap, and go before the agent that stores their flag."""
_PROC = Path("/proc")


def threads_of(pids: Iterable[int]) -> list[int]:
    """All threads of some processes that this one has started and that have not ended.

    The number of one that has ended may be another process's by now.
    """
    found, own = [], str(os.getpid())
    for pid in pids:
        with contextlib.suppress(OSError):
            stat = (_PROC / str(pid) / "stat").read_text()
            # State and parent follow the name, which may hold anything: proc(5).
            if stat.rpartition(")")[2].split()[1] == own:
                found += [int(entry.name) for entry in (_PROC / str(pid) / "task").iterdir()]
    return found


def hasten(threads: Iterable[int], priority: int) -> None:
    """Let threads (0 is the calling one) go before others; without the right to, nothing."""
    policy = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
    for thread in threads:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread, policy, os.sched_param(priority))


def calm(threads: Iterable[int]) -> None:
    """Let threads wait for their turn as usual."""
    for thread in threads:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


@contextlib.contextmanager
def urgent(lanes: Iterable[int] = ()) -> Iterator[None]:
    """The calling thread, and those of lanes, go before others while the context lasts."""
    threads = tuple(lanes)
    hasten(threads, LANES)
    hasten((0,), AGENT)
    try:
        yield
    finally:
        calm((0, *threads))
