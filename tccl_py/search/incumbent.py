"""The best ring set so far, and those so close that noise may have misjudged them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tccl_py.search.hop_index import HopIndex

Sequences = tuple[tuple[int, ...], ...]

MAX_FINALISTS = 64
"""Runners-up kept; more matter only where measurements are very noisy."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A measured ring set: one sequence of hop numbers a ring, and its score in GB/s."""

    score: float
    index: HopIndex
    sequences: Sequences

    @property
    def hops(self) -> tuple[int, ...]:
        """All hops of all rings."""
        return tuple(hop for sequence in self.sequences for hop in sequence)

    @property
    def bounces(self) -> int:
        """How many of the hops bounce."""
        return int(self.index.bounces[list(self.hops)].sum())


class Incumbent:
    """Keeps the best candidate and the runners-up.

    `error` is the relative standard error of a score, the largest seen; `floor` is a score that
    is reached elsewhere.
    """

    def __init__(self, *, error: float = 0.0, floor: float = 0.0) -> None:
        self.error = error
        self._floor = floor
        self._candidates: list[Candidate] = []
        self.improved_at = 0

    @property
    def score(self) -> float:
        """The best score so far, GB/s; 0 before the first."""
        return self._candidates[0].score if self._candidates else 0.0

    @property
    def surely_reached(self) -> float:
        """The score less what luck may have added to it: the best of many noisy ones is lucky."""
        return max(self._floor, self.score * (1 - 2 * self.error))

    @property
    def best(self) -> Candidate | None:
        """The best candidate, if there is one."""
        return self._candidates[0] if self._candidates else None

    def offer(
        self, score: float, index: HopIndex, sequences: Sequence[Sequence[int]], *, at: int
    ) -> None:
        """Take note of a measured ring set; on equal scores fewer bounces and rings win.

        `at` is how many sets had been measured by then; `improved_at` keeps it for the best.
        """
        if score > self.score:
            self.improved_at = at
        candidate = Candidate(
            score=score, index=index, sequences=tuple(tuple(one) for one in sequences)
        )
        self._candidates.append(candidate)
        self._candidates.sort(key=lambda c: (-round(c.score, 6), c.bounces, len(c.sequences)))
        del self._candidates[MAX_FINALISTS:]

    def finalists(self) -> list[Candidate]:
        """Candidates whose score is within three standard errors of the best."""
        return [c for c in self._candidates if c.score >= self.score * (1 - 3 * self.error)]

    def forget(self) -> None:
        """Forget all candidates, because what they were judged by no longer holds."""
        self._candidates.clear()
