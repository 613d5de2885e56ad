"""What a graph file has to say of its channels so that NCCL's tuner believes the truth.

Source: ncclTopoGetGraphFromXmlSub (search.cc) and ncclTopoTuneModel (tuning.cc) of NCCL 2.30.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from tccl_py.errors import InputError
from tccl_py.runtimes.nccl.graph_file import TYPES
from tccl_py.runtimes.nccl.landing import may_change_rails, net_path
from tccl_py.runtimes.nccl.settings import Settings
from tccl_py.runtimes.nccl.transport import View, net_devices, pair_mechanism
from tccl_py.runtimes.nccl.versions import version_facts
from tccl_py.topology.paths import PathType


class GraphFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of one node's channels; types by the names that the settings' version reads.

    `nets` are the device numbers of each channel's NICs, `tree_nets` those of a tree along the same
    GPUs: it comes and goes by the ring's entry, as in NCCL's own dumps. It does so from its first
    GPU, or if `tree_spreads`, from the first two, where the second is as near to the NIC.
    """

    type_intra: str
    type_inter: str
    tree_type_inter: str
    nets: tuple[tuple[int, int], ...]
    tree_nets: tuple[tuple[int, int], ...]
    tree_spreads: bool


def graph_facts(
    seen: View, orders: Sequence[tuple[int, ...]], ends: Sequence[tuple[int, int]]
) -> GraphFacts:
    """What is true of channels over `orders` that enter and leave by the NICs `ends`, by number.

    Raises:
        InputError: channels that change NICs where the settings forbid it, a pair without a path,
            or as `landing` for a NIC or GPU that is not there.
    """
    settings = seen.settings
    if not may_change_rails(settings) and any(entry != leave for entry, leave in ends):
        raise InputError(
            "channels over several nodes",
            "leave by other NICs than they enter by, with NCCL_CROSS_NIC=0",
            "choose cross_nic 1 or 2, or None",
        )
    hops = [pair for order in orders for pair in pairwise(order)]
    crossings: list[PathType] = []
    first: list[PathType] = []
    second: list[PathType] = []
    for order, (entry, leave) in zip(orders, ends, strict=True):
        crossings.append(net_path(seen, order[0], entry, "receive"))
        crossings.append(net_path(seen, order[-1], leave, "send"))
        first += _both_ways(seen, order[0], entry)
        second += [kind for gpu in order[1:2] for kind in _both_ways(seen, gpu, entry)]
    device = net_devices(seen.system.machine, settings)
    return GraphFacts(
        type_intra=_farthest(
            [PathType[pair_mechanism(seen, *pair).path] for pair in hops], settings
        ),
        type_inter=_farthest(crossings, settings),
        tree_type_inter=_farthest(first, settings),
        nets=tuple((device[entry], device[leave]) for entry, leave in ends),
        tree_nets=tuple((device[entry], device[entry]) for entry, _ in ends),
        tree_spreads=bool(second) and max(second) <= max(first),
    )


def _both_ways(seen: View, gpu: int, nic: int) -> list[PathType]:
    return [net_path(seen, gpu, nic, "receive"), net_path(seen, gpu, nic, "send")]


def _farthest(kinds: Sequence[PathType], settings: Settings) -> str:
    """The farthest type, by the nearest name that is as far at least."""
    farthest = max(kinds, default=PathType.LOC)
    known = (name for name in TYPES if name not in version_facts(settings.version).unknown_levels)
    for name in known:
        if PathType[name] >= farthest:
            return name
    raise InputError("channels over several nodes", "join devices without a path", "choose others")
