"""A plan's files for the NCCL plugin: index and library, and the variables that load them."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.machine import Fingerprint
from tccl_py.nccl.plugin.build import LIBRARY, SOURCES
from tccl_py.nccl.plugin.index import (
    INDEX_FILE,
    INDEX_VARIABLE,
    PER_COMMUNICATOR,
    IndexedGpu,
    IndexedSet,
    PluginIndex,
)
from tccl_py.nccl.settings import environment
from tccl_py.nccl.variables import env_rules
from tccl_py.plan.files import GRAPH_FILE, HOSTS_FOLDER, host_graph_file, subset_file
from tccl_py.plan.plan import Plan

if TYPE_CHECKING:
    from tccl_py.nccl.tuner import TunerTable

PLUGIN_VARIABLE = "NCCL_ENV_PLUGIN"
JOB_VARIABLE = "TCCL_JOB"
ALIKE_INDEX_FILE = "plugin-alike.index"
"""The index of a measured plan for hosts of the same kind, whose GPUs have other UUIDs."""
_MAX_PATH = 254
"""Of a network plugin's path (plugin.h); the library is one as well."""
_BUILD = "python -m tccl_py.nccl.plugin.build"


def plugin_files(
    plan: Plan,
    texts: Mapping[str, str],
    fingerprint: Fingerprint | None,
    tables: Sequence[TunerTable] = (),
    *,
    directory: Path,
) -> dict[str, str | bytes]:
    """Return names (below `nccl/` of `directory`) and contents of the plugin's files.

    `texts` are the files of `nccl_files`, `tables` the tuner's. There are none for a plan of
    several hosts, and for measured GPUs that no UUID identifies. The library is the installed one,
    else one that was built in `directory`, if any: nccl.conf may name it.
    """
    files: dict[str, str | bytes] = {}
    with suppress(InputError):
        if (index := _index(plan, texts, fingerprint, tables)) is not None:
            files[INDEX_FILE] = index.encode().decode()
            if not index.simulated:
                gpus = tuple(msgspec.structs.replace(gpu, uuid="") for gpu in index.gpus)
                alike = msgspec.structs.replace(index, gpus=gpus)
                files[ALIKE_INDEX_FILE] = alike.encode().decode()
    built = [path / LIBRARY for path in (SOURCES, directory / "nccl")]
    if files and (library := next(filter(Path.is_file, built), None)):
        files[LIBRARY] = library.read_bytes()
    return files


def _index(
    plan: Plan,
    texts: Mapping[str, str],
    fingerprint: Fingerprint | None,
    tables: Sequence[TunerTable],
) -> PluginIndex | None:
    known = None if plan.simulated else fingerprint
    if plan.is_cluster or (known is None and not plan.simulated):
        return None
    uuids = {} if known is None else known.uuids(plan.machine)
    if known is not None and not set(plan.gpus) <= set(uuids):
        return None
    gpus = tuple(
        IndexedGpu(nvml=gpu.index, bus_id=gpu.bus_id, uuid=uuids.get(gpu.index, ""))
        for gpu in sorted(plan.machine.gpus, key=lambda gpu: gpu.index)
        if gpu.index in plan.gpus
    )
    variables = environment(plan.job_settings)
    names = {gpus: name for gpus, name in graph_files(plan).items() if name in texts}
    own = {n: value for n, value in variables.items() if names and n in PER_COMMUNICATOR}
    major = "" if known is None else known.driver.partition(".")[0]
    must, forbid = env_rules(plan.job_settings)
    numa_ids = {node.index: node.numa_id for node in plan.machine.numa_nodes}

    def nodes(gpus: tuple[int, ...]) -> dict[int, int]:
        found = plan.subset(gpus)
        placed = zip(gpus, found.nodes, strict=False) if found is not None else ()
        return {gpu: numa_ids[node] for gpu, node in placed}

    return PluginIndex(
        simulated=plan.simulated,
        gpus=gpus,
        sets=tuple(
            IndexedSet(
                gpus=gpus,
                file=name,
                text=texts[name].encode(),
                nodes=nodes(gpus),
                variables=own,
            )
            for gpus, name in names.items()
        ),
        variables={name: value for name, value in variables.items() if name not in own},
        must=must,
        forbid=forbid,
        # Rates of a model do not depend on the version, and measured plans hold for their own.
        nccl="" if known is None else ".".join(plan.settings.version.split(".")[:2]),
        driver=int(major) if major.isdecimal() else None,
        numa=None if known is None else known.numa_count,
        tables=tuple(tables),
    )


