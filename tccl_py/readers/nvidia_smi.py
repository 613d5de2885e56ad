"""The text of `nvidia-smi topo -m` -> Machine.

The matrix names relations, not devices between them, so the result is the smallest regular PCI
tree that has these relations, with invented bus ids (domains ffff and fffe). What the text does
not say stays unknown: link speeds, compute capability, NIC speeds, sockets.

Three things cannot be told from the text, and are settled so:

- NODE and PHB are one here, as they are to NCCL: the devices hang from the same NUMA node.
- `NV#` hides how a pair lies on PCI. Other rows of the matrix decide where they can (a NIC beside
  each GPU); else two GPUs share a NUMA node unless their NUMA affinities differ.
- `NV#` does not tell a direct link from a switch. No GPU has more than 18 NVLinks, so GPUs that
  would each need more than 18 for a direct link to every other have an NVLink switch between them;
  all others are taken as linked directly. (A switch between two GPUs is not seen; NCCL calls
  both NVL.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tccl_py.errors import InputError
from tccl_py.files import read_text
from tccl_py.model.machine import Gpu, Machine, Nic, NumaNode, NvLink, NvSwitch, PciBridge, check
from tccl_py.readers.smi_matrix import LEVELS, MAX_DEVICES, Matrix, check_symmetry, parse_matrix

MAX_NVLINKS = 18
"""NVML_NVLINK_MAX_LINKS: no GPU has more."""
_MAX_CPUS = 8192
_CPU_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", re.ASCII)

_Groups = list[list[int]]
"""Row numbers of devices that belong together, in order."""


def read_nvidia_smi(path: Path) -> Machine:
    """Read a file with the output of `nvidia-smi topo -m`; the machine is named after it.

    Raises:
        InputError: as `parse_nvidia_smi`, or the file cannot be read.
    """
    return parse_nvidia_smi(read_text(path), where=str(path))


def parse_nvidia_smi(text: str, *, where: str) -> Machine:
    """Turn the text of `nvidia-smi topo -m` into a Machine; colours and lost tabs do not matter.

    Args:
        text: the output, possibly with a prompt before it.
        where: file name for messages; its stem is the machine's name.

    Raises:
        InputError: no matrix, a matrix that is cut off or not symmetric, or relations that no PCI
            tree has; the message names the two devices.
    """
    matrix = parse_matrix(text, where=where)
    check_symmetry(matrix)
    levels = {level: _groups(matrix, level) for level in LEVELS[:-1]}
    _check_tree(matrix, levels)
    machine = _build(matrix, levels)
    return check(machine, where=where)


def _groups(matrix: Matrix, level: str) -> _Groups:
    """Devices joined by relations up to `level`, each group in row order."""
    near = LEVELS[: LEVELS.index(level) + 1]
    group_of = list(range(len(matrix.rows)))
    for one, other in matrix.pairs():
        if matrix.relation(one, other) in near and group_of[one] != group_of[other]:
            old, new = group_of[other], group_of[one]
            group_of = [new if group == old else group for group in group_of]
    return [
        [row for row, group in enumerate(group_of) if group == wanted]
        for wanted in dict.fromkeys(group_of)
    ]


def _check_tree(matrix: Matrix, levels: dict[str, _Groups]) -> None:
    """A tree's relations nest: whatever is joined through a third device is related as near."""
    for level, groups in levels.items():
        near = LEVELS[: LEVELS.index(level) + 1]
        for group in groups:
            for place, one in enumerate(group):
                for other in group[place + 1 :]:
                    relation = matrix.relation(one, other)
                    if relation and relation not in near:
                        raise InputError(
                            matrix.where,
                            f"relates {matrix.between(one, other)} by {relation}, but others "
                            f"join them by {level} or nearer",
                            "a PCI tree has no such relations",
                        )


def _numa_groups(matrix: Matrix, groups: _Groups) -> _Groups:
    """Groups of devices on one NUMA node, those merged that only NVLink relates."""
    merged: _Groups = []
    for group in groups:
        for known in merged:
            hidden = not any(matrix.relation(one, other) for one in known for other in group)
            if hidden and _affinities_agree(matrix, known, group):
                known.extend(group)
                break
        else:
            merged.append(list(group))
    return sorted(merged, key=lambda group: _numa_order(matrix, group))


def _affinities(matrix: Matrix, group: Sequence[int]) -> set[str]:
    return {matrix.rows[row].numa for row in group if matrix.rows[row].numa}


def _affinities_agree(matrix: Matrix, one: Sequence[int], other: Sequence[int]) -> bool:
    mine, theirs = _affinities(matrix, one), _affinities(matrix, other)
    return not mine or not theirs or mine == theirs


def _numa_order(matrix: Matrix, group: Sequence[int]) -> tuple[int, int]:
    numa = _numa_id(matrix, group)
    return (numa if numa >= 0 else MAX_DEVICES, min(group))


