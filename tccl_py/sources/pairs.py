"""Bandwidth of pairs: every ordered pair of GPUs, each alone, and pairs of hosts by sample.

Of hosts, a pair of each kind is measured, for equal hosts at equal places have equal bandwidth;
spot checks of other pairs test that, and find odd hosts.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from tccl_py.errors import InputError, MeasurementError, counted
from tccl_py.model.machine import Knowledge, Machine
from tccl_py.model.measurement import BandwidthSource, dealt
from tccl_py.model.transfer import (
    Fifo,
    Flow,
    Place,
    Transfer,
    TransferSet,
    bounce,
    direct_write,
    entering,
    joined,
    leaving,
    transfer_set,
)

if TYPE_CHECKING:
    from tccl_profiler.cluster.facts import HostFacts

PING = Fifo(bytes=16, slots=1)
"""A FIFO of one slot: the sender waits until the receiver has emptied the slot."""
CHECK_BLOCKS = 4
CHECK_FIFO = Fifo(bytes=512 << 10)  # small enough that a slow network moves slices often
_LEAST_OFF = 0.1  # a smaller deviation of a host is not reported, however certain
_DEVIATIONS = 5.0
_LEAST_NOISE = 1e-3
_MAD_TO_SIGMA = 1.4826
"""Of normal noise the median absolute deviation is 1 / 1.4826 of the standard deviation."""


class Pair(msgspec.Struct, frozen=True, kw_only=True, rename={"source": "from", "target": "to"}):
    """A GPU writing to another; `via` is `direct`, or the NUMA node of the host memory between.

    `gbps` is the bandwidth in GB/s, with all the channels that it takes. `latency_us` is half the
    time in which 16 bytes arrive and their slot is free again. None is not measured.
    """

    source: int
    target: int
    gbps: float | None = None
    latency_us: float | None = None
    via: str


def pair_flow(
    machine: Machine, knowledge: Knowledge, source: int, target: int, *, via_host: bool = False
) -> Flow:
    """Return a write between two GPUs, or a bounce where NCCL, or the caller, takes host memory.

    Host memory is on the receiver's NUMA node, as NCCL's is.
    """
    if via_host or not knowledge.can_access(machine, source, target):
        return bounce(source, target, machine.numa_of(f"G{target}"))
    return direct_write(source, target)


def pair_sets(flows: Sequence[Flow], *, bidirectional: bool = False) -> list[TransferSet]:
    """Return the sets by which pairs are measured: one flow each, or both directions together."""
    if not bidirectional:
        return [transfer_set([flow]) for flow in flows]
    ends = {(flow.source, flow.destination): flow for flow in flows}
    both = ((flow, ends[b, a]) for (a, b), flow in ends.items() if a < b)
    return [transfer_set(flows) for flows in both]


def all_pairs(
    machine: Machine,
    knowledge: Knowledge,
    source: BandwidthSource,
    gpus: Sequence[int],
    *,
    via_host: bool = False,
    bidirectional: bool = False,
    watch: Callable[[int, int], None] = lambda *_: None,
) -> tuple[list[Pair], bool, list[str]]:
    """Measure all ordered pairs of these GPUs.

    Return them, whether assumed values count, and why some pairs have no bandwidth.

    With `bidirectional` each bandwidth is measured beside the opposite direction. Models have no
    latencies. `watch` is told how many sets are measured, of how many.
    """
    if len(gpus) < 2:
        raise InputError("--gpus", f"names {len(gpus)} GPU", "a pair has two")
    ends = itertools.permutations(sorted(gpus), 2)
    flows = [pair_flow(machine, knowledge, *pair, via_host=via_host) for pair in ends]
    sets = pair_sets(flows, bidirectional=bidirectional)
    pings = {} if source.simulated else {flow: Flow(flow.transfers, 1, PING) for flow in flows}
    wanted = [*sets, *pair_sets(list(pings.values()))]
    rates: dict[Flow, float] = {}
    failures: list[str] = []
    assumed = False
    for count, transfers in enumerate(wanted):
        watch(count, len(wanted))
        try:
            (found,) = source.measure([transfers])
        except MeasurementError as error:
            failures.append(str(error))
            continue
        assumed |= found.assumed
        rates |= {flow: gbps for flow, (gbps, *_) in dealt(transfers.flows, found.gbps).items()}
    pairs = [
        Pair(
            source=flow.source.index,
            target=flow.destination.index,
            gbps=rates.get(flow),
            latency_us=_latency_us(rates.get(pings.get(flow, flow)) if pings else None),
            via=str(flow.places[2]) if flow.is_bounce else "direct",
        )
        for flow in flows
    ]
    return pairs, assumed, failures


def _latency_us(gbps: float | None) -> float | None:
    """Return half the time of a ping; 1 GB/s is 1000 bytes a microsecond."""
    return PING.bytes / gbps / 1000.0 / 2 if gbps else None


def pairs_csv(pairs: Sequence[Pair]) -> str:
    """Return pairs as CSV with a header line.

    >>> print(pairs_csv([Pair(source=0, target=1, gbps=25.0, via="direct")]), end="")
    from,to,gbps,latency_us,via
    0,1,25.0,,direct
    """
    text = io.StringIO()
    rows = csv.DictWriter(text, Pair.__struct_encode_fields__, lineterminator="\n")
    rows.writeheader()
    rows.writerows(map(msgspec.to_builtins, pairs))
    return text.getvalue()


def matrix(pairs: Sequence[Pair], field: str) -> Iterator[tuple[int, list[float | None]]]:
    """Yield the row of each sending GPU: a field by receiving GPU, None where there is none."""
    gpus = sorted({pair.source for pair in pairs})
    values = {(pair.source, pair.target): getattr(pair, field) for pair in pairs}
    for row in gpus:
        yield row, [values.get((row, column)) for column in gpus]


# Pairs of hosts


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


def links_check(
    source: BandwidthSource,
    hosts: Sequence[HostFacts],
    classes: Sequence[int],
    *,
    switches: Mapping[str, str] | None = None,
    spot_checks: int = 16,
    seed: int = 0,
    network: str = "tcp",
) -> tuple[list[PairRate], dict[str, str]]:
    """Measure one pair of hosts for each kind of pair, and further pairs at random.

    Return them, and how hosts are odd whose pairs deviate from those of their like, by their names.

    A kind is the classes of both hosts and whether a switch is shared. Pairs go from host memory to
    host memory by every NIC in turn, or by NCCL from the GPU beside the NIC. Of at most
    `spot_checks` further pairs, hosts without pairs come first.
    """
    under = [(switches or {}).get(host.name, "") for host in hosts]
    known = {host.name: host for host in hosts}
    sample = _PairSample(source, known, zip(classes, under, strict=True), network)
    chooser, names = random.Random(seed), list(known)
    chooser.shuffle(names)
    # 1. A pair of each kind.
    alike: dict[tuple[int, str], list[str]] = {}
    for name in names:
        alike.setdefault(sample.places[name], []).append(name)
    few = [name for group in alike.values() for name in group[:2]]
    kinds = {sample.kind(*pair): pair for pair in itertools.permutations(few, 2)}
    for pair in kinds.values():
        sample.measure(*pair)
    # 2. Others, of the hosts with the fewest pairs.
    for _ in range(spot_checks):
        chooser.shuffle(names)
        sender, receiver = sorted(names, key=lambda name: sample.seen[name])[:2]
        if not sample.measure(sender, receiver):
            break
    # 3. Each host of an odd pair with a third host, to find the cause.
    for pair in sample.odd_pairs():
        well = sample.well(pair)
        if well is not None:
            sample.measure(pair[0], well)
            sample.measure(well, pair[1])
    return sample.rates, sample.odd_hosts()


class _PairSample:
    """Pairs measured so far; `places` are classes and switches of hosts, `seen` counts pairs."""

    def __init__(
        self,
        source: BandwidthSource,
        hosts: Mapping[str, HostFacts],
        places: Iterable[tuple[int, str]],
        network: str,
    ) -> None:
        self._source, self._hosts, self._network = source, hosts, network
        self.places = dict(zip(hosts, places, strict=True))
        self.rates: list[PairRate] = []
        self.seen = Counter[str]()

    def kind(self, sender: str, receiver: str) -> tuple[int, int, bool]:
        """Return the classes of two hosts, and whether they share a switch."""
        (class_of_sender, here), (class_of_receiver, there) = (
            self.places[sender],
            self.places[receiver],
        )
        return class_of_sender, class_of_receiver, here == there

    def measure(self, sender: str, receiver: str) -> bool:
        """Measure a pair by each NIC of the sender; return False if that was done before."""
        if any((rate.sender, rate.receiver) == (sender, receiver) for rate in self.rates):
            return False
        here, there = self._hosts[sender], self._hosts[receiver]
        by_nccl = self._network == "nccl"
        sending, receiving = (
            [nic.index for nic in host.machine.nics] if by_nccl else sorted(host.addresses)
            for host in (here, there)
        )
        for nic in sending:
            into = nic if nic in receiving else min(receiving)
            flow = (between_gpus if by_nccl else between)(here, nic, there, into)
            (found,) = self._source.measure([transfer_set([flow])])
            rate = PairRate(
                sender=sender,
                receiver=receiver,
                nic=nic,
                receiver_nic=into,
                gbps=found.rate_gbps,
                relative_error=found.relative_error,
            )
            self.rates.append(rate)
        self.seen.update((sender, receiver))
        return True

    def _judged(self) -> list[tuple[PairRate, float, float]]:
        """Return each pair, the usual GB/s of pairs like it, and its deviations if it is odd."""

        def key(rate: PairRate) -> tuple[object, ...]:
            return self.kind(rate.sender, rate.receiver), rate.nic, rate.receiver_nic

        alike: dict[tuple[object, ...], list[PairRate]] = {}
        for rate in self.rates:
            alike.setdefault(key(rate), []).append(rate)
        return [(rate, *_deviations(rate, alike[key(rate)])) for rate in self.rates]

    def odd_pairs(self) -> list[tuple[str, str]]:
        """Return odd pairs, each once."""
        odd = [rate for rate, _, deviations in self._judged() if deviations]
        return list(dict.fromkeys((rate.sender, rate.receiver) for rate in odd))

    def well(self, pair: tuple[str, str]) -> str | None:
        """Return a host without odd pairs, preferably of the class of a host of an odd pair."""
        odd = {host for odd in self.odd_pairs() for host in odd}
        there = [name for name in self.seen if name not in odd]
        places = [self.places[name] for name in pair]
        return min(there, key=lambda name: self.places[name] not in places, default=None)

    def odd_hosts(self) -> dict[str, str]:
        """Return how the network of hosts differs most of whose pairs are odd, by their names."""
        judged, found = self._judged(), {}
        for name in self._hosts:
            own = [pair for pair in judged if name in (pair[0].sender, pair[0].receiver)]
            odd = [pair for pair in own if pair[2]]
            if 2 * len(odd) > len(own):
                gbps, usual = (
                    statistics.median(rates)
                    for rates in zip(*((rate.gbps, usual) for rate, usual, _ in odd), strict=True)
                )
                found[name] = (
                    f"its network is {abs(1 - gbps / usual):.0%} "
                    f"{'slower' if gbps < usual else 'faster'} than that of hosts like it, "
                    f"{gbps:.3g} instead of {usual:.3g} GB/s in {counted(len(odd), 'pair')} "
                    f"({min(deviations for _, _, deviations in odd):.0f} standard deviations of "
                    "the noise); look at its links and what else uses them"
                )
        return found


def _deviations(rate: PairRate, alike: Sequence[PairRate]) -> tuple[float, float]:
    """Return the usual GB/s of pairs like this one, and an odd pair's deviations of the noise."""
    # Of two, the quicker is usual: networks fail by being slow.
    usual = statistics.median_high(pair.gbps for pair in alike)
    spread = _MAD_TO_SIGMA * statistics.median(abs(pair.gbps / usual - 1) for pair in alike)
    error = statistics.median(pair.relative_error for pair in alike)
    # Two or three pairs do not tell how much pairs differ.
    noise = math.hypot(error, spread if len(alike) > 3 else 0.0)
    off = abs(rate.gbps / usual - 1)
    deviations = off / max(noise, _LEAST_NOISE)
    return usual, deviations if off > _LEAST_OFF and deviations > _DEVIATIONS else 0.0


