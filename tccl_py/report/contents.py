"""A report's contents: a plan's files, read and checked, and bars and maps of the rates in them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import TypeVar

import msgspec

from tccl_py.errors import InputError
from tccl_py.explanation.findings import EXPLANATION_FILE, Explanation, load_explanation
from tccl_py.health.checks import links_now
from tccl_py.health.host import Host
from tccl_py.model.machine import PciLink
from tccl_py.model.measurement import Measurement
from tccl_py.model.transfer import Flow, TransferSet, bounce, transfer_set
from tccl_py.plan.again import planned_model
from tccl_py.plan.beside import check_plan_directory, planned_fingerprint
from tccl_py.plan.directory import JOURNAL_FILE
from tccl_py.plan.load import load_plan
from tccl_py.plan.plan import ChoiceName, Plan
from tccl_py.plan.staging import PLAN_FILE
from tccl_py.plan.words import CHOICE_WORDS, mark, settings_words
from tccl_py.simulator.source import Simulator
from tccl_py.sources.journal import JournalContents, read_journal
from tccl_py.sources.pairs import pair_flow, pair_sets
from tccl_py.verify.evaluation import EVALUATION_FILE, Evaluation, load_evaluation
from tccl_py.verify.record import VERIFICATION_FILE, Verification, load_verification
from tccl_py.verify.size_table import SizeTuning
from tccl_py.verify.sizes import SIZES_FILE, load_sizes

_DRY_RUN = "is a dry run without GPUs"
_MOST_BESIDE = 16
"""Pairs of hops are simulated for at most so many GPUs: 25,320 sets, in a second."""
_VIRIDIS = (
    *((68, 1, 84), (72, 36, 117), (65, 68, 135), (53, 95, 141), (42, 120, 142), (33, 145, 140)),
    *((34, 168, 132), (68, 191, 112), (122, 209, 81), (189, 223, 38), (253, 231, 37)),
)
"""matplotlib's viridis at eleven places: even in lightness, and distinct for everybody."""

T = TypeVar("T")
Journal = Mapping[TransferSet, Sequence[Measurement]]
Hosts = Collection[str]
"""Hosts whose sets count, by the names in flows; the single host's name there is ""."""
ONE_HOST: Hosts = ("",)


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """A plan's directory; None stands for a missing file.

    `pairs` are rates of pairs of GPUs beyond the journal. `driver` is that of the measured host,
    and `now` has the links of its PCIe devices as they are, where the report is made there.
    `notices` are sentences.
    """

    directory: Path
    plan: Plan
    journal: JournalContents | None
    explanation: Explanation | None
    verification: Verification | None
    evaluation: Evaluation | None
    pairs: Journal
    planned: str
    driver: str
    now: dict[str, PciLink]
    sizes: tuple[SizeTuning, ...]
    notices: tuple[str, ...]

    @property
    def achieved(self) -> dict[ChoiceName, float]:
        """The bus bandwidth of each choice's jobs, GB/s."""
        arms = self.verification.arms if self.verification is not None else ()
        return {arm.name: arm.gbps for arm in arms if arm.gbps is not None}


def read_contents(directory: Path) -> Contents:
    """Read the files of a report; only the plan must be there."""
    check_plan_directory(directory)
    plan = load_plan(directory)
    journal, notices = _journal(directory / JOURNAL_FILE, plan)
    known = None if plan.simulated or plan.is_cluster else planned_fingerprint(plan, directory)
    day = datetime.fromtimestamp((directory / PLAN_FILE).stat().st_mtime, tz=timezone.utc)

    def beside(load: Callable[[Path], T | None], name: str) -> T | None:
        try:
            found = load(directory)
        except InputError as error:
            why = error.what
        else:
            if isinstance(found, Verification) and found.backend != "cuda":
                why = _DRY_RUN
            elif found is not None or not (directory / name).exists():
                return found
            else:
                why = "is of an earlier plan"
        notices.append(f"{name} is left out: it {why}")
        return None

    explanation = beside(load_explanation, EXPLANATION_FILE)
    evaluation = beside(load_evaluation, EVALUATION_FILE)
    verification = beside(load_verification, VERIFICATION_FILE)
    for arm in verification.arms if verification is not None else ():
        notices += [f"jobs of the choice {arm.name} failed: {arm.failure}"] * bool(arm.failure)
    notices += verification.transfer_notices if verification is not None else ()
    sizes = load_sizes(directory)
    if any(tuning.backend != "cuda" for tuning in sizes):
        sizes = ()
        notices.append(f"{SIZES_FILE} is left out: it {_DRY_RUN}")
    return Contents(
        directory=directory,
        plan=plan,
        journal=journal,
        explanation=explanation,
        evaluation=evaluation,
        verification=verification,
        pairs=simulated_pairs(plan, directory),
        planned=f"{day:%Y-%m-%d}",
        driver=known.driver if known is not None else "",
        now=links_now(plan.machine, known, Host()) if known is not None else {},
        sizes=sizes,
        notices=tuple(notices),
    )


