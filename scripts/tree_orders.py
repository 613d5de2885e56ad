"""Rates of NCCL's trees along the orders of a plan's graph file, and along random orders.

usage: scripts/tree-orders [MACHINE...]

Within a node the tree of a channel is the chain along the channel's order, used in both directions:
the hop back to the first GPU is left out. For each bundled machine, with and without P2P, the
script plans by simulation and prints the simulated rate of these chains beginning at the GPU that
the graph file begins with, at the best and worst GPU of the same rings, and in the best of random
orders, under the plan's settings.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from random import Random

import tccl_py
from tccl_py.errors import SearchError
from tccl_py.model.rings import HopSpace
from tccl_py.model.transfer import transfer_set
from tccl_py.nccl.transport import hop_space
from tccl_py.nccl.view import view
from tccl_py.plan.plan import Plan
from tests.planned import SEVERAL_GPUS

_RANDOM_ORDERS = 300


def main() -> None:
    """Print a row for each machine and environment."""
    print("machine | pinned | recommended | as planned | best start | worst start | best order")
    for name in sys.argv[1:] or SEVERAL_GPUS:
        for pinned in ({}, {"NCCL_P2P_DISABLE": "1"}):
            model = tccl_py.load_machine(name)
            source = tccl_py.Simulator(model)
            plan = tccl_py.make_plan(
                model.machine, model.knowledge, source, pinned_env=pinned, subsets=False
            )
            words = [f"{rate:.2f}" for rate in rates(plan, source)]
            environment = " ".join(f"{key}={value}" for key, value in pinned.items()) or "-"
            print(" | ".join([name, environment, plan.recommended, *words]), flush=True)


def rates(plan: Plan, source: tccl_py.Simulator) -> list[float]:
    """Return the rates as planned, from the best and worst start, and of the best random order."""
    topo = view(plan.machine, plan.knowledge, plan.settings, gpus=plan.gpus)
    space = hop_space(topo, rings_in_set=plan.ring_count)
    # Buffers of a GPU stay on one NUMA node, in trees as in rings.
    nodes = {hop.source: hop.flow.through for ring in plan.rings for hop in ring.hops}
    starts = [
        _rate(source, space, nodes, [order[at:] + order[:at] for order in plan.orders])
        for at in range(len(plan.gpus))
    ]
    random = Random(0)
    shuffled = [tuple(random.sample(plan.gpus, len(plan.gpus))) for _ in range(_RANDOM_ORDERS)]
    sampled = [_rate(source, space, nodes, [order] * plan.ring_count) for order in shuffled]
    return [starts[0], max(starts), min(starts), max(sampled)]


def _rate(
    source: tccl_py.Simulator,
    space: HopSpace,
    nodes: dict[int, int | None],
    orders: list[tuple[int, ...]],
) -> float:
    flows = []
    for order in orders:
        for first, second in pairwise(order):
            for pair in ((first, second), (second, first)):
                hops = space.between(*pair)
                if not hops:
                    raise SearchError(f"no hop from GPU {pair[0]} to GPU {pair[1]}")
                placed = (hop for hop in hops if hop.flow.through == nodes[hop.source])
                flows.append(next(placed, hops[0]).flow)
    (measurement,) = source.measure([transfer_set(flows)])
    return len(orders) * measurement.rate_gbps


if __name__ == "__main__":
    main()
