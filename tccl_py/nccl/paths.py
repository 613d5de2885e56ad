"""Paths between devices as NCCL computes them: type, bandwidth and the links on the way.

Source: paths.cc of NCCL 2.30.7 (ncclTopoSetPaths, ncclTopoComputePaths).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import permutations, product
from typing import Literal

from tccl_py.model.machine import Machine
from tccl_py.model.transfer import index_of
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.system import PathType, System, TopoLink, build_system
from tccl_py.nccl.versions import INTEL, LOCAL_GBPS

Direction = Literal["send", "receive"]

Step = tuple[int, int]
"""What a way takes of the links' fields (`Room`), and how many hops it has."""

SCALE = 1000
"""Bandwidths are whole thousandths of a GB/s: NCCL rounds to them what it takes and gives back."""
_MOST_TAKEN = 500_000
"""More than any path takes of a link."""
_NO_ANSWER_FROM = 80
"""GPUs below this sm answer a NIC's transfers with an eighth of the rate back."""
_READS_BESIDE_PCI = 80
"""From this sm on a NIC reads GPU memory even where GPUs talk to each other over PCI."""


@dataclass(frozen=True, slots=True)
class TopoPath:
    """The links from one device to another, the least bandwidth of them in GB/s, the type."""

    links: tuple[TopoLink, ...]
    gbps: float
    type: PathType


