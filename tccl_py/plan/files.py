"""What a plan becomes for NCCL: names and texts of files, each with its provenance on top."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath

from tccl_py.errors import InputError
from tccl_py.files import check_path
from tccl_py.nccl.conf import env_sh, nccl_conf
from tccl_py.nccl.graph_writer import GraphRings, graph_xml, node_rings
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.view import NcclView

GRAPH_FILE = "graph.xml"


def subset_file(gpus: Sequence[int]) -> str:
    """The name of the graph file for a communicator over exactly these GPUs.

    >>> subset_file((0, 2, 5))
    'subsets/graph-0-2-5.xml'
    """
    return f"subsets/graph-{'-'.join(str(gpu) for gpu in gpus)}.xml"


def graph_text(
    orders: Sequence[tuple[int, ...]],
    settings: Settings,
    *,
    rate_gbps: float,
    type_intra: str,
    provenance: str,
) -> str:
    """A graph file for one communicator; `orders` has one GPU order a channel.

    `rate_gbps` is shared evenly by the channels: NCCL's tuner reads a channel's speed.

    Raises:
        InputError: orders or channels that NCCL would not take.
    """
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
    """A script to source in a job: one that uses all GPUs of the plan, if there is a graph file.

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


HOSTS_FOLDER = "hosts"
ORDER_FOLDER = "order"
LAUNCH_NOTES = "launch.txt"

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


def cluster_env_text(settings: Settings, hosts: PurePosixPath, *, provenance: str) -> str:
    """A script to source on every host of a job; it names the graph file of the host it runs on.

    Files are looked for by the name that SLURM's tasks have for it, then by the host's own as it
    is, without its domain, and with it. Where there is none no graph is named, and stderr says so.

    Args:
        settings: of the job.
        hosts: the folder that the graph files are in, from the root.
        provenance: of the plan's rates.

    Raises:
        InputError: the folder is not given from the root or cannot be named in an environment, or
            settings the version does not have.
    """
    check_path(hosts)
    if not hosts.is_absolute():
        right = "jobs start in other directories: give a path from the root"
        raise InputError(f"folder {str(hosts)[:80]!r}", "is no absolute path", right)
    head = (
        f"# tccl-py, rates {provenance}. For jobs over all hosts and GPUs of the plan, with ranks\n"
        f"# in its order of hosts ({ORDER_FOLDER}/{LAUNCH_NOTES}); to be sourced on each host.\n"
    )
    return head + env_sh(settings) + _CHOICE.format(hosts=shlex.quote(str(hosts)))
