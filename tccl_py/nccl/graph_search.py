"""Default NCCL's graphs: the search for channels, and its choice of rings and channels.

1. `ChannelSearch` looks for channels at one rate. Each GPU of a channel is tried in turn, nearest
   first, and takes bandwidth from every link of its path. NCCL tries the PCI order first, then
   repeats the last channel, then tries everything, for a bounded number of steps. This search takes
   the same steps in the same order, but only counts the steps of a subtree that it walked before.
2. `search_ring` and `search_tree` run it at rate after rate.
3. `default_rings` is what NCCL runs then.

Source: search.cc (ncclTopoSearchRec and ncclTopoCompute with their callees) and ncclTopoPostset
(connect.cc) of NCCL 2.30.7.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from itertools import product
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from tccl_py.errors import InputError
from tccl_py.model.machine import Knowledge, Machine
from tccl_py.model.transfer import index_of
from tccl_py.nccl.paths import SCALE, NetPorts, Room, Step, TopoPath, TopoPaths
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.system import PathType, System
from tccl_py.nccl.transport import final_channels
from tccl_py.nccl.versions import AMD, LOCAL_GBPS, speeds
from tccl_py.nccl.view import NcclView, view

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


# Searches at rate after rate.


FALLBACK_GBPS = 0.1
"""What NCCL writes down for the simple order it falls back to."""
_STEPS = 1 << 14
_STEPS_SAME_CHANNELS = 1 << 8
_STEPS_IN_ALL = 1 << 19
_ALWAYS, _IF_NEED_BE = 1, 2
"""Values of NCCL_CROSS_NIC."""
_SLOWER_IS_NO_HELP = 0.49
_DUPLICATE_FROM = 25.0


class _Compute:
    """The ladder of NCCL's searches: down until one finds channels, then up again."""

    def __init__(self, topo: NcclView, pattern: Pattern, nodes: int, low: int, high: int) -> None:
        self.topo, self.system, self.pattern = topo, topo.system, pattern
        self.inter = nodes > 1 and bool(self.system.nets)
        self.search = ChannelSearch(topo.paths, inter=self.inter)
        self.speeds = speeds(self.system.sm_min, inter=self.inter, facts=self.system.rules)
        self._bounds()
        self._totals()
        if len(self.system.gpus) == 1 and pattern != "ring":
            self.pattern = "tree"
        if pattern == "ring" and _two_nvlink_islands(topo):
            low = 2
        chosen = topo.settings.cross_nic
        # NCCL_CROSS_NIC's effect: channels change NICs never, always or if needed.
        self.cross_nic = _IF_NEED_BE if chosen is None else chosen
        if len(self.system.nets) < 2 or self.pattern == "tree":
            self.cross_nic = 0
        self.best = self.trial = SearchGraph(
            pattern=self.pattern,
            min_channels=low,
            max_channels=high,
            type_intra=self.least_intra,
            type_inter=self.least_inter,
            cross_nic=int(self.cross_nic == _ALWAYS),
        )
        self.step = self._first_step(low)
        self._set_rates(self.speeds[self.step])
        self.steps_left = _STEPS_IN_ALL
        self.searched: dict[tuple[object, ...], int] = {}

    def _bounds(self) -> None:
        gpus, nets, paths = self.system.gpus, self.system.nets, self.topo.paths
        intra = [paths[a, b].type for a in gpus for b in gpus if a != b]
        inter = [paths[a, b].type for a in gpus for b in nets]
        self.least_intra = min([PathType.SYS, *intra]) if len(gpus) > 1 else PathType.LOC
        self.most_intra = max([PathType.LOC, *intra]) if len(gpus) > 1 else PathType.SYS
        inward = [paths[b, a].type for a in gpus for b in nets]
        self.types_intra, self.types_inter = {*intra}, {*inter, *inward}
        self.least_inter, self.most_inter = PathType.PIX, PathType.SYS
        if self.inter:
            self.least_inter = min([PathType.SYS, *inter])
            self.most_inter = max([PathType.LOC, *inter])
            if self.system.sm_min < 90 and self.system.rules.old_gpus_leave_over_sys:
                self.most_inter = PathType.SYS

    def _totals(self) -> None:
        """Set the most that one channel, and all channels of a GPU, could carry, in GB/s."""
        gpus = self.system.gpus
        if len(gpus) == 1 and not self.inter:
            self.most, self.total = LOCAL_GBPS, LOCAL_GBPS
            return
        ends = self.system.nets if self.inter else gpus
        paths = self.topo.plain if self.system.rules.device_nodes else self.topo.paths
        ways = [paths[a, b] for a in gpus for b in ends]
        self.most = max((way.gbps for way in ways if way.links), default=0.0)
        self.total = single(max(_leaving(self.system, gpu) for gpu in gpus))

    def _first_step(self, channels: int) -> int:
        total, count = self.total, len(self.system.gpus)
        if count > 1 and self.pattern != "ring":
            total = single(total * (count / (count - 1)))
        for step, speed in enumerate(self.speeds):
            if single(speed) <= single(self.most) and total_gbps(speed, channels) <= total:
                return step
        return len(self.speeds) - 1

    def _set_rates(self, rate: float) -> None:
        self.trial = replace(self.trial, rate_intra=rate, rate_inter=rate)

    def run(self) -> SearchGraph:
        """Search until nothing better is to be expected; the simple order if nothing was found."""
        while self._search_once() and self._next_after_failure():
            pass
        self._duplicate()
        self._faster()
        return self.best if self.best.orders else self._simple_order()

    def _search_once(self) -> bool:
        """Search, and return whether there may be more to find."""
        steps = _STEPS_SAME_CHANNELS if self.trial.same_channels else _STEPS
        self.steps_left -= steps
        # Repeated with these parameters, a search finds nothing better.
        trial = self.trial
        near = sum(kind <= trial.type_intra for kind in self.types_intra)
        out = sum(kind <= trial.type_inter for kind in self.types_inter)
        ways = trial.pattern, trial.same_channels, trial.cross_nic, trial.min_channels
        key = (near, out, trial.rate_intra, trial.rate_inter, *ways)
        if key in self.searched:
            self.clock = self.searched[key]
            return True
        self.best, self.clock = self.search.run(self.trial, self.best, steps)
        self.searched[key] = self.clock
        total = total_gbps(self.best.rate_inter, len(self.best.orders))
        return self.clock != -1 and total < self.total

    def _next_after_failure(self) -> bool:
        """Loosen the trial by one notch; return False after the last notch."""
        trial = self.trial
        through_amd = self.system.vendor == AMD and trial.type_intra == PathType.SYS
        if trial.same_channels and not through_amd:
            self.trial = replace(trial, same_channels=False)
            return True
        self.steps_left += self.clock
        if self.steps_left < 0 and self.best.orders:
            return False
        if self.system.sm_min >= 90 and trial.pattern == "balanced tree":
            self.trial = replace(trial, same_channels=True, pattern="tree")
            return True
        self.trial = replace(trial, same_channels=True, pattern=self.best.pattern)
        return self._farther() or self._slower()

    def _farther(self) -> bool:
        """Allow the next path type, then farther NICs, then different NICs at both ends."""
        trial, best = self.trial, self.best
        none = not best.orders
        limit = trial.type_inter if self.inter else self.most_intra
        if trial.type_intra < limit and (none or trial.type_intra < best.type_intra):
            trial = replace(trial, type_intra=PathType(trial.type_intra + 1))
            if trial.type_intra < PathType.DIS:
                self.trial = trial
                return True
        trial = replace(trial, type_intra=self.least_intra)
        wider = none or trial.type_inter < max(best.type_inter, PathType.PXN)
        if self.inter and trial.type_inter < self.most_inter and wider:
            trial = replace(trial, type_inter=PathType(trial.type_inter + 1))
            if trial.type_inter < PathType.DIS:
                self.trial = trial
                return True
        trial = replace(trial, type_inter=self.least_inter)
        if self.cross_nic == _IF_NEED_BE and trial.cross_nic == 0 and best.pattern != "tree":
            self.trial = replace(trial, cross_nic=self.system.rules.crossed)
            return True
        self.trial = replace(trial, cross_nic=int(self.cross_nic == _ALWAYS))
        return False

    def _slower(self) -> bool:
        step, best = self.step + 1, self.best
        slower = self.speeds[step : step + 1]
        if not slower or (best.orders and slower[0] / best.rate_inter <= _SLOWER_IS_NO_HELP):
            return False
        self.step = step
        self._set_rates(self.speeds[step])
        return True

    def _duplicate(self) -> None:
        """Split few fast channels into twice as many of half the rate."""
        best, searched = self.best, len(self.best.orders)
        if not searched or best.rate_intra < _DUPLICATE_FROM:
            return
        if self.system.sm_min > 80 and best.rate_intra < 2 * _DUPLICATE_FROM and searched > 4:
            return
        count = min(searched * 2, best.max_channels)
        share = -(-count // searched)
        self.best = replace(
            best,
            orders=(best.orders * 2)[:count],
            nics=(best.nics * 2)[:count],
            rate_intra=best.rate_intra / share,
            rate_inter=best.rate_inter / share,
        )

    def _faster(self) -> None:
        """Try the same number of channels at higher rates; trees raise only the rate inside."""
        best = self.best
        self.trial = replace(best, min_channels=len(best.orders))
        faster = sum(speed > best.rate_inter for speed in self.speeds)
        self.step = min(faster, len(self.speeds) - 1)
        self._set_rates(self.speeds[self.step])
        self.clock = -1
        while self.clock != 0 and self.step > 0 and self._raise():
            self._search_once()

    def _raise(self) -> bool:
        trial = self.trial
        if self.pattern == "ring":
            self.step -= 1
            self._set_rates(self.speeds[self.step])
            return True
        if trial.rate_intra != self.best.rate_intra or trial.rate_intra >= trial.rate_inter * 2:
            return False
        self.step -= 1
        self.trial = replace(trial, rate_intra=self.speeds[self.step])
        return True

    def _simple_order(self) -> SearchGraph:
        """Return the GPUs in NCCL's order, between the NICs that the end GPUs prefer."""
        system = self.system
        nics: tuple[int, ...] = ()
        if self.inter and system.rules.falls_back_to_local_nets:
            ends = system.gpus[0], system.gpus[-1]
            near = (self.topo.paths.local_nets(gpu)[0] for gpu in ends)
            nics = tuple(index_of(net) for net in near)
        elif self.inter:
            nics = (self.topo.nics[0],) * 2
        return replace(
            self.best,
            orders=(tuple(range(len(system.gpus))),),
            nics=(nics,),
            rate_intra=FALLBACK_GBPS,
            type_intra=PathType.SYS,
            rate_inter=FALLBACK_GBPS,
            type_inter=PathType.SYS,
            fallback=True,
        )


def _leaving(system: System, gpu: str) -> float:
    links = system.nodes[gpu].links
    nvlinks = sum(link.gbps for link in links if link.type == PathType.NVL)
    pci = [link.gbps for link in links if link.type == PathType.PIX]
    return max([nvlinks, *pci[-1:]])


def _two_nvlink_islands(topo: NcclView) -> bool:
    """Return whether NCCL counts two NVLink domains (ncclTopoSplitNvLink).

    Each GPU in turn takes later NVLink neighbours into its own domain, so overlapping
    neighbourhoods are counted in parts.
    """
    gpus = topo.system.gpus
    domains = list(range(len(gpus)))
    for place, gpu in enumerate(gpus):
        for later in range(place + 1, len(gpus)):
            if topo.paths[gpu, gpus[later]].type == PathType.NVL:
                domains[later] = domains[place]
    return sum(domains.count(domain) > 1 for domain in set(domains)) == 2


def search_ring(topo: NcclView, *, nodes: int = 1) -> SearchGraph:
    """NCCL's ring search."""
    return _search(topo, "ring", nodes, low=1, high=topo.system.rules.max_channels)


def search_tree(topo: NcclView, *, nodes: int = 1, channels: int) -> SearchGraph:
    """NCCL's tree search for exactly as many channels as the ring has."""
    return _search(topo, "balanced tree", nodes, low=channels, high=channels)


def _search(topo: NcclView, pattern: Pattern, nodes: int, *, low: int, high: int) -> SearchGraph:
    """Search, inside a node once for all sets of GPUs that are alike."""
    key = (_shape(topo), pattern, low, high) if nodes == 1 else None
    graph = _GRAPHS.get(key) or _Compute(topo, pattern, nodes, low, high).run()
    if key:
        _GRAPHS[key] = graph
    gpus = [index_of(gpu) for gpu in topo.system.gpus]
    return replace(graph, orders=tuple(tuple(gpus[at] for at in order) for order in graph.orders))


_GRAPHS: dict[object, SearchGraph] = {}


def _shape(topo: NcclView) -> tuple[object, ...]:
    """Return all that a search inside a node depends on, with GPUs and links by their places."""
    system = topo.system
    places: dict[int, int] = {}

    def describe(path: TopoPath) -> tuple[object, ...]:
        links = (
            (places.setdefault(x.index, len(places)), x.type, x.gbps, system.nodes[x.target].kind)
            for x in path.links
        )
        return path.type, path.gbps, *links

    tables = product((topo.paths, topo.plain), system.gpus, system.gpus)
    ways = [describe(paths[source, target]) for paths, source, target in tables]
    gpus = [(system.sm[gpu], _leaving(system, gpu)) for gpu in system.gpus]
    cross_nic = topo.settings.cross_nic if len(system.nets) > 1 else 0
    kinds = bool(system.nvs), system.vendor, system.rules
    return tuple(ways), tuple(gpus), cross_nic, kinds


# Default NCCL's choice.
class DefaultChain(NamedTuple):
    """One channel on one node: in by NIC `entry`, along the GPUs, out by NIC `exit`."""

    entry: int
    gpus: tuple[int, ...]
    exit: int


class DefaultRings(msgspec.Struct, frozen=True, kw_only=True):
    """Default NCCL's rings on one node, or its chains on each of several equal nodes."""

    rings: tuple[tuple[int, ...], ...]
    """One GPU order a searched channel."""
    chains: tuple[DefaultChain, ...] = ()
    """Those of several nodes that run."""
    cross_nic: int
    channels: int
    """The final ones: no more than the tree has, then doubled."""
    settings: Settings
    fallback: bool = False
    """Whether the search found nothing and NCCL took its simple order."""
    assumed_sys: bool = False
    """Whether it found nothing without NCCL_P2P_LEVEL=SYS."""


def default_rings(topo: NcclView, *, nodes: int = 1) -> DefaultRings:
    """Return default NCCL's choice for a communicator over these GPUs of each of `nodes` nodes.

    Settings count only for paths and transports; channels and buffer size do not. Raises
    InputError: several nodes without a NIC that the settings allow.
    """
    if nodes > 1 and not topo.system.nets:
        where = f"default NCCL on {nodes} nodes of {topo.machine.name}"
        raise InputError(where, "has no network to use", "give a NIC that the settings allow")
    return _choice(topo.machine, topo.knowledge, topo.settings, topo.gpus, nodes)


@functools.lru_cache(maxsize=1024)  # plans, explanations and subsets ask for the same choices
def _choice(
    machine: Machine, knowledge: Knowledge, settings: Settings, gpus: tuple[int, ...], nodes: int
) -> DefaultRings:
    topo = view(machine, knowledge, settings, gpus=gpus)
    ring = search_ring(topo, nodes=nodes)
    count = len(ring.orders)
    # A tree always has one channel: for one ring channel there is no need to search.
    trees = len(search_tree(topo, nodes=nodes, channels=count).orders) if count > 1 else 1
    used = min(count, trees)
    ends = zip(ring.orders[:used], ring.nics, strict=False) if nodes > 1 else ()
    return DefaultRings(
        rings=ring.orders,
        chains=tuple(DefaultChain(entry, order, leave) for order, (entry, leave) in ends),
        cross_nic=ring.cross_nic,
        channels=final_channels(
            Settings(version=settings.version, channels=used),
            sm=topo.system.sm_min,
            nodes=nodes,
            speed_intra=ring.rate_intra,
        ),
        settings=settings,
        fallback=ring.fallback,
    )


def default_trees(topo: NcclView) -> SearchGraph:
    """Return default NCCL's trees on each of several nodes."""
    return _trees(topo.machine, topo.knowledge, topo.settings, topo.gpus)


@functools.lru_cache(maxsize=64)
def _trees(
    machine: Machine, knowledge: Knowledge, settings: Settings, gpus: tuple[int, ...]
) -> SearchGraph:
    topo = view(machine, knowledge, settings, gpus=gpus)
    return search_tree(topo, nodes=2, channels=len(default_rings(topo, nodes=2).rings))


def default_rings_or_sys(topo: NcclView, *, nodes: int) -> DefaultRings:
    """Return a baseline's choice: under NCCL_P2P_LEVEL=SYS where only that helps, if not set."""
    choice = default_rings(topo, nodes=nodes)
    if not choice.fallback or topo.settings.p2p_level is not None:
        return choice
    wider = replace(topo.settings, p2p_level="SYS")
    wide = default_rings(view(topo.machine, topo.knowledge, wider, gpus=topo.gpus), nodes=nodes)
    return choice if wide.fallback else replace(wide, assumed_sys=True)
