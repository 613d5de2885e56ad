"""Transfers, flows and transfer sets, with the text form SRC->EXE->DST.

`G0->G0->G4` is GPU 0 writing to GPU 4, `G0->G4->G4` GPU 4 reading from GPU 0, `G0->D0->C1` GPU 0's
copy engine writing to NUMA node 1's host memory. A bounce is one flow of two linked transfers,
`G0->G0->C1->G4->G4`. How a flow moves its bytes follows in braces where it is not the default:
`G0->G0->C1->G4->G4{blocks=8,fifo=512K}`. A plain transfer has no FIFO; the size of
the memory that it goes through again and again can be given: `G0->G0->C1{buffer=4M}`.

A flow over the network is moved by a NIC at each end: `h0.G3->h0.N0->h1.N1->h1.N1->h1.G0`. Where a
NIC cannot reach a GPU's memory, kernels fill and empty a FIFO in host memory beside it:
`h0.G3->h0.G3->h0.C0->h0.N0->h1.N1->h1.N1->h1.C1->h1.G0->h1.G0`. Of a flow that leaves or enters one
node, whoever is at the other end, there is that node's part: `G3->N0->N0`, `N1->N1->C1->G0->G0`. A
GPU may send through another one's memory, which is nearer to the NIC: `G3->G3->G0->N0->N0`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Final, Literal

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import TextValue

Side = Literal["sender", "receiver"]

_Kind = Literal["bounce", "direct", "plain", "network"]

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
_LEAVES = "G(?:G[CG])?N|CN"
_ENTERS = "NN(?:C(?:GG)?|G)"
_NETWORK = re.compile(f"(?:{_LEAVES})(?:N|{_ENTERS})|{_ENTERS}")
"""The kinds of the places that a network flow names: both ends, or one and the network."""


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
        kind = "G" if self.uses_copy_engine else self.executor.kind
        executor = Place(kind, self.executor.index, self.executor.host)
        return "write" if executor == self.source else "read"

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


class Flow(TextValue):
    """The bytes of one hop: one transfer, or a bounce's two linked by a FIFO; it has one rate.

    Args:
        transfers: in the order of the bytes.
        blocks: the thread blocks (NCCL: channels) that move it; None is "as many as it takes".
        fifo: of each block of a bounce or network flow, and of a direct flow between GPUs whose
            blocks are given. A direct flow's default FIFO, and that of a plain transfer, is None.
        buffer: the bytes that a plain transfer goes through again and again, all blocks together;
            None leaves it to the source.
    """

    __slots__ = ("blocks", "buffer", "fifo", "transfers")

    def __init__(
        self,
        transfers: tuple[Transfer, ...],
        blocks: int | None = None,
        fifo: Fifo | None = None,
        buffer: int | None = None,
    ) -> None:
        kind = _kind(transfers)
        if kind in ("bounce", "network"):
            fifo = fifo or Fifo()
        else:
            fifo = _direct_fifo(blocks, fifo) if kind == "direct" else None
        self.transfers: Final = transfers
        self.blocks: Final = blocks
        self.fifo: Final = fifo
        self.buffer: Final = buffer
        text = str(transfers[0])
        for transfer in transfers[1:]:
            text += f"->{transfer.executor}->{transfer.destination}"
        options = _options_text(self)
        self._text = f"{text}{{{options}}}" if options else text

    @classmethod
    def from_text(cls, text: str) -> Flow:
        """Parse one flow; see `parse_flow`."""
        return parse_flow(text)

    @property
    def is_bounce(self) -> bool:
        """Whether the bytes go through host memory on their way to another GPU of the node."""
        return len(self.transfers) == 2 and not self.is_network

    @property
    def is_network(self) -> bool:
        """Whether a NIC moves the bytes."""
        return any(one.executor.kind == "N" for one in self.transfers)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of its places, in the order of the bytes; "" is the local host."""
        places = (p for t in self.transfers for p in (t.source, t.executor, t.destination))
        return tuple(dict.fromkeys(place.host for place in places))

    @property
    def source(self) -> Place:
        """The memory that the bytes come from."""
        return self.transfers[0].source

    @property
    def destination(self) -> Place:
        """The memory that the bytes end in."""
        return self.transfers[-1].destination

    def __lt__(self, other: Flow) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[object, ...]:
        return (self.transfers, self.blocks or 0, self.fifo or Fifo(), self.buffer or 0)


