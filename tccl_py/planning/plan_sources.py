"""Sources for measurements of a plan: its model, its machine, or its hosts; hosts that differ.

A set of a class has only its host's part of flows over the network. It is measured on a host of the
class and a partner: the partner's memory takes bytes that leave, and gives bytes that enter. That
is host memory, or a GPU's where NCCL carries the bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, combinations, islice, product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from tccl_py.errors import BrokenLinkError, InputError, MeasurementError
from tccl_py.model.cluster import Cluster, SwitchTree, cabled_nics
from tccl_py.model.machine import Machine
from tccl_py.model.measurement import (
    JOURNAL_FILE,
    NIC_TRANSPORTS,
    BandwidthSource,
    JournalHeader,
    Measurement,
    NicTransport,
    deal_out,
)
from tccl_py.model.reports import part_of
from tccl_py.model.rings import entering, join_flows, leaving, on_host, receiving_nic, sending_nic
from tccl_py.model.transfer import Fifo, Flow, Place, Transfer, TransferSet, transfer_set
from tccl_py.plan.directory import machine_file
from tccl_py.plan.plan import Plan
from tccl_py.plan.staging import check_if_listed
from tccl_py.planning.cluster_planner import used_nics
from tccl_py.readers.cables import Addresses, Heard, subnet_prefix
from tccl_py.simulator.descriptions import read_description
from tccl_py.simulator.model import MachineModel
from tccl_py.sources.bench import Bench
from tccl_py.sources.hosts import HostsSource, open_hosts
from tccl_py.sources.journal import JournalContents, read_header, read_journal
from tccl_py.sources.opening import open_source
from tccl_py.sources.profiled import MeasuredMachine, measured_machine, search_options

if TYPE_CHECKING:
    from tccl_py.sources.hosts import Job

MOST_SAMPLED = 16
"""Hosts of a class that are compared with it in a first plan."""
MOST_ODD = 8
"""Hosts that get classes of their own: each is measured like a class."""
_LEAST_OFF, _DEVIATIONS = 0.1, 5.0
"""A host differs if a rate is off by more than this share, and by so many standard errors."""
_LEAST_NOISE = 1e-3
SLOWER = 0.9
"""Pairs across an uplink below this share of those beside it are bound by it."""
MOST_PAIRS = 48
"""Pairs of hosts that are measured for uplinks."""
_BLOCKS, _FIFO = 4, Fifo(bytes=512 << 10)
"""Of these pairs: a slow network moves slices often."""
PairRate = tuple[str, str, float]
"""Sender, receiver, and GB/s from one to the other."""


class End(msgspec.Struct, frozen=True):
    """The far end of a NIC: a host and its NIC, the NUMA node beside that, and a GPU or None.

    Bytes end in the GPU where the transport joins GPUs, else in the node's memory. `assumed` is the
    rate in GB/s of flows that cannot be measured, None if unknown.
    """

    host: str
    nic: int
    numa: int
    gpu: int | None = None
    assumed: float | None = None


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The hosts for measuring a class: `host`, and the other end of each NIC."""

    host: str
    ends: Mapping[int, End]

    def assumed_rate(self, flow: Flow, nic: int) -> float | None:
        """Return the rate of a flow by a NIC that cannot be measured; None for any other.

        What joins GPUs cannot take bytes through another GPU's memory.
        """
        end = self.ends[nic]
        return end.assumed if end.gpu is not None and _is_relayed(flow) else None


