"""NIC ports as NCCL's channel search sees them: which to try, in what order, what is left of them.

Source: search.cc of NCCL 2.30.7 (ncclTopoSelectNets, ncclTopoSearchRecNet).
"""

from __future__ import annotations

from functools import cache

from tccl_py.runtimes.nccl.paths import DISCONNECTED, Paths, local_gpu, local_nets, nearest
from tccl_py.runtimes.nccl.system import System
from tccl_py.topology.machine import Nic
from tccl_py.topology.paths import PathType


class NetPorts:
    """The ports of one machine, with the bandwidth that channels have left of them in GB/s."""

    def __init__(self, system: System, paths: Paths) -> None:
        self._system, self._paths = system, paths
        ports = {nic.id: nic for nic in system.machine.nics}
        self._identity = {name: _identity(ports[name]) for name in system.nets}
        self._names = {
            name: tuple(other for other in system.nets if self.same_port(name, other))
            for name in system.nets
        }
        self._left = {
            name: max((link.gbps for link in system.nodes[name].links), default=0.0)
            for name in system.nets
        }
        self.selected = cache(self._select)
        self.local_gpus = cache(self._locals)

    def left(self, port: str) -> float:
        """What is left of a port, in GB/s."""
        return self._left[port]

    def take(self, port: str, gbps: float) -> None:
        """Take from a port and from every other name of the same one."""
        for name in self._names[port]:
            self._left[name] -= gbps

    def most_channels(self, gbps: int, limit: int) -> int:
        """How many channels of this rate can begin at all ports together, or `limit` if fewer."""
        if gbps == 0:
            return limit
        ports = {self._identity[name]: left for name, left in self._left.items()}
        return min(limit, sum(int(left / gbps) for left in ports.values()))

    def same_port(self, one: str, other: str) -> bool:
        """Whether two names are one port of one card."""
        return self._identity[one] == self._identity[other]

    def score(self, port: str, gpu: str) -> tuple[int, int, int]:
        """How promising a GPU is for a way back to `port`; smaller is better, zeros for no port."""
        if not port:
            return 0, 0, 0
        path = self._paths.get((port, gpu), DISCONNECTED)
        links = [link for link in self._system.nodes[gpu].links if link.type == PathType.PIX]
        pci = int(links[0].gbps) if links else -1
        return -int(path.gbps), -pci, len(path.links)

    def _select(self, limit: PathType, gpu: str | None) -> tuple[str, ...]:
        """Ports to try: those the GPUs prefer, then others by path type up to `limit`."""
        gpus = self._system.gpus if gpu is None else (gpu,)
        chosen: dict[str, None] = {}
        for one in gpus:
            chosen.update(dict.fromkeys(local_nets(self._system, self._paths, one)))
        for kind in range(limit + 1):
            for one in gpus:
                ways = {net: self._paths.get((one, net), DISCONNECTED) for net in self._system.nets}
                chosen.update((net, None) for net, way in ways.items() if way.type == kind)
        return tuple(chosen)

    def _locals(self, port: str) -> tuple[str, ...]:
        first = local_gpu(self._system, self._paths, port)
        close = nearest(self._paths, port, self._system.gpus)
        return tuple(dict.fromkeys((first, *close) if first else close))


def _identity(nic: Nic) -> tuple[str, int]:
    return nic.guid or f"device {nic.index}", nic.port
