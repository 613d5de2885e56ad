"""The rate of a flow whose bytes are dealt out to its lanes in equal parts.

NCCL gives every channel the same number of bytes, and a collective ends with its last channel. On
NVLink lanes of one kernel are served unequally: of 24 between two H200 the slowest seven had 10.5
GB/s each, the fastest 18.8. When those are done the slow ones go on faster, but none faster than a
lane among few: of eight each had 20.6 to 21.1 there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def equal_shares_gbps(rates: npt.NDArray[np.float64], most: float | None = None) -> float:
    """Bytes of all lanes over the time of the last, in the unit of `rates`.

    Args:
        rates: what each lane moves while all do, shape (lanes,). While fewer do, what all had
            together is divided among those left in the same proportions, and none has more than
            `most`; what that keeps from it, none has.
        most: what a lane moves where few others do. Less than the fastest of `rates`, or None, is
            that.

    Returns:
        float: at most the sum of the rates, which it is where they are equal; the sum as well
        where a lane has moved nothing, and so nothing is known of its share. It rises with `most`.

    >>> equal_shares_gbps(np.array([3.0, 3.0]))
    6.0
    >>> round(equal_shares_gbps(np.array([1.0, 3.0])), 6)  # after 1/3 s one has 2/3 left, at 3
    3.6
    >>> round(equal_shares_gbps(np.array([1.0, 3.0]), 3.5), 6)  # and at 3.5
    3.818182
    """
    total, count = float(rates.sum()), len(rates)
    if count < 2 or rates.min() <= 0 or rates.min() == rates.max():
        return total
    # The fastest first: with equal shares they are done in this order.
    working = np.sort(rates)[::-1]
    bound = max(float(working[0]), most or 0.0)
    left = np.ones(count)
    lasting = 0.0
    while len(working):
        speeds = np.minimum(working * (total / working.sum()), bound)
        step = float((left / speeds).min())
        lasting += step
        left = left - speeds * step
        done = int(np.count_nonzero(left < 1e-9))
        working, left = working[done:], left[done:]
    return count / lasting
