"""Reader of graph files, as NCCL_GRAPH_FILE takes and NCCL_GRAPH_DUMP_FILE writes them.

Source: ncclTopoGetGraphFromXml and its callees (graph/search.cc) of NCCL 2.30.7.
"""

from __future__ import annotations

from typing import NoReturn

import msgspec
from msgspec.structs import replace

from tccl_py.nccl.versions import ASSUMED, TYPES, VersionFacts, version_facts
from tccl_py.nccl.xml_reader import GraphFaultError, XmlElement, read_elements

_INSIDE = {
    "": ("graphs",),
    "graphs": ("graph",),
    "graph": ("channel",),
    "channel": ("net", "gpu"),
}
_IDS = range(5)
"""Graphs that NCCL asks for: ring, tree, and those of CollNet and NVLS."""


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
