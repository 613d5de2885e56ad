"""Interleaved rounds, each with a job of every arm, until the verdicts are clear."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from tccl_py.plan.plan import ChoiceName
from tccl_py.verify.arms import AnyPlace, Arm, Jobs
from tccl_py.verify.comparison import LEAST_ROUNDS, MAX_ROUNDS, Compared, compare
from tccl_py.verify.jobs import JobError, Outcome
from tccl_py.verify.orders import SIZES, Collective, Groups, Order, Timed

DEFAULT_ROUNDS = 10
DEFAULT_SECONDS = 300.0
"""Three arms have some 30 rows: of fewer than 11 rounds none of them is beyond chance."""
FEW_SIZES = (16 << 10, 1 << 20, 64 << 20, 256 << 20)
"""Sizes of jobs that try settings, and but for the largest of smaller communicators."""
_NARROW = 1 << 20
"""From this size on ratios are to be known to 1 %; below, calls take microseconds."""
_EXTRA = 4
"""How many times the rounds asked for are run where a verdict is open and there is time."""

Watcher = Callable[[str], None]
"""Is told what runs."""


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """How much is run: rounds of jobs, sizes in bytes, and seconds after which no round begins.

    LEAST_ROUNDS rounds are run in any case; fewer than `rounds` where all is clear, more where a
    verdict is open and time is left.
    """

    rounds: int = DEFAULT_ROUNDS
    sizes: tuple[int, ...] = SIZES
    seconds: float = DEFAULT_SECONDS
    collective: Collective = "all_reduce"
    checks: bool = True
    training: bool = False

    @property
    def few_sizes(self) -> tuple[int, ...]:
        """Some sizes up to the largest: no job has larger buffers than asked for."""
        return tuple(size for size in FEW_SIZES if size <= max(self.sizes)) or self.sizes

    def order(self, groups: tuple[Groups, ...] = ()) -> Order:
        """Return what each job of a round does, with smaller communicators if there are any."""
        return Order(
            backend="host",
            world=0,
            sizes=self.sizes,
            groups=groups,
            group_sizes=self.few_sizes[:3],
            collective=self.collective,
            training=self.training,
        )


class Rounds(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs of all rounds, by arm; of arms of which none failed.

    `order` has the arm of each job, in turn; `at_once` is how many jobs ran at once, at the end.
    `compared` has every row of every arm but the first, over the first arm's.
    """

    outcomes: Mapping[ChoiceName, Sequence[Outcome]]
    failures: Mapping[ChoiceName, str]
    order: tuple[ChoiceName, ...]
    at_once: int
    compared: Mapping[tuple[ChoiceName, Timed], Compared]


def round_order(arms: Sequence[Arm], number: int) -> list[Arm]:
    """Return the order of jobs in a round: A B C, C B A, B C A, A C B, ..."""
    first = number // 2 % len(arms)
    rotated = [*arms[first:], *arms[:first]]
    return rotated[::-1] if number % 2 else rotated


def run_rounds(
    place: AnyPlace,
    arms: Sequence[Arm],
    effort: Effort,
    order: Order,
    *,
    begun: float,
    watch: Watcher = lambda _: None,
) -> Rounds:
    """Run rounds of jobs until the verdicts are clear or the time is up.

    An arm of which a job fails is left out from then on, and so are its jobs before.

    Raises:
        JobError: a job of the first arm, the baseline, failed.
    """
    jobs = Jobs(place, order.sizes)
    found: dict[ChoiceName, list[Outcome]] = {arm.name: [] for arm in arms}
    ran: list[ChoiceName] = []
    failures: dict[ChoiceName, str] = {}
    compared: dict[tuple[ChoiceName, Timed], Compared] = {}
    running, count = list(arms), 0
    batch: list[Arm] = []
    most = min(MAX_ROUNDS, max(effort.rounds, LEAST_ROUNDS) * _EXTRA)
    while len(running) > 1 and count < most:
        # 1. Run as many whole rounds as devices have room for.
        numbers = range(count, count + max(1, jobs.at_once // len(running)))
        watch(f"round {' and '.join(str(number + 1) for number in numbers)}")
        batch = [arm for number in numbers for arm in round_order(running, number)]
        for arm, outcome in zip(batch, jobs.run(batch, order), strict=True):
            if not isinstance(outcome, JobError):
                found[arm.name].append(outcome)
                ran.append(arm.name)
            elif arm is arms[0]:
                raise outcome
            else:
                failures[arm.name] = str(outcome)
        running = [arm for arm in running if arm.name not in failures]
        count = len(found[arms[0].name])
        if count < LEAST_ROUNDS or len(running) == 1:
            continue
        # 2. Compare all rows of all arms at once, and stop where more rounds would say nothing new.
        compared = _compared(order, {arm.name: found[arm.name] for arm in running})
        if _enough(effort, compared, count) or time.monotonic() - begun > effort.seconds:
            break
    return Rounds(
        outcomes={arm.name: found[arm.name] for arm in running},
        failures=failures,
        order=tuple(name for name in ran if name not in failures),
        at_once=min(jobs.at_once, len(batch)),
        compared=compared,
    )


def _enough(
    effort: Effort, compared: Mapping[tuple[ChoiceName, Timed], Compared], count: int
) -> bool:
    """Whether more rounds would say nothing new.

    Beyond the rounds asked for, only a lean to harm is worth more, and sizes from _NARROW on over
    all ranks.
    """
    for (_, row), one in compared.items():
        narrow = row.bytes >= _NARROW and not row.groups
        if one.open and (count < effort.rounds or narrow or one.high < 1):
            return False
    return True


def _compared(
    order: Order, outcomes: Mapping[ChoiceName, Sequence[Outcome]]
) -> dict[tuple[ChoiceName, Timed], Compared]:
    rows = {name: row_seconds(order, jobs) for name, jobs in outcomes.items()}
    baseline = next(iter(rows.values()))
    keys = [(name, row) for name in list(rows)[1:] for row in rows[name]]
    found = compare([rows[name][row] for name, row in keys], [baseline[row] for _, row in keys])
    return dict(zip(keys, found, strict=True))


def row_seconds(order: Order, jobs: Sequence[Outcome]) -> dict[Timed, tuple[float, ...]]:
    """Return the seconds of each timed row, one value a job: those of the slowest rank.

    Ranks that are in no group, and jobs under a graph file, have no times of groups.
    """
    found: dict[Timed, list[float]] = {}
    for job in jobs:
        rows = {row: [one.timings[at] for one in job.answers] for at, row in enumerate(order.timed)}
        for mode in job.answers[0].training if order.training else ():
            rows[Timed(mode=mode)] = [one.training[mode] for one in job.answers]
        for row, ranks in rows.items():
            medians = [statistics.median(batches) for batches in ranks if batches]
            if medians:
                found.setdefault(row, []).append(max(medians))
    return {row: tuple(seconds) for row, seconds in found.items()}
