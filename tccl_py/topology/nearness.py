"""Which GPUs stand beside which NICs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tccl_py.topology.machine import Machine


def gpus_beside_nics(machine: Machine, nics: Sequence[int]) -> dict[int, int]:
    """A GPU for each NIC: below as many of the same bridges as can be, and each its own if it can.

    >>> from tccl_py.topology.machine import toy_machine
    >>> gpus_beside_nics(toy_machine(gpus=4), ())
    {}
    """
    users: Counter[int] = Counter()
    found = {}
    for nic in nics:
        above = set(machine.ancestors(f"N{nic}"))

        def far(gpu: int, above: set[str] = above) -> tuple[int, int, int]:
            shared = len(above.intersection(machine.ancestors(f"G{gpu}")))
            return -shared, users[gpu], gpu

        found[nic] = min(machine.gpu_indices, key=far)
        users[found[nic]] += 1
    return found
