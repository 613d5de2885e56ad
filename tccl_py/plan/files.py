"""The files of a plan for NCCL and launchers, each with its provenance on top.

NCCL joins nodes in the order in which ranks first name them, and no file can change that: so the
order in which a job starts its ranks is part of a plan.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath

from tccl_py.errors import InputError
from tccl_py.files import check_path, encode_json
from tccl_py.nccl.graph_writer import GraphRings, graph_xml, node_rings
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.variables import env_sh, nccl_conf
from tccl_py.nccl.view import NcclView, view
from tccl_py.plan.plan import HostPath, Plan, SubsetRings, per_channel

GRAPH_FILE = "graph.xml"
HOSTS_FOLDER = "hosts"
ORDER_FOLDER = "order"
LAUNCH_NOTES = "launch.txt"
OPEN_MPI_HOSTFILE = "hostfile.openmpi"
OPEN_MPI_RANKFILE = "rankfile.openmpi"
MPICH_MACHINEFILE = "hostfile.mpich"
SLURM_HOSTFILE = "hostfile.slurm"
RANK_MAP = "rank-map.json"
HOSTS = "hosts.txt"
MASTER_PORT = 29500
"""torchrun's own default."""


def subset_file(gpus: Sequence[int]) -> str:
    """The name of the graph file for a communicator over exactly these GPUs.

    >>> subset_file((0, 2, 5))
    'subsets/graph-0-2-5.xml'
    """
    return f"subsets/graph-{'-'.join(str(gpu) for gpu in gpus)}.xml"


def graph_files(plan: Plan) -> dict[tuple[int, ...], str]:
    """Return the graph file (below `nccl/`) of each set of GPUs that the plugin gives one to."""
    if plan.is_cluster or plan.recommended != "graph":
        return {}
    gaining = (subset.gpus for subset in plan.subsets if subset.gains)
    return {plan.gpus: GRAPH_FILE} | {gpus: subset_file(gpus) for gpus in gaining}


_PLUGIN_NOTE = "# The best without placed bounce buffers, which jobs get by `tccl run`.\n"


def nccl_files(plan: Plan, directory: Path) -> dict[str, str]:
    """Return names (below `nccl/`) and texts of all files, as they will lie in `directory`.

    Raises InputError: chains that NCCL would not take as meant, or a directory whose path cannot
    stand in an environment variable.
    """
    place = PurePosixPath(directory.resolve() / "nccl")
    files: dict[str, str] = {}
    if plan.is_cluster:
        hosts = [(host.name, plan.gpus_of(host)) for host in plan.hosts]
        order = host_order_files(hosts, provenance=f"tccl-py, rates {plan.provenance}")
        order[LAUNCH_NOTES] = launch_notes(hosts, directory=str(place / ORDER_FOLDER))
        files |= {host_graph_file(name): text for name, text in host_graphs(plan).items()}
        files |= {f"{ORDER_FOLDER}/{name}": text for name, text in order.items()}
        text_of, named = cluster_env_text, place / HOSTS_FOLDER
    else:
        known, farthest = plan.best_known_gbps, plan.paths[0].type_intra
        files[GRAPH_FILE] = _graph(plan, plan.channel_rings, known, farthest)
        for subset in plan.subsets:
            files[subset_file(subset.gpus)] = subset_graph(plan, subset)
        text_of, named = env_text, place / GRAPH_FILE
    graph = named if plan.recommended == "graph" and not plan.needs_plugin else None
    files["env.sh"] = text_of(plan.plain_settings, graph, provenance=plan.provenance)
    if plan.needs_plugin:
        files["env.sh"] += _PLUGIN_NOTE
    files["nccl.conf"] = conf_text(plan.plain_settings, provenance=plan.provenance)
    return files


