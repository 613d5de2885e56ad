"""Errors a user can act on, errors by the system's limits, and Ctrl-C and SIGTERM as exceptions.

Nothing but the standard library is loaded here: with too little memory or too few threads,
numerical libraries end the process while they are imported, or wait for ever.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import NamedTuple, TypeVar

Text = TypeVar("Text", bound=str)


def visible(text: str) -> str:
    r"""Escape the characters that a terminal or a page would act on or not show.

    >>> print(visible("a\x1b[31m"))
    a\x1b[31m
    """
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def spell(count: int, noun: str) -> str:
    """Return a number of things in words.

    >>> spell(1, "set"), spell(0, "GPU")
    ('1 set', '0 GPUs')
    """
    return f"{count} {noun}{'s' * (count != 1)}"


def size_text(size: int) -> str:
    """Return a number of bytes with its largest whole unit.

    >>> size_text(4096), size_text(1 << 30), size_text(1000)
    ('4 KiB', '1 GiB', '1000 B')
    """
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


class TcclError(Exception):
    """Base of every error this package raises on purpose; its text is `visible`, line by line."""

    def __str__(self) -> str:
        return "\n".join(map(visible, super().__str__().split("\n")))


class InputError(TcclError):
    """Unusable input, exit code 2: where (file, option, name), the fault, the right form."""

    def __init__(self, where: str, what: str, right: str) -> None:
        super().__init__(f"{where}: {what}; {right}")
        self.where = where
        self.what = what
        self.right = right


def require(good: object, where: str, what: str, right: str) -> None:
    """Raise InputError unless `good` is true."""
    if not good:
        raise InputError(where, what, right)


def check_type(value: object, name: str, *kinds: type) -> None:
    """Raise InputError unless a public function's parameter is of one of these types."""
    right = " or ".join(kind.__name__ for kind in kinds)
    what = f"is of type {type(value).__name__}"
    require(isinstance(value, kinds), f"`{name}`", what, f"give {right}")


def check_range(where: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """Raise InputError unless a number is in `low` to `high`, or `above` `low`."""
    # The comparisons are written so that NaN fails them.
    if not (value > low if above else value >= low) or not value <= high:
        least = f"above {low:.12g}, at most" if above else f"{low:.12g} to"
        right = f"{least} {high:.12g}" if high < math.inf else f"{low:.12g} or more"
        raise InputError(where, f"is {value:.12g}", right)


def check_choice(where: str, value: str, names: Iterable[Text]) -> Text:
    """Return that of the possible names which a value is; raise InputError for another."""
    known = {str(name): name for name in names}
    right = f"one of {', '.join(known)}"
    require(value in known, f"{where} {str(value)[:20]!r}", "is not known", right)
    return known[value]


def check_once(where: str, kind: str, names: Iterable[object]) -> None:
    """Raise InputError if one of several names of a kind is given twice."""
    known = set[object]()
    for name in names:
        require(name not in known, where, f"names {kind} {name} twice", "once is right")
        known.add(name)


class MeasurementError(TcclError):
    """A transfer set could not be measured."""


class BrokenLinkError(MeasurementError):
    """P2P does not carry data: these flows between GPUs fail in every set, and NCCL's with them.

    Args:
        flows: that fail, or their texts.
        what: a clause with the reason, as "nothing that GPU 1 writes arrives".
        verdict: what NCCL does over them: "hangs", "wrong values" or "fails".
    """

    def __init__(self, flows: Iterable[object], what: str, *, verdict: str = "fails") -> None:
        self.flows, self.what, self.verdict = tuple(map(str, flows)), what, verdict
        super().__init__(f"{' '.join(self.flows)}: {what}")


class BudgetSpentError(MeasurementError):
    """No further set may be measured; a search ends with the best so far."""


class SourceLostError(TcclError):
    """Nothing can be measured any more; unlike MeasurementError, trying other sets is no use."""


class SearchError(TcclError):
    """A search cannot give a ring (no hop into a GPU, ...)."""


class _Limit(NamedTuple):
    number: int
    name: str
    least: int
    option: str
    unit: int


_FILES = _Limit(resource.RLIMIT_NOFILE, "open files", 256, "ulimit -n", 1)
_PROCESSES = _Limit(resource.RLIMIT_NPROC, "processes and threads", 256, "ulimit -u", 1)
_MEMORY = _Limit(resource.RLIMIT_AS, "address space in KiB", 1 << 30, "ulimit -v", 1024)
_REFUSED = (os.strerror(errno.EAGAIN), "can't start new thread")
"""What fork and a thread's start say; a stream that would block has the number of the first."""


def check_limits() -> None:
    """Raise low limits as far as this process may; InputError if a limit stays too low."""
    for limit in (_FILES, _PROCESSES, _MEMORY):
        if limit is _PROCESSES and os.geteuid() == 0:
            # The kernel counts no processes of root.
            continue
        if _below(raise_limit(limit.number, limit.least), limit.least):
            raise _too_low(limit, f"at least {limit.least // limit.unit} are needed")


def raise_limit(number: int, least: int) -> int:
    """Raise a limit of this process to `least`, as far as it may, and return what it is now."""
    soft, hard = resource.getrlimit(number)
    if _below(soft, least):
        soft = hard if _below(hard, least) else least
        resource.setrlimit(number, (soft, hard))
    return soft


def limit_reached(error: BaseException) -> InputError | None:
    """Return the error about the limit behind an exception; None without a limit."""
    number = getattr(error, "errno", None)
    if number == errno.EMFILE:
        return _too_low(_FILES, "all are in use")
    if number == errno.ENFILE:
        return InputError("open files", "all of this system are in use", "raise fs.file-max")
    if (getattr(error, "strerror", None) or str(error)) in _REFUSED:
        return _too_low(_PROCESSES, "or that of this container, is reached")
    if number == errno.ENOMEM or isinstance(error, MemoryError):
        if resource.getrlimit(_MEMORY.number)[0] != resource.RLIM_INFINITY:
            return _too_low(_MEMORY, "which is too little")
        return InputError("memory", f"none is left ({error})", "end what else runs here")
    return None


def _below(value: int, least: int) -> bool:
    return value != resource.RLIM_INFINITY and value < least


def _too_low(limit: _Limit, what: str) -> InputError:
    soft, _ = resource.getrlimit(limit.number)
    most = "unlimited" if soft == resource.RLIM_INFINITY else soft // limit.unit
    return InputError(limit.name, f"the limit is {most}, {what}", f"raise it ({limit.option})")


# Interrupts. Inside numpy one can come out as a TypeError, so it is put off until numpy returns.
class Terminated(BaseException):
    """SIGTERM came; no KeyboardInterrupt, whose exit code typer would make 130."""


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
    main = threading.current_thread() is threading.main_thread()
    # The signals for which nobody has set a handler.
    usual = [number for number in kinds if main and signal.getsignal(number) in _USUAL]
    if not usual:
        yield
        return
    late: list[type[BaseException]] = []

    def note_arrival(number: int, frame: FrameType | None) -> None:
        kind = late[0] if number == signal.SIGALRM else kinds[signal.Signals(number)]
        if not _inside_numpy(frame):
            raise kind
        late.append(kind)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)

    with _handle((signal.SIGALRM,), note_arrival):
        try:
            with _handle(usual, note_arrival):
                yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Within the block Ctrl-C and SIGTERM wait for its end, for steps that belong together."""
    waiting: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    try:
        with _handle(CTRL_C_AND_SIGTERM if main else (), lambda sent, _: waiting.append(sent)):
            yield
    finally:
        for sent in waiting[:1]:
            signal.raise_signal(sent)


@contextlib.contextmanager
def _handle(numbers: Iterable[signal.Signals], handler: Callable[..., object]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)


def _inside_numpy(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] == "numpy":
            return True
        frame = frame.f_back
    return False
