"""What a log of NCCL says that it did (NCCL_DEBUG=INFO; INIT, GRAPH, ENV and TUNING if there).

The machine is the one that NCCL printed (ncclTopoPrint, graph/topo.cc): GB/s are by its count, 24.0
for 16 lanes of PCI Express 4. Lines may have any prefix, and several ranks' lines may be mixed; a
log that is cut gives what is there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.cards import GTS, link_words
from tccl_py.model.machine import (
    MAX_GPUS,
    Gpu,
    Machine,
    NumaNode,
    NvLink,
    NvSwitch,
    PciBridge,
    PciLink,
    check,
)
from tccl_py.nccl.communicators import CHOICE, VERSION, LoggedConnection, parse_log
from tccl_py.nccl.versions import pci_gbps
from tccl_py.workloads.nccl_log import COMMUNICATOR, is_torn

_NCCL = re.compile(r"NCCL (?:INFO|WARN|version \d)")
_SET = re.compile(r"(NCCL_[A-Z0-9_]{1,60}) set by (?P<by>environment|\S{1,200}) to (\S{1,200})")
_SYSTEM = re.compile(r"NCCL INFO === System")
_NODE = re.compile(
    r"NCCL INFO (?P<indent> *)(?:\+ (?P<link>[A-Z0-9]{2,4})\[(?P<gbps>\d{1,6}\.\d)\] - )?"
    r"(?P<kind>CPU|PCI|GPU|NIC|NET|NVS|GIN)/(?P<id>(?:[0-9a-f]{1,3}-)?[0-9a-f]{1,16})"
    r"(?: \((?P<more>[\w/.-]{1,60})\))?\s*$",
    re.ASCII,
)
_PATTERN = re.compile(r"Could not find a path for pattern (\d), falling back to simple order")
_TREE = re.compile(r"NCCL INFO (?:Trees \[|Connected all trees)")
_NETWORK = re.compile(r"NCCL INFO Using network (\S[^\n]{0,60})")
_PLUGIN = re.compile(
    r"NCCL INFO (?:(?P<kind>NET|TUNER|ENV|PROFILER)/Plugin ?:? ?(?:Loaded|Using|Successfully)"
    r"|(?P<whose>Initialized [A-Z]{2,9} plugin)) ?(?P<name>[^\n]{1,80})"
)
_WARN = re.compile(r"NCCL WARN (?P<text>[^\n]{1,300})")
_ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
_PROTOCOLS = ("LL", "LL128", "Simple")
_ARCHS = {"1": "x86_64", "2": "ppc64le", "3": "aarch64"}
_VENDORS = {"1": "GenuineIntel", "2": "AuthenticAMD", "3": "Zhaoxin"}
_NVLINK_GBPS = 20.0
_PRINTED = 0.05
"""NCCL prints a digit behind the point."""
_MOST_NODES, _MOST_TRIED = 1000, 8
_MOST_WARNINGS = 20
_MOST_RANKS = 1 << 12
Ring = tuple[int, ...]


class Variable(msgspec.Struct, frozen=True, kw_only=True):
    """A variable that NCCL read, and whether the environment or a file has it."""

    name: str
    value: str
    by: str


class LoggedHop(
    msgspec.Struct, frozen=True, kw_only=True, rename={"source": "from", "target": "to"}
):
    """A hop between two ranks by NCCL's name of the transport, as `SHM/direct`."""

    source: int
    target: int
    via: str
    channels: int


class LoggedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """NCCL's choice for collectives of a size."""

    collective: str
    bytes: int
    algorithm: str
    protocol: str
    channels: int | None


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """A communicator whose creation did not end on all ranks."""

    ranks: int
    """Ranks that it has."""
    absent: tuple[int, ...]
    """Ranks of which the log has no line that they began: the others wait for them."""
    begun: tuple[int, ...]
    """Ranks that began and did not reach Init COMPLETE."""


class LogReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a log says; what it lacks is empty."""

    version: str
    ranks: int
    """Of the largest communicator."""
    hosts: tuple[str, ...]
    variables: tuple[Variable, ...]
    machine: Machine | None
    """As NCCL saw it; its GPUs are numbered by rank."""
    uplinks_gbps: dict[str, float]
    """By rank, the slowest PCI link from the GPU to its CPU, by NCCL's count."""
    nets_gbps: dict[str, float]
    """By NIC of the first host, its port by NCCL's count."""
    rings: tuple[Ring, ...]
    """Ranks by channel."""
    channels: int
    hops: tuple[LoggedHop, ...]
    """Those of the rings, or all that there are without rings."""
    simple_order: tuple[int, ...]
    """Patterns for which the graph search failed: 4 is ring, 1 to 3 tree."""
    tree: bool
    """Whether trees were connected."""
    choices: tuple[LoggedChoice, ...]
    network: str
    plugins: tuple[str, ...]
    warnings: tuple[str, ...]
    unfinished: tuple[RankState, ...]
    torn: int
    """Lines of one rank inside those of another: what they say is lost."""

    @property
    def values(self) -> dict[str, str]:
        """The variables by name."""
        return {one.name: one.value for one in self.variables}


def split_log(text: str) -> tuple[str, str]:
    """Return the lines of NCCL's log in a text, and the text with these lines empty."""
    if _NCCL.search(text) is None:
        return "", text
    lines = text.splitlines()
    of_nccl = [_NCCL.search(line) is not None for line in lines]
    log = (line for line, own in zip(lines, of_nccl, strict=True) if own)
    rest = ("" if own else line for line, own in zip(lines, of_nccl, strict=True))
    return "\n".join(log), "\n".join(rest)


def read_report(text: str) -> LogReport:
    """Return what the lines of NCCL in a text say (InputError: more than NCCL's reader takes)."""
    joined, _ = split_log(text)
    lines = joined.splitlines()
    ranks, hosts, unfinished = _communicators(lines)
    rings, connections = _rings(lines, ranks)
    machine, uplinks, nets = _machine(lines)
    seen = {
        match[1]: Variable(name=match[1], value=match[3].rstrip("."), by=match["by"])
        for match in _SET.finditer(joined)
    }
    version = VERSION.search(joined)
    network = _NETWORK.search(joined)
    plugins = (f"{m['kind'] or m['whose']} {m['name']}".strip() for m in _PLUGIN.finditer(joined))
    warnings = dict.fromkeys(match["text"].strip() for match in _WARN.finditer(joined))
    return LogReport(
        version=version[1] if version else "",
        ranks=ranks or max(map(len, rings), default=0),
        hosts=hosts,
        variables=tuple(seen.values()),
        machine=machine,
        uplinks_gbps=uplinks,
        nets_gbps=nets,
        rings=rings,
        channels=len(rings),
        hops=_hops(rings, connections),
        simple_order=tuple(sorted({int(m[1]) for m in _PATTERN.finditer(joined)})),
        tree=_TREE.search(joined) is not None,
        choices=tuple(_choices(joined)),
        network=network[1].strip() if network else "",
        plugins=tuple(dict.fromkeys(plugins)),
        warnings=tuple(warnings)[:_MOST_WARNINGS],
        unfinished=unfinished,
        torn=sum(is_torn(line.encode("utf-8", "replace")) for line in lines),
    )


