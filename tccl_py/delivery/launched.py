"""What launchers say of a job: those that started this process, and those in its command."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import resources
from itertools import groupby, pairwise
from math import ceil, prod
from pathlib import PurePath

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.cluster import shown
from tccl_py.readers.hosts import listed_hosts
from tccl_py.readers.live import VARIABLE as VISIBLE

_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
"""The number of a rank on its host: torchrun's, Open MPI's, MPICH's and SLURM's."""
_RANKS = {
    "LOCAL_WORLD_SIZE": "WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "OMPI_COMM_WORLD_SIZE",
    "MPI_LOCALNRANKS": "PMI_SIZE",
}
"""The numbers of ranks on a host, and of all."""
_STEP = "SLURM_STEP_TASKS_PER_NODE"  # as 4(x2),3 of three nodes
_NODES = "SLURM_JOB_NUM_NODES"


class Launched(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of a job on this host, as far as anything says."""

    rank: int | None = None
    """This process's number among them; None where it is none."""
    is_alone: bool = True
    """Whether it is none, or its host's only one, which may start others."""
    ranks: int | None = None
    """How many there are; None is not known."""
    source: str = ""
    """What says so."""
    elsewhere: str = ""
    """What says that ranks are on other hosts too."""
    unlike: bool = False
    """Whether these may lack the variables of this process."""
    is_script: bool = False
    """Whether this process comes before them."""
    visible: tuple[int, ...] | None = None
    """The GPUs of CUDA_VISIBLE_DEVICES; None where it is unset."""
    unreadable: bool = False
    """Whether these cannot be read, as UUIDs."""

    @property
    def gpus(self) -> tuple[int, ...] | None:
        """The GPUs that all ranks of the host see; None is all, or not known."""
        return None if self.visible is None or not self.is_alone else tuple(sorted(self.visible))

    def gpu_of_rank(self, gpus: Sequence[int]) -> int | None:
        """Return the GPU of this process among a job's; None if it is no single rank."""
        gpus = self.visible or gpus
        if self.rank is None or (self.is_alone and len(gpus) > 1):
            return None
        return gpus[0] if len(gpus) == 1 else gpus[self.rank] if self.rank < len(gpus) else None

    def why_not_of(self, gpus: Sequence[int]) -> str:
        """Return why a job may not have a rank on each of these GPUs of the host; "" if it may."""
        if self.ranks not in (None, len(gpus)):
            return f"it is for {len(gpus)} GPUs of this host, and {self.source} says {self.ranks}"
        seen = set(gpus if self.visible is None else self.visible)
        if self.is_alone and self.unreadable:
            return f"{VISIBLE} is no list of numbers"
        if not seen <= set(gpus):
            return f"{VISIBLE} has GPUs that it is not for"
        if self.is_alone and seen != set(gpus):
            return f"it is for {len(gpus)} GPUs of this host, and {VISIBLE} shows {len(seen)}"
        return ""


