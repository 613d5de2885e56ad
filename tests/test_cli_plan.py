"""`tccl plan`, `show`, `env` and `export`: output, interruptions, and jobs over some GPUs."""

import json
import re
import signal
import subprocess
import sys
import time
from itertools import chain

import msgspec
import pytest
from typer.testing import CliRunner

from tccl_py.cli.main import app
from tccl_py.cli.plan import until_jobs_decide
from tccl_py.errors import InputError
from tccl_py.nccl.plugin.index import INDEX_FILE, read_index
from tccl_py.plan.chains import SubsetRings
from tccl_py.plan.directory import write_plan
from tccl_py.plan.text import limit_text
from tccl_py.planning.handle import load_plan
from tccl_py.planning.planner import make_plan
from tccl_py.search.problem import Budget
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator
from tccl_py.sources.journal import read_journal
from tests.commands import done, tccl
from tests.planned import (
    ASUS,
    PCIE,
    SEVERAL_GPUS,
    SMALL,
    WRX,
    as_only,
    needing_a_graph,
    plan_of,
    replace_plan,
)
from tests.test_reference_plans import PLANS


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A plan of four GPUs, in a place whose name a shell must be kept from reading."""
    place = tmp_path_factory.mktemp("plans") / 'it\'s $HOME; "my" plan'
    write_plan(plan_of(SMALL), place_of(place), models=as_only(load_bundled(SMALL)))
    return place


def place_of(place):
    place.mkdir()
    return place


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """A plan that recommends a graph file."""
    place = tmp_path_factory.mktemp("eight")
    write_plan(plan_of(ASUS), place, models=as_only(load_bundled(ASUS)))
    return place


# plan and show


def texts_of_nccl(directory):
    """The files below nccl/, but for the plugin's library, which is there where it was built."""
    return [path for path in (directory / "nccl").rglob("*.*") if path.suffix != ".so"]


def test_what_no_job_has_shown_is_said_until_jobs_decide(tmp_path):
    for winner, said in ((None, True), ("variables", False), ("default", False)):
        place = tmp_path / str(winner)
        plan = msgspec.structs.replace(plan_of("intel-v100"), winner=winner)
        place.mkdir()
        write_plan(plan, place, models=as_only(load_bundled("intel-v100")))
        assert ("unknown: whether small messages" in done("show", place).stdout) == said


def test_a_measured_plan_recommends_default_nccl_until_jobs_have_run(capsys):
    plan = plan_of("intel-v100")
    assert plan.recommended == "variables"
    measured = replace_plan(plan, simulated=False, assumed=False)
    made = until_jobs_decide(measured)
    assert made.recommended == "default"
    assert "variables only, NCCL_P2P_LEVEL=PHB loses in any row" in capsys.readouterr().err
    assert f"alone {plan.gain('variables'):.2f}x default NCCL" in made.advice
    shares = "the plan gets 86%", "variables only would get 86%"
    assert limit_text(made) == limit_text(plan).replace(*shares) != limit_text(plan)
    dry_run = msgspec.structs.replace(measured, dry_run=True)
    decided = msgspec.structs.replace(measured, winner="variables")
    for other in (plan, dry_run, decided):
        assert until_jobs_decide(other) is other
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", SEVERAL_GPUS)
def test_show_fits_a_small_terminal_and_breaks_no_word(name):
    def shown(columns):
        runner = CliRunner(env={"COLUMNS": str(columns)})
        return runner.invoke(app, ["show", str(PLANS / f"{name}.json")]).stdout

    assert 10 < len(shown(80).splitlines()) <= 40
    words = set(re.findall("[^\\s\u2500-\u257f]+", shown(80)))
    assert words <= set(shown(2000).split())


@pytest.mark.parametrize("more", [(), ("--nodes", "2")])
def test_a_new_plan_is_told_in_eight_lines_with_what_comes_next(more, tmp_path):
    place = tmp_path / "box"
    lines = done("plan", place, "--simulate", SMALL, *more).stdout.splitlines()
    titles = [line[:9].strip() for line in lines if line[0] != " "]
    assert titles == ["Plan", "Verdict", "Rates", "Limit", "How sure", "Files", "Next"]
    assert len(done("show", place).stdout.splitlines()) > len(titles)
    assert f"tccl verify {place}" in " ".join(" ".join(lines).split())


