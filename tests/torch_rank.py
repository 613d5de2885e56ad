"""The ranks of a job over real torch.distributed; gloo stands for NCCL, a CPU for each GPU.

usage: python -m tests.torch_rank gloo|as-nccl FOLDER PLAN..., with torchrun's variables but RANK
Each rank, with a plan of its own, writes one JSON line to FOLDER/RANK.out: what each communicator
saw when it was made, sums, and the environment; its errors are in RANK.err. Prints the exit codes.
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path

GRAPH = "NCCL_GRAPH_FILE"


def main():
    # Not above: the tests are collected where there is no torch. Ranks need not load it again.
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    import tccl_py.torch  # noqa: PLC0415

    way, folder, *plans = sys.argv[1:]
    pids = []
    for rank, plan in enumerate(plans):
        pids.append(os.fork())
        if pids[-1] == 0:
            signal.alarm(100)  # a rank that waits for ever ends with the test
            os.environ["RANK"] = str(rank)
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(Path(folder, f"{rank}.{name}"), os.O_CREAT | os.O_WRONLY), number)
            code = 1
            try:
                be_rank(torch, dist, tccl_py.torch, way, plan)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))


def be_rank(torch, dist, ours, way, plan):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seen = []
    if way == "as-nccl":
        as_nccl(torch, dist, rank, seen)
    before = dict(os.environ)
    ours.init_process_group(plan, "gloo")
    sums = {"world": reduced(torch, dist, rank, None)}
    for ranks in ([0, 1], [2, 3], [0, 2], [1, 3], [3], [1, 2, 3]):
        if max(ranks) < size:
            group = ours.new_group(ranks)
            if rank in ranks:
                sums[",".join(map(str, ranks))] = reduced(torch, dist, rank, group)
    added = {name: text for name, text in os.environ.items() if before.get(name) != text}
    dist.destroy_process_group()
    print(json.dumps({"seen": seen, "sums": sums, "added": added}), flush=True)


def as_nccl(torch, dist, rank, seen):
    """Let torch take a CPU for a GPU, numbered backwards, and note what collectives see."""
    from tccl_py.readers.live import DriverFacts  # noqa: PLC0415
    from tccl_py.torch import groups  # noqa: PLC0415

    none = DriverFacts(driver="", gpus=(), peer_access=())
    groups.wants_nccl = lambda torch, backend: True
    groups.device_of = lambda torch, device_id: torch.device("cpu", 0)
    groups.gpu_of_cuda_device = lambda ordinal: (3 - rank, none)
    torch.cuda.nccl.version = lambda: (2, 30, 7)
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
