"""The default rings and trees that this project expects of NCCL, of random machines too."""

import random
from typing import Any

import msgspec

from tccl_py.model.machine import Knowledge
from tccl_py.nccl.graph_search import SearchGraph, search_ring, search_tree
from tccl_py.nccl.settings import Settings, settings_from_environment
from tccl_py.nccl.transport import final_channels
from tccl_py.nccl.view import view
from tccl_py.readers.nccl_topology import parse_nccl_topology
from tests.random_machines import random_environment, random_machine


class Case(msgspec.Struct, frozen=True):
    """A communicator over GPUs of one or two equal nodes."""

    topology: str
    gpus: list[int]
    environment: dict[str, str]
    nodes: int


def random_case(rng: random.Random) -> Case:
    """Return a case with NICs: where a machine has none, NCCL's answer depends on its sockets.

    Most cases say NCCL_NET_DISABLE_INTRA=1, because else many nodes are cut in parts.
    """
    while True:
        topology, gpus = random_machine(rng)
        if "<net " in topology:
            break
    environment = random_environment(rng)
    if rng.random() < 0.8:
        environment["NCCL_NET_DISABLE_INTRA"] = "1"
    return Case(topology, gpus, environment, rng.choice((1, 2)))


def ours(case: Case) -> dict[str, Any]:
    """Return what this project expects of NCCL."""
    machine = parse_nccl_topology(case.topology, where="random.xml")
    settings = settings_from_environment(case.environment)
    seen = view(machine, Knowledge(), settings, gpus=case.gpus)
    ring = search_ring(seen, nodes=case.nodes)
    tree = search_tree(seen, nodes=case.nodes, channels=len(ring.orders))
    channels = final_channels(
        Settings(),
        channels=min(len(ring.orders), len(tree.orders)),
        sm=seen.system.sm_min,
        nodes=case.nodes,
        speed_intra=ring.rate_intra,
    )
    types = {
        f"{one}{other}": seen.paths[one, other].type.name
        for one in seen.system.gpus
        for other in seen.system.gpus
        if one != other
    }
    graphs = {
        name: {
            "orders": [list(order) for order in graph.orders],
            "cross nic": graph.cross_nic,
            "rate inside": round(graph.rate_intra, 3),
            "type inside": graph.type_intra.name,
            **(_outside(graph) if case.nodes > 1 else {}),
        }
        for name, graph in (("ring", ring), ("tree", tree))
    }
    gpus = [int(gpu[1:]) for gpu in seen.system.gpus]
    return {"order of GPUs": gpus, "path types": types, **graphs, "final channels": channels}


def _outside(graph: SearchGraph) -> dict[str, Any]:
    return {
        "rate outside": round(graph.rate_inter, 3),
        "type outside": graph.type_inter.name,
        "NICs": [list(nics) for nics in graph.nics],
    }
