"""Transfers, flows and transfer sets, with the text form SRC->EXE->DST.

`G0->G0->G4` is GPU 0 writing to GPU 4, `G0->G4->G4` GPU 4 reading from GPU 0, `G0->D0->C1` GPU 0's
copy engine writing to NUMA node 1's host memory. A bounce is one flow of two linked transfers,
`G0->G0->C1->G4->G4`. A NIC at each end moves a flow over the network,
`h0.G3->h0.N0->h1.N1->h1.N1->h1.G0`; where a NIC cannot reach a GPU's memory, kernels fill and empty
a FIFO in host memory beside it, `h0.G3->h0.G3->h0.C0->h0.N0->h1.N1->h1.N1->h1.C1->h1.G0->h1.G0`.
One node's part of such a flow is `G3->N0->N0` or `N1->N1->C1->G0->G0`. A GPU may send through
the memory of another GPU nearer to the NIC: `G3->G3->G0->N0->N0`.

    set     = flow { " " flow }
    flow    = path [ "{" option { "," option } "}" ]
    path    = place "->" place "->" place { "->" place "->" place }
    place   = [ host "." ] ( "G" | "C" | "D" | "N" ) index
    option  = "blocks=" size | "fifo=" size | "slots=" size | "buffer=" size | "side=" side
    size    = digits [ "K" | "M" ]          side = "sender" | "receiver"

Short forms are read too: `0:4` is G0->G0->G4 (as NCCL moves bytes between peers), `0<4` is GPU 0
reading from GPU 4, `0:C1:4` the bounce through C1, `0:4,blocks=8` has options, `+` joins the flows
of a set, and TransferBench's triplets stand in parentheses. All but `0<4` and parentheses need no
quotes in a shell.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Final, Literal, get_args

import msgspec

from tccl_py.errors import InputError, check_once, check_type, require, spell
from tccl_py.files import TextValue

Side = Literal["sender", "receiver"]
_Kind = Literal["bounce", "direct", "plain", "network"]

DEFAULT_FIFO_BYTES = 4 * 1024 * 1024  # NCCL_BUFFSIZE's default for the Simple protocol
FIFO_SLOTS = 8  # NCCL_STEPS: a FIFO is eight slots of NCCL_BUFFSIZE / 8
MAX_FIFO_BYTES = 1 << 30
MAX_BLOCKS = 64  # NCCL's MAXCHANNELS: one block a channel
MAX_INDEX = 99_999  # The pattern of places has five digits

_PLACE = re.compile(r"(?:(?P<host>[A-Za-z0-9_.-]+)\.)?(?P<kind>[GCDN])(?P<index>0|[1-9][0-9]{0,4})")
_SHORT = re.compile(r"([0-9]{1,5})([:<]|:C[0-9]{1,5}:)([0-9]{1,5})(?:,(.+))?", re.ASCII)
_SIZE = re.compile(r"(?P<number>[1-9][0-9]{0,9})(?P<unit>[KM]?)")
_UNIT = {"": 1, "K": 1024, "M": 1024 * 1024}
_MAX_TEXT = 65536
_ENTERS = "NN(?:C(?:GG)?|G)"
_NETWORK = re.compile(f"(?:G(?:G[CG])?|C)N(?:N|{_ENTERS})|{_ENTERS}")
"""Kinds of the places of a network flow: both hosts' parts, or one host's part."""


class Place(msgspec.Struct, frozen=True, order=True):
    """A memory or an executor: `G2`, `D2`, `C1`, `N0`; on another host `h3.G2`."""

    kind: Literal["G", "C", "D", "N"]
    index: int
    host: str = ""

    @property
    def device(self) -> str:
        """The device's id in a Machine; a copy engine is part of a GPU."""
        return f"{'G' if self.kind == 'D' else self.kind}{self.index}"

    def __str__(self) -> str:
        prefix = f"{self.host}." if self.host else ""
        return f"{prefix}{self.kind}{self.index}"


@functools.lru_cache(maxsize=4096)
def place_named(name: str) -> Place:
    """Return the device or space with a name: the one parser of names.

    >>> place_named("node-1.rack.G12")
    Place(kind='G', index=12, host='node-1.rack')

    Raises InputError: the text names no place.
    """
    return _parse_place(name, "device")


def index_of(device: str) -> int:
    """Return the index of a device of a Machine.

    >>> index_of("G12"), index_of(Place("D", 3).device)
    (12, 3)
    """
    return place_named(device).index


