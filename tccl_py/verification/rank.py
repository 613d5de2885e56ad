"""One rank of a job: meets the others, checks, times, trains, and leaves its answer in a file.

usage: python -m tccl_py.verification.rank ORDER.json RANK

Only programs like this one import torch. The rank ends itself when its standard input ends: so it
never outlives who started it, however that ended.
"""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from tccl_py.files import decode_json, encode_json, read_text, write_atomically
from tccl_py.verification.checks import run_checks
from tccl_py.verification.orders import Answer, Order
from tccl_py.verification.ranks import Ranks
from tccl_py.verification.timing import time_size
from tccl_py.verification.training import train

_MEETING = timedelta(seconds=90)
"""Who waits longer than that for another rank gives up; the runner names who is late."""


def main() -> None:
    """Do what ORDER says as rank RANK."""
    order = decode_json(read_text(Path(sys.argv[1])), Order, where=sys.argv[1])
    rank = int(sys.argv[2])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    ranks = meet(order, rank)
    answer = carry_out(order, ranks)
    ranks.dist.destroy_process_group()
    write_atomically(Path(order.folder) / f"answer-{rank}.json", encode_json(answer))


def meet(order: Order, rank: int) -> Ranks:
    """Join the job's process group; ranks meet by a file, because a free port may be taken."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    group: dict[str, Any] = {}
    if order.backend == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        group["device_id"] = device
    else:
        device = torch.device("cpu")
        # The ranks of a rehearsal share the cores.
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if order.backend == "cuda" else "gloo",
        init_method=f"file://{order.folder}/meeting",
        rank=rank,
        world_size=order.world,
        timeout=_MEETING,
        **group,
    )
    return Ranks(torch=torch, dist=dist, rank=rank, world=order.world, device=device)


def carry_out(order: Order, ranks: Ranks) -> Answer:
    """Run what the order asks for."""
    torch = ranks.torch
    cuda = order.backend == "cuda"
    answer = Answer(
        rank=ranks.rank,
        torch=str(torch.__version__),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if cuda else "",
        device=torch.cuda.get_device_name(ranks.device) if cuda else "",
    )
    if order.checks:
        found = run_checks(ranks)
        answer = msgspec.structs.replace(
            answer, checked=found.checked, wrong=found.wrong, left_out=found.left_out
        )
    if order.sizes:
        timings = [time_size(ranks, order.collective, size, order.seconds) for size in order.sizes]
        answer = msgspec.structs.replace(answer, timings=tuple(timings))
    if order.training:
        answer = msgspec.structs.replace(answer, training=train(ranks))
    return answer


def _end_with_parent() -> None:
    # Nothing is ever written there: the read returns when the other end is gone. Not through
    # sys.stdin, whose lock this thread would hold while the interpreter ends.
    while os.read(0, 1):
        pass
    os._exit(3)


if __name__ == "__main__":
    main()
