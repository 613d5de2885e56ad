"""The page: contents in the words and drawings of the template."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from tccl_py.nccl.conf import env_sh
from tccl_py.nccl.pinned_env import kept_text
from tccl_py.nccl.settings import environment
from tccl_py.plan.plan import Plan, proof_text
from tccl_py.report.charts import map_views, rates_figure, settings_figure, slowed_pairs
from tccl_py.report.machine import machine_figure, machine_sentence
from tccl_py.report.rings import drawn_kinds, ring_views, stock_rings
from tccl_py.report.svg import shown
from tccl_py.report.tables import Contents, figure_sources, machine_parts, mark, plan_files
from tccl_py.report.words import CHOICE_WORDS, gpu_list, order_words, settings_words

GENERATOR = '<meta name="generator" content="tccl report">'
"""Stands near the top of every report, and so tells one from other files."""


def report_html(contents: Contents) -> str:
    """The report on a plan's directory, as one HTML document.

    Raises:
        InputError: the plan's settings are none that its version of NCCL has.
    """
    view = _facts(contents) | _figures(contents) | _tables(contents)
    return _templates().get_template("report.html").render(view)


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
    templates.filters["gbps"] = "{:.2f}".format
    templates.filters["order"] = order_words
    return templates


def _visible(value: Any) -> Any:
    """What an expression of the template becomes: names come from files, so nothing acts."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return "\n".join(shown(line) for line in value.split("\n"))
    return value


def _facts(contents: Contents) -> dict[str, Any]:
    """What the page says in words."""
    plan, found = contents.plan, contents.explanation
    return {
        "generator": Markup(GENERATOR),
        "plan": plan,
        "contents": contents,
        "facts": _first_line(plan),
        "gpus": gpu_list(plan.gpus),
        "gpu_names": _gpu_names(plan),
        "choice_words": CHOICE_WORDS,
        "mark": plan.provenance,
        "stock_mark": mark(simulated=plan.simulated, assumed=plan.stock.assumed),
        "explanation_mark": mark(simulated=found.simulated, assumed=found.assumed) if found else "",
        "proof": proof_text(len(plan.rings), proven=plan.proven),
        "notices": _notices(contents),
        "variables": environment(plan.settings),
        "exports": env_sh(plan.job_settings),
        "directory": shlex.quote(str(contents.directory)),
    }


def _figures(contents: Contents) -> dict[str, Any]:
    """What the page draws."""
    plan = contents.plan
    return {
        "machine_figure": machine_figure(plan.machine, plan.gpus),
        "machine_sentence": machine_sentence(plan.machine),
        "rings": ring_views(plan),
        "kinds": drawn_kinds(plan),
        "rates": rates_figure(contents),
        "searched": settings_figure(plan),
        "maps": map_views(contents),
    }


def _tables(contents: Contents) -> dict[str, Any]:
    """What the page lists."""
    return {
        "parts": machine_parts(contents.plan.machine),
        "stock_rings": stock_rings(contents.plan),
        "worst": slowed_pairs(contents),
        "sources": figure_sources(contents),
        "files": plan_files(contents),
    }


def _first_line(plan: Plan) -> list[str]:
    """What was planned for, under which settings."""
    count, there = len(plan.gpus), len(plan.machine.gpus)
    unchecked = "" if plan.settings_verified else " (a version that was not checked)"
    return [
        plan.machine.name,
        f"{count}{f' of {there}' if count < there else ''} GPUs ({gpu_list(plan.gpus)})",
        f"NCCL {plan.settings.version}{unchecked}",
        settings_words(plan.settings),
        *([kept_text(plan.kept)] if plan.kept else []),
    ]


def _gpu_names(plan: Plan) -> list[str]:
    return sorted({gpu.name for gpu in plan.machine.gpus if gpu.name})


def _notices(contents: Contents) -> Sequence[str]:
    stopped = ("the search was interrupted: this is the best until then",)
    return (
        *(stopped if contents.plan.cancelled else ()),
        *contents.plan.notices,
        *contents.notices,
    )
