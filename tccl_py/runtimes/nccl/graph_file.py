"""Graph files: what NCCL_GRAPH_FILE names and NCCL_GRAPH_DUMP_FILE writes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from tccl_py.files import read_text
from tccl_py.runtimes.nccl.versions import LATEST, VersionFacts, version_facts
from tccl_py.runtimes.nccl.xml_lexer import (
    MAX_TEXT,
    GraphCrashError,
    GraphRejectedError,
    Known,
    XmlElement,
    read_elements,
)

RING, TREE = 0, 1
"""Ids of the graphs this package writes and cares about."""

_CHANNEL: Known = {"net": {}, "gpu": {}}
_GRAPHS: Known = {"graphs": {"graph": {"channel": _CHANNEL}}}
_C_FLOAT = re.compile(r"[ \t]*[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_TYPES = ("LOC", "NVL", "NVB", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
_MAX_LONG = (1 << 63) - 1


class Channel(msgspec.Struct, frozen=True):
    """One channel: GPU devices in order, NICs in order (entry, then exit).

    `ranks` holds the rank a file gives a GPU, by position; this package never writes one.
    """

    gpus: tuple[int, ...]
    nets: tuple[int, ...] = ()
    ranks: tuple[int | None, ...] = ()


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """One graph; rates in GB/s a channel, types by NCCL's names; None is missing in the file."""

    id: int
    pattern: int
    crossnic: int
    nchannels: int
    speedintra: float
    speedinter: float
    latencyinter: float | None
    typeintra: str | None
    typeinter: str | None
    samechannels: int
    channels: tuple[Channel, ...]
    line: int = 0


class GraphFile(msgspec.Struct, frozen=True, kw_only=True):
    """A graph file as one version of NCCL reads it; `notes` are what a user should know of it."""

    graphs: tuple[Graph, ...] = ()
    notes: tuple[str, ...] = ()

    def graph(self, number: int) -> Graph | None:
        """The graph with this id; of several the last, as in NCCL."""
        found = [graph for graph in self.graphs if graph.id == number]
        return found[-1] if found else None


def parse_graph_file(text: str, *, where: str, version: str = LATEST) -> GraphFile:
    """Read a graph file or dump; ranks it carries are dropped, and a note says so.

    Only the ring's and the tree's graphs are kept: NCCL reads others for other algorithms.

    Raises:
        GraphRejectedError: NCCL would fail at init; place in the file and what NCCL says.
        GraphCrashError: NCCL would crash or corrupt memory.
        InputError: too large.
    """
    loaded = load_graph_file(text, where=where, version=version)
    missing = [
        graph for graph in loaded.graphs if graph.typeintra is None or graph.typeinter is None
    ]
    for graph in missing:
        name = "typeintra" if graph.typeintra is None else "typeinter"
        raise GraphCrashError(
            f"{where}:{graph.line}", f"<graph> has no {name}", "NCCL crashes on it"
        )
    ranked = any(rank is not None for g in loaded.graphs for c in g.channels for rank in c.ranks)
    if not ranked:
        return loaded
    graphs = tuple(_without_ranks(graph) for graph in loaded.graphs)
    note = "rank attributes dropped: they would override dev without a check"
    return GraphFile(graphs=graphs, notes=(*loaded.notes, note))


def read_graph_file(path: Path, *, version: str = LATEST) -> GraphFile:
    """Read a graph file from disk; errors as `parse_graph_file`."""
    return parse_graph_file(read_text(path, limit=MAX_TEXT), where=str(path), version=version)


def load_graph_file(text: str, *, where: str, version: str) -> GraphFile:
    """What NCCL has in its hands after reading the file, ranks included.

    Raises:
        GraphRejectedError, GraphCrashError, InputError: as `parse_graph_file`, missing types apart.
    """
    facts = version_facts(version)
    roots = read_elements(text, _GRAPHS, facts, where=where)
    for root in roots:
        number = _integer(root, "version", where)
        if number != 1:
            _reject(root, where, f"XML Graph has wrong version {number}, 1 needed")
    notes = ("there is no graph in it",) if not roots or not roots[0].children else ()
    graphs = []
    for element in roots[0].children if roots else ():
        if _integer(element, "id", where) in (RING, TREE):
            graphs.append(_graph(element, facts, where))
    return GraphFile(graphs=tuple(graphs), notes=notes)


