"""A report's contents: a plan's files, read and checked, and bars and maps of the rates in them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import TypeVar

import msgspec
import numpy as np

from tccl_py.errors import InputError
from tccl_py.experiments.record import Verification
from tccl_py.experiments.sizes import SizeTuning, load_sizes
from tccl_py.explanation.findings import Explanation
from tccl_py.health.checks import links_now
from tccl_py.health.host import HostState
from tccl_py.model.machine import PciLink
from tccl_py.model.measurement import JOURNAL_FILE, Measurement
from tccl_py.model.rings import bounce
from tccl_py.model.transfer import Flow, TransferSet, transfer_set
from tccl_py.plan.plan import Plan
from tccl_py.plan.results import Kept, Tuning, plan_in, planned_fingerprint
from tccl_py.plan.staging import PLAN_FILE
from tccl_py.planning.plan_sources import planned_model
from tccl_py.report.verification import trade_off_lines
from tccl_py.simulator.source import Simulator
from tccl_py.sources.journal import JournalContents, read_journal
from tccl_py.sources.pairs import pair_flow, pair_sets

_DRY_RUN = "is a dry run without GPUs"
_MOST_BESIDE = 16
"""Pairs of hops are simulated for at most so many GPUs: 25,320 sets, in a second."""
_VIRIDIS = (
    *((68, 1, 84), (72, 36, 117), (65, 68, 135), (53, 95, 141), (42, 120, 142), (33, 145, 140)),
    *((34, 168, 132), (68, 191, 112), (122, 209, 81), (189, 223, 38), (253, 231, 37)),
)
"""matplotlib's viridis at eleven places: even in lightness, and distinct for everybody."""

K = TypeVar("K", bound=Kept)
Journal = Mapping[TransferSet, Sequence[Measurement]]


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
    pairs: Journal
    planned: str
    driver: str
    now: dict[str, PciLink]
    sizes: tuple[SizeTuning, ...]
    notices: tuple[str, ...]


