"""Knowledge: facts about a Machine beyond the structure, with provenance; and the machine file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import encode_json
from tccl_py.model.machine import Machine

Provenance = Literal["measured", "published", "assumed", "reported"]
"""`reported` by the system (NVML, sysfs); `assumed` by nobody's measurement."""


class PeerAccess(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The driver's answer about direct access from a GPU to another GPU."""

    source: int
    target: int
    supported: bool
    provenance: Provenance


class HiddenLink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A path missing in the PCI tree, such as between two virtual switches of a chip."""

    one: str
    other: str
    provenance: Provenance
    note: str = ""


class Knowledge(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts about one machine; `peer_access_default` holds for unlisted pairs."""

    peer_access_default: bool = True
    peer_access_provenance: Provenance = "assumed"
    peer_access: tuple[PeerAccess, ...] = ()
    hidden_links: tuple[HiddenLink, ...] = ()

    def can_access(self, machine: Machine, source: int, target: int) -> bool:
        """Return whether a GPU can use another's memory directly; NVLinked ones always can."""
        for fact in self.peer_access:
            if (fact.source, fact.target) == (source, target):
                return fact.supported
        ends = (f"G{source}", f"G{target}")
        linked = {frozenset((link.source, link.target)) for link in machine.nvlinks}
        paths = [{frozenset((end, s.id)) for end in ends} for s in machine.nvswitches]
        nvlinked = frozenset(ends) in linked or any(path <= linked for path in paths)
        return self.peer_access_default or nvlinked


def check_knowledge(knowledge: Knowledge, machine: Machine, *, where: str) -> Knowledge:
    """Return `knowledge` if it names this machine's devices only (InputError)."""
    for fact in knowledge.peer_access:
        for index in (fact.source, fact.target):
            if index not in machine.gpu_indices:
                raise InputError(where, f"speaks of GPU {index}", f"{machine.name} has no such GPU")
    for link in knowledge.hidden_links:
        for end in (link.one, link.other):
            if end not in machine.graph:
                raise InputError(where, f"a hidden link ends at {end}", "name a device or bus id")
    return knowledge


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Identity of a host's GPUs, driver and kernel; measurements hold for equal ones only."""

    gpu_uuids: tuple[str, ...]
    driver: str
    numa_count: int
    kernel: str


class DiscoveredMachine(Machine, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A Machine with Knowledge and Fingerprint: the file format of `tccl discover`."""

    knowledge: Knowledge | msgspec.UnsetType = msgspec.UNSET
    fingerprint: Fingerprint | msgspec.UnsetType = msgspec.UNSET


def description_to_json(
    machine: Machine, knowledge: Knowledge | None = None, fingerprint: Fingerprint | None = None
) -> str:
    """Encode a machine's file; `tccl_py.load_machine` reads it."""
    fields = {name: getattr(machine, name) for name in Machine.__struct_fields__}
    found = DiscoveredMachine(
        **fields, knowledge=knowledge or msgspec.UNSET, fingerprint=fingerprint or msgspec.UNSET
    )
    return encode_json(found)


def gpus_beside_nics(machine: Machine, nics: Sequence[int]) -> dict[int, int]:
    """Return a GPU for each NIC: below as many common bridges as possible, its own if possible."""
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
