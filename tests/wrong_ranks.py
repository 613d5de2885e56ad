"""The rank program with collectives that give a wrong value, to see that checks find it.

usage: as tccl_py.experiments.rank; NCCL_TEST_WRONG names functions of torch.distributed.
"""

import os

from tccl_py.experiments import calls
from tccl_py.experiments.rank import main


def spoil(name):
    # Not above: the tests are collected where there is no torch.
    import torch.distributed as dist  # noqa: PLC0415

    right = getattr(dist, name)

    def wrong(*arguments, **more):
        work = right(*arguments, **more)
        for one in work if isinstance(work, list) else filter(None, [work]):
            one.wait()
        held = arguments[0]
        held = held[-1] if isinstance(held, list) else held
        held = getattr(held, "tensor", held)
        if dist.get_rank() == dist.get_world_size() - 1 and held is not None and len(held) > 3:
            held[2] += 1
        # A transfer cannot be awaited twice.
        return [] if isinstance(work, list) else work

    setattr(dist, name, wrong)


if __name__ == "__main__":
    # Small sizes show wrong values as well as large ones, and sooner.
    calls.COUNTS = calls.COUNTS[:3]
    for function in os.environ["NCCL_TEST_WRONG"].split():
        spoil(function)
    main()