def find_launch(command: Sequence[str] = ()) -> Launched:
    """Return what is known of the job of this process, or of one that this command starts."""
    # 1. Launchers that started this process. Variables of an outer one, or of the job that
    #    submitted this one, may be left over: one that has ranks elsewhere is believed.
    counts = list(_counts())
    source, here, _ = counts[0] if counts else ("", None, 0)
    elsewhere = next((f"{name} says {few} of {n}" for name, few, n in counts if few < n), "")
    numbers = map(_number, _LOCAL_RANKS if _step() else _LOCAL_RANKS[:-1])
    rank = next((number for number in numbers if number is not None), None)
    # 2. A batch script of several nodes, which is on the first one.
    is_script = rank is None and not counts and (_number(_NODES) or 1) > 1
    if is_script:
        elsewhere = f"{_NODES}={_number(_NODES)}"
    # 3. Those in its command, each of which may start the next one; one rank of a launcher may
    #    start others in another way.
    is_alone = rank is None or here == 1
    ranks = None if is_alone else here
    names = [PurePath(word).name for word in command]
    places = [at for at, name in enumerate(names) if name in _launchers()]
    ends = pairwise((*places, len(command)))
    parts = [_launcher_ranks(names[at], command[at + 1 : end]) for at, end in ends]
    counted = [part for part in parts if part.ranks is not None]
    if counted:
        # One that starts a single rank on each host is there for the next.
        several = [part.source for part in counted if part.ranks != 1]
        source = " times ".join(several or [counted[-1].source])
        ranks = prod(part.ranks or 0 for part in counted)
    over_hosts = [part for part in parts if part.elsewhere]
    text = os.environ.get(VISIBLE, "")
    is_list = re.fullmatch(r" *\d{1,4} *(, *\d{1,4} *)*", text)
    return Launched(
        rank=rank,
        is_alone=is_alone,
        ranks=ranks,
        source=source,
        elsewhere=over_hosts[0].elsewhere if over_hosts else elsewhere,
        unlike=any(part.unlike for part in over_hosts),
        is_script=is_script or any(part.is_script for part in over_hosts),
        visible=tuple(dict.fromkeys(map(int, text.split(",")))) if is_list else None,
        unreadable=bool(text) and not is_list,
    )


def _counts() -> Iterator[tuple[str, int, int]]:
    """Yield the name of a launcher's variable, its number of ranks on this host, and of all."""
    for of_host, of_all in _RANKS.items():
        if (count := _number(of_host)) is not None:
            yield of_host, count, max(count, _number(of_all) or 0)
    nodes = re.findall(r"(\d{1,4})(?:\(x(\d{1,5})\))?", _step())
    each = [int(count) for count, times in nodes for _ in range(int(times or 1))]
    for here in each[_number("SLURM_NODEID") or 0 :][:1]:
        yield _STEP, here, sum(each)


def _step() -> str:
    """Return the tasks of SLURM's step; "" in a batch script, whatever submitted it left."""
    tasks = os.environ.get(_STEP, "")
    return tasks if tasks == os.environ.get("SLURM_TASKS_PER_NODE", tasks) else ""


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if re.fullmatch(r"\d{1,6}", text) else None


# Launchers in a command.


class _Launcher(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a launcher, without dashes, and the variables that stand for them."""

    commands: tuple[str, ...]
    """Its names."""
    each: tuple[str, ...] = ()
    """Those with the ranks on each host."""
    all: tuple[str, ...] = ()
    """Those with all ranks."""
    hosts: tuple[str, ...] = ()
    """Those with the number of hosts."""
    names: tuple[str, ...] = ()
    """Those with the names of hosts, which may be in a file."""
    variables: Mapping[str, str] = {}
    is_script: bool = True
    """Whether it starts ranks on other hosts."""
    unlike: bool = False
    """Whether these may lack its variables."""


@cache
def _launchers() -> dict[str, _Launcher]:
    """Return the launchers of launchers.json by the names of their commands."""
    data = resources.files("tccl_py.delivery").joinpath("launchers.json").read_bytes()
    known = msgspec.json.decode(data, type=list[_Launcher])
    return {command: one for one in known for command in one.commands}


def _launcher_ranks(name: str, words: Sequence[str]) -> Launched:
    """Return the ranks of one launcher by its options, which come before a program's own."""
    launcher = _launchers()[name]
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
    return Launched(
        ranks=ranks,
        source=source,
        elsewhere=elsewhere,
        is_script=launcher.is_script,
        unlike=launcher.unlike,
    )


def _find_option(name: str, options: Collection[str], words: Sequence[str]) -> tuple[str, str]:
    """Return the first of some options with its value; else a variable that stands for one."""
    for word, following in pairwise((*words, "")):
        option, equals, value = word.partition("=")
        if word.startswith("-") and option.lstrip("-").replace("_", "-") in options:
            return f"{name} {option}", value if equals else following
        # As srun -n4.
        if (short := re.fullmatch(r"(-([a-zA-Z]))(\d+)", word)) and short[2] in options:
            return f"{name} {short[1]}", short[3]
    variables = (_launchers()[name].variables.get(option, "") for option in options)
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
