"""Reader of graph files, as NCCL_GRAPH_FILE takes and NCCL_GRAPH_DUMP_FILE writes them.

The reader takes only XML that every version of NCCL reads alike.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec

from tccl_py.errors import InputError, require
from tccl_py.nccl.versions import LATEST, MAX_ATTRIBUTES, TYPES, VersionFacts, version_facts

MAX_TEXT = 8 * 1024 * 1024
"""Several times the largest file within NCCL's limit on elements."""
_MAX_DEPTH = 16

_NAME = r"[A-Za-z_][A-Za-z0-9_]{0,62}"
# Printable ASCII without quotes, markup or entities, as long as NCCL's buffer for a value.
_VALUE = r"[ !#-%(-;=?-~]{0,253}"
_ATTRIBUTE = rf" {_NAME}=(?:\"{_VALUE}\"|'{_VALUE}')"
_TOKEN = re.compile(
    r"[ \n\r]+"
    r"|<!--(?=[ \n\r])[^\0]*?-->"
    rf"|</(?P<close>{_NAME})>"
    rf"|<(?P<open>{_NAME})(?P<attributes>(?:{_ATTRIBUTE})*) ?(?P<single>/?)>"
)
_PAIR = re.compile(rf"({_NAME})=[\"']({_VALUE})")
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,8}")
_NUMBER = re.compile(r"[0-9]{1,9}(?:\.[0-9]{0,9})?(?:[eE][+-]?[0-9]{1,2})?")
_DEVICES = {
    0: re.compile(r"0x[0-9a-fA-F]{1,4}|0|[1-9][0-9]{0,3}"),
    16: re.compile(r"(?:0x)?[0-9a-fA-F]{1,4}"),
}
"""Numbers of GPUs and NICs, by the base in which a version of NCCL reads them (0: by prefix)."""


class GraphFaultError(InputError):
    """NCCL fails at init with this file, or its versions differ in reading the file.

    `crash`: NCCL accesses invalid memory, hangs, or gives wrong sums.
    """

    def __init__(self, where: str, what: str, right: str, *, crash: bool = False) -> None:
        super().__init__(where, what, right)
        self.crash = crash


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
    place: str = ""

    @property
    def orders(self) -> tuple[tuple[int, ...], ...]:
        """The GPUs of each channel, in order."""
        return tuple(channel.gpus for channel in self.channels)

    def fail(self, what: str, right: str, *, crash: bool = False) -> NoReturn:
        """Raise GraphFaultError about this graph."""
        raise GraphFaultError(self.place, f"graph {self.id} {what}", right, crash=crash)


def parse_graph_file(text: str, *, where: str, version: str = LATEST) -> dict[int, Graph]:
    """Return the graphs of a graph file or dump by id; an empty file has none.

    Raises GraphFaultError: NCCL fails at init or crashes, or its versions differ in reading; by
    line. InputError: too large.
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
    return graphs


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
        place=element.place,
    )


def _path_type(element: XmlElement, name: str) -> str:
    value = element.attributes.get(name)
    if value is None:
        element.reject(f"has no {name}", "NCCL crashes on it", crash=True)
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
    """An element with its attributes, its place as file:line, and the elements inside."""

    name: str
    attributes: dict[str, str]
    place: str = ""
    children: list[XmlElement] = field(default_factory=list)

    def named(self, name: str) -> list[XmlElement]:
        """Return the children with this name."""
        return [child for child in self.children if child.name == name]

    def reject(self, what: str, right: str, *, crash: bool = False) -> NoReturn:
        """Raise GraphFaultError about this element."""
        raise GraphFaultError(self.place, f"<{self.name}> {what}", right, crash=crash)

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
        value = self.attributes.get(name, "")
        if form.fullmatch(value) is None:
            self.reject(f"has {name}={value[:40]!r}", right)
        return value


def read_elements(text: str, facts: VersionFacts, *, where: str) -> list[XmlElement]:
    """Return the top elements of `text`, within the limits of an NCCL version; errors as above."""
    right = f"at most {MAX_TEXT} make sense"
    require(len(text) <= MAX_TEXT, where, f"has {len(text)} characters", right)
    stack, count, at, line = [XmlElement("file", {}, where)], 0, 0, 1
    while at < len(text):
        token = _TOKEN.match(text, at)
        place = f"{where}:{line}"
        if token is None:
            raise GraphFaultError(
                place,
                f"NCCL may not read {text[at : at + 40]!r}",
                "write whole tags on one line, one space before each attribute, values in quotes "
                "(at most 253 plain characters), and no tabs between tags",
            )
        if token["close"]:
            if token["close"] != stack[-1].name or len(stack) == 1:
                what = f"</{token['close']}> closes no element"
                raise GraphFaultError(place, what, f"close <{stack[-1].name}> first")
            stack.pop()
        elif token["open"]:
            count += 1
            pairs = _PAIR.findall(token["attributes"])
            element = XmlElement(token["open"], dict(pairs), place)
            _check_room(element, len(pairs), stack, count, facts)
            stack[-1].children.append(element)
            if not token["single"]:
                stack.append(element)
        at, line = token.end(), line + token[0].count("\n")
    if len(stack) > 1:
        stack[-1].reject("is not closed", "complete the file")
    return stack[0].children


def _check_room(
    element: XmlElement, pairs: int, stack: list[XmlElement], count: int, facts: VersionFacts
) -> None:
    if pairs > MAX_ATTRIBUTES or len(element.attributes) < pairs:
        what = f"has {pairs} attributes, {len(element.attributes)} of them different"
        element.reject(what, f"at most {MAX_ATTRIBUTES}, each once")
    holds = f"NCCL {facts.name} takes {facts.max_elements} elements, {_MAX_DEPTH} deep, and "
    holds += f"{facts.max_children} inside of each"
    if count > facts.max_elements or len(stack) > _MAX_DEPTH:
        element.reject(f"is element {count}, {len(stack)} deep", holds)
    parent = stack[-1]
    if len(stack) > 1 and len(parent.children) == facts.max_children:
        what = f"is one child too many of <{parent.name}>"
        element.reject(what, holds, crash=not facts.children_checked)
