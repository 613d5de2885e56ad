"""What the ranks of one job are told, and what they answer; files carry both."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from tccl_py.rank_processes.rank import Meeting
from tccl_py.rank_processes.turns import Seat

Backend = Literal["cuda", "host"]
"""NCCL on GPUs, or gloo over this host's memory as a rehearsal."""
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
"""Collectives that can be timed; all are checked."""
COLLECTIVES: tuple[str, ...] = get_args(Collective)

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = tuple(KIB << shift for shift in range(0, 21, 2))
"""1 KiB to 1 GiB, each four times the one before."""
_LARGE_BYTES = 64 * MIB
"""From here on a bus bandwidth is what a prediction is held against; else the largest size."""
ELEMENT_BYTES = 4
"""Timed collectives move float32."""


Groups = tuple[tuple[int, ...], ...]
"""Disjoint communicators that run at once, by their ranks or GPUs; () is one over all."""


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """One timed row: a collective of `bytes` over all ranks or in `groups`, or a training step."""

    bytes: int = 0
    groups: Groups = ()
    mode: str = ""


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the ranks of a job do, in this order: checks, timings, a training step.

    `sizes` are bytes of the whole buffer; each is timed for about `seconds`. Then `group_sizes` are
    timed in each of `groups`, except under a graph file, which fails communicators over fewer GPUs.
    Over several hosts `first` is the first rank of the host that is told, and all meet at
    `meeting`. Of jobs at once `seat` says which one this is.
    """

    backend: Backend
    world: int
    first: int = 0
    meeting: Meeting | None = None
    seat: Seat | None = None
    checks: bool = False
    sizes: tuple[int, ...] = ()
    seconds: float = 0.08
    groups: tuple[Groups, ...] = ()
    group_sizes: tuple[int, ...] = ()
    collective: Collective = "all_reduce"
    training: bool = False

    @property
    def timed(self) -> tuple[Timed, ...]:
        """Rows of collectives, in the order in which ranks time them."""
        return (
            *(Timed(bytes=size) for size in self.sizes),
            *(Timed(bytes=size, groups=one) for one in self.groups for size in self.group_sizes),
        )


class Wrong(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A collective that gave wrong values, or raised an error, on some rank."""

    case: str
    rank: int
    what: str


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank found.

    `timings` are seconds a call, for each timed row those of some batches of calls, none of a rank
    in no group; `checked` counts the cases compared; `left_out` names collectives that the backend
    does not have; `training` is seconds a step, by name.
    """

    rank: int
    torch: str
    nccl: str = ""
    device: str = ""
    checked: int = 0
    wrong: tuple[Wrong, ...] = ()
    left_out: tuple[str, ...] = ()
    timings: tuple[tuple[float, ...], ...] = ()
    training: dict[str, tuple[float, ...]] = {}


def bus_factor(collective: str, world: int) -> float:
    """Bytes over a ring's slowest hop for each byte of the buffer; NCCL's bus bandwidth has it.

    >>> bus_factor("all_reduce", 4)
    1.5
    """
    if collective == "broadcast":
        return 1.0
    share = (world - 1) / world
    return 2 * share if collective == "all_reduce" else share


def bus_gbps(collective: str, world: int, size: int, seconds: float) -> float:
    """Bus bandwidth, GB/s, of a buffer of `size` bytes in `seconds`."""
    return size / seconds * bus_factor(collective, world) / 1e9


def is_large(size: int) -> bool:
    """Whether bus bandwidths of this size are what a prediction is held against."""
    return size >= _LARGE_BYTES


def large_gbps(rates: Sequence[tuple[int, float]]) -> float | None:
    """The median rate of the large sizes; of the largest if none is large; None without any."""
    large = [gbps for size, gbps in rates if is_large(size)]
    return statistics.median(large or [max(rates)[1]]) if rates else None


def groups_of(world: int) -> tuple[Groups, ...]:
    """Return the ranks in pairs and in halves, as smaller communicators of a job divide them.

    >>> groups_of(8)
    (((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 1, 2, 3), (4, 5, 6, 7)))
    >>> groups_of(3), groups_of(2)
    ((((0, 1),),), ())
    """
    if world < 3:
        return ()
    ranks = tuple(range(world))
    return tuple(
        tuple(ranks[at : at + count] for at in range(0, world - 1, count))
        for count in sorted({2, (world + 1) // 2})
    )


def size_text(size: int) -> str:
    """A number of bytes as people write it.

    >>> size_text(4096), size_text(1 << 30), size_text(1000)
    ('4 KiB', '1 GiB', '1000 B')
    """
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"
