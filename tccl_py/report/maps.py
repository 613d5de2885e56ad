"""The report's heat maps: which rates of the journal they show, and in which words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from markupsafe import Markup

from tccl_py.model.measurement import Measurement
from tccl_py.report.contents import Contents
from tccl_py.report.heat_map import HeatMap, heat_map
from tccl_py.report.rates import (
    Reading,
    Readings,
    fastest_alone,
    fastest_bounces,
    slowest_together,
    worst_pairs,
)

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


def _journal(contents: Contents) -> Mapping[str, Sequence[Measurement]]:
    return contents.journal.measurements if contents.journal is not None else {}
