"""Reading and writing files: bounded reads, whole writes or none, and one run at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from pathlib import Path, PurePath
from typing import Any, TypeVar

import msgspec

from tccl_py.errors import InputError

MAX_INPUT_BYTES = 32 * 1024 * 1024
"""No description of one machine, plan or graph comes near this; larger input is refused unread."""

T = TypeVar("T")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_TERMINAL = re.compile("[\x7f-\x9f]")
"""Control characters that JSON lets stand as they are."""


def read_text(path: Path, *, limit: int = MAX_INPUT_BYTES) -> str:
    """Read a UTF-8 text file of at most `limit` bytes.

    Raises:
        InputError: missing, unreadable, a directory or device, too large, or not UTF-8.
    """
    try:
        return read_bytes(path, limit=limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} byte {error.start}", "is not UTF-8 text", "save it as UTF-8"
        ) from error


def read_bytes(path: Path, *, limit: int = MAX_INPUT_BYTES) -> bytes:
    """Read a file of at most `limit` bytes.

    Raises:
        InputError: missing, unreadable, a directory or device, or too large.
    """
    try:
        if path.exists() and not path.is_file():
            raise InputError(str(path), "is not a regular file", "name a file")
        with path.open("rb") as handle:
            data = handle.read(limit + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(str(path), f"cannot be read ({reason})", "name a readable file") from error
    if len(data) > limit:
        # Whatever kind of file it should be: a journal is read by this, too.
        raise InputError(str(path), f"is larger than {limit} bytes", "name a smaller file")
    return data


def write_atomically(path: Path, text: str) -> None:
    """Write `text` beside `path` and rename it into place; on failure nothing is left behind.

    Raises:
        InputError: the place is a directory or cannot be written (no space, no permission).
    """
    temporary: str | None = None
    try:
        if path.is_dir():
            raise InputError(str(path), "is a directory", "name a file")
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        reason = error.strerror or str(error)
        raise InputError(
            str(path), f"cannot be written ({reason})", "choose a writable place with free space"
        ) from error


def lock(descriptor: int, path: Path) -> None:
    """Hold an open file or directory against other runs until it is closed, however that happens.

    A file system without locks, as some network ones, goes without.

    Raises:
        InputError: another run holds it; `path` is what the message calls it.
    """
    with contextlib.suppress(OSError):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                str(path), "is in use by another run", "wait for its end, or name another"
            ) from error


def check_path(path: PurePath) -> None:
    """Refuse a path that a job's environment could not name as it is.

    Raises:
        InputError: control characters, or bytes that are not UTF-8.
    """
    text = str(path)
    if _CONTROL.search(text):
        raise InputError(
            repr(text), "has control characters", "a job's environment names files in it"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(repr(text), "is not UTF-8", "name another directory") from error


def decode_json(text: str, kind: type[T], *, where: str, name: str = "") -> T:
    """Decode JSON into a msgspec type, strictly; `name` is what a message calls it.

    Raises:
        InputError: not JSON, nested too deep, or not of `kind`; names the place in the document.
    """
    try:
        return msgspec.json.decode(text.encode(), type=kind)
    except RecursionError as error:
        raise InputError(where, "is nested too deep", "give a file this program wrote") from error
    except msgspec.MsgspecError as error:
        raise InputError(
            where,
            f"does not fit {name or kind.__name__} ({error})",
            "give a file this program wrote",
        ) from error


def encode_json(value: Any) -> str:
    """Encode as indented JSON with a final newline; field order is the declared one.

    No control character stands in it, so that a terminal shows what a name has.
    """
    text = msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n"
    return _TERMINAL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
