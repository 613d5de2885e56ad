"""The file of the TCCL fork's runtime, made from a plan: rings and chains for sets of GPUs.

The fork (NCCL 2.18) reads the file behind TCCL_XML_FILE. A set of GPUs is a bit mask; bit i is the
GPU with NVML index i. The fork checks little of its file; tests hold files to its demands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import msgspec
from msgspec.structs import replace

from tccl_py.errors import InputError, MeasurementError, counted, require
from tccl_py.model.machine import Machine, Nic
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.rings import leaving
from tccl_py.model.transfer import Place, Transfer, transfer_set
from tccl_py.plan.again import NoSource, known_model, measured_again
from tccl_py.plan.parts import PlanChain, is_at_bound
from tccl_py.plan.plan import Plan
from tccl_py.plan.tables import HostTable, read_tables
from tccl_py.plan.tasks import Order
from tccl_py.search.problem import Reporter
from tccl_py.sources.opening import open_source
from tccl_py.sources.remembering import RememberingSource
from tccl_py.tccl_fork.search import (
    ALL_SETS_UP_TO,
    DEFAULT_MAX_SETS,
    MOST_CHANNELS,
    DatabaseSearch,
    DatabaseTask,
    Found,
    plan_channels,
    ring_of,
    task_of,
    throughs,
)

# Chains of the fork's database from the tables of a measured cluster: nothing is measured again.


def rates_of(
    plan: Plan, directory: Path, *, watch: Callable[[int], None]
) -> tuple[RememberingSource, list[HostTable], tuple[str, ...]]:
    """Return the source of a database's rates, or tables of a measured cluster, and notices.

    Raises InputError: a measured cluster without tables, another machine than the measured one, or
    a simulated plan without its model.
    """
    if plan.simulated:
        return open_source(known_model(plan, directory)), [], ()
    if not plan.is_cluster:
        source, notices = measured_again(plan, directory, otherwise="export it there")
        source.watch(watch)
        return source, [], notices
    tables = read_tables(directory, plan.cluster.classes)
    require(tables, str(directory), "has no tables of chains", "plan the cluster again")
    return RememberingSource(NoSource(simulated=False)), tables, ()


def kept_chains(
    task: DatabaseTask, tables: Sequence[HostTable], nic: int | None
) -> tuple[DatabaseSearch, int]:
    """Return the chains of tables for a task's sets of GPUs as found, by `nic` (None: the best).

    NIC, blocks and FIFOs are those with the most sets of GPUs, then the fastest chain over the most
    GPUs. Raises InputError: the fork could use no chain.
    """
    wanted = task.subsets or [table.gpus for table in tables]
    groups: dict[tuple[int, int, int], dict[Order, Found]] = {}
    every = (
        (table.gpus, settings.buffsize, chain)
        for table in tables
        for settings, chain in table.all_chains()
    )
    for gpus, fifo_bytes, chain in every:
        by, blocks = chain.entry_nic, chain.hops[0].flow.blocks or 1
        other = by is None or by != chain.exit_nic or by != (by if nic is None else nic)
        if other or blocks > MOST_CHANNELS or gpus not in wanted or not _can_be_set_up(chain):
            continue
        best = groups.setdefault((by or 0, blocks, fifo_bytes), {})
        if gpus not in best or chain.rate > best[gpus].rate_gbps:
            best[gpus] = Found(ring=ring_of(chain), rate_gbps=chain.rate, bound_gbps=None)
    what = "have no chain that enters and leaves by one NIC" + f" {nic}" * (nic is not None)
    require(groups, "the plan's tables", what, "name another NIC, or plan the cluster again")

    def worth(key: tuple[int, int, int]) -> tuple[int, float]:
        found = groups[key]
        return len(found), found[max(found, key=len)].rate_gbps

    by, blocks, fifo_bytes = key = max(groups, key=worth)
    search = DatabaseSearch(replace(task, blocks=blocks, fifo_bytes=fifo_bytes))
    search.chains = groups[key]
    search.missing_chains = {g: "no table has one" for g in wanted if g not in search.chains}
    return search, by


def _can_be_set_up(chain: PlanChain) -> bool:
    """Return whether the fork has names for all transfers, and one of them names each GPU."""
    into, *inner, out = (hop.flow.transfers for hop in chain.hops)
    moved = [*into[1:], *(transfer for hop in inner for transfer in hop), *out[:-1]]
    # Reads by copy engines are known to the fork's reader, but not set up.
    return bool(moved) and not any(
        one.operation == "read" and one.uses_copy_engine and one.source.kind == "G" for one in moved
    )


MOST_MEMORY, MUCH_MEMORY = 1 << 34, 1 << 30  # Of the table of chains: useless, noted
_NAMED = 3  # Sets of GPUs without a ring or chain that are named
_TYPES: dict[tuple[str, str], str] = {
    ("write", "GG"): "GPU_WRITE_GPUMEM",
    ("read", "GG"): "GPU_READ_GPUMEM",
    ("write", "GC"): "GPU_WRITE_CPUMEM",
    ("read", "CG"): "GPU_READ_CPUMEM",
}


class ForkFile(msgspec.Struct, frozen=True, kw_only=True):
    """The fork's file, its counts, and notes on what it lacks of the plan or of the best."""

    text: str
    rings: int
    chains: int
    notes: tuple[str, ...]
    sets_measured: int


