"""What a database of the TCCL fork's runtime has less than the plan has, or than could be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from tccl_py.plan.database_chains import SearchedChains
from tccl_py.plan.database_rings import SearchedRings
from tccl_py.plan.database_search import ALL_SETS_UP_TO, DatabaseTask
from tccl_py.plan.plan import PlanRing
from tccl_py.plan.tasks import Order
from tccl_py.runtimes.nccl.settings import Settings, final_channels
from tccl_py.topology.knowledge import Knowledge
from tccl_py.topology.machine import Machine, Nic

MUCH_MEMORY = 1 << 30
"""More than this in every process of a job is worth a word."""
_PROVEN = 1.01
_NAMED = 3
"""Sets of GPUs without a ring or chain that are named."""


class PlannedNode(Protocol):
    """What of a plan a database is made of: that of a machine, or of a cluster's equal nodes."""

    @property
    def machine(self) -> Machine:
        """The node."""

    @property
    def knowledge(self) -> Knowledge:
        """What is known of it."""

    @property
    def gpus(self) -> Order:
        """NVML indices of the GPUs that are planned for."""

    @property
    def settings(self) -> Settings:
        """NCCL's, for channels and FIFOs."""

    @property
    def kept(self) -> Mapping[str, str]:
        """Variables that all jobs have."""

    @property
    def rings(self) -> tuple[PlanRing, ...]:
        """Rings over the GPUs of one node; none in a cluster's plan."""

    @property
    def rate_gbps(self) -> float:
        """What all rings have together."""

    @property
    def provenance(self) -> str:
        """Where rates come from."""


class FoundParts(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked and what was found; `table_bytes` is the fork's memory in each process.

    `no_chains` says why there are none, where that is so.
    """

    plan: PlannedNode
    task: DatabaseTask
    nic: Nic | None
    rings: SearchedRings
    chains: SearchedChains | None
    no_chains: str
    table_bytes: int


def plan_channels(plan: PlannedNode) -> int:
    """Channels that NCCL has under the plan's settings."""
    sm = min((plan.machine.gpu(gpu).sm or 0 for gpu in plan.gpus), default=0)
    return final_channels(plan.settings.channels, sm=sm, version=plan.settings.version)


def database_notes(parts: FoundParts) -> Iterator[str]:
    """Sentences for the user and for whoever reads the file, most important first."""
    plan, task = parts.plan, parts.task
    done = plan.provenance.partition(" ")[0].removesuffix(",")
    yield (
        f"rates {plan.provenance}, {task.source.sets_measured} sets {done} for this file; "
        f"run it with NCCL_ALGO=TCCL,RING NCCL_MIN_NCHANNELS={task.blocks} "
        f"NCCL_MAX_NCHANNELS={task.blocks} NCCL_BUFFSIZE={task.fifo_bytes}"
    )
    yield from _lost_of_the_plan(parts)
    yield from _left_out(parts)
    yield from _network(parts)
    yield from _without("ring", "a job over them fails", parts.rings.missing)
    if parts.chains is not None:
        yield from _without("chain", "a job with such a node fails", parts.chains.missing)
        chains = parts.chains.listed.values()
        yield from _unproven("chains", [(one.rate_gbps, one.bound_gbps) for one in chains])
    rings = parts.rings.rings.values()
    yield from _unproven("rings", [(one.rate_gbps, one.bound_gbps) for one in rings])
    if parts.table_bytes > MUCH_MEMORY:
        size = parts.table_bytes / 2**30
        yield f"the fork's runtime takes {size:.1f} GiB in every process for its table of chains"


def _lost_of_the_plan(parts: FoundParts) -> Iterator[str]:
    plan, whole = parts.plan, parts.rings.rings.get(parts.plan.gpus)
    if whole is None:
        return
    here = f"the ring here has {whole.rate_gbps:.2f}"
    if len(plan.rings) > 1:
        yield (
            f"the plan's {len(plan.rings)} rings together have {plan.rate_gbps:.2f} GB/s, but all "
            f"channels of the fork take one ring: {here}"
        )
    elif parts.task.blocks < plan_channels(plan):
        yield (
            f"the plan's {plan.rate_gbps:.2f} GB/s are those of {plan_channels(plan)} channels, "
            f"but the fork has room for {parts.task.blocks}: {here}"
        )


def _left_out(parts: FoundParts) -> Iterator[str]:
    task, total = parts.task, 2 ** len(parts.task.gpus) - len(parts.task.gpus) - 1
    searched = len(parts.rings.rings) + len(parts.rings.missing)
    if searched < total:
        why = (
            "as asked for"
            if len(task.gpus) <= ALL_SETS_UP_TO
            else f"above {ALL_SETS_UP_TO} GPUs only those that are asked for"
        )
        yield (
            f"{total - searched} of the {total} sets of GPUs that jobs can have are left out, "
            f"{why}: a job over one of them fails"
        )


def _network(parts: FoundParts) -> Iterator[str]:
    nic, chains = parts.nic, parts.chains
    if parts.no_chains:
        yield f"{parts.no_chains}: there are no chains, and a job of several nodes fails"
    elif nic is not None and chains is not None:
        count = len(parts.plan.machine.nics)
        if count > 1:
            yield (
                f"the fork's database knows one NIC a node, not {count}: run it with "
                f"NCCL_IB_HCA={nic.name}"
            )
        landed = [place for ends in chains.listed for place in (ends.entry, ends.exit)]
        if chains.listed and not any(place.in_gpu for place in landed):
            yield f"NIC {nic.name} does not reach GPU memory: all bytes land in host memory"
        if chains.best and not chains.between:
            yield (
                "each set of GPUs has the chain between its best landings only: between nodes that "
                "are alike the fork chooses no other"
            )


def _without(what: str, so: str, missing: Mapping[Order, str]) -> Iterator[str]:
    for gpus, why in list(missing.items())[:_NAMED]:
        yield f"no {what} over GPUs {_listed(gpus)}, and {so}: {why}"
    if len(missing) > _NAMED:
        yield f"no {what} either over {len(missing) - _NAMED} other sets of GPUs"


def _unproven(what: str, rates: Sequence[tuple[float, float | None]]) -> Iterator[str]:
    """What the limits of the search may have cost."""
    shares = [rate / bound for rate, bound in rates if bound is not None]
    low = [share for share in shares if share * _PROVEN * (1 + 1e-9) < 1]
    if low:
        yield (
            f"{len(low)} of {len(rates)} {what} are not proven best; each has at least "
            f"{100 * min(low):.0f} % of what could be"
        )
    if len(shares) < len(rates):
        yield (
            f"of {len(rates) - len(shares)} of {len(rates)} {what} it is not known what could be: "
            "the sets that may be measured were used up"
        )


def _listed(gpus: Iterable[int]) -> str:
    return ", ".join(map(str, gpus))
