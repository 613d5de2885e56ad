"""How a process of this host waits for others, and tells the time."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

from tccl_profiler.control import ABORT, FLAG_AT, Control
from tccl_profiler.messages import Pinged

SPINS = 500
"""Fruitless rounds, each of which yields the core, before a thread naps between them."""
NAP_S = 20e-6
_PR_SET_TIMERSLACK = 29  # include/uapi/linux/prctl.h

# os.sched_yield keeps the interpreter's lock before Python 3.14; a call by ctypes does not.
_libc = ctypes.CDLL(None)


def nap_exactly() -> None:
    """Let the calling thread's naps of 20 us not take the 70 us of a timer's usual slack."""
    _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)


def pause(rounds: int) -> None:
    """Let others run, longer after many rounds without anything to do."""
    if rounds < SPINS:
        _libc.sched_yield()
    else:
        time.sleep(NAP_S)


def flag_of(control: Control) -> ctypes.c_uint64:
    """The flag, to be read often."""
    return ctypes.c_uint64.from_address(control.segment.address + FLAG_AT)


def released(
    flag: ctypes.c_uint64, epoch: int, patience_ns: int, stopping: Callable[[], bool]
) -> int:
    """Wait for the flag, and return the time; 0 if it does not come in time or says stop."""
    until, rounds = time.monotonic_ns() + patience_ns, 0
    while flag.value < epoch:
        if stopping() or time.monotonic_ns() > until:
            return 0
        pause(rounds)
        rounds += 1
    return 0 if flag.value == ABORT else time.monotonic_ns()


def own_clock(count: int) -> Pinged:
    """Pings of a device whose clock is the host's: three readings each."""
    now = time.monotonic_ns
    readings = [(now(), now(), now()) for _ in range(count)]
    return Pinged(
        asked_ns=tuple(one[0] for one in readings),
        device_ns=tuple(one[1] for one in readings),
        seen_ns=tuple(one[2] for one in readings),
    )
