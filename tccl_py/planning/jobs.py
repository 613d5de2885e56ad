"""The plan of a job over some hosts of a planned cluster, by its tables: nothing is measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path, PurePosixPath

from msgspec.structs import replace

from tccl_py.errors import InputError, SearchError
from tccl_py.files import pick
from tccl_py.merge.rings import uplink_limit
from tccl_py.model.cluster import (
    Cluster,
    Host,
    NodeClass,
    cables_among,
    class_name,
    compress,
    gpus_text,
    shown,
)
from tccl_py.model.measurement import mark
from tccl_py.model.reports import restrict
from tccl_py.model.symmetry import Permutation, automorphisms, mapping, onto, relabelled_hop
from tccl_py.model.transfer import index_of
from tccl_py.nccl.connections import default_channels
from tccl_py.nccl.graph_search import DefaultChain, DefaultRings, default_rings_or_sys
from tccl_py.nccl.network import chain_hop_space
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.view import view
from tccl_py.plan.chains import Choice, ChoiceName
from tccl_py.plan.host_files import order_files
from tccl_py.plan.machine_files import conf_text, env_text
from tccl_py.plan.plan import Plan
from tccl_py.plan.retuning import retune
from tccl_py.plan.staging import write_new_directory
from tccl_py.plan.tables import ClassRates, KeptTable, read_tables
from tccl_py.planning.cables import failing
from tccl_py.planning.join import plan_over
from tccl_py.planning.request import PlanRequest
from tccl_py.readers.hosts import HostSlots

_Key = tuple[int, tuple[int, ...]]
"""The number of a class, and the GPUs of a job on its hosts."""
_MOST_TRIED = 256
"""Mappings of a machine that are tried."""
_OF_THE_JOB = ("cross_nic", "ib_hca", "socket_ifname", "algo")
"""Settings that follow from a job's rings and hosts."""


class NoTableError(InputError):
    """A job uses GPUs of a class that no table is for."""


def plan_of_job(
    plan: Plan,
    directory: Path,
    hosts: Sequence[HostSlots],
    gpus: Mapping[str, tuple[int, ...]] | None = None,
    *,
    keep_order: bool = False,
) -> Plan:
    """Return a job's plan.

    Hosts of a class with other GPUs in the job are of another class of the job.

    Args:
        plan: of a cluster, in `directory` with its tables.
        directory: where the tables are.
        hosts: of the job, in rank order; slots are the number of lowest GPUs, None is `gpus`.
        gpus: of the job on a host, by its name; hosts that are not named use the plan's GPUs.
        keep_order: leave the hosts in the given order.

    Raises NoTableError: no table of a host's class is for its GPUs; see `write_bounded_job`.
    InputError: a plan of one host, an unknown host, or fewer than 2 hosts. SearchError: no ring
    exists.
    """
    keys, cluster = job_cluster(plan, hosts, gpus or {})
    classes = plan.cluster.classes
    tables = read_tables(directory, [classes[number] for number in {number for number, _ in keys}])
    nodes = [
        ClassRates(node_class, _table(tables, classes[number], indices))
        for node_class, (number, indices) in zip(cluster.classes, keys, strict=True)
    ]
    request = PlanRequest(
        strategy=plan.strategy,
        keep_order=keep_order,
        ib_gid_index=plan.settings.ib_gid_index,
        subnet_prefix=plan.settings.subnet_prefix,
        pinned_env=plan.pinned_env,
    )
    return plan_over(cluster, nodes, request)


