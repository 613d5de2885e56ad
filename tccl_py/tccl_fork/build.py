"""From a plan to the database of the TCCL fork's runtime, and notes on what the file lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from tccl_py.errors import InputError, MeasurementError
from tccl_py.model.machine import Machine, Nic
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.rings import ring
from tccl_py.model.transfer import leaving, transfer_set
from tccl_py.nccl.settings import final_channels
from tccl_py.nccl.variables import pinned_level
from tccl_py.plan.plan import Plan
from tccl_py.plan.tasks import Order
from tccl_py.search.problem import Reporter, SilentReporter
from tccl_py.sources.memory import RememberingSource
from tccl_py.tccl_fork.database import (
    TABLE_CELLS,
    Crossing,
    Database,
    GpuRing,
    NodeChain,
    NodeChains,
    TypedTransfer,
    index_bits,
    mask_of,
    numa_ids,
    ring_transfers,
    table_bytes,
    table_cells,
    typed_transfer,
)
from tccl_py.tccl_fork.search import (
    ALL_SETS_UP_TO,
    DatabaseSearch,
    DatabaseTask,
    Found,
    Landing,
    all_ends,
    landings,
)

MOST_CHANNELS = 15  # Besides NCCL's own: the fork has 32 less one for both
DEFAULT_MAX_SETS = 10_000
EVERY_LANDING_UP_TO = 50_000  # Chains of a file; above only the best of each set
MOST_MEMORY, MUCH_MEMORY = 1 << 34, 1 << 30  # Of the table of chains: useless, noted
_PROVEN = 1.01
_NAMED = 3  # Sets of GPUs without a ring or chain that are named


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """Sets of GPUs that jobs use (None: all), the NIC (None: the best), most sets measured."""

    subsets: tuple[Order, ...] | None = None
    nic: int | None = None
    max_sets: int = DEFAULT_MAX_SETS


class MadeDatabase(msgspec.Struct, frozen=True, kw_only=True):
    """A database, and notes on what it lacks of the plan or of the best possible."""

    database: Database
    notes: tuple[str, ...]
    sets_measured: int


def make_database(
    plan: Plan,
    source: BandwidthSource,
    *,
    export: Export | None = None,
    reporter: Reporter | None = None,
) -> MadeDatabase:
    """Search rings and chains for every set of a plan's GPUs, each hop by its fastest mechanism.

    InputError: hosts of several classes, a cluster that was measured, unknown GPUs or NIC, or
    indices too large for the fork.
    """
    export = export or Export()
    check_plan_for_fork(plan)
    task = _task(plan, source, export, reporter or SilentReporter())
    nic, count = _nic(task.machine, export.nic), max(task.gpus) + 1
    numa = numa_ids(task.machine)
    bits = index_bits(count, max(numa.values()) + 1)
    # 1. Search rings, and chains where the network can be measured.
    search = DatabaseSearch(task, nic)
    search.find_rings()
    no_chains = _no_chains(task, nic, table_bytes(count, bits))
    if nic is not None and not no_chains:
        # A file has every pair of landings here, with every pair elsewhere.
        own = sum(len([*all_ends(task, nic, gpus)]) for gpus in task.sets_of_gpus(least=1))
        listed = own * len(landings(task, nic, task.gpus)) ** 2
        search.find_chains(nic, every_landing=listed <= EVERY_LANDING_UP_TO)
    elif table_bytes(count, bits) > MUCH_MEMORY:
        # No crossing is encoded then: indices of one bit keep the fork's table small.
        bits = 1
    # 2. Write both in the fork's terms.
    intra = [
        GpuRing(
            mask=mask_of(gpus),
            gbps=_gbps(found.rate_gbps),
            transfers=ring_transfers(found.ring.hops, numa),
        )
        for gpus, found in search.rings.items()
    ]
    database = Database(
        num_gpus=count,
        num_numa=max(numa.values()) + 1,
        num_bits=bits,
        intra=tuple(sorted(intra, key=lambda entry: entry.mask)),
        inter=tuple(sorted(_inter(search, numa), key=lambda entry: entry.mask)),
    )
    memory = table_bytes(count, bits)
    notes = _notes(plan, task, search, nic=nic, no_chains=no_chains, memory=memory)
    return MadeDatabase(
        database=database, notes=tuple(notes), sets_measured=task.source.sets_measured
    )


def check_plan_for_fork(plan: Plan, *, where: str = "plan") -> None:
    """Refuse a plan that one database cannot serve, or whose further sets nobody can measure."""
    if len(plan.cluster.classes) > 1:
        what = f"has hosts of {len(plan.cluster.classes)} classes"
        right = "the fork has one database for all nodes: plan hosts of one class"
        raise InputError(where, what, right)
    if plan.is_cluster and not plan.simulated:
        what = "was measured over several hosts, and the file needs other sets"
        right = "plan one of the hosts alone: that plan's file has rings for jobs of one node"
        raise InputError(where, what, right)


def _task(plan: Plan, source: BandwidthSource, export: Export, reporter: Reporter) -> DatabaseTask:
    (node,), (gpus,) = plan.cluster.classes, plan.class_gpus
    if table_cells(max(gpus) + 1, 1) >= TABLE_CELLS:
        right = "0 to 21: it makes a table of all sets of GPUs and counts its cells in 32 bits"
        raise InputError(f"GPU {max(gpus)}", "is too high an index for the fork", right)
    for gpu in (gpu for subset in export.subsets or () for gpu in subset):
        if gpu not in gpus:
            known = ", ".join(map(str, gpus))
            raise InputError(f"GPU {gpu}", "is not in the plan", f"it has {known}")
    task = DatabaseTask(
        machine=node.machine,
        knowledge=node.knowledge,
        source=source if isinstance(source, RememberingSource) else RememberingSource(source),
        gpus=gpus,
        subsets=export.subsets,
        blocks=min(plan_channels(plan), MOST_CHANNELS),
        fifo_bytes=plan.settings.buffsize,
        rings=(),
        max_sets=export.max_sets,
        reporter=reporter,
        p2p_level=pinned_level(plan.pinned_env),
    )
    # The plan's rings with the fork's number of blocks, where the fork can use them.
    space, rings = task.hop_space(task.gpus), []
    for planned in () if plan.is_cluster else plan.rings:
        ways = (
            (hop, choice)
            for hop in planned.hops
            for choice in space.between(hop.source, hop.target)
        )
        hops = [way for hop, way in ways if way.flow.transfers == hop.flow.transfers]
        if len(hops) == len(planned.hops):
            rings.append(ring(hops))
    return msgspec.structs.replace(task, rings=tuple(rings))


def plan_channels(plan: Plan) -> int:
    """Return the number of channels that NCCL has under the plan's settings."""
    machine = plan.cluster.classes[0].machine
    sm = min((machine.gpu(gpu).sm or 0 for gpu in plan.class_gpus[0]), default=0)
    return final_channels(plan.settings.channels, sm=sm, version=plan.settings.version)


