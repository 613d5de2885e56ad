"""Plans for machines with links that no plan may use: broken, not proven or not measured."""

import json
import random
from itertools import combinations, permutations

import msgspec
import pytest
from msgspec import UNSET

from tccl_py.cli.plan import until_jobs_decide
from tccl_py.errors import BrokenLinkError, InputError, MeasurementError
from tccl_py.experiments.target import read_target
from tccl_py.explanation.explain import explain
from tccl_py.model.cluster import Cluster, Host, NodeClass
from tccl_py.model.links import JobProof, Proof
from tccl_py.model.machine import Knowledge, NvLink
from tccl_py.model.transfer import parse_flow
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.transport import candidates, pair_mechanism
from tccl_py.nccl.versions import LEVELS, version_facts
from tccl_py.nccl.view import view
from tccl_py.plan.directory import write_plan
from tccl_py.plan.results import ProvenLinks
from tccl_py.planning.handle import load_plan
from tccl_py.planning.opening import judged_by
from tccl_py.planning.planner import make_cluster_plan, make_plan
from tccl_py.readers.nccl_topology import parse_nccl_topology
from tccl_py.search.problem import Budget
from tccl_py.sources.bench import Bench
from tests.commands import tccl
from tests.faulty_links import WHAT, Faulty, facts_on, links_of, random_faults, used_links
from tests.networked import MadeUp, networked_machine
from tests.random_machines import random_machine
from tests.toy import toy_machine

FEW = Budget(sets=60)
PCIE = toy_machine(gpus=4, numa_nodes=2, per_switch=2)


def with_nvlinks(*pairs):
    """The machine with NVLinks between these pairs of GPUs."""
    ends = [*pairs, *(pair[::-1] for pair in pairs)]
    links = tuple(NvLink(source=f"G{one}", target=f"G{other}", count=2) for one, other in ends)
    return msgspec.structs.replace(PCIE, nvlinks=links)


BRIDGED, RELAYED = with_nvlinks((0, 1), (2, 3)), with_nvlinks((0, 2), (2, 1))
FAR, NEAR = (0, 3), (0, 1)


def with_facts(*pairs, state="broken"):
    """Knowledge with facts on these pairs of GPUs."""
    return facts_on(pairs, state=state)


def ways(machine, settings, gpus):
    """The mechanism of each pair of GPUs."""
    topo = view(machine, Knowledge(), settings, gpus=gpus)
    return tuple(pair_mechanism(topo, *pair) for pair in permutations(gpus, 2))


@pytest.mark.parametrize("version", ["2.18", "2.28", "2.30"])
@pytest.mark.parametrize("machine", [PCIE, BRIDGED, RELAYED], ids=["pcie", "bridged", "relayed"])
def test_candidates_are_all_p2p_levels_without_a_broken_link_and_no_others(machine, version):
    gpus, unknown = machine.gpu_indices, version_facts(version).unknown_levels
    levels = [None, *(level for level in LEVELS if level not in unknown)]
    for count in (1, 2, 6):
        for pairs in list(combinations(combinations(gpus, 2), count))[:6]:
            knowledge = with_facts(*pairs)
            made = candidates(machine, knowledge, version)
            for settings in made:
                assert not used_links(machine, knowledge, settings, gpus) & set(pairs)
            outcomes = {ways(machine, settings, gpus) for settings in made}
            for level in levels:
                settings = Settings(version=version, p2p_level=level)
                is_sound = not used_links(machine, knowledge, settings, gpus) & set(pairs)
                assert is_sound == (not view(machine, knowledge, settings).unsound)
                assert not is_sound or ways(machine, settings, gpus) in outcomes
            # Without any P2P it is NCCL_P2P_DISABLE that says so.
            none = ways(machine, Settings(version=version, p2p_level="LOC"), gpus)
            assert all(
                settings.p2p_level in (None, "LOC")
                for settings in made
                if ways(machine, settings, gpus) == none
            )