def test_every_file_of_the_directory_says_that_it_is_simulated(directory):
    plan = json.loads((directory / "plan.json").read_text())
    assert plan["simulated"] is True
    for path in texts_of_nccl(directory):
        head = path.read_text().splitlines()[: 3 if path.name == INDEX_FILE else 1]
        assert "simulated" in "".join(head), path.name
    assert json.loads(done("env", directory, "--json").stdout)["simulated"] is True
    assert done("env", directory).stdout.startswith("# tccl-py, rates simulated")


@pytest.mark.parametrize("most", [1, 7, 40])
def test_max_sets_is_the_number_of_sets_that_the_whole_run_measures(most, tmp_path):
    options = ("--simulate", PCIE, "--max-sets", most)
    done("plan", tmp_path, *options)
    plan = load_plan(tmp_path)
    # A part is left to smaller sets of GPUs, which a plan without graph files does not need.
    assert most * 3 / 4 <= plan.sets_measured <= most
    assert plan.rate_gbps >= plan.choices["default"].rate_gbps > 0
    kept = read_journal(tmp_path / "measurements.jsonl").measurements
    assert sum(map(len, kept.values())) == plan.sets_measured
    again = json.loads(done("plan", tmp_path, *options, "--force", "--json").stdout)
    assert (again["sets_measured"], again["rate_gbps"]) == (0, plan.rate_gbps)


def test_a_plan_resumed_with_a_larger_limit_rates_default_nccl_as_before(tmp_path):
    def planned(directory, limit):
        noisy = ("--noise", "0.02", "--seed", "1", "--max-sets", limit, "--force")
        done("plan", tmp_path / directory, "--simulate", PCIE, *noisy)
        kept = read_journal(tmp_path / directory / "measurements.jsonl").measurements
        return load_plan(tmp_path / directory), kept

    few, kept = planned("resumed", 10)
    assert few.sets_measured == len(kept) < sum(map(len, kept.values()))
    resumed, _ = planned("resumed", 40)
    whole, _ = planned("whole", 40)
    assert few.choices["default"] == resumed.choices["default"] == whole.choices["default"]
    assert (resumed.rate_gbps, resumed.choices["variables"]) == (
        whole.rate_gbps,
        whole.choices["variables"],
    )


def test_a_plan_says_whether_the_limit_of_sets_cut_it_short(tmp_path):
    def notices(*options):
        done("plan", tmp_path, "--force", "--simulate", "h200x4-vm", *options)
        return [text for text in load_plan(tmp_path).notices if "limit of sets" in text]

    assert not notices()
    assert notices("--max-sets", "20")


class Slow(Simulator):
    """Each set takes so many seconds of a clock that stands still otherwise."""

    set_s, now_s = 1.0, 0.0

    def measure(self, sets):
        type(self).now_s += self.set_s * len(sets)
        return super().measure(sets)


@pytest.mark.parametrize(("set_s", "most_s"), [(0.02, 1.0), (1.0, 30.0), (5.0, 21.0), (10.0, 1.0)])
def test_no_set_of_a_plan_ends_after_max_seconds_but_the_first(set_s, most_s, monkeypatch):
    monkeypatch.setattr(Slow, "set_s", set_s)
    monkeypatch.setattr(Slow, "now_s", 100.0)
    monkeypatch.setattr(time, "monotonic", lambda: Slow.now_s)
    model = load_bundled(PCIE)
    budget = Budget(seconds=most_s)
    plan = make_plan(model.machine, model.knowledge, Slow(model, noise=0.05), budget=budget)
    assert 0 < Slow.now_s - 100.0 <= max(most_s, set_s)
    assert plan.choices["default"].rate_gbps
    assert any("limit of sets or seconds" in text for text in plan.notices)


# interruptions


class Impatient:
    """Stands for the progress line; interrupts the search after so many reports."""

    patience = 30
    reports = 0

    def __init__(self, *total, **at_most):
        pass

    def __enter__(self):
        type(self).reports = 0
        return self

    def __exit__(self, *error):
        return None

    def count_sets(self, count):
        pass

    def __call__(self, progress):
        type(self).reports += 1
        if self.reports > self.patience:
            raise KeyboardInterrupt


