"""The files of plans over hosts: each host's graph file and index, and the order for launchers.

NCCL joins nodes in the order in which ranks first name them, and no file can change that: so the
order in which a job starts its ranks is part of a plan.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

import msgspec

from tccl_py.errors import InputError, spell
from tccl_py.files import check_path, encode_json
from tccl_py.nccl.plugin import LIBRARY, found_library
from tccl_py.nccl.plugin.index import IndexedSet
from tccl_py.nccl.settings import Settings, env_sh, environment, export_lines
from tccl_py.nccl.view import NcclView
from tccl_py.plan.machine_files import class_view, env_text, noted_graph, plugin_index
from tccl_py.plan.plan import Plan
from tccl_py.plan.staging import PLAN_FILE

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
HostGpus = Sequence[tuple[str, Sequence[int]]]
"""Hosts in ring order, each with a GPU for each of its ranks, in rank order."""


def host_graph_file(host: str) -> str:
    """The name of the graph file of one of several hosts, below `nccl/`.

    >>> host_graph_file("gpu01")
    'hosts/gpu01.xml'
    """
    return f"{HOSTS_FOLDER}/{host}.xml"


def host_graphs(plan: Plan) -> dict[str, str]:
    """Return the graph file of each of several hosts, by the name of the host.

    Hosts with equal paths share a text. Raises InputError: chains that NCCL would not take as
    meant.
    """
    texts: dict[int, str] = {}
    for number in sorted({host.path for host in plan.hosts}):
        path = plan.paths[number]
        dealt = [path.chains[at % len(path.chains)] for at in range(plan.settings.channels)]
        texts[number] = node_graph_text(
            class_view(plan, path.node_class, plan.settings),
            [chain.gpus for chain in dealt],
            [(chain.entry_nic or 0, chain.exit_nic or 0) for chain in dealt],
            # Rings are as fast as the slowest host lets them be, and NCCL takes the least of all.
            rate_gbps=plan.file_gbps or plan.best_known_gbps,
            provenance=plan.provenance_of("graph"),
        )
    return {host.name: texts[host.path] for host in plan.hosts}


def own_variables(plan: Plan, settings: Settings) -> dict[str, dict[str, str]]:
    """Return the variables under settings that a host has beside the shared ones, by host."""
    shared = environment(plan.shared_settings(settings)).items()
    classes = range(len(plan.class_nics))
    own = [dict(environment(plan.settings_on(n, settings)).items() - shared) for n in classes]
    return {h.name: own[plan.class_number(h)] for h in plan.hosts} if any(own) else {}


def node_graph_text(
    host_view: NcclView,
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
    from tccl_py.nccl.network import node_rings  # noqa: PLC0415 (loads numpy)

    rings = node_rings(host_view, orders, ends, speed_gbps=rate_gbps / len(orders))
    note = f"rates {provenance}; for one node of several, with exactly these GPUs of it:"
    return noted_graph(rings, note, version=host_view.settings.version)


# Read by whatever shell a job has: POSIX only, no function, all names its own. Files are found by
# the host's own name as it is, without its domain, by SLURM's name of it, which Hydra copies from
# the first host to all, and with its domain: `hostname -f` asks the name service, which may take
# long. Last comes the only file of a longer name: hostfiles of Kubernetes have name.job.svc.
_ENV_NOTE = f"""\
For jobs over all hosts and GPUs of the plan, with ranks
# in its order of hosts ({ORDER_FOLDER}/{LAUNCH_NOTES}); to be sourced in each rank.
"""
_CHOICE = """\
unset NCCL_GRAPH_FILE
_tccl_hosts={hosts}
_tccl_file=
_tccl_name=$(uname -n)
_tccl_rank=${{SLURM_STEP_NUM_TASKS-}}${{OMPI_COMM_WORLD_SIZE-}}${{PMI_SIZE-}}${{LOCAL_RANK-}}
if [ "${{SLURM_JOB_NUM_NODES:-1}}" != 1 ] && [ -z "$_tccl_rank" ]; then
    # What a batch script exports goes to the ranks of all hosts.
    echo "tccl: no graph file for a script of $SLURM_JOB_NUM_NODES nodes: source this file in" \\
        "each rank" >&2
