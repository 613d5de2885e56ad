"""NCCL's cost model on one node: algorithm, protocol and channels that it chooses at each size.

Each algorithm and protocol has a latency and a bandwidth, of constants and of what the ring and the
tree graph say of themselves; the least time wins. Then a message gets as many channels as its bytes
keep busy. NVLS is not modelled.

Source: ncclTopoTuneModel and ncclTopoGetAlgoTime (tuning.cc), topoGetAlgoInfo and
scheduleCollTasksToPlan (enqueue.cc) of NCCL 2.30.7; other releases by their libraries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from operator import itemgetter

import msgspec

from tccl_py.nccl.graph_search import SearchGraph, search_ring, search_tree, single, total_gbps
from tccl_py.nccl.system import PathType
from tccl_py.nccl.transport import final_channels
from tccl_py.nccl.tuner import (
    ALGORITHMS,
    PARTED,
    PROTOCOLS,
    Algorithm,
    Protocol,
    SizeChoice,
    TunedCollective,
    channels_kept_busy,
)
from tccl_py.nccl.versions import VersionFacts
from tccl_py.nccl.view import NcclView

Kind = tuple[Algorithm, Protocol]
_ByProtocol = tuple[float, float, float]
"""A value for each protocol: LL, LL128, Simple."""

_BASE_US: dict[str, _ByProtocol] = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
_STEP_US: dict[tuple[str, bool], _ByProtocol] = {
    ("tree", True): (0.6, 1.25, 4.0),
    ("ring", True): (0.6, 1.9, 3.4),
    ("tree", False): (1.0, 1.9, 4.0),
    ("ring", False): (1.0, 2.5, 5.7),
}
"""Latency of a step over NVLink (true), or over anything else."""
_LL_GBPS = (39.0, 87.7, 141.0)
_RING_LL128_GBPS = (20.0, 20.0, 36.7)
_TREE_LL128_GBPS = (20.0, 20.0, 36.7, 55.6)
_TREE_GBPS = (26.5, 24.0, 38.7, 70.0)
"""Most of LL in all, and of a channel of the others, before sm 80, 90, 100 and from there on."""
_TREE_SHARES = {
    "ll": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    "ll128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9,
              0.9, 0.9),
    "simple": (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7,
               0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
}  # fmt: skip
"""Share of a tree's bandwidth in an all-reduce of 64 bytes, twice as many and so on; then all."""
_FIRST_SHARE = 64
_SLOW_RING_GBPS = 12.0
_PLATEAU, _PLATEAU_BYTES, _LONG_BYTES = 0.4, 64, 256 << 10
_CELL_BYTES = 16


