"""MPI: whether this process is a rank of a job, and how ranks meet. Only here mpi4py is imported.

Messages go by Isend and matched probes, never by a collective, so that a rank that is missing does
not hang the others. When all have met, MPI is ended: see `meeting`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from tccl_profiler.cluster.job import Job
from tccl_profiler.cluster.meeting import met
from tccl_py.errors import InputError

_TAG = 4211
_FINALIZE_S = 30.0
"""How long the end of MPI may take: it waits for all ranks, and all have just been there."""
_SIZES = (
    "OMPI_COMM_WORLD_SIZE",  # Open MPI's mpirun
    "PMI_SIZE",  # MPICH, Intel MPI, MVAPICH, Cray; srun --mpi=pmi2
    "MV2_COMM_WORLD_SIZE",
    "PALS_SIZE",
    "SLURM_STEP_NUM_TASKS",  # srun, whatever the MPI
)


def in_mpi_job(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process is one of several ranks, by what the launcher set; MPI is not loaded.

    A shell inside a SLURM allocation has SLURM's variables of the job, but none of a step.

    >>> in_mpi_job({"OMPI_COMM_WORLD_SIZE": "4"}), in_mpi_job({"SLURM_NTASKS": "4"})
    (True, False)
    """
    return _wanted_size(os.environ if environment is None else environment) > 1


def _wanted_size(environment: Mapping[str, str]) -> int:
    """How many ranks the launcher says there are; 2 where it only says that there are some."""
    for name in _SIZES:
        text = environment.get(name, "")
        if text.isascii() and text.isdecimal():
            return int(text)
    # PMIx tells a process its rank; how many there are, only MPI can ask it.
    return 2 if "PMIX_RANK" in environment else 1


@contextlib.contextmanager
def mpi_job() -> Iterator[Job]:
    """This process's part in an MPI job; where the controller leaves it, all ranks end.

    Raises:
        InputError: MPI does not start, a rank is missing, or the launcher started tasks that know
            nothing of each other.
    """
    post = _started()
    wanted = _wanted_size(os.environ)
    if post.size == 1 and wanted > 1:
        raise InputError(
            "this MPI job",
            f"has {wanted} tasks that know nothing of each other",
            "start them by the launcher of the MPI that mpi4py was built for, as mpirun or "
            "srun --mpi=pmix",
        )
    with Job(met(post)) as job:
        yield job


class _MpiPost:
    """The ranks of the world as a Post."""

    def __init__(self, library: Any) -> None:
        self._mpi, self._world = library, library.COMM_WORLD
        self._leaving: list[tuple[Any, bytes]] = []
        self._arriving: list[tuple[int, Any, bytearray]] = []
        self._inbox: dict[int, deque[bytes]] = {}
        self.rank: int = self._world.Get_rank()
        self.size: int = self._world.Get_size()

    def send(self, rank: int, data: bytes) -> None:
        """As Post; the bytes are kept until they have left."""
        self._leaving.append((self._world.Isend([data, self._mpi.BYTE], rank, _TAG), data))
        self._progress()

    def poll(self, rank: int) -> bytes | None:
        """As Post."""
        self._progress()
        waiting = self._inbox.get(rank)
        return waiting.popleft() if waiting else None

    def _progress(self) -> None:
        """Forget what has left, and take in what has come."""
        self._leaving = [(request, data) for request, data in self._leaving if not request.Test()]
        status = self._mpi.Status()
        while True:
            message = self._world.Improbe(self._mpi.ANY_SOURCE, _TAG, status)
            if message is None:
                break
            buffer = bytearray(status.Get_count(self._mpi.BYTE))
            request = message.Irecv([buffer, self._mpi.BYTE])
            self._arriving.append((status.Get_source(), request, buffer))
        still = []
        for source, request, buffer in self._arriving:
            if request.Test():
                self._inbox.setdefault(source, deque()).append(bytes(buffer))
            else:
                still.append((source, request, buffer))
        self._arriving = still

    def finish(self) -> None:
        """As Post. If MPI hangs, this process ends: all else that waits has a limit."""
        guard = threading.Timer(_FINALIZE_S, _given_up, (self.rank,))
        guard.daemon = True
        guard.start()
        self._mpi.Finalize()
        guard.cancel()


def _given_up(rank: int) -> None:
    if rank == 0:
        os.write(2, b"tccl: this MPI job: MPI_Finalize hangs; see whether all hosts are well\n")
    os._exit(2)


def _started() -> _MpiPost:
    """Load and start MPI.

    Raises:
        InputError: mpi4py or the MPI library below it is missing.
    """
    try:
        import mpi4py  # noqa: PLC0415

        # Started and ended by hand: it ends long before this process does.
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI  # noqa: PLC0415
    except (ImportError, RuntimeError) as error:
        raise InputError(
            "this MPI job",
            f"cannot load MPI ({' '.join(str(error).split())[:200]})",
            "install tccl-py[mpi] beside the MPI that launched it",
        ) from error
    MPI.Init_thread(MPI.THREAD_FUNNELED)
    return _MpiPost(MPI)
