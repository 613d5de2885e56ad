"""The manifest of a plan's directory: which files are the plan's, and the digest of each.

Jobs read graph files that name no plan. The manifest tells those of the plan from files of another
plan, and from what was edited or damaged since.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import decode_json, encode_json, read_bytes, read_text

PLAN_FILE = "plan.json"
MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 1
_AGAIN = "plan again with --force, which measures nothing twice"


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """SHA-256 digests by file name: `files` of the plan, `added` of graph files made on demand."""

    files: dict[str, str]
    added: dict[str, str] = {}
    format_version: int = FORMAT_VERSION

    @property
    def digests(self) -> dict[str, str]:
        """All digests by file name."""
        return self.files | self.added

    @property
    def identity(self) -> str:
        """The digest of the whole plan, whatever was added since."""
        return hashlib.sha256(msgspec.json.encode(sorted(self.files.items()))).hexdigest()

    def with_added(self, name: str, text: str) -> Manifest:
        """Return the manifest with one file more, or anew, that was made on demand."""
        added = self.added | {name: _digest(text.encode())}
        return msgspec.structs.replace(self, added=added)


def manifest_of(files: Mapping[str, str]) -> Manifest:
    """Return the manifest of these texts by file name."""
    return Manifest(files={name: _digest(text.encode()) for name, text in files.items()})


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a plan's directory.

    Raises:
        InputError: there is none, or it is unreadable, of another version, or damaged.
    """
    path = directory / MANIFEST_FILE
    if not path.exists():
        what = f"has no {MANIFEST_FILE}, which says what files are the plan's"
        raise InputError(str(directory), what, _AGAIN)
    found = decode_json(read_text(path), Manifest, where=str(path))
    if found.format_version != FORMAT_VERSION:
        what = f"has format version {found.format_version}"
        raise InputError(str(path), what, f"this program reads version {FORMAT_VERSION}")
    for name in found.digests:
        if name != PLAN_FILE and (name[:1] == "/" or ".." in name.split("/")):
            raise InputError(str(path), f"names {name[:60]!a}, which is elsewhere", _AGAIN)
    return found


def check_files(directory: Path, names: Iterable[str] | None = None) -> Manifest:
    """Check files of a plan's directory against its manifest, which is returned.

    Args:
        directory: of a plan.
        names: which files; all in the manifest if None.

    Raises:
        InputError: a file is missing, was changed, or is not in the manifest; or as
            `read_manifest`.
    """
    manifest = read_manifest(directory)
    digests = manifest.digests
    for name in digests if names is None else names:
        path, right = directory / name, f"restore it, or {_AGAIN}"
        if name not in digests:
            raise InputError(str(path), f"is not in the plan's {MANIFEST_FILE}", right)
        if not path.exists():
            raise InputError(str(path), "is missing", right)
        if _digest(read_bytes(path)) != digests[name]:
            raise InputError(str(path), "was changed since the plan was written", right)
    return manifest


def check_if_listed(directory: Path, name: str) -> None:
    """Check one file of a plan's directory, unless a version without manifests wrote it.

    Raises:
        InputError: as `check_files`.
    """
    if (directory / MANIFEST_FILE).exists():
        check_files(directory, [name])


def manifest_text(manifest: Manifest) -> str:
    """Return a manifest as the text of its file."""
    return encode_json(manifest)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
