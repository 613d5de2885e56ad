"""One rank of the communicators that `asked.py` makes; one process for each GPU.

usage: tccl_py.nccl.asked_rank FOLDER/spec.json RANK
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import msgspec

from tccl_py.errors import TcclError
from tccl_py.files import write_atomically
from tccl_py.nccl_library import Library, version_text
from tccl_py.rank_processes.rank import read_spec, write_result

_POLL_S = 0.005
_ABORT_S = 5.0


class Communicator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A communicator to make: its ranks, and the name of its graph file ("": none)."""

    ranks: tuple[int, ...]
    graph: str = ""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """NCCL's library, the GPU of each rank, and communicators to make one after another."""

    library: str
    gpus: tuple[int, ...]
    communicators: tuple[Communicator, ...]


class CommunicatorLog(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """NCCL's log of communicator `number` in this rank; its rank 0 adds the dumped graphs."""

    number: int
    log: str
    dump: str = ""


class RankResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """NCCL's version, and its log of each communicator with this rank."""

    version: str
    logs: tuple[CommunicatorLog, ...]


def main() -> None:
    """Make the communicators; exit with code 1 and NCCL's message if NCCL refuses one."""
    spec, rank, folder = read_spec(JobSpec)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, spec.gpus))
    # NVML's order, which the GPUs' indices have.
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["NCCL_DEBUG_FILE"] = str(folder / f"nccl-{rank}")
    number = -1
    try:
        library = Library(spec.library)
        library.use_gpu(rank)
        logs = []
        for number, communicator in enumerate(spec.communicators):
            if rank in communicator.ranks:
                # Names the communicator in case NCCL crashes.
                print(f"communicator {number}", flush=True)
                logs.append(_made(library, communicator, number, rank, folder))
    except TcclError as error:
        where = f"communicator {number}: " if number >= 0 else ""
        print(f"error: {where}{error}", flush=True)
        os._exit(1)
    write_result(folder, rank, RankResult(version=version_text(library.version), logs=tuple(logs)))
    sys.stdout.flush()
    # Threads of NCCL may still run.
    os._exit(0)


def _made(
    library: Library, communicator: Communicator, number: int, rank: int, folder: Path
) -> CommunicatorLog:
    """Make one communicator with the other ranks, end it, and return its log."""
    place = communicator.ranks.index(rank)
    dump, log = folder / f"dump-{number}.xml", folder / f"nccl-{rank}"
    # 1. Name the files that NCCL reads and writes with every communicator.
    os.environ["NCCL_GRAPH_DUMP_FILE"] = str(dump)
    os.environ.pop("NCCL_GRAPH_FILE", None)
    if communicator.graph:
        os.environ["NCCL_GRAPH_FILE"] = str(folder / communicator.graph)
    # 2. Join by the id of rank 0.
    id_file = folder / f"id-{number}"
    if place == 0:
        write_atomically(id_file, library.unique_id().hex())
    _wait_for(id_file)
    begun = log.stat().st_size if log.exists() else 0
    unique_id = bytes.fromhex(id_file.read_text())
    made = library.communicator(unique_id, rank=place, ranks=len(communicator.ranks))
    # 3. Abort once all ranks have it: until then they need this rank.
    (folder / f"made-{number}-{rank}").touch()
    for peer in communicator.ranks:
        _wait_for(folder / f"made-{number}-{peer}")
    ending = threading.Thread(target=library.abort, args=(made,), daemon=True)
    ending.start()
    ending.join(_ABORT_S)
    text = log.read_bytes()[begun:].decode(errors="replace")
    dumped = dump.read_text(errors="replace") if place == 0 and dump.exists() else ""
    return CommunicatorLog(number=number, log=text, dump=dumped)


def _wait_for(path: Path) -> None:
    """Wait for a peer's file; the parent process limits the time."""
    while not path.exists():
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
