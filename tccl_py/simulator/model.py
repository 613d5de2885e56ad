"""A machine model: a Machine with capacities and congestion rules, all of it data.

A capacity bounds the traffic over one place (each direction of a link, both directions together,
the memory of a NUMA node). A congestion rule describes a pattern of transfers with less bandwidth
than sharing alone would give. Nothing here names a machine or a transfer set: a rate follows from
routes, capacities and rules.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from tccl_py.errors import InputError, require
from tccl_py.files import check_version, pick, says
from tccl_py.model.machine import Knowledge, Machine, PciDevice, Provenance, check, check_knowledge
from tccl_py.model.symmetry import automorphisms

MODEL_VERSION = 1
MAX_FIGURE = 1e6  # A petabyte a second; more is a malformed file
MIN_FIGURE = 1e-6
MAX_ENTRIES = 10_000

Crosses = Literal["any", "socket", "numa", "nothing"]
LinkKind = Literal["pci", "smp", "nvlink", "xgmi", "c2c", "hidden"]
Key = Literal[
    "transfer", "source_gpu", "source_uplink", "destination_root", "memory", "executor_gpu", "nic"
]
"""Keys that group and count transfers: see `tccl_py.simulator.routes.Leg`."""
_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_ENTRIES)]
_Few = msgspec.Meta(max_length=MAX_ENTRIES)


class _Data(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A part of a model."""


class Figure(_Data, frozen=True, kw_only=True):
    """A number with provenance: given here or by a shared parameter, times its factors."""

    provenance: Provenance
    """On this machine: a parameter measured elsewhere is `assumed` here."""
    value: float | None = None
    parameter: str | None = None
    """The name of the parameter in the place of a value."""
    scale: float = 1.0
    """A factor."""
    times: tuple[str, ...] = ()
    """Parameters that are further factors."""


class Traffic(_Data, frozen=True, kw_only=True):
    """A kind of transfers; a field left at `any` matches all."""

    operation: Literal["any", "write", "read"] = "any"
    path: Literal["any", "peer", "host", "bounce", "network"] = "any"
    """GPU to GPU, to or from host memory, half of a bounce, or to or from a NIC."""
    crosses: Crosses = "any"
    """The widest border; a NUMA node's is within a socket."""
    memory: Literal["any", "own", "other"] = "any"
    """The NUMA node of host memory: the executor's, or another."""
    executor: Literal["any", "kernel", "copy_engine"] = "any"


class Links(_Data, frozen=True, kw_only=True, tag="links"):
    """Links of the machine's graph.

    devices: PCI links above these devices, and all other links at these devices; empty is all.
    between: if given, only the link between these two devices.
    position: `root_port` is a PCI link at a CPU.
    span: `smp` links between sockets, or between NUMA nodes of a socket.
    way: `each` direction is a separate place, or `both` together are a place, or only the
        direction `out` of the device below or the GPU, or `in`.
    together: whether all these links are one place, as the functions of a network port are.
    """

    kinds: tuple[LinkKind, ...]
    devices: tuple[str, ...] = ()
    between: tuple[str, str] | None = None
    position: Literal["any", "root_port"] = "any"
    span: Literal["any", "socket", "numa"] = "any"
    way: Literal["each", "both", "out", "in"] = "each"
    together: bool = False


class Memory(_Data, frozen=True, kw_only=True, tag="memory"):
    """Host memory, one place a NUMA node."""


class Capacity(_Data, frozen=True, kw_only=True):
    """The bandwidth limit of the counted traffic over each of these places, GB/s.

    The lowest bound holds.
    """

    name: str
    at: Links | Memory
    counts: Traffic = Traffic()
    write: Figure | None = None
    """The bound of all writes."""
    read: Figure | None = None
    """The bound of all reads."""
    mixed: Figure | None = None
    """The bound of both where both occur."""
    write_in_mix: Figure | None = None
    """The bound of writes there."""
    read_in_mix: Figure | None = None
    """The bound of reads there."""
    note: str = ""


