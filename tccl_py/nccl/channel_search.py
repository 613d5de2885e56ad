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
from tccl_py.nccl.paths import SCALE, NetPorts, Room, Step, TopoPaths
from tccl_py.nccl.system import PathType

Pattern = Literal["ring", "balanced tree", "tree"]
_Subtree = Callable[[int, int, int], None]

_PCI_ORDER_STEPS = 1 << 10


class SearchGraph(msgspec.Struct, frozen=True, kw_only=True):
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
    """A channel's way from a port, back to one at place `leave` (-1: none), of `forced` GPUs."""

    channel: int
    leave: int
    forced: Sequence[int] | None = None
    port: str = ""


class ChannelSearch:
    """The searches over one communicator's machine; with `inter` channels lead between NICs."""

    def __init__(self, paths: TopoPaths, *, inter: bool) -> None:
        self._system, self._paths, self._inter = (system := paths.system), paths, inter
        self._gpus, self._nets = system.gpus, NetPorts(paths)
        self._room = Room(paths, self._nets)
        self._guards = self._room.guards
        self._count = len(system.gpus)
        self._near = cache(self._uncached_near)
        self._before_port = cache(self._uncached_before_port)

    def run(self, request: SearchGraph, best: SearchGraph, steps: int) -> tuple[SearchGraph, int]:
        """Search for `request` in at most `steps` steps.

        Return the better of `best` and the result, and the steps left: -1 if no search can find
        more channels, 0 if the search was cut short.
        """
        self._request, self._best, self._steps_left = request, best, steps
        counts = range(request.max_channels + 1)
        self._totals = [total_gbps(request.rate_intra, count) for count in counts]
        self._best_total = total_gbps(best.rate_intra, len(best.orders))
        self._ways()
        self._orders = [[0] * self._count for _ in range(request.max_channels)]
        self._ends = [["", ""] for _ in range(request.max_channels)]
        self._steps_of: dict[tuple[object, ...], int] = {}
        self._closed = request.pattern == "ring" and not self._inter
        depth = sys.getrecursionlimit()
        sys.setrecursionlimit(depth + 4 * request.max_channels * (self._count + 4))
        try:
            with suppress(_OutOfStepsError):
                self._channel(self._room.whole, 0, request.hops)
        finally:
            sys.setrecursionlimit(depth)
        return self._best, self._steps_left

    # Paths

    def _ways(self) -> None:
        """Find the usable paths: GPU to GPU, port to GPU and GPU to port."""
        request, gpus = self._request, self._gpus
        half = 2 if request.pattern == "balanced tree" else 1
        nets = self._system.nets if self._inter else ()
        inside, outside = (min(t, PathType.NET) for t in (request.type_intra, request.type_inter))
        rate, leaving = request.rate_inter, request.rate_inter / half
        self._onward = [[self._way(a, b, inside, request.rate_intra) for b in gpus] for a in gpus]
        self._inward = {net: [self._way(net, g, outside, rate) for g in gpus] for net in nets}
        self._outward = [{net: self._way(g, net, outside, leaving) for net in nets} for g in gpus]

    def _way(self, source: str, target: str, limit: PathType, rate: float) -> Step | None:
        path, back = self._paths[source, target], self._paths[target, source]
        if path.type > limit:
            return None
        if self._request.pattern != "ring" and back.type > limit:
            return None
        return self._room.use(source, target, rate)

    # Channels

    def _channel(self, state: int, channel: int, hops: int) -> None:
        """Begin the next channel: as the channel before, then, if they may differ, anywhere."""
        anywhere = self._from_ports if self._inter else self._from_gpus
        if not self._inter:
            before = self._orders[channel - 1] if channel else range(self._count)
            self._visit(state, before[0], 1 << before[0], _Course(channel, -1, before), hops)
        if channel and not self._request.same_channels:
            self._once(anywhere, state, channel, hops)
        elif self._inter or channel == 0:
            anywhere(state, channel, hops)

    def _once(self, walk: _Subtree, state: int, channel: int, hops: int) -> None:
        """Walk a subtree, or count the steps of a known subtree: again it has nothing better."""
        ends = self._ends[channel - 1] if self._request.cross_nic == 2 else ()
        key, steps = (state, channel, hops, *ends), self._steps_left
        if key not in self._steps_of:
            walk(state, channel, hops)
            self._steps_of[key] = steps - self._steps_left
        elif self._steps_of[key] > steps:
            self._steps_left = min(steps, 0)
            raise _OutOfStepsError
        else:
            self._steps_left -= self._steps_of[key]

    def _from_gpus(self, state: int, channel: int, hops: int) -> None:
        for gpu in range(self._count):
            self._visit(state, gpu, 1 << gpu, _Course(channel, -1), hops)

    def _from_ports(self, state: int, channel: int, hops: int) -> None:
        request, nets = self._request, self._nets
        leave = self._count - 1 if request.pattern == "ring" else 0
        units = int(request.rate_inter) * SCALE
        ports = nets.selected(request.type_inter, None)
        crossed = request.pattern == "ring" and request.cross_nic == 2 and channel % 2 == 1
        for step in range(len(ports)):
            port = ports[(channel + step) % len(ports)]
            free = state - self._room.port_units[port] * units
            full = free & self._guards != self._guards
            if full or (crossed and port != self._ends[channel - 1][1]):
                continue
            self._ends[channel] = [port, ""]
            course = _Course(channel, leave, port=port)
            if channel == 0:
                self._first_from_port(free, course, hops)
            elif request.same_channels:
                before = self._orders[channel - 1]
                self._enter(free, before[0], course._replace(forced=before), hops)
            else:
                for gpu in nets.local_gpus(port):
                    self._enter(free, gpu, course, hops)

    def _first_from_port(self, state: int, course: _Course, hops: int) -> None:
        """Begin the first channel from a port, and try the PCI order, which has its own steps."""
        if not self._system.nvs:
            steps, self._steps_left = self._steps_left, _PCI_ORDER_STEPS
            with suppress(_OutOfStepsError):
                self._enter(state, 0, course._replace(forced=range(self._count)), hops)
            self._steps_left = -1 if self._steps_left == -1 else steps
        with suppress(_OutOfStepsError):
            for gpu in self._nets.local_gpus(course.port):
                self._enter(state, gpu, course, hops)

    def _enter(self, state: int, gpu: int, course: _Course, hops: int) -> None:
        way = self._inward[course.port][gpu]
        if way is not None and (state - way[0]) & self._guards == self._guards:
            self._visit(state - way[0], gpu, 1 << gpu, course, hops + way[1])

    def _better(self, channels: int, hops: int) -> bool:
        request, best = self._request, self._best
        if channels < request.min_channels:
            return False
        total = self._totals[channels]
        if total != self._best_total:
            return total > self._best_total
        comparable = request.pattern == best.pattern and request.cross_nic == best.cross_nic
        return comparable and hops < best.hops

    # GPUs

    def _visit(self, state: int, gpu: int, used: int, course: _Course, hops: int) -> None:
        """Continue from a GPU, the last in `used` of this channel."""
        if self._steps_left <= 0:
            raise _OutOfStepsError
        self._steps_left -= 1
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
            nexts = nexts[place + 1 : place + 2] if nexts else self._rank(state, gpu, used, course)
            for peer in nexts:
                way = ways[peer]
                if way is not None and (state - way[0]) & guards == guards:
                    self._visit(state - way[0], peer, used | 1 << peer, course, hops + way[1])

    def _to_ports(self, state: int, gpu: int, used: int, course: _Course, hops: int) -> None:
        """Leave for a NIC port, then go on; a balanced tree leaves half from each of two GPUs."""
        channel, _, forced, start = course
        place, ends, guards = used.bit_count() - 1, self._ends[channel], self._guards
        half = self._request.pattern == "balanced tree" and place == 0
        onward = _Course(channel, 1 if half else -1, forced, start)
        for port in self._nets.selected(self._request.type_inter, self._gpus[gpu]):
            way = self._outward[gpu][port]
            if way is None or (state - way[0]) & guards != guards:
                continue
            if self._may_leave(port, place, channel):
                end, ends[1] = ends[1], port
                self._visit(state - way[0], gpu, used, onward, hops + way[1])
                ends[1] = end

    def _may_leave(self, port: str, place: int, channel: int) -> bool:
        request, (start, end) = self._request, self._ends[channel]
        if request.pattern == "ring" and request.cross_nic == 2:
            return channel % 2 == 0 or port == self._ends[channel - 1][0]
        if request.cross_nic == 0 and port not in self._nets.names[start]:
            return False
        if request.pattern == "tree":
            return port == start
        return request.pattern == "ring" or place == 0 or port == end

    def _finish(self, state: int, channel: int, hops: int) -> None:
        """Keep the channels if they are better, and try one channel more."""
        if self._steps_left <= 0:
            raise _OutOfStepsError
        self._steps_left -= 1
        request, channels = self._request, channel + 1
        if self._better(channels, hops):
            self._keep(channels, hops)
            if channels == request.max_channels:
                self._steps_left = -1
        if channels < request.max_channels:
            self._channel(state, channels, hops)

    def _keep(self, channels: int, hops: int) -> None:
        self._best_total = self._totals[channels]
        self._best = msgspec.structs.replace(
            self._request,
            hops=hops,
            orders=tuple(map(tuple, self._orders[:channels])),
            nics=tuple(
                tuple(index_of(port) for port in ends if port) for ends in self._ends[:channels]
            ),
        )

    # Order of GPUs

    def _rank(self, state: int, gpu: int, used: int, course: _Course) -> Sequence[int]:
        """Return the GPUs to try next, best first; before a NIC remaining bandwidth counts."""
        if self._system.nvs:
            return [near for near in self._neighbours(gpu) if not used >> near & 1]
        if course.leave == -1:
            return self._near(gpu, used)
        free = state & self._room.unused_pci(used)
        return self._before_port(gpu, used, course.leave, course.port, free)

    def _uncached_near(self, gpu: int, used: int) -> list[int]:
        """Return the unused GPUs with a path, best first."""
        around = ((gpu + step) % self._count for step in range(1, self._count))
        scores = {peer: self._score(gpu, peer) for peer in around if not used >> peer & 1}
        return sorted((peer for peer in scores if scores[peer][1]), key=scores.__getitem__)

    def _uncached_before_port(
        self, gpu: int, used: int, leave: int, port: str, state: int
    ) -> list[int]:
        def score(peer: int) -> tuple[int, int, int]:
            """Score the path from the port back to a GPU."""
            path = self._paths[port, self._gpus[peer]]
            return -int(path.gbps), -self._room.pci_left(state, peer), len(path.links)

        near = sorted(self._near(gpu, used), key=score)
        tied = len({self._score(gpu, peer) for peer in near}) <= 1
        return near[::-1] if tied and leave != used.bit_count() else near

    def _score(self, gpu: int, peer: int) -> tuple[int, int]:
        """Score the path between two GPUs, in whole GB/s; smaller is better."""
        path = self._paths[self._gpus[gpu], self._gpus[peer]]
        return -int(path.gbps), len(path.links)

    def _neighbours(self, gpu: int) -> list[int]:
        """Return the GPUs tried behind an NVSwitch: only the previous and the next."""
        after, before = (gpu + 1) % self._count, (gpu - 1) % self._count
        orders = {"ring": [before, after], "balanced tree": [after, before], "tree": [after]}
        peers = dict.fromkeys(orders[self._request.pattern])
        return [peer for peer in peers if self._score(gpu, peer)[1]]
