"""Ctrl-C outside of a command: while programs are loaded, and while the interpreter ends.

An exception there would show a trace, or be taken for a missing library, so the process ends.
Nothing is loaded here: `signal` itself takes a while, and `_signal` is built in.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended."""
RAISE = _signal.default_int_handler


def leave(*_: object) -> None:
    """End the process at once."""
    os._exit(INTERRUPTED)


def at_interrupt(handler: object) -> object:
    """Set the handler of Ctrl-C, `leave` or RAISE, and return the one before.

    Nothing is set where the caller ignores or handles Ctrl-C.
    """
    before: object = _signal.getsignal(_signal.SIGINT)
    if before is not handler and before in (leave, RAISE):
        _signal.signal(_signal.SIGINT, handler)
    return before
