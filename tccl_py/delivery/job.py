"""What a job gets from a plan: nothing, variables, a graph file, the plugin, or placed memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from tccl_py.delivery.fit import host_here, why_elsewhere, why_not_with
from tccl_py.delivery.launched import Launched, find_launch
from tccl_py.delivery.plugin import plugin_exports
from tccl_py.errors import InputError, require
from tccl_py.model.cluster import shown
from tccl_py.nccl.settings import Settings, job_environment
from tccl_py.nccl.versions import NEWER_VARIABLE, why_no_plugin
from tccl_py.nccl_library import installed_nccl
from tccl_py.plan.chains import Choice, ChoiceName
from tccl_py.plan.directory import files_of
from tccl_py.plan.host_files import host_graph_file, own_variables
from tccl_py.plan.machine_files import part_file, placement
from tccl_py.plan.plan import Plan
from tccl_py.plan.results import Tuning
from tccl_py.plan.staging import check_files
from tccl_py.readers.hosts import NODE_NAME

Say = Callable[[str], None]
DRY_RUN = (
    "DRY RUN: rates of host memory say nothing about GPUs, NCCL stays as it is (tccl env --force)"
)


class JobRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A job over GPUs of a machine's plan, or on a host of a cluster."""

    gpus: tuple[int, ...] | None = None
    """None is all GPUs of the plan."""
    host: str | None = None
    """None is this host."""
    nccl: str | None = None
    """The version of the job's NCCL; None is the installed one."""
    choice: ChoiceName | None = None
    """None is the recommended choice."""
    plugin: bool = False
    """Whether the job loads NCCL's plugin."""
    newest_nccl: str = ""
    """The version up to which a trial of the plugin went well."""
    equal_hosts: bool = False
    """Whether GPUs' UUIDs may differ."""
    force: bool = False
    """Whether the plan of a dry run holds."""
    command: tuple[str, ...] = ()
    """What takes the place of this process, which then is one of the job's ranks or starts them."""

    def why_no_plugin(self, plan: Plan) -> str:
        """Return why the job's NCCL does not work with the plugin, as a clause; "" if it does."""
        nccl = self.nccl or planned_or_installed(plan)
        try:
            newest = self.newest_nccl or os.environ.get(NEWER_VARIABLE, "")
            return why_no_plugin(nccl, newest=newest)
        except InputError as error:
            return f"{why_no_plugin(nccl)}; {error}"


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of a job get from a plan: a choice, by variables or placed memory."""

    job: Mapping[str, Any] = {}
    """Its GPUs or its host."""
    choice: Choice = Choice(name="default", settings=Settings())
    provenance: str = ""
    """The basis of the rates."""
    variables: Mapping[str, str] = {}
    """All that the ranks need, NCCL_GRAPH_FILE and those that load the plugin included."""
    numa_id: int | None = None
    """The NUMA node for the memory of this rank, where no plugin places bounce buffers."""
    disabled: str = ""
    """Why the plan gives none of them."""
    refused: bool = False
    """Whether the job gets less than was asked for."""


class _Place(msgspec.Struct, frozen=True):
    """Where a job runs: its part of the plan."""

    job: Mapping[str, Any]
    file: str
    """The graph file for it below `nccl/`."""
    disabled: str = ""
    """Why the plan does not hold there."""
    no_file: str = ""
    """Why the graph file does not."""


def deliver(plan: Plan, directory: Path, request: JobRequest, *, say: Say) -> Delivery:
    """Return what a job gets; `say` is told why it gets nothing, or less than was asked for.

    Raises InputError: GPUs of a machine's plan, or a host, are asked of the other kind of plan, or
    a choice that the plan does not have.
    """
    # 1. Find the place of the job in the plan, and whether the plan holds there.
    if plan.dry_run and not request.force:
        say(f"the plan is disabled, it is a {DRY_RUN}")
        return Delivery(disabled=DRY_RUN)
    files = check_files(directory).files
    launch, is_named = find_launch(request.command), (request.gpus, request.host) != (None, None)
    place_of = _over_gpus if plan.cluster.closes else _on_host
    if place_of is _over_gpus and request.gpus is None and not request.plugin:
        request = msgspec.structs.replace(request, gpus=_visible(plan, launch, say))
    place = place_of(plan, directory, request, say)
    other_ranks = _other_ranks(plan, place, launch, is_named=is_named)
    disabled = place.disabled or (request.why_no_plugin(plan) if request.plugin else "")
    if launch.unlike or (place_of is _over_gpus and launch.elsewhere and not plan.simulated):
        # Other hosts have none of its variables, as of other GPUs: a job of unlike ones hangs.
        disabled = disabled or other_ranks
    if disabled:
        say(f"the plan is disabled, NCCL chooses its own rings: {disabled}")
        return Delivery(job=place.job, disabled=disabled, refused=True)
    _check_choice(plan, request)
    # 2. Choose: a graph file needs its own GPUs, and placed buffers the plugin or a rank's memory.
    choice, refused = request.choice or _offer(plan, request.gpus, say), bool(place.no_file)
    plugin, file, numa_id = request.plugin, "", None
    if place.no_file:
        # A job whose ranks have unlike NCCL_BUFFSIZE or numbers of channels fails or hangs.
        say(f"{place.no_file}: no graph file, only the variables, which all ranks need alike")
    elif choice == "graph" and not plugin and f"nccl/{place.file}" not in files:
        say(_without_file(request.gpus or plan.gpus))
        choice, refused = "variables", request.choice is not None
    elif choice == "graph" and not plugin:
        no_plugin = _why_not_placed(plan, directory, request)
        plugin = plan.settings.shm_placement and not no_plugin
        numa_id = _numa_id(plan, request, launch) if no_plugin else None
        # Over several hosts ranks may have files elsewhere, and need the same variables.
        without = "variables" if place_of is _over_gpus else choice
        if no_plugin and numa_id is None:
            say(f"variables alone, as `tccl run` starts no single rank, and {no_plugin}")
            choice, refused = without, request.choice is not None
        elif not plugin and other_ranks:
            say(f"no graph file, variables alone: {other_ranks}")
            choice, refused = without, True
        elif not plugin:
            file = place.file
    # 3. Collect the variables.
    if plugin:
        variables = plugin_exports(plan, directory, equal_hosts=request.equal_hosts)
    else:
        variables = choice_variables(plan, directory, choice, file, plugin=False)
    own, variables = _with_own_nics(plan, plan.choices[choice], place.job.get("host"), variables)
    return Delivery(
        job=place.job,
        choice=own,
        provenance=plan.provenance_of(choice),
        variables=variables,
        numa_id=numa_id,
        refused=refused,
    )


def gives_nothing(plan: Plan, directory: Path, delivery: Delivery) -> bool:
    """Return whether what a host's jobs get is default NCCL, with and without the plugin."""
    own, tuned = delivery.choice.environment, (directory / Tuning.FILE).exists()
    return not (own or tuned or files_of(plan).sets or delivery.choice.settings.shm_placement)


