"""The `tccl` command: its frame, exit codes, and the list of its commands.

Exit codes: 0 done, 1 the answer is no, 2 wrong use or bad input; 130 interrupted, 141 nobody reads
the output any more. Every error on purpose is one sentence on stderr that begins with `tccl:`.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_from_info
from typer.models import CommandInfo

from tccl_py.cli.options import check_given, choices_of, flag
from tccl_py.cli.process import (
    NO_READER,
    NOT_USABLE,
    TERMINATED,
    Speech,
    Verbosity,
    complain,
    flush_output,
    print_version,
    silence_output,
)
from tccl_py.errors import (
    InputError,
    TcclError,
    Terminated,
    check_choice,
    limit_reached,
    require,
)
from tccl_py.interrupts import INTERRUPTED, RAISE, at_interrupt

COMMANDS = {
    "advise": ("health:advise", "Say in ten lines what to try first on a machine."),
    "plan": ("plan:plan", "Find the best rings for a machine or a cluster, and write the files."),
    "verify": ("verify:verify", "Run real collectives by each choice of a plan; name the winner."),
    "install": ("export:install", "Put a verified plan's settings where jobs find them."),
    "doctor": ("health:doctor", "Look for what hangs or slows NCCL on this host."),
    "show": ("show:show", "Show a plan, what slows it (--why), or how two differ."),
    "report": ("show:report", "Write a plan as one HTML page."),
    "check": ("health:check", "Compare a machine with its plan's measurements."),
    "measure": ("measure:measure", "Measure how fast transfers are that run at the same time."),
    "discover": ("machines:discover", "Describe a machine, or list the bundled models."),
    "validate": ("machines:validate", "Say what NCCL will do with a graph file."),
    "env": ("env:env", "Print the environment for a job over some GPUs of a plan."),
    "run": ("env:run", "Run a job with the recommended choice of a plan."),
    "workload": ("workload:workload", "Show a job's collectives, from its logs or traces."),
    "export": ("export:export", "Write the files that a runtime reads, elsewhere."),
    "uninstall": ("export:uninstall", "Take out the lines of `tccl install`."),
}
"""Each command's module and function, and its line in `tccl --help`, in the order listed there."""
_PANELS = {"advise": "Start here", "doctor": "Look", "env": "Use"}
"""The panels of `tccl --help`, by their first commands."""

_PLACES = frozenset(("DIR", "FILE", "GRAPH.xml", "OTHER", "PATH"))
"""What values are called that name files or folders."""
_ADVANCED = "Advanced"
"""The panel of options that `--help-all` shows alone."""
_FRAMED = 60
"""Columns from which on help has frames."""
# The class of every usage error; typer has it from click or from its own copy of click.
_UsageError: Any = typer.BadParameter.__bases__[0]


class _HelpOption:
    """A command whose option for help is a flag also in the list of options."""

    rich_markup_mode: Any
    help: str | None

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option without the metavar that typer gives to flags."""
        option: Any = super().get_help_option(ctx)  # type: ignore[misc]
        option.metavar = " "
        return option

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help; without frames where their columns would cut names of options."""
        columns = shutil.get_terminal_size().columns
        if columns < _FRAMED:
            self.rich_markup_mode = None
            formatter.width = max(columns, 40)
            # Without \b click joins the lines of examples.
            self.help = (self.help or "").replace("\n\n    ", "\n\n\b\n    ")
        super().format_help(ctx, formatter)  # type: ignore[misc]


