"""The order of hosts, as the files that launchers take it from.

NCCL joins nodes in the order in which ranks first name them, for all channels, and no file can
change that: so the order in which a job starts its ranks is part of a plan. `launch_notes` has the
commands.

What may stand beside the names differs. Open MPI's hostfile and rankfile and MPICH's host file know
`#` comments, and say where the order comes from. SLURM documents its hostfile (srun(1),
--distribution=arbitrary) as names only, a line for each task: so that is all that is written, even
if today's srun skips `#` too. `hosts.txt` is for programs that take a line for a host.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import decode_json, encode_json

FORMAT_VERSION = 1
OPEN_MPI_HOSTFILE = "hostfile.openmpi"
OPEN_MPI_RANKFILE = "rankfile.openmpi"
MPICH_MACHINEFILE = "hostfile.mpich"
SLURM_HOSTFILE = "hostfile.slurm"
RANK_MAP = "rank-map.json"
HOSTS = "hosts.txt"
MASTER_PORT = 29500
"""torchrun's own default."""

_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}", re.ASCII)
_CPUS = re.compile(r"[0-9][0-9,:-]{0,62}", re.ASCII)
"""As many characters as Open MPI keeps of a rankfile's slots (RMAPS_RANK_FILE_MAX_SLOTS)."""
_MAX_GPU = 255


class HostOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts in ring order.

    `gpus[n]` has the number of a GPU of host n for each of its ranks, in rank order. `cpus`, if
    given, has the CPUs of each rank as Open MPI's rankfile wants them (`0-15`); else the ranks of a
    host have a core each, in turn. `provenance` says where the order comes from.

    Raises:
        InputError: no host, one that is doubled, without ranks or cannot be written, a GPU that two
            ranks of a host have, or CPUs that are not for exactly these ranks.
    """

    hosts: tuple[str, ...]
    gpus: tuple[tuple[int, ...], ...]
    cpus: tuple[tuple[str, ...], ...] = ()
    provenance: str = ""

    def __post_init__(self) -> None:
        if not self.hosts or len(self.gpus) != len(self.hosts):
            what = f"there are {len(self.hosts)} hosts and GPUs for {len(self.gpus)}"
            raise InputError("host order", what, "each host has its GPUs")
        for host, gpus in zip(self.hosts, self.gpus, strict=True):
            _check_host(host, gpus)
        if len(set(self.hosts)) != len(self.hosts):
            raise InputError("host order", "a host is in it twice", "once is right")
        if self.cpus:
            _check_cpus(self)

    @property
    def ranks(self) -> int:
        """How many there are on all hosts."""
        return sum(map(len, self.gpus))


class _Rank(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rank: int
    host: str
    gpu: int


class _RankMap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `rank-map.json` holds."""

    format_version: int = FORMAT_VERSION
    provenance: str = ""
    ranks: tuple[_Rank, ...]


def host_order_files(order: HostOrder) -> dict[str, str]:
    """The text of every file, by its name."""
    return {
        OPEN_MPI_HOSTFILE: open_mpi_hostfile(order),
        OPEN_MPI_RANKFILE: open_mpi_rankfile(order),
        MPICH_MACHINEFILE: mpich_machinefile(order),
        SLURM_HOSTFILE: slurm_hostfile(order),
        RANK_MAP: rank_map_json(order),
        HOSTS: hosts_txt(order),
    }


def open_mpi_hostfile(order: HostOrder) -> str:
    """`node1 slots=8`, for `mpirun --hostfile`.

    >>> print(open_mpi_hostfile(HostOrder(hosts=("b", "a"), gpus=((0, 1), (0,)))), end="")
    b slots=2
    a slots=1
    """
    lines = (f"{host} slots={ranks}" for host, ranks in _counts(order))
    return _text(*_comment(order), *lines)


def open_mpi_rankfile(order: HostOrder) -> str:
    """`rank 3=node1 slot=0-15`, for `mpirun --map-by rankfile:FILE=` (version 4: `--rankfile`).

    A rankfile also binds each rank to its slots, and Open MPI refuses it without them. So the
    hostfile, which binds nothing, is the better choice unless the CPUs are given.
    """
    lines: list[str] = []
    for position, (host, ranks) in enumerate(_counts(order)):
        cpus = order.cpus[position] if order.cpus else tuple(map(str, range(ranks)))
        lines += [f"rank {len(lines) + at}={host} slot={cpus[at]}" for at in range(ranks)]
    return _text(*_comment(order), *lines)


def mpich_machinefile(order: HostOrder) -> str:
    """`node1:8`, for `mpiexec -machinefile` of MPICH and Intel MPI (Hydra)."""
    return _text(*_comment(order), *(f"{host}:{ranks}" for host, ranks in _counts(order)))


