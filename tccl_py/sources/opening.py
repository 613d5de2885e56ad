"""`open_source`: rates of transfer sets by simulation, by measuring, or from a journal."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tccl_profiler.cluster.mpi import in_mpi_job as in_job
from tccl_profiler.cluster.mpi import mpi_job as join_job
from tccl_py.errors import (
    BudgetSpentError,
    InputError,
    MeasurementError,
    SourceLostError,
    check_type,
    require,
)
from tccl_py.files import encode_json
from tccl_py.model.measurement import JournalHeader, Measurement
from tccl_py.model.transfer import TransferSet
from tccl_py.simulator.descriptions import load_machine
from tccl_py.simulator.model import MachineModel, bundled_parameters
from tccl_py.simulator.source import Simulator
from tccl_py.sources.journal import JournalContents, JournalFile, read_journal
from tccl_py.sources.profiled import (
    DRY_RUN,
    Backend,
    MeasuredMachine,
    MeasurementOptions,
    check_backend,
    measured_machine,
    overlap_notices,
)
from tccl_py.sources.remembering import RememberingSource

if TYPE_CHECKING:
    from tccl_profiler.cluster.agents import RankJobs
    from tccl_profiler.cluster.facts import HostFacts
    from tccl_profiler.cluster.job import Job
    from tccl_profiler.cluster.session import ClusterSession
    from tccl_profiler.profiler import Profiler
    from tccl_profiler.session import Session

__all__ = ["HostFacts", "Job", "in_job", "join_job"]
_UNSETTLED = 0.1
"""A share of unsettled sets above this gets a notice."""
_SHOWN = 5
"""Failed sets, and sets of unknown overlap, that notices name."""


def open_source(
    machine: str | Path | MachineModel | MeasuredMachine | None = None,
    *,
    backend: str | None = None,
    devices: int | None = None,
    gpus: Sequence[int] | None = None,
    options: MeasurementOptions | None = None,
    noise: float = 0.0,
    seed: int = 0,
    journal: Path | str | None = None,
) -> OpenedSource:
    """Open a BandwidthSource over a machine; nothing is started before the first set.

    >>> import tccl_py
    >>> with tccl_py.open_source("asus-esc8000a-e13p") as source:
    ...     (measured,) = source.measure([tccl_py.parse_set("G0->G0->G4")])
    >>> round(measured.rate_gbps, 1), measured.simulated, source.sets_measured
    (39.6, True, 1)

    Without a machine, or with `backend="host"`, the profiler measures this host. The hosts of an
    MPI job are measured by `tccl_py.sources.opening.open_hosts`.

    Args:
        machine: a model to simulate (a bundled name, a file, or a MachineModel), or what
            `measured_machine` gave; None is this host.
        backend, devices: of this host, as `measured_machine` takes them; not beside a machine.
        gpus: indices of the GPUs that sets will name; None is all.
        options: of measurements; not of simulations.
        noise, seed: relative standard deviation of simulated samples, 0 to 1, and its seed.
        journal: a file of measurements; sets in it are not measured again, new ones are added.

    Raises InputError: no such machine, no GPU, options out of range, or another machine's journal.
    """
    if machine is not None:
        check_type(machine, "machine", str, Path, MachineModel, MeasuredMachine)
    is_own_host = machine is None or (backend is None and devices is None)
    require(is_own_host, "backend, devices", "are of this host", "leave them out beside a machine")
    simulated = isinstance(machine, (str, Path, MachineModel))
    require(not simulated or options is None, "options", "are of hardware", "leave them out")
    require(simulated or noise == seed == 0, "noise, seed", "are of models", "leave them out")
    if isinstance(machine, (str, Path, MachineModel)):
        model = machine if isinstance(machine, MachineModel) else load_machine(machine)
        for index in gpus or ():
            model.machine.gpu(index)
        header = simulation_header(model, noise=noise, seed=seed)
        source = OpenedSource(Simulator(model, noise=noise, seed=seed), header)
    else:
        place = machine or measured_machine(backend, devices)
        options = options or MeasurementOptions()
        session = open_session(place, gpus, options)
        source = OpenedSource(
            session=session,
            options=options,
            limits=place.notices,
            dry_run=place.backend == "host",
        )
    if journal is not None:
        source.keep_in(journal)
    return source


def open_session(
    place: MeasuredMachine, gpus: Sequence[int] | None, options: MeasurementOptions
) -> Session:
    """Return the session that measures a machine; entering it starts the workers."""
    from tccl_profiler.session import Session  # noqa: PLC0415

    return Session(
        place.machine,
        place.fingerprint,
        backend=place.backend,
        gpus=gpus,
        options=options.for_profiler,
    )


class OpenedSource(RememberingSource):
    """A source of `open_source`; a context manager.

    A `session` measures: workers, of this host or of a job's hosts, start with the first set, and
    `limits` are notices on every rate measured here, of host memory in a `dry_run`. Else `source`
    simulates under this `header`.
    """

    def __init__(
        self,
        source: Simulator | None = None,
        header: JournalHeader | None = None,
        *,
        session: Session | ClusterSession | None = None,
        options: MeasurementOptions | None = None,
        limits: Sequence[str] = (),
        dry_run: bool = False,
    ) -> None:
        super().__init__(source)
        self._dry_run = dry_run
        self._header, self._session, self._options = header, session, options
        self._limits = tuple(limits)
        self._entered = False
        self._on_set: Callable[[int], None] = lambda _: None
        self._failures: list[str] = []

    @property
    def dry_run(self) -> bool:
        """Return whether host memory is measured in the place of GPUs."""
        return self._dry_run

    @property
    def header(self) -> JournalHeader:
        """Header of journals of these measurements."""
        if self._session is not None:
            return self._session.header
        assert self._header is not None
        return self._header

    @property
    def notices(self) -> tuple[str, ...]:
        """Notices for the user on what is measured; closing the source may add some."""
        return () if self._session is None else (*self._limits, *self._session.notices)

    @property
    def conditions(self) -> str:
        """Clocks and links of the GPUs under load, or errors of the hosts' clocks.

        "" if nothing was measured.
        """
        return self._session.conditions if self._session and self.sets_measured else ""

    def watch(self, on_set: Callable[[int], None]) -> None:
        """Call `on_set` with the number of sets that hardware measured, before and after each."""
        self._on_set = on_set

    def summary(self, conditions: str) -> tuple[str, ...]:
        """Return notices for a plan of the measurements; `conditions` are from before closing."""
        if self._options is None:
            return ()
        notices, new = list(self.notices), self._new.values()
        if conditions:
            notices.append(f"while it was measured: {conditions}")
        unsettled = sum(not any(one.settled for one in measurements) for measurements in new)
        if unsettled > len(new) * _UNSETTLED:
            notices.append(
                f"rates vary: {unsettled} of {len(new)} sets measured did not reach the target of "
                f"{self._options.target:g}; other work, clocks or heat may disturb them"
            )
        for measurement in [one for (one, *_) in new if one.overlap_at_least][:_SHOWN]:
            notices += overlap_notices(str(measurement.transfers), measurement)
        failures = list(dict.fromkeys(self._failures))[:_SHOWN]
        notices += [f"left out, as it cannot be measured: {text}" for text in failures]
        return tuple(dict.fromkeys(notices))

    def keep_in(
        self, path: Path | str, *, replace: bool = False, optional: bool = False
    ) -> tuple[str, ...]:
        """Answer from a journal file, and append new measurements; return notices on the file.

        A missing file is made; `replace` puts a journal of another machine aside, as `PATH.old`. An
        `optional` journal of this machine that this user cannot write to is only read. Raises
        InputError: the file belongs to another machine, is damaged, or cannot be written.
        """
        path = Path(path)
        journal_read: JournalFile | JournalContents
        if optional and path.is_file() and not os.access(path, os.W_OK):
            journal_read = read_journal(path)
        else:
            journal_read = self._journal = JournalFile(path, self.header, replace=replace)
        self._before = journal_read.measurements
        if isinstance(self._source, Simulator):
            self._source.resume(self.times_of)
        return journal_read.notices

    def _measured(self, transfers: TransferSet) -> Measurement:
        if self._session is None:
            return super()._measured(transfers)
        profiler = self._session.profiler
        profiler.deadline = self._deadline if self._answered else inf
        try:
            (measurement,) = profiler.measure([transfers])
        except BudgetSpentError:
            self.cut_short = True
            raise
        except MeasurementError as error:
            profiler.deadline = inf
            self._check_alive(profiler, error)
            self._failures.append(str(error))
            raise
        self._on_set(self.sets_measured + (transfers not in self._new))
        return measurement

    def _start(self) -> None:
        if self._session is None:
            return
        self._on_set(self.sets_measured)
        if not self._entered:
            self._session.__enter__()
            self._entered = True

    def _check_alive(self, profiler: Profiler, error: MeasurementError) -> None:
        """Tell a set that cannot be measured from a machine that is lost."""
        proof = next(iter(self._new), None)
        if proof is None:
            return
        try:
            profiler.exercise(proof)
        except MeasurementError as again:
            # The first error says what happened; later ones may only be its consequence.
            raise SourceLostError(f"{error}; nor can {proof} be measured any more") from again

    def __exit__(self, *exception: Any) -> None:
        self.close()
        if self._session is not None and self._entered:
            self._session.__exit__(*exception)


def simulation_header(model: MachineModel, *, noise: float = 0.0, seed: int = 0) -> JournalHeader:
    """Return the header of a simulation's journal: its model and parameters, at this noise."""
    content = encode_json(model) + encode_json(bundled_parameters())
    digest = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
    return JournalHeader(
        machine=model.name,
        identity=f"model {digest}",
        simulated=True,
        noise=noise,
        seed=seed if noise else 0,
    )


