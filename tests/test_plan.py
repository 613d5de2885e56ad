"""Plans: never below stock, true to the runtime they are for, and safe to load again."""

from collections import Counter
from itertools import product
from pathlib import Path

import msgspec
import pytest

from tccl_py.errors import InputError, MeasurementError
from tccl_py.model.machine import Knowledge
from tccl_py.model.symmetry import automorphisms
from tccl_py.model.transfer import transfer_set
from tccl_py.nccl.graph_file import parse_graph_file
from tccl_py.nccl.settings import environment
from tccl_py.nccl.system import PathType
from tccl_py.nccl.transport import hop_space, mechanism_flow, pair_mechanism
from tccl_py.nccl.validator import validate
from tccl_py.nccl.versions import ASSUMED, known_versions
from tccl_py.nccl.view import view
from tccl_py.plan.chains import per_channel
from tccl_py.plan.directory import nccl_files
from tccl_py.plan.text import show_plan, summary
from tccl_py.planning.handle import load_plan
from tccl_py.planning.parts import subsets
from tccl_py.planning.planner import make_plan
from tccl_py.search.problem import Budget, SearchProblem
from tccl_py.search.strategies import find_rings
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator
from tests.fakes import Impatient
from tests.networked import MadeUp
from tests.planned import (
    ASUS,
    FEW,
    FOUR_GPUS,
    PCIE,
    SEVERAL_GPUS,
    SMALL,
    WRX,
    plan_of,
    replace_plan,
)
from tests.reference_strategies import brute_force
from tests.report_pages import PLANS
from tests.toy import toy_machine

VERSIONS = known_versions()


ANYWHERE = Path("/plan")
FILES = {}


def files_of(plan):
    """What NCCL reads of a plan, written once for each."""
    if id(plan) not in FILES:
        FILES[id(plan)] = nccl_files(plan, ANYWHERE)
    return FILES[id(plan)]


def of_version(name, version):
    """A plan for a version; a small one where it is not the latest."""
    return plan_of(name) if version == ASSUMED else plan_of(name, version=version, budget=FEW)


def turned(ring):
    """A ring from its lowest number on, so that rings can be compared."""
    start = ring.index(min(ring))
    return (*ring[start:], *ring[:start])


def assert_used(plan, name, text):
    """NCCL uses the file for exactly its GPUs, and runs exactly its rings."""
    gpus = plan.gpus
    if name != "graph.xml":
        gpus = tuple(int(gpu) for gpu in name.split("graph-")[1].removesuffix(".xml").split("-"))
    verdict = validate(
        text,
        plan.machine,
        plan.knowledge,
        gpus=gpus,
        version=plan.settings.version,
        environment=environment(plan.settings),
        where=name,
    )
    assert verdict.verdict == "used", f"{name}: {verdict.reason}"
    orders = per_channel(plan.subset(gpus).rings, plan.settings.channels)
    final = [turned(tuple(gpus[rank] for rank in ring)) for ring in verdict.rings]
    assert final == [turned(orders[i % len(orders)]) for i in range(len(final))]
    for graph in parse_graph_file(text, where=name, version=plan.settings.version).values():
        assert all(sorted(channel.gpus) == sorted(gpus) for channel in graph.channels)


@pytest.mark.parametrize("name", SEVERAL_GPUS)
def test_a_plan_is_never_below_stock_and_its_rate_is_that_of_its_slowest_hop(name):
    plan = plan_of(name)
    assert plan.rate_gbps >= plan.choices["default"].rate_gbps
    assert plan.bound_gbps is None or plan.bound_gbps >= plan.rate_gbps
    slowest = min(ring.rate_gbps for ring in plan.rings)
    assert plan.rate_gbps == pytest.approx(len(plan.rings) * slowest)
    for ring in plan.rings:
        assert sorted(ring.gpus) == list(plan.gpus) == list(plan.machine.gpu_indices)
        assert [hop.target for hop in ring.hops] == [*ring.gpus[1:], ring.gpus[0]]
        assert ring.bottleneck in ring.hops
        assert (
            ring.rate_gbps == ring.bottleneck.rate_gbps == min(hop.rate_gbps for hop in ring.hops)
        )


