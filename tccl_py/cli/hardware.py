"""Measuring this machine: which backend and GPUs, what is checked before, and the open session.

The profiler is imported inside what needs it: no other command depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import msgspec
import typer

from tccl_py.errors import InputError, MeasurementError, SourceLostError
from tccl_py.model.knowledge import Fingerprint, Knowledge
from tccl_py.model.machine import Machine
from tccl_py.model.measurement import Measurement
from tccl_py.model.transfer import Place, TransferSet
from tccl_py.readers.live import discover_machine
from tccl_py.sources.journal import JournalHeader

if TYPE_CHECKING:
    from tccl_profiler.profiler import Options, Profiler
    from tccl_profiler.session import Session

Backend = Literal["cuda", "host"]
Meeting = Literal["pass-on", "independent"]
DEFAULT_TARGET = 0.01
REPEATS = 30
SEARCH_REPEATS = 10
"""A search measures hundreds of sets, and what it chooses several times more."""

BackendOption = Annotated[
    str | None,
    typer.Option(
        metavar="cuda|host",
        help="What to measure: this machine's GPUs (the default), or, to try things out, its "
        "memory, with a process on a core in each GPU's place.",
    ),
]
"""The --backend option of commands that measure."""
DevicesOption = Annotated[
    int | None,
    typer.Option(metavar="N", help="Devices of the host backend; if not given one a core, 2 to 8."),
]
"""The --devices option of commands that measure."""
TargetOption = Annotated[
    float | None,
    typer.Option(
        metavar="F",
        help="Repeat a set until the 95 % interval of every flow's rate is narrower than this "
        f"share of it, at most 30 times (a plan's search 10); {DEFAULT_TARGET:g} by default.",
    ),
]
"""The --target option of commands that measure."""

_INSTEAD = (
    "give --simulate MACHINE to ask a model, or --backend host to measure this host's memory "
    "as a rehearsal"
)
_REHEARSAL = (
    "measured by the host backend: copies in this host's memory, a process in each GPU's place. "
    "NCCL does not run there, and no figure says anything of GPUs"
)


class MeasuredMachine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that is measured, what is known of it, and by which backend."""

    backend: Backend
    machine: Machine
    knowledge: Knowledge
    fingerprint: Fingerprint

    @property
    def notices(self) -> tuple[str, ...]:
        """What has to be said of every figure from here."""
        if self.backend == "cuda":
            return ()
        from tccl_profiler.host.machine import shared_cores  # noqa: PLC0415

        return (_REHEARSAL, *shared_cores(self.machine))


class Care(msgspec.Struct, frozen=True, kw_only=True):
    """How carefully sets are measured.

    `target` is how wide the 95 % interval of a rate may be, relative to it; `meeting` what flows
    that meet at a GPU do; with `check` all data that arrive are compared, not each flow's once.
    No set is repeated more often than `repeats`.
    """

    target: float = DEFAULT_TARGET
    repeats: int = REPEATS
    meeting: Meeting = "pass-on"
    check: bool = False


def care(
    *,
    target: float | None,
    meeting: str | None = None,
    check: bool = False,
    repeats: int = REPEATS,
) -> Care:
    """The care that options ask for; None is the default.

    Raises:
        InputError: a target out of range or an unknown meeting.
    """
    if target is None:
        target = DEFAULT_TARGET
    # The comparison is written so that NaN fails it.
    if not 0 < target <= 1:
        raise InputError("--target", f"is {target:g}", "above 0 and at most 1, as 0.01")
    if meeting is None:
        return Care(target=target, check=check, repeats=repeats)
    known = {name: name for name in get_args(Meeting)}
    if meeting not in known:
        raise InputError(
            f"--meeting {meeting[:20]!r}", "is not known", f"one of {', '.join(known)}"
        )
    return Care(target=target, meeting=known[meeting], check=check, repeats=repeats)


def measured_machine(backend: str | None, devices: int | None) -> MeasuredMachine:
    """Find out what there is to measure here.

    Args:
        backend: `cuda` or `host`; None is `cuda`.
        devices: how many devices the host backend has.

    Raises:
        InputError: an unknown backend, no GPU, or a number of devices that cannot be.
    """
    if check_backend(backend, devices) == "host":
        return _host(devices)
    try:
        machine, knowledge, fingerprint = discover_machine()
    except InputError as error:
        raise InputError(error.where, error.what, _INSTEAD) from error
    return MeasuredMachine(
        backend="cuda", machine=machine, knowledge=knowledge, fingerprint=fingerprint
    )


def check_backend(backend: str | None, devices: int | None) -> Backend:
    """The backend that options ask for; None is `cuda`.

    Raises:
        InputError: an unknown backend, or a number of devices beside GPUs.
    """
    known: dict[str, Backend] = {name: name for name in get_args(Backend)}
    chosen = known.get("cuda" if backend is None else backend)
    if chosen is None:
        where = f"--backend {str(backend)[:20]!r}"
        raise InputError(where, "is not known", f"one of {', '.join(known)}")
    if devices is not None and chosen != "host":
        raise InputError("--devices", "is of the host backend", "add --backend host")
    return chosen


def _host(devices: int | None) -> MeasuredMachine:
    from tccl_profiler.host.machine import host_fingerprint, host_machine  # noqa: PLC0415

    machine = host_machine(devices)
    return MeasuredMachine(
        backend="host",
        machine=machine,
        knowledge=Knowledge(),
        fingerprint=host_fingerprint(machine),
    )