def make_database(
    plan: Plan,
    source: BandwidthSource,
    *,
    subsets: tuple[Order, ...] | None = None,
    nic: int | None = None,
    max_sets: int = DEFAULT_MAX_SETS,
    reporter: Reporter | None = None,
    tables: Sequence[HostTable] = (),
) -> ForkFile:
    """Search rings and chains for every set of a plan's GPUs, each hop by its fastest mechanism.

    Args:
        plan: of one host, or of hosts of one class.
        source: answers transfer sets of a host.
        subsets: sets of GPUs that jobs use; None is all, of up to ALL_SETS_UP_TO GPUs.
        nic: the NIC of all chains; None is the best.
        max_sets: after so many measured sets only known rings are tried.
        reporter: watches the searches.
        tables: of a measured cluster: they give chains alone, and nothing is searched.

    Raises InputError: hosts of several classes, unknown GPUs or NIC, indices too large for the
    fork, or no chain in tables.
    """
    search = DatabaseSearch(task_of(plan, source, subsets, max_sets, reporter))
    if tables:
        search, nic = kept_chains(search.task, tables, nic)
    else:
        search.find_rings()
    task = search.task
    chosen, count, numa = _nic(task.machine, nic), max(task.gpus) + 1, numa_ids(task.machine)
    sizes = count, max(numa.values()) + 1
    bits = index_bits(*sizes)
    no_chains = _no_chains(task, chosen, table_bytes(count, bits), known=bool(tables))
    if no_chains:
        search.chains, search.missing_chains = {}, {}
        # No crossing is encoded then: indices of one bit keep the fork's table small.
        bits = 1 if table_bytes(count, bits) > MUCH_MEMORY else bits
    elif chosen is not None and not tables:
        search.find_chains(chosen)
    memory = table_bytes(count, bits)
    notes = tuple(
        _notes(
            plan, task, search, nic=chosen, no_chains=no_chains, memory=memory, kept=bool(tables)
        )
    )
    rings = [(gpus, [_ring_lines(found, numa)]) for gpus, found in search.rings.items()]
    chains = list(_chains(search.chains, numa))
    lines = [
        "<root>",
        *(f"  <!-- {comment(note)} -->" for note in notes),
        '  <metadata num_gpus="{}" num_numa="{}" num_bits_idx="{}"/>'.format(*sizes, bits),
        *("  <intra>", *_subsets(rings), "  </intra>"),
        *("  <inter>", *_subsets(chains), "  </inter>"),
        "</root>\n",
    ]
    return ForkFile(
        text="\n".join(lines),
        rings=len(rings),
        chains=sum(len(found) for _, found in chains),
        notes=notes,
        sets_measured=task.source.sets_measured,
    )


def mask_of(gpus: Iterable[int]) -> int:
    """Return the bit mask of a set of GPUs."""
    return sum(1 << gpu for gpu in set(gpus))


def index_bits(num_gpus: int, num_numa: int) -> int:
    """Return the bits of an index in a crossing, at least 1."""
    return max(1, (max(num_gpus, num_numa) - 1).bit_length())


