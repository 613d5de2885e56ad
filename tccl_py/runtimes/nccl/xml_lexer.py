"""The XML that every version of NCCL reads: a strict reader of graph and topology files.

NCCL's own reader is no general XML parser. This one takes only forms that all versions read alike,
so that a file that passes means to NCCL what it says. It refuses anything else, even where some
version of NCCL would read it.

Source: xmlGetToken, xmlGetNode and xmlLoadSub in xml.cc of NCCL 2.18 to 2.30.7.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tccl_py.errors import InputError
from tccl_py.runtimes.nccl.versions import VersionFacts

MAX_TEXT = 8 * 1024 * 1024
"""Several times the largest file that NCCL's limit on elements leaves room for."""
_MAX_DEPTH = 16

_NAME = r"[A-Za-z_][A-Za-z0-9_]{0,62}"
# Printable ASCII without quotes, markup or entities, as long as NCCL's buffer for a value.
_VALUE = r"[ !#-%(-;=?-~]{0,253}"
_ATTRIBUTE = rf" {_NAME}=(?:\"{_VALUE}\"|'{_VALUE}')"
_TAG = re.compile(
    r"<!--(?=[ \n\r])[^\0]*?-->"
    rf"|</(?P<close>{_NAME})>"
    rf"|<(?P<open>{_NAME})(?P<attributes>(?:{_ATTRIBUTE})*) ?(?P<single>/?)>"
)
_PAIR = re.compile(rf"({_NAME})=[\"']({_VALUE})")
_SPACE = re.compile(r"[ \n\r]*")


class GraphRejectedError(InputError):
    """NCCL fails at init when it reads this file, or no one can say what it would read."""


class GraphCrashError(InputError):
    """NCCL writes or reads where it must not when it reads this file."""


@dataclass(slots=True)
class XmlElement:
    """An element with its attributes, the line it begins on, and the elements inside it."""

    name: str
    attributes: dict[str, str]
    line: int
    children: list[XmlElement] = field(default_factory=list)


def read_elements(text: str, facts: VersionFacts, *, where: str) -> list[XmlElement]:
    """Return the top elements of `text`.

    Args:
        text: the file.
        facts: of the NCCL version, whose limits on numbers of elements count.
        where: name for messages.

    Raises:
        GraphRejectedError: a form that not every NCCL reads, or too many elements; by line.
        GraphCrashError: more children than this version has room for.
        InputError: larger than any file NCCL could read.
    """
    if len(text) > MAX_TEXT:
        raise InputError(where, f"has {len(text)} characters", f"at most {MAX_TEXT} make sense")
    top = XmlElement("", {}, 1)
    stack, count, at, line = [top], 0, 0, 1
    while True:
        # 1. Skip white space; NCCL knows no tabs.
        start = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        line += text.count("\n", at, start)
        if start == len(text):
            break
        # 2. Read one comment or tag.
        tag = _TAG.match(text, start)
        place = f"{where}:{line}"
        if tag is None:
            raise GraphRejectedError(
                place,
                f"NCCL may not read {text[start : start + 40]!r}",
                "write whole tags on one line, one space before each attribute, values in quotes "
                "(at most 253 plain characters), and no tabs between tags",
            )
        at, line = tag.end(), line + text.count("\n", start, tag.end())
        # 3. Put an element into the one it is in.
        if tag["close"]:
            if tag["close"] != stack[-1].name:
                raise GraphRejectedError(
                    place, f"</{tag['close']}> closes no element", f"close <{stack[-1].name}> first"
                )
            stack.pop()
        elif tag["open"]:
            count += 1
            element = XmlElement(tag["open"], _attributes(tag, facts, place), line)
            _check_room(stack, count, facts, place)
            stack[-1].children.append(element)
            if not tag["single"]:
                stack.append(element)
    if len(stack) > 1:
        last = stack[-1]
        raise GraphRejectedError(
            f"{where}:{last.line}", f"<{last.name}> is not closed", "complete the file"
        )
    return top.children


def _attributes(tag: re.Match[str], facts: VersionFacts, place: str) -> dict[str, str]:
    pairs = _PAIR.findall(tag["attributes"])
    attributes = dict(pairs)
    if len(pairs) > facts.max_attributes or len(attributes) < len(pairs):
        raise GraphRejectedError(
            place,
            f"<{tag['open']}> has {len(pairs)} attributes, {len(attributes)} of them different",
            f"at most {facts.max_attributes}, each once",
        )
    return attributes


def _check_room(stack: list[XmlElement], count: int, facts: VersionFacts, place: str) -> None:
    if count > facts.max_elements or len(stack) > _MAX_DEPTH:
        raise GraphRejectedError(
            place,
            f"is element {count}, {len(stack)} deep",
            f"NCCL {facts.name} takes {facts.max_elements}, and none is deeper than {_MAX_DEPTH}",
        )
    parent = stack[-1]
    if parent.name and len(parent.children) == facts.max_children:
        error = GraphRejectedError if facts.children_checked else GraphCrashError
        raise error(
            place,
            f"<{parent.name}> has more than {facts.max_children} children",
            f"NCCL {facts.name} holds no more",
        )
