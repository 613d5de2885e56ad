"""init_process_group, new_group and split_group, each communicator with its own graph file."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from tccl_py.errors import InputError
from tccl_py.torch.here import member_of
from tccl_py.torch.plans import OpenPlan
from tccl_py.torch.roster import Roster, exchange
from tccl_py.torch.surroundings import GRAPH_VARIABLE, ProcessSettings, graph_file

_SETTINGS = ProcessSettings()
_TURNS = count()
"""Each exchange has keys of its own in the store; all ranks come to them in the same order."""


class _PlanInUse(msgspec.Struct, frozen=True):
    """A plan, None if there is none here, and what all ranks know of it."""

    opened: OpenPlan | None
    roster: Roster

    def graph(self, ranks: Sequence[int], rank: int) -> Path | None:
        """The graph file of a group of these ranks, in group order; None is stock."""
        if self.opened is None or self.roster.off:
            return None
        members = self.roster.members
        return self.opened.graph([members[one] for one in ranks], members[rank])


class _Meeting(msgspec.Struct, frozen=True):
    """Where the ranks meet: a store, this one's number, and how many there are."""

    store: Any
    rank: int
    size: int


class _Job(msgspec.Struct, kw_only=True):
    """A job whose default group was made here; `first` is None where NCCL has no part in it."""

    world: Any
    rank: int
    device: Any = None
    meeting: _Meeting | None = None
    first: _PlanInUse | None = None
    others: dict[str, _PlanInUse] = {}


_JOBS: list[_Job] = []
"""The job that this process is in, if any."""


def init_process_group(  # noqa: PLR0917 (torch's own order)
    plan_dir: str | Path | None = None,
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Any = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: Any = None,
) -> None:
    """Make the default group as torch.distributed.init_process_group does, with a plan's rings.

    The plan's settings are set first, for good: NCCL reads them once. The default communicator is
    made before this returns, also without `device_id`; it then uses the current CUDA device, so
    call torch.cuda.set_device before. All ranks use the plan, or none: where it does not fit one of
    them (other GPUs, driver, NUMA nodes or NCCL, or other settings in the environment), rank 0 says
    why on stderr, and all groups are stock NCCL's.

    Args:
        plan_dir: a plan's directory; what TCCL_PLAN names if None, else no plan.
        backend, init_method, timeout, world_size, rank, store, group_name, pg_options, device_id:
            as torch has them.

    Raises:
        InputError: the same on all ranks: no or a damaged plan, one whose settings are not those
            that this process has already, a file of NCCL's that names a graph for all
            communicators, or torch is missing.
    """
    torch = _torch()
    dist = torch.distributed
    given = {
        "timeout": timeout,
        "group_name": group_name or None,
        "pg_options": pg_options,
        "device_id": device_id,
    }
    options = {name: value for name, value in given.items() if value is not None}
    _JOBS.clear()
    if not _wants_nccl(torch, backend):
        meet = {"init_method": init_method, "world_size": world_size, "rank": rank, "store": store}
        with graph_file(None):
            dist.init_process_group(backend, **meet, **options)
        _JOBS.append(_Job(world=dist.group.WORLD, rank=dist.get_rank()))
        return
    if store is None:
        meeting = _rendezvous(dist, init_method, _Meeting(None, rank, world_size), timeout)
    else:
        meeting = _given(init_method, _Meeting(store, rank, world_size))
    device = _device(torch, device_id)
    first = _agree(torch, meeting, plan_dir, device)
    _say(first.roster, meeting.rank)
    if not first.roster.off and first.opened is not None:
        _SETTINGS.fix(first.opened.variables)
    else:
        _SETTINGS.fix({})

    def create() -> Any:
        own = store if store is not None else dist.PrefixStore("default_pg", meeting.store)
        numbers = {"world_size": meeting.size, "rank": meeting.rank}
        dist.init_process_group(backend, store=own, **numbers, **options)
        return dist.group.WORLD

    job = _Job(world=None, rank=meeting.rank, device=device, meeting=meeting, first=first)
    job.world = _made(torch, job, first, tuple(range(meeting.size)), create)
    _JOBS.append(job)


def new_group(  # noqa: PLR0917 (torch's own order)
    ranks: Sequence[int] | None = None,
    timeout: Any = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
    sort_ranks: bool = True,
    *,
    plan_dir: str | Path | None = None,
) -> Any:
    """Make a group as torch.distributed.new_group does, with the rings planned for its GPUs.

    Where the plan has none for exactly these GPUs, the group is stock NCCL's. Its communicator is
    made before this returns.

    Args:
        ranks, timeout, backend, pg_options, use_local_synchronization, group_desc, device_id,
            sort_ranks: as torch has them.
        plan_dir: another plan than the default group's, of the same settings; all ranks name it.

    Raises:
        InputError: the default group was not made here, or something is wrong with `plan_dir`.
    """
    torch, job = _torch(), _job()
    given = {
        "timeout": timeout,
        "backend": backend,
        "pg_options": pg_options,
        "use_local_synchronization": use_local_synchronization or None,
        "group_desc": group_desc,
        "device_id": device_id,
        "sort_ranks": None if sort_ranks else False,
    }
    options = {name: value for name, value in given.items() if value is not None}

    def create() -> Any:
        return torch.distributed.new_group(ranks, **options)

    if job.first is None or not _wants_nccl(torch, backend or "nccl"):
        with graph_file(None):
            return create()
    if plan_dir is not None and use_local_synchronization:
        raise InputError(
            "plan_dir", "is beside use_local_synchronization", "all ranks have to learn of a plan"
        )
    used = job.first if plan_dir is None else _other(torch, job, plan_dir)
    everybody = range(len(job.first.roster.members))
    order = list(everybody if ranks is None else ranks)
    return _made(torch, job, used, sorted(order) if sort_ranks else order, create)


