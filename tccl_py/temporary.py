"""Folders that are gone when their block ends, or with a later one, however their program ended."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import write_atomically
from tccl_py.limits import limit_reached

_MARKER = ".tccl-temporary"
_MOST_BYTES = 4096
_OF_PLACES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT)


class _Owner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The process that made a folder: its host, its number, and its start in ticks since boot."""

    temporary_folder_of: str = "tccl"
    host: str
    pid: int
    started: int


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Make a folder whose name begins with `prefix`, for the time of the block.

    A program that is killed cannot remove its folder. The folder has a lock while the program
    lives, and a marker that names the process: the next call with the prefix removes marked folders
    that have neither. What has no marker is the user's own, whatever its name.

    Raises:
        InputError: the system refuses it, or something in the block, as a full disk does.
    """
    _sweep(prefix)
    with _named(), tempfile.TemporaryDirectory(prefix=prefix) as name, _held(Path(name)):
        # Marked only now that it is locked: no other program may take it for a dead one's.
        own = _Owner(host=socket.gethostname(), pid=os.getpid(), started=_started(os.getpid()))
        write_atomically(Path(name, _MARKER), msgspec.json.encode(own).decode())
        yield Path(name)


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Say of what the system refuses in the block where that was, and what would be right."""
    try:
        yield
    except OSError as error:
        why = f"failed ({error.strerror or error})"
        reached = limit_reached(error)
        if reached is not None:
            raise reached from error
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
    """Remove this user's folders whose marker names a process that is gone."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError, ValueError):
            if not stat.S_ISDIR(_owned(path)) or not stat.S_ISREG(_owned(path / _MARKER)):
                continue
            with (path / _MARKER).open("rb") as marker:
                owner = msgspec.json.decode(marker.read(_MOST_BYTES), type=_Owner)
            if owner.temporary_folder_of != "tccl" or owner.host != socket.gethostname():
                continue
            with _held(path) as nobody:
                if nobody and not _lives(owner):
                    shutil.rmtree(path, ignore_errors=True)


def _owned(path: Path) -> int:
    """Return the mode of a path itself, not of what it links to; 0 if another user owns it."""
    found = path.lstat()
    return found.st_mode if found.st_uid == os.geteuid() else 0


def _lives(owner: _Owner) -> bool:
    with contextlib.suppress(OSError):
        return _started(owner.pid) == owner.started
    return False


def _started(pid: int) -> int:
    """Return the start of a process in ticks since boot."""
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return int(text.rpartition(")")[2].split()[19])
