"""Congestion rules applied to the legs of a set: groups of transfers, and what a group gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from tccl_py.simulator.figures import Figures
from tccl_py.simulator.model import Congestion, Figure, Key, Member, Traffic
from tccl_py.simulator.routes import Leg
from tccl_py.simulator.sharing import Bound


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One leg's part in a rule: in which group, as which member, with what to count."""

    rule: int
    member: int
    group: str
    flow: int
    leg: int
    keys: dict[Key, str]


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that holds for a group: the bounds it sets, and whether they are assumed."""

    bounds: tuple[Bound, ...]
    assumed: bool


def matches(traffic: Traffic, leg: Leg) -> bool:
    """Whether a leg is of this traffic."""
    return (
        traffic.operation in ("any", leg.operation)
        and traffic.path in ("any", leg.path)
        and traffic.crosses in ("any", leg.crosses)
        and traffic.memory in ("any", leg.memory)
        and traffic.executor in ("any", leg.executor)
    )


def roles(rules: Sequence[Congestion], leg: Leg) -> tuple[tuple[int, int, str], ...]:
    """(rule, member, group) of everything a leg may take part in; what a flow's cache keeps."""
    found = []
    for number, rule in enumerate(rules):
        group = "" if rule.together_at == "transfer" else leg.keys.get(rule.together_at)
        if group is None:
            continue
        for index, member in enumerate(rule.members):
            if matches(member.traffic, leg):
                found.append((number, index, group))
    return tuple(found)


def held(rules: Sequence[Congestion], parts: Sequence[Part], figures: Figures) -> Iterator[Held]:
    """The rules that hold for this set, one result a group."""
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
    used = [figure for member in present for figure in _figures(member)]
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


def _figures(member: Member) -> list[Figure]:
    return [figure for figure in (member.total, member.each) if figure is not None]
