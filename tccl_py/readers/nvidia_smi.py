"""What nvidia-smi and its like print -> Machine and Knowledge: `topo -m`, and texts around it.

The matrix has relations, not bridges, so the result is the smallest regular PCI tree with these
relations, and with invented bus ids (domains ffff and fffe) where the text has none. What the text
does not tell stays unknown (NIC speeds, sockets), but a GPU with a card's name has the card's
compute capability and, as an assumption, its link.

Further outputs may stand in the same text, in any order: the matrices of `nvidia-smi topo -p2p`, of
which r, w and p say which GPUs have P2P; names and bus ids of GPUs by `nvidia-smi -L`, its table,
a query as CSV, collect_env, nccl-tests, p2pBandwidthLatencyTest or lspci; the CPU by lscpu.
Where no matrix tells, P2P follows `tccl_py.model.cards`.

Ambiguities of the text are settled so:

- NODE and PHB are the same, as in NCCL: the devices hang from the same NUMA node.
- `NV#` hides the PCI relation of a pair. More rows of the matrix may decide (a NIC beside each
  GPU); else two GPUs share a NUMA node unless the affinities differ.
- SYS between devices of one NUMA affinity: the affinity wins, as NCCL reads the same file of sysfs.
- A NIC that is SYS to all makes no NUMA node: it hangs from the first.
- `NV#` does not tell a direct link from a switch. No GPU has more than 18 NVLinks, so GPUs have an
  NVLink switch if direct links to all would be more than 18 each, and direct links otherwise. (A
  switch between two GPUs is not seen; NCCL calls both NVL.)
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations, permutations, product
from pathlib import Path
from typing import Any

import msgspec

from tccl_py.errors import InputError, require, spell
from tccl_py.files import read_text
from tccl_py.model.cards import GTS, assume_p2p, card_of, has_gpu_direct
from tccl_py.model.cluster import shown
from tccl_py.model.machine import (
    CPU_VENDORS,
    MAX_GPUS,
    Gpu,
    Knowledge,
    Machine,
    Nic,
    NumaNode,
    NvLink,
    NvSwitch,
    PciBridge,
    PciLink,
    PeerAccess,
    check,
)
from tccl_py.model.symmetry import joined_groups
from tccl_py.readers.pasted import plain
from tccl_py.readers.sysfs import bus_order, normal_bus_id

MAX_DEVICES = 256
MAX_NVLINKS = 18  # NVML_NVLINK_MAX_LINKS: no GPU has more
LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")  # Relations on PCI, from near to far
_SELF = "X"
_SUPPORTED = "OK"
_STATUSES = (_SUPPORTED, "CNS", "GNS", "TNS", "NS", "DR", "U")  # Chipset, GPU, topology, regkey
_OLD_NAMES = {"SOC": "SYS"}  # Names by drivers before 2017
_GPU_LABEL = re.compile(r"GPU([0-9]{1,3})", re.ASCII)
_NVLINKED = re.compile(r"NV([1-9][0-9]{0,2})", re.ASCII)
_CELL = rf"(?:{'|'.join((_SELF, *LEVELS, *_OLD_NAMES, *_STATUSES))}|NV[1-9][0-9]{{0,2}})(?!\S)"
_HEADER = re.compile(rf"(?<!\S)GPU[0-9]{{1,3}}(?!\S)(?!\s+{_CELL})", re.ASCII)
_ROW = re.compile(
    rf"(?<!\S)(?!{_CELL})(?=[A-Za-z][^\s\d]{{0,40}}\d)\S{{1,64}}(?=\s+{_CELL})", re.ASCII
)
"""A device's label before its first cell: what stands before it is a prompt or a log's prefix."""
_RULES = frozenset("-:=+| \t")
_MARKDOWN = str.maketrans("|", " ", "*`")
_WAY = re.compile(r"topo\s+(?:-p2p|--p2p_query|--p2p)[ =]?([rwnap])\b")
_DECIDES = "rwp"  # n is of NVLinks, a of atomic operations
_PORT_RATE = re.compile(
    r"(?:^|\n)[^\n]*?(?:CA|device) '(\w{1,64})'(?:(?!\n[^\n]*(?:CA|device) ').){0,2000}?"
    r"\n\s*rate:\s*([0-9]{1,4})\b",
    re.IGNORECASE | re.DOTALL | re.ASCII,
)
"""A NIC and the rate of its first port in Gbit/s, as `ibstat` and `ibstatus` print them."""
_NIC_RATES = {32.0: 400, 16.0: 200}
"""Rates of NICs in Gbit/s that people join to GPUs of a PCIe generation, by its GT/s; else 100."""
_NIC_NAME = re.compile(r"(NIC[0-9]{1,3}): *(\S{1,64})", re.ASCII)
_TITLES = re.compile(r"(CPU Affinity|NUMA Affinity|GPU NUMA ID)")
_MATRIX = "`nvidia-smi topo -m`"
_WHOLE = "give the whole output of `nvidia-smi topo`"
_SAME = "paste outputs of one machine"

_NAME = r"(?P<name>[A-Za-z][\w ./+()-]{1,80}?)"
_MAKER = r"(?:NVIDIA|GeForce|Quadro|Tesla|TITAN) [\w ./+()-]{1,80}?"
_BUS = r"(?P<bus>(?:[0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])"
_LISTED = [
    re.compile(rf"(?<!\S){pattern}$", re.ASCII)
    for pattern in (
        # nvidia-smi -L, collect_env
        rf"GPU (?P<index>\d{{1,3}}): (?P<name>{_MAKER}|[\w ./+()-]{{2,80}}?(?= \(UUID))"
        r"(?: \(UUID: .*)?",
        rf"(?P<index>\d{{1,3}})\s+(?P<name>{_MAKER}\.*)\s+(?:On|Off|N/A)\s+{_BUS} .*",  # table
        rf"Device: (?P<index>\d{{1,3}}), {_NAME}, pciBusID: (?P<hex>[0-9a-f]{{1,2}}), "
        r"pciDeviceID: (?P<device>[0-9a-f]{1,2}), pciDomainID: ?(?P<domain>[0-9a-f]{1,8})",
        rf"(?P<index>\d{{1,3}}), (?P<name>{_MAKER})(?:,(?:.*?[ ,]{_BUS})?.*)?",  # a query
        rf"device\s+(?P<index>\d{{1,3}}) \[[\w:.]{{1,16}}\] {_NAME}",  # nccl-tests
    )
]
_UNNUMBERED = [
    re.compile(rf"(?P<name>{_MAKER})(?:,.*)?", re.ASCII),
    re.compile(
        rf"{_BUS} (?:VGA|3D|Display) .{{0,80}}NVIDIA Corporation .{{0,80}}"
        r"\[(?P<name>[^\]]{2,80})\].*",
        re.ASCII,
    ),
]
_ACCESS = re.compile(r"Device=(\d{1,3}) (CAN|CANNOT) Access Peer Device=(\d{1,3})", re.ASCII)
_CPU_LINE = re.compile(
    r"(?<!\S)(?P<key>Architecture|Vendor ID|vendor_id|CPU family|cpu family|Model|model|"
    r"Hypervisor vendor|Virtualization type)[ \t]*:[ \t]*(?P<value>\S{1,40})",
)
_CPU_NAMES = {
    "AuthenticAMD": re.compile(r"\bAMD (?:EPYC|Ryzen|Threadripper)"),
    "GenuineIntel": re.compile(r"\bIntel(?:\(R\))? ?(?:Xeon|Core)"),
}
_UNIT = re.compile(r" *\[.*?\]| *%")

_Groups = list[list[int]]  # Row numbers of devices that belong together, in order
_Line = tuple[int, str]
"""The number of a line in the text, and a part of it that is a line of its own."""


@dataclass(kw_only=True)
class _Seen:
    """What a text says of a GPU."""

    name: str = ""
    bus_id: str = ""
    link: PciLink = field(default_factory=PciLink)


@dataclass(frozen=True, kw_only=True)
class _Matrix:
    """The devices in the order of the text, with their relations."""

    where: str
    labels: list[str]
    cells: list[list[str]]
    numa: list[str]
    """NUMA affinities, "" if none."""
    gpus: dict[int, int]
    """The rows of GPUs, and the NVML index of each; all further rows are NICs."""

    def relation(self, row: int, column: int) -> str:
        """PIX to SYS; "" for NVLinked GPUs, whose relation on PCI is hidden."""
        cell = self.cells[row][column]
        return "" if _NVLINKED.fullmatch(cell) else cell

    def nvlinks(self, row: int, column: int) -> int:
        """Return the number of NVLinks between two devices."""
        match = _NVLINKED.fullmatch(self.cells[row][column])
        return int(match[1]) if match else 0

    def group_by(self, level: str) -> _Groups:
        """Return groups of devices that relations of this level or nearer ones join."""
        pairs = combinations(range(len(self.labels)), 2)
        near = [pair for pair in pairs if self.relation(*pair) in _near(level)]
        return joined_groups(near, range(len(self.labels)))

    def refusal(self, row: int, column: int, relation: str, right: str) -> InputError:
        """Return the error about the relation of two devices."""
        labels = f"{self.labels[row]} and {self.labels[column]}"
        return InputError(self.where, f"relates {labels} by {relation}", right)


def read_nvidia_smi(path: Path) -> tuple[Machine, Knowledge]:
    """Read a file with the output of `nvidia-smi topo -m`; the machine is named after it."""
    return parse_nvidia_smi(read_text(path), where=str(path))


def parse_nvidia_smi(text: str, *, where: str) -> tuple[Machine, Knowledge]:
    """Turn a text with the matrix of `nvidia-smi topo -m`, as people paste it, into a machine.

    InputError: no matrix, those of several machines, one cut off or not symmetric, relations of no
    PCI tree (names the two devices), or P2P or names of other GPUs. The stem of `where` is the
    machine's name.
    """
    text = plain(text)
    lines = list(_split_lines(text))
    matrix, supported = _parse_matrices(lines, where)
    _check_symmetry(matrix)
    seen = _gpus_seen(text.splitlines(), sorted(matrix.gpus.values()), where)
    for match in _ACCESS.finditer(text):
        supported.setdefault((int(match[1]), int(match[3])), match[2] == "CAN")
    for index in {index for pair in supported for index in pair} - {*matrix.gpus.values()}:
        raise InputError(where, f"tells P2P of GPU{index}, which {_MATRIX} lacks", _SAME)
    nic_names = {match[1]: match[2] for match in _NIC_NAME.finditer(text)}
    notes: list[str] = []
    nodes, bridges, parents = _tree(
        matrix, {level: matrix.group_by(level) for level in LEVELS[:-1]}, notes
    )
    cpu, virtual = _cpu(text)
    nics = [row for row in range(len(matrix.labels)) if row not in matrix.gpus]
    links, switches = _nvlinks(matrix)
    # GPU Direct RDMA is what servers with RDMA NICs are made for.
    direct = [bool(nics and of.name and has_gpu_direct(of.name)) for of in seen.values()]
    gpus = [
        msgspec.structs.replace(_gpu(i, parents[row], seen[i]), gdr=all(direct) and bool(direct))
        for row, i in matrix.gpus.items()
    ]
    rates = {match[1]: int(match[2]) for match in _PORT_RATE.finditer(text)}
    usual = _NIC_RATES.get(max((gpu.link.speed_gts or 0 for gpu in gpus), default=0), 100)
    labels = [(matrix.labels[row], parents[row]) for row in nics]
    machine = Machine(
        name=Path(where).stem,
        numa_nodes=tuple(msgspec.structs.replace(node, **cpu) for node in nodes),
        bridges=tuple(bridges),
        gpus=tuple(gpus),
        nics=tuple(
            # Only RDMA devices are listed.
            Nic(
                index=index,
                name=nic_names.get(label, label),
                parent=parent,
                port=1,
                speed_mbps=1000 * rates.get(nic_names.get(label, label), usual),
                gdr=gpus[0].gdr,
            )
            for index, (label, parent) in enumerate(labels)
        ),
        nvswitches=switches,
        nvlinks=links,
    )
    if untold := [nic.name for nic in machine.nics if nic.name not in rates]:
        notes.append(f"NICs of {usual} Gbit/s, {', '.join(untold[:4])} (`ibstat` tells the rate)")
    if machine.nics:
        notes.append(f"{'' if gpus[0].gdr else 'no '}GPU Direct RDMA, by the cards' names")
    reported = [
        PeerAccess(source=source, target=target, supported=yes, provenance="reported")
        for (source, target), yes in supported.items()
    ]
    assumed = [gpu.id for gpu in gpus if gpu.link.gbps and not seen[gpu.index].link.gbps]
    knowledge = msgspec.structs.replace(
        assume_p2p(check(machine, where=where), reported, virtual=virtual),
        assumed_links=tuple(assumed) or msgspec.UNSET,
        notes=tuple(notes) or msgspec.UNSET,
    )
    return machine, knowledge


def has_matrix(text: str) -> bool:
    """Return whether a plain text has the relations of a GPU, as `nvidia-smi topo -m` has them."""
    rows = (line.split() for _, line in _split_lines(text) if _ROW.match(line))
    matrix = (row for row in rows if _is_relation(row[1]) and {*row}.isdisjoint(_STATUSES))
    return any(_GPU_LABEL.fullmatch(row[0]) for row in matrix)


def name_gpus(machine: Machine, text: str) -> Machine:
    """Return a machine with the names, by index, that a plain text has for its GPUs."""
    seen: Mapping[int, _Seen] = {}
    with suppress(InputError):
        seen = _gpus_seen(text.splitlines(), range(MAX_DEVICES), "")
    cards = {index: card_of(of.name) for index, of in seen.items()}
    gpus = (
        msgspec.structs.replace(gpu, name=seen[gpu.index].name, sm=card.sm, gdr=False)
        if (card := cards.get(gpu.index))
        else gpu
        for gpu in machine.gpus
    )
    return msgspec.structs.replace(machine, gpus=tuple(gpus))


def _gpu(index: int, parent: str, seen: _Seen) -> Gpu:
    card = card_of(seen.name)
    link = seen.link
    if card is not None:
        width = link.width or card.lanes
        link = PciLink(speed_gts=link.speed_gts or card.link.speed_gts, width=width)
    return Gpu(
        index=index,
        bus_id=(seen.name and seen.bus_id) or f"ffff:{index:02x}:00.0",
        parent=parent,
        name=seen.name,
        sm=card.sm if card else None,
        link=link,
    )


def _split_lines(text: str) -> Iterator[_Line]:
    """Yield lines, each row of a matrix as one, without columns' rules, prompts and prefixes."""
    for number, written in enumerate(text.splitlines(), start=1):
        rule = written[max(written.find("|"), 0) :]
        if "-" in rule and _RULES.issuperset(rule):
            continue
        line = written.translate(_MARKDOWN) if "|" in written else written
        starts = [match.start() for match in _ROW.finditer(line)]
        # What stands before a row is a prefix, or the header where rows run together.
        head = line[: starts[0]] if starts else line
        header = _HEADER.search(head)
        if header is not None or not starts:
            yield number, head[header.start() if header else 0 :]
        ends = [*starts[1:], len(line)]
        yield from ((number, line[a:b]) for a, b in zip(starts, ends, strict=False))


