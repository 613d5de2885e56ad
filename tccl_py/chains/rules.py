"""Which NICs the chains of a set may use together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tccl_py.chains.space import WORLD, entry_nic, exit_nic
from tccl_py.search.hop_index import HopIndex
from tccl_py.topology.symmetry import Symmetry, keeping
from tccl_py.transfers.hops import Hop

NicPair = tuple[int, int]
"""A chain's NICs: the one it is entered by, and the one it is left by."""


class EvenUse(msgspec.Struct, frozen=True):
    """No NIC is used twice in one direction while another is idle; `same` ties exit to entry.

    >>> EvenUse(nics=(0, 1), chains=2).even([0, 0])
    False
    """

    nics: tuple[int, ...]
    chains: int
    same: bool = False

    def admits(self, rings: Sequence[Sequence[Hop]]) -> bool:
        """Whether the rings so far leave it open that all NICs are used alike."""
        entries = [entry_nic(one[0]) for one in rings if one]
        whole = [one for one in rings if one and one[-1].target == WORLD]
        exits = [exit_nic(one[-1]) for one in whole]
        if self.same and any(entry_nic(one[0]) != exit_nic(one[-1]) for one in whole):
            return False
        return self.even(entries) and self.even(exits)

    def even(self, used: Sequence[int]) -> bool:
        """Whether chains that use these NICs, one after the other, can still become even."""
        least, more = divmod(self.chains, len(self.nics))
        counts = Counter(used)
        full = sum(count > least for count in counts.values())
        return full <= more and all(count <= least + 1 for count in counts.values())


class Pairing(msgspec.Struct, frozen=True):
    """Chains whose NICs are just these pairs of entry and exit, in any order."""

    pairs: tuple[NicPair, ...]

    def admits(self, rings: Sequence[Sequence[Hop]]) -> bool:
        """Whether the rings so far can be among the chains."""
        left = Counter(self.pairs)
        begun: list[int] = []
        for one in rings:
            if one and one[-1].target == WORLD:
                left[entry_nic(one[0]), exit_nic(one[-1])] -= 1
            elif one:
                begun.append(entry_nic(one[0]))
        if min(left.values()) < 0:
            return False
        open_ = Counter(pair[0] for pair in left.elements())
        return all(count <= open_[nic] for nic, count in Counter(begun).items())


def symmetry_keeping(symmetry: Symmetry, pairing: Pairing) -> Symmetry:
    """The part of a symmetry that takes the pairs of a pairing to themselves."""
    column = {point: i for i, point in enumerate(symmetry.points)}
    wanted = Counter(pairing.pairs)
    first, second = (
        symmetry.elements[:, [column[f"N{pair[end]}"] for pair in pairing.pairs]] for end in (0, 1)
    )
    names = {i: int(point[1:]) for point, i in column.items() if point[0] == "N"}
    keep = np.array(
        [
            Counter((names[one], names[other]) for one, other in zip(a, b, strict=True)) == wanted
            for a, b in zip(first.tolist(), second.tolist(), strict=True)
        ],
        dtype=bool,
    )
    return symmetry if keep.all() else keeping(symmetry, keep)


def end_images(index: HopIndex, groups: Sequence[frozenset[int]]) -> npt.NDArray[np.int64]:
    """For each symmetry element of an index, which group of hops it takes each group to; -1: none.

    Groups are sets of hop numbers.
    """
    number = {group: i for i, group in enumerate(groups)}
    rows = [
        [number.get(frozenset(images[list(group)].tolist()), -1) for group in groups]
        for images in index.images
    ]
    return np.array(rows, dtype=np.int64)
