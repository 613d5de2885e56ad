"""tuning.json of a plan's directory: the tuner's tables, as `tccl verify --tune` measured them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import read_bytes
from tccl_py.nccl.tuner import TunerTable, check_tables
from tccl_py.plan.beside import keep_beside_plan, planned_fingerprint, read_beside_plan
from tccl_py.plan.load import load_plan
from tccl_py.plan.plan import Plan
from tccl_py.plan.plugin import plugin_files
from tccl_py.plan.staging import check_files, write_with_plan

TUNING_FILE = "tuning.json"
FORMAT_VERSION = 1


class Tuning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tables measured with a choice of the plan and a version of NCCL.

    `plan_digest` is the digest of the plan's files.
    """

    choice: Literal["default", "variables", "graph"]
    nccl: str
    tables: tuple[TunerTable, ...] = ()
    simulated: bool = False
    plan_digest: str = ""
    format_version: int = FORMAT_VERSION


def load_tuning(plan: Plan, directory: Path) -> Tuning | None:
    """Return the tuning of the plan in a directory; None if none, or of an earlier plan.

    Raises InputError: tuning.json is unreadable, of another version, damaged, or does not fit.
    """
    path = directory / TUNING_FILE
    if not path.exists():
        return None
    found = read_beside_plan(path, Tuning, version=FORMAT_VERSION)
    if found is not None:
        check_tables(found.tables, plan.gpus, where=str(path))
    return found


def keep_tuning(tuning: Tuning, plan: Plan, directory: Path) -> Tuning:
    """Write tuning.json into a plan's directory, and the tables into the plugin's index.

    Each file is written whole or not at all; other findings of the plan stay. Return the content.
    The caller holds the directory (`locked`).

    Raises InputError: a table does not fit the plan, or a file of the plan was changed or cannot be
    written.
    """
    path = directory / TUNING_FILE
    check_tables(tuning.tables, plan.gpus, where=str(path))
    made_for = plan.recommended, "" if plan.simulated else _series(plan.settings.version)
    if (tuning.choice, "" if plan.simulated else _series(tuning.nccl)) != made_for:
        what = f"was measured with the choice {tuning.choice} and NCCL {tuning.nccl}"
        right = f"the plan recommends {plan.recommended} with NCCL {plan.settings.version}"
        raise InputError(str(path), what, right)
    held = {name: read_bytes(directory / name) for name in check_files(directory).files}
    kept = keep_beside_plan(tuning, path)
    texts = {
        name.removeprefix("nccl/"): content.decode()
        for name, content in held.items()
        if name.endswith(".xml")
    }
    known = None if plan.simulated else planned_fingerprint(plan, directory)
    renewed = plugin_files(plan, texts, known, tuning.tables, directory=directory)
    files = held | {f"nccl/{name}": content for name, content in renewed.items()}
    write_with_plan(files, directory, check=load_plan, findings=())
    return kept


def _series(version: str) -> str:
    return ".".join(version.split(".")[:2])