def _parse_matrices(
    lines: Sequence[_Line], where: str
) -> tuple[_Matrix, dict[tuple[int, int], bool]]:
    """Return the matrix of relations, and P2P by ordered pair of GPUs where the text has it."""
    filled = [(n, line) for n, line in lines if line.strip()]
    headers = [at for at, (_, line) in enumerate(filled) if _is_header(line.split())]
    rows = {at: filled[at + 1][1].split() if at + 1 < len(filled) else [] for at in headers}
    # A sentence may begin with GPU0.
    true = [at for at in headers if _ROW.match(" ".join(rows[at][:2]))] or headers
    # The letter of the `topo -p2p` right above a header; one line may have the commands of all.
    above = {at: [_WAY.findall(line) for _, line in filled[max(0, at - 2) : at + 1]] for at in true}
    named = {at: next((way[0] for way in above[at] if len(way) == 1), "") for at in true}
    levels = {at for at in true if any(map(_is_relation, rows[at][2:]))}
    ways = [
        at
        for at in true
        if (named[at] and at not in levels) or not {*rows[at]}.isdisjoint(_STATUSES)
    ]
    starts = [at for at in true if at not in ways]
    if not starts:
        fault = "has no line that begins with GPU0, and is no machine in JSON or XML"
        raise InputError(where, fault, f"give {_MATRIX}")
    matrix, *others = (_parse_matrix(filled, at, where) for at in starts)
    for start, other in zip(starts[1:], others, strict=True):
        same = (other.labels, other.cells) == (matrix.labels, matrix.cells)
        place = f"{where}:{filled[start][0]}"
        fault = f"is the matrix of another machine than line {filled[starts[0]][0]}"
        require(same, place, fault, "which? paste one machine")
    supported: dict[tuple[int, int], bool] = {}
    unnamed: dict[tuple[int, int], bool] = {}
    for at in ways:
        told = _parse_p2p(filled, at, where)
        if not named[at]:
            # Of several without a name those of NVLinks and atomics say no where others say yes.
            unnamed |= {pair: yes or unnamed.get(pair, False) for pair, yes in told.items()}
        elif named[at] in _DECIDES:
            supported |= {pair: yes and supported.get(pair, True) for pair, yes in told.items()}
    return matrix, supported or unnamed


