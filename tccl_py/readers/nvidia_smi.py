"""The text of `nvidia-smi topo -m` -> Machine.

The matrix has relations, not bridges, so the result is the smallest regular PCI tree with these
relations, and with invented bus ids (domains ffff and fffe). Values missing in the
text stay unknown: link speeds, compute capability, NIC speeds, sockets, CPUs of NUMA nodes.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from tccl_py.errors import InputError
from tccl_py.files import read_text
from tccl_py.model.cluster import shown
from tccl_py.model.machine import (
    MAX_GPUS,
    Gpu,
    Machine,
    Nic,
    NumaNode,
    NvLink,
    NvSwitch,
    PciBridge,
    check,
)
from tccl_py.model.symmetry import joined_groups

MAX_DEVICES = 256
MAX_NVLINKS = 18  # NVML_NVLINK_MAX_LINKS: no GPU has more
LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")  # Relations on PCI, from near to far
_GPU_LABEL = re.compile(r"GPU([0-9]{1,3})", re.ASCII)
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NIC_NAME = re.compile(r"(NIC[0-9]{1,3}): *(\S{1,64})", re.ASCII)
_TITLES = re.compile(r"(CPU Affinity|NUMA Affinity|GPU NUMA ID)")
_NVLINKED = re.compile(r"NV([1-9][0-9]{0,2})", re.ASCII)
_OLD_NAMES = {"SOC": "SYS"}  # Names by drivers before 2017
_SELF = "X"
_WHOLE = "give the whole output of `nvidia-smi topo -m`"

_Groups = list[list[int]]  # Row numbers of devices that belong together, in order


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A device's relations to all devices, and the NUMA affinity ("" if missing)."""

    label: str
    cells: tuple[str, ...]
    numa: str = ""


@dataclass(frozen=True, kw_only=True)
class _Matrix:
    """The rows in the order of the text, and the NICs' names by its legend."""

    rows: tuple[_Row, ...]
    nic_names: dict[str, str]
    where: str

    def relation(self, one: int, other: int) -> str:
        """PIX to SYS; "" for NVLinked GPUs, whose relation on PCI is hidden."""
        cell = self.rows[one].cells[other]
        return "" if _NVLINKED.fullmatch(cell) else cell

    def nvlinks(self, one: int, other: int) -> int:
        """Return the number of NVLinks between two devices."""
        match = _NVLINKED.fullmatch(self.rows[one].cells[other])
        return int(match[1]) if match else 0

    @property
    def gpu_rows(self) -> dict[int, int]:
        """The rows of GPUs, and the NVML index of each; all further rows are NICs."""
        labels = [_GPU_LABEL.fullmatch(row.label) for row in self.rows]
        return {i: int(label[1]) for i, label in enumerate(labels) if label is not None}

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Return each two rows once."""
        return combinations(range(len(self.rows)), 2)

    def told(self, group: Sequence[int]) -> set[str]:
        """Return the NUMA affinities of a group's devices."""
        return {self.rows[row].numa for row in group if self.rows[row].numa}

    def refused(self, one: int, other: int, relation: str, right: str) -> InputError:
        """Return the error about the relation of two devices."""
        labels = f"{self.rows[one].label} and {self.rows[other].label}"
        return InputError(self.where, f"relates {labels} by {relation}", right)


def read_nvidia_smi(path: Path) -> Machine:
    """Read a file with the output of `nvidia-smi topo -m`; the machine is named after it."""
    return parse_nvidia_smi(read_text(path), where=str(path))


def parse_nvidia_smi(text: str, *, where: str) -> Machine:
    """Turn the text of `nvidia-smi topo -m`, with or without a prompt or colours, into a Machine.

    InputError: no matrix, one cut off or not symmetric, or relations of no PCI tree (names the two
    devices). The stem of `where` is the machine's name.
    """
    matrix = _parse_matrix(text, where=where)
    _check_symmetry(matrix)
    levels = {level: _groups(matrix, level) for level in LEVELS[:-1]}
    _check_tree(matrix, levels)
    return check(_build(matrix, levels), where=where)