def _nic(machine: Machine, wanted: int | None) -> Nic | None:
    if wanted is not None:
        found = {nic.index: nic for nic in machine.nics}
        if wanted not in found:
            right = f"it has {', '.join(map(str, found)) or 'none'}"
            raise InputError(f"NIC {wanted}", f"is not in machine {machine.name}", right)
        return found[wanted]
    return max(machine.nics, key=lambda nic: (nic.speed_mbps, nic.gdr, -nic.index), default=None)


def _no_chains(task: DatabaseTask, nic: Nic | None, memory: int) -> str:
    if nic is None:
        return f"{task.machine.name} has no NIC"
    if memory > MOST_MEMORY:
        return f"for GPU indices up to {max(task.gpus)} the fork's table of chains is too large"
    place = landings(task, nic, task.gpus)[0]
    through = None if place.in_gpu else place.index
    way_out = leaving(task.gpus[0], nic.index, through=through, blocks=task.blocks)
    try:
        task.source.measure([transfer_set([way_out])])
    except MeasurementError as error:
        return f"flows over the network cannot be measured here ({error})"
    return ""


def _inter(search: DatabaseSearch, numa: Mapping[int, int]) -> Iterator[NodeChains]:
    """Yield every chain with each landing on other nodes, which are as those here."""
    listed = search.listed
    entries = sorted({ends.entries[0] for ends in listed})
    exits = sorted({ends.exits[0] for ends in listed})
    for gpus in search.best:
        found = [
            NodeChain(
                head=_crossing(before, ends.entries[0], numa),
                tail=_crossing(ends.exits[0], behind, numa),
                gbps=_gbps(chain.rate_gbps),
                transfers=_chain_transfers(chain, numa),
            )
            for ends, chain in listed.items()
            if ends.gpus == gpus
            for before in exits
            for behind in entries
        ]
        yield NodeChains(mask=mask_of(gpus), chains=tuple(found))


