"""NIC ports as NCCL's channel search sees them: which to try, and in what order.

Source: search.cc of NCCL 2.30.7 (ncclTopoSelectNets, ncclTopoSearchRecNet).
"""

from __future__ import annotations

from functools import cache

from tccl_py.runtimes.nccl.paths import DISCONNECTED, Paths, local_gpu, local_nets, nearest
from tccl_py.runtimes.nccl.system import System
from tccl_py.topology.machine import Nic


class NetPorts:
    """The ports of one machine.

    `gbps` is each port's bandwidth in GB/s, `names` are all names of the same port.
    """

    def __init__(self, system: System, paths: Paths) -> None:
        self._system, self._paths = system, paths
        ports = {nic.id: nic for nic in system.machine.nics}
        self._identity = {name: _identity(ports[name]) for name in system.nets}
        self.names = {
            name: tuple(other for other in system.nets if self.same_port(name, other))
            for name in system.nets
        }
        self.gbps = {
            name: max((link.gbps for link in system.nodes[name].links), default=0.0)
            for name in system.nets
        }
        self.selected = cache(self._select)
        self.local_gpus = cache(self._locals)

    def same_port(self, one: str, other: str) -> bool:
        """Whether two names are one port of one card."""
        return self._identity[one] == self._identity[other]

    def _select(self, limit: int, gpu: str | None) -> tuple[str, ...]:
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

    def _locals(self, port: str) -> tuple[int, ...]:
        """Positions of the GPUs that begin a channel from this port."""
        first = local_gpu(self._system, self._paths, port)
        close = nearest(self._paths, port, self._system.gpus)
        order = dict.fromkeys((first, *close) if first else close)
        return tuple(self._system.gpus.index(gpu) for gpu in order)


def _identity(nic: Nic) -> tuple[str, int]:
    return nic.guid or f"device {nic.index}", nic.port