@pytest.mark.parametrize("name", SEVERAL_GPUS)
def test_the_rates_of_a_plan_are_what_the_simulator_says_of_its_flows(name):
    plan = plan_of(name)
    wanted = transfer_set(hop.flow for ring in plan.rings for hop in ring.hops)
    (measured,) = Simulator(load_bundled(name)).measure([wanted])
    rates = sorted((str(hop.flow), hop.rate_gbps) for ring in plan.rings for hop in ring.hops)
    expected = sorted(zip(map(str, wanted.flows), measured.gbps, strict=True))
    assert [flow for flow, _ in rates] == [flow for flow, _ in expected]
    assert [rate for _, rate in rates] == pytest.approx([rate for _, rate in expected])


@pytest.mark.parametrize("name", FOUR_GPUS)
@pytest.mark.parametrize("version", VERSIONS)
def test_nccl_uses_every_graph_file_of_a_plan_for_four_gpus(name, version):
    plan = of_version(name, version)
    graphs = {name: text for name, text in files_of(plan).items() if name.endswith(".xml")}
    assert len(graphs) == 1 + len(plan.subsets) == 11
    for file, text in graphs.items():
        assert_used(plan, file, text)


@pytest.mark.parametrize("name", SEVERAL_GPUS)
def test_nccl_uses_a_sample_of_the_graph_files_of_every_plan(name):
    plan = plan_of(name)
    graphs = sorted(name for name in files_of(plan) if name.endswith(".xml"))
    for file in [*graphs[::31], "graph.xml"]:
        assert_used(plan, file, files_of(plan)[file])


@pytest.mark.parametrize("name", SEVERAL_GPUS)
def test_up_to_eight_gpus_every_subset_has_rings_and_above_none_is_planned_ahead(name):
    plan = plan_of(name)
    count = len(plan.gpus)
    assert len(plan.subsets) == (2**count - count - 2 if count <= 8 else 0)
    for subset in plan.subsets:
        assert all(sorted(ring) == list(subset.gpus) for ring in subset.rings)


@pytest.mark.parametrize(
    ("name", "pinned", "recommended"),
    [(PCIE, {}, "graph"), (SMALL, {}, "default"), (SMALL, {"NCCL_P2P_DISABLE": "1"}, "variables")],
)
def test_smaller_sets_have_rings_where_graph_files_are_recommended(name, pinned, recommended):
    plan, everywhere = (
        make_plan(name, pinned_env=pinned, subsets=subsets) for subsets in (None, True)
    )
    assert (plan.recommended, plan.rings) == (recommended, everywhere.rings)
    groups = [one.gpus for one in everywhere.subsets if one.rings]
    assert len(groups) == 10
    if recommended == "graph":
        assert plan.subsets == everywhere.subsets
        return
    # The plugin gives variables to single communicators: they need ratings, and no rings.
    assert [one.gpus for one in plan.subsets] == groups * (recommended == "variables")
    assert not any(one.rings or plan.subset(one.gpus) for one in plan.subsets)
    assert [name for name in nccl_files(plan, ANYWHERE) if name.endswith(".xml")] == ["graph.xml"]


def test_smaller_sets_leave_the_sets_that_show_the_machines_limit():
    plan = plan_of(ASUS, subsets=None, budget=Budget(sets=500, idle_sets=20))
    assert plan.recommended == "graph"
    assert plan.cut_short
    assert plan.limit_gbps is not None


@pytest.mark.parametrize(
    ("name", "version"),
    sorted({*product(FOUR_GPUS, VERSIONS), *product(SEVERAL_GPUS, [ASSUMED])}),
)
def test_the_flows_of_a_plan_are_the_transports_that_nccl_takes(name, version):
    plan = of_version(name, version)
    seen = view(plan.machine, plan.knowledge, plan.settings, gpus=plan.gpus)
    farthest = PathType.LOC
    for hop in (hop for ring in plan.rings for hop in ring.hops):
        way = pair_mechanism(seen, hop.source, hop.target)
        blocks = hop.flow.blocks
        node = hop.flow.through if plan.settings.shm_placement else None
        flow = mechanism_flow(seen, way, hop.source, hop.target, blocks=blocks, node=node)
        assert flow == hop.flow
        farthest = max(farthest, seen.paths[f"G{hop.source}", f"G{hop.target}"].type)
    assert plan.paths[0].type_intra == farthest.name


@pytest.mark.parametrize("name", FOUR_GPUS)
def test_nccl_2_18_gets_at_most_16_channels(name):
    plan = of_version(name, "2.18")
    assert plan.settings.version == "2.18"
    assert plan.settings.channels <= 16
    assert all(other.settings.channels <= 16 for other in plan.alternatives)
    assert not plan.notices


