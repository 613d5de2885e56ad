"""Verdicts on synthetic timings, interleaved rounds, the winner, NCCL's log, and the file."""

import itertools
import json
import statistics
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tccl_py.errors import InputError, MeasurementError
from tccl_py.experiments.comparison import (
    FALSE_RATE,
    Compared,
    Rounds,
    RunBudget,
    compare,
    row_seconds,
)
from tccl_py.experiments.jobs import (
    Arm,
    HostRanks,
    Launcher,
    Outcome,
    rank_environment,
    round_order,
)
from tccl_py.experiments.plans import run
from tccl_py.experiments.record import Verification, trade_offs, why_not_verified
from tccl_py.experiments.spec import JobResult, JobSpec, Row, WrongValue, batches, bus_gbps
from tccl_py.experiments.target import read_target
from tccl_py.experiments.verify import Judge, run_tuning, verify_target
from tccl_py.files import decode_json, encode_json
from tccl_py.nccl.settings import Settings
from tccl_py.plan.directory import write_plan
from tccl_py.plan.load import load_plan
from tccl_py.report.verification import facts_of, headline, trade_off_lines
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.statistics import sign_flip_p
from tccl_py.workloads.workload import BUNDLED, Workload, WorkloadRow
from tests.nccl_cases import torn
from tests.planned import SMALL, as_only, plan_of, rebind, replace_plan
from tests.verified import (
    FakeJobs,
    by_plan,
    by_variables,
    changed,
    dry_run,
    rings_in_log,
    run_verification,
    verify_by,
)

LOG = Path(__file__).parent / "cases" / "nccl-logs" / "h200x2-plan-2.28.9.log"


@pytest.fixture(scope="module")
def plan():
    return plan_of(SMALL)


@pytest.fixture
def place(plan, tmp_path):
    write_plan(plan, tmp_path, models=as_only(load_bundled(SMALL)))
    return tmp_path


@pytest.fixture(scope="module")
def boxed():
    """A plan of which variables, without a graph file, are recommended."""
    return plan_of("intel-v100")


@pytest.fixture
def box(boxed, tmp_path):
    place = tmp_path / "box"
    place.mkdir()
    write_plan(boxed, place, models=as_only(load_bundled("intel-v100")))
    return place


@pytest.fixture
def three():
    return FakeJobs(by_plan(lambda _: 1.0))


def tables(random, ratio, noise, *, sizes=11, rounds=10):
    """Seconds of an arm and of the baseline, with noise of each job, which sizes share in part."""
    jobs = random.normal(0, noise, (2, 1, rounds)) + random.normal(0, noise, (2, sizes, rounds))
    arm, baseline = np.exp(jobs)
    return (arm / ratio).tolist(), baseline.tolist()


@given(st.integers(0, 10_000), st.sampled_from([0.002, 0.02, 0.1]), st.sampled_from([6, 10, 20]))
@settings(max_examples=3)
def test_equal_arms_are_called_different_no_more_often_than_stated(seed, noise, rounds):
    random = np.random.default_rng(seed)
    tries = 300
    wrong = sum(
        any(one.verdict != "same" for one in compare(*tables(random, 1.0, noise, rounds=rounds)))
        for _ in range(tries)
    )
    # Four standard errors above the stated rate.
    assert wrong <= tries * FALSE_RATE + 4 * (tries * FALSE_RATE) ** 0.5


@given(st.integers(0, 10_000))
@settings(max_examples=20)
def test_seven_rounds_are_enough_for_a_large_gain_of_two_arms_with_many_sizes(seed):
    ours, theirs = tables(np.random.default_rng(seed), 1.3, 0.01, sizes=15, rounds=7)
    assert {one.verdict for one in compare(ours, theirs, arms=2)} == {"better"}
    # A disturbed round changes no verdict.
    ours = [[3 * row[0], *row[1:]] for row in ours]
    assert "worse" not in {one.verdict for one in compare(ours, theirs, arms=2)}


@given(
    st.lists(st.lists(st.floats(-1, 1, width=16), min_size=4, max_size=4), min_size=1, max_size=3)
)
def test_p_values_are_shares_of_all_flips_of_signs(rows):
    def distance(row, flip):
        sizes = np.abs(row)
        clipped = np.minimum(sizes, 2 * np.median(sizes)) * np.sign(row)
        length = np.sqrt(np.sum(clipped**2))
        return abs(np.sum(clipped * flip)) / length if length else 0.0

    flips = list(itertools.product((1, -1), repeat=4))
    farthest = [max(distance(row, flip) for row in rows) for flip in flips]
    for row, p in zip(rows, sign_flip_p(rows), strict=True):
        own = distance(row, flips[0])
        assert p == pytest.approx(np.mean([far >= own - 1e-9 for far in farthest]))


@given(st.integers(0, 10_000))
@settings(max_examples=20)
def test_a_loss_of_three_percent_is_found_at_every_size(seed):
    found = compare(*tables(np.random.default_rng(seed), 0.97, 0.004))
    assert {one.verdict for one in found} == {"worse"}
    assert all(0.95 < one.low <= one.ratio <= one.high < 0.99 for one in found)


def test_a_gain_of_three_percent_is_better_and_half_a_percent_is_the_same():
    random = np.random.default_rng(1)
    assert {one.verdict for one in compare(*tables(random, 1.03, 0.004))} == {"better"}
    assert {one.verdict for one in compare(*tables(random, 1.005, 0.001))} == {"same"}


