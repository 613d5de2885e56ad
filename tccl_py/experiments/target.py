"""Target of verification and tuning: a plan for one host or several, its files, and its arms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tccl_py.delivery.job import choice_variables
from tccl_py.errors import InputError
from tccl_py.experiments.jobs import THIS_HOST, Arm
from tccl_py.experiments.record import Verification
from tccl_py.files import read_text
from tccl_py.model.rings import neighbours
from tccl_py.nccl.graph_search import default_choice
from tccl_py.nccl.settings import Settings, environment, pinned_level
from tccl_py.nccl.transport import SIZE_STAGE, candidates, pair_mechanism, values_of
from tccl_py.plan.chains import ChoiceName
from tccl_py.plan.directory import GRAPH_FILE, class_view, nccl_files, subset_graph, write_plan
from tccl_py.plan.host_files import HOSTS_FOLDER, host_graph_file, host_graphs
from tccl_py.plan.plan import Plan
from tccl_py.plan.results import planned_fingerprint
from tccl_py.plan.retuning import gdr_variants, keeps_rings, retuned
from tccl_py.plan.tables import kept_files
from tccl_py.planning.plan_sources import planned_models
from tccl_py.planning.request import of_transports

Choices = Mapping[ChoiceName, Settings]
Rates = Mapping[ChoiceName, float]
"""Bus bandwidth of each choice's jobs, GB/s."""


