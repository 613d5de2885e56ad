"""Workloads of published models, by formulas over their shapes, for any number of ranks.

GPT-2 XL: Radford et al. 2019, table 2. Llama 3 8B and 70B: arXiv 2407.21783, table 3. Mixtral 8x7B:
arXiv 2401.04088, table 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from tccl_py.errors import InputError, require
from tccl_py.workloads.workload import (
    MAX_RANKS,
    Workload,
    WorkloadCollective,
    WorkloadDtype,
    WorkloadRow,
    check_workload,
)

_BUCKET = 25 << 20
"""Bytes of a bucket of gradients, as PyTorch's DDP has them."""


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
    require(2 <= ranks <= MAX_RANKS, "ranks", f"is {ranks}", f"2 to {MAX_RANKS}")
    formula, rows = _BUNDLED[name]
    made = Workload(name=name, source=f"formula: {formula}", ranks=ranks, rows=tuple(rows(ranks)))
    return check_workload(made, name)
