"""What is planned for: a source of rates, the search by it, and what they rest on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tccl_py.errors import spell
from tccl_py.model.links import Proof
from tccl_py.model.machine import Fingerprint, Knowledge
from tccl_py.plan.plan import Plan
from tccl_py.planning.request import PlanRequest
from tccl_py.search.problem import Reporter
from tccl_py.simulator.descriptions import load_machine, settle_model
from tccl_py.simulator.model import MachineModel, provenances_text
from tccl_py.simulator.source import Simulator
from tccl_py.sources.bench import Bench
from tccl_py.sources.journal import read_journal, widen_journal

if TYPE_CHECKING:
    from tccl_py.nccl.asked import AskedJob

Say = Callable[[str], None]
Prove = Callable[[Callable[[], None]], "tuple[Proof | None, Sequence[AskedJob]]"]
"""Proves the links of this machine: a proof, and what NCCL did for it. The function that it gets is
called once workers of this machine may start."""
UNDER_MPI = "start the command under mpirun or srun"


class Subject(msgspec.Struct, kw_only=True):
    """What is planned for: a source, and the search by it, which closes the source's journal."""

    search: Callable[[Reporter | None], Plan]
    source: Bench | None = None
    model: MachineModel | None = None
    """That of new hosts."""
    fingerprint: Fingerprint | None = None
    links: Proof | None = None
    """The proof by which this machine is planned."""
    grows: bool = False
    """Whether hosts join a plan."""
    known_models: Mapping[str, MachineModel | None] = {}
    """The models of that plan's classes."""
    table_files: Callable[[], Mapping[str, str]] = dict
    """Returns the files of a cluster's tables after the search."""

    def models(self, made: Plan) -> dict[str, MachineModel | None]:
        """Return the models behind a plan's rates by class; new classes have the new model."""
        models = dict.fromkeys((node_class.name for node_class in made.cluster.classes), self.model)
        return {**models, **self.known_models}

    def keep_in(self, journal: Path, *, replace: bool) -> tuple[str, ...]:
        """Keep what is measured, for a plan that grows with all its hosts; return notices."""
        if self.source is None:
            return ()
        if self.grows and journal.is_file():
            if not self.source.simulated:
                widen_journal(journal, self.source.header)
            elif read_journal(journal).header != self.source.header:
                return ()  # Sets of another model have no names of hosts.
        return self.source.keep_in(journal, replace=replace)


def open_model(request: PlanRequest, name: str | MachineModel) -> tuple[MachineModel, Bench]:
    """Open the model that a request names, or a model as the request has it."""
    loaded = name if isinstance(name, MachineModel) else load_machine(name)
    model = settle_model(loaded, p2p=request.p2p, cpu=request.cpu)
    return model, Bench(Simulator(model, noise=request.noise or 0.0, seed=request.seed or 0))


def with_proof(knowledge: Knowledge, proof: Proof | None) -> Knowledge:
    """Return knowledge of a machine with the links that its proof leaves to no plan."""
    if proof is None or not proof.facts:
        return knowledge
    return msgspec.structs.replace(knowledge, links=proof.facts)


def say_sure(plan: Plan, model: MachineModel | None) -> str:
    """Return how sure a plan is, by the model behind its rates, if there is one."""
    if plan.dry_run:
        return "not at all: processes in host memory stood in for GPUs"
    if plan.jobs_ran:
        return "high: NCCL's jobs were timed here"
    if plan.simulated:
        level = "low" if plan.any_assumed else "medium"
        if model is None:
            return f"{level}: simulated"
        basis = "" if model.source else f", {model.note}"
        return f"{level}: by a model with {provenances_text(model)} parameters{basis}"
    interval = plan.choices["graph"].error
    error = f", 95 % interval ±{interval:.1%}" if interval else ""
    sets = spell(plan.sets_measured, "set")
    return f"medium: {sets} measured here{error}; no NCCL job was timed"
