"""The check for drift: what it measures, how seldom it is wrong, and what it points to."""

import numpy as np
import pytest
from msgspec.structs import replace

from tccl_py.delivery.fit import differences
from tccl_py.errors import InputError, MeasurementError
from tccl_py.experiments.preflight import Preflight
from tccl_py.explanation.paths import Paths
from tccl_py.health import drift as module
from tccl_py.health.drift import (
    Comparison,
    Drift,
    Effort,
    TooShortError,
    chosen_sets,
    common_spread,
    compare_sets,
    find_drift,
    gpus_of,
    join_drifts,
    link_class,
    points_to,
    prometheus_text,
)
from tccl_py.model.machine import Fingerprint, Knowledge
from tccl_py.model.measurement import Measurement
from tccl_py.model.transfer import parse_flow, parse_set, transfer_set
from tccl_py.report.check import report_check
from tccl_py.simulator.descriptions import model_for
from tccl_py.simulator.source import Simulator
from tests.cluster_plans import FOUR, ONE, PAIR, cluster_plan
from tests.drifting import Noisy, checked, exact_rates, journalled, with_slower_link
from tests.fakes import scaled
from tests.toy import toy_machine

PCIE = "intel-v100"
SMALL = 8


@pytest.fixture(scope="module")
def case():
    return journalled(PCIE)


# Statistics


def test_all_flows_alike_give_one_spread_of_all_their_freedom():
    random = np.random.default_rng(1)
    spread = common_spread([random.normal(0, 0.02, 4) for _ in range(200)])
    assert spread.variance == pytest.approx(0.02**2, rel=0.15)
    assert spread.freedom > 100


def test_flows_that_differ_keep_more_of_their_own():
    random = np.random.default_rng(1)
    sigmas = np.exp(random.normal(-4, 1, 300))
    assert common_spread([random.normal(0, s, 6) for s in sigmas]).freedom < 10


def test_without_repetition_nothing_is_certain(case):
    source = Simulator(case.model, noise=0.02)
    known = case.some[0]
    one = source.measure([known])
    assert all(row.p == 1 for row in compare_sets({known: one}, {known: one}, common_spread([])))


@pytest.mark.parametrize("between", [0.0, 0.02])
def test_noise_alone_raises_hardly_an_alarm_in_three_hundred_checks(case, between):
    """1 of 100 is allowed. `scripts/check-false-alarms` counts more of them."""
    alarms = sum(
        checked(case, noise=0.01 + 0.04 * (seed % 2), between=between, seed=seed).has_drifted
        for seed in range(150)
    )
    assert alarms <= 1


def test_p_holds_where_the_change_is_just_what_is_let_pass():
    """The worst case of the hypothesis: every flow changed by exactly 3 %."""
    random = np.random.default_rng(5)
    case_ = journalled(PCIE)
    source = Simulator(case_.model)
    texts = [one for one in case_.some if len(one) == 1][:6]
    exact = {one: source.measure([one])[0] for one in texts}

    def noisy(text, factor):
        rows = tuple(
            tuple(float(rate * factor * np.exp(random.normal(0, 0.01))) for rate in row)
            for row in exact[text].samples_gbps
        )
        return replace(exact[text], samples_gbps=rows)

    wrong = 0
    for _ in range(400):
        then = {text: [noisy(text, 1.0)] for text in texts}
        now = {text: [noisy(text, 1 / 1.03) for _ in range(3)] for text in texts}
        logs = [np.log([one.rate_gbps for one in found]) for found in now.values()]
        wrong += any(row.alarming for row in compare_sets(then, now, common_spread(logs)))
    assert wrong <= 400 * 0.03


@pytest.mark.parametrize("count", [1, 2, 5])
def test_p_values_are_adjusted_for_all_flows_that_are_compared(count):
    random, p = np.random.default_rng(3), []
    texts = [transfer_set([parse_flow(f"G0->G0->G{gpu}")]) for gpu in range(1, count + 1)]
    rates = np.exp(random.normal(0, 0.01, 6))
    for number in (1, count):
        then, now = (
            {
                key: [
                    Measurement(transfers=key, samples_gbps=((rate * factor,),), simulated=True)
                    for rate in part
                ]
                for key in texts[:number]
            }
            for part, factor in ((rates[:3], 1.0), (rates[3:], 0.94))
        )
        rows = compare_sets(then, now, common_spread([np.log(rates[:3])]))
        assert len(rows) == number
        p.append({row.p for row in rows})
    assert [*p[1]] == pytest.approx([count * min(p[0])]) and max(p[1]) < 1


