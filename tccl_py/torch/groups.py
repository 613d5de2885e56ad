"""init_process_group, new_group and split_group, each communicator with its own graph file.

A graph file fails every communicator over other GPUs than its own, and ranks that name different
ones crash or hang. So a plan is used only if it fits all ranks, and named while a group is made.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from tccl_py.delivery.fit import ALIKE_VARIABLE, host_here, why_not_fit, why_not_with
from tccl_py.delivery.job import Delivery, JobRequest, communicator_file, deliver_to_host
from tccl_py.delivery.plugin import PLUGIN_VARIABLE
from tccl_py.delivery.scripts import PLAN_VARIABLE
from tccl_py.errors import InputError, visible
from tccl_py.files import check_path
from tccl_py.nccl.settings import GRAPH_VARIABLE, env_conflicts, shell_text
from tccl_py.nccl.versions import why_no_plugin
from tccl_py.nccl_conf import settings_of_files
from tccl_py.nccl_library import loaded_nccl
from tccl_py.plan.directory import files_of
from tccl_py.plan.plan import Plan
from tccl_py.plan.results import plan_in
from tccl_py.plan.staging import check_files
from tccl_py.readers.hosts import host_identity
from tccl_py.readers.live import DriverFacts, gpu_of_cuda_device
from tccl_py.torch.agreement import Member, exchange, variables_read, why_off

# The environment belongs to the whole process, so one communicator is made at a time.
_LOCK = threading.RLock()


class OpenPlan(msgspec.Struct, frozen=True):
    """A plan with its directory, the files in it, its identity, and what all groups get."""

    directory: Path
    plan: Plan
    files: frozenset[str]
    identity: str
    delivery: Delivery

    def graph(self, members: Sequence[Member], rank: Member) -> Path | None:
        """Return the graph file of a rank in a group of these members; None is default NCCL."""
        if len({member.plan for member in members}) != 1:
            return None
        places = [(member.host, member.name, member.gpu) for member in members]
        file = f"nccl/{communicator_file(self.plan, places, rank.name)}"
        return self.directory / file if file in self.files else None


class ProcessState(msgspec.Struct, kw_only=True):
    """The job of this process, and the variables of plans that its NCCL reads.

    The plan is there if all ranks use one, and members if NCCL is used. NCCL reads variables once,
    at the first communicator: from the first group on none is set any more.
    """

    world: Any = None
    rank: int = -1
    device: Any = None
    plan: OpenPlan | None = None
    members: tuple[Member, ...] = ()
    settings: dict[str, str] | None = None


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

    `plan_dir` is a plan's directory, None for the one in TCCL_PLAN; the rest is torch's. Without
    `device_id` call torch.cuda.set_device before: with a graph file the communicator exists when
    this returns. All ranks use the plan, or none: if it does not fit one of them (no plan, other
    GPUs, driver, NUMA nodes, NCCL or settings), or NCCL has the plugin, rank 0 says so and groups
    are left to NCCL, with the variables that it has read for good in other ranks' processes.

    Raises InputError: torch is missing, a store comes without rank and size, or, on all ranks, NCCL
    has read unlike variables in processes that had other plans before.
    """
    torch = import_torch()
    dist = torch.distributed
    waiting = {} if timeout is None else {"timeout": timeout}
    init = partial(dist.init_process_group, backend, **waiting, **options)
    STATE.world, STATE.plan, STATE.members = None, None, ()
    if not wants_nccl(torch, backend):
        init(init_method=init_method, store=store, world_size=world_size, rank=rank)
        STATE.world, STATE.rank = dist.group.WORLD, dist.get_rank()
        return
    # 1. Let the ranks meet as torch does, but have the store before the group.
    if store is None:
        way = init_method or "env://"
        store, rank, world_size = next(iter(dist.rendezvous(way, rank, world_size, **waiting)))
        if timeout is not None:
            store.set_timeout(timeout)
    elif rank < 0 or world_size < 1 or init_method is not None:
        right = "give rank and world_size, no init_method"
        raise InputError("store", "is given beside another way to meet", right)
    # 2. Agree on the plan, and set its settings.
    device_id, directory = options.get("device_id"), None if plan_dir is None else Path(plan_dir)
    STATE.rank, STATE.device = rank, device_of(torch, device_id)
    _agree(torch, store, world_size, directory, bound=device_id is not None)
    # 3. Make the default group.
    store = dist.PrefixStore("default_pg", store)
    create = partial(init, store=store, world_size=world_size, rank=rank)
    STATE.world = _made(torch, range(world_size), lambda: create() or dist.group.WORLD)