def _check_choice(plan: Plan, request: JobRequest) -> None:
    """Refuse a choice that the plan does not have (InputError)."""
    fits = request.choice is None or request.choice in plan.choices
    right = f"it has {', '.join(plan.choices)}"
    require(fits, f"`choice` {request.choice}", "is not in the plan", right)


def choice_variables(
    plan: Plan, directory: Path, choice: ChoiceName, file: str, *, plugin: bool = True
) -> dict[str, str]:
    """Return the variables of jobs by a choice; they load the `plugin` if placed memory needs it.

    The choice "graph" names `file` below `nccl/`, "" if there is none for the job.
    """
    settings = plan.shared_settings(plan.choices[choice].settings)
    if plugin and settings.shm_placement and not why_no_plugin(settings.version):
        return plugin_exports(plan, directory)
    graph = PurePosixPath(directory.resolve(), "nccl", file) if choice == "graph" and file else None
    return job_environment(settings, graph=graph)


def deliver_to_host(plan: Plan, directory: Path, request: JobRequest, *, say: Say) -> Delivery:
    """Return what all jobs of a host get, whatever their communicators are: no graph file.

    With the request's `plugin` it is loaded where that works; `say` is told where it does not.
    """
    _check_choice(plan, request)
    name = request.choice or plan.recommended
    own = name == plan.recommended
    what = "is for jobs over exactly its GPUs, and these lines are for all of the host"
    right = "start such jobs by `tccl run --workload`"
    require(own or name != "graph", "the graph file", what, right)
    choice = plan.plain_choice if own else plan.choices[name]
    variables = job_environment(plan.shared_settings(choice.settings))
    # The plugin's index is that of the plan's own choice.
    if request.plugin and own:
        why, newest = request.why_no_plugin(plan), request.newest_nccl
        try:
            loading = plugin_exports(plan, directory, equal_hosts=request.equal_hosts)
        except InputError as error:
            why = why or str(error)
        if why:
            say(f"without the plugin, by variables alone: {why}")
        else:
            variables = loading | ({NEWER_VARIABLE: newest} if newest else {})
    choice, variables = _with_own_nics(plan, choice, host_here(plan), variables)
    return Delivery(choice=choice, provenance=plan.provenance_of(name), variables=variables)