class Transfer(msgspec.Struct, frozen=True, order=True):
    """Bytes moving from `source` to `destination`, moved by `executor`."""

    source: Place
    executor: Place
    destination: Place

    @property
    def operation(self) -> Literal["write", "read"]:
        """`write` if the executor is on the source's side, else `read`."""
        ends = (self.executor.device, self.executor.host)
        return "write" if ends == (self.source.device, self.source.host) else "read"

    @property
    def uses_copy_engine(self) -> bool:
        """True if a copy engine, not a kernel, moves the bytes."""
        return self.executor.kind == "D"

    def __str__(self) -> str:
        return f"{self.source}->{self.executor}->{self.destination}"


class Fifo(msgspec.Struct, frozen=True, order=True):
    """A block's buffer between writer and reader; `side` is where a bounce's is allocated."""

    bytes: int = DEFAULT_FIFO_BYTES
    slots: int = FIFO_SLOTS
    side: Side = "receiver"


class Flow(TextValue):
    """The bytes of a hop: a transfer, or linked transfers in order with FIFOs between.

    `blocks` are thread blocks (NCCL: channels), None "as many as needed"; `fifo` is each block's,
    None for a direct flow's default and for plain transfers; `buffer` a plain transfer's bytes.
    """

    __slots__ = ("blocks", "buffer", "fifo", "kind", "transfers")

    def __init__(
        self,
        transfers: tuple[Transfer, ...],
        blocks: int | None = None,
        fifo: Fifo | None = None,
        buffer: int | None = None,
    ) -> None:
        if isinstance(transfers, str):
            raise InputError("`transfers`", "is a text", "read it by `parse_flow`")
        kind = _kind(transfers)
        if kind in ("bounce", "network"):
            fifo = fifo or Fifo()
        elif fifo is not None:
            fifo = msgspec.structs.replace(fifo, side=Fifo().side)
            keeps = kind == "direct" and blocks is not None and fifo != Fifo()
            fifo = fifo if keeps else None
        self.transfers: Final = transfers
        self.blocks: Final = blocks
        self.fifo: Final = fifo
        self.buffer: Final = buffer
        self.kind: Final = kind
        more = "".join(f"->{part.executor}->{part.destination}" for part in transfers[1:])
        options = _options_text(blocks, fifo or Fifo(), buffer)
        self._text = f"{transfers[0]}{more}{{{options}}}" if options else f"{transfers[0]}{more}"

    @classmethod
    def from_text(cls, text: str) -> Flow:
        """Parse one flow; see `parse_flow`."""
        return parse_flow(text)

    @property
    def is_bounce(self) -> bool:
        """True if the bytes go through host memory to another GPU of the node."""
        return self.kind == "bounce"

    @property
    def through(self) -> int | None:
        """The NUMA node of a bounce's host memory; None for other flows."""
        return self.transfers[0].destination.index if self.is_bounce else None

    @property
    def peer_transfers(self) -> tuple[Transfer, ...]:
        """Its transfers by which a GPU uses another GPU's memory."""
        ends = ((part, part.source.kind + part.destination.kind) for part in self.transfers)
        return tuple(part for part, kinds in ends if kinds == "GG")

    @property
    def is_network(self) -> bool:
        """True if a NIC moves the bytes."""
        return self.kind == "network"

    @property
    def places(self) -> tuple[Place, ...]:
        """Source, executor and destination of each transfer, in the order of the bytes."""
        return tuple(p for t in self.transfers for p in (t.source, t.executor, t.destination))

    @property
    def words(self) -> str:
        """The flow as people say it: both ends, and what lies between.

        >>> parse_flow("G0->G0->C1->G2->G2{blocks=32}").words
        'G0 -> G2 over host memory of node 1'
        >>> parse_flow("G0->G4->G4").words
        'G0 -> G4 by P2P read'
        """
        names = {
            place: f"host memory of node {place.index}" if place.kind == "C" else str(place)
            for place in self.places
            if place.kind != "D"
        }
        source, target = names.pop(self.source), names.pop(self.destination)
        by = f" over {', '.join(names.values())}" if names else ""
        if any(part.uses_copy_engine for part in self.transfers):
            by += " by copy engine"
        elif self.peer_transfers and not names:
            by = " by P2P" + " read" * (self.transfers[0].operation == "read")
        return f"{source} -> {target}{by}"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of its places, in the order of the bytes; "" is the local host."""
        return tuple(dict.fromkeys(place.host for place in self.places))

    @property
    def source(self) -> Place:
        """The memory at the start of the flow."""
        return self.transfers[0].source

    @property
    def destination(self) -> Place:
        """The memory at the end of the flow."""
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
        if isinstance(flows, str):
            raise InputError("`flows`", "is a text", "read it by `parse_set`")
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


def _kind(transfers: tuple[Transfer, ...]) -> _Kind:
    """Return the kind; `plain` flows have no FIFO: a copy engine, or host memory at an end."""
    if any(transfer.executor.kind == "N" for transfer in transfers):
        return "network"
    if len(transfers) == 2:
        return "bounce"
    (only,) = transfers
    between_gpus = only.source.kind == only.destination.kind == "G"
    return "direct" if between_gpus and not only.uses_copy_engine else "plain"


def _size_text(count: int) -> str:
    unit = next(unit for unit in "MK" if count % _UNIT[unit] == 0) if count % 1024 == 0 else ""
    return f"{count // _UNIT[unit]}{unit}"


def _options_text(blocks: int | None, fifo: Fifo, buffer: int | None) -> str:
    options = {
        "blocks": "" if blocks is None else str(blocks),
        "fifo": "" if fifo.bytes == DEFAULT_FIFO_BYTES else _size_text(fifo.bytes),
        "slots": "" if fifo.slots == FIFO_SLOTS else str(fifo.slots),
        "side": "" if fifo.side == Fifo().side else fifo.side,
        "buffer": "" if buffer is None else _size_text(buffer),
    }
    return ",".join(f"{name}={value}" for name, value in options.items() if value)


@functools.lru_cache(maxsize=1 << 16)  # journals name the same few flows again and again
def parse_flow(text: str) -> Flow:
    """Parse one flow.

    >>> parse_flow("G0->G4->G4").transfers[0].operation
    'read'
    >>> str(parse_flow("G0->G0->C1->G4->G4{fifo=512K,blocks=8}"))
    'G0->G0->C1->G4->G4{blocks=8,fifo=512K}'

    Raises InputError: not a flow; the message has the text and the right form.
    """
    check_type(text, "text", str)
    where = f"flow {text[:60]!r}"
    body, brace, options = _long_form(text).partition("{")
    right = "close them with }"
    require(not brace or options.endswith("}"), where, "the options do not end", right)
    places = [_parse_place(part, where) for part in body.split("->")]
    network = any(place.kind == "N" for place in places)
    if network:
        _check_network(places, where)
    right = "a transfer is SRC->EXE->DST or 0:4, a bounce SRC->EXE->HOST->EXE->DST or 0:C1:4"
    counts = network or len(places) in (3, 5)
    require(counts, where, f"has {spell(len(places), 'place')}", right)
    transfers = link_transfers(places)
    for transfer in transfers:
        _check_transfer(transfer, where)
    if len(transfers) == 2 and not network:
        kinds = "".join(place.kind for place in places[::2])
        require(kinds == "GCG", where, "is no bounce", "a bounce goes GPU, host memory, GPU")
        elsewhere = places[0] != places[-1]
        require(elsewhere, where, "returns to its source", "a bounce ends at another GPU")
    return _with_options(transfers, options[:-1], where)


def link_transfers(places: Sequence[Place]) -> tuple[Transfer, ...]:
    """Return the transfers of a path, each from where the one before ends."""
    return tuple(Transfer(*places[at : at + 3]) for at in range(0, len(places) - 2, 2))


def parse_set(text: str) -> TransferSet:
    """Parse flows with spaces or `+` between.

    >>> parse_set("0:C1:4,blocks=8,fifo=512K+(G4->G4->G0)+1<2")
    TransferSet('G0->G0->C1->G4->G4{blocks=8,fifo=512K} G2->G1->G1 G4->G4->G0')

    Raises InputError: empty, too long, or a part is not a flow.
    """
    check_type(text, "text", str)
    require(len(text) <= _MAX_TEXT, "transfer set", f"has {len(text)} characters", "name fewer")
    parts = flow_texts(text)
    require(parts, "transfer set", "is empty", "name at least one flow, as G0->G0->G1")
    return transfer_set(map(parse_flow, parts))


def flow_texts(text: str) -> list[str]:
    """Return the texts of a set's flows, in the order given."""
    return text.replace("+", " ").split()


