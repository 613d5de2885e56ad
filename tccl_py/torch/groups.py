"""init_process_group, new_group and split_group, each communicator with its own graph file."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tccl_py.delivery.plugin import PLUGIN_VARIABLE
from tccl_py.errors import InputError
from tccl_py.torch.members import GRAPH_VARIABLE, OpenPlan, Roster, exchange, member_of

# The environment belongs to the whole process, so one communicator is made at a time.
_LOCK = threading.RLock()


class _Job(msgspec.Struct, kw_only=True):
    """A job with a default group made here; `roster` is None without NCCL, `plan` if not used."""

    world: Any = None
    rank: int
    device: Any = None
    plan: OpenPlan | None = None
    roster: Roster | None = None


class ProcessState(msgspec.Struct):
    """The job of this process, its NCCL settings, and the number of exchanges between its ranks.

    NCCL reads settings once, at the first communicator.
    """

    job: _Job | None = None
    settings: dict[str, str] | None = None
    exchanges: int = 0


STATE = ProcessState()


def init_process_group(  # noqa: PLR0917 (torch's own order)
    plan_dir: str | Path | None = None,
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Any = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    **options: Any,
) -> None:
    """Make the default group as torch.distributed.init_process_group does, with a plan's rings.

    The plan's settings are set first, for good, because NCCL reads them once. The default
    communicator exists when this returns, also without `device_id`; it then uses the current CUDA
    device, so call torch.cuda.set_device before. All ranks use the plan, or none: if it does not
    fit one of them (other GPUs, driver, NUMA nodes or NCCL, or other settings in the environment),
    rank 0 says why on stderr, and all groups use default NCCL.

    Where NCCL has plugins (2.28.7), the plan has the plugin's library, and the process has not used
    NCCL before, the plugin chooses the graph files, for groups that torch alone makes as well.

    `plan_dir` is a plan's directory, None for the one in TCCL_PLAN, if set; the rest is torch's,
    `options` as well (group_name, pg_options, device_id).
    Raises InputError, the same on all ranks: no plan, a damaged one, or one with other settings
    than this process has already; a file of NCCL's that names a graph for all communicators; or
    torch is missing.
    """
    torch = import_torch()
    dist = torch.distributed
    waiting = {} if timeout is None else {"timeout": timeout}
    init = partial(dist.init_process_group, backend, **waiting, **options)
    STATE.job = None
    if not wants_nccl(torch, backend):
        with graph_file(None):
            init(init_method=init_method, store=store, world_size=world_size, rank=rank)
        STATE.job = _Job(world=dist.group.WORLD, rank=dist.get_rank())
        return
    # 1. Let the ranks meet as torch does, but have the store before the group.
    shared = own = store
    if store is None:
        method = init_method or "env://"
        shared, rank, world_size = next(iter(dist.rendezvous(method, rank, world_size, **waiting)))
        if timeout is not None:
            shared.set_timeout(timeout)
        own = dist.PrefixStore("default_pg", shared)
    elif rank < 0 or world_size < 1 or init_method is not None:
        what = "is given beside another way to meet"
        raise InputError("store", what, "give rank and world_size, no init_method")
    # 2. Agree on the plan, and set its settings.
    device = device_of(torch, options.get("device_id"))
    plan, roster = _agreed(torch, shared, (rank, world_size), plan_dir, device)

    # 3. Make the default group.
    job = _Job(rank=rank, device=device, plan=plan, roster=roster)

    def create() -> Any:
        init(store=own, world_size=world_size, rank=rank)
        job.world = dist.group.WORLD
        return job.world

    _made(torch, job, range(world_size), create)
    STATE.job = job


def new_group(ranks: Sequence[int] | None = None, **options: Any) -> Any:
    """Make a group as torch.distributed.new_group does, with the rings planned for its GPUs.

    Without rings for exactly these GPUs, the group uses default NCCL. The communicator exists on
    return. `options` are torch's, by name. Raises InputError: the default group was not made here.
    """
    torch, job = import_torch(), _current_job()
    order: list[int] = []
    if job.roster is not None and wants_nccl(torch, options.get("backend") or "nccl"):
        order = list(range(len(job.roster.members)) if ranks is None else ranks)
        if options.get("sort_ranks", True):
            order.sort()
    return _made(torch, job, order, partial(torch.distributed.new_group, ranks, **options))


def split_group(
    parent_pg: Any = None, split_ranks: Sequence[Sequence[int]] | None = None, **options: Any
) -> Any:
    """Split a group as torch.distributed.split_group does (ncclCommSplit).

    Each part has the rings planned for the part's GPUs, or default NCCL's. `split_ranks` has ranks
    of the parent, `options` are torch's, by name. Raises InputError: the default group was not made
    here.
    """
    torch, job = import_torch(), _current_job()
    dist = torch.distributed
    parents = dist.get_process_group_ranks(job.world if parent_pg is None else parent_pg)
    parts = [[parents[number] for number in sorted(part)] for part in split_ranks or ()]
    own = next((part for part in parts if job.rank in part), [])
    return _made(torch, job, own, partial(dist.split_group, parent_pg, split_ranks, **options))


def import_torch() -> Any:
    """Import torch, which only programs with process groups need."""
    try:
        import torch  # noqa: PLC0415
        import torch.distributed  # noqa: PLC0415
    except ImportError as error:
        raise InputError("torch", "is not installed", "`pip install torch`") from error
    return torch


@contextmanager
def graph_file(path: Path | None) -> Iterator[None]:
    """Name this graph file, or none, until the block ends; other threads wait."""
    with _LOCK:
        before = os.environ.get(GRAPH_VARIABLE)
        _set_graph(None if path is None else str(path))
        try:
            yield
        finally:
            _set_graph(before)


def _set_graph(value: str | None) -> None:
    if value is not None:
        os.environ[GRAPH_VARIABLE] = value
        return
    os.environ.pop(GRAPH_VARIABLE, None)
    # NCCL sets variables of its files in C, which os.environ does not show.
    os.unsetenv(GRAPH_VARIABLE)


def _made(torch: Any, job: _Job, ranks: Sequence[int], create: Callable[[], Any]) -> Any:
    """Return a group of these ranks, if it uses NCCL with an existing communicator."""
    roster, graph = job.roster if job.rank in ranks else None, None
    if roster is not None and job.plan is not None:
        members = roster.members
        graph = job.plan.graph([members[number] for number in ranks], members[job.rank])
    with graph_file(graph):
        made = create()
        # torch makes communicators with their first collective, or in the background: waiting for
        # a collective works in all versions.
        if roster is not None and roster.distinct:
            token = torch.zeros(1, device=job.device)
            torch.distributed.all_reduce(token, group=made)
            torch.cuda.synchronize(job.device)
    return made


def _agreed(
    torch: Any, store: Any, place: tuple[int, int], plan_dir: str | Path | None, device: Any
) -> tuple[OpenPlan | None, Roster]:
    """Return the plan, None if it does not fit all ranks, and set its settings, once in a process.

    `place` is this rank's number and the number of ranks.
    """
    version = ".".join(map(str, torch.cuda.nccl.version()))
    directory = None if plan_dir is None else Path(plan_dir)
    member, plan = member_of(directory, device.index, version, STATE.settings)
    # Each exchange has keys of its own; all ranks make them in the same order.
    own = torch.distributed.PrefixStore(f"tccl/{STATE.exchanges}", store)
    STATE.exchanges += 1
    roster = exchange(own, *place, member)
    _report(roster, place[0])
    plan = None if roster.off else plan
    with _LOCK:
        if STATE.settings is None:
            STATE.settings = {} if plan is None else plan.variables
            os.environ.update(STATE.settings)
        if plan is None or not all(member.plugin for member in roster.members):
            return plan, roster
        loaded = _load_plugin(torch, plan.loading(version))
    # The plugin gives all communicators their graph files, if all ranks have it.
    own.set(f"plugin/{place[0]}", str(int(loaded)))
    answers = [own.get(f"plugin/{number}") for number in range(place[1])]
    return (None if all(answer in (b"1", "1") for answer in answers) else plan), roster


def _load_plugin(torch: Any, loading: Mapping[str, str]) -> bool:
    """Let NCCL load the plugin; return False if NCCL was initialised without it before."""
    before = {name: os.environ.get(name) for name in loading}
    os.environ.update(loading)
    # NCCL reads its environment, and opens the plugin, with the first id of a process.
    with suppress(RuntimeError):
        torch.cuda.nccl.unique_id()
    if loading[PLUGIN_VARIABLE] in Path("/proc/self/maps").read_text(encoding="utf-8"):
        return True
    for name, value in before.items():
        if value is None:
            del os.environ[name]
    return False


def device_of(torch: Any, device_id: Any) -> Any:
    """Return the CUDA device of `device_id`, the current one if None."""
    index = device_id if isinstance(device_id, int) else getattr(device_id, "index", None)
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def wants_nccl(torch: Any, backend: str | None) -> bool:
    """Return whether groups of this backend use NCCL here."""
    if not torch.cuda.is_available():
        return False
    return backend in (None, "", "undefined") or "nccl" in str(backend).lower()


def _report(roster: Roster, rank: int) -> None:
    """Say on rank 0's stderr that the plan is disabled, or a graph variable in the way."""
    text = ""
    if roster.off:
        text = f"the plan is disabled, NCCL chooses its own rings: {roster.off}"
    elif os.environ.get(GRAPH_VARIABLE):
        what = "is set, and fails communicators made without tccl_py.torch"
        text = f"{GRAPH_VARIABLE} {what}; unset it"
    if text and rank == 0 and sys.stderr is not None:
        print(f"tccl: {text}", file=sys.stderr, flush=True)


def _current_job() -> _Job:
    torch, job = import_torch(), STATE.job
    if job is None or job.world is not torch.distributed.group.WORLD:
        right = "call tccl_py.torch.init_process_group first"
        raise InputError("the default group", "was not made here", right)
    return job
