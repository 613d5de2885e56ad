"""What is left of every link of a machine while NCCL's search takes channels from it.

Source: followPath and ncclTopoFollowPath in search.cc of NCCL 2.30.7.
"""

from __future__ import annotations

from dataclasses import dataclass

from tccl_py.runtimes.nccl.paths import DISCONNECTED, Path, Paths
from tccl_py.runtimes.nccl.system import System
from tccl_py.topology.paths import PathType

SCALE = 1000
"""Bandwidths are whole thousandths of a GB/s, so that what was taken can be given back exactly."""


@dataclass(frozen=True, slots=True)
class _Use:
    """What a path takes of every link: link, fifths of the rate, link backwards (-1: none)."""

    links: tuple[tuple[int, int, int], ...]
    path: Path


class Capacity:
    """The links of one machine and what paths take of them.

    Args:
        system: the communicator's machine.
        paths: with policy applied.
    """

    def __init__(self, system: System, paths: Paths) -> None:
        self.takes = 0
        self._system, self._paths = system, paths
        self._gpus = frozenset(system.gpus)
        self._left = [round(link.gbps * SCALE) for link in system.links]
        self._uses: dict[tuple[str, str], _Use] = {}

    def take(self, source: str, target: str, rate: float) -> int | None:
        """Take `rate` GB/s of every link of a path and say how many there are.

        None, and nothing taken, if a link has too little left.
        """
        self.takes += 1
        links = self._use(source, target).links
        left, rate = self._left, rate * SCALE
        for place, (link, fifths, back) in enumerate(links):
            need = rate * fifths / 5
            if left[link] < need or (back >= 0 and left[back] < need / 8):
                self._give(links[:place], rate)
                return None
            left[link] = int(left[link] - need + 0.5)
            if back >= 0:
                left[back] = int(left[back] - need / 8 + 0.5)
        return len(links)

    def give(self, source: str, target: str, rate: float) -> int:
        """Give back what `take` took and say of how many links."""
        links = self._use(source, target).links
        self._give(links, rate * SCALE)
        return len(links)

    def _give(self, links: tuple[tuple[int, int, int], ...], rate: float) -> None:
        left = self._left
        for link, fifths, back in links:
            need = rate * fifths / 5
            left[link] = int(left[link] + need + 0.5)
            if back >= 0:
                left[back] = int(left[back] + need / 8 + 0.5)

    def type(self, source: str, target: str) -> PathType:
        """The type of a path; DIS if there is none."""
        return self._use(source, target).path.type

    def _use(self, source: str, target: str) -> _Use:
        use = self._uses.get((source, target))
        if use is None:
            path = self._paths.get((source, target), DISCONNECTED)
            use = _Use(self._shares(source, path), path)
            self._uses[source, target] = use
        return use

    def _shares(self, source: str, path: Path) -> tuple[tuple[int, int, int], ...]:
        """Each link's share: a fifth more on PCI below Intel CPUs, an eighth back from old GPUs."""
        system = self._system
        from_gpu = source in self._gpus
        over_cpu = any(system.nodes[link.target].kind == "cpu" for link in path.links)
        costly = path.type == PathType.PHB and from_gpu and over_cpu and system.intel
        shares = []
        for link in path.links:
            back = -1
            if not from_gpu and system.sm.get(link.target, 80) < 80:
                back = self._reverse(link.source, link.target, link.type)
            shares.append((link.index, 6 if costly and link.type == PathType.PIX else 5, back))
        return tuple(shares)

    def _reverse(self, source: str, target: str, kind: PathType) -> int:
        links = self._system.nodes[target].links
        return next(one.index for one in links if one.target == source and one.type == kind)

    def most_channels(self, rate: float, limit: PathType, *, most: int, closed: bool) -> int:
        """No search can find more channels than this, by links that GPUs cannot avoid.

        Every GPU but the last of an open channel leaves by one of its allowed paths, so what all
        of these share is taken once a channel.
        """
        if not self._connected(limit):
            return 0
        forced: dict[int, list[float]] = {}
        for gpu in self._system.gpus:
            for link, fifths in self._unavoidable(gpu, limit).items():
                forced.setdefault(link, []).append(rate * SCALE * fifths / 5)
        for link, needs in forced.items():
            need = sum(sorted(needs)[: None if closed else len(needs) - 1])
            if need > 0:
                most = min(most, int(self._left[link] / need))
        return most

    def _connected(self, limit: PathType) -> bool:
        gpus = self._system.gpus
        reached, frontier = {gpus[0]}, [gpus[0]]
        while frontier:
            one = frontier.pop()
            ways = ((other, self._use(one, other)) for other in gpus if other not in reached)
            near = [other for other, way in ways if way.path.type <= limit]
            reached.update(near)
            frontier.extend(near)
        return len(reached) == len(gpus)

    def _unavoidable(self, gpu: str, limit: PathType) -> dict[int, int]:
        ways = [self._use(gpu, other) for other in self._system.gpus if other != gpu]
        links = [
            {link: fifths for link, fifths, _ in way.links}
            for way in ways
            if way.path.type <= limit
        ]
        if not links:
            return {}
        common = set(links[0]).intersection(*links[1:])
        return {link: min(way[link] for way in links) for link in common}