class _Commands(_HelpOption, TyperGroup):
    """The group of commands; a command is imported when it is used, errors get an exit code."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.params += _common_options()
        # Stand-ins, for the list of `tccl --help`.
        panel = ""
        for name, (_, line) in COMMANDS.items():
            panel = _PANELS.get(name, panel)
            self.commands[name] = TyperCommand(name, help=line, rich_help_panel=panel)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, the commands to start with first; the epilogue has the options."""
        params: list[Any] = [*self.params, self.get_help_option(ctx)]
        for param in params:
            param.hidden = True
        super().format_help(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return name, command and the other arguments of a command line."""
        name, stand_in, arguments = super().resolve_command(ctx, args)
        return name, stand_in and load_command(str(name)), arguments

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command line; ends the process unless `standalone_mode` is off."""
        standalone = extra.pop("standalone_mode", True)
        code = flush_output(self._run(*args, **extra))
        Speech.verbosity, Speech.options = Verbosity.USUAL, {}
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
        except SystemExit as end:
            # No command ends the process; rich and typer do where nobody reads the output, and
            # with code 0 after the words of a shell's completion.
            if end.code:
                silence_output()
            return NO_READER if end.code else 0
        return code if isinstance(code, int) else 0


class _Command(_HelpOption, TyperCommand):
    """One command, with -q and -v; it adds to what typer checks of a command line."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, with the options that few users need after --help-all."""
        params: list[Any] = self.params
        for param in params:
            of_all = getattr(param, "rich_help_panel", None) == _ADVANCED
            param.hidden = param.hidden or (of_all and not ctx.meta.get(_ADVANCED))
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args`; refuse the empty name, which Path takes for the current directory."""
        values: Mapping[str, Any] = {}
        named = [param for param in self.params if param.param_type_name == "option"]
        names = {str(param.name): max(param.opts, key=len) for param in named}
        # In Python a model is given in the place of a machine.
        Speech.options = {"machine": names.get("simulate", "MACHINE"), **names}
        try:
            values, _, given_params = self.make_parser(ctx).parse_args(args=list(args))
            arguments = super().parse_args(ctx, args)
        except _UsageError as error:
            # typer does not name the command in all of them.
            error.ctx = ctx
            programs = any(param.metavar == "COMMAND" for param in self.params)
            if programs and "--" not in args and getattr(error, "option_name", None):
                error.message += "; put -- before the program if it is the program's"
            raise _plain(error, values) from error
        given = []
        for param, times in Counter(given_params).items():
            several = getattr(param, "multiple", False) or getattr(param, "is_flag", False)
            once = param.param_type_name == "option" and not several
            require(times < 2 or not once, param.opts[-1], "is given twice", "give it once")
            given.append(_check_value(param, values.get(param.name)))
        check_given(str(self.name), given)
        return arguments

    def invoke(self, ctx: Any) -> Any:
        """Run the command, where Ctrl-C is an exception."""
        before = at_interrupt(RAISE)
        try:
            return super().invoke(ctx)
        finally:
            at_interrupt(before)


def _check_value(param: Any, value: Any) -> str:
    """Refuse an empty place and what is none of the choices; return a given parameter's name."""
    metavar = param.metavar or ""
    texts = value if isinstance(value, list | tuple) else (value,)
    name = max(param.opts, key=len)
    if param.param_type_name == "argument":
        name = metavar.strip("[].")
    if "" in texts and not _PLACES.isdisjoint(metavar.split("|")):
        raise InputError(name, "is empty", f"name {metavar}")
    if choices := choices_of(metavar):
        check_choice(name, value, choices)
    if value is False:
        return str(*param.secondary_opts)
    return name if any(isinstance(text, str | bool) for text in texts) else ""


def _plain(error: Any, values: Mapping[str, Any]) -> Exception:
    """Return the error of a value that cannot be read in plain words, and any other as it is."""
    if "valid integer" in error.message:
        fault, right = "is no whole number", "give one, as 4"
    elif "valid number" in error.message or "valid float" in error.message:
        fault, right = "is no number", "give one, as 4 or 0.5"
    elif "valid boolean" in error.message:
        # Flags take no value, but their variables do.
        name = error.param.envvar
        where = f"{name}={os.environ.get(name, '')[:20]!r}"
        return InputError(where, "is neither yes nor no", "set it to 1 or 0")
    else:
        wrong: Exception = error
        return wrong
    return InputError(f"{error.param.opts[-1]} {values[error.param.name][:20]!r}", fault, right)


def _verbosity_flag(how: Verbosity, text: str) -> Any:
    """Return a flag of all commands that sets what they say."""

    def choose(is_set: bool) -> None:
        if is_set:
            Speech.verbosity = how

    names = how.value, f"--{how.name.lower()}"
    hidden: dict[str, Any] = {"is_eager": True, "expose_value": False}
    return typer.Option(False, *names, metavar=" ", help=text, callback=choose, **hidden)


def _common(
    quiet: bool = _verbosity_flag(Verbosity.QUIET, "Print results and errors alone."),
    verbose: bool = _verbosity_flag(Verbosity.VERBOSE, "Print progress and traces, and all notes."),
) -> None:
    """Hold the options of all commands."""


def _show_all(ctx: typer.Context, asked: bool) -> None:
    if asked:
        ctx.meta[_ADVANCED] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


def _of_commands(
    help_all: bool = flag(
        "--help-all", "Show all options.", callback=_show_all, is_eager=True, expose_value=False
    ),
) -> None:
    """Hold the options of each command alone."""


def load_command(name: str) -> Any:
    """Import a command and return it."""
    module, _, function = COMMANDS[name][0].partition(":")
    callback = getattr(import_module(f"tccl_py.cli.{module}"), function)
    info = CommandInfo(name=name, cls=_Command, callback=callback, context_settings=_SETTINGS)
    command = get_command_from_info(info, **_MADE)
    common = _common_options()
    for param in common:
        param.rich_help_panel = _ADVANCED
    command.params += [*common, *_options_of(_of_commands)]
    return command


def _common_options() -> list[Any]:
    return _options_of(_common)


def _options_of(holder: Any) -> list[Any]:
    return get_command_from_info(CommandInfo(callback=holder), **_MADE).params


def _sentence(error: Exception) -> str:
    if isinstance(error, _UsageError):
        context: Any = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "tccl"
        message = " ".join(error.format_message().split()).rstrip(".")
        message = message.replace("Got unexpected extra argument(s)", "Not expected here:")
        return f"{message}; see '{path} --help'"
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


_SETTINGS = {"help_option_names": ["-h", "--help"]}
_MADE: dict[str, Any] = {"pretty_exceptions_short": False, "rich_markup_mode": "markdown"}

app = typer.Typer(
    name="tccl",
    cls=_Commands,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings=_SETTINGS,
    epilog="Options: --version; --quiet, -q: results and errors alone; --verbose, -v: progress, "
    "traces and all notes; --install-completion, --show-completion: for your shell; --help, -h.",
)


@app.callback()
def _frame(
    ctx: typer.Context,
    version: bool = flag("--version", "Print the version and exit."),
) -> None:
    """Find fast communication rings for a machine's GPUs by measuring, and hand them to NCCL.

    A MACHINE is the name of a bundled model (see `tccl discover`), a JSON file that this program
    wrote, or an NCCL topology XML. Rates are GB/s, 10^9 bytes a second.

    Exit codes: 0 done, 1 the answer is no, 2 wrong use or bad input.
    """
    if version:
        raise typer.Exit(print_version())
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(NOT_USABLE)


def main() -> None:
    """The console entry point."""
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal cannot show must not end the program.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="tccl")


if __name__ == "__main__":
    main()