def _without_ranks(graph: Graph) -> Graph:
    channels = tuple(Channel(channel.gpus, channel.nets) for channel in graph.channels)
    return msgspec.structs.replace(graph, channels=channels)


def _graph(element: XmlElement, facts: VersionFacts, where: str) -> Graph:
    """Attributes in the order NCCL asks for them: the first missing one is the one it names."""
    crossnic = _integer(element, "crossnic", where)
    pattern = _integer(element, "pattern", where)
    nchannels = _integer(element, "nchannels", where)
    speedintra = _number(element, "speedintra", where)
    speedinter = _number(element, "speedinter", where)
    typeintra, typeinter = (_type(element, name) for name in ("typeintra", "typeinter"))
    known = typeintra is not None and typeinter is not None
    return Graph(
        id=_integer(element, "id", where),
        pattern=pattern,
        crossnic=crossnic,
        nchannels=nchannels,
        speedintra=speedintra,
        speedinter=speedinter,
        latencyinter=(
            _number(element, "latencyinter", where)
            if "latencyinter" in element.attributes
            else None
        ),
        typeintra=typeintra,
        typeinter=typeinter,
        # NCCL has crashed before it could miss samechannels or a dev.
        samechannels=_integer(element, "samechannels", where) if known else 0,
        channels=(tuple(_channel(one, facts, where) for one in element.children) if known else ()),
        line=element.line,
    )


def _channel(element: XmlElement, facts: VersionFacts, where: str) -> Channel:
    gpus, nets, ranks = [], [], []
    for device in element.children:
        number = c_integer(_attribute(device, "dev", where), facts.dev_base)
        if device.name == "net":
            nets.append(number)
        else:
            gpus.append(number)
            text = device.attributes.get("rank")
            ranks.append(None if text is None else c_integer(text, 0))
    return Channel(tuple(gpus), tuple(nets), tuple(ranks))


def _reject(element: XmlElement, where: str, reason: str) -> NoReturn:
    raise GraphRejectedError(f"{where}:{element.line}", reason, f"correct <{element.name}>")


def _attribute(element: XmlElement, name: str, where: str) -> str:
    if name not in element.attributes:
        _reject(element, where, f"Attribute {name} of node {element.name} not found")
    return element.attributes[name]


def _integer(element: XmlElement, name: str, where: str) -> int:
    # NCCL keeps these in 32 bits.
    value = c_integer(_attribute(element, name, where), 0)
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def _number(element: XmlElement, name: str, where: str) -> float:
    match = _C_FLOAT.match(_attribute(element, name, where))
    value = float(match[0]) if match else 0.0
    return value if math.isfinite(value) else 0.0


def _type(element: XmlElement, name: str) -> str | None:
    """The path type; a name NCCL does not know silently becomes LOC."""
    text = element.attributes.get(name)
    return text if text is None or text in _TYPES else "LOC"


def c_integer(text: str, base: int) -> int:
    """What C's strtol makes of the beginning of `text`; 0 if there is no number.

    >>> c_integer("10", 16), c_integer("0x10", 16), c_integer("10", 0), c_integer("010", 0)
    (16, 16, 10, 8)
    """
    text = text.strip(" \t\n\r\v\f")
    sign = -1 if text.startswith("-") else 1
    digits = text[1:] if text[:1] in ("+", "-") else text
    prefixed = re.match(r"0[xX](?=[0-9a-fA-F])", digits)
    if base == 0:
        base = 16 if prefixed else 8 if digits.startswith("0") else 10
    if prefixed and base == 16:
        digits = digits[2:]
    match = re.match(_digits(base), digits)
    value = int(match[0], base) if match else 0
    return max(-_MAX_LONG - 1, min(sign * value, _MAX_LONG))


def _digits(base: int) -> str:
    return {8: "[0-7]+", 10: "[0-9]+", 16: "[0-9a-fA-F]+"}[base]


def channel_orders(graph: Graph) -> Sequence[tuple[int, ...]]:
    """GPU devices of the channels that NCCL uses."""
    return [channel.gpus for channel in graph.channels[: max(0, graph.nchannels)]]
