"""Verdicts on synthetic timings, the run of pairs, NCCL's log against a plan, and the file."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import wilcoxon

from tccl_py.errors import InputError
from tccl_py.files import decode_json, encode_json
from tccl_py.plan.directory import write_plan
from tccl_py.runtimes.nccl.settings import Settings
from tccl_py.simulator.library import load_bundled
from tccl_py.verification.comparison import FALSE_RATE, Compared, compare, overall
from tccl_py.verification.jobs import JobError
from tccl_py.verification.orders import Wrong, bus_gbps
from tccl_py.verification.pairs import Effort
from tccl_py.verification.record import keep_verification, load_verification
from tccl_py.verification.rings import rings_found
from tccl_py.verification.sides import STOCK, plan_side
from tccl_py.verification.surroundings import job_surroundings, kept_variables
from tccl_py.verification.verify import run_verification
from tests.nccl_cases import torn
from tests.planned import SMALL, plan_of, rebind
from tests.verified import FakeJobs, by_plan, changed, rehearsal

LOG = Path(__file__).parent / "cases" / "nccl-logs" / "h200x2-plan-2.28.9.log"


@pytest.fixture(scope="module")
def plan():
    return plan_of(SMALL)


@pytest.fixture
def place(plan, tmp_path):
    write_plan(plan, tmp_path, model=load_bundled(SMALL))
    return tmp_path


def tables(random, ratio, noise, *, sizes=11, pairs=10):
    """Seconds of the plan and of stock, with noise of each job."""
    plan = np.exp(random.normal(0, noise, (sizes, pairs))) / ratio
    return plan.tolist(), np.exp(random.normal(0, noise, (sizes, pairs))).tolist()


@given(st.integers(0, 10_000), st.sampled_from([0.002, 0.02, 0.1]), st.sampled_from([6, 10, 20]))
@settings(max_examples=3)
def test_equal_sides_are_called_different_no_more_often_than_stated(seed, noise, pairs):
    random = np.random.default_rng(seed)
    tries = 300
    wrong = sum(
        any(one.verdict != "same" for one in compare(*tables(random, 1.0, noise, pairs=pairs)))
        for _ in range(tries)
    )
    # Four standard errors above the stated rate.
    assert wrong <= tries * FALSE_RATE + 4 * (tries * FALSE_RATE) ** 0.5


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


def test_the_p_of_one_size_is_that_of_the_signed_rank_test():
    random = np.random.default_rng(2)
    ours, theirs = tables(random, 1.0, 0.05, sizes=1)
    (found,) = compare(ours, theirs)
    logs = np.log(theirs[0]) - np.log(ours[0])
    assert found.p == pytest.approx(wilcoxon(logs, method="exact").pvalue)


def test_intervals_hold_the_true_ratio_as_often_as_stated():
    random = np.random.default_rng(3)
    rows = [one for _ in range(60) for one in compare(*tables(random, 1.2, 0.03))]
    held = sum(one.low <= 1.2 <= one.high for one in rows) / len(rows)
    assert 0.93 < held < 0.975


def test_too_few_pairs_and_uneven_sides_are_refused():
    with pytest.raises(ValueError, match="5 pairs: 6 to 40 can be compared"):
        compare([[1.0] * 5], [[1.0] * 5])
    with pytest.raises(ValueError, match="shorter"):
        compare([[1.0] * 7], [[1.0] * 6])


def test_equal_timings_are_the_same():
    (found,) = compare([[1.0] * 8], [[1.0] * 8])
    assert (found.ratio, found.low, found.high, found.p, found.verdict) == (1, 1, 1, 1, "same")


def test_one_worse_size_makes_the_whole_worse():
    assert overall(["better", "same", "worse"]) == "worse"
    assert overall(["same"]) == "same"
    assert Compared(ratio=0.9, low=0.8, high=0.99, p=0.2).verdict == "same"


def test_a_faster_plan_is_accepted_with_its_evidence(plan, place):
    jobs = FakeJobs(by_plan(lambda size: 1.2 if size >= 1 << 20 else 1.0))
    effort = Effort()
    found = run_verification(plan, place, rehearsal(plan, jobs), effort)
    assert (found.verdict, found.accepted, found.worse_sizes) == ("better", True, ())
    assert [one.verdict for one in found.sizes][-5:] == ["better"] * 5
    assert found.sizes[-1].compared.ratio == pytest.approx(1.2, rel=0.01)
    assert found.plan_gbps == pytest.approx(found.stock_gbps * 1.2, rel=0.02)
    assert found.plan_gbps == pytest.approx(
        bus_gbps("all_reduce", len(plan.gpus), 1 << 30, 0.1 / 1.2), rel=0.1
    )
    assert found.order.startswith("ABBAABBA")
    assert len(found.raw) == len(found.order) == len(jobs.jobs) - 1
    assert found.checked == 60 * len(plan.gpus)


def test_the_sides_differ_by_the_plans_variables_alone(plan, place):
    jobs = FakeJobs(by_plan(lambda _: 1.0))
    found = run_verification(plan, place, rehearsal(plan, jobs), Effort(sizes=(4096,)))
    side = plan_side(plan, place).variables
    assert side["NCCL_GRAPH_FILE"] == str(place / "nccl" / "graph.xml")
    for letter, (order, surroundings) in zip(found.order, jobs.jobs[1:], strict=True):
        nccl = {name: text for name, text in surroundings.items() if name.startswith("NCCL_")}
        assert nccl == (side if letter == "A" else STOCK.variables)
        assert order.world == len(plan.gpus)


def test_stock_has_what_all_jobs_of_the_plans_hosts_have(plan, tmp_path):
    settings = changed(plan.settings, p2p_level="LOC")
    bounced = changed(plan, settings=settings, kept={"NCCL_P2P_DISABLE": "1"}, alternatives=())
    write_plan(bounced, tmp_path, model=load_bundled(SMALL))
    jobs = FakeJobs(by_plan(lambda _: 1.0))
    found = run_verification(bounced, tmp_path, rehearsal(plan, jobs), Effort(sizes=(4096,)))
    assert found.stock_environment == {"NCCL_P2P_DISABLE": "1"}
    assert all(told["NCCL_P2P_DISABLE"] == "1" for _, told in jobs.jobs)


def test_clear_verdicts_need_no_more_pairs_and_noise_gets_four_times_as_many_at_most(plan, place):
    effort = Effort(sizes=(1 << 20, 1 << 26), pairs=8)
    quiet = FakeJobs(by_plan(lambda _: 1.0), noise=0.0005)
    found = run_verification(plan, place, rehearsal(plan, quiet), effort)
    assert len(found.order) == 2 * 6
    noisy = FakeJobs(by_plan(lambda _: 1.02), noise=0.2)
    found = run_verification(plan, place, rehearsal(plan, noisy), effort)
    assert len(found.order) == 2 * 32
    small = FakeJobs(by_plan(lambda _: 1.0), noise=0.2)
    effort = Effort(sizes=(1024, 4096), pairs=8)
    found = run_verification(plan, place, rehearsal(plan, small), effort)
    assert len(found.order) == 2 * 8 or found.sizes[0].compared.high < 1


class Crowded(FakeJobs):
    """Jobs of which there is room for `room` at once."""

    def __init__(self, *arguments, room, **more):
        super().__init__(*arguments, **more)
        self.rounds, self._room = [], room

    def __call__(self, order, surroundings, **_):
        self.rounds.append(["NCCL_GRAPH_FILE" in one for one in surroundings])
        if len(surroundings) > self._room:
            raise JobError("rank 0 ended with code 1: out of memory")
        return super().__call__(order, surroundings)


@pytest.mark.parametrize(
    ("largest", "backend", "at_once"),
    [(1 << 26, "host", 4), (1 << 30, "host", 1), (1 << 30, "cuda", 4), (1 << 31, "cuda", 2)],
)
def test_as_many_jobs_run_at_once_as_devices_surely_have_room_for(
    plan, place, largest, backend, at_once
):
    jobs = Crowded(by_plan(lambda _: 1.0), room=4, noise=0.0005)
    where = changed(rehearsal(plan, jobs), backend=backend)
    effort = Effort(sizes=(1024, largest), checks=False)
    found = run_verification(plan, place, where, effort)
    assert found.at_once == at_once
    assert len(plan.gpus) == 4
    side, stock = [True], [False]
    four = [[True, False, False, True], [False, True, True, False]]
    rounds = {4: [*four, four[0]], 2: [[True, False], [False, True]] * 3}
    alone = [side, stock, stock, side] * 3
    assert jobs.rounds[1:] == rounds.get(at_once, alone)
    assert found.order == ("ABBABAABABBA" if at_once == 4 else "ABBA" * 3)


def test_jobs_that_fail_together_are_run_one_after_the_other(plan, place):
    jobs = Crowded(by_plan(lambda _: 1.2), room=1)
    found = run_verification(plan, place, rehearsal(plan, jobs), Effort(sizes=(4096,)))
    assert (found.verdict, found.at_once, found.failure) == ("better", 1, "")
    assert [len(one) for one in jobs.rounds[:4]] == [1, 4, 1, 1]
    assert found.order.startswith("ABBA")


def test_a_plan_whose_jobs_fail_among_others_is_answered_no(plan, place):
    class Later(Crowded):
        def one(self, order, surroundings):
            if order.sizes and "NCCL_GRAPH_FILE" in surroundings:
                raise JobError("rank 1 ended with code 1: no room")
            return super().one(order, surroundings)

    jobs = Later(by_plan(lambda _: 1.2), room=4)
    found = run_verification(plan, place, rehearsal(plan, jobs), Effort(sizes=(4096,)))
    assert (found.accepted, found.failure) == (False, "rank 1 ended with code 1: no room")


def test_a_plan_that_is_slow_for_small_messages_is_not_recommended_for_them(plan, place):
    jobs = FakeJobs(by_plan(lambda size: 0.9 if size <= 4096 else 1.3))
    found = run_verification(plan, place, rehearsal(plan, jobs), Effort())
    assert (found.verdict, found.accepted, found.worse_sizes) == ("worse", False, (1024, 4096))


def test_a_plan_whose_job_fails_is_answered_no_unless_stock_fails_too(plan, place):
    def fails(surroundings):
        return "rank 1: dev 2 not found" if "NCCL_GRAPH_FILE" in surroundings else ""

    jobs = FakeJobs(by_plan(lambda _: 1.0), fails=fails)
    found = run_verification(plan, place, rehearsal(plan, jobs), Effort())
    assert (found.failure, found.accepted, found.verdict) == (
        "rank 1: dev 2 not found", False, None,
    )  # fmt: skip
    jobs = FakeJobs(by_plan(lambda _: 1.0), fails=lambda _: "no GPU")
    with pytest.raises(JobError, match="no GPU"):
        run_verification(plan, place, rehearsal(plan, jobs), Effort())


def test_wrong_values_make_the_answer_no(plan, place):
    wrong = (Wrong(case="all-reduce, float32 x 3", rank=0, what="1 of 3 values are wrong"),)
    jobs = FakeJobs(by_plan(lambda _: 1.5), wrong=wrong)
    found = run_verification(plan, place, rehearsal(plan, jobs), Effort(sizes=(4096,)))
    assert (found.verdict, found.accepted, found.wrong) == ("better", False, wrong)


def test_a_slower_training_step_makes_the_answer_no(plan, place):
    jobs = FakeJobs(by_plan(lambda _: 1.0), noise=0.0005)
    effort = Effort(sizes=(4096,), training=True)
    found = run_verification(plan, place, rehearsal(plan, jobs), effort)
    assert [one.mode for one in found.training] == ["eager"]
    assert found.accepted
    slow = changed(found.training[0], verdict="worse")
    assert not changed(found, training=(slow,)).accepted


def test_a_missing_graph_file_is_refused(plan, place):
    (place / "nccl" / "graph.xml").unlink()
    with pytest.raises(InputError, match=r"graph\.xml: is missing; plan again"):
        run_verification(plan, place, rehearsal(plan, FakeJobs(by_plan(lambda _: 1.0))), Effort())


def test_the_file_is_read_again_and_an_earlier_plans_is_left_out(plan, place):
    jobs = FakeJobs(by_plan(lambda _: 1.1))
    found = run_verification(plan, place, rehearsal(plan, jobs), Effort(sizes=(4096,)))
    kept = keep_verification(found, place)
    assert load_verification(place) == kept
    changed(plan, strategy="other").save(place / "plan.json")
    rebind(place)
    assert load_verification(place) is None
    text = json.loads((place / "verify.json").read_text())
    (place / "verify.json").write_text(json.dumps({**text, "format_version": 9}))
    with pytest.raises(InputError, match=f"^{place}/verify.json: has format version 9; this"):
        load_verification(place)


def test_what_the_caller_set_for_nccl_is_not_used_but_for_what_is_kept():
    caller = {
        "HOME": "/root", "NCCL_ALGO": "Tree", "NCCL_NVLS_ENABLE": "0", "RANK": "3",
        "MASTER_PORT": "1", "NCCL_P2P_DISABLE": "1", "NCCL_BUFFSIZE": "1",
    }  # fmt: skip
    variables = {"NCCL_BUFFSIZE": "524288"}
    found = job_surroundings(
        caller, gpus=(0, 2), variables=variables, keep=("NCCL_P2P_DISABLE", "NCCL_BUFFSIZE")
    )
    assert found["CUDA_VISIBLE_DEVICES"] == "0,2"
    assert (found["NCCL_NVLS_ENABLE"], found["NCCL_P2P_DISABLE"]) == ("0", "1")
    assert found["NCCL_BUFFSIZE"] == "524288"
    assert not {"NCCL_ALGO", "RANK", "MASTER_PORT"} & set(found)
    assert kept_variables(caller) == {"NCCL_NVLS_ENABLE": "0"}


@pytest.fixture(scope="module")
def on_two(plan):
    """A plan over two GPUs, as the recorded log's was: one ring over 12 channels."""
    two = plan_of(SMALL, gpus=(0, 1), ring_counts=(1,))
    ways = changed(two.settings, channels=12, p2p_level=None, p2p_read=None)
    return changed(two, settings=ways)


