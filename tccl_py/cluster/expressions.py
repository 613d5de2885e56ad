"""SLURM's host list expressions: `gpu[001-016,020],login1`.

They follow SLURM's src/common/hostlist.c.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator

import msgspec

from tccl_py.cluster.names import check_host_name, shown
from tccl_py.errors import InputError

MAX_HOSTS = 65_536
"""As many as SLURM takes in one range (MAX_RANGE)."""
MAX_PARTS = 64
"""Of one name, brackets and what is between them."""

_SEPARATORS = re.compile(r"[,\s]+")
_ENTRY = re.compile(r"(?:[^][,\s]|\[[^][]*\])+")
_PART = re.compile(r"\[(?P<ranges>[^][]*)\]|[^][]+")
_RUN = re.compile(r"(?P<low>[0-9]{1,18})(?:-(?P<high>[0-9]{1,18}))?", re.ASCII)
_NUMBERED = re.compile(r"(?P<prefix>.*?)(?P<digits>[0-9]{1,18})", re.ASCII)
_RANGE = "ranges in brackets are needed, as in gpu[001-016,020]"


class _Run(msgspec.Struct, frozen=True):
    """Numbers in a row, `width` digits wide at least; or one text as it is."""

    numbers: range
    width: int
    text: str = ""

    @property
    def texts(self) -> Iterator[str]:
        return (self.text or f"{number:0{self.width}d}" for number in self.numbers)


def expand(expression: str, *, where: str = "host list") -> tuple[str, ...]:
    """The hosts of a SLURM host list expression, in its order; a host named twice is there twice.

    Brackets may stand anywhere in a name, several of them too; SLURM wants the last one at the end.
    A number is as wide as the first of its range.

    >>> expand("gpu[08-10],login1"), expand("r[1-2]n[0-1]")
    (('gpu08', 'gpu09', 'gpu10', 'login1'), ('r1n0', 'r1n1', 'r2n0', 'r2n1'))

    Raises:
        InputError: brackets that do not match or are empty, ranges that are none or go down, more
            than MAX_HOSTS hosts, or what cannot be a host's name.
    """
    hosts: list[str] = []
    for entry in entries(expression, where=where):
        parts = _parts(entry, where)
        count = math.prod(sum(len(run.numbers) for run in part) for part in parts)
        if len(hosts) + count > MAX_HOSTS:
            what = f"{shown(entry)} makes it more than {MAX_HOSTS} hosts"
            raise InputError(where, what, "give the hosts of one job")
        names = itertools.product(*([text for run in part for text in run.texts] for part in parts))
        hosts.extend(check_host_name("".join(name), where=where) for name in names)
    return tuple(hosts)


def compress(names: Iterable[str]) -> str:
    """The expression that `expand` turns into these names, in their order.

    >>> compress(["gpu08", "gpu09", "gpu10", "gpu12", "login"])
    'gpu[08-10,12],login'
    """
    split = [_split(name) for name in names]
    # A name without a number is no part of a bracket: n,n0 are two.
    alike = itertools.groupby(split, lambda one: (one[0], bool(one[1])))
    groups = (tuple(group) for _, group in alike)
    return ",".join(_group_text(group) for group in groups)


def entries(expression: str, *, where: str) -> Iterator[str]:
    """The parts of an expression between commas and spaces, brackets and all.

    Raises:
        InputError: brackets that do not match.
    """
    at = 0
    while at < len(expression):
        match = _SEPARATORS.match(expression, at) or _ENTRY.match(expression, at)
        if match is None:
            what = f"brackets do not match at {shown(expression[at:])}"
            raise InputError(where, what, _RANGE)
        if match.re is _ENTRY:
            yield match[0]
        at = match.end()


def _parts(entry: str, where: str) -> list[list[_Run]]:
    """What an entry is put together from: for each part, the runs it may be from."""
    parts = []
    for match in _PART.finditer(entry):
        if match["ranges"] is None:
            parts.append([_Run(range(1), 0, match[0])])
        else:
            parts.append([_run(text, entry, where) for text in match["ranges"].split(",")])
        if len(parts) > MAX_PARTS:
            what = f"{shown(entry)} has more than {MAX_PARTS} parts"
            raise InputError(where, what, "a few brackets are enough for any name")
    return parts


def _run(text: str, entry: str, where: str) -> _Run:
    match = _RUN.fullmatch(text)
    if match is None:
        raise InputError(where, f"{shown(text)} in {shown(entry)} is no range", _RANGE)
    low, high = int(match["low"]), int(match["high"] or match["low"])
    if low > high:
        what = f"the range {shown(text)} in {shown(entry)} goes down"
        raise InputError(where, what, "the lower number is first")
    return _Run(range(low, high + 1), len(match["low"]))


def _split(name: str) -> tuple[str, str]:
    """A name as a prefix and the digits it ends with, if any."""
    match = _NUMBERED.fullmatch(name)
    return (match["prefix"], match["digits"]) if match else (name, "")


def _group_text(group: tuple[tuple[str, str], ...]) -> str:
    """Names with one prefix, in brackets if there are several."""
    prefix = group[0][0]
    digits = [one[1] for one in group]
    if not digits[0]:
        return ",".join(prefix for _ in digits)
    runs: list[list[str]] = []
    for text in digits:
        if runs and text == f"{int(runs[-1][-1]) + 1:0{len(runs[-1][0])}d}":
            runs[-1].append(text)
        else:
            runs.append([text])
    texts = [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{prefix}[{','.join(texts)}]" if len(digits) > 1 else prefix + texts[0]
