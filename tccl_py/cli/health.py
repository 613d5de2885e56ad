"""`tccl check`, `doctor` and `advise`: drift, problems of a host, and what to try first."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import typer
from msgspec import UNSET
from msgspec.structs import replace
from rich.console import Console
from rich.padding import Padding

from tccl_py.cli import options
from tccl_py.cli.env import EQUAL_HOSTS
from tccl_py.cli.measure import controlled_job, job_of_plan
from tccl_py.cli.options import (
    MACHINE_HELP,
    arg,
    flag,
    opt,
    p2p_argument,
    refuse,
)
from tccl_py.cli.output import BAD, DOUBT, GOOD, ProgressLine, grid, print_table, results
from tccl_py.cli.plan import plan_by_workload, prove_into, proven_host
from tccl_py.cli.process import (
    ANSWER_IS_NO,
    check_result_file,
    notice,
    notice_each,
    print_json,
    write_result,
)
from tccl_py.errors import (
    CTRL_C_AND_SIGTERM,
    InputError,
    check_range,
    interrupts_put_off,
    spell,
)
from tccl_py.experiments.communication import Communication
from tccl_py.experiments.jobs import Launcher
from tccl_py.experiments.means_table import MeansTable, links_of, means_lines
from tccl_py.experiments.nccl_tests import find_program
from tccl_py.experiments.preflight import (
    FAMILIES,
    Preflight,
    Problem,
    measure_plan_again,
)
from tccl_py.files import encode_json, fill
from tccl_py.health.advice import Advice, advice_by, advice_request, answers_by_cpu
from tccl_py.health.comparison import (
    HostsCompared,
    compare_hosts,
    comparison_lines,
    finding_lines,
    read_reports,
)
from tccl_py.health.doctor import Diagnosis, examine, this_host
from tccl_py.health.drift import SMALLEST, Comparison, Drift, Effort, metric_labels, prometheus_text
from tccl_py.health.host import Defect, DriverState, HostState, files_of_this_host
from tccl_py.health.nics import check_network
from tccl_py.health.pasted import findings_lines, read_pasted
from tccl_py.health.plugin import plugin_complaints
from tccl_py.health.proving import ProvenHost, prove_again
from tccl_py.launchers import in_job
from tccl_py.model.links import DoctorReport, Proof
from tccl_py.model.measurement import IN_DRY_RUN
from tccl_py.plan.directory import machine_file
from tccl_py.plan.plan import Plan
from tccl_py.plan.results import plan_in
from tccl_py.plan.text import plan_name
from tccl_py.planning.opening import machine_subject
from tccl_py.report.check import PREFLIGHT, preflight_metrics, report_check
from tccl_py.report.plan import AdviceReport
from tccl_py.report.tables import Column, lines
from tccl_py.simulator.descriptions import is_named, load_machine
from tccl_py.sources.hosts import examined_hosts
from tccl_py.workloads.sources import workload_for

_MAX_SECONDS = 86_400
_CHECK_S, _PREFLIGHT_S = 120.0, 60.0
_SHOWN = 8
Lines = tuple[tuple[str, str], ...]
"""A name and a text for each line."""
_SHOWN_FLOWS = 3
"""Sets, and further flows of each, that the table has room for."""


def check(
    directory: Path = options.DIRECTORY,
    *,
    preflight: bool = flag("--preflight", "Check NCCL's collectives as well."),
    max_seconds: float | None = opt("S", "Seconds at most; 120 if not given, 60 with --preflight."),
    with_: str | None = opt(
        "PROGRAM", "For --preflight: one of nccl-tests; needs no torch.", "--with"
    ),
    seed: int = opt("N", "Seed of the sample; another each day sees more sets.", default=0),
    alike: bool = EQUAL_HOSTS,
    prometheus: bool = flag("--prometheus", "Print metrics for Prometheus."),
    output: Path | None = options.OUTPUT,
    json: bool = options.JSON,
) -> None:
    """See whether a machine has drifted since its plan was measured, within two minutes.

    Some sets of the plan's journal are measured again on idle GPUs. With --preflight, as before
    each job of a scheduler, real collectives are run and their values compared first.

    Exit codes: 0 nothing changed; 1 something did (with --preflight: became slower, or is wrong); 2
    not all could be judged, and nothing is wrong.

    Examples:

        tccl check my-plan
        tccl check my-plan --prometheus -o /var/lib/node_exporter/tccl.prom
        tccl check my-plan --preflight --json
    """
    check_result_file("--output", output)
    seconds = (_PREFLIGHT_S if preflight else _CHECK_S) if max_seconds is None else max_seconds
    check_range("--max-seconds", seconds, 0, _MAX_SECONDS, above=True)
    check_range("--seed", seed, 0, math.inf)
    plan = plan_in(directory)
    notice_each(plugin_complaints())
    if plan.cluster.cables and not plan.simulated:
        network = (one for one in check_network(files_of_this_host()) if isinstance(one, Defect))
        notice_each(f"{one.what} at {one.where}; {one.fix}" for one in network)
    effort = Effort(seconds=seconds, seed=seed, families=FAMILIES if preflight else 1)
    links = None if prometheus else _links_again(plan, directory, json=json, output=output)
    with interrupts_put_off(CTRL_C_AND_SIGTERM), ExitStack() as stack:
        job = job_of_plan(plan, directory, stack)
        result = measure_plan_again(
            plan,
            directory,
            effort,
            Launcher(
                job=job,
                nccl_tests=find_program(with_) if with_ else None,
                alike=alike,
                say=notice,
            ),
            preflight=preflight,
            watching=lambda: stack.enter_context(ProgressLine()).count_sets,
        )
    drift = result.drift
    if prometheus:
        labels = metric_labels(plan)
        text = "# DRY RUN\n" * plan.dry_run + prometheus_text(drift, labels, now=time.time())
        write_result(text + preflight_metrics(result, labels) * preflight, output)
    elif json:
        write_result(encode_json(report_check(plan, result, links)), output)
    else:
        if preflight:
            _print_preflight(result, dry_run=plan.dry_run)
        _print_drift(plan, drift)
    if not result.ok if preflight else drift.has_drifted:
        raise typer.Exit(ANSWER_IS_NO)
    if preflight and links is not None and links.verdict == "inconclusive":
        raise InputError("links", f"cannot be proven: {links.what}", "end what uses the GPUs")


def _links_again(plan: Plan, directory: Path, *, json: bool, output: Path | None) -> Proof | None:
    """Prove the links of a plan's host again; what is worse than planned ends the command."""

    with interrupts_put_off(CTRL_C_AND_SIGTERM):
        links, fault = prove_again(plan, directory, notice)
    if links is None or not fault:
        if links is not None and links.verdict != "sound":
            notice(f"links: {links.verdict}: {links.what}")
        return links
    if json:
        problem = Problem("links", links.common, "sound", fault)
        found = report_check(plan, Preflight(), links)
        found = replace(found, ok=False, drifted=True, findings=(problem,))
        write_result(encode_json(found), output)
    else:
        results().print(f"links are not as planned: {fault}", style=BAD)
    raise typer.Exit(ANSWER_IS_NO)