def _parse_matrix(text: str, *, where: str) -> _Matrix:
    lines = [(n, _COLOUR.sub("", line)) for n, line in enumerate(text.splitlines(), start=1)]
    words = ([*line.split(), "", ""] for _, line in lines)
    headers = (_GPU_LABEL.fullmatch(found[0]) and not _is_relation(found[1]) for found in words)
    start = next((i for i, header in enumerate(headers) if header), None)
    if start is None:
        raise InputError(where, "has no line that begins with GPU0", "give `nvidia-smi topo -m`")
    number, header = lines[start]
    labels, titles = _header(header, f"{where}:{number}")
    body = [(n, line) for n, line in lines[start + 1 :] if line.strip()][: len(labels)]
    rows = [
        _row(line, label, labels, titles, where=f"{where}:{n}")
        for label, (n, line) in zip(labels, body, strict=False)
    ]
    if len(rows) < len(labels):
        raise InputError(where, f"has {len(rows)} rows for {len(labels)} devices", _WHOLE)
    names = {match[1]: match[2] for match in _NIC_NAME.finditer(text)}
    return _Matrix(rows=tuple(rows), nic_names=names, where=where)


def _is_relation(word: str) -> bool:
    return word in (_SELF, *LEVELS, *_OLD_NAMES) or _NVLINKED.fullmatch(word) is not None


def _header(line: str, where: str) -> tuple[list[str], list[str]]:
    pieces = _TITLES.split(line)
    labels, titles = pieces[0].split(), pieces[1::2]
    gpus = [label for label in labels if _GPU_LABEL.fullmatch(label)]
    if len(labels) > MAX_DEVICES or len(gpus) > MAX_GPUS:
        what = f"names {len(gpus)} GPUs and {len(labels) - len(gpus)} other devices"
        right = f"at most {MAX_GPUS} GPUs and {MAX_DEVICES} devices fit a node"
        raise InputError(where, what, right)
    for label in labels:
        if labels.count(label) > 1:
            raise InputError(where, f"names {label} twice", "every device has one column")
        index = _GPU_LABEL.fullmatch(label)
        if index is not None and int(index[1]) >= MAX_DEVICES:
            raise InputError(where, f"names {label}", f"GPUs are numbered below {MAX_DEVICES}")
    return labels, titles


def _row(
    line: str, label: str, labels: Sequence[str], titles: Sequence[str], *, where: str
) -> _Row:
    words = line.split()
    if not words or words[0] != label:
        found = shown(words[0]) if words else "nothing"
        raise InputError(where, f"begins with {found}", f"the row of {label} comes here")
    cells = [_OLD_NAMES.get(word, word) for word in words[1 : len(labels) + 1]]
    if len(cells) < len(labels):
        raise InputError(where, f"has {len(cells)} of {label}'s {len(labels)} relations", _WHOLE)
    for column, cell in zip(labels, cells, strict=True):
        if not _is_relation(cell):
            what = f"relates {label} and {column} by {shown(cell)}"
            raise InputError(where, what, f"{', '.join((_SELF, *LEVELS))} or NV#")
    # Empty places cannot be seen, so the first words come first. GPU NUMA ID (Grace) is always
    # written and always last; a Machine has no place for it.
    words = words[len(labels) + 1 : -1 if "GPU NUMA ID" in titles else None]
    names = [title for title in titles if title != "GPU NUMA ID"]
    told = {name: "" if word == "N/A" else word for name, word in zip(names, words, strict=False)}
    return _Row(label=label, cells=tuple(cells), numa=told.get("NUMA Affinity", ""))


def _check_symmetry(matrix: _Matrix) -> None:
    for index, row in enumerate(matrix.rows):
        for column, cell in enumerate(row.cells):
            if (cell == _SELF) != (index == column):
                raise matrix.refused(index, column, cell, f"{_SELF} stands on the diagonal only")
    gpus = matrix.gpu_rows
    for a, b in matrix.pairs():
        if matrix.nvlinks(a, b) and not (a in gpus and b in gpus):
            raise matrix.refused(a, b, "NVLinks", "NVLinks join GPUs")
        there, back = matrix.rows[a].cells[b], matrix.rows[b].cells[a]
        if there != back:
            relation = f"{there} one way, {back} the other"
            raise matrix.refused(a, b, relation, "both ways are the same")


def _near(level: str) -> tuple[str, ...]:
    return LEVELS[: LEVELS.index(level) + 1]


def _groups(matrix: _Matrix, level: str) -> _Groups:
    near = _near(level)
    joined = (pair for pair in matrix.pairs() if matrix.relation(*pair) in near)
    return joined_groups(joined, range(len(matrix.rows)))


