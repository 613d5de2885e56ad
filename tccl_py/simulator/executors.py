"""Limits of executors, max-min fair sharing, and congestion rules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from tccl_py.model.transfer import Flow
from tccl_py.simulator.model import (
    Congestion,
    ExecutorLimit,
    Figure,
    Figures,
    Key,
    Traffic,
    figures_in,
)
from tccl_py.simulator.routes import Leg, Network


def applies(limit: ExecutorLimit, network: Network, flow: Flow, legs: tuple[Leg, ...]) -> bool:
    """Return whether a limit is about this flow; a NIC's FIFO in host memory is as a bounce."""
    piped = flow.is_bounce or (flow.is_network and any("memory" in leg.keys for leg in legs))
    if (limit.path == "bounce") != piped:
        return False
    return any(
        leg.executor == limit.executor
        and limit.operation in ("any", leg.operation)
        and limit.over in ("any", _over(network, leg))
        for leg in legs
    )


def _over(network: Network, leg: Leg) -> str:
    kinds = {network.kinds[edge] for edge in leg.edges}
    return "nvlink" if kinds <= {"nvlink", "xgmi", "c2c"} else "pci"


def figures_used(limit: ExecutorLimit, flow: Flow) -> tuple[Figure, ...]:
    """Return the figures behind a flow's limit; without blocks, the ceiling only."""
    used = [limit.ceiling]
    if _blocks(limit, flow) is not None:
        used += [limit.per_block, limit.latency_us if limit.path == "bounce" else None]
    return tuple(figure for figure in used if figure is not None)


