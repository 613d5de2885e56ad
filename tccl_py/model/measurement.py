"""Measurements, what they are valid for, and the protocol of their sources."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Annotated, Literal, Protocol, TypeVar, runtime_checkable

import msgspec

from tccl_py.errors import InputError, MeasurementError, check_type, require
from tccl_py.model.transfer import Flow, TransferSet, parse_set, transfer_set

Value = TypeVar("Value")
Sets = str | Flow | TransferSet | Iterable[str | Flow | TransferSet]
"""What a source measures: sets, flows or texts of sets, one or several."""
Backend = Literal["cuda", "host"]
"""What is measured: GPUs, or as a dry run host memory in their place."""
FlowCoupling = Literal["pass-on", "independent"]
"""Flows through one GPU: forwarded from one to the next as in a ring, or each at its own pace."""

MAX_GBPS = 1e6  # A petabyte a second, far above any memory or link; a higher rate is damage
TOGETHER = 0.9  # The least overlap of a set's measurement
JOURNAL_FILE = "measurements.jsonl"
"""The journal in a plan's directory."""
JOURNAL_FORMAT = 1
IN_DRY_RUN = " in a DRY RUN"
"""The mark of what was measured, or achieved by jobs, in host memory in the place of GPUs."""


def mark(*, simulated: bool, assumed: bool, dry_run: bool = False) -> str:
    """Return the mark beside every block of rates.

    >>> mark(simulated=True, assumed=True)
    'simulated from assumed values'
    >>> mark(simulated=False, assumed=False, dry_run=True)
    'measured in a DRY RUN'
    """
    if not simulated:
        return "measured" + IN_DRY_RUN * dry_run
    basis = "simulated from assumed values" if assumed else "simulated"
    return f"{basis}, tuned{IN_DRY_RUN}" if dry_run else basis


class NoRateError(MeasurementError):
    """A rate is not above 0: a flow moved nothing, so the set was not measured."""

    def __init__(self, transfers: TransferSet, gbps: float) -> None:
        super().__init__(f"{transfers}: its measurement has a rate of {gbps:g} GB/s")
        self.gbps = gbps


class Measurement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates of one transfer set, all flows running together; every rate is above 0."""

    transfers: TransferSet
    samples_gbps: tuple[tuple[float, ...], ...]
    """The rate of each flow, in the set's order, in each repeat, 10^9 bytes a second."""
    simulated: bool
    """Whether a model gave the rates: it stays in everything made from the measurement."""
    assumed: bool = False
    """Whether that model's parameters were never measured."""
    skew_us: float | None = None
    """On hardware, the median time between the first transfer's start and the last's."""
    skew_error_us: float | None = None
    """How far that is known."""
    overlap: float | None = None
    """The share of the time in which all flows ran."""
    overlap_at_least: bool = False
    """Whether that is a lower bound, where the clock shows no more."""
    window_us: float | None = None
    """The duration of a repeat."""
    settled: bool = True
    """Whether the 95 % interval is as narrow as asked."""
    outliers: tuple[int, ...] = ()
    """Suspect repeats, not left out."""
    source: str = ""

    def __post_init__(self) -> None:
        for row in self.samples_gbps:
            # NaN fails the second comparison; no comparison of each, as journals have many.
            if row and not (min(row) > 0 and sum(row) < math.inf):
                raise NoRateError(self.transfers, next(r for r in row if not 0 < r < math.inf))

    @property
    def gbps(self) -> tuple[float, ...]:
        """Median rate of each flow, in GB/s."""
        return tuple(median(row) for row in self.samples_gbps)

    def in_order(
        self, flows: Iterable[Flow], values: Sequence[float] | None = None
    ) -> tuple[float, ...]:
        """Return the set's rates, or `values`, in another order of its flows."""
        waiting = deal_out(self.transfers.flows, self.gbps if values is None else values)
        return tuple(waiting[flow].pop(0) for flow in flows)

    @property
    def total_gbps(self) -> float:
        """Sum of the flows' median rates, in GB/s."""
        return sum(self.gbps)

    @property
    def rate_gbps(self) -> float:
        """The slowest flow's median rate, which is a ring's, in GB/s."""
        return min(self.gbps)

    @property
    def is_together(self) -> bool:
        """True if all flows ran together, as far as the clock can show."""
        if self.overlap is None or self.overlap_at_least or self.overlap >= TOGETHER:
            return True
        # Journals older than `overlap_at_least` have copy engines beside kernels of their GPU.
        parts = (part for flow in self.transfers.flows for part in flow.transfers)
        return any(part.uses_copy_engine for part in parts)

    @property
    def relative_error(self) -> float:
        """Relative standard error of the slowest flow's median; 0 with one sample."""
        slowest = min(self.samples_gbps, key=median)
        middle = median(slowest)
        if len(slowest) < 2:
            return 0.0
        mean = math.fsum(slowest) / len(slowest)
        squares = math.fsum((sample - mean) ** 2 for sample in slowest)
        deviation = math.sqrt(squares / (len(slowest) - 1))
        return math.sqrt(math.pi / 2 / len(slowest)) * deviation / middle


