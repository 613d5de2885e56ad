"""Settings as the files that set them: nccl.conf for a host, env.sh for a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import PurePosixPath

from tccl_py.errors import InputError
from tccl_py.files import check_path
from tccl_py.runtimes.nccl.settings import Settings, environment

_PLAIN_PATH = re.compile(r"/[A-Za-z0-9_./+@%:,=-]*")


def job_environment(
    settings: Settings,
    *,
    graph: PurePosixPath | None = None,
    topology: PurePosixPath | None = None,
) -> dict[str, str]:
    """All variables of a job: the settings', and NCCL_TOPO_FILE and NCCL_GRAPH_FILE if given.

    Raises:
        InputError: settings the version does not have, or a path that is not absolute, or
            cannot be named here.
    """
    variables = environment(settings)
    for name, kind, path in (
        ("NCCL_TOPO_FILE", "topology", topology),
        ("NCCL_GRAPH_FILE", "graph", graph),
    ):
        if path is None:
            continue
        check_path(path)
        if not path.is_absolute():
            raise InputError(
                f"{kind} file {str(path)[:80]!r}",
                "is no absolute path",
                "jobs start in other directories: give a path from the root",
            )
        variables[name] = str(path)
    return variables


def fits_conf(path: PurePosixPath) -> bool:
    """Whether a path can stand in nccl.conf, which knows no quotes."""
    return _PLAIN_PATH.fullmatch(str(path)) is not None


def nccl_conf(
    settings: Settings,
    *,
    graph: PurePosixPath | None = None,
    topology: PurePosixPath | None = None,
) -> str:
    """The text of an nccl.conf: NAME=value lines, which NCCL takes as they stand.

    Raises:
        InputError: as `job_environment`, or a path that NCCL's parser would not take whole.
    """
    for kind, path in (("topology", topology), ("graph", graph)):
        if path is not None and not fits_conf(path):
            raise InputError(
                f"{kind} file {str(path)[:80]!r}",
                "cannot stand in nccl.conf, which knows no quotes",
                "a path from the root of letters, digits and _ . / + @ % : , = -",
            )
    variables = job_environment(settings, graph=graph, topology=topology)
    return "".join(f"{name}={value}\n" for name, value in variables.items())


def env_sh(
    settings: Settings,
    *,
    graph: PurePosixPath | None = None,
    topology: PurePosixPath | None = None,
) -> str:
    """The text of a script to source: one quoted export a line.

    Raises:
        InputError: as `job_environment`.
    """
    return export_lines(job_environment(settings, graph=graph, topology=topology))


def export_lines(variables: Mapping[str, str]) -> str:
    """`export NAME=value` lines, quoted for any shell.

    zsh takes `=mlx5_0` at the beginning of a value for the path of a program of that name, which
    `shlex.quote` does not know.

    >>> print(export_lines({"NCCL_IB_HCA": "=mlx5_0:1", "NCCL_CROSS_NIC": "1"}), end="")
    export NCCL_IB_HCA='=mlx5_0:1'
    export NCCL_CROSS_NIC=1
    """
    return "".join(f"export {name}={_quoted(value)}\n" for name, value in variables.items())


def _quoted(value: str) -> str:
    text = shlex.quote(value)
    return f"'{value}'" if text == value and "=" in value else text
