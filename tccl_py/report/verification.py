"""Verifications as text for people, and as JSON with stable keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

from tccl_py.decision import Harm
from tccl_py.errors import size_text
from tccl_py.experiments.communication import Communication
from tccl_py.experiments.comparison import FALSE_RATE, SMALLEST_EFFECT, Timed, Verdict
from tccl_py.experiments.record import (
    WINS,
    ArmResult,
    TradeOff,
    Verification,
    groups_text,
    row_words,
    sizes_text,
    trade_offs,
)
from tccl_py.experiments.sizes import SizeTuning
from tccl_py.experiments.spec import Collective, Groups, WrongValue, is_large
from tccl_py.files import fill, pick, says
from tccl_py.model.measurement import Backend, mark
from tccl_py.nccl.settings import Settings
from tccl_py.plan.chains import ChoiceName
from tccl_py.plan.text import CHOICE_WORDS
from tccl_py.report.sizes import Tuned, report_tuning
from tccl_py.report.tables import verdict_text

_SHOWN_WRONG = 5


class ComparedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A timed row of an arm beside default NCCL; `ratio` above 1 is faster."""

    collective: Collective
    bytes: Annotated[int, says("0 of a training step")]
    mode: Annotated[str, says("of a training step")]
    groups: Annotated[
        Groups, says("members of smaller communicators: GPUs, or ranks of several hosts")
    ]
    beside_gemm: Annotated[bool, says("whether a GEMM runs at once")]
    us: float | None
    gbps: Annotated[float, says("bus bandwidth")]
    ratio: float | None
    low: Annotated[float, says("the 95 % interval of `ratio`")]
    high: float
    verdict: Verdict
    harm: Annotated[
        Harm | None, says("of a choice: `open` if a loss of 5 % might not have been seen")
    ]


class SameRings(msgspec.Struct, frozen=True, kw_only=True):
    """Rings of NCCL's log beside the planned ones."""

    same: bool
    differences: tuple[str, ...]


class VerifiedArm(msgspec.Struct, frozen=True, kw_only=True):
    """A choice in the jobs of a verification."""

    name: ChoiceName
    accepted: bool
    objections: tuple[str, ...]
    gbps: Annotated[float | None, says("achieved at 64 MiB and above")]
    ratio: Annotated[float, says("over default NCCL at these sizes")]
    low: float
    high: float
    predicted_gbps: float | None
    environment: dict[str, str]
    settings: Settings
    sizes: tuple[ComparedRow, ...]
    groups: Annotated[tuple[ComparedRow, ...], says("smaller communicators")]
    training: tuple[ComparedRow, ...]
    transfers: Annotated[tuple[ComparedRow, ...], says("other collectives, and `--all`")]
    not_recommended: Annotated[tuple[int, ...], says("sizes in bytes at which it loses")]
    checked: Annotated[int, says("compared values of collectives")]
    wrong: tuple[WrongValue, ...]
    rings: Annotated[SameRings | None, says("null without a log")]
    failure: Annotated[str, says("why its job failed")]


class TriedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate of the sweep over settings, of which one job ran."""

    arm: ChoiceName
    settings: Settings
    gbps: Annotated[float, says("bus bandwidth at the large sizes")]
    worst_ratio: Annotated[float, says("the smallest, over sizes, to default NCCL's slowest job")]
    transfer_ratio: Annotated[float, says("of send/recv and all-to-all to the job beside")]
    gain: Annotated[float, says("the bus bandwidth over that job's")]
    failed: Annotated[str, says("why its job failed")]


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """`tccl verify --json`."""

    machine: str
    accepted: Annotated[
        bool, says("whether `chosen` may be used; decides the exit code without `--workload`")
    ]
    winner: Annotated[ChoiceName, says("the best by jobs")]
    recommended: Annotated[ChoiceName, says("the plan's choice")]
    chosen: Annotated[ChoiceName, says("the choice in question: `--choice`, or `recommended`")]
    arms: Annotated[tuple[VerifiedArm, ...], says("`default` first")]
    workload: Annotated[Communication | None, says("with `--workload`")]
    trade_offs: Annotated[tuple[TradeOff, ...], says("the choices that none dominates")]
    simulated: Annotated[bool, says("whether predictions are simulated")]
    dry_run: bool
    tried: Annotated[tuple[TriedChoice, ...], says("candidates of `--tune`")]
    rounds: Annotated[int, says("jobs of each arm")]
    seconds: float
    hosts: Annotated[tuple[str, ...], says("in rank order; none of one machine")]
    backend: Backend
    collective: str
    devices: Annotated[tuple[str, ...], says("names in rank order")]
    versions: dict[str, str]
    notices: tuple[str, ...]
    default_fails: Annotated[str, says("why a job of default NCCL failed")]
    tunings: tuple[Tuned, ...]


def report_verification(result: Verification, tunings: Iterable[SizeTuning] = ()) -> Verified:
    """Return what `verify --json` prints; verify.json has all timings beside."""
    arms = tuple(_arm(result, arm) for arm in result.arms)
    tried = tuple(
        fill(TriedChoice, one, arm=one.name, gbps=one.achieved_gbps or 0.0) for one in result.tried
    )
    more = {
        "tried": tried,
        "trade_offs": trade_offs(result),
        "tunings": tuple(map(report_tuning, tunings)),
    }
    return fill(Verified, result, arms=arms, **more)


def _arm(result: Verification, arm: ArmResult) -> VerifiedArm:
    rows = {"sizes": arm.sizes, "groups": arm.groups, "training": arm.training}
    rows["transfers"] = arm.transfers
    return fill(
        VerifiedArm,
        arm,
        objections=result.objections(arm),
        **pick(arm.large, "ratio", "low", "high"),
        **{name: tuple(map(_row, of)) for name, of in rows.items()},
        not_recommended=tuple(row.bytes for row in arm.sizes if row in arm.losses),
        gbps=arm.achieved_gbps,
        rings=arm.log_rings and fill(SameRings, arm.log_rings),
    )


def _row(row: Timed) -> ComparedRow:
    return fill(ComparedRow, row, beside_gemm=bool(row.beside))


def headline(result: Verification) -> tuple[str, str]:
    """Return the winner, and whether the choice in question may be used."""
    of = ",".join(result.hosts) if result.hosts else f"GPUs {','.join(map(str, result.gpus))}"
    backend = "as a DRY RUN over gloo" if result.dry_run else "over NCCL"
    return f"{result.machine}, {of}, {backend}: {_winner(result)}", _answer(result)


def _winner(result: Verification) -> str:
    """Name the winner, with its speed; where none may replace default NCCL, the speed of each."""
    where = _where(result)
    if result.winner != "default":
        return f"{WINS[result.winner]}: {result.best.large:.3f} times default NCCL {where}"
    ratios = [f"{CHOICE_WORDS[row.name]} {row.large:.3f}" for row in result.arms[1:] if row.rows]
    text = "default NCCL stays" + (f": {', '.join(ratios)} times it {where}" if ratios else "")
    return text + (", but not shown to lose nothing" if any(map(_faster, result.arms[1:])) else "")


def _faster(arm: ArmResult) -> bool:
    """Return whether an arm that may not be used is faster at the large sizes."""
    return arm.large.low > 1 and not arm.failure and not arm.accepted


def _answer(result: Verification) -> str:
    """Return whether the choice in question may be used, and why not."""
    # The baseline may be the jobs of a choice that sets the same.
    chosen = result.recommended if result.chosen == "default" else result.chosen
    name = f"{'recommended' if chosen == result.recommended else 'chosen'} choice"
    name = f"{CHOICE_WORDS[chosen]}, the {name}"
    if not result.accepted:
        return f"No to {name}: {result.against(result.chosen)}"
    if result.winner == result.chosen:
        return f"Yes to {name}"
    return f"As good as {CHOICE_WORDS[result.winner]}, by 1 % or the 95 % interval: {name}"


def _where(result: Verification) -> str:
    sizes = [row.bytes for row in result.arms[0].sizes]
    large = [size for size in sizes if is_large(size)]
    if not sizes or len(large) == 1:
        return f"at {sizes_text(large)}"
    return f"at {size_text(min(large))} and above" if large else f"at {size_text(max(sizes))}"


def facts_of(result: Verification) -> list[str]:
    """Return the results beside sizes: rings, values, communicators, and the cost."""
    lines = [f"default NCCL fails: {result.default_fails}"] if result.default_fails else []
    lines += [line for arm in result.arms for line in _arm_facts(result, arm)]
    if result.left_out:
        lines.append(f"not in this backend: {', '.join(result.left_out)}")
    lines += trade_off_lines(result)
    if result.rounds:
        at_once = f", {result.at_once} jobs at once," if result.at_once > 1 else ""
        lines.append(
            f"{result.rounds} interleaved rounds{at_once} in {result.seconds:.0f} s. Under "
            f"{SMALLEST_EFFECT:.0%} counts as the same; of 100 such comparisons of equal arms "
            f"{100 * FALSE_RATE:.0f} at most have a row that is called better or worse."
        )
    return lines


def trade_off_lines(result: Verification) -> Iterator[str]:
    """Yield a line for each choice that none dominates, if there are several."""
    choices = trade_offs(result)
    for each in choices if len(choices) > 1 else ():
        if each.choice != "default":
            speeds = ", ".join(f"{name} {speed:.2f}" for name, speed in each.workloads.items())
            harm = "harmless" if each.harmless else "not harmless"
            yield f"{CHOICE_WORDS[each.choice]}, {harm}, by these rows: {speeds} times default NCCL"


def _arm_facts(result: Verification, arm: ArmResult) -> list[str]:
    lines = [f"failed: {arm.failure}"] if arm.failure else []
    if arm.achieved_gbps is not None and arm.predicted_gbps:
        kind = mark(simulated=result.simulated, assumed=arm.assumed, dry_run=result.dry_plan)
        kind += ", the network assumed" * (arm.assumed and not result.simulated)
        origin = "achieved by earlier jobs" if result.jobs_ran else f"predicted ({kind})"
        share = arm.achieved_gbps / arm.predicted_gbps
        where = _where(result)
        rates = f"{arm.predicted_gbps:.2f} GB/s {origin}, achieved {arm.achieved_gbps:.2f}"
        lines.append(f"{rates} {where}: {share:.0%}")
    lines += [f"wrong: {row.case}, rank {row.rank}: {row.what}" for row in arm.wrong[:_SHOWN_WRONG]]
    if arm.checked and not arm.wrong:
        lines.append(f"{arm.checked} results of collectives compared, all right")
    if arm.log_rings is not None:
        lines += arm.log_rings.differences
        if arm.log_rings.same:
            lines.append(f"NCCL runs the plan's rings on all {len(arm.log_rings.found)} channels")
    further: dict[str, list[str]] = {}
    for row in (*arm.groups, *arm.training, *arm.transfers):
        over = f" over {groups_text(row.groups, result.members)}" if row.groups else ""
        size = f"{size_text(row.bytes)} " if row.bytes else ""
        if arm is not result.arms[0]:
            ratio = f"{size}{verdict_text(row)}"
            further.setdefault(f"{row_words(row)}{over}", []).append(ratio)
    lines += [f"{name}: {', '.join(ratios)}" for name, ratios in further.items()]
    lines += [f"not taken: {'; '.join(result.objections(arm))}"] if _faster(arm) else []
    return [f"{arm.name}: {line}" for line in lines]
