"""Network bandwidth between hosts by sample: a pair per kind of pair, and the odd hosts.

Equal hosts at equal places have equal bandwidth; spot checks of other pairs test that.
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
from tccl_py.model import transfer
from tccl_py.model.machine import gpus_beside_nics
from tccl_py.model.measurement import BandwidthSource

CHECK_BLOCKS = 4
CHECK_FIFO = transfer.Fifo(bytes=512 << 10)  # small enough that a slow network moves slices often
_LEAST_OFF = 0.1  # a smaller deviation of a host is not reported, however certain
_DEVIATIONS = 5.0
_LEAST_NOISE = 1e-3
_MAD_TO_SIGMA = 1.4826
"""Of normal noise the median absolute deviation is 1 / 1.4826 of the standard deviation."""


class PairRate(msgspec.Struct, frozen=True, kw_only=True):
    """GB/s of a pair of NICs, from host memory to host memory or from GPU to GPU by NCCL.

    `relative_error` is the relative standard error of the median.
    """

    sender: str
    receiver: str
    nic: int
    receiver_nic: int
    gbps: float
    relative_error: float


class OddHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host whose pairs deviate from those of its like: medians in GB/s, count, deviations."""

    host: str
    gbps: float
    usual_gbps: float
    deviations: float
    pairs: int

    def __str__(self) -> str:
        """Return one sentence."""
        more = "slower" if self.gbps < self.usual_gbps else "faster"
        off = abs(1 - self.gbps / self.usual_gbps)
        return (
            f"host {self.host}: its network is {off:.0%} {more} than that of hosts like it, "
            f"{self.gbps:.3g} instead of {self.usual_gbps:.3g} GB/s in {self.pairs} "
            f"pair{'s' * (self.pairs != 1)} ({self.deviations:.0f} standard deviations of the "
            "noise); look at its links and what else uses them"
        )


class LinksReport(msgspec.Struct, frozen=True, kw_only=True):
    """The pairs in the order measured, and the odd hosts."""

    pairs: tuple[PairRate, ...]
    odd: tuple[OddHost, ...]


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
    """Measure one pair of hosts for each kind of pair, further pairs at random, and find odd hosts.

    A kind is the classes of both hosts and whether a switch is shared. Pairs go from host memory to
    host memory by every NIC in turn, or by NCCL from the GPU beside the NIC. Of at most
    `spot_checks` further pairs, hosts without pairs come first.
    """
    sample = _PairSample(source, hosts, classes, switches or {}, network)
    chooser = random.Random(seed)
    # 1. A pair of each kind.
    for sender, receiver in sample.one_of_each_kind(chooser):
        sample.measure(sender, receiver)
    # 2. Others, of the hosts with the fewest pairs.
    names = [host.name for host in hosts]
    for _ in range(spot_checks):
        chooser.shuffle(names)
        sender, receiver = sorted(names, key=lambda name: sample.seen.get(name, 0))[:2]
        if not sample.measure(sender, receiver):
            break
    # 3. Each host of an odd pair with a third host, to find the cause.
    for sender, receiver in sample.odd_pairs():
        well = sample.well(excluding=(sender, receiver))
        if well is not None:
            sample.measure(sender, well)
            sample.measure(well, receiver)
    return LinksReport(pairs=tuple(sample.rates), odd=tuple(sample.odd_hosts()))


