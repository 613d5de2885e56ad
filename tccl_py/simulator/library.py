"""Machine models: the bundled ones by name, others from files."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from tccl_py.errors import InputError
from tccl_py.files import decode_json, encode_json, read_text
from tccl_py.simulator.checks import check_model
from tccl_py.simulator.model import MachineModel
from tccl_py.simulator.parameters import bundled_parameters

_SUFFIX = ".json"


def bundled_names() -> tuple[str, ...]:
    """Names of the models that come with the package, in order.

    >>> "asus-esc8000a-e13p" in bundled_names()
    True
    """
    folder = resources.files("tccl_py.simulator").joinpath("machines")
    names = [entry.name for entry in folder.iterdir()]
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def load_bundled(name: str) -> MachineModel:
    """The bundled model of this name.

    Raises:
        InputError: there is none; the names there are follow.
    """
    if name not in bundled_names():
        known = ", ".join(bundled_names())
        raise InputError(f"machine {name[:60]!r}", "is not bundled", f"there are {known}")
    entry = resources.files("tccl_py.simulator").joinpath("machines").joinpath(name + _SUFFIX)
    return model_from_json(entry.read_text(encoding="utf-8"), where=name + _SUFFIX)


def read_model(path: Path) -> MachineModel:
    """A machine model from a file.

    Raises:
        InputError: unreadable, not a model, or parts that do not fit together.
    """
    return model_from_json(read_text(path), where=str(path))


def model_from_json(text: str, *, where: str) -> MachineModel:
    """Decode and check; figures may name the bundled shared parameters.

    Raises:
        InputError: not JSON, unknown fields, or parts that do not fit together.
    """
    model = decode_json(text, MachineModel, where=where)
    return check_model(model, bundled_parameters(), where=where)


def model_to_json(model: MachineModel) -> str:
    """Encode; `model_from_json` gives an equal model back."""
    return encode_json(model)
