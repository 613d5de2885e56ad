"""Exceptions for Ctrl-C and SIGTERM while a command works.

An interrupt inside numpy's code can come out as a TypeError; it is put off until numpy returns.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended."""
TERMINATED = 128 + signal.SIGTERM


class Terminated(BaseException):
    """SIGTERM came: what is open is closed as after Ctrl-C, and the exit code differs.

    No KeyboardInterrupt: typer would make that code 130.
    """


_Kinds = Mapping[signal.Signals, type[BaseException]]
CTRL_C: _Kinds = {signal.SIGINT: KeyboardInterrupt}
CTRL_C_AND_SIGTERM: _Kinds = {**CTRL_C, signal.SIGTERM: Terminated}
_USUAL = (signal.default_int_handler, signal.SIG_DFL)
_AGAIN_S = 0.005


@contextlib.contextmanager
def interrupts_put_off(kinds: _Kinds = CTRL_C) -> Iterator[None]:
    """Raise exceptions for these signals within the block, inside numpy a moment later.

    Signals that the caller ignores or handles are left alone, and all outside of the main thread.
    """
    usual = _usual(kinds)
    if not usual:
        yield
        return
    late: list[type[BaseException]] = []

    def arrived(number: int, frame: FrameType | None) -> None:
        kind = late[0] if number == signal.SIGALRM else kinds[signal.Signals(number)]
        if not _inside_numpy(frame):
            raise kind
        late.append(kind)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)

    before = signal.signal(signal.SIGALRM, arrived)
    for number in usual:
        signal.signal(number, arrived)
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Within the block Ctrl-C and SIGTERM wait for its end, for steps that belong together."""
    waiting: list[int] = []
    usual = {}
    if threading.current_thread() is threading.main_thread():
        for number in CTRL_C_AND_SIGTERM:
            usual[number] = signal.signal(number, lambda sent, _: waiting.append(sent))
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        for sent in waiting[:1]:
            signal.raise_signal(sent)


@contextlib.contextmanager
def left_at_once() -> Iterator[None]:
    """Within the block Ctrl-C ends the process: imports take exceptions for missing libraries."""
    usual = _usual(CTRL_C)
    for number in usual:
        signal.signal(number, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def _usual(kinds: _Kinds) -> dict[signal.Signals, Any]:
    """Return the handlers of these signals, where nobody has set others."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = {number: signal.getsignal(number) for number in kinds}
    return {number: handler for number, handler in found.items() if handler in _USUAL}


def _inside_numpy(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] == "numpy":
            return True
        frame = frame.f_back
    return False
