"""Verification of a plan: results of its arms, objections, the winner, trade-offs; verify.json.

Trade-offs are what each choice wins and loses for bundled workloads, none dominated. The times of a
workload are estimated from the rows: between two sizes of its collective in communicators of as
many ranks on a line of logarithms, beyond the largest size in proportion to bytes where it is near
or large, a little below the smallest as that one. A send is taken as one of send/recv.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Annotated

import msgspec
import numpy as np

from tccl_py.decision import drop_worse
from tccl_py.delivery.delivered import RingsFound
from tccl_py.errors import InputError, size_text
from tccl_py.experiments.communication import Communication
from tccl_py.experiments.comparison import EQUAL, LEAST_ROUNDS, MAX_ROUNDS, Compared, Timed, compare
from tccl_py.experiments.spec import COLLECTIVE_WORDS, Groups, Row, WrongValue, calls_of, is_large
from tccl_py.files import says
from tccl_py.model.measurement import Backend
from tccl_py.plan.chains import AS_GOOD, Choice, ChoiceName
from tccl_py.plan.results import Kept
from tccl_py.plan.text import CHOICE_WORDS
from tccl_py.workloads.workload import BUNDLED, load_bundled

WINS: dict[ChoiceName, str] = {
    "default": "default NCCL wins",
    "large-buffers": "large buffers win",
    "variables": "variables win",
    "graph": "the graph file wins",
}
_MOST_UNKNOWN = 0.1
"""Share of a workload's bytes that may be without times."""
_NEAR = 4
"""A size is near another up to this factor: that between the usual sizes."""
Curve = list[tuple[int, float]]
"""Seconds of a call by bytes, ascending."""
Curves = Mapping[tuple[str, int], Curve]
"""Curves by collective and ranks of the communicator."""


class ArmResult(Choice, frozen=True, kw_only=True):
    """A choice with the results of real collectives in its arm."""

    environment: dict[str, str]
    """All NCCL variables of its jobs."""
    large: Compared = EQUAL
    """The speed over default NCCL's at the large sizes, of which `achieved_gbps` is."""
    rows: tuple[Timed, ...] = ()
    transfers: tuple[Timed, ...] = ()
    """Rows of send/recv to the next rank, of all-to-all, and of a workload."""
    checked: int = 0
    """Compared values of collectives."""
    wrong: tuple[WrongValue, ...] = ()
    log_rings: RingsFound | None = None
    """The rings of NCCL's log beside the planned ones; None of other choices than a graph file."""
    failure: str = ""
    """Why a job failed: nothing is timed then."""

    @property
    def sizes(self) -> tuple[Timed, ...]:
        """Return collectives over all GPUs."""
        return tuple(row for row in self.rows if row.bytes and not row.groups)

    @property
    def groups(self) -> tuple[Timed, ...]:
        """Return collectives over smaller communicators."""
        return tuple(row for row in self.rows if row.groups)

    @property
    def training(self) -> tuple[Timed, ...]:
        """Return training steps."""
        return tuple(row for row in self.rows if row.trains)

    @property
    def losses(self) -> tuple[Timed, ...]:
        """Return rows that lose."""
        return tuple(row for row in (*self.rows, *self.transfers) if row.harm == "loses")

    @property
    def unclear(self) -> tuple[Timed, ...]:
        """Return rows of which a loss of 5 % might not have been seen."""
        return tuple(row for row in (*self.rows, *self.transfers) if row.harm == "open")

    @property
    def faults(self) -> tuple[str, ...]:
        """Return why the arm is of no use, at whatever speed: failed, wrong, not as planned."""
        if self.failure:
            return (f"its job failed: {self.failure}",)
        found = [f"{len(self.wrong)} values are wrong"] if self.wrong else []
        if self.log_rings is not None and not self.log_rings.same:
            found.append("NCCL does not do what was planned")
        return tuple(found)

    @property
    def accepted(self) -> bool:
        """Return whether the arm may be used."""
        return not (self.faults or self.losses or self.unclear)

    def over(self, baseline: ArmResult) -> Compared:
        """Compare the large sizes (the largest size if none is large) with another arm's."""
        large = [at for at, row in enumerate(self.sizes) if is_large(row.bytes)] or [-1]
        rows = ([arm.sizes[at].seconds for at in large] for arm in (self, baseline))
        means = [list(map(geometric_mean, zip(*row, strict=True))) for row in rows]
        return compare(means[:1], means[1:])[0]


