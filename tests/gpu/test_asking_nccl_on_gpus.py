"""The installed NCCL answers on real GPUs, as jobs of torch see it.

Needs two idle GPUs or more, and NCCL; the comparison with a job needs torch. NCCL_NVLS_ENABLE is
taken from the environment as it is.
"""

import json
import os
import time

import pytest

from tccl_py.nccl.asked import (
    InstalledRings,
    RefusedError,
    ask_each,
    ask_nccl,
    judge_file,
    verdict_on,
)
from tccl_py.nccl.communicators import Question, same_rings, transport_of
from tccl_py.nccl.cost_model import cost_model
from tccl_py.nccl.settings import Settings, environment
from tccl_py.nccl.view import view
from tccl_py.plan.load import load_plan
from tccl_py.plan.machine_files import graph_text
from tccl_py.plan.size_choices import SIZES, size_model
from tccl_py.planning.installed_nccl import why_not_asked
from tccl_py.readers.live import discover_machine
from tests.gpu.ranks import REAL, SHARE
from tests.gpu.test_nccl_loads_plans import all_reduce, in_ranks, tccl
from tests.skips import needs

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def gpus():
    machine, _, _ = discover_machine()
    if why := why_not_asked(machine.gpu_indices):
        pytest.skip(f"needs idle GPUs: {why}")
    return machine.gpu_indices


@pytest.fixture(autouse=True)
def _nothing_is_left(gpus):
    yield
    until = time.monotonic() + 5
    while (why := why_not_asked(gpus)) and time.monotonic() < until:
        time.sleep(0.2)
    assert why == ""


def test_default_nccl_answers_in_seconds_with_rings_and_transports(gpus):
    begun = time.monotonic()
    found = ask_nccl({}, gpus)
    seconds = time.monotonic() - begun
    print(found.version, len(found.rings), "channels", found.via, f"{seconds:.1f} s")
    assert seconds < 30
    assert all(sorted(ring) == list(gpus) for ring in found.rings)
    hops = {hop for ring in found.rings for hop in zip(ring, (*ring[1:], ring[0]), strict=True)}
    assert set(found.via) == hops
    assert found.graph.nchannels >= 1


def test_variables_change_transports_and_channels(gpus):
    found = ask_nccl({"NCCL_P2P_DISABLE": "1", "NCCL_MIN_NCHANNELS": "32"}, gpus)
    assert set(map(transport_of, found.via.values())) == {"SHM"}
    assert len(found.rings) == 32


def test_a_job_of_torch_runs_the_same_rings(gpus, tmp_path, monkeypatch):
    needs("torch")
    for name in list(os.environ):
        if name.startswith("NCCL_") and name != "NCCL_NVLS_ENABLE":
            monkeypatch.delenv(name)
    found = ask_nccl({}, gpus)
    _, log = all_reduce(gpus, {}, tmp_path / "log", size=1 << 20, repeats=2)
    assert log.version == found.version
    (rings,) = log.communicators
    assert list(rings) == in_ranks(found.rings, gpus)


def test_asked_rings_are_compared_with_the_emulation(gpus):
    machine, knowledge, _ = discover_machine()
    version = ask_nccl({}, gpus[:2]).version
    rings = InstalledRings(machine, knowledge, gpus)
    begun = time.monotonic()
    choices = [Settings(version=version, p2p_level=level) for level in (None, "LOC")]
    assert all(found.rings for found in rings(choices))
    print(f"two questions: {time.monotonic() - begun:.1f} s;", rings.notices)
    assert rings.able


@pytest.mark.parametrize("name", ["default", "graph", "pair"])
def test_nccl_chooses_by_size_as_its_cost_model_says(simulated, gpus, name):
    """Over all GPUs with and without the plan's graph file, and over two GPUs."""
    plan = load_plan(simulated)
    of, graph = plan.gpus, None
    settings = plan.settings if name == "graph" else plan.choices["default"].settings
    if name == "pair":
        of = tuple(gpus[:2])
        model = cost_model(view(plan.machine, plan.knowledge, settings, gpus=of))
    else:
        model = size_model(plan, name)
    if name == "graph":
        graph = (simulated / "nccl" / "graph.xml").read_text()
    variables = environment(settings)
    if not REAL:
        variables |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
    begun = time.monotonic()
    (answer,) = ask_each(variables, [Question(gpus=of, graph=graph, sizes=SIZES)], connect=False)
    seconds = time.monotonic() - begun
    expected = [model.choice(row.collective, row.bytes) for row in answer.choices]
    different = [
        f"{row.collective} of {row.bytes}: {kind_of(row)}, not {kind_of(computed)}"
        for row, computed in zip(answer.choices, expected, strict=True)
        if kind_of(row) != kind_of(computed)
    ]
    equal = len(expected) - len(different)
    print(f"{name}, NCCL {answer.version}: {equal} of {len(expected)} equal, {seconds:.1f} s")
    if any(row.algorithm.startswith("nvls") for row in answer.choices):
        pytest.skip("NVLS works here, which the cost model does not have")
    assert len(different) <= 0.02 * len(expected), different


