"""Machines, plans and rings as drawings: importing this module gives them `_repr_html_`."""

from __future__ import annotations

from html import escape

from tccl_py.model.machine import Machine
from tccl_py.model.rings import Ring
from tccl_py.plan.plan import Plan, PlanChain
from tccl_py.report.hops import Ends, HopsView, chain_ends, drawn_hops, line_kind
from tccl_py.report.machine import row_of
from tccl_py.report.page import node_view, templates
from tccl_py.simulator.model import MachineModel

_DRAWING = """{% from "macros.html" import svg, machine, nvlink_parts, hops %}
<!DOCTYPE html><meta charset="utf-8"><style>{% include "report.css" %}</style>
<p>{% for line in lines %}{{ line }}<br>{% endfor %}</p>
{% for node in nodes %}
<div{% if node.rings %} hidden{% endif %}>
{% call svg(node.layout.id, "The machine " ~ node.machine.name, node.sentence, node.layout.width,
  node.nvlinks.bottom + 4) %}
<g id="{{ node.layout.id }}-parts">{{ machine(node.layout) }}</g>{{
  nvlink_parts(node.nvlinks, node.layout) }}{% endcall %}</div>
{% for ring in node.rings %}{{ hops(ring) }}{% endfor %}
{% endfor %}
{% if ring %}<svg hidden><g id="row-parts">{{ machine(ring.layout) }}</g></svg>{{ hops(ring) }}
{% endif %}"""
_HEIGHT = 640.0
"""The height of a plan's drawing, in which rings beyond the first are reached by scrolling."""


def drawing(subject: Machine | MachineModel | Plan | PlanChain | Ring) -> str:
    """Return HTML with SVG drawings of a machine, of a ring, or of a plan's rings on its machines.

    The page is inside an iframe, so that its style and the notebook's do not meet.
    """
    nodes, ring, height = [], None, _HEIGHT
    if isinstance(subject, MachineModel):
        subject = subject.machine
    if isinstance(subject, (PlanChain, Ring)):
        ring = _row(subject)
        height = ring.bottom + 90
        lines = [" → ".join(ring.layout.boxes)]
        lines += [f"{subject.rate:.2f} GB/s by the plan"] if isinstance(subject, PlanChain) else []
    elif isinstance(subject, Plan):
        classes = enumerate(subject.cluster.classes)
        nodes = [node_view(part.machine, subject, number) for number, part in classes]
        lines = repr(subject).splitlines()
    else:
        nodes, lines = [node_view(subject)], [subject.name]
        height = nodes[0].nvlinks.bottom + 90
    page = templates().from_string(_DRAWING).render(nodes=nodes, ring=ring, lines=lines)
    style = f"width:100%;height:{height:.0f}px;border:0;resize:vertical"
    return f'<iframe sandbox srcdoc="{escape(page)}" style="{style}"></iframe>'


def _row(ring: PlanChain | Ring) -> HopsView:
    """Return a ring's hops below its devices, in the order of the ring."""
    ends: list[Ends] = [
        (f"G{hop.source}", f"G{hop.target}", line_kind(hop.flow), hop.flow, None)
        for hop in ring.hops
    ]
    if isinstance(ring, PlanChain):
        ends = chain_ends(ring)
    layout = row_of(list(dict.fromkeys(name for one in ends for name in one[:2])))
    return HopsView(id="ring", title="Ring", layout=layout, hops=drawn_hops(None, ends, layout))


for _kind in (Machine, MachineModel, Plan, PlanChain, Ring):
    setattr(_kind, "_repr_html_", drawing)  # noqa: B010 (mypy knows no such attribute)
