"""XML as plain elements that know their line: bounded, without entities, every fault a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from xml.etree.ElementTree import ParseError

from defusedxml import DefusedXmlException
from defusedxml.ElementTree import DefusedXMLParser

from tccl_py.errors import InputError

MAX_DEPTH = 64
MAX_ELEMENTS = 10_000
"""NCCL itself stops at 256 elements in a topology and 4096 in a graph."""

_INTEGER = re.compile(r"-?(0[xX][0-9a-fA-F]{1,15}|0|[1-9][0-9]{0,17})", re.ASCII)
_SHOWN = 40


@dataclass(kw_only=True)
class Element:
    """An element with the line it starts on; `where` is `file:line <tag>` for messages."""

    tag: str
    attributes: dict[str, str]
    where: str
    children: list[Element] = field(default_factory=list)

    def refused(self, what: str, right: str) -> InputError:
        """Return the error that names this element."""
        return InputError(self.where, what, right)

    def text(self, name: str, *, default: str | None = None) -> str:
        """Return an attribute; required if there is no default.

        Raises:
            InputError: it is missing.
        """
        value = self.attributes.get(name, default)
        if value is None:
            raise self.refused(f"has no {name}", f'write {name}="..."')
        return value

    def integer(
        self, name: str, *, default: int | None = None, least: int = 0, most: int = 2**31 - 1
    ) -> int:
        """Return an attribute as an integer, decimal or 0x..; required if there is no default.

        Raises:
            InputError: missing, no integer, or not within `least` and `most`.
        """
        if name not in self.attributes and default is not None:
            return default
        text = self.text(name)
        value = int(text, 0) if _INTEGER.fullmatch(text) else None
        if value is None or not least <= value <= most:
            right = f"an integer from {least} to {most}"
            raise self.refused(f'has {name}="{shortened(text)}"', right)
        return value

    def matching(self, name: str, pattern: re.Pattern[str], meaning: str) -> str:
        """Return an attribute that matches `pattern` as a whole; "" if it is missing or empty.

        Raises:
            InputError: it does not match; `meaning` is the right form.
        """
        value = self.attributes.get(name, "")
        if value and not pattern.fullmatch(value):
            raise self.refused(f'has {name}="{shortened(value)}"', meaning)
        return value

    def only(self, *tags: str) -> Iterator[Element]:
        """Yield the children, each of one of these tags.

        Raises:
            InputError: another element; the message names it and the right tags.
        """
        for child in self.children:
            if child.tag not in tags:
                allowed = ", ".join(f"<{tag}>" for tag in tags) or "nothing"
                raise child.refused(f"is unknown inside <{self.tag}>", f"{allowed} can stand there")
            yield child

    def only_none(self) -> None:
        """Check that there are no children.

        Raises:
            InputError: there is one.
        """
        list(self.only())


def shortened(text: str) -> str:
    """Return `text`, cut to fit a message."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def parse_elements(
    text: str,
    *,
    where: str,
    most: int = MAX_ELEMENTS,
    right: str = "give the file NCCL wrote",
) -> Element:
    """Parse XML text into elements.

    Args:
        text: the whole document.
        where: file name for messages.
        most: the largest number of elements.
        right: the right input, for messages about text that is no XML.

    Raises:
        InputError: not well-formed, a document type or entities, text between elements, deeper
            than `MAX_DEPTH` or more elements than `most`.
    """
    builder = _Builder(where, most)
    builder.parser = DefusedXMLParser(target=builder, forbid_dtd=True)
    try:
        builder.parser.feed(text)
        root = builder.parser.close()
    except ParseError as error:
        line = error.position[0]
        raise InputError(f"{where}:{line}", f"is not well-formed XML ({error})", right) from error
    except DefusedXmlException as error:
        what = "has a document type or entities"
        raise InputError(f"{where}:{builder.line}", what, "remove them") from error
    except (ValueError, LookupError) as error:
        raise InputError(where, f"is not XML text ({error})", "save it as UTF-8") from error
    if not isinstance(root, Element):
        raise InputError(where, "has no element", right)
    return root


class _Builder:
    """Target of the parser: builds elements and keeps the bounds."""

    def __init__(self, where: str, most: int) -> None:
        self.where = where
        self.most = most
        self.parser: Any = None
        self.root: Element | None = None
        self.open: list[Element] = []
        self.count = 0

    @property
    def line(self) -> int:
        return int(self.parser.parser.CurrentLineNumber)

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self.count += 1
        where = f"{self.where}:{self.line} <{shortened(tag)}>"
        element = Element(tag=tag, attributes=dict(attributes), where=where)
        if self.count > self.most:
            right = f"one machine has at most {self.most}"
            raise element.refused(f"is element number {self.count}", right)
        if len(self.open) >= MAX_DEPTH:
            raise element.refused("is nested too deep", f"at most {MAX_DEPTH} levels")
        if self.open:
            self.open[-1].children.append(element)
        else:
            self.root = element
        self.open.append(element)

    def end(self, tag: str) -> None:  # noqa: ARG002 (the parser has checked the tag)
        self.open.pop()

    def data(self, text: str) -> None:
        # The parser buffers text, so its line is not told; the element around it is.
        if text.strip():
            shown = shortened(" ".join(text.split()))
            what = f'has the text "{shown}" between its elements'
            raise self.open[-1].refused(what, "everything is an attribute here")

    def close(self) -> Element | None:
        return self.root
