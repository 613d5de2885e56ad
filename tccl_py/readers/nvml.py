"""What the driver tells of its GPUs, through NVML."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.knowledge import Knowledge, PeerAccess
from tccl_py.model.machine import Machine, normal_bus_id

NOT_ANSWERED = (2, 3, 4, 6, 13)
"""NVML_ERROR_ INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, FUNCTION_NOT_FOUND: the
question does not apply to this GPU, driver or container. Any other error is a fault."""
_MAX_LINKS = 18
_REMOTE_GPU, _REMOTE_SWITCH = 0, 2
"""NVML_NVLINK_DEVICE_TYPE_GPU and _SWITCH."""
_CAPABILITY_P2P = 0
_P2P_READ, _P2P_WRITE = 0, 1
"""Written out because pynvml has NVML_P2P_CAPS_INDEX_READ as a tuple."""
_C2C_LINK_COUNT = 170
"""NVML_FI_DEV_C2C_LINK_COUNT."""
_INSTEAD = (
    "`tccl discover --nccl-topology FILE` and `tccl discover --nvidia-smi FILE` describe a machine "
    "from files of it"
)


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """One GPU as NVML describes it; `links` counts NVLinks by target bus id, "" for a switch."""

    index: int
    bus_id: str
    uuid: str
    name: str
    sm: int
    links: dict[str, int]
    c2c_links: int


@dataclass(frozen=True, kw_only=True)
class DriverFacts:
    """What NVML tells of a host."""

    driver: str
    gpus: tuple[GpuFacts, ...]
    peer_access: tuple[PeerAccess, ...]


def driver_facts(nvml: Any = None) -> DriverFacts:
    """Ask NVML for all GPUs, their NVLinks, and which pairs it calls capable of peer access.

    Args:
        nvml: the `pynvml` module, or what stands for it.

    Raises:
        InputError: no driver or library, no GPU, or a GPU that fails to answer, by its index.
    """
    nvml = _imported() if nvml is None else nvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise InputError("this machine", f"no NVIDIA driver answers ({error})", _INSTEAD) from error
    try:
        return _facts(nvml)
    finally:
        nvml.nvmlShutdown()


def driver_version() -> str:
    """Return the NVIDIA driver's version, "" where no driver answers."""
    try:
        nvml = _imported()
        nvml.nvmlInit()
        try:
            return _text(_answer(nvml, "the driver", nvml.nvmlSystemGetDriverVersion))
        finally:
            nvml.nvmlShutdown()
    except Exception:
        # NVMLError, or an InputError that says what does not matter here.
        return ""


def gpu_count(nvml: Any = None) -> int:
    """Return how many GPUs the driver has; their NVML indices count from 0.

    Args:
        nvml: the `pynvml` module, or what stands for it.

    Raises:
        InputError: no driver or library answers, or there is no GPU.
    """
    nvml = _imported() if nvml is None else nvml
    try:
        nvml.nvmlInit()
        try:
            count = int(nvml.nvmlDeviceGetCount())
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise InputError("this machine", f"no NVIDIA driver answers ({error})", _INSTEAD) from error
    if not count:
        raise InputError("this machine", "has no NVIDIA GPU that this process may see", _INSTEAD)
    return count


def _imported() -> Any:
    try:
        import pynvml  # noqa: PLC0415 (only live discovery needs it)
    except ImportError as error:
        raise InputError(
            "this machine", "no NVIDIA driver answers (pynvml is missing)", _INSTEAD
        ) from error
    return pynvml


def _facts(nvml: Any) -> DriverFacts:
    driver = _text(_answer(nvml, "the driver", nvml.nvmlSystemGetDriverVersion))
    count = _answer(nvml, "the driver", nvml.nvmlDeviceGetCount)
    if not count:
        raise InputError("this machine", "has no NVIDIA GPU that this process may see", _INSTEAD)
    handles = [_answer(nvml, f"GPU {i}", nvml.nvmlDeviceGetHandleByIndex, i) for i in range(count)]
    return DriverFacts(
        driver=driver,
        gpus=tuple(_gpu(nvml, index, handle) for index, handle in enumerate(handles)),
        peer_access=_peer_access(nvml, handles),
    )


