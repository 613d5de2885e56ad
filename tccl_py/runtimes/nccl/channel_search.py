"""NCCL's depth-first search for channels at one rate: an emulation of its order and its limits.

A channel is a ring or a tree over all GPUs that takes its rate from every link it uses. NCCL tries
the PCI order first, then repeats the last channel, then everything, for a bounded number of steps.
The search nests as deep as channels times GPUs, so it is a stack of generators, not of calls.

Source: search.cc of NCCL 2.30.7.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tccl_py.runtimes.nccl.capacity import Capacity
from tccl_py.runtimes.nccl.network import NetPorts
from tccl_py.runtimes.nccl.paths import DISCONNECTED, Paths
from tccl_py.runtimes.nccl.system import System
from tccl_py.topology.paths import PathType

Pattern = Literal["ring", "balanced tree", "tree"]
Order = Literal["free", "pci", "replay"]
Steps = Iterator[Any]

MAX_TAKES = 700_000
"""Paths tried on one machine after which every search stops as if its time were up. NCCL has no
such limit; it takes effect on 16 GPUs and more, seconds into the search."""
_PCI_ORDER_TIME = 1 << 10


@dataclass(slots=True)
class Trial:
    """What is searched for, and what has been found so far.

    `orders` holds the GPU ids and `ports` the two NIC ports of every channel, finished ones first
    and then the one begun. Rates are GB/s a channel.
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
    channels: int = 0
    hops: int = 0
    orders: list[list[str]] = field(default_factory=list)
    ports: list[list[str]] = field(default_factory=list)

    def copy(self) -> Trial:
        """A copy of the finished channels that shares nothing that changes."""
        return replace(
            self,
            orders=[list(order) for order in self.orders[: self.channels]],
            ports=[list(pair) for pair in self.ports[: self.channels]],
        )

    def begin(self, gpus: int) -> None:
        """Make room for one more channel."""
        if len(self.orders) == self.channels:
            self.orders.append([""] * gpus)
            self.ports.append(["", ""])


@dataclass(slots=True)
class Clock:
    """Steps left; -1 once the best that can be found was found."""

    left: int


@dataclass(frozen=True, slots=True)
class _Course:
    """How a channel goes on: the step at which it turns to a NIC or to its first GPU (-1: none)."""

    back_net: int
    back_first: int
    order: Order