class Member(_Data, frozen=True, kw_only=True):
    """A kind of transfer in a congestion rule, and the group's limit if it takes part."""

    traffic: Traffic
    total: Figure | None = None
    each: Figure | None = None


class Congestion(_Data, frozen=True, kw_only=True):
    """A pattern with less bandwidth than sharing alone would give.

    In each group of transfers to which it applies, the lowest `total` of the members present bounds
    the group's sum, and `each` every transfer of that member.
    """

    name: str
    members: Annotated[tuple[Member, ...], msgspec.Meta(min_length=1, max_length=MAX_ENTRIES)]
    """Kinds of transfers."""
    together_at: Key
    """Transfers of members with an equal key form a group."""
    at_least: dict[Key, _Count] = {}
    """The different values of further keys that a group has at least."""
    needs: Literal["any", "every"] = "any"
    """Whether a group has a transfer of every member."""
    note: str = ""


class ExecutorLimit(_Data, frozen=True, kw_only=True):
    """The limit of the executor of one flow, in GB/s.

    A block moves `per_block`; a bounce's block waits `latency_us` for each FIFO (a kernel) or
    slot (a copy engine) it fills: size / (latency + size / per_block). Blocks add up and bend
    into `ceiling`: (sum^-p + ceiling^-p)^(-1/p) with p = `sharpness`. A flow that names no
    blocks uses as many as it takes and gets the ceiling; a copy engine counts as one block.
    """

    name: str
    executor: Literal["kernel", "copy_engine"]
    path: Literal["direct", "bounce"]
    over: Literal["any", "nvlink", "pci"] = "any"
    operation: Literal["any", "write", "read"] = "any"
    per_block: Figure | None = None
    latency_us: Figure | None = None
    ceiling: Figure | None = None
    sharpness: Annotated[float, msgspec.Meta(ge=1, le=64)] = 16.0
    note: str = ""


class FifoCache(_Data, frozen=True, kw_only=True):
    """Bounces against the part of a NUMA node's cache that device traffic may fill.

    With all FIFOs of a set on one node together F MiB, a share min(1, `cache_mib` / F) of their
    traffic stays in the cache and is bounded by `write` and `read`; the rest meets the memory's
    own capacities. A flow that names no blocks has `default_blocks` FIFOs. Buffers of plain
    transfers count as FIFOs; a write and a read share theirs.
    """

    cache_mib: Figure
    write: Figure
    read: Figure
    default_blocks: _Count = 4
    note: str = ""


class MachineModel(_Data, frozen=True, kw_only=True):
    """A Machine, the knowledge about it, and the capacities of its parts."""

    format_version: int
    name: str
    note: str = ""
    source: str = ""
    machine: Machine
    knowledge: Knowledge
    capacities: Annotated[tuple[Capacity, ...], _Few]
    congestion: Annotated[tuple[Congestion, ...], _Few] = ()
    executors: Annotated[tuple[ExecutorLimit, ...], _Few] = ()
    fifo_cache: FifoCache | None = None


class Parameter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fitted value that machines share."""

    name: str
    value: float
    unit: str
    provenance: Provenance
    prior: float
    """The value that the fit is held to."""
    spread: float
    """The prior's standard deviation, in log terms."""
    note: str = ""


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All shared parameters: the content of `parameters.json`."""

    parameters: tuple[Parameter, ...]
    format_version: int = 1


@cache
def bundled_parameters() -> Parameters:
    """Return the parameters that come with the package."""
    text = resources.files("tccl_py.simulator").joinpath("parameters.json").read_bytes()
    return msgspec.json.decode(text, type=Parameters)


class Figures:
    """Values and provenance of figures under one set of parameters."""

    def __init__(self, parameters: Parameters) -> None:
        self._values = {part.name: part.value for part in parameters.parameters}
        self._assumed = {p.name for p in parameters.parameters if p.provenance == "assumed"}

    def value(self, figure: Figure) -> float:
        """Return the figure's value, in its own unit."""
        value = figure.value
        base = self._values[figure.parameter] if figure.parameter is not None else value
        assert base is not None  # checked when the model was read
        return base * figure.scale * math.prod(self._values[name] for name in figure.times)

    def is_assumed(self, figure: Figure) -> bool:
        """Return whether nobody measured or published the figure for this machine."""
        names = {figure.parameter, *figure.times}
        return figure.provenance == "assumed" or bool(names & self._assumed)


