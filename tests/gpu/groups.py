"""One rank of a job with many groups, over NCCL; started by the tests, one process a GPU.

usage: python -m tests.gpu.groups RANK WORLD MEET PLAN eager|lazy|background
Prints one JSON line: which sums were right, by group and in order, NVML's index of the GPU, and
what is in the environment.
"""

import json
import os
import sys

from tests.gpu.collective import check
from tests.gpu.ranks import groups_of, leave, splits_of


def main():
    # Not above: the tests are collected where there is no torch.
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    import tccl_py.torch  # noqa: PLC0415
    from tccl_py.readers.live import gpu_of_cuda_device  # noqa: PLC0415

    rank, size = int(sys.argv[1]), int(sys.argv[2])
    meet, plan, way = sys.argv[3:]
    if way == "background":
        os.environ["TORCH_NCCL_USE_COMM_NONBLOCKING"] = "1"
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    bound = {} if way == "lazy" else {"device_id": device}
    tccl_py.torch.init_process_group(
        plan, "nccl", init_method=f"file://{meet}", rank=rank, world_size=size, **bound
    )
    right = [[list(range(size)), summed(torch, rank, list(range(size)), None)]]
    for ranks in groups_of(size):
        group = tccl_py.torch.new_group(ranks)
        if rank in ranks:
            right.append([ranks, summed(torch, rank, ranks, group)])
    for parts in splits_of(size) if way != "lazy" else ():
        group = tccl_py.torch.split_group(split_ranks=parts)
        mine = next((part for part in parts if rank in part), None)
        if mine is not None:
            right.append([mine, summed(torch, rank, mine, group)])
    passed = passed_on(torch, dist, rank, size, device)
    answer = {
        "right": right,
        "passed": passed,
        "gpu": gpu_of_cuda_device(rank)[0],
        "graph": os.environ.get("NCCL_GRAPH_FILE"),
    }
    torch.cuda.synchronize()
    dist.barrier()
    if way == "lazy":
        dist.destroy_process_group()
    print(json.dumps(answer))
    leave()


def summed(torch, rank, ranks, group):
    """Whether sums over a group are right, for several sizes."""

    class InGroup:
        """torch, with collectives over this group."""

        def __getattr__(self, name):
            return getattr(torch, name)

        class distributed:  # noqa: N801 (torch's name)
            """Collectives over the group."""

            @staticmethod
            def all_reduce(values):
                """Sum over the group."""
                torch.distributed.all_reduce(values, group=group)

    place = ranks.index(rank)
    device = torch.device("cuda", rank)
    return all(check(InGroup(), place, len(ranks), device, count) for count in (1, 1027, 1 << 20))


def passed_on(torch, dist, rank, size, device):
    """A message to the next rank: without a bound device torch makes a communicator for the two."""
    mine, theirs = torch.full((5,), float(rank), device=device), torch.zeros(5, device=device)
    if rank % 2 == 0:
        dist.send(mine, (rank + 1) % size)
        dist.recv(theirs, (rank - 1) % size)
    else:
        dist.recv(theirs, (rank - 1) % size)
        dist.send(mine, (rank + 1) % size)
    return bool((theirs == (rank - 1) % size).all())


if __name__ == "__main__":
    main()
