"""Bars from 0 on, above an axis in GB/s; they stretch with the page, and their words do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from markupsafe import Markup

from tccl_py.report.scales import steps
from tccl_py.report.svg import element, join, stretched_figure

_WIDTH = 720.0
_STEP = 44.0
_WHOLE = 97.0
"""Where the axis ends, in percent of the drawing: the last mark's words need the rest."""


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """One bar: `kind` is its class in the page, `note` stands after its rate."""

    label: str
    gbps: float
    kind: str
    note: str = ""


def bar_chart(bars: Sequence[Bar], *, name: str, title: str, description: str) -> Markup:
    """Each bar below its rate and words, above an axis that begins at 0."""
    marks = steps(max(bar.gbps for bar in bars))
    bottom = 4 + _STEP * len(bars)
    return stretched_figure(
        *_axis(marks, bottom),
        *(_bar(bar, marks[-1], 4 + _STEP * place) for place, bar in enumerate(bars)),
        name=name,
        title=title,
        description=description,
        width=_WIDTH,
        height=bottom + 24,
    )


def _bar(bar: Bar, largest: float, y: float) -> Markup:
    note = f", {bar.note}" if bar.note else ""
    words = join(
        [
            element("tspan", f"{bar.gbps:.2f} GB/s", class_="strong"),
            element("tspan", f"{bar.label}{note}", dx=8),
        ]
    )
    long = f"{_WHOLE * bar.gbps / largest:.2f}%"
    return element(
        "g",
        element("text", words, x=4, y=y + 14),
        element("rect", x=0, y=y + 20, width=long, height=16, class_=f"bar {bar.kind}"),
    )


def _axis(marks: Sequence[float], bottom: float) -> Iterator[Markup]:
    for mark in marks:
        x = f"{_WHOLE * mark / marks[-1]:.2f}%"
        first, last = mark == 0, mark == marks[-1]
        kind = "axis" if first else "grid"
        yield element("line", x1=x, y1=4, x2=x, y2=bottom, class_=kind)
        anchor = "start" if first else "end" if last else "middle"
        label = f"{mark:g} GB/s" if last else f"{mark:g}"
        yield element("text", label, x=x, y=bottom + 16, class_="small", text_anchor=anchor)