def test_intervals_hold_the_true_ratio_as_often_as_stated():
    random = np.random.default_rng(3)
    rows = [one for _ in range(60) for one in compare(*tables(random, 1.2, 0.03))]
    held = sum(one.low <= 1.2 <= one.high for one in rows) / len(rows)
    assert 0.93 < held < 0.975


def test_too_few_rounds_and_uneven_arms_are_refused():
    with pytest.raises(ValueError, match="5 rounds"):
        compare([[1.0] * 5], [[1.0] * 5])
    with pytest.raises(ValueError, match="shorter"):
        compare([[1.0] * 7], [[1.0] * 6])


def test_equal_timings_are_the_same():
    (found,) = compare([[1.0] * 8], [[1.0] * 8])
    assert (found.ratio, found.low, found.high, found.p, found.verdict) == (1, 1, 1, 1, "same")


def test_a_loss_that_may_be_chance_is_no_verdict_but_a_loss():
    one = Compared(middle=0.9, low=0.8, high=0.99, p=0.2)
    assert (one.verdict, one.loses, one.open) == ("same", True, True)
    small = Compared(middle=0.995, low=0.992, high=0.998, p=0.001)
    assert (small.verdict, small.loses, small.open) == ("same", False, False)


@pytest.mark.parametrize("arms", ["AB", "ABC"])
def test_rounds_are_palindromes_whose_start_rotates(arms):
    rounds = ["".join(round_order(arms, number)) for number in range(2 * len(arms))]
    assert all(rounds[at] == rounds[at + 1][::-1] for at in range(0, len(rounds), 2))
    assert {one[0] for one in rounds[::2]} == set(arms)
    # Over these rounds every arm has every place equally often.
    for place in range(len(arms)):
        assert sorted(one[place] for one in rounds) == sorted(arms * 2)


def test_a_faster_plan_is_accepted_with_its_evidence(plan, place):
    jobs = FakeJobs(by_plan(lambda size: 1.2 if size >= 1 << 20 else 1.0))
    found = verify_by(plan, place, jobs, choice="graph")
    default, graph = found.arms
    assert (found.winner, found.accepted) == ("graph", True)
    assert found.objections(graph) == ()
    assert [one.verdict for one in graph.sizes][-5:] == ["better"] * 5
    assert graph.sizes[-1].compared.ratio == pytest.approx(1.2, rel=0.01)
    assert graph.large.ratio == pytest.approx(1.2, rel=0.01)
    assert graph.achieved_gbps == pytest.approx(default.achieved_gbps * 1.2, rel=0.02)
    assert graph.achieved_gbps == pytest.approx(
        bus_gbps("all_reduce", len(plan.gpus), 1 << 30, 0.1 / 1.2), rel=0.1
    )
    assert found.order.startswith("ABCCBABCA")
    # Both arms' values are checked beforehand.
    assert len(found.raw) == len(found.order) == len(jobs.jobs) - 2
    assert {letter: found.order.count(letter) for letter in "ABC"} == dict.fromkeys("ABC", 6)
    assert default.checked == graph.checked == 60 * len(plan.gpus)


def test_arms_differ_by_the_plans_variables_alone(boxed, box, three):
    found = verify_by(boxed, box, three, sizes=(4096,))
    arms = {
        letter: one.variables
        for letter, one in zip("ABC", read_target(boxed, box).arms, strict=True)
    }
    arms["D"] = arms["A"]
    assert arms["A"] == {}
    assert arms["B"] == {"NCCL_P2P_LEVEL": "PHB"}
    assert arms["C"] == {**arms["B"], "NCCL_GRAPH_FILE": str(box / "nccl" / "graph.xml")}
    # A job's ranks get the graph file in a folder of their own.
    arms["C"]["NCCL_GRAPH_FILE"] = "{folder}/graph.xml"
    for letter, (spec, environment) in zip(found.order, three.jobs[3:], strict=True):
        nccl = {name: text for name, text in environment.items() if name.startswith("NCCL_")}
        assert nccl == arms[letter]
        assert spec.world == len(boxed.gpus)


def test_three_arms_run_in_every_round_and_equal_environments_are_one_arm(boxed, box, three, plan):
    found = verify_by(boxed, box, three, sizes=(4096,))
    assert [one.name for one in found.arms] == ["default", "variables", "graph"]
    # And default NCCL once more, beside itself.
    assert found.order.startswith("ABCDDCBABCDAADCB")
    assert len({found.order.count(letter) for letter in "ABCD"}) == 1
    # Variables of the other plan are those of default NCCL.
    place = box.parent / "other"
    place.mkdir()
    write_plan(plan, place, models=as_only(load_bundled(SMALL)))
    assert [one.name for one in read_target(plan, place).arms] == ["default", "graph"]
    with pytest.raises(InputError, match="`choice` variables"):
        verify_by(plan, place, three, choice="variables")