def job_files(plan: Plan, texts: Mapping[str, str]) -> dict[str, str | bytes]:
    """Return `texts`, the files of `nccl_files`, with the plugin's files for a job over hosts.

    Each host has an index with its graph file, equal for hosts with equal paths. There are none
    where the job needs no graph file.
    """
    files: dict[str, str | bytes] = dict(texts)
    made: dict[int, str] = {}
    for host in plan.hosts if plan.is_cluster and plan.recommended == "graph" else ():
        gpus, text = plan.gpus_of(host), texts[host_graph_file(host.name)]
        shared = f"path-{host.path}.xml"
        if host.path not in made:
            machine = plan.cluster.classes[plan.paths[host.path].node_class].machine
            must, forbid = env_rules(plan.job_settings)
            index = PluginIndex(
                simulated=plan.simulated,
                gpus=tuple(
                    IndexedGpu(nvml=gpu.index, bus_id=gpu.bus_id)
                    for gpu in sorted(machine.gpus, key=lambda gpu: gpu.index)
                    if gpu.index in gpus
                ),
                sets=(IndexedSet(gpus=gpus, file=shared, text=text.encode()),),
                variables=environment(plan.job_settings),
                must=must,
                forbid=forbid,
                nccl="" if plan.simulated else ".".join(plan.settings.version.split(".")[:2]),
                job=sum(len(plan.gpus_of(one)) for one in plan.hosts),
            )
            try:
                made[host.path] = index.encode().decode()
            except InputError:
                return dict(texts)
            files[f"{HOSTS_FOLDER}/{shared}"] = text
        files[f"{HOSTS_FOLDER}/{host.name}.index"] = made[host.path]
    if made and (library := SOURCES / LIBRARY).is_file():
        files[LIBRARY] = library.read_bytes()
    return files


def graph_files(plan: Plan) -> dict[tuple[int, ...], str]:
    """Return the graph file (below `nccl/`) of each set of GPUs that the plugin gives one to."""
    if plan.is_cluster or plan.recommended != "graph":
        return {}
    gaining = (subset.gpus for subset in plan.subsets if subset.gains)
    return {plan.gpus: GRAPH_FILE} | {gpus: subset_file(gpus) for gpus in gaining}


def plugin_variables(directory: Path, *, alike: bool = False) -> dict[str, str]:
    """Return the variables by which a job loads the plugin with the plan in a directory.

    With `alike`, GPUs' UUIDs may differ. A job over several hosts finds the index of each host.

    Raises:
        InputError: the plan has no index, there is no library beside it, or the plugin would not
            trust the files.
    """
    folder = directory.resolve() / "nccl"
    index, library = folder / INDEX_FILE, folder / LIBRARY
    named = {INDEX_VARIABLE: index}
    if (of_hosts := sorted((folder / HOSTS_FOLDER).glob("*.index"))) and not index.is_file():
        index, named = of_hosts[0], {JOB_VARIABLE: folder.parent}
    if not index.is_file():
        what = f"has no {INDEX_FILE}, as clusters' plans, which jobs have, and earlier programs'"
        right = "do without the plugin, plan again, or make a job's files by tccl export --hosts"
        raise InputError(str(folder), what, right)
    if alike and (folder / ALIKE_INDEX_FILE).is_file():
        index = named[INDEX_VARIABLE] = folder / ALIKE_INDEX_FILE
    if not library.is_file():
        what = "has no library of the plugin: no C compiler was there when tccl-py was installed"
        raise InputError(str(folder), what, f"{_BUILD} {folder}")
    if "," in str(library) or len(str(library)) > _MAX_PATH:
        right = f"at most {_MAX_PATH} characters without a comma"
        raise InputError(str(library), "is a path that NCCL cannot open", right)
    if why := why_not_trusted(index):
        right = "let nobody but root and the user of the jobs write it, and the folders above it"
        raise InputError(str(index), f"is not trusted by the plugin: {why}", right)
    return {PLUGIN_VARIABLE: str(library)} | {name: str(path) for name, path in named.items()}


def why_not_trusted(path: Path) -> str:
    """Return who else can write a file or a folder above it, as a clause; "" if nobody can."""
    for place in (path, *path.parents):
        found = place.lstat()
        if found.st_uid not in (0, os.geteuid()):
            return f"{place} belongs to user {found.st_uid}"
        sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
            return f"others can write {place}"
    return ""
