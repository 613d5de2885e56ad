"""Machines, plans and rings as drawings: importing this module gives them `_repr_html_`."""

from __future__ import annotations

import math
from html import escape
from types import SimpleNamespace

from tccl_py.model.machine import Machine
from tccl_py.model.rings import Ring
from tccl_py.plan.plan import Plan, PlanChain
from tccl_py.report.hops import Ends, chain_ends, line_kind
from tccl_py.report.page import node_view, templates
from tccl_py.simulator.model import MachineModel

_DRAWING = """{% from "macros.html" import svg, machine, nvlink_parts, hops %}
<!DOCTYPE html><meta charset="utf-8"><style>{% include "report.css" %}</style>
<p>{% for line in lines %}{{ line }}<br>{% endfor %}</p>
{% for node in nodes %}
<div{% if node.rings %} hidden{% endif %}>
{% call svg(node.id, "The machine " ~ node.machine.name, node.sentence, node.layout.width,
  node.nvlinks.bottom + 4) %}
<g id="{{ node.id }}-parts">{{ machine(node.layout) }}</g>{{ nvlink_parts(node.nvlinks, node.layout)
}}{% endcall %}</div>
{% for ring in node.rings %}{{ hops(ring, node) }}{% endfor %}
{% endfor %}
{% if ring %}{% call svg("ring", "Ring", lines|join(" "), ring.size, ring.size) %}
{% for one in ring.arrows %}<path d="{{ one.line }}" class="hop {{ one.kind }}"><title>{{ one.flow
}}</title></path><path d="M0 0l-9 -4.5v9z" transform="translate({{ one.at }}) rotate({{ one.turn
}})" class="head hop {{ one.kind }}"/>{% endfor %}
{% for one in ring.ends %}<circle cx="{{ one.x|px }}" cy="{{ one.y|px }}" r="18" class="{{ one.kind
}}"/><text x="{{ one.x|px }}" y="{{ (one.y + 5)|px }}" class="{{ one.kind }}-name">{{ one.name
}}</text>{% endfor %}
{% endcall %}{% endif %}"""
_HEIGHT = 640.0
"""The height of a plan's drawing, in which rings beyond the first are reached by scrolling."""
_RADIUS = 22.0
"""Lines end at this distance from the centre of a device."""


def drawing(subject: Machine | MachineModel | Plan | PlanChain | Ring) -> str:
    """Return HTML with SVG drawings of a machine, of a ring, or of a plan's rings on its machines.

    The page is inside an iframe, so that its style and the notebook's do not meet.
    """
    nodes, ring, height = [], None, _HEIGHT
    if isinstance(subject, MachineModel):
        subject = subject.machine
    if isinstance(subject, (PlanChain, Ring)):
        ring = _circle(subject)
        height = ring.size + 90
        lines = [" → ".join(one.name for one in ring.ends)]
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


def _circle(ring: PlanChain | Ring) -> SimpleNamespace:
    """Return a ring's devices on a circle, and an arrow for each hop; the slowest is marked."""
    ends: list[Ends] = [
        (f"G{hop.source}", f"G{hop.target}", line_kind(hop.flow), hop.flow, None)
        for hop in ring.hops
    ]
    slowest = None
    if isinstance(ring, PlanChain):
        ends = chain_ends(ring)
        # As in reports, no hop is marked where all are equally fast.
        if len({hop.gbps for hop in ring.hops}) > 1:
            slowest = ring.rate
    names = list(dict.fromkeys(name for one in ends for name in one[:2]))
    radius = max(70.0, len(names) * 4 * _RADIUS / math.tau)
    middle = radius + 2 * _RADIUS
    turns = [math.tau * place / len(names) - math.pi / 2 for place in range(len(names))]
    at = {
        name: complex(middle + radius * math.cos(turn), middle + radius * math.sin(turn))
        for name, turn in zip(names, turns, strict=True)
    }
    arrows = []
    for source, target, kind, flow, gbps in ends:
        ahead = at[target] - at[source]
        ahead /= abs(ahead) or 1
        start, end = at[source] + _RADIUS * ahead, at[target] - _RADIUS * ahead
        arrows.append(
            SimpleNamespace(
                line=f"M{start.real:.1f} {start.imag:.1f}L{end.real:.1f} {end.imag:.1f}",
                at=f"{end.real:.1f} {end.imag:.1f}",
                turn=f"{math.degrees(math.atan2(ahead.imag, ahead.real)):.1f}",
                kind=kind + " slowest" * (gbps == slowest is not None),
                flow=f"{flow}: {gbps:.2f} GB/s" if gbps is not None else str(flow),
            )
        )
    shown = [
        SimpleNamespace(name=name, x=at[name].real, y=at[name].imag, kind=kind)
        for name, kind in ((name, "nic" if name.startswith("N") else "gpu") for name in names)
    ]
    return SimpleNamespace(size=2 * middle, arrows=arrows, ends=shown)


for _kind in (Machine, MachineModel, Plan, PlanChain, Ring):
    setattr(_kind, "_repr_html_", drawing)  # noqa: B010 (mypy knows no such attribute)
