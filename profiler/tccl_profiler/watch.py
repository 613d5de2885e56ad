"""A watch over the GPUs that are measured: what NVML says of them before, between and after."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tccl_profiler.conditions import GpuConditions, GpuProcess, throttling_names
from tccl_py.errors import MeasurementError
from tccl_py.readers.nvml import NOT_ANSWERED

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
    nothing (virtual machines). What is still low then is for `complaints(..., loaded=True)`.

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
