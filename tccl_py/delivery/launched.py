"""What the launchers around a process, or in its command, say of a job: ranks, and their GPUs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

import msgspec

from tccl_py.delivery.launchers import started_by
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
    # 3. Those in its command; one rank of a launcher may start others in another way.
    started = started_by(command)
    is_alone = rank is None or here == 1
    ranks = here if started.ranks is None and not is_alone else started.ranks
    text = os.environ.get(VISIBLE, "")
    is_list = re.fullmatch(r" *\d{1,4} *(, *\d{1,4} *)*", text)
    return Launched(
        rank=rank,
        is_alone=is_alone,
        ranks=ranks,
        source=source if started.ranks is None else started.source,
        elsewhere=started.elsewhere or elsewhere,
        unlike=started.unlike,
        is_script=is_script or started.remote,
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
