"""Plans for hosts whose jobs all have a variable that turns NCCL's P2P off or limits it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import msgspec
import pytest

from tccl_py.errors import InputError
from tccl_py.explanation.explain import by_mechanism, explain, ring_flows
from tccl_py.model.machine import Knowledge
from tccl_py.model.reports import HostReport, cluster_of
from tccl_py.model.rings import direct_write, ring_like, ring_set
from tccl_py.nccl.graph_search import default_rings, default_rings_or_sys
from tccl_py.nccl.settings import Settings, pinned_level, pinned_values
from tccl_py.nccl.transport import (
    candidates,
    expressible,
    hop_space,
    mechanism_flow,
    pair_mechanism,
)
from tccl_py.nccl.validator import validate
from tccl_py.nccl.view import direct_pairs, view
from tccl_py.plan.chains import condense
from tccl_py.plan.directory import nccl_files
from tccl_py.planning.handle import load_plan
from tccl_py.planning.planner import make_cluster_plan, make_plan
from tccl_py.planning.request import DEFAULT_BUDGET, not_pinned
from tccl_py.search.problem import Budget
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator
from tccl_py.sources.bench import Bench
from tccl_py.tccl_fork import fork_file
from tests.commands import tccl
from tests.nccl_nodes import with_nics
from tests.planned import (
    ASUS,
    FEW,
    FOUR_GPUS,
    PCIE,
    SEVERAL_GPUS,
    SMALL,
    WRX,
    WRX_BUDGET,
    plan_of,
    through,
)
from tests.tccl_runtime import parse_tccl_xml
from tests.toy import toy_machine

OFF = {"NCCL_P2P_DISABLE": "1"}
NEAR = {"NCCL_P2P_LEVEL": "PIX"}
NICS = "nvswitch-8gpu-8nic"
MADE = {}


def kept_plan(name, kept=OFF, **more):
    """The plan of a bundled machine whose jobs all have these variables, each made once."""
    key = name, tuple(kept.items()), tuple(sorted(more.items()))
    if key not in MADE:
        model = load_bundled(name)
        # Of four GPUs the plan is compared with the best there is.
        budget = DEFAULT_BUDGET if name in FOUR_GPUS else WRX_BUDGET if name == WRX else FEW
        source = Simulator(model)
        MADE[key] = make_plan(
            model.machine,
            model.knowledge,
            source,
            pinned_env=kept,
            budget=budget,
            subsets=name != WRX or None,
            **more,
        )
    return MADE[key]


def flows_of(plan):
    return [hop.flow for ring in plan.rings for hop in ring.hops]


class Asked(Simulator):
    """A simulator that knows what it was asked."""

    def __init__(self, model):
        super().__init__(model)
        self.sets = []

    def measure(self, sets):
        self.sets += sets
        return super().measure(sets)


@pytest.mark.parametrize(
    ("given", "read", "level"),
    [
        (OFF, OFF, "LOC"),
        ({"NCCL_P2P_LEVEL": "PIX"}, {"NCCL_P2P_LEVEL": "PIX"}, "PIX"),
        ({"NCCL_P2P_LEVEL": "0"}, {"NCCL_P2P_LEVEL": "LOC"}, "LOC"),
        ({"NCCL_P2P_LEVEL": "SYS"}, {"NCCL_P2P_LEVEL": "SYS"}, "SYS"),
        ({"NCCL_P2P_LEVEL": "7"}, {"NCCL_P2P_LEVEL": "SYS"}, "SYS"),
        ({"NCCL_P2P_LEVEL": "PHB", **OFF}, {**OFF, "NCCL_P2P_LEVEL": "PHB"}, "LOC"),
    ],
)
def test_variables_of_how_far_p2p_goes_are_kept_as_nccl_reads_them(given, read, level):
    assert pinned_values(given, where="kept") == read
    assert pinned_level(read) == level


@pytest.mark.parametrize(
    ("given", "name", "what"),
    [
        ({"NCCL_ALGO": "Ring"}, "'NCCL_ALGO'", "no variable"),
        ({"NCCL_P2P_DISABLE": "0"}, "NCCL_P2P_DISABLE", "'0'"),
        ({"NCCL_P2P_DISABLE": "yes"}, "NCCL_P2P_DISABLE", "'yes'"),
        ({"NCCL_P2P_LEVEL": "pix"}, "NCCL_P2P_LEVEL", "'pix'"),
        ({"NCCL_P2P_LEVEL": ""}, "NCCL_P2P_LEVEL", "''"),
        # Prefixes and exclusions name other NICs on other hosts.
        ({"NCCL_IB_HCA": "mlx5_1"}, "NCCL_IB_HCA", "'mlx5_1'"),
        ({"NCCL_IB_HCA": "^mlx5_1"}, "NCCL_IB_HCA", "'^mlx5_1'"),
        ({"NCCL_IB_HCA": "=mlx5_1;"}, "NCCL_IB_HCA", "'=mlx5_1;'"),
    ],
)
def test_what_says_nothing_of_p2p_is_refused_in_one_sentence(given, name, what):
    with pytest.raises(InputError) as error:
        pinned_values(given, where="--pin-env")
    assert error.value.where == f"--pin-env {name}"
    assert what in error.value.what


def saved(tmp_path, **changes):
    """The file of a plan in which some fields are others; None takes one out."""
    path = tmp_path / "plan.json"
    plan_of(SMALL).save(path)
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: one for name, one in fields.items() if one is not None}))
    return path


def test_a_plan_of_before_there_were_kept_variables_loads(tmp_path):
    assert load_plan(saved(tmp_path, pinned_env=None)) == plan_of(SMALL)
    assert load_plan(tmp_path).pinned_env == {}


@pytest.mark.parametrize(
    ("kept", "what"),
    [
        ({"PATH": "/"}, "pinned_env 'PATH': is no variable"),
        ({"NCCL_P2P_LEVEL": "far"}, "pinned_env NCCL_P2P_LEVEL: is 'far'"),
        ({"NCCL_P2P_LEVEL": "0"}, "pinned_env: has values"),
        ({"NCCL_P2P_LEVEL": "PIX"}, "is for jobs with NCCL_P2P_LEVEL=PIX"),
        ({"NCCL_IB_HCA": "=a"}, "is for jobs with NCCL_IB_HCA"),
    ],
)
def test_a_plan_whose_settings_are_not_those_of_its_kept_variables_is_refused(kept, what, tmp_path):
    with pytest.raises(InputError) as error:
        load_plan(saved(tmp_path, pinned_env=kept))
    assert what in str(error.value)
    assert "\n" not in str(error.value)


def test_other_settings_that_a_plan_compares_must_keep_to_its_variables_too(tmp_path):
    plan = plan_of(SMALL)
    settings = msgspec.structs.replace(plan.settings, p2p_level="LOC")
    choices = msgspec.to_builtins(plan.with_choice("graph", settings=settings).choices)
    path = saved(tmp_path, pinned_env=OFF, choices=choices)
    with pytest.raises(InputError, match=r"is for jobs with NCCL_P2P_DISABLE=1"):
        load_plan(path)


# Planning.


def test_only_settings_of_the_level_that_all_jobs_have_are_candidates():
    model = load_bundled(ASUS)
    for level in ("LOC", "PIX"):
        assert {one.p2p_level for one in expressible("2.30", p2p_level=level)} == {level}
        found = candidates(model.machine, model.knowledge, "2.28", p2p_level=level)
        assert {one.p2p_level for one in found} == {level}
        # What tells them apart is what told them apart among all levels.
        assert len(found) == len({msgspec.json.encode(one) for one in found}) > 1


@pytest.mark.parametrize("name", SEVERAL_GPUS)
def test_where_p2p_is_off_all_that_a_plan_speaks_of_bounces(name):
    plan = kept_plan(name)
    assert plan.pinned_env == OFF
    assert {one.settings.p2p_level for one in plan.alternatives} == {"LOC"}
    assert plan.settings.p2p_level == "LOC"
    assert all(flow.is_bounce for flow in flows_of(plan))
    assert plan.rate_gbps >= plan.choices["variables"].rate_gbps * (1 - 1e-9)
    assert (
        plan.choices["variables"].settings.p2p_level
        == plan.choices["default"].settings.p2p_level
        == "LOC"
    )
    default = [one for one in ring_flows(plan) if one.name == "default"]
    assert all(flow.is_bounce for one in default for flow in one.flows)


@pytest.mark.parametrize("name", SEVERAL_GPUS)
def test_stock_is_what_nccl_does_with_the_variable_too(name):
    plan, model = kept_plan(name), load_bundled(name)
    choice = default_rings(view(model.machine, model.knowledge, Settings(p2p_level="LOC")))
    assert plan.choices["default"].rings == choice.rings
    assert "NCCL_P2P_LEVEL" not in plan.choices["default"].note
    assert ("simple order" in plan.choices["default"].note) == choice.fallback
    if "over their NICs" in plan.choices["default"].note:
        assert plan.choices["default"].rate_gbps is None
        return
    orders = condense(choice.rings)
    settings = Settings(p2p_level="LOC", channels=max(1, choice.channels // 2))
    space = hop_space(view(model.machine, model.knowledge, settings), rings_in_set=len(orders))
    rings = ring_set([ring_like(space, order) for order in orders])
    (measured,) = Simulator(model).measure([rings.flows])
    assert plan.choices["default"].rate_gbps == pytest.approx(len(orders) * measured.rate_gbps)


def test_a_level_stays_though_the_search_falls_back_under_it():
    model = load_bundled(ASUS)
    own = default_rings(view(model.machine, model.knowledge, Settings(p2p_level="LOC")))
    assert (own.fallback, own.settings.p2p_level) == (True, "LOC")
    slow = with_nics(toy_machine(gpus=2), {1: "G0", 0: "G1"}, speed_mbps=100)
    chains = default_rings_or_sys(view(slow, Knowledge(), Settings(p2p_level="PIX")), nodes=2)
    assert (chains.fallback, chains.settings.p2p_level) == (True, "PIX")


def test_where_nccl_would_go_over_its_nics_it_is_not_rated_and_no_gain_is_claimed():
    plan = kept_plan(NICS)
    assert plan.choices["default"].rate_gbps is None
    assert "over their NICs" in plan.choices["default"].note
    assert plan.choices["variables"].settings.net_disable_intra
    assert plan.gain(plan.recommended) is None
    assert "x default NCCL" not in plan.advice
    assert kept_plan(SMALL).choices["default"].note == ""


@pytest.mark.parametrize("name", [ASUS, SMALL])
@pytest.mark.parametrize("kept", [OFF, NEAR])
def test_nccl_uses_the_files_of_such_a_plan_and_moves_bytes_as_planned(name, kept):
    plan = kept_plan(name, kept)
    files = nccl_files(plan, Path("/plan"))
    said = "NCCL_P2P_DISABLE=1" if kept == OFF else "NCCL_P2P_LEVEL=PIX"
    assert said in files["nccl.conf"].splitlines()
    assert f"export {said}" in files["env.sh"].splitlines()
    verdict = validate(
        files["graph.xml"],
        plan.machine,
        plan.knowledge,
        gpus=plan.gpus,
        version=plan.settings.version,
        environment=dict(kept),
        where="graph.xml",
    )
    assert verdict.verdict == "used", verdict.reason
    seen = view(plan.machine, plan.knowledge, plan.settings)
    for flow in flows_of(plan):
        source, target = flow.source.index, flow.destination.index
        way = pair_mechanism(seen, source, target)
        flows = mechanism_flow(seen, way, source, target, blocks=flow.blocks or 1)
        assert str(flows) == str(flow)


@pytest.mark.parametrize("name", [ASUS, *FOUR_GPUS])
def test_every_subset_bounces_too_and_gets_what_the_simulator_says(name):
    plan, model = kept_plan(name), load_bundled(name)
    assert len(plan.subsets) == 2 ** len(plan.gpus) - len(plan.gpus) - 2
    for subset in plan.subsets[:: max(1, len(plan.subsets) // 12)]:
        space = hop_space(
            view(model.machine, model.knowledge, plan.settings, gpus=subset.gpus),
            rings_in_set=len(subset.rings),
        )
        space = through(space, subset)
        rings = ring_set([ring_like(space, order) for order in subset.rings])
        assert all(flow.is_bounce for flow in rings.flows.flows)
        (measured,) = Simulator(model).measure([rings.flows])
        rate = len(subset.rings) * measured.rate_gbps
        assert subset.rate_gbps == pytest.approx(rate)


def sets_of_orders(gpus, count):
    """All sets of so many rings, the first of which begins where it likes."""
    first, *rest = gpus
    orders = [(first, *order) for order in itertools.permutations(rest)]
    return itertools.combinations_with_replacement(orders, count)


@pytest.mark.parametrize(
    ("name", "kept"), [(SMALL, OFF), (PCIE, OFF), ("intel-v100", {"NCCL_P2P_LEVEL": "PHB"})]
)
def test_a_plan_is_as_good_as_the_best_of_all_rings_and_settings(name, kept):
    plan, model = kept_plan(name, kept, ring_counts=(1, 2)), load_bundled(name)
    source, best = Bench(Simulator(model)), 0.0
    kinds = candidates(
        model.machine,
        model.knowledge,
        p2p_level=pinned_level(kept),
    )
    changes = [{"channels": n, "buffsize": size} for n in (2, 8) for size in (1 << 22, 1 << 20)]
    # Copy engines are what no plan predicts.
    for kind, change in itertools.product(kinds, changes):
        settings = msgspec.structs.replace(kind, **change)
        if settings.p2p_copy_engine:
            continue
        for count in (1, 2):
            space = hop_space(view(model.machine, model.knowledge, settings), rings_in_set=count)
            for orders in sets_of_orders(plan.gpus, count):
                rings = ring_set([ring_like(space, order) for order in orders])
                (measured,) = source.measure([rings.flows])
                best = max(best, count * measured.rate_gbps)
    assert plan.rate_gbps >= best * 0.98


def test_a_free_choice_goes_no_farther_than_the_level():
    model = load_bundled(ASUS)
    direct = direct_pairs(model.machine, model.knowledge, "PIX", gpus=model.machine.gpu_indices)
    assert 0 < len(direct) < 8 * 7
    assert direct_pairs(model.machine, model.knowledge, None, gpus=(0, 1)) is None


def test_a_level_that_a_version_takes_for_none_is_refused():
    with pytest.raises(InputError, match=r"p2p_level is P2C"):
        kept_plan(SMALL, {"NCCL_P2P_LEVEL": "P2C"}, version="2.18")


# What is made of such a plan.


def test_an_explanation_asks_for_no_transfer_that_jobs_cannot_have():
    source, plan = Asked(load_bundled(SMALL)), kept_plan(SMALL)
    assert explain(plan, source, max_sets=60).rings
    assert source.sets
    assert all(flow.is_bounce for one in source.sets for flow in one.flows)
    assert by_mechanism(plan, direct_write(0, 1), "direct read") is None
    assert by_mechanism(plan_of(SMALL), direct_write(0, 1), "direct read") is not None


def test_the_database_of_the_fork_keeps_to_it():
    written = parse_tccl_xml(fork_file(kept_plan(SMALL)).text)
    kinds = {one.type for ring in written.intra for one in ring.transfers}
    assert kinds
    assert not any("GPUMEM" in kind for kind in kinds)


# Clusters.


def test_a_clusters_plan_keeps_to_it_on_every_host(tmp_path):
    model = load_bundled(NICS)
    hosts = [HostReport(host=f"h{n}", machine=model.machine, slots=4) for n in range(2)]
    cluster = cluster_of(hosts, where="test")
    plan = make_cluster_plan(
        cluster, [Simulator(model)], budget=Budget(sets=40, idle_sets=10), pinned_env=OFF
    )
    assert (plan.pinned_env, plan.settings.p2p_level) == (OFF, "LOC")
    inner = [h.flow for path in plan.paths for c in path.chains for h in c.hops[1:-1]]
    assert inner
    assert all(flow.is_bounce for flow in inner)
    assert plan.rate_gbps >= (plan.choices["default"].rate_gbps or 0.0) * (1 - 1e-9)
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path) == plan
    fields = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({**fields, "pinned_env": NEAR}))
    with pytest.raises(InputError, match=r"is for jobs with NCCL_P2P_LEVEL=PIX"):
        load_plan(tmp_path)


def test_pinned_nics_leave_the_level_to_the_plan(tmp_path):
    pinned = {"NCCL_IB_HCA": "=mlx5_0"}
    plan = make_plan("amd-v100", budget=Budget(sets=40, idle_sets=5), pinned_env=pinned)
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path) == plan and plan.settings.p2p_level == "SYS"
    assert all(way.environment["NCCL_IB_HCA"] == "=mlx5_0" for way in plan.choices.values())


# The command.


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A plan by the command, where P2P is off."""
    place = tmp_path_factory.mktemp("kept") / "plan"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_P2P_DISABLE", "1")
        result = tccl(
            "plan",
            place,
            "--simulate",
            SMALL,
            "--pin-env",
            "NCCL_P2P_DISABLE",
            "--nccl",
            "2.28",
        )
    assert result.exit_code == 0, result.output
    return place


def test_variables_that_are_set_and_not_planned_for_are_told(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("NCCL_P2P_LEVEL", "far")
    said = "NCCL_P2P_DISABLE=1 is set here and is not planned for: if all jobs have it, "
    assert not_pinned(()) == (f"{said}pin it by `tccl plan --pin-env NCCL_P2P_DISABLE`",)
    assert not_pinned(("NCCL_P2P_DISABLE",)) == ()
