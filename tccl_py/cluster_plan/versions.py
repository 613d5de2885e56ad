"""A cluster's plan for another version of NCCL."""

from __future__ import annotations

import msgspec

from tccl_py.cluster_plan.plan import ClusterPlan
from tccl_py.cluster_plan.retuned import passage_flows
from tccl_py.errors import InputError, SearchError
from tccl_py.nccl.settings import check_settings
from tccl_py.nccl.versions import version_facts


def for_version(plan: ClusterPlan, version: str) -> ClusterPlan:
    """The plan for another version of NCCL, if that moves the rings' hops in the same way.

    Raises:
        InputError: it cannot be given these settings, or would move a hop otherwise.
    """
    settings = check_settings(msgspec.structs.replace(plan.settings, version=version))
    for number in sorted({host.passage for host in plan.hosts}):
        passage = plan.passages[number]
        name = plan.cluster.classes[passage.node_class].name
        try:
            moved = passage_flows(plan, number, settings)
        except SearchError as error:
            raise _refused(version, f"has no hop for a pair of GPUs of {name}") from error
        for chain, flows in zip(passage.chains, moved, strict=True):
            for now, flow in zip(flows, chain.flows, strict=True):
                if now != flow:
                    raise _refused(version, f"on {name} moves by {now}, where the plan has {flow}")
    verified = version_facts(version).verified
    return msgspec.structs.replace(plan, settings=settings, settings_verified=verified)


def _refused(version: str, what: str) -> InputError:
    right = f"make a plan for it: tccl plan --nccl {version[:20]}"
    return InputError(f"NCCL {version[:20]}", what, right)
