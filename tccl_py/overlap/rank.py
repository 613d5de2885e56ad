"""One process of a job of `tccl overlap`: times what its order says, leaves its answer in a file.

usage: python -m tccl_py.overlap.rank ORDER.json RANK

Only here is torch imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tccl_py.overlap.orders import Answer, Order
from tccl_py.overlap.stopwatch import CudaStopwatch, ThreadStopwatch
from tccl_py.overlap.timing import Copies, Messages, Process, time_pairs, time_products
from tccl_py.rank_processes.rank import join_group, rank_device, read_spec, write_result


def main() -> None:
    """Do what ORDER says as rank RANK."""
    order, rank, folder = read_spec(Order)
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    answer = _answer(order, rank, folder, torch, dist)
    if order.kind == "messages":
        dist.destroy_process_group()
    write_result(folder, rank, answer)


def _answer(order: Order, rank: int, folder: Path, torch: Any, dist: Any) -> Answer:
    cuda = order.backend == "nccl"
    device = rank_device(torch, order.backend, rank)
    # A rank opens no GPU but its own.
    places = [rank] if order.kind == "messages" else range(order.places)
    devices = [torch.device("cuda", place) for place in places]
    watch = CudaStopwatch(torch, devices) if cuda else ThreadStopwatch()
    process = Process(torch=torch, order=order, rank=rank, device=device, watch=watch)
    mover: Messages | Copies
    if order.kind == "messages":
        join_group(dist, order.backend, folder, rank=rank, world=order.world, device=device)
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


if __name__ == "__main__":
    main()
