"""Reader of graph files, as NCCL_GRAPH_FILE takes and NCCL_GRAPH_DUMP_FILE writes them.

First XML as NCCL's own parser takes it, less than XML and more; then graphs of its elements.

Source: xmlGetNode and xmlLoadSub (graph/xml.cc) from NCCL 2.18.1 to 2.30.7, and
ncclTopoGetGraphFromXml and its callees (graph/search.cc) of NCCL 2.30.7.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import msgspec
from msgspec.structs import replace

from tccl_py.errors import InputError, require
from tccl_py.nccl.c_numbers import c_float, c_integer
from tccl_py.nccl.versions import ASSUMED, MAX_ATTRIBUTES, TYPES, VersionFacts, version_facts

MAX_TEXT = 8 * 1024 * 1024
"""Several times the largest file within NCCL's limit on elements."""
_FORM = (
    "write whole tags on one line, one space before each attribute, values in quotes (at most 253 "
    "plain characters), and no tabs between tags"
)
_LONGEST_VALUE = 255
"""Characters in NCCL's buffer for a value."""

_BLANKS = re.compile(r"[ \n\r]*")
_END = r"[ >/\n\r]"
_WORD = r"[^ >/\n\r=]{0,253}"
_HEAD = re.compile(rf"<(?P<name>{_WORD})(?P<end>{_END})")
_REST = re.compile(rf"(?P<name>{_WORD})>")
_ATTRIBUTE = re.compile(
    r"(?P<key>[^ >/\n\r=]{0,254})"
    r"(?:=(?P<quote>[\"'])(?P<value>[\s\S]{0,253}?)(?P=quote)(?P<after>[\s\S])"
    rf"|(?P<end>{_END}))"
)
_OLD_ATTRIBUTE = re.compile(
    r"(?P<key>[^ >/\n\r=]{0,254})"
    rf"(?:=[\"'](?P<value>[^\"]*)\"(?P<after>[\s\S])|(?P<end>{_END}))"
)


class GraphFaultError(InputError):
    """NCCL fails at init with this file; `crash`: invalid memory, hangs, or wrong sums."""

    def __init__(self, where: str, fault: str, right: str, *, crash: bool = False) -> None:
        super().__init__(where, fault, right)
        self.crash = crash


@dataclass(slots=True)
class XmlElement:
    """An element with its attributes, its place as file:line, and the elements inside."""

    name: str
    attributes: dict[str, str]
    place: str = ""
    children: list[XmlElement] = field(default_factory=list)

    def children_named(self, name: str) -> list[XmlElement]:
        """Return the children with this name."""
        return [child for child in self.children if child.name == name]

    def reject(self, fault: str, right: str, *, crash: bool = False) -> NoReturn:
        """Raise GraphFaultError about this element."""
        raise GraphFaultError(self.place, f"<{self.name}> {fault}", right, crash=crash)

    def text(self, name: str) -> str:
        """Return an attribute that NCCL needs."""
        if name not in self.attributes:
            self.reject(f"has no {name}", f"write it, among the first {MAX_ATTRIBUTES} attributes")
        return self.attributes[name]

    def long(self, name: str, base: int = 0) -> int:
        """Return an attribute as C's 64-bit number: 0 for other text."""
        number, _ = c_integer(self.text(name), base)
        return min(max(number, -(2**63)), 2**63 - 1)

    def integer(self, name: str) -> int:
        """Return an attribute as C's 32-bit number: 0 for other text."""
        return (self.long(name) + 2**31) % 2**32 - 2**31

    def number(self, name: str) -> float:
        """Return an attribute as C's floating-point number: 0 for other text."""
        return c_float(self.text(name))


class _Tag(NamedTuple):
    """A tag: `closing` as `</name>`, `single` as `<name/>`, else as `<name>`."""

    name: str
    attributes: dict[str, str]
    place: str
    closing: bool = False
    single: bool = False


def read_elements(
    text: str, facts: VersionFacts, inside: Mapping[str, Sequence[str]], *, where: str
) -> list[XmlElement]:
    """Return the top elements of a text.

    `inside` has the elements that NCCL knows in each ("" for the top); it skips all others. Raises
    GraphFaultError: NCCL does not read the text; InputError: too large.
    """
    right = f"at most {MAX_TEXT} make sense"
    require(len(text) <= MAX_TEXT, where, f"has {len(text)} characters", right)
    top = XmlElement("", {}, where)
    # None is an element that NCCL skips: any closing tag ends it.
    stack: list[XmlElement | None] = [top]
    count = 0
    for tag in _tags(text.encode("utf-8", "replace").decode("latin-1"), facts, where=where):
        head = stack[-1]
        if tag.closing and head is not top:
            if head is not None and head.name != tag.name:
                fault = f"</{tag.name}> closes no element"
                raise GraphFaultError(tag.place, fault, f"close <{head.name}> first")
            stack.pop()
            continue
        element = None
        if head is not None and tag.name in inside.get(head.name, ()):
            element = XmlElement(tag.name, tag.attributes, tag.place)
            if head is not top and len(head.children) == facts.max_children:
                fault = f"is one child too many of <{head.name}>"
                right = f"NCCL {facts.name} takes {facts.max_children}"
                element.reject(fault, right, crash=not facts.children_checked)
            head.children.append(element)
            count += 1
            if count == facts.max_elements:
                element.reject(f"is element {count}", f"NCCL {facts.name} takes fewer")
        if not tag.single:
            stack.append(element)
    if len(stack) > 1:
        place = where if stack[-1] is None else stack[-1].place
        raise GraphFaultError(place, "an element is not closed", "complete the file")
    return top.children


