"""Measuring the hosts of an MPI job: who controls, and the source over all hosts.

The profiler is imported inside what needs it: no other command depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from tccl_py.cli.hardware import Backend, Care, check_backend, profiler_options
from tccl_py.errors import InputError, MeasurementError
from tccl_py.model.measurement import Measurement
from tccl_py.model.transfer import TransferSet
from tccl_py.sources.journal import JournalHeader

if TYPE_CHECKING:
    from tccl_profiler.cluster.job import Job
    from tccl_profiler.cluster.session import ClusterSession

InterfacesOption = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Network interfaces to use as NICs N0, N1 ..., where a host has them, as eth0,eth1; "
        "those of the network cards if not given.",
    ),
]
"""The --interfaces option of commands that measure the hosts of a job."""

Network = Literal["tcp", "nccl"]

NetworkOption = Annotated[
    str | None,
    typer.Option(
        metavar="tcp|nccl",
        help="What moves bytes from a GPU to another host's: NCCL, by InfiniBand or RoCE where "
        "there is, or TCP between host memories. The default is nccl, on the host backend tcp.",
    ),
]
"""The --network option of commands that measure the hosts of a job."""

_REHEARSAL = (
    "measured by the host backend: copies in the hosts' memory and between them over TCP. NCCL "
    "does not run there, and no figure says anything of GPUs"
)


def in_job() -> bool:
    """Whether this process is one of several ranks."""
    from tccl_profiler.cluster.mpi import in_mpi_job  # noqa: PLC0415

    return in_mpi_job()


@contextmanager
def job_of_ranks() -> Iterator[Job]:
    """This rank's part in the job; on all ranks but the controller the block does not run.

    Raises:
        InputError: mpi4py is not there, or the ranks cannot meet.
    """
    from tccl_profiler.cluster.mpi import mpi_job  # noqa: PLC0415

    with mpi_job() as job:
        if not job.is_controller:
            raise typer.Exit(job.serve())
        yield job


def open_cluster(
    job: Job,
    *,
    backend: str | None,
    devices: int | None,
    interfaces: str | None,
    network: str | None,
    careful: Care,
    expected: Sequence[str] = (),
    gid_index: int | None = None,
) -> ClusterSession:
    """The session over a job's hosts; it starts nothing before it is entered.

    Raises:
        InputError: an unknown backend or network, or a number of devices beside GPUs.
    """
    from tccl_profiler.cluster.session import LIMITS, ClusterSession  # noqa: PLC0415

    kind = check_backend(backend, devices)
    options = msgspec.structs.replace(
        profiler_options(careful), limits=LIMITS, network=_network(network, kind)
    )
    return ClusterSession(
        job,
        backend=kind,
        devices=devices,
        interfaces=tuple(interfaces.split(",")) if interfaces else (),
        expected=expected,
        options=options,
        gid_index=gid_index,
    )


def _network(asked: str | None, backend: Backend) -> Network:
    """What --network says.

    Raises:
        InputError: an unknown one, or NCCL without GPUs.
    """
    if asked is None:
        return "tcp" if backend == "host" else "nccl"
    if asked == "tcp":
        return "tcp"
    if asked != "nccl":
        raise InputError(f"--network {asked[:20]!r}", "is not known", "one of tcp, nccl")
    if backend == "host":
        raise InputError("--network nccl", "needs GPUs", "leave out --backend host, or it")
    return "nccl"


class ClusterHardware:
    """A BandwidthSource over the hosts of a job, as `hardware.Hardware` is over one machine.

    `on_set` is called with the number of sets measured so far, before and after each. `failures`
    says why sets could not be measured, `unsettled` counts those whose rates vary, `apart` has
    measurements whose flows the clock does not show to have run together.

    Args:
        session: entered.
        rehearsal: whether its devices are no GPUs.
    """

    simulated = False

    def __init__(self, session: ClusterSession, *, rehearsal: bool) -> None:
        self._session = session
        self._rehearsal = (_REHEARSAL,) if rehearsal else ()
        self.on_set: Callable[[int], None] = lambda _: None
        self.count = self.unsettled = 0
        self.failures: list[str] = []
        self.apart: list[Measurement] = []

    @property
    def header(self) -> JournalHeader:
        """Whose a journal of these measurements is."""
        return self._session.header

    @property
    def notices(self) -> tuple[str, ...]:
        """Sentences for the user; more may come until the source is closed."""
        return (*self._rehearsal, *self._session.notices)

    @property
    def conditions(self) -> str:
        """How well the hosts' clocks are known, or "" where nothing was measured."""
        return self._session.conditions if self._session.is_open else ""

    def measure(self, sets: Sequence[TransferSet]) -> Sequence[Measurement]:
        """Measure each set; the answers are in the order given.

        Raises:
            MeasurementError: a set cannot be measured.
            SourceLostError: a host is gone.
        """
        found: list[Measurement] = []
        for one in sets:
            self.on_set(self.count)
            try:
                (answer,) = self._session.source.measure([one])
            except MeasurementError as error:
                self.failures.append(str(error))
                raise
            found.append(answer)
            self.count += 1
            self.unsettled += not answer.settled
            self.apart += [answer] if answer.overlap_at_least else []
            self.on_set(self.count)
        return found