def as_achieved(
    made: Plan, plan: Plan, achieved: Mapping[ChoiceName, float], winner: ChoiceName
) -> Plan:
    """Return a job's plan with what jobs over the whole plan have shown.

    Each choice gets the share of its prediction that the plan's choice achieved, under the settings
    of a tuned plan's choice. The job takes the winner, or variables where its rings cannot be run
    under the winner's settings.
    """
    planned, variables = plan.choices, made.choices["variables"]
    shares = {n: got / rate for n, got in achieved.items() if (rate := planned[n].rate_gbps)}
    # Equal variables share an arm with default NCCL.
    shares.setdefault("variables", shares.get("default", 1.0))
    winner, tuned = winner if winner in made.choices else "default", made
    if plan.winner is not None:
        try:
            if plan.settings.channels % made.ring_count:
                raise SearchError("rings have unequal channels")
            tuned = retune(made, replace(plan.settings, **pick(made.settings, *_OF_THE_JOB)))
        except (InputError, SearchError):
            winner = "variables" if winner == "graph" else winner
    settings = replace(planned["variables"].settings, **pick(variables.settings, *_OF_THE_JOB))
    note = planned["variables"].note or variables.note
    tuned = tuned.with_choice("variables", settings=settings, note=note)
    for name, choice in made.choices.items():
        rate = choice.rate_gbps and choice.rate_gbps * shares.get(name, 1.0)
        rate = rate or (made.rate_gbps if name == "graph" else None)
        tuned = tuned.with_choice(name, predicted_gbps=rate)
    listed = ", ".join(f"{share:.2f} ({name})" for name, share in shares.items())
    return replace(
        tuned,
        bound_gbps=None,
        proven=False,
        bound_assumptions=(),
        winner=winner,
        notices=(*made.notices, f"rates are predictions times what jobs of the plan got: {listed}"),
    )


def job_cluster(
    plan: Plan, hosts: Sequence[HostSlots], gpus: Mapping[str, tuple[int, ...]]
) -> tuple[list[_Key], Cluster]:
    """Return the number of a class and its GPUs for each of a job's classes, and the job's hosts.

    Raises InputError: as `plan_of_job`.
    """
    unknown = sorted(gpus.keys() - {host.name for host in hosts})
    if unknown:
        raise InputError("`gpus`", f"names {shown(unknown[0])}", "name hosts of `hosts`")
    used = {host.name: _class_and_gpus(plan, host, gpus.get(host.name)) for host in hosts}
    if len(hosts) < 2:
        raise InputError("`hosts`", f"names {len(hosts)} host", "plan on it by `tccl plan DIR`")
    keys = list(dict.fromkeys(used.values()))
    of_class = Counter(number for number, _ in keys)
    classes: list[NodeClass] = []
    for number, ids in keys:
        base = plan.cluster.classes[number]
        text = base.name if of_class[number] == 1 else f"{base.name}-gpus-{gpus_text(ids)}"
        name = class_name(text, {c.name for c in classes})
        classes.append(replace(base, name=name))
    numbers = {key: number for number, key in enumerate(keys)}
    tree = plan.cluster.switches
    return keys, Cluster(
        hosts=tuple(Host(name=n, node_class=numbers[k], slots=len(k[1])) for n, k in used.items()),
        classes=tuple(classes),
        switches=None if tree is None else restrict(tree, used),
        rails=plan.cluster.rails,
        cables=cables_among(plan.cluster.cables, used),
    )


def _class_and_gpus(plan: Plan, host: HostSlots, ids: tuple[int, ...] | None) -> _Key:
    """Return the class of a job's host and the job's GPUs on it, `some` if they are named."""
    number = plan.cluster.host_classes.get(host.name)
    if number is None:
        right = f"name hosts of the plan, {shown(compress(plan.cluster.names))}, or plan again"
        raise InputError("`hosts`", f"host {shown(host.name)} is not in the plan", right)
    machine = plan.cluster.classes[number].machine
    every = machine.gpu_indices
    if ids is None:
        ids = plan.class_gpus[number] if host.slots is None else every[: host.slots]
    for gpu in ids:
        machine.gpu(gpu)
    if not ids or host.slots not in (None, len(ids)):
        fault = f"has {len(every)} GPUs, and {host.slots or len(ids)} ranks for {len(ids)} of them"
        raise InputError(f"host {host.name}", fault, "name GPUs that it has, one for each rank")
    return number, tuple(sorted(ids))


def _table(tables: Collection[ClassRates], host: NodeClass, gpus: tuple[int, ...]) -> KeptTable:
    """Return the table of a class for some GPUs, or that of GPUs which equal them."""
    of_class = [table.kept for table in tables if table.node_class.name == host.name]
    candidates = [table for table in of_class if len(table.gpus) == len(gpus)]
    equal = (table for table in candidates if table.gpus == gpus)
    images = (image_of(table, host, gpus) for table in candidates)
    match = next(equal, None) or next(filter(None, images), None)
    if match is None:
        available = ", ".join(gpus_text(table.gpus) for table in of_class)
        fault = f"has no table for GPUs {gpus_text(gpus)}, but for {available}"
        # A number alone would be a count.
        listed = gpus_text(gpus) if len(gpus) > 1 else f"{gpus[0]}-{gpus[0]}"
        by = f"tccl plan DIR --gpus-per-job {listed}"
        right = f"measure them by `{by}` under mpirun, or of a model with --simulate and --hosts"
        if not available:
            fault, right = "has no table", "name the cluster's plan: a job's files have no tables"
        raise NoTableError(f"class {host.name}", fault, right)
    return match


