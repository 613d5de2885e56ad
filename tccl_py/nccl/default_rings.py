"""What NCCL chooses when nobody tells it: ring orders, channels, the rate it expects of them.

Source: ncclTopoCompute (search.cc) and ncclTopoPostset (connect.cc) of NCCL 2.30.7.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.knowledge import Knowledge
from tccl_py.model.machine import Machine
from tccl_py.nccl.graph_file import SWAPPING
from tccl_py.nccl.graph_search import search_ring, search_tree
from tccl_py.nccl.settings import Settings, final_channels
from tccl_py.nccl.transport import Mechanism, View, pair_mechanism, view


class StockHop(msgspec.Struct, frozen=True, kw_only=True):
    """One hop of NCCL's first ring and how it would be connected."""

    source: int
    target: int
    mechanism: Mechanism


class StockChoice(msgspec.Struct, frozen=True, kw_only=True):
    """NCCL's own choice; `rings` has one GPU order a searched channel, `bw_intra` GB/s of each.

    `channels` is what the communicator runs in the end: no more than the tree has, then doubled.
    `fallback` is true where the search found nothing and NCCL took the simple order.
    """

    rings: tuple[tuple[int, ...], ...]
    nchannels: int
    bw_intra: float
    type_intra: str
    channels: int
    hops: tuple[StockHop, ...]
    settings: Settings
    fallback: bool = False


class StockChain(msgspec.Struct, frozen=True, kw_only=True):
    """One channel on one node: in by NIC `entry`, along the GPUs, out by NIC `exit`."""

    entry: int
    gpus: tuple[int, ...]
    exit: int


class StockChains(msgspec.Struct, frozen=True, kw_only=True):
    """NCCL's own choice on each of several equal nodes.

    `chains` has one for every channel that was searched and is run; the final `channels` go
    through them in turn. Rates are what NCCL expects of a channel, GB/s, inside a node and between
    nodes; types the farthest paths it allowed. The rest is as in `StockChoice`. `assumed_sys` is
    true where `stock_chains_default` took NCCL_P2P_LEVEL=SYS because the search found nothing.
    """

    chains: tuple[StockChain, ...]
    bw_intra: float
    bw_inter: float
    type_intra: str
    type_inter: str
    cross_nic: int
    channels: int
    settings: Settings
    fallback: bool = False
    assumed_sys: bool = False

    def on_node(self, number: int) -> tuple[StockChain, ...]:
        """The chains of node `number`, counted in rank order; pairs may be swapped on odd ones.

        NCCL does so where channels leave by another NIC than they enter by, so that every channel
        stays on its rail between nodes (ncclTopoPostset).
        """
        if self.cross_nic != SWAPPING or number % 2 == 0 or len(self.chains) % 2:
            return self.chains
        return tuple(self.chains[channel ^ 1] for channel in range(len(self.chains)))


def stock_choice(
    machine: Machine,
    knowledge: Knowledge,
    settings: Settings | None = None,
    *,
    gpus: Sequence[int] | None = None,
    nodes: int = 1,
) -> StockChoice:
    """What NCCL picks by itself for a communicator over `gpus` of each of `nodes` equal nodes.

    Settings count only for what they do to paths and transports; channels and buffer size do not.
    Cost: at worst a few seconds on nodes of tens of GPUs.

    Raises:
        InputError: unknown GPUs, or a machine on which NCCL fails at init.
    """
    among = None if gpus is None else tuple(gpus)
    return _choice(machine, knowledge, settings or Settings(), among, nodes)