def _is_header(words: Sequence[str]) -> bool:
    first, second = (*words, "", "")[:2]
    is_known = _is_relation(second) or second in _STATUSES
    return _GPU_LABEL.fullmatch(first) is not None and not is_known


def _parse_p2p(lines: Sequence[_Line], start: int, where: str) -> dict[tuple[int, int], bool]:
    labels = lines[start][1].split()
    gpus = _gpu_rows(labels, f"{where}:{lines[start][0]}")
    cells = [
        _cells(words, label, labels, where=place, statuses=True)
        for label, place, words in _rows(lines, start, labels, where)
    ]
    pairs = permutations(gpus, 2)
    return {(gpus[a], gpus[b]): cells[a][b] == _SUPPORTED for a, b in pairs}


def _gpus_seen(lines: Sequence[str], gpus: Sequence[int], where: str) -> defaultdict[int, _Seen]:
    """Return what lists, tables and queries say of GPUs, by GPU index."""
    seen = defaultdict[int, _Seen](_Seen)
    unnumbered: list[_Seen] = []

    def add(index: int, name: str, bus_id: str) -> None:
        require(index in gpus, where, f"names GPU {index}, which {_MATRIX} lacks", _SAME)
        of = seen[index]
        of.name, of.bus_id = of.name or name, of.bus_id or bus_id

    for number, line in enumerate(lines):
        bare = " ".join(line.replace("|", " ").split()) if "|" in line else line.strip()
        if match := next(filter(None, (one.search(bare) for one in _LISTED)), None):
            parts = match.groupdict()
            text = parts.get("bus") or ""
            if parts.get("hex"):
                text = f"{int(parts['domain'], 16):04x}:{parts['hex']:0>2}:{parts['device']:0>2}.0"
            add(int(parts["index"]), parts["name"].strip(), normal_bus_id(text) or "")
        elif match := next(filter(None, (one.fullmatch(bare) for one in _UNNUMBERED)), None):
            bus_id = normal_bus_id(match.groupdict().get("bus") or "") or ""
            unnumbered.append(_Seen(name=match["name"].strip(), bus_id=bus_id))
        if "pcie.link" in bare:
            _read_links(lines[number : number + 1 + len(gpus)], gpus, seen)
    # A list without indices has all GPUs in order.
    listed = [one for one in unnumbered if len(unnumbered) == len(gpus) or card_of(one.name)]
    if listed and not seen:
        fault = f"names {spell(len(listed), 'GPU')}, and {_MATRIX} has {len(gpus)}"
        require(len(listed) == len(gpus), where, fault, _SAME)
        ordered = sorted(listed, key=lambda one: bus_order(one.bus_id) if one.bus_id else ())
        for index, one in zip(gpus, ordered, strict=True):
            add(index, one.name, one.bus_id)
    return seen


