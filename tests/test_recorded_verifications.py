"""What `tccl verify` found on two GPUs, kept whole: read again, compared again, shown again."""

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tccl_py.cli.verify import print_verification
from tccl_py.experiments.comparison import compare
from tccl_py.experiments.record import Verification
from tccl_py.experiments.sizes import read_tunings
from tccl_py.files import decode_json
from tccl_py.report.sizes import arm_charts, size_charts, ticks_around
from tccl_py.report.verification import facts_of, headline

CASES = Path(__file__).parent / "cases" / "verification"
NAMES = ("h200x2-vm", "h200x2-vm-no-p2p-tuned", "h200x2-vm-tuned")


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def recorded(name):
    path = CASES / f"{name}.json"
    return decode_json(path.read_text(), Verification, where=str(path))


def test_all_jobs_were_right_and_ran_the_plans_rings(name):
    found = recorded(name)
    assert found.accepted
    graph = found.judged
    assert found.winner == "graph"
    assert (found.backend, graph.wrong, graph.failure) == ("cuda", (), "")
    assert graph.log_rings.same
    assert found.at_once == 4
    assert found.seconds <= 240


def test_intervals_follow_from_the_times_of_every_round_and_recorded_gains_stay_gains(name):
    default, graph = recorded(name).arms
    again = compare([one.seconds for one in graph.rows], [one.seconds for one in default.rows])
    assert graph.over(default).ratio == graph.large.ratio
    for one, compared in zip(graph.rows, again, strict=True):
        assert compared.ratio == pytest.approx(one.compared.ratio)
        assert (compared.low, compared.high) == pytest.approx((one.compared.low, one.compared.high))
        assert compared.verdict in (one.verdict, "better")


def test_raw_times_have_every_job_size_rank_and_batch(name):
    found = recorded(name)
    assert len(found.raw) == len(found.order)
    assert found.order.count("A") == found.order.count("B") >= 6
    for job in found.raw:
        assert [len(size) for size in job] == [2] * len(found.judged.sizes)
        assert {len(rank) for size in job for rank in size} == {9}


def test_a_measured_plan_is_nowhere_slower_and_faster_at_large_sizes():
    found = recorded("h200x2-vm")
    sizes = found.judged.sizes
    assert min(one.compared.low for one in sizes) >= 0.97
    large = [one for one in sizes if one.bytes >= 64 << 20]
    assert all(one.verdict == "better" and one.compared.low >= 1.01 for one in large)
    assert max((one.compared.high - one.compared.low) / 2 for one in large) <= 0.01
    # What is open is known to a few percent: jobs come in two kinds, 2 us apart.
    assert max((one.compared.high - one.compared.low) / 2 for one in sizes) < 0.05


def test_a_faster_choice_that_is_not_shown_harmless_is_left_and_the_rows_that_are_open_are_named():
    found = recorded("h100x2-vm")
    assert (found.winner, found.accepted, found.rounds) == ("default", True, 6)
    graph = found.arms[1]
    assert graph.large.low > 1.04 and not graph.losses
    assert {row.bytes for row in graph.unclear} == {1 << n for n in (10, 12, 14, 16, 18, 20)}
    assert headline(found)[0].endswith("at 64 MiB and above, but not shown to lose nothing")
    (line,) = (line for line in facts_of(found) if line.startswith("graph: not taken: "))
    assert "send/recv of 64 KiB, 1 MiB (0.99)" in line and line.endswith("--rounds --seconds`)")


def test_a_plan_for_jobs_without_p2p_is_faster_by_two_fifths_when_tuned():
    found = recorded("h200x2-vm-no-p2p-tuned")
    assert found.arms[0].environment["NCCL_P2P_DISABLE"] == "1"
    graph = found.judged
    ratios = {one.bytes >> 20: one.compared.ratio for one in graph.sizes if one.bytes >= 64 << 20}
    assert ratios == pytest.approx({64: 1.391, 256: 1.448, 1024: 1.447}, abs=0.001)
    assert not any(one.verdict == "worse" for one in graph.rows)
    assert {one.mode: one.verdict for one in graph.training} == {
        "ddp-eager": "better",
        "ddp-graph": "better",
    }
    best = max(found.tried, key=lambda one: one.achieved_gbps)
    assert (best.settings.channels, best.settings.buffsize) == (16, 128 << 10)


def test_every_line_of_a_verification_is_shown(name):
    shown = io.StringIO()
    print_verification(recorded(name), Console(file=shown, width=200))
    text = shown.getvalue()
    assert text.startswith("2x-nvidia-h200, GPUs 0,1, over NCCL")
    assert "times default NCCL at 64 MiB" in text
    assert "interleaved rounds, 4 jobs at once" in text
    assert ("a training step (ddp-graph)" in text) == (name != "h200x2-vm")


# Four H200 and three arms, plans as they were measured, not tuned.


def test_on_four_gpus_without_p2p_variables_alone_win_by_half_and_no_size_loses():
    found = recorded("h200x4-vm-no-p2p")
    assert found.accepted
    assert [one.name for one in found.arms] == ["default", "variables", "graph"]
    assert found.winner == found.recommended == "variables"
    default, variables, graph = found.arms
    assert "NCCL_GRAPH_FILE" not in variables.environment
    assert variables.large.low >= 1.40
    assert min(one.compared.ratio for one in variables.sizes) >= 0.97
    assert not any(one.compared.high < 1 for arm in (variables, graph) for one in arm.sizes)
    assert variables.groups
    assert not any(one.compared.high < 1 for one in variables.groups)
    for arm in found.arms:
        assert arm.achieved_gbps == pytest.approx(arm.predicted_gbps, rel=0.03)
        assert (arm.wrong, arm.failure) == ((), "")
        again = compare([one.seconds for one in arm.sizes], [one.seconds for one in default.sizes])
        for one, compared in zip(arm.sizes, again, strict=True):
            assert arm is default or compared.ratio == pytest.approx(one.compared.ratio)


