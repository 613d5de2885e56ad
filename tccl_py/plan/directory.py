"""The files of a machine's plan, and a new directory with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import encode_json
from tccl_py.model.machine import Fingerprint, description_to_json
from tccl_py.nccl.plugin import LIBRARY, found_library
from tccl_py.nccl.plugin.index import (
    INDEX_FILE,
    PER_COMMUNICATOR,
    IndexedGpu,
    IndexedSet,
    PluginIndex,
)
from tccl_py.nccl.settings import environment
from tccl_py.nccl.variables import env_rules
from tccl_py.plan.files import graph_files, machine_files
from tccl_py.plan.plan import Plan
from tccl_py.plan.staging import PLAN_FILE, Files, with_manifest, write_new_directory

ALIKE_INDEX_FILE = "plugin-alike.index"
"""The index of a measured plan for hosts of the same kind, whose GPUs have other UUIDs."""


Models = Mapping[str, msgspec.Struct | None]
"""Models behind the rates of a simulated plan, by the names of its classes."""


def machine_file(plan: Plan, directory: Path, number: int = 0) -> Path:
    """Return the file of a class's machine, by the number of the class, in a plan's directory."""
    return directory / "machines" / f"{plan.cluster.classes[number].name}.json"


def write_new_plan(plan: Plan, output: Path) -> None:
    """Write all files of a machine's plan to the new directory `output`.

    Raises InputError: it exists, or cannot be written; nothing is left then.
    """
    write_new_directory(output, lambda place: with_manifest(machine_plan_files(plan, place)))


def machine_plan_files(
    plan: Plan,
    directory: Path,
    *,
    models: Models | None = None,
    fingerprint: Fingerprint | None = None,
) -> dict[str, str | bytes]:
    """Return names and contents of a machine's plan's files, as they will lie in `directory`."""
    texts = machine_files(plan, directory)
    nccl = {**texts, **plugin_files(plan, texts, fingerprint, directory=directory)}
    return plan_files(plan, nccl, models=models, fingerprint=fingerprint)


def plan_files(
    plan: Plan,
    nccl: Files,
    *,
    models: Models | None = None,
    fingerprint: Fingerprint | None = None,
) -> dict[str, str | bytes]:
    """Return names and contents of a plan's files, with `nccl`, those below `nccl/`.

    `models` are written in the machines' place, so that more can be planned by them; `fingerprint`
    is that of the measured host, written beside the machine.
    """
    files: dict[str, str | bytes] = {f"nccl/{name}": content for name, content in nccl.items()}
    for number, one in enumerate(plan.cluster.classes):
        found = (models or {}).get(one.name)
        files[str(machine_file(plan, Path(), number))] = (
            description_to_json(one.machine, one.knowledge, fingerprint)
            if found is None
            else encode_json(found)
        )
    return {**files, PLAN_FILE: encode_json(plan)}


# The plugin's files: index and library.


Tables = Mapping[tuple[int, ...], Sequence[str]]
"""Lines of the tuner for sets of GPUs (`nccl.tuner.tune_lines`)."""


def plugin_files(
    plan: Plan,
    texts: Mapping[str, str],
    fingerprint: Fingerprint | None,
    tables: Tables | None = None,
    *,
    directory: Path,
) -> dict[str, str | bytes]:
    """Return names (below `nccl/` of `directory`) and contents of the plugin's files.

    `texts` are the files of `nccl_files`. There are none for a plan of several hosts, and for
    measured GPUs that no UUID identifies. The library is the installed one, else one that was built
    in `directory`, if any: nccl.conf may name it.
    """
    files: dict[str, str | bytes] = {}
    known = None if plan.simulated else fingerprint
    uuids = {} if known is None else known.uuids(plan.machine)
    if plan.is_cluster or not (plan.simulated or set(plan.gpus) <= set(uuids)):
        return files
    with suppress(InputError):
        index = _index(plan, texts, known, tables or {})
        files[INDEX_FILE] = index.encode().decode()
        if known is not None:
            gpus = tuple(msgspec.structs.replace(gpu, uuid="") for gpu in index.gpus)
            alike = msgspec.structs.replace(index, gpus=gpus)
            files[ALIKE_INDEX_FILE] = alike.encode().decode()
        if library := found_library(directory / "nccl"):
            files[LIBRARY] = library.read_bytes()
    return files


def _index(
    plan: Plan, texts: Mapping[str, str], known: Fingerprint | None, tables: Tables
) -> PluginIndex:
    variables = environment(plan.job_settings)
    names = {gpus: name for gpus, name in graph_files(plan).items() if name in texts}
    own = {n: value for n, value in variables.items() if names and n in PER_COMMUNICATOR}
    major = "" if known is None else known.driver.partition(".")[0]
    numa_ids = {node.index: node.numa_id for node in plan.machine.numa_nodes}

    def nodes(gpus: tuple[int, ...]) -> dict[int, int]:
        found = plan.subset(gpus)
        placed = zip(gpus, found.nodes, strict=False) if found is not None else ()
        return {gpu: numa_ids[node] for gpu, node in placed}

    sets = tuple(
        IndexedSet(
            gpus=gpus, file=name, text=texts[name].encode(), nodes=nodes(gpus), variables=own
        )
        for gpus, name in names.items()
    )
    index = index_of_class(plan, 0, sets, {} if known is None else known.uuids(plan.machine))
    return msgspec.structs.replace(
        index,
        variables={name: value for name, value in variables.items() if name not in own},
        driver=int(major) if major.isdecimal() else None,
        numa=None if known is None else known.numa_count,
        tables=tables,
    )


def index_of_class(
    plan: Plan, number: int, sets: tuple[IndexedSet, ...], uuids: Mapping[int, str]
) -> PluginIndex:
    """Return the plugin's index for hosts of a class, with graph files for `sets`."""
    gpus = sorted(plan.cluster.classes[number].machine.gpus, key=lambda gpu: gpu.index)
    must, forbid = env_rules(plan.job_settings)
    return PluginIndex(
        simulated=plan.simulated,
        gpus=tuple(
            IndexedGpu(nvml=gpu.index, bus_id=gpu.bus_id, uuid=uuids.get(gpu.index, ""))
            for gpu in gpus
            if gpu.index in plan.class_gpus[number]
        ),
        sets=sets,
        variables=environment(plan.job_settings),
        must=must,
        forbid=forbid,
        # Rates of a model do not depend on the version, and measured plans hold for their own.
        nccl="" if plan.simulated else ".".join(plan.settings.version.split(".")[:2]),
    )
