"""MPI: the rendezvous of a job. Only here mpi4py is imported.

Messages go by isend and matched probes, never by a collective: a missing rank hangs no rank.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tccl_py.errors import InputError, TcclError, require
from tccl_py.launchers import job_size

if TYPE_CHECKING:
    from tccl_profiler.cluster.job import Job, MpiBootstrap

NOT_USABLE = 2
_INIT_S = 120.0
"""Time for MPI to start: it waits for all ranks, and one may be missing."""


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


def _start() -> MpiBootstrap:
    from tccl_profiler.cluster.job import MpiBootstrap, limit_time  # noqa: PLC0415 (as above)

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
    with limit_time(_INIT_S, "MPI_Init"):
        MPI.Init_thread(MPI.THREAD_FUNNELED)
    return MpiBootstrap(MPI)
