"""The HTML page of a plan's directory."""

from __future__ import annotations

import itertools
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

import msgspec
from markupsafe import Markup

from tccl_py import __version__
from tccl_py.errors import InputError
from tccl_py.experiments.record import Verification
from tccl_py.experiments.sizes import SizeTuning, load_sizes
from tccl_py.explanation.findings import Explanation
from tccl_py.files import explain_errors
from tccl_py.health.checks import links_now
from tccl_py.health.host import HostState, list_names
from tccl_py.model.cluster import compress
from tccl_py.model.machine import NumaNode, PciLink
from tccl_py.model.measurement import IN_DRY_RUN, JOURNAL_FILE
from tccl_py.nccl.settings import GRAPH_VARIABLE, env_sh, environment
from tccl_py.plan.chains import ChoiceName
from tccl_py.plan.plan import Plan
from tccl_py.plan.results import Kept, Tuning, plan_in, planned_fingerprint
from tccl_py.plan.size_choices import size_notes
from tccl_py.plan.staging import PLAN_FILE
from tccl_py.plan.text import (
    CHOICE_WORDS,
    advice,
    assumptions,
    choice_words,
    has_stand_ins,
    limit_text,
    notices,
    plan_name,
    proof,
    recommended_words,
    summary,
    unrated_text,
)
from tccl_py.planning.hardware import limit_sentences
from tccl_py.planning.plan_sources import planned_model
from tccl_py.report.drawing import Journal, NodeView, heat_map, node_view, templates, viridis
from tccl_py.report.machine import link_words
from tccl_py.report.sizes import arm_charts, entry_lines, size_charts
from tccl_py.report.verification import headline, trade_off_lines
from tccl_py.simulator.model import gpu_names
from tccl_py.simulator.source import Simulator
from tccl_py.sources.journal import JournalContents, read_journal
from tccl_py.sources.pairs import pair_flow, pair_sets

_DRY_RUN = "is a dry run without GPUs"
_MOST_HOSTS = 64
"""More hosts are not all listed; `nccl/order/hosts.txt` has them."""
REPORT_FILE = "report.html"
_HEAD_BYTES = 2000
_GENERATOR = '<meta name="generator" content="tccl report">'
"""Near the top of every report, to distinguish it from other files."""


K = TypeVar("K", bound=Kept)


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """A plan's directory; None stands for a missing file.

    `pairs` are rates of pairs of GPUs beyond the journal. `driver` is that of the measured host,
    and `now` has the links of its PCIe devices as they are, where the report is made there.
    `notices` are sentences.
    """

    directory: Path
    plan: Plan
    journal: JournalContents | None
    explanation: Explanation | None
    verification: Verification | None
    pairs: Journal
    planned: str
    driver: str
    now: dict[str, PciLink]
    sizes: tuple[SizeTuning, ...]
    notices: tuple[str, ...]


def read_contents(directory: Path) -> Contents:
    """Read the files of a report; only the plan must be there."""
    plan = plan_in(directory)
    journal, notices = _journal(directory / JOURNAL_FILE, plan)
    fingerprint = None if plan.simulated else planned_fingerprint(plan, directory)
    day = datetime.fromtimestamp((directory / PLAN_FILE).stat().st_mtime, tz=timezone.utc)

    def load(kind: type[K]) -> K | None:
        try:
            finding = kind.load(directory)
        except InputError as error:
            why = f"{error.what}; {error.right}"
        else:
            if isinstance(finding, Verification) and finding.backend != "cuda":
                why = _DRY_RUN
            elif finding is not None or not (directory / kind.FILE).exists():
                return finding
            else:
                why = "is of an earlier plan"
        notices.append(f"{kind.FILE} is left out: it {why}")
        return None

    explanation = load(Explanation)
    verification = load(Verification)
    for arm in verification.arms if verification is not None else ():
        notices += [f"jobs of the choice {arm.name} failed: {arm.failure}"] * bool(arm.failure)
    notices += trade_off_lines(verification) if verification is not None else ()
    sizes = load_sizes(directory)
    if any(tuning.backend != "cuda" for tuning in sizes):
        sizes = ()
        notices.append(f"{Tuning.FILE} is left out: it {_DRY_RUN}")
    return Contents(
        directory=directory,
        plan=plan,
        journal=journal,
        explanation=explanation,
        verification=verification,
        pairs=simulated_pairs(plan, directory),
        planned=f"{day:%Y-%m-%d}",
        driver=fingerprint.driver if fingerprint is not None else "",
        now=links_now(plan.machine, fingerprint, HostState()) if fingerprint is not None else {},
        sizes=sizes,
        notices=tuple(notices),
    )


def _journal(path: Path, plan: Plan) -> tuple[JournalContents | None, list[str]]:
    """Return the journal beside the plan, and notices; None for another machine's journal."""
    if not path.exists():
        return None, [f"{path.name} is not there: rates of single hops and pairs are not known"]
    journal = read_journal(path)
    header = journal.header
    names = {part.machine.name for part in plan.cluster.classes}
    foreign = header.machine not in names and not header.hosts
    if foreign or header.simulated != plan.simulated:
        kind = "simulated" if header.simulated else "measured"
        return None, [f"{path.name} is left out: it holds {kind} rates of {header.machine}"]
    return journal, list(journal.notices)


