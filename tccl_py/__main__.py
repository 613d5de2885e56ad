"""Entry point of the `tccl` command, also as `python -m tccl_py`."""

from __future__ import annotations

from tccl_py.interrupts import INTERRUPTED, at_interrupt, leave

at_interrupt(leave)

import gc  # noqa: E402 (only now)
import os  # noqa: E402
import sys  # noqa: E402

from tccl_py.children import search_path  # noqa: E402
from tccl_py.launchers import only_serves  # noqa: E402

NOT_USABLE = 2

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
        _run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        # Where a class is made, Python before 3.12 raises RuntimeError from the interrupt.
        if isinstance(error.__cause__, KeyboardInterrupt):
            sys.exit(INTERRUPTED)
        try:
            if isinstance(error, ModuleNotFoundError):
                sys.stderr.write(f"tccl: {error}; run `pip install .` in this program's folder\n")
            else:
                sys.excepthook(type(error), error, error.__traceback__)
        finally:
            sys.exit(NOT_USABLE)


def _run() -> None:
    from tccl_py.errors import InputError, check_limits  # noqa: PLC0415 (only now)

    try:
        check_limits()
    except InputError as error:
        sys.stderr.write(f"tccl: {error}\n")
        sys.exit(NOT_USABLE)
    if only_serves(sys.argv[1:], os.environ):
        from tccl_profiler.cluster.mpi import serve_rank  # noqa: PLC0415 (in jobs alone)

        sys.exit(serve_rank())
    if sys.argv[1:] == ["--version"]:
        # Scripts ask each host for it, and typer takes a tenth of a second to load.
        from tccl_py.cli.process import print_version  # noqa: PLC0415

        sys.exit(print_version())
    from tccl_py.cli.main import main as run  # noqa: PLC0415

    run()


if __name__ == "__main__":
    main()
