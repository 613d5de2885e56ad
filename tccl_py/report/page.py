"""The HTML page: contents of a plan's directory through the templates."""

from __future__ import annotations

import functools
import shlex
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from tccl_py.errors import visible
from tccl_py.model.machine import Machine
from tccl_py.nccl.settings import environment
from tccl_py.nccl.variables import env_sh, pinned_env_text
from tccl_py.plan.plan import Plan
from tccl_py.plan.words import CHOICE_WORDS, gpu_list, mark, order_words, plan_name, settings_words
from tccl_py.report.contents import Contents, rate_sources
from tccl_py.report.machine import Layout, NvLinks, lay_out, link_words, machine_sentence, nvlinks
from tccl_py.report.rates import (
    HeatMap,
    Reading,
    cell_style,
    cell_text,
    heat_maps,
    rate_bars,
    settings_bars,
    viridis,
    worst_pairs,
)
from tccl_py.report.rings import RingView, default_rings, drawn_kinds, ring_views

_MOST_HOSTS = 64
"""More hosts are not all listed; `nccl/order/hosts.txt` has them."""
GENERATOR = '<meta name="generator" content="tccl report">'
"""Near the top of every report, to distinguish it from other files."""


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A machine of the plan, or of a class of its hosts, with the rings and rates on it."""

    id: str
    name: str
    machine: Machine
    gpus: tuple[int, ...]
    gpu_names: list[str]
    layout: Layout
    nvlinks: NvLinks
    sentence: str
    rings: list[RingView]
    maps: list[HeatMap]
    worst: list[Reading]


def report_html(contents: Contents) -> str:
    """Return the report on a plan's directory, as one HTML document."""
    plan, found = contents.plan, contents.explanation
    nodes = [_node(contents, number) for number in range(len(plan.cluster.classes))]
    return (
        _templates()
        .get_template("report.html")
        .render(
            generator=Markup(GENERATOR),
            plan=plan,
            name=plan_name(plan),
            contents=contents,
            # Facts
            facts=_first_line(plan),
            gpus="" if plan.is_cluster else gpu_list(plan.gpus),
            choice_words=CHOICE_WORDS,
            mark=plan.provenance,
            stock_mark=mark(simulated=plan.simulated, assumed=plan.stock.assumed),
            explanation_mark=found and mark(simulated=found.simulated, assumed=found.assumed),
            proof=plan.proof,
            notices=_notices(contents),
            variables=environment(plan.settings),
            exports=env_sh(plan.job_settings),
            directory=shlex.quote(str(contents.directory)),
            # Drawings
            nodes=nodes,
            kinds=drawn_kinds([ring for node in nodes for ring in node.rings]),
            rates=rate_bars(plan, contents.achieved),
            searched=settings_bars(plan),
            gradient=[viridis(step / 10) for step in range(11)],
            # Tables
            most_hosts=_MOST_HOSTS,
            default_rings=default_rings(plan),
            sources=rate_sources(contents),
        )
    )


def _node(contents: Contents, number: int) -> NodeView:
    plan = contents.plan
    part, gpus = plan.cluster.classes[number], plan.class_gpus[number]
    machine, layout = part.machine, lay_out(part.machine, gpus)
    journal = contents.journal.measurements if contents.journal is not None else {}
    hosts = {name for name, at in plan.cluster.host_classes.items() if at == number}
    # Sets without host names, as a simulated cluster has, are about equal hosts.
    hosts |= {""} if len(plan.cluster.classes) == 1 else set()
    return NodeView(
        id=f"machine-{number}",
        name=part.name if plan.is_cluster else "",
        machine=machine,
        gpus=gpus,
        gpu_names=sorted({gpu.name for gpu in machine.gpus if gpu.name}),
        layout=layout,
        nvlinks=nvlinks(machine, layout),
        sentence=machine_sentence(machine),
        rings=ring_views(plan, number, layout),
        maps=heat_maps(journal, gpus, tuple(node.index for node in machine.numa_nodes), hosts),
        worst=worst_pairs(journal, hosts=hosts),
    )


@functools.cache
def _templates() -> jinja2.Environment:
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("tccl_py.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "gbps": "{:.2f}".format,
        "px": lambda pixels: f"{round(pixels, 1):g}",
        "order": order_words,
        "cell_style": cell_style,
        "cell_text": cell_text,
        "link_words": link_words,
    }
    return templates


def _visible(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, Markup):
        return "\n".join(visible(line) for line in value.split("\n"))
    return value


def _first_line(plan: Plan) -> list[str]:
    """Return the machine, its GPUs, and the settings."""
    unchecked = "" if plan.settings_verified else " (a version that was not checked)"
    if plan.is_cluster:
        gpus = f"{sum(len(plan.gpus_of(host)) for host in plan.hosts)} GPUs"
    else:
        count, there = len(plan.gpus), len(plan.machine.gpus)
        some = f" of {there}" if count < there else ""
        gpus = f"{count}{some} GPUs ({gpu_list(plan.gpus)})"
    return [
        plan_name(plan),
        gpus,
        f"NCCL {plan.settings.version}{unchecked}",
        settings_words(plan.settings),
        *([pinned_env_text(plan.pinned_env)] if plan.pinned_env else []),
    ]


def _notices(contents: Contents) -> tuple[str, ...]:
    stopped = ("the search was interrupted: this is the best until then",)
    cancelled = stopped if contents.plan.cancelled else ()
    return (*cancelled, *contents.plan.notices, *contents.notices)
