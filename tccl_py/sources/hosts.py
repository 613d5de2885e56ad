"""The hosts of an MPI job as a source, and as places for jobs of real collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tccl_profiler.cluster.mpi import mpi_job as join_job
from tccl_py.model.measurement import transport_of
from tccl_py.model.transfer import TransferSet
from tccl_py.sources.bench import Bench
from tccl_py.sources.profiled import DRY_RUN, MeasurementOptions, ProfilerSource, check_backend

if TYPE_CHECKING:
    from tccl_profiler.cluster.agents import RankJobs
    from tccl_profiler.cluster.facts import HostFacts
    from tccl_profiler.cluster.job import Job
    from tccl_profiler.cluster.session import ClusterSession
    from tccl_py.model.links import DoctorReport

__all__ = ["HostFacts", "Job", "join_job"]


def examined_hosts(job: Job, *options: str) -> dict[str, DoctorReport]:
    """Have `tccl doctor` with these options examine the hosts of a job, all at once."""
    from tccl_profiler.cluster.agents import Agents  # noqa: PLC0415

    return Agents(job).examine(*options)


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
        backend: of each host: `cuda` (the default), or `host` for a dry run in host memory.
        devices: number of devices of the host backend.
        interfaces: names of network interfaces, as `eth0,eth1`, to use as NICs; None is all ports
            of the network cards.
        options: of measurements.
        expected: names of the hosts in the job.
        gid_index: NCCL_IB_GID_INDEX.

    Raises InputError: an unknown backend, or a number of devices beside GPUs.
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
