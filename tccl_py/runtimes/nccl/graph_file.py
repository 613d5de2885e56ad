"""Graph files: what NCCL_GRAPH_FILE names and NCCL_GRAPH_DUMP_FILE writes."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from tccl_py.files import read_text
from tccl_py.runtimes.nccl.versions import LATEST, VersionFacts, version_facts
from tccl_py.runtimes.nccl.xml_lexer import (
    MAX_TEXT,
    GraphCrashError,
    GraphRejectedError,
    XmlElement,
    read_elements,
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
