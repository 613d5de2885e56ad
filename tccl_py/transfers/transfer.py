"""Transfers, flows and transfer sets, with the text form SRC->EXE->DST.

`G0->G0->G4` is GPU 0 writing to GPU 4, `G0->G4->G4` GPU 4 reading from GPU 0, `G0->D0->C1` GPU 0's
copy engine writing to NUMA node 1's host memory. A bounce is one flow of two linked transfers,
`G0->G0->C1->G4->G4`. How a flow moves its bytes follows in braces where it is not the default:
`G0->G0->C1->G4->G4{blocks=8,fifo=512K}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

import msgspec

from tccl_py.errors import InputError

Side = Literal["sender", "receiver"]

_Kind = Literal["bounce", "direct", "plain"]

DEFAULT_FIFO_BYTES = 4 * 1024 * 1024
"""NCCL_BUFFSIZE's default for the Simple protocol."""
FIFO_SLOTS = 8
"""NCCL_STEPS: a FIFO is eight slots of NCCL_BUFFSIZE / 8."""
MAX_FIFO_BYTES = 1 << 30
MAX_BLOCKS = 64
"""NCCL's MAXCHANNELS: one block a channel."""

_PLACE = re.compile(r"(?:(?P<host>[A-Za-z0-9_.-]+)\.)?(?P<kind>[GCDN])(?P<index>0|[1-9][0-9]{0,4})")
_SIZE = re.compile(r"(?P<number>[1-9][0-9]{0,9})(?P<unit>[KM]?)")
_UNIT = {"": 1, "K": 1024, "M": 1024 * 1024}
_MAX_TEXT = 4096


class Place(msgspec.Struct, frozen=True, order=True):
    """A memory or an executor: `G2`, `D2`, `C1`, `N0`; on another host `h3.G2`."""

    kind: Literal["G", "C", "D", "N"]
    index: int
    host: str = ""

    def __str__(self) -> str:
        prefix = f"{self.host}." if self.host else ""
        return f"{prefix}{self.kind}{self.index}"


class Transfer(msgspec.Struct, frozen=True, order=True):
    """Bytes moving from `source` to `destination`, moved by `executor`."""

    source: Place
    executor: Place
    destination: Place

    @property
    def operation(self) -> Literal["write", "read"]:
        """`write` if the executor is on the source's side, else `read`."""
        return (
            "write"
            if self.executor.index == self.source.index
            and (self.source.kind == "G" and self.executor.host == self.source.host)
            else "read"
        )

    @property
    def uses_copy_engine(self) -> bool:
        """Whether a copy engine, not a kernel, moves the bytes."""
        return self.executor.kind == "D"

    def __str__(self) -> str:
        return f"{self.source}->{self.executor}->{self.destination}"


class Fifo(msgspec.Struct, frozen=True, order=True):
    """The buffer between a flow's writer and its reader; `bytes` is for one block.

    A bounce's lies in host memory, allocated by `side`; a direct flow's in the memory of the GPU
    that does not move the bytes, whatever `side` says.
    """

    bytes: int = DEFAULT_FIFO_BYTES
    slots: int = FIFO_SLOTS
    side: Side = "receiver"


class Flow(msgspec.Struct, frozen=True, order=True):
    """What one hop moves: one transfer, or a bounce's two linked by a FIFO; it has one rate.

    `blocks` is how many thread blocks (NCCL: channels) move it; None is "as many as it takes".
    A direct flow between GPUs whose blocks are given goes through a FIFO for each of them as well;
    there None, and nothing else, is the default FIFO.
    """

    transfers: tuple[Transfer, ...]
    blocks: int | None = None
    fifo: Fifo | None = None

    @property
    def is_bounce(self) -> bool:
        """Whether the bytes go through host memory on their way to another GPU."""
        return len(self.transfers) == 2

    @property
    def source(self) -> Place:
        """Where the bytes come from."""
        return self.transfers[0].source

    @property
    def destination(self) -> Place:
        """Where the bytes end."""
        return self.transfers[-1].destination

    def __str__(self) -> str:
        first = self.transfers[0]
        text = str(first)
        for transfer in self.transfers[1:]:
            text += f"->{transfer.executor}->{transfer.destination}"
        options = _options_text(self)
        return text + (f"{{{options}}}" if options else "")