def _communicators(lines: Sequence[str]) -> tuple[int, tuple[str, ...], tuple[RankState, ...]]:
    """Return the ranks of the largest communicator, all hosts, and communicators not finished."""
    begun: dict[object, set[int]] = {}
    ended: dict[object, set[int]] = {}
    sizes: dict[object, int] = {}
    hosts: dict[str, None] = {}
    for line in lines:
        match = COMMUNICATOR.search(line.encode("utf-8", "replace"))
        if match is None:
            continue
        size = int(match["ranks"])
        # An older NCCL logs no id: its communicators are told by their size alone.
        key = match["id"] or (size, match["parent"], match["split"], match["color"])
        sizes[key] = size
        hosts[match["host"].decode("utf-8", "replace")] = None
        state = ended if match["state"] == b"COMPLETE" else begun
        state.setdefault(key, set()).add(int(match["rank"]))
    states = []
    for key, size in sizes.items():
        done = ended.get(key, set())
        started = begun.get(key, set()) | done
        if waiting := started - done:
            # Where one rank ended all had come, also those whose log is not here.
            every = range(0 if done else min(size, _MOST_RANKS))
            absent = tuple(rank for rank in every if rank not in started)
            states.append(RankState(ranks=size, absent=absent, begun=tuple(sorted(waiting))))
    return max(sizes.values(), default=0), tuple(hosts), tuple(states)


def _rings(lines: Sequence[str], ranks: int) -> tuple[tuple[Ring, ...], list[LoggedConnection]]:
    """Return the rings of the largest communicator, if they are whole, and all connections."""
    links = [line.replace("via direct shared memory", "via SHM/direct") for line in lines]
    try:
        log = parse_log("\n".join(links), where="the log")
    except InputError:
        # Channels that are cut or mixed say nothing of rings; connections stand for themselves.
        links = [line for line in links if " via " in line]
        return (), list(parse_log("\n".join(links), where="the log").connections)
    found = [rings for rings in log.communicators if len(rings[0]) == ranks]
    found = found or sorted(log.communicators, key=lambda rings: -len(rings[0]))
    return (found[0] if found else ()), list(log.connections)


def _hops(rings: Sequence[Ring], connections: Sequence[LoggedConnection]) -> tuple[LoggedHop, ...]:
    used = {(a, b) for ring in rings for a, b in zip(ring, (*ring[1:], ring[0]), strict=True)}
    counts = Counter(
        (link.source, link.target, link.via)
        for link in connections
        if not used or (link.source, link.target) in used
    )
    return tuple(
        LoggedHop(source=source, target=target, via=via, channels=count)
        for (source, target, via), count in sorted(counts.items())
    )


def _choices(text: str) -> Iterator[LoggedChoice]:
    """Yield NCCL's choices by size, each once; older releases write numbers."""
    seen = set()
    for match in CHOICE.finditer(text):
        algorithm, protocol = match["algorithm"], match["protocol"]
        with suppress(ValueError, IndexError):
            algorithm = _ALGORITHMS[int(algorithm)]
        with suppress(ValueError, IndexError):
            protocol = _PROTOCOLS[int(protocol)]
        channels = int(match["last"]) - int(match["first"]) + 1 if match["last"] else None
        choice = LoggedChoice(
            collective=match["name"],
            bytes=int(match["bytes"]),
            algorithm=algorithm,
            protocol=protocol,
            channels=channels,
        )
        if choice not in seen:
            seen.add(choice)
            yield choice


# The machine as NCCL printed it.


def _machine(lines: Sequence[str]) -> tuple[Machine | None, dict[str, float], dict[str, float]]:
    """Return the first machine that is printed whole, its GPUs' slowest links by rank, its nets."""
    starts = [number for number, line in enumerate(lines) if _SYSTEM.search(line)]
    for start in starts[:_MOST_TRIED]:
        # Other ranks' lines stand between.
        who = lines[start].split("NCCL INFO")[0].split()[-2:]
        own = (
            line for line in lines[start + 1 :] if line.split("NCCL INFO")[0].split()[-2:] == who
        )
        nodes: list[re.Match[str]] = []
        for line in own:
            match = _NODE.search(line)
            if match is None or len(nodes) > _MOST_NODES:
                break
            nodes.append(match)
        with suppress(InputError, ValueError, msgspec.ValidationError):
            nets = (node for node in nodes if node["kind"] == node["link"] == "NET")
            return (*_build(nodes), {f"NET/{node['id']}": float(node["gbps"]) for node in nets})
    return None, {}, {}