def _check_tree(matrix: _Matrix, levels: dict[str, _Groups]) -> None:
    for level, groups in levels.items():
        for pair in (pair for group in groups for pair in combinations(group, 2)):
            relation = matrix.relation(*pair)
            if relation and relation not in _near(level):
                words = f"{relation}, but others join them by {level} or nearer"
                raise matrix.refused(*pair, words, "a PCI tree has no such relations")


def _numa_groups(matrix: _Matrix, groups: _Groups) -> _Groups:
    """Return groups of devices by NUMA node, merging groups with only NVLinks between."""
    merged: _Groups = []
    for group in groups:
        for known in merged:
            hidden = not any(matrix.relation(a, b) for a in known for b in group)
            affinities = [matrix.told(rows) for rows in (known, group)]
            if hidden and (not all(affinities) or affinities[0] == affinities[1]):
                known.extend(group)
                break
        else:
            merged.append(list(group))
    # Unknown NUMA nodes (-1) come last.
    unknown = 2 * MAX_DEVICES
    return sorted(merged, key=lambda group: (_numa_id(matrix, group) % unknown, min(group)))


def _numa_id(matrix: _Matrix, group: Sequence[int]) -> int:
    told = matrix.told(group)
    (text,) = told if len(told) == 1 else ("",)
    known = re.fullmatch(r"[0-9]{1,3}", text, re.ASCII) and int(text) < MAX_DEVICES
    return int(text) if known else -1


def _build(matrix: _Matrix, levels: dict[str, _Groups]) -> Machine:
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
    links, switches = _nvlinks(matrix)
    return Machine(
        name=Path(matrix.where).stem,
        numa_nodes=tuple(nodes),
        bridges=tuple(bridges),
        gpus=tuple(
            Gpu(index=index, bus_id=f"ffff:{index:02x}:00.0", parent=parents[row])
            for row, index in matrix.gpu_rows.items()
        ),
        nics=_nics(matrix, parents),
        nvswitches=switches,
        nvlinks=links,
    )


def _hang(groups: _Groups, parent: str, bridges: list[PciBridge], parents: dict[int, str]) -> None:
    if len(groups) > 1:
        parent = _new_bridge(bridges, parent)
    for group in groups:
        alone = len(groups) == 1 and len(group) == 1
        place = parent if alone else _new_bridge(bridges, parent)
        parents.update(dict.fromkeys(group, place))


def _new_bridge(bridges: list[PciBridge], parent: str) -> str:
    number = len(bridges)
    bus_id = f"fffe:{number % 256:02x}:{number // 256:02x}.0"
    bridges.append(PciBridge(bus_id=bus_id, parent=parent))
    return bus_id


def _nics(matrix: _Matrix, parents: dict[int, str]) -> tuple[Nic, ...]:
    gpus = matrix.gpu_rows
    others = [(i, row.label) for i, row in enumerate(matrix.rows) if i not in gpus]
    return tuple(
        Nic(index=index, name=matrix.nic_names.get(label, label), parent=parents[row])
        for index, (row, label) in enumerate(others)
    )


def _nvlinks(matrix: _Matrix) -> tuple[tuple[NvLink, ...], tuple[NvSwitch, ...]]:
    """Return NVLinks, through a switch for each set of GPUs too large for direct links."""
    links: list[NvLink] = []
    switches: list[NvSwitch] = []
    linked = (pair for pair in combinations(matrix.gpu_rows, 2) if matrix.nvlinks(*pair))
    for island in joined_groups(linked, matrix.gpu_rows):
        counts = {matrix.nvlinks(a, b) for a in island for b in island if a != b}
        count = max(counts, default=0)
        names = {row: f"G{matrix.gpu_rows[row]}" for row in island}
        if len(counts) == 1 and count * (len(island) - 1) > MAX_NVLINKS:
            switch = NvSwitch(index=len(switches))
            switches.append(switch)
            links += [NvLink(source=n, target=switch.id, count=count) for n in names.values()]
            continue
        links += [
            NvLink(source=names[a], target=names[b], count=matrix.nvlinks(a, b))
            for a in island
            for b in island
            if matrix.nvlinks(a, b)
        ]
    return tuple(links), tuple(switches)
