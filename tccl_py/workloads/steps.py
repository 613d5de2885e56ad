"""Steady steps in a sequence of calls: where it repeats, after its warm-up and before its end."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LEAST_STEPS = 3
_PARTS = 16
_WINDOW = 1 << 18
"""Calls after an anchor in which a step has to repeat."""
_NEARLY = 0.95
"""Of the longest run: a shorter step with such a run is preferred."""


class SteadyRun(NamedTuple):
    """Calls from `start` that repeat every `period` calls, `steps` times."""

    start: int
    period: int
    steps: int

    @property
    def stop(self) -> int:
        """Return the first call after the run's last whole step."""
        return self.start + self.period * self.steps


def steady_run(calls: NDArray[np.uint32], *, least_kinds: int = 1) -> SteadyRun | None:
    """Return the longest run of equal steps, at least three; None where steps are not told.

    A run that is short may be equal layers within one step. So it has to be at least half of the
    calls, or ten steps with an eighth of the calls, while three quarters of all calls are like
    those of its step. A step has `least_kinds` of calls that differ.

    >>> steady_run(np.array([9, 9, 8, 1, 2, 2, 1, 2, 2, 1, 2, 2, 7], np.uint32))
    SteadyRun(start=3, period=3, steps=3)
    """
    best = SteadyRun(0, 1, 0)
    for part in range(1, _PARTS):
        anchor = len(calls) * part // _PARTS
        if not best.start <= anchor < best.stop:
            run = _run_at(calls, anchor)
            best = max(best, run, key=lambda run: run.stop - run.start)
    step = calls[best.start : best.start + best.period]
    if best.steps < LEAST_STEPS or len(np.unique(step)) < least_kinds:
        return None
    share = (best.stop - best.start) / len(calls)
    alike = np.isin(calls, step).mean()
    return best if share >= 0.5 or (share >= 0.125 and best.steps >= 10 and alike >= 0.75) else None


def _run_at(calls: NDArray[np.uint32], anchor: int) -> SteadyRun:
    """Return the run around an anchor, with the shortest step of those that last nearly longest."""
    matches = _prefix_matches(calls[anchor : anchor + _WINDOW].tolist())
    lasting = [
        (period + count, period) for period, count in enumerate(matches) if count >= period > 0
    ]
    if not lasting:
        return SteadyRun(0, 1, 0)
    enough = _NEARLY * max(lasting)[0]
    period = min(period for length, period in lasting if length >= enough)
    differ = np.flatnonzero(calls[:-period] != calls[period:])
    after = int(np.searchsorted(differ, anchor))
    start = int(differ[after - 1]) + 1 if after else 0
    stop = int(differ[after]) + period if after < len(differ) else len(calls)
    return SteadyRun(start, period, (stop - start) // period)


def _prefix_matches(calls: list[int]) -> list[int]:
    """Return for each place how many calls from there equal those from the beginning.

    This is the Z-function (Gusfield, Algorithms on Strings, 1.4).
    """
    matches = [0] * len(calls)
    left = right = 0
    for at in range(1, len(calls)):
        count = min(right - at, matches[at - left]) if at < right else 0
        while at + count < len(calls) and calls[count] == calls[at + count]:
            count += 1
        if at + count > right:
            left, right = at, at + count
        matches[at] = count
    return matches
