"""The plan of a job over some hosts of a planned cluster, by its tables: nothing is measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from tccl_py.errors import InputError, SearchError
from tccl_py.merge.rings import uplink_limit
from tccl_py.model.cluster import Cluster, Host, NodeClass, class_name, shown
from tccl_py.model.reports import restricted
from tccl_py.model.symmetry import Permutation, automorphisms, mapping, onto, relabelled_hop
from tccl_py.nccl.graph_search import DefaultChain, default_choice_or_sys
from tccl_py.nccl.network import NicPair, chain_hop_space
from tccl_py.nccl.view import view
from tccl_py.plan.cluster_choices import plan_over
from tccl_py.plan.directory import conf_text, env_text
from tccl_py.plan.parts import ChoiceName, PlanChoice
from tccl_py.plan.plan import Plan
from tccl_py.plan.staging import write_new_directory
from tccl_py.plan.tables import (
    ChainSet,
    HostTable,
    KeptChains,
    KeptTable,
    OwnChains,
    gpus_text,
    read_tables,
)
from tccl_py.plan.variants import retuned
from tccl_py.plan.writing import order_files
from tccl_py.readers.hosts import HostSlots, compress

_Key = tuple[int, tuple[int, ...]]
"""The number of a class, and the GPUs of a job on its hosts."""
_MOST_TRIED = 256
"""Mappings of a machine that are tried."""
_OF_THE_JOB = ("cross_nic", "ib_hca", "socket_ifname")
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

    Raises:
        NoTableError: no table of a host's class is for its GPUs; see `write_bounded_job`.
        InputError: a plan of one host, an unknown host, or fewer than 2 hosts.
        SearchError: no ring exists.
    """
    keys, cluster = job_cluster(plan, hosts, gpus or {})
    known = plan.cluster.classes
    tables = read_tables(directory, [known[number] for number in {number for number, _ in keys}])
    nodes = [
        HostTable(one, _table(tables, known[number], some))
        for one, (number, some) in zip(cluster.classes, keys, strict=True)
    ]
    return plan_over(
        cluster,
        nodes,
        strategy=plan.strategy,
        keep_order=keep_order,
        ib_gid_index=plan.settings.ib_gid_index,
        pinned_env=plan.pinned_env,
    )


def as_achieved(
    made: Plan, plan: Plan, achieved: Mapping[ChoiceName, float], winner: ChoiceName
) -> Plan:
    """Return a job's plan with what jobs over the whole plan have shown.

    Each choice gets the share of its prediction that the plan's choice achieved, under the settings
    of a tuned plan's choice. The job takes the winner, or variables where its rings cannot be run
    under the winner's settings.
    """
    shares = {
        name: achieved[name] / choice.rate_gbps
        for name, choice in plan.choices.items()
        if name in achieved and choice.rate_gbps
    }
    # Equal variables share an arm with default NCCL.
    shares.setdefault("variables", shares.get("default", 1.0))
    replace = msgspec.structs.replace

    def shared(name: ChoiceName, choice: PlanChoice, **fields: Any) -> PlanChoice:
        rate = choice.rate_gbps and choice.rate_gbps * shares.get(name, 1.0)
        return replace(choice, rate_gbps=rate, **fields)

    tuned = made
    if plan.winner is not None:
        nics = {name: getattr(made.settings, name) for name in _OF_THE_JOB}
        try:
            if plan.settings.channels % made.ring_count:
                raise SearchError("rings have unequal channels")
            tuned = retuned(made, replace(plan.settings, **nics))
        except (InputError, SearchError):
            winner = "variables" if winner == "graph" else winner
    told = ", ".join(f"{share:.2f} ({name})" for name, share in shares.items())
    return replace(
        tuned,
        rate_gbps=made.rate_gbps * shares.get("graph", 1.0),
        bound_gbps=None,
        proven=False,
        stock=shared("default", made.stock),
        variables=shared(
            "variables",
            made.variables,
            settings=plan.variables.settings,
            note=plan.variables.note or made.variables.note,
        ),
        winner=winner,
        notices=(*made.notices, f"rates are predictions times what jobs of the plan got: {told}"),
    )


def job_cluster(
    plan: Plan, hosts: Sequence[HostSlots], gpus: Mapping[str, tuple[int, ...]]
) -> tuple[list[_Key], Cluster]:
    """Return the number of a class and its GPUs for each of a job's classes, and the job's hosts.

    Raises InputError: as `plan_of_job`.
    """
    used = _used(plan, hosts, gpus)
    keys = list(dict.fromkeys(used.values()))
    numbers = {key: number for number, key in enumerate(keys)}
    classes: list[NodeClass] = []
    for number, some in keys:
        known = plan.cluster.classes[number]
        alone = sum(other == number for other, _ in keys) == 1
        text = known.name if alone else f"{known.name}-gpus-{gpus_text(some)}"
        name = class_name(text, {one.name for one in classes})
        classes.append(msgspec.structs.replace(known, name=name))
    tree = plan.cluster.switches
    placed = tuple(
        Host(name=name, node_class=numbers[key], slots=len(key[1])) for name, key in used.items()
    )
    switches = None if tree is None else restricted(tree, used)
    return keys, Cluster(
        hosts=placed, classes=tuple(classes), switches=switches, rails=plan.cluster.rails
    )


