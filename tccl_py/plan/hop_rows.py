"""A plan's hops as rows with the devices on their way, for tables and graphs in notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby, pairwise
from typing import Any

import networkx as nx

from tccl_py.model.machine import Machine
from tccl_py.model.transfer import Flow
from tccl_py.plan.plan import Plan


def hop_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return a dictionary for each hop of each ring; see `PlanHandle.hop_rows`."""
    machines = {"": plan.cluster.classes[0].machine}
    for name, number in plan.cluster.host_classes.items():
        machines[name] = plan.cluster.classes[number].machine
    rows = []
    for number, ring in enumerate(plan.rings):
        for hop in ring.hops:
            links = way(machines, hop.flow)
            numa = [device for device in links if device.rpartition(".")[2].startswith("C")]
            kind, operation = hop.flow.kind, hop.flow.transfers[0].operation
            how = kind if kind in ("bounce", "network") else operation
            row = {"ring": number, "from": hop.source, "to": hop.target, "gbps": hop.rate_gbps}
            more = {"slowest": hop == ring.bottleneck, "how": how, "flow": str(hop.flow)}
            rows.append({**row, **more, "links": links, "numa": numa})
    return rows


def hop_graph(plan: Plan) -> nx.MultiDiGraph:
    """Return the rings as a graph over GPUs: an edge for each hop, with its row."""
    graph = nx.MultiDiGraph(machine=", ".join(host.machine.name for host in plan.cluster.classes))
    graph.add_nodes_from(sorted(plan.orders[0]))
    for row in hop_rows(plan):
        graph.add_edge(row["from"], row["to"], **row)
    return graph


def way(machines: Mapping[str, Machine], flow: Flow) -> list[str]:
    """Return the devices of a flow's shortest way, NVLinks first, on machines by host.

    >>> from tccl_py.model.transfer import parse_flow
    >>> from tccl_py.simulator.descriptions import load_bundled
    >>> way({"": load_bundled("amd-v100").machine}, parse_flow("0:C1:2"))[0]
    'G0'
    """

    def weight(_: str, __: str, edge: dict[str, Any]) -> float:
        return 1.0 if edge["kind"] in ("pci", "smp") else 0.4

    stops = [stop for stop, _ in groupby((place.host, place.device) for place in flow.places)]
    devices = stops[:1]
    for (host, near), (reached, far) in pairwise(stops):
        # Between hosts is the network.
        path = [far]
        if host == reached:
            _, *path = nx.shortest_path(machines[host].graph, near, far, weight=weight)
        devices += [(reached, device) for device in path]
    return [f"{host}.{device}".lstrip(".") for host, device in devices]
