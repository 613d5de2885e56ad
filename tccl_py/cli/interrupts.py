"""Ctrl-C while a plan is searched: it must reach the search as KeyboardInterrupt.

An interrupt that falls into numpy's own code can come out of it as a TypeError, so there it is put
off until that code has returned.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import numpy as np

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended."""
_NUMPY = str(Path(np.__file__).parent)
_AGAIN_S = 0.005


@contextlib.contextmanager
def interrupts_put_off() -> Iterator[None]:
    """Within the block an interrupt inside numpy is raised a moment later, outside of it.

    Does nothing where signals cannot be handled (another thread than the main one), or where the
    caller has them ignored.
    """
    usual = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or usual is not signal.default_int_handler:
        yield
        return
    before = signal.signal(signal.SIGALRM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (as handlers are)
    if _inside_numpy(frame):
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    else:
        raise KeyboardInterrupt


def _inside_numpy(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_NUMPY):
            return True
        frame = frame.f_back
    return False
