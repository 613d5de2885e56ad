"""A plan with what its directory has beside it, and advice, as commands print them as JSON."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

from msgspec import UNSET, UnsetType

from tccl_py.errors import InputError
from tccl_py.experiments.communication import Communication
from tccl_py.experiments.record import TradeOff, Verification, trade_offs
from tccl_py.experiments.sizes import load_sizes
from tccl_py.files import fill, says
from tccl_py.health.advice import Advice
from tccl_py.model.links import Proof
from tccl_py.plan.load import is_directory
from tccl_py.plan.plan import Plan
from tccl_py.plan.results import ProvenLinks
from tccl_py.plan.size_choices import BySize, list_by_size
from tccl_py.plan.text import ShownPlan, show_plan
from tccl_py.planning.hardware import limit_sentences
from tccl_py.report.sizes import Tuned, report_tuning


class PlanReport(ShownPlan, frozen=True, kw_only=True):
    """`tccl plan --json` and `tccl show --json`."""

    by_size: tuple[BySize, ...]
    tunings: tuple[Tuned, ...]
    limits: Annotated[tuple[str, ...], says("parts of the machine that limit it before NCCL does")]
    links: Annotated[Proof | UnsetType, says("the proof by which it was planned")] = UNSET
    workload: Annotated[Communication | UnsetType, says("with `--workload`: predicted")] = UNSET
    trade_offs: Annotated[tuple[TradeOff, ...] | UnsetType, says("of a verified plan")] = UNSET


class AdviceReport(Advice, frozen=True, kw_only=True):
    """`tccl advise --json`."""

    workload: Annotated[Communication | UnsetType, says("with `--workload`: predicted")] = UNSET
    means: Annotated[
        tuple[tuple[str, str], ...], says("lines on other means than NCCL, with `--workload`")
    ] = ()


def report_plan(plan: Plan, directory: Path, workload: Communication | None = None) -> PlanReport:
    """Return a plan with what its directory, or its file alone, has beside it.

    `workload` is what is predicted for a job.
    """
    links = ProvenLinks.load(directory) if is_directory(directory) else None
    found: tuple[TradeOff, ...] | UnsetType = UNSET
    if (directory / Verification.FILE).exists():
        with suppress(InputError):
            verified = Verification.load(directory)
            found = () if verified is None else trade_offs(verified)
    return fill(
        PlanReport,
        show_plan(plan),
        by_size=list_by_size(plan),
        tunings=tuple(map(report_tuning, load_sizes(directory))),
        limits=tuple(limit_sentences(plan)),
        links=UNSET if links is None else links.proof,
        workload=UNSET if workload is None else workload,
        trade_offs=found,
    )
