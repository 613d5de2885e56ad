"""Heat maps of rates, on a scale of colours that begins at 0."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from markupsafe import Markup

from tccl_py.report.rates import Reading, Readings
from tccl_py.report.scales import steps, viridis
from tccl_py.report.svg import element, figure, text_width

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