def test_on_four_gpus_with_nvlink_a_graph_file_is_slower_nowhere_and_a_little_faster():
    found = recorded("h200x4-vm")
    assert (found.winner, found.recommended, found.accepted) == ("graph", "graph", True)
    graph = found.judged
    assert graph.log_rings.same
    assert graph.large.low >= 1.01
    assert min(one.compared.low for one in graph.sizes) >= 0.98


def test_charts_of_a_verification_have_speed_latency_and_bandwidth_of_every_choice():
    speed, latency, bandwidth = arm_charts(recorded("h200x4-vm-no-p2p"))
    assert [one.kind for one in speed.series] == ["variables", "graph"]
    assert [one.kind for one in latency.series] == ["default", "variables", "graph"]
    assert [one.kind for one in bandwidth.series] == ["default", "variables", "graph"]
    assert {chart.id for chart in (speed, latency, bandwidth)} == {
        "verified-0", "verified-1", "verified-2",
    }  # fmt: skip


def recorded_sizes():
    path = CASES.parent / "tuning" / "h200x2-vm-no-p2p.json"
    return read_tunings(path.read_text(), str(path))


def test_entries_by_size_follow_from_the_times_of_fresh_jobs_and_nothing_is_slower_than_default():
    for tuning in recorded_sizes():
        for row in tuning.rows:
            over_plan, over_default = row.over(row.plan), row.over("default")
            assert over_default is None or over_default.high > 0.99
            inside = [
                entry
                for entry in tuning.entries
                if entry.collective == row.collective
                and entry.from_bytes <= row.bytes <= entry.to_bytes
            ]
            assert bool(inside) == row.kept
            if row.kept:
                assert over_plan.low > 1
                assert row.choice.channels == inside[0].channels


def test_charts_by_size_have_speed_latency_and_bandwidth_of_each_collective():
    tunings = recorded_sizes()
    timed = {
        (number, row.collective)
        for number, tuning in enumerate(tunings)
        for row in tuning.rows
        if row.dtype == "bfloat16" and row.tuned_seconds
    }
    charts = list(size_charts(tunings))
    assert len({chart.id for chart in charts}) == len(charts) == 3 * len(timed)
    for speed, latency, bandwidth in zip(charts[::3], charts[1::3], charts[2::3], strict=True):
        kinds = [one.kind for one in latency.series]
        assert kinds == [one.kind for one in bandwidth.series]
        assert [one.kind for one in speed.series] == kinds[1:]
        assert {"default", "plan", "tuned"} <= set(kinds)


@given(st.floats(1e-6, 1e7), st.floats(1, 1e4))
def test_axes_have_few_ticks_that_enclose_all_values_whatever_their_unit(low, ratio):
    ticks = ticks_around(low, low * ratio)
    assert 2 <= len(ticks) <= 10
    assert ticks == sorted(set(ticks))
    assert ticks[0] <= low * (1 + 1e-5)
    assert ticks[-1] >= low * ratio * (1 - 1e-5)


def test_predictions_by_size_held_and_the_plugins_tables_gained_as_measured():
    tunings = recorded_sizes()
    right, asked = map(sum, zip(*(tuning.predictions for tuning in tunings), strict=True))
    assert (right, asked) == (28, 29)
    fresh = [row.fresh for tuning in tunings for row in tuning.by_plugin]
    assert len(fresh) == 18
    assert min(one.middle for one in fresh) > 0.99
    assert max(one.middle for one in fresh) > 1.15


def verdicts(found, rounds):
    """How many rows of all arms have one after so many rounds."""
    default, *arms = found.arms
    base = {(row.bytes, row.groups, row.mode): row.seconds[:rounds] for row in default.rows}
    return sum(
        one.verdict != "same"
        for arm in arms
        for one in compare(
            [row.seconds[:rounds] for row in arm.rows],
            [base[row.bytes, row.groups, row.mode] for row in arm.rows],
            arms=len(arms),
        )
    )


def test_seven_rounds_give_nearly_all_verdicts_of_ten():
    names = ("h200x2-vm", "h200x4-vm", "h200x2-vm-no-p2p-tuned", "h200x4-vm-no-p2p")
    assert sum(verdicts(recorded(name), 7) for name in names) == 31
    assert sum(verdicts(recorded(name), 10) for name in names) == 33


@pytest.mark.parametrize(
    ("name", "gain"), [("h200x2-vm-no-p2p-job", 1.18), ("h200x4-vm-no-p2p-job", 1.28)]
)
def test_a_job_gains_by_variables_that_are_not_harmless_for_all_jobs(name, gain):
    found = recorded(name)
    assert (found.winner, found.accepted) == ("default", True)
    job = found.workload
    assert job.chosen == "variables"
    assert job.choices["variables"].speed.low > gain - 0.01
    (variables,) = (arm for arm in found.arms if arm.name == "variables")
    assert variables.large.low > 1.36 and {row.collective for row in variables.losses} >= {
        "send_recv",
        "all_to_all",
    }
    assert all(arm.achieved_gbps > 0.93 * arm.predicted_gbps for arm in found.arms)
