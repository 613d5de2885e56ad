"""Measured bandwidth: the profiler on this host, or on the hosts of an MPI job, as a source.

Functions import the profiler late, so that simulations do not load it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from tccl_py.errors import InputError, MeasurementError, SourceLostError
from tccl_py.model.machine import Fingerprint, Knowledge, Machine
from tccl_py.model.measurement import Measurement, dealt
from tccl_py.model.transfer import Place, TransferSet, flow_texts, parse_flow
from tccl_py.readers.live import discover_machine
from tccl_py.sources.remembering import JournalHeader

if TYPE_CHECKING:
    from tccl_profiler.cluster.session import ClusterSession
    from tccl_profiler.profiler import Options, Profiler
    from tccl_profiler.session import Session
    from tccl_profiler.watch import GpuConditions

Backend = Literal["cuda", "host"]
Meeting = Literal["pass-on", "independent"]
DEFAULT_TARGET = 0.01
REPEATS = 30
SEARCH_REPEATS = 10
"""A search measures hundreds of sets, and measures its results several times more."""

_INSTEAD = (
    "give --simulate MACHINE to ask a model, or --backend host to measure this host's memory "
    "as a dry run"
)
DRY_RUN = (
    "measured by the host backend: copies in host memory, a process in each GPU's place; between "
    "hosts by TCP. NCCL does not run there, and the rates say nothing about GPUs"
)
_UNSETTLED = 0.1
"""A share of unsettled sets above this gets a notice."""
_MANY = 0.2
"""A share of outliers (of all repeats) above this gets a notice."""
_SHOWN = 5
"""Failed sets, and sets of unknown overlap, that notices name."""


class MeasuredMachine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that the profiler measures."""

    backend: Backend
    machine: Machine
    knowledge: Knowledge
    fingerprint: Fingerprint

    @property
    def notices(self) -> tuple[str, ...]:
        """Limits of every rate that is measured here, for the user."""
        if self.backend == "cuda":
            return ()
        from tccl_profiler.host_device import shared_cores  # noqa: PLC0415

        return (DRY_RUN, *shared_cores(self.machine))


class MeasurementOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of measurements.

    A set is repeated until the 95 % interval of every rate is narrower than `target` (a share of
    the rate), at most `repeats` times. `meeting` says whether flows that meet at a GPU pass data on
    or run independently. With `check` the data of every repeat are compared, not of one alone.
    """

    target: float = DEFAULT_TARGET
    repeats: int = REPEATS
    meeting: str = "pass-on"
    check: bool = False

    def __post_init__(self) -> None:
        # The comparison is written so that NaN fails it.
        if not 0 < self.target <= 1:
            raise InputError("--target", f"is {self.target:g}", "above 0 and at most 1, as 0.01")
        if self.meeting not in get_args(Meeting):
            where = f"--meeting {self.meeting[:20]!r}"
            raise InputError(where, "is not known", f"one of {', '.join(get_args(Meeting))}")

    @property
    def for_profiler(self) -> Options:
        """The same, as the profiler takes them."""
        from tccl_profiler.precision import Stopping  # noqa: PLC0415
        from tccl_profiler.profiler import Options  # noqa: PLC0415

        return Options(
            stopping=Stopping(target=self.target, limit=self.repeats),
            meeting=msgspec.convert(self.meeting, Meeting),
            check="every" if self.check else "once",
        )


def measured_machine(backend: str | None = None, devices: int | None = None) -> MeasuredMachine:
    """Return this host's machine as the profiler measures it.

    Args:
        backend: `cuda` (the default), or `host` for a dry run in host memory.
        devices: number of devices of the host backend.

    Raises InputError: an unknown backend, no GPU, or an impossible number of devices.
    """
    if check_backend(backend, devices) == "host":
        from tccl_profiler.host_device import host_fingerprint, host_machine  # noqa: PLC0415

        machine = host_machine(devices)
        fingerprint = host_fingerprint(machine)
        return MeasuredMachine(
            backend="host", machine=machine, knowledge=Knowledge(), fingerprint=fingerprint
        )
    try:
        machine, knowledge, fingerprint = discover_machine()
    except InputError as error:
        raise InputError(error.where, error.what, _INSTEAD) from error
    return MeasuredMachine(
        backend="cuda", machine=machine, knowledge=knowledge, fingerprint=fingerprint
    )


def check_backend(backend: str | None, devices: int | None = None) -> Backend:
    """Return the backend of a name; None is `cuda`. Refuse a number of devices beside GPUs."""
    if backend not in (None, *get_args(Backend)):
        known = ", ".join(get_args(Backend))
        raise InputError(f"--backend {str(backend)[:20]!r}", "is not known", f"one of {known}")
    if devices is not None and backend != "host":
        raise InputError("--devices", "is of the host backend", "add --backend host")
    return "host" if backend == "host" else "cuda"


def is_dry_run(header: JournalHeader) -> bool:
    """Return whether a journal has measurements of the host backend (`Session.header`)."""
    return "host backend" in header.identity


def gpus_of(machine: Machine, sets: Sequence[TransferSet]) -> tuple[int, ...]:
    """Return the GPUs of sets, after checking the sets against the machine.

    Raises InputError: a set names a GPU or NUMA node outside of the machine. MeasurementError: a
    set cannot be measured: a NIC, another host, too many blocks.
    """
    from tccl_profiler.compiler import check_places  # noqa: PLC0415
    from tccl_profiler.shared_memory import MAX_LANES  # noqa: PLC0415

    used: set[int] = set()
    # How many blocks a GPU runs at once is known when it is open; this is the limit for all GPUs.
    lanes = {f"G{i}": MAX_LANES for i in machine.gpu_indices}
    for transfers in sets:
        for part in (part for flow in transfers.flows for part in flow.transfers):
            for place in (part.source, part.executor, part.destination):
                used.update(_gpu_of(machine, place))
        check_places(transfers, lanes=lanes)
    return tuple(sorted(used))


def _gpu_of(machine: Machine, place: Place) -> tuple[int, ...]:
    if place.host or place.kind == "N":
        return ()
    if place.kind == "C":
        known = [f"C{node.index}" for node in machine.numa_nodes]
    else:
        known = [f"{place.kind}{i}" for i in machine.gpu_indices]
    if str(place) not in known:
        where = f"is not in machine {machine.name}"
        raise InputError(str(place), where, f"it has {', '.join(known)}")
    return () if place.kind == "C" else (place.index,)


class ProfiledSource:
    """A BandwidthSource over hardware; a context manager.

    Workers start with the first set, unless the session (of this host or of a job's hosts) is
    `entered` already. `count` sets were measured so far; `on_set` is called with the count before
    and after each. `notices` tell limits of every rate measured here; `check` refuses sets.
    """

    simulated = False

    def __init__(
        self,
        session: Session | ClusterSession,
        options: MeasurementOptions,
        notices: Sequence[str] = (),
        *,
        check: Callable[[Sequence[TransferSet]], object] = lambda _: None,
        entered: bool = False,
    ) -> None:
        self.session = session
        self.options = options
        self.on_set: Callable[[int], None] = lambda _: None
        self.count = 0
        self._notices = tuple(notices)
        self._failures: list[str] = []
        self._unsettled = 0
        self._apart: list[Measurement] = []
        self._check = check
        self._entered = entered
        self._proof: TransferSet | None = None

    @property
    def header(self) -> JournalHeader:
        """Header of journals of these measurements."""
        return self.session.header

    @property
    def notices(self) -> tuple[str, ...]:
        """Notices for the user; closing the source may add some."""
        return (*self._notices, *self.session.notices)

    @property
    def conditions(self) -> str:
        """Clocks and links of the GPUs under load, or errors of the hosts' clocks; "" if idle."""
        return self.session.conditions if self.count else ""

    def summary(self, conditions: str) -> tuple[str, ...]:
        """Return notices for a plan of the measurements; `conditions` are from before closing."""
        notices = list(self.notices)
        if conditions:
            notices.append(f"while it was measured: {conditions}")
        if self._unsettled > self.count * _UNSETTLED:
            notices.append(
                f"rates vary: {self._unsettled} of {self.count} sets measured did not reach "
                f"--target {self.options.target:g}; other work, clocks or heat may disturb them"
            )
        for measurement in self._apart[:_SHOWN]:
            notices += overlap_notices(str(measurement.transfers), measurement)
        failures = list(dict.fromkeys(self._failures))[:_SHOWN]
        notices += [f"left out, as it cannot be measured: {text}" for text in failures]
        return tuple(dict.fromkeys(notices))

    def measure(self, sets: Sequence[TransferSet]) -> Sequence[Measurement]:
        """Measure each set; the answers are in the order given.

        Raises MeasurementError: a set cannot be measured, or no set ever could. SourceLostError: a
        host is gone, or sets that were measured cannot be any more.
        """
        return [self._measured(transfers) for transfers in sets]

    def _measured(self, transfers: TransferSet) -> Measurement:
        self.on_set(self.count)
        self._check([transfers])
        if not self._entered:
            self.session.__enter__()
            self._entered = True
        profiler = self.session.profiler
        try:
            (measurement,) = profiler.measure([transfers])
        except MeasurementError as error:
            self._check_alive(profiler, error)
            self._failures.append(str(error))
            raise
        self._proof = self._proof or transfers
        self.count += 1
        self._unsettled += not measurement.settled
        self._apart += [measurement] if measurement.overlap_at_least else []
        self.on_set(self.count)
        return measurement

    def _check_alive(self, profiler: Profiler, error: MeasurementError) -> None:
        """Tell a set that cannot be measured from a machine that is lost."""
        if self._proof is None:
            return
        try:
            profiler.exercise(self._proof)
        except MeasurementError as again:
            # The first error says what happened; later ones may only be its consequence.
            raise SourceLostError(f"{error}; nor can {self._proof} be measured any more") from again

    def __enter__(self) -> ProfiledSource:
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._entered:
            self.session.__exit__(*exception)


def overlap_notices(text: str, measurement: Measurement) -> Iterator[str]:
    """Warn where the clock does not show that the flows of a set ran together."""
    if measurement.overlap_at_least:
        yield (
            f"{text}: its flows ran together for at least {measurement.overlap:.0%} of the time; "
            "the clock shows no more, as time stamps of copy engines wait for kernels of their "
            "GPU, and copies may be faster than was measured"
        )


def in_given_order(
    text: str, measurement: Measurement, values: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Return rates, or `values`, in the order of `text`; measurements have their own order."""
    found = measurement.gbps if values is None else values
    waiting = dealt(measurement.transfers.flows, found)
    return tuple(waiting[parse_flow(part)].pop(0) for part in flow_texts(text))


def doubts(text: str, measurement: Measurement) -> Iterator[str]:
    """Warn of what makes a measurement of the set `text` doubtful."""
    if measurement.simulated:
        return
    repeats, far = len(measurement.samples_gbps[0]), len(measurement.outliers)
    if not measurement.settled:
        width = half_width(max(relative_intervals(measurement)))
        yield (
            f"{text}: rates vary: after {repeats} repeats the 95 % interval is still {width} wide; "
            "other work, clocks or heat may disturb it; a larger --target accepts it"
        )
    if far > repeats * _MANY:
        yield f"{text}: repeats far from the others: {far} of {repeats}; they count as well"
    yield from overlap_notices(text, measurement)


def half_width(width: float) -> str:
    """Return a relative interval's width as text."""
    return f"\u00b1 {width / 2:.1%}" if width < float("inf") else "?"


def relative_intervals(measurement: Measurement) -> tuple[float, ...]:
    """Return the width of each rate's 95 % interval, relative to it; inf below 6 repeats.

    In the measurement's order of flows.
    """
    from tccl_profiler.precision import relative_width  # noqa: PLC0415

    return tuple(map(relative_width, measurement.samples_gbps))


def conditions_of(gpus: Sequence[int]) -> list[tuple[GpuConditions, tuple[str, ...]]]:
    """Return the state of each GPU now, with sentences on what would spoil measurements."""
    from tccl_profiler.watch import Watch, warnings  # noqa: PLC0415

    with Watch(gpus, frozenset()) as watch:
        seen = watch.look()
    return [(state, warnings([state], loaded=False)) for state in seen]


def users_of(gpus: Sequence[int]) -> str:
    """Return which other process uses one of these GPUs now; "" if none does."""
    users = (
        f"process {process.pid} ({process.name or 'name unknown'}) uses GPU {state.gpu}"
        for state, _ in conditions_of(gpus)
        for process in state.other_processes or ()
    )
    return next(users, "")
