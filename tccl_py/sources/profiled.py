"""Measured bandwidth: the profiler on this host, or on the hosts of an MPI job, as a source.

Functions import the profiler late, so that simulations do not load it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from tccl_py.errors import (
    BudgetSpentError,
    InputError,
    MeasurementError,
    SourceLostError,
    check_choice,
    check_range,
    check_type,
    spell,
)
from tccl_py.model.machine import Fingerprint, Knowledge, Machine
from tccl_py.model.measurement import Backend, FlowCoupling, JournalHeader, Measurement
from tccl_py.model.transfer import TransferSet, index_of

if TYPE_CHECKING:
    from tccl_profiler.cluster.session import ClusterSession
    from tccl_profiler.profiler import Options
    from tccl_profiler.session import Session
    from tccl_profiler.watch import GpuConditions

    GpuState = tuple[GpuConditions, tuple[str, ...]]
    """A GPU's clocks, links and processes, and sentences on what would spoil measurements."""

DEFAULT_TARGET = 0.01
REPEATS, LEAST_REPEATS = 30, 6
_SEARCH_REPEATS = 10
"""A search measures hundreds of sets, and measures its results several times more."""
_DRY_TARGET, _DRY_REPEATS = 0.1, 6
"""A dry run is to end within minutes; its rates say nothing about GPUs."""

_INSTEAD = "ask a model (`machine`), or measure this host's memory as a dry run (`backend` host)"
DRY_RUN = (
    "measured by the host backend: copies in host memory, a process in each GPU's place; between "
    "hosts by TCP. NCCL does not run there, and the rates say nothing about GPUs"
)

_UNSETTLED = 0.1
"""A share of unsettled sets above this gets a notice."""
_SHOWN = 5
"""Failed sets, and sets of unknown overlap, that notices name."""


class MeasuredMachine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that the profiler measures; `visible` is the text of CUDA_VISIBLE_DEVICES."""

    backend: Backend
    machine: Machine
    knowledge: Knowledge
    fingerprint: Fingerprint
    visible: str | None = None

    @property
    def gpus(self) -> tuple[int, ...]:
        """The GPUs that jobs see here, for where none are named; InputError: none of them."""
        from tccl_py.readers.live import visible_indices  # noqa: PLC0415 (loads NVML)

        return visible_indices(self.machine, self.fingerprint.gpu_uuids, self.visible)

    @property
    def notices(self) -> tuple[str, ...]:
        """Limits of every rate that is measured here, for the user."""
        if self.backend == "cuda":
            from tccl_profiler.watch import gpu_share  # noqa: PLC0415

            share = gpu_share()
            words = f"MPS gives a program {share} % of a GPU: with all of it rates may be higher"
            return (words,) if share else ()
        from tccl_profiler.linux import shared_cores  # noqa: PLC0415

        return (DRY_RUN, *shared_cores(self.machine))


class MeasurementOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of measurements."""

    target: float = DEFAULT_TARGET
    """A set is repeated until the 95 % interval of every rate is narrower, as a share of it."""
    repeats: int = REPEATS
    """At most so many times."""
    meeting: str = "pass-on"
    """Whether flows that meet at a GPU pass data on or run independently."""
    check: bool = False
    """Whether data are compared in every set, not once for each flow."""

    def __post_init__(self) -> None:
        check_type(self.target, "target", int, float)
        check_range("`target`", self.target, 0, 1, above=True)
        check_type(self.repeats, "repeats", int)
        check_range("`repeats`", self.repeats, LEAST_REPEATS, inf)
        check_choice("`meeting`", self.meeting, get_args(FlowCoupling))

    @property
    def for_profiler(self) -> Options:
        """The same, as the profiler takes them."""
        from tccl_profiler.precision import Stopping  # noqa: PLC0415
        from tccl_profiler.profiler import Options  # noqa: PLC0415

        return Options(
            stopping=Stopping(target=self.target, limit=self.repeats),
            meeting=msgspec.convert(self.meeting, FlowCoupling),
            check=self.check,
        )


def search_options(backend: str | None, target: float | None = None) -> MeasurementOptions:
    """Return the options of a search's measurements, and of further ones for its plan."""
    dry_run = backend == "host"
    usual = _DRY_TARGET if dry_run else DEFAULT_TARGET
    repeats = _DRY_REPEATS if dry_run else _SEARCH_REPEATS
    return MeasurementOptions(target=usual if target is None else target, repeats=repeats)


