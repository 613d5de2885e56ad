"""Shared parameters: figures that several machine models have in common, fitted together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import decode_json, encode_json
from tccl_py.topology.knowledge import Provenance

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
