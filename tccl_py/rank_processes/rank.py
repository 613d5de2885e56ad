"""What the programs that are a rank share: their order, their end, where they meet, their answer.

They alone import torch, and give it to what is here.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import decode_json, encode_json, read_text, write_atomically
from tccl_py.rank_processes.places import answer_file, meeting_file
from tccl_py.rank_processes.run import LISTENER

_MEETING = timedelta(seconds=90)
"""Who waits longer than that for another rank gives up; the runner names who is late."""

_TRY_S = 3.0

T = TypeVar("T")


class Meeting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where ranks of several hosts meet: the first one's addresses, one of which all reach."""

    addresses: tuple[str, ...]
    port: int


def told(kind: type[T]) -> tuple[T, int, Path]:
    """The order and the number that the command line names, and the folder to answer in.

    From now on this process ends itself when its standard input ends: so it never outlives who
    started it, however that ended.
    """
    file = Path(sys.argv[1])
    order = decode_json(read_text(file), kind, where=str(file))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return order, int(sys.argv[2]), file.parent


def own_device(torch: Any, backend: str, place: int) -> Any:
    """The device of a rank; of `nccl` the visible GPU at its place, which is current then."""
    if backend == "nccl":
        device = torch.device("cuda", place)
        torch.cuda.set_device(device)
        return device
    # The ranks of a rehearsal share the cores.
    torch.set_num_threads(1)
    return torch.device("cpu")


def meet(
    dist: Any,
    backend: str,
    where: Path | Meeting,
    *,
    rank: int,
    world: int,
    device: Any,
) -> None:
    """Join the job's process group.

    On one host ranks meet by a file in a folder: a port that is free may be taken by then. Over
    several the first rank has inherited a socket that is open already.
    """
    more = {"device_id": device} if backend == "nccl" else {}
    if isinstance(where, Meeting):
        more["store"] = _store(dist, where, rank, world)
    else:
        more["init_method"] = f"file://{meeting_file(where)}"
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=_MEETING, **more)


def _store(dist: Any, meeting: Meeting, rank: int, world: int) -> Any:
    more: dict[str, Any] = {"timeout": _MEETING, "wait_for_workers": False}
    if rank == 0:
        descriptor = int(os.environ[LISTENER])
        # It is its own host's; without a network there is loopback.
        address = (*meeting.addresses, "127.0.0.1")[0]
        more |= {"is_master": True, "master_listen_fd": descriptor}
    else:
        address = _reached(meeting)
    return dist.TCPStore(address, meeting.port, world, **more)


def _reached(meeting: Meeting) -> str:
    """The first address that answers: a host may have networks that others do not reach.

    Raises:
        InputError: none does.
    """
    for address in meeting.addresses:
        try:
            with socket.create_connection((address, meeting.port), _TRY_S):
                return address
        except OSError:
            continue
    raise InputError(
        "the first rank's host",
        f"error: is not reached at {', '.join(meeting.addresses)}",
        "let the hosts of a job reach each other over TCP",
    )


def leave_answer(folder: Path, rank: int, answer: Any) -> None:
    """Write a rank's answer, whole or not at all."""
    write_atomically(answer_file(folder, rank), encode_json(answer))


def _end_with_parent() -> None:
    # Nothing is ever written there: the read returns when the other end is gone. Not through
    # sys.stdin, whose lock this thread would hold while the interpreter ends.
    while os.read(0, 1):
        pass
    os._exit(3)
