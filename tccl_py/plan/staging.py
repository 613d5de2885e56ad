"""Files that appear together or not at all: written beside their place and renamed into it.

A plan's directory also holds files of others, so it cannot be replaced as a whole. Its parts are
replaced in turn, and each step can be undone by the next run after a kill.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import (
    SPACE,
    check_path,
    check_version,
    decode_json,
    encode_json,
    explain_errors,
    lock,
    read_bytes,
    read_text,
    sweep,
    sweep_beside,
)

PLAN_FILE = "plan.json"
MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 1
AGAIN = "plan again by `tccl plan DIR --force` with the same options, which measures nothing twice"
_PLUGIN_FILES = ("nccl/plugin", "nccl/libnccl-env-")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """SHA-256 digests of a plan's files by file name."""

    files: dict[str, str]
    format_version: int = FORMAT_VERSION

    @property
    def identity(self) -> str:
        """The digest of the whole plan but the plugin's files, to which tuning adds."""
        files = {n: digests for n, digests in self.files.items() if not n.startswith(_PLUGIN_FILES)}
        return digest(msgspec.json.encode(sorted(files.items())))


def digest(data: bytes) -> str:
    """Return the SHA-256 digest of a file."""
    return hashlib.sha256(data).hexdigest()


Files = Mapping[str, str | bytes]
"""Contents of files by name."""


def with_manifest(files: Files) -> dict[str, str | bytes]:
    """Return a plan's files with the manifest of them."""
    manifest = Manifest(files={name: digest(_bytes(content)) for name, content in files.items()})
    return {**files, MANIFEST_FILE: encode_json(manifest)}


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a plan's directory.

    Raises InputError: there is none, or it is unreadable, of another version, or damaged.
    """
    path = directory / MANIFEST_FILE
    if not path.exists():
        fault = f"has no {MANIFEST_FILE}, which says what files are the plan's"
        raise InputError(str(directory), fault, AGAIN)
    manifest = decode_json(read_text(path), Manifest, where=str(path))
    check_version(manifest.format_version, FORMAT_VERSION, path)
    for name in manifest.files:
        if name != PLAN_FILE and (name[:1] == "/" or ".." in name.split("/")):
            raise InputError(str(path), f"names {name[:60]!a}, which is elsewhere", AGAIN)
    return manifest


def check_files(directory: Path, names: Iterable[str] | None = None) -> Manifest:
    """Check files (None: all) of a plan's directory against its manifest, which is returned.

    Raises InputError: a file is missing, was changed, or is not in the manifest; or as
    `read_manifest`.
    """
    manifest = read_manifest(directory)
    digests = manifest.files
    for name in digests if names is None else names:
        path, fault = directory / name, ""
        if name not in digests:
            fault = f"is not in the plan's {MANIFEST_FILE}"
        elif not path.exists():
            fault = "is missing"
        elif digest(read_bytes(path)) != digests[name]:
            fault = "was changed since the plan was written"
        if fault:
            raise InputError(str(path), fault, f"restore it, or {AGAIN}")
    return manifest


def check_if_listed(directory: Path, name: str) -> None:
    """Check one file of a plan's directory, unless a version without manifests wrote it.

    Raises InputError: as `check_files`.
    """
    if (directory / MANIFEST_FILE).exists():
        check_files(directory, [name])


FINDINGS = (
    *("verify.json", "workloads.json", "tuning.json", "means.json"),
    *("explanation.json", "report.html", "links.json"),
)
"""What other commands leave there of a plan; it says nothing of another one."""
TABLES = "tables"
FOLDERS = ("nccl", "machines", TABLES)
"""What a plan's directory has beside its files; each plan replaces all. TABLES may be empty."""
STAGING = ".writing-"
REPLACING = ".tccl-replacing"
"""Holds new parts that are not in place yet, and old ones, until all are."""
_MARK = ".tccl"
"""A file in it: nobody else's folder of that name is taken for it."""
PATIENCE_S = 10.0
"""How long to wait for another run that writes; it takes some milliseconds."""
_REPLACING_S = 2.0
_NAP_S = 0.01
_PARTS = (*FOLDERS, PLAN_FILE, MANIFEST_FILE)
_WRITERS = 16


def write_with_plan(
    files: Files,
    directory: Path,
    *,
    check: Callable[[Path], object],
    findings: Sequence[str] = FINDINGS,
) -> None:
    """Write a plan's files below `directory`, with their manifest; `findings` of another plan go.

    Args:
        files: contents by file name: plan.json, and files below FOLDERS.
        directory: an existing directory, where no other run is at work.
        check: reads the plan from the staging directory, before anything is replaced.
        findings: names of files to remove.

    Raises InputError: a file cannot be written; the earlier files are still there.
    """
    with explain_errors(directory, "cannot be written", SPACE):
        _tidy(directory)
    staged = {**with_manifest(files), _MARK: ""}
    with _stage(staged, directory, STAGING, directory) as staging:
        try:
            check(staging)
        except InputError as error:
            fault = f"the plan could not be read again, so none was written ({error.what})"
            raise InputError(str(directory), fault, f"{error.right}; report this fault") from error
        with explain_errors(directory, "cannot be written", SPACE):
            (staging / TABLES).mkdir(exist_ok=True)
            _replace(staging, directory, findings)


