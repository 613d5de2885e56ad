"""Entry point of the `tccl` command, also as `python -m tccl_py`.

While the command is loaded, which takes a while, and while the interpreter ends, Ctrl-C ends the
process at once: an exception there would show a trace, or be taken for a missing library.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # built in: `signal` itself takes a while to load
import gc
import os
import sys

TYPE_CHECKING = False  # `typing` takes a while to load
if TYPE_CHECKING:
    from collections.abc import Callable

NOT_USABLE, INTERRUPTED = 2, 130
_OF_RANKS = ("evaluate", "measure", "plan", "verify")
"""Commands that the ranks of an MPI job do together."""


def _leave(*_: object) -> None:
    os._exit(INTERRUPTED)


def _at_interrupt(handler: object) -> None:
    """Set the handler of Ctrl-C, unless the caller ignores or handles it."""
    if _signal.getsignal(_signal.SIGINT) in (_leave, _signal.default_int_handler):
        _signal.signal(_signal.SIGINT, handler)


_at_interrupt(_leave)

from tccl_py.children import search_path  # noqa: E402 (only now)

# Started by `python -m`, what is imported from here on could be files of the current directory.
sys.path[:] = search_path()

# Modules and plans stay: looking for garbage as often as usual takes a twentieth of a command.
gc.set_threshold(50_000, 20, 20)


def main() -> None:
    """Run the console entry point; an interrupt ends it with 130 and without a word.

    Any other exception is a failure of the program, or of its installation, and no answer: Python's
    own exit code would be that of the answer no.
    """
    try:
        run = _loaded()
        _at_interrupt(_signal.default_int_handler)
        run()
    except Exception as error:
        # Where a class is made, Python before 3.12 raises RuntimeError from the interrupt.
        if isinstance(error.__cause__, KeyboardInterrupt):
            sys.exit(INTERRUPTED)
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            sys.exit(NOT_USABLE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        _at_interrupt(_leave)


def _loaded() -> Callable[[], None]:
    """Load the command; may end the process where nothing needs to be loaded."""
    from tccl_py.errors import InputError, check_limits  # noqa: PLC0415 (only now)

    try:
        check_limits()
    except InputError as error:
        sys.stderr.write(f"tccl: {error}\n")
        sys.exit(NOT_USABLE)
    if sys.argv[1:2] and sys.argv[1] in _OF_RANKS:
        from tccl_profiler.cluster.mpi import only_serves, served  # noqa: PLC0415

        if only_serves(sys.argv[1:], os.environ):
            sys.exit(served())
    if sys.argv[1:] == ["--version"]:
        # Scripts ask each host for it, and typer takes a tenth of a second to load.
        from tccl_py.cli.process import print_version  # noqa: PLC0415

        sys.exit(print_version())
    from tccl_py.cli.main import main as run  # noqa: PLC0415

    return run


if __name__ == "__main__":
    main()
