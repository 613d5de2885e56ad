"""The default rings and trees of random machines: by this project, and by NCCL's own graph code."""

import random
from collections.abc import Mapping
from typing import Any

import msgspec

from tccl_py.model.machine import Knowledge
from tccl_py.nccl.channel_search import Graph
from tccl_py.nccl.graph_search import search_ring, search_tree
from tccl_py.nccl.settings import Settings, settings_from_environment
from tccl_py.nccl.transport import final_channels
from tccl_py.nccl.view import view
from tccl_py.readers.nccl_topology import parse_nccl_topology
from tests.random_machines import random_environment, random_machine

NET_PAIRS = "pairs go by NET"


class Case(msgspec.Struct, frozen=True):
    """A communicator over GPUs of one or two equal nodes."""

    topology: str
    gpus: list[int]
    environment: dict[str, str]
    nodes: int

    def question(self):
        """Return the case as `graph_judge.judged` takes it, devices as NCCL discovers them."""
        node = (self.topology, self.gpus, None)
        return {**self.environment, "ORACLE_DISCOVER": "1"}, [node] * self.nodes


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


def _outside(graph: Graph) -> dict[str, Any]:
    return {
        "rate outside": round(graph.rate_inter, 3),
        "type outside": graph.type_inter.name,
        "NICs": [list(nics) for nics in graph.nics],
    }


def theirs(case: Case, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return NCCL's answer for the first node in the form of `ours`."""
    first = answer["sys"][0]
    graphs = {
        name: {
            "orders": [[case.gpus[rank] for rank in order] for order in first[name]["ch"]],
            "cross nic": first[name]["crossNic"],
            "rate inside": round(first[name]["bwIntra"], 3),
            "type inside": first[name]["typeIntra"],
            **(_their_outside(first[name]) if case.nodes > 1 else {}),
        }
        for name in ("ring", "tree")
    }
    types = {pair: way[0] for pair, way in first["topo"]["gg"].items()}
    return {
        "order of GPUs": first["topo"]["gpus"],
        "path types": types,
        **graphs,
        "final channels": answer["final"],
    }


def _their_outside(graph: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "rate outside": round(graph["bwInter"], 3),
        "type outside": graph["typeInter"],
        "NICs": graph["inter"],
    }


def difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """Return the name of the first thing that differs, None if all is equal; orders come last."""
    for name in ("order of GPUs", "path types"):
        if found[name] != wanted[name]:
            return NET_PAIRS if "NET" in wanted["path types"].values() else name
    for graph in ("ring", "tree"):
        one, other = found[graph], wanted[graph]
        if len(one["orders"]) != len(other["orders"]):
            return f"{graph}: number of channels"
        for name in sorted(one, key=lambda name: name in ("orders", "NICs")):
            if one[name] != other[name]:
                return f"{graph}: {name}"
    return None if found["final channels"] == wanted["final channels"] else "final channels"
