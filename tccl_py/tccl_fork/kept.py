"""Chains of the fork's database from the tables of a measured cluster: nothing is measured again.

The tables have chains for NCCL, one or several at a time. The fork runs one chain by one NIC, so a
chain that was measured beside others is at least as fast by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.rings import Hop, Ring
from tccl_py.plan.again import NoSource, known_model, measured_again
from tccl_py.plan.plan import Plan, PlanChain
from tccl_py.plan.tables import HostTable, read_tables
from tccl_py.plan.tasks import Order
from tccl_py.sources.opening import open_source
from tccl_py.sources.remembering import RememberingSource
from tccl_py.tccl_fork.search import MOST_CHANNELS, Found


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
    if not tables:
        raise InputError(str(directory), "has no tables of chains", "plan the cluster again")
    return RememberingSource(NoSource(simulated=False)), tables, ()


class KeptChains(msgspec.Struct, frozen=True, kw_only=True):
    """The best chains by one NIC with equal thread blocks and FIFOs, by sets of GPUs."""

    nic: int
    blocks: int
    fifo_bytes: int
    chains: dict[Order, Found]
    missing: dict[Order, str]


def kept_chains(
    tables: Sequence[HostTable], *, nic: int | None, wanted: Collection[Order] | None
) -> KeptChains:
    """Return the chains of tables for `wanted` sets of GPUs (None: all), by `nic` (None: the best).

    NIC, blocks and FIFOs are those with the most sets of GPUs, then the fastest chain over the most
    GPUs. Raises InputError: the fork could use no chain.
    """
    wanted = wanted or [table.gpus for table in tables]
    groups: dict[tuple[int, int, int], dict[Order, Found]] = {}
    every = (
        (table.gpus, settings.buffsize, chain)
        for table in tables
        for settings, found in table.all_chains()
        for chain in found.chains
    )
    for gpus, fifo_bytes, chain in every:
        by, blocks = chain.entry_nic, chain.hops[0].flow.blocks or 1
        other = by is None or by != chain.exit_nic or by != (by if nic is None else nic)
        if other or blocks > MOST_CHANNELS or gpus not in wanted or not _can_be_set_up(chain):
            continue
        best = groups.setdefault((by or 0, blocks, fifo_bytes), {})
        if gpus not in best or chain.rate > best[gpus].rate_gbps:
            closed = Ring(tuple(Hop(hop.source, hop.target, hop.flow) for hop in chain.hops))
            best[gpus] = Found(ring=closed, rate_gbps=chain.rate, bound_gbps=None)
    if not groups:
        what = "have no chain that enters and leaves by one NIC" + f" {nic}" * (nic is not None)
        raise InputError("the plan's tables", what, "name another NIC, or plan the cluster again")

    def worth(key: tuple[int, int, int]) -> tuple[int, float]:
        found = groups[key]
        return len(found), found[max(found, key=len)].rate_gbps

    by, blocks, fifo_bytes = key = max(groups, key=worth)
    missing = {gpus: "no table has one" for gpus in wanted if gpus not in groups[key]}
    return KeptChains(
        nic=by, blocks=blocks, fifo_bytes=fifo_bytes, chains=groups[key], missing=missing
    )


def _can_be_set_up(chain: PlanChain) -> bool:
    """Return whether the fork has names for all transfers, and one of them names each GPU."""
    into, *inner, out = (hop.flow.transfers for hop in chain.hops)
    moved = [*into[1:], *(transfer for hop in inner for transfer in hop), *out[:-1]]
    # Reads by copy engines are known to the fork's reader, but not set up.
    return bool(moved) and not any(
        one.operation == "read" and one.uses_copy_engine and one.source.kind == "G" for one in moved
    )