# The hosts of an MPI job as a source, and as places for jobs of real collectives.

Network = Literal["tcp", "nccl"]


def open_hosts(
    job: Job,
    *,
    backend: str | None = None,
    devices: int | None = None,
    interfaces: str | None = None,
    network: str | None = None,
    options: MeasurementOptions | None = None,
    expected: Sequence[str] = (),
    gid_index: int | None = None,
) -> HostsSource:
    """Return a source over the hosts of a job; entering it finds out what the hosts are.

    Args:
        job: what `join_job` gives the controller; the other ranks call `job.serve()`.
        backend, devices: of each host, as `measured_machine` takes them.
        interfaces: names of network interfaces, as `eth0,eth1`, to use as NICs; None is all ports
            of the network cards.
        network: `nccl` or `tcp` between hosts; None is nccl, on the host backend tcp.
        options: of measurements.
        expected: names of the hosts in the job.
        gid_index: NCCL_IB_GID_INDEX.

    Raises InputError: an unknown backend or network, or a number of devices beside GPUs.
    """
    from tccl_profiler.cluster.session import LIMITS, ClusterSession  # noqa: PLC0415

    kind = check_backend(backend, devices)
    options = options or MeasurementOptions()
    session = ClusterSession(
        job,
        backend=kind,
        devices=devices,
        interfaces=tuple(interfaces.split(",")) if interfaces else (),
        expected=expected,
        options=msgspec.structs.replace(
            options.for_profiler, limits=LIMITS, network=_network(network, kind)
        ),
        gid_index=gid_index,
    )
    return HostsSource(session, options, dry_run=kind == "host")