def deal_out(flows: Iterable[Flow], values: Iterable[Value]) -> dict[Flow, list[Value]]:
    """Return the values of each different flow, in order: equal flows take one each, in turn.

    >>> from tccl_py.model.rings import direct_write
    >>> one, other = direct_write(0, 1), direct_write(1, 0)
    >>> deal_out([one, other, one], [10, 20, 30]) == {one: [10, 30], other: [20]}
    True
    """
    by_flow: dict[Flow, list[Value]] = {}
    for flow, value in zip(flows, values, strict=True):
        by_flow.setdefault(flow, []).append(value)
    return by_flow


def faults(measurement: Measurement) -> Iterator[str]:
    """Yield each fault of a measurement's numbers, as a clause that begins with a verb."""
    flows, rows = len(measurement.transfers), measurement.samples_gbps
    if len(rows) != flows:
        yield f"has rates of {len(rows)} flows, but its set has {flows}"
        return
    repeats = len(rows[0])
    for row in rows:
        if not row or len(row) != repeats:
            yield "does not have a rate of every flow in every repeat"
        elif max(row) > MAX_GBPS:
            yield f"has a rate of {max(row):g} GB/s"
    limits = {"skew_us": math.inf, "skew_error_us": math.inf, "overlap": 1, "window_us": math.inf}
    for name, limit in limits.items():
        value = getattr(measurement, name)
        if value is not None and not (0 <= value <= limit and value < math.inf):
            yield f"has {name} {value:g}"
    if any(not 0 <= index < repeats for index in measurement.outliers):
        yield f"has an outlier that is none of its {repeats} repeats"


class JournalHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machine, driver and options that a journal's measurements are valid for.

    A journal with another header is refused.
    """

    machine: str
    identity: str
    """What separates measurements that may not be mixed: GPU UUIDs, driver, model revision; of
    several hosts the rest."""
    simulated: bool
    dry_run: bool = False
    """Whether rates are of host memory."""
    hosts: Mapping[str, str] = {}
    """The GPUs, driver and NICs of several hosts, by name."""
    noise: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Of a simulation."""
    seed: int = 0
    format_version: int = JOURNAL_FORMAT

    def __str__(self) -> str:
        """Return what the measurements are valid for, in one line."""
        hosts = [f"host {name}: {text}" for name, text in self.hosts.items()]
        noise = [f"noise {self.noise:g}, seed {self.seed}"] if self.noise else []
        return "; ".join([*hosts, self.identity, *noise])

    def covers(self, header: JournalHeader) -> bool:
        """Return whether measurements hold for a machine or hosts; further hosts do no harm."""
        if not header.hosts:
            return self == header
        hosts = self.hosts
        same_options = msgspec.structs.replace(header, machine=self.machine, hosts=hosts) == self
        return same_options and header.hosts.items() <= hosts.items()

    def join(self, more: JournalHeader) -> JournalHeader:
        """Return the header of the hosts of both; InputError: a host or the options changed."""
        hosts = dict(sorted({**self.hosts, **more.hosts}.items()))
        header = msgspec.structs.replace(self, machine=",".join(hosts), hosts=hosts)
        for name, text in self.hosts.items():
            if hosts[name] != text:
                raise _list_changes(f"host {name}", hosts[name], text)
        if not header.covers(more):
            raise _list_changes("this job", more.identity, self.identity)
        return header


def _list_changes(where: str, now_is: str, before: str) -> InputError:
    right = "measure as before, or plan into a new directory"
    return InputError(where, f"is {now_is}, and was {before}", right)


@runtime_checkable
class BandwidthSource(Protocol):
    """A source of measurements: the profiler, the simulator, a journal.

    A source of single samples may state their relative standard deviation, as `noise`: without it
    a search assumes that they are exact, and proves nothing.
    """

    @property
    def simulated(self) -> bool:
        """True if the answers come from a model."""

    def measure(self, sets: Sequence[TransferSet]) -> Sequence[Measurement]:
        """Answer each set, in order; MeasurementError: a set cannot be measured."""


