"""The search over Settings, closed by the real thing: NCCL itself says which is fastest.

One job tells how fast a choice is, beside those of others and of stock; only the best is compared
with stock in pairs, and stock stays where it is not beaten.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from tccl_py.verification.comparison import SMALLEST_EFFECT
from tccl_py.verification.pairs import Effort, Watcher
from tccl_py.verification.record import Verification
from tccl_py.verification.screening import Screen, Trial
from tccl_py.verification.sides import AnyPlace
from tccl_py.verification.stages import stages
from tccl_py.verification.tunable import Achieved, Tunable
from tccl_py.verification.verify import verify_subject

DEFAULT_SECONDS = 105.0
COMPARISON_SECONDS = 150.0
"""For each comparison, the one before and those after."""
WHOLE_SECONDS = 480.0
"""With the comparison before: a second one after is run if it will have ended by then."""
ATTEMPTS = 2
"""Settings that are compared with stock in pairs: the best, and the best of other channels should
those harm a size, of which one job says little, or a training step."""
_LEAST = 0.9
"""A choice this much slower than stock's slowest job at some size is not tried further: jobs of
small messages differ by a fifth, and one job of each choice has to do."""


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """The best plan and what was verified of it; the plan is the one given where none is better."""

    plan: Tunable
    verification: Verification


def run_tuning(
    plan: Tunable,
    place: AnyPlace,
    effort: Effort,
    first: Verification,
    *,
    seconds: float = DEFAULT_SECONDS,
    watch: Watcher = lambda _: None,
) -> Tuned:
    """Try other settings for a plan that was verified; nothing in its directory is changed.

    What is found is compared with training steps beside: channels that are faster by themselves
    take from what computes at the same time.

    Args:
        plan: what to start from.
        place: where jobs run.
        effort: of the comparison of what is found.
        first: what was found of `plan`.
        seconds: after this no more settings are tried.
        watch: is told what runs.

    Raises:
        JobError: stock's job failed.
        SourceLostError: a host is gone.
    """
    begun = time.monotonic() - first.seconds
    screen = Screen(plan, place, effort, first, watch=watch)
    trials = _tried(plan, screen, deadline=time.monotonic() + seconds)
    tried = (screen.told_stock(trials), *map(screen.told, trials))
    careful = msgspec.structs.replace(effort, training=True)
    current = screen.gbps(trials[0].seconds)
    for _ in range(ATTEMPTS):
        best = _best(trials, screen)
        if best is None or best.settings == plan.settings:
            break
        gbps = screen.gbps(best.seconds)
        if first.accepted and gbps < current * (1 + SMALLEST_EFFECT):
            break
        # One scale for both: what the profiler said of stock is no match for what jobs achieve.
        achieved = Achieved(gbps=gbps, stock_gbps=screen.gbps(best.stock))
        other = plan.retuned(best.settings, achieved=achieved)
        if other.settings == plan.settings:
            break
        with other.elsewhere() as subject:
            found = verify_subject(subject, place, careful, watch=watch)
        if found.accepted and _gains(found, first):
            # It was tried in another place than where it will lie.
            environment = {**found.plan_environment, **other.in_place().side.variables}
            found = msgspec.structs.replace(found, tried=tried, plan_environment=environment)
            return Tuned(plan=other, verification=found)
        if time.monotonic() - begun + found.seconds > WHOLE_SECONDS:
            break
        # What harms small messages, or training, is mostly how many channels there are.
        trials = [one for one in trials if one.settings.channels != best.settings.channels]
    return Tuned(plan=plan, verification=msgspec.structs.replace(first, tried=tried))


def _tried(plan: Tunable, screen: Screen, *, deadline: float) -> list[Trial]:
    """The plan's own settings, and all others until the time is up; each stage starts from the best
    until then."""
    trials = screen.tried([plan.settings])
    for stage in stages(plan):
        best = _best(trials, screen)
        known = {one.settings for one in trials}
        wanted = dict.fromkeys(stage(plan.settings if best is None else best.settings))
        waiting = [one for one in wanted if one not in known and plan.permits(one)]
        while waiting and time.monotonic() < deadline:
            count = screen.at_once
            trials += screen.tried(waiting[:count])
            waiting = waiting[count:]
    return trials


def _best(trials: Sequence[Trial], screen: Screen) -> Trial | None:
    """The fastest at large sizes of those not much slower than stock anywhere; of those that are as
    fast, the one that was tried first."""
    best: Trial | None = None
    for one in trials:
        if screen.low(one) < _LEAST:
            continue
        gbps = screen.gbps(one.seconds)
        if best is None or gbps > screen.gbps(best.seconds) * (1 + SMALLEST_EFFECT):
            best = one
    return best


def _gains(found: Verification, first: Verification) -> bool:
    """Whether what was tuned is faster than what it was made from, both against stock."""
    if not first.accepted:
        return True
    ratio = _large_ratio(found)
    return ratio >= _large_ratio(first) * (1 + SMALLEST_EFFECT)


def _large_ratio(found: Verification) -> float:
    if not found.plan_gbps or not found.stock_gbps:
        return 0.0
    return found.plan_gbps / found.stock_gbps
