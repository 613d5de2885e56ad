"""What the documentation shows runs as it stands, no command lacks a page, and no link is dead."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

import tccl_py
from tccl_py.cli.main import COMMANDS as NAMES
from tccl_py.cli.main import app, load_command
from tccl_py.nccl.versions import known_versions
from tests.test_readme import faults

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# The tutorial first: its plan is what the other pages use.
PAGES = sorted(DOCS.rglob("*.md"), key=lambda page: (page.parent.name != "tutorial", page))
COMMANDS = {name: load_command(name) for name in NAMES}


def blocks(page: Path, language: str) -> str:
    """All blocks of a language, those inside lists too, without their indentation."""
    text = page.read_text(encoding="utf-8")
    fence = rf"^( *)```{language}\n(.*?)^\1```$"
    found = re.findall(fence, text, flags=re.MULTILINE | re.DOTALL)
    return "".join(re.sub(f"^{indent}", "", body, flags=re.MULTILINE) for indent, body in found)


def shown_commands() -> list[tuple[Path, str, list[str]]]:
    """Each command that is shown with output: its page, itself, and the lines below it."""
    found: list[tuple[Path, str, list[str]]] = []
    for page in PAGES:
        for line in blocks(page, "console").splitlines():
            if line.startswith("$ "):
                found.append((page, line.removeprefix("$ "), []))
            else:
                found[-1][2].append(line)
    return found


def shown_files() -> dict[str, str]:
    """The files that pages show, which have a title; commands on the pages read them."""
    fence = r'^```[a-z]+ title="([a-z.-]+)"\n(.*?)^```$'
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    found = [one for text in texts for one in re.findall(fence, text, re.MULTILINE | re.DOTALL)]
    assert len(dict(found)) == len(found), "two pages show a file of one name"
    return dict(found)


def test_the_commands_print_what_the_pages_show(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in shown_files().items():
        Path(name).write_text(text, encoding="utf-8")
    monkeypatch.delenv("COLUMNS", raising=False)
    answers: dict[str, tuple[int, str]] = {}
    commands = shown_commands()
    assert len(commands) >= 15
    for page, command, shown in commands:
        line, asks_code, _ = command.partition("; echo $?")
        program, *arguments = shlex.split(line)
        assert program == "tccl"
        if line not in answers:
            result = CliRunner().invoke(app, arguments)
            answers[line] = result.exit_code, result.stdout
        code, printed = answers[line]
        assert asks_code or code == 0, f"{page.name}: {command}: {printed}"
        found = faults(shown, f"{printed}{code}" if asks_code else printed)
        assert not found, f"{page.name}: {command}"


def typed_commands() -> list[tuple[str, str]]:
    """Command lines of `tccl` that are shown without output, because they need GPUs or files."""
    lines = [(page, line) for page in PAGES for line in blocks(page, "sh").splitlines()]
    return [
        (str(page.relative_to(DOCS)), match[1])
        for page, line in lines
        for match in re.finditer(r"\b(tccl [a-z]+ (?:[^()|;#]|\$\()*)", line)
    ]


@pytest.mark.parametrize("page, line", typed_commands())
def test_commands_and_options_that_are_typed_exist(page, line):
    _, name, *arguments = re.sub(r"[()]|2>.*|\"\$\(", " ", line).replace('"', " ").split()
    params = COMMANDS[name].params
    options = {one for param in params for one in (*param.opts, *param.secondary_opts)}
    # After -- is the command of `tccl run`.
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    used = {one for one in own if re.fullmatch(r"--?[a-z][a-z-]*", one)}
    assert used <= options


def test_sets_of_one_machine_are_typed_without_what_a_shell_takes_for_a_redirection():
    helps = [COMMANDS["measure"].help]
    texts = [blocks(page, language) for page in PAGES for language in ("sh", "console")]
    lines = [one for text in [*helps, *texts] for one in text.splitlines() if "tccl " in one]
    assert sum(bool(re.search(r" 0:\d", one)) for one in lines) > 6
    assert [one for one in lines if re.search(r"(?<!\.)\b[GC]\d+->", one)] == []


def test_a_directory_in_the_documents_means_one_plan():
    plans: dict[str, set[str]] = {}
    for page in [*PAGES, ROOT / "README.md", ROOT / "tccl_py/cli/plan.py"]:
        text = page.read_text(encoding="utf-8")
        for name, options in re.findall(
            r"^ *(?:[$] )?.*?tccl plan (?:-o )?([a-z][a-z0-9-]+)((?: [^#|&`\n]*)?)", text, re.M
        ):
            planned = options.replace("--force", "").strip()
            # Hosts that join a plan are named by another list, or run.
            if (name, planned) not in {("plain", '--hosts "gpu[01-06]"'), ("gpu-cluster", "")}:
                plans.setdefault(name, set()).add(planned)
    assert len(plans) > 15
    assert {name: asked for name, asked in plans.items() if len(asked) > 1} == {}


def test_every_page_of_a_command_is_of_one_there_is():
    names = {page.stem for page in (DOCS / "commands").glob("*.md")} - {"index"}
    assert names <= set(COMMANDS)


def test_the_api_page_has_every_public_name():
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^### (\w+)$", text, flags=re.MULTILINE)
    assert set(tccl_py.__all__) <= set(listed)


def test_generated_pages_are_what_the_scripts_write(monkeypatch):
    for name, pages in (
        ("api_page", [DOCS / "api.md"]),
        ("command_pages", sorted((DOCS / "commands").glob("*.md"))),
    ):
        module = script(name, monkeypatch)
        for page in pages:
            text = page.read_text(encoding="utf-8")
            written = module.page(text) if name == "api_page" else module.page(text, page.stem)
            assert written == text, f"python -m scripts.{name} writes it again"


def script(name: str, monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module(name)


def test_a_page_says_all_that_the_help_does(monkeypatch):
    pages = script("command_pages", monkeypatch)
    for name, command in pages.commands().items():
        text = pages.reference(name, command)
        assert text.startswith(f"# tccl {name}\n")
        for param in command.params:
            assert param.help, f"{name}: {param.name} has no help"
            assert " ".join(param.help.split()) in text
            if param.param_type_name == "option":
                assert all(f"`{option}`" in text for option in param.opts)


def test_the_site_builds_without_a_dead_link_and_loads_nothing_from_elsewhere(tmp_path):
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    result = subprocess.run(
        build,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for page in tmp_path.rglob("*.html"):
        assert not re.findall(
            r'<(?:link|script|img)[^>]* (?:src|href)="https?:[^"]*"', page.read_text()
        )
    for name in COMMANDS:
        assert (tmp_path / "commands" / f"{name}.html").exists()


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_code():
    folders = (ROOT / "tccl_py", ROOT / "profiler")
    files = [
        path for folder in folders for path in folder.rglob("*.*") if path.suffix in (".py", ".c")
    ]
    text = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in files))
    page = (DOCS / "troubleshooting.md").read_text()
    messages = [part for said in re.findall(r'"([^"]{8,})"', page) for part in said.split("...")]
    assert len(messages) > 25
    assert [part for part in messages if part.strip() and part not in text] == ["dev N not found"]


def test_the_tables_of_versions_are_those_of_the_code(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    pages = importlib.import_module("scripts.support_page")
    text = pages.PAGE.read_text(encoding="utf-8")
    assert pages.page(text) == text
    rules = {pages.version_facts(release).name for release in pages.RELEASES}
    assert rules == set(known_versions())


def sentences(text: str) -> list[str]:
    """The sentences of paragraphs and lists, code as single words; no tables, no blocks."""
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.M | re.S)
    text = re.sub(r"^(\||#).*$|^ *<.*>$", "", text, flags=re.M)
    text = re.sub(r"`[^`]*`", "C", re.sub(r"\]\([^)]*\)", "]", text))
    parts = re.split(r"\n\s*\n|\n(?=\s*[-*] |\s*\d+\. )", text)
    return [one for part in parts for one in re.split(r"(?<=[.!?])\s+(?=[A-Z*\[])", part)]


FIRST = [ROOT / "README.md", *(DOCS / f"{name}.md" for name in ("index", "features"))]


@pytest.mark.parametrize(
    "page", [*FIRST, *sorted((DOCS / "tutorial").rglob("*.md"))], ids=lambda page: page.stem
)
def test_no_sentence_of_the_front_pages_and_of_a_tutorial_is_longer_than_30_words(page):
    assert [one for one in sentences(page.read_text()) if len(one.split()) > 30] == []


def words_to_read(page: Path) -> int:
    """The words of a page outside of blocks and of what scripts write below their mark."""
    text = re.split(r"^<!-- (?:tables? )?by ", page.read_text(), maxsplit=1, flags=re.M)[0]
    text = re.sub(r"\A.*^<!-- above by .*?$", "", text, flags=re.M | re.S)
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.M | re.S)
    return len(text.split())


def test_the_documentation_is_at_most_18000_words_beside_generated_pages_and_results():
    generated = {DOCS / "json.md", DOCS / "results.md", *(DOCS / "results").glob("*.md")}
    assert sum(words_to_read(page) for page in PAGES if page not in generated) <= 18_000