def _tags(text: str, facts: VersionFacts, *, where: str) -> Iterator[_Tag]:
    attribute = _ATTRIBUTE if facts.checks_values else _OLD_ATTRIBUTE
    at, line, counted = 0, 1, 0
    while True:
        at += len(_BLANKS.match(text, at)[0])  # type: ignore[index]
        if at == len(text):
            return
        line, counted = line + text.count("\n", counted, at), at
        tag, at = _tag(text, at, f"{where}:{line}", attribute)
        if tag is not None:
            yield tag


def _tag(text: str, start: int, place: str, attribute: re.Pattern[str]) -> tuple[_Tag | None, int]:
    """Return the tag at a place of the text, None for a comment, and where the text goes on."""
    unread = GraphFaultError(place, f"NCCL does not read {text[start : start + 40]!r}", _FORM)
    head = _HEAD.match(text, start)
    if head is None:
        raise unread
    name, end, at = _c_text(head["name"]), head["end"], head.end()
    if name.startswith("!--"):
        stop = text.find("-->", start + len("<!--"))
        if stop < 0:
            raise unread
        return None, stop + len("-->")
    attributes: list[tuple[str, str]] = []
    while end == " ":
        match = attribute.match(text, at)
        if match is None:
            raise unread
        value = match["value"] or ""
        if len(value) > _LONGEST_VALUE:
            raise GraphFaultError(place, "has a value that overflows NCCL's", _FORM, crash=True)
        # NCCL drops attributes beyond its limit, and takes the first of a name.
        if len(attributes) < MAX_ATTRIBUTES:
            attributes.append((_c_text(match["key"]), _c_text(value)))
        end, at = match["after"] or match["end"], match.end()
    attribute_values = dict(reversed(attributes))
    if end == ">":
        return _Tag(name, attribute_values, place), at
    rest = _REST.match(text, at) if end == "/" else None
    if rest is None:
        raise unread
    if not name and head["end"] == "/":
        return _Tag(_c_text(rest["name"]), {}, place, closing=True), rest.end()
    return _Tag(name, attribute_values, place, single=True), rest.end()


def _c_text(text: str) -> str:
    return text.partition("\0")[0]


_INSIDE = {
    "": ("graphs",),
    "graphs": ("graph",),
    "graph": ("channel",),
    "channel": ("net", "gpu"),
}
_IDS = range(5)
"""Graphs that NCCL asks for: ring, tree, and those of CollNet and NVLS."""


class Channel(msgspec.Struct, frozen=True):
    """One channel: GPU devices in order, NICs in order (entry, then exit)."""

    gpus: tuple[int, ...]
    nets: tuple[int, ...] = ()
    ranks: tuple[int | None, ...] = ()
    """Those of the GPUs, in NCCL's dumps; this package writes none, because a newer NCCL trusts
    them more than the device."""


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """One graph; rates in GB/s a channel, types by NCCL's names."""

    id: int
    pattern: int
    crossnic: int
    nchannels: int
    speedintra: float
    speedinter: float
    typeintra: str
    typeinter: str
    samechannels: int
    channels: tuple[Channel, ...]
    place: str = ""

    @property
    def orders(self) -> tuple[tuple[int, ...], ...]:
        """The GPUs of each channel, in order."""
        return tuple(channel.gpus for channel in self.channels)

    def fail(self, fault: str, right: str, *, crash: bool = False) -> NoReturn:
        """Raise GraphFaultError about this graph."""
        raise GraphFaultError(self.place, f"graph {self.id} {fault}", right, crash=crash)


def parse_graph_file(
    text: str, *, where: str, version: str = ASSUMED, cross_nic: int | None = None
) -> dict[int, Graph]:
    """Return the graphs of a graph file or dump by id, as a release of NCCL reads them.

    An empty file has none. With `cross_nic` (NCCL_CROSS_NIC) 0 NCCL passes over graphs whose
    crossnic is 1. Raises GraphFaultError, by line: NCCL fails at init or crashes. InputError: too
    large.
    """
    facts = version_facts(version)
    roots = read_elements(text, facts, _INSIDE, where=where)
    for root in roots:
        if root.integer("version") != 1:
            root.reject("is not of version 1", "NCCL reads no other")
    graphs: dict[int, Graph] = {}
    for element in roots[0].children if roots else ():
        number = element.integer("id")
        if number not in _IDS or (cross_nic == 0 and element.integer("crossnic") == 1):
            continue
        graph = _graph(element, facts)
        if number in graphs:
            # The later graph overwrites the first channels of the earlier one.
            more = graphs[number].channels[len(graph.channels) :]
            graph = replace(graph, channels=graph.channels + more)
        graphs[number] = graph
    return graphs


def _graph(element: XmlElement, facts: VersionFacts) -> Graph:
    return Graph(
        id=element.integer("id"),
        pattern=element.integer("pattern"),
        crossnic=element.integer("crossnic"),
        nchannels=element.integer("nchannels"),
        speedintra=element.number("speedintra"),
        speedinter=element.number("speedinter"),
        typeintra=_path_type(element, "typeintra"),
        typeinter=_path_type(element, "typeinter"),
        samechannels=element.integer("samechannels"),
        channels=tuple(_channel(channel, facts) for channel in element.children_named("channel")),
        place=element.place,
    )


def _path_type(element: XmlElement, name: str) -> str:
    value = element.attributes.get(name)
    if value is None:
        element.reject(f"has no {name}", "NCCL crashes on it", crash=True)
    return value if value in TYPES else "LOC"


def _channel(element: XmlElement, facts: VersionFacts) -> Channel:
    gpus = element.children_named("gpu")
    return Channel(
        tuple(gpu.long("dev", facts.dev_base) for gpu in gpus),
        tuple(net.long("dev", facts.dev_base) for net in element.children_named("net")),
        tuple(gpu.integer("rank") if "rank" in gpu.attributes else None for gpu in gpus),
    )
