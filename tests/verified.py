"""Stand-ins for jobs of real collectives: a runner whose ranks are formulas."""

import msgspec
import numpy as np

from tccl_py.verify.arms import Place
from tccl_py.verify.jobs import JobError, Outcome
from tccl_py.verify.orders import Answer
from tccl_py.verify.subjects import machine_subject
from tccl_py.verify.verify import verify_subject

PLANNED = ("NCCL_BUFFSIZE", "NCCL_MIN_NCHANNELS", "NCCL_P2P_LEVEL", "NCCL_SHM_USE_CUDA_MEMCPY")
"""Variables that plans set, and no host by itself."""


class FakeJobs:
    """Jobs that take `seconds(size, environment)`, times noise; counts what it was asked.

    Calls in smaller groups take `grouped(groups, environment)` times as long.
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
    ):
        self._seconds, self._noise, self._fails, self._wrong = seconds, noise, fails, wrong
        self._grouped = grouped
        self._random = np.random.default_rng(seed)
        self.jobs = []

    def __call__(self, order, surroundings, **_):
        return tuple(self.one(order, each) for each in surroundings)

    def one(self, order, surroundings):
        self.jobs.append((order, dict(surroundings)))
        why = self._fails(surroundings)
        if why:
            raise JobError(why)
        job = float(np.exp(self._random.normal(0, self._noise)))
        timings = []
        for batch, row in enumerate(order.timed):
            seconds = self._seconds(row.bytes, surroundings) * job * (1 + 0.001 * batch)
            if row.groups:
                seconds *= self._grouped(row.groups, surroundings)
            # A graph file fails smaller communicators.
            left_out = row.groups and "NCCL_GRAPH_FILE" in surroundings
            timings.append(() if left_out else (seconds,))
        training = {"eager": (0.01 * job,)} if order.training else {}
        answers = [
            Answer(
                rank=rank,
                torch="2.13.0",
                checked=60 if order.checks else 0,
                wrong=self._wrong if self._is_wrong(order, surroundings, rank) else (),
                timings=tuple(timings),
                training=training,
            )
            for rank in range(order.world)
        ]
        return Outcome(answers=tuple(answers), log="", seconds=7.0)

    def _is_wrong(self, order, surroundings, rank):
        return order.checks and rank == 0 and "NCCL_GRAPH_FILE" in surroundings


def rehearsal(plan, jobs, **more):
    """A place for jobs of a stand-in, without GPUs."""
    return Place(backend="host", gpus=plan.gpus, caller={"PATH": "/bin"}, runner=jobs, **more)


def run_verification(plan, directory, place, effort, *, choice=None):
    """What is found of a machine's plan, or of one of its choices."""
    subject = machine_subject(plan, directory)
    return verify_subject(subject.narrowed(choice) if choice else subject, place, effort)


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
    return msgspec.structs.replace(struct, **changes)
