"""RDMA functions over Ethernet of a host: their interfaces, states and IPv4 addresses, from sysfs.

A function's addresses are its GIDs of RoCE: those of its interface, as NCCL asks for them.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address

import msgspec

from tccl_py.readers.sysfs import HostFiles

PREFIX_VARIABLE = "NCCL_IB_SUBNET_PREFIX_LEN"
PREFIX_BITS = 24
"""The bits by which NCCL compares addresses, whatever an interface's mask is."""
_MAX_GIDS = 256
_MAPPED = re.compile(r"0000:0000:0000:0000:0000:ffff:([0-9a-f]{4}):([0-9a-f]{4})", re.ASCII)
_PORT = "1"


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """An RDMA function; `mtu` is its interface's, None if unknown, `addresses` are numbers."""

    name: str
    interface: str
    active: bool
    mtu: int | None
    addresses: tuple[int, ...]

    def subnets(self, bits: int = PREFIX_BITS) -> frozenset[str]:
        """Return the subnets of the addresses, as NCCL compares them.

        >>> at = int(IPv4Address("10.0.3.7"))
        >>> one = Function(name="a", interface="e", active=True, mtu=None, addresses=(at,))
        >>> sorted(one.subnets()), sorted(one.subnets(16))
        (['10.0.3.0/24'], ['10.0.0.0/16'])
        """
        shift = 32 - bits
        return frozenset(f"{IPv4Address(at >> shift << shift)}/{bits}" for at in self.addresses)


def roce_functions(files: HostFiles) -> tuple[Function, ...]:
    """Return the host's RDMA functions over Ethernet, by name."""
    return tuple(
        _function(files, name)
        for name in files.entries("sys/class/infiniband")
        if files.text(f"sys/class/infiniband/{name}/ports/{_PORT}/link_layer") == "Ethernet"
    )


def _function(files: HostFiles, name: str) -> Function:
    port = f"sys/class/infiniband/{name}/ports/{_PORT}"
    interface = next(iter(files.entries(f"sys/class/infiniband/{name}/device/net")), "")
    gids = (files.text(f"{port}/gids/{n}") for n in files.entries(f"{port}/gids")[:_MAX_GIDS])
    mapped = (match for gid in gids if (match := _MAPPED.fullmatch(gid)))
    return Function(
        name=name,
        interface=interface,
        active="ACTIVE" in files.text(f"{port}/state"),
        mtu=files.number(f"sys/class/net/{interface}/mtu") if interface else None,
        # An address has a GID for each version of RoCE.
        addresses=tuple(dict.fromkeys(int(match[1] + match[2], 16) for match in mapped)),
    )
