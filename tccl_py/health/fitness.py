"""Fitness of a plan for a host: its GPUs, driver, NUMA nodes, and NCCL; a job's environment."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.cluster import shown
from tccl_py.model.machine import Fingerprint, Gpu, Machine
from tccl_py.nccl.settings import Settings, job_environment
from tccl_py.nccl.versions import NEWER_VARIABLE, has_rules, why_no_plugin
from tccl_py.nccl_library import installed_nccl
from tccl_py.plan.beside import known_fingerprint, planned_fingerprint, plugin_exports
from tccl_py.plan.directory import GRAPH_FILE, host_graph_file, machine_file, subset_file
from tccl_py.plan.parts import ChoiceName
from tccl_py.plan.plan import Plan
from tccl_py.plan.staging import check_files
from tccl_py.readers.hosts import NODE_NAME, names_of_this_host
from tccl_py.readers.live import GpuFacts, driver_facts, fingerprint_of

Say = Callable[[str], None]


def differences(
    machine: Machine,
    planned: Fingerprint,
    here: Fingerprint,
    *,
    gpus: Sequence[int],
    alike: Sequence[GpuFacts | Gpu] | None = None,
) -> tuple[list[str], list[str]]:
    """Compare this machine with the plan's by the plan's GPUs; return two lists of clauses.

    By the first this is another machine, whose rates are not comparable; the second may explain a
    change of rates. With its present GPUs as `alike`, for the plan of one of many equal hosts,
    UUIDs may differ: GPUs of the same kinds at the same places will do.
    """
    another: list[str] = []
    notes: list[str] = []
    if alike is not None:
        another += _changed(_places(machine.gpus), _places(alike), gpus)
    uuids = planned.uuids(machine) if alike is None else {}
    for place, (index, uuid) in enumerate(uuids.items()):
        now = here.gpu_uuids[place] if place < len(here.gpu_uuids) else None
        if index in gpus and now != uuid:
            changed = f"GPU {index} was {uuid} and is {now}"
            if now is None:
                changed = f"GPU {index} ({uuid}) is gone"
            elif uuid in here.gpu_uuids:
                changed = f"GPU {index} ({uuid}) has another index"
            another.append(changed)
    if planned.driver != here.driver:
        same = planned.driver.partition(".")[0] == here.driver.partition(".")[0]
        clause = f"the driver was {planned.driver} and is {here.driver}"
        (notes if same else another).append(clause)
    if planned.numa_count != here.numa_count:
        another.append(
            f"it had {planned.numa_count} NUMA node(s) and has {here.numa_count} (the BIOS's "
            "NPS or SNC setting?)"
        )
    if planned.kernel != here.kernel:
        notes.append(f"the kernel was {planned.kernel} and is {here.kernel}")
    return another, notes


def check_same_machine(
    plan: Plan,
    directory: Path,
    here: Fingerprint,
    *,
    right: str,
    alike: Sequence[Gpu] | None = None,
) -> list[str]:
    """Check that a plan was measured on this machine; return notes on smaller differences.

    `alike` is as for `differences`. Raises InputError: it is another machine, with the remedy
    `right`, or the plan has no fingerprint.
    """
    planned = known_fingerprint(plan, directory)
    another, notes = differences(plan.machine, planned, here, gpus=plan.gpus, alike=alike)
    if another:
        what = f"was measured on another machine: {'; '.join(another)}"
        raise InputError(str(directory), what, right)
    return notes


ALIKE_VARIABLE = "TCCL_ALIKE"
"""Set to 1 in jobs that use the plan of another, equal host."""
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
"""The number of a rank on its host: torchrun's, Open MPI's, MPICH's and SLURM's."""
_VERSION = re.compile(r"v?([0-9]{1,3})\.([0-9]{1,3})(?![0-9])")


def why_not_here(
    plan: Plan, directory: Path, here: Fingerprint, *, alike: Sequence[GpuFacts] | None = None
) -> str:
    """Return why a plan's rates do not hold on this host, in clauses; "" if they hold.

    A simulated plan belongs to no host, so nothing speaks against it. `here` is the host's present
    fingerprint, and `alike` is as for `differences`.
    """
    if plan.simulated:
        return ""
    planned = planned_fingerprint(plan, directory)
    if planned is None:
        return f"{machine_file(plan, directory)} has no fingerprint of its host"
    return "; ".join(differences(plan.machine, planned, here, gpus=plan.gpus, alike=alike)[0])


def why_not_of_class(plan: Plan, host: str, gpus: Sequence[GpuFacts | Gpu]) -> str:
    """Return which of a host's GPUs are of other kinds than a cluster plan's, in clauses; or "".

    Hosts of a class share the measurements of one of them, so no host's UUIDs are known. `host` is
    the plan's name for a host, `gpus` are its present GPUs. A simulated plan belongs to no host.
    """
    if plan.simulated:
        return ""
    number = plan.cluster.host_classes[host]
    now = {gpu.index: gpu.name for gpu in gpus}
    was = {gpu.index: gpu.name for gpu in plan.cluster.classes[number].machine.gpus}
    return "; ".join(_changed(was, now, plan.class_gpus[number]))


def _places(gpus: Sequence[GpuFacts | Gpu]) -> dict[int, str]:
    return {gpu.index: f"{gpu.name} at {gpu.bus_id}" for gpu in gpus}


def _changed(was: Mapping[int, str], now: Mapping[int, str], gpus: Sequence[int]) -> list[str]:
    return [
        f"GPU {index} was {was[index] or 'unnamed'} and is {now.get(index, 'gone')}"
        for index in gpus
        if now.get(index) != was[index]
    ]


def why_not_with(settings: Settings, nccl: str) -> str:
    """Return why a plan's settings are for another version of NCCL, in a clause; "" if they fit.

    >>> why_not_with(Settings(version="2.30"), "2.28.9")
    'it is for NCCL 2.30 and this is 2.28.9 (plan again by `tccl plan --nccl 2.28`)'
    """
    planned, used = _VERSION.match(settings.version), _VERSION.match(nccl)
    if used is None:
        where = f"NCCL version {nccl[:40]!r}"
        raise InputError(where, "is no version", "give a number such as 2.28.9")
    if planned is not None and planned.groups() == used.groups():
        return ""
    minor = ".".join(used.groups())
    again = f" (plan again by `tccl plan --nccl {minor}`)" if has_rules(nccl) else ""
    return f"it is for NCCL {settings.version} and this is {nccl}{again}"


def why_elsewhere(
    plan: Plan, directory: Path, *, alike: bool, say: Say, name: str | None = None
) -> str:
    """Return why this is not the machine of a measured plan, in clauses; "" also without a driver.

    With `alike` equal GPUs with other UUIDs will do, as on host `name` of a cluster's plan.
    """
    if plan.simulated:
        return ""
    try:
        facts = driver_facts()
    except InputError as error:
        say(f"whether this is the plan's machine was not checked: {error.what}")
        return ""
    if name is not None:
        return why_not_of_class(plan, name, facts.gpus)
    return why_not_here(plan, directory, fingerprint_of(facts), alike=facts.gpus if alike else None)


def _why_not_used(plan: Plan, nccl: str | None, *, say: Say) -> str:
    """Return why a plan is for another NCCL than `nccl`, by default the installed one; or ""."""
    installed = installed_nccl() if nccl is None and not plan.simulated else None
    version = nccl if installed is None else installed.version
    wrong = "" if version is None else why_not_with(plan.settings, version)
    if wrong and installed is not None:
        found = f"NCCL {installed.version} is here, {installed.source}"
        say(f"{found}; if the job has another, add `nccl`")
    return wrong


def planned_or_installed(plan: Plan) -> str:
    """Return the version of the installed NCCL; the plan's where none is found."""
    installed = installed_nccl()
    return plan.settings.version if installed is None else installed.version


class JobEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """A job's variables, its GPUs or host, and whether what was asked for is not there.

    `subject` is as in the JSON of `tccl env`: `off` says why the plan is disabled. `numa_id` is the
    NUMA node for the memory of this rank, where NCCL has no plugin that places bounce buffers.
    """

    plan: Plan
    subject: dict[str, Any]
    variables: Mapping[str, str]
    refused: bool
    numa_id: int | None = None


class JobRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A job over GPUs of a machine's plan, or on a host of a cluster.

    None is all GPUs, this host, the installed NCCL, and the recommended choice. With `plugin` it
    loads NCCL's plugin, and `alike` is as `why_elsewhere` takes it. With `is_rank` this process may
    be one of its ranks.
    """

    gpus: tuple[int, ...] | None = None
    host: str | None = None
    nccl: str | None = None
    choice: ChoiceName | None = None
    plugin: bool = False
    alike: bool = False
    is_rank: bool = False


def job_environment_of(
    plan: Plan, directory: Path, request: JobRequest, *, say: Say
) -> JobEnvironment:
    """Return the variables of a job.

    `say` is told why there are no variables, or others than were asked for.
    """
    gpus, host, plugin, alike = request.gpus, request.host, request.plugin, request.alike
    listed, numa_id, lacking = check_files(directory).files, None, ""
    taken = request.choice or _offered(plan, gpus)
    placed = taken == "graph" and plan.settings.shm_placement
    loading = plugin_exports(plan, directory, alike=alike) if plugin else {}
    if plan.is_cluster:
        names = names_of_this_host() if host is None else iter((host, host.partition(".")[0]))
        name = plan.host_named(names)
        subject: dict[str, Any] = {"host": name}
        disabled, file = "", host_graph_file(name or "")
        lacking = "" if plugin else _not_planned(host)
        if name is not None:
            where: dict[str, Any] = {"name": name, "alike": alike, "say": say}
            lacking = "" if host else why_elsewhere(plan, directory, **where)
    else:
        chosen = tuple(sorted(gpus or plan.gpus))
        subject = {"gpus": chosen}
        disabled = f"it is for GPUs {','.join(map(str, plan.gpus))}"
        if set(chosen) <= set(plan.gpus):
            wrong = _why_not_used(plan, request.nccl, say=say)
            elsewhere = why_elsewhere(plan, directory, alike=alike, say=say)
            disabled = "; ".join(filter(None, (elsewhere, wrong)))
        newer = os.environ.get(NEWER_VARIABLE) == "1"
        used = request.nccl or planned_or_installed(plan)
        why = why_no_plugin(used, newer=newer) if plugin or placed else ""
        if plugin and not disabled:
            disabled = why
        elif placed and why:
            placed = False
            numa_id = _numa_id(plan, chosen, gpus or plan.gpus) if request.is_rank else None
            taken = "variables" if numa_id is None else taken
            if numa_id is None and not disabled:
                say(f"variables alone, as `tccl run` starts no single rank, and {why}")
        file = GRAPH_FILE if chosen == plan.gpus else subset_file(chosen)
    if disabled:
        say(f"the plan is disabled, NCCL chooses its own rings: {disabled}")
        off = {**subject, "off": disabled}
        return JobEnvironment(plan=plan, subject=off, variables={}, refused=True)
    graph = None
    if lacking:
        # A job whose ranks have unlike NCCL_BUFFSIZE or numbers of channels fails or hangs.
        say(f"{lacking}: no graph file, only the variables, which all ranks need alike")
    elif taken == "graph" and not plugin and f"nccl/{file}" not in listed:
        lacking = _lacking(subject["gpus"])
        say(lacking)
        taken = "variables"
    elif taken == "graph" and placed:
        loading = loading or plugin_exports(plan, directory, alike=alike)
    elif taken == "graph":
        graph = PurePosixPath(directory.resolve() / "nccl" / file)
    return JobEnvironment(
        plan=plan,
        subject={**subject, "choice": taken},
        variables=loading or job_environment(plan.choices[taken].settings, graph=graph),
        refused=bool(lacking) and (plan.is_cluster or request.choice is not None),
        numa_id=numa_id if graph is not None else None,
    )


def _offered(plan: Plan, gpus: Sequence[int] | None) -> ChoiceName:
    """Return the recommended choice for a job over these GPUs: no graph file without a gain."""
    found = None if plan.is_cluster else plan.subset(gpus or plan.gpus)
    if plan.recommended == "graph" and found is not None and not found.gains:
        return "variables"
    return plan.recommended


def _numa_id(plan: Plan, gpus: Sequence[int], in_order: Sequence[int]) -> int | None:
    """Return the NUMA node that a plan names for the GPU of this rank; None if it names none."""
    gpu, found = _gpu_of_rank(in_order), plan.subset(gpus)
    nodes = {} if found is None else dict(zip(found.gpus, found.nodes, strict=False))
    ids = {node.index: node.numa_id for node in plan.machine.numa_nodes}
    return ids[nodes[gpu]] if gpu in nodes else None


def _gpu_of_rank(gpus: Sequence[int]) -> int | None:
    """Return the GPU of this process by its launcher's variables; None if it is no single rank."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if re.fullmatch(r"\d{1,4}(,\d{1,4})*", visible):
        gpus = [int(gpu) for gpu in visible.split(",")]
    ranks = (os.environ.get(name, "") for name in _LOCAL_RANKS)
    rank = next((int(rank) for rank in ranks if re.fullmatch(r"\d{1,4}", rank)), None)
    if rank is None:
        return None
    return gpus[0] if len(gpus) == 1 else gpus[rank] if rank < len(gpus) else None


