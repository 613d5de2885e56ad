"""The directory of a plan: its files appear together, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import check_path, encode_json, refused
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
from tccl_py.plan.load import load_plan
from tccl_py.plan.plan import Plan
from tccl_py.plan.staging import (
    FOLDERS,
    PLAN_FILE,
    Files,
    locked,
    make,
    unmake,
    write_with_plan,
)

JOURNAL_FILE = "measurements.jsonl"
ALIKE_INDEX_FILE = "plugin-alike.index"
"""The index of a measured plan for hosts of the same kind, whose GPUs have other UUIDs."""


Models = Mapping[str, msgspec.Struct | None]
"""Models behind the rates of a simulated plan, by the names of its classes."""


@contextmanager
def output_directory(directory: Path, *, force: bool) -> Iterator[Path]:
    """Make `directory` ready to take a plan and a journal; yield the journal's path.

    A directory with a journal and no plan, or the plan of an interrupted search, is resumed. If an
    error ends the block, the directories made by this call are removed, unless the journal has
    measurements of hardware. Until the block ends no other run gets the directory: two would mix
    their lines in the journal. Raises InputError: a plan or other files are in it and `force` is
    not given, another run has it, or it cannot be made.
    """
    made: list[Path] = []
    unusable = "cannot be made", "name a writable place"
    with _taken_away(made), refused(directory, *unusable):
        check_path(directory.absolute())
        if directory.exists() and not directory.is_dir():
            raise InputError(str(directory), "is no directory", "name a new or empty one")
        make(directory, made)
    # Not taken away if another run has it by now.
    journal = directory / JOURNAL_FILE
    with locked(directory), _taken_away(made, journal):
        with refused(directory, *unusable):
            _check_held(directory, force=force)
        yield journal


@contextmanager
def _taken_away(made: Sequence[Path], journal: Path | None = None) -> Iterator[None]:
    """Remove the directories made if an error, not an interruption, ends the block."""
    try:
        yield
    except Exception:
        if journal is None or not holds_measurements(journal):
            unmake(made)
        raise


def holds_measurements(journal: Path) -> bool:
    """Return whether a file is a journal with measurements of hardware."""
    from tccl_py.sources.journal import read_journal  # noqa: PLC0415 (loads numpy)

    with suppress(InputError, OSError):
        contents = read_journal(journal)
        return not contents.header.simulated and bool(contents.measurements)
    return False


def _check_held(directory: Path, *, force: bool) -> None:
    held = {entry.name for entry in directory.iterdir()}
    where = str(directory)
    if PLAN_FILE in held:
        if not force and not _is_interrupted(directory):
            raise InputError(where, "already holds a plan", "add --force to replace it")
        return
    if held - {JOURNAL_FILE} and not force:
        right = "name a new directory, or add --force to use this one"
        raise InputError(where, "is not empty", right)
    # Without a plan beside them these are not ours to replace.
    for name in sorted(held & set(FOLDERS)):
        where = str(directory / name)
        raise InputError(where, "belongs to no plan", "name a directory without it")


def _is_interrupted(directory: Path) -> bool:
    """Return whether a directory holds the plan of an interrupted search."""
    with suppress(InputError):
        return load_plan(directory).cancelled
    return False


def machine_file(plan: Plan, directory: Path, number: int = 0) -> Path:
    """Return the file of a class's machine, by the number of the class, in a plan's directory."""
    return directory / "machines" / f"{plan.cluster.classes[number].name}.json"


def write_machine_plan(
    plan: Plan,
    directory: Path,
    *,
    models: Models | None = None,
    fingerprint: Fingerprint | None = None,
) -> None:
    """Write all files of a machine's plan below `directory`; see `write_files`."""
    texts = machine_files(plan, directory)
    nccl = {**texts, **plugin_files(plan, texts, fingerprint, directory=directory)}
    write_files(plan, nccl, directory, models=models, fingerprint=fingerprint)


def write_files(
    plan: Plan,
    nccl: Files,
    directory: Path,
    *,
    models: Models | None = None,
    fingerprint: Fingerprint | None = None,
    tables: Mapping[str, str] | None = None,
) -> None:
    """Write a plan with its files for NCCL below `directory`, and their manifest: all, or none.

    Args:
        plan: the plan.
        nccl: names below `nccl/` and contents.
        directory: an existing directory.
        models: the models behind the rates of a simulated plan, by the names of its classes,
            written in the machines' place, so that more can be planned by them.
        fingerprint: the measured host, written beside the machine.
        tables: files of chain tables, as `tables.table_files` gives them.

    Raises InputError: a file cannot be written; the earlier files are still there.
    """
    files = {f"nccl/{name}": content for name, content in nccl.items()} | dict(tables or {})
    for number, one in enumerate(plan.cluster.classes):
        found = (models or {}).get(one.name)
        files[str(machine_file(plan, Path(), number))] = (
            description_to_json(one.machine, one.knowledge, fingerprint)
            if found is None
            else encode_json(found)
        )
    files[PLAN_FILE] = encode_json(plan)
    write_with_plan(files, directory, check=load_plan)


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