def read_contents(directory: Path) -> Contents:
    """Read the files of a report; only the plan must be there."""
    plan = plan_in(directory)
    journal, notices = _journal(directory / JOURNAL_FILE, plan)
    fingerprint = None if plan.simulated else planned_fingerprint(plan, directory)
    day = datetime.fromtimestamp((directory / PLAN_FILE).stat().st_mtime, tz=timezone.utc)

    def load(kind: type[K]) -> K | None:
        try:
            finding = kind.load(directory)
        except InputError as error:
            why = f"{error.what}; {error.right}"
        else:
            if isinstance(finding, Verification) and finding.backend != "cuda":
                why = _DRY_RUN
            elif finding is not None or not (directory / kind.FILE).exists():
                return finding
            else:
                why = "is of an earlier plan"
        notices.append(f"{kind.FILE} is left out: it {why}")
        return None

    explanation = load(Explanation)
    verification = load(Verification)
    for arm in verification.arms if verification is not None else ():
        notices += [f"jobs of the choice {arm.name} failed: {arm.failure}"] * bool(arm.failure)
    notices += trade_off_lines(verification) if verification is not None else ()
    sizes = load_sizes(directory)
    if any(tuning.backend != "cuda" for tuning in sizes):
        sizes = ()
        notices.append(f"{Tuning.FILE} is left out: it {_DRY_RUN}")
    return Contents(
        directory=directory,
        plan=plan,
        journal=journal,
        explanation=explanation,
        verification=verification,
        pairs=simulated_pairs(plan, directory),
        planned=f"{day:%Y-%m-%d}",
        driver=fingerprint.driver if fingerprint is not None else "",
        now=links_now(plan.machine, fingerprint, HostState()) if fingerprint is not None else {},
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
    foreign = header.machine not in names and not header.hosts
    if foreign or header.simulated != plan.simulated:
        kind = "simulated" if header.simulated else "measured"
        return None, [f"{path.name} is left out: it holds {kind} rates of {header.machine}"]
    return journal, list(journal.notices)


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A flow between two GPUs and its rate, GB/s, alone or beside another flow."""

    flow: Flow
    gbps: float
    beside: Flow | None = None


Readings = dict[tuple[int, int], Reading]
"""By GPU and GPU, or by NUMA node and GPU."""


class HeatMap(msgspec.Struct, frozen=True, kw_only=True):
    """Readings by rows and columns; colours reach up to `largest`, GB/s.

    Rows are sending GPUs and columns receiving ones; of `bounces` NUMA nodes and sending GPUs.
    """

    title: str
    caption: str
    readings: Readings
    largest: float
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    bounces: bool = False

    @property
    def is_complete(self) -> bool:
        """True if every cell has a rate, but for those from a GPU to itself."""
        own = () if self.bounces else set(self.rows).intersection(self.columns)
        return len(self.readings) == len(self.rows) * len(self.columns) - len(own)


def heat_maps(
    journal: Journal,
    gpus: tuple[int, ...],
    numa_nodes: tuple[int, ...],
    hosts: Collection[str] = ("",),
) -> list[HeatMap]:
    """Return maps of pairs of GPUs alone and beside their worst neighbour, and of bounces.

    Sets over `hosts` count, by the names in flows; the single host's name there is "".
    """
    readings = _readings(journal, hosts)
    alone = [reading for reading in readings if reading.beside is None]
    besides = sorted((one for one in readings if one.beside), key=lambda one: one.gbps)
    usual = _usual_channels(alone)
    fastest = _map_readings((one for one in alone if one.flow.blocks == usual), gpus, gpus)
    slowest = _map_readings(besides, gpus, gpus)
    equal = [one for one in besides if one.beside and one.flow.blocks == one.beside.blocks == usual]
    if len(equal_blocks := _map_readings(equal, gpus, gpus)) == len(slowest):
        slowest = equal_blocks
    nodes = [one for one in alone if one.flow.is_bounce]
    bounces = _map_readings(nodes, numa_nodes, gpus, bounces=True)
    first = HeatMap(
        title="Each pair of GPUs alone",
        caption=_alone_caption(fastest, len(gpus)),
        readings=fastest,
        # One scale for pairs: equal colours are equal rates.
        largest=max(_largest(fastest), _largest(slowest)),
        rows=gpus,
        columns=gpus,
    )
    second = msgspec.structs.replace(
        first,
        title="Each pair of GPUs beside its worst neighbour",
        caption="The lowest rate of a hop beside one other; the table names both.",
        readings=slowest,
    )
    third = HeatMap(
        title="Bounces by sending GPU and NUMA node",
        caption="The fastest bounce from a GPU to any other through a NUMA node's memory, alone.",
        readings=bounces,
        largest=_largest(bounces),
        rows=numa_nodes,
        columns=gpus,
        bounces=True,
    )
    return [first, second, third]


def _readings(journal: Journal, hosts: Collection[str]) -> list[Reading]:
    """Return flows between GPUs of one host, alone and beside one other, the fastest first."""
    readings = []
    for transfers, measured in journal.items():
        flows = transfers.flows
        used = {host for flow in flows for host in flow.hosts}
        gpus = all(flow.source.kind == flow.destination.kind == "G" for flow in flows)
        if len(flows) <= 2 and gpus and len(used) == 1 and used.issubset(hosts):
            rows = zip(*(measurement.samples_gbps for measurement in measured), strict=True)
            for at, row in enumerate(rows):
                gbps = median(itertools.chain.from_iterable(row))
                beside = flows[1 - at] if len(flows) == 2 else None
                readings.append(Reading(flow=flows[at], gbps=gbps, beside=beside))
    return sorted(readings, key=lambda reading: -reading.gbps)


def _usual_channels(alone: Sequence[Reading]) -> int | None:
    """Return the number of channels by which most pairs were measured; None is unlimited."""
    counts = Counter(
        blocks for blocks, _ in {(reading.flow.blocks, _ends(reading.flow)) for reading in alone}
    )
    return max(counts, key=lambda blocks: (counts[blocks], blocks or math.inf), default=None)


def _ends(flow: Flow) -> tuple[int, int]:
    return flow.source.index, flow.destination.index


def _map_readings(
    readings: Iterable[Reading],
    rows: Sequence[int],
    columns: Sequence[int],
    *,
    bounces: bool = False,
) -> Readings:
    """Return the first of the readings for each row and column."""
    by_ends: Readings = {}
    for reading in readings:
        source, target = _ends(reading.flow)
        row, column = (reading.flow.through, source) if bounces else (source, target)
        if row is not None and row in rows and column in columns:
            by_ends.setdefault((row, column), reading)
    return dict(sorted(by_ends.items()))


def _alone_caption(alone: Readings, gpus: int) -> str:
    blocks = next((reading.flow.blocks for reading in alone.values()), None)
    channels = "as many channels as help" if blocks is None else f"{blocks} channels"
    sentence = f"The fastest mechanism from one GPU to another alone, each with {channels}."
    if len(alone) == gpus * (gpus - 1):
        return sentence
    return f"{sentence} For all: `tccl measure --journal DIR/measurements.jsonl`."


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
            transfer_set([flow, second])
            for ((source, target), flow), ((start, end), second) in pairs
            if source != start and target != end
        ]
    return {measurement.transfers: [measurement] for measurement in Simulator(model).measure(sets)}


def _largest(readings: Readings) -> float:
    return max((reading.gbps for reading in readings.values()), default=0.0)


def viridis(share: float) -> tuple[int, int, int]:
    """Return the colour at `share` of the scale, 0 to 1.

    >>> viridis(0.05)
    (70, 18, 100)
    """
    steps = np.linspace(0, 1, len(_VIRIDIS))
    red, green, blue = (
        round(np.interp(share, steps, values)) for values in zip(*_VIRIDIS, strict=True)
    )
    return red, green, blue


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