def table_bytes(num_gpus: int, num_bits: int) -> int:
    """Return the memory in every process of a job of the fork's table: set x head x tail."""
    # A cell is a struct of 24 bytes and 2 x GPUs transfers of 12 bytes; malloc adds 8.
    transfers = -(-(2 * num_gpus * 12 + 8) // 16) * 16
    return int(2 ** (num_gpus + 4 + 4 * num_bits)) * (24 + transfers)


def numa_ids(machine: Machine) -> dict[int, int]:
    """Return the system's number of each NUMA node, for the kernel; indices where it has none."""
    ids = {node.index: node.numa_id for node in machine.numa_nodes}
    known = min(ids.values()) >= 0 and len(set(ids.values())) == len(ids)
    return ids if known else {index: index for index in ids}


# The fork's terms. Types are as `GPU_WRITE_CPUMEM_KERNEL`: READ or WRITE, of GPUMEM or CPUMEM, by a
# KERNEL or a copy engine (MEMCPY); of a crossing to the next node as `GPU_CPU_INTER`, from GPU
# memory to host memory there.


def typed(transfer: Transfer) -> str:
    """Return the fork's type of a transfer inside a node.

    >>> from tccl_py.model.transfer import parse_flow
    >>> [typed(one) for one in parse_flow("G0->G0->C1->G4->G4").transfers]
    ['GPU_WRITE_CPUMEM_KERNEL', 'GPU_READ_CPUMEM_KERNEL']

    Raises InputError: the fork has no name for it.
    """
    source, destination = transfer.source, transfer.destination
    name = _TYPES.get((transfer.operation, f"{source.kind}{destination.kind}"))
    if name is None or source.host or destination.host:
        right = "GPUs of one node write or read GPU memory, write host memory, or read it"
        what = "is none that the TCCL fork has a name for"
        raise InputError(f"transfer {str(transfer)[:60]!r}", what, right)
    return f"{name}_{'MEMCPY' if transfer.uses_copy_engine else 'KERNEL'}"


def _named(
    kind: str, source: Place, destination: Place, numa: Mapping[int, int], prefix: str = ""
) -> str:
    """Return a movement as attributes; indices are of GPUs, or of NUMA nodes by the system."""
    values = [kind, *(numa[p.index] if p.kind == "C" else p.index for p in (source, destination))]
    keys = zip(("type", "src_idx", "dst_idx"), values, strict=True)
    return " ".join(f'{prefix}{key}="{value}"' for key, value in keys)


def _crossing(name: str, leaves: Place, lands: Place, numa: Mapping[int, int]) -> str:
    kinds = ("CPU" if place.kind == "C" else "GPU" for place in (leaves, lands))
    return _named(f"{'_'.join(kinds)}_INTER", leaves, lands, numa, f"{name}_")


def _lines(
    rate_gbps: float, transfers: Iterable[Transfer], numa: Mapping[int, int], *ends: str
) -> list[str]:
    # repr is the shortest text that is read as the same number.
    rate = f'gbps="{float(f"{rate_gbps:.6g}")!r}"'
    moved = [_named(typed(one), one.source, one.destination, numa) for one in transfers]
    return [
        f"      <transfers {' '.join((rate, *ends))}>",
        *(f"        <transfer {text}/>" for text in moved),
        "      </transfers>",
    ]


def _ring_lines(found: Found, numa: Mapping[int, int]) -> list[str]:
    transfers = (one for hop in found.ring.hops for one in hop.flow.transfers)
    return _lines(found.rate_gbps, transfers, numa)


def _chains(
    chains: Mapping[Order, Found], numa: Mapping[int, int]
) -> Iterator[tuple[Order, list[list[str]]]]:
    """Yield every chain with each landing on other nodes, which are as those here."""
    ends = [found.landings for found in chains.values()]
    entries, exits = sorted({into for into, _ in ends}), sorted({out for _, out in ends})
    for gpus, found in chains.items():
        lands, leaves = found.landings
        into, *hops, out = (hop.flow.transfers for hop in found.ring.hops)
        transfers = [*into[1:], *(one for hop in hops for one in hop), *out[:-1]]
        crossed = (
            (_crossing("head", before, lands, numa), _crossing("tail", leaves, behind, numa))
            for before in exits
            for behind in entries
        )
        yield gpus, [_lines(found.rate_gbps, transfers, numa, *pair) for pair in crossed]


def _subsets(parts: Iterable[tuple[Order, list[list[str]]]]) -> Iterator[str]:
    for mask, found in sorted((mask_of(gpus), found) for gpus, found in parts):
        yield f'    <subset gpus="{mask}">'
        for lines in found:
            yield from lines
        yield "    </subset>"


def comment(note: str) -> str:
    """Return a note as one line of a comment: two hyphens would end it for the fork's parser."""
    text = " ".join(escape(note).split())
    while "--" in text:
        text = text.replace("--", "- -")
    return "".join(part if part.isprintable() else "?" for part in text).rstrip("-")


def _nic(machine: Machine, wanted: int | None) -> Nic | None:
    if wanted is not None:
        found = {nic.index: nic for nic in machine.nics}
        right = f"it has {', '.join(map(str, found)) or 'none'}"
        require(wanted in found, f"NIC {wanted}", f"is not in machine {machine.name}", right)
        return found[wanted]
    return max(machine.nics, key=lambda nic: (nic.speed_mbps, nic.gdr, -nic.index), default=None)


def _no_chains(task: DatabaseTask, nic: Nic | None, memory: int, *, known: bool) -> str:
    """Return why there are no chains; `known` chains need no measurement."""
    if nic is None:
        return f"{task.machine.name} has no NIC"
    if memory > MOST_MEMORY:
        return f"for GPU indices up to {max(task.gpus)} the fork's table of chains is too large"
    if known:
        return ""
    first = task.gpus[0]
    through = throughs(task, nic, first)[0]
    way_out = leaving(first, nic.index, through=through, blocks=task.blocks)
    try:
        task.source.measure([transfer_set([way_out])])
    except MeasurementError as error:
        return f"flows over the network cannot be measured here ({error})"
    return ""


# Notes on what the file lacks.


def _notes(
    plan: Plan,
    task: DatabaseTask,
    search: DatabaseSearch,
    *,
    nic: Nic | None,
    no_chains: str,
    memory: int,
    kept: bool,
) -> Iterator[str]:
    """Yield notes for the user and the file's readers, most important first."""
    done = plan.provenance.partition(" ")[0].removesuffix(",")
    yield (
        f"rates {plan.provenance}, {counted(task.source.sets_measured, 'set')} {done} for this "
        f"file; run it with NCCL_ALGO=TCCL,RING NCCL_MIN_NCHANNELS={task.blocks} "
        f"NCCL_MAX_NCHANNELS={task.blocks} NCCL_BUFFSIZE={task.fifo_bytes}"
    )
    whole = search.rings.get(task.gpus)
    if whole is not None and (plan.ring_count > 1 or task.blocks < plan_channels(plan)):
        yield (
            f"the plan's {plan.rate_gbps:.2f} GB/s are those of {counted(plan.ring_count, 'ring')} "
            f"and {plan_channels(plan)} channels; the fork has one ring and room for "
            f"{MOST_CHANNELS} channels: the ring here has {whole.rate_gbps:.2f}"
        )
    total = 2 ** len(task.gpus) - len(task.gpus) - 1
    left_out = total - len(search.rings) - len(search.missing_rings)
    if kept:
        yield (
            "chains are those of the plan's tables, by NCCL's mechanisms; there are no rings "
            "inside a node, and a job of one node fails: export the plan of one host for it"
        )
    elif left_out:
        few = len(task.gpus) <= ALL_SETS_UP_TO
        why = "as requested" if few else f"above {ALL_SETS_UP_TO} GPUs only requested sets are in"
        yield (
            f"{left_out} of the {total} sets of GPUs that jobs can have are left out, "
            f"{why}: a job over such a set fails"
        )
    if no_chains:
        yield f"{no_chains}: there are no chains, and a job of several nodes fails"
    elif nic is not None and len(task.machine.nics) > 1:
        yield f"the fork's database knows one NIC a node: run it with NCCL_IB_HCA={nic.name}"
    for kind, missing in (("ring", search.missing_rings), ("chain", search.missing_chains)):
        for gpus, why in list(missing.items())[:_NAMED]:
            yield f"no {kind} over GPUs {', '.join(map(str, gpus))}, and a job fails there: {why}"
        if len(missing) > _NAMED:
            yield f"no {kind} over {len(missing) - _NAMED} more sets of GPUs"
    for kind, all_ in (("rings", search.rings), ("chains", search.chains)) if not kept else ():
        if open_ := sum(not is_at_bound(one.rate_gbps, one.bound_gbps) for one in all_.values()):
            yield f"{open_} of {len(all_)} {kind} are not proven best"
    if memory > MUCH_MEMORY:
        yield (
            f"the fork's runtime takes {memory / 2**30:.1f} GiB in every process for its table "
            "of chains"
        )
