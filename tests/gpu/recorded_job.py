"""A job that says itself what it communicates: DDP, tensor parallel groups, a pipeline, experts.

usage: torchrun --nproc-per-node 2|4|8 recorded_job.py FOLDER [TRACES]
Each rank writes FOLDER/RANK.json: its calls of a step, as [collective, dtype, bytes, ranks, calls],
and TRACES/RANK.json.gz, a trace by PyTorch's profiler. Bytes of an all-to-all are this rank's own.
TCCL_JOB_HIDDEN and TCCL_JOB_TOKENS make it larger.
"""

import json
import os
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WARM_UP, STEPS, TRACED = 3, 12, 4
HIDDEN = int(os.environ.get("TCCL_JOB_HIDDEN", "512"))
TOKENS = int(os.environ.get("TCCL_JOB_TOKENS", "96"))


def main():
    folder, traces = Path(sys.argv[1]), sys.argv[2:]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    job = Job(rank, world, device)
    tracing: Any = nullcontext()
    if traces:
        tracing = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            schedule=torch.profiler.schedule(wait=WARM_UP, warmup=1, active=TRACED, repeat=1),
            on_trace_ready=lambda made: made.export_chrome_trace(f"{traces[0]}/{rank}.json.gz"),
        )
    with tracing as profiler:
        for step in range(WARM_UP + STEPS):
            job.calls.clear()
            if step < WARM_UP:
                job.all_reduce(torch.ones(step + 1, device=device), job.everyone)
            job.calls.clear()
            job.step()
            torch.cuda.synchronize()
            if traces:
                profiler.step()
    text = [[*call, count] for call, count in job.calls.items()]
    (folder / f"{rank}.json").write_text(json.dumps(text))
    # What comes after the steps is no part of them.
    dist.all_reduce(torch.ones(7, device=device))
    dist.barrier()
    torch.cuda.synchronize()
    dist.destroy_process_group()


class Job:
    """Two stages of a pipeline, each of replicas of pairs of tensor parallel ranks.

    Of two ranks every group has both.
    """

    def __init__(self, rank, world, device):
        self.rank, self.device, self.calls = rank, device, Counter()
        half = world // 2
        self.everyone = tuple(range(world)), None
        self.pair = self.group([(at, at + 1) for at in range(0, world, 2)])
        whole = [tuple(range(world))]
        replicas = [(at, at + 2) for at in range(world) if at % 4 < 2]
        self.replicas = self.group(replicas if world > 2 else whole)
        halves = [tuple(range(half)), tuple(range(half, world))]
        self.experts = self.group(halves if world > 2 else whole)
        self.first = rank < half
        self.peer = rank + half if self.first else rank - half
        torch.manual_seed(0)
        layers = [torch.nn.Linear(HIDDEN, HIDDEN, device=device) for _ in range(6)]
        self.model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Sequential(*layers), process_group=self.replicas[1], bucket_cap_mb=2
        )
        self.model.register_comm_hook(self, counted_bucket)

    def group(self, parts):
        """The part that has this rank, and its process group."""
        groups = {part: dist.new_group(part) for part in parts}
        return next((part, made) for part, made in groups.items() if self.rank in part)

    def count(self, collective, tensor, ranks, *, times=1, adds=False):
        dtype = str(tensor.dtype).removeprefix("torch.") if adds else "int8"
        size = tensor.numel() * tensor.element_size() * times
        self.calls[collective, dtype, size, tuple(ranks)] += 1

    def all_reduce(self, tensor, on):
        self.count("all_reduce", tensor, on[0], adds=True)
        dist.all_reduce(tensor, group=on[1])

    def step(self):
        """One step; the GPU is idle between its parts, since virtual GPUs share one."""
        x = torch.ones((TOKENS, HIDDEN), device=self.device, dtype=torch.bfloat16)
        # 1. The pipeline: activations to the next stage.
        if self.first:
            self.send(x)
        else:
            dist.recv(x, self.peer)
        torch.cuda.synchronize()
        # 2. Tensor parallel, with sequence parallel parts.
        for _ in range(2):
            self.all_reduce(x, self.pair)
        ranks, group = self.pair
        whole = x.new_empty((TOKENS * len(ranks), HIDDEN))
        self.count("all_gather", whole, ranks)
        dist.all_gather_into_tensor(whole, x, group=group)
        self.count("reduce_scatter", whole, ranks, adds=True)
        dist.reduce_scatter_tensor(x, whole, group=group)
        torch.cuda.synchronize()
        # 3. Experts: rank i has i + 1 rows for each expert, so that blocks differ.
        ranks, group = self.experts
        place = ranks.index(self.rank)
        sent = x.new_ones(((place + 1) * len(ranks), HIDDEN))
        sizes = [at + 1 for at in range(len(ranks))]
        received = x.new_empty((sum(sizes), HIDDEN))
        self.count("all_to_all", max((sent, received), key=torch.Tensor.numel), ranks)
        dist.all_to_all_single(received, sent, sizes, [place + 1] * len(ranks), group=group)
        self.count("all_to_all", whole, ranks)
        dist.all_to_all_single(torch.empty_like(whole), whole, group=group)
        torch.cuda.synchronize()
        # 4. A ring over all ranks.
        ranks = self.everyone[0]
        after, before = ranks[(self.rank + 1) % len(ranks)], ranks[self.rank - 1]
        self.count("send_recv", x, ranks)
        got = torch.empty_like(x)
        operations = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, got, before)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        torch.cuda.synchronize()
        # 5. Gradients, back through the pipeline, and over the replicas.
        if self.first:
            dist.recv(x, self.peer)
        else:
            self.send(x)
        torch.cuda.synchronize()
        self.model(x.float()).sum().backward()
        self.model.zero_grad()

    def send(self, tensor):
        self.count("send", tensor, (self.rank, self.peer))
        dist.send(tensor, self.peer)


def counted_bucket(job, bucket):
    """DDP's own all-reduce of a bucket, counted."""
    ranks, group = job.replicas
    job.count("all_reduce", bucket.buffer(), ranks, adds=True)
    done = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return done.then(lambda future: future.value()[0])


if __name__ == "__main__":
    main()
