"""A plan as a job uses it: which graph file is for which ranks, and whether it fits a rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import check_path
from tccl_py.nccl.conf import job_environment
from tccl_py.plan.directory import check_plan_directory
from tccl_py.plan.files import GRAPH_FILE, host_graph_file, subset_file
from tccl_py.plan.load import load_plan
from tccl_py.plan.plan import Plan
from tccl_py.plan.staging import PLAN_FILE, check_files


class Member(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank tells the others: where it is, and what it found of the plan.

    `host` is what NCCL tells hosts apart by, `name` the plan's name for it, "" if it has none.
    `gpu` is the NVML index. `plan` tells plans apart, `off` says why the plan is not for this rank,
    and `wrong` is a mistake that nobody can go on from.
    """

    host: str
    name: str = ""
    gpu: int = -1
    plan: str = ""
    settings: dict[str, str] = {}
    off: str = ""
    wrong: str = ""


class OpenPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that was read: its directory, the files in it, and what tells it from others."""

    directory: Path
    plan: Plan
    files: frozenset[str]
    identity: str

    @property
    def variables(self) -> dict[str, str]:
        """The environment of all communicators: the settings."""
        return job_environment(self.plan.job_settings)

    def host_name(self, names: Sequence[str]) -> str:
        """The plan's name for the host with these names; "" for a plan of one machine."""
        if not self.plan.is_cluster:
            return ""
        known = self.plan.cluster.host_classes
        return next((name for name in names if name in known), "")

    def graph(self, members: Sequence[Member], me: Member) -> Path | None:
        """The graph file of `me` in a group of these members, in group order; None is stock."""
        name = (
            _machine_graph(self, members)
            if not self.plan.is_cluster
            else _cluster_graph(self.plan, members, me)
        )
        return None if name is None else self.directory / "nccl" / name


def open_plan(directory: Path) -> OpenPlan:
    """Read a plan's directory.

    Raises:
        InputError: no plan, one with files that were changed or are missing, or a path that an
            environment cannot have.
    """
    directory = directory.absolute()
    check_path(directory)
    check_plan_directory(directory)
    plan = load_plan(directory)
    # Each of several hosts has its own files; a rank checks its own.
    manifest = check_files(directory, [PLAN_FILE] if plan.is_cluster else None)
    return OpenPlan(
        directory=directory,
        plan=plan,
        files=frozenset(manifest.digests),
        identity=manifest.identity,
    )


def _machine_graph(opened: OpenPlan, members: Sequence[Member]) -> str | None:
    plan = opened.plan
    if plan.recommended != "graph":
        return None
    gpus = tuple(sorted(member.gpu for member in members))
    same = {(member.host, member.plan) for member in members}
    if len(gpus) < 2 or len(set(gpus)) != len(gpus) or len(same) != 1:
        return None
    if not set(gpus) <= set(plan.gpus):
        return None
    name = GRAPH_FILE if gpus == plan.gpus else subset_file(gpus)
    return name if f"nccl/{name}" in opened.files else None


def _cluster_graph(plan: Plan, members: Sequence[Member], me: Member) -> str | None:
    """A host's file holds where all ranks of the plan are there, hosts in the plan's order."""
    if plan.recommended != "graph" or len({member.plan for member in members}) != 1:
        return None
    wanted = [(host.name, frozenset(plan.gpus_of(host))) for host in plan.hosts]
    found: list[tuple[str, list[int]]] = []
    last = ""
    for member in members:
        if not found or member.host != last:
            found.append((member.name, []))
        found[-1][1].append(member.gpu)
        last = member.host
    there = [(name, frozenset(gpus)) for name, gpus in found]
    if there != wanted or any(len(set(gpus)) != len(gpus) for _, gpus in found):
        return None
    return host_graph_file(me.name)


def check_no_graph(name: str, where: str | None) -> None:
    """Refuse one of NCCL's files that names a graph for all communicators.

    Raises:
        InputError: `where` is not None.
    """
    if where is not None:
        raise InputError(
            where, f"sets {name}", "take it out: it fails every communicator over other GPUs"
        )
