"""The files of a plan's directory: those for NCCL and its plugin, and the one writer of all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import msgspec

from tccl_py.errors import check_type
from tccl_py.files import encode_json
from tccl_py.model.machine import Fingerprint, description_to_json
from tccl_py.plan.load import check_plan, load_plan
from tccl_py.plan.machine_files import MachineFiles, conf_text
from tccl_py.plan.plan import Plan
from tccl_py.plan.staging import (
    PLAN_FILE,
    Files,
    with_manifest,
    write_new_directory,
    write_with_plan,
)

if TYPE_CHECKING:
    from tccl_py.plan.host_files import ClusterFiles

Models = Mapping[str, msgspec.Struct | str | None]
"""Models behind the rates of a simulated plan, or their texts, by the names of its classes."""


def graph_files(plan: Plan) -> dict[tuple[int, ...], str]:
    """Return the graph file (below `nccl/`) of each set of GPUs that the plugin gives one to."""
    return {part.gpus: part.file for part in files_of(plan).sets if part.file is not None}


def files_of(plan: Plan) -> MachineFiles | ClusterFiles:
    """Return NCCL's files of a plan, of one host or of several."""
    if plan.cluster.closes:
        return MachineFiles(plan)
    from tccl_py.plan.host_files import ClusterFiles  # noqa: PLC0415 (not for one host)

    return ClusterFiles(plan)


def graph_texts(plan: Plan, directory: Path) -> dict[str, str]:
    """Return the text of each host's graph file, ANY_HOST's of one that needs no name."""
    texts = nccl_files(plan, directory)
    return {host: texts[name] for host, name in files_of(plan).graphs.items()}


def machine_file(plan: Plan, directory: Path, number: int = 0) -> Path:
    """Return the file of a class's machine, by the number of the class, in a plan's directory."""
    return directory / "machines" / f"{plan.cluster.classes[number].name}.json"


_PLUGIN_NOTE = "# The best without placed bounce buffers, which jobs get by `tccl run`.\n"


def nccl_files(plan: Plan, directory: Path) -> dict[str, str]:
    """Return names (below `nccl/`) and texts of all files, as they will lie in `directory`.

    Raises InputError: chains that NCCL would not take as meant, or a directory whose path cannot
    stand in an environment variable.
    """
    place = PurePosixPath(directory.resolve() / "nccl")
    files = files_of(plan).texts(place)
    env = files["env.sh"] + _PLUGIN_NOTE * plan.needs_plugin
    conf = conf_text(plan.plain_choice.settings, provenance=plan.provenance)
    return files | {"env.sh": env, "nccl.conf": conf}


def plan_files(
    plan: Plan,
    directory: Path,
    *,
    models: Models | None = None,
    fingerprint: Fingerprint | None = None,
    of_job: bool = False,
) -> dict[str, str | bytes]:
    """Return names and contents of a plan's files, as they will lie in `directory`.

    `models` are written in the machines' place, so that more can be planned by them; `fingerprint`
    is that of the measured host, written beside the machine. A plan `of_job` over several hosts has
    the plugin's files as well.
    """
    texts = nccl_files(plan, directory)
    plugin = files_of(plan).plugin(texts, fingerprint, directory, of_job=of_job)
    files: dict[str, str | bytes] = {
        f"nccl/{name}": content for name, content in {**texts, **plugin}.items()
    }
    for number, node_class in enumerate(plan.cluster.classes):
        model = (models or {}).get(node_class.name)
        if model is None:
            model = description_to_json(node_class.machine, node_class.knowledge, fingerprint)
        text = model if isinstance(model, str) else encode_json(model)
        files[str(machine_file(plan, Path(), number))] = text
    return {**files, PLAN_FILE: encode_json(plan)}


def write_plan(
    plan: Plan,
    directory: Path | str,
    *,
    models: Models | None = None,
    fingerprint: Fingerprint | None = None,
    tables: Mapping[str, str] | None = None,
) -> None:
    """Write all files of a plan below `directory`, and the manifest of them: all, or none.

    Args:
        plan: the plan.
        directory: an existing directory.
        models: the models behind the rates of a simulated plan, by the names of its classes.
        fingerprint: the measured host of a machine's plan, written beside the machine.
        tables: files of a cluster's chain tables, as `tables.table_files` gives them.

    Raises InputError: a file cannot be written; the earlier files are still there.
    """
    check_type(plan, "plan", Plan)
    check_type(directory, "directory", str, Path)
    check_type(models, "models", Mapping, type(None))
    check_type(tables, "tables", Mapping, type(None))
    directory = Path(directory)
    files = plan_files(plan, directory, models=models, fingerprint=fingerprint)
    write_with_plan({**files, **(tables or {})}, directory, check=load_plan)


def write_new_plan(plan: Plan, directory: Path | str, models: Models | None = None) -> int:
    """Write a plan, or a job's, with all its files to a new directory; return their number.

    `models` are as of `plan_files`. Raises InputError: parts of the plan do not fit together, the
    directory exists, or cannot be written.
    """
    check_plan(plan, where=str(directory))

    def files_of(place: Path) -> Files:
        return with_manifest(plan_files(plan, place, models=models, of_job=True))

    return write_new_directory(Path(directory), files_of)


def write_nccl_files(plan: Plan, output: Path) -> int:
    """Write NCCL's and launchers' files to the new directory `output`; return their number.

    Raises InputError: it exists, or cannot be written; nothing is left then.
    """
    return write_new_directory(
        output,
        lambda place: {f"nccl/{name}": text for name, text in nccl_files(plan, place).items()},
    )