@pytest.mark.parametrize("gpu", [0, 2])
@pytest.mark.parametrize("left", [0.9, 0.5])
def test_a_slower_link_is_found_and_named(case, gpu, left):
    now = exact_rates(with_slower_link(case.model, f"G{gpu}", left))
    drift = checked(case, noise=0.02, seed=7, now=now)
    assert drift.has_drifted
    # Noise hides a tenth in some sets: then one direction of the link may explain as much.
    doubt = " (downtrained?)" if left < 0.9 else ""
    assert drift.points_to.startswith(f"GPU {gpu}'s own PCIe link{doubt}")
    assert [row.ratio for row in drift.changes] == sorted(row.ratio for row in drift.changes)


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (("nvlink",), "GPU 1's NVLinks"),
        (("pci", "nvlink"), "GPU 1 by any path"),
    ],
)
def test_nvlinks_and_whole_gpus_are_told_apart(kinds, words):
    fast = journalled("h200x4-vm", 0.01)
    now = exact_rates(with_slower_link(fast.model, "G1", 0.5, kinds=kinds))
    assert checked(fast, noise=0.01, seed=1, now=now).points_to.startswith(words)


@pytest.mark.parametrize("then", [1.0, 1.5])
def test_a_change_that_does_not_come_back_is_no_alarm(case, then):
    """What another job slowed once is measured again before it is told, also if it is faster."""
    once = Disturbed(Simulator(case.model, noise=0.01, seed=3), first=3 * SMALL, then=then)
    journal = case.journal(Simulator(case.model, noise=0.01, seed=2))
    drift = find_drift(case.plan, journal, once, effort=Effort(sets=SMALL))
    assert not drift.has_drifted
    assert once.count > 3 * SMALL


class Disturbed:
    simulated = True

    def __init__(self, source, first, then):
        self.source, self.first, self.then, self.count = source, first, then, 0

    def measure(self, sets):
        (found,) = self.source.measure(sets)
        self.count += 1
        if self.count > self.first:
            return [scaled(found, self.then)]
        return [scaled(found, 0.5)]


# What is measured


def test_the_plan_comes_first_and_every_gpu_and_class_is_seen(case):
    chosen = chosen_sets(case.plan, case.journal(Simulator(case.model)), most=24, seed=0)
    flows = [hop.flow for ring in case.plan.rings for hop in ring.hops]
    assert chosen[0] == transfer_set(flows)
    assert len(chosen) == len(set(chosen)) == 24
    small = [one for one in chosen if len(gpus_of(one)) < 4]
    assert set().union(*map(gpus_of, small)) == {0, 1, 2, 3}
    classes = {link_class(case.model.machine, flow) for one in chosen for flow in one.flows}
    known = {link_class(case.model.machine, f) for one in case.some for f in one.flows}
    assert classes == known


def test_another_seed_samples_other_sets(case):
    journal = case.journal(Simulator(case.model))
    one, other = (chosen_sets(case.plan, journal, most=40, seed=seed) for seed in (0, 1))
    assert one[:10] == other[:10]
    assert one != other


class Slow:
    """A source and its clock: each measurement takes a second, starting ten."""

    simulated = True

    def __init__(self, model):
        self.source, self.now, self.asked = Simulator(model, noise=0.01), 0.0, []

    def clock(self):
        return self.now

    def measure(self, sets):
        self.now += 1.0 if self.asked else 11.0
        self.asked += map(str, sets)
        return self.source.measure(sets)


def test_the_time_is_kept_and_what_was_left_out_is_told(case):
    slow = Slow(case.model)
    journal = case.journal(Simulator(case.model, noise=0.01, seed=5))
    effort = Effort(seconds=60, sets=24)
    drift = find_drift(case.plan, journal, slow, effort=effort, clock=slow.clock)
    assert drift.seconds <= 60
    assert drift.skipped
    assert len(drift.sets) + len(drift.skipped) == 24
    assert slow.asked[0] in [str(row.transfers) for row in drift.sets]


def test_too_little_time_is_refused(case):
    slow = Slow(case.model)
    journal = case.journal(Simulator(case.model))
    with pytest.raises(TooShortError) as caught:
        find_drift(case.plan, journal, slow, effort=Effort(seconds=1), clock=slow.clock)
    assert caught.value.where == "`max_seconds`"
    assert len(caught.value.drift.skipped) == 24


def test_a_change_that_no_time_is_left_to_confirm_is_not_passed_over(case):
    slow = Slow(with_slower_link(case.model, "G0", 0.3))
    journal = case.journal(Simulator(case.model, noise=0.01, seed=5))
    # Two measurements of a set in three quarters of the time, and none after it.
    slow.now, slow.asked = 0.0, [""]
    effort = Effort(seconds=1.8)
    with pytest.raises(TooShortError, match="confirm") as caught:
        find_drift(case.plan, journal, slow, effort=effort, clock=slow.clock)
    assert caught.value.where == "`max_seconds`"


class Lost(Slow):
    def measure(self, sets):
        if "G0" in str(sets[0]):
            raise MeasurementError(f"{sets[0]}: G0 has fallen off the bus")
        return self.source.measure(sets)


