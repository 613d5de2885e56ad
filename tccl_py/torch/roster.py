"""What the ranks of a job tell each other before its first communicator, so that all decide alike.

Ranks that name different graph files for one communicator hang or crash NCCL: whatever a rank finds
on its own, it is used only once all know of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from tccl_py.torch.plans import Member


class Store(Protocol):
    """The part of torch.distributed's stores that is used; `get` waits until somebody has set."""

    def set(self, key: str, value: str) -> Any:
        """Set a key for all ranks."""

    def get(self, key: str) -> bytes:
        """The value of a key, once it has one."""


class Roster(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks, and what follows for the plan: `off` says why nobody uses it, "" if all do.

    With `distinct` each rank has a GPU of its own, so that communicators can be made at once.
    """

    members: tuple[Member, ...]
    off: str
    distinct: bool

    @property
    def wrong(self) -> str:
        """The first mistake that a rank found, or ""."""
        return next((member.wrong for member in self.members if member.wrong), "")


def exchange(store: Store, rank: int, size: int, mine: Member) -> Roster:
    """Tell all ranks about this one, and learn of them; each of the `size` ranks calls it once.

    Takes two messages a rank, by way of rank 0, and waits as long as the store does.
    """
    if rank != 0:
        store.set(f"member/{rank}", _encoded(mine))
    else:
        told = [_decoded(store.get(f"member/{other}"), Member) for other in range(1, size)]
        store.set("members", _encoded([mine, *told]))
    found = roster_of(_decoded(store.get("members"), tuple[Member, ...]))
    if found.wrong:
        _wait_for_all(store, rank, size)
    return found


def _wait_for_all(store: Store, rank: int, size: int) -> None:
    """All ranks end after a mistake; rank 0 last, because the store may end with it."""
    if rank != 0:
        store.set(f"read/{rank}", "")
        return
    for other in range(1, size):
        store.get(f"read/{other}")


def roster_of(members: Sequence[Member]) -> Roster:
    """What follows from what the ranks told."""
    twice = _same_gpu(members)
    return Roster(
        members=tuple(members),
        off=_off(members) or twice,
        distinct=not twice and all(member.gpu >= 0 for member in members),
    )


def _off(members: Sequence[Member]) -> str:
    for rank, member in enumerate(members):
        if member.off:
            return f"rank {rank} on {_shown(member)}: {member.off}"
    for rank, member in enumerate(members):
        if member.settings != members[0].settings:
            return f"ranks 0 and {rank} have plans of different settings"
    return ""


def _same_gpu(members: Sequence[Member]) -> str:
    seen: dict[tuple[str, int], int] = {}
    for rank, member in enumerate(members):
        other = seen.setdefault((member.host, member.gpu), rank)
        if other != rank and member.gpu >= 0:
            return (
                f"ranks {other} and {rank} both have GPU {member.gpu} of {_shown(member)} (call "
                "torch.cuda.set_device before, or give device_id)"
            )
    return ""


def _shown(member: Member) -> str:
    return member.host.partition(" ")[0]


def _encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _decoded(text: bytes, kind: Any) -> Any:
    return msgspec.json.decode(text, type=kind)