def test_a_broken_link_fails_default_nccl_and_the_smallest_that_runs_is_recommended():
    source = Faulty(0)
    plan = make_plan(BRIDGED, with_facts(FAR), source, budget=FEW, version="2.18")
    default = plan.choices["default"]
    assert default.rate_gbps is None
    assert default.fails.verdict == "hangs"
    assert [(pair.source, pair.target) for pair in default.fails.pairs] == [FAR]
    assert FAR not in source.links
    measured = msgspec.structs.replace(plan, simulated=False)
    decided = until_jobs_decide(measured)
    running = [name for name in plan.choices if name != "default"]
    assert decided.recommended == decided.control == running[0]
    assert plan.recommended in running
    for name in running:
        settings = plan.choices[name].settings
        assert not view(BRIDGED, plan.knowledge, settings).unsound
    assert f"default NCCL hangs here, since {WHAT}; " in decided.advice
    # NVLinks stay: a level is a threshold for all pairs.
    assert NEAR in source.links
    assert "NCCL_P2P_LEVEL=NVL" in decided.advice
    json = plan.to_dict()["choices"]["default"]
    assert json["fails"] == {"verdict": "hangs", "pairs": ({"from": 0, "to": 3},)}


def test_without_any_sound_p2p_the_advice_is_to_disable_it():
    knowledge = with_facts(*combinations(range(4), 2))
    plan = make_plan(PCIE, knowledge, Faulty(0), budget=FEW, version="2.18")
    advice = until_jobs_decide(msgspec.structs.replace(plan, simulated=False)).advice
    assert advice.startswith("Set NCCL_P2P_DISABLE=1: default NCCL hangs here")
    assert "GB/s without P2P" in advice


@pytest.mark.parametrize("state", ["not proven", "not measured"])
def test_links_that_are_only_doubtful_are_neither_measured_nor_rated_nor_called_failing(state):
    source = Faulty(0)
    plan = make_plan(PCIE, with_facts(NEAR, state=state), source, budget=FEW)
    default = plan.choices["default"]
    assert (default.rate_gbps, default.fails) == (None, None)
    assert default.note == WHAT
    assert NEAR not in source.links
    assert plan.recommended != "default"
    assert "default NCCL is not rated" in plan.advice


def test_a_link_that_nccl_does_not_use_changes_no_choice():
    nodes = tuple(msgspec.structs.replace(n, vendor="GenuineIntel") for n in PCIE.numa_nodes)
    intel = msgspec.structs.replace(PCIE, numa_nodes=nodes)
    sound = make_plan(intel, Knowledge(), MadeUp(1), budget=FEW)
    other = make_plan(intel, with_facts(FAR), MadeUp(1), budget=FEW)
    assert view(intel, other.knowledge).unsound == ()
    assert other.choices["default"].rate_gbps == sound.choices["default"].rate_gbps


def test_the_gpus_with_sound_links_alone_are_named_with_their_rate():
    plan = make_plan(BRIDGED, with_facts((0, 3), (1, 3), (2, 3)), MadeUp(0), version="2.18")
    (text,) = (text for text in plan.notices if "CUDA_VISIBLE_DEVICES" in text)
    assert "CUDA_VISIBLE_DEVICES=0,1,2)" in text
    assert "GB/s" in text


def test_a_pinned_level_over_a_broken_link_is_refused():
    pinned = {"NCCL_P2P_LEVEL": "SYS"}
    with pytest.raises(InputError, match=r"pinned environment: NCCL_P2P_LEVEL=SYS .*arrives"):
        make_plan(PCIE, with_facts(NEAR), MadeUp(0), pinned_env=pinned)
    pinned = {"NCCL_P2P_DISABLE": "1"}
    plan = make_plan(PCIE, with_facts(NEAR), MadeUp(0), pinned_env=pinned, budget=FEW)
    assert plan.choices["default"].fails is None


def test_nccl_is_not_asked_for_its_rings_over_a_link_that_is_broken():
    asked = []

    def own_rings(settings):
        asked.extend(settings)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_plan(PCIE, with_facts(NEAR), MadeUp(0), budget=FEW, own_rings=own_rings)
    assert asked
    assert not any(view(PCIE, with_facts(NEAR), settings).unsound for settings in asked)


