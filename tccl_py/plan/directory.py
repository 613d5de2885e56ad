"""The directory of a plan: its files appear together, or not at all."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from tccl_py.emitters.plan_files import (
    GRAPH_FILE,
    conf_text,
    env_text,
    graph_text,
    subset_file,
)
from tccl_py.errors import InputError
from tccl_py.files import write_atomically
from tccl_py.plan.plan import PLAN_FILE, Plan, per_channel
from tccl_py.runtimes.nccl.transport import view
from tccl_py.topology.machine import machine_to_json

JOURNAL_FILE = "measurements.jsonl"
_ODD = re.compile(r"[^A-Za-z0-9._-]")


def nccl_files(plan: Plan, directory: Path) -> dict[str, str]:
    """Names (below `nccl/`) and texts of everything NCCL reads, as it will lie in `directory`."""
    files = {GRAPH_FILE: _graph(plan, plan.channel_rings, plan.rate_gbps, plan.type_intra)}
    seen = view(plan.machine, plan.knowledge, plan.settings, gpus=plan.gpus)
    for subset in plan.subsets:
        orders = per_channel(subset.rings, plan.settings.channels)
        hops = {pair for ring in subset.rings for pair in _neighbours(ring)}
        farthest = max(seen.paths[f"G{i}", f"G{j}"].type for i, j in hops).name
        files[subset_file(subset.gpus)] = _graph(plan, orders, subset.rate_gbps, farthest)
    files["nccl.conf"] = conf_text(plan.settings, provenance=plan.provenance)
    graph = PurePosixPath(directory.resolve() / "nccl" / GRAPH_FILE)
    files["env.sh"] = env_text(plan.settings, graph, provenance=plan.provenance)
    return files


def _graph(
    plan: Plan, orders: tuple[tuple[int, ...], ...], rate_gbps: float, type_intra: str
) -> str:
    return graph_text(
        orders,
        plan.settings,
        rate_gbps=rate_gbps,
        type_intra=type_intra,
        provenance=plan.provenance,
    )


def _neighbours(ring: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    return zip(ring, (*ring[1:], ring[0]), strict=True)


def file_name(machine: str) -> str:
    """A machine's name as a file name: odd characters become `_`.

    >>> file_name("../box 7")
    '.._box_7'
    """
    return _ODD.sub("_", machine)[:80] or "machine"


@contextmanager
def output_directory(directory: Path, *, force: bool) -> Iterator[Path]:
    """Make `directory` ready to take a plan and its journal; gives the journal's path.

    An interrupted run's directory, with a journal and no plan, is resumed. If writing fails and
    this call made the directory, it is taken away again.

    Raises:
        InputError: it holds a plan or other files and `force` is not given, or cannot be made.
    """
    made = not directory.exists()
    try:
        if not made and not directory.is_dir():
            raise InputError(str(directory), "is no directory", "name a new or empty one")
        if not made and not force:
            _refuse_foreign(directory)
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            str(directory), f"cannot be made ({reason})", "name a writable place"
        ) from error
    try:
        yield directory / JOURNAL_FILE
    except InputError:
        if made:
            shutil.rmtree(directory, ignore_errors=True)
        raise


def _refuse_foreign(directory: Path) -> None:
    held = {entry.name for entry in directory.iterdir()}
    if PLAN_FILE in held:
        raise InputError(str(directory), "already holds a plan", "add --force to replace it")
    if held - {JOURNAL_FILE}:
        raise InputError(
            str(directory), "is not empty", "name a new directory, or add --force to use this one"
        )


def write_plan(plan: Plan, directory: Path) -> None:
    """Write all files of a plan below `directory`; `plan.json` last, so that it means "whole".

    Raises:
        InputError: a file cannot be written; what was there before is still there.
    """
    try:
        staging = Path(tempfile.mkdtemp(dir=directory, prefix=".writing-"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            str(directory), f"cannot be written ({reason})", "choose a place with free space"
        ) from error
    try:
        for name, text in nccl_files(plan, directory).items():
            _write(staging / "nccl" / name, text)
        machine = f"{file_name(plan.machine.name)}.json"
        _write(staging / "machines" / machine, machine_to_json(plan.machine))
        plan.save(staging / PLAN_FILE)
        _move_into_place(staging, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            str(path), f"cannot be written ({reason})", "choose a place with free space"
        ) from error
    write_atomically(path, text)


def _move_into_place(staging: Path, directory: Path) -> None:
    """Renames on one file system: no space is needed, and old files go only now."""
    (directory / PLAN_FILE).unlink(missing_ok=True)
    for folder in ("nccl", "machines"):
        old = directory / folder
        if old.is_symlink() or old.is_file():
            old.unlink()
        elif old.exists():
            shutil.rmtree(old)
        (staging / folder).rename(old)
    (staging / PLAN_FILE).rename(directory / PLAN_FILE)
