"""Reader of graph files, as NCCL_GRAPH_FILE takes and NCCL_GRAPH_DUMP_FILE writes them.

The reader takes only XML that every version of NCCL reads alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec

from tccl_py.errors import InputError
from tccl_py.nccl.versions import LATEST, MAX_ATTRIBUTES, TYPES, VersionFacts, version_facts

MAX_TEXT = 8 * 1024 * 1024
"""Several times the largest file within NCCL's limit on elements."""
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
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,8}")
_NUMBER = re.compile(r"[0-9]{1,9}(?:\.[0-9]{0,9})?(?:[eE][+-]?[0-9]{1,2})?")
_DEVICES = {
    0: re.compile(r"0x[0-9a-fA-F]{1,4}|0|[1-9][0-9]{0,3}"),
    16: re.compile(r"(?:0x)?[0-9a-fA-F]{1,4}"),
}
"""Numbers of GPUs and NICs, by the base in which a version of NCCL reads them (0: by prefix)."""


class GraphRejectedError(InputError):
    """NCCL fails at init with this file, or its versions differ in reading the file."""


class GraphCrashError(InputError):
    """NCCL accesses invalid memory with this file."""


class Channel(msgspec.Struct, frozen=True):
    """One channel: GPU devices in order, NICs in order (entry, then exit).

    `ranks` holds the rank of each GPU in NCCL's dumps; this package never writes ranks, because a
    newer NCCL trusts them more than the device.
    """

    gpus: tuple[int, ...]
    nets: tuple[int, ...] = ()
    ranks: tuple[int | None, ...] = ()


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """One graph; rates in GB/s a channel, types by NCCL's names."""

    id: int
    pattern: int
    crossnic: int
    nchannels: int
    speedintra: float
    speedinter: float
    latencyinter: float | None
    typeintra: str
    typeinter: str
    samechannels: int
    channels: tuple[Channel, ...]
    line: int = 0


class GraphFile(msgspec.Struct, frozen=True, kw_only=True):
    """A graph file as one version of NCCL reads it, at most one graph of each id."""

    graphs: tuple[Graph, ...] = ()

    def graph(self, number: int) -> Graph | None:
        """Return the graph with this id."""
        return next((graph for graph in self.graphs if graph.id == number), None)


def parse_graph_file(text: str, *, where: str, version: str = LATEST) -> GraphFile:
    """Read a graph file or dump; an empty file has no graphs.

    Raises GraphRejectedError: NCCL fails at init, or its versions differ in reading; by line.
    GraphCrashError: NCCL would crash or corrupt memory. InputError: too large.
    """
    facts = version_facts(version)
    roots = [root for root in read_elements(text, facts, where=where) if root.name == "graphs"]
    graphs: dict[int, Graph] = {}
    for root in roots:
        if root is not roots[0] or root.integer("version") != 1:
            root.reject("is not the one <graphs> of version 1", "NCCL reads no other")
        for element in root.named("graph"):
            graph = _graph(element, facts)
            if graph.id in graphs:
                element.reject(f"is the second graph with id {graph.id}", "write each once")
            graphs[graph.id] = graph
    return GraphFile(graphs=tuple(graphs.values()))


def _graph(element: XmlElement, facts: VersionFacts) -> Graph:
    latency = "latencyinter" in element.attributes
    return Graph(
        id=element.integer("id"),
        pattern=element.integer("pattern"),
        crossnic=element.integer("crossnic"),
        nchannels=element.integer("nchannels"),
        speedintra=element.number("speedintra"),
        speedinter=element.number("speedinter"),
        latencyinter=element.number("latencyinter") if latency else None,
        typeintra=_path_type(element, "typeintra"),
        typeinter=_path_type(element, "typeinter"),
        samechannels=element.integer("samechannels"),
        channels=tuple(_channel(channel, facts) for channel in element.named("channel")),
        line=element.line,
    )


def _path_type(element: XmlElement, name: str) -> str:
    value = element.attributes.get(name)
    if value is None:
        raise GraphCrashError(element.place, f"<graph> has no {name}", "NCCL crashes on it")
    return value if value in TYPES else "LOC"


def _channel(element: XmlElement, facts: VersionFacts) -> Channel:
    gpus = element.named("gpu")
    return Channel(
        tuple(gpu.device(facts.dev_base) for gpu in gpus),
        tuple(net.device(facts.dev_base) for net in element.named("net")),
        tuple(gpu.integer("rank") if "rank" in gpu.attributes else None for gpu in gpus),
    )