class Tried(Choice, frozen=True, kw_only=True):
    """A candidate of the sweep, of which one job ran."""

    worst_ratio: float = 0.0
    """The smallest ratio, over sizes, to the slowest job of default NCCL."""
    transfer_ratio: float = 1.0
    """The ratio of send/recv and all-to-all to the job beside; 1.0 where they were not timed."""
    gain: float = 1.0
    """The bus bandwidth at the large sizes over that job's."""
    failed: str = ""
    """Why its job failed."""

    @property
    def channels(self) -> tuple[int, int | None]:
        """Return the numbers of channels that it sets."""
        return self.settings.channels, self.settings.min_channels


class Verification(Kept, frozen=True, kw_only=True):
    """Results of every arm of a plan."""

    FILE = "verify.json"
    machine: str
    gpus: tuple[int, ...]
    """Those of one host; () of several."""
    hosts: tuple[str, ...] = ()
    """The names of several hosts in rank order."""
    backend: Backend
    arms: tuple[ArmResult, ...]
    """The baseline, default NCCL, first. Rings over several hosts have ranks."""
    again: tuple[Timed, ...] = ()
    """Rows of default NCCL's second arm, which say how far it differs from itself."""
    recommended: ChoiceName
    """The plan's choice."""
    chosen: ChoiceName
    """The choice in question."""
    winner: ChoiceName
    """The best by jobs."""
    simulated: bool
    collective: str
    workload: Communication | None = None
    """A job's communication, if one was given."""
    left_out: tuple[str, ...]
    versions: dict[str, str]
    devices: tuple[str, ...]
    order: str
    """The arm of each job as a letter: A the baseline, the last one default NCCL `again`."""
    raw: tuple[tuple[tuple[tuple[float, ...], ...], ...], ...]
    """Each job's seconds per call, by row, rank and batch."""
    seconds: float
    at_once: int = 1
    """Jobs that ran at the same time, interleaved."""
    jobs_ran: bool = msgspec.field(default=False, name="tuned")
    """Whether jobs ran for the plan before: predictions are their bandwidths."""
    dry_plan: bool = False
    """Whether predictions are of host memory."""
    tried: tuple[Tried, ...] = ()
    notices: tuple[str, ...] = ()
    default_fails: str = ""
    """Why a job of default NCCL failed: the baseline has NCCL_P2P_DISABLE=1 then."""
    format_version: int = 3

    def fault(self) -> str:
        """Return what makes it no verification: missing arms, or unlike or untimed rows."""
        names = [arm.name for arm in self.arms]
        if names[:1] != ["default"] or not {self.winner, self.chosen}.issubset(names):
            return "lacks an arm"
        rows = [row for arm in self.arms for row in (*arm.rows, *arm.transfers)]
        if len({tuple(row.bytes for row in arm.sizes) for arm in self.arms if arm.sizes}) > 1:
            return "has arms of different sizes"
        timed = all(row.bytes >= 0 and min(row.seconds, default=0) > 0 for row in rows)
        if not timed or (rows and not self.devices):
            return "has rows without times or devices"
        sound = (arm for arm in self.arms if not arm.failure)
        rounds = {len(row.seconds) for arm in sound for row in arm.sizes}
        if len(rounds) > 1 or not all(LEAST_ROUNDS <= count <= MAX_ROUNDS for count in rounds):
            return f"has not the same {LEAST_ROUNDS} to {MAX_ROUNDS} rounds of all arms"
        return ""

    def arm(self, name: ChoiceName) -> ArmResult | None:
        """Return the result of a choice; None if it was not compared."""
        return next((arm for arm in self.arms if arm.name == name), None)

    def by_winner(self) -> Verification:
        """Return it with the winner as the plan's choice, and in question."""
        return msgspec.structs.replace(self, recommended=self.winner, chosen=self.winner)

    @property
    def dry_run(self) -> bool:
        """Return whether jobs ran over gloo."""
        return self.backend == "host"

    @property
    def achieved(self) -> dict[ChoiceName, float]:
        """Return the bus bandwidth of each choice's jobs, GB/s."""
        rates = {arm.name: arm.achieved_gbps for arm in self.arms}
        return {name: rate for name, rate in rates.items() if rate is not None}

    @property
    def best(self) -> ArmResult:
        """Return the winner's arm."""
        return next(arm for arm in self.arms if arm.name == self.winner)

    @property
    def judged(self) -> ArmResult:
        """Return the arm in question."""
        return next(arm for arm in self.arms if arm.name == self.chosen)

    @property
    def members(self) -> str:
        """Return what the numbers in groups of rows are: GPUs of one host, ranks over several."""
        return "ranks" if self.hosts else "GPUs"

    def objections(self, arm: ArmResult) -> tuple[str, ...]:
        """Return why an arm may not be used: its faults, or slower than default NCCL."""
        against = list(arm.faults)
        slower = row_texts(arm.losses, self.members)
        against += [f"{text} is slower than default NCCL" for text in slower]
        if arm.unclear and not against:
            unclear = "; ".join(row_texts(arm.unclear, self.members))
            seen = f"a loss of 5 % would not surely have been seen in {unclear}"
            against.append(f"{seen}; more rounds may tell (`tccl verify --rounds --seconds`)")
        return tuple(against)

    @property
    def accepted(self) -> bool:
        """Return whether the choice in question may be used; see `against`."""
        return not self.against(self.chosen)

    def against(self, name: ChoiceName) -> str:
        """Return why a choice that was compared may not be used, in clauses; "" if it may.

        It is the winner or as good, and all values are right, those of other choices too.
        """
        arm = next(arm for arm in self.arms if arm.name == name)
        against = list(self.objections(arm))
        # Where P2P fails default NCCL, wrong values over it say nothing of jobs without.
        others = () if self.default_fails else self.arms
        spoilt = [each for each in others if each.wrong and each is not arm]
        against += [f"values of {CHOICE_WORDS[each.name]} are wrong" for each in spoilt]
        if self.default_fails and self.recommended == name == "default":
            against.append(f"default NCCL fails: {self.default_fails}")
        if not against and name not in good_choices(self.arms):
            against.append(WINS[self.winner])
        return "; ".join(against)

    @property
    def rounds(self) -> int:
        """Return the number of jobs of each arm."""
        return self.order.count("A")


