"""Default NCCL, variables alone and a graph file: what each is worth, and which is recommended."""

import json
from itertools import permutations
from math import inf

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tccl_py.errors import InputError, MeasurementError
from tccl_py.model.machine import Knowledge, NvLink
from tccl_py.model.rings import ring_like, ring_set
from tccl_py.nccl.graph_search import default_rings
from tccl_py.nccl.settings import Settings, environment
from tccl_py.nccl.transport import hop_space
from tccl_py.nccl.view import view
from tccl_py.plan.chains import AS_GOOD, CHOICES, FailingPair, Failure, condense
from tccl_py.plan.text import summary
from tccl_py.planning.handle import load_plan
from tccl_py.planning.planner import make_plan
from tccl_py.planning.settings_search import own_gbps, rate_own
from tccl_py.readers.nccl_topology import read_nccl_topology
from tccl_py.search.problem import Budget
from tccl_py.simulator.descriptions import load_bundled, model_for
from tccl_py.simulator.source import Simulator
from tccl_py.sources.bench import bench_of
from tests.commands import tccl
from tests.nccl_cases import CASES
from tests.planned import ASUS, FEW, FOUR_GPUS, PCIE, SMALL, plan_of, replace_plan, task_on
from tests.test_reference_plans import PLANS
from tests.toy import toy_machine

RECOMMENDED = {
    "amd-v100": "variables",
    "intel-v100": "variables",
    "wrx90-16gpu-4switch": "variables",
    ASUS: "graph",
    "supermicro-h12dsg-8x3090": "graph",
    SMALL: "default",
    "nvswitch-8gpu-8nic": "default",
}


@pytest.mark.parametrize(("name", "choice"), RECOMMENDED.items())
def test_the_smallest_choice_that_is_as_good_as_the_best_is_recommended(name, choice):
    plan = load_plan(PLANS / f"{name}.json")
    assert plan.recommended == choice
    assert plan.job_settings == plan.choices[choice].settings
    assert ("graph file" in plan.advice and "No" not in plan.advice) == (choice == "graph")


def test_advice_after_a_search_that_ended_early_is_about_what_it_measured():
    machine = load_bundled(SMALL)
    few = {"subsets": False, "budget": Budget(sets=1)}
    plan = make_plan(machine.machine, machine.knowledge, Simulator(machine), **few)
    assert "before the search ended early" in plan.advice
    assert "ended early" not in plan_of(SMALL).advice


def test_three_choices_for_eight_gpus_take_no_more_than_1800_sets_with_a_local_search():
    assert load_plan(PLANS / f"{ASUS}.json").sets_measured <= 1800


RATES = st.floats(1.0, 100.0)


@given(RATES, RATES, RATES, st.floats(0.0, 0.2), st.booleans())
def test_no_choice_is_recommended_where_a_smaller_one_is_as_good(one, two, three, error, rated):
    plan = plan_of(PCIE)
    stock = msgspec.structs.replace(
        plan.choices["default"], predicted_gbps=one if rated else None, error=error
    )
    variables = msgspec.structs.replace(plan.choices["variables"], predicted_gbps=two)
    plan = replace_plan(plan, default=stock, variables=variables, rate_gbps=three)
    rates = [choice.rate_gbps or 0.0 for choice in plan.choices.values()]
    place = list(plan.choices).index(plan.recommended)
    chosen = plan.choices[plan.recommended]
    assert rates[place] * (1 + max(AS_GOOD, chosen.error)) >= max(rates)
    assert all(rate * (1 + AS_GOOD) < max(rates) for rate in rates[:place])
    assert (plan.gain("variables") is None) == (not rated)
    why = [text for _, text in summary(plan) if "<- recommended" in text]
    assert ["95 % interval" in text for text in why] == [rates[place] * (1 + AS_GOOD) < max(rates)]


HANGS = Failure(verdict="hangs", pairs=(FailingPair(0, 1),))


