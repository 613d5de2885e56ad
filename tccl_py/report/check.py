"""A check and a preflight as a table, as JSON, and as metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from tccl_py.errors import size_text
from tccl_py.experiments.preflight import Preflight, Problem
from tccl_py.files import fill, pick, says
from tccl_py.health.drift import metric
from tccl_py.model.links import Proof
from tccl_py.model.transfer import Flow, TransferSet
from tccl_py.plan.plan import Plan
from tccl_py.plan.text import plan_name
from tccl_py.report.tables import Column, Columns

PREFLIGHT: Columns = (
    Column("collective", lambda row: row.collective),
    Column("size", lambda row: size_text(row.bytes)),
    Column("GB/s", lambda row: f"{row.gbps:.2f}"),
    Column(
        "expected", lambda row: f"{row.expected_gbps:.2f}" if row.expected_gbps else "not verified"
    ),
)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A set whose rate changed; the rates are those of the flow that fell most."""

    set: TransferSet
    flow: Flow
    was_gbps: float
    is_gbps: float
    ratio: float
    p: float
    hosts: Annotated[str | UnsetType, says("their class, where there are several")] = UNSET


class Bandwidth(msgspec.Struct, frozen=True, kw_only=True):
    """A collective of a preflight."""

    bytes: int
    gbps: float
    expected_gbps: Annotated[float | None, says("when the plan was verified")]
    p: float


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """`tccl check --json`; the first six keys with `--preflight` alone."""

    ok: Annotated[bool | UnsetType, says("whether jobs may run")] = UNSET
    values_right: Annotated[bool | UnsetType, says("whether no result was wrong")] = UNSET
    findings: tuple[Problem, ...] | UnsetType = UNSET
    collective: str | UnsetType = UNSET
    collectives_checked: int | UnsetType = UNSET
    bandwidths: tuple[Bandwidth, ...] | UnsetType = UNSET
    machine: str
    drifted: bool
    sets_compared: int
    false_alarm_rate: float
    changes: Annotated[tuple[Change, ...], says("worst first")]
    points_to: Annotated[str, says("the suspected part")]
    lost: Annotated[dict[str, str], says("why a set could not be measured, by set")]
    skipped: tuple[TransferSet, ...]
    seconds: float
    simulated: bool
    dry_run: bool
    links: Annotated[Proof | UnsetType, says("of a plan that was measured on GPUs here")] = UNSET


def report_check(plan: Plan, found: Preflight, links: Proof | None) -> Checked:
    """Return what `check --json` prints."""
    drift, more = found.drift, dict[str, Any]()
    if found.arm is not None:
        rates = (fill(Bandwidth, row, p=row.compared.p) for row in found.rates)
        more = {**pick(found, "ok", "collective"), "values_right": not found.arm.wrong}
        more |= {"findings": found.problems, "collectives_checked": found.checked}
        more |= {"bandwidths": tuple(rates)}
    changes = (
        fill(Change, row, set=row.transfers, hosts=row.hosts or UNSET) for row in drift.changes
    )
    return fill(
        Checked,
        drift,
        **more,
        **pick(plan, "simulated", "dry_run"),
        machine=plan_name(plan),
        sets_compared=len(drift.sets),
        changes=tuple(changes),
        drifted=drift.has_drifted,
        lost={str(transfers): why for transfers, why in drift.lost.items()},
        seconds=found.seconds if found.arm else drift.seconds,
        links=UNSET if links is None else links,
    )


def preflight_metrics(preflight: Preflight, plain: Mapping[str, str]) -> str:
    """Return the metrics that a preflight adds to those of a check, with a plan's labels."""
    sizes = [({**plain, "bytes": str(row.bytes)}, row) for row in preflight.rates]
    rates = [(labels, row.gbps) for labels, row in sizes]
    was = [(labels, row.expected_gbps) for labels, row in sizes if row.expected_gbps]
    return "".join(
        (
            metric("preflight_ok", "Whether jobs may run (1) or not (0).", [(plain, preflight.ok)]),
            metric("findings", "Reasons to keep jobs off.", [(plain, len(preflight.problems))]),
            metric(
                "collectives_checked", "Results compared bit by bit.", [(plain, preflight.checked)]
            ),
            metric("collective_gbps", "Bus bandwidth of a collective, GB/s.", rates),
            metric("collective_expected_gbps", "Bus bandwidth when it was verified, GB/s.", was),
        )
    )
