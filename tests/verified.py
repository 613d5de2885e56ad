"""Stand-ins for jobs of real collectives: a runner whose ranks are formulas."""

import os
from pathlib import Path

import msgspec
import numpy as np

from tccl_py.delivery.delivered import rings_found
from tccl_py.errors import MeasurementError
from tccl_py.experiments.comparison import RunBudget
from tccl_py.experiments.jobs import HostRanks, Launcher, Outcome
from tccl_py.experiments.spec import JobResult, JobSpec, batches
from tccl_py.experiments.target import read_target, target_of
from tccl_py.experiments.verify import verify_target
from tccl_py.files import decode_json, encode_json
from tccl_py.plan.plan import Plan
from tccl_py.rank_processes.tasks import RankOutput
from tests.planned import with_parts

PLANNED = ("NCCL_BUFFSIZE", "NCCL_MIN_NCHANNELS", "NCCL_P2P_LEVEL", "NCCL_SHM_USE_CUDA_MEMCPY")
"""Variables that plans set, and no host by itself."""


class FakeJobs:
    """Jobs that take `seconds(size, environment)`, times noise; counts what it was asked.

    Each job has noise of its own, and `jitter(row)` that of a row in a job.

    Calls in smaller groups take `grouped(groups, environment)` times as long, and send/recv and
    all-to-all `transfers(environment)` times.
    """

    def __init__(
        self,
        seconds,
        *,
        noise=0.005,
        seed=0,
        fails=lambda environment: "",
        wrong=(),
        grouped=lambda groups, environment: 1.0,
        transfers=lambda environment: 1.0,
        trained=lambda environment: 4.001,
        jitter=lambda row: 0.0,
    ):
        self.seconds, self._noise, self._fails, self._wrong = seconds, noise, fails, wrong
        self._grouped, self._trained, self._transfers = grouped, trained, transfers
        self._random, self._jitter = np.random.default_rng(seed), jitter
        self.jobs = []

    def rendezvous(self, host, count):
        return [None] * count

    def run(self, tasks):
        (own,) = tasks.values()
        specs = [decode_json(task.spec, JobSpec, where="spec") for task in own]
        environments = [dict(task.environment) for task in own]
        for environment in environments:
            del environment["NCCL_DEBUG_FILE"]
        outcomes = self.outcomes(specs[0], environments)
        outputs = [
            RankOutput(results=tuple(map(encode_json, one.results)), log=one.log)
            for one in outcomes
        ]
        return dict.fromkeys(tasks, outputs)

    def outcomes(self, spec, environments):
        return [self.one(spec, environment) for environment in environments]

    def one(self, spec, environment):
        self.jobs.append((spec, environment))
        why = self._fails(environment)
        if why:
            raise MeasurementError(why)
        job = float(np.exp(self._random.normal(0, self._noise)))
        seconds_of = {}
        for batch, row in enumerate(row for row in spec.rows if not row.trains):
            seconds = self.seconds(row.bytes, environment) * job * (1 + 0.001 * batch)
            if jitter := self._jitter(row):
                seconds *= float(np.exp(self._random.normal(0, jitter)))
            if row.groups:
                seconds *= self._grouped(row.groups, environment)
            if row.collective in ("send_recv", "all_to_all"):
                seconds *= self._transfers(environment)
            # A graph file fails smaller communicators.
            left_out = row.groups and "NCCL_GRAPH_FILE" in environment
            seconds_of[row] = () if left_out else (seconds,)
        steps = [row for row in spec.rows if row.mode == "ddp-eager"]
        trained = (4.0, 1.0, 0.0), (self._trained(environment), 1.001, 0.0)

        def of_rank(row, rank):
            has_part = not row.groups or any(rank in of and len(of) > 1 for of in row.groups)
            return batches(row, seconds_of[row] if has_part else ())

        answers = [
            JobResult(
                rank=rank,
                torch="2.13.0",
                checked=60 if spec.checks else 0,
                wrong=self._wrong if self._is_wrong(spec, environment, rank) else (),
                # Only the last rank may compute something else.
                times=(
                    *(of_rank(row, rank) for row in seconds_of),
                    *(
                        batches(row, (0.01 * job,), trained[rank == spec.world - 1])
                        for row in steps
                    ),
                ),
            )
            for rank in range(spec.world)
        ]
        return Outcome(results=tuple(answers), log="")

    def _is_wrong(self, spec, environment, rank):
        return spec.checks and rank == 0 and "NCCL_GRAPH_FILE" in environment


def dry_run(plan, jobs, **more):
    """A launcher of a stand-in's jobs, without GPUs."""
    ranks = tuple(range(len(plan.gpus)))
    host = HostRanks(ranks=ranks, gpus=plan.gpus, environment={"PATH": "/bin"})
    return Launcher(**{"backend": "host", "hosts": (host,), "runner": jobs, **more})


def without_gpus(plan, directory, launcher):
    """A launcher of jobs here whatever GPUs are here; stands for `machine_launcher`."""
    ranks = tuple(range(len(plan.gpus)))
    host = HostRanks(ranks=ranks, gpus=plan.gpus, environment=dict(os.environ))
    return msgspec.structs.replace(launcher, backend="host", hosts=(host,))


def run_verification(plan, directory, launcher, budget, *, choice=None):
    """What is found of a machine's plan, or of one of its choices."""
    target = read_target(plan, directory)
    return verify_target(target, launcher, msgspec.structs.replace(budget, only=choice))


def verify_by(plan, directory, jobs, *, choice=None, **budget):
    """What a stand-in's jobs say of a machine's plan, or of one of its choices."""
    return run_verification(
        plan, directory, dry_run(plan, jobs), RunBudget(**budget), choice=choice
    )


def by_plan(ratio, base=1e-4, *, variables=lambda size: 1.0):
    """Seconds of a size: default NCCL's over `ratio(size)` with a graph file.

    With variables alone it is over `variables(size)`.
    """

    def seconds(size, environment):
        default = base + size / 1e10
        if "NCCL_GRAPH_FILE" in environment:
            return default / ratio(size)
        return default / variables(size) if by_variables(environment) else default

    return seconds


def by_variables(environment):
    """Whether a job has variables of a plan, and no graph file."""
    return "NCCL_GRAPH_FILE" not in environment and any(map(PLANNED.__contains__, environment))


def changed(struct, **changes):
    replace = with_parts if isinstance(struct, Plan) else msgspec.structs.replace
    return replace(struct, **changes)


def rings_in_log(plan, graphs, log, variables):
    """The comparison of a log with a plan whose graph files have these texts."""
    return rings_found(plan, target_of(plan, Path(), graphs).verdict, log, variables)


class Interrupting(FakeJobs):
    """Stand-ins of which one, or the first of a kind, sends a signal to the command."""

    def __init__(self, *, number, at, ratio=1.3, noise=0.005):
        super().__init__(by_plan(lambda size: ratio), noise=noise)
        self._number, self._at = number, at

    def one(self, spec, environment):
        if self._at(len(self.jobs)):
            os.kill(os.getpid(), self._number)
        return super().one(spec, environment)
