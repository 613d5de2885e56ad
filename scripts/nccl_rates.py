"""NCCL's all-reduce with several graph files, one communicator after the other; one rank of it.

usage: python scripts/nccl_rates.py RANK WORLD MEETING BYTES REPEATS [GRAPH...]

Ranks meet by files whose names begin with MEETING: ports, free when chosen, may be taken by then.
Prints a JSON list: for each graph file (none: NCCL's own choice) whether the sums were right, and
the bus bandwidth in GB/s. NCCL reads its graph file when a communicator is created.
"""

import json
import os
import sys
import time


def main():
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    rank, world, size, repeats = (int(sys.argv[at]) for at in (1, 2, 4, 5))
    meeting = sys.argv[3]
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    values = torch.ones(size // 4, device=device)
    answers = []
    for number, graph in enumerate(sys.argv[6:] or [""]):
        os.environ.pop("NCCL_GRAPH_FILE", None)
        if graph:
            os.environ["NCCL_GRAPH_FILE"] = graph
        dist.init_process_group(
            "nccl",
            init_method=f"file://{meeting}-{number}",
            rank=rank,
            world_size=world,
            device_id=device,
        )
        small = torch.full((1027,), float(rank), device=device)
        dist.all_reduce(small)
        right = bool((small == world * (world - 1) // 2).all())
        for _ in range(3):
            dist.all_reduce(values)
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(repeats):
            dist.all_reduce(values)
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - begun) / repeats
        dist.destroy_process_group()
        rate = size / seconds * 2 * (world - 1) / world / 1e9
        answers.append({"right": right, "busbw_gbps": rate})
        values.fill_(1.0)
    print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