def test_a_version_that_was_not_checked_is_said_to_be_unverified():
    plan = of_version(SMALL, "2.21.5")
    assert not plan.settings_verified
    assert plan.notices == ("NCCL 2.21.5 is taken for 2.18, the nearest version that was checked",)
    assert plan_of(SMALL).settings_verified


def test_a_version_is_planned_by_its_numbers():
    assert plan_of(SMALL, version="v2.30.7-1", budget=FEW).settings.version == "2.30.7"


def test_a_number_of_rings_that_does_not_come_about_is_told():
    model = load_bundled(SMALL)
    source = Simulator(model)
    plan = make_plan(model.machine, model.knowledge, source, ring_counts=(3,), budget=FEW)
    assert len(plan.rings) != 3
    (notice,) = plan.notices
    assert notice.startswith("sets of 3 rings were asked")
    asked = make_plan(model.machine, model.knowledge, source, ring_counts=(1,), budget=FEW)
    assert (len(asked.rings), asked.notices) == (1, ())


@pytest.mark.parametrize("name", SEVERAL_GPUS)
def test_a_saved_plan_loads_equal(name, tmp_path):
    plan = plan_of(name)
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == load_plan(tmp_path) == plan


@pytest.mark.parametrize("name", SEVERAL_GPUS)
def test_every_file_of_a_simulated_plan_says_so(name):
    plan = plan_of(name)
    assert plan.simulated
    mark = "simulated from assumed values" if plan.assumed else "simulated"
    for file, text in files_of(plan).items():
        assert f"rates {mark}" in text.splitlines()[0], file


def test_assumed_values_are_told_of_the_choices_that_they_lie_behind():
    plan = load_plan(PLANS / f"{ASUS}.json")
    assert {name: one.assumed for name, one in plan.choices.items()} == {
        "default": True,
        "variables": False,
        "graph": False,
    }
    shown, mark = dict(summary(plan)), "(simulated from assumed values)"
    assert mark in shown["default NCCL"]
    assert "(simulated)" in shown["graph file"] and "(simulated)" in shown["variables only"]
    # A ratio rests on both rates.
    assert f"default NCCL {mark}" in plan.advice
    assert show_plan(plan).choices["default"].assumed
    # Files of the recommended variables are not marked by the graph file's rates.
    other = replace_plan(plan, assumed=True, winner="variables")
    files = nccl_files(other, ANYWHERE)
    assert other.provenance == "simulated"
    for name, basis in {"nccl.conf": "simulated.", "graph.xml": mark[1:-1]}.items():
        assert f"rates {basis}" in files[name].splitlines()[0]


def test_a_measured_plan_does_not_say_that_it_is_simulated():
    source = StandingStill(load_bundled(SMALL), "none")
    plan = make_plan(SMALL, source=source, gpus=[0, 1], ring_counts=[1])
    assert (plan.simulated, plan.provenance) == (False, "measured")
    assert all("simulated" not in text for text in nccl_files(plan, ANYWHERE).values())


def test_a_plan_for_some_gpus_speaks_of_no_others(tmp_path):
    plan = plan_of(ASUS, gpus=(1, 2, 5, 6), budget=FEW)
    assert plan.gpus == (1, 2, 5, 6)
    assert len(plan.subsets) == 10
    assert all(set(subset.gpus) < set(plan.gpus) for subset in plan.subsets)
    for file, text in files_of(plan).items():
        if file.endswith(".xml"):
            assert_used(plan, file, text)


def test_a_subset_is_found_in_any_order_of_its_gpus():
    plan = plan_of(PCIE)
    assert plan.subset([3, 0]).gpus == (0, 3)
    assert plan.subset([3, 2, 1, 0]).rate_gbps == plan.rate_gbps
    assert plan.subset([0]) is None
    assert plan.subset([0, 9]) is None


@pytest.mark.parametrize("seed", range(3))
def test_with_noise_a_plan_is_neither_below_stock_nor_far_from_the_best(seed):
    model = load_bundled("amd-v100")
    noisy = Simulator(model, noise=0.05, seed=seed)
    plan = make_plan("amd-v100", source=noisy, ring_counts=(1, 2))
    assert plan.rate_gbps >= plan.choices["default"].rate_gbps
    slowest = min(ring.rate_gbps for ring in plan.rings)
    assert plan.rate_gbps == pytest.approx(len(plan.rings) * slowest)
    flows = transfer_set(hop.flow for ring in plan.rings for hop in ring.hops)
    (truth,) = Simulator(model).measure([flows])
    assert len(plan.rings) * truth.rate_gbps >= 0.95 * plan_of("amd-v100").rate_gbps


