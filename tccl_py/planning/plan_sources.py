"""Sources for more measurements of a plan: its model, its machine, or its hosts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tccl_py.errors import InputError
from tccl_py.model.cluster import Cluster
from tccl_py.model.machine import Machine
from tccl_py.model.measurement import JOURNAL_FILE, NIC_TRANSPORTS, JournalHeader, Measurement
from tccl_py.model.reports import part_of
from tccl_py.model.transfer import TransferSet, transfer_set
from tccl_py.plan.directory import machine_file
from tccl_py.plan.plan import Plan
from tccl_py.plan.staging import check_if_listed
from tccl_py.planning.chain_search import used_nics
from tccl_py.planning.probes import MOST_ODD, MOST_SAMPLED, PlacedSource, placements
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
