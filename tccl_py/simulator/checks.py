"""Checks of a machine model that its types cannot make: sizes, names and figures that fit."""

from __future__ import annotations

from tccl_py.errors import InputError
from tccl_py.simulator.figures import Figures, check_figure, figures_of
from tccl_py.simulator.model import (
    MODEL_VERSION,
    Capacity,
    Congestion,
    ExecutorLimit,
    Links,
    MachineModel,
    Memory,
)
from tccl_py.simulator.parameters import Parameters
from tccl_py.topology.knowledge import check_knowledge
from tccl_py.topology.machine import check

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
