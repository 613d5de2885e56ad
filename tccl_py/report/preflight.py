"""A preflight as a table, as JSON with stable keys, and as metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tccl_py.errors import size_text
from tccl_py.experiments.preflight import Preflight
from tccl_py.files import picked
from tccl_py.health.drift import drift_json, metric
from tccl_py.plan.plan import Plan
from tccl_py.report.tables import Column, Columns

PREFLIGHT: Columns = (
    Column("collective", lambda row: row.collective),
    Column("size", lambda row: size_text(row.bytes)),
    Column("GB/s", lambda row: f"{row.gbps:.2f}"),
    Column(
        "expected", lambda row: f"{row.expected_gbps:.2f}" if row.expected_gbps else "not verified"
    ),
)


def preflight_json(plan: Plan, preflight: Preflight) -> dict[str, Any]:
    """Return the JSON of `check --preflight --json`."""
    return {
        "ok": preflight.ok,
        "values_right": not (preflight.arm and preflight.arm.wrong),
        "findings": preflight.problems,
        "collective": preflight.collective,
        "collectives_checked": preflight.checked,
        "bandwidths": [
            {**picked(row, "bytes", "gbps", "expected_gbps"), "p": row.compared.p}
            for row in preflight.rates
        ],
        **drift_json(plan, preflight.drift),
        "seconds": preflight.seconds,
    }


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
