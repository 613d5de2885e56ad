"""Our part of somebody else's file: between two marker lines; everything else stays byte for byte.

The first marker says what the file was like before, so that taking the part out restores it even
where no record of it is left.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from tccl_py.errors import InputError

Before = Literal["made", "kept", "unended"]
"""The file was not there; it was; it was and its last line had no newline, which we added."""
Comment = Literal["#", "--"]

_MENTION = re.compile(rb"(?:>>>|<<<) tccl-py")
_BEGIN = re.compile(
    rb"^(?:#|--) >>> tccl-py, taken out by tccl uninstall \((made|kept|unended)\) >>>\n", re.M
)
_END = re.compile(rb"^(?:#|--) <<< tccl-py <<<(?:\n|\Z)", re.M)


class _Found(NamedTuple):
    start: int
    inside: tuple[int, int]
    end: int
    before: Before


def with_part(data: bytes | None, body: str, *, comment: Comment, head: str, where: str) -> bytes:
    """A file with our part in it, at its end or where it was already.

    Args:
        data: the file; None if there is none.
        body: the lines of our part.
        comment: what a comment begins with in such a file.
        head: what stands before our part in a new file.
        where: the file's name for messages.

    Raises:
        InputError: the markers that are there are damaged.
    """
    found = _find(data or b"", where)
    if data is not None and found is not None:
        return _around(data, found.inside, body.encode())
    before: Before = "made" if data is None else "kept"
    start = head.encode() if data is None else data
    if data and not data.endswith(b"\n"):
        before, start = "unended", data + b"\n"
    first = f"{comment} >>> tccl-py, taken out by tccl uninstall ({before}) >>>\n"
    return start + f"{first}{body}{comment} <<< tccl-py <<<\n".encode()


def without_part(data: bytes, *, heads: tuple[str, ...], where: str) -> bytes | None:
    """The file as it was before; None if it was not there. Others' later lines are kept.

    Args:
        data: the file as it is.
        heads: what may stand before our part in a file that we made.
        where: its name for messages.

    Raises:
        InputError: the markers are damaged.
    """
    found = _find(data, where)
    if found is None:
        return data
    rest = _around(data, (found.start, found.end), b"")
    if found.before == "made" and rest in [head.encode() for head in heads]:
        return None
    # The newline that we added goes, unless somebody has written behind it.
    alone = found.end == len(data) and rest.endswith(b"\n")
    return rest[:-1] if found.before == "unended" and alone else rest


def has_part(data: bytes, *, where: str) -> bool:
    """Whether our part is in a file.

    Raises:
        InputError: the markers are damaged.
    """
    return _find(data, where) is not None


def _around(data: bytes, cut: tuple[int, int], middle: bytes) -> bytes:
    return data[: cut[0]] + middle + data[cut[1] :]


def _find(data: bytes, where: str) -> _Found | None:
    mentions = len(_MENTION.findall(data))
    if not mentions:
        return None
    begins, ends = list(_BEGIN.finditer(data)), list(_END.finditer(data))
    whole = len(begins) == len(ends) == 1 and begins[0].end() <= ends[0].start()
    if not whole or mentions != 2:
        raise InputError(
            where,
            "has damaged marker lines of tccl-py",
            "one of each is right, the first before the second: mend or delete them by hand",
        )
    before: Before = begins[0][1].decode()  # type: ignore[assignment]
    inside = (begins[0].end(), ends[0].start())
    return _Found(begins[0].start(), inside, ends[0].end(), before)