def _with_own_nics(
    plan: Plan, choice: Choice, host: str | None, variables: Mapping[str, str]
) -> tuple[Choice, dict[str, str]]:
    """Return a choice with a host's own NICs, and the variables with them; others have none."""
    number, settings = plan.cluster.host_classes.get(host or ""), choice.settings
    own = own_variables(plan, settings).get(host or "", {})
    on = plan.shared_settings(settings) if number is None else plan.settings_on(number, settings)
    return msgspec.structs.replace(choice, settings=on), {**variables, **own}


def _on_host(plan: Plan, directory: Path, request: JobRequest, say: Say) -> _Place:
    """Return the place of a job on one of several hosts."""
    # The plugin works with some versions of NCCL alone.
    nccl = None if request.plugin else request.nccl
    for option, value in {"`gpus`": request.gpus, "`nccl`": nccl}.items():
        fault = "is for the plan of a machine, this one is of a cluster"
        require(value is None, option, fault, "leave it out")
    name, no_file = host_here(plan, request.host), ""
    if name is None:
        no_file = "" if request.plugin else _not_planned(request.host)
    elif request.host is None:
        no_file = why_elsewhere(plan, directory, equal_hosts=request.equal_hosts, say=say)
    return _Place({"host": name}, host_graph_file(name or ""), no_file=no_file)


def _over_gpus(plan: Plan, directory: Path, request: JobRequest, say: Say) -> _Place:
    """Return the place of a job over GPUs of a single host."""
    require(request.host is None, "`host`", "is for the plan of a cluster", "leave it out")
    gpus = tuple(sorted(request.gpus or plan.gpus))
    disabled = f"it is for GPUs {','.join(map(str, plan.gpus))}"
    if set(gpus) <= set(plan.gpus):
        nccl = _why_not_used(plan, request.nccl, say=say)
        elsewhere = why_elsewhere(plan, directory, equal_hosts=request.equal_hosts, say=say)
        disabled = "; ".join(filter(None, (elsewhere, nccl)))
    return _Place({"gpus": gpus}, part_file(plan, gpus), disabled)


def _visible(plan: Plan, launch: Launched, say: Say) -> tuple[int, ...] | None:
    """Return the GPUs that a job sees, if these are not the plan's; None is all of the plan."""
    gpus = launch.gpus
    if gpus in (None, tuple(sorted(plan.gpus))):
        return None
    listed = ",".join(map(str, gpus))
    say(f"a job over GPUs {listed}, which CUDA_VISIBLE_DEVICES shows; `gpus` names others")
    return gpus


