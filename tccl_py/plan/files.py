"""The files of a plan for NCCL and launchers, each with its provenance on top."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath

from tccl_py.errors import InputError
from tccl_py.files import check_path
from tccl_py.nccl.conf import env_sh, nccl_conf
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.view import NcclView, view
from tccl_py.plan.host_order import HostOrder, host_order_files, launch_notes
from tccl_py.plan.plan import HostPath, Plan, SubsetRings, per_channel

GRAPH_FILE = "graph.xml"
HOSTS_FOLDER = "hosts"
ORDER_FOLDER = "order"
LAUNCH_NOTES = "launch.txt"


def subset_file(gpus: Sequence[int]) -> str:
    """The name of the graph file for a communicator over exactly these GPUs.

    >>> subset_file((0, 2, 5))
    'subsets/graph-0-2-5.xml'
    """
    return f"subsets/graph-{'-'.join(str(gpu) for gpu in gpus)}.xml"


def nccl_files(plan: Plan, directory: Path) -> dict[str, str]:
    """Return names (below `nccl/`) and texts of all files, as they will lie in `directory`.

    Raises:
        InputError: chains that NCCL would not take as meant, or a directory whose path cannot stand
            in an environment variable.
    """
    provenance = plan.provenance
    place = PurePosixPath(directory.resolve() / "nccl")
    graph = plan.recommended == "graph"
    files: dict[str, str] = {}
    if plan.is_cluster:
        files |= {host_graph_file(name): text for name, text in host_graphs(plan).items()}
        files["env.sh"] = cluster_env_text(
            plan.job_settings, place / HOSTS_FOLDER if graph else None, provenance=provenance
        )
        order = host_order(plan)
        for name, text in host_order_files(order).items():
            files[f"{ORDER_FOLDER}/{name}"] = text
        notes = launch_notes(order, directory=str(place / ORDER_FOLDER))
        files[f"{ORDER_FOLDER}/{LAUNCH_NOTES}"] = notes
    else:
        known = plan.choices["graph"].best_known_gbps or plan.rate_gbps
        files[GRAPH_FILE] = _graph(plan, plan.channel_rings, known, plan.paths[0].type_intra)
        for subset in plan.subsets:
            files[subset_file(subset.gpus)] = subset_graph(plan, subset)
        files["env.sh"] = env_text(
            plan.job_settings, place / GRAPH_FILE if graph else None, provenance=provenance
        )
    files["nccl.conf"] = conf_text(plan.job_settings, provenance=provenance)
    return files


def subset_graph(plan: Plan, subset: SubsetRings) -> str:
    """Return the graph file of a communicator over some of the plan's GPUs."""
    seen = view(plan.machine, plan.knowledge, plan.settings, gpus=subset.gpus)
    orders = per_channel(subset.rings, plan.settings.channels)
    hops = {pair for ring in subset.rings for pair in pairwise((*ring, ring[0]))}
    farthest = max(seen.paths[f"G{i}", f"G{j}"].type for i, j in hops).name
    return _graph(plan, orders, subset.rate_gbps, farthest)


def _graph(
    plan: Plan, orders: tuple[tuple[int, ...], ...], rate_gbps: float, type_intra: str
) -> str:
    return graph_text(
        orders,
        plan.settings,
        rate_gbps=rate_gbps,
        type_intra=type_intra,
        provenance=plan.provenance,
    )


def host_graphs(plan: Plan) -> dict[str, str]:
    """Return the graph file of each of several hosts, by the name of the host.

    Hosts with equal paths share a text.

    Raises:
        InputError: chains that NCCL would not take as meant.
    """
    texts = {number: _path_text(plan, plan.paths[number]) for number in _used_paths(plan)}
    return {host.name: texts[host.path] for host in plan.hosts}


def _used_paths(plan: Plan) -> list[int]:
    return sorted({host.path for host in plan.hosts})


def _path_text(plan: Plan, path: HostPath) -> str:
    one = plan.cluster.classes[path.node_class]
    gpus = plan.class_gpus[path.node_class]
    dealt = [path.chains[at % len(path.chains)] for at in range(plan.settings.channels)]
    ends = [(chain.entry_nic, chain.exit_nic) for chain in dealt]
    return node_graph_text(
        view(one.machine, one.knowledge, plan.settings, gpus=gpus),
        [chain.gpus for chain in dealt],
        [(into, out) for into, out in ends if into is not None and out is not None],
        # Rings are as fast as the slowest host lets them be, and NCCL takes the least of all.
        rate_gbps=plan.choices["graph"].best_known_gbps or plan.rate_gbps,
        provenance=plan.provenance,
    )


def host_order(plan: Plan) -> HostOrder:
    """Return the plan's order of hosts, with the GPU of each rank."""
    return HostOrder(
        hosts=plan.host_order,
        gpus=tuple(map(plan.gpus_of, plan.hosts)),
        provenance=f"tccl-py, rates {plan.provenance}",
    )


def graph_text(
    orders: Sequence[tuple[int, ...]],
    settings: Settings,
    *,
    rate_gbps: float,
    type_intra: str,
    provenance: str,
) -> str:
    """Return a graph file for one communicator; `orders` has a GPU order for each channel.

    Channels share `rate_gbps` evenly: NCCL's tuner reads a channel's speed.

    Raises:
        InputError: orders or channels that NCCL would not take.
    """
    from tccl_py.nccl.graph_writer import GraphRings, graph_xml  # noqa: PLC0415 (slow)

    rings = GraphRings(
        orders=tuple(orders), speed_gbps=rate_gbps / len(orders), type_intra=type_intra
    )
    gpus = ", ".join(str(gpu) for gpu in sorted(orders[0]))
    note = f"rates {provenance}; only for communicators over exactly GPUs {gpus}"
    return f"<!-- tccl-py: {note} -->\n" + graph_xml(rings, version=settings.version)