@pytest.mark.parametrize(
    ("variables", "graph", "winner", "accepted"),
    [
        (1.0, 1.0, "default", True),
        (1.3, 1.0, "variables", True),
        (1.3, 1.305, "variables", True),
        (1.3, 1.5, "graph", False),
        (1.0, 1.3, "graph", False),
        (0.9, 1.3, "graph", False),
        (0.9, 1.0, "default", False),
    ],
)
def test_the_winner_is_the_smallest_choice_that_is_as_good_as_the_best_and_others_are_not_accepted(
    boxed, box, variables, graph, winner, accepted
):
    fake = FakeJobs(by_plan(lambda _: graph, variables=lambda _: variables), noise=0.001)
    found = verify_by(boxed, box, fake, sizes=(4096, 64 << 20))
    assert found.winner == winner
    assert (found.recommended, found.chosen) == ("variables", "variables")
    assert found.accepted == accepted
    changed(found, backend="cuda").keep(box)
    assert bool(why_not_verified(box)) != accepted
    yes = "Yes to" if winner == "variables" else "As good as default NCCL"
    assert headline(found)[1].startswith(yes if accepted else "No to variables only")


@pytest.mark.parametrize(("graph", "kept"), [(0.5, True), (1.0, True), (1.5, False)])
def test_a_limit_and_a_bound_that_jobs_contradict_are_taken_back(boxed, box, graph, kept):
    fake = FakeJobs(by_plan(lambda _: graph, variables=lambda _: 1.3), noise=0.001)
    target = read_target(boxed, box)
    found = verify_by(boxed, box, fake, sizes=(4096, 64 << 20))
    plan = target.settle(changed(found, backend="cuda")).plan
    assert boxed.limit_gbps and boxed.bound_gbps
    # The limit is of the hops of the choice that was fastest by prediction.
    assert plan.limit_gbps == (boxed.limit_gbps if kept else None)
    achieved = found.arm("graph").achieved_gbps
    assert plan.choices["graph"].achieved_gbps == achieved
    assert plan.bound_gbps == (None if achieved > boxed.bound_gbps else boxed.bound_gbps)
    # Rates in host memory are none of the machine's.
    assert target.settle(found).plan.limit_gbps is None


@pytest.mark.parametrize(("ratio", "winner"), [(0.75, "default"), (0.98, "variables")])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_choice_that_slows_send_recv_is_no_winner(boxed, box, ratio, winner, grouped):
    def transfers(environment):
        return 1.3 / (1.3 if grouped else ratio) if by_variables(environment) else 1.0

    def in_groups(_, environment):
        return 1.3 / ratio if grouped and by_variables(environment) else 1.0

    fake = FakeJobs(
        by_plan(lambda _: 1.0, variables=lambda _: 1.3),
        noise=0.001,
        transfers=transfers,
        grouped=in_groups,
    )
    found = verify_by(boxed, box, fake, sizes=(4096, 256 << 20))
    assert (found.winner, found.accepted) == (winner, winner == "variables")
    assert found.judged.large.ratio == pytest.approx(1.3, rel=0.01)
    assert [one.bytes for one in found.judged.sizes] == [4096, 256 << 20]
    timed = {(one.collective, one.bytes, one.groups) for one in found.judged.transfers}
    pairs = ((0, 1), (2, 3))
    sizes = 64 << 10, 1 << 20, 64 << 20
    moved = itertools.product(("send_recv", "all_to_all"), sizes, ((), pairs))
    gathered = itertools.product(("all_gather", "reduce_scatter"), sizes[1:], ((),))
    assert timed == {*moved, *gathered}
    said = found.objections(found.judged)
    assert any("send/recv of 64 KiB" in why for why in said) == (ratio < 0.97)
    # Default NCCL beside itself, by which the others are judged.
    assert len(found.again) == len(found.arms[0].rows) + len(found.arms[0].transfers)
    assert all(one.harm is None for one in (*found.again, *found.arms[0].rows))


def test_predictions_are_marked_by_the_assumed_values_behind_each(boxed, box):
    jobs = FakeJobs(by_plan(lambda _: 1.0))
    found = verify_by(boxed, box, jobs, sizes=(64 << 20,))
    default, change = found.arms[0], msgspec.structs.replace
    assert default.assumed == boxed.choices["default"].assumed
    marked = tuple(change(arm, assumed=arm is default) for arm in found.arms)
    lines = facts_of(change(found, arms=marked, simulated=True, dry_plan=False))
    marks = {line.partition(":")[0]: line for line in lines if "predicted (" in line}
    assert "(simulated from assumed values)" in marks.pop("default")
    assert marks and all("(simulated)" in line for line in marks.values())


@pytest.mark.parametrize("lost", [False, True])
def test_rounds_are_added_while_a_loss_is_in_doubt_unless_a_row_is_lost(boxed, box, lost):
    doubted = 16 << 10

    def speed(size):
        return 1.3 if size > doubted else 0.5 if lost and size < doubted else 1.0

    jobs = FakeJobs(
        by_plan(lambda _: 1.0, variables=speed),
        noise=0.001,
        jitter=lambda row: 0.06 * (row.bytes == doubted),
    )
    found = verify_by(boxed, box, jobs, sizes=(4096, doubted, 64 << 20), rounds=7)
    assert (found.rounds > 7, found.winner) == (not lost, "default" if lost else "variables")


FASTER = {128: 1.55, 256: 1.44, 512: 1.3, 1024: 1.2}
"""The speed of all-reduces over default NCCL's by KiB of a channel's FIFO,"""
TRANSFERRED = {128: 0.75, 256: 0.85, 512: 0.93, 1024: 0.99}
"""and that of send/recv and all-to-all: a trade, as on H200 without P2P."""


