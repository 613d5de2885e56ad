"""The network between hosts by sample: a pair for each pair of classes, and which host is odd.

Equal hosts at equal places of a network have equal rates, so that a few pairs tell of all. Spot
checks over other pairs try that, and name a host that is slower or faster than its like.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from tccl_profiler.cluster.facts import HostFacts
from tccl_profiler.endpoints import Network
from tccl_py.model.knowledge import gpus_beside_nics
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.transfer import (
    Fifo,
    Flow,
    Place,
    Transfer,
    entering,
    joined,
    leaving,
    transfer_set,
)

CHECK_BLOCKS = 4
CHECK_FIFO = Fifo(bytes=512 << 10)
"""Small enough that a slow network moves slices often."""
_LEAST_OFF = 0.1
"""A host that is off by less is not worth a word, however certain that is."""
_DEVIATIONS = 5.0
_LEAST_NOISE = 1e-3
_MAD_TO_SIGMA = 1.4826
"""Of normal noise the median absolute deviation is 1 / 1.4826 of the standard deviation."""


class PairRate(msgspec.Struct, frozen=True, kw_only=True):
    """What one pair of NICs carries from host memory to host memory, or from GPU to GPU by NCCL,
    GB/s, and how far off that may be: the standard error of the median, relative."""

    sender: str
    receiver: str
    nic: int
    receiver_nic: int
    gbps: float
    relative_error: float


class OddHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host whose pairs are off those of its like: their median and the usual one, in GB/s, in how
    many pairs, and how many standard deviations of the noise that is."""

    host: str
    gbps: float
    usual_gbps: float
    deviations: float
    pairs: int

    def __str__(self) -> str:
        """One sentence."""
        more = "slower" if self.gbps < self.usual_gbps else "faster"
        off = abs(1 - self.gbps / self.usual_gbps)
        return (
            f"host {self.host}: its network is {off:.0%} {more} than that of hosts like it, "
            f"{self.gbps:.3g} instead of {self.usual_gbps:.3g} GB/s in {self.pairs} "
            f"pair{'s' * (self.pairs != 1)} ({self.deviations:.0f} standard deviations of the "
            "noise); look at its links and what else uses them"
        )


class LinksReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the sample found: the pairs in the order measured, and hosts that are odd."""

    pairs: tuple[PairRate, ...]
    odd: tuple[OddHost, ...]


class _Off(msgspec.Struct, frozen=True, kw_only=True):
    """A pair beside others of its kind."""

    gbps: float
    usual_gbps: float
    deviations: float
    is_odd: bool


def links_check(
    source: BandwidthSource,
    hosts: Sequence[HostFacts],
    classes: Sequence[int],
    *,
    switches: Mapping[str, str] | None = None,
    spot_checks: int = 16,
    seed: int = 0,
    network: Network = "tcp",
) -> LinksReport:
    """Measure one pair of hosts for each kind of pair, others by chance, and find out odd hosts.

    A kind is the classes of both hosts and whether they share a switch. Pairs go from host memory
    to host memory by every NIC, one at a time, or by NCCL from the GPU beside it. A pair that is
    off others of its kind has a host that is odd: each of the two is then tried with a third one.

    Args:
        source: answers sets that span these hosts.
        hosts: all hosts.
        classes: of each host the number of its class.
        switches: by host the switch that it hangs from; one that is not there hangs from none.
        spot_checks: how many more pairs of hosts at most; hosts that no pair had come first.
        seed: of the choice.
        network: what moves the bytes.

    Raises:
        MeasurementError: a pair cannot be measured.
        SourceLostError: a host is gone.
    """
    sample = _Sample(source, hosts, classes, switches or {}, network)
    chooser = random.Random(seed)
    # 1. A pair of each kind.
    for sender, receiver in _one_of_each_kind(sample, chooser):
        sample.measure(sender, receiver)
    # 2. Others, of hosts that were in none.
    names = [host.name for host in hosts]
    for _ in range(spot_checks):
        chooser.shuffle(names)
        sender, receiver = sorted(names, key=lambda name: sample.seen.get(name, 0))[:2]
        if not sample.measure(sender, receiver):
            break
    # 3. Whose fault it is where a pair is off.
    for sender, receiver in list(sample.pairs_off()):
        well = sample.well(excluding=(sender, receiver))
        if well is not None:
            sample.measure(sender, well)
            sample.measure(well, receiver)
    return LinksReport(pairs=tuple(sample.rates), odd=tuple(sample.odd()))


class _Sample:
    """Pairs that were measured, by kind."""

    def __init__(
        self,
        source: BandwidthSource,
        hosts: Sequence[HostFacts],
        classes: Sequence[int],
        switches: Mapping[str, str],
        network: Network,
    ) -> None:
        self._source = source
        self._network = network
        self._hosts = {host.name: host for host in hosts}
        self.place = {
            host.name: (number, switches.get(host.name, ""))
            for host, number in zip(hosts, classes, strict=True)
        }
        self.rates: list[PairRate] = []
        self.seen: dict[str, int] = {}

    def kind(self, sender: str, receiver: str) -> tuple[int, int, bool]:
        """What pairs must have in common to be alike."""
        (one, here), (other, there) = self.place[sender], self.place[receiver]
        return one, other, here == there

    def measure(self, sender: str, receiver: str) -> bool:
        """Measure a pair by each NIC of the sender; False if that was done before."""
        if any((one.sender, one.receiver) == (sender, receiver) for one in self.rates):
            return False
        here, there = self._hosts[sender], self._hosts[receiver]
        for nic in self._nics(here):
            into = self._nics(there)
            receiver_nic = nic if nic in into else min(into)
            if self._network == "nccl":
                flow = between_gpus(here, nic, there, receiver_nic)
            else:
                flow = between(sender, nic, receiver, receiver_nic)
            (found,) = self._source.measure([transfer_set([flow])])
            self.rates.append(
                PairRate(
                    sender=sender,
                    receiver=receiver,
                    nic=nic,
                    receiver_nic=receiver_nic,
                    gbps=found.rate_gbps,
                    relative_error=found.relative_error,
                )
            )
        for host in (sender, receiver):
            self.seen[host] = self.seen.get(host, 0) + 1
        return True

    def _nics(self, host: HostFacts) -> list[int]:
        """Those that are sampled: NCCL needs no address of ours."""
        if self._network == "nccl":
            return [nic.index for nic in host.machine.nics]
        return sorted(host.addresses)

    def _off(self, rate: PairRate) -> _Off:
        """How far a pair is off others of its kind, and whether that is more than noise."""
        key = self.kind(rate.sender, rate.receiver), rate.nic, rate.receiver_nic
        alike = [
            one
            for one in self.rates
            if (self.kind(one.sender, one.receiver), one.nic, one.receiver_nic) == key
        ]
        # Of two, the quicker one is usual: networks fail by being slow.
        usual = statistics.median_high(one.gbps for one in alike)
        if usual <= 0:
            return _Off(gbps=rate.gbps, usual_gbps=usual, deviations=0.0, is_odd=False)
        off = abs(rate.gbps / usual - 1)
        errors = [one.relative_error for one in alike]
        spread = _MAD_TO_SIGMA * statistics.median(abs(one.gbps / usual - 1) for one in alike)
        # Two or three pairs do not tell how much pairs differ.
        noise = math.hypot(statistics.median(errors), spread if len(alike) > 3 else 0.0)
        deviations = off / max(noise, _LEAST_NOISE)
        return _Off(
            gbps=rate.gbps,
            usual_gbps=usual,
            deviations=deviations,
            is_odd=off > _LEAST_OFF and deviations > _DEVIATIONS,
        )

    def pairs_off(self) -> Iterator[tuple[str, str]]:
        """Pairs that are off, each once."""
        found = [(one.sender, one.receiver) for one in self.rates if self._off(one).is_odd]
        yield from dict.fromkeys(found)

    def well(self, *, excluding: tuple[str, str]) -> str | None:
        """A host none of whose pairs is off, of the class of one of two others if there is one."""
        off = {host for pair in self.pairs_off() for host in pair}
        there = [name for name in self._hosts if name not in off and self.seen.get(name)]
        alike = [n for n in there if self.place[n] in (self.place[one] for one in excluding)]
        return next(iter(alike or there), None)

    def odd(self) -> Iterator[OddHost]:
        """Hosts of pairs that are off, and of no more pairs that are not."""
        for name in self._hosts:
            mine = [self._off(one) for one in self.rates if name in (one.sender, one.receiver)]
            off = [one for one in mine if one.is_odd]
            if off and 2 * len(off) > len(mine):
                yield OddHost(
                    host=name,
                    gbps=statistics.median(one.gbps for one in off),
                    usual_gbps=statistics.median(one.usual_gbps for one in off),
                    deviations=min(one.deviations for one in off),
                    pairs=len(off),
                )


def between(sender: str, nic: int, receiver: str, receiver_nic: int) -> Flow:
    """Host memory beside one NIC to host memory beside another, in four streams.

    >>> str(between("h0", 0, "h1", 1))
    'h0.C0->h0.N0->h1.N1->h1.N1->h1.C0{blocks=4,fifo=512K}'
    """
    source, out = Place("C", 0, sender), Place("N", nic, sender)
    into, target = Place("N", receiver_nic, receiver), Place("C", 0, receiver)
    transfers = (Transfer(source, out, into), Transfer(into, into, target))
    return Flow(transfers, CHECK_BLOCKS, CHECK_FIFO)


def between_gpus(sender: HostFacts, nic: int, receiver: HostFacts, receiver_nic: int) -> Flow:
    """From the GPU beside one NIC to the GPU beside another, by host memory on both sides: that is
    everywhere, so that hosts can be compared."""
    ends = []
    for host, port in ((sender, nic), (receiver, receiver_nic)):
        machine = host.machine
        nics = [one.index for one in machine.nics]
        ends.append((gpus_beside_nics(machine, nics)[port], machine.numa_of(f"N{port}")))
    (gpu, numa), (receiver_gpu, receiver_numa) = ends
    out = leaving(gpu, nic, through=numa, blocks=CHECK_BLOCKS, fifo=CHECK_FIFO)
    into = entering(receiver_nic, receiver_gpu, through=receiver_numa)
    return joined(out, into, sender=sender.name, receiver=receiver.name)


def _one_of_each_kind(sample: _Sample, chooser: random.Random) -> Iterator[tuple[str, str]]:
    """A pair for each kind that there is, between hosts that chance picks."""
    groups: dict[tuple[int, str], list[str]] = {}
    for name, place in sample.place.items():
        groups.setdefault(place, []).append(name)
    for names in groups.values():
        chooser.shuffle(names)
    kinds = set()
    for here, there in itertools.product(groups, repeat=2):
        sender = groups[here][0]
        others = groups[there] if here != there else groups[there][1:]
        if others and (kind := sample.kind(sender, others[0])) not in kinds:
            kinds.add(kind)
            yield sender, others[0]