def _read_links(lines: Sequence[str], gpus: Sequence[int], seen: defaultdict[int, _Seen]) -> None:
    """Add the links of `nvidia-smi --query-gpu=... --format=csv`, whose first line names columns.

    At rest a link keeps its lanes and not its speed.
    """
    columns, *rows = csv.reader(lines, skipinitialspace=True)
    names = [_UNIT.sub("", column).strip() for column in columns]
    names[0] = names[0].split(" ")[-1]  # Behind a prefix
    for index, row in zip(gpus, rows, strict=False):
        cells = dict(zip(names, (_UNIT.sub("", cell) for cell in row), strict=False))
        number = cells.get("index", str(index)).split(" ")[-1]
        at = int(number) if number.isdecimal() and len(number) < 4 else -1
        if at not in gpus or len(row) != len(columns):
            return
        read = {name: int(text) for name, text in cells.items() if re.fullmatch("[0-9]{1,3}", text)}
        of = seen[at]
        of.name = of.name or cells.get("name", "")
        of.bus_id = of.bus_id or normal_bus_id(cells.get("pci.bus_id", "")) or ""
        lanes = [read.get(f"pcie.link.width.{end}", 0) for end in ("current", "max")]
        of.link = PciLink(
            speed_gts=GTS.get(read.get("pcie.link.gen.max", 0)),
            width=min((count for count in lanes if 0 < count <= 32), default=None),
        )


