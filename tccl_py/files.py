"""Files: bounded reads, whole writes or none, locks, JSON, and temporary folders."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path, PurePath
from typing import Any, BinaryIO, TypeVar

import msgspec

from tccl_py.errors import InputError, limit_reached, require

MAX_INPUT_BYTES = 32 * 1024 * 1024  # Larger input is refused unread
_OURS = "give a file this program wrote"
SPACE = "choose a writable place with free space"

T = TypeVar("T")
Text = TypeVar("Text", bound="TextValue")
Result = TypeVar("Result", bound=msgspec.Struct)
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_BEYOND_ASCII = re.compile("[\x7f-\U0010ffff]")  # JSON lets all stand as they are


@contextmanager
def explain_errors(path: Path, fault: str, right: str) -> Iterator[None]:
    """Turn a system error about `path` into a sentence for the user."""
    try:
        yield
    except OSError as error:
        fault = f"{fault} ({error.strerror or error})"
        raise limit_reached(error) or InputError(str(path), fault, right) from error


def read_text(path: Path, *, limit: int = MAX_INPUT_BYTES) -> str:
    """Read a UTF-8 text file of at most `limit` bytes; InputError as `read_bytes`, or not UTF-8."""
    try:
        return read_bytes(path, limit=limit).decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"{path} byte {error.start}"
        raise InputError(where, "is not UTF-8 text", "save it as UTF-8") from error


def read_bytes(path: Path, *, limit: int = MAX_INPUT_BYTES) -> bytes:
    """Read a file of at most `limit` bytes; InputError as `reading`, or too large."""
    with reading(path) as handle:
        data = handle.read(limit + 1)
    require(len(data) <= limit, str(path), f"is larger than {limit} bytes", "name a smaller file")
    return data


@contextmanager
def reading(path: Path) -> Iterator[BufferedReader]:
    """Open a file to read its bytes; InputError if it is missing, unreadable or no regular file."""
    with explain_errors(path, "cannot be read", "name a readable file"):
        if path.exists() and not path.is_file():
            fault = "is a directory" if path.is_dir() else "is not a regular file"
            raise InputError(str(path), fault, "name a file")
        # A FIFO may appear there meanwhile; do not wait for its writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as handle:
            yield handle


def missing(path: Path, otherwise: str = "does not exist") -> str:
    """Return whether a path is a link to nothing, or else the other reason, as a clause."""
    # Path's methods raise for a name that is too long.
    dangling = os.path.islink(path) and not os.path.exists(path)  # noqa: PTH110, PTH114
    return "is a symbolic link to nothing" if dangling else otherwise


def write_atomically(path: Path, text: str) -> None:
    """Write `text` beside `path` and rename it into place; on failure nothing is left behind.

    A replaced file keeps its permissions. InputError: a directory, or not to be written.
    """
    with explain_errors(path, "cannot be written", SPACE):
        require(not path.is_dir(), str(path), "is a directory", "name a file")
        held = stat.S_IMODE(path.stat().st_mode) if path.is_file() else None
        with replacement(path, mode=0o644 if held is None else held) as handle:
            handle.write(text.encode())
            if held is not None:
                os.fchmod(handle.fileno(), held)


def write_named(path: Path, text: str) -> None:
    """Write `text` to what a user named: a device or a pipe as it is, a file as `write_atomically`.

    A link stays, and what it leads to is written. InputError: not to be written.
    """
    with explain_errors(path, "cannot be written", SPACE):
        if path.exists() and not path.is_file() and not path.is_dir():
            # Renaming a file into the place of a device would take the device away.
            path.write_text(text, encoding="utf-8")
            return
        try:
            target = path.resolve() if path.is_symlink() else path
        except RuntimeError as error:
            raise InputError(str(path), f"cannot be written ({error})", SPACE) from error
    write_atomically(target, text)


@contextmanager
def replacement(path: Path, *, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Open a new file to replace `path` in one step at the end of a block without errors."""
    sweep_beside(path)
    descriptor, temporary = _opened_beside(path, mode)
    try:
        with os.fdopen(descriptor, "wb") as handle:
            yield handle
            handle.flush()
            os.fsync(descriptor)
            temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _opened_beside(path: Path, mode: int) -> tuple[int, Path]:
    while True:
        temporary = path.with_name(_prefix_of(path) + os.urandom(4).hex())
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if temporary.exists():
            return descriptor, temporary
        # Swept before it was held.
        os.close(descriptor)


