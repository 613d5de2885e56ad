"""Fit of the shared parameters to all measurements, over all machines together."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from tccl_py.errors import InputError
from tccl_py.files import read_text
from tccl_py.model.rings import ring_like, ring_set
from tccl_py.model.transfer import Flow, TransferSet, parse_flow, parse_set, transfer_set
from tccl_py.nccl.graph_search import default_rings
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.transport import hop_space
from tccl_py.nccl.view import view
from tccl_py.plan.chains import condense
from tccl_py.simulator.descriptions import bundled_names, load_machine
from tccl_py.simulator.model import MachineModel, Parameters, bundled_parameters
from tccl_py.simulator.source import Engine

# Measured rates as rows, for the fit and its tests.


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of one set on one machine: a rate for every flow, or only the sum of all flows.

    `gbps` is in the order of `transfers.flows`. `kind` is `set`, or `nccl`, `matrix` and
    `published` for rates in another form, converted to sets here. With `rings`, `total_gbps` is the
    bus bandwidth of an all-reduce by so many rings, the mean over sizes of messages; an
    all-reduce of no bytes lasts as long as `step_us` says of each of its steps.
    """

    machine: str
    kind: str
    transfers: TransferSet
    gbps: tuple[float, ...] = ()
    total_gbps: float | None = None
    rings: int = 0
    sizes: tuple[int, ...] = ()
    step_us: float = 0.0
    weight: float = 1.0

    @property
    def total(self) -> float:
        """Return the sum over the flows, in GB/s."""
        return self.total_gbps if self.total_gbps is not None else sum(self.gbps)

    @property
    def label(self) -> str:
        """Return machine and set, for messages."""
        return f"{self.machine} {self.transfers}"


def read_observations(folder: Path) -> tuple[Observation, ...]:
    """Read every observation in the `*.json` files of a folder.

    Raises:
        InputError: no such folder or nothing in it, or a file that is no JSON object.
    """
    observations: list[Observation] = []
    for path in sorted(folder.glob("*.json")):
        observations.extend(_of_file(path))
    if not observations:
        raise InputError(str(folder), "holds no measured set", "name the folder of measured files")
    return tuple(observations)


def _of_file(path: Path) -> Iterator[Observation]:
    try:
        data = json.loads(read_text(path))
        machine = str(data["machine"])
        yield from _sets(machine, data.get("sets", []))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        fault = f"is no file of measured sets ({error})"
        raise InputError(str(path), fault, "it has a machine and sets") from error


def _sets(machine: str, rows: list[dict[str, Any]]) -> Iterator[Observation]:
    for row in rows:
        kind = row.get("kind", "set")
        if "each_gbps" in row:
            flows = [parse_flow(text) for text in row["set"]]
            yield observed(machine, kind, list(zip(flows, row["each_gbps"], strict=True)))
            continue
        transfers, total = parse_set(" ".join(row["set"])), float(row["total_gbps"])
        yield Observation(machine=machine, kind=kind, transfers=transfers, total_gbps=total)


def observed(machine: str, kind: str, pairs: list[tuple[Flow, float]]) -> Observation:
    """Return the observation of these flows and rates, in the set's order."""
    ordered = sorted(pairs, key=lambda pair: str(pair[0]))
    return Observation(
        machine=machine,
        kind=kind,
        transfers=transfer_set(flow for flow, _ in ordered),
        gbps=tuple(float(rate) for _, rate in ordered),
    )


# All-reduces that owners of machines published.

PUBLISHED = Path("tests/cases/published/all-reduce.json")
TOPOLOGIES = Path("tests/cases/topologies")


class Latency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time of the smallest all-reduces of a machine, of which each has 2(n - 1) steps."""

    machine: str
    gpus: int
    us: float
    source: str


class Published(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bus bandwidth of an all-reduce that somebody published, the mean over its sizes.

    NCCL runs its own `rings` under these settings, if none are given.
    """

    machine: str
    gpus: tuple[int, ...]
    settings: Settings = Settings()
    rings: tuple[tuple[int, ...], ...] = ()
    bytes: tuple[int, ...]
    gbps: float
    source: str
    note: str = ""


class Apart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A published bus bandwidth of a machine without a model, kept out of the fit."""

    machine: str
    gpus: int
    bytes: tuple[int, ...]
    gbps: float
    source: str


class PublishedRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `tests/cases/published/all-reduce.json`."""

    latencies: tuple[Latency, ...]
    rates: tuple[Published, ...]
    apart: tuple[Apart, ...]

    def step_us(self, *, without: str = "") -> float:
        """Return the time of a step of all machines but one."""
        rows = (row for row in self.latencies if row.machine != without)
        return geometric_mean(row.us / (2 * row.gpus - 2) for row in rows)


def published_rates() -> PublishedRates:
    """Read what owners of machines published."""
    return msgspec.json.decode(PUBLISHED.read_bytes(), type=PublishedRates)


def read_published(*, without: str = "") -> tuple[Observation, ...]:
    """Return published all-reduces as observations, of all machines but one.

    The rows of a machine count as one row, however many they are.
    """
    content = published_rates()
    rows = [row for row in content.rates if row.machine != without]
    counts = Counter(row.machine for row in rows)
    step = content.step_us(without=without)
    return tuple(observed_all_reduce(row, step, weight=counts[row.machine] ** -0.5) for row in rows)


