"""Which transfers hurt which: smallest slow sets, what they share, and the sentences."""

from itertools import combinations
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tccl_py.errors import InputError, MeasurementError
from tccl_py.explanation.causes import NEAR, Prober, SymmetryKeys, find_causes, is_hurt
from tccl_py.explanation.explain import explain
from tccl_py.explanation.findings import Explanation, kind_of
from tccl_py.explanation.paths import Paths
from tccl_py.model.machine import Knowledge
from tccl_py.model.rings import direct_write
from tccl_py.model.symmetry import automorphisms
from tccl_py.model.transfer import parse_set, transfer_set
from tccl_py.plan.chains import PlanChain, PlanHop
from tccl_py.planning.handle import load_plan
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator
from tccl_py.sources.bench import Bench
from tccl_py.sources.opening import open_source
from tests.commands import tccl
from tests.fakes import random_resources, two_uplinks
from tests.nccl_nodes import with_nics
from tests.planned import SEVERAL_GPUS, replace_plan, with_parts
from tests.toy import no_symmetry, toy_machine

PLANS = Path(__file__).parent.parent / "plans"


def plan_of(name):
    return load_plan(PLANS / f"{name}.json")


def explained(name, *, seen=(), noise=0.0, **more):
    """The explanation of a reference plan, by a source that was asked for `seen` before."""
    source = Bench(Simulator(load_bundled(name), noise=noise))
    source.measure([parse_set(text) for text in seen])
    return explain(plan_of(name), source, **more)


def test_a_source_of_another_machine_is_refused():
    with pytest.raises(InputError, match="intel-v100"):
        explain(plan_of("amd-3090"), Simulator(load_bundled("intel-v100")))


def with_ring(plan, order):
    """The plan with one ring of direct writes in its rings' place."""
    hops = tuple(
        PlanHop(source=one, target=other, flow=direct_write(one, other, blocks=2), rate_gbps=1.0)
        for one, other in zip(order, [*order[1:], order[0]], strict=True)
    )
    return with_parts(plan, rings=(PlanChain(hops=hops),))


def prober_of(source, *, gpus=8, max_sets=None):
    symmetry = no_symmetry(toy_machine(gpus=gpus))
    return Prober(Bench(source), SymmetryKeys(symmetry), max_sets=max_sets)


def ring_flows(gpus):
    return [direct_write(one, (one + 1) % gpus) for one in range(gpus)]


def unrelated(one, other):
    return 0


# the smallest slow sets


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), gpus=st.integers(3, 6), related=st.booleans())
def test_causes_are_minimal_as_brute_force_finds_them(seed, gpus, related):
    source = random_resources(seed)
    flows = ring_flows(gpus)
    prober = prober_of(source)
    near = (lambda one, other: 1) if related else unrelated
    causes = find_causes(prober, flows, most=3, related=near)
    alone = min(source.true_rate(transfer_set([flow])) for flow in flows)
    whole = source.true_rate(transfer_set(flows))
    assert bool(causes.causes) == (whole < 0.95 * alone)
    for cause in causes.causes:
        own = source.true_rate(transfer_set(cause.flows))
        for size in range(1, len(cause.flows)):
            for part in combinations(cause.flows, size):
                assert source.true_rate(transfer_set(part)) > own
    if causes.causes:
        assert set(causes.causes[0].flows) in minimal_slow_sets(source, flows, whole, alone)
    if len(causes.causes) < 3:
        assert not is_hurt(prober, causes.remaining)


def minimal_slow_sets(source, flows, whole, alone):
    limit = min(NEAR * whole, (whole * alone) ** 0.5)
    slow = []
    for size in range(2, len(flows) + 1):
        for part in map(set, combinations(flows, size)):
            if source.true_rate(transfer_set(part)) <= limit and not any(s < part for s in slow):
                slow.append(part)
    return slow


def test_no_cause_contains_one_found_before():
    source = random_resources(7)
    causes = find_causes(prober_of(source), ring_flows(7), most=4, related=unrelated)
    for one, other in combinations(causes.causes, 2):
        assert not set(one.flows) <= set(other.flows)


def test_flows_that_do_not_hurt_each_other_have_no_cause():
    flows = [direct_write(0, 1), direct_write(2, 3)]
    causes = find_causes(prober_of(two_uplinks()), flows, most=4, related=unrelated)
    assert causes.causes == ()
    assert not causes.spent


def test_a_budget_ends_the_search_and_is_told():
    source = random_resources(7)
    prober = prober_of(source, max_sets=9)
    causes = find_causes(prober, ring_flows(7), most=4, related=unrelated)
    assert causes.spent
    assert prober.allowance.spent <= 9


