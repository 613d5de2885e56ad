"""Packages: the source archive, what the extras install, the plugin alone, the manual's page."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tccl_py.cli.main import COMMANDS
from tccl_py.nccl.plugin import LIBRARY
from tests.skips import needs

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def checkout():
    """The files of the checkout."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    return {name for name in listed if name and (ROOT / name).exists()}


def test_the_source_archive_has_every_file_of_the_checkout(checkout, tmp_path):
    needs("setuptools")
    source, out = tmp_path / "source", tmp_path / "out"
    for name in checkout:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    command = [sys.executable, "setup.py", "-q", "sdist", "-d", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (archive,) = out.iterdir()
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert checkout - names <= {".gitignore"}


def test_users_extras_install_no_test_tools():
    needs("tomllib")
    import tomllib  # noqa: PLC0415

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (everything,) = project["optional-dependencies"]["all"]
    assert "test" not in everything
    assert "docs" not in everything


def test_the_manual_has_every_command_and_no_bare_markup(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from scripts import man_page  # noqa: PLC0415

    text = man_page.manual()
    for name in COMMANDS:
        assert f'.SS "tccl {name} ' in text
    assert "`" not in text
    requests = {line.split()[0] for line in text.splitlines() if line.startswith(".")}
    assert requests <= {".TH", ".SH", ".SS", ".PP", ".TP", ".RS", ".RE", ".nf", ".fi", ".B"}


def test_the_plugin_is_built_by_a_python_without_packages(tmp_path):
    needs("a C compiler")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(python)}
    command = ["bash", str(ROOT / "scripts" / "build-plugin"), "out"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / LIBRARY).is_file()
