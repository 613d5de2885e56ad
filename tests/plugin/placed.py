"""Ranks in the guest with two NUMA nodes: where the pages of communicators lie, and all others.

usage: placed.py FOLDER NAME... Rank r of two runs on the CPU of node r, next to its GPUs r and
r + 2, and makes the named communicators: over GPUs 0 and 1, over 2 and 3, and over 0 and 1 where
the thread has a memory policy of its own, each with an all-reduce, at which NCCL makes the FIFOs
unless it did before. Each rank prints one line of JSON. Needs the standard library alone: starting
Python is slow there.
"""

import ctypes
import json
import mmap
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

SET_MEMPOLICY, GET_MEMPOLICY, INTERLEAVE = 238, 239, 3
PAGE, BLOCK = 4096, 16
GPUS = {"planned": (0, 1), "default": (2, 3), "own": (0, 1)}
_FIFO = re.compile(r"MMAP allocated shareable host buffer (\S+)")
_MADE = re.compile(r"Allocated \d+ bytes of shared memory in (\S+)")


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


def policy():
    """Return mode and nodes of this thread's memory policy."""
    mode, nodes = ctypes.c_int(), (ctypes.c_ulong * 16)()
    assert ctypes.CDLL(None).syscall(GET_MEMPOLICY, ctypes.byref(mode), nodes, 1025, None, 0) == 0
    return [mode.value, nodes[0]]


def block():
    """Return touched pages of the program."""
    memory = mmap.mmap(-1, BLOCK * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(BLOCK):
        memory[page * PAGE] = 1
    return memory


def nodes_of(memories):
    """Return the number of pages on each node, by move_pages."""
    starts = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in memories]
    pages = [start + PAGE * page for start in starts for page in range(BLOCK)]
    found = (ctypes.c_int * len(pages))()
    every = (ctypes.c_ulong * len(pages))(*pages)
    move_pages = 279
    assert ctypes.CDLL(None).syscall(move_pages, 0, len(pages), every, None, found, 0) == 0
    return [list(found).count(node) for node in range(2)]


def mapped():
    """Return the pages on each node of each file in /dev/shm, and of all memory without a file."""
    found = {}
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        file = re.search(r"file=(\S+)", line)
        if file is None and " anon=" not in line:
            continue
        name = file[1].removesuffix("\\040(deleted)") if file else "anonymous"
        counts = found.setdefault(name, [0, 0])
        for node in range(2):
            pages = re.search(rf" N{node}=(\d+)", line)
            counts[node] += int(pages[1]) if pages else 0
    return {name: n for name, n in found.items() if name.startswith(("/dev/shm/", "anon"))}


class Watcher(threading.Thread):
    """A thread of the program that allocates all the time."""

    def __init__(self):
        super().__init__(daemon=True)
        self.blocks, self.running, self.policies = [], True, set()

    def run(self):
        # NCCL's threads, which ask again and again, would keep the only CPU from this one.
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        while self.running:
            self.blocks.append(block())
            self.policies.add(tuple(policy()))
            time.sleep(0.01)

    def end(self):
        self.running = False
        self.join()
        return nodes_of(self.blocks)


def unique_id(nccl, path, rank):
    """Return the id of a communicator, which rank 0 makes."""
    unique = UniqueId()
    if rank == 0:
        assert nccl.ncclGetUniqueId(ctypes.byref(unique)) == 0
        path.with_suffix(".new").write_bytes(bytes(unique))
        path.with_suffix(".new").rename(path)
    while not path.exists():
        time.sleep(0.005)
    return UniqueId.from_buffer_copy(path.read_bytes())


def be_rank(rank, folder, names):
    os.sched_setaffinity(0, {rank})
    cuda, nccl = ctypes.CDLL("libcudart.so.13"), ctypes.CDLL("libnccl.so.2")
    record, log, seen = {"rank": rank, "before": nodes_of([block()])}, folder / f"log.{rank}", 0
    for name in names:
        cuda.cudaSetDevice(GPUS[name][rank])
        unique, comm, watcher = unique_id(nccl, folder / name, rank), ctypes.c_void_p(), Watcher()
        start = mapped()
        watcher.start()
        while not watcher.blocks:
            time.sleep(0.001)
        if name == "own":
            both = ctypes.byref(ctypes.c_ulong(3))
            ctypes.CDLL(None).syscall(SET_MEMPOLICY, INTERLEAVE, both, 65)
        code = nccl.ncclCommInitRank(ctypes.byref(comm), 2, unique, rank)
        early = len(_FIFO.findall(log.read_text()[seen:]))
        data = ctypes.create_string_buffer(4096)
        code |= nccl.ncclAllReduce(data, data, ctypes.c_size_t(1024), 7, 0, comm, None)
        found = {"code": code, "early": early, "policy": policy(), "during": watcher.end()}
        os.sched_setaffinity(0, {rank})
        found["after"], found["policies"] = nodes_of([block()]), sorted(watcher.policies)
        files, text = mapped(), log.read_text()[seen:]
        seen += len(text)
        fifos, created = set(_FIFO.findall(text)), set(_MADE.findall(text))
        for kind, paths in (("fifos", fifos), ("files", created - fifos)):
            found[kind] = [sum(files[path][node] for path in paths) for node in range(2)]
        change = zip(files["anonymous"], start["anonymous"], strict=True)
        record[name] = found | {"anonymous": [after - before for after, before in change]}
    record["said"] = re.findall(r"tccl: rank \d of 2: (host buffers .*)", log.read_text())
    os.write(1, f"\n{json.dumps(record)}\n".encode())
    (folder / f"done{rank}").touch()
    while not all((folder / f"done{other}").exists() for other in range(2)):
        time.sleep(0.005)
    os._exit(0)


def main():
    folder = Path(sys.argv[1])
    folder.mkdir()
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            os.environ["NCCL_DEBUG_FILE"] = str(folder / f"log.{rank}")
            be_rank(rank, folder, sys.argv[2:])
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        for other in ranks if status else ():
            os.kill(other, signal.SIGKILL)


if __name__ == "__main__":
    main()
