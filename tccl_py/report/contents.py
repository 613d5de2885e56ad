"""A report's contents: a plan's files, read and checked, and bars and maps of the rates in them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
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
from tccl_py.model.transfer import Flow, TransferSet
from tccl_py.plan.plan import Plan
from tccl_py.plan.results import Kept, Tuning, plan_in, planned_fingerprint
from tccl_py.plan.staging import PLAN_FILE
from tccl_py.planning.plan_sources import planned_model
from tccl_py.report.verification import trade_off_lines
from tccl_py.simulator.source import Simulator
from tccl_py.sources.journal import JournalContents, read_journal
from tccl_py.sources.pairs import pair_flow, pair_sets

_DRY_RUN = "is a dry run without GPUs"
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


class HeatMap(msgspec.Struct, frozen=True, kw_only=True):
    """The rate of each pair of GPUs alone, from rows to columns."""

    gpus: tuple[int, ...]
    rates: dict[tuple[int, int], tuple[Flow, float]]
    """By sending and receiving GPU: the flow, and its rate, GB/s."""

    @property
    def largest(self) -> float:
        """The largest rate, GB/s: the end of the colours."""
        return max((gbps for _, gbps in self.rates.values()), default=0.0)

    @property
    def is_complete(self) -> bool:
        """True if every pair has a rate."""
        return len(self.rates) == len(self.gpus) * (len(self.gpus) - 1)

    @property
    def caption(self) -> str:
        """The meaning of the cells."""
        blocks = next((flow.blocks for flow, _ in self.rates.values()), None)
        channels = "as many channels as help" if blocks is None else f"{blocks} channels"
        sentence = f"The fastest mechanism from one GPU to another alone, each with {channels}."
        more = " For all: `tccl measure --journal DIR/measurements.jsonl`."
        return sentence + more * (not self.is_complete)


def heat_map(journal: Journal, gpus: tuple[int, ...], hosts: Collection[str] = ("",)) -> HeatMap:
    """Return the rates of pairs of GPUs, by the number of channels of which most are known.

    Sets over `hosts` count, by the names in flows; the single host's name there is "".
    """
    known: dict[int | None, dict[tuple[int, int], tuple[Flow, float]]] = {}
    for transfers, measured in journal.items():
        flow, *others = transfers.flows
        ends = flow.source.index, flow.destination.index
        between = flow.source.kind == flow.destination.kind == "G" and set(ends) <= set(gpus)
        if others or not between or len(flow.hosts) != 1 or not set(flow.hosts) <= set(hosts):
            continue
        samples = itertools.chain.from_iterable(one.samples_gbps[0] for one in measured)
        rates, gbps = known.setdefault(flow.blocks, {}), median(samples)
        if ends not in rates or gbps > rates[ends][1]:
            rates[ends] = flow, gbps
    usual = max(known, key=lambda blocks: (len(known[blocks]), blocks or math.inf), default=None)
    return HeatMap(gpus=gpus, rates=dict(sorted(known.get(usual, {}).items())))


def simulated_pairs(plan: Plan, directory: Path) -> Journal:
    """Return the rate of each pair of GPUs by the model of a simulated plan; {} without a model."""
    model = None
    if plan.simulated and len(plan.cluster.classes) == 1:
        model = planned_model(plan, directory)
    if model is None:
        return {}
    ends = itertools.permutations(plan.class_gpus[0], 2)
    sets = pair_sets([pair_flow(model.machine, model.knowledge, *pair) for pair in ends])
    return {measurement.transfers: [measurement] for measurement in Simulator(model).measure(sets)}


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
