"""What makes two machines the same for planning: equal structure and knowledge, device by device.

Machines are compared in a form that leaves out what names one single host: the machine's name, bus
ids, guids, masks of CPUs, and bridges that lead to no GPU and no NIC. GPUs, NUMA nodes and NICs
keep their numbers, so that a plan for a class holds for each of its hosts as it is. NICs keep their
names too: settings of a class (NCCL_IB_HCA) call them by those.
"""

from __future__ import annotations

import msgspec

from tccl_py.topology.knowledge import Knowledge
from tccl_py.topology.machine import Gpu, Machine, Nic


def canonical(machine: Machine, knowledge: Knowledge) -> tuple[Machine, Knowledge]:
    """The form in which two machines are equal if one plan is right for both."""
    names = _bridge_names(machine)
    form = Machine(
        name="",
        numa_nodes=tuple(msgspec.structs.replace(node, affinity="") for node in machine.numa_nodes),
        gpus=tuple(
            msgspec.structs.replace(gpu, bus_id="", parent=names.get(gpu.parent, gpu.parent))
            for gpu in sorted(machine.gpus, key=lambda gpu: gpu.index)
        ),
        bridges=tuple(
            msgspec.structs.replace(
                bridge,
                bus_id=names[bridge.bus_id],
                parent=names.get(bridge.parent, bridge.parent),
            )
            for bridge in sorted(
                (bridge for bridge in machine.bridges if bridge.bus_id in names),
                key=lambda bridge: names[bridge.bus_id],
            )
        ),
        nics=tuple(
            msgspec.structs.replace(
                nic, bus_id="", guid="", parent=names.get(nic.parent, nic.parent)
            )
            for nic in sorted(machine.nics, key=lambda nic: nic.index)
        ),
        nvswitches=tuple(msgspec.structs.replace(one, bus_id="") for one in machine.nvswitches),
        nvlinks=tuple(
            sorted(machine.nvlinks, key=lambda link: (link.source, link.target, link.kind))
        ),
    )
    return form, _canonical_knowledge(machine, knowledge, names)


def _bridge_names(machine: Machine) -> dict[str, str]:
    """A name for each bridge that leads to a GPU or NIC, by what it leads to.

    No two bridges lead to the same devices and are as many steps away from the root.
    """
    below: dict[str, set[str]] = {}
    steps: dict[str, int] = {}
    bridges = {bridge.bus_id for bridge in machine.bridges}
    devices: tuple[Gpu | Nic, ...] = (*machine.gpus, *machine.nics)
    for device in devices:
        way = [parent for parent in machine.ancestors(device.id) if parent in bridges]
        for step, bridge in enumerate(reversed(way)):
            below.setdefault(bridge, set()).add(device.id)
            steps[bridge] = step
    return {bridge: f"B{steps[bridge]}:{'+'.join(sorted(ids))}" for bridge, ids in below.items()}


def _canonical_knowledge(
    machine: Machine, knowledge: Knowledge, names: dict[str, str]
) -> Knowledge:
    bridges = {bridge.bus_id for bridge in machine.bridges}
    links = []
    for link in knowledge.hidden_links:
        ends = [names.get(end, "" if end in bridges else end) for end in (link.one, link.other)]
        if all(ends):
            one, other = sorted(ends)
            links.append(msgspec.structs.replace(link, one=one, other=other, note=""))
    return msgspec.structs.replace(
        knowledge,
        peer_access=tuple(sorted(knowledge.peer_access, key=lambda f: (f.source, f.target))),
        hidden_links=tuple(sorted(links, key=lambda link: (link.one, link.other))),
    )