def _network(name: str | None, backend: Backend) -> Network:
    if name not in (None, "tcp", "nccl"):
        raise InputError(f"network {name[:20]!r}", "is not known", "one of tcp, nccl")
    if name == "nccl" and backend == "host":
        raise InputError("network nccl", "needs GPUs", "leave out backend host, or it")
    return "tcp" if name == "tcp" or backend == "host" else "nccl"


class HostsSource(OpenedSource):
    """A source over the hosts of a job; `session` has the hosts."""

    def __init__(
        self, session: ClusterSession, options: MeasurementOptions, *, dry_run: bool
    ) -> None:
        self.session = session
        limits = (DRY_RUN,) if dry_run else ()
        super().__init__(session=session, options=options, limits=limits, dry_run=dry_run)

    def __enter__(self) -> HostsSource:
        self._start()
        return self

    def _measured(self, transfers: TransferSet) -> Measurement:
        self.session.check_sets([transfers])
        return super()._measured(transfers)

    def use_only(self, sets: Sequence[TransferSet]) -> tuple[str, ...]:
        """Limit devices to those of some sets; return their hosts."""
        self.session.only = self.session.check_sets(sets)
        return tuple(self.session.only)


def rank_jobs(job: Job) -> RankJobs:
    """Return what starts jobs of ranks on the hosts of an MPI job."""
    from tccl_profiler.cluster.agents import RankJobs  # noqa: PLC0415

    return RankJobs(job)
