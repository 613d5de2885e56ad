"""NCCL's configuration files: where NCCL finds them, and what their lines set."""

from __future__ import annotations

import os
import pwd
from bisect import bisect
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import read_bytes
from tccl_py.nccl_library import installed_nccl

# NCCL 2.30.7, misc/param.cc: NCCL reads NCCL_CONF_FILE (since 2.23) or, where that is unset or
# empty, `.nccl.conf` in HOME (up to 2.29 in the password file's home), then /etc/nccl.conf. Each
# line that does not begin with `#` sets the name before its first `=`, unless the name is set
# already: the environment comes first, then the user's file with its first line for a name, then
# the host's.
CONF_VARIABLE = "NCCL_CONF_FILE"
HOST_FILE = Path("/etc/nccl.conf")
_READS_HOME = (2, 30)
MAX_CONF_BYTES = 1024 * 1024
_MAX_VALUE = 1023
_MARKERS = ("# >>> tccl-py", "# <<< tccl-py")


class ConfLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line that sets a variable; `where` is file:line, `cut` tells of a name or value too long.

    NCCL keeps the first 1,023 characters of each; bytes outside UTF-8 are surrogate escapes.
    `installed` lines stand between the markers of `tccl install`.
    """

    name: str
    value: str
    where: str
    cut: bool = False
    installed: bool = False


def user_file(environment: Mapping[str, str] = os.environ, *, planned: str = "") -> Path:
    """Return the path of the user's file, which may not exist; `planned` as of `home`."""
    named = environment.get(CONF_VARIABLE, "")
    return Path(named) if named else home(planned) / ".nccl.conf"


def home(planned: str = "") -> Path:
    """Return the user's home directory as NCCL finds it: from 2.30 on by HOME.

    Where no NCCL is installed, jobs have that of a plan: `planned` is its version.
    """
    of_passwd, named = passwd_home(), Path(os.environ.get("HOME") or "/")
    return named if named != of_passwd and _reads_home(planned) else of_passwd


@cache
def _reads_home(planned: str) -> bool:
    installed = installed_nccl()
    version = planned if installed is None else installed.version
    return bool(version) and tuple(map(int, version.split(".")[:2])) >= _READS_HOME


def passwd_home() -> Path:
    """Return the user's home directory by the password file, regardless of HOME."""
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return Path("/")


def conf_lines(data: bytes, *, where: str) -> tuple[ConfLine, ...]:
    r"""Return the settings of a file, in order.

    >>> [(line.name, line.value) for line in conf_lines(b"# a=b\nNCCL_IB_HCA==mlx5\n", where="f")]
    [('NCCL_IB_HCA', '=mlx5')]
    """
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    parted = ((number, *line.partition("=")) for number, line in enumerate(lines, start=1))
    markers = [number for number, line in enumerate(lines, start=1) if line.startswith(_MARKERS)]
    return tuple(
        ConfLine(
            name=name[:_MAX_VALUE],
            value=value[:_MAX_VALUE],
            where=f"{where}:{number}",
            cut=max(len(name), len(value)) > _MAX_VALUE,
            installed=bisect(markers, number) % 2 == 1,
        )
        for number, name, equals, value in parted
        if equals and not name.startswith("#")
    )


def why_no_default() -> str:
    """Return why no job here gets default NCCL, as a clause: a plan is installed for all users."""
    lines = settings_of_files({}, files=[HOST_FILE]).values()
    gives = f"{HOST_FILE} gives all jobs the lines of an installed plan"
    return gives if any(line.installed for line in lines) else ""


def settings_of_files(
    environment: Mapping[str, str] = os.environ,
    *,
    files: Sequence[Path] | None = None,
    planned: str = "",
) -> dict[str, ConfLine]:
    """Return the variables that NCCL's readable files set in this environment, by name."""
    settings: dict[str, ConfLine] = {}
    files = (user_file(environment, planned=planned), HOST_FILE) if files is None else files
    for path in files:
        try:
            data = read_bytes(path, limit=MAX_CONF_BYTES)
        except InputError:
            continue
        for line in conf_lines(data, where=str(path)):
            if line.name not in environment:
                settings.setdefault(line.name, line)
    return settings
