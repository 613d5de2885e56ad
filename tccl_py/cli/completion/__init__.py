"""Scripts that complete `tccl` command lines: all words stand in them, so no Python starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jinja2

from tccl_py.simulator.descriptions import bundled_names

SHELLS = ("bash", "fish", "zsh")
_FILES = ("FILE", "PATH", "DIR|FILE", "GRAPH.xml")


def completion_script(shell: str, commands: Mapping[str, Any], lines: Mapping[str, str]) -> str:
    """Return the script for a shell; `lines` are the commands' lines in `tccl --help`."""
    loader = jinja2.PackageLoader("tccl_py.cli", "completion")
    made = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, autoescape=False)
    words = {name: _words(command) for name, command in commands.items()}
    given = {"commands": words, "lines": lines, "machines": bundled_names()}
    return made.get_template("fish" if shell == "fish" else "bash").render(given)


def _words(command: Any) -> tuple[list[tuple[list[str], str]], str]:
    """Return names and kind of value of each option, and the kind of the first argument."""
    options = [
        ([*one.opts, *one.secondary_opts], "" if getattr(one, "is_flag", False) else _kind(one))
        for one in command.params
        if one.param_type_name == "option"
    ]
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    return [*options, (["--help", "-h"], "")], _kind(arguments[0]) if arguments else "NONE"


def _kind(param: Any) -> str:
    metavar = str(param.metavar or "NONE").strip("[].")
    return "FILE" if metavar in _FILES else metavar
