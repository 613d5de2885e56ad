"""GPUs as the driver sees them at rest: persistence mode, clocks, heat, other processes."""

from __future__ import annotations

from collections.abc import Iterator

from tccl_py.health.doctor.findings import Finding, Unseen, listed
from tccl_py.health.doctor.host import GpuState, Host


def check_gpus(host: Host) -> Iterator[Finding | Unseen]:
    """What NVML complains of, and GPUs whose driver is unloaded between jobs."""
    state = host.driver
    if not host.gpus():
        yield Unseen(check="gpus", what="GPUs", why="no NVIDIA GPU is here, or none is shown")
        return
    if state.unseen:
        what = "clocks, heat, persistence mode and other processes of the GPUs"
        yield Unseen(check="gpus", what=what, why=state.unseen)
        return
    off = [f"GPU {gpu.index}" for gpu in state.gpus if gpu.persistence is False]
    if off:
        yield Finding(
            severity="note",
            check="gpus",
            what="persistence mode is off",
            where=listed(off),
            why="the driver lets go of a GPU that nobody uses: jobs start slower, and settings "
            "such as clocks and power limits are lost",
            source="NVIDIA, Driver Persistence",
            mend="systemctl enable --now nvidia-persistenced (or nvidia-smi -pm 1, as root)",
        )
    for gpu in state.gpus:
        if gpu.clock_mhz is not None:
            yield _held(gpu)
        for text in gpu.complaints:
            yield _complaint(gpu.index, text)


def _held(gpu: GpuState) -> Finding:
    return Finding(
        severity="note",
        check="gpus",
        what=f"its clock is held at {gpu.clock_mhz} of {gpu.clock_max_mhz} MHz by a setting",
        where=f"GPU {gpu.index}",
        why="steady for measurements, but a plan then holds for this clock only",
        source="NVML (nvidia-smi -q -d CLOCK, Applications Clocks)",
        mend=f"nvidia-smi -i {gpu.index} -rac (as root)",
    )


def _complaint(index: int, text: str) -> Finding:
    what, _, mend = text.partition("; ")
    prefix = f"GPU {index}: "
    return Finding(
        severity="slow",
        check="gpus",
        what=what.removeprefix(prefix),
        where=f"GPU {index}",
        why="rates measured now, or jobs run now, are slower than the GPU can be",
        source="NVML (nvidia-smi -q -d PERFORMANCE,CLOCK)",
        mend=mend,
    )
