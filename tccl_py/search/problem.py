"""Problem, result and reporter of a search, and the hops of a space as integers."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tccl_py.errors import SearchError, check_type
from tccl_py.files import check_types
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.rings import Hop, HopSpace, Ring, RingSet, ring, ring_set
from tccl_py.model.symmetry import FlowCodes, Symmetry, smallest_row
from tccl_py.model.transfer import TransferSet, transfer_set


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Limits after which a search stops without a proof; None is no limit.

    Ring counts share `sets` measured and `seconds`; `idle_sets` ends the search of one ring count
    after so many sets without a better ring.
    """

    sets: Annotated[int, msgspec.Meta(ge=1)] | None = None
    seconds: Annotated[float, msgspec.Meta(gt=0)] | None = None
    idle_sets: Annotated[int, msgspec.Meta(ge=1)] | None = None


def check_budget(budget: Budget) -> None:
    """Raise InputError unless this is a budget whose limits can be kept."""
    check_type(budget, "budget", Budget)
    check_types(budget, where="`budget`")


class SetRule(Protocol):
    """A rule that the rings of a set must follow together; it looks at marks of their hops."""

    def mark(self, hop: Hop) -> Hashable:
        """Return what the rule looks at of a hop; None is nothing."""

    def admits(self, rings: Sequence[Sequence[Any]]) -> bool:
        """Return whether a set that follows the rule can begin with rings of these marks.

        The last ring may be unfinished. Every ring begins at the first GPU of its space.
        """


class SearchProblem(msgspec.Struct, frozen=True, kw_only=True):
    """Find the ring set with the highest score: k x the slowest transfer of all k rings
    together."""

    spaces: Mapping[int, HopSpace]
    """The hops open to each ring of a set, by the number of rings."""
    source: BandwidthSource
    symmetry: Symmetry
    """Of the machine; rules must respect it."""
    known: tuple[tuple[Ring | tuple[int, ...], ...], ...] = ()
    """Ring sets that are measured first, so that the answer is never below them: GPU orders, as
    NCCL's own, or rings of another space."""
    rules: Mapping[int, SetRule] = {}
    """The rule for a set of so many rings."""
    cuts: tuple[frozenset[int], ...] = ()
    """Groups of GPUs for upper bounds: any are valid, good ones shorten proofs."""
    floor_gbps: float = 0.0
    """Scores up to this are not searched for."""
    budget: Budget = Budget()
    tolerance: float = 0.01
    """The relative gap at which an answer counts as proven."""
    noise: float = 0.0
    """The relative standard deviation of a measurement that does not state its own."""
    check_bound: bool = True
    """Whether more sets are measured, as a check of what the bound assumes."""

    @property
    def gpus(self) -> tuple[int, ...]:
        """The GPUs to join, ascending."""
        return next(iter(self.spaces.values())).gpus


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The best ring set found, and an upper bound."""

    strategy: str
    rings: RingSet
    rate_gbps: float
    """The score of the rings, GB/s."""
    bound_gbps: float | None
    """No ring set of the searched sizes is above it, as far as the assumptions are true; None is
    unknown."""
    proven: bool
    """Whether the rings are within the tolerance of a bound without assumptions."""
    assumptions: tuple[str, ...]
    """What was not checked for all sets, in sentences."""
    sets_measured: int
    """New measurements."""
    sets_remembered: int
    """Sets of a journal or an earlier search."""
    sets_by_symmetry: int
    """Sets known by an image or a repetition."""
    seconds: float
    simulated: bool
    assumed: bool
    cancelled: bool = False
    symmetric: bool = False
    """Whether measurements confirmed the symmetry that the problem describes."""
    notices: tuple[str, ...] = ()

    @property
    def sets(self) -> int:
        """The sets asked for: what a journal answers counts, so that a resumed run goes on as it
        would."""
        return self.sets_measured + self.sets_remembered


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a search; `best_gbps` is 0 before the first ring is known."""

    rings_in_set: int
    sets_measured: int
    best_gbps: float
    bound_gbps: float


Reporter = Callable[[Progress], None]
"""Told of each measurement and step of a search; a KeyboardInterrupt cancels the search."""


