"""What NCCL did with a plan, by its log: final channels, transports and NICs, and what differs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from tccl_py.errors import InputError, spell
from tccl_py.model.rings import neighbours
from tccl_py.nccl.communicators import LoggedConnection, parse_log, same_rings, transport_of
from tccl_py.nccl.transport import TRANSPORTS, pair_mechanism
from tccl_py.nccl.validator import Verdict
from tccl_py.plan.machine_files import class_view
from tccl_py.plan.plan import Plan

_NIC = re.compile(r"NET/[^/]+/([0-9]{1,7})")
_SHOWN = 5

Ring = tuple[int, ...]
Rings = tuple[Ring, ...]
Judge = Callable[[str, Mapping[str, str]], Verdict]
"""Returns the final rings of a job, with the NICs of several hosts, by NCCL's version."""


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A connection between GPUs (ranks, of several hosts) by NCCL's name, and its channels."""

    source: int
    target: int
    via: str
    channels: int


class RingsFound(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Final rings by channel, in GPUs or ranks, and sentences on differences from the plan."""

    expected: Rings
    found: Rings
    links: tuple[Link, ...]
    differences: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Return whether NCCL does what was planned."""
        return not self.differences


class _Seat(NamedTuple):
    """A rank's host by name and number, the host's class, and the GPU there."""

    host: str
    number: int
    node_class: int
    gpu: int


def rings_found(plan: Plan, judge: Judge, log: str, variables: Mapping[str, str]) -> RingsFound:
    """Compare the log of a job, all ranks' with NCCL_DEBUG=INFO, with its plan.

    Ranks are the GPUs of a single host in ascending order, or follow the plan's order of hosts.
    `variables` are the job's NCCL variables, of which `judge` says what NCCL makes of the plan.
    """
    of_ranks = [
        _Seat(host.name, at, plan.class_number(host), gpu)
        for at, host in enumerate(plan.hosts)
        for gpu in plan.gpus_of(host)
    ]
    names = sorted(plan.orders[0])
    seats = dict(zip(names, of_ranks, strict=True))
    try:
        parsed = parse_log(log, where="NCCL's log")
        version = parsed.version or plan.settings.version
        judged = judge(version, variables)
        # The first communicator is the process group's.
        rings = parsed.rings_over(len(names))
        logged = tuple(tuple(names[rank] for rank in ring) for ring in rings)
        counts = Counter(
            (names[link.source], names[link.target], link.via)
            for link in parsed.connections
            if max(link.source, link.target) < len(names)
        )
        links = tuple(
            Link(source=source, target=target, via=via, channels=count)
            for (source, target, via), count in sorted(counts.items())
        )
        # NCCL may end up with more channels than a file has, or fewer.
        expected = judged.rings
        differences = [
            *_file_differences(plan, judged),
            *_ring_differences(expected, logged),
            *_transports(plan, seats, links, version),
            *_nics(seats, judged, parsed.connections),
        ]
    except InputError as error:
        return RingsFound(expected=(), found=(), links=(), differences=(str(error),))
    return RingsFound(expected=expected, found=logged, links=links, differences=tuple(differences))


def _file_differences(plan: Plan, judged: Verdict) -> Iterator[str]:
    if judged.verdict != "used":
        yield f"NCCL does not use the plan's files as they stand: {judged.reason}"
    elif not all(any(same_rings(ring, order) for order in plan.orders) for ring in judged.rings):
        yield "the graph files do not come to the plan's rings: plan again"


def _ring_differences(expected: Rings, found: Rings) -> Iterator[str]:
    if not found:
        yield "NCCL's log shows no rings over all GPUs"
        return
    if len(found) != len(expected):
        yield f"NCCL uses {spell(len(found), 'channel')}, the plan comes to {len(expected)}"
    wrong = []
    for number, (ring, order) in enumerate(zip(found, expected, strict=False)):
        if not same_rings(ring, order):
            logged, planned = (" ".join(map(str, ranks)) for ranks in (ring, order))
            wrong.append(f"channel {number} is {logged}, planned was {planned}")
    yield from _some(wrong, "channels have another ring")


def _some(lines: list[str], rest: str) -> Iterator[str]:
    yield from lines[:_SHOWN]
    if len(lines) > _SHOWN:
        yield f"and {len(lines) - _SHOWN} more {rest}"


def _transports(
    plan: Plan, seats: Mapping[int, _Seat], links: tuple[Link, ...], version: str
) -> Iterator[str]:
    """Yield links of the plan's rings with another transport, or without a line in the log."""
    settings = msgspec.structs.replace(plan.settings, version=version)
    classes = {seat.node_class for seat in seats.values()}
    views = {number: class_view(plan, number, settings) for number in classes}
    kind = "rank" if len({seat.host for seat in seats.values()}) > 1 else "GPU"
    pairs = {pair for ring in plan.orders for pair in neighbours(ring)}
    silent = sorted(pairs - {(link.source, link.target) for link in links})
    if silent:
        listed = ", ".join(f"{source} -> {target}" for source, target in silent[:_SHOWN])
        yield f"NCCL's log does not say how it connects {kind}s {listed}"
    for link in links:
        if (link.source, link.target) not in pairs:
            continue
        source, target = seats[link.source], seats[link.target]
        planned = "NET"
        if source.host == target.host:
            view = views[source.node_class]
            planned = TRANSPORTS[pair_mechanism(view, source.gpu, target.gpu)]
        if transport_of(link.via) != planned:
            hosts = f" ({source.host}, {target.host})" if kind == "rank" else ""
            yield (
                f"{kind} {link.source} -> {link.target}{hosts} goes by {link.via} on "
                f"{link.channels} channel(s), planned was {planned}"
            )


def _nics(
    seats: Mapping[int, _Seat], judged: Verdict, connections: Iterable[LoggedConnection]
) -> Iterator[str]:
    """Yield crossings of hosts by other NICs: each end of a crossing logs its own NIC."""
    logged: dict[tuple[int, int, int], set[int]] = {}
    for link in connections:
        if nic := _NIC.match(link.via):
            logged.setdefault((link.channel, link.source, link.target), set()).add(int(nic[1]))
    wrong = []
    for channel, (ring, row) in enumerate(zip(judged.rings, judged.nics, strict=False)):
        for source, target in neighbours(ring):
            nics_used = logged.get((channel, source, target))
            ends = row[seats[source].number].exit, row[seats[target].number].entry
            if nics_used is not None and nics_used != set(ends):
                used = " and ".join(f"N{nic}" for nic in sorted(nics_used))
                wrong.append(
                    f"channel {channel}, rank {source} -> {target}: by {used}, planned was from "
                    f"N{ends[0]} to N{ends[1]}"
                )
    yield from _some(wrong, "connections by other NICs")
