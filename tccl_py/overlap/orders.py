"""What a job of `tccl overlap` is told, and what its ranks answer."""

from __future__ import annotations

from typing import Literal

import msgspec

Backend = Literal["nccl", "gloo"]
Kind = Literal["messages", "copies"]
"""By messages between ranks, one a GPU; or by copies that one process makes between all GPUs."""
Mode = Literal["sequential", "concurrent"]
MODES: tuple[Mode, ...] = ("sequential", "concurrent")

ALL_REDUCE = "all-reduce"


class Pair(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A transfer from one place to another; places count from 0 among the job's GPUs."""

    source: int
    target: int


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One job: each set of pairs, then a transfer beside a product of matrices.

    `places` is how many GPUs there are; each message or copy has `message_bytes`, and a transfer
    is `messages` of them. Everything is timed `repeats` times.
    """

    backend: Backend
    kind: Kind
    places: int
    sets: tuple[tuple[Pair, ...], ...]
    message_bytes: int
    messages: int
    repeats: int

    @property
    def world(self) -> int:
        """How many processes the job has."""
        return self.places if self.kind == "messages" else 1


class PairTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's times of one set: by pair the ms of each repeat, none for other ranks' pairs."""

    number: int
    mode: Mode
    pairs_ms: tuple[tuple[float, ...], ...]
    total_ms: tuple[float, ...]


class ProductTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's times of a transfer and a product of matrices, ms of each repeat."""

    transfer: str
    mode: Mode
    transfer_ms: tuple[float, ...]
    product_ms: tuple[float, ...]
    total_ms: tuple[float, ...]


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank saw; `right` is false if what arrived is not what was sent."""

    rank: int
    torch: str
    device: str
    right: bool
    pairs: tuple[PairTimes, ...]
    products: tuple[ProductTimes, ...]
