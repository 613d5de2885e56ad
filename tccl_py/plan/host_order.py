"""The order of hosts, as the files that launchers take it from.

NCCL joins nodes in the order in which ranks first name them, for all channels, and no file can
change that: so the order in which a job starts its ranks is part of a plan. `launch_notes` has the
commands.

Comments differ. Open MPI's hostfile and rankfile and MPICH's host file know `#`. SLURM documents
its hostfile (srun(1), --distribution=arbitrary) as names only, a line for each task: so that is all
that is written, even if today's srun skips `#` too. `hosts.txt` is for programs that take a line
for a host.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import msgspec

from tccl_py.files import encode_json

FORMAT_VERSION = 1
OPEN_MPI_HOSTFILE = "hostfile.openmpi"
OPEN_MPI_RANKFILE = "rankfile.openmpi"
MPICH_MACHINEFILE = "hostfile.mpich"
SLURM_HOSTFILE = "hostfile.slurm"
RANK_MAP = "rank-map.json"
HOSTS = "hosts.txt"
MASTER_PORT = 29500
"""torchrun's own default."""


class HostOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts in ring order, each with a GPU for each of its ranks, in rank order.

    `provenance` says where the order comes from.
    """

    hosts: tuple[str, ...]
    gpus: tuple[tuple[int, ...], ...]
    provenance: str = ""

    @property
    def counts(self) -> Iterator[tuple[str, int]]:
        """The hosts, and the number of ranks of each."""
        return zip(self.hosts, map(len, self.gpus), strict=True)

    @property
    def ranks(self) -> int:
        """The number of ranks on all hosts."""
        return sum(map(len, self.gpus))

    @property
    def comment(self) -> str:
        """The provenance as a line of a file: no character of it ends the comment."""
        text = "".join(char if char.isprintable() else " " for char in self.provenance)
        return f"# {' '.join(text.split())}\n" if text.split() else ""


def host_order_files(order: HostOrder) -> dict[str, str]:
    """Return the text of every file, by its name."""
    per_rank = [host for host, ranks in order.counts for _ in range(ranks)]
    return {
        OPEN_MPI_HOSTFILE: open_mpi_hostfile(order),
        OPEN_MPI_RANKFILE: open_mpi_rankfile(order),
        # For `mpiexec -machinefile` of MPICH and Intel MPI (Hydra).
        MPICH_MACHINEFILE: order.comment + _lines(f"{host}:{n}" for host, n in order.counts),
        SLURM_HOSTFILE: _lines(iter(per_rank)),
        RANK_MAP: rank_map_json(order),
        # The line's number, from 0, is the host's node rank.
        HOSTS: _lines(iter(order.hosts)),
    }


def open_mpi_hostfile(order: HostOrder) -> str:
    """Return the file of `mpirun --hostfile`: `node1 slots=8`.

    >>> print(open_mpi_hostfile(HostOrder(hosts=("b", "a"), gpus=((0, 1), (0,)))), end="")
    b slots=2
    a slots=1
    """
    return order.comment + _lines(f"{host} slots={ranks}" for host, ranks in order.counts)


def open_mpi_rankfile(order: HostOrder) -> str:
    """Return the file of `mpirun --map-by rankfile:FILE=` (version 4: `--rankfile`).

    A line is `rank 3=node1 slot=0`. A rankfile binds each rank to its slots, here a core each, and
    Open MPI refuses it without them: the hostfile, which binds nothing, is the better choice.
    """
    places = [(host, slot) for host, ranks in order.counts for slot in range(ranks)]
    lines = (f"rank {rank}={host} slot={slot}" for rank, (host, slot) in enumerate(places))
    return order.comment + _lines(lines)


def rank_map_json(order: HostOrder) -> str:
    """Return each rank with its host and its GPU there."""
    pairs = [
        (host, gpu) for host, gpus in zip(order.hosts, order.gpus, strict=True) for gpu in gpus
    ]
    ranks = [{"rank": rank, "host": host, "gpu": gpu} for rank, (host, gpu) in enumerate(pairs)]
    provenance = order.comment[2:].rstrip("\n")
    return encode_json({"format_version": FORMAT_VERSION, "provenance": provenance, "ranks": ranks})


def launch_notes(order: HostOrder, *, directory: str = ".") -> str:
    """Return the commands that start a job in this order; `directory` is where the files are."""

    def at(name: str) -> str:
        return shlex.quote(f"{directory}/{name}")

    counts = {ranks for _, ranks in order.counts}
    each = str(counts.pop()) if len(counts) == 1 else "RANKS_OF_THIS_HOST"
    torchrun = (
        f"torchrun --nnodes={len(order.hosts)} --nproc-per-node={each} --node-rank=$K "
        f"--master-addr={order.hosts[0]} --master-port={MASTER_PORT} SCRIPT"
    )
    line_of = f'$(( $(grep -nxF -- "$HOST" {at(HOSTS)} | cut -d: -f1) - 1 ))'
    hosts = f"{len(order.hosts)} host{'s' * (len(order.hosts) != 1)}"
    return f"""\
NCCL joins hosts in the order of their ranks; each rank uses the GPU that {RANK_MAP} has for it.
To start {order.ranks} ranks on {hosts} in this order:

Open MPI:
    mpirun --hostfile {at(OPEN_MPI_HOSTFILE)} --map-by slot --bind-to none -n {order.ranks} PROGRAM
MPICH, Intel MPI:
    mpiexec -machinefile {at(MPICH_MACHINEFILE)} -n {order.ranks} PROGRAM
SLURM, in an allocation of these hosts (without --nodes, which it refuses here):
    SLURM_HOSTFILE={at(SLURM_HOSTFILE)} srun --distribution=arbitrary --ntasks={order.ranks} PROGRAM
torchrun, on each host; K is the line of its name in {HOSTS}, from 0; -1 is none:
    HOST=$(hostname); K={line_of}
    {torchrun}
    (under srun --ntasks-per-node=1, HOST=$SLURMD_NODENAME; not with --rdzv-backend=c10d, which
    numbers hosts itself)

Where ranks need CPUs of their own, Open MPI takes them from a rankfile, and binds to them:
    mpirun --hostfile {at(OPEN_MPI_HOSTFILE)} --map-by rankfile:FILE={at(OPEN_MPI_RANKFILE)} PROGRAM
    (version 4: --rankfile {at(OPEN_MPI_RANKFILE)})
"""


def _lines(lines: Iterator[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
