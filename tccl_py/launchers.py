"""What launchers of MPI jobs tell a process by variables: the number of ranks, and its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

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
_JOBS = ("doctor", "measure", "plan", "verify")
"""Commands that several ranks run together."""
_ALONE = ("--simulate", "--compare", "--root", "--help", "-h")
"""Options with which every rank runs by itself."""


def only_serves(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether another rank controls a command, so that this rank need not parse it.

    >>> only_serves(["measure", "h0.G0->h0.G0->h0.C0"], {"PMI_SIZE": "2", "PMI_RANK": "1"})
    True
    >>> only_serves(["show", "DIR"], {"PMI_SIZE": "2", "PMI_RANK": "1"})
    False
    """
    if not arguments or arguments[0] not in _JOBS or not in_job(environment):
        return False
    if any(argument.partition("=")[0] in _ALONE for argument in arguments):
        return False
    rank = rank_of(environment)
    return rank.isascii() and rank.isdecimal() and int(rank) > 0


def in_job(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether this process is one of several ranks, by the launcher's variables.

    A shell inside a SLURM allocation has SLURM's variables of the job, but none of a step.

    >>> in_job({"OMPI_COMM_WORLD_SIZE": "4"}), in_job({"SLURM_NTASKS": "4"})
    (True, False)
    """
    return job_size(os.environ if environment is None else environment) > 1


def job_size(environment: Mapping[str, str]) -> int:
    """Return the launcher's number of ranks; 2 if it only says that there are several."""
    for name in _SIZES:
        text = environment.get(name, "")
        if text.isascii() and text.isdecimal():
            return int(text)
    # PMIx tells a process its rank; the size is known to MPI only.
    return 2 if "PMIX_RANK" in environment else 1


def rank_of(environment: Mapping[str, str]) -> str:
    """Return the launcher's number of this rank, as text; "0" without a launcher."""
    return next((environment[name] for name in _RANKS if name in environment), "0")


def outside_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables without those by which a process knows that it is one of several ranks."""
    return {name: text for name, text in environment.items() if name not in (*_SIZES, *_RANKS)}