class Target(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A plan to verify or tune.

    `graphs` are the texts of graph files by host, THIS_HOST for a single one; NCCL_GRAPH_FILE of
    the arms names the files of `directory`.
    """

    plan: Plan
    directory: Path
    graphs: Mapping[str, str]

    @property
    def gpus(self) -> tuple[int, ...]:
        """Return the GPUs of a single host, () of several."""
        return () if self.hosts else self.plan.gpus

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the names of several hosts in rank order, () of a single one."""
        return self.plan.host_names

    @cached_property
    def arms(self) -> tuple[Arm, ...]:
        """Return an arm for each different environment, default NCCL, the baseline, first.

        Where NCCL makes no connection without the plan's variables, the baseline has them too.
        """
        # Each of several hosts gets the file of its own name.
        file = f"{HOSTS_FOLDER}/HOST.xml" if self.hosts else GRAPH_FILE
        arms: dict[tuple[tuple[str, str], ...], Arm] = {}
        for name, choice in self.plan.choices.items():
            variables = dict(self.plan.pinned_env)
            if self.plan.connects_by_variables:
                variables |= environment(self.plan.variables.settings)
            if name != "default":
                variables |= choice_variables(self.plan, self.directory, name, file)
            arm = Arm(
                name=name,
                variables=variables,
                settings=choice.settings,
                predicted_gbps=choice.best_known_gbps,
                graphs=dict(self.graphs) if "NCCL_GRAPH_FILE" in variables else {},
            )
            arms.setdefault(tuple(sorted(variables.items())), arm)
        return tuple(arms.values())

    def arm(self, name: ChoiceName) -> Arm:
        """Return the arm of a choice: default NCCL's where the choice sets nothing else."""
        return next((arm for arm in self.arms if arm.name == name), self.arms[0])

    def over(self, gpus: tuple[int, ...]) -> tuple[Arm, ...]:
        """Return the arms over a set of a host's GPUs: graph files need rings planned for it."""
        planned, graphs = self.plan.subset(gpus), dict(self.graphs)
        if planned and gpus != self.gpus:
            graphs = {THIS_HOST: subset_graph(self.plan, planned)}
        arms = (arm for arm in self.arms if planned or arm.name != "graph")
        return tuple(replace(arm, graphs=graphs) if arm.graphs else arm for arm in arms)

    @property
    def choices(self) -> Choices:
        """Return the settings of each choice that may be tuned."""
        return {"variables": self.plan.variables.settings, "graph": self.plan.settings}

    @property
    def network(self) -> str:
        """Return the network of the rows of searched settings: "" of a single host."""
        by_sockets = self.plan.settings.socket_ifname
        return "" if not self.hosts else "sockets" if by_sockets else "RDMA"

    def channels(self, name: ChoiceName) -> Sequence[int]:
        """Return channel counts of a graph file worth trying, most promising first.

        All rings get equal numbers of channels, in subsets as well. NCCL doubles the counts.
        """
        subsets = [len(subset.rings) for subset in self.plan.subsets if subset.rings]
        unit = math.lcm(self.plan.ring_count, *subsets) if name == "graph" else 1
        counts = values_of("channels", "jobs", SIZE_STAGE, network=self.network)
        return tuple(count for count in counts if count % unit == 0)

    def kinds(self, name: ChoiceName, settings: Settings) -> set[str]:
        """Return the mechanisms of hops between GPUs of a host under these settings."""
        plan, mechanisms = self.plan, set[str]()
        for path in plan.paths:
            view = class_view(plan, path.node_class, settings)
            if self.hosts:
                pairs = [pair for chain in path.chains for pair in pairwise(chain.gpus)]
            else:
                pairs = [pair for ring in plan.choices[name].rings for pair in neighbours(ring)]
            mechanisms |= {pair_mechanism(view, *pair) for pair in pairs}
        return mechanisms

    def other_paths(self, name: ChoiceName, settings: Settings) -> Sequence[Settings]:
        """Return settings with other NIC buffer placements, or other P2P levels.

        P2P levels differ only where variables alone choose the rings.
        """
        plan = self.plan
        if self.hosts and name == "graph":
            return gdr_variants(plan, settings)
        if self.hosts or name != "variables":
            return ()
        settings_found = candidates(
            plan.machine,
            plan.knowledge,
            settings.version,
            gpus=plan.gpus,
            p2p_level=pinned_level(plan.pinned_env),
        )
        levels = dict.fromkeys(candidate.p2p_level for candidate in settings_found)
        return [replace(settings, p2p_level=level) for level in levels]

    def permits(self, name: ChoiceName, settings: Settings) -> bool:
        """Return whether the rings of a choice are possible with just these settings' channels.

        Between hosts NCCL doubles few and quick channels of a graph file once more.
        """
        return name != "graph" or not self.hosts or keeps_rings(self.plan, settings)

    def retuned(self, changes: Choices, rates: Rates | None = None) -> Target:
        """Return the plan with other settings of some choices, and with the rates of their jobs."""
        plan, variables, rates = self.plan, self.plan.variables, rates or {}
        if "variables" in changes:
            settings = changes["variables"]
            # Over hosts only settings are tried that leave NCCL's own rings as they are.
            rings = variables.rings
            if not self.hosts:
                rings = default_choice(class_view(plan, 0, of_transports(settings))).rings
            variables = replace(variables, settings=settings, rings=rings)
        if "graph" in changes or rates:
            settings = changes.get("graph", plan.settings)
            plan = retuned(plan, settings, achieved_gbps=rates.get("graph"))
        # The limit was measured under the settings before.
        plan = replace(plan, variables=variables, limit_gbps=None)
        plan = _achieved(plan, rates) if rates else plan
        if self.hosts:
            graphs = host_graphs(plan)
        else:
            graphs = {THIS_HOST: nccl_files(plan, self.directory)[GRAPH_FILE]}
        return replace(self, plan=plan, graphs=graphs)

    def settled(self, result: Verification) -> Target:
        """Return the plan with the rates of a comparison, and the winner as its choice.

        Variables that lose at some size have a note. Graph files of several hosts keep their rates,
        from which NCCL's channels follow.
        """
        rates, plan = result.achieved, self.plan
        plan = _achieved(plan, rates) if self.hosts else self.retuned({}, rates).plan
        variables = result.arm("variables")
        if variables is not None and variables.objections:
            note = "; ".join(variables.objections)
            plan = replace(plan, variables=replace(plan.variables, note=note))
        dry_run = plan.dry_run or result.dry_run
        return replace(self, plan=replace(plan, winner=result.winner, dry_run=dry_run))

    def write(self) -> None:
        """Replace the plan in its directory."""
        models = planned_models(self.plan, self.directory)
        bare = not any(models.values()) and not self.hosts
        fingerprint = planned_fingerprint(self.plan, self.directory) if bare else None
        tables = kept_files(self.directory) if self.hosts else {}
        write_plan(self.plan, self.directory, models=models, fingerprint=fingerprint, tables=tables)


def read_target(plan: Plan, directory: Path) -> Target:
    """Return a plan with the graph files of its directory. Raises InputError: a file is missing."""
    graphs: dict[str, str] = {}
    target = Target(plan=plan, directory=directory, graphs=graphs)
    names = {host: host_graph_file(host) for host in target.hosts} or {THIS_HOST: GRAPH_FILE}
    for host, name in names.items():
        file = directory.resolve() / "nccl" / name
        if not file.is_file():
            raise InputError(str(file), "is missing", "plan again, or `tccl export` it")
        graphs[host] = read_text(file)
    return target


def _achieved(plan: Plan, rates: Rates) -> Plan:
    """Return the plan with what jobs without graph files achieved.

    Variables that equal default NCCL's have its bandwidth.
    """
    stock, default = plan.stock, rates.get("default")
    equal = default if plan.variables.settings == stock.settings else None
    variables = replace(plan.variables, achieved_gbps=rates.get("variables", equal))
    return replace(plan, stock=replace(stock, achieved_gbps=default), variables=variables)
