"""A plan under other settings: the same rings and NICs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress

import msgspec

from tccl_py.errors import SearchError
from tccl_py.model.rings import HopSpace, ring_like
from tccl_py.model.transfer import Flow
from tccl_py.nccl.network import chain_hop_space
from tccl_py.nccl.network import gdr_variants as gdr_settings
from tccl_py.nccl.settings import Settings, check_settings
from tccl_py.nccl.transport import final_channels
from tccl_py.plan.chains import HostPath
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
    ends = {nic for chain in path.chains for nic in (chain.entry_nic, chain.exit_nic)}
    nics = sorted(nic for nic in ends if nic is not None)
    host_view = class_view(plan, path.node_class, settings)
    return chain_hop_space(host_view, nics=nics, chains_in_set=count)


def _move(plan: Plan, path: HostPath, settings: Settings) -> HostPath:
    """Return a path with the flows of its chains under these settings.

    Raises SearchError: a pair of its GPUs, or a GPU and a NIC, has no hop then.
    """
    host_view = class_view(plan, path.node_class, settings)
    space = path_space(plan, path, settings, len(path.chains))
    replace, chains = msgspec.structs.replace, []
    for chain in path.chains:
        moved_ring = ring_like(space, chain.ring)
        moved = zip(chain.hops, moved_ring.hops, strict=True)
        hops = tuple(replace(hop, flow=new.flow) for hop, new in moved)
        chains.append(replace(chain, hops=hops))
    type_intra, type_inter = path_types(host_view, chains)
    return replace(path, chains=tuple(chains), type_intra=type_intra, type_inter=type_inter)


def _all_moved(plan: Plan, settings: Settings) -> tuple[HostPath, ...]:
    return tuple(_move(plan, path, settings) for path in plan.paths)


def _flows(path: HostPath) -> list[Flow]:
    return [hop.flow for chain in path.chains for hop in chain.hops]


def keeps_rings(plan: Plan, settings: Settings) -> bool:
    """Return whether the plan's rings are possible under settings, with just their channels."""
    try:
        _all_moved(plan, settings)
    except SearchError:
        return False
    # Files for jobs under other settings have the predicted rate.
    return _as_measured(plan, settings, plan.rate_gbps)


def gdr_variants(plan: Plan, settings: Settings) -> tuple[Settings, ...]:
    """Return settings that change only the NIC buffer placement of the plan's rings.

    Of settings with equal flows it is the first, which departs least from NCCL's defaults.
    """
    by_flows: dict[tuple[Flow, ...], Settings] = {}
    for variant in (settings, *_gdr_of_classes(plan, settings)):
        with suppress(SearchError):
            flows = itertools.chain.from_iterable(map(_flows, _all_moved(plan, variant)))
            by_flows.setdefault(tuple(flows), variant)
    return tuple(variant for variant in by_flows.values() if variant != settings)


def _gdr_of_classes(plan: Plan, settings: Settings) -> Iterator[Settings]:
    """Settings that change the placement for some GPU and NIC of some class."""
    for number in range(len(plan.cluster.classes)):
        chains = [c for path in plan.paths if path.node_class == number for c in path.chains]
        ends = {nic for chain in chains for nic in (chain.entry_nic, chain.exit_nic)}
        nics = sorted(nic for nic in ends if nic is not None)
        if nics:
            yield from gdr_settings(class_view(plan, number, settings), nics=nics)


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
        paths=_all_moved(plan, settings),
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
