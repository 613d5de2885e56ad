"""`tccl report`: where the page goes, what it replaces, and what a bad directory gets."""

from importlib import resources
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tccl_py.cli.main import app
from tests.planned import SMALL
from tests.report_pages import Page, plan_directory


def tccl(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


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


def test_the_page_goes_beside_the_plan(directory):
    result = tccl("report", directory)
    assert (result.exit_code, result.stdout) == (0, "")
    without, wrote = result.stderr.splitlines()
    assert without.startswith("tccl: without causes of slow transfers: ")
    assert wrote == f"tccl: wrote {directory / 'report.html'}"
    assert "There is no explanation" in (directory / "report.html").read_text()
    Page((directory / "report.html").read_text()).assert_accessible()


def test_the_page_goes_where_one_says(directory, tmp_path):
    assert tccl("report", directory, "-o", tmp_path / "page.html").exit_code == 0
    assert (tmp_path / "page.html").exists()
    assert not (directory / "report.html").exists()


def test_the_same_plan_gives_the_same_page(directory):
    tccl("report", directory)
    first = (directory / "report.html").read_bytes()
    assert tccl("report", directory).exit_code == 0
    assert (directory / "report.html").read_bytes() == first


def test_another_file_is_replaced_only_by_force(directory, tmp_path):
    notes = tmp_path / "notes.html"
    notes.write_text("<p>mine</p>")
    sentence = refused(tmp_path, directory, "-o", notes)
    assert "tccl; name another file" in sentence and f"{notes}" in sentence
    assert tccl("report", directory, "-o", notes, "--force").exit_code == 0
    assert "tccl report" in notes.read_text()


def test_an_empty_file_is_filled(directory, tmp_path):
    (tmp_path / "page.html").touch()
    assert tccl("report", directory, "-o", tmp_path / "page.html").exit_code == 0


def test_the_plan_itself_is_never_replaced(directory):
    for force in ((), ("--force",)):
        said = refused(directory, directory, "-o", directory / "plan.json", *force)
        assert "tccl; name another file" in said.rstrip()


def test_a_link_to_a_report_stays_a_link(directory, tmp_path):
    tccl("report", directory)
    link = tmp_path / "latest.html"
    link.symlink_to(directory / "report.html")
    assert tccl("report", directory, "-o", link).exit_code == 0
    assert link.is_symlink()


def test_a_directory_that_is_missing_or_has_no_plan_gets_a_sentence(tmp_path):
    gone = tmp_path / "gone"
    sentence = f"tccl: {gone}: is no directory; name a directory of `tccl plan`\n"
    assert refused(tmp_path, gone) == sentence
    assert "directory of `tccl plan`" in refused(tmp_path, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["plan.json", "measurements.jsonl"])
def test_a_damaged_file_is_named_and_nothing_is_written(name, directory):
    (directory / name).write_text("{}\n")
    assert f"{directory / name}" in refused(directory, directory)


def test_a_place_that_cannot_be_written_gets_a_sentence(directory, tmp_path):
    nowhere = tmp_path / "no" / "page.html"
    for place in (nowhere, tmp_path):
        assert "is no file that can be made" in refused(tmp_path, directory, "-o", place)
    assert "--output: is empty" in refused(tmp_path, directory, "-o", "")


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
