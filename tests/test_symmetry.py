"""Automorphisms of machines."""

import itertools
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec
import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tccl_py.model.machine import HiddenLink, Knowledge, PeerAccess
from tccl_py.model.rings import bounce, direct_read, direct_write
from tccl_py.model.symmetry import FlowCodes, automorphisms, keeping, mapping, relabel
from tccl_py.model.transfer import Fifo
from tests.reference_strategies import interchangeable
from tests.toy import no_symmetry, toy_machine


def brute_force_order(graph, gpus):
    """Distinct GPU permutations that extend to an automorphism, by listing all isomorphisms."""
    matcher = nx.algorithms.isomorphism.GraphMatcher(
        graph,
        graph,
        node_match=lambda a, b: a["colour"] == b["colour"],
        edge_match=lambda a, b: a["colour"] == b["colour"],
    )
    return len({tuple(m[g] for g in gpus) for m in matcher.isomorphisms_iter()})


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 3))
def test_the_order_equals_brute_force_on_small_machines(gpus, numa, per_switch):
    machine = toy_machine(gpus=gpus, numa_nodes=min(numa, gpus), per_switch=per_switch)
    expected = brute_force_order(machine.graph, [g.id for g in machine.gpus])
    symmetry = automorphisms(machine)
    assert symmetry.order == expected
    assert len(np.unique(symmetry.elements[:, :gpus], axis=0)) == expected


def test_symmetries_are_the_same_whenever_python_starts():
    # NICs that may change places while all GPUs stay: which of them do is not given by the GPUs.
    program = (
        "from tccl_py.model.symmetry import automorphisms\n"
        "from tests.networked import networked_machine\n"
        "machine = networked_machine(gpus=6, nics=4, numa_nodes=2)\n"
        "print(automorphisms(machine).elements.tolist())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "3")
    }
    assert len(found) == 1


def test_listed_elements_are_closed_under_composition():
    elements = automorphisms(toy_machine(gpus=4, numa_nodes=2)).elements
    rows = {tuple(row) for row in elements.tolist()}
    for one, other in itertools.product(elements, repeat=2):
        assert tuple(one[other].tolist()) in rows


def test_a_hidden_link_breaks_the_symmetry_it_breaks():
    machine = toy_machine(gpus=8, numa_nodes=1, per_switch=2)
    switches = [b.id for b in machine.bridges]
    link = HiddenLink(one=switches[0], other=switches[1], provenance="assumed")
    assert automorphisms(machine).order == 2**4 * 24
    assert automorphisms(machine, Knowledge(hidden_links=(link,))).order == 2**4 * 4


def test_a_pair_without_peer_access_is_told_apart_by_direction():
    machine = toy_machine(gpus=3)
    fact = PeerAccess(source=0, target=1, supported=False, provenance="reported")
    assert automorphisms(machine, Knowledge(peer_access=(fact,))).order == 1


def test_only_relabellings_that_keep_the_chosen_gpus_count():
    machine = toy_machine(gpus=4, numa_nodes=2)
    assert automorphisms(machine, gpus=(0, 2, 3)).order == 2


def test_names_of_devices_may_have_any_letters():
    machine = toy_machine(gpus=4, numa_nodes=2)
    one, *others = (msgspec.structs.replace(gpu, name="RTX™") for gpu in machine.gpus)
    other = msgspec.structs.replace(one, name="RTX®")
    for gpus, order in (((one, *others), 8), ((other, *others), 2)):
        assert automorphisms(msgspec.structs.replace(machine, gpus=gpus)).order == order


def test_a_large_group_is_counted_in_full_and_listed_in_part():
    symmetry = automorphisms(toy_machine(gpus=16, numa_nodes=1, per_switch=4))
    assert symmetry.order == 24**4 * 24
    assert 1 < len(symmetry.elements) <= 8_192
    assert (symmetry.elements[0] == np.arange(17)).all()


def test_a_subgroup_keeps_the_identity():
    symmetry = automorphisms(toy_machine(gpus=3))
    kept = keeping(symmetry, np.zeros(6, dtype=bool))
    assert kept.order == 1
    assert no_symmetry(toy_machine(gpus=3)).order == 1


@pytest.mark.parametrize("count", [8, 16, 64])
def test_large_machines_are_quick(count):
    symmetry = automorphisms(toy_machine(gpus=count, numa_nodes=2, per_switch=4))
    assert symmetry.order > 1


def test_gpus_that_can_change_places_are_of_one_class():
    symmetry = automorphisms(toy_machine(gpus=4, per_switch=2))
    assert interchangeable(symmetry, (0, 1, 2, 3)) == {0: 0, 1: 0, 2: 2, 3: 2}


def test_flows_have_one_number_where_their_images_are_the_same_flow_alone():
    symmetry = automorphisms(toy_machine(gpus=4, numa_nodes=2, per_switch=2))
    pairs, fifos = [(0, 1), (0, 2), (3, 1)], [None, Fifo(bytes=1 << 20), Fifo(side="sender")]
    flows = [
        make(*pair, blocks=blocks, fifo=fifo)
        for pair in pairs
        for blocks in (1, 2, None)
        for fifo in fifos
        for make in (direct_write, direct_read, partial(bounce, numa=1))
    ]
    codes = FlowCodes(symmetry).images(flows, symmetry.elements)
    flow_of, code_of = {}, {}
    for row, numbers in zip(symmetry.elements, codes, strict=True):
        names = mapping(symmetry, row)
        for flow, code in zip(flows, numbers.tolist(), strict=True):
            image = relabel(flow, names)
            assert flow_of.setdefault(code, image) == image
            assert code_of.setdefault(image, code) == code
