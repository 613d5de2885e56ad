"""Findings that are kept beside a plan, and are of that plan alone: they have its digest."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TypeVar

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import decode_json, encode_json, read_bytes, read_text, write_atomically
from tccl_py.plan.manifest import MANIFEST_FILE, PLAN_FILE, read_manifest

S = TypeVar("S", bound=msgspec.Struct)
"""With the fields `plan_digest` and `format_version`."""


class _Head(msgspec.Struct):
    """What findings of all versions have."""

    format_version: int
    plan_digest: str = ""


def plan_digest(directory: Path) -> str:
    """Return the digest of all files of a plan; of plan.json alone where it has no manifest.

    Raises:
        InputError: the manifest, or plan.json, cannot be read.
    """
    if (directory / MANIFEST_FILE).exists():
        return read_manifest(directory).identity
    return hashlib.blake2b(read_bytes(directory / PLAN_FILE), digest_size=8).hexdigest()


def keep_beside_plan(found: S, path: Path) -> S:
    """Write a file into a plan's directory, whole or not at all; gives what was written.

    Raises:
        InputError: it cannot be written.
    """
    whole = msgspec.structs.replace(found, plan_digest=plan_digest(path.parent))
    write_atomically(path, encode_json(whole))
    return whole


def read_beside_plan(path: Path, kind: type[S], *, version: int) -> S | None:
    """What a file in a plan's directory says of the plan that is there now; None if of another.

    Raises:
        InputError: it is unreadable, of another version, or damaged.
    """
    text = read_text(path)
    head = decode_json(text, _Head, where=str(path), name=kind.__name__)
    if head.format_version != version:
        raise InputError(
            str(path), f"has format version {head.format_version}", f"this program reads {version}"
        )
    found = decode_json(text, kind, where=str(path))
    return found if head.plan_digest == plan_digest(path.parent) else None