class TransferSet(TextValue):
    """Flows that run at the same time; a flow listed twice runs twice.

    The flows are in canonical order; see `transfer_set`.

    >>> parse_set("G2->G2->G3  G0->G0->G1")
    TransferSet('G0->G0->G1 G2->G2->G3')
    """

    __slots__ = ("flows",)

    def __init__(self, flows: tuple[Flow, ...]) -> None:
        self.flows: Final = flows
        self._text = " ".join(map(str, flows))

    @classmethod
    def from_text(cls, text: str) -> TransferSet:
        """Parse a set; see `parse_set`."""
        return parse_set(text)

    def __len__(self) -> int:
        return len(self.flows)


def transfer_set(flows: Iterable[Flow]) -> TransferSet:
    """Return the set of these flows, in canonical order."""
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
    if flow.buffer is not None:
        options.append(f"buffer={_size_text(flow.buffer)}")
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
    kind = "G" if executor.kind == "D" else executor.kind
    beside = Place(kind, executor.index, executor.host) in (source, destination)
    if executor.kind == "C" or not (beside or executor.kind == "N"):
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


def _parse_options(
    text: str, kind: _Kind, where: str
) -> tuple[int | None, Fifo | None, int | None]:
    blocks: int | None = None
    buffer: int | None = None
    fifo = None if kind == "plain" else Fifo()
    for item in text.split(",") if text else ():
        name, _, value = item.partition("=")
        if name == "blocks":
            blocks = _number(name, value, MAX_BLOCKS, where)
        elif kind == "plain" and name == "buffer":
            buffer = _number(name, value, MAX_FIFO_BYTES, where)
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
                "GPU; side=sender|receiver for bounces; buffer=SIZE where there is no FIFO",
            )
    if kind != "direct" or fifo == Fifo():
        return blocks, fifo if kind in ("bounce", "network") else None, buffer
    if blocks is None:
        raise InputError(where, "has a FIFO but no blocks", "add blocks=N: each has a FIFO")
    return blocks, fifo, None


@functools.lru_cache(maxsize=1 << 16)  # journals name the same few flows again and again
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
    if any(place.kind == "N" for place in places):
        _check_network(places, where)
    elif len(places) not in (3, 5):
        raise InputError(
            where,
            f"has {len(places)} place{'s' * (len(places) != 1)}",
            "a transfer is SRC->EXE->DST, a bounce SRC->EXE->HOST->EXE->DST",
        )
    starts = range(0, len(places) - 2, 2)
    transfers = tuple(_transfer(places[at : at + 3], where) for at in starts)
    if len(places) == 5:
        _check_bounce(places, where)
    return Flow(transfers, *_parse_options(options[:-1], _kind(transfers), where))


def _check_bounce(places: list[Place], where: str) -> None:
    source, writer, host, reader, target = places
    if host.kind == "N" or "N" in (writer.kind, reader.kind):
        return
    if (source.kind, host.kind, target.kind) != ("G", "C", "G"):
        raise InputError(where, "is no bounce", "a bounce goes GPU, host memory, GPU")
    if writer.index != source.index or reader.index != target.index:
        raise InputError(where, "is no bounce", "the sender writes and the receiver reads")
    if source == target:
        raise InputError(where, "returns to its source", "a bounce ends at another GPU")


def _check_network(places: list[Place], where: str) -> None:
    """A way out of a node, a way into one, or both, each along places of one host."""
    if not _NETWORK.fullmatch("".join(place.kind for place in places)):
        raise InputError(
            where,
            "is no way over the network",
            "name both NICs, as h0.G0->h0.N0->h1.N1->h1.N1->h1.G0, or one, as G0->N0->N0",
        )
    first = next(at for at, place in enumerate(places) if place.kind == "N")
    out, into = places[: first + 1], places[first + 1 :]
    if not out[:-1]:  # only a way in
        out, into = [], places
    elif len(into) == 1:  # only a way out
        out, into = places, []
    for part in (out, into):
        if len({place.host for place in part}) > 1:
            raise InputError(where, "changes hosts without a NIC", "a NIC is on the host it serves")
        kinds = "".join(place.kind for place in part)
        gpus = [place.index for place in part if place.kind == "G"][: 2 if "GGG" in kinds else None]
        if len(set(gpus)) > 1:
            raise InputError(where, "changes GPUs on its way", "one GPU fills or empties the FIFO")
    if (out and not into and out[-1] != out[-2]) or (into and into[0] != into[1]):
        raise InputError(where, "changes NICs on its way", "name each NIC twice, as G0->N0->N0")
    if out and into and out[0].host == into[0].host:
        raise InputError(where, "stays on its host", "the two NICs are on different hosts")


