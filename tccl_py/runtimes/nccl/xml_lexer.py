"""NCCL's own reading of XML: not a general parser, and what it refuses depends on its version.

Source: xmlGetToken, xmlGetNode and xmlLoadSub in xml.cc of NCCL 2.18 to 2.30.7.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from tccl_py.errors import InputError
from tccl_py.runtimes.nccl.versions import VersionFacts

MAX_TEXT = 8 * 1024 * 1024
"""Several times the largest file that NCCL's limit on elements leaves room for."""

_SPACE = re.compile(r"[ \n\r]*")
_TOKEN = re.compile(r"([^ >/\n\r=]*)([ >/\n\r=])")
_RIGHT = "see the rules for graph files, or let `tccl export` write it"

Known = Mapping[str, "Known"]
"""Element names that are read at one level, and below each of them; others are skipped."""


class GraphRejectedError(InputError):
    """NCCL fails at init when it reads this file."""


class GraphCrashError(InputError):
    """NCCL writes or reads where it must not when it reads this file."""


@dataclass(slots=True)
class XmlElement:
    """An element as NCCL keeps it; of attributes with one name the first counts."""

    name: str
    attributes: dict[str, str]
    line: int
    children: list[XmlElement] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Tag:
    """One tag; `ends` is "open", "single", "close", or "" at the end of the text."""

    ends: str
    name: str = ""
    attributes: tuple[tuple[str, str], ...] = ()
    start: int = 0


def read_elements(
    text: str, known: Known, facts: VersionFacts, *, where: str
) -> Sequence[XmlElement]:
    """The elements of `text` that `known` names, as this version of NCCL would read them.

    Raises:
        GraphRejectedError: NCCL would stop with an error; place and what NCCL says of it.
        GraphCrashError: NCCL would run over the end of its memory.
        InputError: larger than any file NCCL could read.
    """
    if len(text) > MAX_TEXT:
        raise InputError(where, f"has {len(text)} characters", f"at most {MAX_TEXT} make sense")
    return _Reader(text, known, facts, where).read()


class _Reader:
    def __init__(self, text: str, known: Known, facts: VersionFacts, where: str) -> None:
        # NCCL reads bytes; one character a byte keeps its limits on lengths.
        self._text = text.encode("utf-8", "replace").decode("latin-1")
        self._at = 0
        self._known, self._facts, self._where = known, facts, where
        self._elements = 0
        self._lines = [0, 1]

    def read(self) -> list[XmlElement]:
        top = XmlElement("", {}, 1)
        stack: list[tuple[XmlElement, Known]] = [(top, self._known)]
        while True:
            tag = self._tag()
            head, known = stack[-1]
            if not tag.ends:
                if len(stack) > 1:
                    self._reject(self._at, f"XML Parse : unterminated {head.name}")
                return top.children
            if tag.ends == "close" and len(stack) > 1:
                if tag.name != head.name:
                    self._reject(tag.start, f"XML Mismatch : {head.name} / {tag.name}")
                stack.pop()
            elif tag.name not in known:
                self._skip(tag)
            else:
                element = self._keep(tag, head)
                if tag.ends != "single":
                    stack.append((element, known[tag.name]))

    def _keep(self, tag: _Tag, head: XmlElement) -> XmlElement:
        facts = self._facts
        line = self._line(tag.start)
        if self._elements == facts.max_elements:
            self._reject(tag.start, f"XML parser is limited to {facts.max_elements} nodes")
        if head.name and len(head.children) == facts.max_children:
            reason = f"<{head.name}> has more than {facts.max_children} children"
            if facts.children_checked:
                self._reject(tag.start, f"XML parser : {reason}")
            raise GraphCrashError(
                f"{self._where}:{line}", reason, f"NCCL {facts.name} holds no more"
            )
        self._elements += 1
        attributes: dict[str, str] = {}
        for key, value in tag.attributes:
            attributes.setdefault(key, value)
        element = XmlElement(tag.name, attributes, line)
        head.children.append(element)
        return element

    def _skip(self, tag: _Tag) -> None:
        """Skip an unknown element; inside it NCCL does not compare names, only counts levels."""
        depth = 0 if tag.ends == "single" else 1
        while depth:
            inner = self._tag()
            if not inner.ends:
                self._reject(self._at, f"XML Parse : unterminated {tag.name}")
            depth += {"open": 1, "close": -1}.get(inner.ends, 0)

    # Characters

    def _tag(self) -> _Tag:
        while True:
            space = _SPACE.match(self._text, self._at)
            start = self._at = space.end() if space else self._at
            if start >= len(self._text):
                return _Tag("")
            if self._text[start] != "<":
                self._reject(start, f"XML Parse error : expecting '<', got {self._text[start]!r}")
            self._at += 1
            name, last = self._name()
            if not name.startswith("!--"):
                return self._rest(name, last, start)
            end = self._text.find("-->", start + len("<!--"))
            if end < 0:
                self._reject(start, "XML Parse error : unterminated comment")
            self._at = end + len("-->")

    def _rest(self, name: str, last: str, start: int) -> _Tag:
        if not name and last == "/":
            name, last = self._name()
            if last != ">":
                self._reject(start, f"XML Parse error : unexpected {last!r} in closing tag {name}")
            return _Tag("close", name, (), start)
        attributes: list[tuple[str, str]] = []
        while last == " ":
            key, value, last = self._attribute()
            if len(attributes) < self._facts.max_attributes:
                attributes.append((key, value))
        ends = "open"
        if last == "/":
            ends = "single"
            _, last = self._name()
        if last != ">":
            self._reject(self._at - 1, f"XML Parse : expected >, got {last!r}")
        return _Tag(ends, name, tuple(attributes), start)

    def _token(self) -> tuple[str, str]:
        match = _TOKEN.match(self._text, self._at)
        if match is None:
            self._reject(len(self._text), "XML Parse : Unexpected EOF")
        name, last = match[1], match[2]
        if len(name) > self._facts.max_value - (last != "="):
            self._reject(self._at, f"Error : name {name[:20]}... too long")
        self._at = match.end()
        return name.split("\0")[0], last

    def _name(self) -> tuple[str, str]:
        start = self._at
        name, last = self._token()
        if last == "=":
            self._reject(start, f"XML Parse : Unexpected value with name {name[:40]}")
        return name, last

    def _attribute(self) -> tuple[str, str, str]:
        key, last = self._token()
        if last != "=":
            return key, "", last
        start = self._at
        quote = self._text[start : start + 1]
        if quote not in ('"', "'"):
            self._reject(start, "XML Parse : Expected (double) quote.")
        end = self._text.find(quote, start + 1, start + self._facts.max_value + 2)
        if end < 0:
            short = len(self._text) - start <= self._facts.max_value
            self._reject(
                start,
                "XML Parse : Unexpected EOF" if short else f"Error : value of {key[:40]} too long",
            )
        if end + 1 >= len(self._text):
            self._reject(end, "XML Parse : Unexpected EOF")
        self._at = end + 2
        return key, self._text[start + 1 : end].split("\0")[0], self._text[end + 1]

    def _line(self, at: int) -> int:
        known, line = self._lines
        self._lines = [at, line + self._text.count("\n", known, at)]
        return self._lines[1]

    def _reject(self, at: int, reason: str) -> NoReturn:
        line = self._text.count("\n", 0, at) + 1
        raise GraphRejectedError(f"{self._where}:{line}", reason, _RIGHT)
