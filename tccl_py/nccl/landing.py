"""How a ring leaves a node and enters the next: where the network transport has its buffers.

A graph file names the NICs; whether they reach GPU memory follows from the pair and the settings.

Source: sendSetup, recvSetup, sendProxyConnect and recvProxyConnect (transport/net.cc),
ncclTopoCheckGdr and ncclTopoGetIntermediateRank (paths.cc), ncclTopoGetNetDev (search.cc) of
NCCL 2.30.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tccl_py.errors import InputError
from tccl_py.model.knowledge import Knowledge
from tccl_py.model.machine import Machine, Nic
from tccl_py.model.paths import PathType
from tccl_py.model.transfer import Fifo, Flow, entering, leaving
from tccl_py.nccl.gpu_direct import Direction, gpu_direct_rule
from tccl_py.nccl.paths import (
    DISCONNECTED,
    Paths,
    local_cpu,
    local_gpu,
    local_nets,
    nearest,
    relay_of,
)
from tccl_py.nccl.settings import Settings, check_settings
from tccl_py.nccl.system import System
from tccl_py.nccl.transport import View, view


def landing(seen: View, gpu: int, nic: int, direction: Direction) -> int | None:
    """The NUMA node of the host buffer between a GPU and a NIC; None if there is none (GPU direct).

    Both have to support it, their path is within NCCL_NET_GDR_LEVEL (PXB by default, since 2.27
    also P2C, over C2C to a NIC of the same CPU), and for sending NCCL_NET_GDR_READ lets NICs read
    GPU memory: by default where sm >= 80, or an NVLink to another GPU of the communicator, or no
    other GPU in it. If another GPU sends for this one (see `relay`), its path is the one that
    counts, and in both directions: the NIC then writes to this GPU's memory however far that is.

    A host buffer comes from ncclCudaHostCalloc in the proxy thread (sendProxyConnect,
    recvProxyConnect), pinned where that thread runs: it is started while its rank is bound to the
    CPUs nearest to its GPU (ncclTopoGetCpuAffinity), so that is the GPU's own NUMA node. Only
    NCCL_IGNORE_CPU_AFFINITY, NCCL_PROXY_CPUSET or a rank bound elsewhere change it. When a relay
    sends, it is the relay's. Flushes after receiving (ncclTopoNeedFlush) move no
    data, and change none of this.

    Raises:
        InputError: a GPU that is not in the communicator, or a NIC that NCCL would not use.
    """
    one, port = _ends(seen, gpu, nic)
    path = seen.paths.get((one, port), DISCONNECTED)
    over = relay_of(seen.system, path)
    distance = seen.paths[over, port].type if over else path.type
    direct = gpu_direct_rule(seen.settings).allows(
        seen.system,
        one,
        port,
        distance=distance,
        direction=direction,
        nvlinked=seen.nvlinked,
    )
    if direct:
        return None
    owner = over if over and direction == "send" else one
    return int(local_cpu(seen.system, seen.plain, owner)[1:])


def relay(seen: View, gpu: int, nic: int) -> int | None:
    """The GPU that sends for this one by this NIC (PXN); None if it sends by itself.

    Rings use PXN whenever they leave by a NIC to which the path is PXN: the GPU's kernel writes
    into a buffer in the memory of the GPU beside the NIC, over NVLink, and the NIC reads it there.
    That is so where both GPUs have NVLink, and the other's way to the NIC is wider or avoids the
    CPU. NCCL receives without it. NCCL_PXN_DISABLE=1, which no Settings choose, turns it off;
    NCCL_P2P_PXN_LEVEL is for send and receive only.

    Raises:
        InputError: as `landing`.
    """
    one, port = _ends(seen, gpu, nic)
    over = relay_of(seen.system, seen.paths.get((one, port), DISCONNECTED))
    return None if over is None else int(over[1:])


def net_path(seen: View, gpu: int, nic: int, direction: Direction) -> PathType:
    """The type of the path between a GPU and a NIC, as a graph's typeinter counts it.

    Raises:
        InputError: as `landing`.
    """
    one, port = _ends(seen, gpu, nic)
    pair = (one, port) if direction == "send" else (port, one)
    return seen.paths.get(pair, DISCONNECTED).type


def _ends(seen: View, gpu: int, nic: int) -> tuple[str, str]:
    one, port = f"G{gpu}", f"N{nic}"
    if one not in seen.system.sm or port not in seen.system.nets:
        gpus, nets = ", ".join(seen.system.gpus), ", ".join(seen.system.nets)
        raise InputError(
            f"end of a ring at GPU {gpu} and NIC {nic}",
            f"is not on machine {seen.system.machine.name}, or not for this job",
            f"there are {gpus} and {nets or 'no NICs'}",
        )
    return one, port


def exit_flow(
    machine: Machine,
    knowledge: Knowledge,
    settings: Settings,
    gpu: int,
    nic: int,
    *,
    blocks: int,
    gpus: Sequence[int] | None = None,
) -> Flow:
    """What a ring moves that leaves a node from GPU `gpu` by NIC `nic`.

    `gpus` are the communicator's on this node (None: all). Where another GPU sends for this one,
    the flow goes through that one's memory, `G3->G3->G0->N0->N0`.

    Raises:
        InputError: settings the version does not have, or as `landing`.
    """
    seen = view(machine, knowledge, check_settings(settings), gpus=gpus)
    # Where a host buffer is needed, it is the relay's, and its GPU memory is left out.
    through, over = landing(seen, gpu, nic, "send"), relay(seen, gpu, nic)
    fifo = Fifo(bytes=settings.buffsize)
    return leaving(gpu, nic, through=through, relay=over, blocks=blocks, fifo=fifo)


def entry_flow(
    machine: Machine,
    knowledge: Knowledge,
    settings: Settings,
    nic: int,
    gpu: int,
    *,
    blocks: int,
    gpus: Sequence[int] | None = None,
) -> Flow:
    """What a ring moves that enters a node by NIC `nic` at GPU `gpu`.

    Raises:
        InputError: as `exit_flow`.
    """
    seen = view(machine, knowledge, check_settings(settings), gpus=gpus)
    through = landing(seen, gpu, nic, "receive")
    return entering(nic, gpu, through=through, blocks=blocks, fifo=Fifo(bytes=settings.buffsize))


def open_ends(seen: View) -> tuple[tuple[int, int], ...]:
    """Every (GPU, NIC) at which a ring can enter or leave under a graph file.

    That is any GPU of the communicator with any NIC that NCCL may use (`usable_nics`): NCCL takes
    the NICs as the file names them, however far they are.
    """
    gpus = sorted(int(gpu[1:]) for gpu in seen.system.gpus)
    nics = sorted(int(net[1:]) for net in seen.system.nets)
    return tuple((gpu, nic) for gpu in gpus for nic in nics)


def may_change_rails(settings: Settings) -> bool:
    """Whether a ring may leave a node by another NIC than it entered by (NCCL_CROSS_NIC).

    NCCL does not look at the NICs of a file's channels; but a graph that says of itself that rings
    change rails (crossnic 1) is ignored under NCCL_CROSS_NIC=0.
    """
    return settings.cross_nic != 0


def leaves_as_named(gpus: Sequence[int], entry: int, leave: int) -> bool:
    """Whether a channel leaves by the NIC that a file names, on a node with these GPUs.

    On a node with one GPU that GPU is the first of every channel, and ncclTopoGetNetDev gives the
    first one the entry's NIC for both directions: the exit that a file names is not used.

    >>> leaves_as_named([0], 0, 1), leaves_as_named([0], 1, 1), leaves_as_named([0, 1], 0, 1)
    (False, True, True)
    """
    return len(gpus) > 1 or entry == leave


# NIC ports as NCCL's channel search sees them: which to try, and in what order.


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
