"""GPUs of this host by the driver (NVML), and the GPUs visible to a job."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.machine import Knowledge, Machine, PeerAccess, normal_bus_id

VARIABLE = "CUDA_VISIBLE_DEVICES"
NOT_ANSWERED = (2, 3, 4, 6, 13)
"""NVML_ERROR_ INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, FUNCTION_NOT_FOUND: the
question does not apply to this GPU, driver or container. Any other error is a fault."""
_MAX_LINKS = 18
_REMOTE_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
_CAPABILITY_P2P = 0
_P2P_READ, _P2P_WRITE = 0, 1  # Written out because pynvml has NVML_P2P_CAPS_INDEX_READ as a tuple
_C2C_LINK_COUNT = 170  # NVML_FI_DEV_C2C_LINK_COUNT
_HERE = "this machine"
_INSTEAD = (
    "`tccl discover --nccl-topology FILE` and `tccl discover --nvidia-smi FILE` describe a machine "
    "from files of it"
)


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """A GPU by NVML; `links` counts NVLinks by target bus id, "" for a switch."""

    index: int
    bus_id: str
    uuid: str
    name: str
    sm: int
    links: dict[str, int]
    c2c_links: int


@dataclass(frozen=True, kw_only=True)
class DriverFacts:
    """A host's driver, GPUs, and peer access between GPUs."""

    driver: str
    gpus: tuple[GpuFacts, ...]
    peer_access: tuple[PeerAccess, ...]


def driver_facts(nvml: Any = None) -> DriverFacts:
    """Ask NVML (`pynvml`, or a substitute) for all GPUs, NVLinks, and peer access of GPU pairs."""
    with _initialised(nvml) as opened:
        asked = opened.nvmlDeviceGetHandleByIndex
        handles = [_answer(opened, f"GPU {i}", asked, i) for i in range(_count(opened))]
        return DriverFacts(
            driver=_text(_answer(opened, "the driver", opened.nvmlSystemGetDriverVersion)),
            gpus=tuple(_gpu(opened, index, handle) for index, handle in enumerate(handles)),
            peer_access=tuple(_peer_access(opened, handles)),
        )


def driver_version() -> str:
    """Return the NVIDIA driver's version, "" where no driver answers."""
    try:
        with _initialised(None) as nvml:
            return _text(_answer(nvml, "the driver", nvml.nvmlSystemGetDriverVersion))
    except Exception:
        return ""


def gpu_count(nvml: Any = None) -> int:
    """Return the number of GPUs (InputError without any); NVML indices count from 0."""
    with _initialised(nvml) as opened:
        return _count(opened)


@contextmanager
def _initialised(nvml: Any) -> Iterator[Any]:
    if nvml is None:
        try:
            import pynvml  # noqa: PLC0415 (only live discovery needs it)
        except ImportError as error:
            what = "no NVIDIA driver answers (pynvml is missing)"
            raise InputError(_HERE, what, _INSTEAD) from error
        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise InputError(_HERE, f"no NVIDIA driver answers ({error})", _INSTEAD) from error
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _count(nvml: Any) -> int:
    count = int(_answer(nvml, "the driver", nvml.nvmlDeviceGetCount))
    if not count:
        raise InputError(_HERE, "has no NVIDIA GPU that this process may see", _INSTEAD)
    return count


