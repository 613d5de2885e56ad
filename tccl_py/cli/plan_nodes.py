"""`tccl plan` for several nodes, from the job or the model to the files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from tccl_py.cli.cluster_text import cluster_json, print_cluster
from tccl_py.cli.interrupts import undisturbed
from tccl_py.cli.measure import controlled_job
from tccl_py.cli.nccl_here import version_of_hosts
from tccl_py.cli.plan_cluster import ClusterTask, MeasuredCluster, SimulatedCluster
from tccl_py.cli.plan_run import finish, planning
from tccl_py.cli.verify import check_tuning, tuned_hosts
from tccl_py.plan.directory import output_directory, write_plan
from tccl_py.plan.plan import Plan
from tccl_py.readers.hosts import read_host_list
from tccl_py.sources.hosts import open_hosts
from tccl_py.sources.profiled import MeasurementOptions


class Measuring(msgspec.Struct, frozen=True, kw_only=True):
    """How the hosts of an MPI job are measured; `expected` is a list of them.

    With `tune` their collectives say which settings the plan gets.
    """

    backend: str | None
    devices: int | None
    nccl: str | None
    options: MeasurementOptions
    expected: Path | None
    tune: bool = False

    @property
    def dry_run(self) -> bool:
        """Whether no GPUs are measured."""
        return self.backend == "host"


def plan_hosts(wanted: ClusterTask, how: Measuring, output: Path, force: bool, json: bool) -> None:
    """Plan for the hosts of an MPI job by measuring them."""
    expected = read_host_list(how.expected) if how.expected is not None else ()
    with (
        controlled_job() as ranks,
        open_hosts(
            ranks,
            backend=how.backend,
            devices=how.devices,
            interfaces=wanted.options.interfaces,
            network=wanted.options.network,
            gid_index=wanted.options.gid_index,
            options=how.options,
            expected=[host.name for host in expected],
        ) as source,
    ):
        if how.tune:
            check_tuning(ranks)
        if not how.dry_run:
            version = version_of_hosts(how.nccl, source.session.hosts[0].software.nccl)
            wanted = msgspec.structs.replace(wanted, version=version)
        measured = MeasuredCluster(source, wanted)

        def tuned(directory: Path) -> Plan:
            source.session.end_workers()
            return tuned_hosts(directory, ranks, "host" if how.dry_run else "cuda")

        plan_cluster(measured, output, force, json, tuned=tuned if how.tune else None)


def plan_cluster(
    subject: SimulatedCluster | MeasuredCluster,
    output: Path,
    force: bool,
    json: bool,
    *,
    tuned: Callable[[Path], Plan] | None = None,
) -> None:
    """Plan for several nodes, write the plan and show it.

    `tuned` tunes the plan that was written to a directory; it gives the one that is there then.
    """
    with output_directory(output, force=force) as journal:
        with planning(journal, output):
            made = subject.planned(journal, force=force)
        if not made.cancelled:
            with undisturbed():
                write_plan(made, output, models=subject.models)
            made = tuned(output) if tuned is not None else made
    finish(made, output, cluster_json, print_cluster, json=json)
