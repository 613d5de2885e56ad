"""Completion of command lines in bash, fish and zsh; shells that are not here are skipped."""

import shutil
import subprocess

import pytest
from typer.testing import CliRunner

from tccl_py.cli.main import COMMANDS, app
from tccl_py.simulator.descriptions import bundled_names

BASH_PATH = shutil.which("bash") or "/bin/bash"
BASH = """
. "$1"; shift
COMP_WORDS=(tccl "$@"); COMP_CWORD=$#
_tccl
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    for shell in ("bash", "fish", "zsh"):
        result = CliRunner().invoke(app, ["--completion", shell])
        assert result.exit_code == 0, result.output
        (folder / shell).write_text(result.stdout)
    return folder


@pytest.fixture
def complete(scripts, tmp_path):
    """The completions of the last word, in a folder with a plan and without."""
    (tmp_path / "my plan").mkdir()
    (tmp_path / "my plan" / "plan.json").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "box.json").touch()

    def words(*typed):
        command = [BASH_PATH, "--norc", "-c", BASH, "bash", str(scripts / "bash"), *typed]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert not done.stderr
        return set(done.stdout.splitlines()) - {""}

    return words


def test_commands_options_and_values_complete(complete):
    assert complete("") == set(COMMANDS)
    assert complete("me") == complete("-q", "me") == {"measure"}
    assert complete("-v", "plan", "--noi") == {"--noise"}
    assert {"--simulate", "--tune", "--no-tune", "-o", "--help"} <= complete("plan", "-")
    assert complete("plan", "--no") == {"--nodes", "--noise", "--no-tune"}
    assert complete("measure", "--backend", "") == {"cuda", "host"}
    assert complete("plan", "--max-sets", "") == set()


def test_machines_and_plans_complete(complete):
    assert complete("plan", "--simulate", "a") >= {n for n in bundled_names() if n[0] == "a"}
    assert "box.json" in complete("plan", "--simulate", "b")
    assert complete("machines", "h200") == {"h200x4-vm"}
    assert complete("show", "") == {"my plan"}
    assert complete("show", "o") == {"other"}


def test_a_completion_starts_no_program(complete, monkeypatch):
    typed = [("",), ("me",), ("plan", "--simulate", "a"), ("show", "o")]
    usual = [complete(*words) for words in typed]
    monkeypatch.setenv("PATH", "/nonexistent")
    assert [complete(*words) for words in typed] == usual


@pytest.mark.parametrize("shell", ["fish", "zsh"])
def test_other_shells_read_their_scripts(shell, scripts):
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    ask = {
        "fish": f"source {scripts}/fish; complete -C 'tccl plan --simulate h200'",
        "zsh": f"autoload -U compinit && compinit -u -D; . {scripts}/zsh; print ${{_comps[tccl]}}",
    }[shell]
    done = subprocess.run([shell, "-c", ask], capture_output=True, text=True, check=True)
    assert {"fish": "h200x4-vm", "zsh": "_bash_complete"}[shell] in done.stdout
    assert not done.stderr


def test_an_unknown_shell_is_refused():
    result = CliRunner().invoke(app, ["--completion", "tcsh"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
