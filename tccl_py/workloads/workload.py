"""A workload: the collectives that a job runs in a step, as data, as a JSON file, or bundled.

Bundled are published models by formulas over their shapes, for any number of ranks. GPT-2 XL:
Radford et al. 2019, table 2. Llama 3 8B and 70B: arXiv 2407.21783, table 3. Mixtral 8x7B: arXiv
2401.04088, table 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from tccl_py.errors import InputError, require
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
_BUCKET = 25 << 20
"""Bytes of a bucket of gradients, as PyTorch's DDP has them."""


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


class _Shape(NamedTuple):
    """A model's shape; `keys` is the width of the keys of a token, and that of its values."""

    layers: int
    hidden: int
    inner: int
    keys: int
    vocabulary: int

    @property
    def attention(self) -> int:
        """Return the parameters of a layer's attention and norms."""
        return 2 * self.hidden * self.hidden + 2 * self.hidden * self.keys + 2 * self.hidden

    @property
    def layer(self) -> int:
        """Return the parameters of a layer with a gated feed-forward part."""
        return self.attention + 3 * self.hidden * self.inner


_LLAMA_8B = _Shape(32, 4096, 14336, 1024, 128256)
_LLAMA_70B = _Shape(80, 8192, 28672, 1024, 128256)
_MIXTRAL = _Shape(32, 4096, 14336, 1024, 32000)
_Rows = Iterator[WorkloadRow]


def _row(
    collective: WorkloadCollective,
    dtype: WorkloadDtype,
    size: int,
    ranks: int,
    *,
    calls: int = 1,
    groups: tuple[tuple[int, ...], ...] = (),
) -> WorkloadRow:
    """Return a row over all ranks or in `groups`, its bytes padded to equal blocks of ranks."""
    block = 4 * ranks
    padded = -(-size // block) * block if collective not in ("all_reduce", "send") else size
    return WorkloadRow(
        collective=collective,
        dtype=dtype,
        bytes=padded,
        groups=groups or (tuple(range(ranks)),),
        calls=calls,
    )


def _buckets(dtype: WorkloadDtype, size: int, ranks: int) -> _Rows:
    """Yield the all-reduces of gradients: full buckets, and the rest."""
    full, rest = divmod(size, _BUCKET)
    if full:
        yield _row("all_reduce", dtype, _BUCKET, ranks, calls=full)
    if rest:
        yield _row("all_reduce", dtype, rest, ranks)


def _data_parallel(ranks: int) -> _Rows:
    layers, hidden, vocabulary, context = 48, 1600, 50257, 1024
    parameters = layers * (12 * hidden * hidden + 13 * hidden) + 2 * hidden
    parameters += (vocabulary + context) * hidden
    yield from _buckets("float32", 4 * parameters, ranks)


def _fsdp(ranks: int) -> _Rows:
    shape = _LLAMA_8B
    outer = 2 * shape.vocabulary * shape.hidden + shape.hidden
    yield _row("all_gather", "int8", 2 * shape.layer, ranks, calls=2 * shape.layers)
    yield _row("all_gather", "int8", 2 * outer, ranks)
    yield _row("reduce_scatter", "float32", 4 * shape.layer, ranks, calls=shape.layers)
    yield _row("reduce_scatter", "float32", 4 * outer, ranks)


def _tensor_parallel(ranks: int, tokens: int, sequences: int) -> _Rows:
    shape = _LLAMA_70B
    size = 2 * tokens * shape.hidden
    yield _row("all_reduce", "bfloat16", size, ranks, calls=2 * shape.layers)
    yield _row("all_gather", "int8", 2 * sequences * shape.vocabulary, ranks)


def _pipeline(ranks: int) -> _Rows:
    size, microbatches = 2 * 4096 * _LLAMA_70B.hidden, 4 * ranks
    for first in (0, 1):
        stages = range(first, ranks - 1, 2)
        for forth in (1, -1) if stages else ():
            pairs = tuple((at, at + 1)[::forth] for at in stages)
            yield _row("send", "int8", size, ranks, calls=microbatches, groups=pairs)


def _experts(ranks: int) -> _Rows:
    shape = _MIXTRAL
    yield _row("all_to_all", "int8", 2 * 4096 * 2 * shape.hidden, ranks, calls=4 * shape.layers)
    dense = shape.layers * (shape.attention + 8 * shape.hidden)
    dense += 2 * shape.vocabulary * shape.hidden + shape.hidden
    yield from _buckets("bfloat16", 2 * dense, ranks)


_BUNDLED: dict[str, tuple[str, Callable[[int], _Rows]]] = {
    "data-parallel": (
        "GPT-2 XL, 48 (12 h^2 + 13 h) + 2 h + (50257 + 1024) h parameters with h = 1600: float32 "
        "gradients are all-reduced in buckets of 25 MiB",
        _data_parallel,
    ),
    "fsdp": (
        "Llama 3 8B, a layer of 2 h^2 + 2 h k + 2 h + 3 h f parameters with h = 4096, k = 1024, "
        "f = 14336: gathered in bfloat16 for forward and backward, gradients reduce-scattered in "
        "float32; embedding, output and last norm, 2 h 128256 + h, once each",
        _fsdp,
    ),
    "tensor-parallel-decode": (
        "Llama 3 70B, a token for each of 32 sequences: two all-reduces of 32 x 8192 bfloat16 in "
        "each of 80 layers, and a gather of 32 x 128256 logits",
        lambda ranks: _tensor_parallel(ranks, 32, 32),
    ),
    "tensor-parallel-prefill": (
        "Llama 3 70B, a prompt of 2048 tokens: two all-reduces of 2048 x 8192 bfloat16 in each of "
        "80 layers, and a gather of 128256 logits",
        lambda ranks: _tensor_parallel(ranks, 2048, 1),
    ),
    "pipeline": (
        "Llama 3 70B, a stage a rank: each of 4 microbatches a rank, 4096 x 8192 bfloat16, is sent "
        "to the next stage, and its gradient back",
        _pipeline,
    ),
    "mixture-of-experts": (
        "Mixtral 8x7B, experts over all ranks: 4096 tokens a rank to 2 experts each, 4096 bfloat16 "
        "a token, four all-to-alls in each of 32 layers (there and back, forward and backward); "
        "gradients of all but experts are all-reduced in bfloat16 in buckets of 25 MiB",
        _experts,
    ),
}
BUNDLED = tuple(_BUNDLED)
"""The names of bundled workloads."""


def load_bundled(name: str, ranks: int = 8) -> Workload:
    """Return a bundled workload over a number of ranks (InputError for an unknown name).

    >>> load_bundled("tensor-parallel-decode").rows[0].bytes
    524288
    """
    if name not in _BUNDLED:
        fault, right = "is no bundled workload", f"one of {', '.join(BUNDLED)}, or a file"
        raise InputError(f"workload {name!r}", fault, right)
    require(2 <= ranks <= MAX_RANKS, "`ranks`", f"is {ranks}", f"2 to {MAX_RANKS}")
    formula, rows = _BUNDLED[name]
    made = Workload(name=name, source=f"formula: {formula}", ranks=ranks, rows=tuple(rows(ranks)))
    return check_workload(made, name)