Sources = BandwidthSource | Sequence[BandwidthSource] | None
"""A source, or one for each class of hosts; None is of bundled models."""


@runtime_checkable
class StartedSource(BandwidthSource, Protocol):
    """A source that is started before it measures, and begins no set that ends too late."""

    deadline: float

    def start(self) -> None:
        """Start what measures."""

    def stop(self, *exception: object) -> None:
        """End what measures."""

    def summary(
        self, measured: Mapping[TransferSet, Sequence[Measurement]], conditions: str
    ) -> tuple[str, ...]:
        """Return notices for a plan of what was measured."""


def listed_sets(sets: Sets) -> list[TransferSet]:
    """Return sets that are given as sets, flows or texts, one or several.

    >>> listed_sets("0:1") == listed_sets([parse_set("0:1")])
    True

    Raises InputError: of another type, or as `parse_set`.
    """
    listed = [sets] if isinstance(sets, (str, Flow, TransferSet)) else sets
    check_type(listed, "sets", Iterable)
    answers = []
    for transfers in listed:
        check_type(transfers, "sets", str, Flow, TransferSet)
        flows = transfer_set([transfers]) if isinstance(transfers, Flow) else transfers
        answers.append(parse_set(flows) if isinstance(flows, str) else flows)
    return answers


def check_source(source: BandwidthSource) -> None:
    """Raise InputError unless an object has what a source needs."""
    kind, right = type(source).__name__, "give an object with `simulated` and `measure(sets)`"
    for name in ("simulated", "measure"):
        require(hasattr(source, name), "the source", f"is a {kind} without `{name}`", right)
    is_bool = isinstance(source.simulated, bool)
    require(is_bool, "the source", f"is a {kind} whose `simulated` is not True or False", right)
    noise = getattr(source, "noise", None)
    good = noise is None or (isinstance(noise, (int, float)) and 0 <= noise < math.inf)
    require(good, "the source", f"is a {kind} with `noise` {noise!r}"[:80], "give 0.01 for 1 %")


def answer_fault(answers: object, transfers: TransferSet, *, simulated: bool) -> str:
    """Return what is wrong with a source's answers for one set, as a clause; "" if nothing is."""
    if not isinstance(answers, Sequence):
        return f"returned a {type(answers).__name__} instead of a list of measurements"
    if len(answers) != 1:
        return f"returned {len(answers)} measurements for 1 set"
    (measurement,) = answers
    if not isinstance(measurement, Measurement):
        return f"returned a {type(measurement).__name__} instead of a Measurement"
    if measurement.transfers != transfers:
        return f"returned a measurement of {measurement.transfers}"
    if measurement.simulated != simulated:
        return "returned a measurement that contradicts it on whether rates are simulated"
    return next((f"returned a measurement that {fault}" for fault in faults(measurement)), "")


# Transports by which sets over several hosts are measured: each is a row of one table.


class NicTransport(msgspec.Struct, frozen=True, kw_only=True):
    """How the bytes of flows go from host to host."""

    backend: str
    """That of the sources that measure by it."""
    joins_gpus: bool = False
    """Whether the GPUs at a flow's ends move the bytes, and it opens the NICs."""
    nic_device: str = "tccl_profiler.tcp:NicDevice"
    """The class of NICs (module:class) else, and for flows that end in host memory."""
    need_addresses: bool = False
    """Whether all NICs need addresses that other hosts reach."""
    unmeasured: str = ""
    """Which flows have the speed of a NIC's port, in a sentence."""

    def carries(self, flow: Flow) -> bool:
        """Return whether a flow goes from GPU to GPU by no device between them."""
        ends = {flow.source.kind, flow.destination.kind}
        return self.joins_gpus and flow.is_network and ends == {"G"}


NIC_TRANSPORTS = {
    "nccl": NicTransport(
        backend="cuda",
        joins_gpus=True,
        unmeasured="what GPUs send by another GPU's memory was not measured, but assumed to run at "
        "the speed of the NICs' ports; all else was measured",
    ),
    "tcp": NicTransport(backend="host", need_addresses=True),
}


def transport_of(backend: str) -> str:
    """Return the name of the transport of a backend.

    >>> transport_of("cuda"), transport_of("host")
    ('nccl', 'tcp')
    """
    return next(name for name, row in NIC_TRANSPORTS.items() if row.backend == backend)
