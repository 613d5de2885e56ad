"""One rank of a job: meets the others, checks, times, trains, and leaves its answer in a file.

usage: python -m tccl_py.verify.rank ORDER.json RANK

Only programs like this one import torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tccl_py.rank_processes.places import turns_file
from tccl_py.rank_processes.rank import leave_answer, meet, own_device, told
from tccl_py.rank_processes.turns import TakesTurn, turns
from tccl_py.verify.checks import run_checks
from tccl_py.verify.orders import Answer, Groups, Order
from tccl_py.verify.ranks import Ranks
from tccl_py.verify.timing import time_size, wake
from tccl_py.verify.training import train


def main() -> None:
    """Do what ORDER says as rank RANK."""
    order, rank, folder = told(Order)
    ranks = join(order, rank, folder)
    turn = turns(turns_file(folder), order.seat, rank - order.first)
    answer = carry_out(order, ranks, turn)
    ranks.dist.destroy_process_group()
    leave_answer(folder, rank, answer)


def join(order: Order, rank: int, folder: Path) -> Ranks:
    """The job's ranks, met, as this one sees them."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    backend = "nccl" if order.backend == "cuda" else "gloo"
    device = own_device(torch, backend, rank - order.first)
    where = order.meeting or folder
    meet(dist, backend, where, rank=rank, world=order.world, device=device)
    return Ranks(torch=torch, dist=dist, rank=rank, world=order.world, device=device)


def carry_out(order: Order, ranks: Ranks, turn: TakesTurn) -> Answer:
    """Run what the order asks for; what is timed has its turns."""
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
    if order.timed:
        wake(ranks)
        answer = msgspec.structs.replace(answer, timings=tuple(_timings(order, ranks, turn)))
    if order.training:
        answer = msgspec.structs.replace(answer, training=train(ranks, turn))
    return answer


def _timings(order: Order, ranks: Ranks, turn: TakesTurn) -> Iterator[tuple[float, ...]]:
    made: dict[Groups, Ranks] = {(): ranks}
    for row in order.timed:
        if row.groups not in made:
            # A graph file fails every communicator over fewer GPUs.
            groups = () if "NCCL_GRAPH_FILE" in os.environ else row.groups
            with turn():
                made[row.groups] = ranks.among(groups)
        among = made[row.groups]
        found = time_size(among, order.collective, row.bytes, order.seconds, turn)
        yield found if among.world > 1 else ()


if __name__ == "__main__":
    main()
