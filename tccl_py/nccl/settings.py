"""Settings: one process-wide choice for NCCL, and the environment variables of the choice.

Source of names of NICs: ncclIbInitDevices (transport/net_ib), ncclFindInterfaces (misc/socket.cc)
and parseStringList (misc/utils.cc) of NCCL 2.30.7.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import msgspec

from tccl_py.errors import require
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
_SHM_COPY, _SHM_MODE = "NCCL_SHM_USE_CUDA_MEMCPY", "NCCL_SHM_MEMCPY_MODE"
_SHM_MODES: dict[int, CopyEngineSide] = {1: "sender", 2: "receiver", 3: "both"}
_OLD_LEVELS: tuple[Level, ...] = ("LOC", "PIX", "PXB", "PHB", "SYS", "SYS")
"""Meaning of NCCL_P2P_LEVEL=0, 1, ... before levels had names; larger numbers are SYS."""
_INTEGER = re.compile(r"[ \t\n]*(?P<sign>[+-]?)(?P<digits>[0-9]{1,18})")
UNSET = -2
"""NCCL's own value of a variable without a number."""
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
    `shm_placement` lets the NCCL plugin choose the NUMA node of each rank's bounce buffers, which
    are then the sender's.

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
    shm_placement: bool = False
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


_DEFAULTS = Settings()


def check_settings(settings: Settings) -> Settings:
    """Return `settings` if their version of NCCL can follow them."""
    facts, where = version_facts(settings.version), f"settings for NCCL {settings.version}"
    copies = facts.shm_copy_engine or settings.shm_copy_engine is None
    right = "leave shm_copy_engine out, or use NCCL 2.28"
    require(copies, where, "bounces cannot use a copy engine", right)
    placed = not settings.shm_placement or settings.shm_locality == "sender"
    right = "the plugin places what the sender allocates: set shm_locality to sender"
    require(placed, where, "shm_placement is true", right)
    most = facts.max_final_channels
    low, high = settings.min_channels or 1, settings.max_channels or most
    what = f"channels are to be {low} to {high} in the end"
    require(1 <= low <= high <= most, where, what, f"1 to {most}")
    for name, low, high in (
        ("channels", 1, facts.max_channels),
        ("buffsize", 1024, MAX_FIFO_BYTES),
        ("ib_gid_index", 0, MAX_GID_INDEX),
    ):
        value = getattr(settings, name)
        fits = value is None or low <= value <= high
        require(fits, where, f"{name} is {value}", f"{low} to {high}")
    for name in ("p2p_level", "net_gdr_level"):
        level = getattr(settings, name)
        known = level not in facts.unknown_levels
        require(known, where, f"{name} is {level}", "this version takes it for LOC")
    for name, form, most in (
        ("ib_hca", _HCA, _MAX_HCAS),
        ("socket_ifname", _INTERFACE, _MAX_INTERFACES),
    ):
        names = getattr(settings, name)
        exact = all(map(form.fullmatch, names)) and len(set(names)) == len(names) <= most
        right = f"up to {most} different names, such as mlx5_0, mlx5_0:1 or eth0"
        require(exact, where, f"{name} is {','.join(names)[:80]!r}", right)
    threads, sockets = settings.socket_threads or 1, settings.sockets_per_thread or 1
    fits = 1 <= threads <= _MAX_SOCKET_THREADS and 1 <= sockets <= _MAX_SOCKETS // threads
    what = f"a connection has {threads} socket threads with {sockets} sockets each"
    right = f"1 to {_MAX_SOCKET_THREADS} threads, and at most {_MAX_SOCKETS} sockets together"
    require(fits, where, what, right)
    return settings


def integer(text: str | None) -> int:
    """Return the number at the start of a variable, as C reads it; UNSET if there is none."""
    match = _INTEGER.match(text or "")
    return UNSET if match is None else int(match["sign"] + match["digits"])


# The variables of settings: how each value is read and written.


Read = Callable[[str, int], object]
"""From a variable's text and number: a value, or None without meaning to NCCL."""


def _within(least: int, most: int) -> Read:
    return lambda _, number: number if least <= number <= most else None


def _at_one(value: object) -> Read:
    return lambda _, number: value if number == 1 else None


def _level(text: str, number: int) -> object:
    old = _OLD_LEVELS[min(number, len(_OLD_LEVELS) - 1)] if number >= 0 else None
    return text if text in get_args(Level) else old


def _exact_names(form: re.Pattern[str], most: int) -> Read:
    def read(text: str, _: int) -> tuple[str, ...] | None:
        names = tuple(dict.fromkeys(name for name in text[1:].split(",") if name))
        usable = len(names) <= most and all(map(form.fullmatch, names))
        return names if text.startswith("=") and usable else None

    return read