def test_sets_that_a_symmetry_exchanges_have_one_key():
    keys = SymmetryKeys(automorphisms(toy_machine(gpus=4, numa_nodes=2)))
    near = keys.key(parse_set("G0->G0->G1").flows)
    assert near == keys.key(parse_set("G3->G3->G2").flows)
    assert near != keys.key(parse_set("G0->G0->G2").flows)
    assert near != keys.key(parse_set("G0->G1->G1").flows)
    whole = parse_set("G0->G0->G1 G1->G1->G2 G2->G2->G3 G3->G3->G0").flows
    assert len(keys.images_within(whole[:1], whole)) == 2
    keys.trust_nothing()
    assert near != keys.key(parse_set("G3->G3->G2").flows)


def test_a_symmetry_that_does_not_hold_for_rates_is_given_up():
    class OneSlowPort:
        simulated = True

        def __init__(self):
            self.model = two_uplinks()

        def measure(self, sets):
            found = self.model.measure(sets)
            slow = {"G2->G2->G3", "G3->G3->G2"}
            return [
                msgspec.structs.replace(one, samples_gbps=((1.0,), (1.0,)))
                if set(str(one.transfers).split()) == slow
                else one
                for one in found
            ]

    keys = SymmetryKeys(automorphisms(toy_machine(gpus=4, numa_nodes=2)))
    prober = Prober(Bench(OneSlowPort()), keys)
    flows = parse_set("G2->G2->G3 G3->G3->G2").flows
    (cause,) = find_causes(prober, flows, most=4, related=unrelated).causes
    assert cause.flows == flows


# what the bundled machines show


def test_a_ring_of_crossing_writes_shows_the_collapse_of_posted_writes():
    name = "asus-esc8000a-e13p"
    plan = with_ring(plan_of(name), [0, 4, 1, 6, 2, 5, 3, 7])
    found = explain(plan, Simulator(load_bundled(name)))
    worst = found.rings[0].findings[0]
    assert worst.gbps == pytest.approx(1.33, abs=0.01)
    assert worst.alone_gbps == pytest.approx(22.52)
    assert len(worst.flows) == 2
    assert worst.kinds == ("direct write",)
    assert "between sockets" in worst.sentence
    assert "the uplink of switch" in worst.shares[0]
    assert "a collapse" in worst.sentence
    assert found.sets_measured <= 200


def test_the_collapse_of_posted_writes_is_named_although_the_plan_avoids_it():
    found = explained("asus-esc8000a-e13p")
    (finding,) = found.pitfalls
    assert finding.kinds == ("direct write",)
    assert finding.shares[0] == "the uplink of switch 0000:11:00.0 (upwards)"
    assert finding.gbps == pytest.approx(1.33, abs=0.01)
    assert "(2 x direct write between sockets)" in finding.sentence
    assert finding.slowdown == pytest.approx(22.52 / 1.33, rel=0.01)
    stock = found.rings[1]
    assert stock.findings == ()
    # Default NCCL has two channels here, and a block of each moves a hop's data.
    assert stock.slowest.flows[0].words == "G0 -> G1 by P2P"
    assert stock.slowest.gbps == pytest.approx(22.52, abs=0.01)
    assert "Nothing hurts" in stock.sentence


def test_sets_that_were_asked_for_a_clusters_plan_explain_nothing_here():
    # A directory can have had the plan of a cluster before; its journal is gone on with.
    ends = ["N0->N0->C0->G3->G3{blocks=2}", "G0->G0->C3->N0->N0{blocks=2}"]
    found = explained("amd-v100", seen=[*ends, " ".join(ends)])
    assert found.rings == explained("amd-v100").rings


@pytest.mark.parametrize(("name", "node"), [("amd-v100", 1), ("intel-v100", 0)])
def test_stock_on_the_papers_machines_crowds_one_memory(name, node):
    stock = explained(name).rings[1]
    worst = stock.findings[0]
    assert worst.kinds == ("bounce",)
    assert worst.shares == (f"the host memory of NUMA node {node}",)
    assert len(worst.flows) == 2


def test_reading_own_memory_while_writing_to_another_node_is_named():
    model = load_bundled("amd-v100")
    pair = parse_set("G0->G0->C0->G3->G3 G3->G3->G0").flows
    (busy,) = Paths(model.machine, model.knowledge).busy(pair)
    assert busy.words.startswith("GPU 3, which at once reads")


@pytest.mark.parametrize("name", SEVERAL_GPUS)
def test_every_machine_is_explained_within_its_budget(name):
    found = explained(name)
    assert found.sets_measured <= 200
    assert found.simulated
    for ring in found.rings:
        assert ring.slowest is not None
        assert ring.sentence
        if ring.name == "plan" and not ring.findings:
            plan = plan_of(name)
            assert ring.slowest.flows == (plan.bottleneck[1].flow,)
        assert bool(ring.findings) != ring.sentence.startswith("Nothing hurts")
        for finding in ring.findings:
            assert "(simulated)" in finding.sentence
            assert finding.minimal
            assert finding.gbps < finding.alone_gbps