class TransferSet(msgspec.Struct, frozen=True):
    """Flows that run at the same time; a flow listed twice runs twice. Order has no meaning.

    >>> str(parse_set("G2->G2->G3  G0->G0->G1"))
    'G0->G0->G1 G2->G2->G3'
    """

    flows: tuple[Flow, ...]

    def __str__(self) -> str:
        return " ".join(str(flow) for flow in self.flows)

    def __len__(self) -> int:
        return len(self.flows)


def transfer_set(flows: Iterable[Flow]) -> TransferSet:
    """The set of these flows, in canonical order."""
    return TransferSet(tuple(sorted(flows, key=str)))


def _size_text(count: int) -> str:
    if count % _UNIT["M"] == 0:
        return f"{count // _UNIT['M']}M"
    if count % _UNIT["K"] == 0:
        return f"{count // _UNIT['K']}K"
    return str(count)


def _options_text(flow: Flow) -> str:
    options = []
    if flow.blocks is not None:
        options.append(f"blocks={flow.blocks}")
    if flow.fifo is not None:
        default = Fifo()
        if flow.fifo.bytes != default.bytes:
            options.append(f"fifo={_size_text(flow.fifo.bytes)}")
        if flow.fifo.slots != default.slots:
            options.append(f"slots={flow.fifo.slots}")
        if flow.fifo.side != default.side:
            options.append(f"side={flow.fifo.side}")
    return ",".join(options)


def _parse_place(text: str, where: str) -> Place:
    match = _PLACE.fullmatch(text)
    if match is None:
        raise InputError(
            where, f"{text[:40]!r} names no place", "places are G2, D2, C1, N0 or, elsewhere, h3.G2"
        )
    return Place(match["kind"], int(match["index"]), match["host"] or "")  # type: ignore[arg-type]


def _transfer(places: list[Place], where: str) -> Transfer:
    source, executor, destination = places
    for end in (source, destination):
        if end.kind not in "GCN":
            raise InputError(where, f"{end} holds no bytes", "bytes lie in G, C or N places")
    if source == destination:
        raise InputError(where, f"{source} sends to itself", "source and destination differ")
    near = {(end.kind, end.index, end.host) for end in (source, destination)}
    kind = "G" if executor.kind == "D" else executor.kind
    if executor.kind not in "GD" or (kind, executor.index, executor.host) not in near:
        raise InputError(
            where, f"{executor} cannot move it", "the executor is the G or D of one of the two ends"
        )
    return Transfer(source, executor, destination)


def _number(name: str, text: str, high: int, where: str) -> int:
    match = _SIZE.fullmatch(text)
    value = int(match["number"]) * _UNIT[match["unit"]] if match else 0
    if not 1 <= value <= high:
        raise InputError(where, f"{name}={text[:20]} is out of range", f"1 to {_size_text(high)}")
    return value


def _parse_options(text: str, kind: _Kind, where: str) -> tuple[int | None, Fifo | None]:
    blocks: int | None = None
    fifo = None if kind == "plain" else Fifo()
    for item in text.split(",") if text else ():
        name, _, value = item.partition("=")
        if name == "blocks":
            blocks = _number(name, value, MAX_BLOCKS, where)
        elif fifo is not None and name == "fifo":
            size = _number(name, value, MAX_FIFO_BYTES, where)
            fifo = msgspec.structs.replace(fifo, bytes=size)
        elif fifo is not None and name == "slots":
            fifo = msgspec.structs.replace(fifo, slots=_number(name, value, 1024, where))
        elif (
            fifo is not None
            and kind == "bounce"
            and name == "side"
            and value in ("sender", "receiver")
        ):
            fifo = msgspec.structs.replace(fifo, side=value)
        else:
            raise InputError(
                where,
                f"option {item[:40]!r} is not known here",
                "blocks=N for all flows; fifo=SIZE, slots=N where kernels move bytes from GPU to "
                "GPU; side=sender|receiver for bounces",
            )
    if kind != "direct" or fifo == Fifo():
        return blocks, fifo if kind == "bounce" else None
    if blocks is None:
        raise InputError(where, "has a FIFO but no blocks", "add blocks=N: each has a FIFO")
    return blocks, fifo


