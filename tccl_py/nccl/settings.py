"""Settings: one process-wide choice for stock NCCL, and the environment that makes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.transfer import DEFAULT_FIFO_BYTES, MAX_FIFO_BYTES, Side
from tccl_py.nccl.versions import LATEST, Level, version_facts

# The part of NCCL's settings that is about NICs: their variables, and names fit to stand in them.


CrossNic = Literal[0, 1, 2]

MAX_GID_INDEX = 255
_MAX_HCAS = 32
"""NCCL's MAX_IB_DEVS; it drops what a list has beyond."""
_MAX_INTERFACES = 16
"""NCCL's MAX_IFS."""
_MAX_SOCKET_THREADS, _MAX_SOCKETS = 16, 64
"""NCCL's MAX_THREADS and MAX_SOCKETS of one connection (net_socket.cc)."""
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


CopyEngineSide = Literal["sender", "receiver", "both"]

_SHM_MODES: dict[CopyEngineSide, str] = {"sender": "1", "receiver": "2", "both": "3"}
_OLD_LEVELS: tuple[Level, ...] = ("LOC", "PIX", "PXB", "PHB", "SYS", "SYS")
"""What NCCL_P2P_LEVEL=0, 1, ... meant before levels had names; larger numbers are SYS."""
HOST_VARIABLES = (
    "NCCL_NVLS_ENABLE",
    "NCCL_SOCKET_IFNAME",
    "NCCL_SOCKET_FAMILY",
    "NCCL_IB_DISABLE",
    "NCCL_HOSTID",
)
"""Variables of the caller that say what the host has or forbids; the jobs of `tccl verify` get the
same."""
_INTEGER = re.compile(r"[ \t\n]*(?P<sign>[+-]?)(?P<digits>[0-9]{1,18})")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one NCCL process is told; None is NCCL's own default.

    `p2p_level` LOC lets no pair talk directly. `p2p_read` None reads on NVLink between two sm 80
    GPUs and writes elsewhere. `channels` are ring channels in the graph file; a communicator ends
    up with more, see `final_channels`. `buffsize` is one channel's FIFO in bytes. `shm_disable`
    sends pairs without P2P over NICs; no plan chooses it. `min_channels` and `max_channels` bound
    the channels that a communicator ends up with.

    Of the network: NICs reach GPU memory up to `net_gdr_level` (LOC: never), when sending only if
    `net_gdr_read` lets them (None: not below sm 80 without NVLink). `cross_nic` 0 keeps a ring on
    one rail, 1 lets it change rails, 2 (NCCL's default) where that helps. `ib_hca` are NICs by
    their exact names, with or without a port (`mlx5_0:1`), `socket_ifname` interfaces; () is all.
    Each connection over sockets has `socket_threads` helper threads with `sockets_per_thread`
    sockets each (None: one of each, except on NICs of some clouds; net_socket.cc).
    """

    version: str = LATEST
    p2p_level: Level | None = None
    p2p_read: bool | None = None
    p2p_copy_engine: bool = False
    shm_locality: Side = "receiver"
    shm_copy_engine: CopyEngineSide | None = None
    shm_disable: bool = False
    net_disable_intra: bool = False
    channels: int = 1
    min_channels: int | None = None
    max_channels: int | None = None
    buffsize: int = DEFAULT_FIFO_BYTES
    algo: Literal["Ring"] | None = None
    net_gdr_level: Level | None = None
    net_gdr_read: bool | None = None
    cross_nic: CrossNic | None = None
    ib_hca: tuple[str, ...] = ()
    ib_gid_index: int | None = None
    socket_ifname: tuple[str, ...] = ()
    socket_threads: int | None = None
    sockets_per_thread: int | None = None


def check_settings(settings: Settings) -> Settings:
    """Return `settings` if its version of NCCL can be made to do that.

    Raises:
        InputError: a choice this version does not have, or a number out of its range.
    """
    facts = version_facts(settings.version)
    where = f"settings for NCCL {settings.version}"
    if settings.shm_copy_engine is not None and not facts.shm_copy_engine:
        raise InputError(
            where, "bounces cannot use a copy engine", "leave shm_copy_engine out, or use NCCL 2.28"
        )
    if settings.p2p_copy_engine and not facts.p2p_copy_engine:
        raise InputError(where, "P2P cannot use a copy engine", "leave p2p_copy_engine out")
    if not 1 <= settings.channels <= facts.max_channels:
        raise InputError(
            where,
            f"channels is {settings.channels}",
            f"a graph file holds 1 to {facts.max_channels}",
        )
    limits = (settings.min_channels or 1, settings.max_channels or facts.max_final_channels)
    if not 1 <= limits[0] <= limits[1] <= facts.max_final_channels:
        what = f"channels are to be {limits[0]} to {limits[1]} in the end"
        raise InputError(where, what, f"1 to {facts.max_final_channels}")
    if not 1024 <= settings.buffsize <= MAX_FIFO_BYTES:
        raise InputError(where, f"buffsize is {settings.buffsize}", "1024 bytes to 1 GiB")
    for name in ("p2p_level", "net_gdr_level"):
        if getattr(settings, name) in facts.unknown_levels:
            raise InputError(
                where, f"{name} is {getattr(settings, name)}", "this version takes it for LOC"
            )
    check_network(
        where=where,
        hcas=settings.ib_hca,
        gid_index=settings.ib_gid_index,
        names=settings.socket_ifname,
    )
    threads, sockets = settings.socket_threads or 1, settings.sockets_per_thread or 1
    if not (1 <= threads <= _MAX_SOCKET_THREADS and 1 <= sockets <= _MAX_SOCKETS // threads):
        raise InputError(
            where,
            f"a connection has {threads} socket threads with {sockets} sockets each",
            f"1 to {_MAX_SOCKET_THREADS} threads, and at most {_MAX_SOCKETS} sockets together",
        )
    return settings


def environment(settings: Settings) -> dict[str, str]:
    """The variables that differ from NCCL's defaults; the graph file is not among them.

    >>> environment(Settings(p2p_level="LOC", buffsize=524288))
    {'NCCL_P2P_DISABLE': '1', 'NCCL_BUFFSIZE': '524288'}

    Raises:
        InputError: from `check_settings`.
    """
    check_settings(settings)
    level = settings.p2p_level
    mode = settings.shm_copy_engine
    read = settings.p2p_read
    choices = {
        "NCCL_P2P_DISABLE": "1" if level == "LOC" else None,
        "NCCL_P2P_LEVEL": level if level != "LOC" else None,
        "NCCL_P2P_READ_ENABLE": None if read is None else str(int(read)),
        "NCCL_P2P_USE_CUDA_MEMCPY": "1" if settings.p2p_copy_engine else None,
        "NCCL_SHM_LOCALITY": "1" if settings.shm_locality == "sender" else None,
        "NCCL_SHM_USE_CUDA_MEMCPY": "1" if mode else None,
        "NCCL_SHM_MEMCPY_MODE": _SHM_MODES[mode] if mode else None,
        "NCCL_SHM_DISABLE": "1" if settings.shm_disable else None,
        "NCCL_NET_DISABLE_INTRA": "1" if settings.net_disable_intra else None,
        "NCCL_MIN_NCHANNELS": _number_text(settings.min_channels),
        "NCCL_MAX_NCHANNELS": _number_text(settings.max_channels),
        "NCCL_BUFFSIZE": (
            str(settings.buffsize) if settings.buffsize != DEFAULT_FIFO_BYTES else None
        ),
        "NCCL_ALGO": settings.algo,
        **network_environment(
            level=settings.net_gdr_level,
            read=settings.net_gdr_read,
            cross=settings.cross_nic,
            hcas=settings.ib_hca,
            gid_index=settings.ib_gid_index,
            names=settings.socket_ifname,
        ),
        "NCCL_SOCKET_NTHREADS": _number_text(settings.socket_threads),
        "NCCL_NSOCKS_PERTHREAD": _number_text(settings.sockets_per_thread),
    }
    return {name: value for name, value in choices.items() if value is not None}


def _number_text(number: int | None) -> str | None:
    return None if number is None else str(number)


def settings_from_environment(
    variables: Mapping[str, str], *, version: str = LATEST, channels: int = 1
) -> Settings:
    """What NCCL makes of these variables; a value it would not understand counts as unset.

    Copy-engine bounces are dropped for a version that no longer has them. Lists of NICs or
    interfaces count only where they name them exactly (`=mlx5_0,mlx5_1`): what prefixes and
    exclusions come to is another question on every host.
    """
    number = {name: integer(variables.get(name)) for name in variables}
    engine: CopyEngineSide | None = None
    if number.get("NCCL_SHM_USE_CUDA_MEMCPY") == 1 and version_facts(version).shm_copy_engine:
        modes = {int(code): side for side, code in _SHM_MODES.items()}
        engine = modes.get(number.get("NCCL_SHM_MEMCPY_MODE") or 1, "sender")
    read = number.get("NCCL_P2P_READ_ENABLE")
    size = number.get("NCCL_BUFFSIZE") or 0
    gdr_read = number.get("NCCL_NET_GDR_READ")
    cross, gid = number.get("NCCL_CROSS_NIC"), number.get("NCCL_IB_GID_INDEX")
    threads = number.get("NCCL_SOCKET_NTHREADS") or 0
    threads = threads if 1 <= threads <= _MAX_SOCKET_THREADS else 0
    sockets = number.get("NCCL_NSOCKS_PERTHREAD") or 0
    sockets = sockets if 1 <= sockets <= _MAX_SOCKETS // max(1, threads) else 0
    return Settings(
        version=version,
        p2p_level="LOC"
        if number.get("NCCL_P2P_DISABLE") == 1
        else _level(variables.get("NCCL_P2P_LEVEL")),
        p2p_read=None if read is None else read != 0,
        p2p_copy_engine=number.get("NCCL_P2P_USE_CUDA_MEMCPY") == 1,
        shm_locality="sender" if number.get("NCCL_SHM_LOCALITY") == 1 else "receiver",
        shm_copy_engine=engine,
        shm_disable=number.get("NCCL_SHM_DISABLE") == 1,
        net_disable_intra=number.get("NCCL_NET_DISABLE_INTRA") == 1,
        channels=channels,
        min_channels=_limit(number.get("NCCL_MIN_NCHANNELS"), version),
        max_channels=_limit(number.get("NCCL_MAX_NCHANNELS"), version),
        buffsize=size if 1024 <= size <= MAX_FIFO_BYTES else DEFAULT_FIFO_BYTES,
        algo="Ring" if variables.get("NCCL_ALGO", "").lower() == "ring" else None,
        net_gdr_level=_level(variables.get("NCCL_NET_GDR_LEVEL")),
        net_gdr_read=None if gdr_read is None or gdr_read < 0 else gdr_read != 0,
        cross_nic=cross if cross in (0, 1, 2) else None,  # type: ignore[arg-type]
        ib_hca=ib_hca(variables.get("NCCL_IB_HCA")),
        ib_gid_index=gid if gid is not None and 0 <= gid <= MAX_GID_INDEX else None,
        socket_ifname=interfaces(variables.get("NCCL_SOCKET_IFNAME")),
        socket_threads=threads or None,
        sockets_per_thread=sockets or None,
    )


def _limit(count: int | None, version: str) -> int | None:
    most = version_facts(version).max_final_channels
    return None if count is None or count < 1 else min(count, most)


def _level(text: str | None) -> Level | None:
    for name in get_args(Level):
        if text == name:
            return name  # type: ignore[no-any-return]
    old = integer(text)
    if old is None or old < 0:
        return None
    return _OLD_LEVELS[min(old, len(_OLD_LEVELS) - 1)]


def integer(text: str | None) -> int | None:
    """The decimal number that a variable begins with, as C's strtol reads it; None if none."""
    match = _INTEGER.match(text or "")
    return None if match is None else int(match["sign"] + match["digits"])


def settings_channels(settings: Settings, *, sm: int | None) -> int:
    """Return how many channels a communicator on one node ends up with under these settings."""
    limits = {
        "NCCL_MIN_NCHANNELS": settings.min_channels,
        "NCCL_MAX_NCHANNELS": settings.max_channels,
    }
    variables = {name: str(count) for name, count in limits.items() if count is not None}
    return final_channels(settings.channels, sm=sm, variables=variables, version=settings.version)


def final_channels(
    channels: int,
    *,
    sm: int | None,
    nodes: int = 1,
    speed_intra: float = 0.0,
    variables: Mapping[str, str] | None = None,
    version: str = LATEST,
) -> int:
    """How many channels a communicator ends up with for `channels` of the search or file.

    Doubled always; once more from sm 90 on several nodes above 45 GB/s a channel while there are
    fewer than 16 (connect.cc); then clipped or filled up by NCCL_MAX_NCHANNELS, NCCL_MIN_NCHANNELS.

    >>> final_channels(8, sm=90)
    16
    """
    limit = version_facts(version).max_final_channels
    count = min(channels * 2, limit)
    if (sm or 0) >= 90 and nodes > 1 and speed_intra > 45 and count < 16:
        count *= 2
    low = integer((variables or {}).get("NCCL_MIN_NCHANNELS")) or 0
    high = integer((variables or {}).get("NCCL_MAX_NCHANNELS"))
    low = max(0, min(low, limit))
    high = limit if high is None else max(1, min(high, limit), low)
    return max(min(count, high), low)
