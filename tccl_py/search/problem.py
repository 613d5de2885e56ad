"""What a search is asked, what it answers, and who watches it: one signature for all strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from tccl_py.errors import SearchError
from tccl_py.measurements.measurement import BandwidthSource
from tccl_py.topology.symmetry import Symmetry
from tccl_py.transfers.hops import Hop, HopSpace, Ring, RingSet


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """When to stop without a proof; None is "no limit".

    `sets` measured and `seconds` are for the whole search, and shared between ring counts;
    `idle_sets` ends the search of one ring count after so many sets without a better ring.
    """

    sets: int | None = None
    seconds: float | None = None
    idle_sets: int | None = None


class SetRule(Protocol):
    """What the rings of a set must keep to together, beside the hops that there are."""

    def admits(self, rings: Sequence[Sequence[Hop]]) -> bool:
        """Whether a set of rings that keeps to it can begin so; the last ring may be unfinished.

        Every ring begins at the first GPU of its space.
        """


class SearchProblem(msgspec.Struct, frozen=True, kw_only=True):
    """Find the ring set with the highest score, k x the slowest transfer of all k rings together.

    `spaces[k]` holds the hops open to each ring of a set of k. `orders` are rings known
    beforehand, as GPU orders (NCCL's own choice, say): they are tried first, and the answer is
    never below them; so are `known`, rings that another space had. `rules[k]` is what the rings of
    a set of k must keep to, and `symmetry` must keep to it too. `cuts` are groups of GPUs that
    share a way out, for upper bounds; any groups are right, good ones make proofs quicker. Scores
    up to `floor_gbps` are of no interest: no effort is spent on them. `tolerance` is the relative
    gap at which an answer counts as proven. `noise` is the relative standard deviation of one
    measurement, where measurements do not tell it themselves.
    """

    spaces: Mapping[int, HopSpace]
    source: BandwidthSource
    symmetry: Symmetry
    orders: tuple[tuple[tuple[int, ...], ...], ...] = ()
    known: tuple[tuple[Ring, ...], ...] = ()
    rules: Mapping[int, SetRule] = {}
    cuts: tuple[frozenset[int], ...] = ()
    floor_gbps: float = 0.0
    budget: Budget = Budget()
    tolerance: float = 0.01
    noise: float = 0.0

    @property
    def gpus(self) -> tuple[int, ...]:
        """The GPUs to join, ascending."""
        return next(iter(self.spaces.values())).gpus


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The best ring set found, and how good it is known to be.

    `rate_gbps` is the score of `rings`, GB/s; no ring set of the searched sizes is above
    `bound_gbps`, as far as measurements and symmetries hold (None: nothing is known); `proven`
    means the two are within the tolerance. `sets_measured` counts what had to be measured,
    `sets_remembered` what a journal or an earlier search answered, `sets_by_symmetry` what a
    measured image or repetition answered.
    """

    strategy: str
    rings: RingSet
    rate_gbps: float
    bound_gbps: float | None
    proven: bool
    sets_measured: int
    sets_remembered: int
    sets_by_symmetry: int
    seconds: float
    simulated: bool
    assumed: bool
    cancelled: bool = False
    notices: tuple[str, ...] = ()


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a search is; `best_gbps` is 0 before the first ring is known."""

    strategy: str
    rings_in_set: int
    sets_measured: int
    best_gbps: float
    bound_gbps: float


class Reporter(Protocol):
    """Watches a search; raising KeyboardInterrupt from `update` cancels it."""

    def update(self, progress: Progress) -> None:
        """Called after every measurement and every few hundred states."""


class SilentReporter:
    """A reporter that says nothing."""

    def update(self, progress: Progress) -> None:
        """Say nothing."""


def check_problem(problem: SearchProblem) -> None:
    """Refuse a problem that no ring can solve.

    Raises:
        SearchError: fewer than two GPUs, no ring count, or a GPU without a hop in or out.
    """
    if not problem.spaces:
        raise SearchError("no number of rings to search for")
    for count, space in problem.spaces.items():
        if count < 1:
            raise SearchError(f"{count} rings are none")
        if len(space.gpus) < 2:
            raise SearchError(f"a ring needs at least 2 GPUs, not {len(space.gpus)}")
        for gpu in space.gpus:
            others = [other for other in space.gpus if other != gpu]
            if not any(space.between(gpu, other) for other in others):
                raise SearchError(f"{space.name}: no hop leaves GPU {gpu}")
            if not any(space.between(other, gpu) for other in others):
                raise SearchError(f"{space.name}: no hop reaches GPU {gpu}")