def parse_flow(text: str) -> Flow:
    """Parse one flow.

    >>> parse_flow("G0->G4->G4").transfers[0].operation
    'read'
    >>> str(parse_flow("G0->G0->C1->G4->G4{fifo=512K,blocks=8}"))
    'G0->G0->C1->G4->G4{blocks=8,fifo=512K}'

    Raises:
        InputError: not a flow; the text and what would be right are named.
    """
    where = f"flow {text[:60]!r}"
    body, brace, options = text.partition("{")
    if brace and not options.endswith("}"):
        raise InputError(where, "the options do not end", "close them with }")
    places = [_parse_place(part, where) for part in body.split("->")]
    if len(places) == 3:
        transfers: tuple[Transfer, ...] = (_transfer(places, where),)
    elif len(places) == 5:
        transfers = (_transfer(places[:3], where), _transfer(places[2:], where))
        if [p.kind for p in (places[0], places[2], places[4])] != ["G", "C", "G"]:
            raise InputError(where, "is no bounce", "a bounce goes GPU, host memory, GPU")
        if transfers[0].executor.index != places[0].index or (
            transfers[1].executor.index != places[4].index
        ):
            raise InputError(where, "is no bounce", "the sender writes and the receiver reads")
        if places[0] == places[4]:
            raise InputError(where, "returns to its source", "a bounce ends at another GPU")
    else:
        raise InputError(
            where,
            f"has {len(places)} place{'s' * (len(places) != 1)}",
            "a transfer is SRC->EXE->DST, a bounce SRC->EXE->HOST->EXE->DST",
        )
    blocks, fifo = _parse_options(options[:-1], _kind(transfers), where)
    return Flow(transfers, blocks, fifo)


def _kind(transfers: tuple[Transfer, ...]) -> _Kind:
    """`plain` flows have no FIFO: copy engines', and those that end or begin in host memory."""
    if len(transfers) == 2:
        return "bounce"
    (one,) = transfers
    between_gpus = {one.source.kind, one.destination.kind} == {"G"}
    return "direct" if between_gpus and not one.uses_copy_engine else "plain"


def parse_set(text: str) -> TransferSet:
    """Parse flows that spaces keep apart.

    Raises:
        InputError: empty, too long, or a part is not a flow.
    """
    if len(text) > _MAX_TEXT * 16:
        raise InputError("transfer set", f"has {len(text)} characters", "name at most a few flows")
    parts = text.split()
    if not parts:
        raise InputError("transfer set", "is empty", "name at least one flow, as G0->G0->G1")
    return transfer_set(parse_flow(part) for part in parts)


def direct_write(
    source: int, target: int, *, blocks: int | None = None, fifo: Fifo | None = None
) -> Flow:
    """GPU `source` writing to GPU `target`; `fifo` counts only where blocks are given."""
    one, other = Place("G", source), Place("G", target)
    return Flow((Transfer(one, one, other),), blocks, _direct_fifo(blocks, fifo))


def direct_read(
    source: int, target: int, *, blocks: int | None = None, fifo: Fifo | None = None
) -> Flow:
    """GPU `target` reading from GPU `source`; `fifo` counts only where blocks are given."""
    one, other = Place("G", source), Place("G", target)
    return Flow((Transfer(one, other, other),), blocks, _direct_fifo(blocks, fifo))


def _direct_fifo(blocks: int | None, fifo: Fifo | None) -> Fifo | None:
    """The one form of a direct flow's FIFO: the default is None, and no side is named."""
    if blocks is None or fifo is None:
        return None
    sideless = msgspec.structs.replace(fifo, side=Fifo().side)
    return None if sideless == Fifo() else sideless


def bounce(
    source: int, target: int, numa: int, *, blocks: int | None = None, fifo: Fifo | None = None
) -> Flow:
    """GPU `source` writing to host memory of NUMA node `numa`, GPU `target` reading it there."""
    one, host, other = Place("G", source), Place("C", numa), Place("G", target)
    transfers = (Transfer(one, one, host), Transfer(host, other, other))
    return Flow(transfers, blocks, fifo or Fifo())