def _cpu(text: str) -> tuple[dict[str, Any], bool]:
    """Return fields of NUMA nodes by lscpu, cpuinfo or a CPU's name, and whether it is virtual."""
    told: dict[str, str] = {}
    for match in _CPU_LINE.finditer(text):
        told.setdefault(match["key"].lower().replace(" ", "_"), match["value"])
    vendor = told.get("vendor_id", "")
    named = [name for name, pattern in _CPU_NAMES.items() if pattern.search(text)]
    if vendor not in CPU_VENDORS.values():
        vendor = named[0] if len(named) == 1 else ""
    numbers = (("family", told.get("cpu_family", "")), ("model", told.get("model", "")))
    cpu: dict[str, Any] = {name: int(n) for name, n in numbers if re.fullmatch("[0-9]{1,4}", n)}
    if re.fullmatch(r"aarch64|ppc64le|x86_64", told.get("architecture", "")):
        cpu["arch"] = told["architecture"]
    virtual = "hypervisor_vendor" in told or told.get("virtualization_type") == "full"
    return cpu | ({"vendor": vendor} if vendor else {}), virtual


def _rows(
    lines: Sequence[_Line], start: int, labels: Sequence[str], where: str
) -> list[tuple[str, str, list[str]]]:
    """Return the label, place and words of each row below a header."""
    body = lines[start + 1 : start + 2 + len(labels)]
    fault = f"has {len(body)} rows for {len(labels)} devices"
    require(len(body) >= len(labels), where, fault, _WHOLE)
    for n, line in body[len(labels) :]:
        label, cell = (*line.split(), "")[:2]
        fits = label in labels or not (cell in _STATUSES or _is_relation(cell))
        require(fits, f"{where}:{n}", f"is a row of {shown(label)}, which has no column", _WHOLE)
    rows = zip(labels, body, strict=False)
    return [(label, f"{where}:{n}", line.split()) for label, (n, line) in rows]


