"""Chain tables: the best chain through a node for every way in and every way out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import msgspec
import numpy as np

from tccl_py.errors import MeasurementError, SearchError
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.rings import Hop, HopSpace, Ring, ring
from tccl_py.model.symmetry import Symmetry
from tccl_py.search.chains import (
    Chain,
    Pairing,
    chain_of,
    chain_space,
    end_images,
    symmetry_keeping,
)
from tccl_py.search.evaluator import Ledger, trusted_index
from tccl_py.search.problem import Budget, HopIndex, Reporter, SearchProblem, SearchResult
from tccl_py.search.strategies import SPOT_CHECKS, find_rings

TABLE_BUDGET = Budget(sets=60, idle_sets=15)
"""For one cell of a table; cells that a symmetry exchanges share one search."""
PAIRING_BUDGET = Budget(sets=200, idle_sets=40)


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """The best chain found between one entry and one exit, its rate, and what bounds all others."""

    chain: Chain
    rate_gbps: float
    bound_gbps: float | None
    proven: bool


class NodeChains(msgspec.Struct, frozen=True, kw_only=True):
    """The best chains of one node: `cells[entry, exit]`, by the names that were given to the ends.

    A pair that no chain joins has no cell: one GPU cannot be the first and the last of several.
    """

    cells: Mapping[tuple[str, str], Cell]
    searches: int
    sets_measured: int
    simulated: bool
    assumed: bool

    def rate(self, entry: str, leave: str) -> float:
        """GB/s of the best chain, 0 if there is none."""
        cell = self.cells.get((entry, leave))
        return cell.rate_gbps if cell is not None else 0.0


def chain_table(
    inner: HopSpace,
    entries: Mapping[str, Sequence[Hop]],
    exits: Mapping[str, Sequence[Hop]],
    *,
    source: BandwidthSource,
    symmetry: Symmetry,
    cuts: Sequence[frozenset[int]] = (),
    budget: Budget = TABLE_BUDGET,
    reporter: Reporter | None = None,
) -> NodeChains:
    """The best chain over all GPUs of `inner` for every pair of an entry and an exit.

    An end is a name and the hops it stands for: `{"N0": [...]}` all landings of NIC 0, `{"N0 G3":
    [...]}` just one. Pairs that a symmetry of the node exchanges are searched once; it is
    spot-checked by measuring before.

    Raises:
        MeasurementError: the source cannot measure what is needed.
    """
    whole = chain_space(
        inner,
        *(dict.fromkeys(hop for hops in e.values() for hop in hops) for e in (entries, exits)),
    )
    ledger = Ledger(source, budget=Budget(), noise=0.0)
    index = trusted_index(whole, symmetry, ledger, checks=SPOT_CHECKS)
    table = _Table(index, entries, exits)
    measured, searches, assumed = ledger.sets_measured, 0, ledger.assumed
    cells: dict[tuple[str, str], Cell] = {}
    for pair in product(entries, exits):
        if pair in table.done:
            continue
        result = _searched(
            chain_space(inner, entries[pair[0]], exits[pair[1]]),
            source=source,
            symmetry=index.symmetry,
            cuts=tuple(cuts),
            budget=budget,
            reporter=reporter,
        )
        searches += 1
        found = None
        if result is not None:
            measured += result.sets_measured
            assumed |= result.assumed
            found = Cell(
                chain=chain_of(result.rings.rings[0]),
                rate_gbps=result.rate_gbps,
                bound_gbps=result.bound_gbps,
                proven=result.proven,
            )
        cells.update(table.images(pair, found))
    return NodeChains(
        cells=cells,
        searches=searches,
        sets_measured=measured,
        simulated=source.simulated,
        assumed=assumed,
    )


def paired_chains(
    space: HopSpace,
    pairing: Pairing,
    *,
    source: BandwidthSource,
    symmetry: Symmetry,
    cuts: Sequence[frozenset[int]] = (),
    known: Sequence[Sequence[Ring]] = (),
    budget: Budget = PAIRING_BUDGET,
    reporter: Reporter | None = None,
) -> SearchResult | None:
    """The best chains that use just these pairs of NICs, together; None if there are none.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    count = len(pairing.pairs)
    problem = SearchProblem(
        spaces={count: space},
        source=source,
        symmetry=symmetry_keeping(symmetry, pairing),
        known=tuple(tuple(one) for one in known),
        rules={count: pairing},
        cuts=tuple(cuts),
        budget=budget,
    )
    return _found(problem, reporter)


def _searched(
    space: HopSpace,
    *,
    source: BandwidthSource,
    symmetry: Symmetry,
    cuts: tuple[frozenset[int], ...],
    budget: Budget,
    reporter: Reporter | None,
) -> SearchResult | None:
    problem = SearchProblem(
        spaces={1: space}, source=source, symmetry=symmetry, cuts=cuts, budget=budget
    )
    return _found(problem, reporter)


def _found(problem: SearchProblem, reporter: Reporter | None) -> SearchResult | None:
    try:
        result = find_rings(problem, reporter=reporter)
    except (SearchError, MeasurementError):
        return None
    if result.cancelled:
        raise KeyboardInterrupt
    return result


class _Table:
    """The cells of a table as a symmetry exchanges them."""

    def __init__(
        self,
        index: HopIndex,
        entries: Mapping[str, Sequence[Hop]],
        exits: Mapping[str, Sequence[Hop]],
    ) -> None:
        self._index = index
        self._entries, self._exits = list(entries), list(exits)
        self._entry_images, self._exit_images = (
            end_images(index, [frozenset(index.number[hop] for hop in hops) for hops in e.values()])
            for e in (entries, exits)
        )
        self.done: set[tuple[str, str]] = set()

    def images(self, pair: tuple[str, str], cell: Cell | None) -> dict[tuple[str, str], Cell]:
        """A pair's cell and those it stands for; all of them are done then, with a cell or not."""
        at, to = self._entries.index(pair[0]), self._exits.index(pair[1])
        ends = np.stack([self._entry_images[:, at], self._exit_images[:, to]], axis=1)
        unique, rows = np.unique(ends, axis=0, return_index=True)
        found: dict[tuple[str, str], Cell] = {}
        for (one, other), row in zip(unique.tolist(), rows.tolist(), strict=True):
            image = (self._entries[one], self._exits[other])
            if min(one, other) < 0 or image in self.done:
                continue
            self.done.add(image)
            if cell is not None:
                found[image] = msgspec.structs.replace(cell, chain=self._moved(cell.chain, row))
        return found

    def _moved(self, chain: Chain, row: int) -> Chain:
        numbers = [self._index.number[hop] for hop in chain.all_hops]
        images = self._index.images[row, numbers].tolist()
        return chain_of(ring([self._index.hops[number] for number in images]))
