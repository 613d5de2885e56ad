"""The profiler: a BandwidthSource that measures transfer sets through pools of workers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from tccl_profiler import rates
from tccl_profiler.clocks import Clock, offset_from_pings
from tccl_profiler.compiler import checkable, program_for
from tccl_profiler.pool import Runner, RunSpec
from tccl_profiler.precision import (
    ChannelRate,
    Stopping,
    Window,
    WindowLimits,
    choose_window,
    needs_longer,
    outliers,
    paces_for,
    stretch,
)
from tccl_profiler.program import MAX_REPEATS, Program
from tccl_profiler.protocol import WorkerLost
from tccl_py.errors import BrokenLinkError, BudgetSpentError, MeasurementError
from tccl_py.model.measurement import TOGETHER, FlowCoupling, Measurement, Sets, listed_sets
from tccl_py.model.transfer import Flow, TransferSet, transfer_set

_TRIALS = (0.5, 4.0, 20.0)
"""Windows of trials and checks, in shortest windows, until bytes have moved in every channel."""
_ATTEMPTS = 2  # at a set, the second with new workers where one was lost
_PACINGS = 3  # how often repeats may be discarded because a copy ended before their window did
_MORE = 4  # repeats that are added where the first were not enough
_UNCOUNTED = 6  # invalid repeats of the longest window that, being the majority, fail the set
_FEW_REPEATS = Stopping(minimum=3, limit=3)  # repeats of a set with few channels, which are alike
_EXERCISE_US = 20_000.0
_PINGS = 16
_PING_EVERY_S = 0.05

_Found = TypeVar("_Found")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How carefully sets are measured."""

    stopping: Stopping = msgspec.field(default_factory=Stopping)
    limits: WindowLimits = msgspec.field(default_factory=WindowLimits)
    meeting: FlowCoupling = "pass-on"
    check: bool = False
    """Whether data are compared in every set, not once for each flow."""
    network: str = "tcp"
    """A name of NIC_TRANSPORTS."""

    @property
    def identity(self) -> str:
        """The options that journals of these measurements depend on, in words."""
        passing = "pass data on" if self.meeting == "pass-on" else "are independent"
        return (
            f"windows of {self.limits.minimum_ms:g} to {self.limits.maximum_ms:g} ms, flows that "
            f"meet {passing}"
        )


