"""Compare settings of NCCL on two GPUs by ranks that stay alive, each collective in turn.

usage: python scripts/compare_settings.py SETTINGS.json [SECONDS]

SETTINGS.json is a list of objects with NCCL's variables; default NCCL is added as the first. The
caller's variables hold for all, as NCCL_P2P_DISABLE=1 does. Prints a line for each: its time of
all-reduce as a speed over default NCCL at 64 MiB, 256 MiB and 1 GiB, then the least of the other
collectives from 4 MiB up. Needs torch with CUDA, and 1.7 GB of each GPU for each of the settings.
"""

import json
import os
import statistics
import subprocess
import sys
import time

MIB = 1 << 20
SIZES = [4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB]
HALF = 512 * MIB
"""Bytes of a direction where both GPUs send."""
OPERATIONS = ("all_reduce", "all_gather", "send", "send_recv", "all_to_all")


def serve(rank: int, port: str) -> None:
    """Run calls that the caller names, and print the milliseconds of each."""
    import torch  # noqa: PLC0415 (of ranks alone)
    import torch.distributed as dist  # noqa: PLC0415

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    large = torch.zeros(SIZES[-1], dtype=torch.uint8, device="cuda")
    other = torch.zeros(HALF, dtype=torch.uint8, device="cuda")
    peer = 1 - rank

    def call(operation: str, size: int) -> None:
        both = min(size, HALF)
        if operation == "all_reduce":
            dist.all_reduce(large[:size].view(torch.bfloat16))
        elif operation == "all_gather":
            part = size // 2
            dist.all_gather_into_tensor(large[:size], large[rank * part : (rank + 1) * part])
        elif operation == "send":
            dist.recv(large[:size], 0) if rank else dist.send(large[:size], 1)
        elif operation == "send_recv":
            sent = dist.P2POp(dist.isend, large[:both], peer)
            came = dist.P2POp(dist.irecv, other[:both], peer)
            for work in dist.batch_isend_irecv([sent, came]):
                work.wait()
        else:
            dist.all_to_all_single(other[:both], large[:both])

    for operation in OPERATIONS:
        call(operation, MIB)
    torch.cuda.synchronize()
    print("ready", flush=True)
    for line in sys.stdin:
        operation, size = line.split()[0], int(line.split()[1])
        repeats = max(2, min(30, int(4e8 / size)))
        call(operation, size)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            call(operation, size)
        end.record()
        torch.cuda.synchronize()
        print(begin.elapsed_time(end) / repeats, flush=True)


def main(file: str, seconds: float = 60.0) -> None:
    with open(file) as text:  # noqa: PTH123
        settings = [{}, *filter(None, json.load(text))]
    jobs = [
        [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), str(21000 + number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **variables},
            )
            for rank in (0, 1)
        ]
        for number, variables in enumerate(settings)
    ]
    try:
        for job in jobs:
            if any(rank.stdout.readline() != "ready\n" for rank in job):
                sys.exit("a rank did not start")
        times: dict[tuple[int, str, int], list[float]] = {}
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for operation, size in ((name, size) for name in OPERATIONS for size in SIZES):
                for number, job in enumerate(jobs):
                    for rank in job:
                        print(operation, size, file=rank.stdin, flush=True)
                    took = max(float(rank.stdout.readline()) for rank in job)
                    times.setdefault((number, operation, size), []).append(took)
    finally:
        for job in jobs:
            for rank in job:
                rank.kill()
    for number, variables in enumerate(settings):
        speeds = {
            (name, size): statistics.median(
                own / mine
                for own, mine in zip(times[0, name, size], times[number, name, size], strict=True)
            )
            for name in OPERATIONS
            for size in SIZES
        }
        reduced = " ".join(f"{speeds['all_reduce', size]:.2f}" for size in SIZES[2:])
        name, size = min((key for key in speeds if key[0] != "all_reduce"), key=speeds.get)
        print(f"{reduced}  {name} {size // MIB} MiB {speeds[name, size]:.2f}  {variables}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        serve(int(sys.argv[2]), sys.argv[3])
    else:
        main(sys.argv[1], *map(float, sys.argv[2:]))