def _parse_matrix(lines: Sequence[_Line], start: int, where: str) -> _Matrix:
    pieces = _TITLES.split(lines[start][1])
    labels, titles = pieces[0].split(), pieces[1::2]
    gpus = _gpu_rows(labels, f"{where}:{lines[start][0]}")
    cells, numa = [], []
    for label, place, words in _rows(lines, start, labels, where):
        cells.append(_cells(words, label, labels, where=place))
        # Empty places cannot be seen, so the first words come first. GPU NUMA ID (Grace) is always
        # written and always last; a Machine has no place for it.
        more = words[len(labels) + 1 : -1 if "GPU NUMA ID" in titles else None]
        affinities = dict(zip(titles, more, strict=False))
        cpus = affinities.get("CPU Affinity", "").replace("N/A", "")
        told = affinities.get("NUMA Affinity", "").replace("N/A", "")
        numa.append(told if "NUMA Affinity" in titles else cpus and f"CPUs {cpus}")
    return _Matrix(where=where, labels=labels, cells=cells, numa=numa, gpus=gpus)


def _is_relation(word: str) -> bool:
    return word in (_SELF, *LEVELS, *_OLD_NAMES) or _NVLINKED.fullmatch(word) is not None


def _gpu_rows(labels: Sequence[str], where: str) -> dict[int, int]:
    matches = {row: _GPU_LABEL.fullmatch(label) for row, label in enumerate(labels)}
    gpus = {row: int(match[1]) for row, match in matches.items() if match}
    fault = f"names {len(gpus)} GPUs and {len(labels) - len(gpus)} other devices"
    right = f"at most {MAX_GPUS} GPUs and {MAX_DEVICES} devices fit a node"
    require(len(labels) <= MAX_DEVICES and len(gpus) <= MAX_GPUS, where, fault, right)
    for row, label in enumerate(labels):
        if labels.count(label) > 1:
            raise InputError(where, f"names {label} twice", "every device has one column")
        if gpus.get(row, 0) >= MAX_DEVICES:
            raise InputError(where, f"names {label}", f"GPUs are numbered below {MAX_DEVICES}")
    return gpus