def figures_of(model: MachineModel) -> Iterator[tuple[str, Figure]]:
    """Yield every figure of a model, with its place for messages."""
    parts: list[tuple[str, _Data]] = [(f"capacity {x.name!r}", x) for x in model.capacities]
    parts += [(f"congestion {r.name!r}", member) for r in model.congestion for member in r.members]
    parts += [(f"executor limit {limit.name!r}", limit) for limit in model.executors]
    parts += [("fifo_cache", model.fifo_cache)] if model.fifo_cache is not None else []
    for place, part in parts:
        for name, figure in figures_in(part).items():
            yield f"{place} {name}", figure


def figures_in(part: _Data) -> dict[str, Figure]:
    """Return the figures of a part of a model, by the names of its fields."""
    values = {name: getattr(part, name) for name in part.__struct_fields__}
    return {name: value for name, value in values.items() if isinstance(value, Figure)}


def check_model(model: MachineModel, *, where: str) -> MachineModel:
    """Return `model` if its parts fit together (InputError)."""
    check_version(model.format_version, MODEL_VERSION, where)
    check(model.machine, where=where)
    check_knowledge(model.knowledge, model.machine, where=where)
    for capacity in model.capacities:
        at = capacity.at
        for device in (*at.devices, *(at.between or ())) if isinstance(at, Links) else ():
            place, right = f"{where} capacity {capacity.name!r}", model.machine.name
            there = device in model.machine.graph
            require(there, place, f"speaks of {device}", f"name a device of {right}")
    for rule in model.congestion:
        place, right = f"{where} congestion {rule.name!r}", "give a member a total or an each"
        require(any(map(figures_in, rule.members)), place, "bounds nothing", right)
    for limit in model.executors:
        place = f"{where} executor limit {limit.name!r}"
        bounded = limit.per_block is not None or limit.ceiling is not None
        require(bounded, place, "bounds nothing", "give per_block or ceiling")
    figures = Figures(bundled_parameters())
    for place, figure in figures_of(model):
        _check_figure(figure, figures, f"{where} {place}")
    return model


def is_symmetric(model: MachineModel) -> bool:
    """Return whether the symmetries of the machine leave the capacities of its parts the same."""

    def move(capacity: Capacity, names: Mapping[str, str]) -> Capacity:
        at = capacity.at
        if isinstance(at, Links):
            devices = tuple(sorted(names[device] for device in at.devices))
            low, high = sorted(names[end] for end in at.between or ("", ""))
            at = msgspec.structs.replace(at, devices=devices, between=(low, high))
        return msgspec.structs.replace(capacity, at=at, name="", note="")

    generators = automorphisms(model.machine, model.knowledge).generators
    identity = {"": "", **{device: device for device in model.machine.graph}}
    before = {move(one, identity) for one in model.capacities}
    return all(
        {move(one, {**identity, **names}) for one in model.capacities} == before
        for names in generators
    )


def _check_figure(figure: Figure, figures: Figures, place: str) -> None:
    one = (figure.value is None) != (figure.parameter is None)
    require(one, place, "needs a value or a parameter", "give exactly one of the two")
    try:
        value = figures.value(figure)
    except KeyError as error:
        fault = f"names the unknown parameter {error}"
        raise InputError(place, fault, "use one of parameters.json") from error
    # The comparison is written so that NaN fails it.
    fits = MIN_FIGURE <= value <= MAX_FIGURE and figure.scale > 0
    require(fits, place, f"comes to {value}", f"{MIN_FIGURE} to {MAX_FIGURE:.0f}")


class ModelSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A bundled model, as `tccl discover --json` lists it."""

    name: str
    gpus: Annotated[int, says("how many")]
    gpu: Annotated[str, says("their names")]
    numa_nodes: int
    nics: int
    figures: Annotated[dict[str, int], says("numbers of parameters by provenance")]
    note: str
    source: str
    machine: Annotated[Machine | UnsetType, says("of one that is named")] = UNSET
    knowledge: Knowledge | UnsetType = UNSET


def summarize(model: MachineModel) -> ModelSummary:
    """Return a model's entry in the list."""
    machine = model.machine
    return ModelSummary(
        **pick(model, "name", "note", "source"),
        gpus=len(machine.gpus),
        gpu=gpu_names(machine),
        numa_nodes=len(machine.numa_nodes),
        nics=len(machine.nics),
        figures=provenances(model),
    )


def facts(model: MachineModel) -> Iterator[tuple[str, str]]:
    """Yield facts of a model, each with its name."""
    machine = model.machine
    links = (f"{link.source}-{link.target} x{link.count}" for link in machine.nvlinks)
    pairs = list(itertools.permutations(machine.gpu_indices, 2))
    direct = sum(model.knowledge.can_access(machine, *pair) for pair in pairs)
    yield "Name", model.name
    if model.note:
        yield "Note", model.note
    yield "Source", model.source or "none: every parameter is assumed"
    yield "Parameters", provenances_text(model)
    yield "GPUs", f"{len(machine.gpus)}: {gpu_names(machine)}"
    yield "NUMA nodes", ", ".join(node.id for node in machine.numa_nodes)
    yield "NVLinks", ", ".join(links) or "none" + " (assumed)" * machine.nvlinks_unknown
    guess = " (assumed)" if model.knowledge.assumed_p2p(machine) else ""
    yield "Peer access", f"{direct} of {len(pairs)} ordered pairs of GPUs{guess}"
    yield "Contention", "; ".join(rule.name for rule in model.congestion) or "none known"


def model_cells(model: MachineModel) -> tuple[str, ...]:
    """Return a model's cells in a list: name, numbers of devices, parameters, and note."""
    machine = model.machine
    counts = (str(len(part)) for part in (machine.gpus, machine.numa_nodes, machine.nics))
    return model.name, *counts, provenances_text(model), model.note


def device_table(machine: Machine) -> Iterator[tuple[str, ...]]:
    """Yield the headers and cells of a table of a machine's GPUs and NICs."""
    yield "Device", "Name", "NUMA node", "PCI link", "Below"
    devices: tuple[PciDevice, ...] = (*machine.gpus, *machine.nics)
    for device in devices:
        node = f"C{machine.numa_of(device.id)}"
        bridges = " < ".join(machine.ancestors(device.id)[:-1])
        link = f"{device.link.speed_gts:g} GT/s" if device.link.speed_gts else "speed unknown"
        link += f" x{device.link.lanes}" if device.link.lanes else ""
        yield device.id, getattr(device, "name", ""), node, link, bridges


def provenances_text(model: MachineModel) -> str:
    """Return how many parameters of a model are measured, published and assumed."""
    return ", ".join(f"{count} {kind}" for kind, count in provenances(model).items() if count)


def gpu_names(machine: Machine) -> str:
    """Return the different names of a machine's GPUs."""
    kinds = (gpu.name or (f"sm {gpu.sm}" if gpu.sm else "names not known") for gpu in machine.gpus)
    return ", ".join(dict.fromkeys(kinds))


def provenances(model: MachineModel) -> dict[str, int]:
    """Count parameters by provenance; a parameter counts once wherever it is used."""
    counts = Counter(str(figure.provenance) for _, figure in figures_of(model))
    return {kind: counts[kind] for kind in ("measured", "published", "assumed")}
