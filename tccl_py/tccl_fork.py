"""The file of the TCCL fork's runtime: a plan's rings, or a cluster's chains, for sets of GPUs.

The fork (NCCL 2.18) reads the file behind TCCL_XML_FILE. A set of GPUs is a bit mask; bit i is the
GPU with NVML index i. The fork checks little of its file; tests hold files to its demands.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

import msgspec

from tccl_py.errors import require, spell
from tccl_py.model.cluster import gpus_text
from tccl_py.model.machine import Machine
from tccl_py.model.rings import Hop, ring_like
from tccl_py.model.symmetry import Permutation, automorphisms, images_of_gpus, relabelled_hop
from tccl_py.model.transfer import Flow, Place, Transfer
from tccl_py.nccl.network import Pairing, symmetry_keeping
from tccl_py.nccl.transport import blocks_of_ring, hop_space
from tccl_py.nccl.view import view
from tccl_py.plan.chains import PlanChain, SubsetRings
from tccl_py.plan.plan import Plan
from tccl_py.plan.tables import FORK_CHANNELS, ClassRates
from tccl_py.planning.parts import ALL_SUBSETS_UP_TO
from tccl_py.planning.request import EVERY_SET

MOST_MEMORY, MUCH_MEMORY = 1 << 34, 1 << 30  # Of the fork's table: refused, noted
_NAMED = 16
"""Sets of GPUs without a path that a note names."""
_ENDS = {"write": ("GG", "GC"), "read": ("GG", "CG")}
"""The memories between which a GPU writes or reads: of GPUs, or of the host."""


class ForkPath(msgspec.Struct, frozen=True, kw_only=True):
    """The ring over a set of GPUs inside a node, or the chain through the node; GB/s.

    `ends` are the memory that a NIC fills for a chain, and the memory that a NIC empties.
    """

    gpus: tuple[int, ...]
    rate_gbps: float
    transfers: tuple[Transfer, ...]
    ends: tuple[Place, Place] | None = None
    is_image: bool = False
    """Whether the machine's symmetry maps GPUs that were searched to these."""


