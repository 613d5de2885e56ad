"""Conditions of GPUs that spoil measurements, from NVML."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import msgspec

from tccl_py.errors import InputError, MeasurementError
from tccl_py.readers.live import ask_nvml, opened_nvml

CLOCK_DROP = 0.10  # a clock that fell by more than this share makes rates incomparable
_GRAPHICS_CLOCK, _SM_CLOCK, _MEMORY_CLOCK = 0, 1, 2
_GPU_SENSOR = 0
_UNCORRECTED, _VOLATILE = 1, 0
"""NVML_CLOCK_GRAPHICS, _SM and _MEM, NVML_TEMPERATURE_GPU, NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
NVML_VOLATILE_ECC."""
_QUESTIONS: dict[str, tuple[Any, ...]] = {
    "sm_max_mhz": ("GetMaxClockInfo", _SM_CLOCK),
    "sm_set_mhz": ("GetApplicationsClock", _GRAPHICS_CLOCK),
    "pcie_generation_max": ("GetMaxPcieLinkGeneration",),
    "pcie_width_max": ("GetMaxPcieLinkWidth",),
    "persistence": ("GetPersistenceMode",),
    "compute_mode": ("GetComputeMode",),
    "sm_mhz": ("GetClockInfo", _SM_CLOCK),
    "memory_mhz": ("GetClockInfo", _MEMORY_CLOCK),
    # Drivers before 535 know the second name only, CUDA 14 will know the second of temperature.
    "throttling": ("GetCurrentClocksEventReasons|GetCurrentClocksThrottleReasons",),
    "pcie_generation": ("GetCurrPcieLinkGeneration",),
    "pcie_width": ("GetCurrPcieLinkWidth",),
    "temperature_c": ("GetTemperature|GetTemperatureV", _GPU_SENSOR),
    "ecc_uncorrected": ("GetTotalEccErrors", _UNCORRECTED, _VOLATILE),
    # By version, because pynvml's function without a version turns a missing _v3 into another
    # error. Graphics are not asked for: an X server keeps a few MiB on every GPU.
    "other_processes": ("GetComputeRunningProcesses_v3|GetComputeRunningProcesses_v2",),
    "mps_clients": ("GetMPSComputeRunningProcesses_v3|GetMPSComputeRunningProcesses_v2",),
}
"""By field of GpuConditions, functions of NVML, less nvmlDevice, and their arguments."""
_MPS_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_MPS_SERVER = "nvidia-cuda-mps"  # as /proc cuts the names of server and daemon
_HOST_PIDS = "pid:[4026531836]"
"""The first PID namespace of every Linux (PROC_PID_INIT_INO in the kernel's proc_ns.h)."""
_SETTLED_S = 0.5  # links that have not risen for so long under load will not rise


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that computes on a GPU; `name` is None if /proc does not tell it."""

    pid: int
    name: str | None = None
    used_mib: int | None = None

    def __str__(self) -> str:
        name = "name unknown" if self.name is None else self.name
        used = "" if self.used_mib is None else f", {self.used_mib} MiB"
        return f"process {self.pid} ({name}{used})"


class GpuConditions(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU at one moment; None where the driver does not answer.

    Clocks are in MHz; `sm_set_mhz` is the application clock. `throttling` has nvidia-smi's names;
    `pcie_..._max` are the best of GPU and slot together. With a `compute_mode` other than 0 a GPU
    takes one process or none.
    """

    gpu: int
    sm_mhz: int | None = None
    sm_max_mhz: int | None = None
    sm_set_mhz: int | None = None
    memory_mhz: int | None = None
    throttling: tuple[str, ...] | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    temperature_c: int | None = None
    ecc_uncorrected: int | None = None
    persistence: bool | None = None
    compute_mode: int | None = None
    other_processes: tuple[GpuProcess, ...] | None = None


Conditions = tuple[GpuConditions, ...]


def gpu_share() -> str:
    """Return the percentage of a GPU that MPS gives a program with this environment; "" for all."""
    percentage = os.environ.get(_MPS_SHARE, "")
    return "" if percentage == "100" else percentage


@contextlib.contextmanager
def watching(
    gpus: Sequence[int],
    own_pids: AbstractSet[int],
    nvml: Any = None,
    *,
    proc: Path = Path("/proc"),
) -> Iterator[Callable[[], Conditions]]:
    """Ask NVML about GPUs, by its indices (the order of bus ids); `own_pids` may grow.

    Yields a function that returns the conditions of all GPUs: to be called between timed transfers
    and never during them.
    """
    with contextlib.ExitStack() as opened:
        with _measuring():
            nvml = opened.enter_context(opened_nvml(nvml))
            handle_of = nvml.nvmlDeviceGetHandleByIndex
            handles = {gpu: ask_nvml(nvml, f"GPU {gpu}", handle_of, gpu) for gpu in gpus}

        def conditions(gpu: int) -> GpuConditions:
            fields = {
                field: _answer(nvml, gpu, names.split("|"), handles[gpu], *arguments)
                for field, (names, *arguments) in _QUESTIONS.items()
            }
            if fields["persistence"] is not None:
                fields["persistence"] = bool(fields["persistence"])
            if fields["throttling"] is not None:
                fields["throttling"] = throttling_names(fields["throttling"])
            clients = fields.pop("mps_clients") or ()
            fields["other_processes"] = _others(fields["other_processes"], clients, own_pids, proc)
            return GpuConditions(gpu=gpu, **fields)

        @_measuring()
        def look() -> Conditions:
            return tuple(map(conditions, handles))

        yield look


def _answer(nvml: Any, gpu: int, names: Iterable[str], *arguments: Any) -> Any:
    for name in names:
        question = getattr(nvml, f"nvmlDevice{name}", None)
        if question is not None:
            answer = ask_nvml(nvml, f"GPU {gpu}", question, *arguments, optional=True)
            if answer is not None:
                return answer
    return None


@contextlib.contextmanager
def _measuring() -> Iterator[None]:
    """Raise MeasurementError where NVML does not answer: no input is at fault."""
    try:
        yield
    except InputError as error:
        raise MeasurementError(str(error)) from error


def warm_links(
    look: Callable[[], Conditions],
    load: Callable[[], None],
    *,
    limit_s: float = 2.0,
    clock: Callable[[], float] = time.monotonic,
) -> Conditions:
    """Run `load`, some 10 ms over all links, until every PCIe link runs at the best generation.

    The loop also ends when no link has risen for half a second, or at the limit. Returns the last
    look, for `warnings(..., loaded=True)`.
    """
    begun = risen = clock()
    best: dict[int, int] = {}
    while True:
        load()
        conditions = look()
        time_s = clock()
        for state in conditions:
            if (state.pcie_generation or 0) > best.get(state.gpu, 0):
                best[state.gpu] = state.pcie_generation or 0
                risen = time_s
        slow = any(_below(state.pcie_generation, state.pcie_generation_max) for state in conditions)
        if not slow or time_s - risen >= _SETTLED_S or time_s - begun >= limit_s:
            return conditions


def _others(
    found: Sequence[Any] | None, clients: Sequence[Any], own_pids: AbstractSet[int], proc: Path
) -> tuple[GpuProcess, ...] | None:
    """Return foreign processes, one per pid; the clients of an MPS server stand for it.

    In a container the driver may tell the host's pids, and our own processes then have no entry in
    /proc. So as many hidden pids as own pids are missing from the list are taken for ours.
    """
    if found is None:
        return None
    entries = {int(entry.pid): entry for entry in (*found, *clients)}
    hidden = [pid for pid in entries if not (proc / str(pid)).exists()]
    ours = set(own_pids)
    try:
        in_container = str((proc / "self" / "ns" / "pid").readlink()) != _HOST_PIDS
    except OSError:
        in_container = True
    if in_container:
        ours.update(hidden[: len(ours - entries.keys())])
    return tuple(
        GpuProcess(
            pid=pid,
            name=name,
            used_mib=None if (used := entry.usedGpuMemory) is None else used // 2**20,
        )
        for pid, entry in sorted(entries.items())
        if pid not in ours and (name := _name(proc, pid)) != _MPS_SERVER
    )


def _name(proc: Path, pid: int) -> str | None:
    try:
        text = (proc / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
    return "".join(letter if letter.isprintable() else "?" for letter in text)


_HEAT = "check its fan, the airflow and what heats the room"
_POWER_CAP, _SLOWDOWN = "sw_power_cap", "hw_slowdown"
_REASONS = {
    0x004: (_POWER_CAP, "raise its power limit or keep other load off it"),
    0x008: (_SLOWDOWN, "check its cooling, its power cables and the supply"),
    0x010: ("sync_boost", ""),
    0x020: ("sw_thermal_slowdown", _HEAT),
    0x040: ("hw_thermal_slowdown", _HEAT),
    0x080: ("hw_power_brake_slowdown", "check the power supply and its cables"),
    0x100: ("display_clocks_setting", ""),
    0x200: ("board_limit", ""),
    0x400: ("reliability", ""),
}
"""By bit (nvmlClocksEventReason... of nvml.h), nvidia-smi's name, and advice where rates suffer."""
_SETTINGS = 0x1 | 0x2  # idle and application clocks: no throttling


def throttling_names(bits: int) -> tuple[str, ...]:
    """Return the names of the reasons in NVML's bit mask; an unknown reason keeps its number."""
    names = [name for bit, (name, _) in _REASONS.items() if bits & bit]
    unnamed = bits & ~_SETTINGS & ~sum(_REASONS)
    return (*names, f"reason {unnamed:#x}") if unnamed else tuple(names)


def warnings(conditions: Sequence[GpuConditions], *, loaded: bool) -> tuple[str, ...]:
    """Return sentences on what spoils measurements; only loaded GPUs raise clocks and links."""
    return tuple(
        f"GPU {state.gpu}: {sentence}"
        for state in conditions
        for sentence in _faults(state, loaded=loaded).values()
    )


def _faults(seen: GpuConditions, *, loaded: bool) -> dict[str, str]:
    """Return a sentence for each thing that spoils measurements."""
    faults: dict[str, str] = {}
    narrow = _below(seen.pcie_width, seen.pcie_width_max)
    if narrow or (loaded and _below(seen.pcie_generation, seen.pcie_generation_max)):
        link = _link(seen.pcie_generation, seen.pcie_width)
        best = _link(seen.pcie_generation_max, seen.pcie_width_max)
        advice = "how the board shares lanes" if narrow else "the link speed that the BIOS sets"
        faults["link"] = (
            f"its PCIe link runs at generation {link}, its best is generation {best}; check its "
            f"slot, the riser or cable, and {advice}"
        )
    heat = "" if seen.temperature_c is None else f" at {seen.temperature_c} C"
    names = seen.throttling or ()
    # The slowdown comes with the hardware's reasons for it.
    untold = {_SLOWDOWN} if sum(name.startswith("hw_") for name in names) > 1 else set()
    untold |= set() if loaded else {_POWER_CAP}
    for name, advice in _REASONS.values():
        if advice and name in names and name not in untold:
            faults[name] = f"its clocks are lowered by {name}{heat}; {advice}"
    for process in seen.other_processes or ():
        faults[f"process {process.pid}"] = (
            f"{process} uses it too; end it, or measure GPUs that nobody else uses"
        )
    if seen.ecc_uncorrected:
        faults[f"{seen.ecc_uncorrected} ECC errors"] = (
            f"its memory had {seen.ecc_uncorrected} uncorrected ECC errors since the driver was"
            " loaded; reset it, and have it looked at if they return"
        )
    return faults


def changes(before: Sequence[GpuConditions], after: Sequence[GpuConditions]) -> tuple[str, ...]:
    """Return sentences on what makes rates incomparable between two looks, both under load."""
    return tuple(
        f"GPU {old.gpu}: {sentence}; measure again what was measured before"
        for old, new in zip(before, after, strict=True)
        for sentence in _changes(old, new)
    )


def _changes(old: GpuConditions, new: GpuConditions) -> Iterator[str]:
    clocks = (("SM", old.sm_mhz, new.sm_mhz), ("memory", old.memory_mhz, new.memory_mhz))
    for name, was_mhz, is_mhz in clocks:
        if was_mhz and is_mhz is not None and is_mhz < was_mhz * (1 - CLOCK_DROP):
            yield f"its {name} clock fell from {was_mhz} to {is_mhz} MHz"
    ends = ((old.pcie_generation, new.pcie_generation), (old.pcie_width, new.pcie_width))
    # A link that became faster is told too: earlier rates are too low.
    if any(was and now and was != now for was, now in ends):
        was, now = (_link(*link) for link in zip(*ends, strict=True))
        yield f"its PCIe link went from generation {was} to generation {now}"
    named = {"link", *_faults(old, loaded=True)}
    for fault, sentence in _faults(new, loaded=True).items():
        if fault not in named:
            yield sentence


def _below(now: int | None, best: int | None) -> bool:
    """Return whether a link is below its best; in virtual machines it may be 0 or unknown."""
    return bool(now and best and now < best)


def _link(generation: int | None, width: int | None) -> str:
    return f"{generation or '?'} x{width or '?'}"


def conditions_note(conditions: Sequence[GpuConditions]) -> str:
    """Return clocks, links, temperatures and throttling in one line.

    >>> conditions_note([GpuConditions(gpu=0, sm_mhz=1980, pcie_generation=5, pcie_width=16)])
    'SM 1980 MHz, memory ? MHz, PCIe 5 x16, ? C, throttling ?'
    """
    fastest = max(state.sm_max_mhz or 0 for state in conditions)
    links: dict[str, list[int]] = {}
    reasons: dict[str, list[int]] = {}
    for state in conditions:
        now = _link(state.pcie_generation, state.pcie_width)
        best = _link(state.pcie_generation_max, state.pcie_width_max)
        link = now if best in (now, "? x?") else f"{now} of {best}"
        links.setdefault(link, []).append(state.gpu)
        names = "?" if state.throttling is None else "+".join(state.throttling) or "none"
        reasons.setdefault(names, []).append(state.gpu)
    return (
        f"SM {_span(state.sm_mhz for state in conditions)}{f' of {fastest}' * bool(fastest)} MHz, "
        f"memory {_span(state.memory_mhz for state in conditions)} MHz, PCIe {_by_gpu(links)}, "
        f"{_span(state.temperature_c for state in conditions)} C, throttling {_by_gpu(reasons)}"
    )


def _by_gpu(groups: Mapping[str, Sequence[int]]) -> str:
    if len(groups) == 1:
        return next(iter(groups))
    return " / ".join(f"{text} (GPU {','.join(map(str, gpus))})" for text, gpus in groups.items())


def _span(values: Iterable[int | None]) -> str:
    numbers = [value for value in values if value is not None]
    low, high = min(numbers, default="?"), max(numbers, default="?")
    return f"{low}" if low == high else f"{low}-{high}"
