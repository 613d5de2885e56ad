"""The profiler: a BandwidthSource that measures transfer sets on this host."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

from tccl_profiler.assignment import Meeting, checkable, program_for
from tccl_profiler.clock import Clock, offset_from_pings
from tccl_profiler.control import MAX_STAMPS
from tccl_profiler.messages import Pace
from tccl_profiler.pieces import Network
from tccl_profiler.program import MAX_REPEATS, Part, Program
from tccl_profiler.reading import Reading, ToHost, read_outcome
from tccl_profiler.runs import Runner, Timing
from tccl_profiler.statistics import Sentinel, Stopping, outliers
from tccl_profiler.window import LaneRate, Window, WindowLimits, choose_window, needs_longer
from tccl_profiler.workers import WorkerLost
from tccl_py.errors import MeasurementError
from tccl_py.measurements.measurement import Measurement
from tccl_py.transfers.transfer import TransferSet

_TRIALS_MS = (1.0, 8.0, 40.0)
"""Windows of the first, uncounted repeat, until something has moved in every lane."""
_CHECKS_MS = (1.0, 8.0, 40.0)
"""Windows of a check, until something has arrived by every flow."""
_PACINGS = 3
"""How often repeats may be discarded because a copy ended before their window did."""
_MORE = 4
"""Repeats that are added where the first ones were not enough."""
_EXERCISE_US = 20_000.0
_PINGS = 16
_PING_EVERY_S = 0.05
_TRIAL_GROUPS = 6
"""Slices that a copy moves in a trial, after it has been through its FIFO twice."""
_MOST_GROUPS, _MOST_SLICES = 120, 200


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How carefully sets are measured.

    Repeats go on until every flow's 95 % interval is narrower than `stopping.target`, or its limit;
    once a set has taken `seconds_per_set`, none is added to `stopping.minimum` of them. `check`
    says whether each flow's data are compared once or with every set. `sentinel_every` sets the
    first set is measured again, to see whether the machine drifts; 0 is never. `network` says what
    moves flows from host to host; what NCCL carries is compared when its link is made.
    """

    stopping: Stopping = msgspec.field(default_factory=Stopping)
    limits: WindowLimits = msgspec.field(default_factory=WindowLimits)
    meeting: Meeting = "pass-on"
    check: Literal["once", "every"] = "once"
    seconds_per_set: float = 5.0
    sentinel_every: int = 100
    seed: int = 0
    network: Network = "tcp"


