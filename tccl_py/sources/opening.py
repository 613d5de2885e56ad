"""`open_source`: rates of transfer sets by simulation, by measuring, or from a journal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tccl_profiler.cluster.mpi import in_mpi_job as in_job
from tccl_profiler.cluster.mpi import mpi_job as join_job
from tccl_py.errors import check_type, require
from tccl_py.model.transfer import TransferSet
from tccl_py.simulator.descriptions import load_machine
from tccl_py.simulator.model import MachineModel
from tccl_py.simulator.source import Simulator
from tccl_py.sources.bench import Bench
from tccl_py.sources.profiled import (
    DRY_RUN,
    MeasuredMachine,
    MeasurementOptions,
    ProfilerSource,
    check_backend,
    measured_machine,
)

if TYPE_CHECKING:
    from tccl_profiler.cluster.agents import RankJobs
    from tccl_profiler.cluster.facts import HostFacts
    from tccl_profiler.cluster.job import Job
    from tccl_profiler.cluster.session import ClusterSession
    from tccl_profiler.session import Session

__all__ = ["HostFacts", "Job", "in_job", "join_job"]


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
) -> Bench:
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
        bench = Bench(Simulator(model, noise=noise, seed=seed))
    else:
        place = machine or measured_machine(backend, devices)
        options = options or MeasurementOptions()
        measuring = ProfilerSource(
            open_session(place, gpus, options),
            options,
            limits=place.notices,
            dry_run=place.backend == "host",
            fingerprint=place.fingerprint,
        )
        bench = Bench(measuring)
    if journal is not None:
        bench.keep_in(journal)
    return bench


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


# The hosts of an MPI job as a source, and as places for jobs of real collectives.


def open_hosts(
    job: Job,
    *,
    backend: str | None = None,
    devices: int | None = None,
    interfaces: str | None = None,
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
        options: of measurements.
        expected: names of the hosts in the job.
        gid_index: NCCL_IB_GID_INDEX.

    Raises InputError: an unknown backend, or a number of devices beside GPUs.
    """
    from tccl_profiler.cluster.session import LIMITS, ClusterSession  # noqa: PLC0415
    from tccl_py.model.nic_transports import transport_of  # noqa: PLC0415

    kind = check_backend(backend, devices)
    options = options or MeasurementOptions()
    session = ClusterSession(
        job,
        backend=kind,
        devices=devices,
        interfaces=tuple(interfaces.split(",")) if interfaces else (),
        expected=expected,
        options=msgspec.structs.replace(
            options.for_profiler, limits=LIMITS, network=transport_of(kind)
        ),
        gid_index=gid_index,
    )
    return HostsSource(session, options, dry_run=kind == "host")


class HostsSource(Bench):
    """A bench over the hosts of a job; `session` has the hosts."""

    def __init__(
        self, session: ClusterSession, options: MeasurementOptions, *, dry_run: bool
    ) -> None:
        self.session = session
        limits = (DRY_RUN,) if dry_run else ()
        how: dict[str, Any] = {"limits": limits, "dry_run": dry_run, "check": session.check_sets}
        self._source_of_hosts = ProfilerSource(session, options, **how)
        super().__init__(self._source_of_hosts)

    def __enter__(self) -> HostsSource:
        self._source_of_hosts.start()
        return self

    def use_only(self, sets: Sequence[TransferSet]) -> tuple[str, ...]:
        """Limit devices to those of some sets; return their hosts."""
        self.session.only = self.session.check_sets(sets)
        return tuple(self.session.only)


def rank_jobs(job: Job) -> RankJobs:
    """Return what starts jobs of ranks on the hosts of an MPI job."""
    from tccl_profiler.cluster.agents import RankJobs  # noqa: PLC0415

    return RankJobs(job)
