"""Rings over hosts with different machines: the order of hosts, and the path through each host.

python examples/plan_a_cluster.py [SWITCHES [DIR]]     (a YAML or a topology.conf; DIR is new)

The hosts are made up, two with V100s and two with RTX 3090s, and simulated by bundled models.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tccl_py
from tccl_py.search.problem import Budget

# In the order in which a job would start on them.
HOSTS = {"v1": "amd-v100", "r1": "amd-3090", "v2": "amd-v100", "r2": "amd-3090"}
BUDGET = Budget(sets=60)  # seconds instead of minutes


def main(switches: Path | None, directory: Path | None) -> None:
    """Plan, print each host's path, and write the files if a directory is named."""
    models = {name: tccl_py.load_machine(name) for name in HOSTS.values()}
    reports = [
        tccl_py.HostReport(
            host=host, machine=models[name].machine, knowledge=models[name].knowledge
        )
        for host, name in HOSTS.items()
    ]
    network = tccl_py.read_switches(switches, list(HOSTS)) if switches else None
    cluster = tccl_py.cluster_of(reports, switches=network.switches if network else None)

    # Equal machines are one class, and each class has a source of its own.
    sources = [tccl_py.Simulator(models[one.machine.name]) for one in cluster.classes]
    plan = tccl_py.make_cluster_plan(cluster, sources, ring_counts=[1], budget=BUDGET)

    print(f"order: {', '.join(plan.host_order)}{' (changed)' if plan.order_changed else ''}")
    for host in plan.hosts:
        for chain in plan.paths[host.path].chains:
            slow = chain.bottleneck
            print(
                f"{host.name}, ranks from {host.first_rank} on: from N{chain.entry_nic} over GPUs "
                f"{chain.gpus} to N{chain.exit_nic}, slowest {slow.flow}: {slow.rate_gbps:.2f} GB/s"
            )
    # The same questions as of one host's plan; rings name ranks.
    for ring in plan.rings:
        print(f"ring of global ranks: {ring.gpus}, slowest {ring.bottleneck.flow}")
    for name in plan.choices:
        gain = plan.gain(name)
        times = "not rated" if gain is None else f"{gain:.2f}x default NCCL"
        print(f"{name}: {times} ({plan.provenance})")
    print(f"the rings once more: {plan.rate(plan.orders, source=sources):.2f} GB/s")
    first, second, *others = plan.orders[0]
    swapped = plan.what_if((second, first, *others), sources)
    print(f"with ranks {second} and {first} swapped: {swapped:.2f} GB/s ({plan.provenance})")
    if directory is not None:
        plan.write(directory, sources)
        print(f"wrote {directory}; nccl/order/launch.txt says how to start a job")


if __name__ == "__main__":
    given = [Path(argument) for argument in sys.argv[1:]]
    main(given[0] if given else None, given[1] if len(given) > 1 else None)
