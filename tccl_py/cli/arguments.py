"""What the commands share: machines and GPU lists from text, and output that says where it is from.

Results go to stdout, notices and errors to stderr.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from tccl_py.errors import InputError
from tccl_py.files import encode_json, write_atomically
from tccl_py.model.machine import MAX_GPUS, Machine
from tccl_py.nccl.versions import known_versions

ANSWER_IS_NO = 1
NOT_USABLE = 2
NO_READER = 141

MACHINE_HELP = (
    "A bundled name (see `tccl machines`), a JSON file this program wrote, or an NCCL topology XML."
)
JsonOption = Annotated[
    bool, typer.Option("--json", metavar=" ", help="Print JSON instead of a table.")
]
"""The --json option that every command with a table has."""
NcclOption = Annotated[
    str,
    typer.Option(
        metavar="VERSION", help=f"NCCL's version; {', '.join(known_versions())} were checked."
    ),
]
"""The --nccl option of commands that must know what NCCL will do."""

_PIPED_WIDTH = 120
_LEAST_WIDTH = 60
"""In fewer columns tables would leave out what they are for; a terminal wraps their lines."""
_GPU_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", re.ASCII)


class _SafeConsole(Console):
    """A console that shows control characters instead of sending them to the terminal.

    Every string comes through here, a table's cells too; names in them come from files.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        """Make a Text of `text`, as rich does."""
        return super().render_str(visible(text), **options)


def visible(text: str) -> str:
    r"""`text` with what a terminal would act on, or not show, in its escaped form.

    >>> print(visible("a\x1b[31m"))
    a\x1b[31m
    """
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def results() -> Console:
    """Where results go: stdout; wide enough for tables where it is not a terminal."""
    return _console(stderr=False)


def notices() -> Console:
    """Where notices go: stderr."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    piped = stream is None or not stream.isatty()
    console = _SafeConsole(
        stderr=stderr,
        width=_columns() or (_PIPED_WIDTH if piped else None),
        highlight=False,
        markup=False,
        emoji=False,
        # What rich would take COLUMNS for, it fails at where that is no number.
        _environ={name: text for name, text in os.environ.items() if name != "COLUMNS"},
    )
    if not stderr:
        console.width = max(console.width, _LEAST_WIDTH)
    return console


def _columns() -> int:
    """What COLUMNS says; 0 if it says nothing."""
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def notice(text: str) -> None:
    """Print one sentence for the user on stderr, `tccl:` before it, in one line."""
    # Without a working stderr the exit code still tells.
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"tccl: {visible(' '.join(text.split()))}", file=sys.stderr, flush=True)


def notice_each(texts: Iterable[str]) -> None:
    """Print several sentences as `notice` does, in order."""
    for text in texts:
        notice(text)


def complain(text: str) -> int:
    """Print what went wrong and return the exit code for it."""
    notice(text)
    return NOT_USABLE


def print_json(value: Any) -> None:
    """Print `value` as JSON on stdout: keys as declared, no NaN (msgspec writes null)."""
    print(encode_json(value), end="")


def provenance(*, simulated: bool, assumed: bool) -> str:
    """The mark that goes beside every figure: `simulated` is never lost on the way.

    >>> provenance(simulated=True, assumed=True)
    'simulated from assumed figures'
    """
    if not simulated:
        return "measured"
    return "simulated from assumed figures" if assumed else "simulated"


def gpus_argument(text: str | None, machine: Machine) -> tuple[int, ...] | None:
    """The GPUs of a list such as `0,2,5` or `0-3`, in the order given; None stays None.

    Raises:
        InputError: not such a list, a GPU twice, or one that the machine does not have.
    """
    if text is None:
        return None
    indices = parse_gpus(text)
    for index in indices:
        machine.gpu(index)
    return indices


def parse_gpus(text: str) -> tuple[int, ...]:
    """Parse a list of GPU indices and ranges of them.

    >>> parse_gpus("4,0-2")
    (4, 0, 1, 2)

    Raises:
        InputError: empty, not numbers, a range that goes down or is too long, or a GPU twice.
    """
    where = f"GPU list {text[:60]!r}"
    indices: list[int] = []
    for part in text.split(","):
        indices += _gpu_range(part.strip(), where)
    twice = next((index for index in indices if indices.count(index) > 1), None)
    if twice is not None:
        raise InputError(where, f"names GPU {twice} twice", "every GPU stands once")
    return tuple(indices)


def _gpu_range(part: str, where: str) -> Sequence[int]:
    match = _GPU_RANGE.fullmatch(part)
    if match is None:
        raise InputError(where, f"{part[:20]!r} is no GPU", "write indices, as 0,2,5 or 0-3")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise InputError(where, f"{part!r} goes down", f"write {last}-{first}")
    if last - first >= MAX_GPUS:
        raise InputError(where, f"{part!r} is too long", f"a node has at most {MAX_GPUS} GPUs")
    return range(first, last + 1)


def check_quoted(sets: Iterable[str], example: str) -> None:
    """Refuse a set of which the shell has taken a part: `->` without quotes writes to a file.

    Raises:
        InputError: one ends where its first `>` was.
    """
    for text in sets:
        if text.endswith("-"):
            raise InputError(
                f"set {text[:40]!r}",
                "ends with -, as where the shell takes > for a file to write to",
                f"put each set in quotes, as '{example}'",
            )


def write_result(text: str, output: Path | None) -> None:
    """Write a result to `output`, whole or not at all, or to stdout if that is None.

    Raises:
        InputError: the place cannot be written.
    """
    if output is None:
        print(text, end="")
        return
    try:
        target = output.resolve() if output.is_symlink() else output
        device = target.exists() and not target.is_file() and not target.is_dir()
        if device:
            # Renaming a file into its place would take the device away.
            target.write_text(text, encoding="utf-8")
            return
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            str(output), f"cannot be written ({reason})", "choose a writable place with free space"
        ) from error
    write_atomically(target, text)


def flush_output(code: int) -> int:
    """Hand everything printed to the system; the exit code, which changes if that fails."""
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
    """Send what is still unwritten nowhere, so that the interpreter's exit does not complain."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
