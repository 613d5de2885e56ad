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

_LOOK_S = 0.005
_ABORT_S = 5.0


class Communicator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A communicator to make: the ranks in it, and the name of its graph file, "" without one."""

    ranks: tuple[int, ...]
    graph: str = ""


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """NCCL's library, the GPU of each rank, and communicators to make, one after the other."""

    library: str
    gpus: tuple[int, ...]
    communicators: tuple[Communicator, ...]


class Said(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """NCCL's log of one communicator in this rank; rank 0 of it also has the dumped graphs."""

    number: int
    log: str
    dump: str = ""


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """NCCL's version, and its log of each communicator that this rank was in."""

    version: str
    said: tuple[Said, ...]


def main() -> None:
    """Make the communicators; exit code 1 with NCCL's words where it refuses one."""
    order, rank, folder = read_spec(Order)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, order.gpus))
    # NVML's order, which the GPUs' indices have.
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["NCCL_DEBUG_FILE"] = str(folder / f"nccl-{rank}")
    number = -1
    try:
        library = Library(order.library)
        library.use_gpu(rank)
        said = []
        for number, one in enumerate(order.communicators):
            if rank in one.ranks:
                # Tells who runs this where it came to, if NCCL crashes.
                print(f"communicator {number}", flush=True)
                said.append(_made(library, order, number, rank, folder))
    except TcclError as error:
        where = f"communicator {number}: " if number >= 0 else ""
        print(f"error: {where}{error}", flush=True)
        os._exit(1)
    write_result(folder, rank, Answer(version=version_text(library.version), said=tuple(said)))
    sys.stdout.flush()
    # Threads of NCCL may still run.
    os._exit(0)


def _made(library: Library, order: Order, number: int, rank: int, folder: Path) -> Said:
    """Make one communicator with the others, and end it.

    Raises:
        MeasurementError: NCCL refuses.
    """
    one = order.communicators[number]
    place = one.ranks.index(rank)
    dump, log = folder / f"dump-{number}.xml", folder / f"nccl-{rank}"
    # 1. Name the files that NCCL reads and writes with every communicator.
    os.environ["NCCL_GRAPH_DUMP_FILE"] = str(dump)
    if one.graph:
        os.environ["NCCL_GRAPH_FILE"] = str(folder / one.graph)
    else:
        os.environ.pop("NCCL_GRAPH_FILE", None)
    # 2. Join it.
    meeting = folder / f"id-{number}"
    if place == 0:
        write_atomically(meeting, library.unique_id().hex())
    _wait(meeting)
    begun = log.stat().st_size if log.exists() else 0
    unique_id = bytes.fromhex(meeting.read_text())
    made = library.communicator(unique_id, rank=place, ranks=len(one.ranks))
    # 3. End it when it is complete in all ranks: until then they need this one.
    (folder / f"made-{number}-{rank}").touch()
    for other in one.ranks:
        _wait(folder / f"made-{number}-{other}")
    ending = threading.Thread(target=library.abort, args=(made,), daemon=True)
    ending.start()
    ending.join(_ABORT_S)
    text = log.read_bytes()[begun:].decode(errors="replace")
    dumped = dump.read_text(errors="replace") if place == 0 and dump.exists() else ""
    return Said(number=number, log=text, dump=dumped)


def _wait(path: Path) -> None:
    """Wait for another rank's file; who runs this process limits the time."""
    while not path.exists():
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    main()