class ChannelSearch:
    """One machine's links with what is left of them, and the search over them.

    Args:
        system: the communicator's machine.
        paths: with policy applied.
        nodes: 1, or more if channels begin and end at NICs.
    """

    def __init__(self, system: System, paths: Paths, *, nodes: int) -> None:
        self.system = system
        self.paths = paths
        self.inter = nodes > 1 and bool(system.nets)
        self.nets = NetPorts(system, paths)
        self._capacity = Capacity(system, paths)
        self._sorted: dict[tuple[str, str], list[str]] = {}
        self._beside: dict[tuple[str, Pattern], tuple[str, ...]] = {}
        self._position = {gpu: place for place, gpu in enumerate(system.gpus)}

    def run(self, trial: Trial, best: Trial, clock: Clock) -> Trial:
        """Search from an empty trial; returns the better of `best` and what was found."""
        self._trial, self._best = trial, best
        self._open: dict[tuple[str, str], bool] = {}
        stack = [self._channel(clock)]
        while stack:
            deeper = next(stack[-1], None)
            if deeper is None:
                stack.pop()
            else:
                stack.append(deeper)
        return self._best

    def most_channels(self, trial: Trial) -> int:
        """No search can find more channels than this; costs nothing next to a search."""
        most = trial.max_channels
        if self.inter:
            most = min(most, self.nets.most_channels(int(trial.rate_inter), most))
        closed = trial.pattern == "ring" and not self.inter
        return self._capacity.most_channels(
            trial.rate_intra, trial.type_intra, most=most, closed=closed
        )

    # Channels

    def _channel(self, clock: Clock) -> Steps:
        """Begin the next channel."""
        trial, gpus = self._trial, self.system.gpus
        trial.begin(len(gpus))
        if self.inter:
            yield self._channel_from_port(clock)
            return
        back = len(gpus) - 1 if trial.pattern == "ring" else -1
        if trial.channels == 0:
            yield self._enter("", gpus[0], _Course(-1, back, "pci"), clock)
        else:
            first = trial.orders[trial.channels - 1][0]
            yield self._enter("", first, _Course(-1, back, "replay"), clock)
        if trial.channels == 0 or not trial.same_channels:
            for gpu in gpus:
                yield self._enter("", gpu, _Course(-1, back, "free"), clock)

    def _channel_from_port(self, clock: Clock) -> Steps:
        trial, nets = self._trial, self.nets
        back = len(self.system.gpus) - 1 if trial.pattern == "ring" else 0
        whole = int(trial.rate_inter)
        ports = nets.selected(trial.type_inter, None)
        for step in range(len(ports)):
            port = ports[(trial.channels + step) % len(ports)]
            if nets.left(port) < whole or not self._continues(port):
                continue
            nets.take(port, whole)
            trial.ports[trial.channels][0] = port
            yield self._channel_at(port, back, clock)
            nets.take(port, -whole)

    def _continues(self, port: str) -> bool:
        """With crossed NICs, an odd channel begins where the one before ended."""
        trial = self._trial
        if trial.pattern != "ring" or trial.cross_nic != 2 or trial.channels % 2 == 0:
            return True
        return port == trial.ports[trial.channels - 1][1]

    def _channel_at(self, port: str, back: int, clock: Clock) -> Steps:
        trial = self._trial
        if trial.channels and trial.same_channels:
            first = trial.orders[trial.channels - 1][0]
            yield self._enter(port, first, _Course(back, -1, "replay"), clock)
            return
        if trial.channels == 0 and not self.system.nvs:
            short = Clock(_PCI_ORDER_TIME)
            yield self._enter(port, self.system.gpus[0], _Course(back, -1, "pci"), short)
            if short.left == -1:
                clock.left = -1
        for gpu in self.nets.local_gpus(port):
            yield self._enter(port, gpu, _Course(back, -1, "free"), clock)

    # GPUs

    def _enter(self, port: str, gpu: str, course: _Course, clock: Clock) -> Steps:
        """Begin a channel at `gpu`, coming from a NIC port if there is one."""
        rate = self._trial.rate_inter
        if port and not self._take(port, gpu, rate):
            return
        yield self._visit(gpu, 0, course, clock)
        if port:
            self._give(port, gpu, rate)

    def _visit(self, gpu: str, step: int, course: _Course, clock: Clock) -> Steps:
        if clock.left <= 0:
            return
        clock.left = clock.left - 1 if self._capacity.takes < MAX_TAKES else 0
        last = len(self.system.gpus) - 1
        if step > last:
            yield self._finish(clock)
            return
        self._trial.orders[self._trial.channels][step] = gpu
        if step == course.back_net:
            yield self._back_to_port(gpu, step, course, clock)
        elif step < last:
            rate = self._trial.rate_intra
            for following in self._next_gpus(gpu, step, course):
                if self._take(gpu, following, rate):
                    yield self._visit(following, step + 1, course, clock)
                    self._give(gpu, following, rate)
        elif step == course.back_first:
            yield self._close(gpu, clock)
        else:
            yield self._visit(gpu, last + 1, course, clock)

    def _close(self, gpu: str, clock: Clock) -> Steps:
        """Return from the last GPU to the first."""
        trial = self._trial
        first, rate = trial.orders[trial.channels][0], trial.rate_intra
        if self._take(gpu, first, rate):
            yield self._visit(first, len(self.system.gpus), _Course(-1, -1, "free"), clock)
            self._give(gpu, first, rate)

    def _back_to_port(self, gpu: str, step: int, course: _Course, clock: Clock) -> Steps:
        """Leave for a NIC port, then go on; a balanced tree leaves half from each of two GPUs."""
        trial = self._trial
        balanced = trial.pattern == "balanced tree"
        onward = _Course(1 if balanced and step == 0 else -1, course.back_first, course.order)
        rate = trial.rate_inter / 2 if balanced else trial.rate_inter
        for port in self.nets.selected(trial.type_inter, gpu):
            if not self._may_leave(port, step) or not self._take(gpu, port, rate):
                continue
            trial.ports[trial.channels][1] = port
            yield self._visit(gpu, step, onward, clock)
            self._give(gpu, port, rate)

    def _may_leave(self, port: str, step: int) -> bool:
        trial = self._trial
        start, end = trial.ports[trial.channels]
        if trial.pattern == "tree" and port != start:
            return False
        if trial.pattern == "ring" and trial.cross_nic == 2:
            if trial.channels % 2 and port != trial.ports[trial.channels - 1][0]:
                return False
        elif trial.cross_nic == 0 and not self.nets.same_port(port, start):
            return False
        return trial.pattern != "balanced tree" or step == 0 or port == end

    def _finish(self, clock: Clock) -> Steps:
        """A channel is complete: keep it if it is better, and try one more."""
        trial = self._trial
        trial.channels += 1
        if self._better():
            self._best = trial.copy()
            if trial.channels == trial.max_channels:
                clock.left = -1
        if trial.channels < trial.max_channels:
            yield self._channel(clock)
        trial.channels -= 1

    def _better(self) -> bool:
        trial, best = self._trial, self._best
        if trial.channels < trial.min_channels:
            return False
        new, old = trial.channels * trial.rate_intra, best.channels * best.rate_intra
        if new != old:
            return new > old
        alike = trial.pattern == best.pattern and trial.cross_nic == best.cross_nic
        return alike and trial.hops < best.hops

    # Order of GPUs

    def _next_gpus(self, gpu: str, step: int, course: _Course) -> list[str]:
        back_net = course.back_net
        if course.order == "pci":
            return [self.system.gpus[step + 1]]
        if course.order == "replay":
            return [self._trial.orders[self._trial.channels - 1][step + 1]]
        used = self._trial.orders[self._trial.channels][: step + 1]
        if self.system.nvs:
            return [one for one in self._neighbours(gpu) if one not in used]
        sort_net = 0 if back_net == -1 else 1 if back_net == step + 1 else -1
        port = self._trial.ports[self._trial.channels][0] if sort_net else ""
        ranked = [one for one in self._ranking(gpu, port) if one not in used]
        if sort_net == -1 and len({self._intra_score(gpu, one) for one in ranked}) <= 1:
            ranked.reverse()
        return ranked

    def _intra_score(self, gpu: str, other: str) -> tuple[int, int]:
        path = self.paths[gpu, other]
        return -int(path.gbps), len(path.links)

    def _ranking(self, gpu: str, port: str) -> list[str]:
        """All other GPUs, most promising first; scores are whole GB/s as in NCCL."""
        known = self._sorted.get((gpu, port))
        if known is None:
            start, count = self._position[gpu], len(self.system.gpus)
            around = [self.system.gpus[(start + step) % count] for step in range(1, count)]
            reached = [one for one in around if self.paths.get((gpu, one), DISCONNECTED).links]
            known = sorted(
                reached,
                key=lambda one: (*self.nets.score(port, one), *self._intra_score(gpu, one)),
            )
            self._sorted[gpu, port] = known
        return known

    def _neighbours(self, gpu: str) -> tuple[str, ...]:
        """Behind an NVSwitch only the GPUs before and after this one are tried."""
        known = self._beside.get((gpu, self._trial.pattern))
        if known is None:
            gpus, place = self.system.gpus, self._position[gpu]
            after, before = gpus[(place + 1) % len(gpus)], gpus[place - 1]
            wanted = {"ring": [after, before], "balanced tree": [before, after], "tree": [after]}
            beside = dict.fromkeys(wanted[self._trial.pattern])
            reached = set(self._ranking(gpu, ""))
            known = tuple(one for one in reversed(beside) if one in reached)
            self._beside[gpu, self._trial.pattern] = known
        return known

    # Bandwidth

    def _take(self, source: str, target: str, rate: float) -> bool:
        """Take `rate` from every link of a path; False, and nothing taken, if it may not be."""
        pair = source, target
        if pair not in self._open:
            self._open[pair] = self._allowed(source, target)
        if not self._open[pair]:
            return False
        links = self._capacity.take(source, target, rate)
        self._trial.hops += links or 0
        return links is not None

    def _give(self, source: str, target: str, rate: float) -> None:
        self._trial.hops -= self._capacity.give(source, target, rate)

    def _allowed(self, source: str, target: str) -> bool:
        trial = self._trial
        intra = source in self._position and target in self._position
        limit = min(trial.type_intra if intra else trial.type_inter, PathType.NET)
        if self._capacity.type(source, target) > limit:
            return False
        return trial.pattern == "ring" or self._capacity.type(target, source) <= limit
