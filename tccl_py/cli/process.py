"""The process of a command: exit codes, and plain output to stdout, or of notices to stderr."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from tccl_py import __version__
from tccl_py.errors import InputError, visible
from tccl_py.files import encode_json, write_named

ANSWER_IS_NO = 1
NOT_USABLE = 2
NO_READER = 141
TERMINATED = 128 + signal.SIGTERM


class Verbosity(Enum):
    """What a command says on stderr: errors alone, notices too, or progress and traces as well."""

    QUIET, USUAL, VERBOSE = "-q", "", "-v"


class Speech:
    """What the command that runs says, and its options by their parameters' names."""

    verbosity = Verbosity.USUAL
    options: Mapping[str, str] = {}


def notice(text: str) -> None:
    """Print one sentence for the user on stderr, in one line that begins with `tccl:`."""
    if Speech.verbosity is not Verbosity.QUIET:
        _print_line(text)


def _print_line(text: str) -> None:
    # The library names parameters of functions, which are a command's options.
    line = re.sub(r"`(\w+)`", lambda name: Speech.options.get(name[1], name[0]), text)
    # Without a working stderr the exit code still tells.
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"tccl: {visible(' '.join(line.split()))}", file=sys.stderr, flush=True)


def notice_each(texts: Iterable[str]) -> None:
    """Print several sentences as `notice` does, in order."""
    for text in texts:
        notice(text)


def complain(text: str) -> int:
    """Print an error, after -v with its trace, and return the exit code."""
    if Speech.verbosity is Verbosity.VERBOSE and sys.stderr is not None:
        traceback.print_exc()
    _print_line(text)
    return NOT_USABLE


def print_json(value: Any) -> None:
    """Print `value` as JSON on stdout: keys as declared, no NaN (msgspec writes null)."""
    print(encode_json(value), end="")


def check_result_file(option: str, path: Path | None) -> None:
    """Refuse, before what takes minutes, a file that cannot be made (InputError)."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        where, right = f"{option} {path}", "name a file in a folder that there is"
        raise InputError(where, "is no file that can be made", right)


def write_result(text: str, output: Path | None) -> None:
    """Write a result to `output`, whole or not at all, or to stdout if that is None."""
    if output is None:
        print(text, end="")
    else:
        write_named(output, text)


def print_version() -> int:
    """Print the version on stdout; return the exit code."""
    return flush_output(0, f"tccl {__version__}\n")


def flush_output(code: int, text: str = "") -> int:
    """Hand all that is printed, and `text`, to the system; return the exit code.

    If that fails the code is another one.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.write(text)
            sys.stdout.flush()
    except BrokenPipeError:
        silence_output()
        return NO_READER
    except OSError as error:
        silence_output()
        return complain(
            f"standard output: cannot be written ({error.strerror}); it needs free space"
        )
    return code


def silence_output() -> None:
    """Drop unwritten output, so that the interpreter's exit does not complain."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
