"""The reports of a job's ranks before their first communicator, and what follows on all of them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec

from tccl_py.errors import InputError

_NAP_S = 0.01
_OF_A_HOST = {
    "NCCL_IB_HCA",
    "NCCL_IB_GID_INDEX",
    "NCCL_SOCKET_IFNAME",
    "NCCL_SOCKET_NTHREADS",
    "NCCL_NSOCKS_PERTHREAD",
}
"""Variables of plans that each host may have for itself; NCCL needs the others alike."""


class Member(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A report of a rank.

    `host` is NCCL's identity of it, `name` the plan's name for the host ("" if none), `gpu` the
    NVML index, `plan` the plan's identity, and `settings` its variables. `read` are variables that
    NCCL has read for good in this process (None: none yet), of which a plan set those `by_plan`.
    With a `bound` GPU torch makes communicators at once. `off` says why this rank uses no plan.
    """

    host: str
    name: str = ""
    gpu: int = -1
    plan: str = ""
    settings: dict[str, str] = {}
    read: dict[str, str] | None = None
    by_plan: tuple[str, ...] = ()
    bound: bool = False
    off: str = ""

    @property
    def host_name(self) -> str:
        """The host's name, for messages."""
        return self.host.partition(" ")[0]


def exchange(store: Any, rank: int, size: int, member: Member) -> tuple[Member, ...]:
    """Return the reports of all `size` ranks, by way of rank 0.

    Raises RuntimeError: torch's, if a rank does not come within the store's timeout.
    """
    # The store may hold keys of an earlier exchange, of ranks that ended in the midst of it. So
    # rank 0 draws a session, ranks draw nonces, and only a living rank knows rank 0's answer to its
    # nonce: what lies below the session is of this exchange.
    if rank == 0:
        session = _opened_session(store, size)
        reports = [msgspec.Raw(store.get(f"{session}/member/{one}")) for one in range(1, size)]
        store.set(f"{session}/members", msgspec.json.encode([member, *reports]).decode())
    else:
        nonce = uuid.uuid4().hex
        store.set(f"nonce/{rank}", nonce)
        session = store.get(f"session/{nonce}").decode()
        store.set(f"{session}/member/{rank}", msgspec.json.encode(member).decode())
        store.add(f"{session}/reported/{rank}", 1)
    return msgspec.json.decode(store.get(f"{session}/members"), type=tuple[Member, ...])


def _opened_session(store: Any, size: int) -> str:
    """Return the session in which all other ranks have reported, as rank 0."""
    session, answered = uuid.uuid4().hex, set[str]()
    end = time.monotonic() + store.timeout.total_seconds()
    while True:
        for rank in range(1, size):
            nonce = store.get(f"nonce/{rank}").decode()
            if nonce not in answered:
                store.set(f"session/{nonce}", session)
                answered.add(nonce)
        # Adding 0 looks without waiting, in all versions and stores of torch.
        reported = [store.add(f"{session}/reported/{rank}", 0) for rank in range(1, size)]
        if all(reported):
            return session
        # A nonce without a report may be that of a former process; the rank's own follows.
        if time.monotonic() > end:
            # The error is torch's, as for a rank that never told a nonce.
            missing = [
                f"{session}/member/{rank}" for rank in range(1, size) if not reported[rank - 1]
            ]
            store.wait(missing, timedelta(milliseconds=1))
        time.sleep(_NAP_S)


def why_off(members: Sequence[Member]) -> str:
    """Return why no rank uses the plan, "" if all do: then each has a GPU of its own."""
    off, shared = [], []
    first: dict[tuple[str, int], int] = {}
    for rank, member in enumerate(members):
        host, gpu = member.host_name, member.gpu
        if member.off:
            off.append(f"rank {rank} on {host}: {member.off}")
        if (former := first.setdefault((member.host, gpu), rank)) != rank and gpu >= 0:
            shared.append(
                f"ranks {former} and {rank} both have GPU {gpu} of {host} (call "
                "torch.cuda.set_device before, or give device_id)"
            )
        if member.settings != members[0].settings:
            off.append(f"ranks 0 and {rank} have plans of different settings")
    return next(iter((*off, *shared)), "")


def variables_read(members: Sequence[Member]) -> dict[str, str]:
    """Return variables of plans that NCCL has read for good in processes of some of these ranks.

    Raises InputError: it has read others in further ones, and needs them alike.
    """
    names = sorted({name for member in members for name in member.by_plan} - _OF_A_HOST)
    first: dict[str, tuple[int, str | None]] = {}
    for rank, member in enumerate(members):
        if member.read is None:
            continue
        for name in names:
            value = member.read.get(name)
            former, expected = first.setdefault(name, (rank, value))
            if value != expected:
                where, shown = f"rank {rank} on {member.host_name}", (value, expected)
                text, other = ("unset" if one is None else one for one in shown)
                what = (
                    f"its NCCL has read {name} for good, {text} here and {other} on rank {former}"
                )
                right = "start such ranks in new processes: all ranks of a job need it alike"
                raise InputError(where, what, right)
    return {name: value for name, (_, value) in first.items() if value is not None}
