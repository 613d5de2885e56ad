"""XML as plain elements with line numbers: bounded, without entities, every fault a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.parsers import expat

from tccl_py.errors import InputError
from tccl_py.model.cluster import shown

MAX_DEPTH = 64
MAX_ELEMENTS = 10_000  # NCCL itself stops at 256 elements in a topology and 4096 in a graph

_INTEGER = re.compile(r"-?(0[xX][0-9a-fA-F]{1,15}|0|[1-9][0-9]{0,17})", re.ASCII)


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
        """Return an attribute; without a default a missing attribute is an InputError."""
        value = self.attributes.get(name, default)
        if value is None:
            raise self.refused(f"has no {name}", f'write {name}="..."')
        return value

    def integer(
        self, name: str, *, default: int | None = None, least: int = 0, most: int = 2**31 - 1
    ) -> int:
        """Return an attribute as an integer, decimal or 0x..; required without `default`."""
        if name not in self.attributes and default is not None:
            return default
        text = self.text(name)
        value = int(text, 0) if _INTEGER.fullmatch(text) else None
        if value is None or not least <= value <= most:
            right = f"an integer from {least} to {most}"
            raise self.refused(f"has {name}={shown(text)}", right)
        return value

    def matching(self, name: str, pattern: re.Pattern[str], meaning: str) -> str:
        """Return an attribute of this pattern, `meaning` in messages; "" if missing or empty."""
        value = self.attributes.get(name, "")
        if value and not pattern.fullmatch(value):
            raise self.refused(f"has {name}={shown(value)}", meaning)
        return value

    def only(self, *tags: str) -> Iterator[Element]:
        """Yield the children, each with a tag among `tags`; any other element is an InputError."""
        for child in self.children:
            if child.tag not in tags:
                allowed = ", ".join(f"<{tag}>" for tag in tags) or "nothing"
                raise child.refused(f"is unknown inside <{self.tag}>", f"{allowed} can stand there")
            yield child

    def only_none(self) -> None:
        """Refuse children."""
        list(self.only())


def parse_elements(text: str, *, where: str) -> Element:
    """Parse XML text into elements.

    InputError: not well-formed, a document type or entities, text between elements, deeper than
    `MAX_DEPTH`, or more elements than `MAX_ELEMENTS`.
    """
    parser = expat.ParserCreate()
    top = Element(tag="", attributes={}, where=where)
    path, count = [top], 0

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        place = f"{where}:{parser.CurrentLineNumber} <{tag[:40]}>"
        element = Element(tag=tag, attributes=attributes, where=place)
        if count > MAX_ELEMENTS:
            right = f"one machine has at most {MAX_ELEMENTS}"
            raise element.refused(f"is element number {count}", right)
        if len(path) > MAX_DEPTH:
            raise element.refused("is nested too deep", f"at most {MAX_DEPTH} levels")
        path[-1].children.append(element)
        path.append(element)

    def end(tag: str) -> None:  # noqa: ARG001 (the parser has checked the tag)
        path.pop()

    def data(found: str) -> None:
        if found.strip():
            what = f"has the text {shown(' '.join(found.split()))} between its elements"
            raise path[-1].refused(what, "everything is an attribute here")

    def refuse_type(*declared: object) -> None:  # noqa: ARG001
        # Entities can be declared in a document type only.
        what = "has a document type or entities"
        raise InputError(f"{where}:{parser.CurrentLineNumber}", what, "remove them")

    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = data, refuse_type
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        what, right = f"is not well-formed XML ({error})", "give the file NCCL wrote"
        raise InputError(f"{where}:{error.lineno}", what, right) from error
    except (ValueError, LookupError) as error:
        raise InputError(where, f"is not XML text ({error})", "save it as UTF-8") from error
    return top.children[0]
