"""Shared parameters: figures that several machine models have in common, fitted together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import Path

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import decode_json, encode_json
from tccl_py.model.knowledge import Provenance, check_knowledge
from tccl_py.model.machine import check
from tccl_py.simulator.model import (
    MODEL_VERSION,
    Capacity,
    Congestion,
    ExecutorLimit,
    Figure,
    Links,
    MachineModel,
    Memory,
)

PARAMETERS_VERSION = 1
PARAMETERS_FILE = "parameters.json"


class Parameter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One figure: its fitted `value`, and the `prior` the fit starts from and is held to.

    `spread` is the prior's standard deviation in log terms (0.2: about 20 % either way).
    """

    name: str
    value: float
    unit: str
    provenance: Provenance
    prior: float
    spread: float
    note: str = ""


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All shared parameters, as `parameters.json` keeps them."""

    parameters: tuple[Parameter, ...]
    format_version: int = PARAMETERS_VERSION

    @property
    def values(self) -> dict[str, float]:
        """Name -> fitted value."""
        return {one.name: one.value for one in self.parameters}

    @property
    def assumed(self) -> frozenset[str]:
        """Names of parameters that are nobody's measurement."""
        return frozenset(p.name for p in self.parameters if p.provenance == "assumed")

    def with_values(self, values: Mapping[str, float]) -> Parameters:
        """The same parameters with these values; names left out keep theirs."""
        changed = (
            msgspec.structs.replace(one, value=values.get(one.name, one.value))
            for one in self.parameters
        )
        return msgspec.structs.replace(self, parameters=tuple(changed))


def parameters_from_json(text: str, *, where: str) -> Parameters:
    """Decode and check.

    Raises:
        InputError: not JSON, unknown fields, a repeated name, or a figure that is not positive.
    """
    parameters = decode_json(text, Parameters, where=where)
    if parameters.format_version != PARAMETERS_VERSION:
        raise InputError(
            where,
            f"has format version {parameters.format_version}",
            f"this program reads version {PARAMETERS_VERSION}",
        )
    seen = set()
    for one in parameters.parameters:
        if one.name in seen:
            raise InputError(where, f"names {one.name} twice", "every parameter is named once")
        seen.add(one.name)
        if not all(math.isfinite(x) and x > 0 for x in (one.value, one.prior, one.spread)):
            raise InputError(
                where, f"{one.name} has a figure that is not positive", "all figures are above 0"
            )
    return parameters


def parameters_to_json(parameters: Parameters) -> str:
    """Encode; `parameters_from_json` gives equal Parameters back."""
    return encode_json(parameters)


def bundled_parameters_path() -> Path:
    """Where the package keeps its parameters."""
    return Path(str(resources.files("tccl_py.simulator").joinpath(PARAMETERS_FILE)))


@cache
def bundled_parameters() -> Parameters:
    """The parameters that come with the package."""
    path = bundled_parameters_path()
    return parameters_from_json(path.read_text(encoding="utf-8"), where=PARAMETERS_FILE)


# What the figures of a model come to, given values for the shared parameters.


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


# Checks of a machine model that its types cannot make: sizes, names and figures that fit.


MAX_ENTRIES = 10_000
MAX_SHARPNESS = 64.0


def check_model(model: MachineModel, parameters: Parameters, *, where: str) -> MachineModel:
    """Return `model` if its parts fit together.

    Raises:
        InputError: another version, a machine or knowledge that does not hold together, unknown
            devices or parameters, too many entries, or a figure that is missing or out of range.
    """
    if model.format_version != MODEL_VERSION:
        raise InputError(
            where,
            f"has format version {model.format_version}",
            f"this program reads version {MODEL_VERSION}",
        )
    check(model.machine, where=where)
    check_knowledge(model.knowledge, model.machine, where=where)
    for entries, kind in (
        (model.capacities, "capacities"),
        (model.congestion, "congestion rules"),
        (model.executors, "executor limits"),
    ):
        if len(entries) > MAX_ENTRIES:
            raise InputError(where, f"has {len(entries)} {kind}", f"at most {MAX_ENTRIES}")
    for capacity in model.capacities:
        _check_capacity(capacity, model, where)
    for rule in model.congestion:
        _check_rule(rule, where)
    for limit in model.executors:
        _check_limit(limit, where)
    if model.fifo_cache is not None and not 1 <= model.fifo_cache.default_blocks <= MAX_ENTRIES:
        raise InputError(where, "fifo_cache has no default_blocks", f"1 to {MAX_ENTRIES}")
    figures = Figures(parameters)
    for place, figure in figures_of(model):
        check_figure(figure, figures, where=f"{where} {place}")
    return model


def _check_capacity(capacity: Capacity, model: MachineModel, where: str) -> None:
    at = capacity.at
    if isinstance(at, Links):
        named = (*at.devices, *(at.between or ()))
        unknown = [device for device in named if device not in model.machine.graph]
    elif isinstance(at, Memory):
        known = {node.index for node in model.machine.numa_nodes}
        unknown = [f"C{index}" for index in at.numa_nodes if index not in known]
    if unknown:
        raise InputError(
            f"{where} capacity {capacity.name!r}",
            f"speaks of {unknown[0]}",
            f"name a device of {model.machine.name}",
        )


def _check_rule(rule: Congestion, where: str) -> None:
    place = f"{where} congestion {rule.name!r}"
    if not rule.members or len(rule.members) > MAX_ENTRIES:
        raise InputError(place, f"has {len(rule.members)} members", f"1 to {MAX_ENTRIES}")
    if all(member.total is None and member.each is None for member in rule.members):
        raise InputError(place, "bounds nothing", "give a member a total or an each")
    for key, count in rule.at_least.items():
        if not 1 <= count <= MAX_ENTRIES:
            raise InputError(place, f"asks for {count} of {key}", f"1 to {MAX_ENTRIES}")


def _check_limit(limit: ExecutorLimit, where: str) -> None:
    place = f"{where} executor limit {limit.name!r}"
    # The comparison is written so that NaN fails it.
    if not 1 <= limit.sharpness <= MAX_SHARPNESS:
        raise InputError(place, f"has sharpness {limit.sharpness}", f"1 to {MAX_SHARPNESS:.0f}")
    if limit.per_block is None and limit.ceiling is None:
        raise InputError(place, "bounds nothing", "give per_block or ceiling")
