"""One rank of a real all-reduce over NCCL; started by the tests, one process a GPU.

usage: python -m tests.gpu.collective RANK WORLD FILE BYTES REPEATS
The ranks meet by a FILE that is not there yet: a free port may be taken before rank 0 listens.
LOCAL_RANK is its GPU for CUDA, if that is not RANK.
Prints one JSON line: whether the sums were right, and the bus bandwidth in GB/s.
"""

import json
import os
import sys
import time


def main():
    # Not above: the tests are collected where there is no torch.
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    rank, world, size, repeats = (int(sys.argv[at]) for at in (1, 2, 4, 5))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{sys.argv[3]}",
        rank=rank,
        world_size=world,
        device_id=device,
    )
    right = all(check(torch, rank, world, device, count) for count in (1, 1027, size // 4))
    busbw = measure(torch, world, device, size // 4, repeats)
    dist.destroy_process_group()
    print(json.dumps({"rank": rank, "right": right, "busbw_gbps": busbw}), flush=True)


def check(torch, rank, world, device, count):
    """Sums of integers are exact, and every element differs from its neighbours."""
    index = torch.arange(count, device=device) % 97
    values = (index + rank).float()
    torch.distributed.all_reduce(values)
    expected = (index * world + world * (world - 1) // 2).float()
    return bool(torch.equal(values, expected))


def measure(torch, world, device, count, repeats):
    values = torch.ones(count, device=device)
    for _ in range(3):
        torch.distributed.all_reduce(values)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(repeats):
        torch.distributed.all_reduce(values)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begun) / repeats
    return count * 4 / seconds * 2 * (world - 1) / world / 1e9


if __name__ == "__main__":
    main()
