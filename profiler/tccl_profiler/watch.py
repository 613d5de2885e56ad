"""Conditions of GPUs that spoil measurements, from NVML."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from tccl_py.errors import MeasurementError
from tccl_py.readers.live import NOT_ANSWERED

CLOCK_DROP = 0.10  # a clock that fell by more than this share makes rates incomparable
_AGAIN = "measure again what was measured before"
_NOT_ANSWERED = (*NOT_ANSWERED, 22, 26)  # also NVML_ERROR_VGPU_ECC_NOT_SUPPORTED and _DEPRECATED
_GRAPHICS_CLOCK, _SM_CLOCK, _MEMORY_CLOCK = 0, 1, 2
_GPU_SENSOR = 0
_UNCORRECTED, _VOLATILE = 1, 0
"""NVML_CLOCK_GRAPHICS, _SM and _MEM, NVML_TEMPERATURE_GPU, NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
NVML_VOLATILE_ECC."""
_CONSTANTS = {
    "sm_max_mhz": ("GetMaxClockInfo", _SM_CLOCK),
    "sm_set_mhz": ("GetApplicationsClock", _GRAPHICS_CLOCK),
    "pcie_generation_max": ("GetMaxPcieLinkGeneration",),
    "pcie_width_max": ("GetMaxPcieLinkWidth",),
    "persistence": ("GetPersistenceMode",),
}
_STATE = {
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
}
"""By field of GpuConditions, functions of NVML, less nvmlDevice, and their arguments."""
_HOST_PIDS = "pid:[4026531836]"
"""The first PID namespace of every Linux (PROC_PID_INIT_INO in the kernel's proc_ns.h)."""
_SETTLED_S = 0.5  # links that have not risen for so long under load will not rise
_SHOWN = "see whether nvidia-smi shows all GPUs well"


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
    `pcie_..._max` are the best of GPU and slot together.
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
    other_processes: tuple[GpuProcess, ...] | None = None


Conditions = tuple[GpuConditions, ...]


class Watch:
    """Asks NVML about GPUs, by its indices (the order of bus ids); `own_pids` may grow."""

    def __init__(
        self,
        gpus: Sequence[int],
        own_pids: AbstractSet[int],
        nvml: Any = None,
        *,
        proc: Path = Path("/proc"),
    ) -> None:
        self._gpus = tuple(gpus)
        self._own_pids = own_pids
        self._nvml = nvml
        self._proc = proc
        self._constants: dict[int, tuple[Any, GpuConditions]] = {}

    def __enter__(self) -> Watch:
        if self._nvml is None:
            import pynvml  # noqa: PLC0415 (only measuring needs it)

            self._nvml = pynvml
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise MeasurementError(
                f"this machine: no NVIDIA driver answers ({error}); {_SHOWN}"
            ) from error
        try:
            self._constants = {gpu: self._constant(gpu) for gpu in self._gpus}
        except BaseException:
            self._nvml.nvmlShutdown()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._constants = {}
        self._nvml.nvmlShutdown()

    def _constant(self, gpu: int) -> tuple[Any, GpuConditions]:
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(gpu)
        except self._nvml.NVMLError as error:
            raise MeasurementError(f"GPU {gpu}: cannot be watched ({error}); {_SHOWN}") from error

        known = self._answers(gpu, handle, _CONSTANTS)
        if known["persistence"] is not None:
            known["persistence"] = bool(known["persistence"])
        return handle, GpuConditions(gpu=gpu, **known)

    def look(self) -> Conditions:
        """Return the conditions of all GPUs; look between timed transfers and never during them."""
        if len(self._constants) < len(self._gpus):
            raise RuntimeError("a Watch looks only inside its `with` block")
        return tuple(map(self._conditions, self._gpus))

    def _conditions(self, gpu: int) -> GpuConditions:
        handle, constant = self._constants[gpu]

        state = self._answers(gpu, handle, _STATE)
        if state["throttling"] is not None:
            state["throttling"] = throttling_names(state["throttling"])
        state["other_processes"] = _others(state["other_processes"], self._own_pids, self._proc)
        return msgspec.structs.replace(constant, **state)

    def _answers(
        self, gpu: int, handle: Any, questions: Mapping[str, tuple[Any, ...]]
    ) -> dict[str, Any]:
        return {
            field: self._answer(gpu, names.split("|"), handle, *arguments)
            for field, (names, *arguments) in questions.items()
        }

    def _answer(self, gpu: int, names: Iterable[str], *arguments: Any) -> Any:
        for name in names:
            question = getattr(self._nvml, f"nvmlDevice{name}", None)
            if question is None:
                continue
            try:
                return question(*arguments)
            except self._nvml.NVMLError as error:
                if getattr(error, "value", None) not in _NOT_ANSWERED:
                    raise MeasurementError(
                        f"GPU {gpu}: does not answer nvmlDevice{name} ({error}); {_SHOWN}"
                    ) from error
        return None


def warmed(
    look: Callable[[], Conditions],
    load: Callable[[], None],
    *,
    limit_s: float = 2.0,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Conditions, float]:
    """Run `load`, some 10 ms over all links, until every PCIe link runs at the best generation.

    The loop also ends when no link has risen for half a second, or at the limit. Returns the last
    look, for `warnings(..., loaded=True)`, and the seconds taken.
    """
    begun = risen = clock()
    best: dict[int, int] = {}
    while True:
        load()
        conditions = look()
        now = clock()
        for seen in conditions:
            if (seen.pcie_generation or 0) > best.get(seen.gpu, 0):
                best[seen.gpu] = seen.pcie_generation or 0
                risen = now
        # A link that does not tell its generation has nothing to wait for.
        at_best = all(
            not (seen.pcie_generation and seen.pcie_generation_max)
            or seen.pcie_generation >= seen.pcie_generation_max
            for seen in conditions
        )
        if at_best or now - risen >= _SETTLED_S or now - begun >= limit_s:
            return conditions, now - begun


def _others(
    found: Sequence[Any] | None, own_pids: AbstractSet[int], proc: Path
) -> tuple[GpuProcess, ...] | None:
    """Return foreign processes, one per pid.

    In a container the driver may tell the host's pids, and our own processes then have no entry in
    /proc. So as many hidden pids as own pids are missing from the list are taken for ours.
    """
    if found is None:
        return None
    entries = {int(entry.pid): entry for entry in found}
    hidden = [pid for pid in entries if not (proc / str(pid)).exists()]
    ours = set(own_pids)
    if _in_container(proc):
        ours.update(hidden[: len(ours - entries.keys())])
    return tuple(
        GpuProcess(
            pid=pid,
            name=_name(proc, pid),
            used_mib=None if (used := entry.usedGpuMemory) is None else used // 2**20,
        )
        for pid, entry in sorted(entries.items())
        if pid not in ours
    )


def _in_container(proc: Path) -> bool:
    try:
        return str((proc / "self" / "ns" / "pid").readlink()) != _HOST_PIDS
    except OSError:
        return True


def _name(proc: Path, pid: int) -> str | None:
    try:
        text = (proc / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
    return "".join(letter if letter.isprintable() else "?" for letter in text)


class _Reason(NamedTuple):
    """A reason for lowered clocks: NVML's bit, nvidia-smi's name, when it spoils rates."""

    bit: int
    name: str
    spoils: Literal["always", "loaded", "never"]
    advice: str = ""


_HEAT = "check its fan, the airflow and what heats the room"
_REASONS = (
    _Reason(0x004, "sw_power_cap", "loaded", "raise its power limit or keep other load off it"),
    _Reason(0x008, "hw_slowdown", "always", "check its cooling, its power cables and the supply"),
    _Reason(0x010, "sync_boost", "never"),
    _Reason(0x020, "sw_thermal_slowdown", "always", _HEAT),
    _Reason(0x040, "hw_thermal_slowdown", "always", _HEAT),
    _Reason(0x080, "hw_power_brake_slowdown", "always", "check the power supply and its cables"),
    _Reason(0x100, "display_clocks_setting", "never"),
    _Reason(0x200, "board_limit", "never"),
    _Reason(0x400, "reliability", "never"),
)
"""nvml.h: nvmlClocksEventReason..., and nvmlClocksThrottleReason... with the same bits."""
_SETTINGS = 0x1 | 0x2  # idle and application clocks: no throttling


def throttling_names(bits: int) -> tuple[str, ...]:
    """Return the names of the reasons in NVML's bit mask; an unknown reason keeps its number."""
    names = [reason.name for reason in _REASONS if bits & reason.bit]
    rest = bits & ~_SETTINGS & ~sum(reason.bit for reason in _REASONS)
    return (*names, f"reason {rest:#x}") if rest else tuple(names)


def warnings(conditions: Sequence[GpuConditions], *, loaded: bool) -> tuple[str, ...]:
    """Return sentences on what spoils measurements; only loaded GPUs raise clocks and links."""
    return tuple(
        f"GPU {seen.gpu}: {sentence}"
        for seen in conditions
        for sentence in _warnings(seen, loaded=loaded)
    )


def _warnings(seen: GpuConditions, *, loaded: bool) -> Iterator[str]:
    narrow = _below(seen.pcie_width, seen.pcie_width_max)
    if narrow or (loaded and _below(seen.pcie_generation, seen.pcie_generation_max)):
        now = _link(seen.pcie_generation, seen.pcie_width)
        best = _link(seen.pcie_generation_max, seen.pcie_width_max)
        advice = "how the board shares lanes" if narrow else "the link speed that the BIOS sets"
        yield (
            f"its PCIe link runs at {now}, its best is {best}; check its slot, the riser or cable, "
            f"and {advice}"
        )
    heat = "" if seen.temperature_c is None else f" at {seen.temperature_c} C"
    for reason in _spoiling(seen, loaded=loaded):
        yield f"its clocks are lowered by {reason.name}{heat}; {reason.advice}"
    for process in seen.other_processes or ():
        yield f"{process} uses it too; end it, or measure GPUs that nobody else uses"
    if seen.ecc_uncorrected:
        yield (
            f"its memory had {seen.ecc_uncorrected} uncorrected ECC errors since the driver was"
            " loaded; reset it, and have it looked at if they return"
        )


def changes(before: Sequence[GpuConditions], after: Sequence[GpuConditions]) -> tuple[str, ...]:
    """Return sentences on what makes rates incomparable between two looks, both under load."""
    if [seen.gpu for seen in before] != [seen.gpu for seen in after]:
        raise ValueError("only looks at the same GPUs in the same order can be compared")
    return tuple(
        f"GPU {old.gpu}: {sentence}; {_AGAIN}"
        for old, new in zip(before, after, strict=True)
        for sentence in _changes(old, new)
    )


def _changes(old: GpuConditions, new: GpuConditions) -> Iterator[str]:
    clocks = (("SM", old.sm_mhz, new.sm_mhz), ("memory", old.memory_mhz, new.memory_mhz))
    for name, was_mhz, is_mhz in clocks:
        if was_mhz and is_mhz is not None and is_mhz < was_mhz * (1 - CLOCK_DROP):
            yield f"its {name} clock fell from {was_mhz} to {is_mhz} MHz"
    generations, widths = (
        (old.pcie_generation, new.pcie_generation),
        (old.pcie_width, new.pcie_width),
    )
    # A link that became faster is told too: earlier rates are too low.
    if any(was and now and was != now for was, now in (generations, widths)):
        was, now = (_link(*link) for link in zip(generations, widths, strict=True))
        yield f"its PCIe link went from {was} to {now}"
    if old.throttling is not None:
        for reason in _spoiling(new, loaded=True):
            if reason.name not in old.throttling:
                yield f"{reason.name} began to lower its clocks"
    if old.other_processes is not None:
        known = {process.pid for process in old.other_processes}
        for process in new.other_processes or ():
            if process.pid not in known:
                yield f"{process} came to use it"
    if old.ecc_uncorrected is not None and (new.ecc_uncorrected or 0) > old.ecc_uncorrected:
        more = (new.ecc_uncorrected or 0) - old.ecc_uncorrected
        yield f"its memory had {more} more uncorrected ECC errors"


def _spoiling(seen: GpuConditions, *, loaded: bool) -> list[_Reason]:
    """Return reasons that lower rates; hw_slowdown only alone, since it comes with other hw_."""
    times = ("always", "loaded") if loaded else ("always",)
    names = seen.throttling or ()
    found = [reason for reason in _REASONS if reason.name in names and reason.spoils in times]
    explained = any(name.startswith("hw_") and name != "hw_slowdown" for name in names)
    return [reason for reason in found if not (explained and reason.name == "hw_slowdown")]


def _below(now: int | None, best: int | None) -> bool:
    """Return whether a link is below its best; in virtual machines it may be 0 or unknown."""
    return bool(now and best and now < best)


def _link(generation: int | None, width: int | None) -> str:
    words = [f"generation {generation}"] if generation else []
    return " ".join([*words, f"x{width}"] if width else words) or "unknown"


def conditions_note(conditions: Sequence[GpuConditions]) -> str:
    """Return clocks, links, temperatures and throttling in one line.

    >>> conditions_note([GpuConditions(gpu=0, sm_mhz=1980, pcie_generation=5, pcie_width=16)])
    'SM 1980 MHz, memory ? MHz, PCIe 5 x16, ? C, throttling ?'
    """
    fastest = max((seen.sm_max_mhz or 0 for seen in conditions), default=0)
    return ", ".join(
        (
            f"SM {_span(seen.sm_mhz for seen in conditions)}{f' of {fastest}' * bool(fastest)} MHz",
            f"memory {_span(seen.memory_mhz for seen in conditions)} MHz",
            f"PCIe {_by_gpu(conditions, _note_of_link)}",
            f"{_span(seen.temperature_c for seen in conditions)} C",
            f"throttling {_by_gpu(conditions, _note_of_throttling)}",
        )
    )


def _note_of_link(seen: GpuConditions) -> str:
    now = f"{seen.pcie_generation or '?'} x{seen.pcie_width or '?'}"
    best = f"{seen.pcie_generation_max or '?'} x{seen.pcie_width_max or '?'}"
    return now if best in (now, "? x?") else f"{now} of {best}"


def _note_of_throttling(seen: GpuConditions) -> str:
    return "?" if seen.throttling is None else "+".join(seen.throttling) or "none"


def _by_gpu(conditions: Sequence[GpuConditions], text: Callable[[GpuConditions], str]) -> str:
    groups: dict[str, list[str]] = {}
    for seen in conditions:
        groups.setdefault(text(seen), []).append(str(seen.gpu))
    if len(groups) == 1:
        return next(iter(groups))
    return " / ".join(f"{words} (GPU {','.join(gpus)})" for words, gpus in groups.items()) or "?"


def _span(values: Iterator[int | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "?"
    low, high = min(known), max(known)
    return str(low) if low == high else f"{low}-{high}"