def check_problem(problem: SearchProblem) -> None:
    """Check that rings may exist.

    Raises SearchError: fewer than two GPUs, no ring count, or a GPU without a hop in or out.
    """
    if not problem.spaces:
        raise SearchError("no number of rings to search for")
    for count, space in problem.spaces.items():
        if count < 1:
            raise SearchError(f"{count} rings are none")
        if len(space.gpus) < 2:
            raise SearchError(f"a ring needs at least 2 GPUs, not {len(space.gpus)}")
        for gpu in space.gpus:
            peers = [peer for peer in space.gpus if peer != gpu]
            if not any(space.between(gpu, peer) for peer in peers):
                raise SearchError(f"{space.name}: no hop leaves GPU {gpu}")
            if not any(space.between(peer, gpu) for peer in peers):
                raise SearchError(f"{space.name}: no hop reaches GPU {gpu}")


# Hops as small integers, so that bounds and symmetries are array operations.

MAX_CLOSED = 2
"""Sets of up to so many hops have few enough images to list them all for any group."""

Hops = tuple[int, ...]
"""Hop numbers, ascending; a number that comes twice is a hop that two rings take."""


class HopIndex:
    """The hops of a space, numbered in the order of their flows, where G9 is before G10.

    `pair[i, j]` lists the numbers of the hops from the i-th to the j-th GPU, padded with -1.
    `inside` marks the symmetry elements that take every hop to a hop of the space; `images[e, h]`
    is the image of hop h under the e-th of these elements.
    """

    def __init__(self, space: HopSpace, symmetry: Symmetry) -> None:
        self.space = space
        self.gpus = space.gpus
        self.hops: tuple[Hop, ...] = tuple(sorted(space, key=lambda hop: hop.flow))
        self.texts = tuple(str(hop.flow) for hop in self.hops)
        self.number = {hop: number for number, hop in enumerate(self.hops)}
        position = {gpu: i for i, gpu in enumerate(self.gpus)}
        self.source = np.array([position[hop.source] for hop in self.hops])
        self.target = np.array([position[hop.target] for hop in self.hops])
        self.bounces = np.array([hop.flow.is_bounce for hop in self.hops])
        self.pair = self._pairs()
        self.symmetry = symmetry
        table = self._images(symmetry, symmetry.elements)
        self.inside: npt.NDArray[np.bool_] = np.logical_and.reduce(table >= 0, axis=1)
        self.images: npt.NDArray[np.int32] = table[self.inside]
        self._moves = self._generator_images(symmetry)
        self._smallest: dict[Hops, Hops] = {}
        self._marks: dict[SetRule, list[Hashable]] = {}

    @property
    def is_symmetric(self) -> bool:
        """Whether hops have images other than themselves."""
        return len(self.images) > 1

    def _pairs(self) -> npt.NDArray[np.int64]:
        count = len(self.gpus)
        width = max(map(len, self.space.hops.values()), default=1)
        table = np.full((count, count, width), -1)
        free: defaultdict[tuple[int, int], Iterator[int]] = defaultdict(itertools.count)
        for number, (i, j) in enumerate(zip(self.source, self.target, strict=True)):
            table[i, j, next(free[i, j])] = number
        return table

    def _generator_images(self, symmetry: Symmetry) -> npt.NDArray[np.int32] | None:
        """Return images under the generators of a group too large to list; None if listed."""
        if symmetry.order == len(symmetry.elements):
            return None
        position = {point: i for i, point in enumerate(symmetry.points)}
        rows = [[position[g[point]] for point in symmetry.points] for g in symmetry.generators]
        table = self._images(symmetry, np.array(rows, dtype=np.int16))
        inside: npt.NDArray[np.int32] = table[np.logical_and.reduce(table >= 0, axis=1)]
        return inside

    def _images(self, symmetry: Symmetry, elements: npt.NDArray[np.int16]) -> npt.NDArray[np.int32]:
        """Return the image of each hop under each element, -1 if the space lacks the image."""
        codes, flows = FlowCodes(symmetry), [hop.flow for hop in self.hops]
        (own,) = codes.images(flows, symmetry.elements[:1])
        moved = codes.images(flows, elements)
        order = np.argsort(own)
        found = order[np.minimum(np.searchsorted(own[order], moved), len(own) - 1)]
        return np.where(own[found] == moved, found, -1).astype(np.int32)

    def marks(self, rule: SetRule) -> list[Hashable]:
        """Return the rule's mark of each hop."""
        if rule not in self._marks:
            self._marks[rule] = [rule.mark(hop) for hop in self.hops]
        return self._marks[rule]

    def transfer_set(self, hops: Sequence[int]) -> TransferSet:
        """Return the flows of `hops`, all together."""
        return transfer_set(self.hops[number].flow for number in hops)

    def text(self, hops: Sequence[int]) -> str:
        """Return the text of `transfer_set`."""
        return " ".join(sorted([self.texts[number] for number in hops]))

    def canonical(self, hops: Sequence[int]) -> Hops:
        """Return the smallest image of `hops` under the symmetry, as far as it is listed."""
        key = tuple(sorted(hops))
        if key not in self._smallest:
            if self._moves is not None and len(key) <= MAX_CLOSED:
                rows = [tuple(row) for row in self.orbit(key).tolist()]
                self._smallest.update(dict.fromkeys(rows, rows[0]))
            else:
                self._smallest[key] = smallest_row(np.sort(self.images[:, key], axis=1))
        return self._smallest[key]

    def orbit(self, hops: Sequence[int]) -> npt.NDArray[np.int32]:
        """Return distinct images of `hops`, one sorted row each, in ascending order.

        All images for up to MAX_CLOSED hops; for more hops, images under the listed elements.
        """
        if self._moves is None or len(hops) > MAX_CLOSED:
            return self._distinct(self.images[:, list(hops)])
        rows, count = np.array([sorted(hops)], dtype=np.int32), 0
        while len(rows) > count:
            count = len(rows)
            images = self._moves[:, rows].reshape(-1, len(hops))
            rows = self._distinct(np.concatenate([rows, images]))
        return rows

    def _distinct(self, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return distinct rows of hops, each sorted, in ascending order."""
        rows, count = np.sort(rows, axis=1), len(self.hops)
        if count ** rows.shape[1] >= 1 << 63:
            return np.unique(rows, axis=0)
        # One number a row is sorted much faster than rows are.
        weights = count ** np.arange(rows.shape[1], dtype=np.int64)[::-1]
        numbers = np.unique(rows @ weights)
        return (numbers[:, None] // weights % count).astype(np.int32)

    def rings(self, sequences: Sequence[Sequence[int]]) -> RingSet:
        """Return the ring set of sequences of hop numbers."""
        return ring_set([ring([self.hops[hop] for hop in sequence]) for sequence in sequences])


# All ring sets of small machines.
def count_ring_sets(space: HopSpace, rings: int) -> int:
    """Return an upper limit on the sets of `rings` rings: all orders, all mechanisms."""
    widest = max((len(choices) for choices in space.hops.values()), default=0)
    single = math.factorial(len(space.gpus) - 1) * widest ** len(space.gpus)
    return math.comb(single + rings - 1, rings)


def all_rings(index: HopIndex) -> Iterator[Hops]:
    """Yield every ring once, as hop numbers from the first GPU on."""
    first, *rest = range(len(index.gpus))
    for order in itertools.permutations(rest):
        pairs = itertools.pairwise((first, *order, first))
        choices = [[hop for hop in index.pair[pair].tolist() if hop >= 0] for pair in pairs]
        yield from itertools.product(*choices)


def all_ring_sets(
    index: HopIndex, rings: int, rule: SetRule | None = None
) -> Iterator[tuple[Hops, ...]]:
    """Yield every set of `rings` rings that the rule admits, once."""
    for found in itertools.combinations_with_replacement(all_rings(index), rings):
        if admits(index, found, rule):
            yield found


def random_rings(index: HopIndex, count: int, chance: random.Random) -> tuple[Hops, ...]:
    """Draw `count` rings, each order and mechanism alike; () if two neighbours have no hop."""
    rest = range(1, len(index.gpus))
    rings = [itertools.pairwise((0, *chance.sample(rest, len(rest)), 0)) for _ in range(count)]
    choices = [[[hop for hop in index.pair[pair] if hop >= 0] for pair in one] for one in rings]
    if not all(map(all, choices)):
        return ()
    return tuple(tuple(int(chance.choice(hops)) for hops in one) for one in choices)


def admits(index: HopIndex, rings: Sequence[Sequence[int]], rule: SetRule | None) -> bool:
    """Return whether the rule admits these rings; the last ring may be unfinished."""
    if rule is None:
        return True
    marks = index.marks(rule)
    return rule.admits([[m for hop in ring if (m := marks[hop]) is not None] for ring in rings])
