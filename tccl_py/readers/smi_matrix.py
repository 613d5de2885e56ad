"""The matrix of `nvidia-smi topo -m` as data: rows of relations, checked for shape and symmetry."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tccl_py.errors import InputError
from tccl_py.model.machine import MAX_GPUS
from tccl_py.readers.elements import shortened

MAX_DEVICES = 256
LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Relations on PCI, from near to far."""
GPU_LABEL = re.compile(r"GPU([0-9]{1,3})", re.ASCII)
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NIC_NAME = re.compile(r"(NIC[0-9]{1,3}): *(\S{1,64})", re.ASCII)
_TITLES = re.compile(r"(CPU Affinity|NUMA Affinity|GPU NUMA ID)")
_NVLINKED = re.compile(r"NV([1-9][0-9]{0,2})", re.ASCII)
_OLD_NAMES = {"SOC": "SYS"}
"""What drivers before 2017 wrote."""
_SELF = "X"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One device's row: its relations to all devices and its affinities ("" if not told)."""

    label: str
    cells: tuple[str, ...]
    cpus: str = ""
    numa: str = ""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The rows in the order of the text, and what its legend calls the NICs."""

    rows: tuple[Row, ...]
    nic_names: dict[str, str]
    where: str

    def relation(self, one: int, other: int) -> str:
        """PIX to SYS; "" for NVLinked GPUs, whose relation on PCI is hidden."""
        cell = self.rows[one].cells[other]
        return "" if _NVLINKED.fullmatch(cell) else cell

    def nvlinks(self, one: int, other: int) -> int:
        """How many NVLinks the matrix shows between two devices."""
        match = _NVLINKED.fullmatch(self.rows[one].cells[other])
        return int(match[1]) if match else 0

    @property
    def gpu_rows(self) -> tuple[int, ...]:
        """The rows that are GPUs; all others are NICs."""
        return tuple(i for i, row in enumerate(self.rows) if GPU_LABEL.fullmatch(row.label))

    def gpu_index(self, row: int) -> int:
        """The NVML index in a GPU's label."""
        return int(self.rows[row].label[len("GPU") :])

    def pairs(self) -> list[tuple[int, int]]:
        """Each two rows once."""
        count = len(self.rows)
        return [(one, other) for one in range(count) for other in range(one + 1, count)]

    def between(self, one: int, other: int) -> str:
        """Two devices, for a message."""
        return f"{self.rows[one].label} and {self.rows[other].label}"


def parse_matrix(text: str, *, where: str) -> Matrix:
    """Find the matrix in the text; colours, lost tabs and lines before it do not matter.

    Raises:
        InputError: no matrix, one that is cut off, or a cell that is no relation.
    """
    lines = [(n, _COLOUR.sub("", line)) for n, line in enumerate(text.splitlines(), start=1)]
    start = next((i for i, (_, line) in enumerate(lines) if _is_header(line)), None)
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
        raise InputError(
            where,
            f"has {len(rows)} rows for {len(labels)} devices",
            "give the whole output of `nvidia-smi topo -m`",
        )
    names = {match[1]: match[2] for match in _NIC_NAME.finditer(text)}
    return Matrix(rows=tuple(rows), nic_names=names, where=where)


def _is_header(line: str) -> bool:
    words = line.split()
    relation = len(words) > 1 and (words[1] == _SELF or _is_relation(words[1]))
    return bool(words) and GPU_LABEL.fullmatch(words[0]) is not None and not relation


def _is_relation(word: str) -> bool:
    return word in LEVELS or word in _OLD_NAMES or _NVLINKED.fullmatch(word) is not None


def _header(line: str, where: str) -> tuple[list[str], list[str]]:
    """The devices of the columns, and the titles of the columns after them."""
    pieces = _TITLES.split(line)
    labels, titles = pieces[0].split(), pieces[1::2]
    gpus = [label for label in labels if GPU_LABEL.fullmatch(label)]
    if len(labels) > MAX_DEVICES or len(gpus) > MAX_GPUS:
        raise InputError(
            where,
            f"names {len(gpus)} GPUs and {len(labels) - len(gpus)} other devices",
            f"at most {MAX_GPUS} GPUs and {MAX_DEVICES} devices fit a node",
        )
    for label in labels:
        if labels.count(label) > 1:
            raise InputError(where, f"names {label} twice", "every device has one column")
    return labels, titles


def _row(line: str, label: str, labels: Sequence[str], titles: Sequence[str], *, where: str) -> Row:
    words = line.split()
    if not words or words[0] != label:
        found = shortened(words[0]) if words else "nothing"
        raise InputError(where, f"begins with {found}", f"the row of {label} comes here")
    cells = [_OLD_NAMES.get(word, word) for word in words[1 : len(labels) + 1]]
    if len(cells) < len(labels):
        raise InputError(
            where,
            f"has {len(cells)} of {label}'s {len(labels)} relations",
            "give the whole output of `nvidia-smi topo -m`",
        )
    for other, cell in zip(labels, cells, strict=True):
        if cell != _SELF and not _is_relation(cell):
            raise InputError(
                where,
                f'relates {label} and {other} by "{shortened(cell)}"',
                f"{', '.join((_SELF, *LEVELS))} or NV#",
            )
    told = _affinities(words[len(labels) + 1 :], titles)
    return Row(
        label=label,
        cells=tuple(cells),
        cpus=told.get("CPU Affinity", ""),
        numa=told.get("NUMA Affinity", ""),
    )


def _affinities(words: Sequence[str], titles: Sequence[str]) -> dict[str, str]:
    """What stands under each title; empty places cannot be seen, so the first titles come first.

    GPU NUMA ID, where a GPU's own memory lies (Grace), is always written and always last; nothing
    in a Machine says that.
    """
    if "GPU NUMA ID" in titles:
        words, titles = words[:-1], [title for title in titles if title != "GPU NUMA ID"]
    return {title: _told(word) for title, word in zip(titles, words, strict=False)}


def _told(word: str) -> str:
    return "" if word == "N/A" else word


def check_symmetry(matrix: Matrix) -> None:
    """Refuse a matrix that is not the same both ways.

    Raises:
        InputError: names the two devices.
    """
    for index, row in enumerate(matrix.rows):
        for column, cell in enumerate(row.cells):
            if (cell == _SELF) != (index == column):
                raise InputError(
                    matrix.where,
                    f"relates {matrix.between(index, column)} by {cell}",
                    f"{_SELF} stands on the diagonal only",
                )
    gpus = matrix.gpu_rows
    for one, other in matrix.pairs():
        if matrix.nvlinks(one, other) and not (one in gpus and other in gpus):
            raise InputError(
                matrix.where,
                f"relates {matrix.between(one, other)} by NVLinks",
                "NVLinks join GPUs",
            )
        there, back = matrix.rows[one].cells[other], matrix.rows[other].cells[one]
        if there != back:
            raise InputError(
                matrix.where,
                f"relates {matrix.between(one, other)} by {there} one way, {back} the other",
                "both ways are the same",
            )
