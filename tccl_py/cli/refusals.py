"""Options that are refused beside others, or for what they say nothing about."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tccl_py.errors import InputError


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why an option is refused, what is right, and beside or for what: `at` follows its name."""

    what: str
    right: str = "leave it out"
    at: str = ""


WITH_MODEL = Refusal(
    what="is about hardware", right="leave one of the two out", at="beside --simulate"
)
WITHOUT_MODEL = Refusal(
    what="is about models", right="add --simulate MACHINE", at="without --simulate"
)
IN_JOB = Refusal(
    # Every rank would simulate.
    what="needs no ranks",
    right="start the command by itself",
    at="under mpirun or srun",
)
OUTSIDE_JOB = Refusal(
    what="is about the hosts of an MPI job", right="start the command by mpirun or srun"
)
FOR_ONE = Refusal(
    what="is about several nodes",
    right="add --simulate MACHINE --nodes N, or start the command under mpirun or srun",
)
BY_RANKS = Refusal(
    what="is about one machine",
    right="leave it out: as many GPUs of a host are used as it has ranks (slots)",
    at="for several nodes",
)
BY_HOSTS = Refusal(
    what="runs collectives on the hosts",
    right="leave it out, or measure them: start the command by mpirun or srun",
    at="for nodes that are simulated",
)
OF_CLUSTER = Refusal(what="is for the plan of a machine, this one is of a cluster")
OF_MACHINE = Refusal(what="is for the plan of a cluster, this one is of a machine")


def refuse(options: Mapping[str, object], why: Refusal) -> None:
    """Refuse options that are given, by their names; None or False is "not given".

    Raises:
        InputError: one is.
    """
    for name, value in options.items():
        if value is not None and value is not False:
            raise InputError(f"{name} {why.at}".rstrip(), why.what, why.right)
