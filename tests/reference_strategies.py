"""Reference strategies of the search: the TCCL paper's own, and brute force.

The paper's search (Kim, Ryu, Lee: TCCL, ASPLOS 2024) pops partial rings by measured rate, highest
first, as in Dijkstra's algorithm, and measures every child. Its cache treats GPUs of one NUMA node
as interchangeable; here two GPUs are interchangeable if exchanging them is an automorphism. Nothing
of the paper's code is used.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from tccl_py.errors import SearchError
from tccl_py.model.symmetry import Symmetry
from tccl_py.model.transfer import Flow
from tccl_py.search.problem import HopIndex, all_ring_sets, count_ring_sets
from tccl_py.search.strategies import Run

MAX_BRUTE_FORCE = 200_000
"""Ring sets that brute force measures at most; more are skipped, with their number."""


class SkippedError(SearchError):
    """A strategy would need too many states; `states` is their number."""

    def __init__(self, states: int) -> None:
        super().__init__(f"brute force skipped: {states} states")
        self.states = states


def brute_force(run: Run) -> None:
    """Measure every ring set."""
    spaces = run.problem.spaces
    states = sum(count_ring_sets(space, count) for count, space in spaces.items())
    if states > MAX_BRUTE_FORCE:
        raise SkippedError(states)
    for count in spaces:
        run.begin(count)
        index = run.plain_index(count)
        for sequences in all_ring_sets(index, count, run.problem.rules.get(count)):
            run.offer(index, sequences)
        run.bounds[count] = run.incumbent.score


def tccl(run: Run) -> None:
    """Measure every child of a state at once; interchangeable GPUs share results, no bound."""
    classes = interchangeable(run.problem.symmetry, run.problem.gpus)
    for count in sorted(run.problem.spaces):
        run.begin(count)
        _eager_rings(run, run.plain_index(count), count, classes)


class Path(msgspec.Struct, frozen=True, kw_only=True):
    """A partial ring set with its measured rate, GB/s; `at` is the path's GPU positions."""

    rate: float
    rings: tuple[tuple[int, ...], ...]
    at: tuple[int, ...]
    hops: tuple[int, ...]


def _eager_rings(run: Run, index: HopIndex, count: int, classes: Mapping[int, int]) -> None:
    cache: dict[str, float] = {}
    serial = itertools.count()
    start = Path(rate=float("inf"), rings=(), at=(0,), hops=())
    queue = [(-start.rate, next(serial), start)]
    while queue:
        _, _, path = heapq.heappop(queue)
        if len(path.rings) == count:
            run.offer(index, path.rings)
            return
        for child in _children(index, path):
            hops = [*itertools.chain.from_iterable(child.rings), *child.hops]
            key = _class_key(index, hops, classes)
            if key in cache:
                run.evaluator.sets_by_symmetry += 1
            else:
                cache[key] = run.evaluator.rate(index, hops)
            rated = msgspec.structs.replace(child, rate=min(path.rate, cache[key]))
            heapq.heappush(queue, (-rated.rate, next(serial), rated))


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