def _gbps(rate: float) -> float:
    return float(f"{rate:.6g}")


def _crossing(leaves: Landing, lands: Landing, numa: Mapping[int, int]) -> Crossing:
    places = (leaves, lands)
    numbers = (place.index if place.in_gpu else numa[place.index] for place in places)
    kinds = ("GPU" if place.in_gpu else "CPU" for place in places)
    return Crossing(f"{'_'.join(kinds)}_INTER", *numbers)


def _chain_transfers(found: Found, numa: Mapping[int, int]) -> tuple[TypedTransfer, ...]:
    chain = found.chain
    into = (typed_transfer(part, numa) for part in chain.entry.flow.transfers[1:])
    out = (typed_transfer(part, numa) for part in chain.exit.flow.transfers[:-1])
    return (*into, *ring_transfers(chain.hops, numa), *out)


def _notes(
    plan: Plan,
    task: DatabaseTask,
    search: DatabaseSearch,
    *,
    nic: Nic | None,
    no_chains: str,
    memory: int,
) -> Iterator[str]:
    """Yield notes for the user and the file's readers, most important first."""
    done = plan.provenance.partition(" ")[0].removesuffix(",")
    yield (
        f"rates {plan.provenance}, {task.source.sets_measured} sets {done} for this file; "
        f"run it with NCCL_ALGO=TCCL,RING NCCL_MIN_NCHANNELS={task.blocks} "
        f"NCCL_MAX_NCHANNELS={task.blocks} NCCL_BUFFSIZE={task.fifo_bytes}"
    )
    whole = search.rings.get(task.gpus)
    if whole is not None and (plan.ring_count > 1 or task.blocks < plan_channels(plan)):
        yield (
            f"the plan's {plan.rate_gbps:.2f} GB/s are those of {plan.ring_count} rings and "
            f"{plan_channels(plan)} channels; the fork has one ring and room for {MOST_CHANNELS} "
            f"channels: the ring here has {whole.rate_gbps:.2f}"
        )
    total = 2 ** len(task.gpus) - len(task.gpus) - 1
    left_out = total - len(search.rings) - len(search.missing_rings)
    if left_out:
        few = len(task.gpus) <= ALL_SETS_UP_TO
        why = "as requested" if few else f"above {ALL_SETS_UP_TO} GPUs only requested sets are in"
        yield (
            f"{left_out} of the {total} sets of GPUs that jobs can have are left out, "
            f"{why}: a job over such a set fails"
        )
    if no_chains:
        yield f"{no_chains}: there are no chains, and a job of several nodes fails"
    elif nic is not None:
        if len(task.machine.nics) > 1:
            yield f"the fork's database knows one NIC a node: run it with NCCL_IB_HCA={nic.name}"
        if search.best and not search.between:
            yield (
                "each set of GPUs has the chain between its best landings only: between equal "
                "nodes the fork chooses no other chain"
            )
    for kind, missing in (("ring", search.missing_rings), ("chain", search.missing_chains)):
        for gpus, why in list(missing.items())[:_NAMED]:
            yield f"no {kind} over GPUs {', '.join(map(str, gpus))}, and a job fails there: {why}"
        if len(missing) > _NAMED:
            yield f"no {kind} over {len(missing) - _NAMED} more sets of GPUs"
    yield from _unproven("rings", list(search.rings.values()))
    yield from _unproven("chains", list(search.listed.values()))
    if memory > MUCH_MEMORY:
        yield (
            f"the fork's runtime takes {memory / 2**30:.1f} GiB in every process for its table "
            "of chains"
        )


def _unproven(kind: str, found: Sequence[Found]) -> Iterator[str]:
    shares = [one.rate_gbps / one.bound_gbps for one in found if one.bound_gbps is not None]
    low = [share for share in shares if share * _PROVEN * (1 + 1e-9) < 1]
    if low:
        yield (
            f"{len(low)} of {len(found)} {kind} are not proven best; each has at least "
            f"{100 * min(low):.0f} % of the bound"
        )
    if len(shares) < len(found):
        yield (
            f"{len(found) - len(shares)} of {len(found)} {kind} have no bound: the sets that may "
            "be measured were used up"
        )