def good_choices(arms: Sequence[ArmResult]) -> tuple[ChoiceName, ...]:
    """Return the choices within 1 % of the best, or within a wider interval; the winner first.

    The winner is the smallest intervention of these. Only accepted arms count: harmless ones.
    """
    usable = [arms[0], *(arm for arm in arms[1:] if arm.accepted)]
    best = max(usable, key=lambda arm: arm.large.ratio)

    def as_good(arm: ArmResult) -> bool:
        lead = EQUAL if arm is best else best.over(arm)
        return lead.ratio <= 1 + AS_GOOD or lead.low <= 1

    return tuple(arm.name for arm in usable if as_good(arm))


def sizes_text(sizes: Sequence[int]) -> str:
    """Return sizes in bytes with their units."""
    return ", ".join(map(size_text, sizes))


def row_texts(rows: Iterable[Timed], members: str) -> Iterator[str]:
    """Yield the rows of each collective in words, with the smallest ratio; see `groups_text`."""
    alike: dict[str, list[Timed]] = {}
    for row in rows:
        alike.setdefault(row_words(row), []).append(row)
    for words, same in alike.items():
        sizes = sizes_text(sorted({row.bytes for row in same}))
        what = words if same[0].trains else f"{words} of {sizes}"
        groups = dict.fromkeys(row.groups for row in same)
        named = " or ".join(groups_text(each, members) for each in groups)
        over = "" if () in groups else f" over {named}"
        yield f"{what}{over} ({min(row.compared.ratio for row in same):.2f})"


def row_words(row: Row) -> str:
    """Return what a row does, without its size and groups."""
    if row.trains:
        return f"a training step ({row.mode})"
    return COLLECTIVE_WORDS[row.collective] + " beside a GEMM" * bool(row.beside)


def groups_text(groups: Groups, members: str) -> str:
    """Return groups as text; `members` are GPUs or ranks.

    >>> groups_text(((0, 1), (2, 3)), "GPUs")
    'GPUs 0,1 and 2,3'
    """
    return f"{members} " + " and ".join(",".join(map(str, group)) for group in groups)