class PlacedSource:
    """Measure the sets of a class on a host and what its NICs lead to.

    Args:
        bench: answers sets whose places name hosts.
        placement: the hosts.
        anew: whether every answer is a new measurement, whatever the memory has.
    """

    def __init__(self, bench: Bench, placement: Placement, *, anew: bool = False) -> None:
        self.placement = placement
        self._bench, self._anew = bench, anew
        self._asked: Counter[TransferSet] = Counter()

    @property
    def simulated(self) -> bool:
        """Return whether the answers come from a model."""
        return self._bench.simulated

    @property
    def dry_run(self) -> bool:
        """Return whether the answers come from host memory in the place of GPUs."""
        return self._bench.dry_run

    def measure(self, sets: Sequence[TransferSet]) -> Sequence[Measurement]:
        """Answer each set, in the order given, by its next sample.

        Raises MeasurementError: a set cannot be measured.
        """
        return [self._of_class(transfers, self._next)[0] for transfers in sets]

    def recall(self, transfers: TransferSet) -> list[Measurement]:
        """Return the samples that the bench has of a set, or its rates where all are assumed."""
        return self._of_class(transfers, self._bench.recall)

    def _next(self, placed: TransferSet) -> Sequence[Measurement]:
        number = self._asked[placed]
        answer = self._bench.again(placed) if self._anew else self._bench.sample(placed, number)
        self._asked[placed] += 1
        return [answer]

    def _of_class(
        self, transfers: TransferSet, ask: Callable[[TransferSet], Sequence[Measurement]]
    ) -> list[Measurement]:
        """Return samples of a set of the class, from those that `ask` gives of it on its hosts."""
        assumed = self._assumed_rates(transfers)
        measured = [flow for flow in transfers.flows if flow not in assumed]
        if not measured:
            rates = tuple((assumed[flow],) for flow in transfers.flows)
            basis: dict[str, Any] = {"simulated": self.simulated, "assumed": True}
            return [Measurement(transfers=transfers, samples_gbps=rates, **basis)]
        flows = [self._place(flow, measured) for flow in measured]
        answers = []
        for answer in self._tell(ask, measured, flows):
            # Equal flows share their rates out.
            rows = deal_out(answer.transfers.flows, answer.samples_gbps)
            placed, repeats = iter(flows), len(answer.samples_gbps[0])
            samples = tuple(
                (assumed[flow],) * repeats if flow in assumed else rows[next(placed)].pop(0)
                for flow in transfers.flows
            )
            more = {"samples_gbps": samples, "assumed": answer.assumed or bool(assumed)}
            answers.append(msgspec.structs.replace(answer, transfers=transfers, **more))
        return answers

    def _tell(
        self,
        ask: Callable[[TransferSet], Sequence[Measurement]],
        flows: Sequence[Flow],
        placed: Sequence[Flow],
    ) -> Sequence[Measurement]:
        """Ask for placed flows; a broken link's error names the class's flows in their place."""
        try:
            return ask(transfer_set(placed))
        except BrokenLinkError as error:
            of_class = dict(zip(map(str, placed), flows, strict=True))
            named = [of_class[text] for text in error.flows if text in of_class]
            if not named:  # The partner's links are not the class's.
                raise MeasurementError(str(error)) from error
            raise BrokenLinkError(named, error.what, verdict=error.verdict) from error

    def _assumed_rates(self, transfers: TransferSet) -> dict[Flow, float]:
        """Return the assumed rates of flows without measurement: they share their NIC's port."""
        ports = {
            flow: (gbps, way, nic)
            for flow in transfers.flows
            for way, nic in (("out", sending_nic(flow)), ("in", receiving_nic(flow)))
            if nic is not None and (gbps := self.placement.assumed_rate(flow, nic)) is not None
        }
        users = Counter(ports[flow][1:] for flow in transfers.flows if flow in ports)
        return {flow: gbps / users[way, nic] for flow, (gbps, way, nic) in ports.items()}

    def _place(self, flow: Flow, concurrent: Sequence[Flow]) -> Flow:
        placement = self.placement
        out, into = sending_nic(flow), receiving_nic(flow)
        if out is not None:
            sink = self._far_end(out, flow, concurrent)
            return join_flows(flow, sink, sender=placement.host, receiver=placement.ends[out].host)
        if into is not None:
            spring = self._far_end(into, flow, concurrent)
            return join_flows(
                spring, flow, sender=placement.ends[into].host, receiver=placement.host
            )
        return on_host(flow, placement.host)

    def _far_end(self, nic: int, flow: Flow, concurrent: Sequence[Flow]) -> Flow:
        """Return the far end's part of a flow by a NIC of the host.

        NCCL has one rule for all receivers, on both hosts, and one for all senders: a GPU there
        sends or receives as `concurrent` flows do, or without any, as its own GPU.
        """
        end = self.placement.ends[nic]
        sends = sending_nic(flow) is None
        way = sending_nic if sends else receiving_nic
        example = next((candidate for candidate in concurrent if way(candidate) is not None), flow)
        direct = end.gpu is not None and _lands_in_gpus(example)
        return _by_nic(end, flow.blocks, flow.fifo, sends=sends, direct=direct)