def subset_graph(plan: Plan, subset: SubsetRings) -> str:
    """Return the graph file of a communicator over some of the plan's GPUs."""
    seen = view(plan.machine, plan.knowledge, plan.settings, gpus=subset.gpus)
    orders = per_channel(subset.rings, plan.settings.channels)
    hops = {pair for ring in subset.rings for pair in pairwise((*ring, ring[0]))}
    return _graph(plan, orders, subset.rate_gbps, seen.farthest(hops))


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

    Hosts with equal paths share a text. Raises InputError: chains that NCCL would not take as
    meant.
    """
    used = {host.path for host in plan.hosts}
    texts = {number: _path_text(plan, plan.paths[number]) for number in sorted(used)}
    return {host.name: texts[host.path] for host in plan.hosts}


def class_view(plan: Plan, number: int, settings: Settings) -> NcclView:
    """Return NCCL's view of a host of a class, with the plan's GPUs of it."""
    one = plan.cluster.classes[number]
    return view(one.machine, one.knowledge, settings, gpus=plan.class_gpus[number])


def _path_text(plan: Plan, path: HostPath) -> str:
    dealt = [path.chains[at % len(path.chains)] for at in range(plan.settings.channels)]
    ends = [(chain.entry_nic, chain.exit_nic) for chain in dealt]
    return node_graph_text(
        class_view(plan, path.node_class, plan.settings),
        [chain.gpus for chain in dealt],
        [(into, out) for into, out in ends if into is not None and out is not None],
        # Rings are as fast as the slowest host lets them be, and NCCL takes the least of all.
        rate_gbps=plan.best_known_gbps,
        provenance=plan.provenance,
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

    Channels share `rate_gbps` evenly: NCCL's tuner reads a channel's speed. Raises InputError:
    orders or channels that NCCL would not take.
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
) -> str:
    """Return the graph file of every node of one class, for a communicator over several nodes.

    Args:
        seen: the node under the job's settings, with the communicator's GPUs on it.
        orders: one GPU order a channel.
        ends: the numbers of the NICs by which each channel enters and leaves.
        rate_gbps: of all channels together; they share it evenly.
        provenance: of that rate.

    Raises InputError: orders or NICs that NCCL would not take, or not as they are meant.
    """
    speed = rate_gbps / len(orders)
    rings = node_rings(seen, orders, ends, speed_gbps=speed)
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


def env_text(settings: Settings, graph: PurePosixPath | None, *, provenance: str) -> str:
    """Return a script to source in a job over all GPUs of the plan, or in any job without a graph.

    Raises InputError: a file's path is not absolute.
    """
    whose = "For jobs whose communicators use exactly these GPUs."
    if graph is None:
        whose = "For any job on these GPUs; no graph file is needed."
    head = f"# tccl-py, rates {provenance}. {whose}\n"
    lines = env_sh(settings, graph=graph)
    return head + lines + ("unset NCCL_GRAPH_FILE\n" if graph is None else "")


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


def cluster_env_text(settings: Settings, graph: PurePosixPath | None, *, provenance: str) -> str:
    """Return a script to source on every host of a job; it names the graph file of its host.

    Files are found by SLURM's name of the host, then by its own name as it is, without its domain,
    and with it. Without a file no graph is named, and stderr says so. `graph` is the absolute
    folder of the graph files; None names no graph. Raises InputError: the folder is not absolute or
    cannot be named in an environment, or settings that the version does not have.
    """
    if graph is None:
        return env_text(settings, None, provenance=provenance)
    check_path(graph)
    if not graph.is_absolute():
        right = "jobs start in other directories: give a path from the root"
        raise InputError(f"folder {str(graph)[:80]!r}", "is no absolute path", right)
    head = (
        f"# tccl-py, rates {provenance}. For jobs over all hosts and GPUs of the plan, with ranks\n"
        f"# in its order of hosts ({ORDER_FOLDER}/{LAUNCH_NOTES}); to be sourced on each host.\n"
    )
    return head + env_sh(settings) + _CHOICE.format(hosts=shlex.quote(str(graph)))


# The order of hosts, as the files that launchers take it from.


HostGpus = Sequence[tuple[str, Sequence[int]]]
"""Hosts in ring order, each with a GPU for each of its ranks, in rank order."""


def host_order_files(hosts: HostGpus, *, provenance: str = "") -> dict[str, str]:
    """Return the text of every launcher's file, by its name.

    A rankfile (`mpirun --map-by rankfile:FILE=`) binds each rank to its slots, here a core each,
    and Open MPI refuses it without them. SLURM documents its hostfile (srun(1)) as names only, a
    line for each task, so it has no comment. `hosts.txt` is for programs that take a line for a
    host.
    """
    ranks = [(host, slot, gpu) for host, gpus in hosts for slot, gpu in enumerate(gpus)]
    # No character of the provenance ends the comment.
    provenance = " ".join("".join(c if c.isprintable() else " " for c in provenance).split())
    comment = [f"# {provenance}"] if provenance else []
    bound = (f"rank {rank}={host} slot={slot}" for rank, (host, slot, _) in enumerate(ranks))
    found = {
        OPEN_MPI_HOSTFILE: [*comment, *(f"{host} slots={len(gpus)}" for host, gpus in hosts)],
        OPEN_MPI_RANKFILE: [*comment, *bound],
        # For `mpiexec -machinefile` of MPICH and Intel MPI (Hydra).
        MPICH_MACHINEFILE: [*comment, *(f"{host}:{len(gpus)}" for host, gpus in hosts)],
        SLURM_HOSTFILE: [host for host, _, _ in ranks],
        HOSTS: [host for host, _ in hosts],
    }
    mapped = [{"rank": at, "host": host, "gpu": gpu} for at, (host, _, gpu) in enumerate(ranks)]
    rank_map = {"format_version": 1, "provenance": provenance, "ranks": mapped}
    return {name: "".join(f"{line}\n" for line in lines) for name, lines in found.items()} | {
        RANK_MAP: encode_json(rank_map)
    }


def launch_notes(order: HostGpus, *, directory: str = ".") -> str:
    """Return the commands that start a job in this order; `directory` is where the files are."""

    def at(name: str) -> str:
        return shlex.quote(f"{directory}/{name}")

    counts = [len(gpus) for _, gpus in order]
    ranks = sum(counts)
    each = str(counts[0]) if len(set(counts)) == 1 else "RANKS_OF_THIS_HOST"
    torchrun = (
        f"torchrun --nnodes={len(order)} --nproc-per-node={each} --node-rank=$K "
        f"--master-addr={order[0][0]} --master-port={MASTER_PORT} SCRIPT"
    )
    line_of = f'$(( $(grep -nxF -- "$HOST" {at(HOSTS)} | cut -d: -f1) - 1 ))'
    hosts = f"{len(order)} host{'s' * (len(order) != 1)}"
    return f"""\
