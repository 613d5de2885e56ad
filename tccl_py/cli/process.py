"""The process of a command: exit codes, signals, and plain output.

Results go to stdout, notices and errors to stderr. An interrupt inside numpy's code can come out as
a TypeError; it is put off until numpy returns.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from tccl_py.errors import InputError, visible
from tccl_py.files import encode_json, write_atomically

ANSWER_IS_NO = 1
NOT_USABLE = 2
NO_READER = 141
INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended."""
TERMINATED = 128 + signal.SIGTERM


def notice(text: str) -> None:
    """Print one sentence for the user on stderr, in one line that begins with `tccl:`."""
    # Without a working stderr the exit code still tells.
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"tccl: {visible(' '.join(text.split()))}", file=sys.stderr, flush=True)


def notice_each(texts: Iterable[str]) -> None:
    """Print several sentences as `notice` does, in order."""
    for text in texts:
        notice(text)


def complain(text: str) -> int:
    """Print an error, and return its exit code."""
    notice(text)
    return NOT_USABLE


def picked(record: object, *names: str) -> dict[str, Any]:
    """Return some fields of a record by their names, for JSON."""
    return {name: getattr(record, name) for name in names}


def print_json(value: Any) -> None:
    """Print `value` as JSON on stdout: keys as declared, no NaN (msgspec writes null)."""
    print(encode_json(value), end="")


def write_result(text: str, output: Path | None) -> None:
    """Write a result to `output`, whole or not at all, or to stdout if that is None."""
    if output is None:
        print(text, end="")
        return
    try:
        target = output.resolve() if output.is_symlink() else output
        if target.exists() and not target.is_file() and not target.is_dir():
            # Renaming a file into the place of a device would take the device away.
            target.write_text(text, encoding="utf-8")
            return
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            str(output), f"cannot be written ({reason})", "choose a writable place with free space"
        ) from error
    write_atomically(target, text)


def flush_output(code: int) -> int:
    """Hand everything printed to the system; return the exit code, another one if that fails."""
    try:
        if sys.stdout is not None:
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


class Terminated(BaseException):
    """SIGTERM came: what is open is closed as after Ctrl-C, and the exit code differs.

    No KeyboardInterrupt: typer would make that code 130.
    """


_Kinds = Mapping[signal.Signals, type[BaseException]]
CTRL_C: _Kinds = {signal.SIGINT: KeyboardInterrupt}
CTRL_C_AND_SIGTERM: _Kinds = {**CTRL_C, signal.SIGTERM: Terminated}
_USUAL = (signal.default_int_handler, signal.SIG_DFL)
_AGAIN_S = 0.005


@contextlib.contextmanager
def interrupts_put_off(kinds: _Kinds = CTRL_C) -> Iterator[None]:
    """Raise exceptions for these signals within the block, inside numpy a moment later.

    Signals that the caller ignores or handles are left alone, and all outside of the main thread.
    """
    usual = _usual(kinds)
    if not usual:
        yield
        return
    late: list[type[BaseException]] = []

    def arrived(number: int, frame: FrameType | None) -> None:
        kind = late[0] if number == signal.SIGALRM else kinds[signal.Signals(number)]
        if not _inside_numpy(frame):
            raise kind
        late.append(kind)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)

    with _handled((signal.SIGALRM,), arrived):
        try:
            with _handled(usual, arrived):
                yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Within the block Ctrl-C and SIGTERM wait for its end, for steps that belong together."""
    waiting: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    try:
        with _handled(CTRL_C_AND_SIGTERM if main else (), lambda sent, _: waiting.append(sent)):
            yield
    finally:
        for sent in waiting[:1]:
            signal.raise_signal(sent)


def left_at_once() -> contextlib.AbstractContextManager[None]:
    """Within the block Ctrl-C ends the process: imports take exceptions for missing libraries."""
    return _handled(_usual(CTRL_C), lambda *_: os._exit(INTERRUPTED))


@contextlib.contextmanager
def _handled(numbers: Iterable[signal.Signals], handler: Callable[..., object]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)


def _usual(kinds: _Kinds) -> list[signal.Signals]:
    """Return the signals for which nobody has set a handler."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in kinds if signal.getsignal(number) in _USUAL]


def _inside_numpy(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] == "numpy":
            return True
        frame = frame.f_back
    return False
