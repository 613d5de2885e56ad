"""A NUMA node for the memory of this process."""

from __future__ import annotations

import ctypes
import os
import platform


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
