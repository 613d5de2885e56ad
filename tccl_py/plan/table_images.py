"""Tables for GPUs that a machine's symmetry exchanges with the measured ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec
import numpy as np

from tccl_py.model.cluster import NodeClass
from tccl_py.model.symmetry import Permutation, automorphisms, relabelled_hop
from tccl_py.nccl.graph_search import DefaultChain, default_choice_or_sys
from tccl_py.nccl.network import NicPair, chain_hop_space
from tccl_py.nccl.view import view
from tccl_py.plan.tables import ChainSet, KeptChains, KeptTable, OwnChains, gpus_text

_MOST_TRIED = 256
"""Mappings of a machine that are tried."""


def image_of(table: KeptTable, one: NodeClass, gpus: tuple[int, ...]) -> KeptTable | None:
    """Return a class's table for other GPUs, by a symmetry of the machine; None if there is none.

    NCCL has to move every hop as the mapped one, and to choose the mapped chains by itself.
    """
    for names in islice(_mappings(table, one, gpus), _MOST_TRIED):
        stock = _own_image(table, one, gpus, names)
        if stock is None:
            continue
        found = _relabelled(table, gpus, names, stock)
        if _is_possible(found, one):
            return found
    return None


def _mappings(table: KeptTable, one: NodeClass, gpus: tuple[int, ...]) -> Iterator[Permutation]:
    """Yield the symmetries of a machine that take a table's GPUs to these, and its NICs to them."""
    symmetry = automorphisms(one.machine, one.knowledge)
    points = symmetry.points
    fits = np.ones(len(symmetry.elements), dtype=np.bool_)
    for kind, old, new in (("G", table.gpus, gpus), ("N", table.nics, table.nics)):
        columns = [points.index(f"{kind}{index}") for index in old]
        wanted = sorted(points.index(f"{kind}{index}") for index in new)
        if len(columns) != len(wanted):
            return
        fits &= (np.sort(symmetry.elements[:, columns], axis=1) == wanted).all(axis=1)
    for row in symmetry.elements[fits]:
        yield {points[i]: points[int(image)] for i, image in enumerate(row)}


def _own_image(
    table: KeptTable, one: NodeClass, gpus: tuple[int, ...], names: Permutation
) -> OwnChains | None:
    """Return NCCL's own chains over the other GPUs, if they are the mapped ones."""
    there, here = (
        default_choice_or_sys(
            view(one.machine, one.knowledge, table.default_settings, gpus=some), nodes=2
        )
        for some in (table.gpus, gpus)
    )
    mapped = Counter(
        DefaultChain(
            _index(names, "N", chain.entry),
            tuple(_index(names, "G", gpu) for gpu in chain.gpus),
            _index(names, "N", chain.exit),
        )
        for chain in table.stock.chains
    )
    alike = ("settings", "channels", "cross_nic", "fallback", "assumed_sys")
    same = all(getattr(there, name) == getattr(here, name) for name in alike)
    if not same or mapped != Counter(here.chains):
        return None
    return msgspec.structs.replace(table.stock, chains=here.chains)


def _index(names: Permutation, kind: str, index: int) -> int:
    return int(names[f"{kind}{index}"][1:])


def _relabelled(
    table: KeptTable, gpus: tuple[int, ...], names: Permutation, stock: OwnChains
) -> KeptTable:
    def pairs_of(found: ChainSet | KeptChains) -> tuple[NicPair, ...]:
        moved = ((_index(names, "N", a), _index(names, "N", b)) for a, b in found.pairs)
        return tuple(sorted(moved))

    replace = msgspec.structs.replace
    answers = tuple(
        replace(
            answer,
            best=tuple(replace(found, pairs=pairs_of(found)) for found in answer.best),
            paired=tuple(replace(found, pairs=pairs_of(found)) for found in answer.paired),
        )
        for answer in table.answers
    )
    note = (
        f"{table.node_class}, GPUs {gpus_text(gpus)}: by the rates of GPUs "
        f"{gpus_text(table.gpus)}, which the machine's symmetry maps to them"
    )
    return replace(
        table,
        gpus=gpus,
        stock=stock,
        plain=stock if table.plain == table.stock else table.plain,
        hops=tuple(relabelled_hop(hop, names) for hop in table.hops),
        answers=answers,
        notices=(*table.notices, note),
    )


def _is_possible(table: KeptTable, one: NodeClass) -> bool:
    """Return whether NCCL moves every hop of a mapped table as the table has it."""
    for answer in table.answers:
        seen = view(one.machine, one.knowledge, answer.settings, gpus=table.gpus)
        by_count: dict[int, list[KeptChains]] = {}
        for found in answer.paired:
            by_count.setdefault(len(found.pairs), []).append(found)
        for count, sets in by_count.items():
            space = chain_hop_space(seen, nics=table.nics, chains_in_set=count)
            used: Sequence[int] = sorted(
                {n for found in sets for hops in found.chains for n in hops}
            )
            hops = [table.hops[n] for n in used]
            if not all(hop in space.between(hop.source, hop.target) for hop in hops):
                return False
    return isinstance(table.plain, str) or table.plain == table.stock
