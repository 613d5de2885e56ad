"""How a ring leaves a node and enters the next: NICs, network buffers, and hops of chains.

Whether NICs reach GPU memory follows from the pair and the settings.

Source: sendSetup, recvSetup, sendProxyConnect and recvProxyConnect (transport/net.cc),
ncclTopoCheckGdr and ncclTopoGetIntermediateRank (paths.cc), ncclTopoGetNetDev (search.cc) of
NCCL 2.30.7.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise, product

import msgspec
import numpy as np

from tccl_py.errors import InputError, SearchError, require
from tccl_py.model.rings import (
    Hop,
    HopSpace,
    Pair,
    PairHops,
    Ring,
    entering,
    leaving,
    receiving_nic,
    ring,
    sending_nic,
)
from tccl_py.model.symmetry import Symmetry, keeping
from tccl_py.model.transfer import Fifo, Flow, index_of
from tccl_py.nccl.graph_writer import GraphRings
from tccl_py.nccl.paths import Direction
from tccl_py.nccl.settings import Settings, check_settings
from tccl_py.nccl.system import PathType
from tccl_py.nccl.transport import blocks_of_ring, combinations, hop_space
from tccl_py.nccl.versions import TYPES, version_facts
from tccl_py.nccl.view import NcclView, net_devices, net_ends, net_path, view

# Chains: a node with the network has one more vertex, the world, and a chain is a ring through it.


WORLD = -1
"""The vertex of all other nodes; lower than any GPU, so that rings begin at the world."""


def nic_of(hop: Hop) -> int:
    """Return the index of the NIC of an entry or exit; SearchError for a hop between GPUs."""
    nic = receiving_nic(hop.flow) if hop.source == WORLD else sending_nic(hop.flow)
    if nic is None:
        raise SearchError(f"{hop.flow} does not lead over the network")
    return nic


def chain_space(
    inner: HopSpace, entries: Iterable[tuple[int, Flow]], exits: Iterable[tuple[int, Flow]]
) -> HopSpace:
    """Return the hops inside a node (a node of one GPU has none), and to and from the world.

    `entries` and `exits` are flows with their GPU, several for a GPU reached by several NICs; the
    first are tried first.
    """
    ends: dict[Pair, tuple[Hop, ...]] = {}
    into = [Hop(WORLD, gpu, flow) for gpu, flow in entries]
    for hop in (*into, *(Hop(gpu, WORLD, flow) for gpu, flow in exits)):
        pair = hop.source, hop.target
        ends[pair] = (*ends.get(pair, ()), hop)
    hops = PairHops((*inner.hops, *ends), lambda pair: ends.get(pair) or inner.hops[pair])
    return HopSpace(name=f"{inner.name}, with the network", gpus=(WORLD, *inner.gpus), hops=hops)


NicPair = tuple[int, int]
"""A chain's entry NIC and exit NIC."""


def nic_pair(hops: Sequence[Hop]) -> NicPair:
    """Return the entry NIC and the exit NIC of a chain; SearchError for a closed ring."""
    return nic_of(hops[0]), nic_of(hops[-1])


def route_nics(
    sender: int, listener: int, step: Sequence[NicPair], *, subnet_routing: bool
) -> NicPair | None:
    """Return the NICs of a connection for which NCCL chose these; None where it fails.

    `step` has the NICs that reach each other, of the sending and the listening host. With subnet
    routing the sender gives way to a NIC that reaches the listener's, else the listener does
    (ncclIbConnectImpl and ncclIbAccept in net_ib/connect.cc of NCCL 2.30.7).

    >>> cable = [(0, 1), (2, 3)]
    >>> route_nics(1, 1, cable, subnet_routing=True), route_nics(2, 2, cable, subnet_routing=True)
    ((0, 1), (2, 3))
    >>> route_nics(1, 0, cable, subnet_routing=True), route_nics(2, 2, cable, subnet_routing=False)
    (None, None)
    """
    if (sender, listener) in step or not subnet_routing:
        return (sender, listener) if (sender, listener) in step else None
    to_listener = [pair for pair in sorted(step) if pair[1] == listener]
    from_sender = sorted((into, out) for out, into in step if out == sender)
    return next(iter([*to_listener, *((out, into) for into, out in from_sender)]), None)


# Rules for the NICs of a set of chains.
class NicRule:
    """A rule that looks at a chain's entry NIC, and at its exit NIC once it is closed."""

    def mark(self, hop: Hop) -> int | None:
        """Return the NIC of an entry or exit."""
        return nic_of(hop) if WORLD in (hop.source, hop.target) else None


