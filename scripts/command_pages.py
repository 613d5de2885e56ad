"""Writes the pages of commands, docs/commands: the help of each above what is written by hand.

usage: python -m scripts.command_pages
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tccl_py.cli.main import COMMANDS, load_command

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "commands"
MARK = "<!-- above by python -m scripts.command_pages -->\n"
"""Begins what is written by hand; on index.md the list of commands stands above it."""


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
        lines += ["## Arguments", "", *map(_entry, arguments), ""]
    lines += ["## Options", "", *map(_entry, options)]
    return "\n".join([*lines, "- `--help`, `-h`: Show the help and exit.", ""])


def synopsis(name: str, command: Any) -> str:
    """Return how a command is typed."""
    arguments, _ = arguments_and_options(command)
    return " ".join([f"tccl {name} [OPTIONS]", *map(_argument, arguments)])


def arguments_and_options(command: Any) -> tuple[list[Any], list[Any]]:
    """Return a command's parameters of both kinds."""
    kinds = ("argument", "option")
    return tuple([p for p in command.params if p.param_type_name == kind] for kind in kinds)


def page(text: str, name: str) -> str:
    """Return a page with what stands above its mark written anew; `name` is a command or index."""
    above = listed() if name == "index" else reference(name, commands()[name])
    by_hand = text.partition(MARK)[2] or text
    return f"{above}\n{MARK}{by_hand}"


def listed() -> str:
    """Return the list of commands."""
    rows = [f"| [{name}]({name}.md) | {summary(command)} |" for name, command in commands().items()]
    return "\n".join(["# Commands", "", "| command | does |", "|---|---|", *rows, ""])


def help_text(command: Any) -> str:
    """Return a command's help as Markdown."""
    return inspect.cleandoc(getattr(command, "help", None) or command.__doc__ or "")


def _argument(param: Any) -> str:
    text = (param.metavar or param.name.upper()).strip("{}")
    more = "..." if param.nargs == -1 or param.multiple else ""
    return f"{text}{more}" if param.required else f"[{text}{more}]"


def _entry(param: Any) -> str:
    return f"- {term(param)}: {description(param)}"


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
    if shown and param.default not in (None, "") and isinstance(param.default, str | int | float):
        text += f" Default: `{param.default}`."
    return text


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        path.write_text(page(text, path.stem), encoding="utf-8")
