"""A cluster's plan for another version of NCCL."""

from __future__ import annotations

import msgspec

from tccl_py.cluster_plan.plan import ClusterPlan
from tccl_py.errors import InputError, SearchError
from tccl_py.runtimes.nccl.chain_hops import chain_hop_space, chains_as_rings
from tccl_py.runtimes.nccl.settings import check_settings
from tccl_py.runtimes.nccl.versions import version_facts


def for_version(plan: ClusterPlan, version: str) -> ClusterPlan:
    """The plan for another version of NCCL, if that moves the rings' hops in the same way.

    Raises:
        InputError: it cannot be given these settings, or would move a hop otherwise.
    """
    settings = check_settings(msgspec.structs.replace(plan.settings, version=version))
    for number in sorted({host.passage for host in plan.hosts}):
        passage = plan.passages[number]
        one = plan.cluster.classes[passage.node_class]
        space = chain_hop_space(
            one.machine,
            one.knowledge,
            settings,
            gpus=plan.gpus[passage.node_class],
            chains_in_set=len(passage.chains),
        )
        for chain in passage.chains:
            named = chain.entry_nic, chain.gpus, chain.exit_nic
            try:
                (moved,) = chains_as_rings(space, [named])
            except SearchError as error:
                raise _refused(version, f"has no hop for a pair of GPUs of {one.name}") from error
            for hop, flow in zip(moved.hops, chain.flows, strict=True):
                if str(hop.flow) != flow:
                    what = f"on {one.name} moves by {hop.flow}, where the plan has {flow}"
                    raise _refused(version, what)
    verified = version_facts(version).verified
    return msgspec.structs.replace(plan, settings=settings, settings_verified=verified)


def _refused(version: str, what: str) -> InputError:
    right = f"make a plan for it: tccl plan --nccl {version[:20]}"
    return InputError(f"NCCL {version[:20]}", what, right)
