"""The two sides of a comparison: NCCL with a plan's settings and graph file, and NCCL as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol

import msgspec

from tccl_py.emitters.nccl_conf import job_environment
from tccl_py.emitters.plan_files import GRAPH_FILE
from tccl_py.errors import InputError
from tccl_py.plan.directory import topology_path
from tccl_py.plan.plan import Plan
from tccl_py.verification.jobs import Outcome, run_jobs
from tccl_py.verification.orders import Backend, Order
from tccl_py.verification.surroundings import job_surroundings, kept_variables

Runner = Callable[[Order, Sequence[Mapping[str, str]]], tuple[Outcome, ...]]
"""What runs jobs at once: `run_jobs`, or a stand-in."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """What one side's jobs are told beyond what both are.

    `graphs` are the texts of graph files by host, for a job over several: each gets its own.
    """

    name: str
    variables: dict[str, str]
    graphs: dict[str, str] = {}


class AnyPlace(Protocol):
    """Where jobs run: on this machine or over hosts."""

    @property
    def backend(self) -> Backend:
        """GPUs and NCCL, or gloo."""

    @property
    def ranks(self) -> int:
        """How many ranks of a job one host has at most."""

    def run(self, sides: Sequence[Side], order: Order) -> tuple[Outcome, ...]:
        """Run a job of each side, all at once; they take turns.

        Raises:
            JobError: one failed; which, is only known of one alone.
        """

    def variables(self, side: Side) -> dict[str, str]:
        """All NCCL variables of a side's jobs."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """This machine: which backend and GPUs, and the environment that jobs come from."""

    backend: Backend
    gpus: tuple[int, ...]
    caller: dict[str, str]
    keep: tuple[str, ...] = ()
    runner: Runner = run_jobs

    @property
    def ranks(self) -> int:
        """As AnyPlace."""
        return len(self.gpus)

    def run(self, sides: Sequence[Side], order: Order) -> tuple[Outcome, ...]:
        """As AnyPlace."""
        surroundings = [
            job_surroundings(
                self.caller,
                gpus=self.gpus if self.backend == "cuda" else None,
                variables=side.variables,
                keep=self.keep,
            )
            for side in sides
        ]
        told = msgspec.structs.replace(order, backend=self.backend, world=len(self.gpus))
        return self.runner(told, surroundings)

    def variables(self, side: Side) -> dict[str, str]:
        """All NCCL variables of a side's jobs."""
        return {**kept_variables(self.caller, self.keep), **side.variables}


STOCK = Side(name="stock", variables={})


def plan_side(plan: Plan, directory: Path) -> Side:
    """The side of a plan, by the files in its directory.

    Raises:
        InputError: its graph file is missing.
    """
    graph = directory.resolve() / "nccl" / GRAPH_FILE
    if not graph.is_file():
        raise InputError(str(graph), "is missing", "plan again, or `tccl export` it")
    variables = job_environment(
        plan.settings, graph=PurePosixPath(graph), topology=topology_path(plan, directory)
    )
    return Side(name="plan", variables=variables)
