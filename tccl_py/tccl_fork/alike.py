"""Clusters of nodes that are all alike, which is what the TCCL fork's one database is for."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tccl_py.errors import InputError, SearchError
from tccl_py.model.knowledge import Knowledge
from tccl_py.model.machine import Machine
from tccl_py.nccl.settings import Settings
from tccl_py.plan.plan import Plan, PlanChain
from tccl_py.tccl_fork.database import Database, found_ring, mask_of


class AlikeNodes(msgspec.Struct, frozen=True, kw_only=True):
    """What all nodes of a cluster's plan have in common; they have no rings of their own."""

    machine: Machine
    knowledge: Knowledge
    gpus: tuple[int, ...]
    settings: Settings
    rate_gbps: float
    provenance: str
    pinned_env: dict[str, str] = {}
    rings: tuple[PlanChain, ...] = ()


def alike_nodes(plan: Plan, *, where: str) -> AlikeNodes:
    """The node that every one of the plan is like.

    Raises:
        InputError: they are of several classes, or the plan was measured, which takes all hosts.
    """
    if len(plan.cluster.classes) > 1:
        names = ", ".join(one.name for one in plan.cluster.classes[:8])
        raise InputError(
            where,
            f"has nodes of {len(plan.cluster.classes)} classes ({names})",
            "the fork has one database for all nodes: plan those of one class",
        )
    if not plan.simulated:
        raise InputError(
            where,
            "was measured over its hosts, and the file takes sets that nobody measured there",
            "plan one of its machines alone: the file made of that has rings for jobs of one node",
        )
    (one,), (gpus,) = plan.cluster.classes, plan.class_gpus
    return AlikeNodes(
        machine=one.machine,
        knowledge=one.knowledge,
        gpus=gpus,
        settings=plan.settings,
        rate_gbps=plan.rate_gbps,
        provenance=plan.provenance,
        pinned_env=plan.pinned_env,
    )


def alike_notes(plan: Plan, database: Database) -> Iterator[str]:
    """What the fork's ring over the plan's nodes has beside the plan's own rings."""
    (gpus,) = plan.class_gpus
    nodes = len(plan.hosts)
    rings = f"{plan.ring_count} ring{'s' * (plan.ring_count != 1)}"
    planned = f"the plan has {plan.rate_gbps:.2f} GB/s by {rings} over {nodes} nodes"
    try:
        # Among equal nodes every crossing can be the best one: two nodes have what more have.
        found = found_ring(database, [mask_of(gpus)] * min(nodes, 2))
    except SearchError as error:
        yield f"{planned}; with this file such a job fails: {error}"
    else:
        yield f"{planned}; the one ring that the fork makes of this file has {found.gbps:.2f}"