def new_group(ranks: Sequence[int] | None = None, **options: Any) -> Any:
    """Make a group as torch.distributed.new_group does, with the rings planned for its GPUs.

    With rings for exactly these GPUs the communicator exists on return; else the group uses default
    NCCL. `options` are torch's, by name. Raises InputError: the default group was not made here.
    """
    torch, order = _torch_of_job(), list[int]()
    if STATE.members and wants_nccl(torch, options.get("backend") or "nccl"):
        order = list(range(len(STATE.members)) if ranks is None else ranks)
        if options.get("sort_ranks", True):
            order.sort()
    return _made(torch, order, partial(torch.distributed.new_group, ranks, **options))


def split_group(
    parent_pg: Any = None, split_ranks: Sequence[Sequence[int]] | None = None, **options: Any
) -> Any:
    """Split a group as torch.distributed.split_group does (ncclCommSplit).

    Each part has the rings planned for the part's GPUs, or default NCCL's. `split_ranks` has ranks
    of the parent, `options` are torch's, by name. Raises InputError: the default group was not made
    here.
    """
    torch = _torch_of_job()
    dist = torch.distributed
    parents = dist.get_process_group_ranks(STATE.world if parent_pg is None else parent_pg)
    parts = [[parents[number] for number in sorted(part)] for part in split_ranks or ()]
    order = next((part for part in parts if STATE.rank in part), [])
    return _made(torch, order, partial(dist.split_group, parent_pg, split_ranks, **options))


def import_torch() -> Any:
    """Import torch, which only programs with process groups need."""
    try:
        import torch.distributed  # noqa: PLC0415
    except ImportError as error:
        raise InputError("torch", "is not installed", "`pip install torch`") from error
    return torch


def _torch_of_job() -> Any:
    torch = import_torch()
    if STATE.world is None or STATE.world is not torch.distributed.group.WORLD:
        right = "call tccl_py.torch.init_process_group first"
        raise InputError("the default group", "was not made here", right)
    return torch


def device_of(torch: Any, device_id: Any) -> Any:
    """Return the CUDA device of `device_id`, the current one if None."""
    index = device_id if isinstance(device_id, int) else getattr(device_id, "index", None)
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def wants_nccl(torch: Any, backend: str | None) -> bool:
    """Return whether groups of this backend use NCCL here."""
    nccl = backend in (None, "", "undefined") or "nccl" in str(backend).lower()
    return nccl and torch.cuda.is_available()


@contextmanager
def graph_file(path: Path) -> Iterator[None]:
    """Name this graph file until the block ends; other threads wait."""
    with _LOCK:
        before = os.environ.get(GRAPH_VARIABLE)
        _set_graph(str(path))
        try:
            yield
        finally:
            _set_graph(before)


def _set_graph(value: str | None) -> None:
    # NCCL sets variables of its files in C, which os.environ does not show.
    os.unsetenv(GRAPH_VARIABLE)
    os.environ.pop(GRAPH_VARIABLE, None)
    if value is not None:
        os.environ[GRAPH_VARIABLE] = value


def _made(torch: Any, ranks: Sequence[int], create: Callable[[], Any]) -> Any:
    """Return a group of these ranks, whose communicator exists if the group has a graph file."""
    # torch refuses ranks that there are not, and splits of groups without NCCL.
    known = all(0 <= number < len(STATE.members) for number in ranks)
    members = [STATE.members[number] for number in ranks if known and STATE.rank in ranks]
    graph, awaited = None, False
    if members and STATE.plan is not None:
        graph = STATE.plan.graph(members, STATE.members[STATE.rank])
        # All ranks of the group find the same: with one plan, each host has a file or none has.
        # torch has begun communicators of bound GPUs, in the background in some versions, where
        # they may see the next group's file. Others it may never make: that is left to it.
        awaited = graph is not None or all(member.bound for member in members)
    with _LOCK if graph is None else graph_file(graph):
        group = create()
        if awaited:
            # Waiting for a collective works in all versions of torch.
            token = torch.zeros(1, device=STATE.device)
            torch.distributed.all_reduce(token, group=group)
            torch.cuda.synchronize(STATE.device)
    return group


