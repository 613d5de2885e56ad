"""NCCL's choices by message size, against released libraries, and as seen in jobs."""

from dataclasses import replace

import pytest

from tccl_py.model.machine import Knowledge
from tccl_py.nccl.cost_model import cost_model
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.versions import version_facts
from tccl_py.nccl.view import view
from tests.nccl_cases import machine
from tests.released_nccl import RELEASES
from tests.released_tuning import ROWS, expected, model_of, named_machine, recorded_choices, word

KIB, MIB = 1 << 10, 1 << 20


def model(name, version, gpus=None, **settings):
    found = Settings(version=version, **settings)
    return cost_model(view(machine(name), Knowledge(), found, gpus=gpus))


@pytest.mark.parametrize("release", RELEASES)
def test_choices_are_those_of_released_libraries(release):
    machines = recorded_choices()[release]
    assert len(machines) > 15
    for name, words in machines.items():
        found = model_of(named_machine(name), release)
        assert [word(expected(found, *row)) for row in ROWS] == words, name


def test_recorded_choices_have_rings_of_every_protocol_and_trees():
    words = {word for of in recorded_choices().values() for found in of.values() for word in found}
    kinds = {word.rpartition("/")[0] for word in words}
    assert kinds >= {"ring/ll", "ring/ll128", "ring/simple", "tree/simple"}


@pytest.mark.parametrize(
    ("version", "protocol", "us"), [("2.30.7", "simple", 1235), ("2.31.2", "ll", 36)]
)
def test_a_failed_search_makes_small_messages_slow(version, protocol, us):
    """Seen in runs of both releases on this topology."""
    times = model("asus-esc8000a-e13p.xml", version).times("all_reduce", 64 * KIB)
    kind, expected_us = next(iter(times.items()))
    assert (kind, round(expected_us)) == (("ring", protocol), us)


def test_forced_rings_have_no_trees_and_channels_follow_the_variables():
    topology = named_machine("any 8")
    free = model_of(topology, "2.30.7")
    trees = [row for row in ROWS if expected(free, *row).algorithm == 0]
    assert trees
    rings = replace(free, ring_only=True)
    assert {expected(rings, *row).algorithm for row in trees} == {1}
    few = model("h200x4-vm.xml", "2.30.7", max_channels=4)
    assert few.choice("all_reduce", 64 * MIB).channels == 4


def test_a_message_gets_no_more_channels_than_its_cells():
    """Seen in runs of NCCL: of four H200, 512 KiB had 24 channels, and from 2.29 on 22."""
    sizes = [8 * KIB, 32 * KIB, 128 * KIB, 512 * KIB, 1 << 30]
    for version, channels in (("2.28.9", [1, 2, 8, 24, 24]), ("2.30.7", [1, 2, 8, 22, 24])):
        found = model("h200x4-vm.xml", version)
        assert [found.choice("all_reduce", size).channels for size in sizes] == channels


def test_on_power_broadcasts_take_the_slower_steps_of_trees_too():
    """Asked of the library."""
    times = model_of(named_machine("power 21"), "2.28.9").times("broadcast", MIB)
    assert next(iter(times.items())) == (("ring", "ll"), pytest.approx(84.505, abs=1e-3))


def test_older_releases_have_no_model_here():
    assert not version_facts("2.27.7").has_cost_model
