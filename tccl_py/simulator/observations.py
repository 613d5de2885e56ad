"""Measured rates as rows that a model is fitted to and tested against."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import read_text
from tccl_py.transfers.transfer import Flow, TransferSet, parse_flow, parse_set, transfer_set


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What one set got on one machine: a rate for every flow, or only their sum.

    `gbps` is in the order of `transfers.flows`. `kind` is `set`, or `nccl` and `matrix` for rates
    that were published in another form and are written as sets here.
    """

    machine: str
    kind: str
    transfers: TransferSet
    gbps: tuple[float, ...] = ()
    total_gbps: float | None = None

    @property
    def total(self) -> float:
        """Sum over the flows, in GB/s."""
        return self.total_gbps if self.total_gbps is not None else sum(self.gbps)

    @property
    def label(self) -> str:
        """Machine and set, for messages."""
        return f"{self.machine} {self.transfers}"


def read_observations(folder: Path) -> tuple[Observation, ...]:
    """Every observation in the `*.json` files of a folder.

    Raises:
        InputError: no such folder or nothing in it, or a file that is no JSON object.
    """
    found: list[Observation] = []
    for path in sorted(folder.glob("*.json")):
        found.extend(_of_file(path))
    if not found:
        raise InputError(str(folder), "holds no measured set", "name the folder of measured files")
    return tuple(found)


def _of_file(path: Path) -> Iterator[Observation]:
    try:
        data = json.loads(read_text(path))
        machine = str(data["machine"])
        yield from _sets(machine, data.get("sets", []))
        yield from _ring_kernels(machine, data)
        yield from _matrix(machine, data.get("bidirectional_matrix_gbps", []))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"is no file of measured sets ({error})"
        raise InputError(str(path), what, "it has a machine and sets") from error


def _sets(machine: str, rows: list[dict[str, Any]]) -> Iterator[Observation]:
    for row in rows:
        if "each_gbps" not in row:
            yield Observation(
                machine=machine,
                kind="set",
                transfers=parse_set(" ".join(row["set"])),
                total_gbps=float(row["total_gbps"]),
            )
            continue
        flows = [parse_flow(text) for text in row["set"]]
        yield observed(machine, "set", list(zip(flows, row["each_gbps"], strict=True)))


def observed(machine: str, kind: str, pairs: list[tuple[Flow, float]]) -> Observation:
    """The observation of these flows and their rates, put in the set's order."""
    ordered = sorted(pairs, key=lambda pair: str(pair[0]))
    return Observation(
        machine=machine,
        kind=kind,
        transfers=transfer_set(flow for flow, _ in ordered),
        gbps=tuple(float(rate) for _, rate in ordered),
    )


_RING_CHANNELS = re.compile(r"(\d+)(?: equal)? ring channels?")
_MIN_CHANNELS = re.compile(r"MIN_NCHANNELS (\d+)")
_SIZE = re.compile(r"BUFFSIZE (\d+) ([KM])iB")
_STOCK_BOUNCED_CHANNELS = 4
_STOCK_NVLINK_CHANNELS = 24
"""Final channels of NCCL's own choice on that machine: 4 x 4 MiB bounced, 24 over NVLink."""


def _ring_kernels(machine: str, data: dict[str, Any]) -> Iterator[Observation]:
    """All-reduce bus bandwidths at the largest size, as the rate of every hop of the ring."""
    gpus = int(data.get("hardware", {}).get("gpus", 0)) if "nccl_nvlink" in data else 0
    for row in data.get("nccl_all_hops_bounced", {}).get("rows", []):
        options = _bounce_options(row["settings"])
        if options is not None:
            executor, braces = options
            texts = [
                f"G{a}->{executor}{a}->C0->{executor}{b}->G{b}{braces}" for a, b in _ring(gpus)
            ]
            yield _ring_row(machine, texts, row)
    for row in data.get("nccl_nvlink", {}).get("rows", []):
        match = _RING_CHANNELS.search(row["settings"])
        stock = row["settings"].startswith("stock")
        if match or stock:
            blocks = 2 * int(match[1]) if match else _STOCK_NVLINK_CHANNELS
            texts = [f"G{a}->G{a}->G{b}{{blocks={blocks}}}" for a, b in _ring(gpus)]
            yield _ring_row(machine, texts, row)
    reads = data.get("nccl_2_28_9_all_reduce_busbw_gbps", {}).get("NCCL_P2P_READ_ENABLE=1")
    if reads:
        texts = [f"G{a}->G{b}->G{b}{{blocks={_STOCK_NVLINK_CHANNELS}}}" for a, b in _ring(gpus)]
        yield _ring_row(machine, texts, {"busbw": list(reads.values())})


def _ring(gpus: int) -> list[tuple[int, int]]:
    return [(index, (index + 1) % gpus) for index in range(gpus)]


def _ring_row(machine: str, texts: list[str], row: dict[str, Any]) -> Observation:
    rate = float([value for value in row["busbw"] if value is not None][-1])
    return observed(machine, "nccl", [(parse_flow(text), rate) for text in texts])


def _bounce_options(settings: str) -> tuple[str, str] | None:
    """Executor and flow options that NCCL settings come to; None if they do not say."""
    size = _SIZE.search(settings)
    if settings.startswith("copy engine") and size:
        return "D", f"{{fifo={size[1]}{size[2]}}}"
    if settings.startswith("stock"):
        return "G", f"{{blocks={_STOCK_BOUNCED_CHANNELS}}}"
    channels = _MIN_CHANNELS.search(settings)
    rings = _RING_CHANNELS.search(settings)
    if not (size and rings):
        return None
    blocks = int(channels[1]) if channels else 2 * int(rings[1])
    return "G", f"{{blocks={blocks},fifo={size[1]}{size[2]}}}"


_NVLINKED_GBPS = 50.0
"""Pairs both ways above this went over NVLink; 8 GB/s is what staging by the driver gets."""


def _matrix(machine: str, rows: list[list[float]]) -> Iterator[Observation]:
    """Pairs of GPUs both ways, the first half of the GPUs being on NUMA node 0."""
    for a, b in itertools.combinations(range(len(rows)), 2):
        total = (rows[a][b] + rows[b][a]) / 2
        texts = []
        for source, target in ((a, b), (b, a)):
            host = f"->C{2 * source // len(rows)}->D{target}" if total < _NVLINKED_GBPS else ""
            texts.append(f"G{source}->D{source}{host}->G{target}")
        yield Observation(
            machine=machine,
            kind="matrix",
            transfers=parse_set(" ".join(texts)),
            total_gbps=total,
        )
