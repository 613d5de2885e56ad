"""NCCL's depth-first search for channels at one rate, with NCCL's order and limit of steps.

A channel is a ring or a tree over all GPUs that takes its rate from every link of its path. NCCL
tries the PCI order first, then repeats the last channel, then tries everything, for a bounded
number of steps. This search takes the same steps in the same order, but only counts the steps of a
subtree that it walked before.

Source: search.cc of NCCL 2.30.7 (ncclTopoSearchRec and its callees).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from tccl_py.model.transfer import index_of
from tccl_py.nccl.paths import SCALE, NetPorts, Paths, Room, Step
from tccl_py.nccl.system import PathType, System

Pattern = Literal["ring", "balanced tree", "tree"]
_Walk = Callable[[int, int, int], None]

_PCI_ORDER_STEPS = 1 << 10


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """A graph as NCCL's search requests and returns it: GPUs and NICs (entry, exit) per channel.

    Rates are GB/s of a channel; on one node a channel has no NICs. GPUs are places in the system's
    order for `ChannelSearch`, else NVML indices.
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
    orders: tuple[tuple[int, ...], ...] = ()
    nics: tuple[tuple[int, ...], ...] = ()
    fallback: bool = False


def single(value: float) -> float:
    """Round as NCCL's single-precision arithmetic does."""
    return float(np.float32(value))


def total_gbps(rate: float, channels: int) -> float:
    """Return the bandwidth of channels of a rate as NCCL computes it."""
    return single(channels * single(rate))


class _OutOfStepsError(Exception):
    """The search ends here, out of steps or with nothing better to be found."""


class _Course(NamedTuple):
    """The way of a channel: from a NIC port, the place of its return to a port (-1: none).

    `forced` is the only order of GPUs to try (None: all orders).
    """

    channel: int
    leave: int
    forced: Sequence[int] | None = None
    port: str = ""


