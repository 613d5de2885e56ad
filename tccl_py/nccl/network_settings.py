"""The part of NCCL's settings that is about NICs: their variables, and names fit to stand in them.

Source: ncclIbInitDevices (transport/net_ib), ncclFindInterfaces (misc/socket.cc) and
parseStringList (misc/utils.cc) of NCCL 2.30.7.
"""

from __future__ import annotations

import re
from typing import Literal

from tccl_py.errors import InputError
from tccl_py.nccl.versions import Level

CrossNic = Literal[0, 1, 2]

MAX_GID_INDEX = 255
_MAX_HCAS = 32
"""NCCL's MAX_IB_DEVS; it drops what a list has beyond."""
_MAX_INTERFACES = 16
"""NCCL's MAX_IFS."""
# Of RDMA devices and interfaces the kernel lets be named, what neither a list of NCCL's nor a
# shell nor nccl.conf gives another meaning.
_HCA = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}(?::(?P<port>[1-9][0-9]{0,2}))?")
_INTERFACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,14}")


def check_network(
    *, where: str, hcas: tuple[str, ...], gid_index: int | None, names: tuple[str, ...]
) -> None:
    """Refuse names and numbers that NCCL would not take as they are meant.

    Raises:
        InputError: a name that is none, or is there twice, too many of them, or no GID index.
    """
    _check_names(f"{where}: ib_hca", hcas, _HCA, most=_MAX_HCAS, such="mlx5_0 or mlx5_0:1")
    _check_names(f"{where}: socket_ifname", names, _INTERFACE, most=_MAX_INTERFACES, such="eth0")
    if gid_index is not None and not 0 <= gid_index <= MAX_GID_INDEX:
        raise InputError(where, f"ib_gid_index is {gid_index}", f"0 to {MAX_GID_INDEX}")


def _check_names(
    where: str, names: tuple[str, ...], form: re.Pattern[str], *, most: int, such: str
) -> None:
    for name in names:
        if form.fullmatch(name) is None:
            raise InputError(where, f"names {name[:40]!r}", f"a name is such as {such}")
    if len(set(names)) != len(names):
        raise InputError(where, "names one twice", "name each once")
    if len(names) > most:
        raise InputError(where, f"has {len(names)} names", f"NCCL takes {most}")


def network_environment(
    *,
    level: Level | None,
    read: bool | None,
    cross: CrossNic | None,
    hcas: tuple[str, ...],
    gid_index: int | None,
    names: tuple[str, ...],
) -> dict[str, str | None]:
    """The variables that say this; None is a variable to leave alone.

    Names stand behind `=`: without it NCCL takes them for prefixes, and mlx5_1 means mlx5_10 too.
    """
    return {
        "NCCL_NET_GDR_LEVEL": level,
        "NCCL_NET_GDR_READ": None if read is None else str(int(read)),
        "NCCL_CROSS_NIC": None if cross is None else str(cross),
        "NCCL_IB_HCA": f"={','.join(hcas)}" if hcas else None,
        "NCCL_IB_GID_INDEX": None if gid_index is None else str(gid_index),
        "NCCL_SOCKET_IFNAME": f"={','.join(names)}" if names else None,
    }


def ib_hca(text: str | None) -> tuple[str, ...]:
    """The NICs that a value of NCCL_IB_HCA names exactly; () if it is of another form.

    >>> ib_hca("=mlx5_0:1,mlx5_1"), ib_hca("mlx5"), ib_hca("^=mlx5_2")
    (('mlx5_0:1', 'mlx5_1'), (), ())
    """
    return _exact(text, _HCA, _MAX_HCAS)


def interfaces(text: str | None) -> tuple[str, ...]:
    """The interfaces that a value of NCCL_SOCKET_IFNAME names exactly; () as for `ib_hca`."""
    return _exact(text, _INTERFACE, _MAX_INTERFACES)


def _exact(text: str | None, form: re.Pattern[str], most: int) -> tuple[str, ...]:
    if text is None or not text.startswith("="):
        return ()
    names = tuple(dict.fromkeys(name for name in text[1:].split(",") if name))
    if len(names) > most or any(form.fullmatch(name) is None for name in names):
        return ()
    return names


def listed(names: tuple[str, ...], name: str, port: int) -> bool:
    """Whether a list of NICs has this port of this one; an empty list has all.

    >>> listed(("mlx5_0:2",), "mlx5_0", 1), listed(("mlx5_0",), "mlx5_0", 1)
    (False, True)
    """
    return not names or name in names or f"{name}:{port}" in names