def simulated_pairs(plan: Plan, directory: Path) -> Journal:
    """Return the rate of each pair of GPUs by the model of a simulated plan; {} without a model."""
    model = None
    if plan.simulated and len(plan.cluster.classes) == 1:
        model = planned_model(plan, directory)
    if model is None:
        return {}
    ends = itertools.permutations(plan.class_gpus[0], 2)
    sets = pair_sets([pair_flow(model.machine, model.knowledge, *pair) for pair in ends])
    return {measurement.transfers: [measurement] for measurement in Simulator(model).measure(sets)}


def report_html(contents: Contents) -> str:
    """Return the report on a plan's directory, as one HTML document."""
    plan, verified = contents.plan.as_shown, contents.verification
    nodes = [_node(contents, number) for number in range(len(plan.cluster.classes))]
    return (
        templates()
        .get_template("report.html")
        .render(
            generator=Markup(_GENERATOR),
            plan=plan,
            name=plan_name(plan),
            advice=advice(plan),
            contents=contents,
            # Facts
            facts=(plan_name(plan), choice_words(plan.recommended, plan.job_settings)),
            about=_about(contents, nodes),
            verified=headline(verified) if verified else (),
            command=_command(contents),
            mark=plan.provenance,
            notices=_notices(contents),
            variables=environment(plan.settings),
            chosen=_chosen(plan),
            exports=env_sh(plan.plain_choice.settings),
            directory=_directory(contents),
            # Drawings
            nodes=nodes,
            stand_ins=has_stand_ins(plan),
            kinds=_kinds(nodes),
            rates=rate_bars(plan, verified.achieved if verified else {}),
            size_notes=list(size_notes(plan)),
            charts=list(size_charts(contents.sizes)),
            verified_charts=list(arm_charts(verified)) if verified else [],
            entries=entry_lines(contents.sizes),
            gradient=[viridis(step / 10) for step in range(11)],
            # Tables
            most_hosts=_MOST_HOSTS,
            node_of={node.name: node for node in nodes},
            provenance=provenance_lines(contents),
        )
    )


def _about(contents: Contents, nodes: Sequence[NodeView]) -> Iterator[tuple[str, str]]:
    """Yield what the plan is of, and with which software, as a name and words."""
    plan = contents.plan
    yield "host", list_names([host.name for host in plan.hosts])
    for node in nodes:
        machine, of = node.machine, f" of {node.name}" if node.name else ""
        gpus = f"{len(node.gpus)} of {len(machine.gpus)} ({gpu_list(node.gpus)})"
        yield f"GPUs{of}", f"{gpus}, {gpu_names(machine)}"
        cpus = (" ".join(filter(None, (n.vendor, n.arch))) + _family(n) for n in machine.numa_nodes)
        yield f"NUMA nodes{of}", _count_texts(cpus)
        speeds = (
            f"{nic.speed_mbps / 1000:g} Gb/s" if nic.speed_mbps else "speed not reported"
            for nic in machine.nics
        )
        yield f"NICs{of}", _count_texts(speeds) or "none"
        if has_stand_ins(plan):
            continue
        best = _count_texts(" ".join(link_words(gpu.link)) for gpu in machine.gpus)
        links = [contents.now[gpu.id] for gpu in machine.gpus if gpu.id in contents.now]
        present = _count_texts(" ".join(link_words(link)) for link in links)
        pcie = (best or "not reported") + (f"; now {present}" if present else "")
        yield f"PCIe of GPUs{of}", pcie
    yield "driver", contents.driver or ("none: simulated" if plan.simulated else "not recorded")
    facts = dict(summary(plan))
    yield from ((name, facts[name]) for name in ("NCCL", "pinned") if name in facts)
    yield "planned", contents.planned
    yield "report by", f"tccl-py {__version__}"


def _count_texts(words: Iterable[str]) -> str:
    return ", ".join(f"{n} x {word}" for word, n in Counter(words).items() if word.strip())


def _family(node: NumaNode) -> str:
    return f" (family {node.family}, model {node.model})" if node.family is not None else ""


def gpu_list(gpus: Sequence[int]) -> str:
    """Return GPU indices as `tccl env --gpus` takes them.

    >>> gpu_list((0, 1, 2, 5))
    '0-2,5'
    """
    return compress(map(str, gpus)).strip("[]")


def _directory(contents: Contents) -> str:
    """Return the plan's directory as a shell takes it anywhere."""
    return shlex.quote(str(contents.directory.resolve()))


def _command(contents: Contents) -> str:
    """Return the command for a job over the plan's GPUs, or "" where there is nothing to set."""
    plan, directory = contents.plan, _directory(contents)
    if plan.recommended == "default" or plan.dry_run:
        return ""
    if not plan.cluster.closes:
        return f". {directory}/nccl/env.sh"
    return f'eval "$(tccl env {directory} --gpus {gpu_list(plan.gpus)})"'


