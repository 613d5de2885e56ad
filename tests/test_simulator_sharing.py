"""Max-min sharing against brute force, and what must hold of every model."""

from __future__ import annotations

import math
import random
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from tccl_py.model.rings import bounce, direct_read, direct_write
from tccl_py.model.transfer import Fifo, Flow, parse_flow, transfer_set
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.routes import max_min_rates
from tccl_py.simulator.source import Simulator
from tests.planned import SEVERAL_GPUS

SIMULATORS = {name: Simulator(load_bundled(name)) for name in SEVERAL_GPUS}


def test_two_flows_over_one_link_get_half_each():
    assert max_min_rates(2, [{0: 0.1, 1: 0.1}]) == [5.0, 5.0]


def test_what_a_slow_flow_leaves_goes_to_the_others():
    assert max_min_rates(3, [{0: 0.1, 1: 0.1, 2: 0.1}, {0: 1.0}]) == pytest.approx([1, 4.5, 4.5])


def test_a_flow_that_passes_a_place_twice_takes_twice():
    assert max_min_rates(2, [{0: 0.2, 1: 0.1}]) == pytest.approx([10 / 3, 10 / 3])


def test_a_flow_without_bounds_is_unbounded():
    assert max_min_rates(2, [{1: 0.5}]) == [math.inf, 2.0]


def by_linear_programs(count: int, bounds: list[dict[int, float]]) -> list[float]:
    """Raise all free flows to the highest common rate; keep those that cannot go on; repeat."""
    matrix = np.array([[bound.get(flow, 0.0) for flow in range(count)] for bound in bounds])
    fixed: dict[int, float] = {}
    while len(fixed) < count:
        free = [flow for flow in range(count) if flow not in fixed]
        room = 1.0 - sum((matrix[:, f] * rate for f, rate in fixed.items()), np.zeros(len(bounds)))
        pull = matrix[:, free].sum(axis=1)
        level = linprog([-1.0], A_ub=pull.reshape(-1, 1), b_ub=room).x[0]
        for index, flow in enumerate(free):
            goal = -np.eye(len(free))[index]
            low = [(level * (1 - 1e-9), None)] * len(free)
            highest = linprog(goal, A_ub=matrix[:, free], b_ub=room, bounds=low).x[index]
            if highest < level * (1 + 1e-6):
                fixed[flow] = level
    return [fixed[flow] for flow in range(count)]


@pytest.mark.parametrize("seed", range(25))
def test_rates_are_those_of_brute_force(seed):
    chance = random.Random(seed)
    count = chance.randint(1, 5)
    bounds = [
        {f: chance.choice([0.5, 1.0, 2.0]) / chance.uniform(1, 20) for f in range(count)}
        for _ in range(1)
    ]
    for _ in range(chance.randint(0, 5)):
        inside = chance.sample(range(count), chance.randint(1, count))
        bounds.append({f: chance.choice([1, 2]) / chance.uniform(1, 20) for f in inside})
    assert max_min_rates(count, bounds) == pytest.approx(
        by_linear_programs(count, bounds), rel=1e-4
    )


@st.composite
def flows(draw: st.DrawFn, name: str) -> Flow:
    model = SIMULATORS[name].model
    gpus = model.machine.gpu_indices
    source, target = draw(st.permutations(gpus))[:2]
    blocks = draw(st.sampled_from([None, 1, 4, 16]))
    node = draw(st.sampled_from([node.index for node in model.machine.numa_nodes]))
    kind = draw(st.sampled_from(["direct", "bounce", "out", "in"]))
    if kind == "out":
        return parse_flow(f"G{source}->{draw(st.sampled_from('GD'))}{source}->C{node}")
    if kind == "in":
        return parse_flow(f"C{node}->{draw(st.sampled_from('GD'))}{target}->G{target}")
    if kind == "direct" and model.knowledge.can_access(model.machine, source, target):
        direct = draw(st.sampled_from([direct_write, direct_read]))
        return direct(source, target, blocks=blocks)
    size = draw(st.sampled_from([128 * 1024, 512 * 1024, 4 * 1024 * 1024]))
    return bounce(source, target, node, blocks=blocks, fifo=Fifo(bytes=size))


@pytest.mark.parametrize("further", ["G2->G2->G1", "G2->G2->G1{blocks=16}"])
def test_a_flow_of_more_blocks_does_not_unbend_those_of_few(further):
    few = [parse_flow("G2->G2->G1{blocks=4}")] * 4
    sets = [transfer_set(few), transfer_set([*few, parse_flow(further)])]
    before, after = SIMULATORS["h200x4-vm"].measure(sets)
    assert after.rate_gbps <= before.rate_gbps * (1 + 1e-9)


@pytest.mark.parametrize("name", SEVERAL_GPUS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_further_flow_never_raises_the_slowest_rate(name, data):
    # The search bounds what a partial ring can still become by the rate it has now.
    several = data.draw(st.lists(flows(name), min_size=1, max_size=12))
    further = data.draw(flows(name))
    simulator = SIMULATORS[name]
    before, after = simulator.measure([transfer_set(several), transfer_set([*several, further])])
    assert after.rate_gbps <= before.rate_gbps * (1 + 1e-9)


@pytest.mark.parametrize("name", SEVERAL_GPUS)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_every_rate_is_positive_and_finite(name, data):
    several = data.draw(st.lists(flows(name), min_size=1, max_size=16))
    (answer,) = SIMULATORS[name].measure([transfer_set(several)])
    assert all(0 < rate < 10_000 for rate in answer.gbps)


@pytest.mark.parametrize("name", SEVERAL_GPUS)
def test_the_fifo_of_a_direct_flow_changes_no_rate(name):
    model = SIMULATORS[name].model
    there = [
        (one, other)
        for one, other in permutations(model.machine.gpu_indices[:4], 2)
        if model.knowledge.can_access(model.machine, one, other)
    ]
    small = Fifo(bytes=128 * 1024)
    plain, sized = (
        transfer_set(
            make(*pair, blocks=4, fifo=fifo)
            for pair in there
            for make in (direct_write, direct_read)
        )
        for fifo in (None, small)
    )
    if there:
        assert str(plain) != str(sized)
        one, other = SIMULATORS[name].measure([plain, sized])
        assert other.gbps == pytest.approx(one.gbps)


@pytest.mark.parametrize("blocks", [2, 8, 20])
@pytest.mark.parametrize("targets", [(1, 2), (1, 2, 3)])
def test_flows_of_one_gpu_get_no_more_together_than_one_with_all_their_blocks(blocks, targets):
    source = Simulator(load_bundled("nvswitch-8gpu-8nic"))
    several = " ".join(f"G0->G0->G{gpu}{{blocks={blocks}}}" for gpu in targets)
    one = f"G0->G0->G1{{blocks={blocks * len(targets)}}}"
    (together,), (alone,) = source.measure([several]), source.measure([one])
    assert together.total_gbps == pytest.approx(alone.total_gbps)
