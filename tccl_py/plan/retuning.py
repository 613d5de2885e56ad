"""A plan under other settings: the same rings and NICs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from itertools import chain

import msgspec

from tccl_py.errors import SearchError
from tccl_py.model.rings import HopSpace, ring_like
from tccl_py.model.transfer import Flow
from tccl_py.nccl.network import chain_hop_space
from tccl_py.nccl.network import gdr_variants as gdr_settings
from tccl_py.nccl.settings import Settings, check_settings
from tccl_py.nccl.transport import final_channels
from tccl_py.plan.chains import HostPath, PlanChain, plan_chain
from tccl_py.plan.machine_files import class_view, path_types
from tccl_py.plan.plan import Plan

TUNED_NOTE = "settings tuned: predictions are of the settings before, which real jobs did not run"


def ends_as_measured(settings: Settings, *, sm: int | None, hosts: int, rate_gbps: float) -> bool:
    """Return whether NCCL ends up with the channels that the settings were measured with.

    Between hosts it doubles few and quick channels once more; `rate_gbps` is of all channels.
    """
    channels, version = settings.channels, settings.version
    speed = rate_gbps / channels
    settings = Settings(version=version, channels=channels)
    final = final_channels(settings, sm=sm, nodes=hosts, speed_intra=speed)
    return final == final_channels(settings, sm=sm)


def path_space(plan: Plan, path: HostPath, settings: Settings, count: int) -> HopSpace:
    """Return the hops open to each of `count` rings, or chains, on hosts with a path."""
    host_view = class_view(plan, path.node_class, settings)
    return chain_hop_space(host_view, nics=_nics(path.chains), chains_in_set=count)


def _nics(chains: Iterable[PlanChain]) -> list[int]:
    ends = {nic for of in chains for nic in (of.entry_nic, of.exit_nic)}
    return sorted(nic for nic in ends if nic is not None)


def _move_rings(plan: Plan, settings: Settings) -> tuple[HostPath, ...]:
    """Return the plan's paths with the flows of their chains under these settings.

    Raises SearchError: a pair of its GPUs, or a GPU and a NIC, has no hop then.
    """
    paths = []
    for path in plan.paths:
        space = path_space(plan, path, settings, len(path.chains))
        rings = [ring_like(space, of.ring).hops for of in path.chains]
        rates = [[hop.rate_gbps for hop in of.hops] for of in path.chains]
        chains = tuple(map(plan_chain, rings, rates))
        number = path.node_class
        intra, inter = path_types(class_view(plan, number, settings), chains)
        paths.append(HostPath(node_class=number, chains=chains, type_intra=intra, type_inter=inter))
    return tuple(paths)


def keeps_rings(plan: Plan, settings: Settings) -> bool:
    """Return whether the plan's rings are possible under settings, with just their channels."""
    try:
        _move_rings(plan, settings)
    except SearchError:
        return False
    # Files for jobs under other settings have the predicted rate.
    return _as_measured(plan, settings, plan.rate_gbps)


def gdr_variants(plan: Plan, settings: Settings) -> tuple[Settings, ...]:
    """Return settings that change only the NIC buffer placement of the plan's rings.

    Of settings with equal flows it is the first, which departs least from NCCL's defaults.
    """
    variants = [settings]
    for number in range(len(plan.cluster.classes)):
        of_class = (path.chains for path in plan.paths if path.node_class == number)
        if nics := _nics(chain.from_iterable(of_class)):
            variants += gdr_settings(class_view(plan, number, settings), nics=nics)
    by_flows: dict[tuple[Flow, ...], Settings] = {}
    for variant in variants:
        with suppress(SearchError):
            chains = chain.from_iterable(path.chains for path in _move_rings(plan, variant))
            by_flows.setdefault(tuple(hop.flow for of in chains for hop in of.hops), variant)
    return tuple(variant for variant in by_flows.values() if variant != settings)


def retune(plan: Plan, settings: Settings, *, achieved_gbps: float | None = None) -> Plan:
    """Return the same rings under other settings, with the bandwidth that jobs achieved.

    Where NCCL would double the channels once more at this rate, the files ask for as many. Raises
    InputError: settings that the version does not have. SearchError: a ring has no hop under them.
    """
    check_settings(settings)
    while not _as_measured(plan, settings, achieved_gbps or plan.rate_gbps):
        settings = msgspec.structs.replace(settings, channels=2 * settings.channels)
    return msgspec.structs.replace(
        plan.with_choice("graph", settings=settings, achieved_gbps=achieved_gbps),
        paths=_move_rings(plan, settings),
        file_gbps=msgspec.UNSET,
        bound_gbps=None,
        proven=False,
        bound_assumptions=(),
        # These were measured under the settings before.
        whole_ring_gbps=None,
        limit_gbps=None,
        notices=(*(notice for notice in plan.notices if notice != TUNED_NOTE), TUNED_NOTE),
    )


def _as_measured(plan: Plan, settings: Settings, rate_gbps: float) -> bool:
    classes = {path.node_class for path in plan.paths}
    sm = min(class_view(plan, number, settings).system.sm_min for number in classes)
    return ends_as_measured(settings, sm=sm, hosts=len(plan.hosts), rate_gbps=rate_gbps)
