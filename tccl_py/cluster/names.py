"""Names of hosts, switches and node classes: fit for file names and for the places of transfers."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable

from tccl_py.errors import InputError

MAX_NAME = 240
"""A file of this name, with `.xml` and what is added until it is whole, has no more than the 255
bytes that file systems take; the domain name system would have 253 (RFC 1035, 3.1)."""
MAX_CLASS_NAME = 64

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)
_RIGHT = "letters, digits and _ . - are needed, the first one no dot or dash"
_SHOWN = 40


def shown(text: str) -> str:
    """`text` in quotes, as far as it fits a message and without control characters."""
    return ascii(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!a}..."


def check_host_name(name: str, *, where: str) -> str:
    """Return `name` if it can name a host in files, file names and places (`node1.G0`);
    switches have such names too.

    >>> check_host_name("gpu-01.cluster", where="hosts")
    'gpu-01.cluster'

    Raises:
        InputError: it is empty, too long, or has other characters than such names have.
    """
    if len(name) > MAX_NAME:
        what = f"the name {shown(name)} has {len(name)} characters"
        raise InputError(where, what, f"at most {MAX_NAME} are possible")
    if _NAME.fullmatch(name) is None:
        raise InputError(where, f"{shown(name)} cannot be a name here", _RIGHT)
    return name


def check_host_names(names: Iterable[str], *, where: str, kind: str = "host") -> tuple[str, ...]:
    """Return the names if each is fit and none is there twice; `kind` is what they name.

    Raises:
        InputError: as `check_host_name`, or a doubled name.
    """
    seen: dict[str, None] = {}
    for name in names:
        if check_host_name(name, where=where) in seen:
            raise InputError(where, f"{kind} {name} is named twice", "once is right")
        seen[name] = None
    return tuple(seen)


def class_name(text: str, taken: Container[str] = ()) -> str:
    """A name for a class that is described by `text`, fit for a file name and not yet taken.

    >>> class_name("2x NVIDIA/H200"), class_name("box", {"box", "box-2"})
    ('2x-NVIDIA-H200', 'box-3')
    """
    fit = re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:MAX_CLASS_NAME].strip("-.") or "node"
    name, number = fit, 1
    while name in taken:
        number += 1
        name = f"{fit}-{number}"
    return name
