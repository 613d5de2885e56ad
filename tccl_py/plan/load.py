"""Plan files: read, and checked beyond their types, as anybody may have edited them.

Rings follow from paths and the order of hosts: a chain that visits its GPUs once on every host is a
ring over all hosts. So NCCL's rings are checked part by part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from tccl_py.errors import InputError, require
from tccl_py.files import decode_json, read_text
from tccl_py.model.cluster import check_cluster, shown
from tccl_py.model.machine import Machine
from tccl_py.model.transfer import receiving_nic, sending_nic
from tccl_py.nccl.settings import check_settings
from tccl_py.nccl.system import PathType
from tccl_py.nccl.variables import check_pinned_env
from tccl_py.nccl.view import leaves_as_named, may_change_rails, usable_nics
from tccl_py.plan.plan import FORMAT_VERSION, WORLD, HostPath, Plan, PlanChain, PlanHop
from tccl_py.plan.staging import PLAN_FILE, check_if_listed, settle

MAX_GBPS = 1e6
_AGAIN = "plan it again"


class _Head(msgspec.Struct):
    """The part of a plan file that all versions have."""

    format_version: int
    cluster: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def load_plan(path: Path | str) -> Plan:
    """Read a plan file, or `plan.json` in a directory.

    Raises InputError: unreadable, of another format version, damaged, or parts that do not fit
    together.
    """
    path = plan_file(Path(path))
    text = read_text(path)
    # Another version may have other fields: it is refused by its head alone.
    head = decode_json(text, _Head, where=str(path), name="Plan")
    if head.format_version != FORMAT_VERSION or head.cluster is msgspec.UNSET:
        raise InputError(
            str(path),
            f"is of an earlier program (format version {_number(head.format_version)})",
            f"this program reads version {FORMAT_VERSION}: plan again with --force; what the "
            "journal beside it has is not measured again",
        )
    return check_plan(decode_json(text, Plan, where=str(path)), where=str(path))


def plan_file(path: Path) -> Path:
    """Return the file of a plan: `path` itself, or plan.json in a directory.

    Raises InputError: the directory holds none, or its digest differs from the manifest.
    """
    if not path.exists():
        raise InputError(str(path), "does not exist", "name a directory of `tccl plan`")
    if not path.is_dir():
        return path
    settle(path)
    if not (path / PLAN_FILE).exists():
        raise InputError(str(path), f"holds no {PLAN_FILE}", "name a directory of `tccl plan`")
    check_if_listed(path, PLAN_FILE)
    return path / PLAN_FILE


def check_plan(plan: Plan, *, where: str) -> Plan:
    """Return `plan` if its parts fit together.

    Raises InputError: an invalid cluster or settings, hosts missing, doubled or with wrong ranks,
    paths of no class, chains that do not visit the GPUs of their class once, flows that do not lead
    along their chain, NICs that NCCL would not use so, or rates out of range.
    """
    check_cluster(plan.cluster, where=where)
    searched = (plan.settings, plan.variables.settings, *(a.settings for a in plan.alternatives))
    for settings in (*searched, plan.stock.settings):
        try:
            check_settings(settings)
        except InputError as error:
            raise InputError(f"{where} {error.where}", error.what, error.right) from error
    check_pinned_env(plan.pinned_env, searched, where)
    _check_gpus(plan, where)
    _check_paths(plan, where)
    _check_hosts(plan, where)
    right = "on this network a NIC reaches only the same NIC of other hosts"
    on_rails = plan.cluster.rails != "only" or not plan.off_rails
    require(on_rails, where, "has rings that change NICs between hosts", right)
    _check_orders(plan, where)
    _check_rates(plan, where)
    return plan


def _check_gpus(plan: Plan, where: str) -> None:
    classes, known = plan.cluster.classes, len(plan.class_gpus)
    what = f"has GPUs for {known} classes of hosts"
    require(known == len(classes), where, what, f"there are {len(classes)}")
    for one, gpus in zip(classes, plan.class_gpus, strict=True):
        _check_some(gpus, one.machine.gpu_indices, f"{where}: class {one.name}")


def _check_some(gpus: Sequence[int], known: Sequence[int], where: str) -> None:
    fits = list(gpus) == sorted(set(gpus)) and set(gpus) <= set(known)
    right = f"some of {_few(known)}, each once and in ascending order"
    require(fits, where, f"is for GPUs {_few(gpus)}", right)


def _check_paths(plan: Plan, where: str) -> None:
    require(bool(plan.paths), where, "has no paths through its hosts", _AGAIN)
    for number, path in enumerate(plan.paths):
        place, count = f"{where}: path {number}", len(plan.cluster.classes)
        fits, what = 0 <= path.node_class < count, f"is of class {_number(path.node_class)}"
        require(fits, place, what, f"there are {count} classes, counted from 0")
        what = f"has {len(path.chains)} chains, path 0 has {plan.ring_count}"
        fits = len(path.chains) == plan.ring_count
        require(fits, place, what, "every ring has a chain in each")
        for name in (path.type_intra, *([path.type_inter] if plan.is_cluster else [])):
            right = f"one of {', '.join(PathType.__members__)}"
            require(name in PathType.__members__, place, f"has path type {shown(name)}", right)
        for ring, chain in enumerate(path.chains):
            _check_chain(plan, path, chain, f"{place}, chain {ring}")
    _check_count(plan.ring_count, plan.settings.channels, where)


def _check_count(rings: int, channels: int, where: str) -> None:
    fits, what = rings > 0 and channels % rings == 0, f"has {rings} rings for {channels} channels"
    require(fits, where, what, "every ring has as many channels as any other")


def _check_chain(plan: Plan, path: HostPath, chain: PlanChain, where: str) -> None:
    """Check each hop of a chain, its NICs, and that it visits the GPUs of its class once."""
    gpus = plan.class_gpus[path.node_class]
    machine = plan.cluster.classes[path.node_class].machine
    right = f"those of its class are {_few(gpus)}, each once"
    fits = bool(gpus) and sorted(chain.gpus) == list(gpus)
    require(fits, where, f"visits GPUs {_few(chain.gpus)}", right)
    sources = [hop.source for hop in chain.hops]
    fits = [hop.target for hop in chain.hops] == [*sources[1:], sources[0]]
    require(fits, where, f"the hops over GPUs {_few(chain.gpus)} do not meet", _AGAIN)
    for hop in chain.hops:
        _check_hop(hop, chain, machine, where)
        _check_rate(hop.gbps, where)
    if plan.is_cluster:
        _check_open(plan, chain, machine, where)
    else:
        fits = WORLD not in sources and chain.entry_nic is None and chain.exit_nic is None
        require(fits, where, "leaves the only host", "rings of one host close inside it")


def _check_hop(hop: PlanHop, chain: PlanChain, machine: Machine, where: str) -> None:
    """Check the ends of a hop's flow, and that all its places are on this host."""
    flow = hop.flow
    known = {
        *(f"{kind}{gpu.index}" for gpu in machine.gpus for kind in "GD"),
        *(f"C{numa.index}" for numa in machine.numa_nodes),
        *(f"N{nic.index}" for nic in machine.nics),
    }
    for one in flow.transfers:
        for place in (one.source, one.executor, one.destination):
            what = f"has flow {shown(str(flow))}, and no {shown(str(place))}"
            right = f"name what machine {shown(machine.name)} has"
            require(str(place) in known, where, what, right)
    nics = receiving_nic(flow), sending_nic(flow)
    if hop.source == WORLD:
        fits = nics == (chain.entry_nic, None) and str(flow.destination) == f"G{hop.target}"
        right = f"it enters by NIC {chain.entry_nic} at GPU {_number(hop.target)}"
    elif hop.target == WORLD:
        fits = nics == (None, chain.exit_nic) and str(flow.source) == f"G{hop.source}"
        right = f"it leaves from GPU {_number(hop.source)} by NIC {chain.exit_nic}"
    else:
        ends = (str(flow.source), str(flow.destination))
        fits = nics == (None, None) and ends == (f"G{hop.source}", f"G{hop.target}")
        right = f"it goes from GPU {_number(hop.source)} to GPU {_number(hop.target)}"
    require(fits, where, f"has a hop with flow {shown(str(flow))}", right)


