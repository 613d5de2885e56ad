"""The Verification: what was found of each arm of a plan, with its evidence, and its file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

import msgspec

from tccl_py.nccl.settings import Settings
from tccl_py.plan.directory import keep_beside_plan, read_beside_plan
from tccl_py.plan.plan import AS_GOOD, ChoiceName
from tccl_py.verify.comparison import EQUAL, Compared, Verdict, compare
from tccl_py.verify.orders import Backend, Groups, Wrong, is_large, size_text
from tccl_py.verify.rings import RingsFound

FORMAT_VERSION = 2
VERIFICATION_FILE = "verify.json"


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one timed row in each round, and the arm's speed over the baseline's.

    A row is a collective of `bytes` over all GPUs, or over each of `groups` of them at once, or a
    training step in a `mode`. `gbps` is the median bus bandwidth, 0 of a training step.
    """

    bytes: int = 0
    groups: Groups = ()
    mode: str = ""
    seconds: tuple[float, ...]
    gbps: float = 0.0
    compared: Compared
    verdict: Verdict


class ArmResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What real collectives did in one arm.

    `gbps` is the bus bandwidth at the large sizes, to hold against `predicted_gbps`, and `large`
    the speed over default NCCL's at these. `failure` is why a job failed; nothing is timed then.
    """

    name: ChoiceName
    settings: Settings
    environment: dict[str, str]
    predicted_gbps: float | None = None
    gbps: float | None = None
    large: Compared = EQUAL
    rows: tuple[Row, ...] = ()
    checked: int = 0
    wrong: tuple[Wrong, ...] = ()
    rings: RingsFound | None = None
    failure: str = ""

    @property
    def sizes(self) -> tuple[Row, ...]:
        """Collectives over all GPUs."""
        return tuple(one for one in self.rows if one.bytes and not one.groups)

    @property
    def groups(self) -> tuple[Row, ...]:
        """Collectives over smaller communicators."""
        return tuple(one for one in self.rows if one.groups)

    @property
    def training(self) -> tuple[Row, ...]:
        """Training steps."""
        return tuple(one for one in self.rows if one.mode)

    @property
    def worse_sizes(self) -> tuple[int, ...]:
        """Sizes, in bytes, for which the arm is not recommended."""
        return tuple(one.bytes for one in self.sizes if one.verdict == "worse")

    @property
    def losses(self) -> tuple[Row, ...]:
        """Rows whose interval lies below default NCCL, if only by chance."""
        return tuple(one for one in self.rows if one.compared.loses)

    @property
    def objections(self) -> tuple[str, ...]:
        """Why the arm may not be used: it is wrong, not as planned, or somewhere slower."""
        if self.failure:
            return (f"its job failed: {self.failure}",)
        found = [f"{len(self.wrong)} values are wrong"] if self.wrong else []
        if self.rings is not None and not self.rings.same:
            found.append("NCCL does not do what was planned")
        if self.worse_sizes:
            found.append(f"it is slower than default NCCL at {sizes_text(self.worse_sizes)}")
        if any(one.verdict == "worse" for one in self.training):
            found.append("a training step is slower than with default NCCL")
        for groups in dict.fromkeys(one.groups for one in self.losses if one.groups):
            sizes = sizes_text([one.bytes for one in self.losses if one.groups == groups])
            found.append(f"communicators over {groups_text(groups)} are slower at {sizes}")
        return tuple(found)

    @property
    def accepted(self) -> bool:
        """Whether the arm may be used."""
        return not self.objections

    def over(self, other: ArmResult) -> Compared:
        """Compare the large sizes with another arm's; with the largest size if none is large."""
        sizes = [one.bytes for one in self.sizes]
        large = [at for at, size in enumerate(sizes) if is_large(size)] or [-1]
        (found,) = compare([_mean(self.sizes, large)], [_mean(other.sizes, large)])
        return found


def _mean(rows: Sequence[Row], chosen: Sequence[int]) -> list[float]:
    """Return the geometric mean of some rows' seconds in each round."""
    return [geometric_mean(job) for job in zip(*(rows[at].seconds for at in chosen), strict=True)]