def test_noise_does_not_change_the_cause():
    quiet, noisy = (explained("amd-v100", noise=noise).rings[1] for noise in (0.0, 0.04))
    assert noisy.findings[0].flows == quiet.findings[0].flows
    assert noisy.findings[0].error > 0
    assert "\u00b1" in noisy.findings[0].sentence


@pytest.mark.parametrize("count", [0, 2])
def test_a_plan_is_explained_by_a_source_for_each_class(count):
    source = Simulator(load_bundled("amd-v100"))
    with pytest.raises(InputError, match="give one for each class"):
        explain(plan_of("amd-v100"), [source] * count)


def test_a_directory_answers_by_its_journal_once_it_was_explained(tmp_path):
    plan, source = plan_of("amd-v100"), Simulator(load_bundled("amd-v100"))
    plan.write(tmp_path, source)
    with pytest.raises(MeasurementError, match=r"is not in .*measurements\.jsonl"):
        explain(plan, open_source(tmp_path))
    assert tccl("show", "--why", str(tmp_path)).exit_code == 0
    of_journal = explain(plan, open_source(tmp_path))
    assert (of_journal.sets_measured, of_journal.rings) == (0, explain(plan, source).rings)


def test_without_measurements_what_is_left_open_is_told():
    found = explained("amd-v100", max_sets=0)
    assert found.sets_measured == 0
    assert all("not all measured" in ring.unexplained for ring in found.rings)
    assert all(ring.slowest is None for ring in found.rings)


def test_what_flows_share_is_named_with_its_direction():
    model = load_bundled("asus-esc8000a-e13p")
    paths = Paths(model.machine, model.knowledge)
    assert words(paths, "G0->G0->G4 G4->G4->G0") == [
        "the uplink of switch 0000:11:00.0 (in both directions)",
        "the uplink of switch 0000:81:00.0 (in both directions)",
        "the link between sockets 0 and 1 (in both directions)",
    ]
    assert words(paths, "G0->G0->G1 G1->G1->G2") == ["GPU 1's own PCIe link (in both directions)"]
    assert words(paths, "G0->G0->G1 G2->G2->G3") == []


def words(paths, text):
    return [one.words for one in paths.find_shared(parse_set(text).flows)]


# the file


def test_an_explanation_comes_back_as_it_was_and_goes_with_its_plan(tmp_path):
    plan = plan_of("amd-v100")
    plan.save(tmp_path / "plan.json")
    assert Explanation.load(tmp_path) is None
    saved = explained("amd-v100").keep(tmp_path)
    assert Explanation.load(tmp_path) == saved
    plan_of("intel-v100").save(tmp_path / "plan.json")
    assert Explanation.load(tmp_path) is None


def test_an_explanation_of_another_version_is_refused(tmp_path):
    plan_of("amd-v100").save(tmp_path / "plan.json")
    explained("amd-v100").keep(tmp_path)
    path = tmp_path / "explanation.json"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(InputError, match=r"format version 2"):
        Explanation.load(tmp_path)


def test_the_chains_of_a_cluster_are_explained_on_a_host_of_each_class(tmp_path):
    directory = tmp_path / "plan"
    options = ("--simulate", "nvswitch-8gpu-8nic", "--nodes", "2", "--rings", "1")
    made = tccl("plan", str(directory), *options, "--max-sets", "20")
    assert made.exit_code == 0, made.output
    result = tccl("show", "--why", str(directory), "--json")
    assert result.exit_code == 0, result.output
    found = Explanation.load(directory)
    (ring,) = found.rings
    plan = load_plan(directory)
    assert ring.node_class == plan.cluster.classes[0].name
    assert ring.rate_gbps == pytest.approx(plan.rate_gbps)
    assert found.simulated
    chains = (chain for path in plan.paths for chain in path.chains)
    assert ring.slowest.flows[0] in {hop.flow for chain in chains for hop in chain.hops}


def test_a_network_flow_that_crowds_a_memory_is_named():
    machine = with_nics(toy_machine(gpus=2, numa_nodes=1, name="pair"), {0: "G0", 1: "G1"})
    paths = Paths(machine, Knowledge())
    flows = "N0->N0->C0->G0->G0 N1->N1->C0->G1->G1"
    assert words(paths, flows) == ["the host memory of NUMA node 0"]
    assert kind_of(parse_set(flows).flows[0]) == "network receive"


def test_in_a_dry_run_flows_share_cores_and_no_links_that_are_not_there():
    name = "intel-v100"
    dry = replace_plan(plan_of(name), simulated=False, assumed=False, dry_run=True)
    found = explain(dry, Simulator(load_bundled(name)))
    shares = [text for ring in found.rings for one in ring.findings for text in one.shares]
    assert any("the core in the place of GPU" in text for text in shares)
    assert not any("PCIe link" in text for text in shares)