@pytest.mark.parametrize("patience", [1, 60, -20])
@pytest.mark.parametrize("noise", ["0", "0.05"])
def test_an_interrupted_plan_goes_on_as_if_nothing_had_been(patience, noise, tmp_path, monkeypatch):
    command = ("--simulate", SMALL, "--noise", noise, "--seed", "3", "--json")
    command = (*command, "--max-sets", "100", "--rings", "1,2")
    with monkeypatch.context() as patched:
        patched.setattr("tccl_py.cli.plan.ProgressLine", Impatient)
        patched.setattr(Impatient, "patience", 10**9)
        done("plan", tmp_path / "whole", *command)
        # Counted from the end, an interruption comes while subsets are planned.
        patched.setattr(Impatient, "patience", patience % Impatient.reports)
        cut = tccl("plan", tmp_path / "cut", *command)
    assert cut.exit_code == 130
    assert "interrupted: " in cut.stderr
    best = json.loads(cut.stdout)
    assert best["cancelled"]
    assert best["rate_gbps"] >= best["choices"]["default"]["rate_gbps"]
    assert [list(ring) for ring in load_plan(tmp_path / "cut").channel_rings] == best["rings"]
    done("env", tmp_path / "cut")
    kept = (tmp_path / "cut" / "measurements.jsonl").read_text()
    done("plan", tmp_path / "cut", *command)
    text = (tmp_path / "cut" / "measurements.jsonl").read_text()
    assert text.startswith(kept)
    assert len(text.splitlines()) == len(set(text.splitlines()))
    resumed, whole = load_plan(tmp_path / "cut"), load_plan(tmp_path / "whole")
    counts = {"sets_measured": 0, "sets_remembered": 0}
    assert msgspec.structs.replace(resumed, **counts) == msgspec.structs.replace(whole, **counts)
    assert resumed.sets_measured < whole.sets_measured


