"""The ranks of a job as one of them sees them; torch comes in from outside."""

from __future__ import annotations

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