@pytest.mark.parametrize("slows", [True, False])
def test_tuning_takes_the_fastest_settings_that_slow_no_send_recv(boxed, box, slows):
    def kib(environment):
        return int(environment.get("NCCL_BUFFSIZE", 4 << 20)) >> 10

    def seconds(size, environment):
        return (1e-4 + size / 1e10) / FASTER.get(kib(environment), 1.0)

    def transfers(environment):
        speed = FASTER.get(kib(environment), 1.0)
        return speed / (TRANSFERRED if slows else FASTER).get(kib(environment), 1.0)

    plan = replace_plan(boxed, variables=replace(boxed.choices["variables"], settings=Settings()))
    fake = FakeJobs(seconds, noise=0.001, transfers=transfers)
    target = read_target(plan, box)
    budget = RunBudget(sizes=(4096, 64 << 20, 256 << 20))
    first = verify_target(target, dry_run(plan, fake), budget)
    assert first.winner == "default"
    tuned, found = run_tuning(target, dry_run(plan, fake), budget, first)
    best = 1024 if slows else 128
    assert (found.winner, found.accepted) == ("variables", True)
    assert tuned.choices["variables"].buffsize == best << 10
    assert found.best.large.ratio == pytest.approx(FASTER[best], rel=0.01)


def test_send_recv_is_timed_once_where_it_is_the_collective(plan, place):
    found = verify_by(
        plan, place, FakeJobs(by_plan(lambda _: 1.2)), sizes=(64 << 20,), collectives=("send_recv",)
    )
    assert {one.collective for arm in found.arms for one in arm.transfers} == {
        "all_to_all", "all_gather", "reduce_scatter",
    }  # fmt: skip


@pytest.mark.parametrize("seconds", [1e-9, 300.0])
def test_a_choice_is_not_recommended_before_a_loss_would_have_been_seen(boxed, box, seconds):
    fake = FakeJobs(by_plan(lambda _: 1.0, variables=lambda _: 1.5), noise=0.12, seed=3)

    def even(size, environment):
        return (1e-4 + size / 1e10) / (1.5 if size > 1 << 20 and by_variables(environment) else 1.0)

    fake.seconds = even
    found = verify_by(boxed, box, fake, sizes=(4096, 64 << 20), seconds=seconds)
    variables = found.arms[1]
    if seconds < 1:
        assert (found.rounds, found.winner) == (7, "default")
        assert "might" not in str(variables.losses) and variables.unclear
        assert "4 KiB" in found.against("variables")
    else:
        assert found.rounds > 7


@pytest.mark.parametrize(
    ("ratio", "choices"), [(0.75, ["default", "variables"]), (1.3, ["variables"])]
)
def test_trade_offs_are_the_choices_that_none_dominates_for_bundled_jobs(
    boxed, box, ratio, choices
):
    fake = FakeJobs(
        by_plan(lambda _: 1.0, variables=lambda _: 1.3),
        noise=0.0005,
        transfers=lambda environment: 1.3 / ratio if by_variables(environment) else 1.0,
    )
    found = verify_by(boxed, box, fake)
    offers = trade_offs(found)
    assert [one.choice for one in offers] == choices
    variables = offers[-1]
    assert variables.harmless == (ratio > 1)
    assert set(variables.workloads) == set(BUNDLED)
    assert variables.workloads["data-parallel"] == pytest.approx(1.3, rel=0.01)
    assert variables.workloads["fsdp"] == pytest.approx(1.3, rel=0.01)
    assert variables.workloads["pipeline"] == pytest.approx(ratio, rel=0.01)
    experts = variables.workloads["mixture-of-experts"]
    assert min(ratio, 1.3) * 0.99 < experts < 1.31
    lines = list(trade_off_lines(found))
    assert len(lines) == (ratio < 1)
    assert not lines or "not harmless, by these rows: data-parallel 1.30" in lines[0]


@pytest.mark.parametrize(
    ("sizes", "known"),
    [
        ((1024,), ()),
        ((1024, 256 << 10), ["tensor-parallel-decode"]),
        ((64 << 20,), set(BUNDLED) - {"tensor-parallel-decode"}),
    ],
)
def test_jobs_are_rated_by_times_of_messages_near_theirs_alone(boxed, box, sizes, known):
    fake = FakeJobs(by_plan(lambda _: 1.0, variables=lambda _: 1.3), noise=0.0005)
    found = verify_by(boxed, box, fake, sizes=sizes)
    assert {name for offer in trade_offs(found) for name in offer.workloads} == set(known)


def test_a_tuned_plan_recommends_the_winner_of_its_jobs_whatever_its_rates(boxed):
    assert boxed.recommended == "variables"
    assert changed(boxed, winner="default").recommended == "default"


def test_equal_arms_leave_default_nccl_the_winner(boxed, box):
    wins = []
    for seed in range(60):
        fake = FakeJobs(by_plan(lambda _: 1.0), noise=0.03, seed=seed)
        wins.append(
            verify_by(boxed, box, fake, sizes=(4096, 64 << 20), rounds=6, seconds=1e-9).winner
        )
    # An interval leaves out 1 on the one side in 2.5 % of all cases, for two arms.
    assert wins.count("default") >= 60 - 10


def test_a_choice_that_loses_at_a_size_is_no_winner(boxed, box):
    fake = FakeJobs(
        by_plan(lambda _: 1.2, variables=lambda size: 0.95 if size == 4096 else 1.5), noise=0.001
    )
    found = verify_by(boxed, box, fake, sizes=(4096, 64 << 20))
    assert (found.winner, found.accepted) == ("graph", False)
    assert [row.bytes for row in found.judged.losses] == [4096]


