"""Target of verification and tuning: a plan for one host or several, its files, and its arms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tccl_py.delivery.job import choice_variables
from tccl_py.errors import InputError
from tccl_py.experiments.jobs import Arm
from tccl_py.experiments.record import Verification
from tccl_py.experiments.spec import Groups, groups_of
from tccl_py.files import pick, read_text
from tccl_py.model.rings import neighbours
from tccl_py.nccl.graph_search import default_rings
from tccl_py.nccl.settings import (
    GRAPH_VARIABLE,
    Settings,
    environment,
    pinned_level,
    settings_from_environment,
)
from tccl_py.nccl.transport import SIZE_STAGE, candidates, final_channels, pair_mechanism, values_of
from tccl_py.nccl.validator import NodeJob, Verdict, validate_cluster
from tccl_py.plan.chains import (
    BY_VARIABLES,
    Choice,
    ChoiceName,
    Failure,
    Order,
    as_good,
    per_channel,
)
from tccl_py.plan.directory import files_of, graph_texts, write_plan
from tccl_py.plan.host_files import HOSTS_FOLDER, own_variables
from tccl_py.plan.machine_files import GRAPH_FILE, class_view
from tccl_py.plan.plan import Plan
from tccl_py.plan.results import ProvenLinks, planned_fingerprint
from tccl_py.plan.retuning import gdr_variants, keeps_rings, retune
from tccl_py.plan.tables import kept_files
from tccl_py.planning.plan_sources import planned_models
from tccl_py.planning.request import of_transports

Choices = Mapping[ChoiceName, Settings]
Rates = Mapping[ChoiceName, float]
"""Bus bandwidth of each choice's jobs, GB/s."""


