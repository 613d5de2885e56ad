"""`tccl show --why`: output, the file it keeps, and what it refuses."""

import json
from pathlib import Path

import pytest

from tccl_py.explanation.findings import Explanation
from tccl_py.plan.directory import write_plan
from tccl_py.plan.load import load_plan
from tccl_py.simulator.descriptions import load_bundled, model_for
from tccl_py.simulator.source import Simulator
from tccl_py.sources.bench import Bench
from tccl_py.sources.journal import JournalFile
from tests.cluster_plans import FOUR, PAIR, cluster_plan
from tests.commands import done, refused, tccl
from tests.planned import as_only

PLANS = Path(__file__).parent.parent / "plans"
NAME = "amd-v100"


@pytest.fixture
def directory(tmp_path):
    """A simulated plan with a journal that holds nothing yet."""
    write_plan(load_plan(PLANS / f"{NAME}.json"), tmp_path, models=as_only(load_bundled(NAME)))
    model = load_bundled(NAME)
    with Bench(
        Simulator(model),
        journal=JournalFile(tmp_path / "measurements.jsonl", Simulator(model).header),
    ):
        pass
    return tmp_path


def test_the_json_is_what_is_kept(directory):
    printed = json.loads(done("show", "--why", directory, "--json").stdout)
    assert printed == json.loads((directory / "explanation.json").read_text())
    assert printed["simulated"] is True
    assert [ring["name"] for ring in printed["rings"]] == ["plan", "default"]
    assert Explanation.load(directory).sets_measured == printed["sets_measured"] > 0


def test_a_report_has_causes_without_being_asked(directory):
    wrote = f"tccl: wrote {directory / 'report.html'}\n"
    assert done("report", directory).stderr.endswith(f"explanation.json\n{wrote}")
    assert Explanation.load(directory) is not None
    page = (directory / "report.html").read_text()
    assert "memory of NUMA node 1" in page
    assert done("report", directory).stderr == wrote
    assert (directory / "report.html").read_text() == page


@pytest.mark.parametrize("noise", ["1.2.3", "...", "e", "-1", "0.02, seed 5, noise e"])
def test_noise_that_is_no_number_makes_the_journal_another_models(noise, directory):
    journal = directory / "measurements.jsonl"
    journal.write_text(journal.read_text().replace('","sim', f', noise {noise}, seed 5","sim'))
    refused(tccl("show", "--why", directory), "model of amd-v100")


def test_a_simulated_plan_over_unlike_hosts_is_explained_by_the_model_of_each(tmp_path):
    chains = {"gpu1": ((0, (0, 1, 2, 3), 1),), "gpu2": ((0, (0, 1), 1),)}
    made = cluster_plan([("gpu1", FOUR), ("gpu2", PAIR)], chains)
    write_plan(made, tmp_path, models={one.name: model_for(one) for one in (FOUR, PAIR)})
    rings = json.loads(done("show", "--why", tmp_path, "--json").stdout)["rings"]
    assert [one["node_class"] for one in rings] == ["four", "pair"]
    assert not (tmp_path / "measurements.jsonl").exists()