def test_variables_that_slow_smaller_communicators_are_not_accepted_by_name(boxed, box):
    def grouped(groups, environment):
        assert groups == ((0, 1), (2, 3))
        return 1.1 if by_variables(environment) else 1.0

    fake = FakeJobs(by_plan(lambda _: 1.0, variables=lambda _: 1.05), noise=0.001, grouped=grouped)
    found = verify_by(boxed, box, fake, sizes=(1024, 1 << 20))
    default, variables, graph = found.arms
    assert (found.winner, found.accepted) == ("default", False)
    assert len(found.objections(variables)) == 3
    assert all("over GPUs 0,1 and 2,3 (0.95)" in text for text in found.objections(variables))
    assert [one.bytes for one in default.groups] == [16 << 10, 256 << 10, 1 << 20]
    assert graph.groups == ()
    # Two of the four GPUs are in a communicator.
    assert default.groups[-1].gbps == pytest.approx(
        bus_gbps("all_reduce", 2, 1 << 20, 1e-4 + 1e-10 * (1 << 20)), rel=0.05
    )


def test_an_arm_whose_job_fails_leaves_the_others_in_the_comparison(boxed, box):
    fails = {"rounds": 0}

    def fail(environment):
        fails["rounds"] += by_variables(environment)
        return "no memory" if by_variables(environment) and fails["rounds"] > 3 else ""

    fake = FakeJobs(by_plan(lambda _: 1.3), fails=fail)
    found = verify_by(boxed, box, fake, sizes=(4096, 64 << 20))
    assert (found.winner, found.accepted) == ("graph", False)
    assert found.judged.failure == "no memory"
    assert set(found.order) == {"A", "C", "D"}
    assert len(found.raw) == len(found.order)


def test_every_arm_has_what_all_jobs_of_the_plans_hosts_have(plan, tmp_path):
    settings = changed(plan.settings, p2p_level="LOC")
    variables = changed(
        plan.choices["variables"],
        settings=changed(plan.choices["variables"].settings, p2p_level="LOC"),
    )
    bounced = replace_plan(
        plan,
        settings=settings,
        variables=variables,
        pinned_env={"NCCL_P2P_DISABLE": "1"},
        alternatives=(),
    )
    write_plan(bounced, tmp_path, models=as_only(load_bundled(SMALL)))
    jobs = FakeJobs(by_plan(lambda _: 1.0))
    found = run_verification(
        bounced, tmp_path, dry_run(plan, jobs), RunBudget(sizes=(4096,)), choice="graph"
    )
    assert found.arms[0].environment == {"NCCL_P2P_DISABLE": "1"}
    assert all(told["NCCL_P2P_DISABLE"] == "1" for _, told in jobs.jobs)


def test_clear_verdicts_need_no_more_rounds_and_noise_gets_four_times_as_many_at_most(plan, place):
    effort = RunBudget(sizes=(1 << 20, 1 << 26), rounds=8)
    quiet = FakeJobs(by_plan(lambda _: 1.0), noise=0.0005)
    found = run_verification(plan, place, dry_run(plan, quiet), effort, choice="graph")
    assert len(found.order) == 3 * 6
    noisy = FakeJobs(by_plan(lambda _: 1.02), noise=0.2, seed=3)
    found = run_verification(plan, place, dry_run(plan, noisy), effort, choice="graph")
    assert len(found.order) == 3 * 32
    small = FakeJobs(by_plan(lambda _: 1.0), noise=0.2)
    effort = RunBudget(sizes=(1024, 4096), rounds=8)
    found = run_verification(plan, place, dry_run(plan, small), effort, choice="graph")
    assert len(found.order) == 3 * 8 or found.arms[1].sizes[0].compared.high < 1


class Crowded(FakeJobs):
    """Jobs of which there is room for `room` at once."""

    def __init__(self, *arguments, room, **more):
        super().__init__(*arguments, **more)
        self.rounds, self._room = [], room

    def outcomes(self, spec, environments):
        self.rounds.append(["NCCL_GRAPH_FILE" in one for one in environments])
        if len(environments) > self._room:
            raise MeasurementError("rank 0 ended with code 1: out of memory")
        return super().outcomes(spec, environments)


@pytest.mark.parametrize(
    ("largest", "backend", "at_once"),
    [(1 << 26, "host", 3), (1 << 30, "host", 1), (1 << 30, "cuda", 3), (1 << 31, "cuda", 2)],
)
def test_as_many_jobs_run_at_once_as_devices_surely_have_room_for(
    plan, place, largest, backend, at_once
):
    jobs = Crowded(by_plan(lambda _: 1.0), room=4, noise=0.0005)
    where = changed(dry_run(plan, jobs), backend=backend)
    effort = RunBudget(sizes=(1024, largest), checks=False)
    found = run_verification(plan, place, where, effort, choice="graph")
    assert found.at_once == at_once
    assert len(plan.gpus) == 4
    order = "ABCCBABCAACBCABBAC"
    graph = [letter == "B" for letter in order]
    of_rounds = [graph[at : at + 3] for at in range(0, 18, 3)]
    batches = [of[at : at + at_once] for of in of_rounds for at in range(0, 3, at_once)]
    assert jobs.rounds[1:] == batches
    assert found.order == order


