"""Scales that begin at 0: round marks along them, and colours."""

from __future__ import annotations

import math

_VIRIDIS = (
    *((68, 1, 84), (72, 36, 117), (65, 68, 135), (53, 95, 141), (42, 120, 142), (33, 145, 140)),
    *((34, 168, 132), (68, 191, 112), (122, 209, 81), (189, 223, 38), (253, 231, 37)),
)
"""matplotlib's viridis at eleven places: even in lightness, and told apart by everybody."""


def viridis(share: float) -> tuple[int, int, int]:
    """The colour at `share` of the scale, 0 to 1.

    >>> viridis(0.05)
    (70, 18, 100)
    """
    place = max(0.0, min(1.0, share)) * (len(_VIRIDIS) - 1)
    low = min(int(place), len(_VIRIDIS) - 2)
    part = place - low
    first, second = _VIRIDIS[low], _VIRIDIS[low + 1]
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(first, second, strict=True))
    return red, green, blue


def steps(largest: float, count: int = 5) -> list[float]:
    """Round marks of an axis from 0 up to at least `largest`, about `count` of them.

    >>> steps(50.65)
    [0.0, 20.0, 40.0, 60.0]
    """
    if largest <= 0:
        return [0.0, 1.0]
    rough = largest / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * n for n in (1, 2, 5, 10) if unit * n >= rough * 0.999)
    return [step * n for n in range(math.ceil(largest / step - 1e-9) + 1)]
