"""What a rank finds out about itself: its host, its GPU as NVML counts, and whether a plan fits."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from tccl_py.errors import InputError
from tccl_py.health.fitness import (
    ALIKE_VARIABLE,
    why_not_alike,
    why_not_here,
    why_not_of_class,
    why_not_with,
)
from tccl_py.model.knowledge import Fingerprint
from tccl_py.model.machine import normal_bus_id
from tccl_py.nccl.conf import settings_of_files
from tccl_py.nccl.pinned_env import env_conflicts
from tccl_py.plan.files import host_graph_file
from tccl_py.plan.staging import check_files
from tccl_py.readers.hosts import names_of_this_host
from tccl_py.readers.live import fingerprint_of
from tccl_py.readers.nvml import GpuFacts, driver_facts
from tccl_py.torch.plans import Member, OpenPlan, check_no_graph, open_plan

PLAN_VARIABLE = "TCCL_PLAN"
"""Names the plan's directory where a program does not; an installed plan sets it."""
GRAPH_VARIABLE = "NCCL_GRAPH_FILE"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class CheckSettings(Protocol):
    """Refuses settings by an InputError that names `where`."""

    def __call__(self, variables: Mapping[str, str], *, where: str) -> None:
        """Check settings."""


class Here(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's GPU by its NVML index, the host's fingerprint and GPUs, and its version of NCCL."""

    gpu: int
    fingerprint: Fingerprint
    nccl: str
    gpus: tuple[GpuFacts, ...] = ()


def look(ordinal: int, nccl: str) -> Here:
    """Find out which GPU CUDA's device `ordinal` is, whatever CUDA_VISIBLE_DEVICES says.

    As NCCL does: CUDA tells the bus id, and NVML the index of the GPU with that bus id.

    Raises:
        InputError: the driver does not answer, or knows no such GPU.
    """
    facts = driver_facts()
    bus_id = _bus_id(ordinal)
    found = [gpu.index for gpu in facts.gpus if gpu.bus_id == bus_id]
    if not found:
        raise InputError(
            f"CUDA device {ordinal}", f"has bus id {bus_id}, which NVML does not know", "use a GPU"
        )
    return Here(gpu=found[0], fingerprint=fingerprint_of(facts), nccl=nccl, gpus=facts.gpus)


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


def host_identity(environment: Mapping[str, str] = os.environ) -> str:
    """What NCCL tells hosts apart by: NCCL_HOSTID, or the name and the boot id."""
    named = environment.get("NCCL_HOSTID", "")
    if named:
        return named
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def member_of(
    directory: Path | None, ordinal: int, nccl: str, check: CheckSettings
) -> tuple[Member, OpenPlan | None]:
    """What a rank tells of itself and of a plan, and the plan; it raises nothing on purpose.

    Args:
        directory: the plan's; None if the program names none.
        ordinal: of the rank's CUDA device.
        nccl: the version that torch has.
        check: refuses settings other than those that this process has.
    """
    member = Member(host=host_identity())
    try:
        named = directory or _named()
        opened = None if named is None else open_plan(named)
        if opened is not None:
            check(opened.variables, where=str(opened.directory))
        graph = settings_of_files().get(GRAPH_VARIABLE)
        check_no_graph(GRAPH_VARIABLE, None if graph is None else graph.where)
    except InputError as error:
        return msgspec.structs.replace(member, wrong=str(error)), None
    try:
        here = look(ordinal, nccl)
    except InputError as error:
        return msgspec.structs.replace(member, off=str(error)), opened
    member = msgspec.structs.replace(member, gpu=here.gpu)
    if opened is None:
        return msgspec.structs.replace(member, off=f"{PLAN_VARIABLE} names no plan"), None
    name = "" if not opened.plan.is_cluster else opened.host_name(tuple(names_of_this_host()))
    found = msgspec.structs.replace(
        member, name=name, plan=opened.identity, settings=opened.variables
    )
    try:
        off = why_off(opened, here, name)
    except InputError as error:
        return msgspec.structs.replace(found, wrong=str(error)), opened
    return msgspec.structs.replace(found, off=off), opened


def why_off(opened: OpenPlan, here: Here, name: str) -> str:
    """Why a plan is not for this rank, in a clause; "" if it is.

    Raises:
        InputError: the plan's directory is damaged.
    """
    elsewhere = _why_not_here(opened, here, name)
    if elsewhere:
        return elsewhere
    settings = opened.plan.job_settings
    other = why_not_with(settings, here.nccl)
    if other:
        return other
    given = {name: line.value for name, line in settings_of_files().items()} | dict(os.environ)
    names = env_conflicts(settings, given)
    if names:
        return f"{', '.join(names)} is set to something else than the plan's settings"
    return ""


def _why_not_here(opened: OpenPlan, here: Here, name: str) -> str:
    plan, directory = opened.plan, opened.directory
    if not plan.is_cluster:
        if _alike():
            return why_not_alike(plan, directory, here.fingerprint, here.gpus)
        return why_not_here(plan, directory, here.fingerprint)
    if not name:
        return "the plan has no such host"
    path = directory / "nccl" / host_graph_file(name)
    if not path.is_file():
        return f"{path} is missing"
    check_files(directory, [f"nccl/{host_graph_file(name)}"])
    return why_not_of_class(plan, name, here.gpus)


def _alike() -> bool:
    return os.environ.get(ALIKE_VARIABLE) == "1"


def _named() -> Path | None:
    text = os.environ.get(PLAN_VARIABLE, "")
    return Path(text) if text else None
