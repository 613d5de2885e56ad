"""The report's lists: parts of the machine, and files of the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from tccl_py.errors import InputError
from tccl_py.explain.findings import EXPLANATION_FILE, Explanation, load_explanation
from tccl_py.model.machine import Machine
from tccl_py.model.measurement import Measurement
from tccl_py.model.transfer import Flow, TransferSet, transfer_set
from tccl_py.plan.directory import JOURNAL_FILE, check_plan_directory, machine_file
from tccl_py.plan.plan import ChoiceName, Plan, load_plan
from tccl_py.plan.staging import PLAN_FILE
from tccl_py.report.machine import link_words
from tccl_py.sources.journal import JournalContents, read_journal
from tccl_py.verify.record import VERIFICATION_FILE, load_verification

# What a report is made of: the files of a plan's directory, read and checked.


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """A plan's directory; None is a file that is not there.

    `achieved` is the bus bandwidth that jobs of each choice got, GB/s. `notices` are sentences.
    """

    directory: Path
    plan: Plan
    journal: JournalContents | None
    explanation: Explanation | None
    achieved: dict[ChoiceName, float]
    notices: tuple[str, ...]


def read_contents(directory: Path) -> Contents:
    """Read what a report needs; only the plan must be there.

    Raises:
        InputError: no directory, no plan in it, or a file in it is damaged.
    """
    check_plan_directory(directory)
    plan = load_plan(directory)
    journal, of_journal = _journal(directory / JOURNAL_FILE, plan)
    explanation, of_explanation = _explanation(directory)
    achieved, of_achieved = _achieved(directory)
    return Contents(
        directory=directory,
        plan=plan,
        journal=journal,
        explanation=explanation,
        achieved=achieved,
        notices=(*of_journal, *of_explanation, *of_achieved),
    )


def _journal(path: Path, plan: Plan) -> tuple[JournalContents | None, tuple[str, ...]]:
    """The journal beside the plan; one of another machine or kind is left out, with a notice."""
    if not path.exists():
        return None, (f"{path.name} is not there: rates of single hops and pairs are not known",)
    journal = read_journal(path)
    header = journal.header
    if header.machine != plan.machine.name or header.simulated != plan.simulated:
        kind = "simulated" if header.simulated else "measured"
        return None, (f"{path.name} is left out: it holds {kind} rates of {header.machine}",)
    return journal, journal.notices


def _explanation(directory: Path) -> tuple[Explanation | None, tuple[str, ...]]:
    """What `tccl explain` found of this plan; what it found of an earlier one is left out."""
    found = load_explanation(directory)
    if found is None and (directory / EXPLANATION_FILE).exists():
        return None, (f"{EXPLANATION_FILE} is left out: it is of an earlier plan",)
    return found, ()


def _achieved(directory: Path) -> tuple[dict[ChoiceName, float], tuple[str, ...]]:
    """What was verified of this plan; a file that says nothing of it is left out, with a notice."""
    if not (directory / VERIFICATION_FILE).exists():
        return {}, ()
    try:
        found = load_verification(directory)
    except InputError as error:
        return {}, (f"{VERIFICATION_FILE} is left out: it {error.what}",)
    if found is None:
        return {}, (f"{VERIFICATION_FILE} is left out: it is of an earlier plan",)
    if found.backend != "cuda":
        return {}, (f"{VERIFICATION_FILE} is left out: it is a rehearsal without GPUs",)
    failed = [one for one in found.arms if one.failure]
    return (
        {one.name: one.gbps for one in found.arms if one.gbps is not None},
        tuple(f"jobs of the choice {one.name} failed: {one.failure}" for one in failed),
    )


class PlanFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file below the plan's directory; `there` is false if it is missing."""

    name: str
    purpose: str
    there: bool


def plan_files(contents: Contents) -> list[PlanFile]:
    """What a plan's directory has, in the order in which a reader wants it."""
    directory, plan = contents.directory, contents.plan
    purposes = {
        "nccl/env.sh": "settings and graph, for jobs over exactly the plan's GPUs",
        "nccl/nccl.conf": "settings that hold for every job of a host; names no graph",
        "nccl/graph.xml": "the rings, as NCCL reads them",
        PLAN_FILE: "the plan itself",
        JOURNAL_FILE: "every measurement; an interrupted plan goes on from it",
        str(machine_file(plan, Path())): "the machine",
    }
    return [
        *(
            PlanFile(name=name, purpose=purpose, there=(directory / name).is_file())
            for name, purpose in purposes.items()
        ),
        *_subsets(directory),
    ]