def _numa_id(matrix: Matrix, group: Sequence[int]) -> int:
    """The system's number of a group's NUMA node; -1 if it is not told, or several are."""
    told = _affinities(matrix, group)
    if len(told) == 1:
        (text,) = told
        if re.fullmatch(r"[0-9]{1,3}", text, re.ASCII) and int(text) < MAX_DEVICES:
            return int(text)
    return -1


def _build(matrix: Matrix, levels: dict[str, _Groups]) -> Machine:
    nodes: list[NumaNode] = []
    bridges: list[PciBridge] = []
    parents: dict[int, str] = {}
    for index, group in enumerate(_numa_groups(matrix, levels["NODE"])):
        numa = _numa_id(matrix, group)
        told = numa not in {node.numa_id for node in nodes}
        affinity = _affinity(matrix, group)
        nodes.append(NumaNode(index=index, numa_id=numa if told else -1, affinity=affinity))
        for near in levels["PXB"]:
            if near[0] in group:
                inner = [same for same in levels["PIX"] if same[0] in near]
                _hang(inner, f"C{index}", bridges, parents)
    links, switches = _nvlinks(matrix)
    return Machine(
        name=Path(matrix.where).stem,
        numa_nodes=tuple(nodes),
        bridges=tuple(bridges),
        gpus=tuple(_gpu(matrix, row, parents[row]) for row in matrix.gpu_rows),
        nics=_nics(matrix, parents),
        nvswitches=switches,
        nvlinks=links,
    )


def _hang(groups: _Groups, parent: str, bridges: list[PciBridge], parents: dict[int, str]) -> None:
    """Hang groups of PIX neighbours from `parent`: one bridge each, a common one if several."""
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


def _gpu(matrix: Matrix, row: int, parent: str) -> Gpu:
    index = matrix.gpu_index(row)
    if index >= MAX_DEVICES:
        raise InputError(
            matrix.where, f"names GPU {index}", f"GPUs are numbered below {MAX_DEVICES}"
        )
    return Gpu(index=index, bus_id=f"ffff:{index:02x}:00.0", parent=parent)


def _nics(matrix: Matrix, parents: dict[int, str]) -> tuple[Nic, ...]:
    others = [row for row in range(len(matrix.rows)) if row not in matrix.gpu_rows]
    labels = [matrix.rows[row].label for row in others]
    return tuple(
        Nic(index=index, name=matrix.nic_names.get(label, label), parent=parents[row])
        for index, (row, label) in enumerate(zip(others, labels, strict=True))
    )


def _nvlinks(matrix: Matrix) -> tuple[tuple[NvLink, ...], tuple[NvSwitch, ...]]:
    """NVLinks, through one switch for each set of GPUs that cannot all be linked directly."""
    links: list[NvLink] = []
    switches: list[NvSwitch] = []
    for island in _islands(matrix):
        counts = {matrix.nvlinks(a, b) for a in island for b in island if a != b}
        count = max(counts, default=0)
        names = {row: f"G{matrix.gpu_index(row)}" for row in island}
        if len(counts) == 1 and count * (len(island) - 1) > MAX_NVLINKS:
            switch = NvSwitch(index=len(switches))
            switches.append(switch)
            links += [NvLink(source=n, target=switch.id, count=count) for n in names.values()]
            continue
        for a in island:
            for b in island:
                if matrix.nvlinks(a, b):
                    found = matrix.nvlinks(a, b)
                    links.append(NvLink(source=names[a], target=names[b], count=found))
    return tuple(links), tuple(switches)


def _islands(matrix: Matrix) -> _Groups:
    """GPUs that NVLinks join, directly or over others."""
    left, islands = list(matrix.gpu_rows), []
    while left:
        island = [left.pop(0)]
        for row in island:
            near = [other for other in left if matrix.nvlinks(row, other)]
            island += near
            left = [other for other in left if other not in near]
        islands.append(sorted(island))
    return islands


def _affinity(matrix: Matrix, group: Sequence[int]) -> str:
    """The CPUs of a group's GPUs as the kernel's mask, if all GPUs name the same; else "".

    >>> _mask("0-3,8")
    '0000010f'
    """
    told = {matrix.rows[row].cpus for row in group if matrix.rows[row].cpus}
    if len(told) != 1:
        return ""
    (cpus,) = told
    mask = _mask(cpus)
    if mask is None:
        raise InputError(matrix.where, f"names CPUs {cpus[:40]}", "a list such as 0-15,32-47")
    return mask


def _mask(cpus: str) -> str | None:
    """`0-3,8` -> `0000010f`, 32 bits a group, as the kernel writes it; None if it is no list."""
    bits = 0
    for part in cpus.split(","):
        match = _CPU_RANGE.fullmatch(part)
        if match is None:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < _MAX_CPUS:
            return None
        bits |= ((1 << (last - first + 1)) - 1) << first
    digits = f"{bits:x}"
    digits = digits.zfill(-(-len(digits) // 8) * 8)
    return ",".join(digits[i : i + 8] for i in range(0, len(digits), 8))
