"""Ranks and a plan: the plan's files, each rank's fit, and the agreement of all ranks.

Ranks that name different graph files for one communicator hang or crash NCCL. So each rank reports
its findings before the first communicator, and a plan is used only if it fits all of them.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from tccl_py.delivery.fit import ALIKE_VARIABLE, why_not_fit, why_not_with
from tccl_py.delivery.plugin import plugin_exports
from tccl_py.delivery.scripts import PLAN_VARIABLE
from tccl_py.errors import InputError
from tccl_py.files import check_path
from tccl_py.model.machine import normal_bus_id
from tccl_py.nccl.settings import env_conflicts, job_environment
from tccl_py.nccl.versions import why_no_plugin
from tccl_py.nccl_library import settings_of_files
from tccl_py.plan.host_files import host_graph_file
from tccl_py.plan.nccl_files import graph_files
from tccl_py.plan.plan import Plan
from tccl_py.plan.results import plan_in
from tccl_py.plan.staging import PLAN_FILE, check_files
from tccl_py.readers.hosts import names_of_this_host
from tccl_py.readers.live import DriverFacts, driver_facts

GRAPH_VARIABLE = "NCCL_GRAPH_FILE"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Member(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank's report: host, GPU, and findings about the plan.

    `host` identifies the host as NCCL does, `name` is the plan's name for the host ("" if none),
    `gpu` the NVML index, and `plan` the plan's identity. `off` says why the plan does not fit this
    rank, and `wrong` describes a mistake that ends the job. With `plugin`, NCCL's plugin can be
    loaded.
    """

    host: str
    name: str = ""
    gpu: int = -1
    plan: str = ""
    settings: dict[str, str] = {}
    off: str = ""
    wrong: str = ""
    plugin: bool = False


class OpenPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan with its directory, the files in it, and its identity."""

    directory: Path
    plan: Plan
    files: frozenset[str]
    identity: str

    @property
    def variables(self) -> dict[str, str]:
        """Return the settings of all communicators."""
        return job_environment(self.plan.plain_settings)

    def loading(self, nccl: str) -> dict[str, str]:
        """Return the variables that load the plan's plugin; none if this process cannot."""
        try:
            wanted = plugin_exports(
                self.plan, self.directory, alike=os.environ.get(ALIKE_VARIABLE) == "1"
            )
        except InputError:
            return {}
        given = _given()
        others = any(given.get(name, value) != value for name, value in wanted.items())
        return {} if others or why_no_plugin(nccl) else wanted

    def graph(self, members: Sequence[Member], own: Member) -> Path | None:
        """Return the graph file of `own` in a group of these members; None is default NCCL."""
        plan, name = self.plan, None
        if not plan.names_graph or len({member.plan for member in members}) != 1:
            return None
        parts = [list(part) for _, part in groupby(members, key=lambda member: member.host)]
        found = [(part[0].name, tuple(sorted(one.gpu for one in part))) for part in parts]
        if not plan.is_cluster:
            name = graph_files(plan).get(found[0][1]) if len(found) == 1 else None
        elif found == [(host.name, tuple(sorted(plan.gpus_of(host)))) for host in plan.hosts]:
            name = host_graph_file(own.name)
        file = f"nccl/{name}"
        return self.directory / file if file in self.files else None


def open_plan(directory: Path) -> OpenPlan:
    """Read a plan's directory."""
    directory = directory.absolute()
    check_path(directory)
    plan = plan_in(directory)
    # Each of several hosts has its own files; a rank checks its own.
    manifest = check_files(directory, [PLAN_FILE] if plan.is_cluster else None)
    return OpenPlan(
        directory=directory, plan=plan, files=frozenset(manifest.files), identity=manifest.identity
    )


def look(ordinal: int) -> tuple[int, DriverFacts]:
    """Return the NVML index of CUDA device `ordinal`, found by its bus id as in NCCL, and NVML's
    facts.

    Raises InputError: the driver does not answer, or NVML lacks the GPU.
    """
    facts = driver_facts()
    bus_id = _bus_id(ordinal)
    found = [gpu.index for gpu in facts.gpus if gpu.bus_id == bus_id]
    if not found:
        what = f"has bus id {bus_id}, which NVML does not know"
        raise InputError(f"CUDA device {ordinal}", what, "use a GPU")
    return found[0], facts


def _bus_id(ordinal: int) -> str | None:
    where = f"CUDA device {ordinal}"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise InputError(where, "no CUDA driver answers", "use a machine with GPUs") from error
    device, text = ctypes.c_int(), ctypes.create_string_buffer(64)
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), ordinal)
        or driver.cuDeviceGetPCIBusId(text, len(text), device)
    )
    if failed:
        raise InputError(where, f"does not tell its bus id (error {failed})", "use a GPU")
    return normal_bus_id(text.value.decode("ascii", "replace"))