def _long_form(text: str) -> str:
    """Return a flow of a short form by its places; any other text without parentheses."""
    body, brace, options = text.partition("{")
    if body.startswith("(") and body.endswith(")"):
        return f"{body[1:-1]}{brace}{options}"
    match = _SHORT.fullmatch(body)
    if match is None:
        return text
    first, separator, second, more = match.groups()
    path = f"G{first}->G{first}->G{second}"
    if separator == "<":
        path = f"G{second}->G{first}->G{first}"
    elif separator != ":":
        path = f"G{first}->G{first}->{separator[1:-1]}->G{second}->G{second}"
    return f"{path}{{{more}}}" if more else f"{path}{brace}{options}"


def _parse_place(text: str, where: str) -> Place:
    match = _PLACE.fullmatch(text)
    if match is None:
        right = "a flow is G0->G0->G1, or 0:1; places are G2, D2, C1, N0 or, elsewhere, h3.G2"
        raise InputError(where, f"{text[:40]!r} names no place", right)
    return Place(match["kind"], int(match["index"]), match["host"] or "")  # type: ignore[arg-type]


def _check_transfer(transfer: Transfer, where: str) -> None:
    source, executor, destination = transfer.source, transfer.executor, transfer.destination
    for end in (source, destination):
        require(end.kind != "D", where, f"{end} holds no bytes", "bytes lie in G, C or N places")
    require(source != destination, where, f"{source} sends to itself", "the two ends differ")
    ends = [(end.device, end.host) for end in (source, destination)]
    at_an_end = executor.kind != "C" and (executor.device, executor.host) in ends
    right = "the executor is the G or D of one of the two ends"
    require(at_an_end or executor.kind == "N", where, f"{executor} cannot move it", right)


