"""Whether a NIC reads and writes a GPU's memory itself: GPU direct RDMA, by NCCL's rule.

Source: ncclTopoCheckGdr and ncclTopoComputePaths (paths.cc) of NCCL 2.30.7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tccl_py.model.paths import PathType
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.system import System
from tccl_py.nccl.versions import version_facts

Direction = Literal["send", "receive"]

_READS_BESIDE_PCI = 80
"""From this sm on a NIC reads GPU memory even where GPUs talk to each other over PCI."""


@dataclass(frozen=True, slots=True)
class GpuDirectRule:
    """What settings and version say of it.

    `level` is the farthest path; `read` whether NICs may read GPU memory, which sending needs
    (None: NCCL decides). `relays_need_it` is whether only GPUs that have it send for others.
    `over_c2c` is whether a NIC that hangs from the CPU to which a GPU has C2C counts as near.
    """

    level: PathType
    read: bool | None
    relays_need_it: bool
    over_c2c: bool

    def allows(
        self,
        system: System,
        gpu: str,
        net: str,
        *,
        distance: PathType,
        direction: Direction,
        nvlinked: frozenset[str],
    ) -> bool:
        """Whether port `net` reaches the memory of `gpu`.

        Args:
            system: of the communicator.
            gpu: one of its GPUs.
            net: a port that it may use.
            distance: the type of their path; if another GPU sends for this one, of that one's.
            direction: `send` if the NIC reads the memory.
            nvlinked: the GPUs with an NVLink to another.
        """
        if (gpu, net) not in system.gpu_direct or distance > self.level:
            return False
        if direction == "receive" or self.read is not None:
            return direction == "receive" or bool(self.read)
        alone = len(system.gpus) == 1
        return alone or system.sm[gpu] >= _READS_BESIDE_PCI or gpu in nvlinked


def gpu_direct_rule(settings: Settings) -> GpuDirectRule:
    """The rule that a process with these settings follows."""
    facts = version_facts(settings.version)
    return GpuDirectRule(
        level=PathType[settings.net_gdr_level or facts.default_gdr_level],
        read=settings.net_gdr_read,
        relays_need_it=facts.relays_need_gpu_direct,
        over_c2c="P2C" not in facts.unknown_levels,
    )