def _prefix_of(path: Path) -> str:
    return f".{path.name[:100]}.tccl-"


def sweep_beside(path: Path) -> None:
    """Remove files of killed runs that were to replace `path`."""
    sweep(path.parent, _prefix_of(path))


def sweep(directory: Path, prefix: str, *, marker: str = "") -> None:
    """Remove this user's unlocked files and folders with this prefix.

    With a `marker`, only folders that have a file of this name. File systems without locks keep
    all.
    """
    with suppress(OSError):
        for path in directory.iterdir():
            if path.name.startswith(prefix):
                with suppress(OSError):
                    # What is unmarked may be new: its lock is left to the program that made it.
                    if marker and not stat.S_ISREG((path / marker).lstat().st_mode):
                        continue
                    with _hold(path, os.O_NONBLOCK) as unused:
                        ours = path.lstat().st_uid == os.geteuid()
                        if unused and ours and path.is_dir():
                            shutil.rmtree(path, ignore_errors=True)
                        elif unused and ours:
                            path.unlink()


def lock(descriptor: int, path: Path) -> bool:
    """Lock an open file or directory; False without locks, InputError if another run has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        right = "wait for its end, or name another"
        raise InputError(str(path), "is in use by another run", right) from error
    except OSError:
        return False
    return True


def check_path(path: PurePath) -> None:
    """Check that a job's environment can name a path: no control characters, and UTF-8."""
    text = str(path)
    right = "a job's environment names files in it"
    require(not _CONTROL.search(text), repr(text), "has control characters", right)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(repr(text), "is not UTF-8", "name another directory") from error


class TextValue:
    """A value compared, hashed and stored as `_text`, set in `__init__`; see `from_text`."""

    __slots__ = ("_text",)
    _text: str

    @classmethod
    def from_text(cls: type[Text], text: str) -> Text:
        """Parse the text form; InputError if the text has no such value."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._text!r})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and str(other) == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (type(self).from_text, (self._text,))


def write_value(value: object) -> str:
    """Return the text of a TextValue (msgspec's `enc_hook`)."""
    if isinstance(value, TextValue):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} has no form in files")


def parse_value(kind: type[Any], value: object) -> Any:
    """Parse a TextValue (msgspec's `dec_hook`); ValueError unless in canonical form."""
    if not issubclass(kind, TextValue):
        raise NotImplementedError(f"{kind.__name__} has no form in files")
    if not isinstance(value, str):
        raise ValueError(f"Expected `str`, got `{type(value).__name__}`")
    try:
        result = kind.from_text(value)
    except InputError as error:
        raise ValueError(f"{error.where} {error.what}") from error
    if str(result) != value:
        raise ValueError(f"{value[:60]!r} is not in canonical form: {str(result)[:60]}")
    return result


def decode_json(
    text: str | bytes, kind: type[T], *, where: str, name: str = "", right: str = _OURS
) -> T:
    """Decode JSON into a msgspec type, strictly (InputError); messages call the format `name`."""
    try:
        text = text.decode() if isinstance(text, bytes) else text
        return msgspec.json.decode(text.encode(), type=kind, dec_hook=parse_value)
    except UnicodeError as error:
        raise InputError(where, "is not UTF-8 text", right) from error
    except (RecursionError, msgspec.MsgspecError) as error:
        words = re.sub("(?<=[a-z])(?=[A-Z])", " ", name or kind.__name__.strip("_")).lower()
        fault = f"does not fit the {words} format ({_explain(error, kind)})"
        if isinstance(error, RecursionError):
            fault = "is nested too deep"
        elif not text.strip():
            fault = "is empty"
        right += ", or update this program: later ones write more" * ("unknown field" in fault)
        raise InputError(where, fault, right) from error


