"""From a plan to the database of the TCCL fork's runtime, and what is lost on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from tccl_py.errors import InputError, MeasurementError
from tccl_py.model.machine import Machine, Nic
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.rings import Hop, Ring, ring
from tccl_py.model.transfer import Transfer, leaving, transfer_set
from tccl_py.nccl.pinned_env import pinned_level
from tccl_py.plan.plan import PlanChain
from tccl_py.plan.tasks import Order
from tccl_py.search.problem import Reporter, SilentReporter
from tccl_py.sources.memory import RememberingSource
from tccl_py.tccl_fork.chains import (
    MUCH_MEMORY,
    FoundParts,
    Landing,
    PlannedNode,
    SearchedChain,
    SearchedChains,
    all_ends,
    database_notes,
    landings,
    plan_channels,
    searched_chains,
)
from tccl_py.tccl_fork.checks import TABLE_CELLS, table_bytes, table_cells
from tccl_py.tccl_fork.database import (
    Crossing,
    Database,
    GpuRing,
    NodeChain,
    NodeChains,
    TypedTransfer,
    crossing,
    index_bits,
    mask_of,
    numa_ids,
    ring_transfers,
    typed_transfer,
)
from tccl_py.tccl_fork.rings import DatabaseTask, SearchedRings, searched_rings

MOST_CHANNELS = 15
"""The fork gives its rings channels of their own beside NCCL's, and has 32 less one for both."""
DEFAULT_MAX_SETS = 10_000
EVERY_LANDING_UP_TO = 50_000
"""Chains that a file may list; above that only the best of each set of GPUs is searched."""
MOST_MEMORY = 1 << 34
"""A table of chains that takes more is of no use; that of 8 GPUs takes 3.6 GiB."""


class MadeDatabase(msgspec.Struct, frozen=True, kw_only=True):
    """A database, and sentences on where it has less than the plan, or than could be."""

    database: Database
    notes: tuple[str, ...]
    sets_measured: int


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a database beyond the plan.

    `subsets` are the sets of GPUs that jobs use besides all, None being all subsets; `nic` the
    network port's number, None being the best; `max_sets` how many sets may be measured.
    """

    subsets: tuple[Order, ...] | None = None
    nic: int | None = None
    max_sets: int = DEFAULT_MAX_SETS


def make_database(
    plan: PlannedNode,
    source: BandwidthSource,
    *,
    export: Export | None = None,
    reporter: Reporter | None = None,
) -> MadeDatabase:
    """Search rings and chains for every set of a plan's GPUs, each hop by the mechanism it likes.

    Args:
        plan: of one machine, or of nodes that are all alike.
        source: answers transfer sets of that machine.
        export: what is asked beyond the plan.
        reporter: watches.

    Raises:
        InputError: GPUs or a NIC that are not the plan's, or indices too large for the fork.
        SourceLostError: the source has no answers any more.
        KeyboardInterrupt: it was interrupted.
    """
    export = export or Export()
    task = _task(plan, source, export, reporter or SilentReporter())
    nic = _nic(plan.machine, export.nic)
    rings = searched_rings(task)
    no_chains = _no_chains(task, nic)
    chains = None
    if nic is not None and not no_chains:
        every = _listed_chains(task, nic) <= EVERY_LANDING_UP_TO
        chains = searched_chains(task, nic, task.sets_of_gpus(least=1), every_landing=every)
    bits = _index_bits(task)
    if chains is None and table_bytes(_num_gpus(task), bits) > MUCH_MEMORY:
        # No crossing is encoded then, and the table that the fork makes all the same stays small.
        bits = 1
    parts = FoundParts(
        plan=plan,
        task=task,
        nic=nic,
        rings=rings,
        chains=chains,
        no_chains=no_chains,
        table_bytes=table_bytes(_num_gpus(task), bits),
    )
    return MadeDatabase(
        database=_database(task, rings, chains, bits),
        notes=tuple(database_notes(parts)),
        sets_measured=task.source.sets_measured,
    )


def _no_chains(task: DatabaseTask, nic: Nic | None) -> str:
    """Why there can be no chains, or ""."""
    if nic is None:
        return f"{task.machine.name} has no NIC"
    if table_bytes(_num_gpus(task), _index_bits(task)) > MOST_MEMORY:
        return (
            f"for GPU indices up to {max(task.gpus)} the fork's table of chains would be too large"
        )
    place = landings(task, nic, task.gpus)[0]
    through = None if place.in_gpu else place.index
    way_out = leaving(task.gpus[0], nic.index, through=through, blocks=task.blocks)
    try:
        task.source.measure([transfer_set([way_out])])
    except MeasurementError as error:
        return f"flows over the network cannot be measured here ({error})"
    return ""


def _task(
    plan: PlannedNode, source: BandwidthSource, export: Export, reporter: Reporter
) -> DatabaseTask:
    if table_cells(max(plan.gpus) + 1, 1) >= TABLE_CELLS:
        raise InputError(
            f"GPU {max(plan.gpus)}",
            "is too high an index for the fork",
            "0 to 21: it makes a table of all sets of GPUs and counts its cells in 32 bits",
        )
    for gpu in (gpu for subset in export.subsets or () for gpu in subset):
        if gpu not in plan.gpus:
            known = ", ".join(map(str, plan.gpus))
            raise InputError(f"GPU {gpu}", "is not in the plan", f"it has {known}")
    remembering = source if isinstance(source, RememberingSource) else RememberingSource(source)
    task = DatabaseTask(
        machine=plan.machine,
        knowledge=plan.knowledge,
        source=remembering,
        gpus=plan.gpus,
        subsets=export.subsets,
        blocks=min(plan_channels(plan), MOST_CHANNELS),
        fifo_bytes=plan.settings.buffsize,
        rings=(),
        max_sets=export.max_sets,
        reporter=reporter,
        p2p_level=pinned_level(plan.pinned_env),
    )
    rings = tuple(one for planned in plan.rings for one in _free(task, planned))
    return msgspec.structs.replace(task, rings=rings)


def _free(task: DatabaseTask, planned: PlanChain) -> Iterator[Ring]:
    """A ring of the plan with as many blocks a hop as the fork will use, if it can take it."""
    space = task.hop_space(task.gpus)
    hops: list[Hop] = []
    for one in planned.hops:
        wanted: tuple[Transfer, ...] = one.flow.transfers
        choices = space.between(one.source, one.target)
        hops += [choice for choice in choices if choice.flow.transfers == wanted]
    if len(hops) == len(planned.hops):
        yield ring(hops)


def _num_gpus(task: DatabaseTask) -> int:
    return max(task.gpus) + 1


def _num_numa(machine: Machine) -> int:
    return max(numa_ids(machine).values()) + 1


def _index_bits(task: DatabaseTask) -> int:
    return index_bits(_num_gpus(task), _num_numa(task.machine))


def _nic(machine: Machine, wanted: int | None) -> Nic | None:
    """The NIC to go by: the one asked for, or the fastest, one near GPUs' memory if there is."""
    if wanted is not None:
        found = [nic for nic in machine.nics if nic.index == wanted]
        if not found:
            known = ", ".join(str(nic.index) for nic in machine.nics) or "none"
            raise InputError(
                f"NIC {wanted}", f"is not in machine {machine.name}", f"it has {known}"
            )
        return found[0]
    return max(machine.nics, key=lambda nic: (nic.speed_mbps, nic.gdr, -nic.index), default=None)


