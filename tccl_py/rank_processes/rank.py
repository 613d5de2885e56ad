"""What the programs that are a rank share: their order, their end, where they meet, their answer.

They alone import torch, and give it to what is here.
"""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from tccl_py.files import decode_json, encode_json, read_text, write_atomically
from tccl_py.rank_processes.places import answer_file, meeting_file

_MEETING = timedelta(seconds=90)
"""Who waits longer than that for another rank gives up; the runner names who is late."""

T = TypeVar("T")


def told(kind: type[T]) -> tuple[T, int]:
    """The order and the number that the command line names.

    From now on this process ends itself when its standard input ends: so it never outlives who
    started it, however that ended.
    """
    order = decode_json(read_text(Path(sys.argv[1])), kind, where=sys.argv[1])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return order, int(sys.argv[2])


def own_device(torch: Any, backend: str, rank: int) -> Any:
    """The device of a rank: of `nccl` the GPU of its number, which is current then."""
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        return device
    # The ranks of a rehearsal share the cores.
    torch.set_num_threads(1)
    return torch.device("cpu")


def meet(dist: Any, backend: str, folder: Path, *, rank: int, world: int, device: Any) -> None:
    """Join the job's process group, by a file: a port that is free may be taken by then."""
    more = {"device_id": device} if backend == "nccl" else {}
    dist.init_process_group(
        backend,
        init_method=f"file://{meeting_file(folder)}",
        rank=rank,
        world_size=world,
        timeout=_MEETING,
        **more,
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