class ForkPaths(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of one number of thread blocks, and one size of FIFOs; chains use one NIC."""

    rings: tuple[ForkPath, ...]
    """Inside a node."""
    chains: tuple[ForkPath, ...] = ()
    """Through a node."""
    blocks: int
    fifo_bytes: int
    nic: int | None = None


class ForkFile(msgspec.Struct, frozen=True, kw_only=True):
    """The fork's file, its number of rings or chains, and notes on its limits."""

    text: str
    paths: int
    notes: tuple[str, ...]


def fork_file(plan: Plan, tables: Sequence[ClassRates] = ()) -> ForkFile:
    """Return the file with the rings of a machine's plan, or what a cluster's tables have.

    Raises InputError: hosts of several classes, no chain, or paths that the fork cannot have.
    """
    classes = len(plan.cluster.classes)
    right = "the fork has one database for all nodes: plan hosts of one class"
    require(classes == 1, "plan", f"has hosts of {classes} classes", right)
    machine = plan.cluster.classes[0].machine
    written = chains_of(tables) if tables else rings_of(plan)
    numa = numa_ids(machine)
    sizes = max(plan.class_gpus[0]) + 1, max(numa.values()) + 1
    # Rings have no crossings between nodes: indices of one bit keep the fork's table small.
    bits = index_bits(*sizes) if tables else 1
    memory = table_bytes(sizes[0], bits)
    what = f"the fork's table takes {memory / 2**30:.1f} GiB in every process"
    right = "plan GPUs of lower indices"
    require(memory <= MOST_MEMORY, f"GPU {sizes[0] - 1}", f"is too high an index: {what}", right)
    notes = [*_notes(plan, written, machine), *([what] if memory > MUCH_MEMORY else [])]
    rings, chains = (list(_subsets(paths, numa)) for paths in (written.rings, written.chains))
    lines = [
        "<root>",
        *(f"  <!-- {comment(note)} -->" for note in notes),
        '  <metadata num_gpus="{}" num_numa="{}" num_bits_idx="{}"/>'.format(*sizes, bits),
        *("  <intra>", *rings, "  </intra>", "  <inter>", *chains, "  </inter>"),
        "</root>\n",
    ]
    count = len(written.rings) + len(written.chains)
    return ForkFile(text="\n".join(lines), paths=count, notes=tuple(notes))


def rings_of(plan: Plan) -> ForkPaths:
    """Return a plan's fastest ring over its GPUs, and the first over each smaller set."""
    whole = max(plan.rings, key=lambda ring: ring.rate_gbps)
    network = any(hop.flow.is_network for hop in whole.hops)
    right = "name the cluster's plan: a job's files have no tables"
    require(not network, "plan", "has no tables of chains", right)
    rings = [(plan.gpus, [hop.flow for hop in whole.hops], whole.rate_gbps)]
    planned = [subset for subset in plan.subsets if subset.rings]
    rings += [(s.gpus, _flows(plan, s), s.rate_gbps / len(s.rings)) for s in planned]
    paths = [
        ForkPath(gpus=gpus, rate_gbps=rate, transfers=tuple(t for f in flows for t in f.transfers))
        for gpus, flows, rate in rings
    ]
    blocks, size = min(plan_channels(plan), FORK_CHANNELS), plan.settings.buffsize
    return ForkPaths(rings=tuple(paths), blocks=blocks, fifo_bytes=size)


def plan_channels(plan: Plan) -> int:
    """Return the number of channels that NCCL has under the settings of a machine's plan."""
    return blocks_of_ring(view(plan.machine, plan.knowledge, plan.settings, gpus=plan.gpus), 1)


def chains_of(tables: Sequence[ClassRates]) -> ForkPaths:
    """Return the fastest chain and the fastest ring over each set of GPUs of a cluster's tables.

    Sets to which the machine's symmetry maps those of a table have its chains and rings as well.
    NIC, blocks and FIFOs are those with the most sets of GPUs, then the fastest chain over the most
    GPUs. Raises InputError: the fork could use no chain.
    """
    host = tables[0].node_class
    symmetry = automorphisms(host.machine, host.knowledge)

    @functools.cache
    def images(nic: int | None, gpus: tuple[int, ...]) -> dict[tuple[int, ...], Permutation]:
        keeping = symmetry if nic is None else symmetry_keeping(symmetry, Pairing(((nic, nic),)))
        return images_of_gpus(keeping, gpus)

    groups: dict[tuple[int | None, int, int], dict[tuple[int, ...], ForkPath]] = {}
    for table, (settings, chain) in ((t, pair) for t in tables for pair in t.all_chains()):
        key = chain.entry_nic, chain.hops[0].flow.blocks or 1, settings.buffsize
        for gpus, names in images(chain.entry_nic, table.gpus).items():
            path = _path(gpus, _relabel(chain, names), is_image=gpus != table.gpus)
            if path is None or key[1] > FORK_CHANNELS:
                continue
            group = groups.setdefault(key, {})
            if gpus not in group or path.rate_gbps > group[gpus].rate_gbps:
                group[gpus] = path
    chains = {key: group for key, group in groups.items() if key[0] is not None}
    what = "have no chain that the fork can have: by one NIC, and no reads by copy engines"
    require(chains, "the plan's tables", what, "plan the cluster again")

    def worth(key: tuple[int | None, int, int]) -> tuple[int, float]:
        group = groups[key]
        return len(group), group[max(group, key=len)].rate_gbps

    nic, blocks, size = key = max(chains, key=worth)
    rings = groups.get((None, blocks, size), {}).values()
    sizes = {"blocks": blocks, "fifo_bytes": size}
    return ForkPaths(rings=tuple(rings), chains=tuple(groups[key].values()), **sizes, nic=nic)


def _relabel(chain: PlanChain, names: Permutation) -> PlanChain:
    """Return a chain with all GPUs and NUMA nodes mapped; its NIC stays."""
    hops = []
    for hop in chain.hops:
        moved = relabelled_hop(Hop(*hop.ends, hop.flow), names)
        ends = {"source": moved.source, "target": moved.target, "flow": moved.flow}
        hops.append(msgspec.structs.replace(hop, **ends))
    return msgspec.structs.replace(chain, hops=tuple(hops))


def _flows(plan: Plan, subset: SubsetRings) -> list[Flow]:
    """Return the flows of the first ring over a smaller set of a plan's GPUs."""
    space = hop_space(view(plan.machine, plan.knowledge, plan.settings, gpus=subset.gpus))
    nodes = dict(zip(subset.gpus, subset.nodes, strict=False))

    def place(hop: Hop) -> bool:
        return hop.flow.through in (None, nodes.get(hop.source, hop.flow.through))

    return [hop.flow for hop in ring_like(space.only(place), subset.rings[0]).hops]


def _path(gpus: tuple[int, ...], chain: PlanChain, *, is_image: bool) -> ForkPath | None:
    """Return a ring, or a chain through one NIC; None if the fork cannot set up its GPUs."""
    first, *inner, last = (hop.flow.transfers for hop in chain.hops)
    ends: tuple[Place, Place] | None = None
    if chain.entry_nic is not None:
        ends, gpu = (first[0].destination, last[-1].source), Place("G", chain.hops[-1].source)
        is_relayed = ends[1].kind == "G" and ends[1] != gpu
        if is_relayed or chain.entry_nic != chain.exit_nic:
            return None
        first, last = first[1:], last[:-1]  # Without the crossings to other nodes
    transfers = tuple(itertools.chain(first, *inner, last))
    # The fork sets up a GPU by the transfers that name the GPU: one is needed.
    if not transfers or any(type_transfer(transfer) == _COPIED for transfer in transfers):
        return None
    rate = chain.rate_gbps
    return ForkPath(gpus=gpus, rate_gbps=rate, transfers=transfers, ends=ends, is_image=is_image)


def numa_ids(machine: Machine) -> dict[int, int]:
    """Return the system's number of each NUMA node, for the kernel; indices where it has none."""
    ids = {node.index: node.numa_id for node in machine.numa_nodes}
    numbered = min(ids.values()) >= 0 and len(set(ids.values())) == len(ids)
    return ids if numbered else {index: index for index in ids}


# The fork's terms. Types are as `GPU_WRITE_CPUMEM_KERNEL`: READ or WRITE, of GPUMEM or CPUMEM, by a
# KERNEL or a copy engine (MEMCPY); of a crossing to the next node as `GPU_CPU_INTER`, from GPU
# memory to host memory there.

_COPIED = "GPU_READ_GPUMEM_MEMCPY"
"""The type that the fork's reader knows, and its runtime does not set up."""


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


def type_transfer(transfer: Transfer) -> str:
    """Return the fork's type of a transfer inside a node.

    >>> from tccl_py.model.transfer import parse_flow
    >>> [type_transfer(transfer) for transfer in parse_flow("G0->G0->C1->G4->G4").transfers]
    ['GPU_WRITE_CPUMEM_KERNEL', 'GPU_READ_CPUMEM_KERNEL']

    Raises InputError: the fork has no name for it.
    """
    source, destination = transfer.source, transfer.destination
    kinds = f"{source.kind}{destination.kind}"
    named = kinds in _ENDS[transfer.operation] and not (source.host or destination.host)
    right = "GPUs of one node write or read GPU memory, write host memory, or read it"
    what = "is none that the TCCL fork has a name for"
    require(named, f"transfer {str(transfer)[:60]!r}", what, right)
    memory = "CPUMEM" if "C" in kinds else "GPUMEM"
    engine = "MEMCPY" if transfer.uses_copy_engine else "KERNEL"
    return f"GPU_{transfer.operation.upper()}_{memory}_{engine}"


def _subsets(paths: Sequence[ForkPath], numa: Mapping[int, int]) -> Iterator[str]:
    """Yield every path; a chain with each landing on other nodes, which are as those here."""

    def move(prefix: str, kind: str, *ends: Place) -> str:
        """Return a movement as attributes; indices are of GPUs, or of NUMA nodes by the system."""
        source, target = (numa[end.index] if end.kind == "C" else end.index for end in ends)
        return f'{prefix}type="{kind}" {prefix}src_idx="{source}" {prefix}dst_idx="{target}"'

    def cross(prefix: str, *ends: Place) -> str:
        kinds = "_".join("CPU" if end.kind == "C" else "GPU" for end in ends)
        return " " + move(prefix, f"{kinds}_INTER", *ends)

    ends = [path.ends for path in paths if path.ends is not None]
    entries, exits = (sorted({pair[side] for pair in ends}) for side in (0, 1))
    for path in sorted(paths, key=lambda path: mask_of(path.gpus)):
        crossings = [""]
        if path.ends is not None:
            lands, leaves = path.ends
            pairs = itertools.product(exits, entries)
            crossings = [cross("head_", a, lands) + cross("tail_", leaves, b) for a, b in pairs]
        yield f'    <subset gpus="{mask_of(path.gpus)}">'
        for crossing in crossings:
            # repr is the shortest text that is read as the same number.
            yield f'      <transfers gbps="{float(f"{path.rate_gbps:.6g}")!r}"{crossing}>'
            for one in path.transfers:
                moved = move("", type_transfer(one), one.source, one.destination)
                yield f"        <transfer {moved}/>"
            yield "      </transfers>"
        yield "    </subset>"


def comment(note: str) -> str:
    """Return a note as one line of a comment: two hyphens would end it for the fork's parser."""
    text = re.sub("-(?=-)", "- ", " ".join(escape(note).split()))
    return "".join(part if part.isprintable() else "?" for part in text).rstrip("-")


def _notes(plan: Plan, written: ForkPaths, machine: Machine) -> Iterator[str]:
    """Yield notes for the user and the file's readers, most important first."""
    yield (
        f"rates {plan.provenance_of('graph')}; run it with NCCL_ALGO=TCCL,RING "
        f"NCCL_MIN_NCHANNELS={written.blocks} NCCL_MAX_NCHANNELS={written.blocks} "
        f"NCCL_BUFFSIZE={written.fifo_bytes}"
    )
    if written.nic is not None:
        if images := {path.gpus for path in written.rings + written.chains if path.is_image}:
            yield (
                f"{spell(len(images), 'set')} of GPUs have the rates of others, which the "
                "machine's symmetry maps to them"
            )
        yield from _missing("chain", plan, written.chains, least=1)
        yield from _missing("ring inside a node", plan, written.rings, least=2)
        if len(machine.nics) > 1:
            name = next(nic.name for nic in machine.nics if nic.index == written.nic)
            yield f"the fork's database has one NIC a node: run it with NCCL_IB_HCA={name}"
        return
    if plan.ring_count > 1 or written.blocks < plan_channels(plan):
        yield (
            f"the plan's {plan.rate_gbps:.2f} GB/s are those of {spell(plan.ring_count, 'ring')} "
            f"and {plan_channels(plan)} channels; the fork has one ring and room for "
            f"{FORK_CHANNELS} channels"
        )
    yield from _missing("ring", plan, written.rings, least=2)
    yield "there are no chains, and a job of several nodes fails: export a cluster's plan for it"


def _missing(kind: str, plan: Plan, written: Sequence[ForkPath], *, least: int) -> Iterator[str]:
    """Yield which sets of a plan's GPUs have no path in the file, and what searches for them."""
    gpus, known = plan.class_gpus[0], {path.gpus for path in written}
    total = 2 ** len(gpus) - 1 - (least > 1) * len(gpus)
    sets = itertools.chain(*(itertools.combinations(gpus, n) for n in range(least, len(gpus) + 1)))
    if count := total - len(known):
        named = list(itertools.islice((s for s in sets if s not in known), _NAMED))
        more = ", ..." if count > len(named) else ""
        by = f"; `tccl plan` with --gpus-per-job {EVERY_SET} has every set searched"
        yield (
            f"the plan has no {kind} over {count} of the {total} sets of GPUs that jobs can have "
            f"({', '.join(map(gpus_text, named))}{more}): a job over such a set fails"
            f"{by if len(gpus) <= ALL_SUBSETS_UP_TO else ''}"
        )
