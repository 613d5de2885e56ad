"""`tccl evaluate`: simulated rates against rings by hand, and cells of stand-ins' jobs."""

import csv
import json
import math
import signal
from itertools import permutations
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from scripts.evaluate_machines import evaluated as evaluated_machine
from scripts.evaluate_machines import tables
from tccl_py.cli.main import app
from tccl_py.experiments import plans as module
from tccl_py.experiments.collectives import PROGRAMS
from tccl_py.experiments.evaluation import EVALUATED, Evaluation, estimated_seconds
from tccl_py.experiments.jobs import Arm
from tccl_py.experiments.spec import WrongValue
from tccl_py.model.transfer import transfer_set
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.transport import hop_space
from tccl_py.nccl.view import view
from tccl_py.plan.directory import write_plan
from tccl_py.plan.load import load_plan
from tccl_py.report.verification import evaluation_facts, evaluation_json
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator
from tests.planned import FOUR_GPUS, as_only, plan_of
from tests.verified import FakeJobs, Interrupting, by_plan, dry_run

NAME = "intel-v100"


def tccl(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def place(tmp_path):
    (tmp_path / "plan").mkdir()
    plan = plan_of(NAME)  # with graph files for smaller sets
    write_plan(plan, tmp_path / "plan", models=as_only(load_bundled(NAME)))
    return tmp_path / "plan"


class RecordedJobs(FakeJobs):
    """Stand-ins that note which graph file jobs of so many ranks get."""

    graphs = ()

    def run(self, tasks):
        (own,) = tasks.values()
        self.graphs = (*self.graphs, *((len(one.ranks), one.files) for one in own if one.files))
        return super().run(tasks)


@pytest.fixture
def jobs(monkeypatch):
    """Makes the command's jobs stand-ins."""

    def use(*args, **more):
        fake = RecordedJobs(*args, **more)
        monkeypatch.setattr(module, "LocalRunner", lambda server: fake)
        monkeypatch.setattr(module, "check_torch", lambda: None)
        return fake

    return use


def evaluated(place, *words):
    done = tccl("evaluate", place, "--json", *words)
    assert done.exit_code in (0, 1), done.stderr
    return json.loads(done.stdout), done


def test_large_messages_of_a_simulated_plan_have_the_rates_of_rings_and_of_pairs(place):
    found, _ = evaluated(place)
    plan, model = load_plan(place), load_bundled(NAME)
    cells = {(tuple(c["gpus"]), c["collective"], c["arm"]): c for c in found["cells"]}
    assert found["simulated"] and {c["bytes"] for c in found["cells"]} == {0}
    assert len(cells) == 11 * len(PROGRAMS) * 3
    for name, choice in plan.choices.items():
        for collective in ("all_reduce", "all_gather", "reduce_scatter"):
            cell = cells[plan.gpus, collective, name]
            assert cell["gbps"] == pytest.approx(choice.rate_gbps)
            assert cell["ratio"] == pytest.approx(choice.rate_gbps / plan.stock.rate_gbps)

    def slowest(hops):
        (rates,) = Simulator(model).measure([transfer_set(hop.flow for hop in hops)])
        return rates.rate_gbps

    settings = plan.settings
    for gpus in ((0, 1), (0, 2, 3), plan.gpus):
        seen = view(model.machine, model.knowledge, settings, gpus=gpus)
        (order,) = plan.subset(gpus).rings
        ring = list(zip(order, (*order[1:], order[0]), strict=True))
        space = hop_space(seen)
        hops = {pair: space.between(*pair)[0] for pair in permutations(gpus, 2)}
        # The hop that comes back to the root is idle.
        rates = [slowest(hops[pair] for pair in ring if pair[1] != root) for root in gpus]
        mean = len(gpus) / math.fsum(1 / rate for rate in rates)
        assert cells[gpus, "broadcast", "graph"]["gbps"] == pytest.approx(mean)
        after = zip(gpus, (*gpus[1:], gpus[0]), strict=True)
        rate = slowest(hops[pair] for pair in after)
        assert cells[gpus, "send_recv", "graph"]["gbps"] == pytest.approx(rate)
        shared = hop_space(seen, rings_in_set=len(gpus) - 1)
        rate = slowest(shared.between(*pair)[0] for pair in permutations(gpus, 2))
        at = cells[gpus, "all_to_all", "graph"]["gbps"]
        assert at == pytest.approx((len(gpus) - 1) * rate)


def test_the_summary_is_of_the_ratios_and_no_recommended_one_is_below_1(place):
    found, _ = evaluated(place)
    arm = next(one for one in found["arms"] if one["arm"] == found["recommended"])
    ratios = [c["ratio"] for c in found["cells"] if c["arm"] == found["recommended"]]
    assert (arm["cells"], arm["least"], arm["most"]) == (len(ratios), min(ratios), max(ratios))
    mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
    assert arm["mean"] == pytest.approx(mean) and arm["mean"] > 1.2
    assert arm["least"] >= 1.0
    numbers = [f"{arm['cells']}", *(f"{arm[name]:.3f}" for name in ("mean", "least", "most"))]
    done = tccl("evaluate", place, "--sizes", "1M")
    assert "without effect" in tccl("evaluate", place, "--pin-env", "NCCL_IB_TIMEOUT").stderr
    rows = [line.split() for line in done.stdout.replace("│", " ").splitlines()]
    assert [row for row in rows if "all" in row and row[-4:] == numbers]
    assert "--sizes and options of jobs are without effect" in done.stderr


def test_jobs_have_a_cell_for_every_set_collective_size_and_arm(place, jobs, tmp_path):
    fake = jobs(by_plan(lambda _: 1.1, variables=lambda size: 1.3 if size > 4096 else 1.0))
    rows = tmp_path / "rows.csv"
    words = ("--gpus-per-job", "2,1-3", "--sizes", "4K,1M", "--dtype", "bfloat16", "--csv", rows)
    found, _ = evaluated(place, "--backend", "host", *words)
    assert (found["simulated"], found["wrong"], found["failures"]) == (False, {}, [])
    keys = [(tuple(c["gpus"]), c["collective"], c["bytes"], c["arm"]) for c in found["cells"]]
    assert len(keys) == len(set(keys)) == 3 * len(PROGRAMS) * 2 * 3
    assert {key[0] for key in keys} == {(0, 1, 2, 3), (0, 1), (1, 2, 3)}
    for cell in found["cells"]:
        expected = {"default": 1.0, "variables": 1.0 + 0.3 * (cell["bytes"] > 4096), "graph": 1.1}
        assert cell["ratio"] == pytest.approx(expected[cell["arm"]], rel=0.02)
        assert cell["low"] <= cell["ratio"] <= cell["high"] and cell["dtype"] == "bfloat16"
        share = 1.0
        if cell["collective"] not in ("broadcast", "reduce", "send_recv"):
            share = (len(cell["gpus"]) - 1) / len(cell["gpus"])
        share *= 1 + (cell["collective"] == "all_reduce")
        assert cell["gbps"] == pytest.approx(cell["bytes"] / cell["us"] / 1e3 * share)
    texts = list(csv.DictReader(rows.open()))
    assert [float(text["ratio"]) for text in texts] == [c["ratio"] for c in found["cells"]]
    assert [text["gpus"] for text in texts] == [" ".join(map(str, key[0])) for key in keys]
    # Jobs over some GPUs have the graph file of exactly these.
    files = {ranks: set(file.values()) for ranks, file in fake.graphs}
    assert all(len(texts) == 1 for texts in files.values()) and set(files) == {2, 3, 4}
    plan = load_plan(place)
    saved = evaluation_json(Evaluation.load(place))["cells"]
    assert msgspec.json.encode(saved) == msgspec.json.encode(found["cells"])
    assert (place / "nccl" / "subsets" / "graph-1-2-3.xml").read_text() in files[3]
    assert (place / "nccl" / "graph.xml").read_text() in files[4] and plan.subset((0, 1))


def test_the_report_draws_means_over_sets_by_collective_and_size(place, jobs):
    jobs(by_plan(lambda _: 1.25, variables=lambda _: 1.0))
    evaluated(place, "--backend", "host", "--sizes", "4K,1M", "--collectives", "reduce,all_reduce")
    assert tccl("report", place).exit_code == 0
    page = (place / "report.html").read_text()
    _, _, drawn = page.partition('id="ratios"')
    drawn = drawn.partition("</section>")[0]
    assert drawn.count("4 KiB") == 2 and "send_recv" not in drawn
    assert drawn.count(">1.25</td>") == 4 and "a DRY RUN over gloo" in drawn
    (place / "evaluate.json").write_text('{"format_version": 1}')
    assert tccl("report", place).exit_code == 0
    page = (place / "report.html").read_text()
    assert "has format version 1; this program reads version 2: make it again" in page
    (place / "evaluate.json").write_text('{"format_version": 2, "cells": 3}')
    assert tccl("report", place).exit_code == 0
    assert "evaluate.json is left out" in (place / "report.html").read_text()
    assert 'id="ratios"' not in (place / "report.html").read_text()
    evaluated(place, "--backend", "host", "--sizes", "4K", "--collectives", "reduce")
    write_plan(msgspec.structs.replace(load_plan(place), strategy="nccl-order"), place)
    assert tccl("report", place).exit_code == 0
    assert 'id="ratios"' not in (place / "report.html").read_text()


def test_an_arm_that_fails_or_is_wrong_is_named_and_the_others_have_cells(place, jobs):
    jobs(by_plan(lambda _: 1.1), fails=lambda told: "no room" * ("NCCL_GRAPH_FILE" in told))
    found, done = evaluated(place, "--backend", "host", "--sizes", "4K")
    assert done.exit_code == 1
    assert {c["arm"] for c in found["cells"]} == {"default", "variables"}
    assert len(found["failures"]) == 2 and all("graph: no room" in f for f in found["failures"])
    wrong = (WrongValue(case="scatter, int32 x 3", rank=1, what="1 of 3"),)
    jobs(by_plan(lambda _: 1.1), wrong=wrong)
    found, done = evaluated(place, "--backend", "host", "--sizes", "4K")
    assert (done.exit_code, list(found["wrong"])) == (1, ["graph"])
    jobs(by_plan(lambda _: 1.1), fails=lambda _: "no GPU")
    found, done = evaluated(place, "--backend", "host", "--sizes", "4K")
    assert (done.exit_code, found["cells"], len(found["failures"])) == (1, [], 2)


def test_sets_that_the_time_does_not_suffice_for_are_named(place, jobs):
    jobs(by_plan(lambda _: 1.1))
    none = tccl("evaluate", place, "--gpus-per-job", "99")
    assert (none.exit_code, none.stdout) == (2, "")
    assert "--gpus-per-job: '99' fits no host" in none.stderr
    words = ("--backend", "host", "--sizes", "4K", "--seconds", "0.001")
    found, done = evaluated(place, *words, "--gpus-per-job", "3,2")
    assert {len(c["gpus"]) for c in found["cells"]} == {4}
    assert found["left_out"] == ["GPUs 0,1,2", "GPUs 0,1"]
    assert "3 sets of GPUs in about" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_evaluation_writes_nothing_and_says_so(
    place, jobs, monkeypatch, number, code
):
    jobs(by_plan(lambda size: 1.0))
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    fake = Interrupting(number=number, at=lambda count: count == 4)
    monkeypatch.setattr(module, "LocalRunner", lambda server: fake)
    found = tccl("evaluate", place, "--backend", "host", "--gpus-per-job", "4")
    assert (found.exit_code, found.stdout) == (code, "")
    assert "interrupted: no results were written" in found.stderr
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def test_sets_of_gpus_that_get_default_nccl_by_every_choice_are_named_and_run_no_jobs(place, jobs):
    plan = load_plan(place)
    write_plan(msgspec.structs.replace(plan, variables=plan.stock, subsets=()), place)
    fake = jobs(by_plan(lambda _: 1.1))
    found, done = evaluated(place, "--backend", "host", "--sizes", "4K", "--gpus-per-job", "1-2,2")
    assert {len(c["gpus"]) for c in found["cells"]} == {4}
    assert {spec.world for spec, _ in fake.jobs} == {4}
    assert "GPUs 1,2 get default NCCL by every choice" in done.stderr
    assert "1 set of GPUs in about" in done.stderr


def test_an_evaluation_without_a_rate_of_default_nccl_says_that_there_is_no_ratio():
    result = Evaluation(machine="m", backend="cuda", simulated=True, recommended="variables")
    assert evaluation_facts(result)[1] == "none: default NCCL has no rate here"


def test_the_estimate_grows_with_what_is_asked_and_knows_that_host_memory_is_slow():
    arm = Arm(name="default", variables={}, settings=Settings(), predicted_gbps=100.0)

    def minutes(ranks=2, arms=2, backend="host", **changes):
        launcher = dry_run(plan_of(NAME), None, backend=backend).over(tuple(range(ranks)))
        budget = msgspec.structs.replace(EVALUATED, **changes)
        return estimated_seconds([(launcher, [arm] * arms)], budget) / 60

    # 29 s a job of two ranks at 256 MiB were measured, in twelve jobs, with twelve calls of a row:
    # with eight it would be 19 s.
    assert 3.9 < minutes() < 6
    assert minutes(backend="cuda") < 3
    assert minutes(ranks=4) > 2 * minutes()
    assert minutes(sizes=(64 << 10, 1 << 20)) < 1.5
    assert minutes(rounds=12) > 1.8 * minutes()
    assert minutes(arms=3) > 1.4 * minutes()


def test_a_dry_run_has_no_long_messages_unless_they_are_asked_for(place, jobs):
    def sizes(*words):
        jobs(by_plan(lambda _: 1.1))
        found, _ = evaluated(place, "--backend", "host", "--collectives", "all_reduce", *words)
        return {cell["bytes"] for cell in found["cells"]}

    assert sizes() == {64 << 10, 1 << 20}
    assert sizes("--sizes", "16M") == {16 << 20}


def test_a_dry_run_takes_the_place_of_no_evaluation_on_gpus(place, jobs):
    jobs(by_plan(lambda _: 1.1))
    words = ("--backend", "host", "--collectives", "all_reduce", "--sizes")
    evaluated(place, *words, "4K")
    dry = Evaluation.load(place)
    evaluated(place, *words, "64K")
    assert {cell.bytes for cell in Evaluation.load(place).cells} == {64 << 10}
    kept = msgspec.structs.replace(dry, backend="cuda").keep(place)
    _, done = evaluated(place, *words, "64K")
    assert f"nothing was kept: {place}/evaluate.json is of jobs on GPUs" in done.stderr
    assert Evaluation.load(place) == kept


def test_a_simulated_cluster_has_the_rates_of_jobs_plans_over_all_hosts_and_fewer(tmp_path):
    place = tmp_path / "plan"
    options = ("--simulate", "amd-3090", "--nodes", 4, "--max-sets", 30)
    assert tccl("plan", "-o", place, *options).exit_code == 0
    plan = load_plan(place)
    found, _ = evaluated(place, "--gpus-per-job", "2")
    cells = {(len(c["hosts"]), len(c["gpus"]), c["arm"]): c for c in found["cells"]}
    assert {key[:2] for key in cells} == {(4, 4), (4, 2), (2, 4), (2, 2)}
    assert {c["collective"] for c in found["cells"]} == {
        "all_reduce", "all_gather", "reduce_scatter",
    }  # fmt: skip
    for name, choice in plan.choices.items():
        cell = cells[4, 4, name]
        assert cell["gbps"] == pytest.approx(choice.rate_gbps, rel=1e-3)
        assert cell["ratio"] == pytest.approx(choice.rate_gbps / plan.stock.rate_gbps, rel=1e-3)
    done = tccl("evaluate", place, "--collectives", "send_recv")
    assert done.exit_code == 2 and "--collectives: names none" in done.stderr
    done = tccl("evaluate", place, "--gpus-per-job", "3")
    assert done.exit_code == 2 and "no table for GPUs 0-2" in done.stderr


@pytest.mark.parametrize("name", FOUR_GPUS)
def test_the_table_in_the_docs_is_of_the_models_as_they_are(name):
    found = evaluated_machine(name)
    page = (Path(__file__).parents[1] / "docs" / "evaluation.md").read_text()
    rows = tables([found]).splitlines()
    assert [row for row in rows if row.startswith(f"| {name} ") and row not in page] == []
    assert sum(row.startswith(f"| {name} ") for row in rows) == 2


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (("--collectives", "all_reduce,gather"), "--collectives 'gather'"),
        (("--dtype", "int8"), "--dtype 'int8'"),
        (("--gpus-per-job", "0+9", "--gpus-per-job", "x"), "--gpus-per-job"),
        (("--sizes", "4K,x"), "--sizes"),
        (("--rounds", "2"), "--rounds"),
        (("--csv", "/none/there.csv"), "--csv /none/there.csv"),
    ],
)
def test_wrong_options_are_refused(place, words, where):
    done = tccl("evaluate", place, *words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"tccl: {where}")
    assert not (place / "evaluate.json").exists()
