"""The variables of a job with NCCL's plugin, and the trust in the files that they name."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from shlex import quote

from tccl_py.errors import InputError, require
from tccl_py.nccl.plugin import LIBRARY
from tccl_py.nccl.plugin.index import INDEX_FILE, INDEX_HEAD, INDEX_VARIABLE
from tccl_py.plan.directory import files_of
from tccl_py.plan.host_files import HOSTS_FOLDER
from tccl_py.plan.machine_files import ALIKE_INDEX_FILE
from tccl_py.plan.plan import Plan
from tccl_py.plan.staging import AGAIN

PLUGIN_VARIABLE = "NCCL_ENV_PLUGIN"
JOB_VARIABLE = "TCCL_JOB"
_MAX_PATH = 254
"""Of a network plugin's path (plugin.h); the library is one as well."""
_BUILD = "python -m tccl_py.nccl.plugin.build"


def plugin_exports(plan: Plan, directory: Path, *, equal_hosts: bool = False) -> dict[str, str]:
    """Return the variables of a job with the plugin: those that load it, and those that it needs.

    With `equal_hosts` GPUs' UUIDs may differ. A job over several hosts finds each host's index.

    Raises InputError: the plan has no index, there is no library beside it, or the plugin would not
    trust the files.
    """
    folder = directory.resolve() / "nccl"
    index, library = folder / INDEX_FILE, folder / LIBRARY
    named = {INDEX_VARIABLE: index}
    if (of_hosts := sorted((folder / HOSTS_FOLDER).glob("*.index"))) and not index.is_file():
        index, named = of_hosts[0], {JOB_VARIABLE: folder.parent}
    if not index.is_file():
        fault = f"has no {INDEX_FILE}: the plan is of a cluster, or its job needs no graph file"
        right = "make a job's files by `tccl export --hosts`, or leave out the plugin"
        raise InputError(str(folder), fault, right)
    if equal_hosts and (folder / ALIKE_INDEX_FILE).is_file():
        index = named[INDEX_VARIABLE] = folder / ALIKE_INDEX_FILE
    if not library.is_file():
        fault = "has no library of the plugin, as tccl-py was not installed with a C compiler"
        raise InputError(str(folder), fault, f"run `{_BUILD} {quote(str(folder))}`")
    with index.open("rb") as file:
        right = f"{AGAIN}; or export the job again"
        head = file.readline(len(INDEX_HEAD))
        require(head == INDEX_HEAD, str(index), "is of another version of tccl-py", right)
    if "," in str(library) or len(str(library)) > _MAX_PATH:
        right = f"at most {_MAX_PATH} characters without a comma"
        raise InputError(str(library), "is a path that NCCL cannot open", right)
    check_trusted(index)
    check_trusted(library)
    loading = {PLUGIN_VARIABLE: library, **named}
    return {name: str(path) for name, path in loading.items()} | files_of(plan).variables[0]


def why_not_trusted(path: Path) -> str:
    """Return who else can write a file or a folder above it, as a clause; "" if nobody can."""
    for place in (path, *path.parents):
        status = place.lstat()
        if status.st_uid not in (0, os.geteuid()):
            return f"{place} belongs to user {status.st_uid}"
        sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
            return f"others can write {place}"
    return ""


def why_closed(path: Path) -> str:
    """Return what keeps other users from a file, as a clause; "" if they can read it."""
    for place in (path, *path.parents):
        mode = place.stat().st_mode
        if not mode & (stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH):
            return f"others cannot {'search' if stat.S_ISDIR(mode) else 'read'} {place}"
    return ""


def check_trusted(path: Path) -> None:
    """Check that nobody but root and this user can write a file or a folder above it."""
    why = why_not_trusted(path).replace(str(path), "it")
    right = "let nobody but root and the user of the jobs write it, and the folders above it"
    require(not why, str(path), f"is not trusted: {why}", right)