def _chosen(plan: Plan) -> dict[str, str]:
    """Return the variables of the recommended choice, the graph file by its place in the plan."""
    graph = {GRAPH_VARIABLE: "nccl/graph.xml"} if plan.names_graph and plan.cluster.closes else {}
    return environment(plan.job_settings) | graph


def _kinds(nodes: Sequence[NodeView]) -> set[str]:
    """Return the kinds of lines in the drawings of rings."""
    hops = [hop for node in nodes for ring in node.rings for hop in ring.hops]
    return {hop.kind for hop in hops} | {"write slowest" for hop in hops if hop.slowest}


def _node(contents: Contents, number: int) -> NodeView:
    plan = contents.plan
    part, gpus = plan.cluster.classes[number], plan.class_gpus[number]
    measured = contents.journal.measurements if contents.journal is not None else {}
    journal = {**measured, **contents.pairs}
    hosts = {name for name, at in plan.cluster.host_classes.items() if at == number}
    # Sets without host names, as a simulated cluster has, are about equal hosts.
    hosts |= {""} if len(plan.cluster.classes) == 1 else set()
    return msgspec.structs.replace(
        node_view(part.machine, plan, number),
        name=part.name if len(plan.cluster.classes) > 1 else "",
        map=heat_map(journal, gpus, hosts),
    )


def provenance_lines(contents: Contents) -> Iterator[str]:
    """Yield a line for each kind of source of the rates and facts in the report."""
    plan = contents.plan
    of = f"{plan.provenance_of('graph')}, a prediction of bus bandwidth"
    cost = dict(summary(plan))["cost"]
    yield f"Rings, hops and bounds: {of}; {cost}; search {plan.strategy}."
    if texts := assumptions(plan):
        yield f"Assumed: {'; '.join(texts)}."
    default = plan.choices["default"]
    yield f"Default NCCL: {plan.provenance_of('default')}. {default.note}"
    if contents.verification is not None and contents.verification.achieved:
        yield "Achieved rates: measured with NCCL (verify.json)."
    if contents.journal is not None:
        header = contents.journal.header
        yield f"Maps: the journal of {header.machine} ({header})."
    for part in plan.cluster.classes:
        knowledge = part.knowledge
        kinds = [knowledge.peer_access_provenance, *(p.provenance for p in knowledge.peer_access)]
        kinds += [link.provenance for link in knowledge.hidden_links]
        facts = ", ".join(dict.fromkeys(kinds))
        yield f"Direct access and hidden links of {part.machine.name}: {facts}."


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """A rate to compare, None if unknown: `kind` is a class of the page; `note` explains it."""

    label: str
    gbps: float | None
    kind: str
    note: str = ""


def rate_bars(plan: Plan, achieved: Mapping[ChoiceName, float]) -> list[Bar]:
    """Return bars of the choices, predicted and `achieved` by jobs, then of what is possible."""
    how = ("achieved by jobs" if plan.jobs_ran else "predicted") + IN_DRY_RUN * plan.dry_run
    bars = []
    for name, choice in plan.choices.items():
        recommended, gain = name == plan.recommended, plan.gain(name)
        rate = choice.achieved_gbps if plan.jobs_ran else choice.rate_gbps
        notes = [
            recommended_words(plan) if recommended else "",
            f"{gain:.2f}x default NCCL" if gain is not None and name != "default" else "",
            "" if rate is not None else unrated_text(choice),
            choice.note,
        ]
        label, kind = CHOICE_WORDS[name], "plan" if recommended else "default"
        note = "; ".join(filter(None, notes))
        bars.append(Bar(label=f"{label}, {how}", gbps=rate, kind=kind, note=note))
        if name in achieved and achieved[name] != rate:
            bars.append(Bar(label=f"{label}, achieved", gbps=achieved[name], kind="achieved"))
    limit, bound = plan.limit_gbps, plan.bound_gbps
    above = limit and bound and limit > bound
    why = "no bound: NCCL's kernels move less than bare copies" if above else ""
    label = limit_text(plan) or "bare copies"
    limits = [
        Bar(label=label, gbps=limit, kind="bound", note=why),
        Bar(label=f"upper bound: the plan is {proof(plan)}", gbps=bound, kind="bound"),
    ]
    return bars + [bar for bar in limits if bar.gbps is not None]


def _notices(contents: Contents) -> tuple[str, ...]:
    stopped = ["the search was interrupted: this is the best until then"] * contents.plan.cancelled
    limits = (f"first: {text}" for text in limit_sentences(contents.plan))
    return (*limits, *stopped, *notices(contents.plan), *contents.notices)


def check_replaceable(target: Path, directory: Path, *, force: bool) -> None:
    """Refuse to replace a file that is no report; outside of `directory`, `force` allows it."""
    # Unlike Path.resolve, it bears links that lead in circles.
    inside = Path(os.path.realpath(target)).is_relative_to(os.path.realpath(directory))
    if force and not inside:
        return
    with explain_errors(target, "cannot be read", "name another file"):
        if not target.is_file():
            return
        with target.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    if head and _GENERATOR.encode() not in head:
        right = "name another file" if inside else "name another file, or add `force` to replace it"
        raise InputError(str(target), "is no report of tccl", right)
