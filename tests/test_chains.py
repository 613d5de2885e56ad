"""Chains through a node: spaces with the network, rules for NICs, tables."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tccl_py.errors import SearchError
from tccl_py.model.machine import Knowledge
from tccl_py.model.rings import ring
from tccl_py.model.symmetry import automorphisms
from tccl_py.model.transfer import transfer_set
from tccl_py.nccl.network import (
    EvenUse,
    Pairing,
    chain_hop_space,
    chains_as_rings,
    gdr_variants,
    nic_pair,
    symmetry_keeping,
)
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.view import view
from tccl_py.search.problem import Budget, SearchProblem
from tccl_py.search.strategies import find_rings
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator
from tests.networked import MadeUp, all_chains, networked_machine
from tests.toy import no_symmetry

SETTINGS = Settings(channels=2)
DGX = load_bundled("nvswitch-8gpu-8nic")


def space_of(machine, count=1, settings=SETTINGS):
    return chain_hop_space(view(machine, Knowledge(), settings), chains_in_set=count)


def best_of_all(space, source):
    """The highest of all chains' slowest rates, one after the other."""
    return max(min(source.rate(hop.flow) for hop in hops) for hops in all_chains(space))


@pytest.mark.parametrize("gpus", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(8))
def test_the_best_chain_is_the_best_of_all_chains(gpus, seed):
    machine = networked_machine(gpus=gpus, nics=2, numa_nodes=2)
    space, source = space_of(machine), MadeUp(seed)
    source.bounds_hold = True  # each flow has a rate of its own
    problem = SearchProblem(spaces={1: space}, source=source, symmetry=no_symmetry(machine))
    result = find_rings(problem)
    assert result.rate_gbps == best_of_all(space, source)
    assert result.proven
    (chain,) = result.rings.rings
    assert sorted(chain.gpus[1:]) == list(range(gpus))


@given(st.lists(st.integers(0, 3), max_size=8), st.integers(1, 8))
def test_nics_are_used_evenly_if_no_count_is_more_than_one_above_another(used, chains):
    nics = (0, 1, 2, 3)
    used = used[:chains]
    finished = any(
        max(counts.values()) - min(counts[nic] for nic in nics) <= 1
        for rest in itertools.combinations_with_replacement(nics, chains - len(used))
        for counts in [Counter([*used, *rest])]
    )
    assert EvenUse(nics, chains).even(used) == finished


@pytest.mark.parametrize("least, blocks", [(None, 4), (8, 8)])
def test_hops_to_nics_have_as_many_blocks_as_hops_between_gpus(least, blocks):
    machine = networked_machine(gpus=2, nics=1, numa_nodes=1)
    space = space_of(machine, 1, Settings(channels=2, min_channels=least))
    assert {hop.flow.blocks for hop in space} == {blocks}


def test_chains_together_use_every_nic_once_in_each_direction():
    space = space_of(DGX.machine, 8, Settings(channels=8))
    nics = tuple(range(8))
    problem = SearchProblem(
        spaces={8: space},
        source=Simulator(DGX),
        symmetry=automorphisms(DGX.machine),
        rules={8: EvenUse(nics, 8)},
        budget=Budget(sets=60, idle_sets=10),
    )
    pairs = [nic_pair(chain.hops) for chain in find_rings(problem).rings.rings]
    assert sorted(into for into, _ in pairs) == list(nics)
    assert sorted(out for _, out in pairs) == list(nics)


def together(source, chains):
    flows = transfer_set(hop.flow for chain in chains for hop in chain.hops)
    return source.measure([flows])[0].rate_gbps


@pytest.mark.parametrize("seed", range(6))
def test_chains_with_given_nics_are_the_best_of_all_such_sets(seed):
    machine = networked_machine(gpus=2, nics=2)
    space, source = space_of(machine, 2), MadeUp(seed)
    pairing = Pairing(((0, 1), (1, 0)))
    problem = SearchProblem(
        spaces={2: space},
        source=source,
        symmetry=symmetry_keeping(automorphisms(machine), pairing),
        rules={2: pairing},
        budget=Budget(sets=200, idle_sets=40),
    )
    result = find_rings(problem)
    chains = [ring(hops) for hops in all_chains(space)]
    rates = [
        together(source, pair)
        for pair in itertools.combinations_with_replacement(chains, 2)
        if sorted(nic_pair(one.hops) for one in pair) == list(pairing.pairs)
    ]
    assert result.rate_gbps == 2 * max(rates)


def test_a_symmetry_that_keeps_a_pairing_takes_its_nics_to_themselves():
    machine = networked_machine(gpus=4, nics=2, numa_nodes=2)
    whole = automorphisms(machine)
    crossed = symmetry_keeping(whole, Pairing(((0, 1), (1, 0))))
    one_way = symmetry_keeping(whole, Pairing(((0, 0), (0, 1))))
    assert len(crossed.elements) == len(whole.elements)
    column = one_way.points.index("N0")
    assert {one_way.points[i] for i in one_way.elements[:, column]} == {"N0"}


def test_a_chain_is_a_ring_through_the_world():
    space = space_of(networked_machine(gpus=3))
    (chain,) = chains_as_rings(space, [(0, (2, 0, 1), 0)])
    assert (nic_pair(chain.hops), chain.gpus[1:]) == ((0, 0), (2, 0, 1))
    with pytest.raises(SearchError, match="no chain by NIC 7"):
        chains_as_rings(space, [(7, (0, 1, 2), 0)])


def test_a_machine_without_nics_has_no_chains():
    with pytest.raises(SearchError, match="has no NIC"):
        space_of(load_bundled("asus-esc8000a-e13p").machine)


def test_settings_that_move_landings_lead_back_to_the_defaults():
    machine = networked_machine(gpus=2, nics=1, gdr=True)
    moved = Settings(net_gdr_level="SYS")
    found = gdr_variants(view(machine, Knowledge(), moved, gpus=(0, 1)), nics=(0,))
    assert moved not in found and Settings() in found


def test_settings_that_move_landings_are_candidates_and_equal_ones_are_not():
    machine = networked_machine(gpus=2, nics=1, gdr=True)
    found = gdr_variants(view(machine, Knowledge(), SETTINGS, gpus=(0, 1)), nics=(0,))
    levels = {(one.net_gdr_level, one.net_gdr_read) for one in found}
    assert {level for level, _ in levels} & {"PHB", "SYS"}
    nowhere = networked_machine(gpus=2, nics=1, gdr=False)
    assert gdr_variants(view(nowhere, Knowledge(), SETTINGS, gpus=(0, 1)), nics=(0,)) == ()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 2))
def test_chains_of_made_up_rates_are_found_with_two_nics_too(seed, gpus, nics):
    machine = networked_machine(gpus=gpus, nics=nics, numa_nodes=2)
    space, source = space_of(machine), MadeUp(seed)
    problem = SearchProblem(spaces={1: space}, source=source, symmetry=no_symmetry(machine))
    assert find_rings(problem).rate_gbps == best_of_all(space, source)