def is_rehearsal(header: JournalHeader) -> bool:
    """Whether a journal is of the host backend, by what `Session.header` wrote."""
    return "host backend" in header.identity


def check_sets(machine: Machine, sets: Sequence[TransferSet]) -> tuple[int, ...]:
    """Refuse sets that cannot be measured here, before anything is started; the GPUs they use.

    Raises:
        InputError: a set names a GPU or NUMA node that the machine does not have.
        MeasurementError: a set cannot be measured: a NIC, another host, too many blocks.
    """
    from tccl_profiler.compiler import program_for  # noqa: PLC0415
    from tccl_profiler.shared_memory import MAX_LANES  # noqa: PLC0415

    used: set[int] = set()
    for one in sets:
        for flow in one.flows:
            for part in flow.transfers:
                for place in (part.source, part.executor, part.destination):
                    used.update(_gpu_of(machine, place))
        # How many blocks a GPU runs at once is known when it is open; none runs more than this.
        program_for(one, lanes={f"G{i}": MAX_LANES for i in machine.gpu_indices})
    return tuple(sorted(used))


def _gpu_of(machine: Machine, place: Place) -> tuple[int, ...]:
    if place.host or place.kind == "N":
        return ()
    if place.kind == "C":
        nodes = [f"C{node.index}" for node in machine.numa_nodes]
        if str(place) not in nodes:
            raise _not_there(place, machine, nodes)
        return ()
    if place.index not in machine.gpu_indices:
        raise _not_there(place, machine, [f"{place.kind}{i}" for i in machine.gpu_indices])
    return (place.index,)


def _not_there(place: Place, machine: Machine, known: Sequence[str]) -> InputError:
    return InputError(str(place), f"is not in machine {machine.name}", f"it has {', '.join(known)}")


class Hardware:
    """A BandwidthSource over this machine; its workers start when the first set is asked for.

    So nothing is started to learn that a journal has all the answers, or is another machine's.
    `failures` says why sets could not be measured, `unsettled` counts those whose rates vary,
    `apart` has measurements whose flows the clock does not show to have run together. `on_set` is
    called with `count`, the number of sets measured so far, before and after each.

    Args:
        place: what to measure.
        gpus: indices of the GPUs that sets will name; None is all.
        care: how carefully.
    """

    simulated = False

    def __init__(
        self, place: MeasuredMachine, *, gpus: Sequence[int] | None = None, care: Care | None = None
    ) -> None:
        self.place = place
        self.on_set: Callable[[int], None] = lambda _: None
        self.failures: list[str] = []
        self.unsettled = 0
        self.apart: list[Measurement] = []
        self._session = open_session(place, gpus, care or Care())
        self._profiler: Profiler | None = None
        self._proof: TransferSet | None = None
        self.count = 0

    @property
    def header(self) -> JournalHeader:
        """Whose a journal of these measurements is."""
        return self._session.header

    @property
    def notices(self) -> tuple[str, ...]:
        """Sentences for the user; more may come until the source is closed."""
        return (*self.place.notices, *self._session.notices)

    @property
    def conditions(self) -> str:
        """The GPUs' clocks and links under load, in one line, or ""."""
        return self._session.conditions if self._profiler is not None else ""

    def measure(self, sets: Sequence[TransferSet]) -> Sequence[Measurement]:
        """Measure each set; the answers are in the order given.

        Raises:
            MeasurementError: a set cannot be measured, or nothing ever could.
            SourceLostError: what could be measured before cannot any more.
        """
        return [self._measured(one) for one in sets]

    def _measured(self, transfers: TransferSet) -> Measurement:
        self.on_set(self.count)
        if self._profiler is None:
            self._profiler = self._session.__enter__().profiler
        try:
            (measurement,) = self._profiler.measure([transfers])
        except MeasurementError as error:
            self._check_alive(self._profiler, error)
            self.failures.append(str(error))
            raise
        self._proof = self._proof or transfers
        self.count += 1
        self.unsettled += not measurement.settled
        self.apart += [measurement] if measurement.overlap_at_least else []
        self.on_set(self.count)
        return measurement

    def _check_alive(self, profiler: Profiler, error: MeasurementError) -> None:
        """Tell a set that cannot be measured from a machine on which nothing can be any more."""
        if self._proof is None:
            return
        try:
            profiler.exercise(self._proof)
        except MeasurementError as again:
            # The first error says what happened; what follows a loss may only puzzle.
            raise SourceLostError(f"{error}; nor can {self._proof} be measured any more") from again

    def __enter__(self) -> Hardware:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._profiler is not None:
            self._session.__exit__(kind, error, trace)


def open_session(place: MeasuredMachine, gpus: Sequence[int] | None, care: Care) -> Session:
    """The session that measures a machine; it starts nothing before it is entered.

    Raises:
        InputError: a GPU that the machine does not have.
    """
    from tccl_profiler.session import Session  # noqa: PLC0415

    return Session(
        place.machine,
        place.fingerprint,
        backend=place.backend,
        gpus=gpus,
        options=profiler_options(care),
    )


def profiler_options(care: Care) -> Options:
    """The care as the profiler takes it."""
    from tccl_profiler.profiler import Options  # noqa: PLC0415
    from tccl_profiler.statistics import Stopping  # noqa: PLC0415

    return Options(
        stopping=Stopping(target=care.target, limit=care.repeats),
        meeting=care.meeting,
        check="every" if care.check else "once",
    )