def split_group(
    parent_pg: Any = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Any = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> Any:
    """Split a group as torch.distributed.split_group does (ncclCommSplit), each part with the
    rings planned for its GPUs, or stock NCCL's.

    Args:
        parent_pg, split_ranks, timeout, pg_options, group_desc: as torch has them; `split_ranks`
            has ranks of the parent.

    Raises:
        InputError: the default group was not made here.
    """
    torch, job = _torch(), _job()
    dist = torch.distributed
    given = {"timeout": timeout, "pg_options": pg_options, "group_desc": group_desc}
    options = {name: value for name, value in given.items() if value is not None}

    def create() -> Any:
        return dist.split_group(parent_pg, split_ranks, **options)

    if job.first is None:
        with graph_file(None):
            return create()
    parents = dist.get_process_group_ranks(job.world if parent_pg is None else parent_pg)
    parts = [[parents[one] for one in sorted(part)] for part in split_ranks or ()]
    mine = next((part for part in parts if job.rank in part), [])
    return _made(torch, job, job.first, mine, create)


def _made(
    torch: Any, job: _Job, used: _PlanInUse, ranks: Sequence[int], create: Callable[[], Any]
) -> Any:
    """A group of these ranks; its communicator exists when this returns."""
    member = job.rank in ranks
    with graph_file(used.graph(ranks, job.rank) if member else None):
        made = create()
        # torch makes communicators with their first collective, or in the background: waiting for
        # one is what all versions have in common.
        if member and used.roster.distinct:
            token = torch.zeros(1, device=job.device)
            torch.distributed.all_reduce(token, group=made)
            torch.cuda.synchronize(job.device)
    return made


def _agree(torch: Any, meeting: _Meeting, plan_dir: str | Path | None, device: Any) -> _PlanInUse:
    """Open a plan on all ranks, and learn what all of them say to it."""
    version = ".".join(map(str, torch.cuda.nccl.version()))
    directory = None if plan_dir is None else Path(plan_dir)
    mine, opened = member_of(directory, device.index, version, _SETTINGS)
    own = torch.distributed.PrefixStore(f"tccl/{next(_TURNS)}", meeting.store)
    roster = exchange(own, meeting.rank, meeting.size, mine)
    if roster.wrong:
        at = next(number for number, one in enumerate(roster.members) if one.wrong)
        raise InputError(f"rank {at}", *_parted(roster.wrong))
    return _PlanInUse(opened, roster)


def _parted(sentence: str) -> tuple[str, str]:
    what, _, right = sentence.rpartition("; ")
    return what, right


def _other(torch: Any, job: _Job, plan_dir: str | Path) -> _PlanInUse:
    """Another plan than the default group's; all ranks meet the first time it is named."""
    name = str(plan_dir)
    if name not in job.others:
        assert job.meeting is not None
        job.others[name] = _agree(torch, job.meeting, plan_dir, job.device)
        _say(job.others[name].roster, job.rank)
    return job.others[name]


def _given(init_method: str | None, meeting: _Meeting) -> _Meeting:
    if meeting.rank < 0 or meeting.size < 1 or init_method is not None:
        raise InputError(
            "store", "is beside other ways to meet", "give rank and world_size, no init_method"
        )
    return meeting


def _rendezvous(dist: Any, init_method: str | None, asked: _Meeting, timeout: Any) -> _Meeting:
    """Let the ranks meet as torch would; only that the store is at hand before the group is."""
    more = {} if timeout is None else {"timeout": timeout}
    ways = dist.rendezvous(init_method or "env://", asked.rank, asked.size, **more)
    found = _Meeting(*next(iter(ways)))
    if timeout is not None:
        found.store.set_timeout(timeout)
    return found


def _device(torch: Any, device_id: Any) -> Any:
    index = device_id if isinstance(device_id, int) else getattr(device_id, "index", None)
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def _wants_nccl(torch: Any, backend: str | None) -> bool:
    if not torch.cuda.is_available():
        return False
    return backend in (None, "", "undefined") or "nccl" in str(backend).lower()


def _say(roster: Roster, rank: int) -> None:
    if rank != 0 or sys.stderr is None:
        return
    if roster.off:
        text = f"the plan is off, NCCL chooses its own rings: {roster.off}"
        print(f"tccl: {text}", file=sys.stderr, flush=True)
    elif os.environ.get(GRAPH_VARIABLE):
        text = f"{GRAPH_VARIABLE} is set, and fails communicators made without tccl_py.torch"
        print(f"tccl: {text}; unset it", file=sys.stderr, flush=True)


def _job() -> _Job:
    torch = _torch()
    if not _JOBS or _JOBS[0].world is not torch.distributed.group.WORLD:
        raise InputError(
            "the default group", "was not made here", "call tccl_py.torch.init_process_group first"
        )
    return _JOBS[0]


def _torch() -> Any:
    try:
        import torch  # noqa: PLC0415 (only who makes groups has it)
        import torch.distributed  # noqa: PLC0415
    except ImportError as error:
        raise InputError("torch", "is not installed", "`pip install torch`") from error
    return torch
