"""A marked block of tccl-py in a file of another owner.

Everything outside the block stays byte for byte. The first marker records the state before, and
the last our lines, so removal restores the file even without a record. Lines that others put
between the markers stay, behind the new block or in the place of the old.
"""

from __future__ import annotations

import os
import re
import stat
import zlib
from contextlib import suppress
from pathlib import Path

import msgspec

from tccl_py.errors import InputError, require
from tccl_py.files import check_path, explain_errors, read_bytes, replacement, sweep_beside

MAX_BYTES = 1024 * 1024
_RIGHT = "name a file of your own in a directory that you can write to"


_MENTION = re.compile(rb"(?:>>>|<<<) tccl-py")
# The state before: no file; a file; a file whose last line had no newline, which we added. The last
# marker has a checksum of each of our lines.
_BLOCK = re.compile(
    rb"^# >>> tccl-py, taken out by tccl uninstall \((made|kept|unended)\) >>>\n"
    rb"(.*?)^# <<< tccl-py((?: [0-9a-f]{8})*) <<<(?:\n|\Z)",
    re.M | re.S,
)


def with_block(data: bytes | None, body: str, *, where: str) -> bytes:
    """Return a file (`data`, None for a new one) with our block in place, or added at the end.

    `where` is the file's name for messages. Raises InputError: the markers are damaged.
    """
    block = _find(data or b"", where)
    lines = "".join(f" {_checksum(line)}" for line in _lines(body.encode()))
    text = f"{body}# <<< tccl-py{lines} <<<\n".encode()
    if data is not None and block is not None:
        return data[: block.start(2)] + text + _others(block) + data[block.end() :]
    before = "made" if data is None else "kept"
    start = data or b""
    if data and not data.endswith(b"\n"):
        before, start = "unended", data + b"\n"
    return start + f"# >>> tccl-py, taken out by tccl uninstall ({before}) >>>\n".encode() + text


def without_block(data: bytes, *, where: str) -> bytes | None:
    """Return the file without our block, with all other lines; None if the file was new.

    Raises InputError: the markers are damaged.
    """
    block = _find(data, where)
    if block is None:
        return data
    others = _others(block)
    remaining = data[: block.start()] + others + data[block.end() :]
    if block[1] == b"made" and block.end() == len(data) and not remaining:
        return None
    # The newline that we added goes, unless somebody has written behind it.
    last = not others and block.end() == len(data) and remaining.endswith(b"\n")
    return remaining[:-1] if block[1] == b"unended" and last else remaining


def _lines(data: bytes) -> list[bytes]:
    return re.findall(rb".*\n", data)


def _checksum(line: bytes) -> str:
    return f"{zlib.crc32(line):08x}"


def _others(block: re.Match[bytes]) -> bytes:
    """Return the lines of a block that we did not write."""
    lines, ours = _lines(block[2]), block[3].decode().split()
    return b"".join(line for line in lines if _checksum(line) not in ours)


def _find(data: bytes, where: str) -> re.Match[bytes] | None:
    mentions = len(_MENTION.findall(data))
    block = _BLOCK.search(data)
    if mentions and (block is None or mentions != 2):
        fault = "has damaged marker lines of tccl-py"
        right = "one of each is right, the first before the second: fix or delete them by hand"
        raise InputError(where, fault, right)
    return block


def has_block(path: Path) -> bool:
    """Return whether a readable file mentions our block."""
    with suppress(InputError):
        return _MENTION.search(read_bytes(path, limit=MAX_BYTES)) is not None
    return False


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A file's bytes before and after; None is no file. All users read a `shared` one."""

    path: Path
    before: bytes | None
    after: bytes | None
    shared: bool = False

    @property
    def is_needed(self) -> bool:
        """Return whether the file changes."""
        return self.before != self.after

    @property
    def others(self) -> list[str]:
        """Return lines of others between the markers, which stay outside of them."""
        block = _find(self.before or b"", str(self.path))
        lines = _others(block) if block is not None else b""
        return lines.decode("utf-8", "surrogateescape").splitlines()


def real_path(path: Path) -> Path:
    """Return the absolute path behind symbolic links. Raises InputError: circular links, or a path
    that no text file can name.
    """
    check_path(path.absolute())
    try:
        return path.absolute().resolve()
    except (OSError, RuntimeError) as error:
        raise InputError(str(path), "is a link that leads nowhere", _RIGHT) from error


def read_own(path: Path) -> bytes | None:
    """Return a file that may be changed; None for a new file. Raises InputError: the file belongs
    to another user, is not regular, has hard links, or is too large, or it or its directory is not
    writable.
    """
    with explain_errors(path, "cannot be changed", _RIGHT):
        parent = path.parent
        require(parent.is_dir(), str(parent), "is no directory", "make it first")
        require(os.access(parent, os.W_OK | os.X_OK), str(parent), "cannot be written to", _RIGHT)
        if not path.exists():
            return None
        status = path.stat()
    require(stat.S_ISREG(status.st_mode), str(path), "is no regular file", "name a file")
    require(status.st_uid == os.geteuid(), str(path), f"belongs to user {status.st_uid}", _RIGHT)
    right = "give yourself the right to write it, or name another file"
    require(os.access(path, os.W_OK), str(path), "cannot be written to", right)
    right = "a new file in its place would part them: name a file of its own"
    require(status.st_nlink <= 1, str(path), "has other names (hard links)", right)
    return read_bytes(path, limit=MAX_BYTES)


def apply_change(change: Change) -> None:
    """Write or remove the file, whole or not at all, unless it has the bytes already."""
    sweep_beside(change.path)
    if not change.is_needed:
        return
    with explain_errors(change.path, "cannot be changed", _RIGHT):
        content = change.path.read_bytes() if change.path.exists() else None
        fault = "was changed by another program in the meantime"
        require(content == change.before, str(change.path), fault, "try again")
        if change.after is None:
            change.path.unlink()
            return
        with replacement(change.path, mode=0o644 if content is None else 0o600) as handle:
            handle.write(change.after)
            handle.flush()
            if content is not None:
                _copy_attributes(change.path, handle.fileno())
            elif change.shared:
                os.fchmod(handle.fileno(), 0o644)  # whatever the umask is


def _copy_attributes(path: Path, descriptor: int) -> None:
    held = path.stat()
    if held.st_gid != os.fstat(descriptor).st_gid:
        os.fchown(descriptor, -1, held.st_gid)
    # After the group: changing that clears set-id bits.
    os.fchmod(descriptor, stat.S_IMODE(held.st_mode))
    # Access lists are attributes too; the new file may lack only what the file system lacks.
    with suppress(OSError):
        for name in os.listxattr(path):
            with suppress(OSError):
                os.setxattr(descriptor, name, os.getxattr(path, name))