def measured_machine(backend: str | None = None, devices: int | None = None) -> MeasuredMachine:
    """Return this host's machine as the profiler measures it.

    Args:
        backend: `cuda` (the default), or `host` for a dry run in host memory.
        devices: number of devices of the host backend.

    Raises InputError: an unknown backend, no GPU, or an impossible number of devices.
    """
    if check_backend(backend, devices) == "host":
        from tccl_profiler.linux import host_fingerprint, host_machine  # noqa: PLC0415

        machine = host_machine(devices)
        fingerprint = host_fingerprint(machine)
        # Processes share the memory of their host.
        reached = Knowledge(peer_access_provenance="reported")
        return MeasuredMachine(
            backend="host", machine=machine, knowledge=reached, fingerprint=fingerprint
        )
    from tccl_py.readers.live import VARIABLE, discover_machine  # noqa: PLC0415

    try:
        machine, knowledge, fingerprint = discover_machine()
    except InputError as error:
        raise InputError(error.where, error.what, _INSTEAD) from error
    return MeasuredMachine(
        backend="cuda",
        machine=machine,
        knowledge=knowledge,
        fingerprint=fingerprint,
        visible=os.environ.get(VARIABLE),
    )


def check_backend(backend: str | None, devices: int | None = None) -> Backend:
    """Return the backend of a name; None is `cuda`. Refuse a number of devices beside GPUs."""
    if backend is not None:
        check_choice("`backend`", backend, get_args(Backend))
    if devices is not None and backend != "host":
        raise InputError("`devices`", "are of the host backend", "choose `backend` host")
    return "host" if backend == "host" else "cuda"


def gpus_of(machine: Machine, sets: Sequence[TransferSet]) -> tuple[int, ...]:
    """Return the GPUs of sets, after checking the sets against the machine.

    Raises MeasurementError: a set cannot be measured here: a place outside of the machine, a NIC,
    another host, too many blocks.
    """
    from tccl_profiler.compiler import devices_used  # noqa: PLC0415

    devices = [f"G{index}" for index in machine.gpu_indices]
    memory = [f"C{node.index}" for node in machine.numa_nodes]
    used = devices_used(sets, devices=devices, others=memory)
    return tuple(sorted(index_of(name) for names in used.values() for name in names))


