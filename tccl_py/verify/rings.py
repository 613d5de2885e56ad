"""Do NCCL's final channels and transports equal the plan's? Its log says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec

from tccl_py.errors import InputError
from tccl_py.nccl.log import InitLog, parse_log, same_rings, transport_of
from tccl_py.nccl.settings import final_channels
from tccl_py.nccl.transport import TRANSPORTS, pair_mechanism
from tccl_py.nccl.view import view
from tccl_py.plan.plan import Plan

_SHOWN = 5


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How NCCL connected one GPU to another, by its own name; how many channels it did so for."""

    source: int
    target: int
    via: str
    channels: int


class RingsFound(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Final rings, GPU indices in order, one a channel; and sentences on what is not as planned."""

    expected: tuple[tuple[int, ...], ...]
    found: tuple[tuple[int, ...], ...]
    links: tuple[Link, ...]
    differences: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether all is as planned."""
        return not self.differences


def rings_found(plan: Plan, log: str, variables: Mapping[str, str]) -> RingsFound:
    """Compare what a job's ranks logged with the plan; ranks are the plan's GPUs, ascending.

    Args:
        plan: whose rings and settings the job had.
        log: what all ranks wrote with NCCL_DEBUG=INFO.
        variables: of NCCL, as the job had them.
    """
    gpus = plan.gpus
    try:
        parsed = parse_log(log, where="NCCL's log")
        expected = _expected(plan, parsed.version, variables)
    except InputError as error:
        return RingsFound(expected=(), found=(), links=(), differences=(str(error),))
    # The first communicator is the process group's.
    found = tuple(tuple(gpus[rank] for rank in ring) for ring in parsed.rings_over(len(gpus)))
    links = links_of(parsed, gpus)
    differences = (*ring_differences(expected, found), *_transports(plan, links, parsed.version))
    return RingsFound(expected=expected, found=found, links=links, differences=differences)


def _expected(
    plan: Plan, version: str | None, variables: Mapping[str, str]
) -> tuple[tuple[int, ...], ...]:
    sms = [sm for gpu in plan.gpus if (sm := plan.machine.gpu(gpu).sm) is not None]
    orders = plan.channel_rings
    count = final_channels(
        len(orders),
        sm=min(sms, default=None),
        variables=variables,
        version=version or plan.settings.version,
    )
    return tuple(orders[channel % len(orders)] for channel in range(count))


def ring_differences(
    expected: tuple[tuple[int, ...], ...], found: tuple[tuple[int, ...], ...]
) -> Iterator[str]:
    """Sentences on channels that are not as they were to be."""
    if not found:
        yield "NCCL's log shows no rings over all GPUs"
        return
    if len(found) != len(expected):
        yield f"NCCL uses {len(found)} channels, the plan comes to {len(expected)}"
    other = [
        (number, theirs, ours)
        for number, (theirs, ours) in enumerate(zip(found, expected, strict=False))
        if not same_rings(theirs, ours)
    ]
    for number, theirs, ours in other[:_SHOWN]:
        yield f"channel {number} is {_order(theirs)}, planned was {_order(ours)}"
    if len(other) > _SHOWN:
        yield f"and {len(other) - _SHOWN} more channels have another ring"


def links_of(log: InitLog, gpus: tuple[int, ...]) -> tuple[Link, ...]:
    """What the log says of connections; `gpus` are what ranks are called, in their order."""
    counted: dict[tuple[int, int, str], int] = {}
    for one in log.connections:
        if max(one.source, one.target) < len(gpus):
            key = (gpus[one.source], gpus[one.target], one.via)
            counted[key] = counted.get(key, 0) + 1
    return tuple(
        Link(source=source, target=target, via=via, channels=count)
        for (source, target, via), count in sorted(counted.items())
    )


def _transports(plan: Plan, links: tuple[Link, ...], version: str | None) -> Iterator[str]:
    settings = msgspec.structs.replace(plan.settings, version=version or plan.settings.version)
    try:
        seen = view(plan.machine, plan.knowledge, settings, gpus=plan.gpus)
    except InputError as error:
        yield str(error)
        return
    pairs = {pair for ring in plan.rings for pair in neighbours(ring.gpus)}

    def planned(link: Link) -> str:
        return TRANSPORTS[pair_mechanism(seen, link.source, link.target).kind]

    yield from transport_differences(
        links, pairs, planned, kind="GPU", named=lambda link: f"GPU {link.source} -> {link.target}"
    )


def transport_differences(
    links: tuple[Link, ...],
    pairs: set[tuple[int, int]],
    planned: Callable[[Link], str],
    *,
    kind: str,
    named: Callable[[Link], str],
) -> Iterator[str]:
    """What of the links between some pairs is not as planned, or not in NCCL's log.

    Args:
        links: as logged.
        pairs: those that the plan's rings have.
        planned: the transport that a link was to have.
        kind: what the pairs are of, `GPU` or `rank`.
        named: a link in a sentence.
    """
    silent = sorted(pairs - {(link.source, link.target) for link in links})
    if silent:
        listed = ", ".join(f"{one} -> {other}" for one, other in silent[:_SHOWN])
        yield f"NCCL's log does not say how it connects {kind}s {listed}"
    for link in links:
        if (link.source, link.target) not in pairs:
            continue
        if transport_of(link.via) != planned(link):
            yield (
                f"{named(link)} goes by {link.via} on {link.channels} channel(s), planned was "
                f"{planned(link)}"
            )


def neighbours(ring: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Each of a ring and the next one."""
    return zip(ring, (*ring[1:], ring[0]), strict=True)


def _order(ring: tuple[int, ...]) -> str:
    return " ".join(map(str, ring))