class _PairSample:
    """The pairs measured so far, by kind."""

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
        self._place = {
            host.name: (number, switches.get(host.name, ""))
            for host, number in zip(hosts, classes, strict=True)
        }
        self.rates: list[PairRate] = []
        self.seen: dict[str, int] = {}

    def _kind(self, sender: str, receiver: str) -> tuple[int, int, bool]:
        (class_of_sender, here), (class_of_receiver, there) = (
            self._place[sender],
            self._place[receiver],
        )
        return class_of_sender, class_of_receiver, here == there

    def one_of_each_kind(self, chooser: random.Random) -> Iterator[tuple[str, str]]:
        """Yield a random pair of hosts for each kind."""
        groups: dict[tuple[int, str], list[str]] = {}
        for name, place in self._place.items():
            groups.setdefault(place, []).append(name)
        for names in groups.values():
            chooser.shuffle(names)
        kinds = set()
        for here, there in itertools.product(groups, repeat=2):
            sender = groups[here][0]
            receivers = groups[there] if here != there else groups[there][1:]
            if receivers and (kind := self._kind(sender, receivers[0])) not in kinds:
                kinds.add(kind)
                yield sender, receivers[0]

    def measure(self, sender: str, receiver: str) -> bool:
        """Measure a pair by each NIC of the sender; return False if that was done before."""
        if any((rate.sender, rate.receiver) == (sender, receiver) for rate in self.rates):
            return False
        here, there = self._hosts[sender], self._hosts[receiver]
        for nic in self._nics(here):
            into = self._nics(there)
            receiver_nic = nic if nic in into else min(into)
            if self._network == "nccl":
                flow = between_gpus(here, nic, there, receiver_nic)
            else:
                flow = between(sender, nic, receiver, receiver_nic)
            (found,) = self._source.measure([transfer.transfer_set([flow])])
            rate = PairRate(
                sender=sender,
                receiver=receiver,
                nic=nic,
                receiver_nic=receiver_nic,
                gbps=found.rate_gbps,
                relative_error=found.relative_error,
            )
            self.rates.append(rate)
        for host in (sender, receiver):
            self.seen[host] = self.seen.get(host, 0) + 1
        return True

    def _nics(self, host: HostFacts) -> list[int]:
        if self._network == "nccl":
            return [nic.index for nic in host.machine.nics]
        return sorted(host.addresses)

    def _deviation(self, rate: PairRate) -> tuple[float, float]:
        """Return the usual GB/s of such a pair, and an odd pair's deviations of the noise, or 0."""

        def key(pair: PairRate) -> tuple[object, ...]:
            return self._kind(pair.sender, pair.receiver), pair.nic, pair.receiver_nic

        alike = [pair for pair in self.rates if key(pair) == key(rate)]
        # Of two, the quicker is usual: networks fail by being slow.
        usual = statistics.median_high(pair.gbps for pair in alike)
        if usual <= 0:
            return usual, 0.0
        off = abs(rate.gbps / usual - 1)
        spread = _MAD_TO_SIGMA * statistics.median(abs(pair.gbps / usual - 1) for pair in alike)
        error = statistics.median(pair.relative_error for pair in alike)
        # Two or three pairs do not tell how much pairs differ.
        noise = math.hypot(error, spread if len(alike) > 3 else 0.0)
        deviations = off / max(noise, _LEAST_NOISE)
        return usual, deviations if off > _LEAST_OFF and deviations > _DEVIATIONS else 0.0

    def odd_pairs(self) -> list[tuple[str, str]]:
        """Return odd pairs, each once."""
        odd = (rate for rate in self.rates if self._deviation(rate)[1])
        return list(dict.fromkeys((rate.sender, rate.receiver) for rate in odd))

    def well(self, *, excluding: tuple[str, str]) -> str | None:
        """Return a host without odd pairs, preferably of the class of an excluded host."""
        odd = {host for pair in self.odd_pairs() for host in pair}
        there = [name for name in self._hosts if name not in odd and self.seen.get(name)]
        places = [self._place[name] for name in excluding]
        alike = [name for name in there if self._place[name] in places]
        return next(iter(alike or there), None)

    def odd_hosts(self) -> Iterator[OddHost]:
        """Yield hosts most of whose pairs are odd."""
        for name in self._hosts:
            own = [rate for rate in self.rates if name in (rate.sender, rate.receiver)]
            found = [(rate.gbps, *self._deviation(rate)) for rate in own]
            odd = [seen for seen in found if seen[2]]
            if odd and 2 * len(odd) > len(own):
                gbps, usual_gbps, deviations = zip(*odd, strict=True)
                yield OddHost(
                    host=name,
                    gbps=statistics.median(gbps),
                    usual_gbps=statistics.median(usual_gbps),
                    deviations=min(deviations),
                    pairs=len(odd),
                )


def between(sender: str, nic: int, receiver: str, receiver_nic: int) -> transfer.Flow:
    """Return a flow from host memory beside one NIC to host memory beside another.

    >>> str(between("h0", 0, "h1", 1))
    'h0.C0->h0.N0->h1.N1->h1.N1->h1.C0{blocks=4,fifo=512K}'
    """
    source, out = transfer.Place("C", 0, sender), transfer.Place("N", nic, sender)
    into, target = transfer.Place("N", receiver_nic, receiver), transfer.Place("C", 0, receiver)
    transfers = (transfer.Transfer(source, out, into), transfer.Transfer(into, into, target))
    return transfer.Flow(transfers, CHECK_BLOCKS, CHECK_FIFO)


def between_gpus(
    sender: HostFacts, nic: int, receiver: HostFacts, receiver_nic: int
) -> transfer.Flow:
    """Return a flow between the GPUs beside two NICs, through host memory on both sides."""
    ends = []
    for host, port in ((sender, nic), (receiver, receiver_nic)):
        nics = [own.index for own in host.machine.nics]
        gpu = gpus_beside_nics(host.machine, nics)[port]
        ends.append((gpu, host.machine.numa_of(f"N{port}")))
    (gpu, numa), (receiver_gpu, receiver_numa) = ends
    out = transfer.leaving(gpu, nic, through=numa, blocks=CHECK_BLOCKS, fifo=CHECK_FIFO)
    into = transfer.entering(receiver_nic, receiver_gpu, through=receiver_numa)
    return transfer.joined(out, into, sender=sender.name, receiver=receiver.name)