def _journal(path: Path, plan: Plan) -> tuple[JournalContents | None, list[str]]:
    """Return the journal beside the plan, and notices; None for another machine's journal."""
    if not path.exists():
        return None, [f"{path.name} is not there: rates of single hops and pairs are not known"]
    journal = read_journal(path)
    header = journal.header
    names = {part.machine.name for part in plan.cluster.classes}
    other = header.machine not in names and not plan.is_cluster
    if other or header.simulated != plan.simulated:
        kind = "simulated" if header.simulated else "measured"
        return None, [f"{path.name} is left out: it holds {kind} rates of {header.machine}"]
    return journal, list(journal.notices)


def rate_sources(contents: Contents) -> Iterator[tuple[str, str, str]]:
    """Yield the kinds of rates and facts in the report: name, provenance, and note."""
    plan, found = contents.plan, contents.explanation
    done = "simulated" if plan.simulated else "measured"
    basis = "a prediction of NCCL's bus bandwidth"
    if plan.tuned:
        basis = "shares of the bandwidth of NCCL jobs when settings were tuned"
    cost = (
        f"{plan.sets_measured} sets {done}, {plan.sets_remembered} from memory or journal, "
        f"{plan.sets_by_symmetry} by symmetry; search {plan.strategy}"
    )
    yield "rates of rings and hops", plan.provenance, f"{basis}; {cost}"
    stock = mark(simulated=plan.simulated, assumed=plan.stock.assumed)
    yield "default NCCL", stock, plan.stock.note
    searched = "of all ring sets of the searched sizes under these settings"
    yield "bound", plan.provenance, searched if plan.bound_gbps else "not known"
    if plan.limit_gbps is not None:
        yield "limit", plan.provenance, "bare copies over the hops of the recommended choice"
    if found is not None:
        yield "explanation", found.provenance, ""
    if contents.achieved:
        yield "achieved rates", "measured with NCCL (verify.json)", ""
    if contents.journal is not None:
        yield "maps and pairs", *_journal_source(contents.journal)
    for part in plan.cluster.classes:
        known = part.knowledge
        facts = Counter(fact.provenance for fact in known.peer_access)
        pairs = ", ".join(f"{count} pairs {kind}" for kind, count in facts.items())
        default = f"by default {'yes' if known.peer_access_default else 'no'}"
        access = f"{known.peer_access_provenance} ({default})"
        where = f" of {part.name}" if plan.is_cluster else ""
        yield f"direct access between GPUs{where}", access, pairs
        for link in known.hidden_links:
            yield f"hidden link {link.one} to {link.other}{where}", link.provenance, link.note


def _journal_source(journal: JournalContents) -> tuple[str, str]:
    measured = [one for found in journal.measurements.values() for one in found]
    kinds = Counter(mark(simulated=one.simulated, assumed=one.assumed) for one in measured)
    source = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "nothing measured"
    note = f"{len(measured)} measurements of {journal.header.machine} ({journal.header.identity})"
    unsettled = sum(not one.settled for one in measured)
    return source, note + (f"; {unsettled} are less precise than asked" if unsettled else "")


# Rates of a plan and of a journal: bars, and maps of single hops and of pairs of hops.
class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """A rate to compare, None if unknown: `kind` is a class of the page; `note` explains it."""

    label: str
    gbps: float | None
    kind: str
    note: str = ""


def rate_bars(plan: Plan, achieved: Mapping[ChoiceName, float]) -> list[Bar]:
    """Return bars of the choices, predicted and `achieved` by jobs, then of what is possible."""
    how = "achieved when tuned" if plan.tuned else "predicted"
    found = []
    for name, choice in plan.choices.items():
        recommended, gain = name == plan.recommended, plan.gain(name)
        notes = [
            "recommended" * recommended,
            f"{gain:.2f}x default NCCL" if gain is not None and name != "default" else "",
            "" if choice.rate_gbps is not None else "not rated",
            choice.note,
        ]
        label, kind = CHOICE_WORDS[name], "plan" if recommended else "stock"
        bar = Bar(label=f"{label}, {how}", gbps=choice.rate_gbps, kind=kind)
        found.append(msgspec.structs.replace(bar, note="; ".join(filter(None, notes))))
        if name in achieved:
            found.append(Bar(label=f"{label}, achieved", gbps=achieved[name], kind="achieved"))
    limits = {
        plan.limit_text or "bare copies": plan.limit_gbps,
        f"upper bound: the plan is {plan.proof}": plan.bound_gbps,
    }
    bounds = {label: gbps for label, gbps in limits.items() if gbps is not None}
    return found + [Bar(label=label, gbps=bounds[label], kind="bound") for label in bounds]