@functools.lru_cache(maxsize=64)  # what plans, explains or judges subsets asks for the same ones
def _choice(
    machine: Machine,
    knowledge: Knowledge,
    settings: Settings,
    gpus: tuple[int, ...] | None,
    nodes: int,
) -> StockChoice:
    seen = view(machine, knowledge, settings, gpus=gpus)
    ring = search_ring(seen, nodes=nodes)
    count = len(ring.orders)
    # A tree always has one channel: where the ring has no more, it need not be searched.
    trees = len(search_tree(seen, nodes=nodes, channels=count).orders) if count > 1 else 1
    channels = final_channels(
        min(count, trees),
        sm=seen.system.sm_min,
        nodes=nodes,
        speed_intra=ring.rate_intra,
        version=settings.version,
    )
    rings = tuple(tuple(int(gpu[1:]) for gpu in order) for order in ring.orders)
    return StockChoice(
        rings=rings,
        nchannels=count,
        bw_intra=ring.rate_intra,
        type_intra=ring.type_intra.name,
        channels=channels,
        hops=_hops(seen, rings[0], closed=nodes == 1),
        settings=settings,
        fallback=ring.fallback,
    )


def _hops(seen: View, order: Sequence[int], *, closed: bool) -> tuple[StockHop, ...]:
    targets = [*order[1:], order[0]] if closed else order[1:]
    return tuple(
        StockHop(source=one, target=other, mechanism=pair_mechanism(seen, one, other))
        for one, other in zip(order, targets, strict=False)
        if one != other
    )


def stock_chains(
    machine: Machine,
    knowledge: Knowledge,
    settings: Settings | None = None,
    *,
    nodes: int,
    gpus: Sequence[int] | None = None,
) -> StockChains:
    """What NCCL picks by itself on each of `nodes` equal nodes, NICs included.

    Settings count as for `stock_choice`, and with what they say of NICs. On nodes that differ,
    each searches for itself, and the fewest channels of all are run: `validate_cluster` does that.

    Raises:
        InputError: one node, no NIC that NCCL may use, or as `stock_choice`.
    """
    settings = settings or Settings()
    seen = view(machine, knowledge, settings, gpus=gpus)
    if nodes < 2 or not seen.system.nets:
        raise InputError(
            f"stock NCCL on {nodes} nodes of {machine.name}",
            "has no network to use",
            "give two nodes or more, with a NIC that the settings allow",
        )
    ring = search_ring(seen, nodes=nodes)
    tree = search_tree(seen, nodes=nodes, channels=len(ring.orders))
    count = min(len(ring.orders), len(tree.orders))
    chains = tuple(
        StockChain(
            entry=int(ports[0][1:]),
            gpus=tuple(int(one[1:]) for one in order),
            exit=int(ports[1][1:]),
        )
        for order, ports in zip(ring.orders[:count], ring.ports, strict=False)
    )
    return StockChains(
        chains=chains,
        bw_intra=ring.rate_intra,
        bw_inter=ring.rate_inter,
        type_intra=ring.type_intra.name,
        type_inter=ring.type_inter.name,
        cross_nic=ring.cross_nic,
        channels=final_channels(
            count,
            sm=seen.system.sm_min,
            nodes=nodes,
            speed_intra=ring.rate_intra,
            version=settings.version,
        ),
        settings=settings,
        fallback=ring.fallback,
    )


def stock_chains_default(
    machine: Machine,
    knowledge: Knowledge,
    settings: Settings | None = None,
    *,
    nodes: int,
    gpus: Sequence[int] | None = None,
) -> StockChains:
    """The chains that plans are compared with: those with NCCL_P2P_LEVEL=SYS where only that helps.

    `settings` say what the job cannot do without, such as the NICs it may use; a P2P level among
    them stays. A search that falls back because the network is too slow for any rate it tries falls
    back under SYS too, and stays.

    Raises:
        InputError: as `stock_chains`.
    """
    settings = settings or Settings()
    chains = stock_chains(machine, knowledge, settings, nodes=nodes, gpus=gpus)
    if not chains.fallback or settings.p2p_level is not None:
        return chains
    wider = msgspec.structs.replace(settings, p2p_level="SYS")
    wide = stock_chains(machine, knowledge, wider, nodes=nodes, gpus=gpus)
    return chains if wide.fallback else msgspec.structs.replace(wide, assumed_sys=True)
