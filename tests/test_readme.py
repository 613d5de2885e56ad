"""What the README shows runs as it stands there, and what it names exists."""

from __future__ import annotations

import re
import shlex
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tccl_py
from tccl_py.cli.main import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def words(text: str) -> str:
    """Without the lines of tables: columns move with names' lengths, words and figures do not."""
    return " ".join(re.sub("[│┃]", " ", text).split())


def faults(shown: list[str], printed: str) -> list[str]:
    """Lines that a command does not print, or that are cut: a sentence's rest, a table's header."""
    lines, found = printed.splitlines(), []
    there = {words(line) for line in shown}
    printed_words = [words(line) for line in lines]
    for line in shown:
        if words(line) not in printed_words:
            found.append(f"is not printed: {line}")
            continue
        at = printed_words.index(words(line))
        after = lines[at + 1] if at + 1 < len(lines) else ""
        # In the two columns of a summary a sentence goes on below, behind spaces.
        if after.startswith("     ") and words(after) not in there and not line.startswith(" "):
            found.append(f"is cut: {line}")
        if lines[at].startswith("│"):
            header = next(one for one in reversed(lines[:at]) if one.startswith("┃"))
            if words(header) not in there:
                found.append(f"is a row without the header: {header}")
    return found


def shown_commands() -> list[tuple[str, list[str]]]:
    """Each command of the console blocks with the lines of output shown below it."""
    found: list[tuple[str, list[str]]] = []
    for line in "".join(blocks("console")).splitlines():
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        else:
            found[-1][1].append(line)
    return found


def test_the_commands_print_what_the_readme_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    commands = shown_commands()
    assert len(commands) >= 5
    for command, shown in commands:
        program, *arguments = shlex.split(command)
        assert program == "tccl"
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, f"{command}: {result.output}"
        assert not faults(shown, result.stdout), command


@pytest.mark.parametrize("example", blocks("python"), ids=lambda text: text.splitlines()[0])
def test_the_python_examples_run(example, capsys):
    exec(compile(example, "README.md", "exec"), {})
    assert "simulated" in capsys.readouterr().out


def test_the_names_in_the_readme_are_public():
    used = set(re.findall(r"tccl_py\.([a-z_]+)\(", README, flags=re.IGNORECASE))
    assert used
    assert used <= set(tccl_py.__all__)


def test_the_extras_in_the_readme_are_those_of_the_package():
    named = set(re.findall(r"`\[(\w+)\]`", README))
    assert named == set(metadata.metadata("tccl-py").get_all("Provides-Extra"))


def test_the_scripts_in_the_documents_exist_and_can_be_run():
    pages = [ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = README + "".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"scripts/([a-z-]+)", text))
    assert {"demo", "test"} <= named
    for name in named:
        assert (ROOT / "scripts" / name).stat().st_mode & 0o111, name
