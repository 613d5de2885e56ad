"""Settings: one process-wide choice for NCCL, and the environment variables of the choice.

Source of names of NICs: ncclIbInitDevices (transport/net_ib), ncclFindInterfaces (misc/socket.cc)
and parseStringList (misc/utils.cc) of NCCL 2.30.7.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.transfer import DEFAULT_FIFO_BYTES, MAX_FIFO_BYTES, Side
from tccl_py.nccl.versions import LATEST, Level, version_facts

CopyEngineSide = Literal["sender", "receiver", "both"]
CrossNic = Literal[0, 1, 2]

HOST_VARIABLES = (
    "NCCL_NVLS_ENABLE",
    "NCCL_SOCKET_IFNAME",
    "NCCL_SOCKET_FAMILY",
    "NCCL_IB_DISABLE",
    "NCCL_HOSTID",
)
"""Variables for what a host has or forbids; the jobs of `tccl verify` inherit them."""
_SHM_MODES: dict[CopyEngineSide, str] = {"sender": "1", "receiver": "2", "both": "3"}
_OLD_LEVELS: tuple[Level, ...] = ("LOC", "PIX", "PXB", "PHB", "SYS", "SYS")
"""Meaning of NCCL_P2P_LEVEL=0, 1, ... before levels had names; larger numbers are SYS."""
_INTEGER = re.compile(r"[ \t\n]*(?P<sign>[+-]?)(?P<digits>[0-9]{1,18})")
MAX_GID_INDEX = 255
# Names of RDMA devices and interfaces that no list of NCCL's, no shell and no nccl.conf misreads.
_HCA = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}(?::(?P<port>[1-9][0-9]{0,2}))?")
_INTERFACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,14}")
_MAX_HCAS, _MAX_INTERFACES = 32, 16
"""NCCL's MAX_IB_DEVS and MAX_IFS; NCCL drops longer lists' ends."""
_MAX_SOCKET_THREADS, _MAX_SOCKETS = 16, 64
"""NCCL's MAX_THREADS and MAX_SOCKETS of one connection (net_socket.cc)."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one NCCL process; None is NCCL's own default.

    `p2p_level` LOC lets no pair talk directly. `p2p_read` None reads on NVLink between two sm 80
    GPUs and writes elsewhere. `channels` are ring channels in the graph file; the final number is
    more (`final_channels`), within `min_channels` and `max_channels`. `buffsize` is a channel's
    FIFO in bytes. `shm_disable` sends pairs without P2P over NICs; no plan chooses it.

    NICs reach GPU memory up to `net_gdr_level` (LOC: never), when sending only if `net_gdr_read`
    lets them (None: not below sm 80 without NVLink). `cross_nic` 0 keeps a ring on one rail, 1 lets
    it change rails, 2 (NCCL's default) where that helps. `ib_hca` are NICs by exact names, with or
    without a port (`mlx5_0:1`), `socket_ifname` interfaces; () is all. A connection over sockets
    has `socket_threads` helper threads with `sockets_per_thread` sockets each.
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
    """Return `settings` if their version of NCCL can follow them."""
    facts = version_facts(settings.version)
    where = f"settings for NCCL {settings.version}"
    if settings.shm_copy_engine is not None and not facts.shm_copy_engine:
        right = "leave shm_copy_engine out, or use NCCL 2.28"
        raise InputError(where, "bounces cannot use a copy engine", right)
    if settings.p2p_copy_engine and not facts.p2p_copy_engine:
        raise InputError(where, "P2P cannot use a copy engine", "leave p2p_copy_engine out")
    if not 1 <= settings.channels <= facts.max_channels:
        right = f"a graph file holds 1 to {facts.max_channels}"
        raise InputError(where, f"channels is {settings.channels}", right)
    limits = (settings.min_channels or 1, settings.max_channels or facts.max_final_channels)
    if not 1 <= limits[0] <= limits[1] <= facts.max_final_channels:
        what = f"channels are to be {limits[0]} to {limits[1]} in the end"
        raise InputError(where, what, f"1 to {facts.max_final_channels}")
    if not 1024 <= settings.buffsize <= MAX_FIFO_BYTES:
        raise InputError(where, f"buffsize is {settings.buffsize}", "1024 bytes to 1 GiB")
    for name in ("p2p_level", "net_gdr_level"):
        level = getattr(settings, name)
        if level in facts.unknown_levels:
            raise InputError(where, f"{name} is {level}", "this version takes it for LOC")
    gid = settings.ib_gid_index
    if gid is not None and not 0 <= gid <= MAX_GID_INDEX:
        raise InputError(where, f"ib_gid_index is {gid}", f"0 to {MAX_GID_INDEX}")
    ports = "mlx5_0 or mlx5_0:1"
    _check_names(f"{where}: ib_hca", settings.ib_hca, _HCA, most=_MAX_HCAS, such=ports)
    names = settings.socket_ifname
    _check_names(f"{where}: socket_ifname", names, _INTERFACE, most=_MAX_INTERFACES, such="eth0")
    threads, sockets = settings.socket_threads or 1, settings.sockets_per_thread or 1
    if not (1 <= threads <= _MAX_SOCKET_THREADS and 1 <= sockets <= _MAX_SOCKETS // threads):
        what = f"a connection has {threads} socket threads with {sockets} sockets each"
        right = f"1 to {_MAX_SOCKET_THREADS} threads, and at most {_MAX_SOCKETS} sockets together"
        raise InputError(where, what, right)
    return settings


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


def environment(settings: Settings) -> dict[str, str]:
    """Return the variables that differ from NCCL's defaults, without the graph file.

    Names of NICs stand behind `=`: without it NCCL takes mlx5_1 for mlx5_10 too.

    >>> environment(Settings(p2p_level="LOC", buffsize=524288))
    {'NCCL_P2P_DISABLE': '1', 'NCCL_BUFFSIZE': '524288'}
    """
    check_settings(settings)
    level, mode = settings.p2p_level, settings.shm_copy_engine
    choices: dict[str, str | int | None] = {
        "NCCL_P2P_DISABLE": 1 if level == "LOC" else None,
        "NCCL_P2P_LEVEL": level if level != "LOC" else None,
        "NCCL_P2P_READ_ENABLE": settings.p2p_read,
        "NCCL_P2P_USE_CUDA_MEMCPY": settings.p2p_copy_engine or None,
        "NCCL_SHM_LOCALITY": 1 if settings.shm_locality == "sender" else None,
        "NCCL_SHM_USE_CUDA_MEMCPY": 1 if mode else None,
        "NCCL_SHM_MEMCPY_MODE": _SHM_MODES[mode] if mode else None,
        "NCCL_SHM_DISABLE": settings.shm_disable or None,
        "NCCL_NET_DISABLE_INTRA": settings.net_disable_intra or None,
        "NCCL_MIN_NCHANNELS": settings.min_channels,
        "NCCL_MAX_NCHANNELS": settings.max_channels,
        "NCCL_BUFFSIZE": None if settings.buffsize == DEFAULT_FIFO_BYTES else settings.buffsize,
        "NCCL_ALGO": settings.algo,
        "NCCL_NET_GDR_LEVEL": settings.net_gdr_level,
        "NCCL_NET_GDR_READ": settings.net_gdr_read,
        "NCCL_CROSS_NIC": settings.cross_nic,
        "NCCL_IB_HCA": f"={','.join(settings.ib_hca)}" if settings.ib_hca else None,
        "NCCL_IB_GID_INDEX": settings.ib_gid_index,
        "NCCL_SOCKET_IFNAME": (
            f"={','.join(settings.socket_ifname)}" if settings.socket_ifname else None
        ),
        "NCCL_SOCKET_NTHREADS": settings.socket_threads,
        "NCCL_NSOCKS_PERTHREAD": settings.sockets_per_thread,
    }
    return {
        name: value if isinstance(value, str) else str(int(value))
        for name, value in choices.items()
        if value is not None
    }


def environment_text(settings: Settings) -> str:
    """Return the variables that make these settings as `NAME=VALUE ...`, "" for none."""
    return " ".join(f"{name}={value}" for name, value in environment(settings).items())


def settings_from_environment(
    variables: Mapping[str, str], *, version: str = LATEST, channels: int = 1
) -> Settings:
    """Return the settings that NCCL reads from variables; values without meaning count as unset.

    Lists of NICs or interfaces count only with exact names (`=mlx5_0,mlx5_1`): prefixes and
    exclusions depend on the host.
    """
    number = {name: integer(value) for name, value in variables.items()}
    facts = version_facts(version)
    engine: CopyEngineSide | None = None
    if number.get("NCCL_SHM_USE_CUDA_MEMCPY") == 1 and facts.shm_copy_engine:
        modes = {int(code): side for side, code in _SHM_MODES.items()}
        engine = modes.get(number.get("NCCL_SHM_MEMCPY_MODE") or 1, "sender")
    disabled = number.get("NCCL_P2P_DISABLE") == 1
    read, gdr_read = number.get("NCCL_P2P_READ_ENABLE"), number.get("NCCL_NET_GDR_READ")
    size = number.get("NCCL_BUFFSIZE") or 0
    cross, gid = number.get("NCCL_CROSS_NIC"), number.get("NCCL_IB_GID_INDEX")

    threads, sockets = number.get("NCCL_SOCKET_NTHREADS"), number.get("NCCL_NSOCKS_PERTHREAD")
    threads = threads if threads and 1 <= threads <= _MAX_SOCKET_THREADS else None
    most_sockets = _MAX_SOCKETS // (threads or 1)

    def limit(name: str) -> int | None:
        count = number.get(name)
        return None if count is None or count < 1 else min(count, facts.max_final_channels)

    return Settings(
        version=version,
        p2p_level="LOC" if disabled else _level(variables.get("NCCL_P2P_LEVEL")),
        p2p_read=None if read is None else read != 0,
        p2p_copy_engine=number.get("NCCL_P2P_USE_CUDA_MEMCPY") == 1,
        shm_locality="sender" if number.get("NCCL_SHM_LOCALITY") == 1 else "receiver",
        shm_copy_engine=engine,
        shm_disable=number.get("NCCL_SHM_DISABLE") == 1,
        net_disable_intra=number.get("NCCL_NET_DISABLE_INTRA") == 1,
        channels=channels,
        min_channels=limit("NCCL_MIN_NCHANNELS"),
        max_channels=limit("NCCL_MAX_NCHANNELS"),
        buffsize=size if 1024 <= size <= MAX_FIFO_BYTES else DEFAULT_FIFO_BYTES,
        algo="Ring" if variables.get("NCCL_ALGO", "").lower() == "ring" else None,
        net_gdr_level=_level(variables.get("NCCL_NET_GDR_LEVEL")),
        net_gdr_read=None if gdr_read is None or gdr_read < 0 else gdr_read != 0,
        cross_nic=cross if cross in (0, 1, 2) else None,  # type: ignore[arg-type]
        ib_hca=_exact_names(variables.get("NCCL_IB_HCA"), _HCA, _MAX_HCAS),
        ib_gid_index=gid if gid is not None and 0 <= gid <= MAX_GID_INDEX else None,
        socket_ifname=_exact_names(
            variables.get("NCCL_SOCKET_IFNAME"), _INTERFACE, _MAX_INTERFACES
        ),
        socket_threads=threads,
        sockets_per_thread=sockets if sockets and 1 <= sockets <= most_sockets else None,
    )


def _level(text: str | None) -> Level | None:
    if text in get_args(Level):
        return text  # type: ignore[return-value]
    old = integer(text)
    return None if old is None or old < 0 else _OLD_LEVELS[min(old, len(_OLD_LEVELS) - 1)]


def _exact_names(text: str | None, form: re.Pattern[str], most: int) -> tuple[str, ...]:
    if text is None or not text.startswith("="):
        return ()
    names = tuple(dict.fromkeys(name for name in text[1:].split(",") if name))
    return names if len(names) <= most and all(map(form.fullmatch, names)) else ()


def listed(names: tuple[str, ...], name: str, port: int) -> bool:
    """Return whether a list of NICs has this port of a NIC; an empty list has all.

    >>> listed(("mlx5_0:2",), "mlx5_0", 1), listed(("mlx5_0",), "mlx5_0", 1)
    (False, True)
    """
    return not names or name in names or f"{name}:{port}" in names


def integer(text: str | None) -> int | None:
    """Return the decimal number at the start of a variable, as C's strtol reads it."""
    match = _INTEGER.match(text or "")
    return None if match is None else int(match["sign"] + match["digits"])


def settings_channels(settings: Settings, *, sm: int | None) -> int:
    """Return the final number of channels on one node under these settings."""
    limits = {"MIN": settings.min_channels, "MAX": settings.max_channels}
    variables = {f"NCCL_{end}_NCHANNELS": str(n) for end, n in limits.items() if n is not None}
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
    """Return the final number of channels for `channels` of the search or file.

    Doubled always; once more from sm 90 on several nodes above 45 GB/s a channel while there are
    fewer than 16 (connect.cc); then limited by NCCL_MAX_NCHANNELS and NCCL_MIN_NCHANNELS.

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
