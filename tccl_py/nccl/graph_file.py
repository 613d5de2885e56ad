"""Graph files: what NCCL_GRAPH_FILE names and NCCL_GRAPH_DUMP_FILE writes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import read_text
from tccl_py.nccl.versions import LATEST, VersionFacts, version_facts

# The XML that every version of NCCL reads: a strict reader of graph and topology files.


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


RING, TREE = 0, 1
"""Ids of the graphs that this package writes."""
TYPES = ("LOC", "NVL", "NVB", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
"""Path types that a graph file knows, nearest first; NCCL silently takes any other for LOC."""

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,8}")
_NUMBER = re.compile(r"[0-9]{1,9}(?:\.[0-9]{0,9})?(?:[eE][+-]?[0-9]{1,2})?")
_DEVICES = {
    0: re.compile(r"0x[0-9a-fA-F]{1,4}|0|[1-9][0-9]{0,3}"),
    16: re.compile(r"(?:0x)?[0-9a-fA-F]{1,4}"),
}
"""Numbers of GPUs and NICs, by the base that a version of NCCL reads them in (0: by prefix)."""


class Channel(msgspec.Struct, frozen=True):
    """One channel: GPU devices in order, NICs in order (entry, then exit).

    `ranks` holds the rank a file gives a GPU, by position, as NCCL's own dumps do; this package
    never writes one, because a newer NCCL believes it more than the device.
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
    """Read a graph file or dump; an empty one has no graphs.

    Raises:
        GraphRejectedError: NCCL fails at init, or its versions differ in what they read; by line.
        GraphCrashError: NCCL would crash or corrupt memory.
        InputError: too large.
    """
    facts = version_facts(version)
    roots = [root for root in read_elements(text, facts, where=where) if root.name == "graphs"]
    graphs: dict[int, Graph] = {}
    for root in roots:
        reader = _Reader(facts, where, root)
        if root is not roots[0] or reader.integer("version") != 1:
            raise reader.refuse("is not the one <graphs> of version 1", "NCCL reads no other")
        for element in root.children:
            if element.name == "graph":
                graph = _graph(element, facts, where)
                if graph.id in graphs:
                    what = f"is the second graph with id {graph.id}"
                    raise _Reader(facts, where, element).refuse(what, "write each once")
                graphs[graph.id] = graph
    return GraphFile(graphs=tuple(graphs.values()))


def read_graph_file(path: Path, *, version: str = LATEST) -> GraphFile:
    """Read a graph file from disk; errors as `parse_graph_file`."""
    return parse_graph_file(read_text(path, limit=MAX_TEXT), where=str(path), version=version)


class _Reader:
    """Values of one element's attributes."""

    def __init__(self, facts: VersionFacts, where: str, element: XmlElement) -> None:
        self._facts, self._element = facts, element
        self._where = f"{where}:{element.line}"

    def refuse(self, what: str, right: str) -> GraphRejectedError:
        """Return an error about this element."""
        return GraphRejectedError(self._where, f"<{self._element.name}> {what}", right)

    def _matched(self, name: str, form: re.Pattern[str], right: str) -> str:
        value = self._element.attributes.get(name)
        if value is None:
            raise self.refuse(f"has no {name}", right)
        if form.fullmatch(value) is None:
            raise self.refuse(f"has {name}={value[:40]!r}", right)
        return value

    def integer(self, name: str) -> int:
        """Return a decimal number."""
        return int(self._matched(name, _INTEGER, "give a decimal number"))

    def number(self, name: str) -> float:
        """Return a number of 0 or more."""
        return float(self._matched(name, _NUMBER, "give a number such as 12.5"))

    def device(self) -> int:
        """Return the number of a GPU or NIC."""
        base = self._facts.dev_base
        value = self._matched("dev", _DEVICES[base], "give a device number such as 0x2")
        return int(value, base)

    def rank(self) -> int | None:
        """Return the rank, if the element has one."""
        return self.integer("rank") if "rank" in self._element.attributes else None

    def type(self, name: str) -> str:
        """Return a path type as NCCL takes it."""
        value = self._element.attributes.get(name)
        if value is None:
            raise GraphCrashError(self._where, f"<graph> has no {name}", "NCCL crashes on it")
        return value if value in TYPES else "LOC"


def _graph(element: XmlElement, facts: VersionFacts, where: str) -> Graph:
    reader = _Reader(facts, where, element)
    return Graph(
        id=reader.integer("id"),
        pattern=reader.integer("pattern"),
        crossnic=reader.integer("crossnic"),
        nchannels=reader.integer("nchannels"),
        speedintra=reader.number("speedintra"),
        speedinter=reader.number("speedinter"),
        latencyinter=(
            reader.number("latencyinter") if "latencyinter" in element.attributes else None
        ),
        typeintra=reader.type("typeintra"),
        typeinter=reader.type("typeinter"),
        samechannels=reader.integer("samechannels"),
        channels=tuple(
            _channel(one, facts, where) for one in element.children if one.name == "channel"
        ),
        line=element.line,
    )


def _channel(element: XmlElement, facts: VersionFacts, where: str) -> Channel:
    devices = [(one.name, _Reader(facts, where, one)) for one in element.children]
    gpus = [reader for name, reader in devices if name == "gpu"]
    return Channel(
        tuple(reader.device() for reader in gpus),
        tuple(reader.device() for name, reader in devices if name == "net"),
        tuple(reader.rank() for reader in gpus),
    )


# Rings of a communicator from the channels of its nodes.


Ranks = tuple[int, ...]
SWAPPING = 2
"""The crossnic of a graph whose pairs of channels are swapped on odd nodes."""


@dataclass(frozen=True, slots=True)
class NodeRings:
    """Rank orders of one node's channels; each has all ranks of the node once."""

    orders: tuple[Ranks, ...]
    crossnic: int = 0


def connect(nodes: Sequence[NodeRings], *, channels: int) -> list[Ranks]:
    """Return the first `channels` rings as rank orders that begin at rank 0.

    A ring visits the nodes in rank order. With crossed NICs odd nodes swap the channels of each
    pair, if all channels are in pairs.
    """
    rings = []
    for channel in range(channels):
        ring: list[int] = []
        for number, node in enumerate(nodes):
            swapped = node.crossnic == SWAPPING and number % 2 and channels % 2 == 0
            ring += node.orders[channel ^ 1 if swapped else channel]
        start = ring.index(0)
        rings.append((*ring[start:], *ring[:start]))
    return rings


def repeated(rings: Sequence[Ranks], count: int) -> tuple[Ranks, ...]:
    """Return the final `count` channels: the rings over and over."""
    return tuple(rings[number % len(rings)] for number in range(count))