def test_jobs_that_fail_together_are_run_one_after_the_other(plan, place):
    jobs = Crowded(by_plan(lambda _: 1.2), room=1)
    found = verify_by(plan, place, jobs, sizes=(4096,), choice="graph")
    assert (found.winner, found.at_once, found.arms[1].failure) == ("graph", 1, "")
    # The checks of both arms, then their rounds.
    assert [len(one) for one in jobs.rounds[:6]] == [2, 1, 1, 3, 1, 1]
    assert found.order.startswith("ABCCBA")


def test_a_plan_whose_job_fails_is_answered_no_unless_default_nccl_fails_too(plan, place):
    def fails(environment):
        return "rank 1: dev 2 not found" if "NCCL_GRAPH_FILE" in environment else ""

    jobs = FakeJobs(by_plan(lambda _: 1.0), fails=fails)
    found = verify_by(plan, place, jobs, choice="graph")
    assert (found.judged.failure, found.accepted, found.winner) == (
        "rank 1: dev 2 not found", False, "default",
    )  # fmt: skip
    jobs = FakeJobs(by_plan(lambda _: 1.0), fails=lambda _: "no GPU")
    with pytest.raises(MeasurementError, match="no GPU"):
        verify_by(plan, place, jobs, choice="graph")


def test_a_verdict_follows_from_rounds_without_a_job(plan, place):
    target, launcher = read_target(plan, place), dry_run(plan, None)
    budget = RunBudget(sizes=(4096,), training=True)
    judge = Judge(target, launcher, budget, target.arms, "graph", {}, begun=0.0)
    assert {row.mode for row in judge.rows} == {"", "ddp-eager", "tp2-eager", "tp4-eager"}
    assert len(set(judge.rows)) == len(judge.rows)
    ranks = tuple(JobResult(rank=rank, torch="2") for rank in range(launcher.world))
    checked = {"default": Outcome(results=ranks, log="")}
    failures = {arm.name: "no room" for arm in target.arms[1:]}
    rounds = Rounds(launcher, target.arms[:1], JobSpec())
    rounds.checked, rounds.failures = checked, failures
    found = judge.verdict(rounds)
    assert (found.winner, found.rounds, found.raw) == ("default", 0, ())
    assert "no room" in found.against("graph")


def test_wrong_values_make_the_answer_no(plan, place):
    wrong = (WrongValue(case="all-reduce, float32 x 3", rank=0, what="1 of 3 values are wrong"),)
    jobs = FakeJobs(by_plan(lambda _: 1.5), wrong=wrong)
    found = verify_by(plan, place, jobs, sizes=(4096,), choice="graph")
    assert (found.winner, found.accepted, found.judged.wrong) == ("default", False, wrong)
    found = changed(found, chosen="default")
    assert not found.accepted and "values of graph file are wrong" in headline(found)[1]


@pytest.mark.parametrize("is_wrong", [True, False])
def test_a_choice_with_wrong_values_never_wins_a_workload(plan, place, is_wrong):
    row = WorkloadRow(
        collective="all_reduce", dtype="float32", bytes=1 << 20, groups=((0, 1, 2, 3),), calls=4.0
    )
    wrong = (WrongValue(case="all-reduce", rank=0, what="1 of 3 values are wrong"),)
    jobs = FakeJobs(by_plan(lambda _: 1.5), wrong=wrong if is_wrong else ())
    workload = Workload(name="job", source="a test", ranks=4, rows=(row,))
    found = verify_by(plan, place, jobs, sizes=(4096,), workload=workload).workload
    assert found.chosen == ("default" if is_wrong else "graph")
    assert ("graph" in found.choices) != is_wrong


@given(
    st.lists(
        st.lists(st.lists(st.floats(1e-6, 1.0), max_size=3), min_size=3, max_size=3),
        min_size=1,
        max_size=4,
    )
)
def test_a_job_is_as_slow_as_its_slowest_ranks_median(times):
    """Ranks without a part in a row have no times of it."""
    row = Row(bytes=4096)
    jobs = [
        Outcome(
            results=tuple(
                JobResult(rank=rank, torch="2", times=(batches(row, seconds),))
                for rank, seconds in enumerate(ranks)
            ),
            log="",
        )
        for ranks in times
    ]
    medians = [[statistics.median(own) for own in ranks if own] for ranks in times]
    found = row_seconds(jobs).get(row, ())
    assert list(found) == [max(own) for own in medians if own]


def test_of_two_arms_six_rounds_are_run_at_least_and_of_three_seven(boxed, box):
    """Six rounds have too few flips of signs for a verdict on each of two arms."""
    fake, budget = FakeJobs(by_plan(lambda _: 1.0)), RunBudget(sizes=(4096,), rounds=1, seconds=0.0)
    for choice, rounds in (("graph", 6), (None, 7)):
        found = run_verification(boxed, box, dry_run(boxed, fake), budget, choice=choice)
        assert found.rounds == rounds


