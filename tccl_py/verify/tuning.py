"""Tuning by jobs: a sweep over settings, then comparisons of the best ones with default NCCL.

Only the best candidate of each choice is compared in interleaved rounds; the plan then recommends
the winner.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from tccl_py.plan.plan import CHOICES, ChoiceName
from tccl_py.verify.jobs import Launcher
from tccl_py.verify.record import SMALLEST_EFFECT, Verification
from tccl_py.verify.sweep import Candidate, Sweep, Trial, stages
from tccl_py.verify.target import Target
from tccl_py.verify.verify import RunBudget, Watcher, verify_target

DEFAULT_SECONDS = 105.0
COMPARISON_SECONDS = 150.0
"""For each comparison, before the sweep and after it."""
WHOLE_SECONDS = 480.0
"""With the first comparison: a second one after the sweep runs only if it will end by then."""
ATTEMPTS = 2
"""Comparisons after the sweep: of the best settings, and of the best with other channels if those
harm a training step or a size, about which one job says little."""
_LEAST = 0.9
"""Candidates with a smaller worst ratio are dropped: jobs of small messages differ by a fifth, and
a candidate has one job."""


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """The best plan and its verification; the given plan where none is better."""

    plan: Target
    verification: Verification


def run_tuning(
    plan: Target,
    launcher: Launcher,
    budget: RunBudget,
    first: Verification,
    *,
    seconds: float = DEFAULT_SECONDS,
    watch: Watcher = lambda _: None,
) -> Tuned:
    """Try other settings for a verified plan; its directory does not change.

    The best settings are compared with training steps as well: more channels can be faster alone
    and take from computation at the same time.

    Args:
        plan: the start.
        launcher: runs the jobs.
        budget: of each comparison.
        first: verification of `plan`.
        seconds: limit of the sweep.
        watch: receives progress.

    Raises:
        JobError: a baseline job failed.
        SourceLostError: a host is gone.
    """
    begun = time.monotonic() - first.seconds
    # 1. Try candidates, one job each.
    sweep = Sweep(plan, launcher, budget, first, watch=watch)
    trials = _trials(plan, sweep, deadline=time.monotonic() + seconds)
    tried = sweep.records(trials)
    # 2. Compare the best of each choice in rounds; the second best where those are no better.
    careful = msgspec.structs.replace(budget, training=True)
    best_plan, best = plan, _judged_by_winner(first)
    for _ in range(ATTEMPTS):
        fastest = {name: _fastest(trials, name, sweep) for name in plan.choices}
        found = {name: trial for name, trial in fastest.items() if trial is not None}
        changes = {
            name: trial.candidate.settings
            for name, trial in found.items()
            if trial.candidate.settings != plan.choices[name]
        }
        if not changes:
            break
        # Predictions cannot be compared with job throughput: use the jobs' for all choices.
        rates: dict[ChoiceName, float] = {"default": tried[0].gbps}
        rates |= {name: sweep.gbps(trial.seconds) for name, trial in found.items()}
        changed = plan.retuned(changes, rates)
        if changed.choices == plan.choices:
            break
        compared = verify_target(changed, launcher, careful, watch=watch)
        again = _judged_by_winner(compared)
        if _better(again, best):
            best_plan, best = changed, again
            break
        if time.monotonic() - begun + again.seconds > WHOLE_SECONDS:
            break
        # The number of channels is what mostly harms small messages, or training.
        harmful = {(name, *_channels(found[name])) for name in changes}
        trials = [one for one in trials if (one.candidate.name, *_channels(one)) not in harmful]
    # 3. Keep the plan where neither its settings nor its recommendation change.
    if best_plan is plan and best.chosen == first.recommended:
        return Tuned(plan=plan, verification=msgspec.structs.replace(first, tried=tried))
    return Tuned(
        plan=best_plan.settled(best), verification=msgspec.structs.replace(best, tried=tried)
    )


def _judged_by_winner(found: Verification) -> Verification:
    """Judge the choice that the plan will recommend."""
    return msgspec.structs.replace(found, recommended=found.winner, chosen=found.winner)


def _trials(plan: Target, sweep: Sweep, *, deadline: float) -> list[Trial]:
    """Try the plan's own settings, and the stages' until the deadline.

    Each stage starts from the best settings of each choice so far.
    """
    trials = sweep.run([Candidate(name, settings) for name, settings in plan.choices.items()])
    for steps in zip(*(stages(plan, name) for name in plan.choices), strict=True):
        known = {trial.candidate for trial in trials}
        wanted: dict[Candidate, None] = {}
        for name, stage in zip(plan.choices, steps, strict=True):
            best = _fastest(trials, name, sweep)
            base = plan.choices[name] if best is None else best.candidate.settings
            wanted |= dict.fromkeys(Candidate(name, settings) for settings in stage(base))
        waiting = [
            one for one in wanted if one not in known and plan.permits(one.name, one.settings)
        ]
        while waiting and time.monotonic() < deadline:
            count = sweep.at_once
            trials += sweep.run(waiting[:count])
            waiting = waiting[count:]
    return trials


def _fastest(trials: Sequence[Trial], name: ChoiceName, sweep: Sweep) -> Trial | None:
    """Return the fastest candidate at large sizes that is not much slower than default NCCL.

    Of equally fast ones it is the first.
    """
    best: Trial | None = None
    for trial in trials:
        if trial.candidate.name != name or sweep.worst_ratio(trial) < _LEAST:
            continue
        gbps = sweep.gbps(trial.seconds)
        if best is None or gbps > sweep.gbps(best.seconds) * (1 + SMALLEST_EFFECT):
            best = trial
    return best


def _channels(trial: Trial) -> tuple[int, int | None]:
    return trial.candidate.settings.channels, trial.candidate.settings.min_channels


def _better(found: Verification, first: Verification) -> bool:
    """Return whether a tuned plan is faster than the first, or as fast by a smaller choice.

    Both are relative to default NCCL.
    """
    if not (found.accepted and first.accepted):
        return found.accepted
    lead = found.judged.large.ratio / first.judged.large.ratio
    if CHOICES.index(found.chosen) < CHOICES.index(first.chosen):
        return lead >= 1 - SMALLEST_EFFECT
    return lead >= 1 + SMALLEST_EFFECT
