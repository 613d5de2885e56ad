"""Links by sample: which pairs are measured, and who is named."""

import random
import re

import msgspec
import pytest

from tccl_profiler.cluster.facts import HostFacts, Interface
from tccl_py.model.machine import Fingerprint, Knowledge, Nic
from tccl_py.model.measurement import Measurement
from tccl_py.sources.pairs import links_check
from tests.toy import toy_machine


def hosts(count, *, nics=1):
    machine = msgspec.structs.replace(
        toy_machine(gpus=2),
        nics=tuple(Nic(index=i, name=f"eth{i}", parent="C0") for i in range(nics)),
    )
    return [
        HostFacts(
            name=f"h{number}",
            machine=machine,
            knowledge=Knowledge(),
            fingerprint=Fingerprint(gpu_uuids=(), driver="none", numa_count=1, kernel="6"),
            tccl_py="1",
            nccl="none",
            addresses={
                i: Interface(name=f"eth{i}", address="10.0.0.1", up=True) for i in range(nics)
            },
        )
        for number in range(count)
    ]


class Network:
    """A source: each host's network has a rate, a pair the lower of two, and some noise."""

    simulated = False

    def __init__(self, rates, *, noise=0.01, usual=10.0, across=None, switches=None):
        self.rates, self.noise, self.usual = rates, noise, usual
        self.across, self.switches = across, switches or {}
        self.asked = []
        self._random = random.Random(1)

    def measure(self, sets):
        return [self.one_of(one) for one in sets]

    def one_of(self, transfers):
        (flow,) = transfers.flows
        sender, receiver = flow.source.host, flow.destination.host
        self.asked.append((sender, receiver))
        rate = min(self.rates.get(host, self.usual) for host in (sender, receiver))
        if self.across and self.switches[sender] != self.switches[receiver]:
            rate = min(rate, self.across)
        samples = tuple(rate * self._random.gauss(1, self.noise) for _ in range(10))
        return Measurement(transfers=transfers, samples_gbps=(samples,), simulated=False)


def test_equal_hosts_are_sampled_and_none_is_odd():
    network = Network({})
    _pairs, odd = links_check(network, hosts(100), [0] * 100, spot_checks=10)
    assert odd == {}
    assert len(network.asked) == 11
    assert len({host for pair in network.asked for host in pair}) == 22


def test_a_pair_of_each_pair_of_classes_is_measured():
    network = Network({})
    pairs, _odd = links_check(network, hosts(4), [0, 0, 1, 1], spot_checks=0)
    place = {"h0": 0, "h1": 0, "h2": 1, "h3": 1}
    kinds = {(place[one.sender], place[one.receiver]) for one in pairs}
    assert len(pairs) == 4
    assert kinds == {(0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize("slow", ["h0", "h3", "h7"])
@pytest.mark.parametrize("seed", range(4))
def test_a_host_that_is_slow_is_named(slow, seed):
    network = Network({slow: 6.0})
    _pairs, odd = links_check(network, hosts(8), [0] * 8, spot_checks=8, seed=seed)
    assert list(odd) == [slow]
    found = re.fullmatch(
        r"its network is (3\d|4\d)% slower .* (\S+) instead of (\S+) GB/s .*"
        r" \((\d+) standard deviations .*",
        odd[slow],
    )
    assert float(found[2]) == pytest.approx(6, rel=0.05)
    assert float(found[3]) == pytest.approx(10, rel=0.05)
    assert int(found[4]) > 5


def test_a_rate_that_is_off_by_no_more_than_the_noise_is_no_ones_fault():
    network = Network({"h3": 8.0}, noise=0.3)
    _pairs, odd = links_check(network, hosts(8), [0] * 8, spot_checks=8)
    assert odd == {}


def test_hosts_behind_another_switch_are_not_odd():
    switches = {f"h{i}": f"s{i // 4}" for i in range(8)}
    network = Network({}, across=3.0, switches=switches)
    pairs, odd = links_check(network, hosts(8), [0] * 8, switches=switches, spot_checks=12)
    assert odd == {}
    assert {round(one.gbps) for one in pairs} == {3, 10}


def test_every_nic_of_a_pair_is_measured():
    pairs, _odd = links_check(Network({}), hosts(2, nics=2), [0, 0], spot_checks=0)
    assert [(one.nic, one.receiver_nic) for one in pairs] == [(0, 0), (1, 1)]


def test_two_hosts_are_a_sample():
    network = Network({})
    assert links_check(network, hosts(2), [0, 0])[1] == {}
    assert set(network.asked) <= {("h0", "h1"), ("h1", "h0")}


def test_pairs_by_nccl_go_from_gpu_to_gpu_by_nics_that_need_no_address():
    asked = []

    class Carried(Network):
        def one_of(self, transfers):
            asked.append(str(transfers))
            return super().one_of(transfers)

    nameless = [msgspec.structs.replace(one, addresses={}) for one in hosts(2, nics=2)]
    pairs, _odd = links_check(Carried({}), nameless, [0, 0], spot_checks=0, network="nccl")
    assert [(one.nic, one.receiver_nic) for one in pairs] == [(0, 0), (1, 1)]
    (sender, receiver) = pairs[0].sender, pairs[0].receiver
    assert asked[1] == (
        f"{sender}.G1->{sender}.G1->{sender}.C0->{sender}.N1->{receiver}.N1->{receiver}.N1->"
        f"{receiver}.C0->{receiver}.G1->{receiver}.G1{{blocks=4,fifo=512K}}"
    )
