"""Logs of NCCL_DEBUG=INFO: final rings, and the transport of every connection."""

from __future__ import annotations

import re

import msgspec

from tccl_py.errors import InputError

# Numbers are bounded, because a torn log joins digits of several.
_CHANNEL = re.compile(
    r"NCCL INFO Channel (?P<number>\d{2,3})/(?P<count>\d{2,3}) :(?P<ranks>(?: +\d{1,7})+) *$",
    re.ASCII,
)
_LINK = re.compile(
    r"NCCL INFO Channel (?P<number>\d{2,3})(?:/\d+)? : "
    r"(?P<source>\d{1,7})\[(?P<from>[0-9a-f]+)\] -> (?P<target>\d{1,7})\[(?P<to>[0-9a-f]+)\]"
    r"(?: \[(?P<way>send|receive)\])? via (?P<via>\S+)",
    re.ASCII,
)
_VERSION = re.compile(r"NCCL version (?P<version>\d{1,3}\.\d{1,3}\.\d{1,3})", re.ASCII)
MAX_LOG_CHARACTERS = 512 * 1024 * 1024


def transport_of(via: str) -> str:
    """Return the transport of a connection by NCCL's name of it.

    >>> transport_of("P2P/CUMEM"), transport_of("SHM/direct")
    ('P2P', 'SHM')
    """
    return via.split("/", maxsplit=1)[0]


class Connection(msgspec.Struct, frozen=True, order=True):
    """One connection: channel, ranks, and NCCL's name for it (`P2P/CUMEM`, `SHM/direct`)."""

    channel: int
    source: int
    target: int
    via: str


class InitLog(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed log; `communicators` holds final rank orders, one tuple of rings for each."""

    version: str | None
    communicators: tuple[tuple[tuple[int, ...], ...], ...]
    connections: tuple[Connection, ...]

    def rings_over(self, ranks: int) -> tuple[tuple[int, ...], ...]:
        """Return the first rings over this many ranks; () unless every ring has each rank once."""
        rings = next((found for found in self.communicators if len(found[0]) == ranks), ())
        every = list(range(ranks))
        return rings if all(sorted(ring) == every for ring in rings) else ()


def parse_log(text: str, *, where: str) -> InitLog:
    """Read final channels and connections from an INFO log of one or more ranks.

    Only rank 0 prints orders; a communicator begins with its channel 0 and ends with the last.
    """
    if len(text) > MAX_LOG_CHARACTERS:
        raise InputError(where, "is too large", f"at most {MAX_LOG_CHARACTERS} characters")
    version = _VERSION.search(text)
    rings: list[list[tuple[int, ...]]] = []
    expected: list[int] = []
    connections = set()
    for number, line in enumerate(text.splitlines(), start=1):
        channel = _CHANNEL.search(line.rstrip())
        if channel is not None:
            _add(channel, rings, expected, f"{where}:{number}")
            continue
        link = _LINK.search(line)
        if link is not None:
            ends = int(link["number"]), int(link["source"]), int(link["target"])
            connections.add(Connection(*ends, link["via"]))
    for found, count in zip(rings, expected, strict=True):
        if len(found) != count:
            raise InputError(where, f"shows {len(found)} of {count} channels", "give the whole log")
    return InitLog(
        version=version["version"] if version else None,
        communicators=tuple(tuple(found) for found in rings),
        connections=tuple(sorted(connections)),
    )


def _add(
    match: re.Match[str], rings: list[list[tuple[int, ...]]], expected: list[int], where: str
) -> None:
    number, count = int(match["number"]), int(match["count"])
    if number == 0:
        rings.append([])
        expected.append(count)
    if not rings or len(rings[-1]) != number or expected[-1] != count:
        raise InputError(
            where, f"channel {number} of {count} comes out of turn", "give the log of one job"
        )
    rings[-1].append(tuple(int(rank) for rank in match["ranks"].split()))


def same_rings(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return whether two rank orders are the same ring, from any start.

    >>> same_rings((0, 2, 1, 3), (1, 3, 0, 2))
    True
    """
    if len(one) != len(other) or set(one) != set(other) or not one:
        return one == other
    start = other.index(one[0])
    return one == (*other[start:], *other[:start])
