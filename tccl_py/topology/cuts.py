"""Groups of GPUs that share a way out of somewhere: where bounds on ring sets come from."""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx

from tccl_py.topology.knowledge import Knowledge
from tccl_py.topology.machine import Machine


def natural_cuts(
    machine: Machine, knowledge: Knowledge, *, gpus: Sequence[int]
) -> tuple[frozenset[int], ...]:
    """The groups of `gpus` below each bridge, chip, NUMA node and socket, or joined by NVLink.

    Smallest first.

    >>> from tccl_py.topology.machine import toy_machine
    >>> machine = toy_machine(gpus=4, numa_nodes=2)
    >>> [sorted(cut) for cut in natural_cuts(machine, Knowledge(), gpus=machine.gpu_indices)]
    [[0, 1], [2, 3]]
    """
    below: dict[str, set[int]] = {}
    for gpu in machine.gpus:
        if gpu.index in gpus:
            for ancestor in machine.ancestors(gpu.id):
                below.setdefault(ancestor, set()).add(gpu.index)
    sockets = {node.id: f"socket {node.socket}" for node in machine.numa_nodes}
    for node in machine.numa_nodes:
        if node.socket is not None:
            below.setdefault(sockets[node.id], set()).update(below.get(node.id, ()))
    for chip in _chips(knowledge):
        together = set().union(*(below.get(part, set()) for part in chip))
        below.setdefault(" ".join(chip), set()).update(together)
    for turn, group in enumerate(_bridged(machine)):
        below[f"NVLink group {turn}"] = group & set(gpus)
    groups = {frozenset(group) for group in below.values()}
    proper = [group for group in groups if 1 < len(group) < len(gpus)]
    return tuple(sorted(proper, key=lambda group: (len(group), sorted(group))))


def _chips(knowledge: Knowledge) -> list[list[str]]:
    """Devices that hidden links join into one."""
    graph = nx.Graph([(link.one, link.other) for link in knowledge.hidden_links])
    return [sorted(part) for part in nx.connected_components(graph)]


def _bridged(machine: Machine) -> list[set[int]]:
    """GPUs that NVLinks join directly."""
    links = [link for link in machine.nvlinks if link.source[0] == link.target[0] == "G"]
    graph = nx.Graph([(int(link.source[1:]), int(link.target[1:])) for link in links])
    return [set(part) for part in nx.connected_components(graph)]
