"""The sets of pairs that are timed: those asked for, or what the number of GPUs allows."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tccl_py.errors import InputError
from tccl_py.overlap.orders import Pair

_PAIR = re.compile(r"G([0-9]{1,4})->G([0-9]{1,4})", re.ASCII)
_MOST_PAIRS = 8


def default_sets(places: int) -> tuple[tuple[Pair, ...], ...]:
    """Two pairs each: both ways, twice the same; from 3 GPUs on out of one, into one, through one.

    >>> [len(default_sets(places)) for places in (2, 3, 4)]
    [2, 5, 6]
    """
    both, twice = ((0, 1), (1, 0)), ((0, 1), (0, 1))
    out, into, through = ((0, 1), (0, 2)), ((1, 0), (2, 0)), ((1, 0), (0, 2))
    chosen = [both, twice]
    if places > 2:
        chosen += [out, into, through]
    if places > 3:
        chosen.append(((0, 1), (2, 3)))
    return tuple(tuple(Pair(source=one, target=other) for one, other in pairs) for pairs in chosen)


def parse_sets(texts: Sequence[str], gpus: Sequence[int]) -> tuple[tuple[Pair, ...], ...]:
    """Sets such as `G0->G2 G0->G3`, as places in `gpus`.

    >>> parse_sets(["G4->G6"], (4, 6))
    ((Pair(source=0, target=1),),)

    Raises:
        InputError: no such set, too many pairs, or a GPU that is not among them.
    """
    return tuple(_parse_set(text, gpus) for text in texts)


def _parse_set(text: str, gpus: Sequence[int]) -> tuple[Pair, ...]:
    where = f"set {text[:60]!r}"
    words = text.split()
    if not 1 <= len(words) <= _MOST_PAIRS:
        raise InputError(
            where, f"has {len(words)} pairs", f"1 to {_MOST_PAIRS}, as 'G0->G1 G2->G3'"
        )
    pairs = []
    for word in words:
        match = _PAIR.fullmatch(word)
        if match is None:
            raise InputError(where, f"has {word[:30]!r}", "write pairs of GPUs, as G0->G1")
        ends = [int(one) for one in match.groups()]
        for gpu in ends:
            if gpu not in gpus:
                known = ", ".join(map(str, gpus))
                raise InputError(where, f"names GPU {gpu}", f"the job has {known}")
        if ends[0] == ends[1]:
            raise InputError(where, f"has {word}", "a transfer joins two GPUs")
        pairs.append(Pair(source=gpus.index(ends[0]), target=gpus.index(ends[1])))
    return tuple(pairs)
