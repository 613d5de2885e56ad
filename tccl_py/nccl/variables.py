"""The names of NCCL's variables, and what NCCL makes of misspelt names and values.

Source: the names are data (variables.txt); NCCL 2.30.7 reads integers in misc/param.cc, and levels
in ncclGetLevel (graph/paths.cc). NCCL itself ignores names that it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib import resources

from tccl_py.errors import InputError
from tccl_py.nccl.c_numbers import c_integer
from tccl_py.nccl.versions import LEVELS

_LISTS = [
    tuple(re.findall(r"NCCL_\w+", part))
    for part in resources.files("tccl_py.nccl").joinpath("variables.txt").read_text().split("\n# ")
]
_, _INTEGERS, _TEXTS, HOST_VARIABLES, CHOOSING_VARIABLES, _UNFOLLOWED = _LISTS
"""Variables for what a host has, allows or forbids, which the jobs of `tccl verify` inherit; those
that take the choice of algorithms, protocols or channels away from NCCL; and those by which NCCL
may find other paths, NICs or channels than its rules here."""
_NAMES = frozenset((*_INTEGERS, *_TEXTS))
_SET = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,99})=(.*)", re.ASCII | re.DOTALL)
_LEVEL_NAMES = ("NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL")
_SIMILAR = 0.88
"""By difflib's measure two letters in the wrong order in the shortest names."""


def given_variables(settings: Sequence[str]) -> dict[str, str]:
    """Return the environment variables of NAME=VALUE texts.

    Raises InputError: a name is like one of NCCL's, but none.

    >>> given_variables(["NCCL_ALGO=Ring"])
    {'NCCL_ALGO': 'Ring'}
    """
    variables: dict[str, str] = {}
    for text in settings:
        match = _SET.fullmatch(text)
        where = f"`env` {text[:60]!r}"
        if match is None:
            raise InputError(where, "sets no variable", "write NAME=VALUE, as NCCL_P2P_LEVEL=SYS")
        name, value = match.groups()
        if variables.setdefault(name, value) != value:
            raise InputError(where, f"sets {name} a second time", "give it one value")
        if meant := similar_name(name):
            raise InputError(where, f"sets {name}, which NCCL does not have", f"write {meant}")
    return variables


class NameList:
    """A list of devices as NCCL reads it: `^` leaves them out, `=` takes exact names alone.

    Otherwise names are beginnings of names. Ports are left out.

    >>> [NameList(text).allows("mlx5_10") for text in ("mlx5_1", "=mlx5_1:1", "^mlx5", "")]
    [True, False, False, True]
    """

    def __init__(self, text: str) -> None:
        self.excludes = text.startswith("^")
        names = text.removeprefix("^")
        self._fits = str.__eq__ if names.startswith("=") else str.startswith
        parts = (name.partition(":")[0] for name in names.removeprefix("=").split(","))
        self.names = list(filter(None, parts))

    def has(self, device: str) -> bool:
        """Return whether it names a device."""
        return any(self._fits(device, name) for name in self.names)

    def allows(self, device: str) -> bool:
        """Return whether it leaves NCCL a device; an empty one leaves all."""
        return not self.names or self.has(device) != self.excludes

    def lost(self, present: Sequence[str]) -> list[str]:
        """Return the names that fit none of the present devices, if it does not exclude."""
        names = [] if self.excludes else self.names
        return [name for name in names if not any(self._fits(each, name) for each in present)]


def similar_name(name: str) -> str:
    """Return the variable of NCCL that a name is a misspelling of; "" if none, or if it is right.

    >>> similar_name("NCCL_P2P_LEVLE"), similar_name("NCCL_P2P_LEVEL"), similar_name("LANG")
    ('NCCL_P2P_LEVEL', '', '')
    """
    near = () if name in _NAMES else get_close_matches(name.upper(), _NAMES, 1, _SIMILAR)
    return near[0] if near else ""


def notices(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence on each variable that NCCL does not know, or reads as something else."""
    for name, text in variables.items():
        setting = f"{name}={text[:60]}"
        if name not in _NAMES:
            yield f"NCCL itself has no variable {name}"
        elif name in _LEVEL_NAMES and text not in LEVELS and not "0" <= text[:1] <= "9":
            yield f"NCCL ignores {setting}, which is no path type: {', '.join(LEVELS)}"
        elif name in _INTEGERS and text and (rest := c_integer(text)[1].strip()):
            yield f"NCCL reads {setting} as {c_integer(text)[0]}: {rest[:60]!r} is no number"


def list_unfollowed(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence on each variable that changes NCCL's graphs and is no rule here."""
    for name in sorted({*_UNFOLLOWED} & {*variables}):
        # No rule here merges NICs.
        if (name, variables[name]) != ("NCCL_IB_MERGE_NICS", "0"):
            yield f"{name} can give NCCL other paths, NICs or channels, which are not followed here"
