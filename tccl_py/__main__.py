"""Entry point of the `tccl` command, also as `python -m tccl_py`.

Nothing heavy is imported before interrupts are handled: loading commands and numerical libraries
takes a while.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback

from tccl_py.children import search_path

# Started by `python -m`, what is imported from here on could be files of the current directory.
sys.path[:] = search_path()

# Modules and plans stay: looking for garbage as often as usual takes a twentieth of a command.
gc.set_threshold(50_000, 20, 20)

NOT_USABLE, INTERRUPTED = 2, 130
_OF_RANKS = ("evaluate", "measure", "plan", "verify")
"""Commands that the ranks of an MPI job do together."""


def main() -> None:
    """Run the console entry point; an interrupt ends it with 130 and without a word.

    Any other exception is a failure of the program, or of its installation, and no answer: Python's
    own exit code would be that of the answer no.
    """
    try:
        from tccl_py.errors import left_at_once  # noqa: PLC0415

        with left_at_once():
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
            from tccl_py.cli.main import main as run  # noqa: PLC0415
        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception:
        try:
            traceback.print_exc()
        finally:
            sys.exit(NOT_USABLE)


if __name__ == "__main__":
    main()