def failing(plan, names):
    """Return a plan whose choices of these names do not run."""
    replace, gone = msgspec.structs.replace, {"predicted_gbps": None, "fails": HANGS}
    if "default" in names:
        plan = replace_plan(plan, default=replace(plan.choices["default"], **gone))
    if "variables" in names:
        plan = replace_plan(plan, variables=replace(plan.choices["variables"], **gone))
    return replace_plan(plan, fails=HANGS if "graph" in names else None)


@given(
    st.tuples(RATES, RATES, RATES),
    st.sets(st.sampled_from(["default", "variables", "graph"])),
    st.sampled_from([None, "default", "variables", "graph"]),
)
def test_a_choice_that_runs_beats_any_that_fails(rates, names, winner):
    plan = replace_plan(plan_of(PCIE), large_buffers=None, winner=winner)
    plan = replace_plan(
        plan,
        default=msgspec.structs.replace(plan.choices["default"], predicted_gbps=rates[0]),
        variables=msgspec.structs.replace(plan.choices["variables"], predicted_gbps=rates[1]),
        rate_gbps=rates[2],
        bound_gbps=None,
    )
    running = dict(zip(plan.choices, rates, strict=True))
    running = {name: rate for name, rate in running.items() if name not in names}
    plan = failing(plan, names)
    assert {name for name, choice in plan.choices.items() if choice.rate_gbps is None} == names
    if not running:
        assert plan.advice == "No choice runs: NCCL fails (hangs)."
        return
    assert plan.recommended in running
    if winner is None:
        good = [name for name, rate in running.items() if rate * 1.01 >= max(running.values())]
        assert plan.recommended == good[0]
    elif winner in running:
        assert plan.recommended == winner
    assert ("default NCCL hangs here" in plan.advice) == ("default" in names)


def test_a_choice_that_fails_is_told_with_its_pairs_and_never_has_a_rate(tmp_path):
    plan = replace_plan(plan_of(PCIE), large_buffers=None)
    plan = failing(plan, {"default"})
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    made = plan.to_dict()["choices"]
    assert made["default"]["rate_gbps"] is None
    assert made["default"]["fails"] == {"verdict": "hangs", "pairs": ({"from": 0, "to": 1},)}
    assert "fails" not in made["variables"]
    lines = dict(summary(plan))
    assert lines["default NCCL"].startswith("fails (hangs): ")
    graph = failing(plan, {"default", "variables"})
    assert "<- recommended: the smallest that runs" in dict(summary(graph))["graph file"]
    rated = msgspec.structs.replace(plan.choices["default"], predicted_gbps=1.0)
    replace_plan(plan, default=rated).save(tmp_path / "wrong.json")
    with pytest.raises(InputError, match="rate of a choice that fails"):
        load_plan(tmp_path / "wrong.json")


@pytest.mark.parametrize("name", FOUR_GPUS)
def test_variables_do_at_least_as_well_as_any_p2p_level_with_the_rings_that_nccl_picks(name):
    model = load_bundled(name)
    best = plan_of(name).choices["variables"].rate_gbps
    for level in (None, "SYS", "PHB", "PXB", "LOC"):
        settings = Settings(p2p_level=level)
        found = default_rings(view(model.machine, model.knowledge, settings))
        orders = condense(found.rings)
        for count in (found.channels, 16, 32):
            changed = msgspec.structs.replace(
                settings,
                channels=found.channels // 2,
                min_channels=count if count > found.channels else None,
            )
            space = hop_space(
                view(model.machine, model.knowledge, changed), rings_in_set=len(orders)
            )
            rings = ring_set([ring_like(space, order) for order in orders])
            (measured,) = Simulator(model).measure([rings.flows])
            assert best * (1 + AS_GOOD) >= len(orders) * measured.rate_gbps


def test_default_nccl_that_would_go_over_nics_is_not_rated_and_no_gain_is_claimed():
    machine = read_nccl_topology(CASES / "nccl-cases" / "amd4nogdr.xml")
    plan = make_plan(machine, Knowledge(), Simulator(model_for(machine)), budget=FEW)
    assert plan.choices["default"].rate_gbps is None
    assert "over their NICs" in plan.choices["default"].note
    assert plan.gain(plan.recommended) is None
    assert "default NCCL" not in plan.advice
    assert environment(plan.job_settings)["NCCL_NET_DISABLE_INTRA"] == "1"


