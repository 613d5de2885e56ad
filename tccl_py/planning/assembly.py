"""Rings over all hosts, as a Plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from tccl_py.model.cluster import Cluster
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.versions import version_facts
from tccl_py.plan.chains import (
    HostPath,
    PlanChain,
    PlanChoice,
    PlannedHost,
    is_at_bound,
    version_notices,
)
from tccl_py.plan.plan import Plan
from tccl_py.planning.request import PlanRequest
from tccl_py.search.strategies import strategy_name


class JoinedRings(msgspec.Struct, frozen=True, kw_only=True):
    """Rings over all hosts: the order of hosts, and the chains of each, in the order of rings.

    `rate_gbps` is the bandwidth of all rings together, and `error` half its 95 % interval,
    relative. If `bound_assumptions` hold, no set of as many rings under these settings exceeds
    `bound_gbps`, in any order of hosts and over any NICs, if NICs carry equal numbers of rings or
    one more; None is not known.
    """

    settings: Settings
    rings: int
    hosts: tuple[str, ...]
    chains: tuple[tuple[PlanChain, ...], ...]
    rate_gbps: float
    error: float
    assumed: bool
    bound_gbps: float | None
    bound_assumptions: tuple[str, ...]


PathTypes = Callable[[int, Sequence[PlanChain]], tuple[str, str]]
"""The farthest paths of chains on a host of a class, inside it and to its NICs, by name."""


def assembled(
    cluster: Cluster,
    class_gpus: Sequence[tuple[int, ...]],
    joined: JoinedRings,
    rated: tuple[PlanChoice, PlanChoice],
    request: PlanRequest,
    *,
    types: PathTypes,
    notices: Iterable[str],
    simulated: bool,
    dry_run: bool,
    cancelled: bool,
) -> Plan:
    """Return the plan of rings over one host or several; the counts of sets are left 0.

    `rated` are default NCCL and NCCL by variables alone.
    """
    numbers: dict[tuple[int, tuple[PlanChain, ...]], int] = {}
    hosts: list[PlannedHost] = []
    rank = 0
    for name, chains in zip(joined.hosts, joined.chains, strict=True):
        node_class = cluster.host_classes[name]
        path = numbers.setdefault((node_class, chains), len(numbers))
        hosts.append(PlannedHost(name=name, path=path, first_rank=rank))
        rank += len(class_gpus[node_class])
    paths = []
    for number, chains in numbers:
        intra, inter = types(number, chains)
        paths.append(HostPath(node_class=number, chains=chains, type_intra=intra, type_inter=inter))
    default, variables = rated
    version = joined.settings.version
    odd = other_count_notices(request.ring_counts or (), joined.rings)
    return Plan(
        cluster=cluster,
        class_gpus=tuple(class_gpus),
        hosts=tuple(hosts),
        paths=tuple(paths),
        settings=joined.settings,
        settings_verified=version_facts(version).verified,
        rate_gbps=joined.rate_gbps,
        error=joined.error,
        bound_gbps=joined.bound_gbps,
        proven=is_at_bound(joined.rate_gbps, joined.bound_gbps) and not joined.bound_assumptions,
        bound_assumptions=joined.bound_assumptions,
        simulated=simulated,
        assumed=joined.assumed,
        dry_run=dry_run,
        strategy=strategy_name(request.strategy),
        sets_measured=0,
        sets_remembered=0,
        sets_by_symmetry=0,
        stock=default,
        variables=variables,
        notices=(*notices, *version_notices(version), *odd),
        pinned_env=dict(request.pinned_env),
        cancelled=cancelled,
    )


def other_count_notices(asked: Sequence[int], count: int) -> tuple[str, ...]:
    """Return a notice where a plan has none of the requested numbers of rings."""
    if not asked or count in asked:
        return ()
    wanted = ", ".join(map(str, asked))
    return (
        f"sets of {wanted} rings were asked for; the plan has NCCL's own {count}, as none of those "
        "is faster, or none divides the numbers of channels that are tried",
    )
