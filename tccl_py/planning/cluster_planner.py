"""Several hosts: chains of each class, rings over all, and tables for jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations, combinations_with_replacement, islice
from math import inf
from typing import Any

from msgspec.structs import replace

from tccl_py.errors import InputError, MeasurementError, SearchError
from tccl_py.files import pick
from tccl_py.merge.cables import cabled_ring
from tccl_py.model.cluster import Cluster, Host, NodeClass, cabled_nics, gpus_text
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.reports import part_of
from tccl_py.model.symmetry import automorphisms, images_of_gpus
from tccl_py.nccl.network import Pairing, symmetry_keeping
from tccl_py.nccl.settings import Settings, check_settings, settings_from_environment
from tccl_py.nccl.transport import blocks_of_ring
from tccl_py.nccl.versions import ASSUMED
from tccl_py.nccl.view import view
from tccl_py.plan.chains import Order
from tccl_py.plan.plan import Plan
from tccl_py.plan.tables import FORK_CHANNELS, ClassRates, KeptTable
from tccl_py.planning.chain_search import ClassStudy, HostTask, used_nics
from tccl_py.planning.choices import mechanisms, own_gbps
from tccl_py.planning.join import best_rings, plan_over
from tccl_py.planning.parts import answer_sets, job_gpus
from tccl_py.planning.request import EVERY_SET, PlanRequest, all_limited, of_transports, task_for
from tccl_py.sources.bench import Allowance, Bench

FEW_RINGS = 4
"""Beyond a ring for each NIC, sets of up to so many are tried."""
MAX_RINGS = 8
MOST_JOBS = 100
"""Small jobs that are planned, so that tables have answers for them."""
NO_TABLE = "no jobs can be planned"
"""A notice, with the GPUs before it, and then why."""


class SeveralHosts:
    """Several hosts: the chains of their classes are joined to rings over all of them.

    `kept` are tables of earlier, and `tables` takes those of every class, if it is a list.
    """

    def __init__(
        self,
        request: PlanRequest,
        cluster: Cluster,
        gpus: Sequence[Order],
        sources: Sequence[BandwidthSource | None],
        *,
        kept: Sequence[ClassRates],
        tables: list[KeptTable] | None,
    ) -> None:
        self.request, self.cluster, self.gpus = request, cluster, gpus
        self.tables, self.nodes, self.sources = tables, list[ClassRates](), list[Bench]()
        if cluster.cables:
            check_settings(Settings(version=request.version or ASSUMED, subnet_routing=True))
            # Without a ring nothing need be measured.
            keep_order = request.keep_order
            cabled_ring(cluster.names, cluster.cables, 1, lambda *_: 1, keep_order=keep_order)
        # A ring on each NIC, among others.
        pinned = settings_from_environment(request.pinned_env)
        nics = [_nics(cluster, node_class, pinned) for node_class in cluster.classes]
        counts = {1, 2, FEW_RINGS} | {min(len(used), MAX_RINGS) for used in nics}
        more: dict[str, Any] = {
            "ring_counts": request.ring_counts or tuple(sorted(counts)),
            "cabled": bool(cluster.cables),
            "railed": cluster.rails == "only",
        }
        # Their time is limited all together.
        budget = replace(request.budget, seconds=None)
        untimed = replace(request, budget=budget)
        # By the number of a class: its task if it has a source, and kept tables by GPUs.
        self.tasks, self.kept = list[HostTask | None](), list[dict[Order, ClassRates]]()
        for host, source, ids, used in zip(cluster.classes, sources, gpus, nics, strict=True):
            self.kept.append({t.gpus: t for t in kept if t.node_class.name == host.name})
            task = None
            if source is not None:
                task = task_for(HostTask, untimed, host, source, ids, nics=used, **more)
                self.sources.append(task.source)
            elif ids not in self.kept[-1]:
                fault = "has no table, and no host to measure"
                raise InputError(f"class {host.name}", fault, "start a rank on a host of it")
            self.tasks.append(task)
        # Kept tables grow with the cluster.
        known = all(ids in of for ids, of in zip(gpus, self.kept, strict=True))
        self.growing = not known or request.gpus_per_job == EVERY_SET
        # Sets are limited for each search.
        self.allowance = Allowance(seconds=request.budget.seconds)

    @property
    def sets_by_symmetry(self) -> int:
        """The number of sets that symmetries have spared."""
        return sum(node.sets_by_symmetry for node in self.nodes)

    @property
    def cut_short(self) -> bool:
        """Whether the limit of sets ended searches over all GPUs of a class."""
        studies = (n for n in self.nodes[: len(self.gpus)] if isinstance(n, ClassStudy))
        return any(study.cut_short for study in studies)

    def plan(self) -> Plan:
        """Return the best rings over all hosts; KeyboardInterrupt ends it with the best so far."""
        self._study()
        self.allowance.allow(3 / 4)
        try:
            plan = plan_over(self.cluster, self.nodes, self.request)
        except SearchError:
            if not any(source.cut_short for source in self.sources):
                raise
            # No settings were rated on all classes. Rings over all get the whole limit once more
            # beside what is remembered, and a new set of each class in any case.
            self._study()
            budget = self.request.budget
            with all_limited(self.sources, Allowance(budget.sets, budget.seconds)):
                plan = plan_over(self.cluster, self.nodes, self.request)
        cancelled = plan.cancelled or any(node.cancelled for node in self.nodes)
        return replace(plan, cancelled=cancelled)

    def _study(self) -> None:
        """Search every class, each in its part of the first half of the time."""
        self.nodes.clear()
        sound = self._sound_settings()
        self.tasks = [task and replace(task, sound=sound) for task in self.tasks]
        for number, ids in enumerate(self.gpus):
            self.allowance.allow((number + 1) / len(self.gpus) / 2)
            allow = partial(self.allowance.allow, 3 / 4)
            self.nodes.append(self._node(number, ids, allow=allow))

    def _sound_settings(self) -> Settings | None:
        """Return the variables under which NCCL's own rings are fastest over sound links alone.

        None is default NCCL, which uses no link on any class that no plan may use.
        """
        tasks = [task for task in self.tasks if task is not None]
        hosts = list(zip(self.cluster.classes, self.gpus, strict=True))

        def is_unsound(settings: Settings) -> bool:
            views = (view(h.machine, h.knowledge, settings, gpus=ids) for h, ids in hosts)
            return any(topo.unsound for topo in views)

        if not tasks or not is_unsound(tasks[0].default_settings):
            return None
        kinds = (of_transports(kind) for task in tasks for kind in mechanisms(task))
        changes = ("p2p_level", "net_disable_intra")
        settings = dict.fromkeys(
            replace(tasks[0].default_settings, **pick(kind, *changes)) for kind in kinds
        )
        # Of equal ones that without P2P.
        rates = {
            kind: min(rate if (rate := own_gbps(task, kind)) < inf else 0.0 for task in tasks)
            for kind in sorted(settings, key=lambda kind: kind.p2p_level != "LOC")
            if not is_unsound(kind)
        }
        return max(rates, key=rates.__getitem__, default=None)

    def with_parts(self, plan: Plan) -> Iterator[Plan]:
        """Yield the plan, with notices on jobs that cannot be planned; make the tables of all."""
        if self.tables is None:
            return
        notices, asked = list(plan.notices), self.request.gpus_per_job
        try:
            for number, (_, *subsets) in enumerate(job_gpus(asked, *self.gpus)):
                # Tables of earlier get further sets of GPUs only if these are named.
                named = [] if self.kept[number] and asked is None else subsets
                if asked == EVERY_SET:
                    named = list(self._unlike(number, subsets))
                others = self._others(number, named, notices)
                self.nodes += others
                if asked == EVERY_SET:
                    self._answer_fork((self.nodes[number], *others))
            # Jobs are asked about, so that tables have answers for them.
            for job, nodes in islice(_small_jobs(self.cluster, self.nodes), MOST_JOBS):
                with suppress(SearchError, MeasurementError):
                    if best_rings(job, nodes)[1]:
                        raise KeyboardInterrupt
        finally:
            self.tables += [node.table() for node in self.nodes]
        yield replace(plan, notices=tuple(notices))

    def _unlike(self, number: int, gpu_sets: Sequence[Order]) -> Iterator[Order]:
        """Yield sets of a class's GPUs that no symmetry of its machine maps to an earlier one.

        The NIC of chains for the TCCL fork stays.
        """
        host, nic = self.cluster.classes[number], self.nodes[number].nics[0]
        symmetry = automorphisms(host.machine, host.knowledge)
        symmetry = symmetry_keeping(symmetry, Pairing(((nic, nic),)))
        images: set[Order] = set()
        for gpus in gpu_sets:
            if gpus not in images:
                images |= images_of_gpus(symmetry, gpus).keys()
                yield gpus

    def _answer_fork(self, nodes: Sequence[ClassRates]) -> None:
        """Ask each node of a class what the TCCL fork needs, under settings of the first."""
        settings = nodes[0].choices[0][0]
        counts = (2**power for power in range(settings.channels.bit_length()))
        fits = [
            count
            for count in counts
            if blocks_of_ring(nodes[0].view(replace(settings, channels=count)), 1) <= FORK_CHANNELS
        ]
        settings = replace(settings, channels=fits[-1], min_channels=None)
        for node in nodes:
            if isinstance(node, ClassStudy):
                node.answer_fork(settings)

    def _node(
        self,
        number: int,
        gpus: Order,
        *,
        parts: int = 1,
        allow: Callable[[], object] = lambda: None,
    ) -> ClassRates:
        """Return the table for GPUs of a class, or a search with one of `parts` of its budget.

        Raises MeasurementError: there is neither, or the source cannot measure what is needed.
        """
        task, table = self.tasks[number], self.kept[number].get(gpus)
        if table is not None and (task is None or not self.growing):
            return table
        if task is None:
            raise MeasurementError("no host of the class is at hand")
        sets = task.budget.sets
        few = replace(task.budget, sets=sets and max(1, sets // parts))
        task = replace(task.over(gpus), budget=few)
        kept = None if table is None else table.kept
        return ClassStudy(self.cluster.classes[number], task, kept, allow=allow)

    def _others(
        self, number: int, gpu_sets: Sequence[Order], notices: list[str]
    ) -> tuple[ClassRates, ...]:
        """Return nodes for other GPUs of a class: `gpu_sets` without table, and kept ones.

        The notices get the reason where a search fails. Each gets an equal part of the time that
        is left.
        """
        kept, classes = self.kept[number], len(self.gpus) - number
        new = [gpus for gpus in gpu_sets if gpus not in kept]

        def search_class(gpus: Order) -> ClassRates | None:
            if gpus in kept:
                return self._node(number, gpus)
            self.allowance.allot(parts=classes * (len(new) - new.index(gpus)))
            try:
                node = self._node(number, gpus, parts=len(new))
            except (InputError, SearchError, MeasurementError) as error:
                name = f"{self.cluster.classes[number].name}, GPUs {gpus_text(gpus)}"
                notices.append(f"{name}: {NO_TABLE} ({error})")
                return None
            if node.cancelled:
                raise KeyboardInterrupt
            return node

        others = (gpus for gpus in kept if gpus != self.gpus[number])
        return answer_sets([*new, *others], search_class)


def _nics(cluster: Cluster, node_class: NodeClass, pinned: Settings) -> tuple[int, ...]:
    """Return the NICs of rings: with cables, those that have one."""
    used, of = used_nics(node_class.machine, pinned), cluster.host_classes
    if not cluster.cables:
        return used
    ends = cabled_nics(cluster.cables)
    cabled = {nic for host, nic, _ in ends if cluster.classes[of[host]].name == node_class.name}
    return tuple(nic for nic in used if nic in cabled)


def _small_jobs(
    cluster: Cluster, nodes: Sequence[ClassRates]
) -> Iterator[tuple[Cluster, Sequence[ClassRates]]]:
    """Yield small jobs, of which those without a ring are none, with the nodes of their classes.

    Along cables they are parts of the hosts, small ones first; else two hosts of every pair of
    nodes, those with equal numbers of GPUs first. Two tables have answered already.
    """
    if cluster.cables:
        names, of = cluster.names, cluster.host_classes
        for count in range(2, len(names)):
            for part in combinations(names, count):
                yield part_of(cluster, part), [nodes[n] for n in {of[name]: 0 for name in part}]
        return
    combined = combinations_with_replacement(nodes, 2)
    pairs = [pair for pair in combined if any(node.searches for node in pair)]
    for pair in sorted(pairs, key=lambda pair: abs(len(pair[0].gpus) - len(pair[1].gpus))):
        used = list(dict.fromkeys(pair))
        hosts = tuple(
            Host(name=str(n), node_class=n % len(used), slots=len(pair[n].gpus)) for n in range(2)
        )
        classes = tuple(node.node_class for node in used)
        yield Cluster(hosts=hosts, classes=classes, rails=cluster.rails), used