def test_a_broken_host_among_several_leaves_none_of_them_its_links():
    machine = networked_machine(gpus=2, nics=1)
    classes = [
        NodeClass(name=name, machine=machine, knowledge=knowledge)
        for name, knowledge in (("sound", Knowledge()), ("broken", with_facts(NEAR)))
    ]
    hosts = tuple(Host(name=f"n{n}", node_class=n % 2, slots=2) for n in range(4))
    sources, tables = [Faulty(0), Faulty(0)], []
    cluster = Cluster(hosts=hosts, classes=tuple(classes))
    plan = make_cluster_plan(cluster, sources, budget=FEW, tables=tables)
    assert plan.choices["default"].fails.verdict == "hangs"
    assert plan.choices["default"].fails.pairs[0].source == "n1 GPU 0"
    assert plan.choices["default"].rate_gbps is None
    assert plan.recommended != "default"
    assert NEAR not in sources[1].links
    for settings in (plan.settings, plan.choices["variables"].settings):
        assert not view(machine, with_facts(NEAR), settings).unsound
    assert {table.rated_default.settings.p2p_level for table in tables} == {"LOC"}


@pytest.mark.parametrize("how", ["facts", "broken", "unmeasured"])
@pytest.mark.parametrize("seed", range(5))
def test_plans_of_random_machines_with_random_faults_use_no_faulty_link(seed, how):
    rng = random.Random(f"faulty {seed}")
    text, _ = random_machine(rng, gpus=rng.choice((2, 3, 4, 4, 6)))
    machine = parse_nccl_topology(text, where="random")
    faults = random_faults(rng, machine)
    knowledge = facts_on(faults) if how == "facts" else Knowledge()
    source = Faulty(seed, faults, error=how)
    plan = make_plan(machine, knowledge, source, budget=Budget(sets=20), subsets=False)
    hops = [hop for ring in plan.rings for hop in ring.hops]
    assert not faults & {link for hop in hops for link in links_of(hop.flow)}
    assert plan.choices[plan.recommended].rate_gbps is not None
    assert how != "facts" or not source.refused
    # A source that was asked for no faulty link cannot tell of any.
    if how == "facts" or source.refused:
        for choice in plan.choices.values():
            used = used_links(machine, plan.knowledge, choice.settings, plan.gpus)
            assert choice.rate_gbps is None or not used & faults


@pytest.mark.parametrize(("how", "state"), [("broken", "broken"), ("unmeasured", "not measured")])
def test_a_source_that_refuses_links_gets_a_plan_of_the_others(how, state):
    source = Faulty(0, [(0, 1), (1, 2), (1, 3)], error=how)
    plan = make_plan(BRIDGED, Knowledge(), source, budget=FEW, version="2.18")
    assert {(f.one, f.other): f.state for f in plan.knowledge.links} == dict.fromkeys(
        source.faults, state
    )
    default = plan.choices["default"]
    assert default.rate_gbps is None
    assert (default.fails is None) == (how == "unmeasured")
    assert plan.choices[plan.recommended].rate_gbps
    # Nothing that was refused is asked for again.
    assert len(source.refused) == len(set(source.refused))


def test_a_transient_fault_is_no_fact_about_the_machine():
    class Busy(Faulty):
        """Refuses the first sets over a link."""

        def measure(self, sets):
            if len(self.refused) < 1 and any(links_of(f) for s in sets for f in s.flows):
                self.refused.append(str(sets[0]))
                raise MeasurementError("the GPUs are busy")
            return super().measure(sets)

    with pytest.raises(MeasurementError, match="busy"):
        make_plan(PCIE, Knowledge(), Busy(0), budget=FEW, version="2.18")
    bench = Bench(Busy(0))
    with pytest.raises(MeasurementError, match="busy"):
        make_plan(PCIE, Knowledge(), bench, budget=FEW, version="2.18")
    assert not bench.unsound
    assert make_plan(PCIE, Knowledge(), bench, budget=FEW, version="2.18").knowledge.links == UNSET


def test_nothing_is_measured_again_over_a_link_that_was_named_broken():
    source = Faulty(0, [(0, 1)])
    bench = Bench(source)
    for text in ("0:1", "0<1 2:3", "1:0"):
        with pytest.raises(BrokenLinkError) as caught:
            bench.measure(text)
        assert caught.value.what == WHAT
        assert [links_of(parse_flow(flow)) for flow in caught.value.flows] == [{(0, 1)}]
    assert len(source.refused) == 1
    assert bench.measure("2:3")[0].rate_gbps > 0


