"""Reads the XML file of the TCCL fork's runtime, and refuses what the runtime could not use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar, get_args

from tccl_py.errors import InputError
from tccl_py.files import MAX_INPUT_BYTES, read_text
from tccl_py.readers.elements import Element, parse_elements, shortened
from tccl_py.tccl_fork.checks import Fault, chain_fault, mask_fault, metadata_fault, ring_fault
from tccl_py.tccl_fork.database import (
    Crossing,
    CrossingType,
    Database,
    GpuRing,
    NodeChain,
    NodeChains,
    TransferType,
    TypedTransfer,
)

MAX_ELEMENTS = 500_000
"""All chains over the subsets of 5 GPUs are 200,000 elements."""

_DECIMAL = re.compile(r"[0-9]{1,9}", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,20}(?:\.[0-9]{0,40})?(?:[eE][+-]?[0-9]{1,3})?", re.ASCII)
_RIGHT = "give the file that `tccl export --runtime tccl` or the fork's path finder wrote"
_TRANSFER_TYPES: dict[str, TransferType] = {name: name for name in get_args(TransferType)}
_CROSSING_TYPES: dict[str, CrossingType] = {name: name for name in get_args(CrossingType)}

T = TypeVar("T")


def read_tccl_xml(path: Path) -> Database:
    """Read and check a database.

    Raises:
        InputError: unreadable, too large, or not what the fork could load and use.
    """
    return parse_tccl_xml(read_text(path), where=str(path))


def parse_tccl_xml(text: str, *, where: str) -> Database:
    """Parse and check the text of a database.

    Args:
        text: the whole document, at most MAX_INPUT_BYTES.
        where: file name for messages.

    Raises:
        InputError: not XML, entities, too much of it, or not what the fork could load and use; the
            line is named.
    """
    if len(text) > MAX_INPUT_BYTES:
        raise InputError(where, f"has {len(text)} characters", f"at most {MAX_INPUT_BYTES}")
    root = parse_elements(text, where=where, most=MAX_ELEMENTS, right=_RIGHT)
    if root.tag != "root":
        raise root.refused("is no database of the TCCL fork", _RIGHT)
    parts = {part.tag: part for part in root.only("metadata", "intra", "inter")}
    for tag in ("metadata", "intra", "inter"):
        count = sum(part.tag == tag for part in root.children)
        if count != 1:
            raise root.refused(f"has {count} <{tag}>", f"one <{tag}>")
    return _Reader(parts["metadata"]).database(parts["intra"], parts["inter"])


class _Reader:
    """Reads rings and chains, which are checked against the metadata."""

    def __init__(self, metadata: Element) -> None:
        self.metadata = Database(
            num_gpus=_index(metadata, "num_gpus"),
            num_numa=_index(metadata, "num_numa"),
            num_bits=_index(metadata, "num_bits_idx"),
        )
        for name, most in (("num_gpus", 64), ("num_numa", 1024), ("num_bits_idx", 10)):
            if _index(metadata, name) > most:
                raise metadata.refused(f"has {name}={_index(metadata, name)}", f"at most {most}")
        _refuse(metadata, metadata_fault(self.metadata))

    def database(self, intra: Element, inter: Element) -> Database:
        rings = [self._ring(one, mask) for one, mask in self._subsets(intra, least=2)]
        chains = [self._chains(one, mask) for one, mask in self._subsets(inter, least=1)]
        return Database(
            num_gpus=self.metadata.num_gpus,
            num_numa=self.metadata.num_numa,
            num_bits=self.metadata.num_bits,
            intra=tuple(rings),
            inter=tuple(chains),
        )

    def _subsets(self, part: Element, *, least: int) -> list[tuple[Element, int]]:
        seen: dict[int, Element] = {}
        for subset in part.only("subset"):
            mask = _index(subset, "gpus")
            _refuse(subset, mask_fault(self.metadata, mask, least=least))
            if mask in seen:
                raise subset.refused(
                    f"has gpus={mask}, as {seen[mask].where}", "each set stands once"
                )
            seen[mask] = subset
        return [(subset, mask) for mask, subset in seen.items()]

    def _ring(self, subset: Element, mask: int) -> GpuRing:
        rings = list(subset.only("transfers"))
        if len(rings) != 1:
            raise subset.refused(
                f"has {len(rings)} <transfers>", "one: the fork takes the last of several"
            )
        (element,) = rings
        ring = GpuRing(mask=mask, gbps=_gbps(element), transfers=_transfers(element))
        _refuse(element, ring_fault(self.metadata, ring))
        return ring

    def _chains(self, subset: Element, mask: int) -> NodeChains:
        chains: dict[tuple[Crossing, Crossing], NodeChain] = {}
        for element in subset.only("transfers"):
            chain = NodeChain(
                head=_crossing(element, "head"),
                tail=_crossing(element, "tail"),
                gbps=_gbps(element),
                transfers=_transfers(element),
            )
            _refuse(element, chain_fault(self.metadata, mask, chain))
            if (chain.head, chain.tail) in chains:
                raise element.refused(
                    f"has a head and a tail that gpus={mask} has a chain for",
                    "one chain for each: the fork takes the last of several",
                )
            chains[chain.head, chain.tail] = chain
        return NodeChains(mask=mask, chains=tuple(chains.values()))


def _refuse(element: Element, fault: Fault | None) -> None:
    if fault is not None:
        raise element.refused(fault.what, fault.right)


def _transfers(element: Element) -> tuple[TypedTransfer, ...]:
    return tuple(
        TypedTransfer(
            _named(one, "type", _TRANSFER_TYPES), _index(one, "src_idx"), _index(one, "dst_idx")
        )
        for one in _leaves(element)
    )


def _leaves(element: Element) -> Iterator[Element]:
    for one in element.only("transfer"):
        yield from (one,) if not list(one.only()) else ()


def _crossing(element: Element, name: str) -> Crossing:
    return Crossing(
        _named(element, f"{name}_type", _CROSSING_TYPES),
        _index(element, f"{name}_src_idx"),
        _index(element, f"{name}_dst_idx"),
    )


def _named(element: Element, name: str, types: dict[str, T]) -> T:
    text = element.text(name)
    if text not in types:
        raise element.refused(f'has {name}="{shortened(text)}"', f"one of {', '.join(types)}")
    return types[text]


def _index(element: Element, name: str) -> int:
    """A number as the fork reads it: it takes 0x10 for 0, so only decimal digits are right."""
    text = element.text(name)
    if not _DECIMAL.fullmatch(text):
        raise element.refused(f'has {name}="{shortened(text)}"', "a decimal number, 0 or above")
    return int(text)


def _gbps(element: Element) -> float:
    text = element.text("gbps")
    if not _NUMBER.fullmatch(text):
        raise element.refused(f'has gbps="{shortened(text)}"', "GB/s as a decimal number")
    return float(text)
