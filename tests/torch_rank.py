"""One rank of a job over real torch.distributed; gloo stands for NCCL, a CPU for each GPU.

usage: python -m tests.torch_rank gloo|as-nccl PLAN, with torchrun's variables
Prints one JSON line: what each communicator saw when it was made, sums, and the environment.
"""

import json
import os
import sys

GRAPH = "NCCL_GRAPH_FILE"


def main():
    # Not above: the tests are collected where there is no torch.
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    import tccl_py.torch  # noqa: PLC0415

    way, plan = sys.argv[1:3]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seen = []
    if way == "as-nccl":
        as_nccl(torch, dist, rank, seen)
    before = dict(os.environ)
    tccl_py.torch.init_process_group(plan, "gloo")
    sums = {"world": reduced(torch, dist, rank, None)}
    for ranks in ([0, 1], [2, 3], [0, 2], [1, 3], [3], [1, 2, 3]):
        if max(ranks) < size:
            group = tccl_py.torch.new_group(ranks)
            if rank in ranks:
                sums[",".join(map(str, ranks))] = reduced(torch, dist, rank, group)
    added = {name: text for name, text in os.environ.items() if before.get(name) != text}
    dist.destroy_process_group()
    print(json.dumps({"seen": seen, "sums": sums, "added": added}), flush=True)


def as_nccl(torch, dist, rank, seen):
    """Let torch take a CPU for a GPU, numbered backwards, and note what collectives see."""
    from tccl_py.readers.live import DriverFacts  # noqa: PLC0415
    from tccl_py.torch import groups, members  # noqa: PLC0415

    none = DriverFacts(driver="", gpus=(), peer_access=())
    groups.wants_nccl = lambda torch, backend: True
    groups.device_of = lambda torch, device_id: torch.device("cpu", 0)
    members.look = lambda ordinal: (3 - rank, none)
    torch.cuda.nccl.version = lambda: (2, 30, 7)
    # No NCCL reads its environment here, so no plugin is loaded.
    torch.cuda.nccl.unique_id = lambda: b""
    torch.cuda.synchronize = lambda device: None
    real = dist.all_reduce

    def noted(token, group=None, **more):
        ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        if token.numel() == 1:
            seen.append((ranks, os.environ.get(GRAPH)))
        return real(token, group=group, **more)

    dist.all_reduce = noted


def reduced(torch, dist, rank, group):
    values = torch.full((3,), float(rank))
    dist.all_reduce(values, group=group)
    return values[0].item()


if __name__ == "__main__":
    main()
