"""A job's communication by each choice: rows, totals, the first line, and what is kept of it."""

import json
from itertools import permutations
from pathlib import Path
from statistics import harmonic_mean

import pytest
from msgspec.structs import replace

from tccl_py.decision import harm
from tccl_py.errors import InputError
from tccl_py.experiments.communication import (
    MOST_ROWS,
    Communications,
    communication_of,
    keep_communication,
    timed_calls,
    verified_choice,
)
from tccl_py.experiments.prediction import predicted_communication
from tccl_py.experiments.record import Verification
from tccl_py.experiments.sizes import read_tunings
from tccl_py.experiments.spec import PROGRAMS, Row, bus_gbps, calls_of
from tccl_py.files import decode_json
from tccl_py.model.transfer import transfer_set
from tccl_py.nccl.transport import hop_space
from tccl_py.nccl.view import view
from tccl_py.plan.directory import write_plan
from tccl_py.planning.handle import load_plan
from tccl_py.report.tables import communication_line
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator
from tccl_py.workloads.workload import Workload, WorkloadRow, write_workload
from tests.commands import tccl
from tests.planned import SMALL, plan_of
from tests.test_json_page import same_keys

CASES = Path(__file__).parent / "cases"


def workload(*rows, ranks=2, name="mine"):
    """A workload of (collective, bytes, calls), each over all ranks."""
    over_all = (tuple(range(ranks)),)
    made = tuple(
        WorkloadRow(collective=kind, dtype="bfloat16", bytes=size, groups=over_all, calls=calls)
        for kind, size, calls in rows
    )
    return Workload(name=name, source="made by a test", ranks=ranks, rows=made)


def judged(made, times):
    """What `times` by choice, collective and bytes say of a workload."""
    calls = calls_of(made)
    keyed = {
        name: {row: rows[row.collective, row.bytes] for row in calls}
        for name, rows in times.items()
    }
    return communication_of(made, calls, keyed)


BY_HAND = {
    "default": {("all_reduce", 1 << 26): [1.5e-3] * 6, ("all_to_all", 1 << 20): [0.1e-3] * 6},
    "variables": {("all_reduce", 1 << 26): [1.05e-3] * 6, ("all_to_all", 1 << 20): [0.16e-3] * 6},
}


def test_the_first_line_has_both_times_the_ratio_and_what_the_choice_slows():
    found = judged(workload(("all_reduce", 1 << 26, 8), ("all_to_all", 1 << 20, 3)), BY_HAND)
    assert communication_line(found) == (
        "your job's communication: 12.3 -> 8.9 ms a step (1.39) by variables only; "
        "all-to-all, 2 % of it, is slower (0.62)"
    )
    assert found.losses == {"all-to-all": pytest.approx((0.3 / 12.3, 0.1 / 0.16))}
    assert sum(row.calls * row.seconds["variables"] for row in found.rows) == pytest.approx(
        found.choices["variables"].seconds
    )


def test_where_no_choice_wins_default_nccl_stays_with_the_speeds_of_the_others():
    line = communication_line(judged(workload(("all_to_all", 1 << 20, 3)), BY_HAND))
    assert "300 us a step by default NCCL" in line
    assert "variables only 0.62" in line


def test_rows_that_take_least_are_left_out_with_their_share_of_the_calls():
    rows = [("all_reduce", 4 << at, 1) for at in range(20)]
    rows += [("all_gather", 4 << at, 1) for at in range(30)]
    made = workload(*rows)
    calls = timed_calls(made, 2)
    assert len(calls) == MOST_ROWS
    least = min(row.bytes for row in calls)
    assert all(row.bytes <= least for row in calls_of(made).keys() - calls.keys())
    times = {"default": {row: [1e-3] for row in calls}}
    assert communication_of(made, calls, times).unknown == pytest.approx(10 / 50)
    with pytest.raises(InputError, match="of 2 ranks, and jobs here have 4"):
        timed_calls(made, 4)
    with pytest.raises(InputError, match="communicates nothing"):
        timed_calls(workload(), 2)


# Recorded times of two H200 without P2P, and of four.