def _by_nic(
    end: End, blocks: int | None, fifo: Fifo | None, *, sends: bool, direct: bool = False
) -> Flow:
    """Return a GPU, if not `direct` through host memory, or the memory, sending or receiving."""
    if end.gpu is None:
        memory, port = Place("C", end.numa), Place("N", end.nic)
        places = (memory, port, port) if sends else (port, port, memory)
        return Flow((Transfer(*places),), blocks, fifo)
    through = None if direct else end.numa
    if sends:
        return leaving(end.gpu, end.nic, through=through, blocks=blocks, fifo=fifo)
    return entering(end.nic, end.gpu, through=through, blocks=blocks, fifo=fifo)


def _lands_in_gpus(flow: Flow) -> bool:
    """Return whether a NIC moves the bytes to or from GPU memory."""
    ends = ((leg.executor.kind, leg.source.kind, leg.destination.kind) for leg in flow.transfers)
    return any(executor == "N" and "G" in (a, b) for executor, a, b in ends)


def _is_relayed(flow: Flow) -> bool:
    """Return whether a NIC takes the bytes from the memory of a GPU other than the flow's own."""
    ends = {flow.source, flow.destination}
    places = (place for leg in flow.transfers for place in (leg.source, leg.destination))
    return any(place.kind == "G" and place not in ends for place in places)


def placements(
    cluster: Cluster, transport: NicTransport = NIC_TRANSPORTS["tcp"]
) -> tuple[Placement, ...]:
    """Return the hosts for measuring each class: its first host, with the next host as partner.

    A host under the same switch is preferred as a partner, then a host of the same class: switches
    are judged apart. Cables have a partner for each NIC. Raises InputError: a class without NIC.
    """
    of = cluster.host_classes

    def placement(host: str) -> Placement:
        machine, far = cluster.classes[of[host]].machine, _far_nics(cluster, host)
        speeds = {nic.index: nic.speed_mbps / 8000.0 for nic in machine.nics if nic.speed_mbps > 0}
        ends = {}
        for nic, (name, far_nic) in far.items():
            theirs = cluster.classes[of[name]].machine
            near = gpus_beside_nics(theirs, used_nics(theirs)) if transport.joins_gpus else {}
            ends[nic] = End(
                host=name,
                nic=far_nic,
                numa=theirs.numa_of(f"N{far_nic}"),
                gpu=near.get(far_nic),
                assumed=speeds.get(nic),
            )
        return Placement(host=host, ends=ends)

    firsts = {number: host for host, number in reversed(of.items())}
    return tuple(placement(firsts[number]) for number in range(len(cluster.classes)))


def _far_nics(cluster: Cluster, host: str) -> dict[int, tuple[str, int]]:
    """Return the host and NIC at the other end of each NIC of a host."""
    if cluster.cables:
        return {out: far for near, out, far in cabled_nics(cluster.cables) if near == host}
    switch, of = cluster.switch_of, cluster.host_classes
    partner = min(
        (name for name in cluster.names if name != host),
        key=lambda name: (switch.get(name) != switch.get(host), of[name] != of[host]),
    )
    own, other = (cluster.classes[of[name]] for name in (host, partner))
    used, theirs = (used_nics(one.machine) for one in (own, other))
    # The same rail where there is one; else NICs in turn.
    on_rails = {other.rail(nic): nic for nic in theirs}
    return {
        nic: (partner, on_rails.get(own.rail(nic), theirs[at % len(theirs)]))
        for at, nic in enumerate(used)
    }


