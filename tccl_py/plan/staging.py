"""Files that appear together or not at all: written beside their place and renamed into it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from tccl_py.errors import InputError
from tccl_py.files import check_path, write_atomically
from tccl_py.plan.plan import PLAN_FILE

FINDINGS = ("verify.json", "explanation.json", "report.html")
"""What other commands leave there of a plan; it says nothing of another one."""
FOLDERS = ("nccl", "machines")
"""What a plan's directory has beside its files; each plan replaces both."""
STAGING = ".writing-"
_WRITERS = 16
_SPACE = "choose a writable place with free space"


def write_with_plan(
    files: Mapping[str, str], directory: Path, *, save: Callable[[Path], None]
) -> None:
    """Write a plan's files below `directory`; `save` writes plan.json, which is there last.

    Args:
        files: texts by their names below FOLDERS; each folder has one at least.
        directory: where; it exists.
        save: called with the place that plan.json has until then.

    Raises:
        InputError: a file cannot be written; what was there before is still there.
    """
    for left in directory.glob(f"{STAGING}*"):
        shutil.rmtree(left, ignore_errors=True)
    with _staged(files, directory, target=directory) as staging:
        save(staging / PLAN_FILE)
        with refused(directory, "cannot be written", _SPACE):
            _move_into_place(staging, directory)


def write_new_directory(output: Path, files_of: Callable[[Path], Mapping[str, str]]) -> int:
    """Write the files that `files_of(output)` names to a new directory; how many those are.

    Raises:
        InputError: it exists, or cannot be written; nothing is left of it then.
    """
    with refused(output, "cannot be written", _SPACE):
        check_path(output.absolute())
        if output.exists() or output.is_symlink():
            raise InputError(str(output), "already exists", "name a new directory")
        files = files_of(output)
        made: list[Path] = []
        try:
            make(output.absolute().parent, made)
            with _staged(files, output.absolute().parent, target=output) as staging:
                staging.chmod(0o755)
                staging.rename(output)
        except BaseException:
            unmake(made)
            raise
    return len(files)


def write_file(path: Path, text: str) -> None:
    """Write one file, and the folders that it is in.

    Raises:
        InputError: it cannot be written.
    """
    with refused(path, "cannot be written", _SPACE):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)


@contextmanager
def refused(path: Path, what: str, right: str) -> Iterator[None]:
    """Turns what the system says of `path` into a sentence for the user."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(str(path), f"{what} ({reason})", right) from error


def make(directory: Path, made: list[Path]) -> None:
    """Make a directory and those that it is in; each new one is added to `made`."""
    missing = [one for one in (directory, *directory.parents) if not one.exists()]
    for folder in reversed(missing):
        folder.mkdir()
        made.append(folder)


def unmake(made: Sequence[Path]) -> None:
    """Take away directories that `make` made; what others put into the parents stays."""
    if made:
        shutil.rmtree(made[-1], ignore_errors=True)
    for folder in reversed(made[:-1]):
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def _staged(files: Mapping[str, str], directory: Path, *, target: Path) -> Iterator[Path]:
    """A folder in `directory` with these files, gone at the end unless it was moved.

    Raises:
        InputError: a file cannot be written; names `target`, as the folder is gone by then.
    """
    with refused(target, "cannot be written", _SPACE):
        staging = Path(tempfile.mkdtemp(dir=directory, prefix=STAGING))
    try:
        # Each file waits for the disk, which takes many at once as well as one.
        with ThreadPoolExecutor(_WRITERS) as writers:
            for _ in writers.map(write_file, (staging / name for name in files), files.values()):
                pass
        yield staging
    except InputError as error:
        raise InputError(str(target), error.what, error.right) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _move_into_place(staging: Path, directory: Path) -> None:
    """Renames on one file system: no space is needed, and old files go only now.

    They go with `staging`: to delete hundreds here would leave a killed run time to end between.
    """
    (directory / PLAN_FILE).unlink(missing_ok=True)
    for name in FINDINGS:
        if (directory / name).is_file():
            (directory / name).rename(staging / f"old-{name}")
    for folder in FOLDERS:
        place = directory / folder
        if place.is_symlink() or place.exists():
            place.rename(staging / f"old-{folder}")
        (staging / folder).rename(place)
    (staging / PLAN_FILE).rename(directory / PLAN_FILE)
