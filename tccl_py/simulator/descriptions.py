"""Machine models by name or file, and a model of assumed values for any Machine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import resources
from pathlib import Path

import msgspec

from tccl_py.errors import InputError, check_type, require
from tccl_py.files import decode_json, missing, read_text
from tccl_py.model.cards import assume_p2p
from tccl_py.model.machine import (
    DiscoveredMachine,
    Knowledge,
    Machine,
    PciLink,
    check,
    check_knowledge,
)
from tccl_py.simulator.model import (
    MODEL_VERSION,
    Capacity,
    ExecutorLimit,
    FifoCache,
    Figure,
    Links,
    MachineModel,
    Memory,
    Traffic,
    check_model,
)

GEN5_GTS = 32.0
DEFAULT_WIDTH = 16
_SM_LINK_GTS = ((90, 32.0), (80, 16.0), (0, 8.0))  # PCIe by sm, where none is reported
_NVLINK_RELATIVE = ((100, 2.0), (90, 1.0), (87, 1.0), (86, 0.5625), (70, 1.0), (0, 0.8))
"""One NVLink of a GPU relative to the 25 GB/s each way of NVLink 2 to 4: data sheets by sm."""
_RELATIVE = {"xgmi": 1.5, "c2c": 1.8}  # Infinity Fabric at 37 GB/s, NVLink-C2C at 45 each way
_MEMORY_RELATIVE = ((32.0, 1.0), (16.0, 0.6), (0.0, 0.35))  # By PCIe generation
_FASTEST_PORT_MBPS = 100_000_000
_DEVICE_CACHE_VENDORS = frozenset({"GenuineIntel"})  # Intel's DDIO


_ALL = Traffic()


class AssumedLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for any machine: the content of `assumed.json`."""

    executors: tuple[ExecutorLimit, ...]
    """The limits of NCCL's blocks: a direct rate, and a FIFO's window for bounces."""
    fifo_cache: FifoCache
    """Of CPUs whose caches take the traffic of devices."""


def _assume(parameter: str, scale: float = 1.0) -> Figure:
    return Figure(parameter=parameter, scale=scale, provenance="assumed")


def _share(name: str, at: Links, figure: Figure, counts: Traffic = _ALL) -> Capacity:
    return Capacity(name=name, at=at, counts=counts, write=figure, read=figure, mixed=figure)


def model_for(machine: Machine, knowledge: Knowledge | None = None) -> MachineModel:
    """Return a model of `machine` by data sheets and other machines: `assumed`, without rules."""
    intel = {node.vendor for node in machine.numa_nodes} & _DEVICE_CACHE_VENDORS
    limits = msgspec.json.decode(_FILES.joinpath("assumed.json").read_bytes(), type=AssumedLimits)
    model = MachineModel(
        format_version=MODEL_VERSION,
        name=machine.name,
        note="capacities assumed from link speeds and widths",
        machine=machine,
        knowledge=knowledge or Knowledge(),
        capacities=(
            *_pci_capacities(machine),
            *_fabric(machine),
            *_nvlinks(machine),
            *_nics(machine),
            _host_memory(machine),
        ),
        executors=limits.executors,
        fifo_cache=limits.fifo_cache if intel else None,
    )
    return check_model(model, where=machine.name)


def _pci_capacities(machine: Machine) -> Iterable[Capacity]:
    classes: dict[float, list[str]] = {}
    for device, link in machine.links.items():
        classes.setdefault(_lanes(machine, link), []).append(device)
    for share, devices in sorted(classes.items()):
        name = f"PCI link, {share * GEN5_GTS * DEFAULT_WIDTH:g} GT/s over all lanes"
        at = Links(kinds=("pci",), devices=tuple(devices))
        both = msgspec.structs.replace(at, way="both")
        yield _share(f"{name}, one way", at, _assume("pcie5_x16_one_way", share))
        yield _share(f"{name}, both ways", both, _assume("pcie5_x16_both_ways", share))
        # NCCL's rings move less than bare copies.
        figure = _assume("pcie5_x16_both_ways", share)
        figure = msgspec.structs.replace(figure, times=("pcie_kernel_share",))
        yield _share(f"{name}, both ways, NCCL's kernels", both, figure, Traffic(executor="kernel"))