def kind_of(row):
    return row.algorithm, row.protocol, row.channels


def test_the_graph_files_of_a_plan_are_used(simulated):
    """Eight GPUs have 246 subsets: some 15 of them."""
    plan = load_plan(simulated)
    subsets = [one for one in plan.subsets if one.rings]
    subsets = subsets[:: len(subsets) // 16 + 1]
    names = {"graph.xml": plan.gpus}
    names |= {f"subsets/graph-{'-'.join(map(str, one.gpus))}.xml": one.gpus for one in subsets}
    texts = [(simulated / "nccl" / name).read_text() for name in names]
    questions = [
        Question(gpus=of, graph=text) for of, text in zip(names.values(), texts, strict=True)
    ]
    begun = time.monotonic()
    found = ask_each(environment(plan.settings), questions, connect=False)
    print(f"{len(questions)} graph files: {time.monotonic() - begun:.1f} s")
    verdicts = [
        (name, verdict_on(one, text, where=name))
        for name, one, text in zip(names, found, texts, strict=True)
    ]
    assert [(name, one.reason) for name, one in verdicts if one.verdict != "used"] == []


def test_a_graph_file_for_other_gpus_is_refused(simulated):
    plan = load_plan(simulated)
    if len(plan.gpus) < 3:
        pytest.skip("needs 3 GPUs")
    text = (simulated / "nccl" / "graph.xml").read_text()
    with pytest.raises(RefusedError, match="not found") as refused:
        ask_nccl({}, plan.gpus[:2], graph=text)
    assert not refused.value.crash
    assert judge_file({}, plan.gpus[:2], text, where="graph.xml").verdict == "rejected"


def test_validate_and_doctor_ask_the_nccl_here(simulated, gpus):
    graph = simulated / "nccl" / "graph.xml"
    used = tccl("validate", graph, "--json")
    assert used.returncode == 0, used.stderr + used.stdout
    answer = json.loads(used.stdout)
    assert answer["verdict"] == "used"
    assert all(sorted(ring) == list(range(len(gpus))) for ring in answer["rings"])
    if len(gpus) > 2:
        other = tccl("validate", graph, "--gpus", f"{gpus[0]},{gpus[1]}")
        assert other.returncode == 1
        assert "rejected" in other.stdout
    found = json.loads(tccl("doctor", "--json").stdout)
    (rings,) = (one for one in found["findings"] if one["check"] == "nccl-rings")
    print(rings["what"])


def test_a_measured_plan_takes_nccls_own_rings_and_files_that_it_loads(gpus, tmp_path, monkeypatch):
    pair = gpus[:2]
    text = ",".join(map(str, pair))
    for name, part in SHARE.items():
        monkeypatch.setenv(name, part)
    made = tccl("plan", tmp_path / "plan", "--gpus", text, "--max-sets", "20")
    assert made.returncode == 0, made.stderr
    plan = load_plan(tmp_path / "plan")
    print(plan.notices)
    assert not any("was asked neither" in one for one in plan.notices)
    assert "default" in plan.sizes
    found = ask_nccl({}, pair)
    assert all(same_rings(ring, found.rings[0]) for ring in plan.choices["default"].rings)
    verdict = judge_file(
        environment(plan.settings),
        pair,
        (tmp_path / "plan" / "nccl" / "graph.xml").read_text(),
        where="graph.xml",
    )
    assert verdict.verdict == "used"


def test_of_several_graph_files_the_one_that_fails_is_named(gpus):
    pair = tuple(gpus[:2])
    right = graph_text([pair], Settings(), rate_gbps=12.0, type_intra="SYS", provenance="made up")
    other = right.replace(f'dev="{pair[1]:#x}"', 'dev="0xfe"')
    assert other != right
    with pytest.raises(RefusedError, match="not found") as refused:
        ask_each({}, [Question(gpus=pair, graph=right), Question(gpus=pair, graph=other)])
    assert (refused.value.question, refused.value.crash) == (1, False)


def test_a_file_that_crashes_nccl_is_told_from_nccl_that_crashes(gpus):
    pair = tuple(gpus[:2])
    text = graph_text([pair], Settings(), rate_gbps=12.0, type_intra="SYS", provenance="made up")
    verdict = judge_file({}, pair, text.replace(' typeintra="SYS"', ""), where="g.xml")
    assert verdict.verdict == "crash"
    assert "killed by signal 11" in verdict.reason


def test_a_file_without_rings_is_ignored(gpus):
    pair = tuple(gpus[:2])
    text = graph_text([pair], Settings(), rate_gbps=12.0, type_intra="SYS", provenance="made up")
    text = text.replace('id="0"', 'id="7"').replace('id="1"', 'id="8"')
    assert judge_file({}, pair, text, where="g.xml").verdict == "ignored"