JOBS = {
    "data parallel": workload(("all_reduce", 64 << 20, 16), ("all_reduce", 16 << 10, 4)),
    "pipeline": workload(("send_recv", 16 << 20, 64), ("all_reduce", 16 << 10, 1)),
    "mixture of experts": workload(("all_to_all", 16 << 20, 48), ("all_reduce", 64 << 20, 2)),
    "few experts": workload(("all_to_all", 64 << 10, 8), ("all_reduce", 64 << 20, 16)),
}
BEST = {
    "data parallel": "variables",
    "pipeline": "default",
    "mixture of experts": "default",
    "few experts": "variables",
}


def transfers(rounds):
    """Seconds of send/recv and all-to-all from ratios that docs/results has."""
    path = CASES / "workloads" / "h200-no-p2p-transfers.json"
    case = json.loads(path.read_text())
    assert case["transcribed"] and "docs/results" in case["source"]
    times = {"default": {}, "variables": {}}
    for row in case["ratios"]:
        key = row["collective"], row["bytes"]
        seconds = row["bytes"] / case["default_gbps"] / 1e9
        times["default"][key] = [seconds] * rounds
        times["variables"][key] = [seconds / row["ratio"]] * rounds
    return times


@pytest.fixture(scope="module")
def two():
    """Times of the two arms on two H200: of jobs in rounds, and transcribed for transfers."""
    path = CASES / "tuning" / "h200x2-vm-no-p2p.json"
    times = transfers(6)
    for tuning in read_tunings(path.read_text(), str(path)):
        for row in tuning.rows:
            if row.dtype == "bfloat16":
                for name in times:
                    key = row.collective, row.bytes
                    times[name][key] = row.seconds[name][:6]
    return times


@pytest.mark.parametrize("gpus", ["two", "four"])
def test_without_a_job_the_same_choice_is_not_harmless(request, gpus):
    times = request.getfixturevalue(gpus)
    keys = times["default"]
    harms = {key: harm(times["variables"][key], keys[key], keys[key]) for key in keys}
    assert harms["send_recv", 16 << 20] == harms["all_to_all", 256 << 20] == "loses"
    assert harms["all_reduce", 64 << 20] == "none"


@pytest.fixture(scope="module")
def four():
    """Times of all-reduce on four H200, and transcribed for transfers."""
    path = CASES / "verification" / "h200x4-vm-no-p2p.json"
    found = decode_json(path.read_text(), Verification, where=str(path))
    times = transfers(10)
    for arm in found.arms[:2]:
        for row in arm.sizes:
            times[arm.name][row.collective, row.bytes] = row.seconds
    return times


@pytest.mark.parametrize(("gpus", "gain"), [("two", 1.2), ("four", 1.5)])
@pytest.mark.parametrize("job", JOBS)
def test_without_p2p_the_job_decides(request, gpus, gain, job):
    found = judged(JOBS[job], request.getfixturevalue(gpus))
    assert found.chosen == BEST[job]
    if gpus == "two" and job != "few experts":
        page = (CASES.parents[1] / "docs" / "will-my-job-be-faster.md").read_text()
        assert f"| {communication_line(found).partition(': ')[2]} |" in page
    if job == "data parallel":
        assert found.choices["variables"].speed.low > gain
    if job == "few experts":
        assert "all-to-all" in found.losses


# Predictions.


def predicted(made, *, name="asus-esc8000a-e13p"):
    """What the model of a machine says of a workload."""
    model = load_bundled(name)
    return predicted_communication(plan_of(name), made, Simulator(model))


def test_a_model_tells_large_messages_alone_and_in_all_groups_at_once():
    sizes = workload(("all_reduce", 64 << 20, 3), ("all_reduce", 4096, 1), ranks=8)
    found = predicted(sizes)
    assert (found.unknown, [row.bytes for row in found.rows]) == (0.25, [64 << 20])
    plan = plan_of("asus-esc8000a-e13p")
    seconds = 3 * bus_gbps("all_reduce", 8, 64 << 20, 1.0) / plan.choices["default"].rate_gbps
    assert found.choices["default"].seconds == pytest.approx(seconds)
    assert f"({plan.basis_of_gain(plan.recommended)})" in communication_line(found)
    assert predicted(workload(("all_reduce", 4096, 1), ranks=8)) is None

    def by_groups(*groups):
        row = WorkloadRow(
            collective="all_reduce", dtype="int8", bytes=1 << 26, groups=groups, calls=1
        )
        return predicted(Workload(name="g", source="", ranks=8, rows=(row,)))

    alone, beside = by_groups((0, 4), (1, 5)), by_groups((0, 4), (1, 5), (2, 6), (3, 7))
    # A graph file fails smaller communicators; more of these share the links between the sockets.
    assert "graph" not in alone.choices
    assert beside.choices["default"].seconds >= alone.choices["default"].seconds


