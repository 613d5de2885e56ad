"""Fitting the shared parameters to everything that was measured, all machines together."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from tccl_py.simulator.engine import Engine
from tccl_py.simulator.library import load_bundled
from tccl_py.simulator.observations import Observation
from tccl_py.simulator.parameters import Parameters, bundled_parameters

DATA_SPREAD = 0.07
"""What a rate is trusted to, in log terms: repeated runs differ by 5 %, and a model by more."""
_STEP = [1e-4]
"""Relative step of the numerical derivatives, in log terms."""
_ENOUGH = 1e-5
"""Relative change that ends the fit: four digits are kept."""
_KIND_WEIGHT = {"set": 1.0, "nccl": 0.7, "matrix": 0.2}
"""Sets are what the model is for; the 28 pairs of a matrix say the same two things."""


class Fit:
    """Rows to fit to, with an engine for each machine; several fits share the routes."""

    def __init__(self, rows: Sequence[Observation], start: Parameters | None = None) -> None:
        self.rows = tuple(rows)
        self.start = start or bundled_parameters()
        names = sorted({row.machine for row in rows})
        self._engines = {name: Engine(load_bundled(name), self.start) for name in names}

    def parameters(self, *, leave_out: Collection[int] = ()) -> Parameters:
        """The parameters that fit best all rows but those with these numbers.

        Minimises the squares of log errors of the rates and of log distances from the priors,
        each in units of its spread. Starts from the values at hand.
        """
        kept = [row for index, row in enumerate(self.rows) if index not in leave_out]
        first = np.log([one.value for one in self.start.parameters])
        found = least_squares(
            self._residuals, first, args=(kept,), diff_step=_STEP, ftol=_ENOUGH, xtol=_ENOUGH
        )
        fitted = self._with(found.x)
        # Four digits say all there is to know and keep the file readable.
        return fitted.with_values({n: float(f"{x:.4g}") for n, x in fitted.values.items()})

    def predict(self, row: Observation, parameters: Parameters) -> tuple[float, ...]:
        """Rates of a row's flows in GB/s under these parameters."""
        engine = self._engines[row.machine]
        engine.resolve(parameters)
        return engine.rates(row.transfers).gbps

    def _with(self, logs: npt.NDArray[np.float64]) -> Parameters:
        names = [one.name for one in self.start.parameters]
        values = [float(value) for value in np.exp(logs)]
        return self.start.with_values(dict(zip(names, values, strict=True)))

    def _residuals(
        self, logs: npt.NDArray[np.float64], rows: Sequence[Observation]
    ) -> npt.NDArray[np.float64]:
        parameters = self._with(logs)
        for engine in self._engines.values():
            engine.resolve(parameters)
        away = [
            (x - math.log(one.prior)) / one.spread
            for x, one in zip(logs, self.start.parameters, strict=True)
        ]
        for row in rows:
            away.extend(row_errors(row, self._engines[row.machine].rates(row.transfers).gbps))
        return np.array(away)


def row_errors(row: Observation, gbps: Sequence[float]) -> list[float]:
    """Log errors of one row in units of its spread; all its flows together count once."""
    weight = _KIND_WEIGHT[row.kind] / DATA_SPREAD
    if not row.gbps:
        return [weight * math.log(sum(gbps) / row.total)]
    weight /= math.sqrt(len(row.gbps))
    return [weight * math.log(p / m) for p, m in zip(gbps, row.gbps, strict=True)]


def relative_errors(row: Observation, gbps: Sequence[float]) -> list[float]:
    """(predicted - measured) / measured of every flow, or of the total if only that is known."""
    if not row.gbps:
        return [sum(gbps) / row.total - 1.0]
    return [p / m - 1.0 for p, m in zip(gbps, row.gbps, strict=True)]