class EvenUse(NicRule, msgspec.Struct, frozen=True):
    """No NIC is used twice in one direction while another is idle; `same` ties exit to entry.

    >>> EvenUse(nics=(0, 1), chains=2).even([0, 0])
    False
    """

    nics: tuple[int, ...]
    chains: int
    same: bool = False

    def admits(self, chains: Sequence[Sequence[int]]) -> bool:
        """Return whether all NICs can still be used equally after chains by these NICs."""
        exits = [nics[1] for nics in chains if len(nics) > 1]
        if self.same and any(len(set(nics)) > 1 for nics in chains):
            return False
        return self.even([nics[0] for nics in chains if nics]) and self.even(exits)

    def even(self, used: Sequence[int]) -> bool:
        """Return whether chains that use these NICs can still become even."""
        least, more = divmod(self.chains, len(self.nics))
        full = [count for nic in {*used} if (count := used.count(nic)) > least]
        return len(full) <= more and all(count == least + 1 for count in full)


class Pairing(NicRule, msgspec.Struct, frozen=True):
    """Chains with exactly these pairs of entry and exit NIC, in any order."""

    pairs: tuple[NicPair, ...]

    def admits(self, chains: Sequence[Sequence[int]]) -> bool:
        """Return whether chains by these NICs can be among the chains."""
        remaining = Counter(self.pairs)
        remaining.subtract((nics[0], nics[1]) for nics in chains if len(nics) > 1)
        if min(remaining.values()) < 0:
            return False
        open_ = Counter(pair[0] for pair in remaining.elements())
        begun = Counter(nics[0] for nics in chains if len(nics) == 1)
        return all(count <= open_[nic] for nic, count in begun.items())


def symmetry_keeping(symmetry: Symmetry, pairing: Pairing) -> Symmetry:
    """Return the symmetry elements that take the NIC pairs of a pairing to themselves."""
    column = {point: i for i, point in enumerate(symmetry.points)}
    ends = np.array([[column[f"N{nic}"] for nic in pair] for pair in pairing.pairs])
    # A pair as one number: elements with the same numbers take pairs to pairs.
    digits = np.array([len(column), 1])
    keep = (np.sort(symmetry.elements[:, ends] @ digits) == np.sort(ends @ digits)).all(axis=1)
    return symmetry if keep.all() else keeping(symmetry, keep)


def net_buffer_numa(topo: NcclView, gpu: int, nic: int, direction: Direction) -> int | None:
    """Return the NUMA node of the host buffer between a GPU and a NIC; None with GPU direct RDMA.

    GPU direct needs support of both, a path within NCCL_NET_GDR_LEVEL, and for sending
    NCCL_NET_GDR_READ. If a relay sends for this GPU, the relay's path counts, in both directions.

    The proxy thread allocates a host buffer while its rank is bound to the CPUs nearest to its GPU
    (ncclTopoGetCpuAffinity), so the buffer is on the GPU's own NUMA node (the relay's, if a relay
    sends). NCCL_IGNORE_CPU_AFFINITY, NCCL_PROXY_CPUSET or a rank bound elsewhere change this.
    """
    ends = net_ends(topo, gpu, nic)
    if topo.paths.reaches_gpu(ends, direction, topo.settings):
        return None
    over = relay(topo, gpu, nic)
    owner = gpu if over is None or direction == "receive" else over
    return index_of(topo.plain.local_cpu(f"G{owner}"))


def relay(topo: NcclView, gpu: int, nic: int) -> int | None:
    """Return the GPU that sends for `gpu` by this NIC (PXN); None if `gpu` sends by itself.

    The GPU's kernel writes over NVLink into the memory of the GPU beside the NIC, where the NIC
    reads. NCCL receives without PXN. No Settings choose NCCL_PXN_DISABLE=1.
    """
    over = topo.paths.relay(net_ends(topo, gpu, nic))
    return None if over is None else index_of(over)


def exit_flow(topo: NcclView, gpu: int, nic: int, *, blocks: int) -> Flow:
    """Return the flow by which a ring leaves a node from GPU `gpu` by NIC `nic`.

    With a relay, the flow goes through the relay's memory, `G3->G3->G0->N0->N0`; a host buffer is
    the relay's, without its GPU memory.
    """
    fifo = Fifo(bytes=check_settings(topo.settings).buffsize)
    through, over = net_buffer_numa(topo, gpu, nic, "send"), relay(topo, gpu, nic)
    return leaving(gpu, nic, through=through, relay=over, blocks=blocks, fifo=fifo)