def test_a_set_that_cannot_be_measured_any_more_is_drift(case):
    journal = case.journal(Simulator(case.model, noise=0.01, seed=5))
    drift = find_drift(case.plan, journal, Lost(case.model))
    assert drift.has_drifted
    assert not drift.changes
    assert all(why.endswith("G0 has fallen off the bus") for why in drift.lost.values())


def test_equal_sets_of_unlike_hosts_are_compared_and_named_apart():
    chains = {"gpu1": ((0, (0, 1, 2, 3), 1),), "gpu2": ((0, (0, 1), 1),)}
    plan = cluster_plan([("gpu1", FOUR), ("gpu2", PAIR)], chains)
    sets = [parse_set(text) for text in ("G0->G0->C0->G1->G1", "G1->G1->C0->G0->G0")]
    drifts = []
    for number, node in enumerate(plan.cluster.classes):
        model = model_for(node.machine)
        then = Noisy(exact_rates(model), noise=0.01)
        journal = {one: [then.measure([one])[0] for _ in range(4)] for one in sets}
        now = exact_rates(with_slower_link(model, "G1", 0.4) if number else model)
        drifts.append(find_drift(plan, journal, Noisy(now, noise=0.01, seed=7), number=number))
    both = join_drifts(plan, drifts)
    assert report_check(plan, Preflight(drift=both), None).sets_compared == len(both.sets)
    assert len(both.sets) == len(plan.cluster.classes) * len(sets)
    assert {(row.hosts, row.transfers) for row in both.changes} == {("pair", one) for one in sets}
    text = prometheus_text(both, {"machine": "two"}, now=0)
    changed = [line for line in text.splitlines() if line.startswith("tccl_check_set_changed")]
    flags = [line.rpartition('hosts="')[2] for line in changed]
    assert sorted(flags) == ['four"} 0', 'four"} 0', 'pair"} 1', 'pair"} 1']
    gone = [replace(one, lost={sets[0]: "gone"}) for one in drifts]
    assert join_drifts(plan, gone).lost == {sets[0]: "gone; gone"}


@pytest.mark.parametrize(("others", "families"), [((), 1), ((PAIR,), 1), ((PAIR, ONE), 2)])
def test_false_alarms_are_bounded_over_all_classes_of_hosts_and_families(others, families):
    chains = {"gpu0": ((0, (0, 1, 2, 3), 1),), "gpu1": ((0, (0, 1), 1),), "gpu2": ((0, (0,), 0),)}
    machines = [(f"gpu{at}", machine) for at, machine in enumerate((FOUR, *others))]
    machines += [("gpu9", FOUR)] * (not others)
    chains["gpu9"] = chains["gpu0"]
    plan = cluster_plan(machines, {name: chains[name] for name, _ in machines})
    sets = [parse_set(text) for text in ("G0->G0->C0->G1->G1", "G1->G1->C0->G0->G0")]
    model = model_for(plan.cluster.classes[0].machine)
    then = Noisy(exact_rates(model), noise=0.01)
    journal = {one: [then.measure([one])[0] for _ in range(4)] for one in sets}
    now = exact_rates(with_slower_link(model, "G1", 0.4))

    def chances(plan, effort):
        drift = find_drift(plan, journal, Noisy(now, noise=0.01, seed=7), effort=effort)
        return {row.flow: row.p for row in drift.rows}

    alone = cluster_plan([("a", FOUR), ("b", FOUR)], dict.fromkeys("ab", chains["gpu0"]))
    one, all_ = chances(alone, Effort()), chances(plan, Effort(families=families))
    times = (len(others) + 1) * families
    assert all_ == {flow: pytest.approx(min(1.0, times * p), abs=0) for flow, p in one.items()}
    assert min(one.values()) < 0.01


def test_a_class_of_hosts_without_time_hides_no_drift_of_another(monkeypatch):
    chains = {"gpu1": ((0, (0, 1, 2, 3), 1),), "gpu2": ((0, (0, 1), 1),)}
    plan = cluster_plan([("gpu1", FOUR), ("gpu2", PAIR)], chains)
    some = parse_set("G0->G0->G1")
    none = {"rows": (), "changes": (), "points_to": "", "skipped": (), "seconds": 1.0}
    answers = iter([Drift(**none, lost={some: "gone"}), TooShortError("confirm", [some], 1.0)])

    def find(*_, **__):
        answer = next(answers)
        if isinstance(answer, TooShortError):
            raise answer
        return answer

    monkeypatch.setattr(module, "find_drift", find)
    monkeypatch.setattr(module, "HostsSource", object)
    monkeypatch.setattr(module, "class_sources", lambda *_: [None, None])
    again = module.Remeasuring(plan, None, [{}, {}], (), extends=False)
    with pytest.raises(TooShortError) as caught:
        again.drift(Effort())
    drift = caught.value.drift
    assert (drift.lost, drift.skipped) == ({some: "gone"}, (some,))


