"""What a launcher's variables say of a rank: its GPU, and the host's ranks; the rank's memory."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Sequence

_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
"""The number of a rank on its host: torchrun's, Open MPI's, MPICH's and SLURM's."""
_RANKS = {
    "LOCAL_WORLD_SIZE": "WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "OMPI_COMM_WORLD_SIZE",
    "MPI_LOCALNRANKS": "PMI_SIZE",
}
"""The numbers of ranks on a host, and of all."""
_RANKS_OF_NODES = "SLURM_STEP_TASKS_PER_NODE"  # as 4(x2),3 of three nodes


def gpu_of_rank(gpus: Sequence[int]) -> int | None:
    """Return the GPU of this process by its launcher's variables; None if it is no single rank."""
    gpus, rank = _visible() or gpus, _local_rank()
    if rank is None:
        return None
    return gpus[0] if len(gpus) == 1 else gpus[rank] if rank < len(gpus) else None


def gpus_of_job() -> tuple[int, ...] | None:
    """Return the GPUs that the ranks below this process see; None is all, or not known.

    Ranks of a launcher may each see others, and a job of one GPU needs no rings.
    """
    gpus = _visible()
    return tuple(sorted(set(gpus))) if _local_rank() is None and len(set(gpus)) > 1 else None


def launched_ranks() -> tuple[int, int] | None:
    """Return how many ranks a launcher started on this host, and in all; None if it says neither.

    Without a launcher, too, it is None.
    """
    if _local_rank() is None:
        return None
    for of_host, of_all in _RANKS.items():
        if (count := _number(of_host)) is not None:
            return count, max(count, _number(of_all) or 0)
    nodes = re.findall(r"(\d{1,4})(?:\(x(\d{1,5})\))?", os.environ.get(_RANKS_OF_NODES, ""))
    each = [int(count) for count, times in nodes for _ in range(int(times or 1))]
    here = each[_number("SLURM_NODEID") or 0 :][:1]
    return (here[0], sum(each)) if here else None


def _visible() -> Sequence[int]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    is_list = re.fullmatch(r"\d{1,4}(,\d{1,4})*", visible)
    return [int(gpu) for gpu in visible.split(",")] if is_list else []


def _local_rank() -> int | None:
    ranks = map(_number, _LOCAL_RANKS)
    return next((rank for rank in ranks if rank is not None), None)


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if re.fullmatch(r"\d{1,6}", text) else None


def prefer_numa_node(node: int) -> str:
    """Prefer a NUMA node for all memory of this process and its children; return why not, or ""."""
    set_mempolicy = {"x86_64": 238, "aarch64": 237}.get(platform.machine())
    if set_mempolicy is None:
        return f"not known on {platform.machine()}"
    libc, preferred = ctypes.CDLL(None, use_errno=True), 1
    words = (ctypes.c_uint64 * 16)()
    if not 0 <= node < 64 * len(words):
        return "Linux has no such node"
    words[node // 64] = 1 << node % 64
    # The kernel reads one bit less.
    done = libc.syscall(set_mempolicy, preferred, words, 8 * ctypes.sizeof(words) + 1)
    return os.strerror(ctypes.get_errno()) if done else ""
