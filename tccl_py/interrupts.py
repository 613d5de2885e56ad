"""Ctrl-C and SIGTERM as exceptions.

An interrupt inside numpy's code can come out as a TypeError; it is put off until numpy returns.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType


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

    with _handled((signal.SIGALRM,), arrived):
        try:
            with _handled(usual, arrived):
                yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Within the block Ctrl-C and SIGTERM wait for its end, for steps that belong together."""
    waiting: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    try:
        with _handled(CTRL_C_AND_SIGTERM if main else (), lambda sent, _: waiting.append(sent)):
            yield
    finally:
        for sent in waiting[:1]:
            signal.raise_signal(sent)


def left_at_once() -> contextlib.AbstractContextManager[None]:
    """Within the block Ctrl-C ends the process: imports take exceptions for missing libraries."""
    return _handled(_usual(CTRL_C), lambda *_: os._exit(128 + signal.SIGINT))


@contextlib.contextmanager
def _handled(numbers: Iterable[signal.Signals], handler: Callable[..., object]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)


def _usual(kinds: _Kinds) -> list[signal.Signals]:
    """Return the signals for which nobody has set a handler."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in kinds if signal.getsignal(number) in _USUAL]


def _inside_numpy(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] == "numpy":
            return True
        frame = frame.f_back
    return False