class Target(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A plan to verify or tune, of one host, whose chains close, or of several."""

    plan: Plan
    directory: Path
    graphs: Mapping[str, str]
    """The texts of graph files by host, THIS_HOST for a single one."""

    @property
    def one_host(self) -> bool:
        """Return whether the plan is of a single host."""
        return self.plan.cluster.closes

    @property
    def gpus(self) -> tuple[int, ...]:
        """The GPUs of a single host, () of several."""
        return self.plan.gpus if self.one_host else ()

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of several hosts in rank order, () of a single one."""
        return tuple(filter(None, files_of(self.plan).graphs))

    @cached_property
    def arms(self) -> tuple[Arm, ...]:
        """Return an arm for each different environment, default NCCL, the baseline, first."""
        return tuple(arm for name, arm in self._arm_of_choice.items() if arm.name == name)

    @cached_property
    def _arm_of_choice(self) -> Mapping[ChoiceName, Arm]:
        """Return the arm of each choice, that of a smaller one where it sets the same.

        Where NCCL makes no connection without the plan's variables, the baseline has them too, and
        where default NCCL fails those of the smallest choice that runs.
        """
        arms: dict[ChoiceName, Arm] = {}
        different: dict[tuple[tuple[str, str], ...], Arm] = {}
        plan, control = self.plan, self.plan.choices[self.plan.control]
        baseline = plan.choices["default"] if plan.control == "default" else control
        for name, option in plan.choices.items():
            if name in self.left_out or (option.fails and name != "default"):
                continue
            variables, choice = dict(plan.pinned_env), option
            if plan.control != "default" and (name == "default" or plan.cluster.cables):
                variables |= environment(plan.shared_settings(control.settings))
                choice = control if option.fails else option
            if name != "default":
                variables |= self._variables(name)
            arm = Arm(
                name=name,
                **pick(choice, "settings", "assumed"),
                predicted_gbps=choice.best_known_gbps,
                variables=variables,
                graphs=dict(self.graphs) if GRAPH_VARIABLE in variables else {},
                of_hosts=own_variables(plan, (baseline if name == "default" else option).settings),
            )
            arms[name] = different.setdefault(tuple(sorted(variables.items())), arm)
        return arms

    def arm(self, name: ChoiceName) -> Arm:
        """Return the arm of a choice, or of a smaller one that sets the same.

        It is default NCCL's of a choice that the plan does not have. Raises InputError: its jobs
        need the plugin, which cannot be loaded.
        """
        if name in self.left_out:
            raise self.left_out[name]
        return self._arm_of_choice.get(name, self.arms[0])

    @cached_property
    def left_out(self) -> Mapping[ChoiceName, InputError]:
        """Return why choices have no arm: their jobs need the plugin, which cannot be loaded."""
        faults: dict[ChoiceName, InputError] = {}
        for name in self.plan.choices:
            try:
                self._variables(name)
            except InputError as error:
                faults[name] = error
        return faults

    def _variables(self, name: ChoiceName) -> dict[str, str]:
        # Each host gets the file of its own name.
        file = GRAPH_FILE if self.one_host else f"{HOSTS_FOLDER}/HOST.xml"
        return choice_variables(self.plan, self.directory, name, file)

    @property
    def choices(self) -> Choices:
        """Return the settings of each choice that may be tuned."""
        return {"variables": self.plan.choices["variables"].settings, "graph": self.plan.settings}

    @property
    def network(self) -> str:
        """Return the network of the rows of searched settings: "" of a single host."""
        if self.one_host:
            return ""
        return "sockets" if self.plan.settings.socket_ifname else "RDMA"

    def without_p2p(self, why: str) -> Target | None:
        """Return the plan with default NCCL failing, NCCL_P2P_DISABLE=1 as the least that runs.

        None where jobs of default NCCL use no P2P, or P2P is pinned.
        """
        plan, default = self.plan, self.plan.choices["default"]
        if default.fails or plan.pinned_env or not self._p2p(default):
            return None
        settings = replace(default.settings, p2p_level="LOC")
        rings = self._own_rings(settings)
        least = Choice(name="large-buffers", settings=settings, rings=rings)
        fails = Failure(verdict="fails")
        default = replace(default, predicted_gbps=None, fails=fails, note=why)
        # In the order of choices.
        choices = {"default": default, "large-buffers": least}
        return replace(self, plan=replace(plan, choices={**choices, **plan.choices, **choices}))

    def _p2p(self, choice: Choice) -> set[tuple[int, int, int]]:
        """Return the pairs of GPUs that a choice joins by P2P, each with its class of hosts."""
        classes = range(len(self.plan.cluster.classes))
        views = ((number, class_view(self.plan, number, choice.settings)) for number in classes)
        return {(number, *pair) for number, topo in views for pair in topo.p2p}

    def groups(self, world: int) -> tuple[Groups, ...]:
        """Return groups of ranks whose communicators are compared, as the plan holds for them."""
        return groups_of(world) if self.one_host else ()

    def verdict(self, version: str, variables: Mapping[str, str]) -> Verdict:
        """Return what NCCL makes of graph files; of one host's as many of its rings as fit."""
        plan = self.plan
        if not self.one_host:
            nodes = [
                NodeJob(
                    **pick(plan.cluster.classes[plan.class_number(host)], "machine", "knowledge"),
                    gpus=plan.gpus_of(host),
                    graph=self.graphs[host.name],
                    where=f"graph file of {host.name}",
                )
                for host in plan.hosts
            ]
            return validate_cluster(nodes, version=version, environment=variables)
        sms = [sm for gpu in self.gpus if (sm := plan.machine.gpu(gpu).sm) is not None]
        settings = settings_from_environment(variables, version=version)
        orders = plan.channel_rings
        count = final_channels(settings, sm=min(sms, default=None), channels=len(orders))
        return Verdict(verdict="used", reason="", rings=per_channel(orders, count))

    def channels(self, name: ChoiceName) -> Sequence[int]:
        """Return channel counts of a graph file worth trying, most promising first.

        All rings get equal numbers of channels, in subsets as well. NCCL doubles the counts.
        """
        of_subsets = [len(subset.rings) for subset in self.plan.subsets if subset.rings]
        unit = math.lcm(self.plan.ring_count, *of_subsets) if name == "graph" else 1
        counts = values_of("channels", "jobs", SIZE_STAGE, network=self.network)
        return tuple(count for count in counts if count % unit == 0)

    def kinds(self, name: ChoiceName, settings: Settings) -> set[str]:
        """Return the mechanisms of hops between GPUs of a host under these settings."""
        plan, mechanisms = self.plan, set[str]()
        for path in plan.paths:
            view = class_view(plan, path.node_class, settings)
            pairs = chain.from_iterable(
                map(neighbours, plan.choices[name].rings or ())
                if self.one_host
                else (pairwise(of.gpus) for of in path.chains)
            )
            mechanisms |= {pair_mechanism(view, *pair) for pair in pairs}
        return mechanisms

    def other_paths(self, name: ChoiceName, settings: Settings) -> Sequence[Settings]:
        """Return settings with other paths for the rings.

        These are other NIC buffer placements of a graph file over hosts, and other P2P levels where
        variables alone choose the rings of one host.
        """
        plan = self.plan
        if not self.one_host:
            return gdr_variants(plan, settings) if name == "graph" else ()
        if name != "variables":
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
        return name != "graph" or keeps_rings(self.plan, settings)

    def retune(self, changes: Choices, rates: Rates | None = None) -> Target:
        """Return the plan with other settings of some choices, and with the rates of their jobs."""
        plan, rates = self.plan, rates or {}
        if "graph" in changes or rates:
            settings = changes.get("graph", plan.settings)
            plan = retune(plan, settings, achieved_gbps=rates.get("graph"))
        if "variables" in changes:
            settings = changes["variables"]
            rings = self._own_rings(settings)
            plan = plan.with_choice("variables", settings=settings, rings=rings)
        # The limit was measured under the settings before.
        plan = replace(plan, limit_gbps=None)
        plan = _with_achieved(plan, rates) if rates else plan
        return replace(self, plan=plan, graphs=graph_texts(plan, self.directory))

    def _own_rings(self, settings: Settings) -> tuple[Order, ...] | None:
        if self.one_host:
            view = class_view(self.plan, 0, of_transports(settings))
            return tuple(default_rings(view).rings) or None
        # Only settings are tried that leave NCCL's own rings over hosts as they are.
        return self.plan.choices["variables"].rings

    def settle(self, result: Verification) -> Target:
        """Return the plan with the rates of a comparison, and the winner as its choice.

        Variables that lose at some size have a note; those that lose no more have none.
        """
        rates, dry_run = result.achieved, self.plan.dry_run or result.dry_run
        plan = _with_achieved(self.plan, rates)
        plan = plan.with_choice("graph", achieved_gbps=rates.get("graph"))
        if not self.one_host:
            # Graph files keep the rate that jobs ran with, from which NCCL's channels follow.
            rate = self.plan.file_gbps or self.plan.best_known_gbps
            plan = replace(plan, file_gbps=rate)
        if as_good(plan.rates) != as_good(self.plan.rates) or dry_run != self.plan.dry_run:
            # The limit is of the hops of the choice that was fastest before.
            plan = replace(plan, limit_gbps=None)
        if (plan.choices["graph"].achieved_gbps or 0.0) > (plan.bound_gbps or math.inf):
            plan = replace(plan, bound_gbps=None, proven=False, bound_assumptions=())
        notes = {arm.name: "; ".join(result.objections(arm)) for arm in result.arms}
        for name in BY_VARIABLES:
            if name in notes and name in plan.choices:
                plan = plan.with_choice(name, note=notes[name])
        if result.winner == "large-buffers" and plan.recommended != "large-buffers":
            # What smaller sets of GPUs gain was rated under other variables.
            plan = replace(plan, subsets=())
        if result.default_fails:
            # Others that join GPUs by P2P as default NCCL does fail too, unless their jobs ran.
            ran = {arm.name for arm in result.arms if not (arm.failure or arm.wrong)}
            pairs = self._p2p(plan.choices["default"])
            common = {name for name, way in plan.choices.items() if self._p2p(way) & pairs}
            fails = plan.choices["default"].fails
            if "variables" in common - ran:
                plan = plan.with_choice("variables", predicted_gbps=None, fails=fails)
            if "graph" in common - ran:
                plan = plan.with_choice("graph", fails=fails)
        return replace(self, plan=replace(plan, winner=result.winner, dry_run=dry_run))

    def write(self) -> None:
        """Replace the plan in its directory."""
        models = planned_models(self.plan, self.directory)
        bare, tables = not any(models.values()), kept_files(self.directory)
        fingerprint = planned_fingerprint(self.plan, self.directory) if bare else None
        links = ProvenLinks.load(self.directory)
        write_plan(self.plan, self.directory, models=models, fingerprint=fingerprint, tables=tables)
        if links is not None:
            links.keep(self.directory)


def target_of(plan: Plan, directory: Path, graphs: Mapping[str, str] | None = None) -> Target:
    """Return a plan with the texts of its graph files by host; None makes them of the plan."""
    graphs = graph_texts(plan, directory) if graphs is None else graphs
    return Target(plan=plan, directory=directory, graphs=graphs)


def read_target(plan: Plan, directory: Path) -> Target:
    """Return a plan with the graph files of its directory. Raises InputError: a file is missing."""
    graphs: dict[str, str] = {}
    for host, name in files_of(plan).graphs.items():
        file = directory.resolve() / "nccl" / name
        if not file.is_file():
            raise InputError(str(file), "is missing", "plan again, or `tccl export` it")
        graphs[host] = read_text(file)
    return target_of(plan, directory, graphs)


def _with_achieved(plan: Plan, rates: Rates) -> Plan:
    """Return the plan with what jobs without graph files achieved.

    Variables that equal default NCCL's have its bandwidth.
    """
    if plan.choices["default"].fails and "default" in rates:
        # The baseline was the smallest choice that runs.
        baseline = rates["default"]
        rates = {name: rate for name, rate in rates.items() if name != "default"}
        rates.setdefault(plan.control, baseline)
    default, variables = plan.choices["default"], plan.choices["variables"]
    if variables.settings == default.settings and "default" in rates:
        rates = {"variables": rates["default"], **rates}
    for name in plan.choices:
        if name != "graph":
            plan = plan.with_choice(name, achieved_gbps=rates.get(name))
    return plan
