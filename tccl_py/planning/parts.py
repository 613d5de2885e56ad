"""Parts of a plan's GPUs: which of them get answers, and rings for those of one host.

Rings for parts of one host and chains for jobs over several share `answer_sets`, a walk over sets,
the task of a set (`Task.over`), and its search under a choice of settings. A ring
is searched under the plan's settings alone, and compared with NCCL's own rings, for the plugin:
what is kept is an order and one rate, also for all images of a set (`SubsetRings`). Chains are
asked for under any settings, in any number and between any NICs, as the other hosts of a job
decide: a table keeps the rate of each hop, and images are made when a job asks (`KeptTable`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from typing import TypeVar

import msgspec

from tccl_py.errors import InputError, require
from tccl_py.model.cluster import gpus_text, parse_gpus, shown
from tccl_py.model.machine import Machine
from tccl_py.model.symmetry import Symmetry, automorphisms, images_of_gpus
from tccl_py.model.transfer import index_of
from tccl_py.nccl.plugin.index import plugin_environment
from tccl_py.nccl.settings import Settings
from tccl_py.plan.chains import AS_GOOD, Order, SubsetRings, sender_nodes
from tccl_py.plan.plan import Plan
from tccl_py.planning.request import EVERY_SET, Task
from tccl_py.planning.settings_search import Candidate, own_gbps
from tccl_py.search.problem import Budget

Answer = TypeVar("Answer")
ALL_SUBSETS_UP_TO = 8
"""Machines with more GPUs have too many subsets: only usual ones are planned."""
SUBSET_BUDGET = Budget(sets=60, idle_sets=15)
SUBSET_RING_COUNTS = (1, 2)


def job_gpus(text: str | None, *hosts: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """Return the sets of GPUs of jobs on hosts with these GPUs, all GPUs first.

    `text` lists counts, of the lowest GPUs, and sets; a host without the GPUs of an item leaves the
    item out. None is all GPUs, half of them, a quarter, and one; EVERY_SET is all sets of up to
    ALL_SUBSETS_UP_TO GPUs.

    >>> job_gpus(None, range(8))
    [[(0, 1, 2, 3, 4, 5, 6, 7), (0, 1, 2, 3), (0, 1), (0,)]]
    >>> job_gpus("2,4-7,0+2", range(8), range(2))
    [[(0, 1, 2, 3, 4, 5, 6, 7), (0, 1), (4, 5, 6, 7), (0, 2)], [(0, 1)]]

    Raises InputError: an item that is neither count nor set, or beyond every host; too many sets.
    """
    if text == EVERY_SET:
        most = max(map(len, hosts))
        right = f"for hosts of up to {ALL_SUBSETS_UP_TO} GPUs: name sets"
        fits = most <= ALL_SUBSETS_UP_TO
        require(fits, "`gpus_per_job`", f"is {EVERY_SET}, of hosts with {most} GPUs", right)
        return [
            [s for n in range(len(gpus), 0, -1) for s in itertools.combinations(gpus, n)]
            for gpus in hosts
        ]
    of_hosts = [[tuple(gpus)] for gpus in hosts]
    for sets, gpus in zip(of_hosts, hosts, strict=True):
        counts = (len(gpus) // 2, len(gpus) // 4, 1) if text is None else ()
        sets.extend(tuple(gpus[:count]) for count in counts if count)
    for item in [] if text is None else map(str.strip, text.split(",")):
        named = [_named_gpus(item, gpus) for gpus in hosts]
        if not any(named):
            listed = " or ".join(dict.fromkeys(map(gpus_text, hosts)))
            fault = f"{shown(item)} fits no host: their GPUs are {listed}"
            raise InputError("`gpus_per_job`", fault, "name fewer, or leave it out")
        for sets, more in zip(of_hosts, named, strict=True):
            sets.extend(more)
    return [list(dict.fromkeys(sets)) for sets in of_hosts]


def _named_gpus(item: str, gpus: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the set of GPUs of an item of `gpus_per_job`; none if the host lacks one of them."""
    if re.fullmatch("0*[1-9][0-9]{0,3}", item, re.ASCII):
        return [tuple(gpus[: int(item)])] if int(item) <= len(gpus) else []
    try:
        # A number alone would be a count.
        indices = parse_gpus(item.replace("+", ",") if set("+-") & set(item) else "")
    except InputError as error:
        fault, right = f"{shown(item)} is no number of GPUs and no set", "as 8,4,4-7,0+2"
        raise InputError("`gpus_per_job`", fault, f"write counts or sets, {right}") from error
    return [tuple(sorted(indices))] if set(indices) <= set(gpus) else []


def answer_sets(
    gpu_sets: Sequence[Order],
    ask: Callable[[Order], Answer | None],
    images: Callable[[Answer], Mapping[Order, Answer]] = lambda _: {},
) -> tuple[Answer, ...]:
    """Return the answers about sets of a host's GPUs, of which some may have none.

    Sets that look the same as an answered one, its `images`, are not asked about.
    """
    answers: dict[Order, Answer] = {}
    for gpus in gpu_sets:
        if gpus not in answers and (answer := ask(gpus)) is not None:
            answers |= {**images(answer), gpus: answer}
    # A symmetry of the whole machine may take a set to GPUs that are not asked about.
    return tuple(answers[gpus] for gpus in gpu_sets if gpus in answers)