def gpus_beside_nics(machine: Machine, nics: Sequence[int]) -> dict[int, int]:
    """Return a GPU for each NIC: below as many common bridges as possible, its own if possible."""
    users: Counter[int] = Counter()
    nearest = {}
    for nic in nics:
        above = set(machine.ancestors(f"N{nic}"))
        nearest[nic] = min(
            (-len(above.intersection(machine.ancestors(f"G{gpu}"))), users[gpu], gpu)
            for gpu in machine.gpu_indices
        )[-1]
        users[nearest[nic]] += 1
    return nearest


# Hosts compared with the measured rates of their class.


class Sample(msgspec.Struct, frozen=True):
    """A measured set of a class: flows, the rate of the slowest, GB/s, and its standard error."""

    transfers: TransferSet
    gbps: float
    error: float


def odd_hosts(
    source: Bench,
    cluster: Cluster,
    hosts: Sequence[str],
    samples: Sequence[Sample],
    known: Sequence[str],
    *,
    transport: NicTransport = NIC_TRANSPORTS["tcp"],
) -> dict[str, str]:
    """Return how hosts differ from the measured sets of their class, by the names of those that do.

    A host differs if it does with two partners, or twice with the only partner. Partners are
    `known` hosts, then hosts found alike; without any below its switch no host differs. Sets are
    measured anew, whatever the journal has: a host may have changed since.
    """
    classes, switch = cluster.host_classes, cluster.switch_of
    outliers: dict[str, str] = {}
    equal = list(known)
    for host in hosts:
        partners = [n for n in dict.fromkeys((*equal, *hosts)) if n != host]
        near = [name for name in partners if switch.get(name) == switch.get(host)]
        near.sort(key=lambda name: (name in outliers, classes[name] != classes[host]))
        why = ""
        for partner in near[:2] if len(near) != 1 else near * 2:
            # Cables lead to further hosts than one partner.
            hosts_at_hand = (host, *partners) if cluster.cables else (host, partner)
            place = placements(part_of(cluster, hosts_at_hand), transport)[0]
            why = difference(PlacedSource(source, place, anew=True), samples)
            if not why:
                equal.append(host)
                break
        if why:
            outliers[host] = why
    return outliers


def difference(source: BandwidthSource, samples: Sequence[Sample]) -> str:
    """Return how a host differs from measured sets of its class; "" if it is alike."""
    for sample in samples:
        (answer,) = source.measure([sample.transfers])
        off = abs(answer.rate_gbps / sample.gbps - 1)
        noise = max(_LEAST_NOISE, math.hypot(sample.error, answer.relative_error))
        if off > max(_LEAST_OFF, _DEVIATIONS * noise):
            more = "slower" if answer.rate_gbps < sample.gbps else "faster"
            return (
                f"{off:.0%} {more} than its class, {answer.rate_gbps:.3g} instead of "
                f"{sample.gbps:.3g} GB/s in {sample.transfers}"
            )
    return ""


def uplink_pairs(tree: SwitchTree) -> Iterator[tuple[str, str]]:
    """Yield pairs for unknown uplinks: below each switch, and from it to the next one and back.

    >>> tree = SwitchTree(name="top", switches=(
    ...     SwitchTree(name="a", hosts=("h0", "h1")), SwitchTree(name="b", hosts=("h2",))))
    >>> list(uplink_pairs(tree))
    [('h0', 'h1'), ('h0', 'h2'), ('h2', 'h0')]
    """
    below = [list(islice(switch.all_hosts, 2)) for switch in tree.switches]
    below += [[host] for host in tree.hosts]
    for at, switch in enumerate(tree.switches):
        if switch.uplink_gbps is None and len(below[at]) > 1 and len(below) > 1:
            local, near = below[at]
            remote = below[(at + 1) % len(below)][0]
            yield from ((local, near), (local, remote), (remote, local))
        yield from uplink_pairs(switch)