def _used(
    plan: Plan, hosts: Sequence[HostSlots], gpus: Mapping[str, tuple[int, ...]]
) -> dict[str, _Key]:
    """Return the class and the GPUs of each host of a job."""
    names = {host.name for host in hosts}
    odd = next((name for name in gpus if name not in names), None)
    if odd is not None:
        raise InputError("--gpus", f"names {shown(odd)}", "name hosts of --hosts")
    found: dict[str, _Key] = {}
    for host in hosts:
        number = plan.cluster.host_classes.get(host.name)
        if number is None:
            right = f"name hosts of the plan, {shown(compress(plan.cluster.names))}, or plan again"
            raise InputError("--hosts", f"host {shown(host.name)} is not in the plan", right)
        found[host.name] = number, _gpus(plan, number, host, gpus.get(host.name))
    if len(hosts) < 2:
        raise InputError("--hosts", f"names {len(hosts)} host", "plan on it by `tccl plan -o DIR`")
    return found


def _gpus(
    plan: Plan, number: int, host: HostSlots, given: tuple[int, ...] | None
) -> tuple[int, ...]:
    machine = plan.cluster.classes[number].machine
    known, some = machine.gpu_indices, given
    if some is None:
        some = plan.class_gpus[number] if host.slots is None else known[: host.slots]
    for gpu in some:
        machine.gpu(gpu)
    if not some or host.slots not in (None, len(some)):
        what = f"has {len(known)} GPUs, and {host.slots or len(some)} ranks for {len(some)} of them"
        raise InputError(f"host {host.name}", what, "name GPUs that it has, one for each rank")
    return tuple(sorted(some))


def _table(tables: Collection[HostTable], one: NodeClass, gpus: tuple[int, ...]) -> KeptTable:
    """Return the table of a class for some GPUs, or that of GPUs which equal them."""
    of_class = [table.kept for table in tables if table.node_class.name == one.name]
    alike = [table for table in of_class if len(table.gpus) == len(gpus)]
    same = (table for table in alike if table.gpus == gpus)
    images = (image_of(table, one, gpus) for table in alike)
    found = next(same, None) or next(filter(None, images), None)
    if found is None:
        there = ", ".join(gpus_text(table.gpus) for table in of_class)
        what = f"has no table for GPUs {gpus_text(gpus)}, but for {there}"
        # A number alone would be a count.
        some = gpus_text(gpus) if len(gpus) > 1 else f"{gpus[0]}-{gpus[0]}"
        right = f"measure them on a host: tccl plan DIR --extend --gpus-per-job {some}"
        if not there:
            what, right = "has no table", "name the cluster's plan: a job's files have no tables"
        raise NoTableError(f"class {one.name}", what, right)
    return found


# Tables for GPUs that a machine's symmetry exchanges with the measured ones.


def image_of(table: KeptTable, one: NodeClass, gpus: tuple[int, ...]) -> KeptTable | None:
    """Return a class's table for other GPUs, by a symmetry of the machine; None if there is none.

    NCCL has to move every hop as the mapped one, and to choose the mapped chains by itself.
    """
    for names in islice(_mappings(table, one, gpus), _MOST_TRIED):
        stock = _own_image(table, one, gpus, names)
        if stock is None:
            continue
        found = _relabelled(table, gpus, names, stock)
        if _is_possible(found, one):
            return found
    return None


def _mappings(table: KeptTable, one: NodeClass, gpus: tuple[int, ...]) -> Iterator[Permutation]:
    """Yield the symmetries of a machine that take a table's GPUs to these, and its NICs to them."""
    symmetry = automorphisms(one.machine, one.knowledge)
    nics = [f"N{nic}" for nic in table.nics]
    fits = onto(symmetry, [f"G{gpu}" for gpu in table.gpus], [f"G{gpu}" for gpu in gpus])
    for row in symmetry.elements[fits & onto(symmetry, nics, nics)]:
        yield mapping(symmetry, row)


def _own_image(
    table: KeptTable, one: NodeClass, gpus: tuple[int, ...], names: Permutation
) -> OwnChains | None:
    """Return NCCL's own chains over the other GPUs, if they are the mapped ones."""
    there, here = (
        default_choice_or_sys(
            view(one.machine, one.knowledge, table.default_settings, gpus=some), nodes=2
        )
        for some in (table.gpus, gpus)
    )
    mapped = Counter(
        DefaultChain(
            _index(names, "N", chain.entry),
            tuple(_index(names, "G", gpu) for gpu in chain.gpus),
            _index(names, "N", chain.exit),
        )
        for chain in table.stock.chains
    )
    alike = ("settings", "channels", "cross_nic", "fallback", "assumed_sys")
    same = all(getattr(there, name) == getattr(here, name) for name in alike)
    if not same or mapped != Counter(here.chains):
        return None
    return msgspec.structs.replace(table.stock, chains=here.chains)