class Tried(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings tried by a job: bus bandwidth at the largest sizes; why it failed, if so.

    `low` is the worst ratio to the slowest job of default NCCL at any size.
    """

    arm: ChoiceName
    settings: Settings
    gbps: float = 0.0
    low: float = 0.0
    failed: str = ""


class Verification(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What real collectives did in each arm; default NCCL, the baseline, is the first.

    `recommended` is the plan's choice, `chosen` the one that was asked about, `winner` what jobs
    found best. `order` is the arm of each job, in turn, A the first; `raw` has each job's timings:
    seconds a call, by row, rank and batch. `at_once` jobs ran at the same time, interleaved. Of
    several hosts `hosts` are the names in rank order, `gpus` none, and rings have ranks in place of
    GPUs. Predictions of a `tuned` plan are what jobs achieved before.
    """

    machine: str
    gpus: tuple[int, ...]
    hosts: tuple[str, ...] = ()
    backend: Backend
    arms: tuple[ArmResult, ...]
    recommended: ChoiceName
    chosen: ChoiceName
    winner: ChoiceName
    simulated: bool
    assumed: bool
    collective: str
    left_out: tuple[str, ...]
    versions: dict[str, str]
    devices: tuple[str, ...]
    order: str
    raw: tuple[tuple[tuple[tuple[float, ...], ...], ...], ...]
    seconds: float
    at_once: int = 1
    tuned: bool = False
    tried: tuple[Tried, ...] = ()
    notices: tuple[str, ...] = ()
    plan_digest: str = ""
    format_version: int = FORMAT_VERSION

    def arm(self, name: ChoiceName) -> ArmResult | None:
        """Return what was found of a choice; None if it was not compared."""
        return next((one for one in self.arms if one.name == name), None)

    @property
    def best(self) -> ArmResult:
        """The winner's arm."""
        return next(one for one in self.arms if one.name == self.winner)

    @property
    def judged(self) -> ArmResult:
        """The arm that was asked about."""
        return next(one for one in self.arms if one.name == self.chosen)

    @property
    def accepted(self) -> bool:
        """Whether the choice that was asked about may be used."""
        return self.judged.accepted

    @property
    def rounds(self) -> int:
        """How many jobs each arm had."""
        return self.order.count("A")


def winner(arms: Sequence[ArmResult]) -> ChoiceName:
    """Return the smallest intervention within 1 % of the best, or within the interval if wider.

    Only arms that are accepted and have no row whose interval lies below default NCCL count.
    """
    usable = [arms[0], *(one for one in arms[1:] if one.accepted and not one.losses)]
    best = max(usable, key=lambda one: one.large.ratio)

    def as_good(one: ArmResult) -> bool:
        lead = EQUAL if one is best else best.over(one)
        return lead.ratio <= 1 + AS_GOOD or lead.low <= 1

    return next(one.name for one in usable if as_good(one))


def sizes_text(sizes: Sequence[int]) -> str:
    """Return sizes in bytes as people write them, in a list."""
    return ", ".join(map(size_text, sizes))


def groups_text(groups: Groups) -> str:
    """Return groups of GPUs in words.

    >>> groups_text(((0, 1), (2, 3)))
    'GPUs 0,1 and 2,3'
    """
    return "GPUs " + " and ".join(",".join(map(str, one)) for one in groups)


def keep_verification(found: Verification, directory: Path) -> Verification:
    """Write verify.json beside a plan, whole or not at all; gives what was written.

    Raises:
        InputError: it cannot be written.
    """
    return keep_beside_plan(found, directory / VERIFICATION_FILE)


def load_verification(directory: Path) -> Verification | None:
    """Return what was verified of the plan in a directory; None if nothing, or of an earlier plan.

    Raises:
        InputError: the file is unreadable, of another version, or damaged.
    """
    path = directory / VERIFICATION_FILE
    if not path.exists():
        return None
    return read_beside_plan(path, Verification, version=FORMAT_VERSION)
