"""The search on the bundled machines: equal to brute force where that can follow, and frugal."""

import functools

import msgspec
import pytest

from tccl_py.model.symmetry import automorphisms, natural_cuts
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.transport import hop_space
from tccl_py.nccl.view import view
from tccl_py.search.problem import SearchProblem, count_ring_sets
from tccl_py.search.strategies import find_rings
from tccl_py.simulator.descriptions import bundled_names, load_bundled
from tccl_py.simulator.source import Simulator
from tests.reference_strategies import brute_force, tccl
from tests.tccl_databases import free_hop_space

FOUR_GPUS = ("amd-3090", "amd-v100", "h200x4-vm", "intel-v100")
EIGHT_GPUS = ("asus-esc8000a-e13p", "nvswitch-8gpu-8nic", "supermicro-h12dsg-8x3090")
CHOICES = {
    "NCCL's defaults": Settings(channels=4),
    "P2P everywhere": Settings(channels=8, p2p_level="SYS"),
    "reads everywhere": Settings(channels=4, p2p_level="SYS", p2p_read=True),
    "P2P below one CPU": Settings(channels=4, p2p_level="PHB"),
    "bounces everywhere": Settings(channels=4, p2p_level="LOC", buffsize=1 << 19),
}
NOISY = {
    "amd-3090": "P2P everywhere",
    "amd-v100": "P2P below one CPU",
    "h200x4-vm": "NCCL's defaults",
    "intel-v100": "bounces everywhere",
}
NOISE = 0.05
SEEDS = range(10)
MAX_FREE_STATES = 2000
"""Ring sets that brute force goes through here; it takes about a millisecond for each."""


@functools.cache
def model_of(name):
    return load_bundled(name)


def nccl_spaces(name, settings, counts):
    model = model_of(name)
    return {
        count: hop_space(view(model.machine, model.knowledge, settings), rings_in_set=count)
        for count in counts
    }


def problem_of(name, spaces, **more):
    model = model_of(name)
    gpus = next(iter(spaces.values())).gpus
    return SearchProblem(
        spaces=spaces,
        source=more.pop("source", None) or Simulator(model),
        symmetry=automorphisms(model.machine, model.knowledge, gpus=gpus),
        cuts=natural_cuts(model.machine, model.knowledge, gpus=gpus),
        **more,
    )


@functools.cache
def in_nccl(name, choice, strategy):
    return find_rings(
        problem_of(name, nccl_spaces(name, CHOICES[choice], (1, 2))), strategy=strategy
    )


def true_score(name, result):
    (measured,) = Simulator(model_of(name)).measure([result.rings.flows])
    return len(result.rings.rings) * measured.rate_gbps


def test_the_machines_tested_here_are_the_bundled_ones_of_their_size():
    sizes = {name: len(model_of(name).machine.gpus) for name in bundled_names()}
    assert tuple(name for name, size in sizes.items() if size == 4) == FOUR_GPUS
    assert tuple(name for name, size in sizes.items() if size == 8) == EIGHT_GPUS


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", FOUR_GPUS)
def test_best_first_equals_brute_force_on_four_gpus_under_settings_of_nccl(name, choice):
    best, brute = in_nccl(name, choice, "best-first"), in_nccl(name, choice, brute_force)
    assert best.rate_gbps == pytest.approx(brute.rate_gbps)
    assert best.bound_gbps >= brute.rate_gbps * (1 - 1e-9)
    assert best.proven
    assert best.simulated
    assert best.rate_gbps == pytest.approx(true_score(name, best))


@pytest.mark.parametrize("name", FOUR_GPUS)
def test_best_first_equals_brute_force_if_every_hop_may_choose(name):
    model = model_of(name)
    every = model.machine.gpu_indices
    spaces = [
        free_hop_space(model.machine, model.knowledge, gpus)
        for gpus in (every, every[:3], every[1:])
    ]
    followed = [space for space in spaces if count_ring_sets(space, 1) <= MAX_FREE_STATES]
    assert len(followed) >= 2
    for space in followed:
        problem = problem_of(name, {1: space})
        best, brute = find_rings(problem), find_rings(problem, strategy=brute_force)
        assert best.rate_gbps == pytest.approx(brute.rate_gbps)
        assert best.bound_gbps >= brute.rate_gbps * (1 - 1e-9)
        assert best.sets_measured < brute.sets_measured


@pytest.mark.parametrize("name", FOUR_GPUS)
def test_with_five_percent_noise_the_true_rate_is_never_five_percent_below_brute_force(name):
    settings = CHOICES[NOISY[name]]
    problem = problem_of(name, nccl_spaces(name, settings, (1, 2)), noise=NOISE)
    right = in_nccl(name, NOISY[name], brute_force).rate_gbps
    for seed in SEEDS:
        source = Simulator(model_of(name), noise=NOISE, seed=seed)
        found = find_rings(msgspec.structs.replace(problem, source=source))
        assert true_score(name, found) >= 0.95 * right, f"seed {seed}"


@pytest.mark.parametrize("name", FOUR_GPUS)
def test_the_noise_of_samples_is_enough_to_know_if_the_problem_does_not_state_it(name):
    settings = CHOICES[NOISY[name]]
    problem = problem_of(name, nccl_spaces(name, settings, (1, 2)))
    right = in_nccl(name, NOISY[name], brute_force).rate_gbps
    for seed in SEEDS[:5]:
        source = Simulator(model_of(name), noise=NOISE, seed=seed)
        found = find_rings(msgspec.structs.replace(problem, source=source))
        assert true_score(name, found) >= 0.95 * right, f"seed {seed}"


@pytest.mark.parametrize("name", EIGHT_GPUS)
def test_best_first_measures_a_tenth_of_what_tccl_does_on_eight_gpus(name):
    spaces = nccl_spaces(name, CHOICES["P2P everywhere"], (1,))
    best, eager = (
        find_rings(problem_of(name, spaces), strategy=strategy) for strategy in ("best-first", tccl)
    )
    assert best.sets_measured * 10 <= eager.sets_measured
    assert best.rate_gbps >= eager.rate_gbps * (1 - 1e-9)
    assert best.proven


@pytest.mark.parametrize("name", EIGHT_GPUS)
def test_best_first_measures_at_most_a_thousand_sets_for_one_two_and_four_rings(name):
    spaces = nccl_spaces(name, CHOICES["P2P everywhere"], (1, 2, 4))
    found = find_rings(problem_of(name, spaces))
    assert found.sets_measured <= 1000
    assert found.rate_gbps == pytest.approx(true_score(name, found))
    assert found.bound_gbps >= found.rate_gbps
