"""What a plan asks a source in Python: the bandwidth of other rings, and a journal beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from tccl_py.errors import InputError, check_type, require, spell
from tccl_py.model.cluster import NodeClass
from tccl_py.model.measurement import BandwidthSource, Sources
from tccl_py.model.rings import HopSpace, nics_of, ring_like, ring_set
from tccl_py.nccl.settings import Settings, check_settings
from tccl_py.nccl.transport import blocks_of_ring
from tccl_py.plan.chains import WORLD, HostPath, Order, Orders, PlanChain, condense
from tccl_py.plan.directory import write_plan
from tccl_py.plan.machine_files import class_view
from tccl_py.plan.plan import Plan
from tccl_py.plan.retuning import path_space
from tccl_py.plan.tables import KeptTable, table_files
from tccl_py.planning.output import output_directory
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator
from tccl_py.sources.bench import Bench, bench_for
from tccl_py.sources.journal import JournalFile

_Like = tuple[Order, PlanChain]
"""An order of GPUs, and the planned chain that it is like."""


def rate_of_rings(plan: Plan, rings: Orders, settings: Settings | None, source: Sources) -> float:
    """Return the bandwidth of a set of rings, GB/s; see `PlanHandle.rate`."""
    check_type(settings, "settings", Settings, type(None))
    settings = plan.settings if settings is None else check_settings(settings)
    parts = zip(*(_chains(plan, order) for order in _orders(rings)), strict=True)
    numbers = [host.path for host in plan.hosts]
    like = [_like(plan.paths[path], part) for path, part in zip(numbers, parts, strict=True)]
    # Rings are equal if they are on all hosts.
    chains = zip(*condense(list(zip(*like, strict=True))), strict=True)
    sources = benches_of(plan, source)
    hosts = dict.fromkeys(zip(numbers, chains, strict=True))
    # Orders over several hosts are as fast as the slowest host lets them be.
    return min(
        _rate_on_host(plan, plan.paths[path], chains, settings, sources) for path, chains in hosts
    )


def _like(path: HostPath, orders: Sequence[Order]) -> list[_Like]:
    """Return GPU orders on a host, each with the planned chain whose NICs it takes.

    Chains over the same GPUs, which may differ in NICs, are taken in turn, others by their number.
    """
    turns, like = Counter[Order](), list[_Like]()
    for number, gpus in enumerate(orders):
        planned = [chain for chain in path.chains if chain.gpus == gpus]
        chains, at = (planned, turns[gpus]) if planned else (path.chains, number)
        like.append((gpus, chains[at % len(chains)]))
        turns[gpus] += 1
    return like


def _rate_on_host(
    plan: Plan,
    path: HostPath,
    orders: Sequence[_Like],
    settings: Settings,
    sources: Sequence[BandwidthSource],
) -> float:
    """Return the bandwidth of GPU orders on a host that has this path in the plan."""
    channels = blocks_of_ring(class_view(plan, path.node_class, settings), 1)
    fault = f"are {spell(len(orders), 'different ring')}"
    right = f"settings that end in {spell(channels, 'channel')} take a number that divides it"
    require(channels % len(orders) == 0, "rings", fault, right)
    space = path_space(plan, path, settings, len(orders))
    rings = []
    for gpus, chain in orders:
        # Planned chains keep their mechanisms, and others enter and leave by the same NICs.
        if gpus == chain.gpus:
            rings.append(ring_like(space, chain.ring))
        else:
            outside = [hop.source for hop in chain.hops if hop.source == WORLD]
            rings.append(ring_like(_by_nics(space, chain), (*outside, *gpus)))
    rated = ring_set(rings)
    (measurement,) = sources[path.node_class].measure([rated.flows])
    return rated.rate(measurement)


def _by_nics(space: HopSpace, chain: PlanChain) -> HopSpace:
    """Return the space with the NICs of a chain alone."""
    nics = {(None, chain.entry_nic), (chain.exit_nic, None), (None, None)}
    return space.only(lambda hop: nics_of(hop) in nics)


def _orders(rings: Orders) -> list[Order]:
    """Return rings as a list of orders, of which a single one may be given."""
    check_type(rings, "rings", Iterable)
    listed: list[Any] = list(rings)
    require(listed, "rings", "are none", "give at least one, as `plan.orders`")
    listed = [listed] if isinstance(listed[0], int) else listed
    for order in listed:
        check_type(order, "rings", Iterable)
    orders = [tuple(order) for order in listed]
    for number in (number for order in orders for number in order):
        check_type(number, "rings", int)
    return orders


def _chains(plan: Plan, order: Order) -> list[Order]:
    """Return the GPUs of a ring on each host, in the order of hosts.

    Raises InputError: it does not visit each GPU once, and over several hosts host by host.
    """
    numbers = [plan.in_rings(host)[1] for host in plan.hosts]
    first, chains = set(numbers[0].values()), []
    # A ring may begin anywhere: turn it to where it enters the first host, or to its lowest GPU.
    entries = [at for at in range(len(order)) if order[at] in first and order[at - 1] not in first]
    start = entries[0] if entries else order.index(min(first)) if min(first) in order else 0
    places = iter((*order[start:], *order[:start]))
    for host, named in zip(plan.hosts, numbers, strict=True):
        gpus = {number: gpu for gpu, number in named.items()}
        part = tuple(islice(places, len(gpus)))
        if set(part) != gpus.keys():
            right = f"each of {', '.join(map(str, gpus))} once, without others between"
            raise InputError("rings", f"have {part[:64]} on host {host.name}", right)
        chains.append(tuple(gpus[number] for number in part))
    require(not [*places], "rings", "have more places than the plan has GPUs", "each GPU once")
    return chains


def write_directory(
    plan: Plan, directory: Path, source: Sources, tables: Iterable[KeptTable]
) -> None:
    """Write a plan, its journal and its models; see `PlanHandle.write`."""
    benches = benches_of(plan, source)
    first, names = benches[0], [node_class.name for node_class in plan.cluster.classes]
    with output_directory(directory, force=None) as journal:
        # Commands ask models and hardware again: no source of another kind, nor several.
        again = first.model is not None or first.fingerprint is not None
        if again and len(benches) == 1 and not journal.exists():
            if plan.simulated:
                rate_of_rings(plan, plan.orders, None, first)
            with closing(JournalFile(journal, first.header)) as copy:
                for transfers in first.sets:
                    for sample in first.recall(transfers):
                        copy.append(sample)
        models = {name: bench.model for name, bench in zip(names, benches, strict=True)}
        files = table_files(tables)
        write_plan(plan, directory, models=models, fingerprint=first.fingerprint, tables=files)


def benches_of(plan: Plan, source: Sources) -> list[Bench]:
    """Return a source for each class of hosts; None is of the models that are bundled.

    Raises InputError: too few sources, one of another machine, or none where no model is bundled.
    """
    classes = plan.cluster.classes
    if source is None:
        source = [_simulator(plan, node_class) for node_class in classes]
    sources = list(source) if isinstance(source, Sequence) else [source]
    right = "give one for each class of hosts, in the order of `plan.cluster.classes`"
    require(len(sources) == len(classes), "source", f"is {len(sources)} sources", right)
    pairs = zip(sources, classes, strict=True)
    return [bench_for(bandwidths, node_class.machine.name) for bandwidths, node_class in pairs]


def _simulator(plan: Plan, node_class: NodeClass) -> Simulator:
    """Return a simulation by the bundled model that gave the rates of a class of hosts."""
    machine, knowledge = node_class.machine, node_class.knowledge
    with suppress(InputError):
        model = load_bundled(machine.name)
        if plan.simulated and (model.machine, model.knowledge) == (machine, knowledge):
            return Simulator(model)
    fault = f"is missing: no bundled model gave the rates of {machine.name}"
    raise InputError("source", fault, "give the source that the plan was made with")