def node_graph_text(
    seen: NcclView,
    orders: Sequence[tuple[int, ...]],
    ends: Sequence[tuple[int, int]],
    *,
    rate_gbps: float,
    provenance: str,
    network_gbps: float | None = None,
) -> str:
    """The graph file of every node of one class, for a communicator over several nodes.

    Args:
        seen: the node under the job's settings, with the communicator's GPUs on it.
        orders: one GPU order a channel.
        ends: the numbers of the NICs by which each channel enters and leaves.
        rate_gbps: of all channels together; they share it evenly.
        provenance: of that rate.
        network_gbps: what all channels carry between nodes, if that is known and more.

    Raises:
        InputError: orders or NICs that NCCL would not take, or not as they are meant.
    """
    count = len(orders)
    from tccl_py.nccl.graph_writer import graph_xml, node_rings  # noqa: PLC0415 (slow)

    rings = node_rings(
        seen,
        orders,
        ends,
        speed_gbps=rate_gbps / count,
        speed_inter_gbps=(rate_gbps if network_gbps is None else network_gbps) / count,
    )
    gpus = ", ".join(str(gpu) for gpu in sorted(orders[0]))
    note = f"rates {provenance}; for one node of several, with exactly these GPUs of it: {gpus}"
    return f"<!-- tccl-py: {note} -->\n" + graph_xml(rings, version=seen.settings.version)


def conf_text(settings: Settings, *, provenance: str) -> str:
    """Return an nccl.conf with the settings; a graph file is not for every job of a host."""
    head = (
        f"# tccl-py, rates {provenance}. Holds for every job of the host.\n"
        "# No graph file is named here: it fails every communicator over other GPUs.\n"
        "# Jobs that need one get it from env.sh of the plan, from tccl env or by tccl_py.torch.\n"
    )
    return head + nccl_conf(settings)


def env_text(
    settings: Settings,
    graph: PurePosixPath | None,
    *,
    provenance: str,
) -> str:
    """Return a script to source in a job over all GPUs of the plan, or in any job without a graph.

    Raises:
        InputError: a file's path is not absolute.
    """
    whose = "For jobs whose communicators use exactly these GPUs."
    if graph is None:
        whose = "For any job on these GPUs; no graph file is needed."
    head = f"# tccl-py, rates {provenance}. {whose}\n"
    lines = env_sh(settings, graph=graph)
    return head + lines + ("unset NCCL_GRAPH_FILE\n" if graph is None else "")


# What a plan of several hosts becomes beside its graph files: env.sh, which finds a host's own.


# Read by whatever shell a job has: POSIX only, no function, all names its own. `hostname -f` asks
# the name service, which may take long, so only where the names at hand are none of the plan's.
# SLURM's nodes may have other names than their hosts, and lists of a job's hosts have SLURM's.
_CHOICE = """\
unset NCCL_GRAPH_FILE
_tccl_hosts={hosts}
_tccl_name=$(uname -n)
for _tccl_host in "${{SLURMD_NODENAME:-$_tccl_name}}" "$_tccl_name" "${{_tccl_name%%.*}}" ''; do
    if [ -z "$_tccl_host" ]; then
        _tccl_host=$(hostname -f 2>/dev/null || :)
    fi
    if [ -n "$_tccl_host" ] && [ -f "$_tccl_hosts/$_tccl_host.xml" ]; then
        export NCCL_GRAPH_FILE="$_tccl_hosts/$_tccl_host.xml"
        break
    fi
done
if [ -z "${{NCCL_GRAPH_FILE-}}" ]; then
    echo "tccl: no graph file for host $_tccl_name in $_tccl_hosts:" \\
        "NCCL chooses its own rings" >&2
fi
unset _tccl_hosts _tccl_name _tccl_host
"""


def host_graph_file(host: str) -> str:
    """The name of a host's graph file, below `nccl/`.

    >>> host_graph_file("gpu01")
    'hosts/gpu01.xml'
    """
    return f"{HOSTS_FOLDER}/{host}.xml"


def cluster_env_text(settings: Settings, hosts: PurePosixPath | None, *, provenance: str) -> str:
    """Return a script to source on every host of a job; it names the graph file of its host.

    Files are found by SLURM's name of the host, then by its own name as it is, without its domain,
    and with it. Without a file no graph is named, and stderr says so.

    Args:
        settings: of the job.
        hosts: the absolute folder of the graph files; None names no graph.
        provenance: of the plan's rates.

    Raises:
        InputError: the folder is not absolute or cannot be named in an environment, or settings
            that the version does not have.
    """
    if hosts is None:
        return env_text(settings, None, provenance=provenance)
    check_path(hosts)
    if not hosts.is_absolute():
        right = "jobs start in other directories: give a path from the root"
        raise InputError(f"folder {str(hosts)[:80]!r}", "is no absolute path", right)
    head = (
        f"# tccl-py, rates {provenance}. For jobs over all hosts and GPUs of the plan, with ranks\n"
        f"# in its order of hosts ({ORDER_FOLDER}/{LAUNCH_NOTES}); to be sourced on each host.\n"
    )
    return head + env_sh(settings) + _CHOICE.format(hosts=shlex.quote(str(hosts)))