def _check_open(plan: Plan, chain: PlanChain, machine: Machine, where: str) -> None:
    """Check that NCCL would enter and leave a host by the NICs of a chain."""
    if chain.hops[0].source != WORLD or chain.entry_nic is None or chain.exit_nic is None:
        raise InputError(where, "stays on its host", "a ring over hosts enters and leaves each")
    nics = usable_nics(machine, plan.settings)
    for nic in (chain.entry_nic, chain.exit_nic):
        right = f"the settings let NCCL use {_few(nics)}"
        require(nic in nics, where, f"uses NIC {_number(nic)}", right)
    ends = f"is entered by NIC {chain.entry_nic} and left by NIC {chain.exit_nic}"
    fits = leaves_as_named(chain.gpus, chain.entry_nic, chain.exit_nic)
    require(fits, where, ends, "NCCL leaves one GPU by the NIC that it enters by")
    fits = chain.entry_nic == chain.exit_nic or may_change_rails(plan.settings)
    require(fits, where, ends, "with NCCL_CROSS_NIC=0 both are the same")


def _check_hosts(plan: Plan, where: str) -> None:
    slots = {host.name: host.slots for host in plan.cluster.hosts}
    classes = plan.cluster.host_classes
    seen: set[str] = set()
    rank = 0
    for host in plan.hosts:
        place = f"{where}: host {shown(host.name)}"
        require(host.name in slots, place, "is not in the cluster", "name its hosts")
        require(host.name not in seen, place, "is in the order twice", "once is right")
        seen.add(host.name)
        right = f"there are {len(plan.paths)}, counted from 0"
        require(0 <= host.path < len(plan.paths), place, f"has path {_number(host.path)}", right)
        number, own = plan.class_number(host), classes[host.name]
        what = f"has a path of class {plan.cluster.classes[number].name}"
        require(number == own, place, what, f"it is of class {plan.cluster.classes[own].name}")
        gpus = plan.class_gpus[number]
        what = f"has {slots[host.name]} ranks for GPUs {_few(gpus)}"
        require(slots[host.name] == len(gpus), place, what, "a GPU has one rank")
        what = f"begins with rank {_number(host.first_rank)}"
        require(host.first_rank == rank, place, what, f"the hosts before it have {rank} ranks")
        rank += len(gpus)
    missing = next((name for name in slots if name not in seen), None)
    right = "the order has every host of the cluster"
    require(missing is None, where, f"host {missing} is missing from the order", right)
    require(rank >= 2, where, f"is for {rank} GPU", "a ring joins 2 or more")


