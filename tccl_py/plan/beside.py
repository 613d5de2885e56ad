"""Findings beside a plan: files in its directory that hold for this plan alone."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TypeVar

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import decode_json, encode_json, read_bytes, read_text, write_atomically
from tccl_py.model.machine import DiscoveredMachine, Fingerprint
from tccl_py.plan.directory import machine_file
from tccl_py.plan.plan import Plan
from tccl_py.plan.staging import MANIFEST_FILE, PLAN_FILE, check_if_listed, read_manifest


def check_plan_directory(directory: Path) -> None:
    """Refuse anything but a directory; `load_plan` checks for the plan in it.

    Raises InputError: a file, or nothing there.
    """
    if not directory.is_dir():
        raise InputError(str(directory), "is no directory", "name a directory of `tccl plan`")


def planned_fingerprint(plan: Plan, directory: Path) -> Fingerprint | None:
    """Return the fingerprint of the host of a measured plan; None if its directory has none.

    Raises InputError: the machine's file is gone or damaged.
    """
    path = machine_file(plan, directory)
    check_if_listed(directory, str(machine_file(plan, Path())))
    try:
        found = msgspec.json.decode(read_text(path).encode(), type=DiscoveredMachine)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(str(path), "describes no machine", "plan again") from error
    return None if found.fingerprint is msgspec.UNSET else found.fingerprint


def known_fingerprint(plan: Plan, directory: Path) -> Fingerprint:
    """Return the fingerprint of the host of a measured plan.

    Raises InputError: as `planned_fingerprint`, or there is none.
    """
    found = planned_fingerprint(plan, directory)
    if found is None:
        where = str(machine_file(plan, directory))
        raise InputError(where, "does not say whose it is", "plan again")
    return found


S = TypeVar("S", bound=msgspec.Struct)
"""With the fields `plan_digest` and `format_version`."""


class _Head(msgspec.Struct):
    """The fields that findings of all versions have."""

    format_version: int
    plan_digest: str = ""


def plan_digest(directory: Path) -> str:
    """Return the digest of all files of a plan; of plan.json alone where it has no manifest.

    Raises InputError: the manifest, or plan.json, cannot be read.
    """
    if (directory / MANIFEST_FILE).exists():
        return read_manifest(directory).identity
    return hashlib.blake2b(read_bytes(directory / PLAN_FILE), digest_size=8).hexdigest()


def keep_beside_plan(found: S, path: Path) -> S:
    """Write a file into a plan's directory, whole or not at all; return the written value.

    Raises InputError: it cannot be written.
    """
    whole = msgspec.structs.replace(found, plan_digest=plan_digest(path.parent))
    write_atomically(path, encode_json(whole))
    return whole


def read_beside_plan(path: Path, kind: type[S], *, version: int) -> S | None:
    """Read a finding of the plan that is now in the directory; None if of another plan.

    Raises InputError: it is unreadable, of another version, or damaged.
    """
    text = read_text(path)
    head = decode_json(text, _Head, where=str(path), name=kind.__name__)
    if head.format_version != version:
        what = f"has format version {head.format_version}"
        raise InputError(str(path), what, f"this program reads {version}")
    found = decode_json(text, kind, where=str(path))
    return found if head.plan_digest == plan_digest(path.parent) else None
