"""MPI: detection of a job, and its rendezvous. Only here mpi4py is imported.

Messages go by isend and matched probes, never by a collective: a missing rank hangs no rank.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tccl_py.errors import InputError, TcclError

if TYPE_CHECKING:
    from tccl_profiler.cluster.job import Job

NOT_USABLE = 2
_TAG = 4211
_INIT_S = 120.0
_FINALIZE_S = 30.0
"""Time for MPI to start and to end: it waits for all ranks, and one may be missing."""
_SIZES = (
    "OMPI_COMM_WORLD_SIZE",  # Open MPI's mpirun
    "PMI_SIZE",  # MPICH, Intel MPI, MVAPICH, Cray; srun --mpi=pmi2
    "MV2_COMM_WORLD_SIZE",
    "PALS_SIZE",
    "SLURM_STEP_NUM_TASKS",  # srun, whatever the MPI
)
_RANKS = (
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "MV2_COMM_WORLD_RANK",
    "PALS_RANKID",
    "SLURM_PROCID",
)
_JOBS = ("evaluate", "measure", "plan", "verify")  # commands that several ranks run together
_ALONE = ("--simulate", "--help", "-h")  # options with which every rank runs by itself


def only_serves(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether another rank controls a command, so that this rank need not parse it.

    >>> only_serves(["measure", "h0.G0->h0.G0->h0.C0"], {"PMI_SIZE": "2", "PMI_RANK": "1"})
    True
    >>> only_serves(["show", "DIR"], {"PMI_SIZE": "2", "PMI_RANK": "1"})
    False
    """
    if not arguments or arguments[0] not in _JOBS or not in_mpi_job(environment):
        return False
    if any(argument.partition("=")[0] in _ALONE for argument in arguments):
        return False
    rank = _rank(environment)
    return rank.isascii() and rank.isdecimal() and int(rank) > 0


def served() -> int:
    """Serve the controller of this rank's job to its end; return the exit code."""
    try:
        with mpi_job() as job:
            return job.serve()
    except TcclError:
        # The controller prints it.
        return NOT_USABLE


def in_mpi_job(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether this process is one of several ranks, by the launcher's variables.

    A shell inside a SLURM allocation has SLURM's variables of the job, but none of a step.

    >>> in_mpi_job({"OMPI_COMM_WORLD_SIZE": "4"}), in_mpi_job({"SLURM_NTASKS": "4"})
    (True, False)
    """
    return _wanted_size(os.environ if environment is None else environment) > 1


def _wanted_size(environment: Mapping[str, str]) -> int:
    """Return the launcher's number of ranks; 2 if it only says that there are several."""
    for name in _SIZES:
        text = environment.get(name, "")
        if text.isascii() and text.isdecimal():
            return int(text)
    # PMIx tells a process its rank; the size is known to MPI only.
    return 2 if "PMIX_RANK" in environment else 1


def _rank(environment: Mapping[str, str]) -> str:
    return next((environment[name] for name in _RANKS if name in environment), "0")


@contextlib.contextmanager
def mpi_job() -> Iterator[Job]:
    """Join this MPI job; all ranks but `job.is_controller` are to call `job.serve()` at once.

    All ranks end when the controller leaves.
    """
    # Most processes that ask whether they are in a job are not.
    from tccl_profiler.cluster.job import rendezvous  # noqa: PLC0415

    bootstrap = _started()
    size = _wanted_size(os.environ)
    if bootstrap.size == 1 and size > 1:
        fault = f"has {size} tasks that know nothing of each other"
        right = "launcher of the MPI that mpi4py was built for, as mpirun or srun --mpi=pmix"
        raise InputError("this MPI job", fault, f"start them by the {right}")
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
        with _limited(_FINALIZE_S, "MPI_Finalize", os.environ):
            self._mpi.Request.waitall(self._leaving)
            self._mpi.Finalize()


@contextlib.contextmanager
def _limited(limit_s: float, call: str, environment: Mapping[str, str]) -> Iterator[None]:
    """End this process if MPI does not come back: every other wait here has a limit."""

    def give_up() -> None:
        if _rank(environment) == "0":
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


def _started() -> MpiBootstrap:
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
    with _limited(_INIT_S, "MPI_Init", os.environ):
        MPI.Init_thread(MPI.THREAD_FUNNELED)
    return MpiBootstrap(MPI)