else
    for _tccl_host in "$_tccl_name" "${{_tccl_name%%.*}}" "${{SLURMD_NODENAME:-$_tccl_name}}" ''; do
        if [ -z "$_tccl_host" ]; then
            _tccl_host=$(hostname -f 2>/dev/null || :)
        fi
        if [ -n "$_tccl_host" ] && [ -f "$_tccl_hosts/$_tccl_host.xml" ]; then
            _tccl_file="$_tccl_hosts/$_tccl_host.xml"
            break
        fi
    done
    if [ -z "$_tccl_file" ]; then
        _tccl_file=$(find "$_tccl_hosts" -name "$_tccl_name.*.xml" 2>/dev/null || :)
    fi
    if [ -f "$_tccl_file" ]; then
{found}
    else
        echo "tccl: no graph file for host $_tccl_name in $_tccl_hosts:" \\
            "NCCL chooses its own rings" >&2
    fi
fi
unset _tccl_hosts _tccl_file _tccl_name _tccl_rank _tccl_host
"""


def _host_lines(plan: Plan, settings: Settings) -> str:
    """Return the lines of env.sh on a host whose graph file is found; "" if no host needs any."""
    hosts: dict[str, list[str]] = {}
    for host, variables in own_variables(plan, settings).items():
        hosts.setdefault(export_lines(variables).strip() or ":", []).append(f"{host}.xml")
    lines = ['export NCCL_GRAPH_FILE="$_tccl_file"'] * plan.names_graph
    if hosts:
        cases = [f"    {'|'.join(map(shlex.quote, hosts[text]))}) {text} ;;" for text in hosts]
        lines += ['case "${_tccl_file##*/}" in', *cases, "esac"]
    return "\n".join(f"        {line}" for line in lines)


class ClusterFiles:
    """NCCL's and the plugin's files of a plan of several hosts, for jobs in its order of hosts.

    `graphs` has each host's graph file below `nccl/`. The plugin gives no set of a host's GPUs
    anything, but each host of a job its graph file.
    """

    for_all_jobs = False
    sets: tuple[IndexedSet, ...] = ()

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.graphs: Mapping[str, str] = {name: host_graph_file(name) for name in plan.host_order}

    @property
    def variables(self) -> tuple[dict[str, str], dict[str, str]]:
        """The variables that a job with the plugin needs; it gives none.

        A rank does not know what ranks of other hosts are given.
        """
        return environment(self.plan.shared_settings(self.plan.job_settings)), {}

    def used_on(self, host: str | None) -> list[str]:
        """Return the files of a plan's directory that ranks on a host use: not those of others."""
        return [PLAN_FILE, *(f"nccl/{self.graphs[name]}" for name in self.graphs if name == host)]

    def texts(self, place: PurePosixPath) -> dict[str, str]:
        """Return graph files, files for launchers and env.sh, as they will lie in `place`."""
        plan, settings, provenance = (
            self.plan,
            self.plan.plain_choice.settings,
            self.plan.provenance,
        )
        files = {self.graphs[name]: text for name, text in host_graphs(plan).items()}
        hosts = [(host.name, plan.gpus_of(host)) for host in plan.hosts]
        files |= order_files(hosts, place, provenance=provenance)
        shared = plan.shared_settings(settings)
        env = env_text(shared, None, provenance=provenance)
        if found := _host_lines(plan, settings):
            check_path(place)
            choice = _CHOICE.format(hosts=shlex.quote(str(place / HOSTS_FOLDER)), found=found)
            env = f"# tccl-py, rates {provenance}. {_ENV_NOTE}{env_sh(shared)}{choice}"
        return files | {"env.sh": env}

    def plugin(
        self, texts: Mapping[str, str], *_: object, of_job: bool = True
    ) -> dict[str, str | bytes]:
        """Return the plugin's files: an index for each host with its graph file, and the library.

        Hosts with equal paths have equal indices. There are none but for the plan `of_job`, and
        where the job needs no graph file.
        """
        plan, files, made = self.plan, dict[str, str | bytes](), dict[int, str]()
        own = own_variables(plan, plan.job_settings)
        for host in plan.hosts if of_job and plan.recommended == "graph" else ():
            # No host of this name has its own file there: those end in .xml and .index.
            shared = f"path-{host.path}.graph"
            if host.path not in made:
                text = texts[self.graphs[host.name]]
                part = IndexedSet(gpus=plan.gpus_of(host), file=shared, text=text.encode())
                needed, given = self.variables
                needed = {**needed, **own.get(host.name, {})}
                index = plugin_index(plan, (needed, given), plan.class_number(host), [part])
                try:
                    index = msgspec.structs.replace(index, job=plan.cluster.ranks)
                    made[host.path] = index.encode().decode()
                except InputError:
                    return {}
                files[f"{HOSTS_FOLDER}/{shared}"] = text
            files[f"{HOSTS_FOLDER}/{host.name}.index"] = made[host.path]
        if made and (library := found_library()):
            files[LIBRARY] = library.read_bytes()
        return files


