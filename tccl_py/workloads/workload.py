"""A workload: the collectives that a job runs in a step, as data and as a JSON file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from tccl_py.errors import require
from tccl_py.files import (
    check_types,
    check_version,
    decode_json,
    encode_json,
    encode_line,
    read_text,
    write_named,
)

FORMAT_VERSION = 1
MAX_RANKS, MAX_ROWS, MAX_BYTES, MAX_STREAM = 1 << 16, 10_000, 1 << 50, 1000
MAX_NAME = 200

WorkloadCollective = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all",
    "send_recv", "send",
]  # fmt: skip
"""The collectives of `experiments.collectives`. In a group of `send_recv` each rank sends to the
next and the last to the first, all at once; in a group of `send` the first rank sends to the second
and nothing comes back."""
WorkloadDtype = Literal[
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
    "bfloat16", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip
"""NCCL's datatypes, in the order of its numbers, by the names of torch."""
ELEMENT_BYTES: dict[WorkloadDtype, int] = dict(
    zip(get_args(WorkloadDtype), (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1), strict=True)
)
TIMES_RANKS = frozenset({"all_gather", "reduce_scatter", "all_to_all"})
"""Collectives whose larger buffer has a block for each rank."""

_Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
_Group = Annotated[tuple[_Rank, ...], Meta(min_length=2)]
_Text = Annotated[str, Meta(max_length=2000)]


class WorkloadRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Equal calls of a step."""

    collective: WorkloadCollective
    dtype: WorkloadDtype
    bytes: Annotated[int, Meta(ge=1, le=MAX_BYTES)]
    """Those of the larger buffer of one rank, as in rows of experiments and in nccl-tests: elements
    times the `count` of NCCL's call, for all-gather, reduce-scatter and all-to-all times the ranks
    of the group as well; where ranks or blocks differ, of the largest rank."""
    groups: Annotated[tuple[_Group, ...], Meta(min_length=1)]
    """Disjoint; ranks are those of the job, in the communicator's order."""
    calls: Annotated[float, Meta(gt=0, le=1e9)]
    """Calls of each group in a step."""
    stream: Annotated[int, Meta(ge=0, le=MAX_STREAM)] = 0
    """Rows of one stream run one after the other, those of several may run at the same time."""


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The collectives of a job in a step."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    source: _Text
    """Where the rows came from, in a sentence: a formula, or a recording."""
    ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    rows: Annotated[tuple[WorkloadRow, ...], Meta(max_length=MAX_ROWS)]
    steps: Annotated[int, Meta(ge=0)] = 0
    """The steady steps that were recorded; 0: none was told from another, and a step is all."""
    notices: tuple[_Text, ...] = ()
    """What the rows leave out or could not tell, in sentences."""
    format_version: int = FORMAT_VERSION

    @property
    def digest(self) -> str:
        """Return the digest of what it communicates, whatever its name."""
        rows = sorted(encode_line(replace(row, calls=float(row.calls))) for row in self.rows)
        return hashlib.blake2b(b"".join([b"%d\n" % self.ranks, *rows]), digest_size=8).hexdigest()


def check_workload(workload: Workload, where: str | Path) -> Workload:
    """Return the workload if its rows fit its ranks (InputError)."""
    check_version(workload.format_version, FORMAT_VERSION, where)
    for number, row in enumerate(workload.rows, 1):
        place = f"{where} row {number}"
        ranks = [rank for group in row.groups for rank in group]
        right = f"name ranks below {workload.ranks}, each in one group"
        require(len(set(ranks)) == len(ranks), place, "has a rank twice", right)
        require(max(ranks) < workload.ranks, place, f"has rank {max(ranks)}", right)
        if row.collective == "send":
            pairs = all(len(group) == 2 for group in row.groups)
            require(pairs, place, "sends in a group that is no pair", "name source and destination")
    return workload


def read_workload(path: Path) -> Workload:
    """Read the file of a workload; InputError for a file that is none."""
    right = "write it as `tccl workload data-parallel -o FILE` does"
    return check_workload(
        decode_json(read_text(path), Workload, where=str(path), right=right), path
    )


def write_workload(workload: Workload, path: Path) -> None:
    """Write a workload, whole or not at all (InputError also where it could not be read)."""
    check_types(workload, where=str(path))
    write_named(path, encode_json(check_workload(workload, path)))
