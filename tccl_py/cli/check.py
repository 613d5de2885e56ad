"""`tccl check`: has the machine drifted since its plan was measured?"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tccl_py.cli import options
from tccl_py.cli.measure import planned_hosts
from tccl_py.cli.options import flag, in_range, opt
from tccl_py.cli.output import BAD, GOOD, ProgressLine, results
from tccl_py.cli.process import ANSWER_IS_NO, notice_each, write_result
from tccl_py.errors import InputError, interrupts_put_off
from tccl_py.files import encode_json
from tccl_py.health.drift import (
    Drift,
    Effort,
    Journal,
    drift_json,
    find_drift,
    joined,
    measuring_again,
    prometheus_text,
)
from tccl_py.health.drift_statistics import SMALLEST, Comparison
from tccl_py.health.host import Finding, Host
from tccl_py.health.plugin import check_plugin
from tccl_py.model.measurement import BandwidthSource
from tccl_py.nccl_library import home
from tccl_py.plan.again import journal_of
from tccl_py.plan.beside import check_plan_directory
from tccl_py.plan.job import class_sources, journal_by_class
from tccl_py.plan.load import load_plan
from tccl_py.plan.plan import Plan
from tccl_py.plan.words import plan_name
from tccl_py.sources.journal import AnewSource, JournalContents
from tccl_py.sources.opening import OpenedSource

_MAX_SECONDS = 86_400
_SHOWN = 8
_SHOWN_FLOWS = 3
"""Sets, and further flows of each, that the table has room for."""


def check(
    directory: options.Directory,
    *,
    max_seconds: Annotated[float, opt("S", "Seconds of all measurements at most.")] = 120.0,
    seed: Annotated[int, opt("N", "Seed of the sample; another each day sees more sets.")] = 0,
    prometheus: Annotated[bool, flag("--prometheus", "Print metrics for Prometheus.")] = False,
    output: options.Output = None,
    json: options.Json = False,
) -> None:
    """See whether a machine has drifted since its plan was measured, within two minutes.

    Measures some sets of the plan's journal again, three times each: the plan's rings, the slowest
    hop, a set of each class of links, some for every GPU, and a random sample. The GPUs should be
    idle. Names rates that changed by more than 3 % and by more than noise explains, worst first,
    and the suspected part. At most 1 of 100 checks of an unchanged machine reports a change.

    Exit codes: 0 nothing changed, 1 something did, 2 this is another machine or nothing could be
    measured.

    --json has the keys `machine`, `drifted`, `sets_compared`, `false_alarm_rate`, `changes` (a list
    of `set`, `flow`, `was_gbps`, `is_gbps`, `ratio`, `p`), `points_to`, `lost` (why, by set),
    `skipped`, `seconds`, `simulated`. The rates are those of the flow that fell most. The metrics
    of --prometheus are tccl_check_drifted, _sets_compared, _sets_lost, _false_alarm_rate,
    _duration_seconds, _timestamp_seconds and, by set, _set_rate_ratio and _set_changed.

    Examples:

        tccl check my-plan
        tccl check my-plan --prometheus -o /var/lib/node_exporter/tccl.prom
    """
    if json and prometheus:
        raise InputError("--json beside --prometheus", "are two forms", "leave one of the two out")
    if output is not None and not (json or prometheus):
        raise InputError("--output", "is for machines", "add --json or --prometheus")
    in_range("--max-seconds", max_seconds, _MAX_SECONDS, least=0)
    if seed < 0:
        raise InputError("--seed", f"is {seed}", "0 or more")
    check_plan_directory(directory)
    plan = load_plan(directory)
    journal = journal_of(plan, directory)
    notice_each(journal.notices)
    notice_each(_plugin_notices())
    effort = Effort(seconds=max_seconds / len(plan.cluster.classes), seed=seed)
    with interrupts_put_off(), ExitStack() as stack:
        source, known, sources = _sources(plan, directory, journal, seed, stack)
        found = [
            find_drift(plan, known[number], each, number=number, effort=effort)
            for number, each in enumerate(sources)
        ]
        drift = joined(plan, found)
    notice_each(source.notices)
    ended = time.time()
    if prometheus:
        name = plan_name(plan)
        text = prometheus_text(drift, machine=name, simulated=plan.simulated, now=ended)
        write_result(text, output)
    elif json:
        write_result(encode_json(drift_json(plan, drift)), output)
    else:
        _print(plan, drift)
    if drift.drifted:
        raise typer.Exit(ANSWER_IS_NO)


def _plugin_notices() -> list[str]:
    """Return what keeps an installed plugin from its plan."""
    host = Host(home=str(home()), environment=dict(os.environ))
    found = [one for one in check_plugin(host) if isinstance(one, Finding)]
    return [f"{one.where}: {one.what}" for one in found if one.severity != "note"]


def _sources(
    plan: Plan, directory: Path, journal: JournalContents, seed: int, stack: ExitStack
) -> tuple[OpenedSource, Sequence[Journal], Sequence[BandwidthSource]]:
    """Return the source, and the earlier measurements and a source for each class of hosts."""
    line = stack.enter_context(ProgressLine())
    if plan.is_cluster and not plan.simulated:
        hosts = planned_hosts(plan, journal.header, stack)
        hosts.watch(line.measured)
        return hosts, journal_by_class(plan, journal), class_sources(hosts, plan.cluster)
    source, notices = measuring_again(plan, directory, journal.header, seed)
    notice_each(notices)
    source.watch(line.measured)
    anew = AnewSource(stack.enter_context(source))
    return source, [journal.measurements], [anew]


def _print(plan: Plan, drift: Drift) -> None:
    console = results()
    verdict = "has drifted" if drift.drifted else "is as it was"
    said = f"{plan_name(plan)} {verdict} since it was planned ({plan.provenance})"
    console.print(said, style=BAD if drift.drifted else GOOD)
    if drift.changes:
        console.print("Of each set that changed the flow that fell most:")
        console.print(_table(drift))
        console.print(f"This points to {drift.points_to}.")
    for text, why in drift.lost.items():
        console.print(f"cannot be measured any more: {text}: {why}")
    console.print(
        f"{len(drift.sets)} sets of the journal compared in {drift.seconds:.0f} s. Changes up to "
        f"{SMALLEST:.0%} do not count; of 100 checks of an unchanged machine at most "
        f"{100 * drift.false_alarm_rate:.0f} gives a false alarm."
    )
    if drift.skipped:
        console.print(
            f"{len(drift.skipped)} more were chosen, but the time was up: give --max-seconds more"
        )


def _table(drift: Drift) -> Table:
    table = Table("flow, and what ran beside it", "was GB/s", "is GB/s", "change", "p")
    table.columns[0].overflow = "fold"
    for row in drift.changes[:_SHOWN]:
        change, p = f"{row.ratio - 1:+.0%}", "< 1e-6" if row.p < 1e-6 else f"{row.p:.1g}"
        table.add_row(str(row.flow), f"{row.was_gbps:.2f}", f"{row.is_gbps:.2f}", change, p)
        for line in _beside(row):
            table.add_row(f"  {line}", "", "", "", "", style="dim")
        table.add_section()
    rest = len(drift.changes) - _SHOWN
    if rest > 0:
        table.add_row(f"and {rest} more sets; --json has all", "", "", "", "")
    return table


def _beside(row: Comparison) -> list[str]:
    """Return the further flows of a set, equal ones counted; the first few of many."""
    counted = Counter(map(str, row.transfers.flows))
    counted[str(row.flow)] -= 1
    lines = [f"{times} x {flow}" if times > 1 else flow for flow, times in (+counted).items()]
    rest = len(lines) - _SHOWN_FLOWS
    return [*lines[:_SHOWN_FLOWS], *([f"and {rest} other flows"] if rest > 0 else [])]
