"""Ranks of a job: started together, and all ended together."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tccl_py.nccl_library import loaded_nccl

REPOSITORY = Path(__file__).resolve().parents[2]
REAL = "TCCL_VIRTUAL_GPUS" not in os.environ
"""False on virtual GPUs (scripts/test-gpu): there bandwidths mean nothing, and little is timed."""


def _virtual_gpus():
    """How many virtual GPUs the one real GPU stands for, on all hosts; at least 4."""
    listed = os.environ.get("VGPU_CONFIG")
    count = len(Path(listed).read_text().splitlines()) if listed else 8
    return max(4, count * int(os.environ.get("VGPU_HOSTS", "1")))


SHARE = (
    {}
    if REAL
    else {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(96 // _virtual_gpus()),
        "VGPU_CONNECTIONS": str(max(2, 64 // _virtual_gpus())),
    }
)
"""Variables of processes that measure on virtual GPUs: a share of the real one's multiprocessors
and queues for each, since the kernels of a set wait for each other."""
RANKS_TIMEOUT_S = 240 if REAL else 60
BRIEF = () if REAL else ("--max-sets", "20", "--max-seconds", "20")
"""Options of `tccl plan`."""
CHANNELS = tuple(
    name
    for name in ("NCCL_MAX_NCHANNELS", "NCCL_MAX_P2P_NCHANNELS", "NCCL_CGA_CLUSTER_SIZE")
    if name in os.environ
)
"""What scripts/test-gpu sets, so that the blocks of all ranks fit on the one real GPU."""
PINNED = tuple(word for name in CHANNELS for word in ("--pin-env", name))
"""Options of `tccl verify`, which gives its jobs none of the caller's variables of NCCL."""


def run_ranks(commands, environments, *, timeout=RANKS_TIMEOUT_S):
    """Run a process for each command; return their exit codes, and their output and errors.

    None outlives the call, which ends with subprocess.TimeoutExpired where a rank hangs: what each
    said is printed then, and where those are that show their stack by SIGUSR1.
    """
    ranks = [
        subprocess.Popen(
            list(map(str, command)),
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        outputs = [rank.communicate(timeout=timeout) for rank in ranks]
    except subprocess.TimeoutExpired:
        for rank in ranks:
            rank.send_signal(signal.SIGUSR1)
        time.sleep(1)
        for number, rank in enumerate(ranks):
            rank.kill()
            print(f"rank {number}: {rank.communicate()[1][-4000:]}", flush=True)
        raise
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], outputs


def torch_nccl():
    """The version of the NCCL that torch loads, also of another than it was built with; or None."""
    try:
        import torch  # noqa: PLC0415
    except ImportError:
        return None
    return tuple(map(int, loaded_nccl(torch).split(".")))


def groups_of(size):
    """Sets of ranks: a pair, halves, every other one, a triple, a single one, and all."""
    ranks = list(range(size))
    half = size // 2
    sets = (ranks[:2], ranks[:half], ranks[half:], ranks[::2], ranks[1::2], ranks[:3], ranks[-1:])
    return [list(one) for one in dict.fromkeys(map(tuple, (*sets, ranks)))]


def splits_of(size):
    """Ways to part all ranks."""
    ranks = list(range(size))
    whole = [ranks] if size == 2 else [ranks[: size // 2], ranks[size // 2 :]]
    return [whole, [[0, *ranks[2:]], [1]]]


def leave():
    """End this rank as programs do that do not destroy their groups.

    With overlapping splits of four GPUs and more torch 2.11 hangs while it destroys groups, without
    the plugin too.
    """
    sys.stdout.flush()
    os._exit(0)
