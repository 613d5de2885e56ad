"""A watch over the GPUs that are measured: what NVML says of them before, between and after."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from tccl_py.errors import MeasurementError
from tccl_py.readers.nvml import NOT_ANSWERED

# Conditions of GPUs that spoil measurements: what they are, and what they say to a user.


CLOCK_DROP = 0.10
"""A clock that fell by more than this share makes rates incomparable."""
_AGAIN = "measure again what was measured before"


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that computes on a GPU; `name` is None where /proc does not tell it."""

    pid: int
    name: str | None = None
    used_mib: int | None = None


class GpuConditions(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU at one moment; a figure is None where the driver does not answer.

    Clocks in MHz; `sm_set_mhz` is the application clock, to which a setting may hold the SMs.
    `throttling` has the names of nvidia-smi's clocks_event_reasons, without idle and
    application clocks, which are settings. `pcie_generation_max` and `pcie_width_max` are the best
    of GPU and slot together, `gpu_pcie_generation_max` that of the GPU alone. Uncorrected ECC
    errors count since the driver was loaded. `other_processes` leaves out those given as our own.
    """

    gpu: int
    sm_mhz: int | None = None
    sm_max_mhz: int | None = None
    sm_set_mhz: int | None = None
    memory_mhz: int | None = None
    throttling: tuple[str, ...] | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    gpu_pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    temperature_c: int | None = None
    ecc_uncorrected: int | None = None
    persistence: bool | None = None
    other_processes: tuple[GpuProcess, ...] | None = None


class _Reason(NamedTuple):
    """Why a GPU lowers its clocks: NVML's bit, nvidia-smi's name, when that spoils rates."""

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
_SETTINGS = 0x1 | 0x2
"""Idle and application clocks: no throttling."""


def throttling_names(bits: int) -> tuple[str, ...]:
    """Names of the reasons in NVML's bit mask; one that nobody described keeps its number."""
    names = [reason.name for reason in _REASONS if bits & reason.bit]
    rest = bits & ~_SETTINGS & ~sum(reason.bit for reason in _REASONS)
    return (*names, f"reason {rest:#x}") if rest else tuple(names)


def warnings(conditions: Sequence[GpuConditions], *, loaded: bool) -> tuple[str, ...]:
    """What spoils measurements under these conditions, a sentence each: where, what, what to do.

    Args:
        conditions: one look.
        loaded: whether transfers ran while it was taken. An idle GPU lowers its PCIe generation and
            may sit at its power cap; that is no fault, so only the loaded look complains of it.
    """
    return tuple(
        f"GPU {seen.gpu}: {sentence}"
        for seen in conditions
        for part in (
            _link_warnings(seen, loaded=loaded),
            _throttling_warnings(seen, loaded=loaded),
            _process_warnings(seen),
            _ecc_warnings(seen),
        )
        for sentence in part
    )


def changes(before: Sequence[GpuConditions], after: Sequence[GpuConditions]) -> tuple[str, ...]:
    """What makes rates from before and after incomparable, a sentence each.

    Compare like with like: two looks under load, or links and clocks differ by nature. Figures that
    one look lacks are not compared.

    Raises:
        ValueError: the looks are of different GPUs.
    """
    if [seen.gpu for seen in before] != [seen.gpu for seen in after]:
        raise ValueError("only looks at the same GPUs in the same order can be compared")
    return tuple(
        f"GPU {old.gpu}: {sentence}; {_AGAIN}"
        for old, new in zip(before, after, strict=True)
        for part in (
            _clock_change("SM", old.sm_mhz, new.sm_mhz),
            _clock_change("memory", old.memory_mhz, new.memory_mhz),
            _link_change(old, new),
            _new_throttling(old, new),
            _new_processes(old, new),
            _new_ecc_errors(old, new),
        )
        for sentence in part
    )


def conditions_note(conditions: Sequence[GpuConditions]) -> str:
    """One line to keep beside measurements: clocks, links, temperatures, throttling.

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


def _link_warnings(seen: GpuConditions, *, loaded: bool) -> Iterator[str]:
    narrow = _below(seen.pcie_width, seen.pcie_width_max)
    slow = loaded and _below(seen.pcie_generation, seen.pcie_generation_max)
    if narrow or slow:
        now = _link(seen.pcie_generation, seen.pcie_width)
        best = _link(seen.pcie_generation_max, seen.pcie_width_max)
        advice = "check its slot, the riser or cable, and " + (
            "how the board shares lanes" if narrow else "the link speed that the BIOS sets"
        )
        yield f"its PCIe link runs at {now}, its best is {best}; {advice}"


def _throttling_warnings(seen: GpuConditions, *, loaded: bool) -> Iterator[str]:
    heat = "" if seen.temperature_c is None else f" at {seen.temperature_c} C"
    for reason in _spoiling(seen, loaded=loaded):
        yield f"its clocks are lowered by {reason.name}{heat}; {reason.advice}"


def _process_warnings(seen: GpuConditions) -> Iterator[str]:
    for process in seen.other_processes or ():
        yield f"{_described(process)} uses it too; end it, or measure GPUs that nobody else uses"


def _ecc_warnings(seen: GpuConditions) -> Iterator[str]:
    if seen.ecc_uncorrected:
        yield (
            f"its memory had {seen.ecc_uncorrected} uncorrected ECC errors since the driver was"
            " loaded; reset it, and have it looked at if they return"
        )


def _clock_change(name: str, old: int | None, new: int | None) -> Iterator[str]:
    if old and new is not None and new < old * (1 - CLOCK_DROP):
        yield f"its {name} clock fell from {old} to {new} MHz"


def _link_change(old: GpuConditions, new: GpuConditions) -> Iterator[str]:
    """A link that became faster is told too: what was measured before is too slow."""
    generation = _changed(old.pcie_generation, new.pcie_generation)
    if generation or _changed(old.pcie_width, new.pcie_width):
        was = _link(old.pcie_generation, old.pcie_width)
        yield f"its PCIe link went from {was} to {_link(new.pcie_generation, new.pcie_width)}"


def _new_throttling(old: GpuConditions, new: GpuConditions) -> Iterator[str]:
    if old.throttling is not None:
        for reason in _spoiling(new, loaded=True):
            if reason.name not in old.throttling:
                yield f"{reason.name} began to lower its clocks"


def _new_processes(old: GpuConditions, new: GpuConditions) -> Iterator[str]:
    if old.other_processes is not None:
        known = {process.pid for process in old.other_processes}
        for process in new.other_processes or ():
            if process.pid not in known:
                yield f"{_described(process)} came to use it"


def _new_ecc_errors(old: GpuConditions, new: GpuConditions) -> Iterator[str]:
    if old.ecc_uncorrected is not None and (new.ecc_uncorrected or 0) > old.ecc_uncorrected:
        more = (new.ecc_uncorrected or 0) - old.ecc_uncorrected
        yield f"its memory had {more} more uncorrected ECC errors"


def _spoiling(seen: GpuConditions, *, loaded: bool) -> list[_Reason]:
    """Reasons that lower rates; hw_slowdown only alone, since it comes with the other hw_ ones."""
    times = ("always", "loaded") if loaded else ("always",)
    names = seen.throttling or ()
    found = [reason for reason in _REASONS if reason.name in names and reason.spoils in times]
    explained = any(name.startswith("hw_") and name != "hw_slowdown" for name in names)
    return [reason for reason in found if not (explained and reason.name == "hw_slowdown")]


def _below(now: int | None, best: int | None) -> bool:
    """Whether a link is below its best; in virtual machines it may be 0 or unknown: no."""
    return bool(now and best and now < best)


def _changed(old: int | None, new: int | None) -> bool:
    return bool(old and new and old != new)


def _link(generation: int | None, width: int | None) -> str:
    words = [f"generation {generation}"] if generation else []
    return " ".join([*words, f"x{width}"] if width else words) or "unknown"


def _described(process: GpuProcess) -> str:
    name = "name unknown" if process.name is None else process.name
    used = "" if process.used_mib is None else f", {process.used_mib} MiB"
    return f"process {process.pid} ({name}{used})"


def _note_of_link(seen: GpuConditions) -> str:
    """`5 x16`, or `1 x16 of 5 x16`."""
    now, best = (
        f"{generation or '?'} x{width or '?'}"
        for generation, width in (
            (seen.pcie_generation, seen.pcie_width),
            (seen.pcie_generation_max, seen.pcie_width_max),
        )
    )
    return now if best in (now, "? x?") else f"{now} of {best}"


def _note_of_throttling(seen: GpuConditions) -> str:
    return "?" if seen.throttling is None else "+".join(seen.throttling) or "none"


def _by_gpu(conditions: Sequence[GpuConditions], text: Callable[[GpuConditions], str]) -> str:
    """The text that all share, or each with the GPUs it holds for."""
    groups: dict[str, list[str]] = {}
    for seen in conditions:
        groups.setdefault(text(seen), []).append(str(seen.gpu))
    if len(groups) == 1:
        return next(iter(groups))
    return " / ".join(f"{words} (GPU {','.join(gpus)})" for words, gpus in groups.items()) or "?"


def _span(figures: Iterator[int | None]) -> str:
    """`41` or `41-47`; `?` if no GPU told it."""
    known = [figure for figure in figures if figure is not None]
    if not known:
        return "?"
    low, high = min(known), max(known)
    return str(low) if low == high else f"{low}-{high}"


Conditions = tuple[GpuConditions, ...]

_NOT_ANSWERED = (*NOT_ANSWERED, 22, 26)
"""Also NVML_ERROR_VGPU_ECC_NOT_SUPPORTED and _DEPRECATED."""
_GRAPHICS_CLOCK, _SM_CLOCK, _MEMORY_CLOCK = 0, 1, 2
_GPU_SENSOR = 0
_UNCORRECTED, _VOLATILE = 1, 0
"""NVML_CLOCK_GRAPHICS, _SM and _MEM, NVML_TEMPERATURE_GPU, NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
NVML_VOLATILE_ECC."""
_CLOCK_REASONS = (
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
)
"""The second is the older name (drivers before 535)."""
_TEMPERATURE = ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV")
"""The first goes with CUDA 14."""
_PROCESSES = (
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetComputeRunningProcesses_v2",
)
"""By version, because pynvml's function without one turns a missing _v3 into an error of its own.
Graphics are not asked for: an X server keeps a few MiB on every GPU and copies nothing."""
_HOST_PIDS = "pid:[4026531836]"
"""The first PID namespace of every Linux (PROC_PID_INIT_INO in the kernel's proc_ns.h)."""
_SETTLED_S = 0.5
"""Links that have not risen for so long under load will not rise."""
_SHOWN = "see whether nvidia-smi shows all GPUs well"


@dataclass(frozen=True, kw_only=True)
class _Watched:
    """A GPU under watch, with what does not change while it is."""

    gpu: int
    handle: Any
    sm_max_mhz: int | None
    sm_set_mhz: int | None
    pcie_generation_max: int | None
    gpu_pcie_generation_max: int | None
    pcie_width_max: int | None
    persistence: bool | None

    @property
    def who(self) -> str:
        return f"GPU {self.gpu}"


class Watch:
    """Asks NVML about GPUs; a context manager, because NVML is opened and closed.

    Args:
        gpus: indices as NVML counts them, which is the order of bus ids; CUDA counts the same way
            with CUDA_DEVICE_ORDER=PCI_BUS_ID and no CUDA_VISIBLE_DEVICES.
        own_pids: processes that are ours; read at every look, so that it may grow.
        nvml: the `pynvml` module, or what stands for it.
        proc: where procfs is.

    Raises:
        MeasurementError: on entry and at every look, no driver, or a GPU that fails, by its index.
    """

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
        self._watched: tuple[_Watched, ...] | None = None

    def __enter__(self) -> Watch:
        if self._nvml is None:
            self._nvml = _imported()
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise MeasurementError(
                f"this machine: no NVIDIA driver answers ({error}); {_SHOWN}"
            ) from error
        try:
            self._watched = tuple(_watched(self._nvml, gpu) for gpu in self._gpus)
        except BaseException:
            self._nvml.nvmlShutdown()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._watched = None
        self._nvml.nvmlShutdown()

    def look(self) -> Conditions:
        """The conditions of all GPUs, in the order given.

        Cost: 8 NVML calls a GPU (up to 3 more with drivers that answer an older or newer name), and
        two small reads of /proc for each process of others. Some calls go to the GPU's own
        processor, so look between timed transfers and never during them.
        """
        if self._watched is None:
            raise RuntimeError("a Watch looks only inside its `with` block")
        return tuple(self._conditions(watched) for watched in self._watched)

    def _conditions(self, watched: _Watched) -> GpuConditions:
        def ask(names: str | tuple[str, ...], *arguments: int) -> Any:
            return _maybe(self._nvml, watched.who, names, watched.handle, *arguments)

        reasons = ask(_CLOCK_REASONS)
        return GpuConditions(
            gpu=watched.gpu,
            sm_mhz=ask("nvmlDeviceGetClockInfo", _SM_CLOCK),
            sm_max_mhz=watched.sm_max_mhz,
            sm_set_mhz=watched.sm_set_mhz,
            memory_mhz=ask("nvmlDeviceGetClockInfo", _MEMORY_CLOCK),
            throttling=None if reasons is None else throttling_names(reasons),
            pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
            pcie_generation_max=watched.pcie_generation_max,
            gpu_pcie_generation_max=watched.gpu_pcie_generation_max,
            pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
            pcie_width_max=watched.pcie_width_max,
            temperature_c=ask(_TEMPERATURE, _GPU_SENSOR),
            ecc_uncorrected=ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE),
            persistence=watched.persistence,
            other_processes=_others(ask(_PROCESSES), self._own_pids, self._proc),
        )


def warmed(
    look: Callable[[], Conditions],
    load: Callable[[], None],
    *,
    limit_s: float = 2.0,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Conditions, float]:
    """Run `load` until every PCIe link runs at its best generation; gives the last look.

    It ends too when no link has risen for half a second, or at the limit, exceeded by one `load` at
    most. `load` runs at least once, because clocks rise with it where links need not or tell
    nothing (virtual machines). What is still low then is for `warnings(..., loaded=True)`.

    Args:
        look: `Watch.look`.
        load: a short burst of transfers over all links, some 10 ms long.
        limit_s: how long to try, in seconds.
        clock: seconds, from any beginning.

    Returns:
        The last look, and how many seconds it all took.
    """
    begun = risen = clock()
    best: dict[int, int] = {}
    while True:
        load()
        conditions = look()
        now = clock()
        if _rose(conditions, best):
            risen = now
        at_best = all(map(_at_best_generation, conditions))
        if at_best or now - risen >= _SETTLED_S or now - begun >= limit_s:
            return conditions, now - begun


def _rose(conditions: Conditions, best: dict[int, int]) -> bool:
    """Whether a link is faster than in any look before; `best` remembers them."""
    rose = False
    for seen in conditions:
        generation = seen.pcie_generation or 0
        if generation > best.get(seen.gpu, 0):
            best[seen.gpu] = generation
            rose = True
    return rose


def _at_best_generation(seen: GpuConditions) -> bool:
    """A link that does not tell its generation has nothing to wait for."""
    now, best = seen.pcie_generation, seen.pcie_generation_max
    return not now or not best or now >= best


def _imported() -> Any:
    try:
        import pynvml  # noqa: PLC0415 (only measuring needs it)
    except ImportError as error:
        raise MeasurementError(
            "this machine: no NVIDIA driver answers (pynvml is missing); install nvidia-ml-py"
        ) from error
    return pynvml


def _watched(nvml: Any, gpu: int) -> _Watched:
    who = f"GPU {gpu}"
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(gpu)
    except nvml.NVMLError as error:
        raise MeasurementError(f"{who}: cannot be watched ({error}); {_SHOWN}") from error

    def ask(name: str, *arguments: int) -> Any:
        return _maybe(nvml, who, name, handle, *arguments)

    persistence = ask("nvmlDeviceGetPersistenceMode")
    return _Watched(
        gpu=gpu,
        handle=handle,
        sm_max_mhz=ask("nvmlDeviceGetMaxClockInfo", _SM_CLOCK),
        sm_set_mhz=ask("nvmlDeviceGetApplicationsClock", _GRAPHICS_CLOCK),
        pcie_generation_max=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        gpu_pcie_generation_max=ask("nvmlDeviceGetGpuMaxPcieLinkGeneration"),
        pcie_width_max=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        persistence=None if persistence is None else bool(persistence),
    )


def _maybe(nvml: Any, who: str, names: str | tuple[str, ...], *arguments: Any) -> Any:
    """The first answer among functions that ask the same, or None if the question does not apply.

    Drivers lack newer functions and pynvml lacks some of any age, so a name that pynvml does not
    have is passed over too.
    """
    for name in (names,) if isinstance(names, str) else names:
        question = getattr(nvml, name, None)
        if question is None:
            continue
        try:
            return question(*arguments)
        except nvml.NVMLError as error:
            if getattr(error, "value", None) not in _NOT_ANSWERED:
                raise MeasurementError(
                    f"{who}: does not answer {name} ({error}); {_SHOWN}"
                ) from error
    return None


def _others(
    found: Sequence[Any] | None, own_pids: AbstractSet[int], proc: Path
) -> tuple[GpuProcess, ...] | None:
    """Processes among `found` that are not ours, one for each pid.

    In a container the driver may tell the host's pids, under which our own processes have no entry
    in /proc. So as many of those as there are own pids missing from the list are taken for ours.
    """
    if found is None:
        return None
    entries = {int(entry.pid): entry for entry in found}
    hidden = [pid for pid in entries if not (proc / str(pid)).exists()]
    ours = set(own_pids)
    if _in_container(proc):
        ours.update(hidden[: len(ours - entries.keys())])
    return tuple(
        GpuProcess(pid=pid, name=_name(proc, pid), used_mib=_mib(entry.usedGpuMemory))
        for pid, entry in sorted(entries.items())
        if pid not in ours
    )


def _in_container(proc: Path) -> bool:
    """Whether pids here are not the host's; so too where nothing tells."""
    try:
        return str((proc / "self" / "ns" / "pid").readlink()) != _HOST_PIDS
    except OSError:
        return True


def _name(proc: Path, pid: int) -> str | None:
    """What the process calls itself, without what would disturb a terminal."""
    try:
        text = (proc / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _mib(size_bytes: int | None) -> int | None:
    return None if size_bytes is None else size_bytes // 2**20
