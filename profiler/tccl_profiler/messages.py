"""What a controller asks of workers: the requests of a device, and the structs they carry.

Links are made in three steps, each at all hosts before the next: receivers listen and return an
endpoint, senders connect, receivers accept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol, get_args

import msgspec

from tccl_profiler.program import DeviceProgram, Link

LINK_S = 10.0  # seconds for a link to be made
Making = Literal["listen", "connect", "accept"]
MAKING: tuple[Making, ...] = get_args(Making)


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A device by name, its worker's CPUs, a GPU's bus id, a NIC's address and `network`."""

    device: str
    bus_id: str = ""
    cpus: tuple[int, ...] = ()
    address: str = ""
    interface: str = ""
    network: str = ""


class Start(DeviceSpec, frozen=True, kw_only=True):
    """The device to open; `slot` is its place in the control segment, whose descriptor comes."""

    backend: str
    slot: int
    arena_bytes: int
    user_bytes: int


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """A device is ready, runs so many lanes at once, and shares its arena by `handle`."""

    lanes: int
    arena_bytes: int = 0
    handle: bytes = b""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a space, in place of earlier memory: a descriptor, or a GPU arena's handle."""

    space: str
    handle: bytes = b""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of a copy: groups of slices, each followed by a stamp."""

    groups: int
    slices: int = 1


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Queue `repeats` repeats of a program; repeat r waits for the flag to be `epoch` + r."""

    program: DeviceProgram
    epoch: int
    repeats: int
    warm_ns: int
    window_ns: int
    patience_ns: int
    paces: tuple[Pace, ...] = ()
    check: bool = False


class Pinged(msgspec.Struct, frozen=True, kw_only=True):
    """Host time before, device time, host time after; nanoseconds."""

    asked_ns: tuple[int, ...]
    device_ns: tuple[int, ...]
    seen_ns: tuple[int, ...]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses and ports that await a connection, and the token that identifies the caller."""

    addresses: tuple[tuple[str, int], ...]
    token: bytes


LinkEnds = Mapping[Link, Endpoint | None]
"""Links, and where each is awaited after `listen`."""


class LinkStep(msgspec.Struct, frozen=True, kw_only=True):
    """Take one step for these links, within `limit_s`; answered by their LinkEnds.

    `usable` takes no links and answers the existing, clean links. `listen` and `connect` replace
    namesakes; `connect` needs the endpoints that `listen` answered.
    """

    step: Making | Literal["usable"]
    ends: LinkEnds = {}
    limit_s: float = LINK_S

    def shares(self, part_of: Callable[[str], str]) -> dict[str, LinkStep]:
        """Split the step; `part_of` names the worker or host of a device, which is a link's end."""
        parts: dict[str, dict[Link, Endpoint | None]] = {}
        for link, end in self.ends.items():
            device = link.sender if self.step == "connect" else link.receiver
            parts.setdefault(part_of(device), {})[link] = end
        return {part: msgspec.structs.replace(self, ends=ends) for part, ends in parts.items()}


class DeviceRequests(Protocol):
    """The requests that a worker serves."""

    def open(self, start: Start) -> Started:
        """Take the device; its arena's descriptor, if it has one, goes with the answer."""

    def share(self, share: Share) -> None:
        """Take the memory of a space."""

    def run(self, run: Run) -> None:
        """Run all repeats of a program."""

    def ping(self, count: int) -> Pinged:
        """Read the clock of the device `count` times."""

    def take(self, step: LinkStep) -> dict[Link, Endpoint | None]:
        """Take one step for links."""