def settle(directory: Path) -> None:
    """Wait until no run replaces the plan in a directory; undo the replacing by a killed run.

    Without permission to write, a reader takes the files as they are.
    """
    end = time.monotonic() + PATIENCE_S
    while _is_replaced(directory) and os.access(directory, os.W_OK) and time.monotonic() < end:
        with suppress(InputError), lock_directory(directory):
            return
        time.sleep(_NAP_S)


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Hold `directory` against other runs; the system releases it however this run ends.

    The remains of a killed run are undone or swept first. Raises InputError: another run has it, or
    it cannot be opened.
    """
    with explain_errors(directory, "cannot be opened", "name a readable place"):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not lock(descriptor, directory):
            # No locks here: a run that still replaces its plan by then was killed.
            end = time.monotonic() + _REPLACING_S
            while _is_replaced(directory) and time.monotonic() < end:
                time.sleep(_NAP_S)
        with explain_errors(directory, "cannot be tidied up", "make it writable"):
            _tidy(directory)
        yield
    finally:
        os.close(descriptor)


def write_new_directory(output: Path, files_of: Callable[[Path], Files]) -> int:
    """Write the files that `files_of(output)` names to a new directory; return their number.

    Raises InputError: it exists, or cannot be written; nothing is left then.
    """
    with explain_errors(output, "cannot be written", SPACE):
        check_path(output.absolute())
        if output.exists() or output.is_symlink():
            raise InputError(str(output), "already exists", "name a new directory")
        files = files_of(output)
        made: list[Path] = []
        try:
            make(output.absolute().parent, made)
            prefix = f".{output.name[:100]}.tccl-"
            parent = output.absolute().parent
            with _stage(files, parent, prefix, output, linked=True) as staging:
                staging.rename(output)
        except BaseException:
            unmake(made)
            raise
    return len(files)


def make(directory: Path, made: list[Path]) -> None:
    """Make a directory and its parents; each new directory is added to `made`."""
    missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o755)
        made.append(folder)


def unmake(made: Sequence[Path]) -> None:
    """Remove directories made by `make`; files of others in the parents stay."""
    if made:
        shutil.rmtree(made[-1], ignore_errors=True)
    for folder in reversed(made[:-1]):
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def _stage(
    files: Files, directory: Path, prefix: str, target: Path, *, linked: bool = False
) -> Iterator[Path]:
    """Make a new folder in `directory` with these files, removed at the end unless it was moved.

    Remains of killed runs with its `prefix` are swept. Errors name `target`: the folder is gone.
    With `linked`, equal files are hard links, which saves waiting for the disk.
    """
    sweep(directory, prefix)
    staging = directory / (prefix + os.urandom(4).hex())
    with explain_errors(target, "cannot be written", SPACE):
        # Whatever the umask: NCCL's plugin trusts nothing that a group can write.
        staging.mkdir(mode=0o755)
        descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
    try:
        lock(descriptor, staging)
        # Each file waits for the disk, which takes many at once as well as one.
        with (
            explain_errors(target, "cannot be written", SPACE),
            ThreadPoolExecutor(_WRITERS) as writers,
        ):
            for name in sorted({str(parent) for file in files for parent in Path(file).parents}):
                (staging / name).mkdir(mode=0o755, exist_ok=True)
            # Of equal files, as graphs of equal hosts, one waits where the others may be links.
            first = {content: name for name, content in reversed(list(files.items()))}
            alone = [name for name in files if not linked or first[files[name]] == name]
            list(writers.map(_write_new, (staging / n for n in alone), (files[n] for n in alone)))
            for name in files.keys() - set(alone):
                _link(staging / first[files[name]], staging / name, files[name])
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(descriptor)


def _link(first: Path, path: Path, content: str | bytes) -> None:
    try:
        path.hardlink_to(first)
    except OSError:  # The file system has no links, or no more of them.
        _write_new(path, content)


def _write_new(path: Path, content: str | bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o644), "wb") as handle:
        handle.write(_bytes(content))
        handle.flush()
        os.fsync(handle.fileno())


def _replace(staging: Path, directory: Path, findings: Sequence[str]) -> None:
    """Rename on one file system: no space is needed, and old files go only after all renames.

    They go with `staging`: deleting hundreds here would leave a killed run time to end between.
    """
    moving = directory / REPLACING
    staging.rename(moving)
    try:
        for name in findings:
            if (directory / name).is_file():
                (directory / name).rename(moving / f"old-{name}")
        for name in _PARTS:
            place = directory / name
            if os.path.lexists(place):
                place.rename(moving / f"old-{name}")
            (moving / name).rename(place)
        with suppress(OSError):  # Only an empty folder can be removed.
            (directory / TABLES).rmdir()
        # From here on it cannot be undone.
        moving.rename(staging)
    except BaseException:
        _undo(directory)
        raise


def _tidy(directory: Path) -> None:
    """Undo and sweep what a killed run left in a plan's directory."""
    _undo(directory)
    sweep(directory, STAGING)
    for name in (*FINDINGS, MANIFEST_FILE):
        sweep_beside(directory / name)


def _undo(directory: Path) -> None:
    """Put back the plan from before `_replace` began; this may be killed as well."""
    moving = directory / REPLACING
    if not _is_replaced(directory):
        return
    for name in reversed((*FINDINGS, *_PARTS)):
        place, old = directory / name, moving / f"old-{name}"
        if name in _PARTS and os.path.lexists(place) and not os.path.lexists(moving / name):
            place.rename(moving / name)
        if os.path.lexists(old):
            old.rename(place)
    gone = directory / f"{STAGING}{os.urandom(4).hex()}"
    moving.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _is_replaced(directory: Path) -> bool:
    return (directory / REPLACING / _MARK).is_file()
