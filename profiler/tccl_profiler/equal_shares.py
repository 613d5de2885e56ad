"""The rate of a flow whose bytes are dealt out to its lanes in equal parts.

NCCL gives every channel the same number of bytes, and a collective ends with its last channel. On
NVLink lanes of one kernel are served unequally: of 24 between two H200 the slowest seven had 10.5
GB/s each, the fastest 18.8. When those are done the slow ones go on alone, faster, but no lane is
faster by itself than it can be.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def equal_shares_gbps(rates: npt.NDArray[np.float64]) -> float:
    """Bytes of all lanes over the time of the last, in the unit of `rates`.

    Args:
        rates: what each lane moves while all do, shape (lanes,). While fewer do, those left share
            what all had together in the same proportions, and none is faster than the fastest was.

    Returns:
        float: at most the sum of the rates, which it is where they are equal; the sum as well
        where a lane has moved nothing, and so nothing is known of its share.

    >>> equal_shares_gbps(np.array([3.0, 3.0]))
    6.0
    >>> round(equal_shares_gbps(np.array([1.0, 3.0])), 6)  # after 1/3 s one has 2/3 left, at 3
    3.6
    """
    total, count = float(rates.sum()), len(rates)
    if count < 2 or rates.min() <= 0 or rates.min() == rates.max():
        return total
    # The fastest first: with equal shares they are done in this order.
    working = np.sort(rates)[::-1]
    fastest = float(working[0])
    left = np.ones(count)
    lasting = 0.0
    while len(working):
        speeds = _at_once(working, min(total, fastest * len(working)), fastest)
        step = float((left / speeds).min())
        lasting += step
        left = left - speeds * step
        done = int(np.count_nonzero(left < 1e-9))
        working, left = working[done:], left[done:]
    return count / lasting


def _at_once(
    rates: npt.NDArray[np.float64], together: float, most: float
) -> npt.NDArray[np.float64]:
    """Speeds in proportion to `rates`, descending, that make `together`, none above `most`."""
    slower = np.cumsum(rates[::-1])[::-1]
    scales = (together - np.arange(len(rates)) * most) / slower
    # As many of the fastest as proportion would carry beyond `most` have just that.
    fit = rates * scales <= most * (1 + 1e-12)
    capped = int(np.argmax(fit)) if fit.any() else len(rates)
    speeds = np.full(len(rates), most)
    speeds[capped:] = rates[capped:] * scales[min(capped, len(rates) - 1)]
    return speeds
