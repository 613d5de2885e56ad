"""A machine model: a Machine with capacities and congestion rules, all of it data.

A capacity bounds the traffic over one place (each direction of a link, both directions together,
the memory of a NUMA node). A congestion rule describes a pattern of transfers that get less than
sharing alone would give them, and what they get. Nothing here names a machine or a transfer set:
a rate follows from routes, capacities and rules.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tccl_py.model.knowledge import Knowledge, Provenance
from tccl_py.model.machine import Machine

MODEL_VERSION = 1

LinkKind = Literal["pci", "smp", "nvlink", "xgmi", "c2c", "hidden"]
Key = Literal[
    "transfer", "source_gpu", "source_uplink", "destination_root", "memory", "executor_gpu"
]
"""What transfers are grouped by and counted by: see `tccl_py.simulator.routes.Leg`."""


class _Data(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What all parts of a model have in common."""


class Figure(_Data, frozen=True, kw_only=True):
    """A number with its provenance: given here or by the shared parameter of that name.

    Its value is (`value` or the parameter) x `scale` x the parameters in `times`. `provenance`
    speaks of this machine: a parameter measured elsewhere is `assumed` here.
    """

    provenance: Provenance
    value: float | None = None
    parameter: str | None = None
    scale: float = 1.0
    times: tuple[str, ...] = ()


class Traffic(_Data, frozen=True, kw_only=True):
    """Which transfers are meant; a field left at `any` asks nothing.

    path: `peer` is GPU to GPU, `host` has host memory at one end, `bounce` is half of a bounce,
        `network` has a NIC at one end.
    crosses: the farthest it goes, `socket`, `numa` (within a socket) or `nothing`.
    memory: host memory on the executor's `own` NUMA node or on an `other`.
    """

    operation: Literal["any", "write", "read"] = "any"
    path: Literal["any", "peer", "host", "bounce", "network"] = "any"
    crosses: Literal["any", "socket", "numa", "nothing"] = "any"
    memory: Literal["any", "own", "other"] = "any"
    executor: Literal["any", "kernel", "copy_engine"] = "any"


class Links(_Data, frozen=True, kw_only=True, tag="links"):
    """Links of the machine's graph.

    devices: PCI links above these devices, other links that end at them; empty is all.
    between: if given, only the link that joins these two devices.
    position: `root_port` is a PCI link that ends at a CPU.
    span: of `smp` links, those between sockets or those between NUMA nodes of one socket.
    way: `each` direction is a place of its own, or `both` together are one, or only the one `out`
        of the device below or the GPU, or the one `in`.
    """

    kinds: tuple[LinkKind, ...]
    devices: tuple[str, ...] = ()
    between: tuple[str, str] | None = None
    position: Literal["any", "root_port"] = "any"
    span: Literal["any", "socket", "numa"] = "any"
    way: Literal["each", "both", "out", "in"] = "each"


class Memory(_Data, frozen=True, kw_only=True, tag="memory"):
    """Host memory, one place a NUMA node; empty `numa_nodes` is all."""

    numa_nodes: tuple[int, ...] = ()


class Capacity(_Data, frozen=True, kw_only=True):
    """What the counted traffic over each of these places gets at most, in GB/s.

    `write` and `read` bound each operation's sum and `mixed` the sum of both where both occur;
    `write_in_mix` and `read_in_mix` replace `write` and `read` there. The lowest bound holds.
    """

    name: str
    at: Links | Memory
    counts: Traffic = Traffic()
    write: Figure | None = None
    read: Figure | None = None
    mixed: Figure | None = None
    write_in_mix: Figure | None = None
    read_in_mix: Figure | None = None
    note: str = ""


class Member(_Data, frozen=True, kw_only=True):
    """One kind of transfer in a congestion rule, and what the group gets if it takes part."""

    traffic: Traffic
    total: Figure | None = None
    each: Figure | None = None


class Congestion(_Data, frozen=True, kw_only=True):
    """A pattern that gets less than sharing alone would give.

    Transfers that match a member and have the same `together_at` form a group. The rule holds
    for a group with at least so many different values of each key in `at_least` and, if `needs`
    is `every`, a transfer of every member. Then the lowest `total` of the members present bounds
    the group's sum, and `each` every transfer of that member.
    """

    name: str
    members: tuple[Member, ...]
    together_at: Key
    at_least: dict[Key, int] = {}
    needs: Literal["any", "every"] = "any"
    note: str = ""


class ExecutorLimit(_Data, frozen=True, kw_only=True):
    """What the executor of one flow reaches by itself, in GB/s.

    A block moves `per_block`; a bounce's block waits `latency_us` for each FIFO (a kernel) or
    slot (a copy engine) it fills: size / (latency + size / per_block). Blocks add up and bend
    into `ceiling`: (sum^-p + ceiling^-p)^(-1/p) with p = `sharpness`. A flow that names no
    blocks uses as many as it takes and gets the ceiling; a copy engine counts as one block.
    """

    name: str
    executor: Literal["kernel", "copy_engine"]
    path: Literal["direct", "bounce"]
    over: Literal["any", "nvlink", "pci"] = "any"
    operation: Literal["any", "write", "read"] = "any"
    per_block: Figure | None = None
    latency_us: Figure | None = None
    ceiling: Figure | None = None
    sharpness: float = 16.0
    note: str = ""


class FifoCache(_Data, frozen=True, kw_only=True):
    """Bounces against the part of a NUMA node's cache that device traffic may fill.

    With all FIFOs of a set on one node together F MiB, a share min(1, `cache_mib` / F) of their
    traffic stays in the cache and is bounded by `write` and `read`; the rest meets the memory's
    own capacities. A flow that names no blocks has `default_blocks` FIFOs. Buffers of plain
    transfers count as FIFOs; a write and a read share theirs.
    """

    cache_mib: Figure
    write: Figure
    read: Figure
    default_blocks: int = 4
    note: str = ""


class MachineModel(_Data, frozen=True, kw_only=True):
    """A Machine, what is known about it, and what its parts can carry."""

    format_version: int
    name: str
    note: str = ""
    source: str = ""
    machine: Machine
    knowledge: Knowledge
    capacities: tuple[Capacity, ...]
    congestion: tuple[Congestion, ...] = ()
    executors: tuple[ExecutorLimit, ...] = ()
    fifo_cache: FifoCache | None = None


def without_congestion(model: MachineModel) -> MachineModel:
    """The model with sharing alone: what a collapse is compared with."""
    return msgspec.structs.replace(model, congestion=())
