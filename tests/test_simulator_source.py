"""The simulator as a BandwidthSource: provenance, noise, refusals, speed."""

from __future__ import annotations

import numpy as np
import pytest

from tccl_py.errors import InputError, MeasurementError
from tccl_py.model.rings import bounce, direct_read, direct_write
from tccl_py.model.transfer import parse_set, transfer_set
from tccl_py.simulator.descriptions import load_bundled, model_for
from tccl_py.simulator.source import Simulator
from tests.effort import calls_at_most
from tests.toy import toy_machine

ASUS = load_bundled("asus-esc8000a-e13p")
TWO = parse_set("G0->G0->G4 G2->G2->G6")


def test_without_noise_there_is_one_sample_and_no_error():
    (answer,) = Simulator(ASUS).measure([TWO])
    assert [len(row) for row in answer.samples_gbps] == [1, 1]
    assert answer.relative_error == 0
    assert answer.source == "simulator:asus-esc8000a-e13p"


def test_the_same_seed_gives_the_same_samples_in_any_order():
    sets = [TWO, parse_set("G0->G0->G1"), parse_set("G5->G5->G1")]
    forward = Simulator(ASUS, noise=0.05, seed=7).measure(sets)
    backward = Simulator(ASUS, noise=0.05, seed=7).measure(sets[::-1])
    assert list(forward) == list(backward)[::-1]
    assert forward != Simulator(ASUS, noise=0.05, seed=8).measure(sets)


def test_noise_spreads_samples_as_asked_around_the_rate():
    (quiet,) = Simulator(ASUS).measure([TWO])
    noisy = Simulator(ASUS, noise=0.05, seed=1).measure([TWO] * 400)
    logs = np.log(np.array([one.samples_gbps for one in noisy]) / quiet.rate_gbps)
    assert logs.std() == pytest.approx(0.05, rel=0.1)
    assert logs.mean() == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("noise", [-0.1, float("nan"), 2.0])
def test_senseless_noise_is_refused(noise):
    with pytest.raises(InputError, match=r"; 0 to 1$"):
        Simulator(ASUS, noise=noise)


def test_a_direct_transfer_without_peer_access_is_refused():
    with pytest.raises(MeasurementError) as refused:
        Simulator(load_bundled("amd-3090")).measure([parse_set("G0->G0->G1")])
    assert str(refused.value).startswith("G0->G0->G1: ")
    assert "no direct access" in str(refused.value)


@pytest.mark.parametrize("text", ["G0->G0->h3.G1", "G0->G0->C0->N0->h3.N1->h3.N1->h3.G0"])
def test_another_host_is_refused(text):
    with pytest.raises(MeasurementError, match=r"another host.* h3\."):
        Simulator(ASUS).measure([parse_set(text)])


@pytest.mark.parametrize(
    ("text", "where", "known"),
    [
        ("G0->G0->G9", "G9", "G0, G1, G2, G3, G4"),
        ("G0->G0->C2", "C2", "C0, C1"),
        ("G0->N0->N0", "N0", "none of this kind"),
    ],
)
def test_a_place_the_machine_does_not_have_is_refused_with_those_it_has(text, where, known):
    with pytest.raises(InputError) as refused:
        Simulator(ASUS).measure([parse_set(text)])
    assert refused.value.where == where
    assert known in refused.value.right


def test_a_flow_listed_twice_runs_twice():
    once, twice = Simulator(ASUS).measure(
        [parse_set("G0->G0->G1"), parse_set("G0->G0->G1 G0->G0->G1")]
    )
    assert twice.gbps == pytest.approx((once.rate_gbps / 2,) * 2)


def test_a_nic_carries_no_more_than_its_port():
    (answer,) = Simulator(load_bundled("nvswitch-8gpu-8nic")).measure([parse_set("N0->N0->G0")])
    assert answer.rate_gbps == pytest.approx(50.0)
    assert answer.assumed


def test_copy_engines_are_not_bound_by_blocks():
    direct, kernel = Simulator(load_bundled("h200x4-vm")).measure(
        [parse_set("G0->D0->G1"), parse_set("G0->G0->G1{blocks=1}")]
    )
    assert kernel.rate_gbps == pytest.approx(20.5, rel=0.05)
    assert direct.rate_gbps > 15 * kernel.rate_gbps


@pytest.mark.parametrize("flows", [16, 64])
def test_a_set_takes_few_calls_for_each_flow(flows):
    simulator = Simulator(ASUS)
    hops = [direct_write, direct_read, lambda a, b: bounce(a, b, b // 4)]
    one = transfer_set(
        hops[i % 3](i % 8, (i + 1 + i // 8) % 8 if (1 + i // 8) % 8 else (i + 1) % 8)
        for i in range(flows)
    )
    simulator.measure([one])
    with calls_at_most(300 * flows):
        simulator.measure([one])


def test_a_model_for_any_machine_shares_links_and_is_assumed():
    simulator = Simulator(model_for(toy_machine(gpus=4, numa_nodes=2, per_switch=2)))
    alone, together = simulator.measure(
        [parse_set("G0->G0->G2"), parse_set("G0->G0->G2 G1->G1->G3")]
    )
    assert alone.assumed and together.assumed
    assert together.rate_gbps == pytest.approx(alone.rate_gbps / 2)
