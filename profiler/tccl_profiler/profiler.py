"""The profiler: a BandwidthSource that measures transfer sets on this host."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

import msgspec
import numpy as np

from tccl_profiler.clock import Clock, offset_from_pings
from tccl_profiler.compiler import Meeting, checkable, program_for
from tccl_profiler.endpoints import Network
from tccl_profiler.execution import Runner, Timing
from tccl_profiler.program import MAX_REPEATS, Program
from tccl_profiler.rates import (
    Reading,
    ToHost,
    few_of,
    hides_overlap,
    lone_rates,
    read_outcome,
    why_uncounted,
    with_few_lanes,
)
from tccl_profiler.statistics import Sentinel, Stopping, outliers
from tccl_profiler.window import (
    LaneRate,
    Window,
    WindowLimits,
    choose_window,
    needs_longer,
    paces_for,
    stretched,
)
from tccl_profiler.workers import WorkerLost
from tccl_py.errors import MeasurementError
from tccl_py.model.measurement import TOGETHER, Measurement
from tccl_py.model.transfer import Flow, TransferSet

_TRIALS_MS = (1.0, 8.0, 40.0)
"""Windows of the first, uncounted repeat, until something has moved in every lane."""
_CHECKS_MS = (1.0, 8.0, 40.0)
"""Windows of a check, until something has arrived by every flow."""
_PACINGS = 3
"""How often repeats may be discarded because a copy ended before their window did."""
_MORE = 4
"""Repeats that are added where the first ones were not enough."""
_UNCOUNTED = 6
"""Repeats of the longest window that do not count, and are more than those that do: it failed."""
_FEW_REPEATS = Stopping(minimum=3, limit=3)
"""Repeats of a set with few lanes, whose lanes are alike."""
_EXERCISE_US = 20_000.0
_PINGS = 16
_PING_EVERY_S = 0.05

_Found = TypeVar("_Found")


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
        self._lone: dict[str, Mapping[Flow, float]] = {}
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
        return self._surely(transfers, self._measured)

    def _surely(self, transfers: TransferSet, measured: Callable[[TransferSet], _Found]) -> _Found:
        """Measure one set; where a worker is lost, once more with new ones."""
        try:
            return measured(transfers)
        except WorkerLost as error:
            lost = str(error)
        self._note(f"{lost}; all workers were started anew and {transfers} measured again")
        self._forget_clocks()
        try:
            self._pool.restart()
            return measured(transfers)
        except WorkerLost as again:
            self._forget_clocks()
            raise MeasurementError(
                f"{transfers}: {lost}; then, with all workers started anew, {again}"
            ) from again

    def _forget_clocks(self) -> None:
        self._clocks.clear()
        self._pinged_s = -math.inf

    def _measured(self, transfers: TransferSet) -> Measurement:
        options = self.options
        program = self._program(transfers, options.meeting)
        self._read_clocks()
        self._check(program)
        window, seen = self._repeated(program, options.stopping, self._lone_rates(transfers))
        self.sets_run += 1
        rows = _rows(seen)
        overlap = float(np.median([one.overlap for one in seen]))
        return Measurement(
            transfers=transfers,
            samples_gbps=rows,
            simulated=False,
            skew_us=float(np.median([one.skew_us for one in seen])),
            skew_error_us=float(np.median([one.skew_error_us for one in seen])),
            overlap=overlap,
            overlap_at_least=overlap < TOGETHER and hides_overlap(program),
            settled=options.stopping.reached(rows),
            outliers=tuple(sorted({index for row in rows for index in outliers(row)})),
            window_us=window.window_us,
            source=self._source,
        )

    def _lone_rates(self, transfers: TransferSet) -> Mapping[Flow, float]:
        """What a lane of each flow moves where few others do, if it has many lanes that share
        links; it is measured once for all sets that differ in lanes alone.

        Without it a set is measured all the same: none of its lanes is then taken to go on faster
        than the fastest.
        """
        few = with_few_lanes(transfers)
        if few is None:
            return {}
        key = str(few)
        if key not in self._lone:
            try:
                self._lone[key] = self._surely(few, self._lone_measured)
            except MeasurementError as error:
                # Not tried again: sets that are compared are to be read alike.
                self._lone[key] = {}
                self._note(
                    f"{error}; without this set, with few lanes of those that were asked for, "
                    "rates of more lanes may be too low"
                )
        known = self._lone[key]
        return {flow: known[few_of(flow)] for flow in transfers.flows if few_of(flow) in known}

    def _lone_measured(self, few: TransferSet) -> Mapping[Flow, float]:
        program = self._program(few, self.options.meeting)
        self._read_clocks()
        _, seen = self._repeated(program, _FEW_REPEATS, {})
        return lone_rates(program, _slowest(seen))

    def _repeated(
        self, program: Program, stopping: Stopping, lone: Mapping[Flow, float]
    ) -> tuple[Window, list[Reading]]:
        """Repeat a set until that is enough or takes too long; the window, and what was read in it.

        Repeats are discarded where the window turns out too short, or a copy ended before it did.
        Both end: windows grow by a quarter at least, up to their limit. A repeat in which a flow
        moved nothing, or flows ran apart, never counts.

        Raises:
            MeasurementError: most repeats of the longest window do not count.
        """
        key, limits = str(program.transfers), self.options.limits
        begun, pacings, uncounted = self._now(), 0, 0
        window, lanes = self._windows.get(key) or self._window(program)
        seen: list[Reading] = []
        while not self._enough(stopping, seen, self._now() - begun):
            # 1. Some more repeats, not beyond the limit.
            wanted = min(_MORE, stopping.limit - len(seen)) if seen else stopping.minimum
            repeats = min(wanted, MAX_REPEATS)
            readings = self._run(program, window, lanes, repeats=repeats, lone=lone)
            lanes, start_error_us = _slowest(readings), _start_error(readings)
            # 2. Begin again if the first of them say that they are of little use.
            faults = [why_uncounted(program, one) for one in readings]
            if needs_longer(window, lanes=lanes, start_error_us=start_error_us, limits=limits):
                window, seen = self._chosen(lanes, start_error_us, window), []
            elif pacings < _PACINGS and any(one.ended_early for one in readings):
                pacings += 1
            elif any(faults) and (longer := stretched(window, limits)) != window:
                window, seen = longer, []
            # 3. At the longest window each repeat counts, or does not, by itself.
            else:
                seen.extend(one for one, why in zip(readings, faults, strict=True) if not why)
                uncounted += sum(map(bool, faults))
                if uncounted >= _UNCOUNTED and uncounted > len(seen):
                    tried = f"{uncounted + len(seen)} repeats of {window.window_us / 1e3:.3g} ms"
                    raise MeasurementError(
                        f"{key}: {uncounted} of {tried} are no measurement: "
                        f"{next(filter(None, faults))}; measure again when the machine has less "
                        "to do"
                    )
        self._windows[key] = window, lanes
        return window, seen

    def _enough(self, stopping: Stopping, seen: Sequence[Reading], lasted_s: float) -> bool:
        if not seen:
            return False
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
                paces=paces_for(proof, None, window_ms * 1e3),
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
        lone: Mapping[Flow, float] | None = None,
    ) -> list[Reading]:
        timing = Timing(
            repeats=repeats,
            warm_us=window.warm_us,
            window_us=window.window_us,
            paces=paces_for(program, lanes, window.warm_us + window.window_us),
        )
        outcomes = self._pool.run(program, timing)
        # Between two readings a clock is known better than after the last one.
        self._read_clocks()
        to_host = self._to_host()
        return [read_outcome(program, one, timing, to_host, lone=lone) for one in outcomes]


def _start_error(readings: Sequence[Reading]) -> float:
    return float(np.median([one.skew_us for one in readings]))


def _slowest(readings: Sequence[Reading]) -> tuple[LaneRate, ...]:
    """Each lane at its median rate over some repeats."""
    return tuple(
        msgspec.structs.replace(lanes[0], gbps=float(np.median([lane.gbps for lane in lanes])))
        for lanes in zip(*(one.lanes for one in readings), strict=True)
    )


def _rows(seen: Sequence[Reading]) -> tuple[tuple[float, ...], ...]:
    """Each flow's rates, one a repeat."""
    return tuple(zip(*(one.gbps for one in seen), strict=True))