def _index(names: Permutation, kind: str, index: int) -> int:
    return int(names[f"{kind}{index}"][1:])


def _relabelled(
    table: KeptTable, gpus: tuple[int, ...], names: Permutation, stock: OwnChains
) -> KeptTable:
    def pairs_of(found: ChainSet | KeptChains) -> tuple[NicPair, ...]:
        moved = ((_index(names, "N", a), _index(names, "N", b)) for a, b in found.pairs)
        return tuple(sorted(moved))

    replace = msgspec.structs.replace
    answers = tuple(
        replace(
            answer,
            best=tuple(replace(found, pairs=pairs_of(found)) for found in answer.best),
            paired=tuple(replace(found, pairs=pairs_of(found)) for found in answer.paired),
        )
        for answer in table.answers
    )
    note = (
        f"{table.node_class}, GPUs {gpus_text(gpus)}: by the rates of GPUs "
        f"{gpus_text(table.gpus)}, which the machine's symmetry maps to them"
    )
    return replace(
        table,
        gpus=gpus,
        stock=stock,
        plain=stock if table.plain == table.stock else table.plain,
        hops=tuple(relabelled_hop(hop, names) for hop in table.hops),
        answers=answers,
        notices=(*table.notices, note),
    )


def _is_possible(table: KeptTable, one: NodeClass) -> bool:
    """Return whether NCCL moves every hop of a mapped table as the table has it."""
    for answer in table.answers:
        seen = view(one.machine, one.knowledge, answer.settings, gpus=table.gpus)
        used: dict[int, set[int]] = {}
        for found in answer.paired:
            used.setdefault(len(found.pairs), set()).update(*found.chains)
        for count, numbers in used.items():
            space = chain_hop_space(seen, nics=table.nics, chains_in_set=count)
            hops = (table.hops[n] for n in numbers)
            if not all(hop in space.between(hop.source, hop.target) for hop in hops):
                return False
    return isinstance(table.plain, str) or table.plain == table.stock


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
) -> tuple[int, str]:
    """Write files of default NCCL for a job that `plan_of_job` refused, as tables are `missing`.

    Return the number of files in the new directory `output`, and the rate in words. Raises
    InputError: a class without any table, or `output` exists, or cannot be written.
    """
    keys, cluster = job_cluster(plan, hosts, gpus)
    tables = [read_tables(directory, [plan.cluster.classes[number]]) for number, _ in keys]
    if not all(tables):
        raise missing
    sets = [some for _, some in keys]
    bound = bound_of(cluster, sets, tables)
    most = "" if bound is None else f", at most {bound:.2f} GB/s"
    rate = f"not known{most} ({'simulated' if plan.simulated else 'measured'} tables)"
    settings = tables[0][0].kept.default_settings
    named = [(host.name, sets[host.node_class]) for host in cluster.hosts]

    def files_of(place: Path) -> dict[str, str]:
        folder = PurePosixPath(place.resolve() / "nccl")
        texts = {
            "env.sh": env_text(settings, None, provenance=rate),
            "nccl.conf": conf_text(settings, provenance=rate),
            **order_files(named, folder, provenance=rate),
        }
        return {f"nccl/{name}": text for name, text in texts.items()}

    return write_new_directory(output, files_of), rate


def bound_of(
    cluster: Cluster, gpus: Sequence[tuple[int, ...]], tables: Sequence[Sequence[HostTable]]
) -> float | None:
    """Return an upper bound on default NCCL's bandwidth in a job, GB/s; None if nothing bounds it.

    `cluster` is the job's, its hosts in rank order; of its classes are the GPUs, and all tables.
    """
    of_classes = zip(cluster.classes, gpus, tables, strict=True)
    found = [bound for one in of_classes for bound in _bounds_of_class(*one)]
    if cluster.switches is not None:
        found.append(uplink_limit(cluster.switches, cluster.names))
    least = min(found)
    return least if least < float("inf") else None


def _bounds_of_class(
    one: NodeClass, gpus: tuple[int, ...], tables: Sequence[HostTable]
) -> Iterator[float]:
    """Yield bounds on the bandwidth of NCCL's own chains on hosts of a class.

    A NIC carries no more than its port. Tables for more or fewer GPUs bound nothing: chains over
    them have other hops, and only a set of the same transfers bounds one with further transfers.
    """
    ports = {nic.index: nic.speed_mbps / _MBPS or float("inf") for nic in one.machine.nics}
    for table in tables:
        if table.gpus == gpus and isinstance(table.plain, OwnChains):
            yield table.plain.rate_gbps
    seen = view(one.machine, one.knowledge, tables[0].kept.default_settings, gpus=gpus)
    chains = default_choice_or_sys(seen, nodes=2).chains
    for ends in ([chain.entry for chain in chains], [chain.exit for chain in chains]):
        yield min(ports[nic] * len(ends) / count for nic, count in Counter(ends).items())
