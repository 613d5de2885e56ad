"""Heat maps of rates, on a scale of colours that begins at 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from markupsafe import Markup

from tccl_py.model.measurement import Measurement
from tccl_py.model.transfer import TransferSet
from tccl_py.plan.plan import ChoiceName, Plan, PlanChoice
from tccl_py.report.svg import element, figure, join, steps, stretched_figure, text_width, viridis
from tccl_py.report.tables import (
    Contents,
    Reading,
    Readings,
    fastest_alone,
    fastest_bounces,
    slowest_together,
    worst_pairs,
)
from tccl_py.report.words import CHOICE_WORDS, settings_words

_LEFT, _TOP = 52.0, 44.0
_LEGEND = 56.0
_FLAT = 0.7


class HeatMap(msgspec.Struct, frozen=True, kw_only=True):
    """Which readings are drawn, by which rows and columns, and in which words.

    The colours reach up to `largest`, GB/s.
    """

    name: str
    title: str
    readings: Readings
    largest: float
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    row_word: str
    column_word: str
    row_letter: str = "G"

    @property
    def size(self) -> float:
        """Width of a cell, in pixels."""
        return 58.0 if max(len(self.rows), len(self.columns)) <= 8 else 46.0

    @property
    def width(self) -> float:
        """Width of the drawing, in pixels."""
        return max(_LEFT + self.size * len(self.columns) + 8, 330.0)


def heat_map(chart: HeatMap, provenance: str) -> Markup:
    """A heat map of rates; cells without a reading stay blank."""
    height = _TOP + chart.size * _FLAT * len(chart.rows) + _LEGEND
    scale = steps(chart.largest)[-1]
    return figure(
        *_axes(chart, chart.size),
        *_cells(chart, chart.size, scale),
        *_legend(height - _LEGEND + 16, min(chart.width - _LEFT - 8, 300), scale),
        name=chart.name,
        title=f"{chart.title}, GB/s, {provenance}",
        description=_extent(chart) + " The table below the map lists every figure.",
        width=chart.width,
        height=height,
    )


def _extent(chart: HeatMap) -> str:
    rates = [one.gbps for one in chart.readings.values()]
    cells = sum(
        1 for row in chart.rows for column in chart.columns if (row, column) in chart.readings
    )
    if not rates:
        return "Nothing was measured."
    return f"{cells} cells with rates from {min(rates):.2f} to {max(rates):.2f} GB/s."


def _axes(chart: HeatMap, size: float) -> Iterator[Markup]:
    # A map of one or two columns is narrower than its word.
    least = text_width(chart.column_word, 11) / 2
    across = _LEFT + max(size * len(chart.columns) / 2, least)
    down = _TOP + size * _FLAT * len(chart.rows) / 2
    turn = f"rotate(-90 12 {down:.1f})"
    yield _word(chart.column_word, across, 13, "small")
    yield _word(chart.row_word, 12, down, "small", transform=turn)
    for place, column in enumerate(chart.columns):
        yield _word(f"G{column}", _LEFT + size * (place + 0.5), _TOP - 8, "name")
    for place, row in enumerate(chart.rows):
        y = _TOP + size * _FLAT * (place + 0.5) + 4
        label = f"{chart.row_letter}{row}"
        yield element("text", label, x=_LEFT - 8, y=y, class_="name", text_anchor="end")


def _word(text: str, x: float, y: float, kind: str, transform: str | None = None) -> Markup:
    return element("text", text, x=x, y=y, class_=kind, text_anchor="middle", transform=transform)


def _cells(chart: HeatMap, size: float, scale: float) -> Iterator[Markup]:
    for down, row in enumerate(chart.rows):
        for across, column in enumerate(chart.columns):
            box = {
                "x": _LEFT + size * across + 1,
                "y": _TOP + size * _FLAT * down + 1,
                "width": size - 2,
                "height": size * _FLAT - 2,
                "rx": 3.0,
            }
            reading = chart.readings.get((row, column))
            if reading is None:
                same = chart.row_letter == "G" and row == column
                yield element("rect", **box, class_="self" if same else "blank")
            else:
                yield _cell(chart, reading, box, scale)


def _cell(chart: HeatMap, reading: Reading, box: dict[str, float], scale: float) -> Markup:
    red, green, blue = viridis(reading.gbps / scale)
    ink = "on-light" if 0.299 * red + 0.587 * green + 0.114 * blue > 120 else "on-dark"
    beside = f" beside {reading.beside}" if reading.beside else ""
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2 + 4
    return element(
        "g",
        element("title", f"{reading.flow}{beside}: {reading.gbps:.2f} GB/s"),
        element("rect", **box, fill=f"#{red:02x}{green:02x}{blue:02x}"),
        *_dashes(box, ink) if reading.bounce and chart.row_letter == "G" else (),
        element("text", cell_text(reading.gbps), x=x, y=y, class_=f"cell {ink}"),
    )


def _dashes(box: dict[str, float], ink: str) -> tuple[Markup]:
    inner = {"x": 2.5, "y": 2.5, "width": -5.0, "height": -5.0, "rx": -1.0}
    inside = {name: value + inner[name] for name, value in box.items()}
    return (element("rect", **inside, class_=f"dashes {ink}"),)


def cell_text(gbps: float) -> str:
    """A rate in few characters.

    >>> cell_text(3.478), cell_text(50.65), cell_text(360.6)
    ('3.5', '50.6', '361')
    """
    return f"{gbps:.0f}" if gbps >= 100 else f"{gbps:.1f}"


def _legend(y: float, width: float, scale: float) -> Iterator[Markup]:
    parts = 40
    for part in range(parts):
        red, green, blue = viridis((part + 0.5) / parts)
        yield element(
            "rect",
            x=_LEFT + width * part / parts,
            y=y,
            width=width / parts + 0.5,
            height=10,
            fill=f"#{red:02x}{green:02x}{blue:02x}",
        )
    for place, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        label = f"{scale * place:g}" + (" GB/s" if place == 1 else "")
        x = _LEFT + width * place
        yield element("text", label, x=x, y=y + 25, class_="small", text_anchor=anchor)


# Bars from 0 on, above an axis in GB/s; they stretch with the page, and their words do not.


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


# The report's bars: what the plan gets beside what else is known, and the settings searched.


class Bars(msgspec.Struct, frozen=True, kw_only=True):
    """Bars and the drawing of them."""

    bars: tuple[Bar, ...]
    figure: Markup


def rates_figure(contents: Contents) -> Bars:
    """What was predicted, is possible, and is got: those that are known."""
    bars = (*_predicted(contents.plan), *_achieved(contents))
    return _drawn("rates", "Rates of the plan", bars, contents.plan)


def _predicted(plan: Plan) -> list[Bar]:
    how = "when tuned" if plan.tuned else "predicted"
    bars = [Bar(label=f"{CHOICE_WORDS['graph']}, {how}", gbps=plan.rate_gbps, kind="plan")]
    if plan.bound_gbps is not None:
        bars.append(Bar(label="upper bound", gbps=plan.bound_gbps, kind="bound"))
    if plan.limit_gbps is not None:
        bars.append(Bar(label="bare copies over the same hops", gbps=plan.limit_gbps, kind="bound"))
    own: dict[ChoiceName, PlanChoice] = {"variables": plan.variables, "default": plan.stock}
    for name, choice in own.items():
        if choice.rate_gbps is not None:
            bars.append(
                Bar(label=f"{CHOICE_WORDS[name]}, {how}", gbps=choice.rate_gbps, kind="stock")
            )
    return bars


def _achieved(contents: Contents) -> list[Bar]:
    return [
        Bar(label=f"{CHOICE_WORDS[name]}, achieved", gbps=rate, kind="achieved")
        for name, rate in contents.achieved.items()
    ]


def settings_figure(plan: Plan) -> Bars | None:
    """The best ring set under each of the settings searched; None if they were not kept."""
    if not plan.alternatives:
        return None
    bars = tuple(
        Bar(
            label=settings_words(one.settings),
            gbps=one.rate_gbps,
            kind="plan" if one.settings == plan.settings else "stock",
            note=f"{one.rings_in_set} ring{'' if one.rings_in_set == 1 else 's'}",
        )
        for one in plan.alternatives
    )
    return _drawn("searched", "Best rate under each of the settings", bars, plan)


def _drawn(name: str, title: str, bars: tuple[Bar, ...], plan: Plan) -> Bars:
    listed = "; ".join(f"{bar.label}: {bar.gbps:.2f} GB/s" for bar in bars)
    marked = f"{title}, GB/s, {plan.provenance}"
    return Bars(bars=bars, figure=bar_chart(bars, name=name, title=marked, description=listed))


# The report's heat maps: which rates of the journal they show, and in which words.


_WORST_PAIRS = 12
_CAPTIONS = {
    "alone": "The fastest way from one GPU to another with nothing else running.",
    "together": "The lowest rate of a hop that ran together with one other; the table names both.",
    "bounces": "The fastest bounce from a GPU to any other through a NUMA node's memory, alone.",
}


class MapView(msgspec.Struct, frozen=True, kw_only=True):
    """A heat map, the drawing of it, what it shows, and its readings in order."""

    chart: HeatMap
    figure: Markup
    caption: str
    listed: list[tuple[tuple[int, int], Reading]]


def map_views(contents: Contents) -> list[MapView]:
    """Pairs of GPUs alone, beside their worst neighbour, and bounces by NUMA node."""
    journal = _journal(contents)
    alone, together = fastest_alone(journal), slowest_together(journal)
    # One scale for both: equal colours are equal rates.
    pairs: dict[str, Any] = {
        "largest": _largest(alone, together),
        "rows": contents.plan.gpus,
        "columns": contents.plan.gpus,
        "row_word": "from GPU",
        "column_word": "to GPU",
    }
    charts = [
        HeatMap(name="alone", title="Each pair of GPUs alone", readings=alone, **pairs),
        HeatMap(
            name="together",
            title="Each pair of GPUs beside its worst neighbour",
            readings=together,
            **pairs,
        ),
        _bounces(contents, fastest_bounces(journal)),
    ]
    return [_view(contents, chart) for chart in charts]


def _largest(*several: Readings) -> float:
    return max((one.gbps for readings in several for one in readings.values()), default=0.0)


def _bounces(contents: Contents, readings: Readings) -> HeatMap:
    return HeatMap(
        name="bounces",
        title="Bounces by sending GPU and NUMA node",
        readings=readings,
        largest=_largest(readings),
        rows=tuple(node.index for node in contents.plan.machine.numa_nodes),
        columns=contents.plan.gpus,
        row_word="through",
        column_word="from GPU",
        row_letter="C",
    )


def _view(contents: Contents, chart: HeatMap) -> MapView:
    inside = {
        key: reading
        for key, reading in chart.readings.items()
        if key[0] in chart.rows and key[1] in chart.columns
    }
    chart = msgspec.structs.replace(chart, readings=inside)
    return MapView(
        chart=chart,
        figure=heat_map(chart, contents.plan.provenance),
        caption=_CAPTIONS[chart.name],
        listed=sorted(inside.items()),
    )


def slowed_pairs(contents: Contents) -> list[Reading]:
    """The flows that one other slows most."""
    return worst_pairs(_journal(contents), _WORST_PAIRS)


def _journal(contents: Contents) -> Mapping[TransferSet, Sequence[Measurement]]:
    return contents.journal.measurements if contents.journal is not None else {}
