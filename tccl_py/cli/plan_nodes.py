"""`tccl plan` for several nodes, from the job or the model to the files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import typer

from tccl_py.cli.arguments import notice, print_json, results
from tccl_py.cli.cluster_text import cluster_json, print_cluster
from tccl_py.cli.hardware import Care
from tccl_py.cli.interrupts import INTERRUPTED, interrupts_put_off
from tccl_py.cli.jobs import job_of_ranks, open_cluster
from tccl_py.cli.nccl_here import version_of_hosts
from tccl_py.cli.plan_cluster import ClusterTask, MeasuredCluster, SimulatedCluster
from tccl_py.cluster.hostlist import read_host_list
from tccl_py.cluster_plan.directory import write_cluster_plan
from tccl_py.plan.directory import holds_measurements, output_directory


class Measuring(msgspec.Struct, frozen=True, kw_only=True):
    """How the hosts of an MPI job are measured; `expected` is a list of them."""

    backend: str | None
    devices: int | None
    nccl: str | None
    careful: Care
    expected: Path | None


def plan_hosts(wanted: ClusterTask, how: Measuring, output: Path, force: bool, json: bool) -> None:
    """Plan for the hosts of an MPI job by measuring them."""
    expected = read_host_list(how.expected) if how.expected is not None else ()
    with (
        job_of_ranks() as ranks,
        open_cluster(
            ranks,
            backend=how.backend,
            devices=how.devices,
            interfaces=wanted.options.interfaces,
            careful=how.careful,
            expected=[host.name for host in expected],
        ) as session,
    ):
        rehearsal = how.backend == "host"
        if not rehearsal:
            version = version_of_hosts(how.nccl, session.hosts[0].software.nccl)
            wanted = msgspec.structs.replace(wanted, version=version)
        measured = MeasuredCluster(session, wanted, how.careful, rehearsal=rehearsal)
        plan_cluster(measured, output, force, json)


def plan_cluster(
    subject: SimulatedCluster | MeasuredCluster, output: Path, force: bool, json: bool
) -> None:
    """Plan for several nodes, write the plan and show it."""
    with output_directory(output, force=force) as journal:
        try:
            with interrupts_put_off():
                made = subject.planned(journal, force=force)
        except BaseException:
            if holds_measurements(journal):
                notice(f"what was measured is kept: the same command goes on from {output}")
            raise
        if not made.cancelled:
            write_cluster_plan(made, output, models=subject.models)
    if made.cancelled:
        notice(f"interrupted: the best so far follows; the same command goes on from {output}")
    if json:
        print_json(cluster_json(made))
    else:
        print_cluster(made, results())
    if made.cancelled:
        raise typer.Exit(INTERRUPTED)
    notice(f"wrote {output}")
