"""The report's lists: parts of the machine, and files of the plan."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tccl_py.model.machine import Machine
from tccl_py.plan.directory import JOURNAL_FILE, machine_file
from tccl_py.plan.files import TOPOLOGY_FILE
from tccl_py.plan.plan import Plan
from tccl_py.plan.staging import PLAN_FILE
from tccl_py.report.contents import Contents
from tccl_py.report.layout import link_words


class PlanFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file below the plan's directory; `there` is false if it is missing."""

    name: str
    purpose: str
    there: bool


def plan_files(contents: Contents) -> list[PlanFile]:
    """What a plan's directory has, in the order in which a reader wants it."""
    directory, plan = contents.directory, contents.plan
    purposes = {
        "nccl/env.sh": "settings and graph, for jobs over exactly the plan's GPUs",
        "nccl/nccl.conf": "settings that hold for every job of a host; names no graph",
        "nccl/graph.xml": "the rings, as NCCL reads them",
        **_topology_file(plan),
        PLAN_FILE: "the plan itself",
        JOURNAL_FILE: "every measurement; an interrupted plan goes on from it",
        str(machine_file(plan, Path())): "the machine",
    }
    return [
        *(
            PlanFile(name=name, purpose=purpose, there=(directory / name).is_file())
            for name, purpose in purposes.items()
        ),
        *_subsets(directory),
    ]


def _topology_file(plan: Plan) -> dict[str, str]:
    if plan.topology is None:
        return {}
    return {
        f"nccl/{TOPOLOGY_FILE}": "what NCCL's own search is told of the machine, for every "
        f"communicator: {plan.topology.summary}"
    }


def _subsets(directory: Path) -> list[PlanFile]:
    count = len(list((directory / "nccl" / "subsets").glob("graph-*.xml")))
    if not count:
        return []
    purpose = f"{count} more graph files, each for one smaller set of GPUs"
    return [PlanFile(name="nccl/subsets/", purpose=purpose, there=True)]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A device or link of the machine, in words."""

    id: str
    what: str
    parent: str = ""
    link: str = ""


def machine_parts(machine: Machine) -> list[Part]:
    """Every device and NVLink of a machine."""
    parts = [
        Part(
            id=device,
            what=what.strip(" ,"),
            parent=machine.parents.get(device, ""),
            link=" ".join(link_words(machine.links[device])) if device in machine.links else "",
        )
        for device, what in _devices(machine).items()
    ]
    return parts + [
        Part(id=f"{one.source} to {one.target}", what=one.kind, link=f"{one.count} links")
        for one in machine.nvlinks
    ]


def _devices(machine: Machine) -> dict[str, str]:
    return {
        **{
            node.id: f"NUMA node {node.numa_id}, socket {_known(node.socket)}, {node.vendor}"
            for node in machine.numa_nodes
        },
        **{bridge.id: "PCI bridge" for bridge in machine.bridges},
        **{gpu.id: f"GPU {gpu.name} at {gpu.bus_id}" for gpu in machine.gpus},
        **{nic.id: f"NIC {nic.name} {nic.bus_id}" for nic in machine.nics},
        **{switch.id: f"NVLink switch {switch.bus_id}" for switch in machine.nvswitches},
    }


def _known(socket: int | None) -> str:
    return "not reported" if socket is None else str(socket)
