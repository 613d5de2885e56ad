"""NCCL's depth-first search for channels at one rate, with NCCL's order and limit of steps.

A channel is a ring or a tree over all GPUs that takes its rate from every link of its path. NCCL
tries the PCI order first, then repeats the last channel, then tries everything, for a bounded
number of steps. This search takes the same steps in the same order, but only counts the steps of a
subtree that was searched before from the same state without improvement.

The remaining bandwidth of all links is one integer: a field of bits for each link, below a guard
bit. Taking a path is one subtraction; a cleared guard bit means a link with too little left.

Source: search.cc of NCCL 2.30.7 (ncclTopoSearchRec and its callees).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from tccl_py.nccl.paths import NetPorts, Paths
from tccl_py.nccl.system import Link, PathType, System

Pattern = Literal["ring", "balanced tree", "tree"]
Order = Literal["free", "pci", "replay"]
Key = tuple[object, ...]
Step = tuple[int, int]
"""What a way takes of the links' fields, and how many hops it has."""

_SCALE = 1000
"""Bandwidths are whole thousandths of a GB/s: NCCL rounds to them what it takes and gives back."""
_MOST_TAKEN = 500_000
"""More than any path takes of a link."""
_PCI_ORDER_STEPS = 1 << 10
_MOST_TRIED = 40_000_000
"""Ways tried on one machine after which every search has few steps. NCCL has no such limit; it
takes effect on 12 GPUs and more, seconds into the search."""
_FEW_STEPS = 1 << 8
_NO_ANSWER_FROM = 80
"""GPUs below this sm answer a NIC's transfers with an eighth of the rate back."""


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """A graph as NCCL's search requests and returns it: GPU ids and NIC ports per channel.

    Rates are GB/s of a channel; ports are "" on one node.
    """

    pattern: Pattern
    min_channels: int
    max_channels: int
    type_intra: PathType
    type_inter: PathType = PathType.PIX
    rate_intra: float = 0.0
    rate_inter: float = 0.0
    same_channels: bool = True
    cross_nic: int = 0
    hops: int = 0
    orders: tuple[tuple[str, ...], ...] = ()
    ports: tuple[tuple[str, str], ...] = ()
    fallback: bool = False


def single(value: float) -> float:
    """Round as NCCL's single-precision arithmetic does."""
    return float(np.float32(value))


@cache
def _totals(rate: float, most: int) -> list[float]:
    """Return the bandwidth of 0 to `most` channels, as NCCL computes it."""
    return [single(channels * single(rate)) for channels in range(most + 1)]


_NOTHING = (0, 0)


class _OutOfStepsError(Exception):
    """The search ends here, out of steps or with nothing better to be found."""


class _Course(NamedTuple):
    """The way of a channel: from a NIC port, the place of its return to a port (-1: none)."""

    channel: int
    leave: int
    order: Order
    port: str = ""