@dataclass(frozen=True, slots=True)
class CostModel:
    """The cost model of a communicator of one node."""

    ring: SearchGraph
    tree: SearchGraph
    ranks: int
    channels: int
    """The final ones."""
    sm: tuple[int, int]
    """The lowest and the highest of its GPUs."""
    rules: VersionFacts
    power: bool = False
    """Whether the CPUs are of POWER."""
    ring_only: bool = False
    """Whether NCCL_ALGO is Ring."""

    def choice(self, collective: TunedCollective, size: int) -> SizeChoice:
        """Return the choice for a message, whose bytes count as those of a tuner's table."""
        algorithm, protocol = next(iter(self.times(collective, size)))
        most = self.most_channels(algorithm, protocol, size)
        return SizeChoice(
            collective=collective,
            bytes=size,
            algorithm=algorithm,
            protocol=protocol,
            channels=self._busy(collective, protocol, size, most),
        )

    def times(self, collective: TunedCollective, size: int) -> dict[Kind, float]:
        """Return the time that NCCL expects of each algorithm and protocol, its choice first."""
        kinds = [*product(ALGORITHMS, PROTOCOLS)]
        times = {
            kind: expected
            for kind in (reversed(kinds) if self.rules.later_tie_wins else kinds)
            if (expected := self.expected_us(collective, *kind, size)) is not None
        }
        return dict(sorted(times.items(), key=itemgetter(1)))

    @property
    def fallback(self) -> bool:
        """Whether a graph search of NCCL failed."""
        return self.ring.fallback or self.tree.fallback

    @property
    def ring_gbps(self) -> float:
        """The bandwidth that NCCL counts for all rings together."""
        return total_gbps(self.ring.rate_intra, self._count)

    def with_rate(self, gbps: float) -> CostModel:
        """Return the model for rings and trees of this bandwidth together."""
        each = dict.fromkeys(("rate_intra", "rate_inter"), gbps / self._count)
        ring, tree = (msgspec.structs.replace(one, **each) for one in (self.ring, self.tree))
        return replace(self, ring=ring, tree=tree)

    def expected_us(
        self, collective: TunedCollective, algorithm: Algorithm, protocol: Protocol, size: int
    ) -> float | None:
        """Return the time that NCCL expects, None where it does not have or enable this."""
        rate = self._gbps(collective, algorithm, protocol)
        if not rate:
            return None
        latency = self._latency_us(collective, algorithm, protocol)
        doublings = (size // _FIRST_SHARE).bit_length() - 1
        shares = _TREE_SHARES[protocol]
        if algorithm == "tree" and 0 <= doublings < len(shares):
            rate = single(rate * single(shares[doublings]))
        if (algorithm, protocol) == ("ring", "simple"):
            latency = single(latency * self._plateau(collective, size))
        return single(latency + single(single(size) / single(1000 * rate)))

    def _plateau(self, collective: str, size: int) -> float:
        """Return the factor by which a Simple ring's latency grows."""
        over_nvlink = self.sm[0] >= 100 and self.ring.type_intra == PathType.NVL
        share = size // (self.channels * self.ranks)
        affected = over_nvlink and collective in self.rules.plateau_collectives
        if not affected or share < _PLATEAU_BYTES:
            return 1.0
        if not self.rules.plateau_by_steps:
            return 1 + _PLATEAU
        long = min(1.0, max(0, share - _LONG_BYTES) / _LONG_BYTES)
        few = 0.25 ** (self._steps(collective) - 1)
        return 1 + (1 - few) * (_PLATEAU - 0.1 * long)

    def _gbps(self, collective: str, algorithm: str, protocol: str) -> float:
        """Return the bandwidth of message bytes; 0 where not enabled."""
        graph, all_reduce = getattr(self, algorithm), collective == "all_reduce"
        if algorithm == "tree" and (self.ring_only or not all_reduce):
            return 0.0
        # NCCL trusts LL128 over near paths alone.
        (least, most), farthest = self.sm, PathType.PXN if self.sm[0] >= 90 else PathType.PXB
        near = graph.type_inter <= farthest and graph.type_intra <= PathType.NVB
        if protocol == "ll128" and not (near and least >= 70 and (least == most or least >= 90)):
            return 0.0
        bus = self._ring_gbps(protocol) if algorithm == "ring" else self._tree_gbps(protocol)
        if algorithm == "tree":
            return single(bus * 0.5)
        return single(bus * single(self.ranks / self._steps(collective)))

    def _ring_gbps(self, protocol: str) -> float:
        """Return the bus bandwidth of rings."""
        count, generation = self._count, self._generation
        bus = total_gbps(self.ring.rate_intra, count)
        if protocol == "ll":
            return single(min((*_LL_GBPS, self.rules.blackwell_ll_gbps)[generation], bus * 0.5))
        if protocol == "ll128":
            most = (*_RING_LL128_GBPS, self.rules.blackwell_ring_ll128_gbps)[generation]
            return single(min(bus * 0.92, count * most))
        return bus

    def _tree_gbps(self, protocol: str) -> float:
        """Return the bus bandwidth of trees."""
        count, generation, rate = self._count, self._generation, self.tree.rate_intra
        if self.rules.trees_take_lesser_rate and self.sm[0] >= 100:
            rate = min(rate, self.tree.rate_inter)
        bus = single(min(total_gbps(rate, count) * 0.92, count * _TREE_GBPS[generation]))
        if protocol == "ll":
            most = (*_LL_GBPS, self.rules.blackwell_ll_gbps)[generation]
            bus = single(min(bus / 3.8, most))
        if protocol == "ll128":
            bus = single(min(bus * (7.0 / 9.0), count * _TREE_LL128_GBPS[generation]))
        return single(bus * 0.85) if self.tree.pattern == "tree" else bus

    def _latency_us(self, collective: str, algorithm: Algorithm, protocol: Protocol) -> float:
        graph, like = getattr(self, algorithm), algorithm
        steps = float(self._steps(collective))
        if algorithm == "tree":
            steps = 2.0 * (self.ranks - 1)
        elif collective in ("broadcast", "reduce"):
            if graph.same_channels:
                steps = 1.0
            elif protocol == "simple":
                like = "tree"
        over_nvlink = graph.type_intra == PathType.NVL
        if self.power and self.rules.power_trees_as_rings and protocol == "simple":
            like = like if over_nvlink else "ring"
        number = PROTOCOLS.index(protocol)
        step_us = single(_STEP_US[like, over_nvlink][number])
        return single(single(_BASE_US[algorithm][number]) + single(steps * step_us))

    def _steps(self, collective: str) -> int:
        """Return the steps of a ring."""
        if collective == "all_reduce":
            return 2 * (self.ranks - 1)
        return self.ranks - 1 if collective in PARTED else self.ranks

    @property
    def _count(self) -> int:
        """The channels that both graphs have."""
        return min(len(self.ring.orders), len(self.tree.orders))

    @property
    def _generation(self) -> int:
        """The place of the oldest GPU's generation in tables: Volta, Ampere, Hopper, Blackwell."""
        return sum(self.sm[0] >= first for first in (80, 90, 100))

    def most_channels(self, algorithm: Algorithm, protocol: Protocol, size: int) -> int:
        """Return the channels whose threads a message keeps busy."""
        halves = self.rules.slow_rings_halve_threads and self.ring_gbps <= _SLOW_RING_GBPS
        return channels_kept_busy(
            algorithm, protocol, size, self.channels, ranks=self.ranks, slow_rings=halves
        )

    def _busy(self, collective: str, protocol: str, size: int, most: int) -> int:
        """Return how many channels get part of a message, in cells of `channel_bytes` or more."""
        gathers = collective in PARTED
        bytes_of_rank = size // self.ranks if gathers else size
        weight = self.ranks if gathers else 1 + (collective == "all_reduce")
        cost = weight * (4 if protocol == "ll" else 1)
        least = self.rules.channel_bytes
        cell = _up(_up(least, cost), _CELL_BYTES) * _CELL_BYTES
        part = _up(max(least, bytes_of_rank * cost) // most, _CELL_BYTES) * _CELL_BYTES
        cells = max(1, _up(bytes_of_rank, cell))
        return min(self.channels, _up(cells, min(cells, _up(part, cell * cost))))


def cost_model(topo: NcclView, graphs: tuple[SearchGraph, SearchGraph] | None = None) -> CostModel:
    """Return the model of a communicator; `graphs` are a file's ring and tree (None: searched)."""
    if graphs is None:
        ring = search_ring(topo)
        graphs = ring, search_tree(topo, channels=len(ring.orders))
    ring, tree = graphs
    sm = topo.system.sm.values()
    count = min(len(ring.orders), len(tree.orders))
    return CostModel(
        ring=ring,
        tree=tree,
        ranks=len(topo.gpus),
        channels=final_channels(topo.settings, sm=min(sm), channels=count),
        sm=(min(sm), max(sm)),
        rules=topo.system.rules,
        power=topo.machine.numa_nodes[0].arch.startswith("ppc"),
        ring_only=topo.settings.algo == "Ring",
    )


def _up(amount: int, unit: int) -> int:
    """Return how many units hold an amount.

    >>> _up(17, 16)
    2
    """
    return -(-amount // unit)