def pair_rates(source: Bench, cluster: Cluster, transport: NicTransport) -> list[PairRate]:
    """Measure pairs of hosts by which uplinks can be estimated.

    Bytes go from host memory to host memory, or from the GPU beside the NIC. Pairs that cannot be
    measured are left out.
    """
    assert cluster.switches is not None
    rates: list[PairRate] = []
    for pair in islice(dict.fromkeys(uplink_pairs(cluster.switches)), MOST_PAIRS):
        part = part_of(cluster, pair)
        place, machine = placements(part, transport)[0], part.classes[0].machine
        nic = min(place.ends)
        gpu = None if place.ends[nic].gpu is None else gpus_beside_nics(machine, [nic])[nic]
        end = End(pair[0], nic, machine.numa_of(f"N{nic}"), gpu)
        out = _by_nic(end, _BLOCKS, _FIFO, sends=True)
        with suppress(MeasurementError):
            (answer,) = PlacedSource(source, place).measure([transfer_set([out])])
            rates.append((*pair, answer.rate_gbps))
    return rates


def estimate_uplinks(tree: SwitchTree, pairs: Sequence[PairRate]) -> SwitchTree:
    """Estimate unknown uplink bandwidths of switches from measured pairs of hosts.

    An uplink that carries a pair as fast as the hosts' own links do may carry any number of pairs,
    and stays without a limit. Any other is as fast as the fastest pair, each way; of the two
    directions the slower counts.

    >>> tree = SwitchTree(name="top", switches=(
    ...     SwitchTree(name="a", hosts=("h0", "h1")), SwitchTree(name="b", hosts=("h2", "h3"))))
    >>> pairs = [("h0", "h1", 0.25), ("h2", "h3", 0.25), ("h0", "h2", 0.1), ("h3", "h1", 0.11)]
    >>> [switch.uplink_gbps for switch in estimate_uplinks(tree, pairs).switches]
    [0.1, 0.1]
    """

    def measure_pair(switch: SwitchTree, around: frozenset[str]) -> SwitchTree:
        below = frozenset(switch.all_hosts)
        inner = tuple(measure_pair(nested, below) for nested in switch.switches)
        local = [gbps for a, b, gbps in pairs if a in below and b in below]
        up = [gbps for a, b, gbps in pairs if a in below and b in around - below]
        down = [gbps for a, b, gbps in pairs if b in below and a in around - below]
        uplink = switch.uplink_gbps
        if uplink is None and local and (up or down):
            across = min(max(rates) for rates in (up, down) if rates)
            uplink = across if 0 < across < SLOWER * median(local) else None
        return msgspec.structs.replace(switch, uplink_gbps=uplink, switches=inner)

    everyone = frozenset(tree.all_hosts)
    switches = tuple(measure_pair(switch, everyone) for switch in tree.switches)
    return msgspec.structs.replace(tree, switches=switches)


def journal_of(plan: Plan, directory: Path) -> JournalContents:
    """Read the journal of a plan; refuse that of another machine."""
    header_of(plan, directory)
    return read_journal(directory / JOURNAL_FILE)


def header_of(plan: Plan, directory: Path) -> JournalHeader:
    """Read the header of a plan's journal alone; refuse that of another machine."""
    journal = directory / JOURNAL_FILE
    if not journal.is_file():
        right = "name the plan with the measurements (a job of `tccl export` has none)"
        raise InputError(str(journal), "does not exist", f"{right}, or plan again")
    header, machine = read_header(journal), plan.cluster.classes[0].machine
    fits = (header.machine, header.simulated) == (machine.name, plan.simulated)
    if not (fits or header.hosts):
        kind = "simulated" if header.simulated else "measured"
        fault = f"is of machine {header.machine}, {kind}, and not of this plan"
        raise InputError(str(journal), fault, f"the journal of {machine.name}")
    return header