def _subsets(directory: Path) -> list[PlanFile]:
    count = len(list((directory / "nccl" / "subsets").glob("graph-*.xml")))
    if not count:
        return []
    purpose = f"{count} more graph files, each for one smaller set of GPUs"
    return [PlanFile(name="nccl/subsets/", purpose=purpose, there=True)]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A device or link of the machine, in words."""

    id: str
    what: str
    parent: str = ""
    link: str = ""


def machine_parts(machine: Machine) -> list[Part]:
    """Every device and NVLink of a machine."""
    parts = [
        Part(
            id=device,
            what=what.strip(" ,"),
            parent=machine.parents.get(device, ""),
            link=" ".join(link_words(machine.links[device])) if device in machine.links else "",
        )
        for device, what in _devices(machine).items()
    ]
    return parts + [
        Part(id=f"{one.source} to {one.target}", what=one.kind, link=f"{one.count} links")
        for one in machine.nvlinks
    ]


def _devices(machine: Machine) -> dict[str, str]:
    return {
        **{
            node.id: f"NUMA node {node.numa_id}, socket {_known(node.socket)}, {node.vendor}"
            for node in machine.numa_nodes
        },
        **{bridge.id: "PCI bridge" for bridge in machine.bridges},
        **{gpu.id: f"GPU {gpu.name} at {gpu.bus_id}" for gpu in machine.gpus},
        **{nic.id: f"NIC {nic.name} {nic.bus_id}" for nic in machine.nics},
        **{switch.id: f"NVLink switch {switch.bus_id}" for switch in machine.nvswitches},
    }


def _known(socket: int | None) -> str:
    return "not reported" if socket is None else str(socket)


# What a journal says of single hops and of pairs of hops, as tables by GPU.


_SLOWED = 0.99
"""What keeps more of its rate than this is not slowed: noise makes as much."""

Journal = Mapping[TransferSet, Sequence[Measurement]]


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A flow between two GPUs and its rate, GB/s; `beside` is what ran with it, if anything."""

    flow: str
    gbps: float
    bounce: bool
    beside: str = ""
    alone_gbps: float | None = None

    @property
    def kept(self) -> float | None:
        """Which part of its rate alone it keeps; None if that was not measured."""
        return self.gbps / self.alone_gbps if self.alone_gbps else None


Readings = dict[tuple[int, int], Reading]
"""By GPU and GPU, or by NUMA node and GPU."""


def fastest_alone(journal: Journal) -> Readings:
    """Each ordered pair of GPUs -> the fastest flow between them that was measured alone."""
    found: Readings = {}
    for flow, gbps in _singles(journal):
        _keep_fastest(found, _pair(flow), flow, gbps)
    return found


def fastest_bounces(journal: Journal) -> Readings:
    """(NUMA node, GPU) -> the fastest bounce alone that the GPU sends through that node."""
    found: Readings = {}
    for flow, gbps in _singles(journal):
        if flow.is_bounce:
            host = flow.transfers[0].destination
            _keep_fastest(found, (host.index, flow.source.index), flow, gbps)
    return found


def slowest_together(journal: Journal) -> Readings:
    """Each ordered pair of GPUs -> its slowest flow beside one other flow between GPUs."""
    found: Readings = {}
    for flow, reading in _beside(journal):
        pair = _pair(flow)
        if pair not in found or reading.gbps < found[pair].gbps:
            found[pair] = reading
    return found


def worst_pairs(journal: Journal, count: int) -> list[Reading]:
    """The flows that one other flow slows most, worst first.

    Two flows stand once, with the blocks and FIFOs with which they slow each other most.
    """
    worst: dict[frozenset[str], Reading] = {}
    for _, reading in _beside(journal):
        ways = frozenset(_way(text) for text in (reading.flow, reading.beside))
        if ways not in worst or _kept(reading) < _kept(worst[ways]):
            worst[ways] = reading
    slowed = [one for one in worst.values() if _kept(one) < _SLOWED]
    return sorted(slowed, key=lambda one: (_kept(one), one.flow, one.beside))[:count]


def _way(flow: str) -> str:
    """A flow's text without its options."""
    return flow.partition("{")[0]


def _kept(reading: Reading) -> float:
    return 1.0 if reading.kept is None else reading.kept


def _keep_fastest(found: Readings, key: tuple[int, int], flow: Flow, gbps: float) -> None:
    if key not in found or gbps > found[key].gbps:
        found[key] = Reading(flow=str(flow), gbps=gbps, bounce=flow.is_bounce)


def _singles(journal: Journal) -> Iterator[tuple[Flow, float]]:
    for transfers, measured in journal.items():
        if len(transfers) == 1:
            (flow,) = transfers.flows
            if _joins_gpus(flow):
                yield flow, _rates(measured)[0]


