"""The rank program with means that hang, give a wrong value, or cannot run.

usage: as tccl_py.experiments.rank
"""

import time

from tccl_py.experiments import means
from tccl_py.experiments.means import MEANS, NCCL, Means, refuse
from tccl_py.experiments.rank import main


def hangs(job, task):
    calls = MEANS[NCCL].prepare(job, task)
    return [*calls[:-1], lambda: time.sleep(600) if job.on.rank else calls[-1]()]


def wrong(job, task):
    """Right values in the first calls, and one wrong one in each later batch."""
    *calls, last = MEANS[NCCL].prepare(job, task)
    count = iter(range(10_000))

    def call():
        last()
        if job.on.rank == 1 and next(count):
            task.received[-1][3] += 1

    return [*calls, call]


def absent(job, task):
    refuse("it is not installed")


STAND_INS = {
    name: Means(("all_reduce",), prepare, p2p=False)
    for name, prepare in {"hangs": hangs, "wrong": wrong, "absent": absent}.items()
}

if __name__ == "__main__":
    MEANS.update(STAND_INS)
    means.ROW_S = 15.0
    main()
