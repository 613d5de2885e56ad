"""The search over settings, closed by jobs: NCCL itself says which are fastest.

Each candidate is one job beside one of default NCCL. Only the best of each choice are compared with
default NCCL in interleaved rounds, and the plan then recommends the winner.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from tccl_py.plan.plan import CHOICES, ChoiceName
from tccl_py.verify.arms import AnyPlace
from tccl_py.verify.comparison import SMALLEST_EFFECT
from tccl_py.verify.record import Verification
from tccl_py.verify.rounds import Effort, Watcher
from tccl_py.verify.screening import Candidate, Screen, Trial
from tccl_py.verify.stages import stages
from tccl_py.verify.tunable import Tunable
from tccl_py.verify.verify import verify_subject

DEFAULT_SECONDS = 105.0
COMPARISON_SECONDS = 150.0
"""For each comparison, the one before and those after."""
WHOLE_SECONDS = 480.0
"""With the comparison before: a second one after is run if it will have ended by then."""
ATTEMPTS = 2
"""Settings that are compared in rounds: the best, and the best of other channels should those harm
a size, of which one job says little, or a training step."""
_LEAST = 0.9
"""A candidate this much slower than default NCCL's slowest job at some size is not tried further:
jobs of small messages differ by a fifth, and one job of each candidate has to do."""


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
        JobError: default NCCL's job failed.
        SourceLostError: a host is gone.
    """
    begun = time.monotonic() - first.seconds
    # 1. Try candidates, each by one job.
    screen = Screen(plan, place, effort, first, watch=watch)
    trials = _tried(plan, screen, deadline=time.monotonic() + seconds)
    tried = screen.told(trials)
    # 2. Compare the best of each choice in rounds; the second best where those are no better.
    careful = msgspec.structs.replace(effort, training=True)
    best_plan, best = plan, _settled(plan, first)
    for _ in range(ATTEMPTS):
        fastest = {name: _fastest(trials, name, screen) for name in plan.choices}
        found = {name: one for name, one in fastest.items() if one is not None}
        changes = {
            name: one.candidate.settings
            for name, one in found.items()
            if one.candidate.settings != plan.choices[name]
        }
        if not changes:
            break
        # One scale for all: predictions cannot be compared with what jobs achieve.
        rates: dict[ChoiceName, float] = {"default": tried[0].gbps}
        rates |= {name: screen.gbps(one.seconds) for name, one in found.items()}
        other = plan.retuned(changes, rates)
        if other.choices == plan.choices:
            break
        with other.elsewhere() as subject:
            again = _settled(plan, verify_subject(subject, place, careful, watch=watch))
        if _better(again, best):
            # It was tried in another place than where it will lie.
            best_plan, best = other, again
            break
        if time.monotonic() - begun + again.seconds > WHOLE_SECONDS:
            break
        # What harms small messages, or training, is mostly how many channels there are.
        harmful = {(name, *_channels(found[name])) for name in changes}
        trials = [one for one in trials if (one.candidate.name, *_channels(one)) not in harmful]
    # 3. Keep the plan where neither its settings nor its recommendation change.
    if best_plan is plan and best.chosen == first.recommended:
        return Tuned(plan=plan, verification=msgspec.structs.replace(first, tried=tried))
    best_plan = best_plan.settled(best)
    in_place = best_plan.in_place()
    arms = tuple(
        msgspec.structs.replace(one, environment=place.variables(in_place.arm(one.name)))
        for one in best.arms
    )
    return Tuned(plan=best_plan, verification=msgspec.structs.replace(best, arms=arms, tried=tried))


def _settled(plan: Tunable, found: Verification) -> Verification:
    """Judge the choice that the plan will recommend; one of hosts has its graph files alone."""
    if len(plan.choices) == 1:
        return found
    return msgspec.structs.replace(found, recommended=found.winner, chosen=found.winner)


def _tried(plan: Tunable, screen: Screen, *, deadline: float) -> list[Trial]:
    """Try the plan's own settings, and all others until the time is up.

    Each stage starts from the best of each choice until then.
    """
    trials = screen.tried([Candidate(name, one) for name, one in plan.choices.items()])
    for steps in zip(*(stages(plan, name) for name in plan.choices), strict=True):
        known = {one.candidate for one in trials}
        wanted: dict[Candidate, None] = {}
        for name, stage in zip(plan.choices, steps, strict=True):
            best = _fastest(trials, name, screen)
            base = plan.choices[name] if best is None else best.candidate.settings
            wanted |= dict.fromkeys(Candidate(name, one) for one in stage(base))
        waiting = [one for one in wanted if one not in known and plan.permits(one.settings)]
        while waiting and time.monotonic() < deadline:
            count = screen.at_once
            trials += screen.tried(waiting[:count])
            waiting = waiting[count:]
    return trials


def _fastest(trials: Sequence[Trial], name: ChoiceName, screen: Screen) -> Trial | None:
    """Return the fastest at large sizes of those not much slower than default NCCL anywhere.

    Of those that are as fast it is the one that was tried first.
    """
    best: Trial | None = None
    for one in trials:
        if one.candidate.name != name or screen.low(one) < _LEAST:
            continue
        gbps = screen.gbps(one.seconds)
        if best is None or gbps > screen.gbps(best.seconds) * (1 + SMALLEST_EFFECT):
            best = one
    return best


def _channels(trial: Trial) -> tuple[int, int | None]:
    return trial.candidate.settings.channels, trial.candidate.settings.min_channels


def _better(found: Verification, first: Verification) -> bool:
    """Whether what was tuned is faster than what it was made from, or as fast by a smaller choice.

    Both are against default NCCL.
    """
    if not (found.accepted and first.accepted):
        return found.accepted
    lead = found.judged.large.ratio / first.judged.large.ratio
    if CHOICES.index(found.chosen) < CHOICES.index(first.chosen):
        return lead >= 1 - SMALLEST_EFFECT
    return lead >= 1 + SMALLEST_EFFECT