def test_p_values_of_several_arms_are_adjusted_for_all_of_them(boxed, box):
    fake = FakeJobs(by_plan(lambda _: 1.3, variables=lambda _: 1.3), noise=0.001)
    least = {}
    for choice in ("graph", None):
        found = verify_by(boxed, box, fake, sizes=(4096,), choice=choice)
        arms = len(found.arms) - 1
        rounds = len(found.arms[1].rows[0].seconds)
        assert {row.compared.p for row in found.arms[-1].sizes} == {arms * 2.0 ** (1 - rounds)}
        least[choice] = arms
    assert least == {"graph": 1, None: 2}
    arm, baseline = [[1.0, 1.1, 0.9, 1.2, 0.95, 1.05]], [[1.1, 1.3, 1.0, 1.25, 0.9, 1.2]]
    (one,), (three,) = (compare(arm, baseline, arms=count) for count in (1, 3))
    assert three.p == min(1.0, 3 * one.p) > one.p


def test_a_slower_training_step_makes_the_answer_no(plan, place):
    jobs = FakeJobs(by_plan(lambda _: 1.0), noise=0.0005)
    found = verify_by(plan, place, jobs, sizes=(4096,), training=True, choice="graph")
    assert [one.mode for one in found.judged.training] == ["ddp-eager"]
    assert found.accepted
    slow = changed(found.judged.training[0], harm="loses")
    arm = changed(found.judged, rows=(*found.judged.sizes, slow))
    assert "training step" in found.objections(arm)[0]


def test_another_loss_of_a_training_step_than_default_nccls_makes_the_answer_no(plan, place):
    for loss, accepted in ((4.001, True), (4.1, False), (float("nan"), False)):
        jobs = FakeJobs(
            by_plan(lambda _: 1.5),
            trained=lambda environment, loss=loss: (
                loss if "NCCL_GRAPH_FILE" in environment else 4.0
            ),
        )
        found = verify_by(plan, place, jobs, sizes=(4096,), training=True, choice="graph")
        assert found.accepted == accepted
        last = len(plan.gpus) - 1
        assert {one.rank for one in found.judged.wrong} == (set() if accepted else {last})


def test_a_missing_graph_file_is_refused(plan, place):
    (place / "nccl" / "graph.xml").unlink()
    with pytest.raises(InputError, match=r"graph\.xml: is missing"):
        verify_by(plan, place, three)


def test_the_file_is_read_again_and_an_earlier_plans_is_left_out(plan, place):
    jobs = FakeJobs(by_plan(lambda _: 1.1))
    found = verify_by(plan, place, jobs, sizes=(4096,), choice="graph")
    kept = found.keep(place)
    assert Verification.load(place) == kept
    changed(plan, strategy="other").save(place / "plan.json")
    rebind(place)
    assert Verification.load(place) is None
    text = json.loads((place / "verify.json").read_text())
    (place / "verify.json").write_text(json.dumps({**text, "format_version": 9}))
    with pytest.raises(InputError, match="format version 9"):
        Verification.load(place)


def test_what_the_caller_set_for_nccl_is_not_used_but_for_what_is_kept():
    caller = {
        "HOME": "/root", "NCCL_ALGO": "Tree", "NCCL_NVLS_ENABLE": "0", "RANK": "3",
        "MASTER_PORT": "1", "NCCL_P2P_DISABLE": "1", "NCCL_BUFFSIZE": "1",
    }  # fmt: skip
    variables = {"NCCL_BUFFSIZE": "524288"}
    found = rank_environment(
        caller, gpus=(0, 2), variables=variables, keep=("NCCL_P2P_DISABLE", "NCCL_BUFFSIZE")
    )
    assert found["CUDA_VISIBLE_DEVICES"] == "0,2"
    assert (found["NCCL_NVLS_ENABLE"], found["NCCL_P2P_DISABLE"]) == ("0", "1")
    assert found["NCCL_BUFFSIZE"] == "524288"
    assert not {"NCCL_ALGO", "RANK", "MASTER_PORT"} & set(found)
    host = HostRanks(ranks=(0,), gpus=(0,), environment=caller)
    arm = Arm(name="variables", variables=variables, settings=Settings())
    found = Launcher(backend="cuda", hosts=(host,)).variables(arm)
    assert found == {"NCCL_NVLS_ENABLE": "0", **variables}


@pytest.fixture(scope="module")
def on_two(plan):
    """A plan over two GPUs, as the recorded log's was: one ring over 12 channels."""
    two = plan_of(SMALL, gpus=(0, 1), ring_counts=(1,))
    ways = changed(two.settings, channels=12, p2p_level=None, p2p_read=None)
    return changed(two, settings=ways)


def test_a_recorded_log_is_that_of_its_plan(on_two):
    found = rings_in_log(on_two, {}, LOG.read_text(), {})
    assert (found.differences, found.same) == ((), True)
    assert len(found.found) == len(found.expected) == 24
    assert {link.via for link in found.links} == {"P2P/CUMEM"}


@pytest.mark.parametrize("at", [0, 1, 6, 100])
def test_the_log_of_any_job_that_differs_from_the_plan_is_told(on_two, tmp_path, at):
    class Changing(FakeJobs):
        """One job of the graph file has fewer channels than were planned."""

        def one(self, spec, environment):
            number = sum("NCCL_GRAPH_FILE" in before for _, before in self.jobs)
            text = LOG.read_text().replace("/24", "/12") if number == at else LOG.read_text()
            return changed(super().one(spec, environment), log=text)

    write_plan(on_two, tmp_path, models=as_only(load_bundled(SMALL)))
    place = changed(dry_run(on_two, Changing(by_plan(lambda _: 1.0))), backend="cuda")
    found = run_verification(on_two, tmp_path, place, RunBudget(sizes=(1 << 20,)), choice="graph")
    assert found.arms[1].log_rings.same == (at == 100)
    assert bool(found.arms[1].faults) == (at != 100)


