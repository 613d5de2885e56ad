"""The plan of a dry run, made in host memory, is marked in all that is made from it."""

import json

import pytest

from tccl_profiler.linux import host_fingerprint, host_machine
from tccl_py.errors import InputError
from tccl_py.health.drift import metric_labels
from tccl_py.plan.directory import write_plan
from tccl_py.plan.load import load_plan
from tests.commands import tccl
from tests.planned import SMALL, needing_a_graph, plan_of, replace_plan

MARK = "DRY RUN"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A plan that recommends its graph file, as if copies in host memory had been measured."""
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "nccl.conf"))
    (tmp_path / "state").mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = replace_plan(
        needing_a_graph(plan_of(SMALL)), simulated=False, assumed=False, dry_run=True
    )
    directory = tmp_path / "plan"
    directory.mkdir()
    write_plan(made, directory, fingerprint=host_fingerprint(host_machine(4)))
    return directory


def test_every_file_of_the_plan_says_so_in_its_first_line(place, tmp_path):
    texts = {path.name: path.read_text() for path in (place / "nccl").rglob("*.*")
             if path.is_file() and path.suffix in (".xml", ".sh", ".conf")}  # fmt: skip
    assert {"graph.xml", "env.sh", "nccl.conf"} < set(texts)
    assert [name for name, text in texts.items() if MARK not in text.partition("\n")[0]] == []
    assert json.loads((place / "plan.json").read_text())["dry_run"]


@pytest.mark.parametrize(
    "words",
    [("show",), ("env",), ("env", "--force"), ("export",), ("run", "--", "true")],
    ids=" ".join,
)
def test_the_first_line_of_every_answer_says_so(place, words, monkeypatch):
    monkeypatch.setattr("os.execvpe", lambda *_: None)
    name, *options = words
    found = tccl(name, place, *options)
    assert found.exit_code == 0, found.stderr
    assert MARK in (found.stdout or found.stderr).partition("\n")[0]


def test_where_it_cannot_run_the_error_says_so(place, monkeypatch):
    def nothing(*_):
        raise InputError("this machine", "has no GPU", "")

    monkeypatch.setattr("tccl_py.experiments.plans.measured_machine", nothing)
    found = tccl("verify", place)
    assert found.exit_code == 2
    assert "(measured in a DRY RUN): cannot run here" in found.stderr


@pytest.mark.parametrize("name", ["show", "env"])
def test_json_has_a_key_for_it(place, name):
    assert json.loads(tccl(name, place, "--json").stdout)["dry_run"] is True


def test_metrics_have_a_label_for_it(place):
    assert metric_labels(load_plan(place))["dry_run"] == "true"
    assert "dry_run" not in metric_labels(plan_of(SMALL))


def test_the_report_has_neither_a_green_badge_nor_links_of_made_up_gpus(place):
    assert tccl("report", place).exit_code == 0
    page = (place / "report.html").read_text()
    _, _, words = page.partition("<main>")
    assert MARK in page.partition("<title>")[2].partition("</title>")[0]
    assert MARK in words.strip().partition("\n")[0]
    assert 'badge measured"' not in words and "tccl env " + str(place) + " --gpus" not in words
    assert "PCIe of GPUs" not in words and "is a PCI Express link" not in words
    assert "Every rate" not in words


def test_a_dry_run_exports_nothing_unless_it_is_forced(place):
    for words in ((), ("--plugin",), ("--choice", "graph"), ("--gpus", "0,1")):
        found = tccl("env", place, *words)
        assert found.exit_code == 0, found.stderr
        assert [line[:1] for line in found.stdout.splitlines()] == ["#"]
    forced = tccl("env", place, "--force").stdout
    assert f"export NCCL_GRAPH_FILE={place}/nccl/graph.xml\n" in forced


@pytest.mark.parametrize("force", [False, True])
def test_a_job_of_tccl_run_gets_a_dry_runs_variables_only_by_force(place, monkeypatch, force):
    seen = {}
    monkeypatch.setattr("os.execvpe", lambda *given: seen.update(given[2]))
    tccl("run", place, *["--force"] * force, "--", "true")
    assert ("NCCL_GRAPH_FILE" in seen) == force
    assert "PATH" in seen


def test_a_dry_run_is_installed_only_by_force_and_marked(place, tmp_path):
    found = tccl("install", place)
    assert found.exit_code == 2
    assert MARK in found.stderr and not (tmp_path / "nccl.conf").exists()
    found = tccl("install", place, "--force", "--no-plugin")
    assert found.exit_code == 0, found.stderr
    marker, first, *_ = (tmp_path / "nccl.conf").read_text().splitlines()
    assert MARK in marker + first
