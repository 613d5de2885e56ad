"""Uplinks whose rate nobody told: what pairs of hosts across them were measured to carry."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from tccl_py.model.cluster import SwitchTree

SLOWER = 0.9
"""Pairs across an uplink below this share of those beside it are bound by it."""

PairRate = tuple[str, str, float]
"""Sender, receiver, and what one carries to the other, GB/s."""


def with_measured_uplinks(tree: SwitchTree, pairs: Sequence[PairRate]) -> SwitchTree:
    """The tree with a rate for uplinks that have none, where pairs across them are slower.

    An uplink that carries a pair as fast as the hosts' own links do may carry any number of them,
    and stays without a limit. One that does not is as fast as the fastest pair, each way; of the
    two directions the slower counts.

    >>> tree = SwitchTree(name="top", switches=(
    ...     SwitchTree(name="a", hosts=("h0", "h1")), SwitchTree(name="b", hosts=("h2", "h3"))))
    >>> pairs = [("h0", "h1", 0.25), ("h2", "h3", 0.25), ("h0", "h2", 0.1), ("h3", "h1", 0.11)]
    >>> [switch.uplink_gbps for switch in with_measured_uplinks(tree, pairs).switches]
    [0.1, 0.1]
    """
    everyone = frozenset(tree.all_hosts)
    switches = tuple(with_measured_uplinks(switch, pairs) for switch in tree.switches)
    done = msgspec.structs.replace(tree, switches=switches)
    return msgspec.structs.replace(
        done, switches=tuple(_measured(one, everyone, pairs) for one in switches)
    )


def _measured(
    switch: SwitchTree, everyone: frozenset[str], pairs: Sequence[PairRate]
) -> SwitchTree:
    """A switch below others with what its uplink was seen to carry."""
    below = frozenset(switch.all_hosts)
    beside = [gbps for one, other, gbps in pairs if one in below and other in below]
    up = [gbps for one, other, gbps in pairs if one in below and other in everyone - below]
    down = [gbps for one, other, gbps in pairs if other in below and one in everyone - below]
    if switch.uplink_gbps is not None or not beside or not (up or down):
        return switch
    across = min(max(rates) for rates in (up, down) if rates)
    if across <= 0 or across >= SLOWER * median(beside):
        return switch
    return msgspec.structs.replace(switch, uplink_gbps=across)
