"""What is asked of a run of a program, and what comes back from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tccl_profiler.control import MAX_STAMPS, Control
from tccl_profiler.messages import Pace, Pinged, Run
from tccl_profiler.program import DeviceProgram, Program, host_of, local
from tccl_py.errors import MeasurementError


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """How a program is run: repeats, their warm-up and window, and whether data are checked.

    `paces` says for each device how much its copies move.
    """

    repeats: int
    warm_us: float
    window_us: float
    check: bool = False
    paces: Mapping[str, tuple[Pace, ...]] = msgspec.field(default_factory=dict)

    def on(self, host: str) -> Timing:
        """The same for one host's devices, by their names there."""
        paces = {local(name): pace for name, pace in self.paces.items() if host_of(name) == host}
        return msgspec.structs.replace(self, paces=paces)

    @property
    def lasting_s(self) -> float:
        """Warm-up and window of one repeat, in seconds."""
        return (self.warm_us + self.window_us) / 1e6


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One repeat: by device its records (`control.RECORD`), lanes first, and its copies'
    stamps: when released, then when each group was done."""

    records: Mapping[str, npt.NDArray[np.void]]
    stamps: Mapping[str, tuple[npt.NDArray[np.uint64], ...]]


class Runner(Protocol):
    """What runs programs for a profiler: the pool of one host, or pools of several."""

    @property
    def lanes(self) -> Mapping[str, int]:
        """How many blocks each device runs at once, by its name."""

    def run(self, program: Program, timing: Timing) -> Sequence[Outcome]:
        """Run a program's repeats."""

    def ping(self, count: int = ...) -> Mapping[str, Pinged]:
        """Each device's clock against the clock that all are compared on."""

    def restart(self) -> None:
        """Start all workers anew."""


def joined(outcomes: Mapping[str, Outcome]) -> Outcome:
    """One repeat's outcome over several hosts, from each one's own, by host."""

    def name(host: str, device: str) -> str:
        return f"{host}.{device}" if host else device

    return Outcome(
        records={
            name(host, device): rows
            for host, outcome in outcomes.items()
            for device, rows in outcome.records.items()
        },
        stamps={
            name(host, device): rows
            for host, outcome in outcomes.items()
            for device, rows in outcome.stamps.items()
        },
    )


def order_of(
    device: str, share: DeviceProgram, timing: Timing, *, epoch: int, patience_s: float
) -> Run:
    """The order for a device: its share of a program, from this epoch on.

    Raises:
        MeasurementError: its copies have no paces that fit.
    """
    paces = timing.paces.get(device, ())
    stamps = sum(pace.groups + 2 for pace in paces)
    if len(paces) != len(share.copies) or stamps > MAX_STAMPS:
        raise MeasurementError(
            f"{device}: {len(paces)} paces with {stamps} stamps for {len(share.copies)} copies; "
            f"one each and {MAX_STAMPS} stamps at most are right"
        )
    return Run(
        program=share,
        epoch=epoch,
        repeats=timing.repeats,
        warm_ns=round(timing.warm_us * 1e3),
        window_ns=round(timing.window_us * 1e3),
        patience_ns=round(patience_s * 1e9),
        paces=paces,
        check=timing.check,
    )


def stamps_of(
    control: Control, slot: int, device: str, timing: Timing, repeat: int
) -> tuple[npt.NDArray[np.uint64], ...]:
    """Views of the stamps of each copy of a device: queued, released, and one for each group."""
    rows, first = [], 0
    paces = timing.paces.get(device, ())
    area = control.stamps(slot, repeat, sum(pace.groups + 2 for pace in paces))
    for pace in paces:
        rows.append(area[first : first + pace.groups + 2])
        first += pace.groups + 2
    return tuple(rows)