class ChannelSearch:
    """The searches over one communicator's machine; with `inter` channels lead between NICs."""

    def __init__(self, system: System, paths: Paths, *, inter: bool) -> None:
        self._system, self._paths, self._inter = system, paths, inter
        self._gpus, self._nets = system.gpus, NetPorts(system, paths)
        self._room = Room(system, paths, self._nets)
        self._guards = self._room.guards
        self._count = len(system.gpus)
        self._near = cache(self._uncached_near)
        self._before_port = cache(self._uncached_before_port)

    def run(self, wanted: Graph, best: Graph, steps: int) -> tuple[Graph, int]:
        """Search for `wanted` in at most `steps` steps.

        Return the better of `best` and the result, and the steps left: -1 if no search can find
        more channels, 0 if the search was cut short.
        """
        self._wanted, self._best, self._left = wanted, best, steps
        counts = range(wanted.max_channels + 1)
        self._totals = [total_gbps(wanted.rate_intra, count) for count in counts]
        self._best_total = total_gbps(best.rate_intra, len(best.orders))
        self._ways()
        self._orders = [[0] * self._count for _ in range(wanted.max_channels)]
        self._ends = [["", ""] for _ in range(wanted.max_channels)]
        self._known: dict[tuple[object, ...], int] = {}
        self._closed = wanted.pattern == "ring" and not self._inter
        depth = sys.getrecursionlimit()
        sys.setrecursionlimit(depth + 4 * wanted.max_channels * (self._count + 4))
        try:
            with suppress(_OutOfStepsError):
                self._channel(self._room.whole, 0, wanted.hops)
        finally:
            sys.setrecursionlimit(depth)
        return self._best, self._left

    # Paths

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
        if path.type > limit:
            return None
        if self._wanted.pattern != "ring" and back.type > limit:
            return None
        return self._room.use(source, target, rate)

    # Channels

    def _channel(self, state: int, channel: int, hops: int) -> None:
        """Begin the next channel: as the channel before, then, if they may differ, anywhere."""
        anywhere = self._from_ports if self._inter else self._from_gpus
        if not self._inter:
            before = self._orders[channel - 1] if channel else range(self._count)
            self._visit(state, before[0], 1 << before[0], _Course(channel, -1, before), hops)
        if channel and not self._wanted.same_channels:
            self._once(anywhere, state, channel, hops)
        elif self._inter or channel == 0:
            anywhere(state, channel, hops)

    def _once(self, walk: _Walk, state: int, channel: int, hops: int) -> None:
        """Walk a subtree, or count the steps of a known subtree: again it has nothing better."""
        ends = self._ends[channel - 1] if self._wanted.cross_nic == 2 else ()
        key, left = (state, channel, hops, *ends), self._left
        if key not in self._known:
            walk(state, channel, hops)
            self._known[key] = left - self._left
        elif self._known[key] > left:
            self._left = min(left, 0)
            raise _OutOfStepsError
        else:
            self._left -= self._known[key]

    def _from_gpus(self, state: int, channel: int, hops: int) -> None:
        for gpu in range(self._count):
            self._visit(state, gpu, 1 << gpu, _Course(channel, -1), hops)

    def _from_ports(self, state: int, channel: int, hops: int) -> None:
        wanted, nets = self._wanted, self._nets
        leave = self._count - 1 if wanted.pattern == "ring" else 0
        taken = int(wanted.rate_inter) * SCALE
        ports = nets.selected(wanted.type_inter, None)
        crossed = wanted.pattern == "ring" and wanted.cross_nic == 2 and channel % 2 == 1
        for step in range(len(ports)):
            port = ports[(channel + step) % len(ports)]
            left = state - self._room.port_units[port] * taken
            full = left & self._guards != self._guards
            if full or (crossed and port != self._ends[channel - 1][1]):
                continue
            self._ends[channel] = [port, ""]
            course = _Course(channel, leave, port=port)
            if channel == 0:
                self._first_from_port(left, course, hops)
            elif wanted.same_channels:
                before = self._orders[channel - 1]
                self._enter(left, before[0], course._replace(forced=before), hops)
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
                self._enter(state, 0, course._replace(forced=range(self._count)), hops)
            self._left = -1 if self._left == -1 else left
        with suppress(_OutOfStepsError):
            for gpu in self._nets.local_gpus(course.port):
                self._enter(state, gpu, course, hops)

    def _enter(self, state: int, gpu: int, course: _Course, hops: int) -> None:
        way = self._inward[course.port][gpu]
        if way is not None and (state - way[0]) & self._guards == self._guards:
            self._visit(state - way[0], gpu, 1 << gpu, course, hops + way[1])

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
        place = used.bit_count() - 1
        self._orders[course.channel][place] = gpu
        if place == course.leave:
            self._to_ports(state, gpu, used, course, hops)
        elif place == self._count - 1:
            # A ring on one node returns from the last GPU to the first.
            way = self._onward[gpu][self._orders[course.channel][0]] if self._closed else (0, 0)
            if way is not None and (state - way[0]) & self._guards == self._guards:
                self._finish(state - way[0], course.channel, hops + way[1])
        else:
            ways, guards, nexts = self._onward[gpu], self._guards, course.forced
            nexts = (
                nexts[place + 1 : place + 2] if nexts else self._ranked(state, gpu, used, course)
            )
            for peer in nexts:
                way = ways[peer]
                if way is not None and (state - way[0]) & guards == guards:
                    self._visit(state - way[0], peer, used | 1 << peer, course, hops + way[1])

    def _to_ports(self, state: int, gpu: int, used: int, course: _Course, hops: int) -> None:
        """Leave for a NIC port, then go on; a balanced tree leaves half from each of two GPUs."""
        channel, _, forced, start = course
        place, ends, guards = used.bit_count() - 1, self._ends[channel], self._guards
        half = self._wanted.pattern == "balanced tree" and place == 0
        onward = _Course(channel, 1 if half else -1, forced, start)
        for port in self._nets.selected(self._wanted.type_inter, self._gpus[gpu]):
            way = self._outward[gpu][port]
            if way is None or (state - way[0]) & guards != guards:
                continue
            if self._may_leave(port, place, channel):
                end, ends[1] = ends[1], port
                self._visit(state - way[0], gpu, used, onward, hops + way[1])
                ends[1] = end

    def _may_leave(self, port: str, place: int, channel: int) -> bool:
        wanted, (start, end) = self._wanted, self._ends[channel]
        if wanted.pattern == "ring" and wanted.cross_nic == 2:
            return channel % 2 == 0 or port == self._ends[channel - 1][0]
        if wanted.cross_nic == 0 and port not in self._nets.names[start]:
            return False
        if wanted.pattern == "tree":
            return port == start
        return wanted.pattern == "ring" or place == 0 or port == end

    def _finish(self, state: int, channel: int, hops: int) -> None:
        """Keep the channels if they are better, and try one channel more."""
        if self._left <= 0:
            raise _OutOfStepsError
        self._left -= 1
        wanted, channels = self._wanted, channel + 1
        if self._better(channels, hops):
            self._keep(channels, hops)
            if channels == wanted.max_channels:
                self._left = -1
        if channels < wanted.max_channels:
            self._channel(state, channels, hops)

    def _keep(self, channels: int, hops: int) -> None:
        self._best_total = self._totals[channels]
        self._best = msgspec.structs.replace(
            self._wanted,
            hops=hops,
            orders=tuple(map(tuple, self._orders[:channels])),
            nics=tuple(
                tuple(index_of(port) for port in ends if port) for ends in self._ends[:channels]
            ),
        )

    # Order of GPUs

    def _ranked(self, state: int, gpu: int, used: int, course: _Course) -> Sequence[int]:
        """Return the GPUs to try next, best first; before a NIC remaining bandwidth counts."""
        if self._system.nvs:
            return [near for near in self._neighbours(gpu) if not used >> near & 1]
        if course.leave == -1:
            return self._near(gpu, used)
        left = state & self._room.unused_pci(used)
        return self._before_port(gpu, used, course.leave, course.port, left)

    def _uncached_near(self, gpu: int, used: int) -> list[int]:
        """Return the unused GPUs with a path, best first."""
        around = ((gpu + step) % self._count for step in range(1, self._count))
        scores = {peer: self._score(gpu, peer) for peer in around if not used >> peer & 1}
        return sorted((peer for peer in scores if scores[peer][1]), key=scores.__getitem__)

    def _uncached_before_port(
        self, gpu: int, used: int, leave: int, port: str, state: int
    ) -> list[int]:
        near = sorted(self._near(gpu, used), key=lambda peer: self._port_score(port, peer, state))
        alike = len({self._score(gpu, peer) for peer in near}) <= 1
        return near[::-1] if alike and leave != used.bit_count() else near

    def _score(self, gpu: int, other: int) -> tuple[int, int]:
        """Score the path between two GPUs, in whole GB/s; smaller is better."""
        path = self._paths[self._gpus[gpu], self._gpus[other]]
        return -int(path.gbps), len(path.links)

    def _port_score(self, port: str, gpu: int, state: int) -> tuple[int, int, int]:
        """Score the path from `port` back to a GPU."""
        path = self._paths[port, self._gpus[gpu]]
        return -int(path.gbps), -self._room.pci_left(state, gpu), len(path.links)

    def _neighbours(self, gpu: int) -> list[int]:
        """Return the GPUs tried behind an NVSwitch: only the previous and the next."""
        after, before = (gpu + 1) % self._count, (gpu - 1) % self._count
        wanted = {"ring": [before, after], "balanced tree": [after, before], "tree": [after]}
        beside = dict.fromkeys(wanted[self._wanted.pattern])
        return [peer for peer in beside if self._score(gpu, peer)[1]]