NCCL joins hosts in the order of their ranks; each rank uses the GPU that {RANK_MAP} has for it.
To start {ranks} ranks on {hosts} in this order:

Open MPI:
    mpirun --hostfile {at(OPEN_MPI_HOSTFILE)} --map-by slot --bind-to none -n {ranks} PROGRAM
MPICH, Intel MPI:
    mpiexec -machinefile {at(MPICH_MACHINEFILE)} -n {ranks} PROGRAM
SLURM, in an allocation of these hosts (without --nodes, which it refuses here):
    SLURM_HOSTFILE={at(SLURM_HOSTFILE)} srun --distribution=arbitrary --ntasks={ranks} PROGRAM
torchrun, on each host; K is the line of its name in {HOSTS}, from 0; -1 is none:
    HOST=$(hostname); K={line_of}
    {torchrun}
    (under srun --ntasks-per-node=1, HOST=$SLURMD_NODENAME; not with --rdzv-backend=c10d, which
    numbers hosts itself)

Where ranks need CPUs of their own, Open MPI takes them from a rankfile, and binds to them:
    mpirun --hostfile {at(OPEN_MPI_HOSTFILE)} --map-by rankfile:FILE={at(OPEN_MPI_RANKFILE)} PROGRAM
    (version 4: --rankfile {at(OPEN_MPI_RANKFILE)})
"""
