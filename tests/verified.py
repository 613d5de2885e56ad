"""Stand-ins for jobs of real collectives: a runner whose ranks are formulas."""

import msgspec
import numpy as np

from tccl_py.verification.jobs import JobError, Outcome
from tccl_py.verification.orders import Answer
from tccl_py.verification.sides import Place


class FakeJobs:
    """Jobs that take `seconds(size, environment)`, times noise; counts what it was asked."""

    def __init__(self, seconds, *, noise=0.005, seed=0, fails=lambda environment: "", wrong=()):
        self._seconds, self._noise, self._fails, self._wrong = seconds, noise, fails, wrong
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
        timings = tuple(
            (self._seconds(size, surroundings) * job * (1 + 0.001 * batch),)
            for batch, size in enumerate(order.sizes)
        )
        training = {"eager": (0.01 * job,)} if order.training else {}
        answers = [
            Answer(
                rank=rank,
                torch="2.13.0",
                checked=60 if order.checks else 0,
                wrong=self._wrong if order.checks and rank == 0 else (),
                timings=timings,
                training=training,
            )
            for rank in range(order.world)
        ]
        return Outcome(answers=tuple(answers), log="", seconds=7.0)


def rehearsal(plan, jobs, **more):
    """A place for jobs of a stand-in, without GPUs."""
    return Place(backend="host", gpus=plan.gpus, caller={"PATH": "/bin"}, runner=jobs, **more)


def by_plan(ratio, base=1e-4):
    """Seconds of a size: stock's over `ratio(size)` with a graph file."""

    def seconds(size, environment):
        stock = base + size / 1e10
        return stock / ratio(size) if "NCCL_GRAPH_FILE" in environment else stock

    return seconds


def changed(struct, **changes):
    return msgspec.structs.replace(struct, **changes)
