"""Plan files: read, and checked beyond their types, as anybody may have edited them.

Rings follow from paths and the order of hosts: a chain that visits its GPUs once on every host is a
ring over all hosts. So NCCL's rings are checked part by part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from shlex import quote

import msgspec

from tccl_py.errors import InputError, check_type, require
from tccl_py.files import (
    check_types,
    check_version,
    decode_json,
    explain_errors,
    missing,
    read_text,
)
from tccl_py.model.cluster import check_cluster, shown
from tccl_py.model.machine import Machine
from tccl_py.model.rings import receiving_nic, sending_nic
from tccl_py.nccl.settings import check_pinned_env, check_settings
from tccl_py.nccl.view import leaves_as_named, usable_nics
from tccl_py.plan.chains import CHOICES, WORLD, HostPath, Number, PlanChain, PlanHop
from tccl_py.plan.plan import FORMAT_VERSION, Plan
from tccl_py.plan.staging import PLAN_FILE, check_if_listed, settle

_AGAIN, _RIGHT = "plan it again", "name a directory of `tccl plan`"


class _Head(msgspec.Struct):
    """The part of a plan file that all versions have."""

    format_version: Number


def load_plan(path: Path | str) -> Plan:
    """Read a plan file, or `plan.json` in a directory.

    Raises InputError: unreadable, of another format version, damaged, or parts that do not fit
    together.
    """
    check_type(path, "path", str, Path)
    path = plan_file(Path(path))
    text = read_text(path)
    # Another version may have other fields: it is refused by its head alone.
    head = decode_json(text, _Head, where=str(path), name="Plan")
    check_version(head.format_version, FORMAT_VERSION, path)
    return check_plan(decode_json(text, Plan, where=str(path)), where=str(path))


def is_directory(path: Path) -> bool:
    """Return whether a plan's path is a directory (InputError: the system does not take it)."""
    with explain_errors(path, "cannot be read", _RIGHT):
        return path.is_dir()


def plan_file(path: Path) -> Path:
    """Return the file of a plan: `path` itself, or plan.json in a directory.

    Raises InputError: the directory holds none, or its digest differs from the manifest.
    """
    if not is_directory(path):
        require(path.exists(), str(path), missing(path), _RIGHT)
        return path
    settle(path)
    if not (path / PLAN_FILE).exists():
        fault, right = f"holds no {PLAN_FILE}", _RIGHT
        if (env_file := path / "nccl" / "env.sh").is_file():
            fault += ", but files of `tccl export`"
            right = f"use them by `. {quote(str(env_file))}`, or {right}"
        raise InputError(str(path), fault, right)
    check_if_listed(path, PLAN_FILE)
    return path / PLAN_FILE


def check_plan(plan: Plan, *, where: str) -> Plan:
    """Return `plan` if its parts fit together, whose types are right.

    Raises InputError: an invalid cluster or settings, hosts missing, doubled or with wrong ranks,
    paths of no class, chains that do not visit the GPUs of their class once, flows that do not lead
    along their chain, NICs that NCCL would not use so, or a rate above its bound.
    """
    check_cluster(plan.cluster, where=where)
    _check_choices(plan, where)
    searched = [one.settings for name, one in plan.choices.items() if name != "default"]
    searched += [alternative.settings for alternative in plan.alternatives]
    for settings in (*searched, plan.choices["default"].settings):
        try:
            check_settings(settings)
        except InputError as error:
            raise InputError(f"{where} {error.where}", error.what, error.right) from error
    check_pinned_env(plan.pinned_env, searched, where)
    count = len(plan.cluster.classes)
    _require(len(plan.class_gpus) == count, where, f"has GPUs for {len(plan.class_gpus)} classes")
    fits = len(plan.class_nics) in (0, count)
    _require(fits, where, f"has NICs for {len(plan.class_nics)} classes")
    for number in range(len(plan.class_nics)):
        check_types(plan.settings_on(number, plan.settings), where=f"{where} class_nics")
    for node_class, gpus in zip(plan.cluster.classes, plan.class_gpus, strict=True):
        _check_some(gpus, node_class.machine.gpu_indices, f"{where}: class {node_class.name}")
    _require(bool(plan.paths), where, "has no paths through its hosts")
    for number, path in enumerate(plan.paths):
        _check_path(plan, path, f"{where}: path {number}")
    _check_count(plan.ring_count, plan.settings.channels, where)
    _check_hosts(plan, where)
    on_rails = plan.cluster.rails != "only" or not off_rails(plan)
    _require(on_rails, where, "has rings that change NICs between hosts")
    _check_orders(plan, where)
    answers = plan.sizes.values()
    for name in {plan.winner, *plan.sizes} - {None, *plan.choices}:
        raise InputError(where, f"names {name}, and has no such choice", _AGAIN)
    rows = {tuple((row.collective, row.bytes) for row in answer.rows) for answer in answers}
    _require(len(rows) < 2, where, "has choices for different message sizes")
    fits = plan.bound_gbps is None or plan.rate_gbps <= plan.bound_gbps
    _require(fits, where, f"has rate {plan.rate_gbps} and bound {plan.bound_gbps}")
    return plan


