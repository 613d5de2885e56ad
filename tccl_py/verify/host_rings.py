"""Do NCCL's final channels over several hosts equal the plan's, and go as planned in each?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from tccl_py.errors import InputError
from tccl_py.nccl.log import Connection, parse_log, same_rings
from tccl_py.nccl.transport import TRANSPORTS, pair_mechanism
from tccl_py.nccl.validator import NodeJob, Verdict, validate_cluster
from tccl_py.nccl.view import NcclView, view
from tccl_py.plan.plan import Plan
from tccl_py.verify.rings import (
    Link,
    RingsFound,
    links_of,
    neighbours,
    ring_differences,
    transport_differences,
)

_NIC = re.compile(r"NET/[^/]+/([0-9]{1,7})")
_SHOWN = 5


class _Seat(NamedTuple):
    """Where a rank is: its host by name and number, the host's class, and the GPU there."""

    host: str
    number: int
    node_class: int
    gpu: int


def cluster_rings_found(
    plan: Plan, graphs: Mapping[str, str], log: str, variables: Mapping[str, str]
) -> RingsFound:
    """Compare what all hosts' ranks logged with the plan; ranks follow its order of hosts.

    Args:
        plan: whose rings and settings the job had.
        graphs: the text of each host's graph file, by name.
        log: what all ranks of all hosts wrote with NCCL_DEBUG=INFO.
        variables: of NCCL, as the job had them.
    """
    seats = _seats(plan)
    try:
        parsed = parse_log(log, where="NCCL's log")
        version = parsed.version or plan.settings.version
        # What NCCL makes of the files: it may have more channels than a file, and fewer.
        judged = validate_cluster(_nodes(plan, graphs), version=version, environment=variables)
    except InputError as error:
        return RingsFound(expected=(), found=(), links=(), differences=(str(error),))
    found = parsed.rings_over(len(seats))
    links = links_of(parsed, tuple(range(len(seats))))
    differences = (
        *_planned(plan, judged),
        *ring_differences(judged.rings, found),
        *_transports(plan, seats, links, version),
        *_nics(seats, judged, parsed.connections),
    )
    return RingsFound(expected=judged.rings, found=found, links=links, differences=differences)


def _seats(plan: Plan) -> tuple[_Seat, ...]:
    """Of each rank."""
    classes = [plan.class_number(host) for host in plan.hosts]
    return tuple(
        _Seat(host.name, at, number, gpu)
        for at, (host, number) in enumerate(zip(plan.hosts, classes, strict=True))
        for gpu in plan.class_gpus[number]
    )


def _nodes(plan: Plan, graphs: Mapping[str, str]) -> list[NodeJob]:
    found = []
    for host in plan.hosts:
        number = plan.class_number(host)
        one = plan.cluster.classes[number]
        found.append(
            NodeJob(
                machine=one.machine,
                knowledge=one.knowledge,
                gpus=plan.class_gpus[number],
                graph=graphs[host.name],
                where=f"graph file of {host.name}",
            )
        )
    return found


def _planned(plan: Plan, judged: Verdict) -> Iterator[str]:
    """What is to be said where the files themselves do not come to the plan's rings."""
    if judged.verdict != "used":
        yield f"NCCL does not use the plan's files as they stand: {judged.reason}"
    elif not all(any(same_rings(ring, one) for one in plan.orders) for ring in judged.rings):
        yield "the graph files do not come to the plan's rings: plan again"


def _transports(
    plan: Plan, seats: tuple[_Seat, ...], links: tuple[Link, ...], version: str
) -> Iterator[str]:
    settings = msgspec.structs.replace(plan.settings, version=version)
    views: dict[int, NcclView] = {}
    for number in {seat.node_class for seat in seats}:
        one = plan.cluster.classes[number]
        try:
            views[number] = view(one.machine, one.knowledge, settings, gpus=plan.class_gpus[number])
        except InputError as error:
            yield str(error)
            return
    pairs = {pair for ring in plan.orders for pair in neighbours(ring)}

    def planned(link: Link) -> str:
        source, target = seats[link.source], seats[link.target]
        if source.host != target.host:
            return "NET"
        return TRANSPORTS[pair_mechanism(views[source.node_class], source.gpu, target.gpu).kind]

    def named(link: Link) -> str:
        hosts = f"{seats[link.source].host}, {seats[link.target].host}"
        return f"rank {link.source} -> {link.target} ({hosts})"

    yield from transport_differences(links, pairs, planned, kind="rank", named=named)


def _nics(
    seats: tuple[_Seat, ...], judged: Verdict, connections: Iterable[Connection]
) -> Iterator[str]:
    """Where a ring crosses hosts, both ends log the NIC: one to leave by, one to come in by."""
    seen: dict[tuple[int, int, int], set[int]] = {}
    for one in connections:
        nic = _NIC.match(one.via)
        if nic is not None and max(one.source, one.target) < len(seats):
            seen.setdefault((one.channel, one.source, one.target), set()).add(int(nic[1]))
    other = []
    for channel, (ring, row) in enumerate(zip(judged.rings, judged.nics, strict=False)):
        for source, target in neighbours(ring):
            found = seen.get((channel, source, target))
            ends = row[seats[source].number].exit, row[seats[target].number].entry
            if found is not None and found != set(ends):
                other.append((channel, source, target, found, ends))
    for channel, source, target, found, ends in other[:_SHOWN]:
        used = " and ".join(f"N{nic}" for nic in sorted(found))
        yield (
            f"channel {channel}, rank {source} -> {target}: by {used}, planned was from N{ends[0]} "
            f"to N{ends[1]}"
        )
    if len(other) > _SHOWN:
        yield f"and {len(other) - _SHOWN} more connections by other NICs"