class StandingStill:
    """A simulation that passes for measurements, in which one way is never gone."""

    simulated = False

    def __init__(self, model, way):
        self._simulator, self._way = Simulator(model), way

    def measure(self, sets):
        return [self._stopped(one) for one in self._simulator.measure(sets)]

    def _stopped(self, found):
        rows = zip(found.transfers.flows, found.samples_gbps, strict=True)
        samples = tuple(
            (0.0,) * len(row) if str(flow).startswith(self._way) else row for flow, row in rows
        )
        return msgspec.structs.replace(found, samples_gbps=samples, simulated=False)


def test_a_plan_over_a_way_that_stands_still_is_refused_by_the_set():
    source = StandingStill(load_bundled("intel-v100"), "G0")
    with pytest.raises(MeasurementError, match=r"^G0->G0->.*: its measurement has a rate"):
        make_plan("intel-v100", source=source, budget=FEW)


def test_one_gpu_is_too_few_to_plan_for():
    machine = toy_machine(gpus=1)
    with pytest.raises(InputError, match=r"1 GPU to plan"):
        make_plan(machine, Knowledge(), Simulator(load_bundled(SMALL)))


def test_an_unknown_strategy_lists_the_right_ones():
    with pytest.raises(InputError, match="there are best-first, nccl-order"):
        make_plan(SMALL, strategy="magic")
    with pytest.raises(InputError, match="strategy '3'"):
        make_plan(SMALL, strategy=3)


@pytest.mark.parametrize(
    "given",
    [
        {"gpus": 3.5},
        {"version": 3},
        {"ring_counts": 3},
        {"ring_counts": "a"},
        {"ring_counts": [0]},
        {"budget": 5},
        {"pinned_env": ["NCCL_P2P_DISABLE"]},
        {"subsets": "all"},
    ],
    ids=str,
)
def test_a_value_of_another_type_is_named(given):
    (name,) = given
    with pytest.raises(InputError, match=f"`{name}`"):
        make_plan(SMALL, **given)


def test_a_field_that_another_plan_has_is_refused():
    with pytest.raises(TypeError, match="'keep_order'"):
        make_plan(SMALL, keep_order=True)


def test_the_other_strategy_plans_too():
    plan = plan_of("intel-v100", strategy="nccl-order", ring_counts=(1,), gpus=(0, 1, 2))
    assert plan.strategy == "nccl-order"
    assert plan.rate_gbps >= plan.choices["default"].rate_gbps


def test_a_directory_without_a_plan_says_what_is_missing(tmp_path):
    with pytest.raises(InputError, match=r"holds no plan\.json"):
        load_plan(tmp_path)


@pytest.mark.parametrize("seed, updates", [(1, 20), (3, 40), (4, 60), (4, 100), (4, 10_000)])
def test_whenever_a_search_is_interrupted_its_bound_is_true_under_the_plans_settings(seed, updates):
    model = load_bundled("amd-v100")
    # Its rates change with the number of channels, so that bounds of one do not hold for another.
    source, watch = MadeUp(seed, high=1000), Impatient(updates)
    how = {"ring_counts": (1,), "budget": FEW, "reporter": watch}
    plan = make_plan(model.machine, model.knowledge, source, **how)
    problem = SearchProblem(
        spaces={1: hop_space(view(model.machine, model.knowledge, plan.settings), rings_in_set=1)},
        source=source,
        symmetry=automorphisms(model.machine, model.knowledge),
    )
    best = find_rings(problem, strategy=brute_force).rate_gbps
    assert plan.bound_gbps is None or plan.bound_gbps >= best
    assert plan.cancelled or plan.bound_gbps is not None


def test_of_many_gpus_usual_subsets_are_planned_for():
    machine = load_bundled(WRX).machine
    found = subsets(machine, machine.gpu_indices)
    assert {(0, 1, 2, 3), tuple(range(8)), (0, 1), (14, 15)} <= set(found)
    # Four switches with four GPUs each, and two halves.
    assert Counter(map(len, found)) == {2: 24, 4: 4, 8: 2}
    assert len(subsets(machine, machine.gpu_indices[:8])) == 246