def entry_flow(topo: NcclView, nic: int, gpu: int, *, blocks: int) -> Flow:
    """Return the flow by which a ring enters a node by NIC `nic` at GPU `gpu`."""
    fifo = Fifo(bytes=check_settings(topo.settings).buffsize)
    through = net_buffer_numa(topo, gpu, nic, "receive")
    return entering(nic, gpu, through=through, blocks=blocks, fifo=fifo)


# Hops of chains: inside a node, its entries and its exits.
def chain_hop_space(
    topo: NcclView, *, nics: Sequence[int] | None = None, chains_in_set: int = 1
) -> HopSpace:
    """Return one hop per pair of GPUs, and one between each GPU and the world by every NIC.

    Nearest NICs come first; `nics` None is all that the settings allow, and without any chains
    close in the host. The final channels' blocks are shared evenly by the `chains_in_set` chains of
    a set. Raises InputError: settings the version does not have. SearchError: there is no NIC.
    """
    inner = hop_space(topo, rings_in_set=chains_in_set)
    if nics is not None and not nics:
        return inner
    blocks = blocks_of_ring(topo, chains_in_set)
    ends = [(gpu, nic) for gpu in topo.gpus for nic in topo.nics if nics is None or nic in nics]
    if not ends:
        raise SearchError(f"machine {topo.machine.name} has no NIC for chains")

    def distance(end: tuple[int, int], direction: Direction) -> tuple[PathType, int, int]:
        return net_path(topo, *end, direction), abs(end[0] - end[1]), end[1]

    into = sorted(ends, key=lambda end: distance(end, "receive"))
    out = sorted(ends, key=lambda end: distance(end, "send"))
    return chain_space(
        inner,
        [(gpu, entry_flow(topo, nic, gpu, blocks=blocks)) for gpu, nic in into],
        [(gpu, exit_flow(topo, gpu, nic, blocks=blocks)) for gpu, nic in out],
    )


def chains_as_rings(
    space: HopSpace, chains: Sequence[tuple[int, Sequence[int], int]]
) -> tuple[Ring, ...]:
    """Return chains, as (entry NIC, GPUs, exit NIC), as rings; SearchError: a hop is missing."""
    rings = []
    for enters_by, gpus, leaves_by in chains:
        into = [hop for hop in space.between(WORLD, gpus[0]) if nic_of(hop) == enters_by]
        out = [hop for hop in space.between(gpus[-1], WORLD) if nic_of(hop) == leaves_by]
        choices = [into, *(space.between(*pair) for pair in pairwise(gpus)), out]
        if not all(choices):
            raise SearchError(
                f"{space.name}: no chain by NIC {enters_by}, GPUs {gpus}, NIC {leaves_by}"
            )
        rings.append(ring([hops[0] for hops in choices]))
    return tuple(rings)


def gdr_variants(topo: NcclView, *, nics: Sequence[int]) -> tuple[Settings, ...]:
    """Return settings that differ from the view's in the placement of NIC buffers alone.

    Of settings with equal placements the first is returned, which departs least from the defaults.
    """
    distinct: dict[tuple[Flow, ...], Settings] = {}
    variants = combinations("NIC buffers")
    changes = (msgspec.structs.replace(topo.settings, **values) for values in variants)
    for changed in (topo.settings, *changes):
        under = view(topo.machine, topo.knowledge, changed, gpus=topo.gpus)
        ends = list(product(topo.gpus, nics))
        flows = [entry_flow(under, nic, gpu, blocks=1) for gpu, nic in ends]
        flows += [exit_flow(under, gpu, nic, blocks=1) for gpu, nic in ends]
        distinct.setdefault(tuple(flows), changed)
    return tuple(distinct.values())[1:]