def source_again(plan: Plan, directory: Path) -> tuple[Bench, tuple[str, ...]]:
    """Return a source of a simulated plan, or of one host's, with its journal, and notices on it.

    Raises InputError: as `measured_again`, the plan has no model, or its journal is of another
    model.
    """
    if not plan.simulated:
        return measured_again(plan, directory, otherwise="explain it there")
    model, journal = known_model(plan, directory), directory / JOURNAL_FILE
    header = read_journal(journal).header if journal.is_file() else None
    noise, seed = (0.0, 0) if header is None else (header.noise, header.seed)
    source = open_source(model, noise=noise, seed=seed)
    if header not in (None, source.header):
        fault = f"is not of the model of {model.name} as this program has it"
        raise InputError(str(journal), fault, "plan again")
    return source, source.keep_in(journal, optional=True)


def measured_as(header: JournalHeader, machine: Machine) -> MeasuredMachine:
    """Return this host: its GPUs, or host memory if the plan's journal is of a dry run.

    Raises InputError: there is no GPU.
    """
    devices = ("host", len(machine.gpus)) if header.dry_run else ()
    return measured_machine(*devices)


def measured_again(plan: Plan, directory: Path, *, otherwise: str) -> tuple[Bench, tuple[str, ...]]:
    """Return a source over this host, if the plan was measured on it, and notices on its journal.

    `otherwise` is the remedy on another machine. Raises InputError: this is another machine, or the
    journal is missing, damaged, or another machine's.
    """
    machine, header = plan.machine, journal_of(plan, directory).header
    try:
        place = measured_as(header, machine)
    except InputError as error:
        used = f"{error.where} {error.what}"
    else:
        source = open_source(place, gpus=plan.gpus, options=search_options(place.backend))
        if source.header == header:
            return source, source.keep_in(directory / JOURNAL_FILE, optional=True)
        used = f"this is {place.machine.name} ({source.header})"
    raise InputError(
        f"the plan of {machine.name}",
        f"was measured on other GPUs or with other software ({header}) than there are here: {used}",
        otherwise,
    )


# The models in the directory of a simulated plan: planning one machine needs no simulator.
def planned_model(plan: Plan, directory: Path, number: int = 0) -> MachineModel | None:
    """Return the model behind the rates of a class in a simulated plan; None without a model.

    Raises InputError: the file was changed, is damaged, or describes another machine.
    """
    path = machine_file(plan, directory, number)
    if not plan.simulated:
        return None
    check_if_listed(directory, str(machine_file(plan, Path(), number)))
    if not path.is_file():
        return None
    node_class, description = plan.cluster.classes[number], read_description(path)
    learnt = description.model is not None and description.knowledge != node_class.knowledge
    if description.machine != node_class.machine or learnt:
        raise InputError(str(path), "is not the plan's machine", "plan it again")
    return description.model


def planned_models(plan: Plan, directory: Path) -> dict[str, MachineModel | None]:
    """Return the models behind the rates of all classes, by name; as `planned_model`."""
    classes = enumerate(plan.cluster.classes)
    return {host.name: planned_model(plan, directory, number) for number, host in classes}


def known_model(plan: Plan, directory: Path, number: int = 0) -> MachineModel:
    """Return the model of a class of a plan's hosts.

    Raises InputError: as `planned_model`, or there is none.
    """
    model = planned_model(plan, directory, number)
    if model is None:
        where = str(machine_file(plan, directory, number))
        right = "plan again with `tccl plan --simulate`"
        raise InputError(where, "holds no model to simulate by", right)
    return model


# The hosts of a plan for several.


def class_sources(source: HostsSource, cluster: Cluster) -> list[PlacedSource]:
    """Return a source for each class of hosts, over one host of it and a partner."""
    places = placements(cluster, source.session.transport)
    return [PlacedSource(source, place) for place in places]


