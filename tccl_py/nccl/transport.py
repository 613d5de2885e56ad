"""Transports that NCCL takes for pairs of GPUs, the hops of settings, and the settings searched.

Source: p2p.cc and shm.cc of NCCL 2.30.7.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from itertools import permutations, product
from typing import Any, Literal

import msgspec

from tccl_py.errors import InputError, require
from tccl_py.model.machine import Knowledge, Machine
from tccl_py.model.rings import Hop, HopSpace, Pair, PairHops, direct_read, direct_write
from tccl_py.model.transfer import (
    FIFO_SLOTS,
    Fifo,
    Flow,
    Place,
    Side,
    Transfer,
)
from tccl_py.nccl.settings import Settings, check_settings, environment_text
from tccl_py.nccl.system import PathType
from tccl_py.nccl.versions import ASSUMED, LEVELS, Level, version_facts
from tccl_py.nccl.view import NcclView, view

MechanismKind = Literal["write", "read", "bounce", "network"]
TRANSPORTS = {"write": "P2P", "read": "P2P", "bounce": "SHM", "network": "NET"}
"""Each mechanism's name in NCCL's log."""
_READS_ON_NVLINK = 80
"""Only between two GPUs of this sm does NCCL read over NVLink unasked."""


def pair_mechanism(topo: NcclView, source: int, target: int) -> MechanismKind:
    """Return how NCCL moves bytes from GPU `source` to GPU `target`; `network` is over NICs."""
    pair = (f"G{source}", f"G{target}")
    if source == target or not all(gpu in topo.system.sm for gpu in pair):
        fault, right = "is no pair of the communicator's GPUs", ", ".join(topo.system.gpus)
        raise InputError(f"hop from GPU {source} to GPU {target}", fault, f"choose two of {right}")
    if pair in topo.by_network:
        return "network"
    if pair not in topo.direct:
        return "bounce"
    both_read = all(topo.system.sm[gpu] == _READS_ON_NVLINK for gpu in pair)
    reads = topo.settings.p2p_read
    if reads is None:
        reads = both_read and topo.plain[pair].type == PathType.NVL
    return "read" if reads and not topo.settings.p2p_copy_engine else "write"


def _copy_engines(settings: Settings, kind: MechanismKind) -> tuple[Side, ...]:
    """Return the ends of a hop that use a copy engine."""
    if kind == "write":
        return ("sender",) if settings.p2p_copy_engine else ()
    sides: tuple[Side, ...] = ("sender", "receiver")
    chosen = settings.shm_copy_engine if kind == "bounce" else None
    return tuple(side for side in sides if chosen in (side, "both"))


def hop_space(topo: NcclView, *, rings_in_set: int = 1) -> HopSpace:
    """Return one hop per ordered pair, by the mechanism the settings give the pair.

    The space is empty where NCCL would send any pair over NICs: it may then cut the node in parts;
    and where it would use a link that no plan may use.
    Every hop is moved by the final channels' blocks, shared evenly by the rings of a set. With
    placement a bounce has a hop for each NUMA node, the sender's own first. Pairs that NCCL joins
    through the memory of a GPU between, as they have no P2P, have no hop: no source measures that.
    """
    settings = check_settings(topo.settings)
    require(rings_in_set >= 1, "rings_in_set", f"is {rings_in_set}", "a set has at least one ring")
    channels = final_channels(settings, sm=topo.system.sm_min)
    blocks = blocks_of_ring(topo, rings_in_set)

    def build(pair: Pair) -> tuple[Hop, ...]:
        kind = pair_mechanism(topo, *pair)
        if kind in ("write", "read") and not topo.knowledge.can_access(topo.machine, *pair):
            return ()
        return tuple(
            Hop(*pair, mechanism_flow(topo, kind, *pair, blocks=blocks, node=node))
            for node in _nodes(topo, kind, pair[0])
        )

    pairs = () if topo.by_network or topo.unsound else permutations(topo.gpus, 2)
    name = f"nccl {settings.version}, {channels} channels {environment_text(settings)}".rstrip()
    return HopSpace(name=name, gpus=topo.gpus, hops=PairHops(pairs, build))


def blocks_of_ring(topo: NcclView, rings_in_set: int) -> int:
    """Return the blocks of each hop where the rings of a set share the final channels evenly."""
    return max(1, final_channels(topo.settings, sm=topo.system.sm_min) // rings_in_set)


def final_channels(
    settings: Settings,
    *,
    sm: int | None,
    channels: int | None = None,
    nodes: int = 1,
    speed_intra: float = 0.0,
) -> int:
    """Return the final number of channels for `channels` (None: the settings') of search or file.

    Doubled always; once more from sm 90 on several nodes above 45 GB/s a channel while there are
    fewer than 16 (connect.cc); then limited by the settings.

    >>> final_channels(Settings(channels=8), sm=90)
    16
    """
    limit = version_facts(settings.version).max_final_channels
    count = min(2 * (settings.channels if channels is None else channels), limit)
    if (sm or 0) >= 90 and nodes > 1 and speed_intra > 45 and count < 16:
        count *= 2
    low, high = settings.min_channels or 0, settings.max_channels or limit
    return min(max(min(count, high), low), limit)


def _nodes(topo: NcclView, kind: MechanismKind, source: int) -> tuple[int | None, ...]:
    """Return the NUMA nodes open to a hop's buffer, NCCL's own choice first (None: only this)."""
    if kind != "bounce" or not topo.settings.shm_placement:
        return (None,)
    nearest = topo.machine.numa_of(f"G{source}")
    nodes = [node.index for node in topo.machine.numa_nodes if node.index != nearest]
    return (nearest, *nodes)


def mechanism_flow(
    topo: NcclView,
    kind: MechanismKind,
    source: int,
    target: int,
    *,
    blocks: int,
    node: int | None = None,
) -> Flow:
    """Return the flow of a mechanism.

    A bounce buffer lies on NUMA node `node`, by default that of the allocating GPU.
    NCCL_BUFFSIZE is the size of direct hops' FIFOs too, which lie in GPU memory (p2p.cc).
    """
    start, end = Place("G", source), Place("G", target)
    engines = _copy_engines(topo.settings, kind)
    sender = Place("D", source) if "sender" in engines else start
    receiver = Place("D", target) if "receiver" in engines else end
    size = topo.settings.buffsize
    if kind in ("read", "write"):
        if engines:
            return Flow((Transfer(start, sender, end),), blocks)
        make = direct_read if kind == "read" else direct_write
        return make(source, target, blocks=blocks, fifo=Fifo(bytes=size))
    side = topo.settings.shm_locality
    owner = target if side == "receiver" else source
    host = Place("C", topo.machine.numa_of(f"G{owner}") if node is None else node)
    fifo = Fifo(bytes=size, side=side)
    return Flow((Transfer(start, sender, host), Transfer(host, receiver, end)), blocks, fifo)


_CHUNK_BYTES, _NVLINK_CHUNK_BYTES = 128 << 10, 512 << 10


def chunk_bytes(topo: NcclView) -> int:
    """Return the largest chunk of send/recv and all-to-all, among pairs of GPUs as well.

    It is NCCL_P2P_PCI_CHUNKSIZE, or where a path of a communicator is NVLink
    NCCL_P2P_NVL_CHUNKSIZE, and at most an eighth of NCCL_BUFFSIZE (computeBuffSizes, init.cc).
    """
    pairs = permutations(topo.system.gpus, 2)
    near = any(topo.paths[pair].type < PathType.PIX for pair in pairs)
    chunk = _NVLINK_CHUNK_BYTES if near else _CHUNK_BYTES
    return min(chunk, topo.settings.buffsize // FIFO_SLOTS)


# Settings that are searched: the values tried, for which choice, by measurement or by jobs.


Search = Literal["mechanisms", "NIC buffers", "rings", "jobs"]
"""By measurement: mechanisms of pairs of GPUs, NIC buffers, and then what suits a ring set."""


class Searched(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of searched.json: the values of a setting that a search tries, the first ones first."""

    search: Search
    setting: str
    """Its name, or several names."""
    values: tuple[Any, ...]
    """Of several settings lists."""
    stage: int = 0
    """Jobs try the rows of a stage with the best of the stage before."""
    networks: tuple[str, ...] = ("", "sockets", "RDMA")
    """Those of the plans that it is for: "" of a single host, "sockets" or "RDMA"."""
    mechanisms: tuple[MechanismKind, ...] = ()
    """It matters where a plan's rings have one of these; none: always."""
    unless: str = ""
    """And not this one."""
    why: str = ""

    def fits(self, present: Collection[str]) -> bool:
        """Return whether the setting matters to rings of these mechanisms."""
        has = not self.mechanisms or any(kind in present for kind in self.mechanisms)
        return has and self.unless not in present

    @property
    def changes(self) -> Iterator[dict[str, Any]]:
        """Yield each value as a change of settings."""
        names = self.setting.split()
        for value in self.values:
            yield dict(zip(names, value if len(names) > 1 else [value], strict=True))


SIZE_STAGE, PATH_STAGE, LAST_STAGE = 2, 4, 5
"""The stage of channels with FIFO sizes, and the one that also has other paths."""


@cache
def searched_settings() -> tuple[Searched, ...]:
    """Return the rows of searched.json."""
    data = resources.files("tccl_py.nccl").joinpath("searched.json").read_bytes()
    return msgspec.json.decode(data, type=tuple[Searched, ...])


def searched_in(search: Search, stage: int = 0, *, network: str = "") -> list[Searched]:
    """Return the rows of a search, or of a stage of it, for plans with such a network."""
    rows = [row for row in searched_settings() if (row.search, row.stage) == (search, stage)]
    return [row for row in rows if network in row.networks]


def values_of(
    setting: str, search: Search, stage: int = 0, *, network: str = ""
) -> tuple[Any, ...]:
    """Return the values of a setting in a search.

    >>> values_of("channels", "jobs", SIZE_STAGE, network="sockets")
    (2, 4, 8, 1, 16)
    """
    rows = searched_in(search, stage, network=network)
    return tuple(value for row in rows if row.setting == setting for value in row.values)


def combinations(search: Search, **only: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yield all combinations of a search's values, defaults first; `only` has other values."""
    rows = searched_in(search)
    for values in product(*(only.get(row.setting, row.values) for row in rows)):
        yield dict(zip((row.setting for row in rows), values, strict=True))


def expressible(
    version: str = ASSUMED, *, p2p_level: Level | None = None, every_level: bool = False
) -> tuple[Settings, ...]:
    """Return every combination of mechanism switches of this NCCL version, defaults first.

    Channels and FIFO size are NCCL's defaults; `p2p_level` fixes the level (None: any). With
    `every_level` all that this version knows are tried, LOC first.
    """
    only: dict[str, Sequence[object]] = {} if p2p_level is None else {"p2p_level": [p2p_level]}
    if every_level and p2p_level is None:
        unknown = version_facts(version).unknown_levels
        only["p2p_level"] = [None, *(level for level in LEVELS if level not in unknown)]
    if not version_facts(version).shm_copy_engine:
        only["shm_copy_engine"] = [None]
    switches = combinations("mechanisms", **only)
    return tuple(msgspec.convert({"version": version, **chosen}, Settings) for chosen in switches)


def candidates(
    machine: Machine,
    knowledge: Knowledge,
    version: str = ASSUMED,
    *,
    gpus: Sequence[int] | None = None,
    channels: int = 1,
    p2p_level: Level | None = None,
) -> tuple[Settings, ...]:
    """Return settings under which the pairs' mechanisms differ, with this number of channels.

    Of settings with equal outcome the first is returned, which departs least from NCCL's defaults.
    `p2p_level` fixes the level (None: any). Where there are links that no plan may use, no settings
    use them; then all levels are tried, no P2P first.
    """
    distinct: dict[tuple[object, ...], Settings] = {}
    views: dict[tuple[Level | None, bool], NcclView] = {}
    for settings in expressible(version, p2p_level=p2p_level, every_level=bool(knowledge.links)):
        # No other switch changes the paths, and defaults come first.
        key = settings.p2p_level, settings.net_disable_intra
        if key not in views:
            views[key] = view(machine, knowledge, settings, gpus=gpus)
        topo = replace(views[key], settings=settings)
        if topo.unsound:
            continue
        # Settings change mechanisms, and the NUMA nodes of bounces' buffers.
        outcome: list[object] = []
        for pair in permutations(topo.gpus, 2):
            kind, owner = pair_mechanism(topo, *pair), pair[settings.shm_locality == "receiver"]
            node = machine.numa_of(f"G{owner}") if kind == "bounce" else None
            outcome.append((kind, _copy_engines(settings, kind), node))
        changed = msgspec.structs.replace(settings, channels=channels)
        distinct.setdefault(tuple(outcome), changed)
    return tuple(map(check_settings, distinct.values()))