def usual_gts(machine: Machine) -> float:
    """Return the speed that links of unknown speed are assumed to have, GT/s."""
    return _by_threshold(_SM_LINK_GTS, max((gpu.sm or 0) for gpu in machine.gpus))


def _lanes(machine: Machine, link: PciLink) -> float:
    speed = link.speed_gts or usual_gts(machine)
    return speed * (link.lanes or DEFAULT_WIDTH) / (GEN5_GTS * DEFAULT_WIDTH)


def _by_threshold(table: tuple[tuple[float, float], ...], value: float) -> float:
    return next(result for least, result in table if value >= least)


def _fastest(machine: Machine) -> float:
    return max(_lanes(machine, gpu.link) for gpu in machine.gpus)


def _fabric(machine: Machine) -> Iterable[Capacity]:
    if len(machine.numa_nodes) < 2:
        return
    speed = _fastest(machine)
    port, socket, inner = (_assume("socket_crossing_port", speed * n) for n in (1.0, 2.0, 3.0))
    ports = Links(kinds=("pci",), position="root_port")
    yield _share("a root port's traffic across sockets", ports, port, Traffic(crosses="socket"))
    yield _share("link between sockets, one way", Links(kinds=("smp",), span="socket"), socket)
    name = "link between NUMA nodes of a socket, one way"
    yield _share(name, Links(kinds=("smp",), span="numa"), inner)


def _nvlinks(machine: Machine) -> Iterable[Capacity]:
    counts: dict[tuple[str, str], float] = {}
    for link in machine.nvlinks:
        ends = (link.source, link.target)
        counts[ends] = counts.get(ends, 0.0) + link.count * _relative(machine, link.kind, ends)
    kinds = {frozenset((link.source, link.target)): link.kind for link in machine.nvlinks}
    for pair in sorted(kinds, key=sorted):
        first, second = sorted(pair)
        share = max(counts.get((first, second), 0.0), counts.get((second, first), 0.0))
        at = Links(kinds=(kinds[pair],), between=(first, second))
        name = f"{kinds[pair]} {first} - {second}, one way"
        yield _share(name, at, _assume("nvlink4_link_one_way", share))


def _relative(machine: Machine, kind: str, ends: tuple[str, str]) -> float:
    sms = [gpu.sm for gpu in machine.gpus if gpu.id in ends and gpu.sm is not None]
    return _RELATIVE.get(kind) or _by_threshold(_NVLINK_RELATIVE, min(sms, default=90))


def _nics(machine: Machine) -> Iterable[Capacity]:
    for nic in machine.nics:
        if nic.speed_mbps > 0:
            gbps = min(nic.speed_mbps, _FASTEST_PORT_MBPS) / 8000.0
            at = Links(kinds=("pci",), devices=(nic.id,))
            figure = Figure(value=gbps, provenance="assumed")
            yield _share(f"{nic.id}, its network port, one way", at, figure)


def _host_memory(machine: Machine) -> Capacity:
    sockets = {node.socket for node in machine.numa_nodes if node.socket is not None}
    parts = len(machine.numa_nodes) / len(sockets) if sockets else 1.0
    scale = _by_threshold(_MEMORY_RELATIVE, _fastest(machine) * GEN5_GTS) / parts
    return Capacity(
        name="host memory of a NUMA node",
        at=Memory(),
        write=_assume("host_write", scale),
        read=_assume("host_read", scale),
        write_in_mix=_assume("host_write_in_mix", scale),
        read_in_mix=_assume("host_read_in_mix", scale),
    )


_FILES = resources.files("tccl_py.simulator")
_MODELS = _FILES.joinpath("machines")
_SUFFIX = ".json"
_FORMS = "give a machine or model as JSON, an NCCL topology XML, or `nvidia-smi topo -m`"


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a machine's file; `model` is None in files without rates."""

    machine: Machine
    knowledge: Knowledge
    model: MachineModel | None = None


def bundled_names() -> tuple[str, ...]:
    """Return the names of the models that come with the package, in order.

    >>> "asus-esc8000a-e13p" in bundled_names()
    True
    """
    names = [entry.name for entry in _MODELS.iterdir()]
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def load_bundled(name: str) -> MachineModel:
    """Return the bundled model of this name; the InputError names all models."""
    if name not in bundled_names():
        names = ", ".join(bundled_names())
        raise InputError(f"machine {name[:60]!r}", "is not bundled", f"there are {names}")
    text = _MODELS.joinpath(name + _SUFFIX).read_text(encoding="utf-8")
    return model_from_json(text, where=name + _SUFFIX)


