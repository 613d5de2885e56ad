"""Options that are refused beside others, or for what they say nothing about."""

from __future__ import annotations

from collections.abc import Mapping

from tccl_py.errors import InputError

Options = Mapping[str, object]
"""Values of options by their names; None or False is "not given"."""


def refuse_options(
    options: Options, what: str, right: str = "leave it out", *, at: str = ""
) -> None:
    """Refuse options that are given.

    Raises:
        InputError: one is; `at` says beside what or for what it is wrong.
    """
    for name, value in options.items():
        if value is not None and value is not False:
            raise InputError(f"{name} {at}".rstrip(), what, right)


def refuse_with_model(options: Options) -> None:
    """Refuse options of measuring beside --simulate.

    Raises:
        InputError: one is given.
    """
    right = "leave one of the two out"
    refuse_options(options, "is about hardware", right, at="beside --simulate")


def refuse_without_model(options: Options) -> None:
    """Refuse options of models without --simulate.

    Raises:
        InputError: one is given.
    """
    right = "add --simulate MACHINE"
    refuse_options(options, "is about models", right, at="without --simulate")


def refuse_outside_job(options: Options) -> None:
    """Refuse options of MPI jobs where there is none.

    Raises:
        InputError: one is given.
    """
    right = "start the command by mpirun or srun"
    refuse_options(options, "is about the hosts of an MPI job", right)


def refuse_in_job(options: Options) -> None:
    """Refuse options of simulation in an MPI job, where every rank would simulate.

    Raises:
        InputError: one is given.
    """
    right = "start the command by itself"
    refuse_options(options, "needs no ranks", right, at="under mpirun or srun")


def refuse_for_one(options: Options) -> None:
    """Refuse options of clusters for a plan of one machine.

    Raises:
        InputError: one is given.
    """
    right = "add --simulate MACHINE --nodes N, or start the command under mpirun or srun"
    refuse_options(options, "is about several nodes", right)


def refuse_with_nodes(options: Options) -> None:
    """Refuse options of one machine for a plan of several nodes.

    Raises:
        InputError: one is given.
    """
    right = "leave it out: as many GPUs of a host are used as it has ranks (slots)"
    refuse_options(options, "is about one machine", right, at="for several nodes")
