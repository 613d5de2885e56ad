"""`tccl show --why`: output, the file it keeps, and what it refuses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tccl_py.cli.main import app
from tccl_py.errors import InputError
from tccl_py.explanation.findings import Explanation
from tccl_py.model.measurement import JournalHeader
from tccl_py.model.transfer import parse_set
from tccl_py.plan.directory import write_plan
from tccl_py.plan.load import load_plan
from tccl_py.simulator.descriptions import load_bundled, model_for
from tccl_py.simulator.source import Simulator
from tccl_py.sources.bench import Bench
from tccl_py.sources.journal import JournalFile
from tests.cluster_plans import FOUR, PAIR, cluster_plan
from tests.planned import as_only, rebind, replace_plan
from tests.sessions import Fake, measures_by

PLANS = Path(__file__).parent.parent / "plans"
NAME = "amd-v100"


def tccl(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def done(*arguments):
    result = tccl(*arguments)
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments):
    result = tccl(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.stderr


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


def measured(directory):
    """Make the plan and its journal say that they were measured."""
    plan = replace_plan(load_plan(directory), simulated=False, assumed=False)
    plan.save(directory / "plan.json")
    rebind(directory)
    journal = directory / "measurements.jsonl"
    journal.unlink()
    header = JournalHeader(machine=NAME, identity="GPUs a, b", simulated=False)
    with Bench(Simulator(load_bundled(NAME)), journal=JournalFile(journal, header)):
        pass


def test_the_text_names_rings_causes_and_provenance(directory):
    text = " ".join(done("show", "--why", directory).stdout.split())
    assert "amd-v100, GPUs 0,1,2,3: simulated" in text
    assert "NCCL: 4.00 GB/s " in text
    assert "bounce through the memory" in text
    assert "memory of NUMA node 1" in text
    assert "10.73 by direct write or" in text


def test_the_json_is_what_is_kept(directory):
    printed = json.loads(done("show", "--why", directory, "--json").stdout)
    assert printed == json.loads((directory / "explanation.json").read_text())
    assert printed["simulated"] is True
    assert [ring["name"] for ring in printed["rings"]] == ["plan", "default"]
    assert Explanation.load(directory).sets_measured == printed["sets_measured"] > 0


def test_a_small_budget_says_what_is_left_open(directory):
    found = json.loads(done("show", "--why", directory, "--json", "--max-sets", 3).stdout)
    assert found["sets_measured"] <= 3
    assert any(ring["unexplained"] for ring in found["rings"])


def test_a_report_has_causes_without_being_asked(directory):
    wrote = f"tccl: wrote {directory / 'report.html'}\n"
    assert done("report", directory).stderr.endswith(f"explanation.json\n{wrote}")
    assert Explanation.load(directory) is not None
    page = (directory / "report.html").read_text()
    assert "memory of NUMA node 1" in page
    assert done("report", directory).stderr == wrote
    assert (directory / "report.html").read_text() == page


def test_options_of_causes_are_refused_without_them(directory):
    assert "add --why" in refused("show", directory, "--max-sets", "3")


def test_noise_and_seed_of_the_plan_are_kept(tmp_path):
    done("plan", "-o", tmp_path, "--simulate", NAME, "--noise", 0.03, "--seed", 5, "--max-sets", 20)
    found = json.loads(done("show", "--why", tmp_path, "--json").stdout)
    assert found["rings"][1]["findings"][0]["error"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere: is no directory"),
        (["."], ".: holds no plan.json"),
        ([".", "--max-sets", "0"], "--max-sets: is 0; 1 to 1000000"),
        ([".", "--max-causes", "0"], "--max-causes: is 0; 1 to 100"),
        ([".", "other"], "--why: is about one plan as it is"),
        ([".", "--hops"], "--hops: is about one plan as it is"),
    ],
)
def test_what_cannot_be_explained_is_refused(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused("show", "--why", *arguments).startswith(f"tccl: {said}")


def test_a_measured_plan_is_not_explained_by_another_machine(directory, monkeypatch):
    measured(directory)

    def none():
        raise InputError("this machine", "no NVIDIA driver answers (why)", "read a file")

    monkeypatch.setattr("tccl_py.readers.live.discover_machine", none)
    said = refused("show", "--why", directory)
    assert "amd-v100: was measured" in said
    assert "explain it there" in said


def test_a_measured_plan_without_its_journal_is_refused(directory):
    measured(directory)
    (directory / "measurements.jsonl").unlink()
    assert "measurements.jsonl: does not" in refused("show", "--why", directory)


def test_a_measured_plan_is_explained_on_its_machine(directory, monkeypatch):
    measured(directory)
    session = Fake(NAME, "G0 was warm")
    session.more = {}
    measures_by(monkeypatch, session, "tccl_py.planning.plan_sources")
    result = done("show", "--why", directory)
    assert "(measured)" in result.stdout
    assert "simulated" not in result.stdout
    assert "G0 was warm" in result.stderr
    text = str(parse_set("G0->G0->G3{blocks=2}"))
    assert text in (directory / "measurements.jsonl").read_text()


@pytest.mark.parametrize("noise", ["1.2.3", "...", "e", "-1", "0.02, seed 5, noise e"])
def test_noise_that_is_no_number_makes_the_journal_another_models(noise, directory):
    journal = directory / "measurements.jsonl"
    journal.write_text(journal.read_text().replace('","sim', f', noise {noise}, seed 5","sim'))
    assert "model of amd-v100" in refused("show", "--why", directory)


def test_a_simulated_plan_over_unlike_hosts_is_explained_by_the_model_of_each(tmp_path):
    chains = {"gpu1": ((0, (0, 1, 2, 3), 1),), "gpu2": ((0, (0, 1), 1),)}
    made = cluster_plan([("gpu1", FOUR), ("gpu2", PAIR)], chains)
    write_plan(made, tmp_path, models={one.name: model_for(one) for one in (FOUR, PAIR)})
    rings = json.loads(done("show", "--why", tmp_path, "--json").stdout)["rings"]
    assert [one["node_class"] for one in rings] == ["four", "pair"]
    assert not (tmp_path / "measurements.jsonl").exists()


def test_rings_that_differ_from_default_nccls_by_channels_alone_are_said_to(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    words = ("--simulate", "h200x4-vm", "--pin-env", "NCCL_P2P_DISABLE")
    done("plan", tmp_path / "plan", *words)
    said = done("show", "--why", tmp_path / "plan").stdout
    assert (
        "the plan's rings are default NCCL's, with 8 channels of 1 MiB in place of 4 of 4 MiB"
        in " ".join(said.split())
    )
