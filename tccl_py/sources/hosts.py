"""The hosts of an MPI job as a source, and as places for jobs of real collectives."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.transfer import TransferSet
from tccl_py.sources.opening import OpenedSource
from tccl_py.sources.profiled import (
    DRY_RUN,
    Backend,
    MeasurementOptions,
    ProfiledSource,
    check_backend,
)

if TYPE_CHECKING:
    from tccl_profiler.cluster.agents import RankJobs
    from tccl_profiler.cluster.facts import HostFacts
    from tccl_profiler.cluster.job import Job
    from tccl_profiler.cluster.sampling import LinksReport
    from tccl_profiler.cluster.session import ClusterSession

Network = Literal["tcp", "nccl"]
__all__ = ["HostFacts", "Job"]


def in_job() -> bool:
    """Return whether this process is one of several MPI ranks."""
    from tccl_profiler.cluster.mpi import in_mpi_job  # noqa: PLC0415

    return in_mpi_job()


def join_job() -> AbstractContextManager[Job]:
    """Join this MPI job; all ranks but `job.is_controller` are to call `job.serve()` at once."""
    from tccl_profiler.cluster.mpi import mpi_job  # noqa: PLC0415

    return mpi_job()


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
        job: joined, on the controller.
        backend, devices: of each host, as `measured_machine` takes them.
        interfaces: names of network interfaces, as `eth0,eth1`, to use as NICs; None is all ports
            of the network cards.
        network: `nccl` or `tcp` between hosts; None is nccl, on the host backend tcp.
        options: of measurements.
        expected: names of the hosts in the job.
        gid_index: NCCL_IB_GID_INDEX.

    Raises:
        InputError: an unknown backend or network, or a number of devices beside GPUs.
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


def _network(asked: str | None, backend: Backend) -> Network:
    if asked not in (None, "tcp", "nccl"):
        raise InputError(f"--network {asked[:20]!r}", "is not known", "one of tcp, nccl")
    if asked == "nccl" and backend == "host":
        raise InputError("--network nccl", "needs GPUs", "leave out --backend host, or it")
    return "tcp" if asked == "tcp" or backend == "host" else "nccl"


class HostsSource(OpenedSource):
    """A source over the hosts of a job; `session` has the hosts, `measuring` counts sets."""

    def __init__(
        self, session: ClusterSession, options: MeasurementOptions, *, dry_run: bool
    ) -> None:
        self.session, self.dry_run = session, dry_run
        self.measuring = ProfiledSource(
            session,
            options,
            notices=(DRY_RUN,) if dry_run else (),
            check=session.check_sets,
            entered=True,
        )
        super().__init__(self.measuring)

    def __enter__(self) -> HostsSource:
        self.session.__enter__()
        return self

    def use_only(self, sets: Sequence[TransferSet]) -> tuple[str, ...]:
        """Limit devices to those of some sets; return their hosts."""
        self.session.only = self.session.check_sets(sets)
        return tuple(self.session.only)


def rank_jobs(job: Job) -> RankJobs:
    """Return what starts jobs of ranks on the hosts of an MPI job."""
    from tccl_profiler.cluster.agents import RankJobs  # noqa: PLC0415

    return RankJobs(job)


def sampled_links(source: BandwidthSource, *facts: Any, **options: Any) -> LinksReport:
    """Measure some pairs of hosts, as `tccl_profiler.cluster.sampling.links_check`."""
    from tccl_profiler.cluster.sampling import links_check  # noqa: PLC0415

    return links_check(source, *facts, **options)