@pytest.mark.parametrize("checks", [True, False])
def test_without_checks_the_log_is_that_of_a_timing_job(on_two, tmp_path, checks):
    class Logging(FakeJobs):
        """NCCL connects nothing before it moves something."""

        def one(self, spec, environment):
            outcome = super().one(spec, environment)
            moves = spec.checks or spec.rows
            return changed(outcome, log=LOG.read_text() if moves else "")

    write_plan(on_two, tmp_path, models=as_only(load_bundled(SMALL)))
    jobs = Logging(by_plan(lambda _: 1.0))
    place = changed(dry_run(on_two, jobs), backend="cuda")
    effort = RunBudget(sizes=(1 << 20,), checks=checks)
    found = run_verification(on_two, tmp_path, place, effort, choice="graph")
    assert found.arms[0].rings is None
    assert found.arms[1].log_rings.same, found.arms[1].log_rings.differences


def test_other_channels_rings_and_transports_are_named(on_two):
    text = LOG.read_text()
    fewer = changed(on_two, settings=changed(on_two.settings, channels=8))
    assert rings_in_log(fewer, {}, text, {}).differences == (
        "NCCL uses 24 channels, the plan comes to 16",
    )
    bounced = changed(on_two, settings=Settings(channels=12, p2p_level="LOC"))
    assert (
        "GPU 0 -> 1 goes by P2P/CUMEM on 32" in rings_in_log(bounced, {}, text, {}).differences[0]
    )
    silent = "\n".join(line for line in text.splitlines() if " via " not in line)
    (found,) = rings_in_log(on_two, {}, silent, {}).differences
    assert found.endswith("GPUs 0 -> 1, 1 -> 0")
    assert "no rings" in rings_in_log(on_two, {}, "nothing", {}).differences[0]


@given(torn(LOG.read_bytes()))
def test_no_torn_log_of_nccl_fails(on_two, text):
    found = rings_in_log(on_two, {}, text, {})
    assert found.same or found.differences
    assert all(set(ring) == {0, 1} for ring in found.found)
    assert decode_json(encode_json(found), type(found), where="verify.json") == found


def test_another_order_of_gpus_is_named_by_its_channel(plan):
    orders = [(0, 1, 2, 3), (0, 2, 1, 3)]
    lines = [
        f"vm:1:1 [0] NCCL INFO Channel {at:02d}/24 : {' '.join(map(str, orders[at == 5]))}"
        for at in range(24)
    ]
    ring = plan.rings[0]
    assert ring.gpus == (0, 1, 2, 3)
    twelve = changed(plan, rings=(ring,), settings=changed(plan.settings, channels=12))
    found = rings_in_log(twelve, {}, "\n".join(lines), {})
    assert found.differences[0] == "channel 5 is 0 2 1 3, planned was 0 1 2 3"


HUNG = "rank 0 did not end within 180 s"


@pytest.mark.parametrize("wrong", [False, True])
def test_where_default_nccl_fails_a_job_without_p2p_is_the_baseline(plan, place, wrong):
    class WithoutP2p(FakeJobs):
        def _is_wrong(self, spec, environment, rank):
            return wrong and spec.checks and "NCCL_P2P_DISABLE" not in environment

    def fails(environment):
        return "" if wrong or environment.get("NCCL_P2P_DISABLE") == "1" else HUNG

    value = WrongValue(case="all_reduce float32 1", rank=0, what="a sum of 3 instead of 4")
    jobs = WithoutP2p(by_plan(lambda _: 1.0), fails=fails, wrong=(value,))
    said = []
    launcher = dry_run(plan, jobs, backend="cuda", say=said.append)
    assert plan.recommended == "default"
    found = run(read_target(plan, place), launcher, RunBudget(sizes=(4096,)))
    why = "a sum of 3 instead of 4" if wrong else HUNG
    assert why in found.default_fails
    assert any(text.startswith("default NCCL fails") for text in said)
    # Its job is the answer to a plan that recommends it.
    assert not found.accepted
    assert f"default NCCL fails: {found.default_fails}" in facts_of(found)
    assert found.arms[0].environment["NCCL_P2P_DISABLE"] == "1"
    # The plan says so from now on, and is verified.
    known = load_plan(place)
    assert known.choices["default"].fails
    assert known.choices[known.recommended].environment == {"NCCL_P2P_DISABLE": "1"}
    assert (known.choices[known.recommended].achieved_gbps is None) == (not wrong)
    assert known.choices["default"].achieved_gbps is None
    assert known.running == ["large-buffers"]
    assert why_not_verified(place) == ""
    # The next one begins with the baseline.
    del said[:]
    again = run(read_target(known, place), launcher, RunBudget(sizes=(4096,)))
    assert again.accepted
    assert again.default_fails == ""
    assert said[0].endswith("compared with NCCL_P2P_DISABLE=1 in its place")
    assert why_not_verified(place) == ""


def test_a_failure_that_has_nothing_to_do_with_p2p_ends_a_verification(plan, boxed, place, box):
    jobs = FakeJobs(by_plan(lambda _: 1.0), fails=lambda _: "no room")
    for one, where in ((plan, place), (boxed, box)):
        with pytest.raises(MeasurementError, match="no room"):
            run(read_target(one, where), dry_run(one, jobs, backend="cuda"), RunBudget())