# XML
@dataclass(slots=True)
class XmlElement:
    """An element with its attributes, file and line, and the elements inside."""

    name: str
    attributes: dict[str, str]
    where: str = ""
    line: int = 1
    children: list[XmlElement] = field(default_factory=list)

    @property
    def place(self) -> str:
        """The file and line, for messages."""
        return f"{self.where}:{self.line}"

    def named(self, name: str) -> list[XmlElement]:
        """Return the children with this name."""
        return [child for child in self.children if child.name == name]

    def reject(self, what: str, right: str) -> NoReturn:
        """Raise GraphRejectedError about this element."""
        raise GraphRejectedError(self.place, f"<{self.name}> {what}", right)

    def integer(self, name: str) -> int:
        """Return a decimal number."""
        return int(self._matched(name, _INTEGER, "give a decimal number"))

    def number(self, name: str) -> float:
        """Return a number of 0 or more."""
        return float(self._matched(name, _NUMBER, "give a number such as 12.5"))

    def device(self, base: int) -> int:
        """Return the number of a GPU or NIC."""
        return int(self._matched("dev", _DEVICES[base], "give a device number such as 0x2"), base)

    def _matched(self, name: str, form: re.Pattern[str], right: str) -> str:
        value = self.attributes.get(name)
        if value is None:
            self.reject(f"has no {name}", right)
        if form.fullmatch(value) is None:
            self.reject(f"has {name}={value[:40]!r}", right)
        return value


def read_elements(text: str, facts: VersionFacts, *, where: str) -> list[XmlElement]:
    """Return the top elements of `text`, within the limits of an NCCL version.

    Raises GraphRejectedError: a form that not every NCCL reads, or too many elements; by line.
    GraphCrashError: more children than this version has room for. InputError: larger than any file
    NCCL could read.
    """
    if len(text) > MAX_TEXT:
        raise InputError(where, f"has {len(text)} characters", f"at most {MAX_TEXT} make sense")
    stack, count, at, line = [XmlElement("", {})], 0, 0, 1
    while True:
        # 1. Skip white space; NCCL knows no tabs.
        start = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        line += text.count("\n", at, start)
        if start == len(text):
            break
        # 2. Read one comment or tag.
        tag = _TAG.match(text, start)
        if tag is None:
            raise GraphRejectedError(
                f"{where}:{line}",
                f"NCCL may not read {text[start : start + 40]!r}",
                "write whole tags on one line, one space before each attribute, values in quotes "
                "(at most 253 plain characters), and no tabs between tags",
            )
        at, line = tag.end(), line + text.count("\n", start, tag.end())
        # 3. Put an element into its parent.
        if tag["close"]:
            if tag["close"] != stack[-1].name:
                what = f"</{tag['close']}> closes no element"
                raise GraphRejectedError(f"{where}:{line}", what, f"close <{stack[-1].name}> first")
            stack.pop()
        elif tag["open"]:
            count += 1
            element = _element(tag, where, line)
            _check_room(element, stack, count, facts)
            stack[-1].children.append(element)
            if not tag["single"]:
                stack.append(element)
    if len(stack) > 1:
        stack[-1].reject("is not closed", "complete the file")
    return stack[0].children


def _element(tag: re.Match[str], where: str, line: int) -> XmlElement:
    pairs = _PAIR.findall(tag["attributes"])
    element = XmlElement(tag["open"], dict(pairs), where, line)
    if len(pairs) > MAX_ATTRIBUTES or len(element.attributes) < len(pairs):
        what = f"has {len(pairs)} attributes, {len(element.attributes)} of them different"
        element.reject(what, f"at most {MAX_ATTRIBUTES}, each once")
    return element


def _check_room(
    element: XmlElement, stack: Sequence[XmlElement], count: int, facts: VersionFacts
) -> None:
    if count > facts.max_elements or len(stack) > _MAX_DEPTH:
        right = (
            f"NCCL {facts.name} takes {facts.max_elements}, and none is deeper than {_MAX_DEPTH}"
        )
        element.reject(f"is element {count}, {len(stack)} deep", right)
    parent = stack[-1]
    if parent.name and len(parent.children) == facts.max_children:
        error = GraphRejectedError if facts.children_checked else GraphCrashError
        what = f"<{parent.name}> has more than {facts.max_children} children"
        raise error(element.place, what, f"NCCL {facts.name} holds no more")
