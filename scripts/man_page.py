"""Writes man/tccl.1, the manual of `tccl` for `man`, from the help of its commands."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

from scripts.command_pages import (
    arguments_and_options,
    commands,
    description,
    help_text,
    synopsis,
    term,
)
from tccl_py.cli.main import _frame, app

FILE = Path(__file__).resolve().parent.parent / "man" / "tccl.1"


def escaped(text: str) -> str:
    """Return `text` as roff prints it as it stands."""
    text = text.replace("\\", r"\e").replace("-", r"\-").replace("`", r"\(ga").replace("'", r"\(aq")
    return rf"\&{text}" if text.startswith(".") else text


def inline(token: Token) -> str:
    """Return a paragraph: code in bold, line breaks as spaces."""
    parts = []
    for part in token.children or ():
        text = " " if part.type == "softbreak" else escaped(part.content)
        parts.append(rf"\fB{text}\fP" if part.type == "code_inline" else text)
    return "".join(parts)


def roff(text: str) -> Iterator[str]:
    """Yield the lines of Markdown: paragraphs and indented blocks."""
    for token in MarkdownIt().parse(text):
        if token.type == "inline":
            yield from (".PP", inline(token))
        elif token.type in ("code_block", "fence"):
            yield from (".PP", ".RS 4", ".nf", *map(escaped, token.content.splitlines()))
            yield from (".fi", ".RE")


def section(name: str, command: Any) -> Iterator[str]:
    """Yield the part of a command: its form, help, arguments and options."""
    yield f'.SS "{escaped(synopsis(name, command))}"'
    yield from roff(help_text(command))
    for param in (part for parts in arguments_and_options(command) for part in parts):
        (heading,) = (token for token in MarkdownIt().parse(term(param)) if token.type == "inline")
        (text,) = (
            token for token in MarkdownIt().parse(description(param)) if token.type == "inline"
        )
        yield from (".TP", inline(heading), inline(text))


def manual() -> str:
    """Return the manual as roff."""
    lines = [
        f'.TH TCCL 1 "" "tccl-py {metadata.version("tccl-py")}"',
        ".SH NAME",
        r"tccl \- find fast communication rings for GPUs by measuring, and hand them to NCCL",
        ".SH SYNOPSIS",
        r".B tccl\fR COMMAND [OPTIONS] [ARGUMENTS]",
        ".SH DESCRIPTION",
        *roff(help_text(_frame)),
        *roff(str(app.info.epilog)),
        ".SH COMMANDS",
    ]
    for name, command in commands().items():
        lines += section(name, command)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(manual(), encoding="utf-8")
