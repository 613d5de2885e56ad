"""How much work something takes, the same on every machine."""

import contextlib
import sys


@contextlib.contextmanager
def calls_at_most(most):
    """What runs inside makes at most so many calls, of functions in Python and in C."""
    count, before = 0, sys.getprofile()

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
    assert count <= most, f"{count} calls"
