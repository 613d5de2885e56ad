"""The text of `nvidia-smi topo -m` -> Machine and Knowledge.

The matrix has relations, not bridges, so the result is the smallest regular PCI tree with these
relations, and with invented bus ids (domains ffff and fffe). Values missing in the
text stay unknown: link speeds, compute capability, NIC speeds, sockets, CPUs of NUMA nodes.

Further outputs may stand in the same text, in any order: the matrices of `nvidia-smi topo -p2p r`
and `w` say which GPUs have P2P, `nvidia-smi -L` or a query of `name` names the GPUs. Where no
matrix tells, GPUs without NVLink are assumed to have no P2P, unless all have names of product lines
with P2P.

Three ambiguities of the text are settled so:

- NODE and PHB are the same, as in NCCL: the devices hang from the same NUMA node.
- `NV#` hides the PCI relation of a pair. More rows of the matrix may decide (a NIC beside each
  GPU); else two GPUs share a NUMA node unless the NUMA affinities differ.
- `NV#` does not tell a direct link from a switch. No GPU has more than 18 NVLinks, so GPUs have an
  NVLink switch if direct links to all would be more than 18 each, and direct links otherwise. (A
  switch between two GPUs is not seen; NCCL calls both NVL.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product
from pathlib import Path

from tccl_py.errors import InputError, counted, require
from tccl_py.files import read_text
from tccl_py.model.cluster import shown
from tccl_py.model.machine import (
    MAX_GPUS,
    Gpu,
    Knowledge,
    Machine,
    Nic,
    NumaNode,
    NvLink,
    NvSwitch,
    PciBridge,
    PeerAccess,
    check,
)
from tccl_py.model.symmetry import joined_groups
from tccl_py.readers.live import WITHOUT_P2P

MAX_DEVICES = 256
MAX_NVLINKS = 18  # NVML_NVLINK_MAX_LINKS: no GPU has more
LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")  # Relations on PCI, from near to far
_GPU_LABEL = re.compile(r"GPU([0-9]{1,3})", re.ASCII)
_GPU_NAME = re.compile(
    r"GPU ([0-9]{1,3}): (?P<listed>[\w ./+-]{1,80}) \(UUID: .*"
    r"|(?:([0-9]{1,3}), )?(?P<queried>(?:NVIDIA|GeForce|Quadro|Tesla|TITAN) [\w ./+-]{1,80})"
    r"(?:,.*)?",
    re.ASCII,
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NIC_NAME = re.compile(r"(NIC[0-9]{1,3}): *(\S{1,64})", re.ASCII)
_TITLES = re.compile(r"(CPU Affinity|NUMA Affinity|GPU NUMA ID)")
_NVLINKED = re.compile(r"NV([1-9][0-9]{0,2})", re.ASCII)
_OLD_NAMES = {"SOC": "SYS"}  # Names by drivers before 2017
_SELF = "X"
_MATRIX = "`nvidia-smi topo -m`"
_WHOLE = "give the whole output of `nvidia-smi topo`"
_SAME = "paste outputs of one machine"
_SUPPORTED = "OK"
_STATUSES = (_SUPPORTED, "CNS", "GNS", "TNS", "NS", "DR", "U")  # Chipset, GPU, topology, regkey

_Groups = list[list[int]]  # Row numbers of devices that belong together, in order


@dataclass(frozen=True, kw_only=True)
class _Matrix:
    """The devices in the order of the text, with their relations and NUMA affinities ("" if none).

    `gpus` are the rows of GPUs, and the NVML index of each; all further rows are NICs.
    """

    where: str
    labels: list[str]
    cells: list[list[str]]
    numa: list[str]
    gpus: dict[int, int]

    def relation(self, row: int, column: int) -> str:
        """PIX to SYS; "" for NVLinked GPUs, whose relation on PCI is hidden."""
        cell = self.cells[row][column]
        return "" if _NVLINKED.fullmatch(cell) else cell

    def nvlinks(self, row: int, column: int) -> int:
        """Return the number of NVLinks between two devices."""
        match = _NVLINKED.fullmatch(self.cells[row][column])
        return int(match[1]) if match else 0

    def joined(self, level: str) -> _Groups:
        """Return groups of devices that relations of this level or nearer ones join."""
        pairs = combinations(range(len(self.labels)), 2)
        near = [pair for pair in pairs if self.relation(*pair) in _near(level)]
        return joined_groups(near, range(len(self.labels)))

    def refused(self, row: int, column: int, relation: str, right: str) -> InputError:
        """Return the error about the relation of two devices."""
        labels = f"{self.labels[row]} and {self.labels[column]}"
        return InputError(self.where, f"relates {labels} by {relation}", right)


def read_nvidia_smi(path: Path) -> tuple[Machine, Knowledge]:
    """Read a file with the output of `nvidia-smi topo -m`; the machine is named after it."""
    return parse_nvidia_smi(read_text(path), where=str(path))


def parse_nvidia_smi(text: str, *, where: str) -> tuple[Machine, Knowledge]:
    """Turn the text of `nvidia-smi topo -m`, with or without prompts or colours, into a machine.

    InputError: no matrix, one cut off or not symmetric, relations of no PCI tree (names the two
    devices), or P2P or names of other GPUs. The stem of `where` is the machine's name.
    """
    text = _COLOUR.sub("", text)
    lines = text.splitlines()
    matrix, supported = _parse_matrices(lines, where)
    _check_symmetry(matrix)
    names = _gpu_names(lines, sorted(matrix.gpus.values()), where)
    nic_names = {match[1]: match[2] for match in _NIC_NAME.finditer(text)}
    nodes, bridges, parents = _tree(matrix, {level: matrix.joined(level) for level in LEVELS[:-1]})
    nics = [row for row in range(len(matrix.labels)) if row not in matrix.gpus]
    links, switches = _nvlinks(matrix)
    gpus = [
        Gpu(index=i, bus_id=f"ffff:{i:02x}:00.0", parent=parents[row], name=names.get(i, ""))
        for row, i in matrix.gpus.items()
    ]
    labels = [(matrix.labels[row], parents[row]) for row in nics]
    machine = Machine(
        name=Path(where).stem,
        numa_nodes=tuple(nodes),
        bridges=tuple(bridges),
        gpus=tuple(gpus),
        nics=tuple(
            # Only RDMA devices are listed.
            Nic(index=index, name=nic_names.get(label, label), parent=parent, port=1)
            for index, (label, parent) in enumerate(labels)
        ),
        nvswitches=switches,
        nvlinks=links,
    )
    lacking = [not gpu.name or any(line in gpu.name for line in WITHOUT_P2P) for gpu in gpus]
    access = [
        PeerAccess(source=source, target=target, supported=yes, provenance="reported")
        for (source, target), yes in supported.items()
    ]
    knowledge = Knowledge(peer_access_default=not any(lacking), peer_access=tuple(access))
    return check(machine, where=where), knowledge


def _parse_matrices(
    lines: Sequence[str], where: str
) -> tuple[_Matrix, dict[tuple[int, int], bool]]:
    """Return the matrix of relations, and P2P by ordered pair of GPUs where the text has it."""
    headers = [number for number, line in enumerate(lines) if _is_header(line.split())]
    rows = {n: next((line.split() for line in lines[n + 1 :] if line.strip()), []) for n in headers}
    ways = [number for number, row in rows.items() if not {*row}.isdisjoint(_STATUSES)]
    start = next((number for number in headers if number not in ways), None)
    if start is None:
        fault = "has no line that begins with GPU0, and is no machine in JSON or XML"
        raise InputError(where, fault, f"give {_MATRIX}")
    matrix = _parse_matrix(lines, start, where)
    supported: dict[tuple[int, int], bool] = {}
    for way in ways:
        for pair, yes in _parse_p2p(lines, way, where).items():
            supported[pair] = yes and supported.get(pair, True)
    for index in {index for pair in supported for index in pair} - {*matrix.gpus.values()}:
        raise InputError(where, f"tells P2P of GPU{index}, which {_MATRIX} lacks", _SAME)
    return matrix, supported


def _is_header(words: Sequence[str]) -> bool:
    first, second = (*words, "", "")[:2]
    is_known = _is_relation(second) or second in _STATUSES
    return _GPU_LABEL.fullmatch(first) is not None and not is_known


def _parse_p2p(lines: Sequence[str], start: int, where: str) -> dict[tuple[int, int], bool]:
    labels = lines[start].split()
    gpus = _gpu_rows(labels, f"{where}:{start + 1}")
    cells = [
        _cells(words, label, labels, where=place, statuses=True)
        for label, place, words in _rows(lines, start, labels, where)
    ]
    pairs = permutations(gpus, 2)
    return {(gpus[a], gpus[b]): cells[a][b] == _SUPPORTED for a, b in pairs}


def _gpu_names(lines: Sequence[str], gpus: Sequence[int], where: str) -> dict[int, str]:
    """Return names by GPU index, by `nvidia-smi -L`, or by a query with or without indices."""
    matches = [match for line in lines if (match := _GPU_NAME.fullmatch(line.strip()))]
    listings = [(match[1] or match[3], match["listed"] or match["queried"]) for match in matches]
    names = {int(index): name for index, name in listings if index}
    # A list without indices has all GPUs in order.
    if listed := [name for index, name in listings if not index]:
        names |= dict(zip(gpus, listed, strict=False))
        fits = len(listed) == len(gpus)
        fault = f"names {counted(len(listed), 'GPU')}, and {_MATRIX} has {len(gpus)}"
        require(fits, where, fault, _SAME)
    for index in names:
        require(index in gpus, where, f"names GPU {index}, which {_MATRIX} lacks", _SAME)
    return names


def _rows(
    lines: Sequence[str], start: int, labels: Sequence[str], where: str
) -> list[tuple[str, str, list[str]]]:
    """Return the label, place and words of each row below a header."""
    body = [(n, line) for n, line in enumerate(lines[start + 1 :], start + 2) if line.strip()]
    fault = f"has {len(body)} rows for {len(labels)} devices"
    require(len(body) >= len(labels), where, fault, _WHOLE)
    for n, line in body[len(labels) :][:1]:
        label, cell = (*line.split(), "")[:2]
        fits = label in labels or not (cell in _STATUSES or _is_relation(cell))
        require(fits, f"{where}:{n}", f"is a row of {shown(label)}, which has no column", _WHOLE)
    rows = zip(labels, body, strict=False)
    return [(label, f"{where}:{n}", line.split()) for label, (n, line) in rows]


def _parse_matrix(lines: Sequence[str], start: int, where: str) -> _Matrix:
    pieces = _TITLES.split(lines[start])
    labels, titles = pieces[0].split(), pieces[1::2]
    gpus = _gpu_rows(labels, f"{where}:{start + 1}")
    cells, numa = [], []
    for label, place, words in _rows(lines, start, labels, where):
        cells.append(_cells(words, label, labels, where=place))
        # Empty places cannot be seen, so the first words come first. GPU NUMA ID (Grace) is always
        # written and always last; a Machine has no place for it.
        more = words[len(labels) + 1 : -1 if "GPU NUMA ID" in titles else None]
        affinities = dict(zip(titles, more, strict=False))
        numa.append(affinities.get("NUMA Affinity", "").replace("N/A", ""))
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
            raise matrix.refused(a, b, forth, f"{_SELF} stands on the diagonal only")
        if matrix.nvlinks(a, b) and not {a, b} <= matrix.gpus.keys():
            raise matrix.refused(a, b, "NVLinks", "NVLinks join GPUs")
        if forth != back:
            relation = f"{forth} one way, {back} the other"
            raise matrix.refused(a, b, relation, "both ways are the same")


def _near(level: str) -> tuple[str, ...]:
    return LEVELS[: LEVELS.index(level) + 1]


def _tree(
    matrix: _Matrix, levels: dict[str, _Groups]
) -> tuple[list[NumaNode], list[PciBridge], dict[int, str]]:
    """Return NUMA nodes, bridges, and the parent of each row's device."""
    for level, groups in levels.items():
        for pair in (pair for group in groups for pair in combinations(group, 2)):
            if (relation := matrix.relation(*pair)) not in ("", *_near(level)):
                words = f"{relation}, but others join them by {level} or nearer"
                raise matrix.refused(*pair, words, "a PCI tree has no such relations")
    nodes: list[NumaNode] = []
    bridges: list[PciBridge] = []
    parents: dict[int, str] = {}
    for index, group in enumerate(_numa_groups(matrix, levels["NODE"])):
        numa = _numa_id(matrix, group)
        numa = -1 if numa in {node.numa_id for node in nodes} else numa
        nodes.append(NumaNode(index=index, numa_id=numa))
        for near in levels["PXB"]:
            if near[0] in group:
                inner = [same for same in levels["PIX"] if same[0] in near]
                _hang(inner, f"C{index}", bridges, parents)
    return nodes, bridges, parents


def _numa_groups(matrix: _Matrix, groups: _Groups) -> _Groups:
    """Return groups of devices by NUMA node, merging groups with only NVLinks between."""
    merged: _Groups = []
    for group in groups:
        for known in merged:
            hidden = not any(matrix.relation(a, b) for a in known for b in group)
            affinities = [{matrix.numa[row] for row in rows} - {""} for rows in (known, group)]
            if hidden and (not all(affinities) or affinities[0] == affinities[1]):
                known.extend(group)
                break
        else:
            merged.append(list(group))
    # Unknown NUMA nodes (-1) come last.
    unknown = 2 * MAX_DEVICES
    return sorted(merged, key=lambda group: (_numa_id(matrix, group) % unknown, min(group)))


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