def order_files(hosts: HostGpus, place: PurePosixPath, *, provenance: str) -> dict[str, str]:
    """Return the files below `nccl/order`, as they will lie in `place`."""
    order = host_order_files(hosts, provenance=f"tccl-py, rates {provenance}")
    order[LAUNCH_NOTES] = launch_notes(hosts, directory=str(place / ORDER_FOLDER))
    return {f"{ORDER_FOLDER}/{name}": text for name, text in order.items()}


# The order of hosts, as the files that launchers take it from.


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
    texts = {
        OPEN_MPI_HOSTFILE: [*comment, *(f"{host} slots={len(gpus)}" for host, gpus in hosts)],
        OPEN_MPI_RANKFILE: [*comment, *bound],
        # For `mpiexec -machinefile` of MPICH and Intel MPI (Hydra).
        MPICH_MACHINEFILE: [*comment, *(f"{host}:{len(gpus)}" for host, gpus in hosts)],
        SLURM_HOSTFILE: [host for host, _, _ in ranks],
        HOSTS: [host for host, _ in hosts],
    }
    mapped = [{"rank": at, "host": host, "gpu": gpu} for at, (host, _, gpu) in enumerate(ranks)]
    rank_map = {"format_version": 1, "provenance": provenance, "ranks": mapped}
    return {name: "".join(f"{line}\n" for line in lines) for name, lines in texts.items()} | {
        RANK_MAP: encode_json(rank_map)
    }


def launch_notes(order: HostGpus, *, directory: str = ".") -> str:
    """Return the commands that start a job in this order; `directory` is where the files are."""

    def at(name: str) -> str:
        return shlex.quote(f"{directory}/{name}")

    counts = [len(gpus) for _, gpus in order]
    ranks = sum(counts)
    count = str(counts[0]) if len(set(counts)) == 1 else "RANKS_OF_THIS_HOST"
    torchrun = (
        f"torchrun --nnodes={len(order)} --nproc-per-node={count} --node-rank=$K "
        f"--master-addr={order[0][0]} --master-port={MASTER_PORT} SCRIPT"
    )
    # The host's own name, or one of the two is the other's with a domain.
    same = 'index($0, h ".") == 1 || index(h, $0 ".") == 1'
    find = f"$0 == h {{k = NR; exit}} !k && ({same}) {{k = NR}} END {{print k - 1}}"
    line_of = f"$(awk -v h=\"$HOST\" '{find}' {at(HOSTS)})"
    hosts = spell(len(order), "host")
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
