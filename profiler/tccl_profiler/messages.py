"""What the controller and its workers say to each other; bytes of transfers go another way."""

from __future__ import annotations

import msgspec

from tccl_profiler.links import Accept, AskLinks, Connect, Linked, Listen, Listening
from tccl_profiler.program import DeviceProgram


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message, with two descriptors: the control segment and the lifeline.

    `slot` is the device's place in the control segment, `device` its name in the machine: `G0`. The
    lifeline is a pipe that ends with the controller, however that ends; so does the worker then.
    A NIC has an IP address and the name of an interface.
    """

    backend: str
    slot: int
    device: str
    bus_id: str
    cpus: tuple[int, ...]
    control_bytes: int
    arena_bytes: int
    user_bytes: int
    address: str = ""
    interface: str = ""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A device that is ready: how many lanes it runs at once, and how others reach its arena."""

    pid: int
    name: str
    lanes: int
    arena_bytes: int
    handle: bytes
    memory_bytes: int


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Another device's arena; `descriptor` counts the message's descriptors, -1 is none."""

    space: str
    handle: bytes
    size: int
    bus_id: str
    descriptor: int = -1


class Meet(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The other devices' arenas."""

    peers: tuple[Peer, ...]


class Share(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Host memory that replaces what was mapped under this name, with its descriptor."""

    space: str
    size: int


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How much a copy moves: groups of slices; a stamp follows each group."""

    groups: int
    slices: int = 1


class Run(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Queue `repeats` repeats of a program; repeat r waits for the flag to be `epoch` + r."""

    program: DeviceProgram
    epoch: int
    repeats: int
    warm_ns: int
    window_ns: int
    patience_ns: int
    paces: tuple[Pace, ...] = ()
    check: bool = False


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask the device for its time so many times."""

    count: int


class Pinged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """When the host asked, what the device's time was, when the host saw it; nanoseconds."""

    asked_ns: tuple[int, ...]
    device_ns: tuple[int, ...]
    seen_ns: tuple[int, ...]


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What was asked for has been done."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It could not be done; `fatal` if the worker is of no more use, `link` if a link is lost."""

    what: str
    fatal: bool = True
    link: bool = False


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Give everything back and end."""


ToWorker = Start | Meet | Share | Run | Ping | Listen | Connect | Accept | AskLinks | Stop
FromWorker = Started | Done | Pinged | Listening | Linked | Failed