def observed_all_reduce(row: Published, step_us: float, *, weight: float = 1.0) -> Observation:
    """Return the flows of a published all-reduce with its bandwidth."""
    model = model_of(row.machine)
    seen = view(model.machine, model.knowledge, row.settings, gpus=row.gpus)
    rings, channels = row.rings, row.settings.channels
    if not rings:
        own = default_rings(seen)
        rings, channels = condense(own.rings), max(1, own.channels // 2)
    settings = msgspec.structs.replace(row.settings, channels=channels)
    seen = view(model.machine, model.knowledge, settings, gpus=row.gpus)
    space = hop_space(seen, rings_in_set=len(rings))
    return Observation(
        machine=row.machine,
        kind="published",
        transfers=ring_set([ring_like(space, order) for order in rings]).flows,
        total_gbps=row.gbps,
        rings=len(rings),
        sizes=row.bytes,
        step_us=step_us,
        weight=weight,
    )


def model_of(machine: str) -> MachineModel:
    """Return the model of a bundled machine, or of one of the tests' topologies."""
    return load_machine(machine if machine in bundled_names() else TOPOLOGIES / f"{machine}.xml")


DATA_SPREAD = 0.07
"""Spread of a rate, in log terms: repeated runs differ by 5 %, and a model by more."""
_STEP = [1e-4]
"""Relative step of the numerical derivatives, in log terms."""
_ENOUGH = 1e-5
"""Relative change that ends the fit: four digits are kept."""
_KIND_WEIGHT = {"set": 1.0, "nccl": 0.7, "matrix": 0.2, "published": 1.0}
"""The model is for sets; the 28 pairs of a matrix repeat the same two facts."""


class Fit:
    """Rows of a fit, with an engine for each machine; several fits share the routes."""

    def __init__(self, rows: Sequence[Observation], start: Parameters | None = None) -> None:
        self.rows = tuple(rows)
        self.start = start or bundled_parameters()
        names = sorted({row.machine for row in rows})
        self._engines = {name: Engine(model_of(name), self.start) for name in names}

    def parameters(self, *, leave_out: Collection[int] = ()) -> Parameters:
        """Return the parameters that fit best all rows but `leave_out`.

        Minimises the squares of log errors of the rates and of log distances from the priors,
        each in units of its spread. Starts from the values at hand.
        """
        rows = [row for index, row in enumerate(self.rows) if index not in leave_out]
        first = np.log([parameter.value for parameter in self.start.parameters])
        solution = least_squares(
            self._residuals, first, args=(rows,), diff_step=_STEP, ftol=_ENOUGH, xtol=_ENOUGH
        )
        fitted = self._with(solution.x)
        # Four digits say all there is to know and keep the file readable.
        return with_values(fitted, [float(f"{row.value:.4g}") for row in fitted.parameters])

    def predict(self, row: Observation, parameters: Parameters) -> tuple[float, ...]:
        """Rates of a row's flows in GB/s under these parameters."""
        engine = self._engines[row.machine]
        engine.resolve(parameters)
        return engine.rates(row.transfers).gbps

    def _with(self, logs: npt.NDArray[np.float64]) -> Parameters:
        return with_values(self.start, [float(value) for value in np.exp(logs)])

    def _residuals(
        self, logs: npt.NDArray[np.float64], rows: Sequence[Observation]
    ) -> npt.NDArray[np.float64]:
        parameters = self._with(logs)
        for engine in self._engines.values():
            engine.resolve(parameters)
        errors = [
            (x - math.log(parameter.prior)) / parameter.spread
            for x, parameter in zip(logs, self.start.parameters, strict=True)
        ]
        for row in rows:
            errors.extend(row_errors(row, self._engines[row.machine].rates(row.transfers).gbps))
        return np.array(errors)


def with_values(parameters: Parameters, values: Sequence[float]) -> Parameters:
    """Return the same parameters with these values, in order."""
    pairs = zip(parameters.parameters, values, strict=True)
    changed = tuple(msgspec.structs.replace(parameter, value=value) for parameter, value in pairs)
    return msgspec.structs.replace(parameters, parameters=changed)


def row_errors(row: Observation, gbps: Sequence[float]) -> list[float]:
    """Log errors of one row in units of its spread; all its flows together count once."""
    pairs = _compared(row, gbps)
    weight = row.weight * _KIND_WEIGHT[row.kind] / DATA_SPREAD / math.sqrt(len(pairs))
    return [weight * math.log(p / m) for p, m in pairs]


def relative_errors(row: Observation, gbps: Sequence[float]) -> list[float]:
    """(predicted - measured) / measured of every flow, or of the total if only that is known."""
    return [p / m - 1.0 for p, m in _compared(row, gbps)]


def _compared(row: Observation, gbps: Sequence[float]) -> list[tuple[float, float]]:
    """Return each predicted rate with its measured one."""
    if row.rings:
        ranks = len(row.transfers.flows) // row.rings
        rate = row.rings * min(gbps)
        return [(mean_bandwidth(rate, ranks, row.sizes, row.step_us), row.total)]
    return [*zip(gbps, row.gbps, strict=True)] if row.gbps else [(sum(gbps), row.total)]


def mean_bandwidth(gbps: float, ranks: int, sizes: Sequence[int], step_us: float) -> float:
    """Return the bus bandwidth of all-reduces of these sizes by rings that move `gbps`.

    An all-reduce of S bytes over n ranks moves S/n bytes in each of 2(n - 1) steps.
    """
    return fmean(1 / (1 / gbps + ranks * step_us * 1000 / size) for size in sizes)
