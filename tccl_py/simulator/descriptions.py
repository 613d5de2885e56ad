"""Files that describe a machine: what is in them, and how `tccl discover` writes them.

The JSON of a discovered machine is a Machine's, with the keys `knowledge` and `fingerprint` beside
its own where discovery learned them, so that one reader takes both.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import decode_json, encode_json, read_text
from tccl_py.model.knowledge import Fingerprint, Knowledge, check_knowledge
from tccl_py.model.machine import Machine, check, machine_from_json
from tccl_py.readers.nccl_topology import parse_nccl_topology
from tccl_py.simulator.generic import model_for
from tccl_py.simulator.model import MachineModel
from tccl_py.simulator.parameters import bundled_parameters, check_model

# Machine models: the bundled ones by name, others from files.


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


_FORMS = "give a machine or model as JSON, or an NCCL topology XML"


class DiscoveredMachine(Machine, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A Machine, what is known of it, and whose it is: the file format of `tccl discover`."""

    knowledge: Knowledge | msgspec.UnsetType = msgspec.UNSET
    fingerprint: Fingerprint | msgspec.UnsetType = msgspec.UNSET


class _Keys(msgspec.Struct):
    """Which of the keys that tell the forms apart a JSON object has."""

    gpus: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    capacities: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    knowledge: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    fingerprint: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says of a machine; `model` is None where it says nothing of rates."""

    machine: Machine
    knowledge: Knowledge
    model: MachineModel | None = None

    def with_model(self) -> MachineModel:
        """The model it has, or one in which every figure is assumed."""
        return self.model or model_for(self.machine, self.knowledge)


def load_machine(name: str) -> MachineModel:
    """The machine model that a MACHINE names; a bundled name comes before a file of that name.

    A Machine or topology without a model gets one in which every figure is assumed.

    >>> model = load_machine("h200x4-vm")
    >>> model.machine.gpu_indices
    (0, 1, 2, 3)

    Raises:
        InputError: an unknown name (the right ones follow), no such file, or not a machine.
    """
    if name in bundled_names():
        return load_bundled(name)
    path = Path(name)
    if name and _exists(path):
        return read_description(path).with_model()
    known = ", ".join(bundled_names())
    if path.suffix or "/" in name:
        raise InputError(name[:200], "does not exist", f"name a file or one of {known}")
    raise InputError(
        f"machine {name[:60]!r}", "is neither bundled nor a file", f"there are {known}"
    )


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
    keys = _keys(text, where)
    if keys.capacities is not msgspec.UNSET:
        model = model_from_json(text, where=where)
        return Description(machine=model.machine, knowledge=model.knowledge, model=model)
    if keys.gpus is msgspec.UNSET:
        raise InputError(where, "describes no machine", _FORMS)
    if keys.knowledge is msgspec.UNSET and keys.fingerprint is msgspec.UNSET:
        return Description(machine=machine_from_json(text, where=where), knowledge=Knowledge())
    return _split(decode_json(text, DiscoveredMachine, where=where), where)


def _keys(text: str, where: str) -> _Keys:
    try:
        return msgspec.json.decode(text.encode(), type=_Keys)
    except RecursionError as error:
        raise InputError(where, "is nested too deep", _FORMS) from error
    except msgspec.MsgspecError as error:
        raise InputError(where, f"is no JSON ({error})", _FORMS) from error


def _split(found: DiscoveredMachine, where: str) -> Description:
    fields = {name: getattr(found, name) for name in Machine.__struct_fields__}
    machine = check(Machine(**fields), where=where)
    known = Knowledge() if found.knowledge is msgspec.UNSET else found.knowledge
    return Description(machine=machine, knowledge=check_knowledge(known, machine, where=where))


def description_to_json(
    machine: Machine,
    knowledge: Knowledge | None = None,
    fingerprint: Fingerprint | None = None,
) -> str:
    """Encode; `read_description` gives an equal machine and knowledge back."""
    fields = {name: getattr(machine, name) for name in Machine.__struct_fields__}
    return encode_json(
        DiscoveredMachine(
            **fields,
            knowledge=knowledge or msgspec.UNSET,
            fingerprint=fingerprint or msgspec.UNSET,
        )
    )
