"""tuning.json of a plan's directory: the tuner's tables, as `tccl verify --tune` measured them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from tccl_py.nccl.tuner import TunerTable, check_tables
from tccl_py.plan.beside import keep_beside_plan, read_beside_plan
from tccl_py.plan.plan import Plan

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
    """Write tuning.json into a plan's directory, whole or not at all; return its content.

    Raises InputError: a table does not fit the plan, or the file cannot be written.
    """
    path = directory / TUNING_FILE
    check_tables(tuning.tables, plan.gpus, where=str(path))
    return keep_beside_plan(tuning, path)
