"""The HTML page: contents of a plan's directory through the templates."""

from __future__ import annotations

import functools
import shlex
from typing import Any

import jinja2
from markupsafe import Markup

from tccl_py.nccl.conf import env_sh
from tccl_py.nccl.pinned_env import pinned_env_text
from tccl_py.nccl.settings import environment
from tccl_py.plan.plan import Plan, proof_text
from tccl_py.report.contents import Contents, plan_files, rate_sources
from tccl_py.report.machine import lay_out, link_words, machine_sentence, nvlinks
from tccl_py.report.rates import (
    cell_style,
    cell_text,
    heat_maps,
    rate_bars,
    settings_bars,
    viridis,
    worst_pairs,
)
from tccl_py.report.rings import default_rings, drawn_kinds, ring_views
from tccl_py.report.words import CHOICE_WORDS, gpu_list, mark, order_words, settings_words, shown

GENERATOR = '<meta name="generator" content="tccl report">'
"""Near the top of every report, to distinguish it from other files."""


def report_html(contents: Contents) -> str:
    """Return the report on a plan's directory, as one HTML document.

    Raises:
        InputError: the plan's settings are none that its version of NCCL has.
    """
    plan, found = contents.plan, contents.explanation
    layout = lay_out(plan.machine, plan.gpus)
    rings = ring_views(plan)
    journal = contents.journal.measurements if contents.journal is not None else {}
    numa_nodes = tuple(node.index for node in plan.machine.numa_nodes)
    return (
        _templates()
        .get_template("report.html")
        .render(
            generator=Markup(GENERATOR),
            plan=plan,
            contents=contents,
            # Facts
            facts=_first_line(plan),
            gpus=gpu_list(plan.gpus),
            gpu_names=sorted({gpu.name for gpu in plan.machine.gpus if gpu.name}),
            choice_words=CHOICE_WORDS,
            mark=plan.provenance,
            stock_mark=mark(simulated=plan.simulated, assumed=plan.stock.assumed),
            explanation_mark=found and mark(simulated=found.simulated, assumed=found.assumed),
            proof=proof_text(len(plan.rings), proven=plan.proven),
            notices=_notices(contents),
            variables=environment(plan.settings),
            exports=env_sh(plan.job_settings),
            directory=shlex.quote(str(contents.directory)),
            # Drawings
            layout=layout,
            nvlinks=nvlinks(plan.machine, layout),
            machine_sentence=machine_sentence(plan.machine),
            rings=rings,
            kinds=drawn_kinds(rings),
            rates=rate_bars(plan, contents.achieved),
            searched=settings_bars(plan),
            maps=heat_maps(journal, plan.gpus, numa_nodes),
            gradient=[viridis(step / 10) for step in range(11)],
            # Tables
            default_rings=default_rings(plan),
            worst=worst_pairs(journal),
            sources=rate_sources(contents),
            files=plan_files(contents),
        )
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
    """Escape control characters of expressions: names come from files, and must not act."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return "\n".join(shown(line) for line in value.split("\n"))
    return value


def _first_line(plan: Plan) -> list[str]:
    """Return the machine, its GPUs, and the settings."""
    count, there = len(plan.gpus), len(plan.machine.gpus)
    unchecked = "" if plan.settings_verified else " (a version that was not checked)"
    return [
        plan.machine.name,
        f"{count}{f' of {there}' if count < there else ''} GPUs ({gpu_list(plan.gpus)})",
        f"NCCL {plan.settings.version}{unchecked}",
        settings_words(plan.settings),
        *([pinned_env_text(plan.pinned_env)] if plan.pinned_env else []),
    ]


def _notices(contents: Contents) -> tuple[str, ...]:
    stopped = ("the search was interrupted: this is the best until then",)
    cancelled = stopped if contents.plan.cancelled else ()
    return (*cancelled, *contents.plan.notices, *contents.notices)
