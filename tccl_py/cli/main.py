"""The `tccl` command: its frame, exit codes, and the list of its commands.

Exit codes: 0 done, 1 the answer is no, 2 wrong use or bad input; 130 interrupted, 141 nobody reads
the output any more. Every error on purpose is one sentence on stderr that begins with `tccl:`.
"""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from tccl_py.cli.arguments import NO_READER, NOT_USABLE, complain, flush_output, silence_output
from tccl_py.cli.check import check
from tccl_py.cli.discover import discover
from tccl_py.cli.doctor import doctor
from tccl_py.cli.env import env
from tccl_py.cli.explain import explain
from tccl_py.cli.export import export
from tccl_py.cli.install import install
from tccl_py.cli.interrupts import INTERRUPTED, TERMINATED, Terminated
from tccl_py.cli.machines import machines
from tccl_py.cli.measure import measure
from tccl_py.cli.overlap import overlap
from tccl_py.cli.plan import plan
from tccl_py.cli.report import report
from tccl_py.cli.show import show
from tccl_py.cli.uninstall import uninstall
from tccl_py.cli.validate import validate
from tccl_py.cli.verify import verify
from tccl_py.errors import InputError, TcclError
from tccl_py.limits import limit_reached

# The class of every usage error; typer has it from click or from its own copy of click.
_UsageError: Any = typer.BadParameter.__bases__[0]


class _Commands(TyperGroup):
    """The group of commands; what goes wrong leaves it as a sentence and an exit code."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command line; ends the process unless `standalone_mode` is off."""
        standalone = extra.pop("standalone_mode", True)
        code = flush_output(self._run(*args, **extra))
        if standalone:
            sys.exit(code)
        return code

    def _run(self, *args: Any, **extra: Any) -> int:
        extra["standalone_mode"] = False
        try:
            code = super().main(*args, **extra)
        except (TcclError, _UsageError, OSError, UnicodeEncodeError) as error:
            return complain(_sentence(error))
        except (MemoryError, RuntimeError) as error:
            reached = limit_reached(error)
            if reached is None:
                raise
            return complain(str(reached))
        except Terminated:
            return TERMINATED
        except (KeyboardInterrupt, typer.Abort):
            return INTERRUPTED
        except SystemExit:
            # No command ends the process; rich and typer do where nobody reads the output.
            silence_output()
            return NO_READER
        return code if isinstance(code, int) else 0


class _Command(TyperCommand):
    """One command; it adds to what typer checks of a command line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args` into the context.

        Raises:
            InputError: a FILE or DIR with the empty name, which Path takes for the directory one
                is in.
        """
        try:
            given = self.make_parser(ctx).parse_args(args=list(args))[0]
        except _UsageError as error:
            # typer does not say for all of them which command's they are.
            error.ctx = ctx
            raise
        rest = super().parse_args(ctx, args)
        for param in self.params:
            metavar = getattr(param, "metavar", None)
            if metavar in ("FILE", "DIR", "DIR|FILE") and given.get(param.name) == "":
                raise InputError(param.opts[-1], "is empty", f"name a {metavar}")
        return rest


def _sentence(error: Exception) -> str:
    if isinstance(error, _UsageError):
        return _usage(error)
    if isinstance(error, UnicodeEncodeError):
        return "a file name: holds bytes that are not UTF-8; rename the file"
    if isinstance(error, OSError):
        reached = limit_reached(error)
        if reached is not None:
            return str(reached)
        # Files are read and written with sentences of their own: what is left is the output.
        silence_output()
        place = error.filename or "standard output"
        return f"{place}: failed ({error.strerror or error}); it must be usable"
    return str(error)


def _usage(error: Any) -> str:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "tccl"
    message = " ".join(error.format_message().split()).rstrip(".")
    return f"{message}; see '{path} --help'"


app = typer.Typer(
    name="tccl",
    cls=_Commands,
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tccl {metadata.version('tccl-py')}")
        raise typer.Exit(0)


@app.callback()
def _frame(
    ctx: typer.Context,
    version: Annotated[  # noqa: ARG001 (its callback prints and ends)
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Find fast communication rings for a machine's GPUs by measuring, and hand them to NCCL.

    A MACHINE is the name of a bundled model (see `tccl machines`), a JSON file that this program
    wrote, or an NCCL topology XML. Rates are GB/s, 10^9 bytes a second.

    Exit codes: 0 done, 1 the answer is no, 2 wrong use or bad input.
    """
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(NOT_USABLE)


# In the order in which the help lists them; each comes from the module of its name.
for _command in (
    discover,
    machines,
    measure,
    plan,
    show,
    explain,
    report,
    env,
    export,
    install,
    uninstall,
    validate,
    verify,
    check,
    overlap,
    doctor,
):
    app.command(cls=_Command)(_command)


def main() -> None:
    """The console entry point."""
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal cannot show must not end the program.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="tccl")


if __name__ == "__main__":
    main()
