"""Texts of variables for NCCL and shells, and the pinned environment of a plan."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from tccl_py.errors import InputError
from tccl_py.files import check_path
from tccl_py.nccl.settings import Settings, environment, settings_from_environment
from tccl_py.nccl.versions import Level

# Texts of files: nccl.conf for a host, env.sh for a shell.


def job_environment(settings: Settings, *, graph: PurePosixPath | None = None) -> dict[str, str]:
    """Return all variables of a job: the settings', and NCCL_GRAPH_FILE if given."""
    variables = environment(settings)
    if graph is not None:
        check_path(graph)
        if not graph.is_absolute():
            right = "jobs start in other directories: give a path from the root"
            raise InputError(f"graph file {str(graph)[:80]!r}", "is no absolute path", right)
        variables["NCCL_GRAPH_FILE"] = str(graph)
    return variables


def nccl_conf(settings: Settings) -> str:
    """Return the text of an nccl.conf: NAME=value lines, which NCCL takes literally."""
    return "".join(f"{name}={value}\n" for name, value in environment(settings).items())


def env_sh(settings: Settings, *, graph: PurePosixPath | None = None) -> str:
    """Return the text of a script to source: one quoted export a line."""
    return export_lines(job_environment(settings, graph=graph))


def export_lines(variables: Mapping[str, str]) -> str:
    """Return `export NAME=value` lines, quoted for any shell: zsh expands a leading `=mlx5_0`.

    >>> print(export_lines({"NCCL_IB_HCA": "=mlx5_0:1", "NCCL_CROSS_NIC": "1"}), end="")
    export NCCL_IB_HCA='=mlx5_0:1'
    export NCCL_CROSS_NIC=1
    """
    plain = {name: shlex.quote(value) for name, value in variables.items()}
    quoted = {n: f"'{v}'" if v == variables[n] and "=" in v else v for n, v in plain.items()}
    return "".join(f"export {name}={value}\n" for name, value in quoted.items())


# The pinned environment of a plan (variables of all its jobs), and conflicts with settings.


PINNABLE = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL")
_RIGHT = {
    "NCCL_P2P_DISABLE": "1 would; leave it out otherwise",
    "NCCL_P2P_LEVEL": "a path type would, as SYS, PHB, PIX or LOC; leave it out otherwise",
}
_BY_P2P = ("p2p_level", "p2p_read", "p2p_copy_engine")
_BY_MEMORY = ("shm_locality", "shm_copy_engine", "shm_disable", "buffsize")
_ALWAYS = (*_BY_P2P, *_BY_MEMORY, "net_disable_intra")
"""Settings that always change a ring's transfers; all others count only if the plan chose them."""


def check_pinnable(name: str, *, where: str) -> None:
    """Check that plans can be made under a variable."""
    if name not in PINNABLE:
        what = "is no variable that plans can be made under"
        raise InputError(f"{where} {name[:40]!r}", what, " or ".join(PINNABLE))


def pinned_values(variables: Mapping[str, str], *, where: str) -> dict[str, str]:
    """Return the variables with the values that NCCL reads; each must set a P2P level.

    >>> pinned_values({"NCCL_P2P_LEVEL": "1"}, where="--pin-env")
    {'NCCL_P2P_LEVEL': 'PIX'}
    """
    found = {}
    for name, value in sorted(variables.items()):
        check_pinnable(name, where=where)
        level = pinned_level({name: value})
        if level is None:
            what = f"is {value[:20]!r}, which says nothing to NCCL"
            raise InputError(f"{where} {name}", what, _RIGHT[name])
        found[name] = "1" if name == "NCCL_P2P_DISABLE" else str(level)
    return found


def pinned_level(variables: Mapping[str, str]) -> Level | None:
    """Return the P2P level of these variables (LOC: no P2P); None is NCCL's default."""
    return settings_from_environment(variables).p2p_level


def check_pinned_env(pinned: Mapping[str, str], under: Iterable[Settings], where: str) -> None:
    """Check a plan's pinned environment against the plan's settings."""
    if not pinned:
        return
    if pinned_values(pinned, where=f"{where} pinned_env") != pinned:
        raise InputError(f"{where} pinned_env", "has values that no plan has", "plan it again")
    level = pinned_level(pinned)
    for settings in under:
        if settings.p2p_level != level:
            what = f"is for jobs with {_shell(pinned)} and has p2p_level {settings.p2p_level}"
            raise InputError(where, what, f"it is {level} there; plan it again")


def _shell(pinned: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in pinned.items())


def pinned_env_text(pinned: Mapping[str, str]) -> str:
    """Return the jobs that a plan is for.

    >>> pinned_env_text({"NCCL_P2P_DISABLE": "1"})
    'for jobs with NCCL_P2P_DISABLE=1, default NCCL included'
    """
    return f"for jobs with {_shell(pinned)}, default NCCL included"


def env_conflicts(settings: Settings, given: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of variables in an environment that contradict these settings.

    >>> env_conflicts(Settings(p2p_level="SYS"), {"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "INFO"})
    ('NCCL_P2P_DISABLE',)
    """
    wanted = environment(settings)
    if not _differ(settings, {**wanted, **given}):
        return ()
    nccl = (name for name in sorted(given) if name.startswith("NCCL_"))
    named = [name for name in nccl if _differ(settings, {**wanted, name: given[name]})]
    return tuple(named) or ("its NCCL variables",)


_NEUTRAL = {
    "NCCL_P2P_DISABLE": "0",
    "NCCL_P2P_USE_CUDA_MEMCPY": "0",
    "NCCL_SHM_LOCALITY": "2",
    "NCCL_SHM_USE_CUDA_MEMCPY": "0",
    "NCCL_SHM_DISABLE": "0",
    "NCCL_NET_DISABLE_INTRA": "0",
    "NCCL_BUFFSIZE": str(Settings().buffsize),
}
"""NCCL's own values of the variables that always change a ring's transfers."""
_UNTOUCHED = ("NCCL_P2P_LEVEL", "NCCL_P2P_READ_ENABLE")
"""Such variables whose own value depends on the machine."""


def env_rules(settings: Settings) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the rules of `env_conflicts` as a table, a little stricter.

    Jobs that set a variable of the first part must give it this value, and must leave those of the
    second part alone.
    """
    must = _NEUTRAL | environment(settings)
    known = must if settings.p2p_level != "LOC" else {**must, "NCCL_P2P_LEVEL": ""}
    return must, tuple(name for name in _UNTOUCHED if name not in known)


def _differ(settings: Settings, variables: Mapping[str, str]) -> bool:
    read = settings_from_environment(
        variables, version=settings.version, channels=settings.channels
    )
    return any(
        getattr(read, field) != getattr(settings, field)
        for field in Settings.__struct_fields__
        if field in _ALWAYS or getattr(settings, field) != getattr(Settings(), field)
    )
