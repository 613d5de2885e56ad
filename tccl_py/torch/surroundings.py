"""The environment while a communicator is made: its graph file, and what holds for the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tccl_py.errors import InputError

GRAPH_VARIABLE = "NCCL_GRAPH_FILE"

# The environment is the whole process's, so that only one communicator is made at a time.
_LOCK = threading.RLock()


@contextmanager
def graph_file(path: Path | None) -> Iterator[None]:
    """Name this graph file, or none, until the block ends; then the variable is as before.

    Threads wait for one another here.
    """
    with _LOCK:
        before = os.environ.get(GRAPH_VARIABLE)
        _name(None if path is None else str(path))
        try:
            yield
        finally:
            _name(before)


def _name(value: str | None) -> None:
    if value is not None:
        os.environ[GRAPH_VARIABLE] = value
        return
    os.environ.pop(GRAPH_VARIABLE, None)
    # NCCL sets variables from its files itself, which os.environ does not see.
    os.unsetenv(GRAPH_VARIABLE)


class ProcessSettings:
    """The settings of this process's communicators: NCCL keeps what it read at the first one."""

    def __init__(self) -> None:
        self._fixed: dict[str, str] | None = None

    def check(self, variables: Mapping[str, str], *, where: str) -> None:
        """See whether a plan may use these variables.

        Raises:
            InputError: communicators of this process were made with others; names `where`.
        """
        if self._fixed is None or self._fixed == variables:
            return
        raise InputError(
            where,
            f"needs {_listed(variables)}, and this process has {_listed(self._fixed)}",
            "NCCL reads settings once in a process: use plans of the same settings in it",
        )

    def fix(self, variables: Mapping[str, str]) -> None:
        """Set the variables, for good; nothing is done if that was done before."""
        with _LOCK:
            if self._fixed is None:
                self._fixed = dict(variables)
                os.environ.update(variables)


def _listed(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={text}" for name, text in sorted(variables.items())) or "no settings"