def why_not_verified(directory: Path) -> str:
    """Return why a plan does not count as verified, as a predicate; "" if it does."""
    if not (directory / Verification.FILE).exists():
        return "was not verified"
    try:
        result = Verification.load(directory)
    except InputError as error:
        return f"has a verification that is of no use: {error.where} {error.what}"
    if result is None:
        return "was planned again after it was verified"
    if result.backend != "cuda":
        return "was verified without GPUs"
    # A choice that sets the same as the baseline has no arm of its own.
    arm = result.judged if result.chosen == "default" else result.arm(result.recommended)
    if arm is None:
        return f"was verified for the choice {result.chosen} alone"
    known = arm.name == "default" or any(row.harm for row in arm.transfers)
    why = "" if known else "was verified without send/recv and all-to-all"
    if against := result.against(arm.name):
        why = f"was not accepted when it was verified: {against}"
    return "failed when it was verified" if arm.failure else why


class TradeOff(msgspec.Struct, frozen=True, kw_only=True):
    """A choice's speed over default NCCL's for each bundled workload, and whether it harms none."""

    choice: ChoiceName
    harmless: bool
    workloads: Annotated[dict[str, float], says("estimated from the rows; without unknown ones")]


def trade_offs(result: Verification) -> tuple[TradeOff, ...]:
    """Return the choices that no other equals or exceeds for all bundled workloads."""
    ranks = len(result.devices)
    arms = {arm.name: arm for arm in result.arms if not arm.faults and arm.sizes}
    if ranks < 2 or "default" not in arms:
        return ()
    curves = {name: _curves(arm, ranks) for name, arm in arms.items()}
    jobs = {name: calls_of(load_bundled(name, ranks)) for name in BUNDLED}
    speeds: dict[ChoiceName, dict[str, float]] = {
        name: {
            job: speed
            for job, calls in jobs.items()
            if (speed := _speed(calls, curves["default"], curves[name], ranks)) is not None
        }
        for name in arms
    }
    # Speeds within 1 % are equal, and a job that a choice cannot run has none by it.
    compared = {
        name: {job: round(of.get(job, 0.0), 2) for job in speeds["default"]}
        for name, of in speeds.items()
    }
    return tuple(
        TradeOff(choice=name, harmless=arms[name].accepted, workloads=speeds[name])
        for name in drop_worse(compared)
    )


def _curves(arm: ArmResult, ranks: int) -> Curves:
    """Return an arm's median seconds by size."""
    rows: dict[tuple[str, int], dict[int, float]] = {}
    for row in (*arm.rows, *arm.transfers):
        if row.bytes and not (row.mode or row.beside):
            rows.setdefault(_kind(row, ranks), {}).setdefault(row.bytes, median(row.seconds))
    return {kind: sorted(seconds.items()) for kind, seconds in rows.items()}


def _kind(row: Row | Timed, ranks: int) -> tuple[str, int]:
    collective = "send_recv" if row.collective == "send" else row.collective
    return collective, max(map(len, row.groups), default=ranks)


def _speed(calls: Mapping[Row, float], default: Curves, arm: Curves, ranks: int) -> float | None:
    """Return the speed of a step's calls over default NCCL's; None where too much is unknown."""
    timed = {kind: default[kind] for kind in default.keys() & arm.keys()}
    known = {
        row: n for row, n in calls.items() if _is_near(timed.get(_kind(row, ranks)), row.bytes)
    }
    if _bytes(known.items()) < (1 - _MOST_UNKNOWN) * _bytes(calls.items()):
        return None

    def seconds(curves: Curves) -> float:
        return sum(n * at_size(curves[_kind(row, ranks)], row.bytes) for row, n in known.items())

    return seconds(default) / seconds(arm)


def _is_near(curve: Curve | None, size: int) -> bool:
    """Return whether a size is among those of a curve, near them, or as large as the largest."""
    if curve is None:
        return False
    (smallest, _), (largest, _) = curve[0], curve[-1]
    reach = math.inf if is_large(largest) else _NEAR * largest
    return smallest <= _NEAR * size and size <= reach


def _bytes(calls: Iterable[tuple[Row, float]]) -> float:
    return sum(row.bytes * count for row, count in calls)


def at_size(curve: Curve, size: int) -> float:
    """Return the seconds of a call of `size` bytes.

    >>> [round(at_size([(4, 1.0), (16, 4.0)], size), 6) for size in (1, 4, 8, 16, 64)]
    [1.0, 1.0, 2.0, 4.0, 16.0]
    """
    sizes, seconds = np.array(curve).T
    known = math.exp(np.interp(math.log(size), np.log(sizes), np.log(seconds)))
    return known * max(1.0, size / curve[-1][0])
