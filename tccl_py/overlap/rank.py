"""One process of a job of `tccl overlap`: times what its order says, leaves its answer in a file.

usage: python -m tccl_py.overlap.rank ORDER.json RANK

Only here is torch imported. The process ends itself when its standard input ends: so it never
outlives who started it, however that ended.
"""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

from tccl_py.files import decode_json, encode_json, read_text, write_atomically
from tccl_py.overlap.orders import Answer, Order
from tccl_py.overlap.stopwatch import CudaStopwatch, ThreadStopwatch
from tccl_py.overlap.timing import Copies, Messages, Process, time_pairs, time_products

_MEETING = timedelta(seconds=90)
"""Who waits longer than that for another rank gives up."""


def main() -> None:
    """Do what ORDER says as rank RANK."""
    order = decode_json(read_text(Path(sys.argv[1])), Order, where=sys.argv[1])
    rank = int(sys.argv[2])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    answer = _answer(order, rank, torch, dist)
    if order.kind == "messages":
        dist.destroy_process_group()
    write_atomically(Path(order.folder) / f"answer-{rank}.json", encode_json(answer))


def _answer(order: Order, rank: int, torch: Any, dist: Any) -> Answer:
    cuda = order.backend == "nccl"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        # The ranks of a rehearsal share the cores.
        torch.set_num_threads(1)
    # A rank opens no GPU but its own.
    places = [rank] if order.kind == "messages" else range(order.places)
    devices = [torch.device("cuda", place) for place in places]
    watch = CudaStopwatch(torch, devices) if cuda else ThreadStopwatch()
    process = Process(torch=torch, order=order, rank=rank, device=device, watch=watch)
    mover: Messages | Copies
    if order.kind == "messages":
        more: dict[str, Any] = {"device_id": device} if cuda else {}
        # By a file: a port that is free now may be taken before all are there.
        dist.init_process_group(
            order.backend,
            init_method=f"file://{order.folder}/meeting",
            rank=rank,
            world_size=order.world,
            timeout=_MEETING,
            **more,
        )
        mover = Messages(process, dist)
    else:
        mover = Copies(process)
    pairs = time_pairs(process, mover)
    products = time_products(process, mover)
    return Answer(
        rank=rank,
        torch=str(torch.__version__),
        device=torch.cuda.get_device_name(device) if cuda else "",
        right=mover.right(),
        pairs=tuple(pairs),
        products=tuple(products),
    )


def _end_with_parent() -> None:
    # Nothing is ever written there: the read returns when the other end is gone. Not through
    # sys.stdin, whose lock this thread would hold while the interpreter ends.
    while os.read(0, 1):
        pass
    os._exit(3)


if __name__ == "__main__":
    main()