_VARIABLES: dict[str, tuple[str, Read]] = {
    "p2p_level": ("NCCL_P2P_LEVEL", _level),
    "p2p_read": ("NCCL_P2P_READ_ENABLE", lambda _, n: None if n == UNSET else n != 0),
    "p2p_copy_engine": ("NCCL_P2P_USE_CUDA_MEMCPY", _at_one(True)),
    "shm_locality": ("NCCL_SHM_LOCALITY", _at_one("sender")),
    "shm_copy_engine": (_SHM_MODE, lambda _, n: _SHM_MODES.get(n, "sender")),
    "shm_disable": ("NCCL_SHM_DISABLE", _at_one(True)),
    "shm_placement": ("NCCL_CUMEM_HOST_ENABLE", lambda _, n: True if n == 0 else None),
    "net_disable_intra": ("NCCL_NET_DISABLE_INTRA", _at_one(True)),
    "min_channels": ("NCCL_MIN_NCHANNELS", _within(1, 10**18)),
    "max_channels": ("NCCL_MAX_NCHANNELS", _within(1, 10**18)),
    "buffsize": ("NCCL_BUFFSIZE", _within(1024, MAX_FIFO_BYTES)),
    "algo": ("NCCL_ALGO", lambda text, _: "Ring" if text.lower() == "ring" else None),
    "net_gdr_level": ("NCCL_NET_GDR_LEVEL", _level),
    "net_gdr_read": ("NCCL_NET_GDR_READ", lambda _, n: None if n < 0 else n != 0),
    "cross_nic": ("NCCL_CROSS_NIC", _within(0, 2)),
    "ib_hca": ("NCCL_IB_HCA", _exact_names(_HCA, _MAX_HCAS)),
    "ib_gid_index": ("NCCL_IB_GID_INDEX", _within(0, MAX_GID_INDEX)),
    "socket_ifname": ("NCCL_SOCKET_IFNAME", _exact_names(_INTERFACE, _MAX_INTERFACES)),
    "socket_threads": ("NCCL_SOCKET_NTHREADS", _within(1, _MAX_SOCKET_THREADS)),
    "sockets_per_thread": ("NCCL_NSOCKS_PERTHREAD", _within(1, _MAX_SOCKETS)),
}
"""Field of Settings -> variable and its reader."""


def environment(settings: Settings) -> dict[str, str]:
    """Return the variables that differ from NCCL's defaults, without the graph file.

    Names of NICs stand behind `=`: without it NCCL takes mlx5_1 for mlx5_10 too.

    >>> environment(Settings(p2p_level="LOC", buffsize=524288))
    {'NCCL_P2P_DISABLE': '1', 'NCCL_BUFFSIZE': '524288'}
    """
    check_settings(settings)
    found: dict[str, str] = {}
    for field, (name, _) in _VARIABLES.items():
        value = getattr(settings, field)
        if value == getattr(_DEFAULTS, field):
            continue
        if (field, value) == ("p2p_level", "LOC"):
            found["NCCL_P2P_DISABLE"] = "1"
        elif field == "shm_locality":
            found[name] = "1"
        elif field == "shm_placement":
            found[name] = "0"
        elif field == "shm_copy_engine":
            mode = next(code for code, side in _SHM_MODES.items() if side == value)
            found |= {_SHM_COPY: "1", _SHM_MODE: str(mode)}
        elif isinstance(value, tuple):
            found[name] = f"={','.join(value)}"
        else:
            found[name] = value if isinstance(value, str) else str(int(value))
    return found


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
    facts = version_facts(version)
    found: dict[str, Any] = {}
    for field, (name, read) in _VARIABLES.items():
        text = variables.get(name)
        if text is not None and (value := read(text, integer(text))) is not None:
            found[field] = value
    if integer(variables.get("NCCL_P2P_DISABLE")) == 1:
        found["p2p_level"] = "LOC"
    if facts.shm_copy_engine and integer(variables.get(_SHM_COPY)) == 1:
        found.setdefault("shm_copy_engine", "sender")
    else:
        found.pop("shm_copy_engine", None)
    if "shm_locality" not in found:
        found.pop("shm_placement", None)
    for end in found.keys() & {"min_channels", "max_channels"}:
        found[end] = min(found[end], facts.max_final_channels)
    if found.get("sockets_per_thread", 0) * found.get("socket_threads", 1) > _MAX_SOCKETS:
        del found["sockets_per_thread"]
    return Settings(version=version, channels=channels, **found)


def listed(names: tuple[str, ...], name: str, port: int) -> bool:
    """Return whether a list of NICs has this port of a NIC; an empty list has all.

    >>> listed(("mlx5_0:2",), "mlx5_0", 1), listed(("mlx5_0",), "mlx5_0", 1)
    (False, True)
    """
    return not names or name in names or f"{name}:{port}" in names


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
    ends = (integer((variables or {}).get(f"NCCL_{end}_NCHANNELS")) for end in ("MIN", "MAX"))
    low, high = (min(end, limit) for end in ends)
    low = max(0, low)
    high = limit if high == UNSET else max(1, high, low)
    return max(min(count, high), low)
