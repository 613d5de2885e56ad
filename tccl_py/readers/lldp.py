"""What LLDP tells of the other end of an interface's cable, as systemd-networkd has saved it.

Source: link_lldp_save (networkd-lldp-rx.c of systemd 255): a frame after its size in 8 bytes; IEEE
802.1AB: a frame's fields, each after 7 bits of kind and 9 of length.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tccl_py.readers.sysfs import HostFiles

_FOLDER = "run/systemd/netif/lldp"
_SIZE, _ETHERNET = 8, 14
_PORT, _PORT_DESCRIPTION, _SYSTEM = 2, 4, 5
_MAC = 3
"""The kind of a port's name that is an address."""


class Neighbour(msgspec.Struct, frozen=True):
    """A port of another system; "" is unknown."""

    system: str
    port: str


def neighbours(files: HostFiles, interface: str) -> tuple[Neighbour, ...]:
    """Return the ports that an interface hears; none without systemd-networkd's LLDP."""
    index = files.number(f"sys/class/net/{interface}/ifindex")
    data = (files.data(f"{_FOLDER}/{index}") or b"") if index is not None else b""
    heard, at = list[Neighbour](), 0
    while len(data) > at + _SIZE:
        end = at + _SIZE + int.from_bytes(data[at : at + _SIZE], "little")
        fields = dict(_fields(data[at + _SIZE + _ETHERNET : end]))
        named = fields.get(_PORT, b"")
        port = fields.get(_PORT_DESCRIPTION, b"") if named[:1] == bytes([_MAC]) else named[1:]
        heard.append(Neighbour(_text(fields.get(_SYSTEM, b"")), _text(port)))
        at = end
    return tuple(heard)


def _fields(frame: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while len(frame) >= at + 2 and frame[at] >> 1:
        length = (frame[at] & 1) << 8 | frame[at + 1]
        yield frame[at] >> 1, frame[at + 2 : at + 2 + length]
        at += 2 + length


def _text(name: bytes) -> str:
    text = name.decode("utf-8", "replace").strip("\0 ")
    return text if text.isprintable() else ""
