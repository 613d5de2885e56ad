"""One rank of NCCL's all-reduce with several graph files, one communicator for each.

usage: python scripts/nccl_rates.py RANK WORLD RENDEZVOUS BYTES REPEATS GRAPH...

An empty GRAPH is default NCCL. The rendezvous is by files whose names begin with RENDEZVOUS: a free
port may be taken before its use. Prints a JSON list: for each GRAPH `right` (all values are
correct) and the bus bandwidth in GB/s. NCCL reads its graph file when a communicator is created.
"""

import json
import os
import sys
import time


def main():
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    rank, world, size, repeats = (int(sys.argv[at]) for at in (1, 2, 4, 5))
    rendezvous = sys.argv[3]
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    values = torch.ones(size // 4 // world * world, device=device)
    answers = []
    for number, graph in enumerate(sys.argv[6:]):
        os.environ.pop("NCCL_GRAPH_FILE", None)
        if graph:
            os.environ["NCCL_GRAPH_FILE"] = graph
        dist.init_process_group(
            "nccl",
            init_method=f"file://{rendezvous}-{number}",
            rank=rank,
            world_size=world,
            device_id=device,
        )
        small = torch.full((1027 * world,), float(rank), device=device)
        dist.all_reduce(small)
        right = bool(small.eq(float(world * (world - 1) // 2)).all())
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
        rate = 4 * len(values) / seconds * 2 * (world - 1) / world / 1e9
        answers.append({"right": right, "busbw_gbps": rate})
        values.fill_(1.0)
    print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
