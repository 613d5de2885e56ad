"""Folders that are gone when their block ends, or with a later one, however their program ended."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tccl_py.errors import InputError

_YOUNG_S = 600.0
"""A younger folder may be about to be locked."""
_OF_PLACES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT)


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A folder of this program's own, whose name begins with `prefix`.

    A program that is killed cannot take its folder away. It holds a lock on it while it lives, so
    that who makes the next one of the same name takes away what nobody holds.

    Raises:
        InputError: the system refuses it, or something in the block, as a full disk does.
    """
    _sweep(prefix)
    with _named(), tempfile.TemporaryDirectory(prefix=prefix) as name, _held(Path(name)):
        yield Path(name)


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Say of what the system refuses in the block where that was, and what would be right."""
    try:
        yield
    except OSError as error:
        why = f"failed ({error.strerror or error})"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise InputError("open files", why, "raise the limit on them (ulimit -n)") from error
        if error.errno not in _OF_PLACES:
            raise
        where = f"temporary folder {tempfile.gettempdir()}"
        raise InputError(where, why, "make room there, or name another by TMPDIR") from error


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Hold a folder against others; whether that was possible.

    Not by `files.lock`, which goes without where a file system has no locks: there nobody may take
    a folder away.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # Somebody has it, or the file system knows no locks.
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


def _sweep(prefix: str) -> None:
    """Take away this user's folders that nobody holds any more."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            left = found.st_uid == os.geteuid() and time.time() - found.st_mtime > _YOUNG_S
            if left:
                with _held(path) as nobody:
                    if nobody:
                        shutil.rmtree(path, ignore_errors=True)