def test_one_class_of_several_hosts_with_a_link_that_its_source_refuses():
    machine = networked_machine(gpus=4, nics=2)
    knowledge = Knowledge(peer_access_provenance="reported")
    classes = tuple(NodeClass(name=n, machine=machine, knowledge=knowledge) for n in ("a", "b"))
    hosts = tuple(Host(name=f"n{n}", node_class=n % 2, slots=4) for n in range(4))
    sources = [Faulty(0), Faulty(0, [(2, 3)])]
    tables = []
    cluster = Cluster(hosts=hosts, classes=classes)
    plan = make_cluster_plan(cluster, sources, budget=FEW, version="2.18", tables=tables)
    sound, broken = plan.cluster.classes
    assert sound.knowledge.links == UNSET
    assert [(fact.one, fact.other) for fact in broken.knowledge.links] == [(2, 3)]
    assert plan.choices["default"].fails.pairs[0].source == "n1 GPU 2"
    assert plan.recommended != "default"
    assert len({(table.node_class, table.gpus) for table in tables}) == len(tables)


# The proof of this machine's links.


def proof_of(**jobs):
    """A proof by jobs of NCCL without a variable, and without P2P."""
    environments = {"default": {}, "control": {"NCCL_P2P_DISABLE": "1"}}
    return Proof(
        verdict="hangs",
        what=WHAT,
        by_nccl=tuple(
            JobProof(environment=environments[name], verdict=verdict, seconds=1.0)
            for name, verdict in jobs.items()
        ),
        facts=facts_on([NEAR], verdict="fails").links,
    )


def test_choices_fail_as_the_jobs_of_the_proof_did_that_joined_the_gpus_alike():
    plan = make_plan(PCIE, facts_on([NEAR], verdict="fails"), MadeUp(0), budget=FEW)
    assert plan.choices["default"].fails.verdict == "fails"
    judged = judged_by(plan, proof_of(default="wrong values", control="sound"))
    assert judged.choices["default"].fails.verdict == "wrong values"
    assert judged.choices["default"].fails.pairs == plan.choices["default"].fails.pairs
    assert judged.running == plan.running
    none = judged_by(plan, proof_of(default="fails", control="fails"))
    assert not none.running
    assert none.advice.startswith("No choice runs: NCCL fails (fails)")
    doubtful = msgspec.structs.replace(proof_of(control="fails"), verdict="inconclusive")
    assert judged_by(plan, doubtful) == plan


def test_the_proof_stays_beside_its_plan_and_is_shown(tmp_path):
    plan = make_plan(PCIE, facts_on([NEAR]), MadeUp(0), budget=FEW)
    write_plan(plan, tmp_path)
    ProvenLinks(proof=proof_of(default="hangs")).keep(tmp_path)
    shown = tccl("show", str(tmp_path), "--json")
    assert json.loads(shown.stdout)["links"]["by_nccl"][0]["verdict"] == "hangs"
    assert f"links: hangs; {WHAT}" in tccl("show", str(tmp_path)).stdout
    read_target(load_plan(tmp_path), tmp_path).write()
    assert ProvenLinks.load(tmp_path).proof == proof_of(default="hangs")
    write_plan(plan, tmp_path)
    assert ProvenLinks.load(tmp_path) is None


@pytest.mark.parametrize(("version", "windows"), [("2.18", False), ("2.28", True), ("2.30", True)])
def test_a_plan_without_p2p_says_what_else_uses_the_links(version, windows):
    plan = make_plan(BRIDGED, facts_on([NEAR]), MadeUp(0), budget=FEW, version=version)
    (note,) = [text for text in plan.to_dict()["notices"] if "is not all P2P" in text]
    assert note.startswith("NCCL_P2P_DISABLE=1 ")
    assert "--disable-custom-all-reduce" in note
    assert ("NCCL_WIN_ENABLE=0" in note) == windows
    sound = make_plan(BRIDGED, Knowledge(), MadeUp(0), budget=FEW, version=version)
    assert not any("is not all P2P" in text for text in sound.to_dict()["notices"])


def test_an_explanation_measures_nothing_over_a_broken_link():
    source = Faulty(0, [NEAR])
    plan = make_plan(BRIDGED, facts_on([NEAR]), source, budget=FEW)
    explain(plan, source)
    assert not source.refused
