"""A cluster's plan as text for people, and as the JSON whose keys are kept stable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Column, Table

from tccl_py.cli.plan_text import (
    bound_text,
    choice_json,
    choice_text,
    effort_text,
    marked_rate,
    settings_text,
)
from tccl_py.nccl.pinned_env import pinned_env_text
from tccl_py.nccl.settings import environment
from tccl_py.plan.plan import CHOICES, Plan, PlanChain
from tccl_py.readers.hosts import compress
from tccl_py.report.words import CHOICE_WORDS

_MOST_PASSAGES = 16
"""Of a cluster whose hosts differ there can be hundreds; `--hops` lists them all."""
_MOST_ORDER = 1000
"""Characters of the hosts' order that a terminal has room for."""


def cluster_json(plan: Plan) -> dict[str, Any]:
    """What `plan --json` and `show --json` print; a ring is a list of global ranks, per channel.

    `hosts` are names in the order of ranks.
    """
    return {
        "kind": "cluster",
        "hosts": plan.host_order,
        "rings": plan.channel_rings,
        "rate_gbps": plan.rate_gbps,
        "bound_gbps": plan.bound_gbps,
        "proven": plan.proven,
        "whole_ring_gbps": plan.whole_ring_gbps,
        "sets_measured": plan.sets_measured,
        "simulated": plan.simulated,
        "assumed": plan.assumed,
        "settings": msgspec.to_builtins(plan.settings),
        "environment": environment(plan.settings),
        "kept": plan.pinned_env,
        "recommended": plan.recommended,
        "choices": {name: choice_json(one) for name, one in plan.choices.items()},
        "stock": choice_json(plan.stock),
        "cancelled": plan.cancelled,
        "notices": plan.notices,
    }


def print_cluster(plan: Plan, console: Console) -> None:
    """Print classes, passages, rates, bound, settings and what the plan is compared with."""
    counted = f"{len(plan.hosts)} hosts with {plan.cluster.ranks} GPUs"
    console.print(f"Plan for a cluster of {counted}: {plan.provenance}")
    console.print(_classes_table(plan))
    console.print(_passages_table(plan))
    left = len(_used(plan)) - _MOST_PASSAGES
    if left > 0:
        console.print(f"and {left} more passages; `tccl show --hops` lists all")
    console.print(_summary(plan))
    for notice in plan.notices:
        console.print(f"note: {notice}")


def flows_table(plan: Plan) -> Table:
    """Every flow of every passage with its rate beside all others of the passage."""
    table = _table("class", "passage", "ring", "GB/s", "flow")
    for number in _used(plan):
        path = plan.paths[number]
        name = plan.cluster.classes[path.node_class].name
        slowest = min(chain.rate for chain in path.chains)
        for ring, chain in enumerate(path.chains):
            for hop in chain.hops:
                marked = marked_rate(hop.gbps, slowest=hop.gbps == slowest)
                table.add_row(name, str(number), str(ring), marked, str(hop.flow))
    return table


def _classes_table(plan: Plan) -> Table:
    table = _table("class", "hosts", "GPUs", "NICs")
    counts = Counter(plan.cluster.host_classes.values())
    for number, one in enumerate(plan.cluster.classes):
        gpus = ",".join(str(gpu) for gpu in plan.class_gpus[number])
        nics = " ".join(f"{nic.id} {nic.name}" for nic in one.machine.nics)
        table.add_row(one.name, str(counts[number]), gpus, nics)
    return table


def _table(*headers: str) -> Table:
    """A table whose words go on in the next line where they are too long, so that none is cut."""
    return Table(*(Column(header, overflow="fold") for header in headers))


def _used(plan: Plan) -> Counter[int]:
    """The passages that hosts have, in the order of the ring, and how many have each."""
    return Counter(host.path for host in plan.hosts)


def _passages_table(plan: Plan) -> Table:
    table = _table("passage of", "hosts", "ring", "in", "GPU order", "out", "GB/s", "slowest flow")
    for number, hosts in list(_used(plan).items())[:_MOST_PASSAGES]:
        path = plan.paths[number]
        name = plan.cluster.classes[path.node_class].name
        for ring, chain in enumerate(path.chains):
            first = (f"{name} ({number})", str(hosts)) if ring == 0 else ("", "")
            table.add_row(*first, str(ring), *_chain(chain))
        table.add_section()
    return table


def _chain(chain: PlanChain) -> tuple[str, ...]:
    order = " ".join(str(gpu) for gpu in chain.gpus)
    return (
        f"N{chain.entry_nic}",
        order,
        f"N{chain.exit_nic}",
        f"{chain.rate:.2f}",
        str(chain.bottleneck.flow),
    )


def _summary(plan: Plan) -> Table:
    table = Table.grid("", Column(overflow="fold"), padding=(0, 2))
    for name, text in _lines(plan):
        table.add_row(name, text)
    return table


def _lines(plan: Plan) -> Iterator[tuple[str, str]]:
    mark = plan.provenance
    changed = "another order than given" if plan.order_changed else "as given"
    yield "host order", f"{changed}: {_order(plan)}"
    rings, channels = plan.ring_count, plan.settings.channels
    counted = f"{rings} ring{'s' * (rings != 1)} over {channels} channel{'s' * (channels != 1)}"
    yield "rate", f"{plan.rate_gbps:.2f} GB/s ({mark}), {counted}"
    name, hop = plan.bottleneck
    yield "slowest flow", f"{hop.gbps:.2f} GB/s: {hop.flow} on {name}"
    if plan.whole_ring_gbps is not None:
        yield "whole rings", f"{plan.whole_ring_gbps:.2f} GB/s with all hosts at once ({mark})"
    yield "bound", bound_text(plan, plan.ring_count)
    for choice in CHOICES:
        yield CHOICE_WORDS[choice], choice_text(plan, choice, plan.choices[choice], mark)
    yield "settings", settings_text(plan.settings, checked=plan.settings_verified)
    if plan.pinned_env:
        yield "kept", pinned_env_text(plan.pinned_env)
    yield "effort", effort_text(plan)


def _order(plan: Plan) -> str:
    text = compress(plan.host_order)
    if len(text) <= _MOST_ORDER:
        return text
    begin = text[:_MOST_ORDER].rpartition(",")[0]
    return f"{begin}, ... (nccl/order/hosts.txt has all)"
