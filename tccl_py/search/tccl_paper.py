"""The search of the TCCL paper: a priority queue of partial rings, every child measured.

Paths are popped by measured rate, highest first, as in Dijkstra's algorithm; equal rates first in,
first out (Kim, Ryu, Lee: TCCL, ASPLOS 2024). The paper's cache treats GPUs of one NUMA node as
interchangeable (NUMA isomorphism). Here two GPUs are interchangeable if exchanging them is an
automorphism: the same on the paper's machines, and right for switches and NVLink pairs too. Nothing
of the paper's code is used.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from tccl_py.model.rings import HopSpace
from tccl_py.model.symmetry import Symmetry
from tccl_py.model.transfer import Flow
from tccl_py.search.evaluator import Evaluator, Incumbent, Sequences
from tccl_py.search.problem import HopIndex, SetRule


class Path(msgspec.Struct, frozen=True, kw_only=True):
    """A partial ring set with its measured rate, GB/s; `at` is the path's GPU positions."""

    rate: float
    rings: tuple[tuple[int, ...], ...]
    at: tuple[int, ...]
    hops: tuple[int, ...]


def eager_rings(
    evaluator: Evaluator,
    incumbent: Incumbent,
    index: HopIndex,
    *,
    count: int,
    classes: Mapping[int, int],
) -> None:
    """Find the best set of `count` rings; the cache proves nothing, so there is no bound.

    `classes` gives each GPU the number of its class of interchangeable GPUs.

    Raises:
        BudgetSpentError: the budget is used up.
    """
    cache: dict[str, float] = {}
    serial = itertools.count()
    start = Path(rate=float("inf"), rings=(), at=(0,), hops=())
    queue = [(-start.rate, next(serial), start)]
    while queue:
        _, _, path = heapq.heappop(queue)
        if len(path.rings) == count:
            hops = [hop for ring in path.rings for hop in ring]
            rate = evaluator.rate(index, hops)
            at = evaluator.sets_measured
            incumbent.offer(count * rate, index, path.rings, at=at)
            return
        for child in _children(index, path):
            hops = [*itertools.chain.from_iterable(child.rings), *child.hops]
            key = _class_key(index, hops, classes)
            if key in cache:
                evaluator.sets_by_symmetry += 1
            else:
                cache[key] = evaluator.rate(index, hops)
            rate = min(path.rate, cache[key])
            rated = msgspec.structs.replace(child, rate=rate)
            heapq.heappush(queue, (-rate, next(serial), rated))


def _children(index: HopIndex, path: Path) -> list[Path]:
    rest = [i for i in range(len(index.gpus)) if i not in path.at]
    children = []
    for target in rest or [path.at[0]]:
        for hop in index.pair[path.at[-1], target].tolist():
            if hop < 0:
                continue
            hops = (*path.hops, hop)
            if rest:
                child = Path(rate=0.0, rings=path.rings, at=(*path.at, target), hops=hops)
            else:
                child = Path(rate=0.0, rings=(*path.rings, hops), at=(0,), hops=())
            children.append(child)
    return children


def interchangeable(symmetry: Symmetry, gpus: Sequence[int]) -> dict[int, int]:
    """Return each GPU's class: the least GPU it can change places with, all other GPUs fixed."""
    columns = [symmetry.points.index(f"G{gpu}") for gpu in gpus]
    moves = symmetry.elements[:, columns]
    swaps = moves[(moves != columns).sum(axis=1) == 2]
    classes = {gpu: gpu for gpu in gpus}
    for row in swaps.tolist():
        low, high = (gpu for gpu, at, to in zip(gpus, columns, row, strict=True) if at != to)
        classes[high] = min(classes[high], classes[low])
    return classes


def _class_key(index: HopIndex, hops: list[int], classes: Mapping[int, int]) -> str:
    """Return the hops with each GPU renamed to its class and order of appearance."""
    names: dict[int, str] = {}
    seen: Counter[int] = Counter()
    for hop in hops:
        for gpu in (index.hops[hop].source, index.hops[hop].target):
            if gpu not in names:
                seen[classes[gpu]] += 1
                names[gpu] = f"{classes[gpu]}.{seen[classes[gpu]]}"
    return " ".join(
        f"{names[hop.source]}>{names[hop.target]}:{_mechanism(hop.flow)}"
        for hop in (index.hops[number] for number in hops)
    )


def _mechanism(flow: Flow) -> str:
    """Return the mechanism of a flow, without its GPUs."""
    return ",".join(
        f"{t.operation}{t.executor.kind}{t.destination if t.destination.kind == 'C' else ''}"
        for t in flow.transfers
    )


# All ring sets, for small machines and as the reference of the strategies.


def count_ring_sets(space: HopSpace, rings: int) -> int:
    """Return an upper limit on the sets of `rings` rings: all orders, all mechanisms.

    >>> from tccl_py.model.rings import Hop
    >>> from tccl_py.model.transfer import direct_write
    >>> pairs = [(i, j) for i in range(4) for j in range(4) if i != j]
    >>> hops = {(i, j): (Hop(i, j, direct_write(i, j)),) for i, j in pairs}
    >>> count_ring_sets(HopSpace(name="toy", gpus=(0, 1, 2, 3), hops=hops), 2)
    21
    """
    widest = max((len(choices) for choices in space.hops.values()), default=0)
    single = math.factorial(len(space.gpus) - 1) * widest ** len(space.gpus)
    return math.comb(single + rings - 1, rings)


def all_rings(index: HopIndex) -> Iterator[tuple[int, ...]]:
    """Yield every ring once, as hop numbers from the first GPU on."""
    first, *rest = range(len(index.gpus))
    for order in itertools.permutations(rest):
        stations = (first, *order, first)
        choices = [
            [hop for hop in index.pair[i, j].tolist() if hop >= 0]
            for i, j in itertools.pairwise(stations)
        ]
        yield from itertools.product(*choices)


def all_ring_sets(index: HopIndex, rings: int, rule: SetRule | None = None) -> Iterator[Sequences]:
    """Yield every set of `rings` rings that the rule admits, once."""
    for found in itertools.combinations_with_replacement(all_rings(index), rings):
        if admitted(index, found, rule):
            yield found


def admitted(index: HopIndex, rings: Sequence[Sequence[int]], rule: SetRule | None) -> bool:
    """Return whether the rule admits these rings; the last ring may be unfinished."""
    if rule is None:
        return True
    return rule.admits([[index.hops[number] for number in ring] for ring in rings])