def _agree(torch: Any, store: Any, size: int, directory: Path | None, *, bound: bool) -> None:
    """Decide with all ranks on the plan, and set its settings, once in a process.

    Raises InputError on all ranks: NCCL has read unlike settings in their processes.
    """
    version = loaded_nccl(torch)
    member, plan = member_of(directory, STATE.device.index, version, STATE.settings)
    member = replace(member, bound=bound)
    keys = torch.distributed.PrefixStore("tccl", store)
    members = exchange(keys, STATE.rank, size, member)
    settings, off = variables_read(members), why_off(members)
    STATE.members, STATE.plan = members, None if off else plan
    text = f"tccl_py.torch leaves all groups to NCCL: {off}" if off else ""
    if off and settings:
        text += f"; it has {shell_text(settings)} of an earlier plan"
    if not off and os.environ.get(GRAPH_VARIABLE):
        text = f"{GRAPH_VARIABLE} is set, and fails other communicators; unset it"
    if text and STATE.rank == 0 and sys.stderr is not None:
        print(f"tccl: {text}", file=sys.stderr, flush=True)
    with _LOCK:
        if STATE.settings is None:
            # Where other ranks' processes have settings for good, this one needs the same.
            STATE.settings = settings if STATE.plan is None else member.settings
            os.environ.update(STATE.settings)


def member_of(
    directory: Path | None, ordinal: int, nccl: str, settings: Mapping[str, str] | None
) -> tuple[Member, OpenPlan | None]:
    """Return a rank's report, by its CUDA device and torch's NCCL, and the plan if it was opened.

    `settings` are those of this process, None before the first communicator.
    """
    read = None if settings is None else dict(settings)
    member = Member(host=host_identity(), read=read, by_plan=tuple(settings or ()))
    opened, why = None, f"{PLAN_VARIABLE} names no plan"
    place = directory or Path(os.environ.get(PLAN_VARIABLE, ""))
    try:
        if read is not None:
            # Without a plan the user may have set the same.
            user = {name: visible(value) for name, value in nccl_environment().items()}
            member = replace(member, read=user | read)
        gpu, facts = gpu_of_cuda_device(ordinal)
        member = replace(member, gpu=gpu)
        if place != Path():
            opened = open_plan(place)
            name, variables = host_here(opened.plan), dict(opened.delivery.variables)
            member = replace(member, name=name or "", plan=opened.identity, settings=variables)
            why = _why_off(opened, facts, nccl, name)
            if settings is not None and settings != variables:
                why = "this process has other settings, which its NCCL has read for good"
    except InputError as error:
        why = str(error)
    return replace(member, off=why), opened


def open_plan(directory: Path) -> OpenPlan:
    """Read a plan's directory."""
    directory = directory.absolute()
    check_path(directory)
    plan = plan_in(directory)
    manifest = check_files(directory, files_of(plan).used_on(host_here(plan)))
    delivery = deliver_to_host(plan, directory, JobRequest(), say=lambda _: None)
    return OpenPlan(directory, plan, frozenset(manifest.files), manifest.identity, delivery)


def _why_off(opened: OpenPlan, facts: DriverFacts, nccl: str, name: str | None) -> str:
    """Return why a rank does not use a plan, as a clause; "" if it does."""
    plan, directory = opened.plan, opened.directory
    equal_hosts = os.environ.get(ALIKE_VARIABLE) == "1"
    why = why_not_fit(plan, directory, facts, equal_hosts=equal_hosts, host=name)
    if why := why or why_not_with(opened.delivery.settings, nccl):
        return why
    if line := settings_of_files().get(GRAPH_VARIABLE):
        return f"{line.where} sets {GRAPH_VARIABLE}, which fails other groups"
    environment = nccl_environment()
    if PLUGIN_VARIABLE in environment and not why_no_plugin(nccl):
        return f"{PLUGIN_VARIABLE} is set, whose plugin answers for each communicator"
    names = ", ".join(env_conflicts(opened.delivery.settings, environment))
    return f"{names} is set to something else than the plan's settings" if names else ""


def nccl_environment() -> dict[str, str]:
    """Return NCCL's variables, by its files and the environment, which comes first."""
    lines = {name: line.value for name, line in settings_of_files().items()}
    variables = lines | os.environ
    return {name: value for name, value in variables.items() if name.startswith("NCCL_")}
