"""Tuning by jobs: a sweep over settings, then comparisons of the best ones with default NCCL.

In the sweep each candidate has one job, interleaved with a baseline job. Socket threads come first
where hosts talk over sockets. Then come channels and FIFO size, because most follows from the
footprint of all FIFOs; then Ring alone, P2P levels or NIC buffer placements; last the owner of host
buffers, reads instead of writes, and copy engines. Only the best candidate of each choice is
compared in interleaved rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from statistics import median

import msgspec

from tccl_py.errors import MeasurementError
from tccl_py.model.transfer import DEFAULT_FIFO_BYTES
from tccl_py.nccl.settings import Settings, check_settings, environment_text
from tccl_py.nccl.versions import version_facts
from tccl_py.plan.parts import CHOICES, ChoiceName
from tccl_py.verify.jobs import ConcurrentJobs, Launcher, Outcome
from tccl_py.verify.record import SLOW_TRANSFERS, SMALLEST_EFFECT, Tried, Verification, sizes_text
from tccl_py.verify.spec import TimedRow, bus_gbps, large_gbps
from tccl_py.verify.target import Target
from tccl_py.verify.verify import RunBudget, row_seconds, verify_target

SWEEP_SECONDS = 105.0
COMPARISON_SECONDS = 150.0
"""For each comparison, before the sweep and after it."""
WHOLE_SECONDS = 480.0
"""With the first comparison: a second one after the sweep runs only if it will end by then."""
ATTEMPTS = 2
"""Comparisons after the sweep: of the best settings, and of the best with other channels if those
harm a training step or a size, about which one job says little."""
_AS_FAST, _KINDER = 0.98, 1.02
"""Of FIFO sizes this close to the fastest, send/recv decides if it is faster by this factor."""
_LEAST = 0.9
"""Candidates with a smaller worst ratio are dropped: jobs of small messages differ by a fifth, and
a candidate has one job."""

BUFFSIZES = (DEFAULT_FIFO_BYTES, 512 << 10)
MORE_BUFFSIZES = (256 << 10, 1 << 20, 128 << 10)
"""Tried with the best number of channels only, as each job takes seconds."""
SOCKETS = ((2, 2), (4, 2), (4, 4))
"""Helper threads of a connection, and sockets of each: else one thread of a GPU serves all sockets
of a job. On two H200 over the loopback interface (2, 2) made 10 GB/s of 4, and (4, 2) with four
channels 17 (NCCL 2.28.9)."""

Candidate = tuple[ChoiceName, Settings]
Stage = Callable[[Settings], Iterator[Settings]]
"""Returns the settings to try, from the best so far."""


def run_tuning(
    plan: Target,
    launcher: Launcher,
    budget: RunBudget,
    first: Verification,
    *,
    seconds: float = SWEEP_SECONDS,
) -> tuple[Target, Verification]:
    """Try other settings for a plan, verified by `first`; its directory does not change.

    Return the best plan and its verification; the given plan where none is better.

    The best settings are compared with training steps as well: more channels can be faster alone
    and take from computation at the same time. The sweep ends after `seconds`.
    """
    begun = time.monotonic() - first.seconds
    # 1. Try candidates, one job each.
    sweep = Sweep(plan, launcher, budget, first)
    trials = _trials(plan, sweep, deadline=time.monotonic() + seconds)
    tried = (sweep.baseline(), *trials)
    # 2. Compare the best of each choice in rounds; the second best where those are no better.
    careful = msgspec.structs.replace(budget, training=True)
    best_plan, best, rejected = plan, _judged_by_winner(first), list[str]()
    offer: tuple[Target, Verification] | None = None
    for _ in range(ATTEMPTS):
        fastest = {name: _fastest(trials, name) for name in plan.choices}
        found = {name: trial for name, trial in fastest.items() if trial is not None}
        changes = {
            name: trial.settings
            for name, trial in found.items()
            if trial.settings != plan.choices[name]
        }
        if not changes:
            break
        # Predictions cannot be compared with job throughput: use the jobs' for all choices.
        rates: dict[ChoiceName, float] = {"default": tried[0].gbps}
        rates |= {name: trial.gbps for name, trial in found.items()}
        changed = plan.retuned(changes, rates)
        if changed.choices == plan.choices:
            break
        compared = verify_target(changed, launcher, careful)
        again = _judged_by_winner(compared)
        if _better(again, best):
            best_plan, best = changed, again
            break
        rejected += _rejections(again)
        if offer is None and _faster_when_large(again):
            offer = changed, again
        if time.monotonic() - begun + again.seconds > WHOLE_SECONDS:
            break
        # The number of channels is what mostly harms small messages, or training.
        harmful = {(name, *_channels(found[name])) for name in changes}
        trials = [trial for trial in trials if (trial.arm, *_channels(trial)) not in harmful]
    # 3. Offer settings that only large messages gain from; they are not recommended.
    if best_plan is plan and best.chosen == "default" and offer is not None:
        best_plan, best = offer
    # 4. Keep the plan where neither its settings nor its recommendation change.
    if best_plan is plan and best.chosen == first.recommended:
        best = first
    else:
        best_plan = best_plan.settled(best)
    notices = (*best.notices, *rejected)
    return best_plan, msgspec.structs.replace(best, tried=tried, notices=notices)


def _rejections(found: Verification) -> Iterator[str]:
    """Yield why the tuned settings of each choice are not used."""
    for arm in found.arms[1:]:
        sizes = sizes_text([row.bytes for row in arm.losses])
        why = "; ".join(arm.objections) or (f"slower at {sizes}" if sizes else "no clear gain")
        lead = f"{arm.large.ratio:.2f}x default NCCL at large sizes"
        variables = environment_text(arm.settings)
        yield f"tuned {arm.name} not used ({variables}): {lead}, but {why}"


def _faster_when_large(found: Verification) -> bool:
    """Return whether jobs of all arms were right, and variables clearly gain at large sizes."""
    variables = found.arm("variables")
    right = not any(arm.faults for arm in found.arms)
    return right and variables is not None and variables.large.low > 1 + SMALLEST_EFFECT


def _judged_by_winner(found: Verification) -> Verification:
    return msgspec.structs.replace(found, recommended=found.winner, chosen=found.winner)


def _trials(plan: Target, sweep: Sweep, *, deadline: float) -> list[Tried]:
    """Try the plan's own settings, and the stages' until the deadline.

    Each stage starts from the best settings of each choice so far.
    """
    trials = sweep.run(list(plan.choices.items()))
    for steps in zip_longest(*(stages(plan, name) for name in plan.choices)):
        known = {(trial.arm, trial.settings) for trial in trials}
        wanted: dict[Candidate, None] = {}
        for name, stage in zip(plan.choices, steps, strict=True):
            best = _fastest(trials, name)
            base = plan.choices[name] if best is None else best.settings
            wanted |= dict.fromkeys((name, settings) for settings in (stage(base) if stage else ()))
        waiting = [each for each in wanted if each not in known and plan.permits(*each)]
        while waiting and time.monotonic() < deadline:
            count = sweep.at_once
            trials += sweep.run(waiting[:count])
            waiting = waiting[count:]
    return trials


def _fastest(trials: Sequence[Tried], name: ChoiceName) -> Tried | None:
    """Return the fastest candidate at large sizes that is not much slower than default NCCL.

    Of equally fast ones it is the first; of FIFO sizes that hardly differ, which harm send/recv,
    the kindest.
    """
    usable = [trial for trial in trials if trial.arm == name and trial.worst_ratio >= _LEAST]
    best: Tried | None = None
    for trial in usable:
        if best is None or trial.gbps > best.gbps * (1 + SMALLEST_EFFECT):
            best = trial
    if best is None or best.transfer_ratio >= SLOW_TRANSFERS:
        return best
    replace, fifo = msgspec.structs.replace, best.settings.buffsize
    kinder = [
        trial
        for trial in usable
        if replace(trial.settings, buffsize=fifo) == best.settings
        and trial.transfer_ratio > best.transfer_ratio * _KINDER
        and trial.gbps >= best.gbps * _AS_FAST
    ]
    return max(kinder, key=lambda trial: trial.transfer_ratio, default=best)


def _channels(trial: Tried) -> tuple[int, int | None]:
    return trial.settings.channels, trial.settings.min_channels


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


class Sweep:
    """Runs one job for each candidate, interleaved with a baseline job, and rates them.

    `first`, the verification of the plan, has the slowest baseline job at each size; trials have
    some sizes of `budget`.
    """

    def __init__(
        self,
        target: Target,
        launcher: Launcher,
        budget: RunBudget,
        first: Verification,
    ) -> None:
        self._target, self._watch = target, launcher.watch
        few = msgspec.structs.replace(budget.spec, sizes=budget.few_sizes)
        slowest = {row.bytes: max(row.seconds) for row in first.arms[0].sizes}
        self._slowest = {row: slowest.get(row.bytes, 0.0) for row in few.rows}
        self._spec = msgspec.structs.replace(few, transfer_sizes=budget.transfer_sizes)
        self._jobs = ConcurrentJobs(launcher, budget.few_sizes)
        self._default: dict[TimedRow, float] = {}
        self._default_gbps: list[float] = []

    @property
    def at_once(self) -> int:
        """Return the number of concurrent candidates beside the baseline job."""
        return max(1, self._jobs.at_once - 1)

    def run(self, candidates: Sequence[Candidate]) -> list[Tried]:
        """Run a job of each candidate. Raises MeasurementError: the baseline job failed."""
        named = (f"{name} of {settings.buffsize >> 10} KiB" for name, settings in candidates)
        self._watch(f"trying {', '.join(named)}")
        targets = [
            self._target
            if settings == self._target.choices[name]
            else self._target.retuned({name: settings})
            for name, settings in candidates
        ]
        arms = [target.arm(name) for target, (name, _) in zip(targets, candidates, strict=True)]
        with_default = self._jobs.at_once > 1 or not self._default
        outcomes = self._jobs.run([targets[0].arms[0]] * with_default + arms, self._spec)
        if with_default:
            default = outcomes.pop(0)
            if isinstance(default, MeasurementError):
                raise default
            self._default = self._seconds(default)
        found = []
        for (name, settings), outcome in zip(candidates, outcomes, strict=True):
            self._default_gbps.append(self._gbps(self._default))
            if isinstance(outcome, MeasurementError):
                found.append(Tried(arm=name, settings=settings, failed=str(outcome)))
                continue
            seconds = self._seconds(outcome)
            ratios = {
                row: max(default, self._slowest.get(row, 0.0)) / seconds[row]
                for row, default in self._default.items()
            }
            transfers = [ratio for row, ratio in ratios.items() if row not in self._slowest]
            found.append(
                Tried(
                    arm=name,
                    settings=settings,
                    gbps=self._gbps(seconds),
                    worst_ratio=min(ratios[row] for row in self._slowest),
                    transfer_ratio=min(transfers, default=1.0),
                )
            )
        return found

    def baseline(self) -> Tried:
        """Return default NCCL with the median rate of its jobs."""
        settings = Settings(version=self._target.plan.variables.settings.version)
        rate = median(self._default_gbps)
        return Tried(arm="default", settings=settings, gbps=rate, worst_ratio=1.0)

    def _gbps(self, seconds: Mapping[TimedRow, float]) -> float:
        """Return the bus bandwidth at the large sizes."""
        rates = [
            (row.bytes, bus_gbps(row.collective, self._target.world, row.bytes, taken))
            for row, taken in seconds.items()
            if row in self._slowest
        ]
        return large_gbps(rates) or 0.0

    def _seconds(self, outcome: Outcome) -> dict[TimedRow, float]:
        return {row: taken for row, (taken,) in row_seconds(self._spec, [outcome]).items()}


def stages(target: Target, name: ChoiceName) -> tuple[Stage, ...]:
    """Return the stages of a choice's sweep.

    Where the plugin places bounce buffers, its index holds for the planned settings alone.
    """
    facts = version_facts(target.choices[name].version)

    def sockets(base: Settings) -> Iterator[Settings]:
        for threads, each in SOCKETS if target.over_sockets else ():
            yield _valid(base, socket_threads=threads, sockets_per_thread=each)

    def channels_and_sizes(base: Settings) -> Iterator[Settings]:
        for count in target.channels(name):
            # NCCL doubles the channels of a file, and of its own search.
            changes: dict[str, object] = {"channels": count}
            if name == "variables":
                changes = {"min_channels": 2 * count if count > base.channels else None}
            if count <= facts.max_channels:
                for size in BUFFSIZES:
                    yield _valid(base, **changes, buffsize=size)

    def more_sizes(base: Settings) -> Iterator[Settings]:
        for size in MORE_BUFFSIZES:
            yield _valid(base, buffsize=size)

    def algorithm_and_paths(base: Settings) -> Iterator[Settings]:
        yield _valid(base, algo=None if base.algo else "Ring")
        yield from map(check_settings, target.other_paths(name, base))

    def mechanisms(base: Settings) -> Iterator[Settings]:
        kinds = target.kinds(name, base)
        if "bounce" in kinds:
            owner = "sender" if base.shm_locality == "receiver" else "receiver"
            yield _valid(base, shm_locality=owner)
        if kinds & {"read", "write"}:
            yield _valid(base, p2p_read="read" not in kinds)
        if "bounce" in kinds and facts.shm_copy_engine:
            yield _valid(base, shm_copy_engine="both")
        if kinds & {"read", "write"}:
            yield _valid(base, p2p_copy_engine=True)

    if target.choices[name].shm_placement:
        return ()
    return sockets, channels_and_sizes, more_sizes, algorithm_and_paths, mechanisms


def _valid(base: Settings, **changes: object) -> Settings:
    return check_settings(msgspec.structs.replace(base, **changes))