@contextmanager
def hosts_again(plan: Plan, journal: JournalHeader, job: Job) -> Iterator[HostsSource]:
    """Open a source over the hosts of a job, on which a plan was measured with this journal.

    Raises InputError: the plan was measured on other hosts, or other cables join them.
    """
    machines = [node_class.machine for node_class in plan.cluster.classes]
    nics, dry_run = [nic for machine in machines for nic in machine.nics], dict[str, Any]()
    # Ports of RDMA cards are found; interfaces may be those that the user named.
    named = () if any(nic.port for nic in nics) else dict.fromkeys(nic.name for nic in nics)
    if journal.dry_run:
        dry_run = {"backend": "host", "devices": len(machines[0].gpus)}
    options = search_options(dry_run.get("backend"))
    interfaces = ",".join(named) or None
    with open_hosts(job, options=options, interfaces=interfaces, **dry_run) as source:
        missing = set(plan.cluster.names) - {host.name for host in source.session.hosts}
        if missing or not journal.covers(source.header):
            clause = f"was measured on other hosts ({journal}) than these"
            fault, right = f"{clause} ({source.header})", "plan these hosts"
            raise InputError(f"the plan of {len(plan.hosts)} hosts", fault, right)
        subnet_prefix(plan.cluster.cables, addresses_of(source), where="the plan")
        yield source


def addresses_of(source: HostsSource) -> Addresses:
    """Return the addresses of the NICs of rings by host."""
    return {
        host.name: {
            nic: f"{interface.address}/{interface.prefix}"
            for nic, interface in host.addresses.items()
            if nic in used_nics(host.machine)
        }
        for host in source.session.hosts
    }


def heard_by(source: HostsSource) -> Heard:
    """Return what the interfaces of the NICs of rings hear of other ports, by host."""
    return {
        host.name: {
            nic: (interface.name, interface.heard)
            for nic, interface in host.addresses.items()
            if nic in used_nics(host.machine)
        }
        for host in source.session.hosts
    }


def journal_by_class(
    plan: Plan, journal: JournalContents
) -> list[dict[TransferSet, list[Measurement]]]:
    """Return the journal's measurements of the plan's hops and chains, for each class of hosts.

    A journal names hosts. These sets, hops alone, in pairs, and chains, are of one host.
    """
    base = Bench(None, journal.measurements)
    by_class: list[dict[TransferSet, list[Measurement]]] = [{} for _ in plan.cluster.classes]
    for transport in NIC_TRANSPORTS.values():
        places = placements(plan.cluster, transport)
        for path in plan.paths:
            flows = [hop.flow for chain in path.chains for hop in chain.hops]
            sets = [transfer_set(flows), *(transfer_set([flow]) for flow in flows)]
            sets += [transfer_set(hop.flow for hop in chain.hops) for chain in path.chains]
            sets += [transfer_set(pair) for pair in combinations(flows, 2)]
            answers = by_class[path.node_class]
            further = _measured_pairs(plan.cluster, path.node_class, journal.header)
            partners = (placements(pair, transport)[0] for pair in further)
            for place in chain([places[path.node_class]], partners):
                source = PlacedSource(base, place)
                for transfers in dict.fromkeys(sets):
                    if transfers not in answers and (samples := source.recall(transfers)):
                        answers[transfers] = samples
                if not answers.keys().isdisjoint(sets):
                    break
    return by_class


def _measured_pairs(cluster: Cluster, number: int, header: JournalHeader) -> Iterator[Cluster]:
    """Yield pairs of measured hosts, the first of a class: new classes were measured with others.

    Hosts that a plan was extended by had the partners at hand. Cables lead to fixed ones.
    """
    if cluster.cables:
        return
    classes = cluster.host_classes
    measured = [name for name in header.hosts if name in classes]
    of_class = [name for name in measured if classes[name] == number][:MOST_ODD]
    for host, partner in product(of_class, measured[:MOST_SAMPLED]):
        if host != partner:
            yield part_of(cluster, (host, partner))
