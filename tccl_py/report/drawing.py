"""Drawings of machines and of plans' rings, in notebooks and reports, and the templates of both.

Importing this module gives machines and plans their `_repr_svg_`.
"""

from __future__ import annotations

import functools
import re
from textwrap import wrap
from typing import Any, Literal

import jinja2
import msgspec
from markupsafe import Markup, escape

from tccl_py.errors import check_type, visible
from tccl_py.explanation.paths import Paths
from tccl_py.files import check_value
from tccl_py.model.machine import Machine
from tccl_py.plan.plan import Plan
from tccl_py.plan.text import description, has_stand_ins, settings_words
from tccl_py.report.contents import HeatMap, cell_colours, cell_text
from tccl_py.report.hops import (
    DrawnHop,
    HopsView,
    LinkLoad,
    cause_view,
    cause_words,
    link_loads,
    order_words,
    path_words,
    ring_views,
)
from tccl_py.report.machine import (
    Layout,
    NvLinks,
    depth,
    lay_out,
    link_words,
    machine_sentence,
    nvlinks,
    row_below,
)
from tccl_py.simulator.model import MachineModel, gpu_names

Scheme = Literal["light", "dark"]
_NARROW = 56
"""Characters of a line of a narrow drawing."""
_LINE, _TITLE = 18.0, 24.0
"""Heights of a line of text, and of a ring's title."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a drawing at `y`: a machine, or a row of its GPUs, with hops below it."""

    y: float
    layout: Layout
    node: NodeView | None = None
    title: str = ""
    words: str = ""
    """The hops in words."""
    hops: tuple[DrawnHop, ...] = ()

    @property
    def bottom(self) -> float:
        """The y below the part."""
        bottom = self.layout.bottom + depth([hop.wire for hop in self.hops])
        return self.y + max(bottom, self.node.nvlinks.bottom if self.node is not None else 0.0)


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A drawn machine, of the plan or of a class of its hosts, with the rings and rates on it."""

    machine: Machine
    layout: Layout
    nvlinks: NvLinks
    sentence: str
    rings: list[HopsView]
    name: str = ""
    gpus: tuple[int, ...] = ()
    loads: dict[str, LinkLoad] = {}
    maps: list[HeatMap] = []

    def parts(self, y: float = 0.0) -> list[Part]:
        """Return the machine with its first ring from `y` down, and a row of GPUs for each other.

        NVLinks have lanes below the machine, and then the first ring has a row of its own.
        """
        linked = bool(self.nvlinks.wires or self.nvlinks.lines)
        parts = []
        if linked or not self.rings:
            parts.append(Part(y=y, layout=self.layout, node=self))
        for ring in self.rings:
            rate = "" if ring.rate is None else f": {ring.rate:.2f} GB/s"
            layout = row_below(self.layout) if parts else self.layout
            part = Part(
                y=(parts[-1].bottom if parts else y) + _TITLE,
                layout=layout,
                node=None if parts else self,
                title=ring.title + rate,
                words=ring.description,
                hops=tuple(hop.move(layout) for hop in ring.hops),
            )
            parts.append(part)
        return parts


def node_view(
    machine: Machine, plan: Plan | None = None, number: int = 0, *, narrow: bool = False
) -> NodeView:
    """Return a machine, that of class `number` of a plan, and the plan's rings on it."""
    gpus = None if plan is None else plan.class_gpus[number]
    layout = lay_out(machine, gpus, number=number, narrow=narrow)
    return NodeView(
        machine=machine,
        layout=layout,
        nvlinks=nvlinks(machine, layout),
        sentence=machine_sentence(machine),
        rings=[] if plan is None else ring_views(plan, number, layout),
    )


def loaded_view(plan: Plan, number: int, *, narrow: bool = False) -> NodeView:
    """Return the machine of a class with the plan's rings on it and the loads of its links."""
    part = plan.cluster.classes[number]
    # Hosts of a class may have different paths: the first one's is drawn.
    path = next((path for path in plan.paths if path.node_class == number), None)
    chains = path.chains if path is not None else ()
    hops = [(hop.flow, hop.rate_gbps) for chain in chains for hop in chain.hops]
    return msgspec.structs.replace(
        node_view(part.machine, plan, number, narrow=narrow),
        loads={} if has_stand_ins(plan) else link_loads(Paths(part.machine, part.knowledge), hops),
    )


@functools.cache
def templates() -> jinja2.Environment:
    """Return the environment of the report's templates."""
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
        "path_words": path_words,
        "cell_style": lambda *rate: "background:{};color:{}".format(*cell_colours(*rate)),
        "cell_text": cell_text,
        "link_words": link_words,
        "cause_words": cause_words,
        "code": _code,
        "settings_words": settings_words,
    }
    templates.globals |= {"cause_view": cause_view, "gpu_names": gpu_names}
    return templates


def _visible(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, Markup):
        return "\n".join(visible(line) for line in value.split("\n"))
    return value


def _code(text: str) -> Markup:
    """Return text with what it has between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(_visible(text)))))


def drawing(
    subject: Machine | MachineModel | Plan, *, scheme: Scheme | None = None, narrow: bool = False
) -> str:
    """Return an SVG file of a machine, or of a plan's rings on its machines.

    Its colours are those of `scheme`, or follow the reader's. `narrow` is for a telephone's width.
    """
    check_type(subject, "subject", Machine, MachineModel, Plan)
    check_value(scheme, Scheme | None, where="`scheme`")
    if isinstance(subject, MachineModel):
        subject = subject.machine
    if isinstance(subject, Plan):
        lines, parts = description(subject).splitlines(), list[Part]()
        lines = [part for line in lines for part in wrap(line, _NARROW if narrow else 200)]
        for number in range(len(subject.cluster.classes)):
            y = parts[-1].bottom if parts else _LINE * len(lines) + 8
            parts += loaded_view(subject, number, narrow=narrow).parts(y)
    else:
        lines, parts = [subject.name], node_view(subject, narrow=narrow).parts(_LINE + 8)
    words = max(len(line) for line in lines) * 7.0
    return (
        templates()
        .get_template("drawing.svg")
        .render(
            style=Markup(_style(scheme)),
            lines=lines,
            parts=parts,
            width=max(words, *(part.layout.width for part in parts)) + 4,
            height=parts[-1].bottom + 6,
        )
    )


@functools.cache
def _style(scheme: Scheme | None) -> str:
    loader = templates().loader
    assert loader is not None
    text = loader.get_source(templates(), "drawing.css")[0]
    head, dark, tail = re.split(r"@media [^{]*{\n(.*?)\n}\n", text, maxsplit=1, flags=re.DOTALL)
    return {None: text, "light": head + tail, "dark": head + dark + tail}[scheme]


for _kind in (Machine, MachineModel, Plan):
    setattr(_kind, "_repr_svg_", drawing)  # noqa: B010 (mypy knows no such attribute)
