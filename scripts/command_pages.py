"""Hook of mkdocs: a page for every command of `tccl`, from the command's own help.

Examples written by hand in `docs/commands/NAME.md` follow the help; a command without examples gets
a page too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from tccl_py.cli.main import COMMANDS, load_command

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

FOLDER = PurePosixPath("commands")
LIST = "<!-- commands -->"
"""Mark in docs/commands/index.md, replaced by the list of commands."""


@functools.cache
def commands() -> Mapping[str, Any]:
    """Return the commands, in the order of `tccl --help`."""
    return {name: load_command(name) for name in COMMANDS}


def summary(command: Any) -> str:
    """Return the first sentence of a command's help."""
    return " ".join(help_text(command).split("\n\n")[0].split())


def reference(name: str, command: Any) -> str:
    """Return the text of `tccl NAME --help` as Markdown."""
    arguments, options = arguments_and_options(command)
    lines = [f"# tccl {name}", "", "```text", synopsis(name, command), "```", ""]
    lines += [help_text(command), ""]
    if arguments:
        lines += ["## Arguments", "", *(line for param in arguments for line in _entry(param))]
    lines += ["## Options", "", *(line for param in options for line in _entry(param))]
    return "\n".join([*lines, *_HELP_OPTION])


def synopsis(name: str, command: Any) -> str:
    """Return how a command is typed."""
    arguments, _ = arguments_and_options(command)
    return " ".join([f"tccl {name} [OPTIONS]", *map(_argument, arguments)])


def arguments_and_options(command: Any) -> tuple[list[Any], list[Any]]:
    """Return a command's parameters of both kinds."""
    kinds = ("argument", "option")
    return tuple([p for p in command.params if p.param_type_name == kind] for kind in kinds)


def page(name: str, command: Any, examples: str = "") -> str:
    """Return the whole page: the help, then examples written by hand."""
    return f"{reference(name, command)}\n{examples}".rstrip() + "\n"


_HELP_OPTION = ("`--help`, `-h`", ":   Show the help and exit.", "")


def help_text(command: Any) -> str:
    """Return a command's help as Markdown."""
    return inspect.cleandoc(getattr(command, "help", None) or command.__doc__ or "")


def _argument(param: Any) -> str:
    text = (param.metavar or param.name.upper()).strip("{}")
    more = "..." if param.nargs == -1 or param.multiple else ""
    return f"{text}{more}" if param.required else f"[{text}{more}]"


def _entry(param: Any) -> tuple[str, ...]:
    """Return a definition list's term and text."""
    return term(param), f":   {description(param)}", ""


def term(param: Any) -> str:
    """Return an argument's or an option's names and metavar."""
    if param.param_type_name == "argument":
        return f"`{_argument(param)}`"
    metavar = (param.metavar or "").strip()
    flag = bool(getattr(param, "is_flag", False))
    names = ", ".join(f"`{name}`" for name in sorted(param.opts, key=len, reverse=True))
    return f"{names} `{metavar}`" if metavar and not flag else names


def description(param: Any) -> str:
    """Return the text of an argument or option, with its default."""
    text = " ".join((getattr(param, "help", None) or "").split())
    if param.required and param.param_type_name == "option":
        text += " Required."
    shown = getattr(param, "show_default", False) and not getattr(param, "is_flag", False)
    if shown and param.default is not None and isinstance(param.default, str | int | float):
        text += f" Default: `{param.default}`."
    return text


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the commands to the navigation."""
    entries = next(entry["Commands"] for entry in config.nav or [] if "Commands" in entry)
    paths = [{name: f"{FOLDER / name}.md"} for name in commands()]
    entries += [path for path in paths if path not in entries]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Make the pages of commands."""
    from mkdocs.structure.files import File  # noqa: PLC0415 (man_page.py needs no mkdocs)

    for name, command in commands().items():
        uri = f"{FOLDER / name}.md"
        written = files.get_file_from_path(uri)
        examples = written.content_string if written is not None else ""
        if written is not None:
            files.remove(written)
        files.append(File.generated(config, uri, content=page(name, command, examples)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the list of commands."""
    rows = [f"| [{name}]({name}.md) | {summary(command)} |" for name, command in commands().items()]
    return markdown.replace(LIST, "\n".join(["| command | does |", "|---|---|", *rows]))
