"""The graphs NCCL computes for itself: its search at rate after rate, limit after limit.

Source: ncclTopoCompute (search.cc) of NCCL 2.30.7.
"""

from __future__ import annotations

import msgspec

from tccl_py.runtimes.nccl.bandwidths import LOCAL_GBPS, speeds
from tccl_py.runtimes.nccl.channel_search import ChannelSearch, Clock, Pattern, Trial
from tccl_py.runtimes.nccl.paths import DISCONNECTED
from tccl_py.runtimes.nccl.system import System
from tccl_py.runtimes.nccl.transport import View
from tccl_py.runtimes.nccl.versions import version_facts
from tccl_py.topology.paths import PathType

FALLBACK_GBPS = 0.1
"""What NCCL writes down for the simple order it falls back to."""
_TIME = 1 << 14
_TIME_SAME_CHANNELS = 1 << 8
_TIME_IN_ALL = 1 << 19
_FEW_GPUS = 8
_ALWAYS, _IF_NEED_BE = 1, 2
"""Values of NCCL_CROSS_NIC."""
_SLOWER_IS_NO_HELP = 0.49
_DUPLICATE_FROM = 25.0


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A graph as NCCL's search leaves it: GPU ids per channel, ids of the NIC ports at its ends.

    Ports are "" on one node. With `cross_nic` 2, nodes whose number is odd swap the channels of
    each pair.
    """

    orders: tuple[tuple[str, ...], ...]
    ports: tuple[tuple[str, str], ...]
    rate_intra: float
    type_intra: PathType
    rate_inter: float
    type_inter: PathType
    cross_nic: int = 0
    fallback: bool = False


class _Compute:
    """The ladder of searches that NCCL climbs down until one finds channels, then up again."""

    def __init__(self, seen: View, *, pattern: Pattern, nodes: int, low: int, high: int) -> None:
        self.system, self.pattern = seen.system, pattern
        self.search = ChannelSearch(seen.system, seen.paths, nodes=nodes)
        self.crossed = version_facts(seen.settings.version).crossed
        self.inter = self.search.inter
        self.speeds = speeds(seen.system.sm_min, nodes=2 if self.inter else 1)
        self._bounds(seen)
        self._totals(seen)
        if len(self.system.gpus) == 1 and pattern != "ring":
            self.pattern = "tree"
        if pattern == "ring" and low == 1 and high >= 2 and _two_nvlink_islands(seen):
            low = 2
        self.cross_nic = self._cross_nic(seen)
        self.best = Trial(
            pattern=self.pattern,
            min_channels=low,
            max_channels=high,
            type_intra=self.least_intra,
            type_inter=self.least_inter,
            cross_nic=int(self.cross_nic == _ALWAYS),
        )
        self.trial = self.best.copy()
        self.step = self._first_step(low)
        self._set_rates(self.speeds[self.step])
        self.time_left = _TIME_IN_ALL
        self.searched: dict[tuple[object, ...], int] = {}

    def _cross_nic(self, seen: View) -> int:
        """What NCCL_CROSS_NIC comes to here: channels change NICs never, always or if need be."""
        if not self.inter or len(self.system.nets) < 2 or self.pattern == "tree":
            return 0
        chosen = seen.settings.cross_nic
        return _IF_NEED_BE if chosen is None else chosen

    def _bounds(self, seen: View) -> None:
        gpus, nets, paths = self.system.gpus, self.system.nets, seen.paths
        intra = [paths.get((a, b), DISCONNECTED).type for a in gpus for b in gpus if a != b]
        inter = [paths.get((a, b), DISCONNECTED).type for a in gpus for b in nets]
        self.least_intra = min([PathType.SYS, *intra]) if len(gpus) > 1 else PathType.LOC
        self.most_intra = max([PathType.LOC, *intra]) if len(gpus) > 1 else PathType.SYS
        inward = [paths.get((b, a), DISCONNECTED).type for a in gpus for b in nets]
        self.types_intra, self.types_inter = {*intra}, {*inter, *inward}
        self.least_inter, self.most_inter = PathType.PIX, PathType.SYS
        if self.inter:
            self.least_inter = min([PathType.SYS, *inter])
            self.most_inter = max([PathType.LOC, *inter])
            if self.system.sm_min < 90:
                self.most_inter = PathType.SYS

    def _totals(self, seen: View) -> None:
        """The most one channel and all channels of a GPU could carry, in GB/s."""
        gpus = self.system.gpus
        if len(gpus) == 1 and not self.inter:
            self.most, self.total = LOCAL_GBPS, LOCAL_GBPS
            return
        ends = self.system.nets if self.inter else gpus
        ways = [seen.paths.get((a, b), DISCONNECTED) for a in gpus for b in ends]
        self.most = max((way.gbps for way in ways if way.links), default=0.0)
        self.total = max(_leaving(self.system, gpu) for gpu in gpus)

    def _first_step(self, channels: int) -> int:
        total, count = self.total, len(self.system.gpus)
        if count > 1 and self.pattern != "ring":
            total *= count / (count - 1)
        for step, speed in enumerate(self.speeds):
            if speed <= self.most and speed * channels <= total:
                return step
        return len(self.speeds) - 1

    def _set_rates(self, rate: float) -> None:
        self.trial.rate_intra = self.trial.rate_inter = rate

    def run(self) -> Found:
        """Search until nothing better is to be expected; the simple order if nothing was found."""
        while self._search_once() and self._next_after_failure():
            pass
        self._duplicate()
        self._faster()
        best = self.best
        if best.channels == 0:
            return _simple_order(self.system, self.inter)
        return Found(
            orders=tuple(tuple(order) for order in best.orders[: best.channels]),
            ports=tuple((one, other) for one, other in best.ports[: best.channels]),
            rate_intra=best.rate_intra,
            type_intra=best.type_intra,
            rate_inter=best.rate_inter,
            type_inter=best.type_inter,
            cross_nic=best.cross_nic,
        )

    def _search_once(self) -> bool:
        """Whether there may be more to find after one search."""
        trial = self.trial
        clock = Clock(_TIME_SAME_CHANNELS if trial.same_channels else _TIME)
        self.time_left -= clock.left
        trial.channels, trial.hops = 0, 0
        if self._hopeless():
            self.clock = 0
            return True
        key = self._key()
        if key in self.searched:
            self.clock = self.searched[key]
            return True
        self.best = self.search.run(trial, self.best, clock)
        self.clock = self.searched[key] = clock.left
        return clock.left != -1 and self.best.channels * self.best.rate_inter < self.total

    def _key(self) -> tuple[object, ...]:
        """What a search depends on: one that was made already finds nothing better again."""
        trial = self.trial
        near = sum(one <= trial.type_intra for one in self.types_intra)
        out = sum(one <= trial.type_inter for one in self.types_inter)
        rates = trial.rate_intra, trial.rate_inter
        ways = trial.pattern, trial.same_channels, trial.cross_nic
        return (near, out, *rates, *ways, trial.min_channels)

    def _hopeless(self) -> bool:
        """Whether a search can find nothing better; on many GPUs it would run into its limit."""
        trial, best = self.trial, self.best
        if len(self.system.gpus) < _FEW_GPUS:
            return False
        most = self.search.most_channels(trial)
        enough = best.channels * best.rate_intra
        return most < trial.min_channels or most * trial.rate_intra < enough

    def _next_after_failure(self) -> bool:
        """Loosen the trial by one notch; False when all notches are used up."""
        trial, best = self.trial, self.best
        through_amd = self.system.amd and trial.type_intra == PathType.SYS
        if trial.same_channels and not through_amd:
            trial.same_channels = False
            return True
        trial.same_channels = True
        self.time_left += self.clock
        if self.time_left < 0 and best.channels:
            return False
        if self.system.sm_min >= 90 and trial.pattern == "balanced tree":
            trial.pattern = "tree"
            return True
        trial.pattern = self.pattern
        return self._farther() or self._slower()

    def _farther(self) -> bool:
        """Allow the next path type, then NICs farther away, then different ones at both ends."""
        trial, best = self.trial, self.best
        none = best.channels == 0
        limit = trial.type_inter if self.inter else self.most_intra
        if trial.type_intra < limit and (none or trial.type_intra < best.type_intra):
            trial.type_intra = PathType(trial.type_intra + 1)
            if trial.type_intra < PathType.DIS:
                return True
        trial.type_intra = self.least_intra
        wider = none or trial.type_inter < max(best.type_inter, PathType.PXN)
        if self.inter and trial.type_inter < self.most_inter and wider:
            trial.type_inter = PathType(trial.type_inter + 1)
            if trial.type_inter < PathType.DIS:
                return True
        trial.type_inter = self.least_inter
        if self.cross_nic == _IF_NEED_BE and trial.cross_nic == 0:
            trial.cross_nic = self.crossed
            return True
        trial.cross_nic = int(self.cross_nic == _ALWAYS)
        return False

    def _slower(self) -> bool:
        step, best = self.step + 1, self.best
        if step >= len(self.speeds):
            return False
        if best.channels and self.speeds[step] / best.rate_inter <= _SLOWER_IS_NO_HELP:
            return False
        self.step = step
        self._set_rates(self.speeds[step])
        return True

    def _duplicate(self) -> None:
        """Split few fast channels into twice as many of half the rate."""
        best, many = self.best, self.best.channels > 4
        if best.channels == 0 or best.rate_intra < _DUPLICATE_FROM:
            return
        if self.system.sm_min > 80 and best.rate_intra < 2 * _DUPLICATE_FROM and many:
            return
        count = min(best.channels * 2, best.max_channels)
        share = -(-count // best.channels)
        best.orders = (best.orders[: best.channels] * 2)[:count]
        best.ports = (best.ports[: best.channels] * 2)[:count]
        best.rate_intra /= share
        best.rate_inter /= share
        best.channels = count

    def _faster(self) -> None:
        """Try the same number of channels at higher rates; trees raise only the rate inside."""
        best = self.best
        self.trial = best.copy()
        self.trial.min_channels = best.channels
        found = [step for step, speed in enumerate(self.speeds) if speed <= best.rate_inter]
        self.step = found[0] if found else len(self.speeds) - 1
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
        trial.rate_intra = self.speeds[self.step]
        return True


def _leaving(system: System, gpu: str) -> float:
    links = system.nodes[gpu].links
    nvlinks = sum(link.gbps for link in links if link.type == PathType.NVL)
    pci = [link.gbps for link in links if link.type == PathType.PIX]
    return max([nvlinks, *pci[-1:]])


def _two_nvlink_islands(seen: View) -> bool:
    """Whether the GPUs are two groups with NVLinks inside and something slower between."""
    islands: list[set[str]] = []
    for gpu in seen.system.gpus:
        near = {
            other
            for other in seen.system.gpus
            if seen.paths.get((gpu, other), DISCONNECTED).type == PathType.NVL
        }
        if not any(gpu in island for island in islands):
            islands.append(near | {gpu})
    return sum(len(island) > 1 for island in islands) == 2


def _simple_order(system: System, inter: bool) -> Found:
    port = min(system.nets, key=lambda net: int(net[1:])) if inter else ""
    return Found(
        orders=(system.gpus,),
        ports=((port, port),),
        rate_intra=FALLBACK_GBPS,
        type_intra=PathType.SYS,
        rate_inter=FALLBACK_GBPS,
        type_inter=PathType.SYS,
        fallback=True,
    )


def search_ring(seen: View, *, nodes: int = 1) -> Found:
    """NCCL's ring search."""
    high = version_facts(seen.settings.version).max_channels
    return _Compute(seen, pattern="ring", nodes=nodes, low=1, high=high).run()


def search_tree(seen: View, *, nodes: int = 1, channels: int) -> Found:
    """NCCL's tree search for exactly as many channels as the ring has."""
    return _Compute(seen, pattern="balanced tree", nodes=nodes, low=channels, high=channels).run()