def _print_preflight(preflight: Preflight, *, dry_run: bool) -> None:
    console = results()
    verdict = f"preflight {'passed' if preflight.ok else 'failed'}{IN_DRY_RUN * dry_run}"
    console.print(verdict, style=GOOD if preflight.ok else BAD)
    for problem in preflight.problems:
        console.print(f"{problem.what}: {problem.measured}, expected {problem.expected}")
        console.print(f"  at {problem.where}")
    if preflight.rates:
        console.print(f"{preflight.checked} results of collectives compared, bit by bit")
        print_table(console, lines(PREFLIGHT, preflight.rates))


def _print_drift(plan: Plan, drift: Drift) -> None:
    console = results()
    verdict, style = ("drifted", BAD) if drift.has_drifted else ("no drift", GOOD)
    if not (drift.has_drifted or drift.sets):
        verdict, style = "no verdict on drift", DOUBT
    console.print(f"{plan_name(plan)}: {verdict} since planning ({plan.provenance})", style=style)
    if drift.changes:
        console.print("Of each set that changed the flow that fell most:")
        print_table(console, lines(_DRIFT, drift.changes[:_SHOWN]))
        if hidden := len(drift.changes[_SHOWN:]):
            console.print(f"and {spell(hidden, 'more set')}; --json has all")
        console.print(f"Suspected: {drift.points_to}.")
    for text, why in drift.lost.items():
        console.print(f"cannot be measured any more: {text}: {why}")
    console.print(
        f"{spell(len(drift.sets), 'set')} of the journal compared in {drift.seconds:.0f} s. "
        f"Changes up to {SMALLEST:.0%} do not count; of 100 checks of an unchanged machine at most "
        f"{100 * drift.false_alarm_rate:.0f} gives a false alarm."
    )
    if drift.skipped:
        console.print(
            f"{len(drift.skipped)} more were chosen, but the time was up: give --max-seconds more"
        )