def test_a_model_rates_large_messages_by_rings_to_and_from_roots_and_by_pairs():
    plan, model = plan_of("intel-v100"), load_bundled("intel-v100")
    names = (*PROGRAMS.values(), "send")
    gbps = dict[str, dict[str, float]]()
    for name in names:
        made = predicted_communication(
            plan, workload((name, 1 << 30, 1), ranks=4), Simulator(model)
        )
        for choice, step in made.choices.items():
            rate = bus_gbps(name, 4, 1 << 30, step.seconds)
            gbps.setdefault(choice, {})[name] = rate
    for choice, rates in gbps.items():
        for name in ("all_reduce", "all_gather", "reduce_scatter"):
            assert rates[name] == pytest.approx(plan.choices[choice].rate_gbps)

    def slowest(hops):
        (rates,) = Simulator(model).measure([transfer_set(hop.flow for hop in hops)])
        return rates.rate_gbps

    gpus, seen = plan.gpus, view(model.machine, model.knowledge, plan.settings, gpus=plan.gpus)
    (order,) = plan.subset(gpus).rings
    ring = list(zip(order, (*order[1:], order[0]), strict=True))
    space = hop_space(seen)
    hops = {pair: space.between(*pair)[0] for pair in permutations(gpus, 2)}
    # The hop that comes back to the root is idle.
    of_roots = [slowest(hops[pair] for pair in ring if pair[1] != root) for root in gpus]
    assert gbps["graph"]["broadcast"] == pytest.approx(harmonic_mean(of_roots))
    after = zip(gpus, (*gpus[1:], gpus[0]), strict=True)
    assert gbps["graph"]["send_recv"] == pytest.approx(slowest(hops[pair] for pair in after))
    assert gbps["graph"]["send"] == pytest.approx(slowest([hops[gpus[0], gpus[1]]]))
    shared = hop_space(seen, rings_in_set=len(gpus) - 1)
    rate = slowest(shared.between(*pair)[0] for pair in permutations(gpus, 2))
    assert gbps["graph"]["all_to_all"] == pytest.approx((len(gpus) - 1) * rate)


def test_without_a_source_ring_collectives_over_all_gpus_have_the_plans_rates():
    plan = plan_of("asus-esc8000a-e13p")
    rows = ("all_gather", 64 << 20, 1), ("all_to_all", 64 << 20, 1)
    found = predicted_communication(plan, workload(*rows, ranks=8))
    assert [row.collective for row in found.rows] == ["all_gather"]
    assert found.unknown == 0.5


@pytest.mark.parametrize("dry_run", [False, True])
def test_what_is_predicted_from_measurements_of_a_dry_run_is_marked(dry_run):
    plan = replace(plan_of("asus-esc8000a-e13p"), simulated=False, dry_run=dry_run)
    found = predicted_communication(plan, workload(("all_reduce", 64 << 20, 1), ranks=8))
    assert ("DRY RUN" in communication_line(found)) == dry_run


@pytest.mark.parametrize(
    ("job", "recommended"), [("data-parallel", "variables"), ("tensor-parallel-decode", "default")]
)
def test_a_plan_for_a_workload_recommends_what_is_predicted_for_it(tmp_path, job, recommended):
    place = tmp_path / "plan"
    words = ("plan", place, "--simulate", "intel-v100", "--max-sets", "20", "--workload", job)
    done = tccl(*map(str, words), "--json")
    assert done.exit_code == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["recommended"] == load_plan(place).recommended == recommended
    assert ("workload" in answer) == (recommended == "variables")
    assert "your job's communication" in answer["notices"][-1]
    if recommended == "default":
        assert "For large all-reduces alone" in load_plan(place).advice
    assert same_keys("plan", answer)
    # A prediction verifies nothing.
    with pytest.raises(InputError, match="was not verified for it"):
        verified_choice(place, job)


