"""Differences between versions of NCCL, and its constants, most as data (releases.json)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from importlib import resources
from typing import Any, Literal, TypeVar, get_args

import msgspec
from msgspec.structs import replace

from tccl_py.errors import InputError, require
from tccl_py.model.machine import NumaNode, PciLink

T = TypeVar("T")

Level = Literal["LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS"]
"""NCCL's names of path types, nearest first; a P2P level is one of them."""
LEVELS: tuple[Level, ...] = get_args(Level)

ASSUMED = "2.30"
"""The version where none is named or installed: what torch brings."""

RING, TREE = 0, 1
"""Ids of the graphs that this package writes."""
TYPES = ("LOC", "NVL", "NVB", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
"""Path types of graph files, nearest first; NCCL silently reads any other type as LOC."""
MAX_ATTRIBUTES = 16
"""Attributes that NCCL reads of an XML element."""
SWAPPING = 2
"""The crossnic of a graph whose pairs of channels are swapped on odd nodes."""


class VersionFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts of one release, with the values of 2.18 as defaults."""

    name: str = "2.18"
    """The nearest version whose facts were checked."""
    verified: bool = True
    """Whether it is the release itself."""
    default_gdr_level: Level = "PXB"
    """The farthest path over which a NIC reaches GPU memory by default."""
    unknown_levels: tuple[Level, ...] = ("P2C",)
    """Levels that are read as LOC."""
    relays_need_gpu_direct: bool = False
    """Whether only a GPU with GPU direct RDMA relays."""
    crossed: Literal[1, 2] = 1
    """The crossnic of channels that have to change NICs: 2 swaps pairs of them on odd nodes."""
    amd_gpus: int | None = None
    """GPUs up to which an AMD host gets P2P level SYS by default; None is any number."""
    dev_base: Literal[0, 16] = 0
    max_channels: int = 16
    """Channels of a graph file at most."""
    max_final_channels: int = 32
    """Channels of a communicator at most."""
    max_children: int = 32
    """Children of an element of a graph file at most."""
    children_checked: bool = False
    """Whether more children fail; else they corrupt memory."""
    checks_values: bool = False
    """Whether a value ends at the quote that it began with, and too long ones fail; before, only at
    a double quote, and they corrupt memory."""
    max_elements: int = 1024
    rank_overrides_dev: bool = False
    shm_copy_engine: bool = True
    fuses_topologies: bool = False
    """Whether each rank looks only at its own GPU and all NICs, and the views are fused in rank
    order."""
    old_gpus_leave_over_sys: bool = False
    """Whether trees of GPUs before sm 90 may reach NICs over any path."""
    falls_back_to_local_nets: bool = False
    """Whether a search without result takes local NICs; else NIC 0."""
    unknown_intra: tuple[float, ...] = (45.0,)
    """Rates inside a node that its search does not try from sm 100 on, GB/s."""
    unknown_inter: tuple[float, ...] = (80.0, 86.0, 90.2)
    """The same between nodes."""
    amd_gbps: tuple[float, float, float] = (16.0, 16.0, 16.0)
    """The rates between sockets of Zen 1 and 2, 3 and 4, and 5."""
    xeon6_gbps: float = 22.0
    """The rate between sockets of Granite Rapids and Sierra Forest."""
    unknown_gts: float = 8.0
    """What a GPU's unknown link speed counts as."""
    has_rubin: bool = False
    """Whether it knows sm 107."""
    routes_by_subnet: bool = False
    """Whether RDMA connections can be made to leave by a NIC in the subnet of the other end's."""
    device_nodes: bool = False
    """Whether every GPU is two nodes, a device and a rank's GPU."""
    nearer_wins: bool = False
    """Whether a path of a nearer type replaces another; else only a wider path that is not longer,
    and a GPU's CPU is that of fewest links."""
    shares_nets_by_place: bool = False
    """Whether a GPU's first NIC follows from its number among the GPUs that share the NICs; else
    from its NVML index."""
    rereads: tuple[str, ...] = ()
    """Variables with effect where they are read for each communicator, as NCCL_NO_CACHE asks."""
    has_cost_model: bool = False
    """Whether the cost model is known here; the fields below are of it."""
    channel_bytes: int = 16 << 10
    """Bytes of a message that a channel gets at least."""
    slow_rings_halve_threads: bool = True
    """Whether Simple rings of up to 12 GB/s have 256 threads."""
    blackwell_ll_gbps: float = 282.0
    """The limit of LL inside a node from sm 100 on."""
    blackwell_ring_ll128_gbps: float = 73.4
    """The limit of a channel of LL128 rings there."""
    power_trees_as_rings: bool = True
    """Whether POWER has the ring's latency for Simple trees."""
    trees_take_lesser_rate: bool = False
    """Whether the slower of a tree's two rates counts from sm 100 on."""
    plateau_collectives: tuple[str, ...] = ()
    """Collectives with 1.4 times the latency of Simple rings over NVLink then."""
    plateau_by_steps: bool = False
    """Whether that is less for few steps and long messages."""
    later_tie_wins: bool = False
    """Whether the later of two equal times is chosen."""
    algorithms_exclude: bool = False
    """Whether NCCL_ALGO for some collectives beside NCCL_PROTO for all leaves the others none."""
    tuners_lower_channels: bool = False
    """Whether a tuner's number counts below NCCL's own for the size."""
    windows_ask_cuda: bool = False
    """Whether registered windows use P2P that CUDA grants, whatever NCCL's P2P level."""


class _Change(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts that changed with a release."""

    first: str
    """The first release with them."""
    facts: dict[str, Any]
    source: str


class _Releases(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Differences between releases, and rates by compute capability: releases.json."""

    changes: tuple[_Change, ...]
    """Oldest first."""
    nvlink_gbps: dict[int, float]
    """From this sm on, one NVLink's GB/s; older or unknown counts as sm 80."""
    intra_gbps: dict[int, tuple[float, ...]]
    """From this sm on, a channel's rates inside a node that the search tries."""
    inter_gbps: dict[int, tuple[float, ...]]
    """The same between nodes."""


@cache
def _releases() -> _Releases:
    data = resources.files("tccl_py.nccl").joinpath("releases.json").read_bytes()
    return msgspec.json.decode(data, type=_Releases)


_VERSION = re.compile(
    r"v?(?P<major>[0-9]{1,3})\.(?P<minor>[0-9]{1,3})(?:\.(?P<patch>[0-9]{1,3}))?(?:(?:[+-]|\.[a-z]).{0,40})?",
    re.DOTALL,
)
_NEWEST_PATCH = 999
_BEYOND = 40
"""No release has this minor version yet: 2.32 was the newest in 2026."""


def known_versions() -> tuple[str, ...]:
    """Versions whose facts were checked, oldest first."""
    later = (one.facts["name"] for one in _releases().changes if "name" in one.facts)
    return (VersionFacts().name, *later)


def has_rules(version: str) -> bool:
    """Return whether plans can be made for a version."""
    return release(f"{known_versions()[0]}.0") <= release(version) < (2, _BEYOND)


def asked_version(version: str) -> str:
    """Return a version that a user names (InputError); newer ones count as the newest known."""
    oldest, *_, newest = known_versions()
    right = f"{oldest} to {newest}, or a newer one below 2.{_BEYOND}, which is taken for {newest}"
    require(has_rules(version), f"NCCL version {version[:40]!r}", "has no rules here", right)
    return plain_version(version)


def plain_version(version: str) -> str:
    """Return the numbers of a version alone (InputError: it is none).

    >>> plain_version("v2.28.9+cuda13.0"), plain_version("2.30")
    ('2.28.9', '2.30')
    """
    major, minor, patch = release(version)
    return f"{major}.{minor}" + (f".{patch}" if patch != _NEWEST_PATCH else "")


@lru_cache(maxsize=64)
def version_facts(version: str) -> VersionFacts:
    """Facts of a release (without a third number: the last such release).

    >>> version_facts("2.28.9").verified, version_facts("2.21").name, version_facts("2.21").verified
    (True, '2.18', False)
    >>> version_facts("2.30.4").nearer_wins, version_facts("2.30").nearer_wins
    (False, True)
    """
    own, fields = release(version), dict[str, Any]()
    for change in _releases().changes:
        first = release(change.first)
        if own >= first:
            fields |= change.facts
    facts = msgspec.convert(fields, VersionFacts)
    return replace(facts, verified=facts.name == f"{own[0]}.{own[1]}")


def say_unchecked(version: str) -> str:
    """Return which rules of a version were not checked, as a sentence; "" if all were.

    >>> say_unchecked("2.28.9"), say_unchecked("2.21")
    ('', 'NCCL 2.21 is taken for 2.18, the nearest version that was checked')
    """
    facts, newest = version_facts(version), known_versions()[-1]
    if facts.verified:
        return ""
    if facts.name != newest:
        return f"NCCL {version} is taken for {facts.name}, the nearest version that was checked"
    return (
        f"NCCL {version} is newer than {newest}, the newest that was checked: its bandwidths, "
        f"paths, graph search, channels, graph files and variables are taken for {newest}'s"
    )


def release(version: str) -> tuple[int, int, int]:
    """Return the numbers of a version (InputError)."""
    match = _VERSION.fullmatch(version)
    if match is None:
        where = f"NCCL version {version[:40]!r}"
        raise InputError(where, "is no version", "give a number such as 2.28.9")
    return int(match["major"]), int(match["minor"]), int(match["patch"] or _NEWEST_PATCH)


# The constants from which NCCL models a machine, in GB/s; they are NCCL's beliefs, not rates.


LOCAL_GBPS = 5000.0
C2C_GBPS = 44.712
"""One C2C link as Grace Hopper's topology files state it; a Machine holds only their count."""
DEFAULT_NET_MBPS = 10000
MBPS_PER_GBPS = 8000.0

_PCI_LANE = {2.5: 15, 5.0: 30, 8.0: 60, 16.0: 120, 32.0: 240, 64.0: 480}
"""GT/s -> what NCCL counts a lane as, in 100 Mb/s (80 of them are 1 GB/s)."""

_RUBIN, _NOT_RUBIN = 107, (110, 120, 121)
INTEL, AMD = "GenuineIntel", "AuthenticAMD"
_INTEL = ((0xCF, 40.0), (0x8F, 22.0), (0x55, 10.0))
"""From this model on, GB/s between sockets: Emerald Rapids, Sapphire Rapids, Skylake."""
_XEON6 = (0xAD, 0xAE, 0xAF)
_ZEN34, _ZEN5 = 25, 26
"""Families of AMD CPUs as the kernel numbers them."""
_ZHAOXIN = ("CentaurHauls", "  Shanghai  ")
_ZHAOXIN_YONGFENG = (7, 0x5B)


def pci_gbps(link: PciLink, *, unknown_gts: float = 8.0) -> float:
    """A PCI link by NCCL's table; an unknown speed counts as `unknown_gts`, an unknown width as 16.

    >>> pci_gbps(PciLink(speed_gts=32.0)), pci_gbps(PciLink(speed_gts=8.0, width=8))
    (48.0, 6.0)
    """
    lane = _PCI_LANE.get(link.speed_gts or unknown_gts, 60)
    return (link.width or 16) * lane / 80.0


def nvlink_gbps(sm: int | None, facts: VersionFacts) -> float:
    """Return the bandwidth of one NVLink of a GPU of this sm."""
    return _from_sm(_releases().nvlink_gbps, sm or 0, facts, 20.0)


def _from_sm(table: Mapping[int, T], sm: int, facts: VersionFacts, otherwise: T) -> T:
    """Return the entry of the highest sm that a GPU reaches."""
    rubin = facts.has_rubin and sm not in _NOT_RUBIN
    firsts = [first for first in table if first <= sm and (rubin or first != _RUBIN)]
    return table[max(firsts)] if firsts else otherwise


def between_cpus_gbps(node: NumaNode, facts: VersionFacts) -> float:
    """Return the bandwidth between NUMA nodes, by architecture, vendor, family and model."""
    if node.arch.startswith("ppc"):
        return 32.0
    if node.arch.startswith(("arm", "aarch")):
        return 6.0
    if node.vendor == INTEL:
        models = _INTEL if node.family == 6 else ()
        gbps = next((gbps for first, gbps in models if (node.model or 0) >= first), 6.0)
        return facts.xeon6_gbps if models and node.model in _XEON6 else gbps
    if node.vendor == AMD:
        return facts.amd_gbps[(node.family in (_ZEN34, _ZEN5)) + (node.family == _ZEN5)]
    if node.vendor in _ZHAOXIN:
        return 9.0 if (node.family, node.model) == _ZHAOXIN_YONGFENG else 6.0
    return LOCAL_GBPS


def speeds(sm: int, *, inter: bool, facts: VersionFacts) -> Sequence[float]:
    """Return the rates of a channel that the search tries, fastest first (search.cc)."""
    known = _releases()
    table, unknown = known.intra_gbps, facts.unknown_intra
    if inter:
        table, unknown = known.inter_gbps, facts.unknown_inter
    rates = _from_sm(table, sm, facts, ())
    return tuple(rate for rate in rates if sm < 100 or rate not in unknown)


FIRST_WITH_PLUGIN, LAST_WITH_PLUGIN = (2, 28, 7), (2, 32)
"""Releases with which the plugin was tried (FIRST_NCCL and LAST_NCCL in nccl/plugin/process.c)."""
NEWER_VARIABLE = "TCCL_NEWER_NCCL"
"""In jobs: the newest NCCL with which a trial of the plugin went well on this host."""


def why_no_plugin(version: str, *, newest: str = "") -> str:
    """Return why a version of NCCL does not work with the plugin, as a clause; "" if it does.

    Missing numbers are taken for favourable ones. `newest` is a value of NEWER_VARIABLE.

    >>> why_no_plugin("v2.28.9"), why_no_plugin("2.28.3-1"), why_no_plugin("2.28")
    ('', 'NCCL 2.28.3-1 has no environment plugins, which came with 2.28.7', '')
    >>> why_no_plugin("2.33.1")
    'NCCL 2.33.1 is newer than 2.32, up to which the plugin was tried'
    >>> why_no_plugin("2.33.1", newest="2.33.1")
    ''

    Raises InputError: `newest` is no version.
    """
    match = _VERSION.fullmatch(version)
    numbers = tuple(int(number) for number in match.groups() if number) if match else ()
    if numbers < FIRST_WITH_PLUGIN[: len(numbers)]:
        return f"NCCL {version} has no environment plugins, which came with 2.28.7"
    if numbers[:2] <= LAST_WITH_PLUGIN or (newest and numbers <= _whole(newest)):
        return ""
    last = newest or ".".join(map(str, LAST_WITH_PLUGIN))
    return f"NCCL {version} is newer than {last}, up to which the plugin was tried"


def _whole(newest: str) -> tuple[int, ...]:
    right = "the newest NCCL that `tccl install --newer-nccl` has tried, as 2.33.1"
    fits = re.fullmatch(r"[0-9]{1,2}(\.[0-9]{1,2}){2}", newest, re.ASCII)
    require(fits, NEWER_VARIABLE, f"is '{newest[:20]}'", right)
    return tuple(map(int, newest.split(".")))