class TopoPaths(dict[tuple[str, str], TopoPath]):
    """Paths of a system by their ends; pairs without a path are disconnected."""

    def __init__(self, system: System, paths: Mapping[tuple[str, str], TopoPath] = {}) -> None:
        super().__init__(paths)
        self.system = system

    def __missing__(self, ends: tuple[str, str]) -> TopoPath:
        """Return no path."""
        return _DISCONNECTED

    def by_way_of(self, source: str, middle: str, target: str) -> TopoPath:
        """Return the path from `source` over `middle` to `target`."""
        first, second = self[source, middle], self[middle, target]
        kind = max(first.type, second.type)
        if {first.type, second.type} == {PathType.PHB, PathType.C2C}:
            kind = PathType.P2C
        return TopoPath((*first.links, *second.links), min(first.gbps, second.gbps), kind)

    def nearest(self, source: str, targets: tuple[str, ...]) -> tuple[str, ...]:
        """Return the targets with the most bandwidth from `source`, then with the nearest type."""
        reached = {name: self[source, name] for name in targets if self[source, name].gbps > 0}
        best = max(((path.gbps, -path.type) for path in reached.values()), default=None)
        return tuple(name for name, path in reached.items() if (path.gbps, -path.type) == best)

    def local_cpu(self, gpu: str) -> str:
        """Return the CPU of fewest links to a GPU, among the nearest CPUs where `nearer_wins`."""
        system = self.system
        near = self.nearest(gpu, system.cpus) if system.rules.nearer_wins else system.cpus
        return min(near, key=lambda cpu: len(self[gpu, cpu].links) or len(system.links))

    def relay(self, ends: tuple[str, str]) -> str | None:
        """Return the GPU through which the path from a GPU to a NIC leads, if any."""
        stops = (link.target for link in self[ends].links if link.target in self.system.sm)
        return next(stops) if self[ends].type == PathType.PXN else None

    def reaches_gpu(self, ends: tuple[str, str], direction: Direction, settings: Settings) -> bool:
        """Return whether a NIC reaches the memory of a GPU; to `send`, the NIC reads the memory.

        `ends` are the GPU and the NIC port. With a relay the relay's path counts.
        """
        system, (gpu, net) = self.system, ends
        farthest = PathType[settings.net_gdr_level or system.rules.default_gdr_level]
        distance = self[self.relay(ends) or gpu, net].type
        if ends not in system.gpu_direct or distance > farthest:
            return False
        if direction == "receive":
            return True
        if settings.net_gdr_read is not None:
            return settings.net_gdr_read
        peers = [self[gpu, peer].type for peer in system.gpus if peer != gpu]
        return not peers or system.sm[gpu] >= _READS_BESIDE_PCI or PathType.NVL in peers

    def local_nets(self, gpu: str) -> tuple[str, ...]:
        """Return the NIC ports that a GPU prefers, in the order of its channels.

        GPUs with several equally near ports begin at different ports (`shares_nets_by_place`).
        """
        nets = self.nearest(gpu, self.system.nets)
        if not nets:
            return ()
        sharers = len(self.nearest(nets[0], self.system.gpus)) or 1
        count, start = len(nets), index_of(gpu)
        if self.system.rules.shares_nets_by_place:
            start %= sharers
        if count > 1 and count & (count - 1) == 0:
            # Bits in reverse.
            start = int(format(start & (count - 1), f"0{count.bit_length() - 1}b")[::-1], 2)
        return tuple(nets[(start + step) % count] for step in range(-(-count // sharers)))

    def local_gpu(self, net: str) -> str | None:
        """Return the GPU that prefers this port, and relays for other GPUs."""
        choices = {gpu: self.local_nets(gpu) for gpu in self.nearest(net, self.system.gpus)}
        places = {gpu: nets.index(net) for gpu, nets in choices.items() if net in nets}
        return min(places, key=places.__getitem__, default=None)


_DISCONNECTED = TopoPath((), 0.0, PathType.DIS)
_LONGEST_NVB = 1


def shortest_paths(system: System) -> TopoPaths:
    """Return paths to every CPU, GPU, NIC port and NVSwitch, before policy."""
    paths = TopoPaths(system)
    for base in (*system.cpus, *system.gpus, *system.nets, *system.nvs):
        for device, path in _paths_to(system, base).items():
            paths[device, base] = path
    return paths


@lru_cache(maxsize=16)
def path_types(machine: Machine) -> dict[tuple[str, str], PathType]:
    """Return the path type from each CPU, GPU and NIC to each, without settings and policy.

    NCCL leaves out CPUs without a device, to which all paths lead over other CPUs.
    """
    types = {pair: path.type for pair, path in shortest_paths(build_system(machine)).items()}
    names = {name for pair in types for name in pair}
    for node in (node.id for node in machine.numa_nodes if node.id not in names):
        types |= {pair: PathType.SYS for name in names for pair in ((node, name), (name, node))}
    return types


def _paths_to(system: System, base: str) -> dict[str, TopoPath]:
    """Search breadth first from `base`; a better path replaces a known path."""
    paths = {base: TopoPath((), LOCAL_GBPS, PathType.LOC)}
    frontier = [base]
    while frontier:
        reached: dict[str, None] = {}
        for name in frontier:
            for link in system.nodes[name].links:
                if not _may_pass(system, base, paths[name], link):
                    continue
                path = _extend(system, paths[name], link)
                current = paths.get(link.target)
                if current is None or _better(system, path, current):
                    paths[link.target] = path
                    reached[link.target] = None
        frontier = list(reached)
    return paths


def _better(system: System, path: TopoPath, current: TopoPath) -> bool:
    if system.rules.nearer_wins:
        new, old = ((way.type, -way.gbps, len(way.links)) for way in (path, current))
        return new < old
    return len(current.links) >= len(path.links) and current.gbps < path.gbps


def _may_pass(system: System, base: str, path: TopoPath, link: TopoLink) -> bool:
    """Return whether a path may pass: through a GPU only by NVLink, to a GPU, as one step."""
    if link.source == base or system.nodes[link.source].kind != "gpu":
        return True
    onward = link.type == PathType.NVL and system.nodes[link.target].kind == "gpu"
    return onward and len(path.links) <= _LONGEST_NVB


def _extend(system: System, path: TopoPath, link: TopoLink) -> TopoPath:
    near, far = system.nodes[link.source].kind, system.nodes[link.target].kind
    kind = PathType.LOC if link.type == PathType.NET else link.type
    if near == far == "pci":
        kind = PathType.PXB
    if link.type == PathType.PIX and "cpu" in (near, far):
        kind = PathType.PHB
    if near == "gpu" and path.links and path.type == kind == PathType.NVL:
        kind = PathType.NVB
    return TopoPath(
        (system.back(link), *path.links), min(path.gbps, link.gbps), max(path.type, kind)
    )


def with_policy(
    paths: TopoPaths, *, direct: frozenset[tuple[str, str]], settings: Settings
) -> TopoPaths:
    """Return `shortest_paths` with policy: pairs not `direct` go over a CPU, NICs as by NCCL."""
    system = paths.system
    result = TopoPaths(system, paths)
    for target, source in permutations(system.gpus, 2):
        if (source, target) not in direct:
            result[source, target] = result.by_way_of(source, result.local_cpu(target), target)
    if "P2C" not in system.rules.unknown_levels:
        _count_c2c_as_near(result)
    for net, gpu in product(system.nets, system.gpus):
        _send_by_relay(result, settings, gpu, net)
        near = result[gpu, net].type < PathType.PHB
        if near and not result.reaches_gpu((gpu, net), "receive", settings):
            cpu = result.local_cpu(gpu)
            result[net, gpu] = result.by_way_of(net, cpu, gpu)
            result[gpu, net] = result.by_way_of(gpu, cpu, net)
    return result


def _count_c2c_as_near(paths: TopoPaths) -> None:
    """Count a GPU's nearest NICs as near if they are below the CPU of its C2C link."""
    for gpu in paths.system.gpus:
        cpu = paths.local_cpu(gpu)
        for net in paths.nearest(gpu, paths.system.nets):
            if paths.by_way_of(gpu, cpu, net).type == PathType.P2C:
                for pair in ((gpu, net), (net, gpu)):
                    paths[pair] = replace(paths[pair], type=min(PathType.P2C, paths[pair].type))


def _send_by_relay(paths: TopoPaths, settings: Settings, gpu: str, net: str) -> None:
    """Apply PXN: an NVLinked GPU nearer to a NIC relays for this GPU."""
    relay = paths.local_gpu(net)
    if relay is None or relay == gpu:
        return
    path, near = (paths[end, net] for end in (gpu, relay))
    adjacent = near.type <= PathType.P2C and paths[relay, gpu].type <= PathType.NVL
    if not adjacent or (near.gbps <= path.gbps and path.type <= PathType.PXN):
        return
    free = not paths.system.rules.relays_need_gpu_direct
    if free or paths.reaches_gpu((relay, net), "send", settings):
        paths[gpu, net] = replace(paths.by_way_of(gpu, relay, net), type=PathType.PXN)


class NetPorts:
    """The NIC ports of one machine in NCCL's order, with the `names` (aliases) of each."""

    def __init__(self, paths: TopoPaths) -> None:
        self._system, self._paths = (system := paths.system), paths
        ports = {
            nic.id: (nic.guid or f"device {nic.index}", nic.port) for nic in system.machine.nics
        }
        self.names = {
            name: tuple(twin for twin in system.nets if ports[twin] == ports[name])
            for name in system.nets
        }
        self.selected = cache(self._select)
        self.local_gpus = cache(self._locals)

    def _select(self, limit: int, gpu: str | None) -> tuple[str, ...]:
        """Return the ports that the GPUs prefer, then further ports by path type up to `limit`."""
        gpus, nets = self._system.gpus if gpu is None else (gpu,), self._system.nets
        chosen = [net for name in gpus for net in self._paths.local_nets(name)]
        for kind in range(limit + 1):
            ends = ((name, net) for name in gpus for net in nets)
            chosen += [end[1] for end in ends if self._paths[end].type == kind]
        return tuple(dict.fromkeys(chosen))

    def _locals(self, port: str) -> tuple[int, ...]:
        """Return the positions of the GPUs that begin a channel from this port."""
        first = self._paths.local_gpu(port)
        close = self._paths.nearest(port, self._system.gpus)
        order = dict.fromkeys((first, *close) if first else close)
        return tuple(self._system.gpus.index(gpu) for gpu in order)


class Room:
    """The bandwidth left on all links and NIC ports as one integer; `whole` is all of it.

    Each has a field of bits below a guard bit. Taking a path is one subtraction; a guard bit
    (`guards`) that it clears means a link with too little left.
    """

    def __init__(self, paths: TopoPaths, nets: NetPorts) -> None:
        self._system, self._paths = (system := paths.system), paths
        gbps = [link.gbps for link in system.links.values()]
        ports = [max(link.gbps for link in system.nodes[net].links) for net in system.nets]
        scaled = [round(gbps_of_link * SCALE) for gbps_of_link in gbps + ports]
        self._bits = max(_MOST_TAKEN, *scaled).bit_length() + 1
        guard = 1 << (self._bits - 1)
        self.guards = sum(guard << self._bits * index for index in range(len(scaled)))
        self.whole = sum(guard + units << self._bits * at for at, units in enumerate(scaled))
        unit = {net: 1 << self._bits * at for at, net in enumerate(system.nets, len(gbps))}
        self.port_units = {net: sum(unit[twin] for twin in nets.names[net]) for net in system.nets}
        self._field = guard - 1
        self._pci = [[self._bits * index for index in self._pci_links(gpu)] for gpu in system.gpus]
        self.use = cache(self._use)
        self.unused_pci = cache(self._unused_pci)

    def _pci_links(self, gpu: str) -> list[int]:
        """Return the PCI link from a GPU up, and the link down to the GPU."""
        nodes = self._system.nodes
        for up in nodes[gpu].links:
            if up.type == PathType.PIX:
                down = next(link for link in nodes[up.target].links if link.target == gpu)
                return [up.index, down.index]
        return []

    def pci_left(self, state: int, gpu: int) -> int:
        """Return the whole GB/s left on a GPU's PCI link, -1 without one."""
        units = (state >> shift & self._field for shift in self._pci[gpu])
        return min(units, default=-1) // SCALE

    def _unused_pci(self, used: int) -> int:
        """Return the fields of the PCI links of the GPUs outside a set of bits."""
        shifts = (pair for gpu, pair in enumerate(self._pci) if not used >> gpu & 1)
        return sum(self._field << shift for pair in shifts for shift in pair)

    def _use(self, source: str, target: str, rate: float) -> Step:
        """A fifth more is taken of PCI links below Intel CPUs, and an eighth back from old GPUs."""
        system, path, sm = self._system, self._paths[source, target], self._system.sm
        over_cpu = any(system.nodes[link.target].kind == "cpu" for link in path.links)
        costly = path.type == PathType.PHB and source in sm and over_cpu and system.vendor == INTEL
        need, use = round(rate * SCALE), 0
        for link in path.links:
            takes = need * 6 // 5 if costly and link.type == PathType.PIX else need
            use += takes << self._bits * link.index
            if source not in sm and sm.get(link.target, _NO_ANSWER_FROM) < _NO_ANSWER_FROM:
                use += takes // 8 << self._bits * system.back(link).index
        hops = len(path.links)
        if hops and system.rules.device_nodes:
            # One link more between a rank's GPU and its device, and two at a relay.
            hops += sum(end in sm for end in (source, target)) + 2 * (path.type == PathType.PXN)
        return use, hops
