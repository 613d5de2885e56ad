"""Machine models by name: the bundled ones, and any file that describes a machine."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import decode_json, read_text
from tccl_py.model.knowledge import DiscoveredMachine, Knowledge, check_knowledge
from tccl_py.model.machine import Machine, check
from tccl_py.readers.nccl_topology import parse_nccl_topology
from tccl_py.simulator.generic import model_for
from tccl_py.simulator.model import MachineModel, bundled_parameters, check_model

_MODELS = resources.files("tccl_py.simulator").joinpath("machines")
_SUFFIX = ".json"
_FORMS = "give a machine or model as JSON, or an NCCL topology XML"


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a machine's file; `model` is None in files without rates."""

    machine: Machine
    knowledge: Knowledge
    model: MachineModel | None = None

    def with_model(self) -> MachineModel:
        """Return the file's model, or a model of assumed figures only."""
        return self.model or model_for(self.machine, self.knowledge)


def bundled_names() -> tuple[str, ...]:
    """Return the names of the models that come with the package, in order.

    >>> "asus-esc8000a-e13p" in bundled_names()
    True
    """
    names = [entry.name for entry in _MODELS.iterdir()]
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def load_bundled(name: str) -> MachineModel:
    """Return the bundled model of this name.

    Raises:
        InputError: no such model; the message names the bundled ones.
    """
    if name not in bundled_names():
        known = ", ".join(bundled_names())
        raise InputError(f"machine {name[:60]!r}", "is not bundled", f"there are {known}")
    text = _MODELS.joinpath(name + _SUFFIX).read_text(encoding="utf-8")
    return model_from_json(text, where=name + _SUFFIX)


def load_machine(name: str) -> MachineModel:
    """Return the machine model of a bundled name or a file; the bundled name comes first.

    A Machine or topology without a model gets a model of assumed figures only.

    >>> model = load_machine("h200x4-vm")
    >>> model.machine.gpu_indices
    (0, 1, 2, 3)

    Raises:
        InputError: an unknown name (the message names the bundled ones), no such file, or a file
            of another form.
    """
    if name in bundled_names():
        return load_bundled(name)
    path = Path(name)
    if name and _exists(path):
        return read_description(path).with_model()
    known = ", ".join(bundled_names())
    if path.suffix or "/" in name:
        raise InputError(name[:200], "does not exist", f"name a file or one of {known}")
    where = f"machine {name[:60]!r}"
    raise InputError(where, "is neither bundled nor a file", f"there are {known}")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def read_description(path: Path) -> Description:
    """Read a machine from a file of any form.

    Raises:
        InputError: unreadable, none of the forms, or parts that do not fit together.
    """
    where = str(path)
    text = read_text(path)
    start = text.lstrip("\ufeff \t\r\n")[:1]
    if start == "<":
        return Description(machine=parse_nccl_topology(text, where=where), knowledge=Knowledge())
    if start == "{":
        return _from_json(text, where)
    raise InputError(where, "is neither JSON nor XML", _FORMS)


def _from_json(text: str, where: str) -> Description:
    try:
        keys = msgspec.json.decode(text.encode(), type=dict[str, msgspec.Raw])
    except RecursionError as error:
        raise InputError(where, "is nested too deep", _FORMS) from error
    except msgspec.MsgspecError as error:
        raise InputError(where, f"is no JSON ({error})", _FORMS) from error
    if "capacities" in keys:
        model = model_from_json(text, where=where)
        return Description(machine=model.machine, knowledge=model.knowledge, model=model)
    if "gpus" not in keys:
        raise InputError(where, "describes no machine", _FORMS)
    found = decode_json(text, DiscoveredMachine, where=where, name="Machine")
    fields = {name: getattr(found, name) for name in Machine.__struct_fields__}
    machine = check(Machine(**fields), where=where)
    known = found.knowledge or Knowledge()
    return Description(machine=machine, knowledge=check_knowledge(known, machine, where=where))


def model_from_json(text: str, *, where: str) -> MachineModel:
    """Decode and check a model; figures may name the bundled shared parameters.

    Raises:
        InputError: not JSON, unknown fields, or parts that do not fit together.
    """
    model = decode_json(text, MachineModel, where=where)
    return check_model(model, bundled_parameters(), where=where)
