"""Parts of rank programs: specification, communicator, time slots and result.

Only rank programs import torch, by `join`.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import decode_json, encode_json, read_text, write_atomically

LISTENER = "TCCL_RENDEZVOUS_DESCRIPTOR"
"""Variable that tells a rank the descriptor of the listening socket it inherits."""
SPEC_FILE = "spec.json"
"""The job specification in the folder of a job's ranks."""
_RENDEZVOUS_TIMEOUT = timedelta(seconds=90)
_CONNECT_S = 3.0
_WORD = 8
_POLL_S = 2e-4

T = TypeVar("T")
TimeSlot = Callable[[], AbstractContextManager[None]]
"""Enters the rank's next time slot: no other job runs inside its `with` block."""


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the ranks of a job over several hosts meet: at the first rank's host."""

    address: str
    port: int
    prefix: str
    """The store's keys are below it, a secret of the job: torch's store has no passwords."""


class JobSlot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job's number among concurrent jobs, and the ranks of each on this host."""

    number: int
    jobs: int
    ranks: int


def result_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's result."""
    return folder / f"result-{rank}.json"


def slots_file(folder: Path) -> Path:
    """Return the file of time slots, which concurrent jobs share."""
    return folder.parent / "slots"


def read_spec(kind: type[T]) -> tuple[T, int, Path]:
    """Return the specification and rank from the command line, and the folder for the result."""
    file = Path(sys.argv[1])
    spec = decode_json(read_text(file), kind, where=str(file))
    return spec, int(sys.argv[2]), file.parent


@dataclass(frozen=True)
class Communicator:
    """A communicator as one rank of the job sees it."""

    torch: Any
    dist: Any
    """torch.distributed"""
    rank: int
    members: tuple[int, ...]
    """Ranks of the job; the rank alone where it is outside."""
    device: Any
    group: Any = None
    """The process group; None over all ranks of the job."""

    @property
    def world(self) -> int:
        """Return the number of members."""
        return len(self.members)

    @property
    def place(self) -> int:
        """Return this rank's place among the members."""
        return self.members.index(self.rank)

    @property
    def cuda(self) -> bool:
        """Return whether this rank has a GPU."""
        return bool(self.device.type == "cuda")

    @property
    def device_name(self) -> str:
        """Return the GPU's name, "" in host memory."""
        return str(self.torch.cuda.get_device_name(self.device)) if self.cuda else ""

    def wait(self) -> None:
        """Wait for this rank's device."""
        if self.cuda:
            self.torch.cuda.synchronize(self.device)

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        """Make all of `groups`, as every rank must; return this rank's, members ascending."""
        subgroup = replace(self, members=(self.rank,))
        for members in map(sorted, groups):
            group = self.dist.new_group(members)
            if self.rank in members:
                subgroup = replace(self, members=tuple(members), group=group)
        return subgroup

    def maxima(self, values: Sequence[float]) -> list[float]:
        """Return the largest of all ranks' values, at each place."""
        device = self.device if self.dist.get_backend() == "nccl" else "cpu"
        shared = self.torch.tensor(list(values), dtype=self.torch.float64, device=device)
        self.dist.all_reduce(shared, op=self.dist.ReduceOp.MAX)
        return [float(value) for value in shared.tolist()]

    def maximum(self, value: float) -> float:
        """Return the largest `value` of all the job's ranks: loops need one count everywhere."""
        return self.maxima([value])[0]


def join(
    backend: str,
    where: Path | Rendezvous,
    *,
    rank: int,
    world: int,
    local_rank: int,
    gpu: bool = False,
) -> Communicator:
    """Join the job's process group, over `nccl` with the visible GPU `local_rank`, or over `gloo`.

    With `gpu` a rank over `gloo` has that GPU too, so that nothing of NCCL's can fail.
    Ranks of one host use a file in the folder `where`, because a free port may be taken before use.
    Over several hosts rank 0 has inherited an open listening socket.
    """
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    device, more = torch.device("cpu"), dict[str, Any]()
    if gpu or backend == "nccl":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if backend == "nccl":
        more["device_id"] = device
    else:
        # Ranks on one host share its cores.
        torch.set_num_threads(1)
    if isinstance(where, Rendezvous):
        more["store"] = _store(dist, where, rank, world)
    else:
        more["init_method"] = f"file://{where / 'rendezvous'}"
    dist.init_process_group(
        backend, rank=rank, world_size=world, timeout=_RENDEZVOUS_TIMEOUT, **more
    )
    members = tuple(range(world))
    return Communicator(torch=torch, dist=dist, rank=rank, members=members, device=device)


def _store(dist: Any, rendezvous: Rendezvous, rank: int, world: int) -> Any:
    more: dict[str, Any] = {"timeout": _RENDEZVOUS_TIMEOUT, "wait_for_workers": False}
    address = rendezvous.address, rendezvous.port
    if rank == 0:
        more |= {"is_master": True, "master_listen_fd": int(os.environ[LISTENER])}
    else:
        # The store itself would try for as long as ranks wait for each other.
        try:
            socket.create_connection(address, _CONNECT_S).close()
        except OSError as error:
            fault = f"error: cannot be reached at {address[0]} ({error})"
            right = "let the hosts of a job reach each other over TCP"
            raise InputError("the first rank's host", fault, right) from error
    return dist.PrefixStore(rendezvous.prefix, dist.TCPStore(*address, world, **more))


def write_result(folder: Path, rank: int, result: Any) -> None:
    """Write a rank's result, whole or not at all."""
    write_atomically(result_file(folder, rank), encode_json(result))


# Time slots: a disturbance of some seconds then hits all concurrent jobs alike, and starting
# several jobs takes no longer than starting one. The ranks of a host map a file with the number of
# slots that each has had. Over several hosts that suffices: a slot begins with a collective of its
# job, which every host's ranks reach only after the job before has left its slot there.


def write_slots(file: Path, ranks: int) -> None:
    """Write the file for this many ranks without a slot so far."""
    file.write_bytes(bytes(_WORD * ranks))


def time_slots(file: Path, slot: JobSlot | None, local_rank: int) -> TimeSlot:
    """Return the time slots of a rank; a single job never waits."""
    if slot is None or slot.jobs == 1:
        return nullcontext
    with file.open("r+b") as opened:
        # Each word is written by one rank, and whole.
        counts = memoryview(mmap.mmap(opened.fileno(), 0)).cast("q")
    offset = slot.number * slot.ranks + local_rank

    @contextmanager
    def next_slot() -> Iterator[None]:
        had = counts[offset]
        # Wait until the ranks of the job before this one have had their slot of this round.
        job, needed = (slot.number - 1, had + 1) if slot.number else (slot.jobs - 1, had)
        first = job * slot.ranks
        while any(counts[rank] < needed for rank in range(first, first + slot.ranks)):
            time.sleep(_POLL_S)
        yield
        counts[offset] = had + 1

    return next_slot
