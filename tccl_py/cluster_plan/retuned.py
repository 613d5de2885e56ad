"""A cluster's plan under other settings: the same rings over the same hosts and NICs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import msgspec

from tccl_py.cluster_plan.plan import ClusterPlan, PlanPassage
from tccl_py.errors import SearchError
from tccl_py.nccl.network import chain_hop_space, chains_as_rings, farthest_end, gdr_variants
from tccl_py.nccl.settings import Settings, check_settings, final_channels
from tccl_py.nccl.view import NcclView, view

PassageFlows = tuple[tuple[str, ...], ...]
"""How each chain of a passage moves, flow by flow."""


class _ChainEnds(Protocol):
    """A chain's way through a node, of a plan or of a search."""

    @property
    def entry_nic(self) -> int: ...
    @property
    def gpus(self) -> tuple[int, ...]: ...
    @property
    def exit_nic(self) -> int: ...


def ends_as_measured(settings: Settings, *, sm: int | None, hosts: int, rate_gbps: float) -> bool:
    """Whether NCCL ends up with the channels that the settings were measured with.

    Between nodes it doubles few and quick channels once more; `rate_gbps` is of all channels.
    """
    channels, version = settings.channels, settings.version
    speed = rate_gbps / channels
    final = final_channels(channels, sm=sm, nodes=hosts, speed_intra=speed, version=version)
    return final == final_channels(channels, sm=sm, version=version)


def path_types(seen: NcclView, chains: Sequence[_ChainEnds]) -> tuple[str, str]:
    """The farthest paths of chains inside a node and to its NICs, by name."""
    pairs = {pair for chain in chains for pair in pairwise(chain.gpus)}
    types = [seen.paths[f"G{one}", f"G{other}"].type for one, other in pairs]
    ends = [(one.gpus[0], one.entry_nic, one.gpus[-1], one.exit_nic) for one in chains]
    return max(types).name if types else "LOC", farthest_end(seen, ends).name


def passage_flows(plan: ClusterPlan, number: int, settings: Settings) -> PassageFlows:
    """How the chains of a passage, by its number, move under these settings.

    Raises:
        SearchError: a pair of its GPUs, or a GPU and a NIC, has no hop then.
    """
    passage = plan.passages[number]
    one = plan.cluster.classes[passage.node_class]
    space = chain_hop_space(
        view(one.machine, one.knowledge, settings, gpus=plan.gpus[passage.node_class]),
        chains_in_set=len(passage.chains),
    )
    named = [(chain.entry_nic, chain.gpus, chain.exit_nic) for chain in passage.chains]
    moved = chains_as_rings(space, named)
    return tuple(tuple(str(hop.flow) for hop in ring.hops) for ring in moved)


def keeps_rings(plan: ClusterPlan, settings: Settings) -> bool:
    """Whether the plan's rings are possible under these settings, with just their channels."""
    try:
        _flows(plan, settings)
    except SearchError:
        return False
    return _as_measured(plan, settings, plan.rate_gbps)


def other_landings(plan: ClusterPlan, settings: Settings) -> tuple[Settings, ...]:
    """Settings that change where bytes of the plan's rings land between GPUs and NICs, and nothing
    else; of those that come to the same the first, which departs least from NCCL's defaults."""
    found: dict[tuple[PassageFlows, ...], Settings] = {}
    for other in (settings, *_landings_of_classes(plan, settings)):
        try:
            found.setdefault(_flows(plan, other), other)
        except SearchError:
            continue
    return tuple(one for one in found.values() if one != settings)


def _landings_of_classes(plan: ClusterPlan, settings: Settings) -> Iterator[Settings]:
    """Settings that change where bytes land for some GPU and NIC of some class."""
    for number, passages in _by_class(plan).items():
        one = plan.cluster.classes[number]
        chains = [chain for passage in passages for chain in passage.chains]
        nics = sorted({nic for chain in chains for nic in (chain.entry_nic, chain.exit_nic)})
        yield from gdr_variants(
            view(one.machine, one.knowledge, settings, gpus=plan.gpus[number]), nics=nics
        )


def retuned(plan: ClusterPlan, settings: Settings, *, rate_gbps: float) -> ClusterPlan:
    """The same rings under other settings, which carry `rate_gbps` together.

    Where NCCL would double the channels once more at this rate, as many are asked for in the files.

    Raises:
        InputError: settings that the version does not have.
        SearchError: a ring has no hop under them.
    """
    check_settings(settings)
    while not _as_measured(plan, settings, rate_gbps):
        settings = msgspec.structs.replace(settings, channels=2 * settings.channels)
    moved = _flows(plan, settings)
    share = rate_gbps / plan.ring_count
    return msgspec.structs.replace(
        plan,
        settings=settings,
        passages=tuple(
            _passage(plan, passage, settings, flows, share=share)
            for passage, flows in zip(plan.passages, moved, strict=True)
        ),
        rate_gbps=rate_gbps,
        bound_gbps=None,
        proven=False,
        # That was measured under the settings before.
        whole_ring_gbps=None,
    )


def _passage(
    plan: ClusterPlan,
    passage: PlanPassage,
    settings: Settings,
    flows: PassageFlows,
    *,
    share: float,
) -> PlanPassage:
    one = plan.cluster.classes[passage.node_class]
    seen = view(one.machine, one.knowledge, settings, gpus=plan.gpus[passage.node_class])
    type_intra, type_inter = path_types(seen, passage.chains)
    return msgspec.structs.replace(
        passage,
        chains=tuple(
            msgspec.structs.replace(chain, flows=moved, gbps=(share,) * len(moved))
            for chain, moved in zip(passage.chains, flows, strict=True)
        ),
        rate_gbps=share * len(passage.chains),
        type_intra=type_intra,
        type_inter=type_inter,
    )


def _flows(plan: ClusterPlan, settings: Settings) -> tuple[PassageFlows, ...]:
    return tuple(passage_flows(plan, number, settings) for number in range(len(plan.passages)))


def _as_measured(plan: ClusterPlan, settings: Settings, rate_gbps: float) -> bool:
    found = []
    for number in _by_class(plan):
        one = plan.cluster.classes[number]
        seen = view(one.machine, one.knowledge, settings, gpus=plan.gpus[number])
        found.append(seen.system.sm_min)
    hosts = len(plan.hosts)
    return ends_as_measured(settings, sm=min(found), hosts=hosts, rate_gbps=rate_gbps)


def _by_class(plan: ClusterPlan) -> dict[int, list[PlanPassage]]:
    """The passages through nodes of each class, by its number."""
    found: dict[int, list[PlanPassage]] = {}
    for passage in plan.passages:
        found.setdefault(passage.node_class, []).append(passage)
    return found