def settings_bars(plan: Plan) -> list[Bar]:
    """Return the best ring set under each of the settings searched; empty if not kept."""
    return [
        Bar(
            label=settings_words(found.settings),
            gbps=found.rate_gbps,
            kind="plan" if found.settings == plan.settings else "stock",
            note=f"{found.rings_in_set} ring{'' if found.rings_in_set == 1 else 's'}",
        )
        for found in plan.alternatives
    ]


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A flow between two GPUs and its rate, GB/s, alone or beside another flow."""

    flow: Flow
    gbps: float
    beside: Flow | None = None


Readings = dict[tuple[int, int], Reading]
"""By GPU and GPU, or by NUMA node and GPU."""


class HeatMap(msgspec.Struct, frozen=True, kw_only=True):
    """Readings by rows and columns; colours reach up to `largest`, GB/s."""

    name: str
    title: str
    caption: str
    readings: Readings
    largest: float
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    row_word: str
    column_word: str
    row_letter: str = "G"

    @property
    def is_complete(self) -> bool:
        """True if every cell has a rate, but for those from a GPU to itself."""
        own = set(self.rows).intersection(self.columns) if self.row_letter == "G" else ()
        return len(self.readings) == len(self.rows) * len(self.columns) - len(own)


def heat_maps(
    journal: Journal, gpus: tuple[int, ...], numa_nodes: tuple[int, ...], hosts: Hosts = ONE_HOST
) -> list[HeatMap]:
    """Return maps of pairs of GPUs alone and beside their worst neighbour, and of bounces."""
    comparable = with_equal_channels(journal, hosts)
    alone = _within(fastest_alone(comparable, hosts), gpus, gpus)
    together = _within(slowest_together(journal, hosts), gpus, gpus)
    usual = {reading.flow.blocks for reading in alone.values()}
    equal = {
        each: found
        for each, found in journal.items()
        if {one.blocks for one in each.flows} == usual
    }
    alike = _within(slowest_together(equal, hosts), gpus, gpus)
    if len(alike) == len(together):
        together = alike
    bounces = _within(fastest_bounces(journal, hosts), numa_nodes, gpus)
    # One scale for both: equal colours are equal rates.
    largest = max(_largest(alone), _largest(together))
    first = HeatMap(
        name="alone",
        title="Each pair of GPUs alone",
        caption=_alone_caption(alone, len(gpus)),
        readings=alone,
        largest=largest,
        rows=gpus,
        columns=gpus,
        row_word="from GPU",
        column_word="to GPU",
    )
    second = msgspec.structs.replace(
        first,
        name="together",
        title="Each pair of GPUs beside its worst neighbour",
        caption="The lowest rate of a hop beside one other; the table names both.",
        readings=together,
    )
    third = HeatMap(
        name="bounces",
        title="Bounces by sending GPU and NUMA node",
        caption="The fastest bounce from a GPU to any other through a NUMA node's memory, alone.",
        readings=bounces,
        largest=_largest(bounces),
        rows=numa_nodes,
        columns=gpus,
        row_word="through",
        column_word="from GPU",
        row_letter="C",
    )
    return [first, second, third]


def _alone_caption(alone: Readings, gpus: int) -> str:
    blocks = next((one.flow.blocks for one in alone.values()), None)
    channels = "as many channels as help" if blocks is None else f"{blocks} channels"
    said = f"The fastest mechanism from one GPU to another alone, each with {channels}."
    if len(alone) == gpus * (gpus - 1):
        return said
    return f"{said} For all: `tccl measure --all-pairs --journal DIR/measurements.jsonl`."


def with_equal_channels(journal: Journal, hosts: Hosts = ONE_HOST) -> Journal:
    """Return the sets of one flow with the number of channels by which most pairs were measured."""
    pairs: dict[int | None, set[tuple[int, int]]] = {}
    for one in _singles(journal, hosts):
        pairs.setdefault(one.flow.blocks, set()).add(_ends(one.flow))
    if not pairs:
        return {}
    most = max(pairs, key=lambda blocks: (len(pairs[blocks]), blocks is None, blocks or 0))
    singles = (transfers for transfers in journal if len(transfers) == 1)
    return {one: journal[one] for one in singles if one.flows[0].blocks == most}


def simulated_pairs(plan: Plan, directory: Path) -> Journal:
    """Return single hops, bounces and pairs of hops by the model of a simulated plan.

    Single hops are each pair of GPUs, and bounces go through each NUMA node. Pairs of hops share
    no sending and no receiving GPU. Without a model there is nothing.
    """
    if not plan.simulated or len(plan.cluster.classes) > 1:
        return {}
    model = planned_model(plan, directory)
    if model is None:
        return {}
    ends = list(itertools.permutations(plan.class_gpus[0], 2))
    flows = [pair_flow(model.machine, model.knowledge, *pair) for pair in ends]
    nodes = model.machine.numa_nodes
    bounces = [bounce(*pair, node.index) for node in nodes for pair in ends]
    sets = pair_sets([*dict.fromkeys([*flows, *bounces])])
    if len(plan.class_gpus[0]) <= _MOST_BESIDE:
        pairs = itertools.combinations(zip(ends, flows, strict=True), 2)
        sets += [
            transfer_set([flow, other])
            for ((source, target), flow), ((start, end), other) in pairs
            if source != start and target != end
        ]
    return {found.transfers: [found] for found in Simulator(model).measure(sets)}


def _within(readings: Readings, rows: Sequence[int], columns: Sequence[int]) -> Readings:
    inside = (key for key in readings if key[0] in rows and key[1] in columns)
    return {key: readings[key] for key in sorted(inside)}


def _largest(readings: Readings) -> float:
    return max((reading.gbps for reading in readings.values()), default=0.0)


def viridis(share: float) -> tuple[int, int, int]:
    """Return the colour at `share` of the scale, 0 to 1.

    >>> viridis(0.05)
    (70, 18, 100)
    """
    place = max(0.0, min(1.0, share)) * (len(_VIRIDIS) - 1)
    low = min(int(place), len(_VIRIDIS) - 2)
    red, green, blue = (
        round(first + (second - first) * (place - low))
        for first, second in zip(_VIRIDIS[low], _VIRIDIS[low + 1], strict=True)
    )
    return red, green, blue


def cell_style(gbps: float, largest: float) -> str:
    """Return the colours of a cell as CSS."""
    return "background:{};color:{}".format(*cell_colours(gbps, largest))


def cell_colours(gbps: float, largest: float) -> tuple[str, str]:
    """Return the colours of a cell: background by rate, and legible ink."""
    red, green, blue = viridis(gbps / largest)
    ink = "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 120 else "#ffffff"
    return f"#{red:02x}{green:02x}{blue:02x}", ink


def cell_text(gbps: float) -> str:
    """Return a rate in few characters.

    >>> cell_text(3.478), cell_text(50.65), cell_text(360.6)
    ('3.5', '50.6', '361')
    """
    return f"{gbps:.0f}" if gbps >= 100 else f"{gbps:.1f}"


def fastest_alone(journal: Journal, hosts: Hosts = ONE_HOST) -> Readings:
    """Return the fastest flow of each ordered pair of GPUs that was measured alone."""
    return {_ends(one.flow): one for one in _singles(journal, hosts)}


def fastest_bounces(journal: Journal, hosts: Hosts = ONE_HOST) -> Readings:
    """Return the fastest bounce alone through each NUMA node from each GPU."""
    return {
        (one.flow.transfers[0].destination.index, one.flow.source.index): one
        for one in _singles(journal, hosts)
        if one.flow.is_bounce
    }


def slowest_together(journal: Journal, hosts: Hosts = ONE_HOST) -> Readings:
    """Return the slowest flow of each ordered pair of GPUs beside one other flow between GPUs."""
    found = sorted(_beside(journal, hosts), key=lambda reading: reading.gbps)
    return {_ends(one.flow): one for one in reversed(found)}


def _ends(flow: Flow) -> tuple[int, int]:
    return flow.source.index, flow.destination.index


def _singles(journal: Journal, hosts: Hosts) -> list[Reading]:
    """Return the flows measured alone, the fastest last."""
    found = [
        Reading(flow=transfers.flows[0], gbps=_rates(measured)[0])
        for transfers, measured in journal.items()
        if len(transfers) == 1 and _joins_gpus(transfers, hosts)
    ]
    return sorted(found, key=lambda one: -one.gbps)[::-1]


def _beside(journal: Journal, hosts: Hosts) -> Iterator[Reading]:
    for transfers, measured in journal.items():
        if len(transfers) != 2 or not _joins_gpus(transfers, hosts):
            continue
        first, second = zip(transfers.flows, _rates(measured), strict=True)
        for (flow, gbps), (other, _) in ((first, second), (second, first)):
            yield Reading(flow=flow, gbps=gbps, beside=other)


def _joins_gpus(transfers: TransferSet, hosts: Hosts) -> bool:
    used = {host for flow in transfers.flows for host in flow.hosts}
    ends = [(flow.source, flow.destination) for flow in transfers.flows]
    gpus = all(source.kind == target.kind == "G" for source, target in ends)
    return gpus and len(used) == 1 and used.issubset(hosts)


def _rates(measured: Sequence[Measurement]) -> list[float]:
    rows = zip(*(measurement.samples_gbps for measurement in measured), strict=True)
    return [median([rate for row in pooled for rate in row]) for pooled in rows]