def _beside(row: Comparison) -> str:
    """Return the further flows of a set, equal ones counted; the first few of many."""
    counted = Counter(flow.words for flow in row.transfers.flows)
    counted[row.flow.words] -= 1
    texts = [f"{times} x {flow}" if times > 1 else flow for flow, times in (+counted).items()]
    hidden = len(texts[_SHOWN_FLOWS:])
    return ", ".join([*texts[:_SHOWN_FLOWS], *[f"and {hidden} other flows"] * bool(hidden)])


_DRIFT = (
    Column("flow", lambda row: f"{row.flow.words}{' on ' * bool(row.hosts)}{row.hosts}"),
    Column("beside", _beside),
    Column("was GB/s", lambda row: f"{row.was_gbps:.2f}"),
    Column("is GB/s", lambda row: f"{row.is_gbps:.2f}"),
    Column("change", lambda row: f"{row.ratio - 1:+.0%}"),
    Column("p", lambda row: "< 1e-6" if row.p < 1e-6 else f"{row.p:.1g}"),
)


# `tccl doctor` and `tccl advise`

_PASTED = f"FILEs: logs of NCCL, its tests' tables, topologies; - is standard input. {MACHINE_HELP}"


_COPIED = DriverState(unseen="a copy of a host has no driver to ask")
_INDENT = (0, 0, 0, 6)
_WORDS = {"hang": "HANG", "slow": "SLOW", "note": "note"}
_STYLES = {"hang": BAD, "slow": DOUBT, "note": "bold"}


def doctor(
    files: list[Path] | None = arg("FILES", "With --compare: what `--json` wrote.", None),
    *,
    compare: bool = flag("--compare", "Compare what `tccl doctor --json` wrote on each host."),
    root: Path | None = opt("DIR", "Look at a copy of another host's files."),
    passive: bool = flag("--passive", "Only look: nothing runs on the GPUs."),
    prove: bool = options.PROVE,
    json: bool = options.JSON,
) -> None:
    """Prove that links between GPUs carry data, and look for what hangs or slows NCCL here.

    On idle GPUs kernels and NCCL's jobs run for half a minute at most. All else is only read; a
    fix is printed, never run. Root sees more. Under mpirun, srun or --compare, hosts are compared.

    Exit codes: 0 at most notes, or unproven links; 1 something hangs, slows or damages; 2 wrong
    use.

    Examples:

        tccl doctor
        tccl doctor --passive
        sudo tccl doctor --json
        tccl doctor --compare node*.json
    """
    if compare:
        _say_comparison(compare_hosts(read_reports(files or ())), (), json=json)
        return
    if root is None and in_job():
        with controlled_job() as job:
            options = (*["--prove"] * prove, *["--passive"] * passive)
            reports = list(examined_hosts(job, *options).values())
        _say_comparison(compare_hosts(reports), reports, json=json)
        return
    if root is not None and not any((root / name).is_dir() for name in ("sys", "proc", "etc")):
        right = "name one with sys, proc, etc and dev in it"
        raise InputError(str(root), "is no directory with sys, proc or etc in it", right)
    if root is not None:
        host = HostState(root=root, driver=_COPIED)
    else:
        host = this_host() if passive else proven_host(force=prove).host
    diagnosis = examine(host)
    if json:
        print_json(diagnosis)
    else:
        _print_diagnosis(diagnosis)
    if not diagnosis.healthy:
        raise typer.Exit(ANSWER_IS_NO)


