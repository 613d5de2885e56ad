"""Plans for machines with links that no plan may use: broken, not proven or not measured."""

from itertools import combinations, permutations

import msgspec
import pytest

from tccl_py.cli.plan import until_jobs_decide
from tccl_py.errors import InputError
from tccl_py.model.cluster import Cluster, Host, NodeClass
from tccl_py.model.links import LinkFact
from tccl_py.model.machine import Knowledge, NvLink
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.transport import candidates, pair_mechanism
from tccl_py.nccl.versions import LEVELS, version_facts
from tccl_py.nccl.view import view
from tccl_py.planning.planner import make_cluster_plan, make_plan
from tccl_py.search.problem import Budget
from tests.networked import MadeUp, networked_machine
from tests.toy import toy_machine

FEW = Budget(sets=60)
PCIE = toy_machine(gpus=4, numa_nodes=2, per_switch=2)
BRIDGED = msgspec.structs.replace(
    PCIE,
    nvlinks=tuple(
        NvLink(source=f"G{one}", target=f"G{other}", count=2)
        for one, other in ((0, 1), (1, 0), (2, 3), (3, 2))
    ),
)
FAR, NEAR = (0, 3), (0, 1)
WHAT = "nothing that GPU 0 writes arrives"


def with_facts(*pairs, state="broken", what=WHAT, verdict="hangs"):
    """Knowledge with facts on these pairs of GPUs."""
    facts = [
        LinkFact(one=min(pair), other=max(pair), state=state, what=what, verdict=verdict)
        for pair in pairs
    ]
    return Knowledge(links=tuple(facts))


class Watched(MadeUp):
    """Makes up rates, and notes the pairs of GPUs of which one uses the other's memory."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.direct = set()

    def measure(self, sets):
        for transfers in sets:
            self.direct |= {pair for flow in transfers.flows for pair in direct_pairs(flow)}
        return super().measure(sets)


def direct_pairs(flow):
    """The pairs of GPUs in a flow of which one uses the other's memory, lower index first."""
    ends = [{part.source, part.destination} for part in flow.transfers]
    return {
        tuple(sorted(place.index for place in pair))
        for pair in ends
        if {place.kind for place in pair} == {"G"}
    }


def p2p_of(machine, knowledge, settings, gpus):
    """The pairs that communicators of any of these GPUs join by P2P, by brute force."""
    used = set()
    for size in range(2, len(gpus) + 1):
        for some in combinations(gpus, size):
            topo = view(machine, knowledge, settings, gpus=some)
            for pair in permutations(some, 2):
                if pair_mechanism(topo, *pair) in ("read", "write"):
                    used.add(tuple(sorted(pair)))
    return used


def ways(machine, settings, gpus):
    """The mechanism of each pair of GPUs."""
    topo = view(machine, Knowledge(), settings, gpus=gpus)
    return tuple(pair_mechanism(topo, *pair) for pair in permutations(gpus, 2))


@pytest.mark.parametrize("version", ["2.18", "2.28", "2.30"])
@pytest.mark.parametrize("machine", [PCIE, BRIDGED], ids=["pcie", "bridged"])
def test_candidates_are_all_p2p_levels_without_a_broken_link_and_no_others(machine, version):
    gpus, unknown = machine.gpu_indices, version_facts(version).unknown_levels
    levels = [None, *(level for level in LEVELS if level not in unknown)]
    for count in (1, 2, 6):
        for pairs in list(combinations(combinations(gpus, 2), count))[:6]:
            knowledge = with_facts(*pairs)
            made = candidates(machine, knowledge, version)
            for settings in made:
                assert not p2p_of(machine, knowledge, settings, gpus) & set(pairs)
            outcomes = {ways(machine, settings, gpus) for settings in made}
            for level in levels:
                settings = Settings(version=version, p2p_level=level)
                is_sound = not p2p_of(machine, knowledge, settings, gpus) & set(pairs)
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
    source = Watched()
    plan = make_plan(BRIDGED, with_facts(FAR), source, budget=FEW, pinned_env=None, version="2.18")
    default = plan.choices["default"]
    assert default.rate_gbps is None
    assert default.fails.verdict == "hangs"
    assert [(pair.source, pair.target) for pair in default.fails.pairs] == [FAR]
    assert FAR not in source.direct
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
    assert NEAR in source.direct
    assert "NCCL_P2P_LEVEL=NVL" in decided.advice
    json = plan.to_dict()["choices"]["default"]
    assert json["fails"] == {"verdict": "hangs", "pairs": ({"from": 0, "to": 3},)}


def test_without_any_sound_p2p_the_advice_is_to_disable_it():
    knowledge = with_facts(*combinations(range(4), 2))
    plan = make_plan(PCIE, knowledge, Watched(), budget=FEW, version="2.18")
    advice = until_jobs_decide(msgspec.structs.replace(plan, simulated=False)).advice
    assert advice.startswith("Set NCCL_P2P_DISABLE=1: default NCCL hangs here")
    assert "GB/s without P2P" in advice


@pytest.mark.parametrize("state", ["not proven", "not measured"])
def test_links_that_are_only_doubtful_are_neither_measured_nor_rated_nor_called_failing(state):
    source = Watched()
    plan = make_plan(PCIE, with_facts(NEAR, state=state), source, budget=FEW)
    default = plan.choices["default"]
    assert (default.rate_gbps, default.fails) == (None, None)
    assert default.note == WHAT
    assert NEAR not in source.direct
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
    sources, tables = [Watched(0), Watched(0)], []
    cluster = Cluster(hosts=hosts, classes=tuple(classes))
    plan = make_cluster_plan(cluster, sources, budget=FEW, tables=tables)
    assert plan.stock.fails.verdict == "hangs"
    assert plan.stock.fails.pairs[0].source == "n1 GPU 0"
    assert plan.stock.rate_gbps is None
    assert plan.recommended != "default"
    assert NEAR not in sources[1].direct
    for settings in (plan.settings, plan.variables.settings):
        assert not view(machine, with_facts(NEAR), settings).unsound
    assert {table.stock.settings.p2p_level for table in tables} == {"LOC"}