def test_default_nccl_that_goes_through_another_gpu_is_not_rated_and_stays():
    # GPUs 1 and 2 have NVLink to GPU 0 alone, and no P2P.
    knowledge = Knowledge(peer_access_default=False, peer_access_provenance="reported")
    ends = permutations(("G0", "G1", "G2"), 2)
    links = tuple(NvLink(source=a, target=b, count=1) for a, b in ends if "G0" in (a, b))
    machine = msgspec.structs.replace(toy_machine(gpus=3, numa_nodes=2), nvlinks=links)
    source = Simulator(msgspec.structs.replace(model_for(machine), knowledge=knowledge))
    plan = make_plan(machine, knowledge, source, budget=FEW)
    assert "through the memory of another" in plan.choices["default"].note
    assert (plan.choices["default"].rate_gbps, plan.recommended) == (None, "default")
    # Neither does any set of GPUs gain over it.
    task = task_on(machine, knowledge, source)
    assert own_gbps(task, Settings()) == inf


def test_no_set_of_gpus_gains_over_rings_that_could_not_be_measured(monkeypatch):
    model = load_bundled("amd-3090")
    source = bench_of(Simulator(model))
    task = task_on(model.machine, model.knowledge, source, gpus=(0, 1))
    assert 0 < own_gbps(task, Settings()) < inf

    def lost(sets):
        raise MeasurementError("GPU 1 is lost")

    monkeypatch.setattr(source, "measure", lost)
    assert own_gbps(task, Settings()) == inf


def test_the_json_has_what_scripts_rely_on():
    result = tccl("show", str(PLANS / f"{ASUS}.json"), "--json")
    shown = json.loads(result.stdout)
    assert shown["recommended"] == "graph"
    assert list(shown["choices"]) == [name for name in CHOICES if name != "large-buffers"]
    for choice in shown["choices"].values():
        assert {"rate_gbps", "settings", "environment", "rings", "note"} <= set(choice)
    assert shown["choices"]["graph"]["rate_gbps"] == shown["rate_gbps"]
    assert shown["choices"]["graph"]["environment"] == {"NCCL_P2P_LEVEL": "SYS"}


@given(
    st.lists(
        st.tuples(st.sampled_from((1.0, 1.005, 1.02, 1.06, 1.3)), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    st.randoms(),
)
@settings(max_examples=30, deadline=None)
def test_the_variables_are_the_fewest_of_those_within_a_percent_of_the_best(rates, chance):
    model = load_bundled(PCIE)
    task = task_on(model.machine, model.knowledge, Simulator(model))
    default = rate_own(task, lambda task, default: iter(())).own["default"]
    kinds = [
        {},
        {"p2p_level": "SYS"},
        {"min_channels": 8},
        {"p2p_level": "SYS", "min_channels": 16},
        {"p2p_level": "SYS", "min_channels": 32, "buffsize": 131072},
    ]
    made = [
        msgspec.structs.replace(
            default,
            settings=msgspec.structs.replace(default.settings, **chance.choice(kinds)),
            rate_gbps=default.rate_gbps * rate,
        )
        for rate, _ in rates
    ]
    found = rate_own(task, lambda task, default: iter(made)).own["variables"]
    tried = [default, *made]
    most = max(one.rate_gbps for one in tried)
    near = [one for one in tried if one.rate_gbps * 1.01 >= most]
    fewest = min(len(environment(one.settings)) for one in near)
    assert len(environment(found.settings)) == fewest
    assert found.settings in [one.settings for one in near]


@pytest.mark.parametrize("name", ["amd-v100", "intel-v100", "h200x4-vm"])
def test_sets_of_gpus_gain_nothing_by_rings_that_are_as_fast_as_nccls_own(name):
    sets = plan_of(name).subsets
    assert len(sets) == 10 and not any(one.gains for one in sets)