def host_identity() -> str:
    """Return NCCL's identity of this host: NCCL_HOSTID, or the host name and the boot id."""
    if named := os.environ.get("NCCL_HOSTID", ""):
        return named
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def member_of(
    directory: Path | None, ordinal: int, nccl: str, settings: Mapping[str, str] | None
) -> tuple[Member, OpenPlan | None]:
    """Return a rank's report, with errors as text, and the plan.

    `directory` is the plan's, None for the one in TCCL_PLAN, if set; `ordinal` the rank's CUDA
    device, `nccl` torch's version, and `settings` this process's NCCL settings, None before the
    first communicator.
    """
    member, opened, kind = Member(host=host_identity()), None, "wrong"
    named = directory or Path(os.environ.get(PLAN_VARIABLE, ""))
    try:
        # 1. Open the plan.
        if named != Path():
            opened = open_plan(named)
            if settings is not None and settings != opened.variables:
                needed = _listed(opened.variables)
                what = f"needs {needed}, and this process has {_listed(settings)}"
                right = (
                    "NCCL reads settings once in a process: use plans of the same settings in it"
                )
                raise InputError(str(opened.directory), what, right)
        graph = settings_of_files().get(GRAPH_VARIABLE)
        if graph is not None:
            right = "take it out: it fails every communicator over other GPUs"
            raise InputError(graph.where, f"sets {GRAPH_VARIABLE}", right)
        # 2. Find this rank's GPU.
        kind = "off"
        gpu, facts = look(ordinal)
        member = replace(member, gpu=gpu)
        if opened is None:
            return replace(member, off=f"{PLAN_VARIABLE} names no plan"), None
        # 3. Check the plan's fit.
        kind = "wrong"
        name = opened.plan.host_named(names_of_this_host()) or ""
        told = {"plan": opened.identity, "settings": opened.variables}
        member = replace(member, name=name, plugin=bool(opened.loading(nccl)), **told)
        return replace(member, off=_misfit(opened, facts, nccl, name)), opened
    except InputError as error:
        return replace(member, **{kind: str(error)}), opened


def _listed(settings: Mapping[str, str]) -> str:
    return " ".join(f"{name}={settings[name]}" for name in sorted(settings)) or "no settings"


def _misfit(opened: OpenPlan, facts: DriverFacts, nccl: str, name: str) -> str:
    """Return why a plan does not fit this rank, as a clause; "" if it does."""
    plan, directory = opened.plan, opened.directory
    if plan.is_cluster:
        if not name:
            return "the plan has no such host"
        if not (path := directory / "nccl" / host_graph_file(name)).is_file():
            return f"{path} is missing"
        check_files(directory, [f"nccl/{host_graph_file(name)}"])
    alike = os.environ.get(ALIKE_VARIABLE) == "1"
    why = why_not_fit(plan, directory, facts, alike=alike, host=name or None)
    if why := why or why_not_with(plan.plain_settings, nccl):
        return why
    names = ", ".join(env_conflicts(plan.plain_settings, _given()))
    return f"{names} is set to something else than the plan's settings" if names else ""


def _given() -> dict[str, str]:
    """Return this process's variables, NCCL's files included."""
    return {name: line.value for name, line in settings_of_files().items()} | dict(os.environ)


class Roster(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks' reports, and the conclusion: `off` says why no rank uses the plan, else "".

    With `distinct`, each rank has a GPU of its own, so communicators can be made at once.
    """

    members: tuple[Member, ...]
    off: str
    distinct: bool


def exchange(store: Any, rank: int, size: int, own: Member) -> Roster:
    """Exchange the reports of all `size` ranks by way of rank 0, two messages a rank.

    `store` is a store of torch.distributed, whose `get` waits for the key. Raises InputError, the
    same on all ranks: a mistake of a rank.
    """
    if rank != 0:
        store.set(f"member/{rank}", msgspec.json.encode(own).decode())
    else:
        others = [
            msgspec.json.decode(store.get(f"member/{number}"), type=Member)
            for number in range(1, size)
        ]
        store.set("members", msgspec.json.encode([own, *others]).decode())
    members = msgspec.json.decode(store.get("members"), type=tuple[Member, ...])
    wrong = next(((at, member.wrong) for at, member in enumerate(members) if member.wrong), None)
    if wrong is None:
        return roster_of(members)
    # All ranks end now, rank 0 last, because the store may end with it.
    if rank != 0:
        store.set(f"read/{rank}", "")
    else:
        for number in range(1, size):
            store.get(f"read/{number}")
    what, _, right = wrong[1].rpartition("; ")
    raise InputError(f"rank {wrong[0]}", what, right)


def roster_of(members: Sequence[Member]) -> Roster:
    """Return the conclusion from the ranks' reports."""
    hosts = [member.host.partition(" ")[0] for member in members]
    seen: dict[tuple[str, int], int] = {}
    off, shared = [], []
    for rank, (member, host) in enumerate(zip(members, hosts, strict=True)):
        if member.off:
            off.append(f"rank {rank} on {host}: {member.off}")
        first = seen.setdefault((member.host, member.gpu), rank)
        if first != rank and member.gpu >= 0:
            shared.append(
                f"ranks {first} and {rank} both have GPU {member.gpu} of {host} (call "
                "torch.cuda.set_device before, or give device_id)"
            )
    unlike = [n for n, member in enumerate(members) if member.settings != members[0].settings]
    off += [f"ranks 0 and {rank} have plans of different settings" for rank in unlike]
    return Roster(
        members=tuple(members),
        off=next(iter((*off, *shared)), ""),
        distinct=not shared and all(member.gpu >= 0 for member in members),
    )
