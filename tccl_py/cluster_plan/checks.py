"""Checks of a cluster's plan that its types cannot make: its file may have been edited by anybody.

Rings follow from passages and the order of hosts, so what NCCL would make of them is checked here
part by part: a chain that visits its GPUs once on every host is a ring over all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from tccl_py.errors import InputError
from tccl_py.model.cluster import check_cluster, shown
from tccl_py.model.machine import Machine
from tccl_py.model.paths import PathType
from tccl_py.model.transfer import Flow, parse_flow, receiving_nic, sending_nic
from tccl_py.nccl.network import leaves_as_named, may_change_rails
from tccl_py.nccl.pinned_env import check_kept
from tccl_py.nccl.settings import check_settings
from tccl_py.nccl.view import usable_nics

if TYPE_CHECKING:
    from tccl_py.cluster_plan.plan import ClusterPlan, PlanChain, PlanPassage

MAX_GBPS = 1e6
_AGAIN = "plan it again"


def check_cluster_plan(plan: ClusterPlan, *, where: str) -> ClusterPlan:
    """Return `plan` if its parts fit together.

    Raises:
        InputError: a cluster or settings that do not hold together, hosts that are not the
            cluster's, each once and with the ranks of their place, passages that are not there or
            of another class, chains that do not visit the GPUs of their class once, flows that do
            not lead along them from NIC to NIC, NICs that NCCL would not use so, or rates out of
            range.
    """
    check_cluster(plan.cluster, where=where)
    _check_settings(plan, where)
    _check_gpus(plan, where)
    _check_passages(plan, where)
    _check_hosts(plan, where)
    _check_rails(plan, where)
    _check_rates(plan, where)
    return plan


def _check_settings(plan: ClusterPlan, where: str) -> None:
    try:
        check_settings(plan.settings)
    except InputError as error:
        raise InputError(f"{where} {error.where}", error.what, error.right) from error
    check_kept(plan.kept, [plan.settings], where)


def _check_gpus(plan: ClusterPlan, where: str) -> None:
    classes = plan.cluster.classes
    if len(plan.gpus) != len(classes):
        what = f"has GPUs for {len(plan.gpus)} classes of hosts"
        raise InputError(where, what, f"there are {len(classes)}")
    for one, gpus in zip(classes, plan.gpus, strict=True):
        known = one.machine.gpu_indices
        if list(gpus) != sorted(set(gpus)) or not set(gpus) <= set(known):
            right = f"some of {_few(known)}, each once and in ascending order"
            raise InputError(f"{where}: class {one.name}", f"is for GPUs {_few(gpus)}", right)


def _check_passages(plan: ClusterPlan, where: str) -> None:
    if not plan.passages:
        raise InputError(where, "has no passages", _AGAIN)
    first = len(plan.passages[0].chains)
    for number, passage in enumerate(plan.passages):
        place = f"{where}: passage {number}"
        if not 0 <= passage.node_class < len(plan.cluster.classes):
            what = f"is of class {_number(passage.node_class)}"
            right = f"there are {len(plan.cluster.classes)} classes, counted from 0"
            raise InputError(place, what, right)
        if len(passage.chains) != first:
            what = f"has {len(passage.chains)} chains, passage 0 has {first}"
            raise InputError(place, what, "every ring has a chain in each")
        for name in (passage.type_intra, passage.type_inter):
            if name not in PathType.__members__:
                known = ", ".join(PathType.__members__)
                raise InputError(place, f"has path type {shown(name)}", f"one of {known}")
        _check_chains(plan, passage, place)
    if first < 1 or plan.settings.channels % first:
        what = f"has {first} rings for {plan.settings.channels} channels"
        raise InputError(where, what, "every ring has as many channels as any other")


def _check_chains(plan: ClusterPlan, passage: PlanPassage, where: str) -> None:
    machine = plan.cluster.classes[passage.node_class].machine
    gpus = plan.gpus[passage.node_class]
    nics = usable_nics(machine, plan.settings)
    for number, chain in enumerate(passage.chains):
        place = f"{where}, chain {number}"
        if not gpus or sorted(chain.gpus) != list(gpus):
            what = f"visits GPUs {_few(chain.gpus)}"
            raise InputError(place, what, f"those of its class are {_few(gpus)}, each once")
        _check_nics(plan, chain, nics, place)
        _check_flows(chain, machine, place)
        for rate in chain.gbps:
            _check_rate(rate, place)
    _check_rate(passage.rate_gbps, where)


def _check_nics(plan: ClusterPlan, chain: PlanChain, nics: Sequence[int], where: str) -> None:
    for nic in (chain.entry_nic, chain.exit_nic):
        if nic not in nics:
            right = f"the settings let NCCL use {_few(nics)}"
            raise InputError(where, f"uses NIC {_number(nic)}", right)
    ends = f"is entered by NIC {chain.entry_nic} and left by NIC {chain.exit_nic}"
    if not leaves_as_named(chain.gpus, chain.entry_nic, chain.exit_nic):
        raise InputError(where, ends, "NCCL leaves one GPU by the NIC that it enters by")
    if chain.entry_nic != chain.exit_nic and not may_change_rails(plan.settings):
        raise InputError(where, ends, "with NCCL_CROSS_NIC=0 both are the same")


def _check_flows(chain: PlanChain, machine: Machine, where: str) -> None:
    stations = len(chain.gpus) + 1
    if (len(chain.flows), len(chain.gbps)) != (stations, stations):
        what = f"has {len(chain.flows)} flows and {len(chain.gbps)} rates"
        raise InputError(where, what, f"each of the {stations} hops of a chain has both")
    flows = [_parsed(text, where) for text in chain.flows]
    for text, flow in zip(chain.flows, flows, strict=True):
        _check_places(text, flow, machine, where)
    entry, *inner, leave = flows
    into = receiving_nic(entry), sending_nic(entry), str(entry.destination)
    if into != (chain.entry_nic, None, f"G{chain.gpus[0]}"):
        right = f"it enters by NIC {chain.entry_nic} at GPU {chain.gpus[0]}"
        raise InputError(where, f"begins with flow {shown(chain.flows[0])}", right)
    out = receiving_nic(leave), sending_nic(leave), str(leave.source)
    if out != (None, chain.exit_nic, f"G{chain.gpus[-1]}"):
        right = f"it leaves from GPU {chain.gpus[-1]} by NIC {chain.exit_nic}"
        raise InputError(where, f"ends with flow {shown(chain.flows[-1])}", right)
    for text, flow, hop in zip(chain.flows[1:], inner, pairwise(chain.gpus), strict=False):
        ends = (str(flow.source), str(flow.destination))
        if flow.is_network or ends != (f"G{hop[0]}", f"G{hop[1]}"):
            what = f"goes from GPU {hop[0]} to GPU {hop[1]} by flow {shown(text)}"
            raise InputError(where, what, _AGAIN)


def _parsed(text: str, where: str) -> Flow:
    try:
        return parse_flow(text)
    except InputError as error:
        raise InputError(f"{where}, {error.where}", error.what, error.right) from error


def _check_places(text: str, flow: Flow, machine: Machine, where: str) -> None:
    """Refuse places of other hosts, and what the machine does not have."""
    known = {
        *(f"G{gpu.index}" for gpu in machine.gpus),
        *(f"D{gpu.index}" for gpu in machine.gpus),
        *(f"C{numa.index}" for numa in machine.numa_nodes),
        *(f"N{nic.index}" for nic in machine.nics),
    }
    for one in flow.transfers:
        for place in (one.source, one.executor, one.destination):
            if str(place) not in known:
                what = f"has flow {shown(text)}, and no {shown(str(place))}"
                raise InputError(where, what, f"name what machine {shown(machine.name)} has")


def _check_hosts(plan: ClusterPlan, where: str) -> None:
    if len(plan.hosts) < 2:
        raise InputError(where, f"has {len(plan.hosts)} hosts", "a plan of a cluster has 2 or more")
    slots = {host.name: host.slots for host in plan.cluster.hosts}
    classes = plan.cluster.host_classes
    seen: set[str] = set()
    rank = 0
    for host in plan.hosts:
        place = f"{where}: host {shown(host.name)}"
        if host.name not in slots:
            raise InputError(place, "is not in the cluster", "name its hosts")
        if host.name in seen:
            raise InputError(place, "is in the order twice", "once is right")
        seen.add(host.name)
        if not 0 <= host.passage < len(plan.passages):
            right = f"there are {len(plan.passages)}, counted from 0"
            raise InputError(place, f"has passage {_number(host.passage)}", right)
        number = plan.passages[host.passage].node_class
        if number != classes[host.name]:
            what = f"has a passage of class {plan.cluster.classes[number].name}"
            right = f"it is of class {plan.cluster.classes[classes[host.name]].name}"
            raise InputError(place, what, right)
        gpus = plan.gpus[number]
        if slots[host.name] != len(gpus):
            what = f"has {slots[host.name]} ranks for GPUs {_few(gpus)}"
            raise InputError(place, what, "a GPU has one rank")
        if host.first_rank != rank:
            what = f"begins with rank {_number(host.first_rank)}"
            raise InputError(place, what, f"the hosts before it have {rank} ranks")
        rank += len(gpus)
    for name in slots:
        if name not in seen:
            right = "the order has every host of the cluster"
            raise InputError(where, f"host {name} is missing from the order", right)


def _check_rails(plan: ClusterPlan, where: str) -> None:
    if plan.cluster.rails == "only" and plan.off_rails:
        right = "on this network a NIC reaches only the same NIC of other hosts"
        raise InputError(where, "has rings that change NICs between hosts", right)


def _check_rates(plan: ClusterPlan, where: str) -> None:
    others = [plan.whole_ring_gbps] if plan.whole_ring_gbps is not None else []
    for rate in (plan.rate_gbps, plan.stock.rate_gbps, *others):
        _check_rate(rate, where)
    if plan.bound_gbps is not None and not plan.rate_gbps <= plan.bound_gbps < MAX_GBPS:
        what = f"has rate {plan.rate_gbps} and bound {plan.bound_gbps}"
        raise InputError(where, what, "a bound is never below what was found")
    counts = (plan.sets_measured, plan.sets_remembered, plan.sets_by_symmetry)
    if min(counts) < 0:
        raise InputError(where, f"has {_number(min(counts))} sets", "a count is 0 or more")
    channels = plan.stock.channels
    if len(channels) != len(plan.cluster.classes) or min(channels) < 0:
        what = f"has stock channels {_few(channels)}"
        raise InputError(where, what, "each class has a number of them")


def _check_rate(rate: float, where: str) -> None:
    # The comparison is written so that NaN fails it.
    if not 0 < rate < MAX_GBPS:
        raise InputError(where, f"has a rate of {rate} GB/s", "rates are above 0, and finite")


def _number(value: int) -> str:
    """A number of any length as far as it fits a message."""
    return str(value)[:20]


def _few(numbers: Iterable[int]) -> str:
    known = list(numbers)
    more = ", ..." if len(known) > 64 else ""
    return f"[{', '.join(map(_number, known[:64]))}{more}]"