def _kind(transfers: tuple[Transfer, ...]) -> _Kind:
    """`plain` flows have no FIFO: copy engines', and those that end or begin in host memory."""
    if any(one.executor.kind == "N" for one in transfers):
        return "network"
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
    return Flow((Transfer(one, one, other),), blocks, fifo)


def direct_read(
    source: int, target: int, *, blocks: int | None = None, fifo: Fifo | None = None
) -> Flow:
    """GPU `target` reading from GPU `source`; `fifo` counts only where blocks are given."""
    one, other = Place("G", source), Place("G", target)
    return Flow((Transfer(one, other, other),), blocks, fifo)


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
    return Flow(transfers, blocks, fifo)


def leaving(
    gpu: int,
    nic: int,
    *,
    through: int | None = None,
    relay: int | None = None,
    blocks: int | None = None,
    fifo: Fifo | None = None,
) -> Flow:
    """GPU `gpu` sending by NIC `nic`.

    It goes through host memory of NUMA node `through`, or else the memory of GPU `relay`, if one of
    them is given.

    >>> str(leaving(3, 0)), str(leaving(3, 0, through=1)), str(leaving(3, 0, relay=2))
    ('G3->N0->N0', 'G3->G3->C1->N0->N0', 'G3->G3->G2->N0->N0')
    """
    one, port = Place("G", gpu), Place("N", nic)
    if through is None and relay is None:
        return Flow((Transfer(one, port, port),), blocks, fifo)
    halfway = Place("C", through) if through is not None else Place("G", relay or 0)
    transfers = (Transfer(one, one, halfway), Transfer(halfway, port, port))
    return Flow(transfers, blocks, fifo)


def entering(
    nic: int,
    gpu: int,
    *,
    through: int | None = None,
    blocks: int | None = None,
    fifo: Fifo | None = None,
) -> Flow:
    """GPU `gpu` receiving by NIC `nic`, through host memory of NUMA node `through` if given.

    >>> str(entering(0, 3)), str(entering(0, 3, through=1))
    ('N0->N0->G3', 'N0->N0->C1->G3->G3')
    """
    one, port = Place("G", gpu), Place("N", nic)
    if through is None:
        return Flow((Transfer(port, port, one),), blocks, fifo)
    host = Place("C", through)
    transfers = (Transfer(port, port, host), Transfer(host, one, one))
    return Flow(transfers, blocks, fifo)


def joined(out: Flow, into: Flow, *, sender: str, receiver: str) -> Flow:
    """The flow over the network that leaves host `sender` by one and enters `receiver` by other.

    It has the sender's blocks and FIFO.

    >>> str(joined(leaving(3, 0), entering(1, 0), sender="h0", receiver="h1"))
    'h0.G3->h0.N0->h1.N1->h1.N1->h1.G0'
    """
    arrived = on_host(into, receiver)
    *before, last = on_host(out, sender).transfers
    over = Transfer(last.source, last.executor, arrived.source)
    return Flow((*before, over, *arrived.transfers), out.blocks, out.fifo)


def on_host(flow: Flow, host: str) -> Flow:
    """The flow with all its places on `host`."""
    return elsewhere(flow, lambda place: Place(place.kind, place.index, host))


def elsewhere(flow: Flow, moved: Callable[[Place], Place]) -> Flow:
    """The same flow between other places: `moved` says which stands in for each."""
    transfers = tuple(
        Transfer(moved(one.source), moved(one.executor), moved(one.destination))
        for one in flow.transfers
    )
    return Flow(transfers, flow.blocks, flow.fifo, flow.buffer)


def sending_nic(flow: Flow) -> int | None:
    """The NIC by which a flow leaves its node; None if it does not.

    >>> sending_nic(leaving(3, 1, through=0)), sending_nic(entering(1, 3))
    (1, None)
    """
    return next(
        (
            t.executor.index
            for t in flow.transfers
            if t.executor.kind == "N" and t.operation == "read"
        ),
        None,
    )


def receiving_nic(flow: Flow) -> int | None:
    """The NIC by which a flow enters a node; None if it does not."""
    return next(
        (
            t.executor.index
            for t in flow.transfers
            if t.executor.kind == "N" and t.operation == "write"
        ),
        None,
    )