def _check_orders(plan: Plan, where: str) -> None:
    """Check the rings of smaller communicators, and of the choices without a graph file."""
    everyone = range(plan.cluster.ranks) if plan.is_cluster else plan.gpus
    for choice in (plan.stock, plan.variables):
        for ring in choice.rings:
            _check_order(ring, everyone, where)
    for subset in plan.subsets:
        _check_some(subset.gpus, everyone, where)
        for ring in subset.rings:
            _check_order(ring, subset.gpus, where)
        _check_count(len(subset.rings), plan.settings.channels, where)
        known = {node.index for node in plan.machine.numa_nodes}
        fits = len(subset.nodes) in (0, len(subset.gpus)) and known.issuperset(subset.nodes)
        require(fits, where, f"has NUMA nodes {_few(subset.nodes)}", f"some of {_few(known)}")


def _check_order(order: Sequence[int], gpus: Sequence[int], where: str) -> None:
    what = f"ring {_few(order)} does not visit {_few(gpus)} once"
    require(sorted(order) == sorted(gpus), where, what, _AGAIN)


def _check_rates(plan: Plan, where: str) -> None:
    rates = [plan.rate_gbps, plan.limit_gbps, plan.whole_ring_gbps]
    rates += [subset.rate_gbps for subset in plan.subsets]
    for choice in plan.choices.values():
        rates += [choice.rate_gbps, choice.achieved_gbps]
    for rate in rates:
        if rate is not None:
            _check_rate(rate, where)
    fits = plan.bound_gbps is None or plan.rate_gbps <= plan.bound_gbps < MAX_GBPS
    what = f"has rate {plan.rate_gbps} and bound {plan.bound_gbps}"
    require(fits, where, what, "a bound is never below what was found")
    least = min(plan.sets_measured, plan.sets_remembered, plan.sets_by_symmetry)
    require(least >= 0, where, f"has {_number(least)} sets", "a count is 0 or more")


def _check_rate(rate: float, where: str) -> None:
    fits, right = 0 < rate < MAX_GBPS, "rates are above 0, and finite"
    require(fits, where, f"has a rate of {rate} GB/s", right)


def _number(value: int) -> str:
    """A number of any length as far as it fits a message."""
    return str(value)[:20]


def _few(numbers: Iterable[int]) -> str:
    known = list(numbers)
    more = ", ..." if len(known) > 64 else ""
    return f"[{', '.join(map(_number, known[:64]))}{more}]"
