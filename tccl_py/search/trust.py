"""Symmetries are spot-checked by measuring before they are trusted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tccl_py.search.hop_index import HopIndex
from tccl_py.search.ledger import SAFETY, Ledger
from tccl_py.topology.symmetry import Symmetry, keeping
from tccl_py.transfers.hops import HopSpace

DIFFERENCE = 0.05
"""Hops that a symmetry exchanges may differ this much (relative) and still count as equal."""


def trusted_index(
    space: HopSpace, symmetry: Symmetry, ledger: Ledger, *, checks: int | None
) -> HopIndex:
    """Index the space under the part of the symmetry that measurements of single hops bear out.

    Args:
        space: the hops.
        symmetry: automorphisms of the machine as described.
        ledger: measures; each class of hops is measured once, and `checks` more of its members.
        checks: None checks every member.
    """
    index = HopIndex(space, symmetry)
    rates = np.full(len(index.hops), np.nan)
    errors = [0.0]
    for orbit in _single_orbits(index):
        for hop in _spread(orbit, checks):
            measurement = ledger.exactly(index, [hop])
            rates[hop] = measurement.rate_gbps
            errors.append(ledger.relative_error(measurement))
        rates[orbit] = np.where(np.isnan(rates[orbit]), rates[orbit[0]], rates[orbit])
    allowed = max(DIFFERENCE, 2 * SAFETY * max(errors))
    classes = _classes(rates, allowed)
    kept = (classes[index.images] == classes[None, :]).all(axis=1)
    if kept.all():
        return index
    return HopIndex(space, _subgroup(index, symmetry, classes))


def _single_orbits(index: HopIndex) -> list[npt.NDArray[np.int32]]:
    seen = np.zeros(len(index.hops), dtype=bool)
    orbits = []
    for hop in range(len(index.hops)):
        if not seen[hop]:
            orbit = np.unique(index.images[:, hop])
            seen[orbit] = True
            orbits.append(orbit)
    return orbits


def _spread(orbit: npt.NDArray[np.int32], checks: int | None) -> list[int]:
    """The first member and `checks` others, evenly spread."""
    if checks is None or checks + 1 >= len(orbit):
        return [int(hop) for hop in orbit]
    picked = np.linspace(0, len(orbit) - 1, checks + 1).astype(int)
    return [int(orbit[i]) for i in picked]


def _classes(rates: npt.NDArray[np.float64], allowed: float) -> npt.NDArray[np.int64]:
    """Numbers rates so that neighbours in size, closer than `allowed`, have one number."""
    order = np.argsort(rates)
    ordered = rates[order]
    jumps = ordered[1:] > ordered[:-1] * (1 + allowed)
    classes = np.empty(len(rates), dtype=np.int64)
    classes[order] = np.concatenate([[0], np.cumsum(jumps)])
    return classes


def _subgroup(index: HopIndex, symmetry: Symmetry, classes: npt.NDArray[np.int64]) -> Symmetry:
    # An element that takes a hop out of the space has no row of its own in `images`, so rows
    # are matched through the elements that stay inside.
    inside = index.inside
    keep = np.zeros(len(symmetry.elements), dtype=bool)
    keep[np.flatnonzero(inside)] = (classes[index.images] == classes[None, :]).all(axis=1)
    return keeping(symmetry, keep)