def _check_network(places: Sequence[Place], where: str) -> None:
    """Check a way out of a node, a way into one, or both, each along places of one host."""
    kinds = "".join(place.kind for place in places)
    right = "name both NICs, as h0.G0->h0.N0->h1.N1->h1.N1->h1.G0, or one, as G0->N0->N0"
    require(_NETWORK.fullmatch(kinds), where, "is no way over the network", right)
    nics = [place for place in places if place.kind == "N"]
    cut = kinds.index("N") + 1 if len(nics) == 3 else 0
    out, into = ({place.host for place in part} for part in (places[:cut], places[cut:]))
    right = "a NIC is on the host it serves"
    require(max(len(out), len(into)) == 1, where, "changes hosts without a NIC", right)
    same_gpu = kinds[:2] != "GG" or places[0] == places[1]
    require(same_gpu, where, "changes GPUs on its way", "one GPU fills or empties the FIFO")
    right = "name each NIC twice, as G0->N0->N0"
    require(nics[-2] == nics[-1], where, "changes NICs on its way", right)
    require(out != into, where, "stays on its host", "the two NICs are on different hosts")


def _with_options(transfers: tuple[Transfer, ...], text: str, where: str) -> Flow:
    kind = _kind(transfers)
    numbers = {"fifo": MAX_FIFO_BYTES, "slots": 1024, "blocks": MAX_BLOCKS}
    if kind == "plain":
        numbers = {"buffer": MAX_FIFO_BYTES, "blocks": MAX_BLOCKS}
    values: dict[str, int] = {}
    side = Fifo().side
    items = text.split(",") if text else []
    check_once(where, "option", (item.partition("=")[0][:20] for item in items))
    for item in items:
        name, _, value = item.partition("=")
        if name in numbers:
            match, high = _SIZE.fullmatch(value), numbers[name]
            values[name] = int(match["number"]) * _UNIT[match["unit"]] if match else 0
            out = match or value.isdecimal()
            fault = f"{name}={value[:20]} is {'out of range' if out else 'no number'}"
            require(1 <= values[name] <= high, where, fault, f"1 to {_size_text(high)}")
        elif name == "side" and kind == "bounce" and value in get_args(Side):
            side = value  # type: ignore[assignment]
        else:
            right = (
                "blocks=N for all flows; fifo=SIZE, slots=N where kernels move bytes from GPU to "
                "GPU; side=sender|receiver for bounces; buffer=SIZE where there is no FIFO"
            )
            raise InputError(where, f"option {item[:40]!r} is not known here", right)
    fifo = Fifo(values.get("fifo", DEFAULT_FIFO_BYTES), values.get("slots", FIFO_SLOTS), side)
    filled = kind != "direct" or fifo == Fifo() or "blocks" in values
    require(filled, where, "has a FIFO but no blocks", "add blocks=N: each has a FIFO")
    return Flow(transfers, values.get("blocks"), fifo, values.get("buffer"))
