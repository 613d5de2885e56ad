"""Indices are labels: GPUs 6 to 13 of a machine have the rings and proofs of GPUs 0 to 7."""

import itertools
import random
import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tccl_py.explanation.explain import explain
from tccl_py.model.symmetry import automorphisms, natural_cuts
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.transport import hop_space
from tccl_py.nccl.view import view
from tccl_py.planning.planner import make_plan
from tccl_py.readers.nccl_topology import parse_nccl_topology
from tccl_py.search.problem import Budget, SearchProblem
from tccl_py.search.strategies import find_rings
from tccl_py.simulator.descriptions import load_bundled, model_for
from tccl_py.simulator.model import MachineModel
from tccl_py.simulator.source import Simulator
from tests.planned import ASUS, plan_of
from tests.random_machines import random_machine
from tests.reference_strategies import brute_force
from tests.toy import no_symmetry

RAISED_BY = 6


def in_words(text, gpu, numa):
    """The text with other indices of GPUs and NUMA nodes."""
    new = {"G": gpu, "C": numa}
    return re.sub(r"\b([GC])([0-9]+)\b", lambda m: f"{m[1]}{new[m[1]](int(m[2]))}", text)


def relabelled(model, gpu, numa=lambda index: index):
    """The model with other indices of GPUs and NUMA nodes; `gpu` and `numa` return them."""
    data = msgspec.json.decode(in_words(msgspec.json.encode(model).decode(), gpu, numa))
    for device in data["machine"]["gpus"]:
        device["index"] = gpu(device["index"])
    for node in data["machine"]["numa_nodes"]:
        node["index"] = numa(node["index"])
    for fact in data["knowledge"].get("peer_access", ()):
        fact["source"], fact["target"] = gpu(fact["source"]), gpu(fact["target"])
    return msgspec.convert(data, MachineModel)


def facts(plan, gpu=lambda index: index, numa=lambda index: index):
    """Everything that a plan says of rings and rates, with other indices."""
    own = plan.choices.values()
    return {
        "rates": [pytest.approx(one.rate_gbps) for one in (*own, *plan.subsets)],
        "bound": pytest.approx(plan.bound_gbps),
        "proven": plan.proven,
        "recommended": plan.recommended,
        "settings": [one.settings for one in own],
        "cost": (plan.sets_measured, plan.sets_by_symmetry),
        "slowest": in_words(str(plan.bottleneck[1].flow), gpu, numa),
        "hops": [in_words(str(hop.flow), gpu, numa) for one in plan.rings for hop in one.hops],
        "orders": [[*map(gpu, ring)] for one in (*own, *plan.subsets) for ring in one.rings],
        "nodes": [[*map(numa, one.nodes)] for one in plan.subsets],
    }


def test_the_asus_machine_gains_as_much_with_gpus_from_index_6_on():
    def raised(index):
        return index + RAISED_BY

    model, other = load_bundled(ASUS), relabelled(load_bundled(ASUS), raised)
    plan = make_plan(other.machine, other.knowledge, Simulator(other))
    assert facts(plan) == facts(plan_of(ASUS, subsets=None), raised)
    found = explain(plan, Simulator(other))
    expected = explain(plan_of(ASUS), Simulator(model))
    sets = [[*map(str, one.flows)] for ring in found.rings for one in ring.findings]
    assert sets == [
        [in_words(str(flow), raised, int) for flow in one.flows]
        for ring in expected.rings
        for one in ring.findings
    ]


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6))
def test_other_indices_change_nothing_but_the_labels(seed):
    rng = random.Random(seed)
    text, _ = random_machine(rng, gpus=rng.choice((3, 4)), nics=False)
    machine = parse_nccl_topology(text, where="a random machine")
    gpus, nodes = (sorted(rng.sample(range(30), 8)).__getitem__ for _ in range(2))
    plans = [
        make_plan(
            model.machine, model.knowledge, Simulator(model), budget=Budget(sets=150, idle_sets=15)
        )
        for model in (model_for(machine), relabelled(model_for(machine), gpus, nodes))
    ]
    assert facts(plans[1]) == facts(plans[0], gpus, nodes)


@pytest.mark.parametrize("symmetric", [True, False])
def test_best_first_equals_brute_force_over_gpus_on_both_sides_of_index_10(symmetric):
    model = relabelled(load_bundled(ASUS), lambda index: index + RAISED_BY)
    machine, knowledge = model.machine, model.knowledge
    sets = [gpus for size in (3, 4) for gpus in itertools.combinations(machine.gpu_indices, size)]
    sets = random.Random(0).sample([gpus for gpus in sets if gpus[0] < 10 <= gpus[-1]], 30)
    ratios = {}
    for gpus in sets:
        seen = view(machine, knowledge, Settings(channels=8, p2p_level="SYS"), gpus=gpus)
        whole = automorphisms(machine, knowledge, gpus=gpus)
        problem = SearchProblem(
            spaces={count: hop_space(seen, rings_in_set=count) for count in (1, 2)},
            source=Simulator(model),
            symmetry=whole if symmetric else no_symmetry(machine),
            cuts=natural_cuts(machine, knowledge, gpus=gpus),
        )
        best, brute = find_rings(problem), find_rings(problem, strategy=brute_force)
        ratios[gpus] = best.rate_gbps / brute.rate_gbps
        assert best.bound_gbps >= brute.rate_gbps * (1 - 1e-9)
    assert min(ratios.values()) >= 1 / 1.0101, ratios
