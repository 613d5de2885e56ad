"""The ranks of a job as one of them sees them; torch comes in from outside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ranks:
    """One rank of a process group. `torch` and `dist` are torch and torch.distributed."""

    torch: Any
    dist: Any
    rank: int
    world: int
    device: Any

    @property
    def cuda(self) -> bool:
        """Whether the group talks over NCCL."""
        return bool(self.device.type == "cuda")

    def wait(self) -> None:
        """Until this rank's device has done all it was given."""
        if self.cuda:
            self.torch.cuda.synchronize(self.device)

    def agree(self, value: float) -> float:
        """The largest `value` of all ranks: loops over collectives need one count everywhere."""
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