class Profiler:
    """Measures transfer sets through the pools of one host or several; a `BandwidthSource`.

    `notices` are sentences for the user, each once. The pool is started and closed by the caller.
    No run begins that would end after `deadline`, by the clock.
    """

    simulated = False

    def __init__(
        self,
        pool: Runner,
        *,
        options: Options | None = None,
        source: str = "",
        notices: list[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._now = clock
        self.deadline = math.inf
        self.options = options or Options()
        self._trials_us = [trial * self.options.limits.minimum_ms * 1e3 for trial in _TRIALS]
        self._source = source
        self._clocks: dict[str, Clock] = {}
        self._pinged_s = -math.inf
        self._windows: dict[TransferSet, tuple[Window, tuple[ChannelRate, ...]]] = {}
        self._checked: set[str] = set()
        self._uncontended: dict[TransferSet, Mapping[Flow, float]] = {}
        self.notices = [] if notices is None else notices
        self.sets_run = 0

    def measure(self, sets: Sets) -> Sequence[Measurement]:
        """Measure each set, flow or text. BudgetSpentError: one would end after the deadline."""
        return [self._retry(transfers, self._measure) for transfers in listed_sets(sets)]

    def exercise(self, transfers: TransferSet) -> None:
        """Run a set for a moment without measuring it, so that links wake up."""
        program = self._compile(transfers, "independent")
        self._read_clocks()
        self._run(program, Window(warm_us=0.0, window_us=_EXERCISE_US), None, repeats=1)

    def _compile(self, transfers: TransferSet, coupling: FlowCoupling | None = None) -> Program:
        return program_for(
            transfers,
            lanes=self._pool.lanes,
            meeting=coupling or self.options.meeting,
            network=self.options.network,
        )

    # One set: compile, check its data, choose a window, repeat.

    def _measure(self, transfers: TransferSet) -> Measurement:
        program = self._compile(transfers)
        self._read_clocks()
        self._check(program)
        uncontended = self._uncontended_of(transfers)
        window, samples = self._repeat(program, self.options.stopping, uncontended)
        self.sets_run += 1
        rows = _rows(samples)
        overlap = float(np.median([sample.overlap for sample in samples]))
        return Measurement(
            transfers=transfers,
            samples_gbps=rows,
            simulated=False,
            skew_us=float(np.median([sample.skew_us for sample in samples])),
            skew_error_us=float(np.median([sample.skew_error_us for sample in samples])),
            overlap=overlap,
            overlap_at_least=overlap < TOGETHER and rates.hides_overlap(program),
            settled=self.options.stopping.is_reached(rows),
            outliers=tuple(sorted({index for row in rows for index in outliers(row)})),
            window_us=window.window_us,
            source=self._source,
        )

    def _retry(self, transfers: TransferSet, measured: Callable[[TransferSet], _Found]) -> _Found:
        """Measure a set; if a worker is lost, again with new workers."""
        lost: list[str] = []
        while True:
            try:
                if lost:
                    self._pool.restart()
                return measured(transfers)
            except WorkerLost as error:
                lost.append(str(error))
                if self._now() >= self.deadline and len(lost) == 1:
                    raise BudgetSpentError(lost[0]) from error
                self._clocks.clear()
                self._pinged_s = -math.inf
                if len(lost) == _ATTEMPTS:
                    text = "; then, with all workers started anew, ".join(lost)
                    raise MeasurementError(f"{transfers}: {text}") from error
            self.note(f"{lost[-1]}; all workers were started anew and {transfers} measured again")

    def _check(self, program: Program) -> None:
        """Compare arriving data with what was sent, for flows that were not checked yet."""
        flows = {str(flow) for flow in program.transfers.flows}
        if not self.options.check and flows <= self._checked:
            return
        transfers = checkable(program.transfers)
        proof = program if transfers == program.transfers else self._compile(transfers)
        for window_us in self._trials_us:
            window = Window(warm_us=0.0, window_us=window_us)
            (sample,) = self._run(proof, window, None, repeats=1, check=True)
            for flow, wrong in zip(proof.transfers.flows, sample.wrong, strict=True):
                if wrong:
                    what = f"damages data: {wrong} packs of 16 bytes arrived other than sent"
                    if flow.kind == "direct":
                        (part,) = flow.transfers
                        what = f"P2P between {part.source} and {part.destination} {what}"
                        raise BrokenLinkError([flow], what, verdict="wrong values")
                    advice = "look for PCIe errors (dmesg), IOMMU and ACS settings"
                    raise MeasurementError(f"{flow}: the path {what}; {advice}")
            if all(sample.gbps):
                self._checked |= flows
                return

    def _uncontended_of(self, transfers: TransferSet) -> Mapping[Flow, float]:
        """Return GB/s of each flow's channel among few, if its channels share links."""
        fewer = {flow: rates.with_few_channels(flow) for flow in transfers.flows}
        few = transfer_set(fewer[flow] for flow in transfers.flows)
        if few == transfers:
            return {}
        if few not in self._uncontended:
            try:
                self._uncontended[few] = self._retry(few, self._uncontended_measured)
            except BudgetSpentError:
                raise
            except MeasurementError as error:
                # Not tried again: sets that are compared are to be read alike.
                self._uncontended[few] = {}
                self.note(
                    f"{error}; without this set, with few channels of those that were asked for, "
                    "rates of more channels may be too low"
                )
        measured = self._uncontended[few]
        return {flow: measured[part] for flow, part in fewer.items() if part in measured}

    def _uncontended_measured(self, few: TransferSet) -> Mapping[Flow, float]:
        program = self._compile(few)
        self._read_clocks()
        _, samples = self._repeat(program, _FEW_REPEATS, {})
        return rates.uncontended_gbps(program, rates.median_channels(samples))

    def _repeat(
        self, program: Program, stopping: Stopping, uncontended: Mapping[Flow, float]
    ) -> tuple[Window, list[rates.Sample]]:
        """Repeat a set until that is enough or takes too long; return window and samples.

        Repeats are discarded if the window turns out too short (a flow stood still in it, or flows
        ran apart in most repeats), or if a copy ended within it. Both end: windows grow by a
        quarter at least, up to their limit.
        """
        limits, begun, pacings, uncounted = self.options.limits, self._now(), 0, 0
        window, channels = self._windows.get(program.transfers) or self._trial(program)
        seen: list[rates.Sample] = []
        while not (seen and stopping.enough(_rows(seen), self._now() - begun)):
            # 1. The least number of repeats, then some more, not beyond the limit.
            missing = stopping.minimum - len(seen)
            more = missing if missing > 0 else min(_MORE, stopping.limit - len(seen))
            repeats = min(more, MAX_REPEATS)
            try:
                samples = self._run(
                    program, window, channels, repeats=repeats, uncontended=uncontended
                )
            except BudgetSpentError:
                if len(seen) < stopping.minimum:
                    raise
                break
            channels, start_error_us = rates.median_channels(samples), _start_error(samples)
            # 2. Begin again if these repeats are of little use.
            if needs_longer(window, channels, start_error_us, limits):
                window = choose_window(channels, start_error_us, limits, window)
                seen, uncounted = [], 0
            elif pacings < _PACINGS and any(sample.ended_early for sample in samples):
                pacings += 1
            # 3. Each repeat counts, or does not, by itself.
            else:
                faults = [rates.why_uncounted(program, sample) for sample in samples]
                seen += [sample for sample, why in zip(samples, faults, strict=True) if not why]
                uncounted += sum(map(bool, faults))
                most, stalls = uncounted > len(seen), min(min(x.gbps) for x in samples) <= 0
                if (most or stalls) and (longer := stretch(window, limits)) != window:
                    window, seen, uncounted = longer, [], 0
                elif most and uncounted >= _UNCOUNTED:
                    tried = f"{uncounted + len(seen)} repeats of {window.window_us / 1e3:.3g} ms"
                    raise MeasurementError(
                        f"{program.transfers}: {uncounted} of {tried} are no measurement: "
                        f"{next(filter(None, faults))}; measure again when the machine has less "
                        "to do"
                    )
        self._windows[program.transfers] = window, channels
        return window, seen

    def _trial(self, program: Program) -> tuple[Window, tuple[ChannelRate, ...]]:
        # The few slices that a copy moves in a trial may all end within a warm-up.
        copies = any(share.copies for share in program.devices.values())
        for trial_us in self._trials_us:
            trial = Window(warm_us=0.0 if copies else trial_us / 4, window_us=trial_us)
            samples = self._run(program, trial, None, repeats=1)
            channels = rates.median_channels(samples)
            if all(channel.gbps for channel in channels):
                break
        return choose_window(channels, _start_error(samples), self.options.limits), channels

    def _run(
        self,
        program: Program,
        window: Window,
        channels: Sequence[ChannelRate] | None,
        *,
        repeats: int,
        check: bool = False,
        uncontended: Mapping[Flow, float] | None = None,
    ) -> list[rates.Sample]:
        lasting_s = repeats * (window.warm_us + window.window_us) / 1e6
        if self._now() + lasting_s > self.deadline:
            raise BudgetSpentError(f"{program.transfers}: the time for measuring is over")
        spec = RunSpec(
            repeats=repeats,
            warm_us=window.warm_us,
            window_us=window.window_us,
            check=check,
            paces=paces_for(program, channels, window.warm_us + window.window_us),
        )
        results = self._pool.run(program, spec)
        # Between two readings a clock is known better than after the last.
        self._read_clocks()
        clocks = {device: clock.host_ns for device, clock in self._clocks.items()}
        return [
            rates.sample_of(program, result, spec, clocks, uncontended=uncontended)
            for result in results
        ]

    # Clocks

    def _read_clocks(self) -> None:
        """Compare the devices' clocks with the host's, unless that was just done."""
        if self._now() - self._pinged_s < _PING_EVERY_S:
            return
        for device, pinged in self._pool.ping(_PINGS).items():
            clock = self._clocks.setdefault(device, Clock(device=device))
            reading = offset_from_pings(pinged.asked_ns, pinged.device_ns, pinged.seen_ns)
            self.note(clock.add(reading))
        self._pinged_s = self._now()

    def note(self, *texts: str | None) -> None:
        """Add notices, each once."""
        for text in texts:
            if text and text not in self.notices:
                self.notices.append(text)


def _start_error(samples: Sequence[rates.Sample]) -> float:
    return float(np.median([sample.skew_us for sample in samples]))


def _rows(samples: Sequence[rates.Sample]) -> tuple[tuple[float, ...], ...]:
    return tuple(zip(*(sample.gbps for sample in samples), strict=True))