def _build(nodes: Sequence[re.Match[str]]) -> tuple[Machine, dict[str, float]]:
    """Return a machine from lines of its tree, where the indent of a line is its depth."""
    cpus: list[NumaNode] = []
    bridges: list[PciBridge] = []
    gpus: dict[str, Gpu] = {}
    uplinks: dict[str, float] = {}
    links: list[tuple[str, str, float]] = []
    above: list[tuple[int, str, float, str]] = []  # Depth, id, slowest link, kind
    for node in nodes:
        kind, depth, gbps = node["kind"], len(node["indent"]), float(node["gbps"] or 0)
        while above and (above[-1][0] >= depth or node["link"] is None):
            above.pop()
        if kind == "CPU" and node["link"] is None:
            arch, vendor, _ = (node["more"] or "//").split("/")[:3]
            number = int(node["id"].split("-")[-1], 16)
            cpu = NumaNode(
                index=len(cpus),
                numa_id=number if number < 1 << 20 else -1,
                arch=_ARCHS.get(arch, "x86_64"),
                vendor=_VENDORS.get(vendor, ""),
            )
            cpus.append(cpu)
            above.append((-1, cpu.id, float("inf"), kind))
        elif kind in ("PCI", "GPU") and node["link"] == "PCI" and above:
            parent, least = above[-1][1], min(above[-1][2], gbps)
            bus_id = _bus_id(node["id"].split("-")[-1])
            # The link of most lanes that NCCL counts so.
            link = max(_links_of(gbps), key=lambda link: link.width or 0, default=PciLink())
            if kind == "PCI":
                bridges.append(PciBridge(bus_id=bus_id, parent=parent, link=link))
                above.append((depth, bus_id, least, kind))
                continue
            rank = (node["more"] or "0").split("/")[0]
            gpu = Gpu(index=int(rank), bus_id=bus_id, parent=parent, link=link, gdr=True)
            gpus[node["id"]] = gpu
            uplinks[rank] = least
            above.append((depth, node["id"], least, kind))
        elif node["link"] == "NVL" and above and above[-1][3] == "GPU":
            links.append((above[-1][1], node["id"] if kind == "GPU" else "", gbps))
    machine = Machine(
        name="the machine of the log",
        numa_nodes=tuple(cpus),
        bridges=tuple(bridges),
        gpus=tuple(sorted(gpus.values(), key=lambda gpu: gpu.index))[:MAX_GPUS],
        nvswitches=(NvSwitch(index=0),) if any(not target for _, target, _ in links) else (),
        nvlinks=tuple(
            NvLink(
                source=gpus[source].id,
                target=gpus[target].id if target else "S0",
                count=max(1, round(gbps / _NVLINK_GBPS)),
            )
            for source, target, gbps in links
            if not target or target in gpus
        ),
    )
    return check(machine, where="the log"), uplinks


def _bus_id(text: str) -> str:
    """Return a bus id of NCCL's number.

    >>> _bus_id("41000"), _bus_id("1000c0")
    ('0000:41:00.0', '0001:00:0c.0')
    """
    digits = f"{int(text, 16):09x}"
    return f"{digits[:-5]:0>4}:{digits[-5:-3]}:{digits[-3:-1]}.{int(digits[-1], 16) % 8}"


def _links_of(gbps: float) -> list[PciLink]:
    links = (PciLink(speed_gts=gts, width=n) for gts in GTS.values() for n in (16, 8, 4, 2, 1))
    return [link for link in links if abs(pci_gbps(link) - gbps) < _PRINTED]


def fits_of(gbps: float) -> list[str]:
    """Return the lanes of each generation that NCCL counts as so many GB/s.

    >>> fits_of(1.5)
    ['PCIe 1 x8', 'PCIe 2 x4', 'PCIe 3 x2', 'PCIe 4 x1']
    """
    return [link_words(link) for link in _links_of(gbps)]
