"""Knowledge: what is known about a Machine beyond its structure, each fact with its provenance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.machine import Machine

Provenance = Literal["measured", "published", "assumed", "reported"]
"""`reported` is what the system says of itself (NVML, sysfs); `assumed` has no figure behind it."""


class PeerAccess(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether the driver calls direct access from one GPU to another supported."""

    source: int
    target: int
    supported: bool
    provenance: Provenance


class HiddenLink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A path that the PCI tree does not show, such as two virtual switches on one chip."""

    one: str
    other: str
    provenance: Provenance
    note: str = ""


class Knowledge(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts about one machine; `peer_access_default` holds for pairs that are not listed."""

    peer_access_default: bool = True
    peer_access_provenance: Provenance = "assumed"
    peer_access: tuple[PeerAccess, ...] = ()
    hidden_links: tuple[HiddenLink, ...] = ()

    def can_access(self, machine: Machine, source: int, target: int) -> bool:
        """Whether GPU `source` can read and write GPU `target`'s memory directly.

        NVLinked neighbours always can, whatever the default is.
        """
        for fact in self.peer_access:
            if (fact.source, fact.target) == (source, target):
                return fact.supported
        if self.peer_access_default:
            return True
        return _nvlinked(machine, f"G{source}", f"G{target}")


def _nvlinked(machine: Machine, one: str, other: str) -> bool:
    direct = {frozenset((link.source, link.target)) for link in machine.nvlinks}
    if frozenset((one, other)) in direct:
        return True
    switches = [switch.id for switch in machine.nvswitches]
    return any({frozenset((one, s)), frozenset((other, s))} <= direct for s in switches)


def check_knowledge(knowledge: Knowledge, machine: Machine, *, where: str) -> Knowledge:
    """Return `knowledge` if it speaks of this machine's devices only.

    Raises:
        InputError: an unknown GPU or an unknown end of a hidden link.
    """
    for fact in knowledge.peer_access:
        for index in (fact.source, fact.target):
            if index not in machine.gpu_indices:
                raise InputError(where, f"speaks of GPU {index}", f"{machine.name} has no such GPU")
    for link in knowledge.hidden_links:
        for end in (link.one, link.other):
            if end not in machine.graph:
                raise InputError(where, f"a hidden link ends at {end}", "name a device or bus id")
    return knowledge


# The Fingerprint: what tells one host at one time from another, to see whether it has changed.


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Identity of a host's GPUs, driver and kernel; measurements hold for equal ones only."""

    gpu_uuids: tuple[str, ...]
    driver: str
    numa_count: int
    kernel: str


# Which GPUs stand beside which NICs.


def gpus_beside_nics(machine: Machine, nics: Sequence[int]) -> dict[int, int]:
    """A GPU for each NIC: below as many of the same bridges as can be, and each its own if it can.

    >>> from tccl_py.model.machine import toy_machine
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
