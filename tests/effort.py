"""How much work something takes, however busy the cores are."""

import contextlib
import time


@contextlib.contextmanager
def soon(most_s):
    """What runs inside takes a core for at most so long; waiting for one does not count."""
    begun = time.process_time()
    yield
    took_s = time.process_time() - begun
    assert took_s < most_s, f"took a core for {took_s:.1f} s"