class ProfilerSource:
    """A source that measures by a session, of this host or of a job's hosts; started when needed.

    `limits` are notices on every rate measured here, of host memory in a `dry_run`. `check` raises
    MeasurementError for sets that the hosts cannot run. No set is begun that would end after the
    `deadline`, in monotonic time.
    """

    simulated = False

    def __init__(
        self,
        session: Session | ClusterSession,
        options: MeasurementOptions,
        *,
        limits: Sequence[str] = (),
        dry_run: bool = False,
        fingerprint: Fingerprint | None = None,
        check: Callable[[Sequence[TransferSet]], object] = lambda _: None,
    ) -> None:
        self._session, self.options, self._limits = session, options, tuple(limits)
        self.dry_run, self.fingerprint, self._check = dry_run, fingerprint, check
        self.deadline = inf
        self._proof: TransferSet | None = None
        self._prepared: Session | None = None
        self._failures: list[str] = []
        self._entered = False

    @property
    def header(self) -> JournalHeader:
        """Header of journals of these measurements."""
        return self._session.header

    @property
    def notices(self) -> tuple[str, ...]:
        """Notices for the user on what is measured; stopping may add some."""
        return (*self._limits, *self._session.notices)

    @property
    def conditions(self) -> str:
        """Clocks and links of the GPUs under load, or errors of the hosts' clocks."""
        return self._session.conditions

    def prepare(self) -> None:
        """Start the workers of this host, and do not wait for them: `start` does."""
        from tccl_profiler.session import Session  # noqa: PLC0415

        if not self._entered and isinstance(self._session, Session):
            self._prepared = self._session
            self._prepared.pool.prepare()

    def start(self) -> None:
        """Start the workers, which takes long once."""
        if not self._entered:
            self._session.__enter__()
            self._entered = True

    def stop(self, *exception: Any) -> None:
        """End the workers."""
        if self._entered:
            self._session.__exit__(*exception)
        elif self._prepared is not None:
            self._prepared.pool.close()
        self._entered, self._prepared = False, None

    def measure(self, sets: Sequence[TransferSet]) -> Sequence[Measurement]:
        """Measure each set.

        Raises MeasurementError: a set cannot be measured, or no set ever could. SourceLostError:
        sets that were measured cannot be any more.
        """
        self._check(sets)
        profiler = self._session.profiler
        profiler.deadline = self.deadline
        try:
            measurements = profiler.measure(sets)
        except BudgetSpentError:
            raise
        except MeasurementError as error:
            profiler.deadline = inf
            self._check_alive(error)
            self._failures.append(str(error))
            raise
        self._proof = self._proof or sets[0]
        return measurements

    def summary(
        self, measured: Mapping[TransferSet, Sequence[Measurement]], conditions: str
    ) -> tuple[str, ...]:
        """Return notices for a plan of what was measured; `conditions` are from before stopping."""
        notices = list(self.notices)
        if conditions:
            notices.append(f"while it was measured: {conditions}")
        unsettled = sum(not any(one.settled for one in samples) for samples in measured.values())
        if unsettled > len(measured) * _UNSETTLED:
            notices.append(
                f"rates vary: {unsettled} of {len(measured)} sets measured did not reach the "
                f"target of {self.options.target:g}; other work, clocks or heat may disturb them"
            )
        firsts = [first for first, *_ in measured.values() if first.overlap_at_least]
        for first in firsts[:_SHOWN]:
            notices += overlap_notices(str(first.transfers), first)
        if failures := dict.fromkeys(self._failures):
            notices.append(
                f"{spell(len(failures), 'set')} left out, as they cannot be measured (busy)"
            )
            notices += [f"left out: {text}" for text in islice(failures, _SHOWN)]
        return tuple(dict.fromkeys(notices))

    def _check_alive(self, error: MeasurementError) -> None:
        """Tell a set that cannot be measured from a machine that is lost."""
        if self._proof is None:
            return
        try:
            self._session.profiler.exercise(self._proof)
        except MeasurementError as again:
            # The first error says what happened; later ones may only be its consequence.
            text = f"{error}; nor can {self._proof} be measured any more"
            raise SourceLostError(text) from again


def overlap_notices(text: str, measurement: Measurement) -> Iterator[str]:
    """Warn where the clock does not show that the flows of a set ran together."""
    if measurement.overlap_at_least:
        yield (
            f"{text}: its flows ran together for at least {measurement.overlap:.0%} of the time; "
            "the clock shows no more, as time stamps of copy engines wait for kernels of their "
            "GPU, and copies may be faster than was measured"
        )


def relative_intervals(measurement: Measurement) -> tuple[float, ...]:
    """Return the width of each rate's 95 % interval, relative to it; inf below 6 repeats.

    In the measurement's order of flows.
    """
    from tccl_profiler.precision import relative_width  # noqa: PLC0415

    return tuple(map(relative_width, measurement.samples_gbps))


# The state of this host's GPUs now.
def conditions_of(gpus: Sequence[int]) -> list[GpuState]:
    """Return the state of each GPU now."""
    from tccl_profiler.watch import warnings, watching  # noqa: PLC0415

    with watching(gpus, frozenset()) as look:
        states = look()
    return [(state, warnings([state], loaded=False)) for state in states]


def several_processes_may_use(gpus: Sequence[int]) -> bool:
    """Return whether workers may run on these GPUs beside NCCL's ranks, as NVML says.

    Programs that share a GPU by MPS have few queues in all.
    """
    from tccl_profiler.watch import gpu_share  # noqa: PLC0415

    with suppress(MeasurementError):
        return not (gpu_share() or any(state.compute_mode for state, _ in conditions_of(gpus)))
    return False


def users_of(gpus: Sequence[int]) -> str:
    """Return which other process uses one of these GPUs now; "" if none does."""
    users = (
        f"process {process.pid} ({process.name or 'name unknown'}) uses GPU {state.gpu}"
        for state, _ in conditions_of(gpus)
        for process in state.other_processes or ()
    )
    return next(users, "")