# Graph files of one node of several.
def node_rings(
    topo: NcclView,
    orders: Sequence[tuple[int, ...]],
    ends: Sequence[tuple[int, int]],
    *,
    speed_gbps: float,
) -> GraphRings:
    """Return the file's content for channels over `orders` between entry and exit NICs `ends`.

    The tree uses the ring's entry in both directions, as in NCCL's own dumps; it spreads to the
    second GPU where this GPU is as near to the NIC.
    """
    settings = topo.settings
    stays = settings.cross_nic != 0 or all(into == out for into, out in ends)
    fault = "leave by other NICs than they enter by, with NCCL_CROSS_NIC=0"
    require(stays, "channels over several nodes", fault, "choose cross_nic 1, 2 or None")
    intra = PathType[topo.farthest(pair for order in orders for pair in pairwise(order))]
    channels = [(order, *pair) for order, pair in zip(orders, ends, strict=True)]
    inter = farthest_end(topo, [(order[0], into, order[-1], out) for order, into, out in channels])
    # A tree's first GPU, and maybe its second, sends and receives by the entry.
    first, *second = (
        farthest_end(topo, [(order[at], into, order[at], into) for order, into, _ in channels])
        for at in range(min(2, len(orders[0])))
    )
    device = net_devices(topo.machine, settings)
    return GraphRings(
        orders=tuple(orders),
        speed_gbps=speed_gbps,
        type_intra=_known_type(intra, settings),
        nets=tuple((device[into], device[out]) for into, out in ends),
        type_inter=_known_type(inter, settings),
        tree_type_inter=_known_type(first, settings),
        tree_spreads=bool(second) and second[0] <= first,
        subnet_routing=settings.subnet_routing,
    )


def _known_type(farthest: PathType, settings: Settings) -> str:
    """Return the type, or the next farther type that this NCCL reads."""
    unknown = version_facts(settings.version).unknown_levels
    for name in TYPES:
        if name not in unknown and PathType[name] >= farthest:
            return name
    raise InputError("channels over several nodes", "join devices without a path", "choose others")


def farthest_end(topo: NcclView, ends: Sequence[tuple[int, int, int, int]]) -> PathType:
    """Return the farthest path at chains' ends: (first GPU, entry NIC, last GPU, exit NIC)."""
    into = [net_path(topo, first, nic, "receive") for first, nic, _, _ in ends]
    return max(into + [net_path(topo, last, nic, "send") for _, _, last, nic in ends])


# Chains to start a search from: where NICs and GPUs are alike, they are often the best.


def initial_chains(space: HopSpace, nics: Sequence[int], count: int) -> Iterator[tuple[Ring, ...]]:
    """Yield sets of `count` chains, each entered at a GPU near its NIC and left near another NIC's.

    Chain c is entered by NIC c and left by NIC c + shift: a shift of 0 keeps to one NIC, others
    spare the path back through the host. GPUs between are visited in ascending order from the first
    GPU on, so that equal hops of the chains are spread.
    """
    for shift in sorted({0, 1, len(nics) // 2, len(nics) - 1} & set(range(len(nics)))):
        ends = [(nics[c % len(nics)], nics[(c + shift) % len(nics)]) for c in range(count)]
        chains = paired_chain_set(space, ends)
        if chains:
            yield chains


def paired_chain_set(space: HopSpace, pairs: Sequence[NicPair]) -> tuple[Ring, ...]:
    """Return a chain for each pair of entry and exit NIC, near both; () without such a set.

    Chains with one entry NIC begin at different GPUs, and last GPUs differ as far as they can.
    """
    gpus = [gpu for gpu in space.gpus if gpu != WORLD]
    chains: list[tuple[int, list[int], int]] = []
    for number, (entered, left_by) in enumerate(pairs):
        turn = [into for into, _ in pairs[:number]].count(entered)
        entries = [hop.target for hop in _nearest(space, entered, into=True)]
        first = next(iter(entries[turn : turn + 1] or entries), WORLD)
        exits = [hop.source for hop in _nearest(space, left_by, into=False)]
        exits = [gpu for gpu in exits if gpu != first or len(gpus) == 1]
        if first == WORLD or not exits:
            return ()
        last = min(exits, key=[order[-1] for _, order, _ in chains].count)
        at = gpus.index(first)
        between = [gpu for gpu in gpus[at:] + gpus[:at] if gpu not in (first, last)]
        chains.append((entered, [first, *between, *[last][: len(gpus) - 1]], left_by))
    with suppress(SearchError):
        return chains_as_rings(space, chains)
    return ()


def _nearest(space: HopSpace, nic: int, *, into: bool) -> list[Hop]:
    """Return the hops of a NIC, nearest first: by their place among the hops of their GPU."""
    ranked = []
    for gpu in (gpu for gpu in space.gpus if gpu != WORLD):
        for place, hop in enumerate(space.between(*((WORLD, gpu) if into else (gpu, WORLD)))):
            if nic_of(hop) == nic:
                ranked.append((place, hop))
    return [hop for _, hop in sorted(ranked, key=lambda near: near[0])]
