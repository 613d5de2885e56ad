"""`tccl report`: where the page goes, what it replaces, and what a bad directory gets."""

from importlib import resources
from pathlib import Path

import pytest

from tests.commands import tccl
from tests.planned import SMALL
from tests.report_pages import plan_directory


@pytest.fixture
def directory(tmp_path):
    return plan_directory(tmp_path / "plan", SMALL)


def refused(directory, *arguments):
    """The sentence for a command line that must leave everything as it is."""
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    result = tccl("report", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert before == {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    return result.stderr


def test_a_link_to_a_report_stays_a_link(directory, tmp_path):
    tccl("report", directory)
    link = tmp_path / "latest.html"
    link.symlink_to(directory / "report.html")
    assert tccl("report", directory, "-o", link).exit_code == 0
    assert link.is_symlink()


def test_a_report_stays_where_writing_the_next_fails(directory, monkeypatch):
    tccl("report", directory)
    before = (directory / "report.html").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    result = tccl("report", directory)
    assert result.exit_code == 2
    assert "space left on device" in result.stderr
    assert (directory / "report.html").read_bytes() == before
    assert not list(directory.glob(".report*"))


def test_templates_come_with_the_package():
    templates = resources.files("tccl_py.report") / "templates"
    assert {one.name for one in templates.iterdir()} >= {"report.html", "report.css"}
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert '"report/templates/*"' in project