def test_a_plan_for_a_workload_of_other_ranks_does_not_say_that_verify_times_it(tmp_path):
    job = tmp_path / "job.json"
    write_workload(workload(("all_reduce", 1 << 26, 8), ranks=2), job)
    words = ("plan", tmp_path / "plan", "--simulate", SMALL, "--max-sets", 1, "--workload", job)
    done = tccl(*map(str, words), "--json")
    note = json.loads(done.stdout)["notices"][-1]
    assert "is of a job of 2 ranks, and jobs here have 4" in note and "verify" not in note


# What is kept beside a plan.


@pytest.fixture
def place(tmp_path):
    write_plan(plan_of(SMALL), tmp_path)
    return tmp_path


def test_a_choice_is_that_of_just_the_workload_it_was_verified_for(place, tmp_path):
    made = workload(("all_reduce", 1 << 26, 8))
    keep_communication(judged(made, BY_HAND), place)
    file = tmp_path / "job.json"
    write_workload(made, file)
    assert verified_choice(place, str(file)).chosen == "variables"
    assert verified_choice(place, "mine").chosen == "variables"
    other = workload(("all_reduce", 1 << 26, 9))
    write_workload(other, file)
    for text in (str(file), "yours"):
        with pytest.raises(InputError, match="was not verified for it"):
            verified_choice(place, text)
    # Of one name there is one, and of one workload as well.
    keep_communication(judged(other, BY_HAND), place)
    assert len(Communications.load(place).workloads) == 1
    renamed = workload(("all_reduce", 1 << 26, 9), name="x")
    assert other.digest == renamed.digest


def test_a_bundled_name_is_that_workload_also_beside_a_file_of_its_name(
    place, tmp_path, monkeypatch
):
    keep_communication(judged(workload(("all_reduce", 1 << 26, 8), name="fsdp"), BY_HAND), place)
    (tmp_path / "fsdp").touch()
    monkeypatch.chdir(tmp_path)
    assert verified_choice(place, "fsdp").name == "fsdp"


def test_what_is_kept_of_a_workload_without_times_of_a_choice_is_refused(place):
    keep_communication(judged(workload(("all_reduce", 1 << 26, 8)), BY_HAND), place)
    file = place / "workloads.json"
    file.write_text(file.read_text().replace('"default"', '"graph"', 1))
    with pytest.raises(InputError, match="lacks the times of a choice"):
        verified_choice(place, "mine")


def test_a_dry_run_verifies_no_choice(place):
    found = judged(workload(("all_reduce", 1 << 26, 8)), BY_HAND)
    calls = {Row(collective="all_reduce", dtype="bfloat16", bytes=1 << 26): 8.0}
    times = {name: dict.fromkeys(calls, [1.0] * 6) for name in BY_HAND}
    dry = communication_of(workload(("all_reduce", 1 << 26, 8)), calls, times, basis="a DRY RUN")
    assert "DRY RUN" in communication_line(dry) and "DRY RUN" not in communication_line(found)
    keep_communication(dry, place)
    with pytest.raises(InputError, match="without GPUs"):
        verified_choice(place, "mine")


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.005, 1.03, 1.1, 1.6])
def test_what_the_chosen_one_slows_is_told_with_its_share_however_little(factor):
    rows = [
        WorkloadRow(collective=kind, dtype="float32", bytes=4096, groups=((0, 1),), calls=1.0)
        for kind in ("all_reduce", "send_recv")
    ]
    workload = Workload(name="job", source="a test", ranks=2, rows=tuple(rows))
    calls = calls_of(workload)
    fast, slow = calls
    times = {"default": {fast: [9.0] * 6, slow: [1.0] * 6}}
    times["variables"] = {fast: [5.0] * 6, slow: [factor] * 6}
    made = communication_of(workload, calls, times)
    assert made.chosen == "variables"
    losses = {"send/recv": (pytest.approx(0.1), pytest.approx(1 / factor))}
    assert made.losses == (losses if factor >= 1.03 else {})