class ChannelSearch:
    """The searches over one communicator's machine; with `inter` channels lead between NICs."""

    def __init__(self, system: System, paths: Paths, *, inter: bool) -> None:
        self._system, self._paths, self._inter = system, paths, inter
        self._gpus, self._nets = system.gpus, NetPorts(system, paths)
        self._count = len(system.gpus)
        self._walked = 0
        self._lay_out_fields()
        self._ranking = cache(self._uncached_ranking)
        self._use = cache(self._uncached_use)

    def run(self, wanted: Graph, best: Graph, steps: int) -> tuple[Graph, int]:
        """Search for `wanted` in at most `steps` steps.

        Return the better of `best` and the result, and the steps left: -1 if no search can find
        more channels, 0 if the search was cut short.
        """
        if self._walked * self._count > _MOST_TRIED:
            steps = min(steps, _FEW_STEPS)
        self._wanted, self._best, self._left = wanted, best, steps
        self._totals = _totals(wanted.rate_intra, wanted.max_channels)
        self._best_total = single(len(best.orders) * single(best.rate_intra))
        self._ways()
        self._orders = [[0] * self._count for _ in range(wanted.max_channels)]
        self._ends = [["", ""] for _ in range(wanted.max_channels)]
        self._known: dict[Key, tuple[int, int, int]] = {}
        self._copies, self._peak = 0, _NOTHING
        self._closed = wanted.pattern == "ring" and not self._inter
        depth = sys.getrecursionlimit()
        sys.setrecursionlimit(depth + 4 * wanted.max_channels * (self._count + 4))
        try:
            with suppress(_OutOfStepsError):
                self._channel(self._whole, 0, wanted.hops)
        finally:
            sys.setrecursionlimit(depth)
        return self._best, self._left

    # Links

    def _lay_out_fields(self) -> None:
        """Give each link, and each NIC port, a field with its bandwidth, below a guard bit."""
        nets = self._system.nets
        gbps = [link.gbps for link in self._system.links] + [self._nets.gbps[net] for net in nets]
        scaled = [round(each * _SCALE) for each in gbps]
        self._bits = max(_MOST_TAKEN, *scaled).bit_length() + 1
        guard = 1 << (self._bits - 1)
        self._guards = sum(guard << self._bits * index for index in range(len(scaled)))
        fields = (left << self._bits * index for index, left in enumerate(scaled))
        self._whole = self._guards + sum(fields)
        shift = {net: self._bits * index for index, net in enumerate(nets, len(self._system.links))}
        self._port_units = {
            net: sum(1 << shift[twin] for twin in self._nets.names[net]) for net in nets
        }
        self._field = guard - 1
        self._pci = [
            [self._bits * link.index for link in self._pci_links(gpu)] for gpu in self._gpus
        ]
        own = [sum(self._field << shift for shift in both) for both in self._pci]
        self._unused_pci = cache(
            lambda used: sum(fields for gpu, fields in enumerate(own) if not used >> gpu & 1)
        )

    def _pci_links(self, gpu: str) -> list[Link]:
        """Return the PCI link from a GPU up, and the link down to the GPU."""
        nodes = self._system.nodes
        for up in nodes[gpu].links:
            if up.type == PathType.PIX:
                return [up, next(down for down in nodes[up.target].links if down.target == gpu)]
        return []

    def _answered(self, source: str, link: Link) -> Link | None:
        """Return the link backwards, if old GPUs answer NIC transfers on it."""
        sm = self._system.sm
        if source in sm or sm.get(link.target, _NO_ANSWER_FROM) >= _NO_ANSWER_FROM:
            return None
        links = self._system.nodes[link.target].links
        return next(up for up in links if (up.target, up.type) == (link.source, link.type))

    def _uncached_use(self, source: str, target: str, rate: float) -> Step:
        """A fifth more is taken of PCI links below Intel CPUs, and an eighth back from old GPUs."""
        system, path = self._system, self._paths[source, target]
        over_cpu = any(system.nodes[link.target].kind == "cpu" for link in path.links)
        costly = path.type == PathType.PHB and source in system.sm and over_cpu and system.intel
        need, use = round(rate * _SCALE), 0
        for link in path.links:
            takes = need * 6 // 5 if costly and link.type == PathType.PIX else need
            use += takes << self._bits * link.index
            back = self._answered(source, link)
            if back is not None:
                use += takes // 8 << self._bits * back.index
        hops = len(path.links)
        if hops and system.rules.device_nodes:
            # One link more between a rank's GPU and its device, and two at a relay.
            hops += sum(end in system.sm for end in (source, target))
            hops += 2 * (path.type == PathType.PXN)
        return use, hops

    def _ways(self) -> None:
        """Find the usable paths: GPU to GPU, port to GPU and GPU to port."""
        wanted, gpus = self._wanted, self._gpus
        half = 2 if wanted.pattern == "balanced tree" else 1
        nets = self._system.nets if self._inter else ()
        inside, outside = (min(t, PathType.NET) for t in (wanted.type_intra, wanted.type_inter))
        rate, leaving = wanted.rate_inter, wanted.rate_inter / half
        self._onward = [[self._way(a, b, inside, wanted.rate_intra) for b in gpus] for a in gpus]
        self._inward = {net: [self._way(net, g, outside, rate) for g in gpus] for net in nets}
        self._outward = [{net: self._way(g, net, outside, leaving) for net in nets} for g in gpus]

    def _way(self, source: str, target: str, limit: PathType, rate: float) -> Step | None:
        path, back = self._paths[source, target], self._paths[target, source]
        # A link too slow for the rate is never taken; less than a step of the fields is rounding.
        if path.type > limit or path.gbps < rate - 1 / _SCALE:
            return None
        if self._wanted.pattern != "ring" and back.type > limit:
            return None
        return self._use(source, target, rate)

    # Channels

    def _channel(self, state: int, channel: int, hops: int) -> None:
        """Begin the next channel."""
        wanted = self._wanted
        free = channel > 0 and not wanted.same_channels
        if self._inter:
            if free:
                ends = tuple(self._ends[channel - 1]) if wanted.cross_nic == 2 else ()
                self._once(
                    (state, channel, ends), hops, lambda: self._from_ports(state, channel, hops)
                )
            else:
                self._from_ports(state, channel, hops)
            return
        first = self._orders[channel - 1][0] if channel else 0
        course = _Course(channel, -1, "replay" if channel else "pci")
        self._visit(state, first, 1 << first, course, hops)
        if free:
            self._once((state, channel), hops, lambda: self._from_gpus(state, channel, hops))
        elif channel == 0:
            self._from_gpus(state, channel, hops)

    def _from_gpus(self, state: int, channel: int, hops: int) -> None:
        for gpu in range(self._count):
            self._visit(state, gpu, 1 << gpu, _Course(channel, -1, "free"), hops)

    def _from_ports(self, state: int, channel: int, hops: int) -> None:
        wanted, nets = self._wanted, self._nets
        leave = self._count - 1 if wanted.pattern == "ring" else 0
        taken = int(wanted.rate_inter) * _SCALE
        ports = nets.selected(wanted.type_inter, None)
        crossed = wanted.pattern == "ring" and wanted.cross_nic == 2 and channel % 2 == 1
        for step in range(len(ports)):
            port = ports[(channel + step) % len(ports)]
            left = state - self._port_units[port] * taken
            full = left & self._guards != self._guards
            if full or (crossed and port != self._ends[channel - 1][1]):
                continue
            self._ends[channel] = [port, ""]
            again = channel > 0 and wanted.same_channels
            course = _Course(channel, leave, "replay" if again else "free", port)
            if channel == 0:
                self._first_from_port(left, course, hops)
            elif again:
                self._enter(left, self._orders[channel - 1][0], course, hops)
            else:
                for gpu in nets.local_gpus(port):
                    self._enter(left, gpu, course, hops)

    def _first_from_port(self, state: int, course: _Course, hops: int) -> None:
        """Begin the first channel, which tries the PCI order with steps of its own.

        NCCL does so from every port, even if no steps are left for anything else.
        """
        if not self._system.nvs:
            left, self._left = self._left, _PCI_ORDER_STEPS
            with suppress(_OutOfStepsError):
                self._enter(state, 0, _Course(0, course.leave, "pci", course.port), hops)
            self._left = -1 if self._left == -1 else left
        with suppress(_OutOfStepsError):
            for gpu in self._nets.local_gpus(course.port):
                self._enter(state, gpu, course, hops)

    def _enter(self, state: int, gpu: int, course: _Course, hops: int) -> None:
        way = self._inward[course.port][gpu]
        if way is not None and (state - way[0]) & self._guards == self._guards:
            self._visit(state - way[0], gpu, 1 << gpu, course, hops + way[1])

    def _once(self, key: Key, hops: int, walk: Callable[[], None]) -> None:
        """Walk a subtree unless it is known; remember a subtree without improvement.

        A subtree improves by more channels than the best, or by as many with fewer hops.
        """
        known = self._known.get(key)
        if known is not None:
            steps, channels, hops_below = known
            if not self._better(channels, hops + hops_below):
                # The subtree's steps count all the same.
                if steps > self._left:
                    self._left = 0
                    raise _OutOfStepsError
                self._left -= steps
                return
        copies, left, outside = self._copies, self._left, self._peak
        self._peak = _NOTHING
        walk()
        if self._copies == copies:
            self._known[key] = (left - self._left, self._peak[0], -self._peak[1] - hops)
        self._peak = max(outside, self._peak)

    def _better(self, channels: int, hops: int) -> bool:
        wanted, best = self._wanted, self._best
        if channels < wanted.min_channels:
            return False
        total = self._totals[channels]
        if total != self._best_total:
            return total > self._best_total
        alike = wanted.pattern == best.pattern and wanted.cross_nic == best.cross_nic
        return alike and hops < best.hops

    # GPUs

    def _visit(self, state: int, gpu: int, used: int, course: _Course, hops: int) -> None:
        """Continue from a GPU, the last in `used` of this channel."""
        if self._left <= 0:
            raise _OutOfStepsError
        self._left -= 1
        self._walked += 1
        place, last, order = used.bit_count() - 1, self._count - 1, course.order
        self._orders[course.channel][place] = gpu
        if place == course.leave:
            self._to_ports(state, gpu, used, course, hops)
            return
        if place == last:
            self._end(state, gpu, course, hops)
            return
        if order == "free":
            candidates = self._candidates(state, gpu, used, course)
        else:
            before = self._orders[course.channel - 1]
            candidates = [place + 1 if order == "pci" else before[place + 1]]
        ways, guards = self._onward[gpu], self._guards
        for following in candidates:
            way = ways[following]
            if way is not None and (state - way[0]) & guards == guards:
                self._visit(state - way[0], following, used | 1 << following, course, hops + way[1])

    def _end(self, state: int, gpu: int, course: _Course, hops: int) -> None:
        """Complete a channel; a closed channel returns from the last GPU to the first."""
        if self._closed:
            way = self._onward[gpu][self._orders[course.channel][0]]
            if way is None or (state - way[0]) & self._guards != self._guards:
                return
            state, hops = state - way[0], hops + way[1]
        self._finish(state, course.channel, hops)

    def _to_ports(self, state: int, gpu: int, used: int, course: _Course, hops: int) -> None:
        """Leave for a NIC port, then go on; a balanced tree leaves half from each of two GPUs."""
        wanted, channel, order = self._wanted, course.channel, course.order
        place = used.bit_count() - 1
        leave = 1 if wanted.pattern == "balanced tree" and place == 0 else -1
        ends = self._ends[channel]
        for port in self._nets.selected(wanted.type_inter, self._gpus[gpu]):
            way = self._outward[gpu][port]
            if way is None or not self._may_leave(port, place, channel):
                continue
            if (state - way[0]) & self._guards == self._guards:
                onward = _Course(channel, leave, order, course.port)
                end, ends[1] = ends[1], port
                self._visit(state - way[0], gpu, used, onward, hops + way[1])
                ends[1] = end

    def _may_leave(self, port: str, place: int, channel: int) -> bool:
        wanted = self._wanted
        start, end = self._ends[channel]
        if wanted.pattern == "tree" and port != start:
            return False
        if wanted.pattern == "ring" and wanted.cross_nic == 2:
            if channel % 2 and port != self._ends[channel - 1][0]:
                return False
        elif wanted.cross_nic == 0 and port not in self._nets.names[start]:
            return False
        return wanted.pattern != "balanced tree" or place == 0 or port == end

    def _finish(self, state: int, channel: int, hops: int) -> None:
        """Keep the channels if they are better, and try one channel more."""
        if self._left <= 0:
            raise _OutOfStepsError
        self._left -= 1
        wanted, channels = self._wanted, channel + 1
        self._peak = max(self._peak, (channels, -hops))
        if self._better(channels, hops):
            self._keep(channels, hops)
            if channels == wanted.max_channels:
                self._left = -1
        if channels < wanted.max_channels:
            self._channel(state, channels, hops)

    def _keep(self, channels: int, hops: int) -> None:
        self._copies += 1
        self._best_total = self._totals[channels]
        self._best = msgspec.structs.replace(
            self._wanted,
            hops=hops,
            orders=tuple(
                tuple(self._gpus[gpu] for gpu in order) for order in self._orders[:channels]
            ),
            ports=tuple((start, end) for start, end in self._ends[:channels]),
        )

    # Order of GPUs

    def _candidates(self, state: int, gpu: int, used: int, course: _Course) -> list[int]:
        """Return the GPUs to try next, best first; before a NIC remaining bandwidth counts."""
        if self._system.nvs:
            return [near for near in self._neighbours(gpu) if not used >> near & 1]
        port = "" if course.leave == -1 else course.port
        left = state & self._unused_pci(used) if port else 0
        return self._ranking(gpu, used, course.leave, port, left)

    def _uncached_ranking(
        self, gpu: int, used: int, leave: int, port: str, state: int
    ) -> list[int]:
        around = ((gpu + step) % self._count for step in range(1, self._count))
        scores = {peer: self._score(gpu, peer) for peer in around if not used >> peer & 1}
        ranked = sorted(
            (peer for peer, (_, hops) in scores.items() if hops),
            key=lambda peer: (*self._port_score(port, peer, state), *scores[peer]),
        )
        alike = len({scores[peer] for peer in ranked}) <= 1
        if alike and leave not in (-1, used.bit_count()):
            ranked.reverse()
        return ranked

    def _score(self, gpu: int, other: int) -> tuple[int, int]:
        """Score the path between two GPUs, in whole GB/s; smaller is better."""
        path = self._paths[self._gpus[gpu], self._gpus[other]]
        return -int(path.gbps), len(path.links)

    def _port_score(self, port: str, gpu: int, state: int) -> tuple[int, int, int]:
        """Score a GPU for the path back to `port`; zeros for no port."""
        if not port:
            return 0, 0, 0
        path = self._paths[port, self._gpus[gpu]]
        left = [(state >> shift & self._field) // _SCALE for shift in self._pci[gpu]]
        return -int(path.gbps), -min(left, default=-1), len(path.links)

    def _neighbours(self, gpu: int) -> list[int]:
        """Return the GPUs tried behind an NVSwitch: only the previous and the next."""
        after, before = (gpu + 1) % self._count, (gpu - 1) % self._count
        wanted = {"ring": [before, after], "balanced tree": [after, before], "tree": [after]}
        beside = dict.fromkeys(wanted[self._wanted.pattern])
        return [peer for peer in beside if self._score(gpu, peer)[1]]
