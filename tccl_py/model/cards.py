"""NVIDIA's cards by name, and the one rule of which GPUs have P2P where nobody said.

The cards are data (cards.json), each with its source. GeForce and TITAN have P2P over NVLink alone
under the stock driver (NVIDIA/nccl-tests#117, NVIDIA/nccl#1637); a virtual machine has it over PCIe
only where its host was made for it (NVIDIA/nccl#175).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import resources
from itertools import chain, permutations
from typing import Annotated

import msgspec

from tccl_py.model.machine import Gpu, Knowledge, Machine, PciLink, PeerAccess

GTS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
"""The speed of a lane by generation of PCI Express."""
_GENERATIONS = ((100, "Blackwell"), (90, "Hopper"), (89, "Ada"), (80, "Ampere"), (75, "Turing"),
                (70, "Volta"), (60, "Pascal"), (0, "Maxwell"))  # fmt: skip
_SHARED_SM = frozenset({61, 75, 86, 89, 120})
"""Compute capabilities of GeForce and professional cards; the others are of data centers alone."""
_WITHOUT_P2P = ("GeForce", "TITAN")
_MAKERS = re.compile(r"^(?:NVIDIA|Tesla|\s)+", re.IGNORECASE)


def link_words(link: PciLink) -> str:
    """Return a link in words.

    >>> link_words(PciLink(speed_gts=16.0, width=8))
    'PCIe 4 x8'
    """
    speeds = {gts: f"PCIe {number}" for number, gts in GTS.items()}
    return speeds.get(link.speed_gts or 0.0, "PCIe") + (f" x{link.lanes}" if link.lanes else "")


class Card(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A card: what it has by its maker's public documents."""

    name: Annotated[str, msgspec.Meta(min_length=2)]
    """As nvidia-smi prints it, without maker, form factor and memory."""
    sm: Annotated[int, msgspec.Meta(ge=50, le=200)]
    """Compute capability times ten."""
    pcie: Annotated[int, msgspec.Meta(ge=1, le=6)]
    """Generation of PCI Express."""
    lanes: Annotated[int, msgspec.Meta(ge=1, le=16)]
    p2p: bool
    """Whether the stock driver gives it P2P over PCIe."""
    memory_gb: Annotated[int, msgspec.Meta(ge=1, le=1000)]
    """Memory of the usual model, GB."""
    source: Annotated[str, msgspec.Meta(min_length=8)]

    @property
    def link(self) -> PciLink:
        """The link to its slot, where the slot does not limit it."""
        return PciLink(speed_gts=GTS[self.pcie], width=self.lanes)


@cache
def cards() -> tuple[Card, ...]:
    """Return all cards, longest names first (msgspec.ValidationError: the data is damaged)."""
    text = resources.files("tccl_py.model").joinpath("cards.json").read_bytes()
    return tuple(sorted(msgspec.json.decode(text, type=list[Card]), key=lambda c: -len(c.name)))


@cache
def card_of(name: str) -> Card | None:
    """Return the card with a name as nvidia-smi prints it; None if it is not known.

    >>> card_of("NVIDIA H100 80GB HBM3").pcie, card_of("Tesla V100-SXM2-16GB").sm
    (5, 70)
    """
    plain = _MAKERS.sub("", name).lower()
    for card in cards():
        known = card.name.lower()
        if plain.startswith(known) and not plain[len(known) : len(known) + 1].isalnum():
            return card
    # The table of nvidia-smi cuts long names, and ends them by three dots.
    cut = plain.rstrip(".")
    near = [card for card in cards() if card.name.lower().startswith(cut)] if cut != plain else []
    facts = {(card.sm, card.pcie, card.lanes, card.p2p) for card in near}
    return near[0] if len(facts) == 1 else None


def has_gpu_direct(name: str) -> bool:
    """Return whether cards of this product line have GPU-direct RDMA, by their name."""
    return not any(line in name for line in _WITHOUT_P2P)


def generation(gpu: Gpu) -> str:
    """Return the name of a GPU's architecture; "" if it is not known."""
    card = card_of(gpu.name)
    sm = gpu.sm or (card.sm if card else None)
    return "" if sm is None else next(name for least, name in _GENERATIONS if sm >= least)


def assume_p2p(
    machine: Machine, reported: Iterable[PeerAccess] = (), *, virtual: bool | None = None
) -> Knowledge:
    """Return knowledge of P2P: what was `reported`, and what is assumed of all other pairs.

    Args:
        machine: whose GPUs have names, or compute capability and GPU-direct RDMA.
        reported: what the driver said.
        virtual: whether it is known to be a virtual machine; None: if its NUMA nodes have no
            numbers, as NCCL and sysfs have it there.
    """
    if virtual is None:
        virtual = any(node.numa_id < 0 for node in machine.numa_nodes)
    facts = tuple(reported)
    told = {(fact.source, fact.target) for fact in facts}
    pairs = [pair for pair in permutations(machine.gpu_indices, 2) if pair not in told]
    whys = {
        pair: list(_deny_p2p(machine, pair, virtual=virtual))
        for pair in pairs
        if not machine.has_nvlink(*pair)
    }
    lacking = [pair for pair, why in whys.items() if why]
    some = 0 < len(lacking) < len(whys)
    assumed = (
        PeerAccess(source=source, target=target, supported=False, provenance="assumed")
        for source, target in lacking * some
    )
    return Knowledge(
        peer_access_default=some or not lacking,
        peer_access=(*facts, *assumed),
        no_p2p_since=" and ".join(dict.fromkeys(chain(*whys.values()))) or msgspec.UNSET,
    )


def _deny_p2p(machine: Machine, pair: tuple[int, int], *, virtual: bool) -> Iterator[str]:
    """Yield why two GPUs without NVLink are taken to have no P2P; nothing where they have it."""
    gpus = [machine.gpu(index) for index in pair]
    if virtual:
        yield "a virtual machine that does not say so has none"
    if len({generation(gpu) for gpu in gpus} - {""}) > 1:
        yield "GPUs of two generations have none"
    # The driver said GPU-direct RDMA, which GeForce lacks.
    for gpu in (gpu for gpu in gpus if not gpu.gdr):
        card = card_of(gpu.name)
        if card is not None or not has_gpu_direct(gpu.name):
            if card is None or not card.p2p:
                yield "GeForce has none over PCIe by the stock driver"
        elif gpu.sm in _SHARED_SM and not gpu.name:
            yield "GPUs without GPU-direct RDMA are taken for GeForce, which has none over PCIe"
        elif not gpu.name and gpu.sm is None and not machine.nvlinks_unknown:
            yield "the cards are not named"
