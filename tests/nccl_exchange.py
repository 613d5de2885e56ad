"""Which NICs NCCL connects between hosts, worked out with arrays of ranks as NCCL does it.

This follows ncclTopoPreset, ncclTopoPostset, connectTrees and ncclTopoGetNetDev, from the parents'
side of trees, and shares no code with the product.
"""

from typing import NamedTuple


class Graph(NamedTuple):
    """A host's ring or tree graph: GPUs (ranks on the host) and two NICs for each channel."""

    intra: list
    inter: list
    crossnic: int = 0
    balanced: bool = False


def btree_children(count, rank):
    bit = 1
    while bit < count and not bit & rank:
        bit *= 2
    low = bit // 2
    if rank == 0:
        return -1, (low if count > 1 else -1)
    if low == 0:
        return -1, -1
    second = rank + low
    while second >= count:
        second = rank + low if low else -1
        low //= 2
    return rank - bit // 2, second


def children(count, rank):
    """The two children of a host in the first tree, and in the second."""
    if count % 2:
        other = btree_children(count, (rank - 1) % count)
        second = [-1 if child < 0 else (child + 1) % count for child in other]
    else:
        other = btree_children(count, count - 1 - rank)
        second = [-1 if child < 0 else count - 1 - child for child in other]
    return btree_children(count, rank), tuple(second)


def net_dev(graph, channel, rank):
    return graph.inter[channel][0 if graph.intra[channel][0] == rank else 1]


def connections(rings, trees):
    """Return the connections of rings and those of trees: (host, NIC, host, NIC), as sets."""
    nodes = len(rings)
    channels = min(len(graph.intra) for graph in (*rings, *trees))
    first = [[graph.intra[c][0] for graph in rings] for c in range(channels)]
    last = [[graph.intra[c][-1] for graph in rings] for c in range(channels)]
    for node, graph in enumerate(rings):
        if graph.crossnic == 2 and channels % 2 == 0 and node % 2 == 1:
            for c in range(0, channels, 2):
                for ranks in (first, last):
                    ranks[c][node], ranks[c + 1][node] = ranks[c + 1][node], ranks[c][node]
    by_rings, by_trees = set(), set()
    for c in range(channels):
        for node in range(nodes):
            peer = (node + 1) % nodes
            out = net_dev(rings[node], c, last[c][node])
            by_rings.add((node, out, peer, net_dev(rings[peer], c, first[c][peer])))
        for node, graph in enumerate(trees):
            ways = [graph.intra[c][1 if graph.balanced else 0], graph.intra[c][0]]
            for tree in children(nodes, node):
                for child, way in zip(tree, ways, strict=True):
                    if child >= 0:
                        near = net_dev(graph, c, way)
                        far = net_dev(trees[child], c, trees[child].intra[c][0])
                        by_trees |= {(node, near, child, far), (child, far, node, near)}
    return by_rings, by_trees


def off_rails(links):
    return {link for link in links if link[1] != link[3]}