def _cells(
    words: Sequence[str], label: str, labels: Sequence[str], *, where: str, statuses: bool = False
) -> list[str]:
    """Return the cells of a row: relations, or the `statuses` of P2P."""
    right = f"the whole row of {label} is next"
    require(words[0] == label, where, f"begins with {shown(words[0])}", right)
    cells = [_OLD_NAMES.get(word, word) for word in words[1 : len(labels) + 1]]
    fault = f"has {len(cells)} of {label}'s {len(labels)} relations"
    require(len(cells) >= len(labels), where, fault, _WHOLE)
    for column, cell in zip(labels, cells, strict=True):
        if not (cell in (_SELF, *_STATUSES) if statuses else _is_relation(cell)):
            fault = f"relates {label} and {column} by {shown(cell)}"
            right = ", ".join((_SELF, *(_STATUSES if statuses else LEVELS)))
            raise InputError(where, fault, right if statuses else f"{right} or NV#")
    return cells


def _check_symmetry(matrix: _Matrix) -> None:
    for a, b in product(range(len(matrix.labels)), repeat=2):
        forth, back = matrix.cells[a][b], matrix.cells[b][a]
        if (forth == _SELF) != (a == b):
            raise matrix.refusal(a, b, forth, f"{_SELF} stands on the diagonal only")
        if matrix.nvlinks(a, b) and not {a, b} <= matrix.gpus.keys():
            raise matrix.refusal(a, b, "NVLinks", "NVLinks join GPUs")
        if forth != back:
            relation = f"{forth} one way, {back} the other"
            raise matrix.refusal(a, b, relation, "both ways are the same")


def _near(level: str) -> tuple[str, ...]:
    return LEVELS[: LEVELS.index(level) + 1]


def _tree(
    matrix: _Matrix, levels: dict[str, _Groups], notes: list[str]
) -> tuple[list[NumaNode], list[PciBridge], dict[int, str]]:
    """Return NUMA nodes, bridges, and the parent of each row's device."""
    for level, groups in levels.items():
        for pair in (pair for group in groups for pair in combinations(group, 2)):
            if (relation := matrix.relation(*pair)) not in ("", *_near(level)):
                words = f"{relation}, but others join them by {level} or nearer"
                raise matrix.refusal(*pair, words, "a PCI tree has no such relations")
    nodes: list[NumaNode] = []
    bridges: list[PciBridge] = []
    parents: dict[int, str] = {}
    for index, group in enumerate(_numa_groups(matrix, levels["NODE"], notes)):
        numa = _numa_id(matrix, group)
        numa = -1 if numa in {node.numa_id for node in nodes} else numa
        nodes.append(NumaNode(index=index, numa_id=numa))
        for near in levels["PXB"]:
            if near[0] in group:
                inner = [same for same in levels["PIX"] if same[0] in near]
                _hang(inner, f"C{index}", bridges, parents)
    return nodes, bridges, parents


