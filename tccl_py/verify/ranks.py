"""The ranks of a job as one of them sees them; torch comes in from outside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tccl_py.verify.orders import Groups


@dataclass(frozen=True)
class Ranks:
    """One rank of a communicator of `world` ranks; one of a `world` of one is in none.

    `torch` and `dist` are torch and torch.distributed, `group` is the process group, None over all
    ranks of the job, and `root` the first rank in it.
    """

    torch: Any
    dist: Any
    rank: int
    world: int
    device: Any
    group: Any = None
    root: int = 0

    @property
    def cuda(self) -> bool:
        """Whether the group talks over NCCL."""
        return bool(self.device.type == "cuda")

    def wait(self) -> None:
        """Until this rank's device has done all it was given."""
        if self.cuda:
            self.torch.cuda.synchronize(self.device)

    def among(self, groups: Groups) -> Ranks:
        """Return this rank in its communicator of disjoint ones, all of which all ranks make."""
        found = replace(self, world=1)
        for members in groups:
            group = self.dist.new_group(list(members))
            if self.rank in members:
                found = replace(self, world=len(members), group=group, root=members[0])
        return found

    def agree(self, value: float) -> float:
        """Return the largest `value` of all the job's ranks: loops need one count everywhere."""
        shared = self.torch.tensor([value], dtype=self.torch.float64, device=self.device)
        self.dist.all_reduce(shared, op=self.dist.ReduceOp.MAX)
        return float(shared.item())

    @contextlib.contextmanager
    def graphed(
        self, calls: Callable[[], Any], *, stream: Any = None
    ) -> Iterator[Callable[[], Any]]:
        """What replays `calls` by a CUDA graph, taken on a stream; None is one of its own."""
        graph = self.torch.cuda.CUDAGraph()
        # NCCL's watchdog thread asks for events meanwhile, which a global mode would forbid.
        with self.torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            calls()
        self.wait()
        self.dist.barrier()
        try:
            yield graph.replay
        finally:
            self.wait()
            # The group cannot be left while a graph holds its work.
            graph.reset()