def test_an_empty_journal_has_nothing_to_compare(case):
    with pytest.raises(InputError, match=r"^the journal: has no measurements"):
        find_drift(case.plan, {}, Slow(case.model))


# What it points to


def row(text, ratio=1.0, **more):
    p = 1.0 if ratio == 1 else 1e-9
    return Comparison(
        transfers=parse_set(text),
        flow=parse_flow(text),
        was_gbps=10.0,
        is_gbps=10 * ratio,
        p=p,
        **more,
    )


def pairs(slow):
    """All direct writes among four GPUs, two below each switch; `slow` gives their ratios."""
    return [row(f"G{i}->G{i}->G{j}", slow(i, j)) for i in range(4) for j in range(4) if i != j]


MACHINE = toy_machine(gpus=4, numa_nodes=2, per_switch=2)
PATHS = Paths(MACHINE, Knowledge())
NAMED = {
    "GPU 2's own PCIe link (downtrained?)": lambda i, j: 0.5 if 2 in (i, j) else 1,
    "GPU 1's own PCIe link (inwards)": lambda i, j: 0.5 if j == 1 else 1,
    "the uplink of switch 0000:80:00.0 (downtrained?) or the link between sockets 0 and 1 or the "
    "uplink of switch 0000:81:00.0 (downtrained?): all sets that changed use it, and 8 of the 8": (
        lambda i, j: 0.5 if i // 2 != j // 2 else 1
    ),
    "PCIe switch 0000:80:00.0": lambda i, j: 0.5 if {i, j} == {0, 1} else 1,
    "clocks, a power limit, heat": lambda i, j: 0.8,
    "GPU 3's own PCIe link (inwards): all": lambda i, j: 0.5 if j == 3 else 1,
    "more than one cause": lambda i, j: 0.5 if (i, j) in ((0, 1), (2, 3)) else 1,
    "higher clocks": lambda i, j: 2 if i == 0 else 1,
}


@pytest.mark.parametrize("words", NAMED)
def test_what_changed_sets_have_in_common_is_named(words):
    assert points_to(PATHS, pairs(NAMED[words])).startswith(words)


def test_nothing_changed_points_to_nothing():
    assert points_to(PATHS, pairs(lambda i, j: 1)) == ""


def test_bounces_can_have_a_memory_in_common():
    rows = [
        row(f"G{i}->G{i}->C{c}->G{j}->G{j}", 0.5 if c == 1 else 1)
        for c in (0, 1)
        for i in range(4)
        for j in range(4)
        if i != j
    ]
    assert points_to(PATHS, rows).startswith("the host memory of NUMA node 1")


# Whose it is

HERE = Fingerprint(gpu_uuids=("a", "b", "c", "d"), driver="570.86", numa_count=2, kernel="6.8")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"gpu_uuids": ("a", "x", "c", "d")}, "GPU 1 was b and is x"),
        ({"gpu_uuids": ("b", "a", "c", "d")}, "GPU 0 (a) has another index"),
        ({"gpu_uuids": ("a", "b", "c")}, "GPU 3 (d) is gone"),
        ({"driver": "580.1"}, "the driver was 570.86 and is 580.1"),
        (
            {"numa_count": 8},
            "it had 2 NUMA node(s) and has 8",
        ),
    ],
)
def test_another_machine_is_told_by_what_differs(change, sentence):
    other = replace(HERE, **change)
    another, _ = differences(MACHINE, HERE, other, gpus=(0, 1, 2, 3))
    assert another[0].startswith(sentence)


def test_small_differences_are_notes_and_gpus_outside_the_plan_do_not_count():
    other = Fingerprint(gpu_uuids=("a", "b", "x", "y"), driver="570.99", numa_count=2, kernel="6.9")
    another, notes = differences(MACHINE, HERE, other, gpus=(0, 1))
    assert another == []
    assert notes == ["the driver was 570.86 and is 570.99", "the kernel was 6.8 and is 6.9"]


# Metrics


def test_metrics_are_well_formed_and_labels_escaped(case):
    now = exact_rates(with_slower_link(case.model, "G2", 0.5))
    drift = checked(case, noise=0.01, seed=1, now=now)
    own = {"machine": 'a"b\\c\nd\x1b', "simulated": "true"}
    text = prometheus_text(drift, own, now=1700000000.5)
    assert 'tccl_check_drifted{machine="a\\"b\\\\c\\nd?",simulated="true"} 1\n' in text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)) == 8
    helped = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    assert helped == names
    changed = [line for line in text.splitlines() if line.startswith("tccl_check_set_changed")]
    assert sum(line.endswith(" 1") for line in changed) == len(drift.changes)