def test_a_recorded_log_is_that_of_its_plan(on_two):
    found = rings_found(on_two, LOG.read_text(), {})
    assert (found.differences, found.same) == ((), True)
    assert len(found.found) == len(found.expected) == 24
    assert {link.via for link in found.links} == {"P2P/CUMEM"}


@pytest.mark.parametrize("checks", [True, False])
def test_without_checks_the_log_is_that_of_a_timing_job(on_two, tmp_path, checks):
    class Logging(FakeJobs):
        """NCCL connects nothing before it moves something."""

        def one(self, order, surroundings):
            outcome = super().one(order, surroundings)
            moves = order.checks or order.sizes
            return changed(outcome, log=LOG.read_text() if moves else "")

    write_plan(on_two, tmp_path, model=load_bundled(SMALL))
    jobs = Logging(by_plan(lambda _: 1.0))
    place = changed(rehearsal(on_two, jobs), backend="cuda")
    effort = Effort(sizes=(1 << 20,), checks=checks)
    found = run_verification(on_two, tmp_path, place, effort)
    assert found.rings.same, found.rings.differences


def test_other_channels_rings_and_transports_are_named(on_two):
    text = LOG.read_text()
    fewer = changed(on_two, settings=changed(on_two.settings, channels=8))
    assert rings_found(fewer, text, {}).differences == (
        "NCCL uses 24 channels, the plan comes to 16",
    )
    bounced = changed(on_two, settings=Settings(channels=12, p2p_level="LOC"))
    assert rings_found(bounced, text, {}).differences[0] == (
        "GPU 0 -> 1 goes by P2P/CUMEM on 32 channel(s), planned was SHM"
    )
    silent = "\n".join(line for line in text.splitlines() if " via " not in line)
    assert rings_found(on_two, silent, {}).differences == (
        "NCCL's log does not say how it connects GPUs 0 -> 1, 1 -> 0",
    )
    assert rings_found(on_two, "nothing", {}).differences[0] == (
        "NCCL's log shows no rings over all GPUs"
    )


@given(torn(LOG.read_bytes()))
def test_no_torn_log_of_nccl_fails(on_two, text):
    found = rings_found(on_two, text, {})
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
    found = rings_found(twelve, "\n".join(lines), {})
    assert found.differences[0] == "channel 5 is 0 2 1 3, planned was 0 1 2 3"
