"""What the README shows runs as it stands there, and what it names exists."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import tccl_py
from tccl_py.nccl.versions import FIRST_WITH_PLUGIN, LAST_WITH_PLUGIN, known_versions
from tests.test_advice import OPTIONS, advised

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FEATURES = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def words(text: str) -> str:
    """Without the lines of tables: columns move with names' lengths, words and figures do not."""
    return " ".join(re.sub("[│┃]", " ", text).split())


def faults(shown: list[str], printed: str) -> list[str]:
    """What differs between an example and the output of its command, of which `...` is any part."""
    printed = printed.replace(str(Path.cwd()), "/home/me")
    lines, expected = ([words(line) for line in text] for text in (printed.splitlines(), shown))
    # Frames of tables have other lengths where names have.
    drawn = [line for line in lines if line.strip("┏━┳┓┡╇┩└─┴┘├┼┤ ")]
    asked = [line for line in expected if line.strip("┏━┳┓┡╇┩└─┴┘├┼┤ ")]
    pattern = "".join("(.*\n)*?" if line == "..." else f"{re.escape(line)}\n" for line in asked)
    if re.fullmatch(pattern, "".join(f"{line}\n" for line in drawn)):
        return []
    return [line for line in difflib.ndiff(drawn, asked) if line[0] in "+-"] or [
        "the order differs"
    ]


def shown_commands() -> list[tuple[str, list[str]]]:
    """Each command of the console blocks with the lines of output shown below it."""
    found: list[tuple[str, list[str]]] = []
    for line in "".join(blocks("console")).splitlines():
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        else:
            found[-1][1].append(line)
    return found


@pytest.mark.parametrize(
    ("shown", "right"),
    [
        ("a\nb\nc", True),
        ("a\n...\nc", True),
        ("...", True),
        ("a\n...\nb\nc", True),
        ("", False),
        ("a\nc", False),
        ("a\nb", False),
        ("b\nc", False),
        ("a\nb\nc\nd", False),
        ("b\n...", False),
        ("c\n...\na", False),
    ],
)
def test_an_example_shows_every_line_or_dots(shown, right):
    assert (faults(shown.splitlines(), "a\n\n━━━\nb\nc\n") == []) is right


def test_a_shell_runs_the_commands_in_turn_and_they_print_what_the_readme_shows(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(ROOT / "examples")
    tools = Path(sys.executable).parent
    if not (tools / "tccl").exists():
        pytest.skip("needs the command tccl beside this Python")
    environment = {name: os.environ[name] for name in os.environ if name != "COLUMNS"}
    environment["PATH"] = f"{tools}:{environment['PATH']}"
    commands = shown_commands()
    assert len(commands) >= 2
    for command, shown in commands:
        result = subprocess.run(
            ["bash", "-c", command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, f"{command}: {result.stderr}"
        assert not faults(shown, result.stdout), command


def test_a_reader_who_types_each_line_in_turn_has_the_command_and_no_directory_twice():
    lines = [
        line
        for block in re.findall(r"^```[a-z]+\n(.*?)^```$", README, re.M | re.S)
        for line in block.splitlines()
    ]
    typed = [line.removeprefix("$ ").partition("#")[0].strip() for line in lines]
    first = next(at for at, line in enumerate(typed) if line.startswith("tccl "))
    with_gpus, *without = typed[:first]
    assert re.fullmatch(r"pip install .\.\[cuda\d+,torch\].", with_gpus)
    assert without == ["scripts/demo", "scripts/test", ". .venv/bin/activate"]
    assert "${TCCL_VENV:-.venv}" in (ROOT / "scripts" / "_environment").read_text()
    written = [found[1] for line in typed if (found := re.match(r"tccl plan (\S+)", line))]
    assert len(written) >= 3
    assert len(set(written)) == len(written)


def test_commands_anywhere_in_the_readme_have_the_options_they_are_given():
    found = list(advised(README + FEATURES))
    assert len(found) > 15
    for name, options in found:
        assert set(options) <= OPTIONS[name], name


@pytest.mark.parametrize(
    "example", blocks("python", FEATURES), ids=lambda text: text.splitlines()[0]
)
def test_the_python_examples_run(example, capsys):
    exec(compile(example, "features.md", "exec"), {})
    assert "simulated" in capsys.readouterr().out


def test_the_versions_of_nccl_in_the_documents_are_those_of_the_code():
    assert f"NCCL ({', '.join(known_versions())})" in FEATURES
    first, last = (".".join(map(str, one)) for one in (FIRST_WITH_PLUGIN, LAST_WITH_PLUGIN))
    assert f"NCCL {first} to {last}" in README
    assert f"(NCCL {first} to {last})" in FEATURES
    for page in (ROOT / "docs").rglob("*.md"):
        ranges = re.findall(r"2\.28\.7(?: to | [a-z]+ later)\S*", page.read_text(encoding="utf-8"))
        assert {found.rstrip(".,:;)") for found in ranges} <= {f"{first} to {last}"}, page


def test_the_names_in_the_features_are_public():
    used = set(re.findall(r"tccl_py\.([a-z_]+)\(", FEATURES, flags=re.IGNORECASE))
    assert used
    assert used <= set(tccl_py.__all__)


def test_the_extras_in_the_readme_are_those_of_the_package():
    named = set(re.findall(r"`\[(\w+)\]`", README))
    assert named == set(metadata.metadata("tccl-py").get_all("Provides-Extra"))


def test_the_demo_plans_shows_and_draws_a_machine(tmp_path):
    demo = (ROOT / "scripts" / "demo").read_text()
    lines = [line for line in demo.splitlines() if line.startswith("tccl ")]
    script = "\n".join(['set -eu; machine=amd-v100 folder="$1"', *lines])
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-c", script, "bash", str(tmp_path / "plan")],
        env={**os.environ, "PATH": path, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert len(lines) == 3 and (tmp_path / "plan" / "report.html").is_file()


def test_the_scripts_in_the_documents_exist_and_can_be_run():
    pages = [ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
    # Results name the commands of their day.
    now = [page for page in pages if page.parent.name != "results"]
    text = README + "".join(page.read_text(encoding="utf-8") for page in now)
    named = set(re.findall(r"scripts/([a-z-]+)\b(?!\.)", text))
    assert {"demo", "test"} <= named
    for name in named:
        assert (ROOT / "scripts" / name).stat().st_mode & 0o111, name