# Tables for GPUs that a machine's symmetry exchanges with the measured ones.


def image_of(table: KeptTable, host: NodeClass, gpus: tuple[int, ...]) -> KeptTable | None:
    """Return a class's table for other GPUs, by a symmetry of the machine; None if there is none.

    NCCL has to move every hop as the mapped one, and to choose the mapped chains by itself.
    """
    old, new = (_rings_of(host, table.default_settings, ids) for ids in (table.gpus, gpus))
    rated = table.default.rate_gbps is not None
    unlike = replace(old, rings=new.rings, chains=new.chains) != new
    if unlike or (rated and table.default.settings != table.rated_default.settings):
        return None
    symmetry = automorphisms(host.machine, host.knowledge)
    nics = [f"N{nic}" for nic in table.nics]
    fits = onto(symmetry, [f"G{gpu}" for gpu in table.gpus], [f"G{gpu}" for gpu in gpus])
    for row in symmetry.elements[fits & onto(symmetry, nics, nics)][:_MOST_TRIED]:
        names = mapping(symmetry, row)
        if _are_images(old.chains, new.chains, names):
            image = _relabel(table, host, gpus, names)
            if _is_possible(image, host):
                return image
    return None


def _are_images(
    chains: Sequence[DefaultChain], images: Sequence[DefaultChain], names: Permutation
) -> bool:
    """Return whether chains are mapped to others, whichever channels have these."""
    index = partial(_index, names)
    mapped = (
        DefaultChain(index("N", into), tuple(index("G", gpu) for gpu in gpus), index("N", out))
        for into, gpus, out in chains
    )
    return Counter(mapped) == Counter(images)


def _index(names: Permutation, kind: str, number: int) -> int:
    return index_of(names[f"{kind}{number}"])


def _rings_of(host: NodeClass, settings: Settings, gpus: tuple[int, ...]) -> DefaultRings:
    return default_rings_or_sys(view(host.machine, host.knowledge, settings, gpus=gpus), nodes=2)


def _relabel(
    table: KeptTable, host: NodeClass, gpus: tuple[int, ...], names: Permutation
) -> KeptTable:
    """Return a table with all GPUs, NICs and NUMA nodes mapped."""
    index = partial(_index, names)

    def map_own(choice: Choice | None) -> Choice | None:
        """Return NCCL's own chains on the other GPUs; None if they are not the mapped ones."""
        if choice is None or choice.rings is None:
            return choice
        old, new = (_rings_of(host, choice.settings, ids) for ids in (table.gpus, gpus))
        same = _are_images(old.chains, new.chains, names)
        return replace(choice, rings=new.rings) if same else None

    pairs = [sorted((index("N", a), index("N", b)) for a, b in row.pairs) for row in table.answers]
    note = (
        f"{table.node_class}, GPUs {gpus_text(gpus)}: by the rates of GPUs "
        f"{gpus_text(table.gpus)}, which the machine's symmetry maps to them"
    )
    return replace(
        table,
        gpus=gpus,
        rated_default=map_own(table.rated_default) or table.rated_default,
        default=map_own(table.default) or table.default,
        railed=map_own(table.railed),
        hops=tuple(relabelled_hop(hop, names) for hop in table.hops),
        answers=tuple(
            replace(row, pairs=tuple(nics)) for row, nics in zip(table.answers, pairs, strict=True)
        ),
        notices=(*table.notices, note),
    )


def _is_possible(table: KeptTable, host: NodeClass) -> bool:
    """Return whether NCCL moves every hop of a mapped table as the table has it."""
    used: dict[tuple[int, int], set[int]] = {}
    for answer in table.answers:
        used.setdefault((answer.under, len(answer.pairs)), set()).update(*answer.chains)
    for (under, count), numbers in used.items():
        host_view = view(host.machine, host.knowledge, table.settings[under], gpus=table.gpus)
        space = chain_hop_space(host_view, nics=table.nics, chains_in_set=count)
        hops = (table.hops[n] for n in numbers)
        if not all(hop in space.between(hop.source, hop.target) for hop in hops):
            return False
    return True