def _beside(journal: Journal) -> Iterator[tuple[Flow, Reading]]:
    """Each flow of each set of two, beside the other."""
    for transfers, measured in journal.items():
        flows = transfers.flows
        if len(flows) != 2 or not all(_joins_gpus(flow) for flow in flows):
            continue
        rates = _rates(measured)
        for this, other in ((0, 1), (1, 0)):
            alone = journal.get(transfer_set([flows[this]]))
            yield (
                flows[this],
                Reading(
                    flow=str(flows[this]),
                    gbps=rates[this],
                    bounce=flows[this].is_bounce,
                    beside=str(flows[other]),
                    alone_gbps=_rates(alone)[0] if alone else None,
                ),
            )


def _joins_gpus(flow: Flow) -> bool:
    ends = flow.source, flow.destination
    return all(place.kind == "G" and not place.host for place in ends) and ends[0] != ends[1]


def _pair(flow: Flow) -> tuple[int, int]:
    return flow.source.index, flow.destination.index


def _rates(measured: Sequence[Measurement]) -> list[float]:
    """Median rate of each flow over all repeats of all its measurements, GB/s."""
    rows = zip(*(one.samples_gbps for one in measured), strict=True)
    return [float(np.median([rate for row in pooled for rate in row])) for pooled in rows]


# Where every figure of a report comes from.


class FigureSource(msgspec.Struct, frozen=True, kw_only=True):
    """Which figures come from where, and what is to be known about them."""

    figures: str
    source: str
    note: str = ""


def mark(*, simulated: bool, assumed: bool) -> str:
    """The mark beside every block of figures.

    >>> mark(simulated=True, assumed=True)
    'simulated from assumed figures'
    """
    if not simulated:
        return "measured"
    return "simulated from assumed figures" if assumed else "simulated"


def figure_sources(contents: Contents) -> list[FigureSource]:
    """All figures of the report by kind."""
    return [*_of_plan(contents), *_of_journal(contents), *_of_machine(contents)]


def _of_plan(contents: Contents) -> Iterator[FigureSource]:
    plan = contents.plan
    done = "simulated" if plan.simulated else "measured"
    effort = (
        f"{plan.sets_measured} sets {done}, {plan.sets_remembered} from memory or journal, "
        f"{plan.sets_by_symmetry} by symmetry; search {plan.strategy}"
    )
    what = "a prediction of NCCL's bus bandwidth"
    if plan.tuned:
        what = "shares of what jobs of NCCL achieved when settings were tuned"
    note = f"{what}; {effort}"
    yield FigureSource(figures="rates of rings and hops", source=plan.provenance, note=note)
    stock = mark(simulated=plan.simulated, assumed=plan.stock.assumed)
    yield FigureSource(figures="stock NCCL", source=stock, note=plan.stock.note)
    yield FigureSource(
        figures="bound",
        source=plan.provenance,
        note="of all ring sets of the searched sizes under these settings"
        if plan.bound_gbps
        else "not known",
    )
    if plan.limit_gbps is not None:
        note = "bare copies over the hops of the recommended choice"
        yield FigureSource(figures="limit", source=plan.provenance, note=note)
    if contents.explanation is not None:
        found = contents.explanation
        yield FigureSource(
            figures="explanation", source=mark(simulated=found.simulated, assumed=found.assumed)
        )
    if contents.achieved:
        yield FigureSource(figures="achieved rates", source="measured with NCCL (verify.json)")


def _of_journal(contents: Contents) -> Iterator[FigureSource]:
    if contents.journal is None:
        return
    measured = [one for listed in contents.journal.measurements.values() for one in listed]
    header = contents.journal.header
    kinds = Counter(mark(simulated=one.simulated, assumed=one.assumed) for one in measured)
    unsettled = sum(not one.settled for one in measured)
    notes = [f"{len(measured)} measurements of {header.machine} ({header.identity})"]
    if unsettled:
        notes.append(f"{unsettled} did not come as close as asked")
    source = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "nothing measured"
    yield FigureSource(figures="maps and pairs", source=source, note="; ".join(notes))


def _of_machine(contents: Contents) -> Iterator[FigureSource]:
    known = contents.plan.knowledge
    facts = Counter(fact.provenance for fact in known.peer_access)
    listed = ", ".join(f"{count} pairs {kind}" for kind, count in facts.items())
    default = f"by default {'yes' if known.peer_access_default else 'no'}"
    yield FigureSource(
        figures="which GPUs reach each other directly",
        source=f"{known.peer_access_provenance} ({default})",
        note=listed,
    )
    for link in known.hidden_links:
        hidden = f"hidden link {link.one} to {link.other}"
        yield FigureSource(figures=hidden, source=link.provenance, note=link.note)