def _require(fits: bool, where: str, fault: str, right: str = _AGAIN) -> None:
    require(fits, where, fault, right)


def _check_choices(plan: Plan, where: str) -> None:
    """Check that the choices are in order, and that those that fail have no rate."""
    names = [name for name in CHOICES if name in plan.choices or name != "large-buffers"]
    fits = list(plan.choices.items()) == [(n, plan.choices.get(n)) for n in names]
    fits = fits and all(name == choice.name for name, choice in plan.choices.items())
    _require(fits, where, f"has choices {', '.join(plan.choices)}", f"{', '.join(names)}, in order")
    _require(bool(plan.choices["graph"].predicted_gbps), where, "has no rate of its rings")
    for name, choice in plan.choices.items():
        fits = name == "graph" or choice.fails is None or choice.predicted_gbps is None
        _require(fits, where, "has a rate of a choice that fails")


def off_rails(plan: Plan) -> bool:
    """Return whether a ring crosses to a NIC of the next host on another rail."""
    around = [plan.paths[host.path] for host in (*plan.hosts, plan.hosts[0])]
    classes = plan.cluster.classes
    return any(
        classes[here.node_class].rail(out.exit_nic or 0)
        != classes[there.node_class].rail(into.entry_nic or 0)
        for here, there in pairwise(around)
        for out, into in zip(here.chains, there.chains, strict=True)
    )


def _check_some(gpus: Sequence[int], available: Iterable[int], where: str) -> None:
    """Check that GPUs are some of the known ones, each once and in ascending order."""
    fits = tuple(gpus) == tuple(sorted(set(gpus) & set(available)))
    right = f"some of {_few(available)}, each once and in ascending order"
    _require(fits, where, f"is for GPUs {_few(gpus)}", right)


def _check_count(rings: int, channels: int, where: str) -> None:
    fits = rings > 0 and channels % rings == 0
    _require(fits, where, f"has {rings} rings for {channels} channels")


def _check_path(plan: Plan, path: HostPath, where: str) -> None:
    """Check chains: their GPUs, each hop, and the NICs by which NCCL enters and leaves the host."""
    fits = path.node_class < len(plan.cluster.classes)
    _require(fits, where, f"is of class {path.node_class}, which is not there")
    count = len(path.chains)
    fits = count == plan.ring_count
    _require(fits, where, f"has {count} chains, path 0 has {plan.ring_count}")
    machine, gpus = plan.cluster.classes[path.node_class].machine, plan.class_gpus[path.node_class]
    nics = usable_nics(machine, plan.settings_on(path.node_class, plan.settings))
    for ring, chain in enumerate(path.chains):
        place, sources = f"{where}, chain {ring}", [hop.source for hop in chain.hops]
        fits = bool(gpus) and sorted(chain.gpus) == list(gpus)
        _require(fits, place, f"visits GPUs {_few(chain.gpus)}", f"each of {_few(gpus)} once")
        fits = [hop.target for hop in chain.hops] == [*sources[1:], sources[0]]
        _require(fits, place, f"the hops over GPUs {_few(chain.gpus)} do not meet")
        for hop in chain.hops:
            _check_hop(hop, chain, machine, place)
        ends = {chain.entry_nic, chain.exit_nic}
        if len(plan.cluster.hosts) == 1:
            fits = WORLD not in sources and ends == {None}
            _require(fits, place, "leaves the only host")
            continue
        _require(sources[0] == WORLD and None not in ends, place, "stays on its host")
        fault = f"is entered by NIC {chain.entry_nic} and left by NIC {chain.exit_nic}"
        _require(ends.issubset(nics), place, fault, f"the settings let NCCL use {_few(nics)}")
        fits = len(ends) == 1 or plan.settings.cross_nic != 0
        _require(fits, place, fault, "with NCCL_CROSS_NIC=0 both are the same")
        pair, routed = (chain.entry_nic or 0, chain.exit_nic or 0), plan.settings.subnet_routing
        fits = leaves_as_named(chain.gpus, *pair, subnet_routing=routed)
        _require(fits, place, fault, "NCCL leaves one GPU by the NIC that it enters by")