# Databases


def _database(
    task: DatabaseTask, rings: SearchedRings, chains: SearchedChains | None, bits: int
) -> Database:
    numa = numa_ids(task.machine)
    intra = [
        GpuRing(
            mask=mask_of(gpus),
            gbps=_gbps(found.rate_gbps),
            transfers=ring_transfers(found.ring.hops, numa),
        )
        for gpus, found in rings.rings.items()
        if found.rate_gbps > 0
    ]
    inter = [] if chains is None else list(_inter(chains, numa))
    return Database(
        num_gpus=_num_gpus(task),
        num_numa=_num_numa(task.machine),
        num_bits=bits,
        intra=tuple(sorted(intra, key=lambda one: one.mask)),
        inter=tuple(sorted(inter, key=lambda one: one.mask)),
    )


def _inter(chains: SearchedChains, numa: Mapping[int, int]) -> Iterator[NodeChains]:
    """Every chain with each place where its bytes may come from and go to on other nodes.

    Nodes are alike, so these are the places where chains of the database begin and end.
    """
    listed = chains.listed
    entries = sorted({ends.entry for ends in listed})
    exits = sorted({ends.exit for ends in listed})
    for gpus in chains.best:
        found = [
            NodeChain(
                head=_crossing(before, ends.entry, numa),
                tail=_crossing(ends.exit, behind, numa),
                gbps=_gbps(one.rate_gbps),
                transfers=_chain_transfers(one, numa),
            )
            for ends, one in listed.items()
            if ends.gpus == gpus and one.rate_gbps > 0
            for before in exits
            for behind in entries
        ]
        yield NodeChains(mask=mask_of(gpus), chains=tuple(found))


def _gbps(rate: float) -> float:
    """A rate to six digits, as no measurement has more."""
    return float(f"{rate:.6g}")


def _crossing(leaves: Landing, lands: Landing, numa: Mapping[int, int]) -> Crossing:
    source, destination = (
        place.index if place.in_gpu else numa[place.index] for place in (leaves, lands)
    )
    return crossing(
        leaves_gpu=leaves.in_gpu,
        source=source,
        lands_in_gpu=lands.in_gpu,
        destination=destination,
    )


def _chain_transfers(one: SearchedChain, numa: Mapping[int, int]) -> tuple[TypedTransfer, ...]:
    """Transfers inside the node: the kernel's from where the NIC put the bytes, to where it takes
    them.
    """
    entry, way_out = one.chain.entry.flow, one.chain.exit.flow
    into = (typed_transfer(part, numa) for part in entry.transfers[1:])
    out = (typed_transfer(part, numa) for part in way_out.transfers[:-1])
    return (*into, *ring_transfers(one.chain.hops, numa), *out)


def _listed_chains(task: DatabaseTask, nic: Nic) -> int:
    """Chains in a file with every pair of landings: what each node's table has, for all others'."""
    places = len(landings(task, nic, task.gpus))
    own = sum(sum(1 for _ in all_ends(task, nic, one)) for one in task.sets_of_gpus(least=1))
    return own * places**2