def check_types(value: msgspec.Struct, *, where: str) -> None:
    """Check a structure made here against its fields' types, as decoding does (InputError)."""
    check_value(msgspec.to_builtins(value), type(value), where=where)


def check_value(value: object, kind: Any, *, where: str) -> None:
    """Check a value against a type with bounds, as decoding does (InputError)."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text = _explain(error, kind)
        if " - at" not in text:
            text = text.replace("`object`", f"`{getattr(kind, '__name__', kind)}`")
        fault = f"does not fit ({text})"
        raise InputError(where, fault, "give what is expected there") from error


def _explain(error: Exception, kind: Any) -> str:
    """Return msgspec's text on a value, with the possible words where it is another one."""
    found = re.match(r"Invalid enum value '.*'(?: - at `\$(.*)`)?$", str(error), re.DOTALL)
    if found is None:
        return str(error)
    kinds = [msgspec.inspect.type_info(kind)]
    for name in re.findall(r"\.(\w+)|\[", found[1] or ""):
        fields = [field for one in kinds for field in getattr(one, "fields", ())]
        inner = [field.type for field in fields if field.encode_name == name]
        inner += [one.item_type for one in kinds if not name and hasattr(one, "item_type")]
        kinds = inner
    members = [member for one in kinds for member in getattr(one, "types", (one,))]
    words = [word for one in members for word in getattr(one, "values", ())]
    return f"{error}, one of {', '.join(words)}" if words else str(error)


def check_version(version: int, readable: int, where: str | Path) -> None:
    """Refuse a format version that this program does not read."""
    right = "update it" if version > readable else "make it again"
    right = f"this program reads version {readable}: {right}"
    require(version == readable, str(where), f"has format version {version}", right)


def pick(record: object, *names: str) -> dict[str, Any]:
    """Return some fields of a record by their names, for JSON."""
    return {name: getattr(record, name) for name in names}


def says(text: str) -> msgspec.Meta:
    """Return the description of a key of JSON, for the type of a result's field."""
    return msgspec.Meta(description=text)


def fill(kind: type[Result], record: object, **more: Any) -> Result:
    """Return a result whose fields are attributes of a record by their names, or given."""
    names = (name for name in kind.__struct_fields__ if name not in more and hasattr(record, name))
    return kind(**{name: getattr(record, name) for name in names}, **more)


def encode_json(value: Any) -> str:
    """Encode as indented JSON in field order; what `errors.visible` escapes is escaped."""
    text = msgspec.json.format(encode_line(value)[:-1], indent=1).decode() + "\n"
    return _BEYOND_ASCII.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return match[0] if match[0].isprintable() else json.dumps(match[0])[1:-1]


def encode_line(value: Any) -> bytes:
    """Encode as JSON on one line, with a final newline."""
    return msgspec.json.encode(value, enc_hook=write_value) + b"\n"


_OF_PLACES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT)
_MARKER = ".tccl-temporary"


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Make a folder whose name begins with `prefix`, for the time of the block.

    The folder is locked while the program lives; a later call with the prefix removes the folder
    of a killed program, known by its marker. InputError: the system refuses the folder, or a write
    in the block.
    """
    sweep(Path(tempfile.gettempdir()), prefix, marker=_MARKER)
    try:
        with tempfile.TemporaryDirectory(prefix=prefix) as name, _hold(Path(name)):
            # Marked only now that it is locked: until then it could look like a killed program's.
            Path(name, _MARKER).touch()
            yield Path(name)
    except OSError as error:
        reached = limit_reached(error)
        if reached is not None:
            raise reached from error
        if error.errno not in _OF_PLACES:
            raise
        where, why = f"temporary folder {tempfile.gettempdir()}", error.strerror or error
        right = "make room there, or name another by TMPDIR"
        raise InputError(where, f"failed ({why})", right) from error


@contextmanager
def _hold(path: Path, flags: int = os.O_DIRECTORY) -> Iterator[bool]:
    """Lock a file or folder; yield False if another process has the lock, or without locks."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | flags)
    try:
        locked = False
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        yield locked
    finally:
        os.close(descriptor)