def _check_hop(hop: PlanHop, chain: PlanChain, machine: Machine, where: str) -> None:
    """Check the ends of a hop's flow, and that all its places are on this host."""
    flow = hop.flow
    places = {
        *(f"{kind}{gpu.index}" for gpu in machine.gpus for kind in "GD"),
        *(f"C{numa.index}" for numa in machine.numa_nodes),
        *(f"N{nic.index}" for nic in machine.nics),
    }
    for place in map(str, flow.places):
        _require(place in places, where, f"has flow {shown(str(flow))}, and no {shown(place)}")
    nics = (
        chain.entry_nic if hop.source == WORLD else None,
        chain.exit_nic if hop.target == WORLD else None,
    )
    pairs = zip(hop.ends, nics, strict=True)
    ends = [f"N{nic}" if gpu == WORLD else f"G{gpu}" for gpu, nic in pairs]
    fits = (receiving_nic(flow), sending_nic(flow)) == nics
    fits = fits and [str(flow.source), str(flow.destination)] == ends
    fault = f"has a hop with flow {shown(str(flow))}"
    _require(fits, where, fault, f"it goes from {ends[0]} to {ends[1]}")


def _check_hosts(plan: Plan, where: str) -> None:
    """Check that the order has each host of the cluster once, with a path of its class."""
    order, names = Counter(plan.host_order), Counter(plan.cluster.names)
    unequal = next(iter((order - names) | (names - order)), None)
    _require(unequal is None, where, f"does not have host {shown(unequal or '')} once in its order")
    slots, classes = {h.name: h.slots for h in plan.cluster.hosts}, plan.cluster.host_classes
    rank = 0
    for host in plan.hosts:
        place = f"{where}: host {shown(host.name)}"
        _require(host.path < len(plan.paths), place, f"has path {host.path} of {len(plan.paths)}")
        number, gpus = plan.class_number(host), plan.gpus_of(host)
        fault = f"has a path of class {plan.cluster.classes[number].name}"
        _require(number == classes[host.name], place, fault)
        ranks = slots[host.name]
        _require(ranks == len(gpus), place, f"has {ranks} ranks for GPUs {_few(gpus)}")
        _require(host.first_rank == rank, place, f"begins with rank {host.first_rank}, not {rank}")
        rank += ranks
    _require(rank >= 2, where, f"is for {rank} GPU", "a ring joins 2 or more")


def _check_orders(plan: Plan, where: str) -> None:
    """Check the rings of smaller communicators, and of the choices without a graph file."""
    everyone = sorted(plan.orders[0])
    for choice in plan.choices.values():
        _check_rings(choice.rings or (), everyone, where)
    fits = plan.choices["graph"].rings == plan.channel_rings
    _require(fits, where, "has other rings for its graph file than its paths are")
    for subset in plan.subsets:
        _check_some(subset.gpus, everyone, where)
        _check_rings(subset.rings, subset.gpus, where)
        if subset.rings:
            _check_count(len(subset.rings), plan.settings.channels, where)
        nodes = {node.index for node in plan.machine.numa_nodes}
        fits = len(subset.nodes) in (0, len(subset.gpus)) and nodes.issuperset(subset.nodes)
        _require(fits, where, f"has NUMA nodes {_few(subset.nodes)}", f"some of {_few(nodes)}")


def _check_rings(rings: Iterable[Sequence[int]], gpus: Sequence[int], where: str) -> None:
    for ring in rings:
        fits = sorted(ring) == sorted(gpus)
        _require(fits, where, f"ring {_few(ring)} does not visit {_few(gpus)} once")


def _few(numbers: Iterable[int]) -> str:
    listed = list(numbers)
    more = ", ..." if len(listed) > 64 else ""
    return f"[{', '.join(map(str, listed[:64]))}{more}]"
