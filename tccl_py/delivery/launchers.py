"""What the launchers in a command say of the ranks that they start: torchrun, mpirun, srun ..."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import groupby, pairwise
from math import ceil, prod
from pathlib import PurePath

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import pick
from tccl_py.model.cluster import shown
from tccl_py.readers.hosts import listed_hosts


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks that a command starts."""

    ranks: int | None = None
    """How many on each host; None: it does not say."""
    source: str = ""
    """What says so."""
    elsewhere: str = ""
    """What says that some are on other hosts."""
    remote: bool = False
    """Whether this command starts these too."""
    unlike: bool = False
    """Whether they may then lack its variables."""


class _Launcher(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a launcher, without dashes, and the variables that stand for them."""

    each: tuple[str, ...] = ()
    """Those with the ranks on each host."""
    all: tuple[str, ...] = ()
    """Those with all ranks."""
    hosts: tuple[str, ...] = ()
    """Those with the number of hosts."""
    names: tuple[str, ...] = ()
    """Those with the names of hosts, which may be in a file."""
    variables: Mapping[str, str] = {}
    remote: bool = True
    """Whether it starts ranks on other hosts."""
    unlike: bool = False
    """Whether these may lack its variables."""


_TORCHRUN = _Launcher(
    each=("nproc-per-node",),
    hosts=("nnodes",),
    variables={"nproc-per-node": "PET_NPROC_PER_NODE", "nnodes": "PET_NNODES"},
    remote=False,
)
_MPIRUN = _Launcher(
    each=("ppn", "perhost", "npernode", "N"),
    all=("n", "np"),
    names=("H", "host", "hosts", "hostfile", "machinefile"),
    unlike=True,
)
_SRUN = _Launcher(
    each=("ntasks-per-node",),
    all=("n", "ntasks"),
    hosts=("N", "nodes"),
    names=("w", "nodelist"),
    variables={"ntasks": "SLURM_NTASKS"},
)
_ACCELERATE = _Launcher(all=("num-processes",), hosts=("num-machines",), remote=False)
_DEEPSPEED = _Launcher(each=("num-gpus",), hosts=("num-nodes",), names=("H", "hostfile"))
_LAUNCHERS = {
    **dict.fromkeys(("torchrun", "torch.distributed.run", "torch.distributed.launch"), _TORCHRUN),
    **dict.fromkeys(("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun"), _MPIRUN),
    **dict.fromkeys(("accelerate", "accelerate.commands.launch"), _ACCELERATE),
    "horovodrun": _MPIRUN,
    "srun": _SRUN,
    "deepspeed": _DEEPSPEED,
}


def started_by(command: Sequence[str]) -> Started:
    """Return the ranks that a command's launchers start, each of which may start the next one."""
    names = [PurePath(word).name for word in command]
    places = [at for at, name in enumerate(names) if name in _LAUNCHERS]
    ends = pairwise((*places, len(command)))
    parts = [_part(names[at], command[at + 1 : end]) for at, end in ends]
    counted = [part for part in parts if part.ranks is not None]
    # One that starts a single rank on each host is there for the next.
    several = [part for part in counted if part.ranks != 1] or counted[-1:]
    over_hosts = [part for part in parts if part.elsewhere]
    return Started(
        ranks=prod(part.ranks or 0 for part in counted) if counted else None,
        source=" times ".join(part.source for part in several),
        elsewhere=next((part.elsewhere for part in over_hosts), ""),
        remote=any(part.remote for part in over_hosts),
        unlike=any(part.unlike for part in over_hosts),
    )


def _part(name: str, words: Sequence[str]) -> Started:
    """Return the ranks of one launcher by its options, which come before a program's own."""
    launcher = _LAUNCHERS[name]
    # 1. Count hosts. Those that are not understood may be others.
    elsewhere, hosts = "", 1
    for options, counted in ((launcher.hosts, _count), (launcher.names, _count_listed)):
        by, text = _find_option(name, options, words)
        if text and (hosts := counted(text) or 0) != 1:
            elsewhere = f"{by} says {hosts or shown(text)}"
            break
    # 2. Count ranks. Of several programs, as -n 4 one : -n 4 other, each has its own number.
    source, text = _find_option(name, launcher.each, words)
    ranks = _count(text)
    parts = [tuple(part) for colon, part in groupby(words, ":".__eq__) if not colon] or [()]
    programs = [_find_option(name, launcher.all, part) for part in parts]
    counts = [count for _, text in programs if (count := _count(text)) is not None]
    if ranks is None and len(counts) == len(programs):
        source, ranks = programs[0][0], ceil(sum(counts) / max(hosts, 1))
    elif ranks and hosts == 1 and sum(counts) > ranks:
        elsewhere = f"{source} says {ranks} of {sum(counts)}"
    marks = pick(launcher, "remote", "unlike")
    return Started(ranks=ranks, source=source, elsewhere=elsewhere, **marks)


def _find_option(name: str, options: Collection[str], words: Sequence[str]) -> tuple[str, str]:
    """Return the first of some options with its value; else a variable that stands for one."""
    for word, following in pairwise((*words, "")):
        option, equals, value = word.partition("=")
        if word.startswith("-") and option.lstrip("-").replace("_", "-") in options:
            return f"{name} {option}", value if equals else following
        # As srun -n4.
        if (short := re.fullmatch(r"(-([a-zA-Z]))(\d+)", word)) and short[2] in options:
            return f"{name} {short[1]}", short[3]
    variables = (_LAUNCHERS[name].variables.get(option, "") for option in options)
    return next(((named, text) for named in variables if (text := os.environ.get(named))), ("", ""))


def _count(text: str) -> int | None:
    """Return a number, the larger one of 1:4 or 1-4; None if it is none."""
    match = re.fullmatch(r"(?:\d{1,6}[:-])?(\d{1,6})", text)
    return int(match[1]) if match else None


def _count_listed(text: str) -> int | None:
    """Return the number of hosts in a list or its file; None if they are not understood."""
    with suppress(InputError):
        return len(listed_hosts(text, where="hosts"))
    return None
