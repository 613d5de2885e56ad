"""Plans for programs: rows of hops, a graph, other orders, and the difference of two plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tccl_py.errors import InputError
from tccl_py.model.machine import Machine
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.transfer import Flow
from tccl_py.nccl.settings import environment
from tccl_py.plan.plan import Plan
from tccl_py.plan.tasks import Task, rings_under
from tccl_py.sources.remembering import remembering

if TYPE_CHECKING:
    import networkx as nx

_OF_ONE = "take one of its classes"


def rows(plan: Plan) -> list[dict[str, Any]]:
    """Return a dictionary for each hop of each ring, as pandas.DataFrame takes them.

    `links` are the devices along the way, and `numa` the NUMA nodes among them.
    """
    plan.check_single("plan", _OF_ONE)
    found = []
    for number, ring in enumerate(plan.rings):
        for hop in ring.hops:
            links = way(plan.machine, hop.flow)
            numa = [device for device in links if device.startswith("C")]
            kind = "bounce" if hop.flow.is_bounce else hop.flow.transfers[0].operation
            row = {"ring": number, "from": hop.source, "to": hop.target, "gbps": hop.gbps}
            more = {"slowest": hop == ring.bottleneck, "how": kind, "flow": str(hop.flow)}
            found.append({**row, **more, "links": links, "numa": numa})
    return found


def way(machine: Machine, flow: Flow) -> list[str]:
    """Return the devices of a flow's shortest way, NVLinks first.

    >>> from tccl_py.model.transfer import parse_flow
    >>> from tccl_py.simulator.descriptions import load_bundled
    >>> way(load_bundled("amd-v100").machine, parse_flow("0:C1:2"))[0]
    'G0'
    """
    import networkx as nx  # noqa: PLC0415 (slow)

    def weight(_: str, __: str, edge: dict[str, Any]) -> float:
        return 1.0 if edge["kind"] in ("pci", "smp") else 0.4

    found: list[str] = []
    for part in flow.transfers:
        ends = part.source.device, part.destination.device
        found += nx.shortest_path(machine.graph, *ends, weight=weight)[bool(found) :]
    return found


def graph(plan: Plan) -> nx.MultiDiGraph:
    """Return the rings as a networkx graph over GPUs: an edge for each hop, with its row."""
    import networkx as nx  # noqa: PLC0415 (slow)

    found = nx.MultiDiGraph(machine=plan.machine.name)
    found.add_nodes_from(plan.gpus)
    for row in rows(plan):
        found.add_edge(row["from"], row["to"], **row)
    return found


def what_if(plan: Plan, order: Sequence[int], source: BandwidthSource) -> float:
    """Return the bandwidth of another ring order under the plan's settings, GB/s.

    Raises InputError: not each GPU of the plan once. SearchError: NCCL has no hop between two.
    """
    if sorted(order) != list(plan.gpus):
        wanted = ", ".join(map(str, plan.gpus))
        raise InputError("order", f"is {list(order)}", f"each of GPUs {wanted} once")
    task = Task(
        machine=plan.machine,
        knowledge=plan.knowledge,
        source=remembering(source),
        gpus=plan.gpus,
        version=plan.settings.version,
    )
    first = order.index(plan.gpus[0])
    rings = rings_under(task, plan.settings, [(*order[first:], *order[:first])])
    (found,) = source.measure([rings.flows])
    return rings.rate(found)


def diff(plan: Plan, other: Plan) -> dict[str, tuple[Any, Any]]:
    """Return what differs between two plans, by name: the first plan's value and the second's."""
    one, two = (_facts(each) for each in (plan, other))
    return {name: (one[name], two[name]) for name in one if one[name] != two[name]}


def _facts(plan: Plan) -> dict[str, Any]:
    names = ("rate_gbps", "bound_gbps", "recommended", "orders", "provenance", "pinned_env")
    facts = {name: getattr(plan, name) for name in names}
    stock, variables = plan.stock.rate_gbps, plan.variables.rate_gbps
    rates = {"default_gbps": stock, "variables_gbps": variables}
    hosts = {"machines": tuple(one.machine.name for one in plan.cluster.classes)}
    gpus = {"hosts": plan.host_order, "gpus": plan.class_gpus}
    return {**hosts, **gpus, **facts, **rates, "environment": environment(plan.settings)}