def _gpu(nvml: Any, index: int, handle: Any) -> GpuFacts:
    who = f"GPU {index}"
    found = _text(_answer(nvml, who, nvml.nvmlDeviceGetPciInfo, handle).busId)
    bus_id = normal_bus_id(found)
    if bus_id is None:
        raise InputError(who, f"has bus id {found[:40]!r}", "a bus id such as 00000000:1A:00.0")
    major, minor = _answer(nvml, who, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    c2c_count = getattr(nvml, "NVML_FI_DEV_C2C_LINK_COUNT", _C2C_LINK_COUNT)
    c2c = _maybe(nvml, who, nvml.nvmlDeviceGetFieldValues, handle, [c2c_count])
    return GpuFacts(
        index=index,
        bus_id=bus_id,
        uuid=_text(_answer(nvml, who, nvml.nvmlDeviceGetUUID, handle)),
        name=_text(_answer(nvml, who, nvml.nvmlDeviceGetName, handle)),
        sm=major * 10 + minor,
        links=_links(nvml, who, handle),
        c2c_links=int(c2c[0].value.uiVal) if c2c and c2c[0].nvmlReturn == 0 else 0,
    )


def _links(nvml: Any, who: str, handle: Any) -> dict[str, int]:
    """Return the numbers of active NVLinks with peer access, by the device at the far end."""
    counts: dict[str, int] = {}
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", _MAX_LINKS)):
        asked = nvml.nvmlDeviceGetNvLinkCapability
        capable = _maybe(nvml, who, asked, handle, link, _CAPABILITY_P2P)
        if not capable or not _maybe(nvml, who, nvml.nvmlDeviceGetNvLinkState, handle, link):
            continue
        target = _remote(nvml, who, handle, link)
        if target is not None:
            counts[target] = counts.get(target, 0) + 1
    return counts


def _remote(nvml: Any, who: str, handle: Any, link: int) -> str | None:
    """Return the far end's bus id, "" for a switch (as in NCCL, any end outside this host)."""
    pci = _maybe(nvml, who, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
    if pci is None:
        return None
    kind = _maybe(nvml, who, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
    return "" if kind == _REMOTE_SWITCH else normal_bus_id(_text(pci.busId)) or ""


def _peer_access(nvml: Any, handles: list[Any]) -> Iterator[PeerAccess]:
    for source, sender in enumerate(handles):
        for target, receiver in enumerate(handles):
            if source == target:
                continue
            who, asked = f"GPUs {source} and {target}", nvml.nvmlDeviceGetP2PStatus
            ways = (_P2P_READ, _P2P_WRITE)
            answers = [_maybe(nvml, who, asked, sender, receiver, way) for way in ways]
            if None not in answers:
                yield PeerAccess(
                    source=source, target=target, supported=not any(answers), provenance="reported"
                )


def _answer(nvml: Any, who: str, question: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return question(*arguments)
    except nvml.NVMLError as error:
        what = f"does not answer {question.__name__} ({error})"
        raise InputError(who, what, "see whether nvidia-smi shows all GPUs well") from error


def _maybe(nvml: Any, who: str, question: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return _answer(nvml, who, question, *arguments)
    except InputError as error:
        if getattr(error.__cause__, "value", None) in NOT_ANSWERED:
            return None
        raise


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def visible_indices(machine: Machine, uuids: Sequence[str], text: str | None) -> tuple[int, ...]:
    """Return the NVML indices in CUDA_VISIBLE_DEVICES, ascending; all if the variable is not set.

    As in CUDA: indices or beginnings of UUIDs with commas between, up to the first entry of another
    form. InputError: no GPU is left.
    """
    if text is None:
        return machine.gpu_indices
    found: set[int] = set()
    for part in (piece.strip() for piece in text.split(",")):
        if part.isascii() and part.isdigit() and len(part) < 6:
            named = [int(part)] if int(part) in machine.gpu_indices else []
        else:
            known = zip(machine.gpu_indices, uuids, strict=False)
            named = [index for index, uuid in known if len(part) > 4 and uuid.startswith(part)]
        if len(named) != 1:
            break
        found.update(named)
    if not found:
        right = f"there are {', '.join(map(str, machine.gpu_indices))}"
        raise InputError(VARIABLE, f"is {text[:40]!r}, which is no GPU here", right)
    return tuple(sorted(found))


def only_gpus(
    machine: Machine, knowledge: Knowledge, gpus: Collection[int]
) -> tuple[Machine, Knowledge]:
    """Return machine and knowledge with these GPUs alone; indices stay."""
    gone = {gpu.id for gpu in machine.gpus if gpu.index not in gpus}
    smaller = msgspec.structs.replace(
        machine,
        gpus=tuple(gpu for gpu in machine.gpus if gpu.id not in gone),
        nvlinks=tuple(link for link in machine.nvlinks if not {link.source, link.target} & gone),
    )
    access, hidden = knowledge.peer_access, knowledge.hidden_links
    facts = msgspec.structs.replace(
        knowledge,
        peer_access=tuple(fact for fact in access if {fact.source, fact.target} <= set(gpus)),
        hidden_links=tuple(link for link in hidden if not {link.one, link.other} & gone),
    )
    return smaller, facts
