"""Changes to files that belong to others: checked before, made all or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import check_path, read_bytes, replacement

MAX_BYTES = 1024 * 1024
_OWN = "name a file of your own in a directory that you can write to"


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What a file is and becomes; None is no file. `mode` is what a new one gets."""

    path: Path
    before: bytes | None
    after: bytes | None
    mode: int = 0o644

    @property
    def needed(self) -> bool:
        """Whether it changes anything."""
        return self.before != self.after


def real_place(path: Path) -> Path:
    """Where a file is, or would be, behind symbolic links.

    Raises:
        InputError: links that lead in circles, or a path that no text file can name.
    """
    check_path(path.absolute())
    try:
        return path.absolute().resolve()
    except (OSError, RuntimeError) as error:
        raise InputError(str(path), "is a link that leads nowhere", _OWN) from error


def read_own(path: Path) -> bytes | None:
    """A file that may be changed; None if there is none and one may be made.

    Raises:
        InputError: it, or its directory, is another user's or not to be written, it is no regular
            file, has other names (hard links), or is too large.
    """
    with _refused(path):
        parent = path.parent
        if not parent.is_dir():
            raise InputError(str(parent), "is no directory", "make it first")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise InputError(str(parent), "cannot be written to", _OWN)
        if not path.exists():
            return None
        found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise InputError(str(path), "is no regular file", "name a file")
    if found.st_uid != os.geteuid():
        raise InputError(str(path), f"belongs to {_user(found.st_uid)}", _OWN)
    if not os.access(path, os.W_OK):
        raise InputError(
            str(path), "is not to be written to", "give yourself the right, or another"
        )
    if found.st_nlink > 1:
        right = "a new file in its place would part them: name one of its own"
        raise InputError(str(path), "has other names (hard links)", right)
    return read_bytes(path, limit=MAX_BYTES)


def make(changes: Sequence[Change]) -> None:
    """Make all changes, or none.

    Raises:
        InputError: a file is not as it was when it was read, or cannot be written; those that were
            changed already are as before.
    """
    done: list[Change] = []
    try:
        for change in changes:
            if change.needed:
                _make(change)
                done.append(change)
    except BaseException:
        for change in reversed(done):
            with suppress(InputError, OSError):
                _make(
                    Change(
                        path=change.path,
                        before=change.after,
                        after=change.before,
                        mode=change.mode,
                    )
                )
        raise


def _make(change: Change) -> None:
    with _refused(change.path):
        now = change.path.read_bytes() if change.path.exists() else None
        if now != change.before:
            raise InputError(str(change.path), "was changed by somebody meanwhile", "try again")
        if change.after is None:
            change.path.unlink()
        else:
            _replace(change.path, change.after, change.mode)


def _replace(path: Path, data: bytes, mode: int) -> None:
    """A new file in the place of `path`, with its permissions and attributes."""
    replaced = path.exists()
    with replacement(path, mode=0o600 if replaced else mode) as handle:
        handle.write(data)
        handle.flush()
        if replaced:
            _take_over(path, handle.fileno())


def _take_over(path: Path, descriptor: int) -> None:
    held = path.stat()
    if held.st_gid != os.fstat(descriptor).st_gid:
        os.fchown(descriptor, -1, held.st_gid)
    # After the group: to change that takes set-id bits away.
    os.fchmod(descriptor, stat.S_IMODE(held.st_mode))
    # Access lists are attributes too; what a file system does not have it cannot lose.
    with suppress(OSError):
        for name in os.listxattr(path):
            with suppress(OSError):
                os.setxattr(descriptor, name, os.getxattr(path, name))


def _user(number: int) -> str:
    import pwd  # noqa: PLC0415 (only for a message)

    with suppress(KeyError):
        return f"user {pwd.getpwuid(number).pw_name}"
    return f"user {number}"


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(str(path), f"cannot be changed ({reason})", _OWN) from error
