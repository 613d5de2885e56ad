"""Chain tables of node classes, and the rings over nodes that are merged from them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tccl_py.errors import InputError, SearchError

Rates = npt.NDArray[np.float64]


class ChainTable(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """How fast the best chain through a node of this class is, for each way in and out.

    `rates[x, y]`, GB/s, is for chains that the ring enters by crossing x and leaves by crossing y;
    0 means that there is none. It is copied and cannot be written to.

    Raises:
        InputError: a table that is empty or not square, or a rate that is negative or not finite.
    """

    name: str
    rates: Rates

    def __post_init__(self) -> None:
        rates = np.array(self.rates, dtype=np.float64)
        where = f"chain table {self.name}"
        if rates.ndim != 2 or rates.shape[0] != rates.shape[1] or not rates.size:
            shape = " x ".join(map(str, rates.shape)) or "a single number"
            right = "a row for each crossing in and a column for each crossing out are needed"
            raise InputError(where, f"the rates are {shape}", right)
        wrong = np.argwhere(~np.isfinite(rates) | (rates < 0))
        if len(wrong):
            entry, leave = wrong[0].tolist()
            place = f"{where}, in by crossing {entry} and out by {leave}"
            right = "a rate in GB/s, or 0 where there is no chain, is needed"
            raise InputError(place, f"the rate is {rates[entry, leave]}", right)
        rates.setflags(write=False)
        msgspec.structs.force_setattr(self, "rates", rates)


class MergedRing(msgspec.Struct, frozen=True, kw_only=True):
    """A ring over nodes, and how good it is known to be.

    `order[n]` is the class of the n-th node and `crossings[n]` what leads from it to the next one,
    cyclic; `hosts` are the nodes' names, where they have names. `rate_gbps` is that of the slowest
    chain or uplink. No ring over the tables' chains and crossings is above `bound_gbps`, in any
    order of nodes, or in the one that was given; `proven` means that the two are equal.
    """

    rate_gbps: float
    bound_gbps: float
    order: tuple[int, ...]
    crossings: tuple[int, ...]
    hosts: tuple[str, ...] = ()

    @property
    def proven(self) -> bool:
        """Whether no ring of these chains is better, in any order that was allowed."""
        return self.rate_gbps >= self.bound_gbps


def stacked(tables: Sequence[ChainTable]) -> Rates:
    """All rates, class x entry x exit.

    Raises:
        InputError: no table, or tables over different numbers of crossings.
    """
    if not tables:
        raise InputError("chain tables", "there are none", "one for each node class is needed")
    first = tables[0]
    for table in tables:
        if len(table.rates) != len(first.rates):
            what = f"it has {len(table.rates)} crossings, table {first.name} {len(first.rates)}"
            right = "all tables must be over the same crossings"
            raise InputError(f"chain table {table.name}", what, right)
    return np.stack([table.rates for table in tables])


def check_size(nodes: int, where: str) -> None:
    """Refuse what is too small for a ring over nodes.

    Raises:
        InputError: fewer than two nodes.
    """
    if nodes < 2:
        what = "there is one node, which needs no crossing" if nodes else "there are no nodes"
        raise InputError(where, what, "a ring over nodes needs at least 2")


def check_class(number: int, tables: Sequence[ChainTable], where: str) -> None:
    """Refuse a class without a table.

    Raises:
        InputError: a class number that is no position in `tables`.
    """
    if not 0 <= number < len(tables):
        right = f"classes are 0 to {len(tables) - 1}, the positions of their tables"
        raise InputError(where, f"node class {number} is unknown", right)


def no_ring(tables: Sequence[ChainTable], used: Sequence[int], why: str) -> SearchError:
    """The error for a cluster without a ring; a class without any chain is named first."""
    for number in used:
        if not tables[number].rates.any():
            return SearchError(f"no ring: node class {tables[number].name} has no chain at all")
    return SearchError(f"no ring: {why}")


def ring_rate(rates: Rates, order: Sequence[int], crossings: Sequence[int]) -> float:
    """The slowest chain of a ring, GB/s: node n comes in by crossing n - 1, and leaves by n."""
    exits = np.asarray(crossings)
    return float(rates[np.asarray(order), np.roll(exits, 1), exits].min())
