"""What the searches for a database's rings and chains share: the task, its budget, symmetry."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np

from tccl_py.measurements.memory import RememberingSource
from tccl_py.plan.tasks import Order
from tccl_py.runtimes.free import free_hop_space
from tccl_py.runtimes.nccl.kept import direct_pairs
from tccl_py.runtimes.nccl.versions import Level
from tccl_py.search.problem import Budget, Reporter, SearchProblem, SearchResult
from tccl_py.search.strategies import AGREEMENT, find_rings
from tccl_py.topology.knowledge import Knowledge
from tccl_py.topology.machine import Machine
from tccl_py.topology.symmetry import Symmetry, keeping
from tccl_py.transfers.hops import HopSpace, Ring

ALL_SETS_UP_TO = 8
"""So many GPUs have 247 sets of two or more; of more GPUs only the sets asked for are searched."""
LEAST_IDLE = 10
"""Sets without a better ring that any search may measure before it gives up."""


class DatabaseTask(msgspec.Struct, frozen=True, kw_only=True):
    """What a database is to be made of.

    `gpus` are all GPUs it is for; `subsets` those of them that jobs use, None being all subsets, as
    far as those are few. Each hop is moved by `blocks` thread blocks through FIFOs of `fifo_bytes`.
    `rings` are rings known beforehand: they stay unless one over their GPUs is better.
    After `max_sets` measured sets only what is known beforehand is tried. `p2p_level` is the one
    that all jobs have, if they do.
    """

    machine: Machine
    knowledge: Knowledge
    source: RememberingSource
    gpus: Order
    subsets: tuple[Order, ...] | None
    blocks: int
    fifo_bytes: int
    rings: tuple[Ring, ...]
    max_sets: int
    reporter: Reporter
    p2p_level: Level | None = None

    def hop_space(self, gpus: Sequence[int]) -> HopSpace:
        """The hops between some of the GPUs."""
        return free_hop_space(
            self.machine,
            self.knowledge,
            gpus=gpus,
            blocks=self.blocks,
            fifo_bytes=self.fifo_bytes,
            direct=direct_pairs(self.machine, self.knowledge, self.p2p_level, gpus=self.gpus),
        )

    def sets_of_gpus(self, *, least: int) -> tuple[Order, ...]:
        """The sets of `least` GPUs or more to search, largest first."""
        if self.subsets is None and len(self.gpus) <= ALL_SETS_UP_TO:
            sizes = range(len(self.gpus), least - 1, -1)
            return tuple(one for size in sizes for one in itertools.combinations(self.gpus, size))
        named = {tuple(sorted(one)) for one in (self.gpus, *(self.subsets or ()))}
        wanted = [one for one in named if len(one) >= least]
        return tuple(sorted(wanted, key=lambda one: (-len(one), one)))

    def found(self, problem: SearchProblem) -> SearchResult:
        """The answer of a search, cut short where the sets are used up.

        Raises:
            SearchError: there is no ring.
            MeasurementError: a set could not be measured.
            KeyboardInterrupt: it was interrupted; half a database fails jobs.
        """
        left = self.max_sets - self.source.sets_measured
        if left <= 0:
            known = msgspec.structs.replace(problem, budget=Budget())
            result = find_rings(known, strategy="nccl-order", reporter=self.reporter)
        else:
            # The fewer sets are left, the sooner a search gives up: others come after it.
            idle = int((problem.budget.idle_sets or 0) * left / self.max_sets)
            sets = min(problem.budget.sets or left, left)
            budget = Budget(sets=sets, idle_sets=max(LEAST_IDLE, idle))
            limited = msgspec.structs.replace(problem, budget=budget)
            result = find_rings(limited, reporter=self.reporter)
        if result.cancelled:
            raise KeyboardInterrupt
        return result


def fixing(symmetry: Symmetry, points: Sequence[str]) -> Symmetry:
    """The listed elements that keep a set of points as it is."""
    columns = [symmetry.points.index(point) for point in points]
    moved = np.sort(symmetry.elements[:, columns], axis=1)
    return keeping(symmetry, (moved == np.sort(columns)).all(axis=1))


def agrees(rate_gbps: float, expected_gbps: float, relative_error: float) -> bool:
    """Whether a rate is what a symmetry says, as far as noise lets tell."""
    allowed = AGREEMENT + 6 * relative_error
    return abs(rate_gbps - expected_gbps) <= allowed * expected_gbps