def between(sender: HostFacts, nic: int, receiver: HostFacts, receiver_nic: int) -> Flow:
    """Return a flow from host memory beside one NIC to host memory beside another."""
    source, out = (Place(*place, sender.name) for place in (("C", 0), ("N", nic)))
    target, into = (Place(*place, receiver.name) for place in (("C", 0), ("N", receiver_nic)))
    transfers = (Transfer(source, out, into), Transfer(into, into, target))
    return Flow(transfers, CHECK_BLOCKS, CHECK_FIFO)


def between_gpus(sender: HostFacts, nic: int, receiver: HostFacts, receiver_nic: int) -> Flow:
    """Return a flow between the GPUs beside two NICs, through host memory on both sides."""
    (gpu, numa), (receiver_gpu, receiver_numa) = (
        (
            gpus_beside_nics(host.machine, [own.index for own in host.machine.nics])[port],
            host.machine.numa_of(f"N{port}"),
        )
        for host, port in ((sender, nic), (receiver, receiver_nic))
    )
    out = leaving(gpu, nic, through=numa, blocks=CHECK_BLOCKS, fifo=CHECK_FIFO)
    into = entering(receiver_nic, receiver_gpu, through=receiver_numa)
    return joined(out, into, sender=sender.name, receiver=receiver.name)


def gpus_beside_nics(machine: Machine, nics: Sequence[int]) -> dict[int, int]:
    """Return a GPU for each NIC: below as many common bridges as possible, its own if possible."""
    users: Counter[int] = Counter()
    found = {}
    for nic in nics:
        above = set(machine.ancestors(f"N{nic}"))
        found[nic] = min(
            (-len(above.intersection(machine.ancestors(f"G{gpu}"))), users[gpu], gpu)
            for gpu in machine.gpu_indices
        )[-1]
        users[found[nic]] += 1
    return found
