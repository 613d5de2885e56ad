"""The models in the directory of a simulated plan: planning one machine needs no simulator."""

from __future__ import annotations

from pathlib import Path

from tccl_py.errors import InputError
from tccl_py.plan.directory import machine_file
from tccl_py.plan.plan import Plan
from tccl_py.plan.staging import check_if_listed
from tccl_py.simulator.descriptions import read_description
from tccl_py.simulator.model import MachineModel


def planned_model(plan: Plan, directory: Path, number: int = 0) -> MachineModel | None:
    """Return the model behind the rates of a class in a simulated plan; None without a model.

    Raises:
        InputError: the file was changed, is damaged, or describes another machine.
    """
    path = machine_file(plan, directory, number)
    if not plan.simulated:
        return None
    check_if_listed(directory, str(machine_file(plan, Path(), number)))
    if not path.is_file():
        return None
    one, found = plan.cluster.classes[number], read_description(path)
    learnt = found.model is not None and found.knowledge != one.knowledge
    if found.machine != one.machine or learnt:
        raise InputError(str(path), "is not the plan's machine", "plan it again")
    return found.model


def planned_models(plan: Plan, directory: Path) -> dict[str, MachineModel]:
    """Return the models of all classes with a model, by the names of the classes.

    Raises:
        InputError: as `planned_model`.
    """
    found = {
        one.name: planned_model(plan, directory, number)
        for number, one in enumerate(plan.cluster.classes)
    }
    return {name: model for name, model in found.items() if model is not None}


def known_model(plan: Plan, directory: Path, *, otherwise: str = "") -> MachineModel:
    """Return the model of a plan whose hosts are all equal.

    Raises:
        InputError: as `planned_model`, or there is none; `otherwise` is another remedy.
    """
    found = planned_model(plan, directory)
    if found is None:
        where, right = str(machine_file(plan, directory)), "plan again with `tccl plan --simulate`"
        raise InputError(where, "holds no model to simulate by", f"{right}{otherwise}")
    return found