def _why_not_used(plan: Plan, nccl: str | None, *, say: Say) -> str:
    """Return why a plan is for another NCCL than `nccl`, by default the installed one; or ""."""
    installed = installed_nccl() if nccl is None and not plan.simulated else None
    version = nccl if installed is None else installed.version
    why = "" if version is None else why_not_with(plan.settings, version)
    if why and installed is not None:
        text = f"NCCL {installed.version} is here, {installed.source}"
        say(f"{text}; if the job has another, add `nccl`")
    return why


def planned_or_installed(plan: Plan) -> str:
    """Return the version of the installed NCCL; the plan's where none is found."""
    installed = installed_nccl()
    return plan.settings.version if installed is None else installed.version


def _offer(plan: Plan, gpus: Iterable[int] | None, say: Say) -> ChoiceName:
    """Return the recommended choice for a job over these GPUs, or a smaller one if it is as good.

    Without a gain by its graph file it is the variables, without one by these default NCCL.
    """
    part = None if gpus is None else plan.parts.get(tuple(sorted(gpus)))
    if part is None or part.gains:
        return plan.recommended
    if plan.recommended == "graph" and part.rings:
        return "variables"
    if plan.is_by_variables and not part.rings:
        listed = ",".join(map(str, part.gpus))
        say(f"default NCCL: the plan's variables gain nothing over GPUs {listed}")
        return "default"
    return plan.recommended


def _why_not_placed(plan: Plan, directory: Path, request: JobRequest) -> str:
    """Return why the plugin cannot place a plan's bounce buffers, as a clause; "" if it can."""
    if not plan.settings.shm_placement:
        return ""
    try:
        if not (why := request.why_no_plugin(plan)):
            plugin_exports(plan, directory, equal_hosts=request.equal_hosts)
        return why
    except InputError as error:
        return str(error)


def _numa_id(plan: Plan, request: JobRequest, launch: Launched) -> int | None:
    """Return the NUMA node that a plan names for the GPU of this rank; None if it names none."""
    gpus = request.gpus or plan.gpus
    gpu = launch.gpu_of_rank(gpus) if request.command else None
    return None if gpu is None else placement(plan, gpus).get(gpu)


def _without_file(gpus: Iterable[int]) -> str:
    """Return a notice on GPUs without a graph file in the plan."""
    text = ",".join(map(str, sorted(gpus)))
    again = f"; to plan rings for them: `tccl plan DIR --gpus {text}`"
    return f"no graph file for GPUs {text}: variables alone{again if ',' in text else ''}"


def _other_ranks(plan: Plan, place: _Place, launch: Launched, *, is_named: bool) -> str:
    """Return why the graph file may be for other ranks than the job's; "" if nothing says so.

    Where the job's GPUs or host are named, these hold.
    """
    gpus = place.job.get("gpus") or ()
    if gpus and launch.elsewhere:
        others = f"other hosts have ranks too ({launch.elsewhere})"
        return f"it is for jobs on one host, and {others}; plan them together"
    if is_named and not launch.unlike:
        return ""
    if launch.is_script:
        return f"each host has its own ({launch.elsewhere}); start each rank by `tccl run`"
    instead = "`gpus` names those of the job"
    if not gpus:
        hosts = {host.name: plan.gpus_of(host) for host in plan.hosts}
        gpus = hosts.get(place.job["host"], ())
        instead = "`tccl export --hosts` makes files of jobs, `host` says that ranks use all"
    why = launch.why_not_of(gpus) if gpus else ""
    return f"{why}; {instead}" if why else ""


def _not_planned(host: str | None) -> str:
    """Return the sentence that a host, this one if not given, is not in the plan."""
    name = host if host is not None else socket.gethostname()
    node = os.environ.get(NODE_NAME, "") if host is None else ""
    also = f" (SLURM's {shown(node)})" if node not in ("", name) else ""
    return f"host {shown(name)}{also} is not in the plan"