def prefer_numa_node(node: int) -> str:
    """Prefer a NUMA node for all memory of this process and its children; return why not, or ""."""
    import ctypes  # noqa: PLC0415
    import platform  # noqa: PLC0415

    set_mempolicy = {"x86_64": 238, "aarch64": 237}.get(platform.machine())
    if set_mempolicy is None:
        return f"not known on {platform.machine()}"
    libc, preferred = ctypes.CDLL(None, use_errno=True), 1
    words = (ctypes.c_uint64 * 16)()
    words[node // 64] = 1 << node % 64
    # The kernel reads one bit less.
    done = libc.syscall(set_mempolicy, preferred, words, 8 * ctypes.sizeof(words) + 1)
    return os.strerror(ctypes.get_errno()) if done else ""


def _lacking(gpus: Sequence[int]) -> str:
    """Return a notice on GPUs without a graph file in the plan."""
    text = ",".join(map(str, gpus))
    again = f"; to plan rings for them: `tccl plan -o DIR --gpus {text}`"
    return f"no graph file for GPUs {text}: variables alone{again if len(gpus) > 1 else ''}"


def _not_planned(host: str | None) -> str:
    """Return the sentence that a host, this one if not given, is not in the plan."""
    asked = host if host is not None else socket.gethostname()
    node = os.environ.get(NODE_NAME, "") if host is None else ""
    also = f" (SLURM's {shown(node)})" if node not in ("", asked) else ""
    return f"host {shown(asked)}{also} is not in the plan"
