"""Why is a set slow? The smallest part of it that is slow already, with few measurements.

The method is QuickXplain (Junker, AAAI 2004): halve the set, keep what is needed. It asks about
2 m log2(n / m) + 2 m times for a culprit of m hops among n.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

Slow = Callable[[Sequence[int]], bool]
"""Tells whether hops are slow together; supersets of slow sets are slow."""


def smallest_slow_part(hops: Sequence[int], slow: Slow) -> tuple[int, ...]:
    """A subset that is slow and of which no proper part is; `hops` themselves must be slow.

    >>> smallest_slow_part([1, 2, 3, 4, 5], lambda part: {2, 5} <= set(part))
    (2, 5)
    """
    return tuple(sorted(_needed([], False, list(hops), _remembered(slow))))


def _needed(beside: list[int], grown: bool, hops: list[int], slow: Slow) -> list[int]:
    if grown and slow(beside):
        return []
    if len(hops) == 1:
        return hops
    half = len(hops) // 2
    first, second = hops[:half], hops[half:]
    from_second = _needed(beside + first, True, second, slow)
    from_first = _needed(beside + from_second, bool(from_second), first, slow)
    return from_first + from_second


def _remembered(slow: Slow) -> Slow:
    """`slow`, not asked again about parts of sets known to be quick."""
    quick: list[Counter[int]] = []

    def asked(part: Sequence[int]) -> bool:
        count = Counter(part)
        if any(count <= known for known in quick):
            return False
        answer = slow(part)
        if not answer:
            quick.append(count)
        return answer

    return asked