class Profiler:
    """Measures transfer sets through a pool of workers, or one a host; a `BandwidthSource`.

    `notices` are sentences for the user about what was seen on the way, in order, each once.

    Args:
        pool: started; the profiler neither starts nor closes it.
        options: how carefully.
        source: what is said of where the figures are from, with every measurement.
        clock: seconds, from any beginning.
    """

    simulated = False

    def __init__(
        self,
        pool: Runner,
        *,
        options: Options | None = None,
        source: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._now = clock
        self.options = options or Options()
        self._source = source
        self._clocks: dict[str, Clock] = {}
        self._pinged_s = -math.inf
        self._windows: dict[str, tuple[Window, tuple[LaneRate, ...]]] = {}
        self._checked: set[str] = set()
        self._random = random.Random(self.options.seed)
        self._sentinel: tuple[TransferSet, Sentinel] | None = None
        self._since_sentinel = 0
        self._drifted = ""
        self.notices: list[str] = []
        self.sets_run = 0

    def measure(self, sets: Sequence[TransferSet]) -> Sequence[Measurement]:
        """Measure each set, in random order; the answers are in the order given.

        Raises:
            MeasurementError: a set cannot be measured, or its data arrived wrong.
        """
        order = list(range(len(sets)))
        self._random.shuffle(order)
        answers: dict[int, Measurement] = {}
        for number in order:
            answers[number] = self._one(sets[number])
            self._watch_drift(sets[number], answers[number])
        return [answers[number] for number in range(len(sets))]

    def exercise(self, transfers: TransferSet) -> None:
        """Run a set for a moment without measuring it, so that links wake up.

        Raises:
            MeasurementError: it cannot be run.
        """
        program = self._program(transfers, "independent")
        self._read_clocks()
        self._run(program, Window(warm_us=0.0, window_us=_EXERCISE_US), None, repeats=1)

    def _watch_drift(self, transfers: TransferSet, measurement: Measurement) -> None:
        if not self.options.sentinel_every:
            return
        if self._sentinel is None:
            self._sentinel = (transfers, Sentinel(transfers=str(transfers)))
            self._sentinel[1].add(measurement.samples_gbps)
        self._since_sentinel += 1
        if self._since_sentinel >= self.options.sentinel_every:
            self._since_sentinel = 0
            self._note(self._drift(*self._sentinel))

    def _drift(self, first: TransferSet, sentinel: Sentinel) -> str | None:
        """Measure the first set again; what is to be said of it, in place of what was said."""
        try:
            sentinel.add(self._one(first).samples_gbps)
        except MeasurementError as error:
            # The set that was asked for has been measured, and counts.
            return f"the first set could not be measured again: {error}"
        if self._drifted in self.notices:
            self.notices.remove(self._drifted)
        self._drifted = sentinel.drift() or ""
        return self._drifted

    def _note(self, text: str | None) -> None:
        if text and text not in self.notices:
            self.notices.append(text)

    def _one(self, transfers: TransferSet) -> Measurement:
        """Measure one set; where a worker is lost, once more with new ones."""
        try:
            return self._measured(transfers)
        except WorkerLost as error:
            lost = str(error)
        self._note(f"{lost}; all workers were started anew and {transfers} measured again")
        self._clocks.clear()
        self._pinged_s = -math.inf
        try:
            self._pool.restart()
            return self._measured(transfers)
        except WorkerLost as again:
            raise MeasurementError(
                f"{transfers}: {lost}; then, with all workers started anew, {again}"
            ) from again

    def _measured(self, transfers: TransferSet) -> Measurement:
        options = self.options
        program = self._program(transfers, options.meeting)
        self._read_clocks()
        self._check(program)
        window, seen = self._repeated(program)
        self.sets_run += 1
        rows = _rows(seen)
        return Measurement(
            transfers=str(transfers),
            samples_gbps=rows,
            simulated=False,
            skew_us=float(np.median([one.skew_us for one in seen])),
            skew_error_us=float(np.median([one.skew_error_us for one in seen])),
            overlap=float(np.median([one.overlap for one in seen])),
            settled=options.stopping.reached(rows),
            outliers=tuple(sorted({index for row in rows for index in outliers(row)})),
            window_us=window.window_us,
            source=self._source,
        )

    def _repeated(self, program: Program) -> tuple[Window, list[Reading]]:
        """Repeat a set until that is enough or takes too long; the window, and what was read in it.

        Repeats are discarded where the window turns out too short, or a copy ended before it did.
        Both end: windows grow by a quarter at least, up to their limit.
        """
        stopping, key = self.options.stopping, str(program.transfers)
        begun, pacings = self._now(), 0
        window, lanes = self._windows.get(key) or self._window(program)
        seen: list[Reading] = []
        while not self._enough(seen, self._now() - begun):
            # 1. Some more repeats, not beyond the limit.
            wanted = min(_MORE, stopping.limit - len(seen)) if seen else stopping.minimum
            readings = self._run(program, window, lanes, repeats=min(wanted, MAX_REPEATS))
            lanes, start_error_us = _slowest(readings), _start_error(readings)
            # 2. Begin again if the first of them say that they are of little use.
            if needs_longer(
                window, lanes=lanes, start_error_us=start_error_us, limits=self.options.limits
            ):
                window, seen = self._chosen(lanes, start_error_us, window), []
            elif pacings < _PACINGS and any(one.ended_early for one in readings):
                pacings += 1
            else:
                seen.extend(readings)
        self._windows[key] = window, lanes
        return window, seen

    def _enough(self, seen: Sequence[Reading], lasted_s: float) -> bool:
        if not seen:
            return False
        stopping = self.options.stopping
        late = lasted_s > self.options.seconds_per_set and len(seen) >= stopping.minimum
        return late or stopping.enough(_rows(seen))

    def _program(self, transfers: TransferSet, meeting: Meeting) -> Program:
        return program_for(
            transfers, lanes=self._pool.lanes, meeting=meeting, network=self.options.network
        )

    def _read_clocks(self) -> None:
        """Compare the devices' clocks with the host's, unless that was just done."""
        if self._now() - self._pinged_s < _PING_EVERY_S:
            return
        for device, pinged in self._pool.ping(_PINGS).items():
            reading = offset_from_pings(pinged.asked_ns, pinged.device_ns, pinged.seen_ns)
            clock = self._clocks.get(device)
            jump = clock.jumped(reading) if clock else None
            self._note(jump)
            if clock is None or jump:
                clock = self._clocks[device] = Clock(device=device)
            clock.add(reading)
        self._pinged_s = self._now()

    def _to_host(self) -> Mapping[str, ToHost]:
        return {device: clock.host_ns for device, clock in self._clocks.items()}

    def _check(self, program: Program) -> None:
        """Compare arriving data with what was sent, for flows that were not checked before."""
        flows = {str(flow) for flow in program.transfers.flows}
        if self.options.check == "once" and flows <= self._checked:
            return
        proof = self._program(checkable(program.transfers), self.options.meeting)
        for window_ms in _CHECKS_MS:
            timing = Timing(
                repeats=1,
                warm_us=0.0,
                window_us=window_ms * 1e3,
                check=True,
                paces=_paces(proof, None, window_ms * 1e3),
            )
            (outcome,) = self._pool.run(proof, timing)
            reading = read_outcome(proof, outcome, timing, self._to_host())
            for flow, wrong in zip(proof.transfers.flows, reading.wrong, strict=True):
                if wrong:
                    raise MeasurementError(
                        f"{flow}: {wrong} packs of 16 bytes arrived other than they were sent; the "
                        "path damages data: look for PCIe errors (dmesg), IOMMU and ACS settings"
                    )
            if all(reading.gbps):
                self._checked |= flows
                return

    def _window(self, program: Program) -> tuple[Window, tuple[LaneRate, ...]]:
        """The window for a set and what its lanes do, from a short trial that also warms up."""
        lanes: tuple[LaneRate, ...] = ()
        # The few slices that a copy moves in a trial may all be done within a warm-up.
        copies = any(share.copies for share in program.devices.values())
        for trial_ms in _TRIALS_MS:
            trial = Window(warm_us=0.0 if copies else trial_ms * 250, window_us=trial_ms * 1e3)
            readings = self._run(program, trial, None, repeats=1)
            lanes = _slowest(readings)
            if all(lane.gbps for lane in lanes):
                break
        return self._chosen(lanes, _start_error(readings), None), lanes

    def _chosen(
        self, lanes: Sequence[LaneRate], start_error_us: float, at_least: Window | None
    ) -> Window:
        return choose_window(
            lanes=lanes,
            start_error_us=start_error_us,
            limits=self.options.limits,
            at_least=at_least,
        )

    def _run(
        self,
        program: Program,
        window: Window,
        lanes: Sequence[LaneRate] | None,
        *,
        repeats: int,
    ) -> list[Reading]:
        timing = Timing(
            repeats=repeats,
            warm_us=window.warm_us,
            window_us=window.window_us,
            paces=_paces(program, lanes, window.warm_us + window.window_us),
        )
        outcomes = self._pool.run(program, timing)
        # Between two readings a clock is known better than after the last one.
        self._read_clocks()
        to_host = self._to_host()
        return [read_outcome(program, outcome, timing, to_host) for outcome in outcomes]


def _start_error(readings: Sequence[Reading]) -> float:
    return float(np.median([one.skew_us for one in readings]))


def _slowest(readings: Sequence[Reading]) -> tuple[LaneRate, ...]:
    """Each lane at its median rate over some repeats."""
    return tuple(
        msgspec.structs.replace(lanes[0], gbps=float(np.median([lane.gbps for lane in lanes])))
        for lanes in zip(*(one.lanes for one in readings), strict=True)
    )


def _paces(
    program: Program, lanes: Sequence[LaneRate] | None, lasting_us: float
) -> dict[str, tuple[Pace, ...]]:
    """How much each copy moves so that it lasts the window: both ends of a flow as much.

    `lanes` are rates in the order of `Reading.lanes`; None where nothing is known yet.
    """
    shares = {device: share.copies for device, share in program.devices.items() if share.copies}
    paces: dict[str, dict[int, Pace]] = {device: {} for device in shares}
    rates = iter(() if lanes is None else [lane.gbps for lane in lanes])
    for counted, others in zip(program.counted, program.other, strict=True):
        copying = [part for part in (counted, *others) if part.kind == "copy"]
        for offset in range(len(counted.numbers)):
            gbps = next(rates, 0.0)
            for part in copying:
                # A device's stamps are shared by its copies.
                most = min(_MOST_GROUPS, MAX_STAMPS // len(shares[part.device]) - 2)
                paces[part.device][part.numbers[offset]] = _pace(part, gbps, lasting_us, most)
    return {
        device: tuple(pace for _, pace in sorted(found.items())) for device, found in paces.items()
    }


def _pace(part: Part, gbps: float, lasting_us: float, most: int) -> Pace:
    """Groups long enough that their stamps cost nothing, and a few more than the window needs."""
    if not gbps:
        return Pace(groups=min(2 * part.slices + _TRIAL_GROUPS, most))
    slice_us, wanted_us = part.slice_bytes / (gbps * 1e3), 1.1 * lasting_us
    group_us = max(part.group_us, wanted_us / (most - 2))
    slices = min(math.ceil(group_us / slice_us), _MOST_SLICES)
    return Pace(groups=min(math.ceil(wanted_us / (slices * slice_us)) + 2, most), slices=slices)


def _rows(seen: Sequence[Reading]) -> tuple[tuple[float, ...], ...]:
    """Each flow's rates, one a repeat."""
    return tuple(zip(*(one.gbps for one in seen), strict=True))