# Jobs over GPUs that no table is for: default NCCL, with an upper bound in place of a rate.


_MBPS = 8_000
"""Of a GB/s."""


def write_bounded_job(
    plan: Plan,
    directory: Path,
    hosts: Sequence[HostSlots],
    gpus: Mapping[str, tuple[int, ...]],
    *,
    output: Path,
    missing: NoTableError,
) -> tuple[int, str, Settings]:
    """Write files of default NCCL for a job that `plan_of_job` refused, as tables are `missing`.

    Return the number of files in the new directory `output`, the rate in words, and the settings.
    Raises InputError: a class without any table, hosts that do not connect, or `output` exists, or
    cannot be written.
    """
    keys, cluster = job_cluster(plan, hosts, gpus)
    tables = [read_tables(directory, [plan.cluster.classes[number]]) for number, _ in keys]
    if not all(tables):
        raise missing
    sets = [indices for _, indices in keys]
    settings = _connecting(cluster, sets, tables[0][0].kept.default_settings)
    bound = bound_of(cluster, sets, tables, settings)
    most = "" if bound is None else f", at most {bound:.2f} GB/s"
    basis = mark(simulated=plan.simulated, assumed=False, dry_run=plan.dry_run)
    rate = f"not known{most} (tables {basis})"
    named = [(host.name, sets[host.node_class]) for host in cluster.hosts]

    def files_of(place: Path) -> dict[str, str]:
        folder = PurePosixPath(place.resolve() / "nccl")
        texts = {
            "env.sh": env_text(settings, None, provenance=rate),
            "nccl.conf": conf_text(settings, provenance=rate),
            **order_files(named, folder, provenance=rate),
        }
        return {f"nccl/{name}": text for name, text in texts.items()}

    return write_new_directory(output, files_of), rate, settings


def _connecting(cluster: Cluster, gpus: Sequence[tuple[int, ...]], default: Settings) -> Settings:
    """Return default NCCL's settings, or those that keep rings on their rails if only these do.

    Raises InputError: NCCL connects the hosts with neither.
    """
    note = ""
    for settings in (default, replace(default, cross_nic=0)):
        channels = []
        for host, ids in zip(cluster.classes, gpus, strict=True):
            own = _rings_of(host, settings, ids)
            topo = view(host.machine, host.knowledge, own.settings, gpus=ids)
            channels.append([default_channels(topo, own.chains, own.cross_nic)])
        choice = Choice(name="default", settings=settings)
        choice = failing(choice, cluster, channels)
        if not choice.fails:
            return settings
        note = note or choice.note
    raise InputError("`hosts`", f"do not connect without a plan: {note}", "plan for these GPUs")


def bound_of(
    cluster: Cluster,
    gpus: Sequence[tuple[int, ...]],
    tables: Sequence[Sequence[ClassRates]],
    settings: Settings,
) -> float | None:
    """Return an upper bound on NCCL's bandwidth in a job, GB/s; None if nothing bounds it.

    `cluster` is the job's, its hosts in rank order; of its classes are the GPUs, and all tables. A
    NIC carries no more than its port. Tables for more or fewer GPUs bound nothing: chains over them
    have other hops, and only a set of the same transfers bounds one with further transfers.
    """
    bounds = [inf if cluster.switches is None else uplink_limit(cluster.switches, cluster.names)]
    for host, indices, of_class in zip(cluster.classes, gpus, tables, strict=True):
        equal = [table for table in of_class if table.gpus == indices]
        rated = [t.default if settings.cross_nic is None else t.kept.railed for t in equal]
        bounds += [own.rate_gbps for own in rated if own is not None and own.rate_gbps is not None]
        ports = {nic.index: nic.speed_mbps / _MBPS or inf for nic in host.machine.nics}
        chains = _rings_of(host, settings, indices).chains
        for ends in ([chain.entry for chain in chains], [chain.exit for chain in chains]):
            bounds += [ports[nic] * len(ends) / count for nic, count in Counter(ends).items()]
    least = min(bounds)
    return least if least < inf else None
