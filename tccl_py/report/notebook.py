"""Machines and plans as drawings in notebooks: importing this module gives them `_repr_html_`."""

from __future__ import annotations

from html import escape
from types import SimpleNamespace

from tccl_py.model.machine import Machine
from tccl_py.plan.plan import Plan
from tccl_py.report.hops import ring_views
from tccl_py.report.machine import lay_out, machine_sentence, nvlinks
from tccl_py.report.page import templates

_DRAWING = """{% from "macros.html" import svg, machine, nvlink_parts, hops %}
<!DOCTYPE html><meta charset="utf-8"><style>{% include "report.css" %}</style>
<p>{% for line in lines %}{{ line }}<br>{% endfor %}</p>
{% for node in nodes %}
{% call svg(node.id, "The machine " ~ node.machine.name, node.sentence, node.layout.width,
  node.nvlinks.bottom + 4) %}
<g id="{{ node.id }}-parts">{{ machine(node.layout) }}</g>{{ nvlink_parts(node.nvlinks, node.layout)
}}{% endcall %}
{% for ring in node.rings %}{{ hops(ring, node) }}{% endfor %}
{% endfor %}"""
_HEIGHT = 640


def drawing(subject: Machine | Plan) -> str:
    """Return HTML with SVG drawings of a machine, or of a plan's machines and rings.

    The page is inside an iframe, so that its style and the notebook's do not meet.
    """
    if isinstance(subject, Plan):
        classes = zip(subject.cluster.classes, subject.class_gpus, strict=True)
        nodes = [_node(part.machine, n, gpus, subject) for n, (part, gpus) in enumerate(classes)]
        lines = repr(subject).splitlines()
    else:
        nodes, lines = [_node(subject, 0)], [subject.name]
    page = templates().from_string(_DRAWING).render(nodes=nodes, lines=lines)
    style = f"width:100%;height:{_HEIGHT}px;border:0;resize:vertical"
    return f'<iframe sandbox srcdoc="{escape(page)}" style="{style}"></iframe>'


def _node(
    machine: Machine, number: int, gpus: tuple[int, ...] | None = None, plan: Plan | None = None
) -> SimpleNamespace:
    layout = lay_out(machine, gpus)
    return SimpleNamespace(
        id=f"machine-{number}",
        machine=machine,
        layout=layout,
        nvlinks=nvlinks(machine, layout),
        sentence=machine_sentence(machine),
        rings=[] if plan is None else ring_views(plan, number, layout),
    )


for _kind in (Machine, Plan):
    setattr(_kind, "_repr_html_", drawing)  # noqa: B010 (mypy knows no such attribute)
