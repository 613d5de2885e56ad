"""One rank of NCCL's collectives with several graph files, one communicator for each.

usage: python scripts/nccl_rates.py RANK WORLD RENDEZVOUS BYTES REPEATS JOB...

A JOB is a kind of KINDS (default NCCL), or KIND:GRAPH with a graph file. The rendezvous is by files
whose names begin with RENDEZVOUS: a free port may be taken before its use. Prints a JSON list: for
each job `right` (all values are correct) and the bus bandwidth in GB/s. NCCL reads its graph file
when a communicator is created.
"""

import json
import os
import sys
import time

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")


def main():
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    rank, world, size, repeats = (int(sys.argv[at]) for at in (1, 2, 4, 5))
    rendezvous = sys.argv[3]
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    values = torch.ones(size // 4 // world * world, device=device)
    answers = []
    for number, job in enumerate(sys.argv[6:]):
        kind, _, graph = job.partition(":")
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
        mine = slice(1027 * rank, 1027 * (rank + 1))
        run(dist, kind, small, small[mine])
        right = bool(small[mine].eq(expected(kind, rank, world)).all())
        # A reduction's values on ranks other than the root are undefined.
        right = right or (kind == "reduce" and rank > 0)
        share = len(values) // world
        part = values[share * rank : share * (rank + 1)]
        for _ in range(3):
            run(dist, kind, values, part)
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(repeats):
            run(dist, kind, values, part)
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - begun) / repeats
        dist.destroy_process_group()
        rate = 4 * len(values) / seconds * carried(kind, world) / 1e9
        answers.append({"right": right, "busbw_gbps": rate})
        values.fill_(1.0)
    print(json.dumps(answers), flush=True)


def run(dist, kind, values, part):
    """Run one collective over `values`; `part` is this rank's share."""
    if kind == "all_reduce":
        dist.all_reduce(values)
    elif kind == "all_gather":
        dist.all_gather_into_tensor(values, part)
    elif kind == "reduce_scatter":
        dist.reduce_scatter_tensor(part, values)
    elif kind == "broadcast":
        dist.broadcast(values, 0)
    else:
        dist.reduce(values, 0)


def expected(kind, rank, world):
    """Return the result on this rank, if all values of rank r are r."""
    total = float(world * (world - 1) // 2)
    return {"all_gather": float(rank), "broadcast": 0.0}.get(kind, total)


def carried(kind, world):
    """Return the bytes on each hop of a ring per byte of the values."""
    if kind == "all_reduce":
        return 2 * (world - 1) / world
    return (world - 1) / world if kind in ("all_gather", "reduce_scatter") else 1.0


if __name__ == "__main__":
    main()
