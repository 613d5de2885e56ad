"""What the figures of a model come to, given values for the shared parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tccl_py.errors import InputError
from tccl_py.simulator.model import Figure, MachineModel
from tccl_py.simulator.parameters import Parameters

MAX_FIGURE = 1e6
"""A petabyte a second; more is a malformed file."""
MIN_FIGURE = 1e-6


class Figures:
    """Values and provenance of figures under one set of parameters."""

    def __init__(self, parameters: Parameters) -> None:
        self._values = parameters.values
        self._assumed = parameters.assumed

    def value(self, figure: Figure) -> float:
        """What the figure comes to, in its own unit."""
        given = figure.value
        base = self._values[figure.parameter] if figure.parameter is not None else given
        assert base is not None  # checked when the model was read
        return base * figure.scale * math.prod(self._values[name] for name in figure.times)

    def assumed(self, figure: Figure) -> bool:
        """Whether nobody measured or published it for this machine."""
        names = {figure.parameter, *figure.times}
        return figure.provenance == "assumed" or bool(names & self._assumed)


def check_figure(figure: Figure, figures: Figures, *, where: str) -> None:
    """Check that a figure has exactly one origin and a usable value.

    Raises:
        InputError: both or neither of value and parameter, an unknown parameter, or out of range.
    """
    if (figure.value is None) == (figure.parameter is None):
        raise InputError(where, "needs a value or a parameter", "give exactly one of the two")
    try:
        value = figures.value(figure)
    except KeyError as error:
        raise InputError(
            where, f"names the unknown parameter {error}", "use one of parameters.json"
        ) from error
    # The comparison is written so that NaN fails it.
    if not MIN_FIGURE <= value <= MAX_FIGURE or not figure.scale > 0:
        raise InputError(where, f"comes to {value}", f"{MIN_FIGURE} to {MAX_FIGURE:.0f}")


def figures_of(model: MachineModel) -> Iterator[tuple[str, Figure]]:
    """Every figure of a model with where it stands."""
    for capacity in model.capacities:
        yield from _named(f"capacity {capacity.name!r}", capacity, CAPACITY_FIELDS)
    for rule in model.congestion:
        for member in rule.members:
            yield from _named(f"congestion {rule.name!r}", member, ("total", "each"))
    for limit in model.executors:
        fields = ("per_block", "latency_us", "ceiling")
        yield from _named(f"executor limit {limit.name!r}", limit, fields)
    if model.fifo_cache is not None:
        yield from _named("fifo_cache", model.fifo_cache, ("cache_mib", "write", "read"))


CAPACITY_FIELDS = ("write", "read", "mixed", "write_in_mix", "read_in_mix")


def _named(where: str, holder: object, fields: tuple[str, ...]) -> Iterator[tuple[str, Figure]]:
    for field in fields:
        figure = getattr(holder, field)
        if figure is not None:
            yield f"{where} {field}", figure