def advise(
    names: list[str] | None = arg("MACHINE|FILE...", f"This host if not given. {_PASTED}", None),
    *,
    p2p: str | None = options.P2P,
    cpu: str | None = options.CPU,
    workload: str | None = options.WORKLOAD,
    json: bool = options.JSON,
) -> None:
    """Say in ten lines what NCCL does on a machine and what to try first, within a minute.

    Idle GPUs are measured for 40 s at most, and the host is examined. With MACHINE, or FILEs as
    people paste them, a model answers, anywhere. Of a log or a table of rates it says what
    happened. With --workload it names other means, as measured in a plan's directory.

    Examples:

        tccl advise
        tccl advise topology.xml
        tccl advise topo-m.txt --p2p yes
        tccl advise nccl.log all_reduce_perf.txt
        tccl advise - < report.txt
        tccl advise asus-esc8000a-e13p --workload mixture-of-experts
        tccl advise my-plan --workload tensor-parallel-decode
    """

    job = None if workload is None else workload_for(workload)
    predicted, line, findings, model = None, "", None, None
    names, measured = _machine_of_plan(names)
    proven: list[ProvenHost] = []
    machine = names[0] if names else None
    request = advice_request(machine, p2p=p2p_argument(p2p), cpu=cpu)
    console = results()
    with interrupts_put_off():
        if names and machine is not None and (len(names) > 1 or not is_named(machine)):
            pasted = read_pasted(names)
            findings, model = pasted.findings, pasted.model
            if model is None:
                of_models = {"--p2p": p2p, "--cpu": cpu, "--workload": workload}
                refuse(of_models, "is about machines", "add the file of one, or leave it out")
                if json:
                    print_json({"findings": findings})
                else:
                    _print_lines(console, findings_lines(findings))
                return
        elif machine is not None:
            model = load_machine(machine)
        try:
            subject = machine_subject(request, notice, prove_into(proven), model=model)
        except InputError as error:
            if machine is not None or error.where.startswith("cupy"):
                raise
            right = "name a MACHINE, as in `tccl advise topology.xml`"
            raise InputError(error.where, error.what, right) from error
        made = subject.search()
        diagnosis = examine(proven[0].host) if proven else None
        if job is not None:
            made, predicted, line = plan_by_workload(made, job, subject.model)
        advice = advice_by(made, subject, diagnosis)
        if model is not None:
            by_cpu = answers_by_cpu(request, model, notice)
            advice = replace(advice, by_cpu=by_cpu, findings=findings or UNSET)
    means = _means_lines(made, workload, measured)
    if json:
        _print_advice(advice, predicted, means)
        return
    _print_lines(console, [*([("Your job", line)] if line else ()), *means, *advice.lines()])


def _print_advice(advice: Advice, predicted: Communication | None, means: Lines) -> None:

    known = UNSET if predicted is None else predicted
    print_json(fill(AdviceReport, advice, workload=known, means=means))


def _machine_of_plan(names: list[str] | None) -> tuple[list[str] | None, Path | None]:
    """Return the machine's file in the place of a plan's directory, and that directory."""
    if not names or len(names) > 1 or not (directory := Path(names[0])).is_dir():
        return names, None
    return [str(machine_file(plan_in(directory), directory))], directory


def _means_lines(made: Plan, workload: str | None, directory: Path | None) -> Lines:
    """Return lines on other means than NCCL, if a workload is given."""
    if workload is None:
        return ()

    table = None if directory is None else MeansTable.load(directory)
    return tuple(means_lines(workload, links_of(made.machine, made.knowledge), table))


def _print_lines(console: Console, lines: Iterable[tuple[str, str]]) -> None:
    for name, text in lines:
        console.print(grid([(name.ljust(9), text)]), style=GOOD if name == "Try first" else "")


def _say_comparison(found: HostsCompared, reports: Sequence[DoctorReport], *, json: bool) -> None:
    """Print hosts compared, and the findings of each of a job; end by 1 where one is bad."""
    if json:
        print_json(replace(found, reports=tuple(reports)) if reports else found)
    else:
        console = results()
        for text, severity in (*comparison_lines(found), *finding_lines(reports)):
            console.print(text, style=_STYLES[severity] if severity else "")
    bad = any(one["severity"] != "note" for report in reports for one in report.findings)
    if bad or not found.healthy:
        raise typer.Exit(ANSWER_IS_NO)


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    console = results()
    for finding in diagnosis.findings:
        values = (finding.measured, finding.expected and f"expected {finding.expected}")
        numbers = ", ".join(value for value in values if value)
        headline = f"{finding.what}: {numbers}" if numbers else finding.what
        console.print(f"{_WORDS[finding.severity]}  {headline}", style=_STYLES[finding.severity])
        lines = [("at", finding.where), ("why", finding.why), ("source", finding.source)]
        lines += [("fix", finding.fix)] if finding.fix else []
        console.print(Padding(grid(lines), _INDENT))
        console.print()
    if diagnosis.unseen:
        console.print("Not seen:")
        unseen = [("-", f"{unseen.what}: {unseen.why}") for unseen in diagnosis.unseen]
        console.print(Padding(grid(unseen), _INDENT))
        console.print()
    counts: Counter[str] = Counter(finding.severity for finding in diagnosis.findings)
    words = {"hang": "may hang NCCL", "slow": "may slow it"}
    parts = [f"{counts[kind]} {text}" for kind, text in words.items() if counts[kind]]
    bad = ", ".join(parts) or "nothing that hangs or slows NCCL"
    notes = f", {counts['note']} to know of" if counts["note"] else ""
    links = diagnosis.links
    unproven = links is not None and links.verdict == "inconclusive"
    doubt = "; whether the links carry data was not proven" * unproven
    style = BAD if not diagnosis.healthy else DOUBT if unproven else GOOD
    console.print(f"Found: {bad}{notes}{doubt}.", style=style)