def _gpu(nvml: Any, index: int, handle: Any) -> GpuFacts:
    who = f"GPU {index}"
    found = _text(_answer(nvml, who, nvml.nvmlDeviceGetPciInfo, handle).busId)
    bus_id = normal_bus_id(found)
    if bus_id is None:
        raise InputError(who, f"has bus id {found[:40]!r}", "a bus id such as 00000000:1A:00.0")
    major, minor = _answer(nvml, who, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    return GpuFacts(
        index=index,
        bus_id=bus_id,
        uuid=_text(_answer(nvml, who, nvml.nvmlDeviceGetUUID, handle)),
        name=_text(_answer(nvml, who, nvml.nvmlDeviceGetName, handle)),
        sm=major * 10 + minor,
        links=_links(nvml, who, handle),
        c2c_links=_c2c_links(nvml, who, handle),
    )


def _links(nvml: Any, who: str, handle: Any) -> dict[str, int]:
    """Active NVLinks that can do peer access, counted by what is at their other end."""
    counts: dict[str, int] = {}
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", _MAX_LINKS)):
        capable = _maybe(
            nvml, who, nvml.nvmlDeviceGetNvLinkCapability, handle, link, _CAPABILITY_P2P
        )
        if not capable or not _maybe(nvml, who, nvml.nvmlDeviceGetNvLinkState, handle, link):
            continue
        target = _remote(nvml, who, handle, link)
        if target is not None:
            counts[target] = counts.get(target, 0) + 1
    return counts


def _remote(nvml: Any, who: str, handle: Any, link: int) -> str | None:
    """Bus id of the GPU at the other end, "" for a switch, None if NVML does not know an end.

    Drivers without the question about the type leave it to the bus id: what is no GPU of this host
    is a switch, which virtual machines do not see (NCCL concludes the same).
    """
    pci = _maybe(nvml, who, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
    if pci is None:
        return None
    kind = _maybe(nvml, who, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
    if kind == _REMOTE_SWITCH:
        return ""
    return normal_bus_id(_text(pci.busId)) or ""


def _c2c_links(nvml: Any, who: str, handle: Any) -> int:
    """How many chip-to-chip links lead to the CPU (Grace); 0 if the driver knows of none."""
    field = getattr(nvml, "NVML_FI_DEV_C2C_LINK_COUNT", _C2C_LINK_COUNT)
    values = _maybe(nvml, who, nvml.nvmlDeviceGetFieldValues, handle, [field])
    if not values or values[0].nvmlReturn != 0:
        return 0
    return int(values[0].value.uiVal)


def _peer_access(nvml: Any, handles: list[Any]) -> tuple[PeerAccess, ...]:
    """Reported peer access of each ordered pair; pairs without an answer are left out."""
    found = []
    for source, one in enumerate(handles):
        for target, other in enumerate(handles):
            if source == target:
                continue
            who = f"GPUs {source} and {target}"
            answers = [
                _maybe(nvml, who, nvml.nvmlDeviceGetP2PStatus, one, other, direction)
                for direction in (_P2P_READ, _P2P_WRITE)
            ]
            if None in answers:
                continue
            supported = all(answer == 0 for answer in answers)
            found.append(
                PeerAccess(source=source, target=target, supported=supported, provenance="reported")
            )
    return tuple(found)


def _answer(nvml: Any, who: str, question: Callable[..., Any], *arguments: Any) -> Any:
    """NVML's answer to what every driver can answer."""
    try:
        return question(*arguments)
    except nvml.NVMLError as error:
        raise InputError(
            who,
            f"does not answer {question.__name__} ({error})",
            "see whether nvidia-smi shows all GPUs well",
        ) from error


def _maybe(nvml: Any, who: str, question: Callable[..., Any], *arguments: Any) -> Any:
    """NVML's answer, or None if the question does not apply there."""
    try:
        return question(*arguments)
    except nvml.NVMLError as error:
        if getattr(error, "value", None) in NOT_ANSWERED:
            return None
        raise InputError(
            who,
            f"does not answer {question.__name__} ({error})",
            "see whether nvidia-smi shows all GPUs well",
        ) from error


def _text(value: Any) -> str:
    """pynvml gives bytes or str, as its version has it."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


# A machine as a job sees it that may use some of its GPUs only (CUDA_VISIBLE_DEVICES).


VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_indices(machine: Machine, uuids: Sequence[str], text: str | None) -> tuple[int, ...]:
    """NVML indices of the GPUs that CUDA_VISIBLE_DEVICES leaves, ascending; all if it is not set.

    As CUDA reads it: indices or beginnings of UUIDs with commas between, and nothing counts from
    the first that is neither.

    Raises:
        InputError: it leaves none.
    """
    if text is None:
        return machine.gpu_indices
    found: set[int] = set()
    for part in (piece.strip() for piece in text.split(",")):
        index = _index(machine, uuids, part)
        if index is None:
            break
        found.add(index)
    if not found:
        known = ", ".join(map(str, machine.gpu_indices))
        raise InputError(VARIABLE, f"is {text[:40]!r}, which is no GPU here", f"there are {known}")
    return tuple(sorted(found))


def _index(machine: Machine, uuids: Sequence[str], part: str) -> int | None:
    if part.isascii() and part.isdigit() and len(part) < 6:
        return int(part) if int(part) in machine.gpu_indices else None
    named = [
        index
        for index, uuid in zip(machine.gpu_indices, uuids, strict=False)
        if len(part) > len("GPU-") and uuid.startswith(part)
    ]
    return named[0] if len(named) == 1 else None


def only_gpus(
    machine: Machine, knowledge: Knowledge, gpus: Collection[int]
) -> tuple[Machine, Knowledge]:
    """The machine with these GPUs alone, and what is known of them; indices stay as they are."""
    gone = {gpu.id for gpu in machine.gpus if gpu.index not in gpus}
    smaller = msgspec.structs.replace(
        machine,
        gpus=tuple(gpu for gpu in machine.gpus if gpu.id not in gone),
        nvlinks=tuple(link for link in machine.nvlinks if not {link.source, link.target} & gone),
    )
    facts = msgspec.structs.replace(
        knowledge,
        peer_access=tuple(
            fact for fact in knowledge.peer_access if {fact.source, fact.target} <= set(gpus)
        ),
        hidden_links=tuple(
            link for link in knowledge.hidden_links if not {link.one, link.other} & gone
        ),
    )
    return smaller, facts