def smaller_sets(
    task: Task, plan: Plan, best: Candidate, *, everywhere: bool
) -> tuple[SubsetRings, ...]:
    """Return what the recommended choice needs to know of smaller sets of GPUs.

    Only graph files need rings of their own, else rings are searched `everywhere` alone. Where the
    plugin gives variables to single communicators, NCCL's own rings are rated.
    """
    variables = plan.job_settings if plan.is_by_variables else plan.choices["variables"].settings
    if everywhere or plan.recommended == "graph":
        planned = subset_rings(task, best.settings, best.orders)
        return _rate(task, planned, (best.settings, variables))
    few = len(task.gpus) <= ALL_SUBSETS_UP_TO
    if few and plan.is_by_variables and plugin_environment(variables)[1]:
        return answer_sets(
            subsets(task.host.machine, task.gpus), partial(_by_variables, task, variables)
        )
    return ()


def subset_rings(
    task: Task, settings: Settings, orders: Sequence[Order]
) -> tuple[SubsetRings, ...]:
    """Return rings for every proper subset of two GPUs or more, under the plan's settings.

    Subsets that a symmetry of the machine exchanges share one search. Of more than
    ALL_SUBSETS_UP_TO GPUs only the usual subsets are planned.
    """
    symmetry = automorphisms(task.host.machine, task.host.knowledge)
    return answer_sets(
        subsets(task.host.machine, task.gpus),
        lambda gpus: _subset(task, settings, orders, gpus),
        lambda planned: images_of_rings(planned, symmetry),
    )


def _rate(
    task: Task, planned: Iterable[SubsetRings], settings: Iterable[Settings]
) -> tuple[SubsetRings, ...]:
    """Return the subsets, with whether NCCL's own rings are slower under any of these settings."""
    plain = dict.fromkeys(msgspec.structs.replace(kind, shm_placement=False) for kind in settings)

    def gains(subset: SubsetRings) -> bool:
        part = task.over(subset.gpus)
        return any(subset.rate_gbps > own_gbps(part, kind) * (1 + AS_GOOD) for kind in plain)

    return tuple(msgspec.structs.replace(subset, gains=gains(subset)) for subset in planned)


def _by_variables(task: Task, variables: Settings, gpus: Order) -> SubsetRings | None:
    """Return a subset without rings, with whether variables beat default NCCL; None unrated."""
    part = task.over(gpus)
    default, rate = (own_gbps(part, option) for option in (task.default_settings, variables))
    gains = rate > default * (1 + AS_GOOD)
    # Rates of sets that may not be measured any more are infinite.
    known = 0 < rate < inf
    return SubsetRings(gpus=gpus, rings=(), rate_gbps=rate, gains=gains) if known else None


def subsets(machine: Machine, gpus: Order) -> tuple[Order, ...]:
    """Return the proper subsets of two GPUs or more that a plan has rings for, by size.

    Of more than ALL_SUBSETS_UP_TO GPUs they are halves and quarters in the order of indices, all
    GPUs below one switch, and pairs of these.
    """
    count, combinations = len(gpus), itertools.combinations
    if count <= ALL_SUBSETS_UP_TO:
        return tuple(subset for size in range(2, count) for subset in combinations(gpus, size))
    parts = [
        gpus[at : at + size] for size in (count // 2, count // 4) for at in range(0, count, size)
    ]
    parents = {gpu.index: gpu.parent for gpu in machine.gpus}
    below = [
        tuple(gpu for gpu in gpus if parents[gpu] == parent)
        for parent in dict.fromkeys(parents[gpu] for gpu in gpus)
    ]
    pairs = [pair for group in below for pair in combinations(group, 2)]
    chosen = {subset for subset in (*parts, *below, *pairs) if 2 <= len(subset) < count}
    return tuple(sorted(chosen, key=lambda subset: (len(subset), subset)))


def _subset(
    task: Task, settings: Settings, orders: Sequence[Order], gpus: Order
) -> SubsetRings | None:
    """Return rings over exactly these GPUs; None where the settings leave a GPU without a hop."""
    few = {"ring_counts": SUBSET_RING_COUNTS, "budget": SUBSET_BUDGET}
    part = msgspec.structs.replace(task.over(gpus), **few)
    # The whole machine's rings without the GPUs that are missing are a good beginning.
    seeds = [tuple(tuple(gpu for gpu in order if gpu in gpus) for order in orders)]
    result = part.search(settings, known=seeds, sets=SUBSET_BUDGET.sets)
    if result is None:
        return None
    task.source.allowance.stopped |= result.cancelled
    rings = tuple(ring.gpus for ring in result.rings.rings)
    nodes = sender_nodes(task.host.machine, result.rings.rings) if settings.shm_placement else ()
    return SubsetRings(gpus=gpus, rings=rings, rate_gbps=result.rate_gbps, nodes=nodes)


def images_of_rings(planned: SubsetRings, symmetry: Symmetry) -> dict[Order, SubsetRings]:
    """Return the rings of a set of GPUs, carried over to all sets that look the same."""
    images = {planned.gpus: planned}
    for gpus, names in images_of_gpus(symmetry, planned.gpus).items():
        rings = tuple(tuple(index_of(names[f"G{gpu}"]) for gpu in ring) for ring in planned.rings)
        places = zip(planned.gpus, planned.nodes, strict=False)
        nodes = sorted(
            (index_of(names[f"G{g}"]), index_of(names[f"C{node}"])) for g, node in places
        )
        image = {"gpus": gpus, "rings": rings, "nodes": tuple(node for _, node in nodes)}
        images.setdefault(gpus, msgspec.structs.replace(planned, **image))
    return images