def unbent(limit: ExecutorLimit, figures: Figures, flow: Flow) -> float:
    """Return the rate of a flow's blocks without the ceiling, GB/s; inf if it names none."""
    blocks = _blocks(limit, flow)
    if blocks is None or limit.per_block is None:
        return math.inf
    rate = figures.value(limit.per_block)
    # A direct flow's FIFO lies in GPU memory: its size is not known to matter.
    if limit.latency_us is None or flow.fifo is None or limit.path != "bounce":
        return blocks * rate
    size = flow.fifo.bytes
    if limit.executor == "copy_engine":
        size = max(1, size // flow.fifo.slots)
    # 1 GB/s is 1000 bytes a microsecond.
    micros = figures.value(limit.latency_us) + size / (rate * 1000.0)
    return blocks * (size / micros / 1000.0)


def bent(limit: ExecutorLimit, figures: Figures, together: float) -> float:
    """Return the rate of blocks under the ceiling; `together` is the rate without a ceiling."""
    ceiling = figures.value(limit.ceiling) if limit.ceiling is not None else math.inf
    if math.inf in (together, ceiling):
        return min(together, ceiling)
    # Scaled by the smaller of the two, so that powers neither overflow nor vanish.
    small, large = sorted((together, ceiling))
    bend: float = (1.0 + (small / large) ** limit.sharpness) ** (-1.0 / limit.sharpness)
    return small * bend


def _blocks(limit: ExecutorLimit, flow: Flow) -> int | None:
    return 1 if limit.executor == "copy_engine" else flow.blocks


# Max-min fair sharing: no flow can get more without taking from a flow that has less.


Bound = dict[int, float]  # Flow -> the bound's part that 1 GB/s takes; their sum is at most 1

_TIE = 1.0 + 1e-12  # Bounds that tighten at the same rate but for rounding are one bottleneck


def max_min_rates(count: int, bounds: Sequence[Bound]) -> list[float]:
    """Return the rates of `count` flows under bounds, by progressive filling; inf without any."""
    bounds = _tightest(bounds)
    rates = [math.inf] * count
    room = [1.0] * len(bounds)
    pull = [sum(bound.values()) for bound in bounds]
    growing = [len(bound) for bound in bounds]
    bounds_of: list[list[int]] = [[] for _ in range(count)]
    for index, bound in enumerate(bounds):
        for flow in bound:
            bounds_of[flow].append(index)
    alive = [index for index, bound in enumerate(bounds) if bound]
    while alive:
        # 1. All growing rates rise together until the first bounds are full.
        level = min(room[index] / pull[index] for index in alive)
        full = [index for index in alive if room[index] <= level * _TIE * pull[index]]
        # 2. Every flow in them keeps this rate, and takes its share of its other bounds.
        stopped = {f for index in full for f in bounds[index] if rates[f] == math.inf}
        for flow in stopped:
            rates[flow] = level
            for index in bounds_of[flow]:
                share = bounds[index][flow]
                room[index] = max(room[index] - share * level, 0.0)
                pull[index] -= share
                growing[index] -= 1
        alive = [index for index in alive if growing[index]]
    return rates


def _tightest(bounds: Sequence[Bound]) -> list[Bound]:
    alone: dict[int, float] = {}
    shared = []
    for bound in bounds:
        if len(bound) == 1:
            ((flow, share),) = bound.items()
            alone[flow] = max(share, alone.get(flow, 0.0))
        else:
            shared.append(bound)
    return shared + [{flow: share} for flow, share in alone.items()]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A leg's part in a rule: the group, the member, and the keys to count."""

    rule: int
    member: int
    group: str
    flow: int
    leg: int
    keys: dict[Key, str]


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of a rule on a group, and whether any bound is assumed."""

    bounds: tuple[Bound, ...]
    assumed: bool


def matches(traffic: Traffic, leg: Leg) -> bool:
    """Return whether a leg is of this traffic."""
    fields = traffic.__struct_fields__
    return all(getattr(traffic, name) in ("any", getattr(leg, name)) for name in fields)


def roles(rules: Sequence[Congestion], leg: Leg) -> tuple[tuple[int, int, str], ...]:
    """Return (rule, member, group) of each part that a leg may have."""
    groups: dict[Key, str] = {**leg.keys, "transfer": ""}
    return tuple(
        (number, index, groups[rule.together_at])
        for number, rule in enumerate(rules)
        if rule.together_at in groups
        for index, member in enumerate(rule.members)
        if matches(member.traffic, leg)
    )


def held(rules: Sequence[Congestion], parts: Sequence[Part], figures: Figures) -> Iterator[Held]:
    """Yield the rules in force for this set, a result for each group."""
    groups: dict[tuple[int, str], list[Part]] = {}
    for part in parts:
        alone = f"{part.flow}/{part.leg}" if rules[part.rule].together_at == "transfer" else ""
        groups.setdefault((part.rule, part.group + alone), []).append(part)
    for (number, _), group in groups.items():
        if _holds(rules[number], group):
            yield _bounds(rules[number], group, figures)


def _holds(rule: Congestion, group: Sequence[Part]) -> bool:
    if rule.needs == "every" and len({part.member for part in group}) < len(rule.members):
        return False
    for key, count in rule.at_least.items():
        if key == "transfer":
            different: set[object] = {(part.flow, part.leg) for part in group}
        else:
            different = {part.keys[key] for part in group if key in part.keys}
        if len(different) < count:
            return False
    return True


def _bounds(rule: Congestion, group: Sequence[Part], figures: Figures) -> Held:
    present = [rule.members[index] for index in sorted({part.member for part in group})]
    used = [figure for member in present for figure in figures_in(member).values()]
    bounds: list[Bound] = []
    totals = [figures.value(member.total) for member in present if member.total is not None]
    if totals:
        share = 1.0 / min(totals)
        total: Bound = {}
        for flow, _ in {(part.flow, part.leg) for part in group}:
            total[flow] = total.get(flow, 0.0) + share
        bounds.append(total)
    for part in group:
        each = rule.members[part.member].each
        if each is not None:
            bounds.append({part.flow: 1.0 / figures.value(each)})
    return Held(bounds=tuple(bounds), assumed=any(figures.assumed(figure) for figure in used))