def _numa_groups(matrix: _Matrix, groups: _Groups, notes: list[str]) -> _Groups:
    """Return groups of devices by NUMA node: by affinity, and with only NVLinks between."""
    merged: _Groups = []
    for group in groups:
        for known in merged:
            hidden = not any(matrix.relation(a, b) for a in known for b in group)
            first, second = ({matrix.numa[row] for row in rows} - {""} for rows in (known, group))
            same = first == second and len(first) == 1 and not re.search(r"\d[-,]", min(first)[:4])
            if same and not hidden:
                affinity = (
                    min(first) if min(first).startswith("CPUs") else f"NUMA node {min(first)}"
                )
                notes.append(
                    f"SYS between devices of one affinity ({affinity[:40]}): taken as one NUMA "
                    "node, as NCCL reads the affinity"
                )
            if same or (hidden and (not first or not second or first == second)):
                known.extend(group)
                break
        else:
            merged.append(list(group))
    # Unknown NUMA nodes (-1) come last; a group of NICs alone makes none.
    unknown = 2 * MAX_DEVICES
    merged.sort(key=lambda group: (_numa_id(matrix, group) % unknown, min(group)))
    near = [group for group in merged if not matrix.gpus.keys().isdisjoint(group)]
    for group in merged:
        if group not in near:
            near[0].extend(group)
            names = ", ".join(matrix.labels[row] for row in group)
            notes.append(f"{names} is SYS to all GPUs: taken as on the first NUMA node")
    return near


def _numa_id(matrix: _Matrix, group: Sequence[int]) -> int:
    texts = {matrix.numa[row] for row in group} - {""}
    (text,) = texts if len(texts) == 1 else ("",)
    is_number = re.fullmatch(r"[0-9]{1,3}", text, re.ASCII) and int(text) < MAX_DEVICES
    return int(text) if is_number else -1


def _hang(groups: _Groups, parent: str, bridges: list[PciBridge], parents: dict[int, str]) -> None:
    def bridge() -> str:
        bus_id = f"fffe:{len(bridges) % 256:02x}:{len(bridges) // 256:02x}.0"
        bridges.append(PciBridge(bus_id=bus_id, parent=parent))
        return bus_id

    alone = len(groups) == 1 and len(groups[0]) == 1
    if len(groups) > 1:
        parent = bridge()
    for group in groups:
        parents.update(dict.fromkeys(group, parent if alone else bridge()))


def _nvlinks(matrix: _Matrix) -> tuple[tuple[NvLink, ...], tuple[NvSwitch, ...]]:
    """Return NVLinks, through a switch for each set of GPUs too large for direct links."""
    links: list[NvLink] = []
    switches: list[NvSwitch] = []
    linked = (pair for pair in combinations(matrix.gpus, 2) if matrix.nvlinks(*pair))
    for island in joined_groups(linked, matrix.gpus):
        names = {row: f"G{matrix.gpus[row]}" for row in island}
        counts = {pair: matrix.nvlinks(*pair) for pair in permutations(island, 2)}
        count = max(counts.values(), default=0)
        if len({*counts.values()}) == 1 and count * (len(island) - 1) > MAX_NVLINKS:
            switch = NvSwitch(index=len(switches))
            switches.append(switch)
            links += [NvLink(source=n, target=switch.id, count=count) for n in names.values()]
        else:
            ends = ((names[a], names[b], count) for (a, b), count in counts.items() if count)
            links += [NvLink(source=a, target=b, count=count) for a, b, count in ends]
    return tuple(links), tuple(switches)