@pytest.mark.parametrize("more", [(), ("--nodes", "2")])
def test_an_interruption_before_anything_was_found_says_so(more, tmp_path, monkeypatch):
    def impatient(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("tccl_py.planning.opening.plan_hosts", impatient)
    monkeypatch.setattr("tccl_py.planning.opening_hosts.plan_unmeasured", impatient)
    result = tccl("plan", tmp_path, "--simulate", SMALL, *more)
    assert (result.exit_code, result.stdout) == (130, "")
    assert "tccl: interrupted before there" in result.stderr


ENDED_WHILE_WRITING = """
import os, sys
from tccl_py.cli.main import main
from tccl_py.plan import staging

write, how = staging._write_new, int(sys.argv.pop())

def ended(path, text):
    if path.name == "nccl.conf":
        os.kill(os.getpid(), how)
    write(path, text)

staging._write_new = ended
main()
"""


@pytest.mark.parametrize("how, code", [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
@pytest.mark.parametrize("more", [(), ("--nodes", "2")])
def test_a_plan_that_is_being_written_is_written_whole(more, how, code, tmp_path):
    command = [sys.executable, "-c", ENDED_WHILE_WRITING, "plan", str(tmp_path / "plan")]
    command += ["--simulate", SMALL, "--rings", "1", "--max-sets", "1", *more, str(int(how))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (code, "")
    assert "Traceback" not in done.stderr
    written = {path.name for path in (tmp_path / "plan").iterdir()}
    files = {"plan.json", "manifest.json", "measurements.jsonl", "machines", "nccl"}
    assert written == files | ({"tables"} if more else set())


def test_a_signal_leaves_the_best_so_far_and_a_journal_that_is_gone_on_from(tmp_path):
    command = [sys.executable, "-m", "tccl_py.cli.main", "plan", str(tmp_path / "plan")]
    command += ["--simulate", "asus-esc8000a-e13p", "--max-sets", "400", "--rings", "1,2"]
    command += ["--gpus", "0-5"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    journal = tmp_path / "plan" / "measurements.jsonl"
    deadline = time.monotonic() + 60
    while not (journal.exists() and journal.read_text().count("\n") > 60):
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    output, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "tccl: interrupted: " in errors
    assert errors.count("\n") == 1
    assert "GPUs 0,1,2,3,4,5: simulated" in output
    assert load_plan(journal.parent).cancelled
    before = read_journal(journal).measurements
    again = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0, again.stderr
    after = read_journal(journal).measurements
    assert len(before) >= 60
    assert set(before) < set(after)
    assert all(len(measured) == 1 for measured in after.values())
    assert load_plan(tmp_path / "plan").sets_measured == len(after) - len(before)


@pytest.mark.parametrize(
    "other",
    [{"--noise": "0.1"}, {"--seed": "4"}, {"--simulate": PCIE}],
)
def test_a_journal_of_another_machine_noise_or_seed_is_refused(other, tmp_path, monkeypatch):
    given = {"--simulate": SMALL, "--noise": "0.05", "--seed": "3", "--rings": "1,2,4"}

    def plan(options):
        return tccl("plan", tmp_path, *chain.from_iterable(options.items()))

    with monkeypatch.context() as patched:
        patched.setattr("tccl_py.cli.plan.ProgressLine", Impatient)
        assert plan(given).exit_code == 130
    before = (tmp_path / "measurements.jsonl").read_bytes()
    result = plan(given | other)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "machine h200x4-vm" in result.stderr
    assert "journal or output directory" in result.stderr
    assert (tmp_path / "measurements.jsonl").read_bytes() == before


# env


@pytest.mark.parametrize("gains", [True, False])
def test_env_gives_variables_to_sets_of_gpus_that_gain_by_them(gains, tmp_path):
    plan = plan_of("amd-v100")
    assert plan.recommended == "variables"
    pair = SubsetRings(gpus=(0, 1), rings=(), rate_gbps=9.0, gains=gains)
    write_plan(msgspec.structs.replace(plan, subsets=(pair,)), tmp_path)
    result = done("env", tmp_path, "--gpus", "1,0", "--json")
    found = json.loads(result.stdout)
    assert found["choice"] == ("variables" if gains else "default")
    assert ("NCCL_P2P_LEVEL" in found["environment"]) == gains
    assert ("default NCCL: the plan's variables gain nothing" in result.stderr) != gains
    # What is asked for by name is given.
    asked = json.loads(
        done("env", tmp_path, "--gpus", "0,1", "--choice", "variables", "--json").stdout
    )
    assert "NCCL_P2P_LEVEL" in asked["environment"]


@pytest.mark.parametrize("gains", [True, False])
def test_env_and_the_plugin_give_a_graph_file_to_sets_that_gain_by_it_alone(gains, tmp_path):
    plan = needing_a_graph(plan_of("amd-v100"))
    pairs = [one for one in plan.subsets if len(one.gpus) == 2 and one.rings]
    first = msgspec.structs.replace(pairs[0], gains=gains)
    plan = msgspec.structs.replace(plan, subsets=(first, *pairs[1:]))
    write_plan(plan, tmp_path)
    given = {}
    for pair in pairs[:2]:
        words = ("env", tmp_path, "--gpus", ",".join(map(str, pair.gpus)), "--json")
        found = json.loads(done(*words).stdout)
        given[pair.gpus] = "NCCL_GRAPH_FILE" in found["environment"]
    assert list(given.values()) == [gains, True]
    sets = read_index(tmp_path / "nccl" / INDEX_FILE).sets
    assert [gpus in sets for gpus in given] == [gains, True]


@pytest.mark.parametrize("simulated", [True, False])
def test_a_plan_leaves_other_subsets_to_nccl(simulated, tmp_path):
    plan = msgspec.structs.replace(plan_of(WRX), simulated=simulated)
    write_plan(plan, tmp_path)
    result = tccl("env", tmp_path, "--gpus", "0,1,8", "--choice", "graph")
    assert result.exit_code == 1
    assert result.stdout.startswith(f"# tccl-py, rates {plan.provenance}\n")
    assert result.stdout.endswith("unset NCCL_GRAPH_FILE\n")


# export


def test_export_writes_what_nccl_reads_elsewhere(directory, tmp_path):
    done("export", directory, "-o", tmp_path / "there")
    ours = {one.name: one.read_text() for one in texts_of_nccl(directory)}
    theirs = {one.name: one.read_text() for one in texts_of_nccl(tmp_path / "there")}
    # The index is for the host of the plan.
    assert ours.pop(INDEX_FILE)
    assert theirs == ours


def test_this_machine_is_planned_with_fewer_sets_than_a_model(tmp_path, monkeypatch):
    budgets = []

    def machine_subject(request, *_):
        budgets.append(request.budget.sets)
        raise InputError("machine", "is not there", "none")

    monkeypatch.setattr("tccl_py.cli.plan.machine_subject", machine_subject)
    for options in ((), ("--simulate", SMALL), ("--backend", "host"), ("--max-sets", "7")):
        assert tccl("plan", tmp_path, *options).exit_code == 2
    assert budgets == [1250, 2000, 40, 7]
