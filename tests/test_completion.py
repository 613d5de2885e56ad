"""Completion of command lines in bash, by the lines that `tccl --show-completion` prints."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tccl_py.cli.main import COMMANDS
from tccl_py.simulator.descriptions import bundled_names

BASH_PATH = shutil.which("bash") or "/bin/bash"
BASH = """
eval "$(tccl --show-completion bash)"
COMP_WORDS=(tccl "$@"); COMP_CWORD=$#
_tccl_completion tccl
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def complete():
    """The completions of the last word."""
    # Names of shells are read from the processes above this one, unless it is named.
    bin_path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "PATH": bin_path}

    def words(*typed):
        command = [BASH_PATH, "--norc", "-c", BASH, "bash", *typed]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        assert not done.stderr
        return set(done.stdout.splitlines()) - {""}

    return words


def test_commands_and_options_complete(complete):
    assert complete("") == set(COMMANDS)
    assert complete("-q", "me") == {"measure"}
    assert complete("plan", "--no") == {"--nodes", "--noise", "--no-tune"}


def test_choices_and_machines_complete(complete):
    assert complete("measure", "--backend", "") == {"cuda", "host"}
    assert complete("plan", "--simulate", "a") == {n for n in bundled_names() if n[0] == "a"}
    assert complete("discover", "h200") == {"h200x4-vm"}
    assert complete("plan", "--max-sets", "") == set()