def slurm_hostfile(order: HostOrder) -> str:
    """A line with the host's name for each task, for SLURM_HOSTFILE; no comment."""
    return _text(*(host for host, ranks in _counts(order) for _ in range(ranks)))


def hosts_txt(order: HostOrder) -> str:
    """The hosts, one a line; the line's number, from 0, is the host's node rank."""
    return _text(*order.hosts)


def rank_map_json(order: HostOrder) -> str:
    """Each rank with its host and its GPU there; `rank_map_from_json` reads it back."""
    pairs = (
        (host, gpu) for host, gpus in zip(order.hosts, order.gpus, strict=True) for gpu in gpus
    )
    ranks = tuple(_Rank(rank=n, host=host, gpu=gpu) for n, (host, gpu) in enumerate(pairs))
    return encode_json(_RankMap(provenance=_one_line(order.provenance), ranks=ranks))


def rank_map_from_json(text: str, *, where: str) -> HostOrder:
    """The order that a rank map has; CPUs are not in it.

    Raises:
        InputError: not a rank map, ranks that are not counted from 0, or ranks of one host that do
            not follow one another.
    """
    found = decode_json(text, _RankMap, where=where, name="a rank map")
    if found.format_version != FORMAT_VERSION:
        what = f"has format version {found.format_version}"
        raise InputError(where, what, f"this program reads version {FORMAT_VERSION}")
    gpus: dict[str, list[int]] = {}
    last = ""
    for number, rank in enumerate(found.ranks):
        if rank.rank != number:
            raise InputError(where, f"rank {rank.rank} is in place {number}", "count them from 0")
        if rank.host in gpus and rank.host != last:
            what = f"rank {number} returns to host {rank.host[:40]!a}"
            raise InputError(where, what, "the ranks of a host follow one another")
        gpus.setdefault(rank.host, []).append(rank.gpu)
        last = rank.host
    order = tuple(map(tuple, gpus.values()))
    return HostOrder(hosts=tuple(gpus), gpus=order, provenance=found.provenance)


def launch_notes(order: HostOrder, *, directory: str = ".") -> str:
    """How to start a job so that its ranks have this order; `directory` is where the files are."""

    def at(name: str) -> str:
        return shlex.quote(f"{directory}/{name}")

    counts = sorted({ranks for _, ranks in _counts(order)})
    each = str(counts[0]) if len(counts) == 1 else "RANKS_OF_THIS_HOST"
    torchrun = (
        f"torchrun --nnodes={len(order.hosts)} --nproc-per-node={each} --node-rank=$K "
        f"--master-addr={order.hosts[0]} --master-port={MASTER_PORT} SCRIPT"
    )
    line_of = f'$(( $(grep -nxF -- "$HOST" {at(HOSTS)} | cut -d: -f1) - 1 ))'
    return f"""\
NCCL joins hosts in the order of their ranks; each rank uses the GPU that {RANK_MAP} has for it.
To start {order.ranks} ranks on {_hosts(order)} in this order:

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


def _check_host(host: str, gpus: tuple[int, ...]) -> None:
    if _HOST.fullmatch(host) is None:
        right = "letters, digits and _ . - are possible, the first one no dot or dash"
        raise InputError("host order", f"{host[:40]!a} cannot be a host's name", right)
    if not gpus or len(set(gpus)) != len(gpus):
        what = f"host {host} has {len(gpus)} ranks on {len(set(gpus))} GPUs"
        raise InputError("host order", what, "each rank has a GPU of its own")
    if not all(0 <= gpu <= _MAX_GPU for gpu in gpus):
        raise InputError("host order", f"host {host} has GPUs {gpus}", f"they are 0 to {_MAX_GPU}")


def _check_cpus(order: HostOrder) -> None:
    if [len(cpus) for cpus in order.cpus] != [len(gpus) for gpus in order.gpus]:
        right = "give them for each rank of each host, or for none"
        raise InputError("host order", "the CPUs are not for exactly these ranks", right)
    for host, cpus in zip(order.hosts, order.cpus, strict=True):
        for one in cpus:
            if _CPUS.fullmatch(one) is None:
                right = "a list such as 0-15,64-79 of at most 63 characters is possible"
                raise InputError("host order", f"host {host} has CPUs {one[:40]!a}", right)


def _counts(order: HostOrder) -> Iterator[tuple[str, int]]:
    """The hosts, and how many ranks each has."""
    for host, gpus in zip(order.hosts, order.gpus, strict=True):
        yield host, len(gpus)


def _hosts(order: HostOrder) -> str:
    return f"{len(order.hosts)} host{'s' * (len(order.hosts) != 1)}"


def _one_line(text: str) -> str:
    """Text that ends no comment and moves no cursor."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _comment(order: HostOrder) -> tuple[str, ...]:
    provenance = _one_line(order.provenance)
    return (f"# {provenance}",) if provenance else ()


def _text(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)
