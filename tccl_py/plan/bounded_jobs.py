"""Jobs over GPUs that no table is for: default NCCL, with an upper bound in place of a rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from tccl_py.merge.rings import uplink_limit
from tccl_py.model.cluster import Cluster, NodeClass
from tccl_py.nccl.graph_search import default_choice_or_sys
from tccl_py.nccl.view import view
from tccl_py.plan.files import conf_text, env_text
from tccl_py.plan.plan import Plan
from tccl_py.plan.staging import write_new_directory
from tccl_py.plan.table_jobs import NoTableError, job_cluster
from tccl_py.plan.tables import HostTable, OwnChains, read_tables
from tccl_py.plan.writing import order_files
from tccl_py.readers.hosts import HostSlots

_MBPS = 8_000
"""Of a GB/s."""


def write_bounded_job(
    plan: Plan,
    directory: Path,
    hosts: Sequence[HostSlots],
    gpus: Mapping[str, tuple[int, ...]],
    *,
    output: Path,
    missing: NoTableError,
) -> tuple[int, str]:
    """Write files of default NCCL for a job that `plan_of_job` refused, as tables are `missing`.

    Return the number of files in the new directory `output`, and the rate in words. Raises
    InputError: a class without any table, or `output` exists, or cannot be written.
    """
    keys, cluster = job_cluster(plan, hosts, gpus)
    tables = [read_tables(directory, [plan.cluster.classes[number]]) for number, _ in keys]
    if not all(tables):
        raise missing
    sets = [some for _, some in keys]
    bound = bound_of(cluster, sets, tables)
    most = "" if bound is None else f", at most {bound:.2f} GB/s"
    rate = f"not known{most} ({'simulated' if plan.simulated else 'measured'} tables)"
    settings = tables[0][0].kept.default_settings
    named = [(host.name, sets[host.node_class]) for host in cluster.hosts]

    def files_of(place: Path) -> dict[str, str]:
        folder = PurePosixPath(place.resolve() / "nccl")
        texts = {
            "env.sh": env_text(settings, None, provenance=rate),
            "nccl.conf": conf_text(settings, provenance=rate),
            **order_files(named, folder, provenance=rate),
        }
        return {f"nccl/{name}": text for name, text in texts.items()}

    return write_new_directory(output, files_of), rate


def bound_of(
    cluster: Cluster, gpus: Sequence[tuple[int, ...]], tables: Sequence[Sequence[HostTable]]
) -> float | None:
    """Return an upper bound on default NCCL's bandwidth in a job, GB/s; None if nothing bounds it.

    `cluster` is the job's, its hosts in rank order; of its classes are the GPUs, and all tables.
    """
    of_classes = zip(cluster.classes, gpus, tables, strict=True)
    found = [bound for one in of_classes for bound in _bounds_of_class(*one)]
    if cluster.switches is not None:
        found.append(uplink_limit(cluster.switches, cluster.names))
    least = min(found)
    return least if least < float("inf") else None


def _bounds_of_class(
    one: NodeClass, gpus: tuple[int, ...], tables: Sequence[HostTable]
) -> Iterator[float]:
    """Yield bounds on the bandwidth of NCCL's own chains on hosts of a class.

    A NIC carries no more than its port. Tables for more or fewer GPUs bound nothing: chains over
    them have other hops, and only a set of the same transfers bounds one with further transfers.
    """
    ports = {nic.index: nic.speed_mbps / _MBPS or float("inf") for nic in one.machine.nics}
    for table in tables:
        if table.gpus == gpus and isinstance(table.plain, OwnChains):
            yield table.plain.rate_gbps
    seen = view(one.machine, one.knowledge, tables[0].kept.default_settings, gpus=gpus)
    chains = default_choice_or_sys(seen, nodes=2).chains
    for ends in ([chain.entry for chain in chains], [chain.exit for chain in chains]):
        yield min(ports[nic] * len(ends) / count for nic, count in Counter(ends).items())
