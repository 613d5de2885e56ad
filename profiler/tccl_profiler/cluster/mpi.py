"""MPI: the rendezvous of a job. Only here mpi4py is imported.

Messages go by isend and matched probes, never by a collective: a missing rank hangs no rank.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tccl_py.errors import InputError, TcclError, require
from tccl_py.launchers import job_size, rank_of

if TYPE_CHECKING:
    from tccl_profiler.cluster.job import Job

NOT_USABLE = 2
_TAG = 4211
_INIT_S = 120.0
_FINALIZE_S = 30.0
"""Time for MPI to start and to end: it waits for all ranks, and one may be missing."""


def serve_rank() -> int:
    """Serve the controller of this rank's job to its end; return the exit code."""
    try:
        with mpi_job() as job:
            return job.serve()
    except TcclError:
        # The controller prints it.
        return NOT_USABLE


@contextlib.contextmanager
def mpi_job() -> Iterator[Job]:
    """Join this MPI job, which ends with the controller; other ranks call `job.serve()` at once."""
    # Most processes that ask whether they are in a job are not.
    from tccl_profiler.cluster.job import rendezvous  # noqa: PLC0415

    bootstrap = _start()
    size = job_size(os.environ)
    fault = f"has {size} tasks that know nothing of each other"
    right = "launcher of the MPI that mpi4py was built for, as mpirun or srun --mpi=pmix"
    require(bootstrap.size != 1 or size <= 1, "this MPI job", fault, f"start them by the {right}")
    with rendezvous(bootstrap) as job:
        yield job


class MpiBootstrap:
    """Carries bytes between the ranks of the world during the rendezvous."""

    def __init__(self, library: Any) -> None:
        self._mpi, self._world = library, library.COMM_WORLD
        self._leaving: list[Any] = []
        self.rank: int = self._world.Get_rank()
        self.size: int = self._world.Get_size()

    def send(self, rank: int, data: bytes) -> None:
        """Begin to send."""
        self._leaving.append(self._world.isend(data, rank, _TAG))

    def poll(self, rank: int) -> bytes | None:
        """Return the next message from a rank, if there is one."""
        message = self._world.improbe(rank, _TAG)
        # A message this small arrives as a whole.
        return None if message is None else bytes(message.recv())

    def finish(self) -> None:
        """End MPI; all ranks do."""
        with _limit(_FINALIZE_S, "MPI_Finalize", os.environ):
            self._mpi.Request.waitall(self._leaving)
            self._mpi.Finalize()


@contextlib.contextmanager
def _limit(limit_s: float, call: str, environment: Mapping[str, str]) -> Iterator[None]:
    """End this process if MPI does not come back: every other wait here has a limit."""

    def give_up() -> None:
        if rank_of(environment) == "0":
            text = f"tccl: this MPI job: {call} takes longer than {limit_s:g} s; see whether all "
            os.write(2, f"{text}hosts are well, and start one tccl command on each\n".encode())
        os._exit(NOT_USABLE)

    guard = threading.Timer(limit_s, give_up)
    guard.daemon = True
    guard.start()
    try:
        yield
    finally:
        guard.cancel()


def _start() -> MpiBootstrap:
    try:
        import mpi4py  # noqa: PLC0415

        # Started and ended by hand: it ends long before this process does.
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI  # noqa: PLC0415
    except (ImportError, RuntimeError) as error:
        fault = f"cannot load MPI ({' '.join(str(error).split())[:200]})"
        right = "`pip install mpi4py` beside the MPI that launched it"
        raise InputError("this MPI job", fault, right) from error
    with _limit(_INIT_S, "MPI_Init", os.environ):
        MPI.Init_thread(MPI.THREAD_FUNNELED)
    return MpiBootstrap(MPI)