def load_machine(
    name: str | Path, *, p2p: bool | None = None, cpu: str | None = None
) -> MachineModel:
    """Return the machine model of a bundled name or a file; the bundled name comes first.

    A Machine or topology without a model gets a model of assumed values only. `p2p` says whether
    GPUs without NVLink have P2P, and `cpu` is "amd" or "intel", where that is not known.

    >>> model = load_machine("h200x4-vm")
    >>> model.machine.gpu_indices
    (0, 1, 2, 3)

    Raises InputError: an unknown name (the message names similar models, or all), no such file, one
    of another form, or `p2p` or `cpu` of a machine where it is known.
    """
    check_type(name, "name", str, Path)
    return settle_model(_load(name), p2p=p2p, cpu=cpu)


def settle_model(model: MachineModel, *, p2p: bool | None, cpu: str | None) -> MachineModel:
    """Return a model with what the user says of P2P and CPUs, None is nothing (InputError)."""
    knowledge = model.knowledge.with_p2p(model.machine, p2p)
    machine = model.machine.with_cpu(cpu)
    if cpu is not None and not model.source:
        return model_for(machine, knowledge)
    return msgspec.structs.replace(model, machine=machine, knowledge=knowledge)


def is_named(name: str) -> bool:
    """Return whether a name is that of a bundled model, or of no file, and not standard input."""
    return name in bundled_names() or not (name == "-" or os.path.lexists(name))


def _load(name: str | Path) -> MachineModel:
    path, name = Path(name), str(name)
    if name in bundled_names():
        return load_bundled(name)
    try:
        exists = bool(name) and path.exists()
    except (OSError, ValueError):
        exists = False
    if exists:
        description = read_description(path)
        return description.model or model_for(description.machine, description.knowledge)
    names = ", ".join(bundled_names())
    if path.suffix or "/" in name or os.path.islink(path):  # noqa: PTH114 (no error: name too long)
        raise InputError(name, missing(path), f"name a file or one of {names}")
    where, part = f"machine {name[:60]!r}", name.lower()
    near = [model for model in bundled_names() if part and part in model]
    near = near or get_close_matches(part, bundled_names())
    right = f"did you mean {' or '.join(near)}?" if near else f"there are {names}"
    raise InputError(where, "is neither bundled nor a file", right)


def read_description(path: Path) -> Description:
    """Read a machine from a file of any form."""
    return parse_description(read_text(path), where=str(path))


def parse_description(text: str, *, where: str) -> Description:
    """Read a machine from a text of any form, as people paste it (InputError)."""
    from tccl_py.readers.pasted import plain  # noqa: PLC0415 (of files alone)

    pasted, text = text, plain(text)
    start = text.lstrip()[:1]
    if start == "{":
        # A text in JSON may have what looks like colours.
        return _from_json(pasted.lstrip("\ufeff"), where)
    if start == "<":
        from tccl_py.readers.nccl_topology import parse_nccl_topology  # noqa: PLC0415

        machine = parse_nccl_topology(text.lstrip(), where=where)
        return Description(machine=machine, knowledge=assume_p2p(machine))
    from tccl_py.readers.nvidia_smi import parse_nvidia_smi  # noqa: PLC0415

    machine, knowledge = parse_nvidia_smi(text, where=where)
    return Description(machine=machine, knowledge=knowledge)


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
    require("gpus" in keys, where, "describes no machine", _FORMS)
    discovered = decode_json(text, DiscoveredMachine, where=where, name="Machine")
    fields = {name: getattr(discovered, name) for name in Machine.__struct_fields__}
    machine = check(Machine(**fields), where=where)
    knowledge = discovered.knowledge or Knowledge()
    return Description(machine=machine, knowledge=check_knowledge(knowledge, machine, where=where))


def model_from_json(text: str, *, where: str) -> MachineModel:
    """Decode and check a model; figures may name the bundled shared parameters."""
    return check_model(decode_json(text, MachineModel, where=where), where=where)
