"""Comparison of flows' rates with earlier ones, at a low rate of false alarms over all flows.

A flow's rate in one measurement is one number, the median of its repeats: repeats are correlated,
and only measurements at different times show the spread. Few sets have many measurements, so the
spread of all flows moderates each flow's (Smyth, Statistical Applications in Genetics and
Molecular Biology 3, 2004). The null hypothesis is "changed by no more than `SMALLEST`", not
"unchanged": a small drift is no news.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
import scipy  # whose parts load when they are first used, so that commands start without them

from tccl_py.model.measurement import Measurement, dealt
from tccl_py.model.transfer import Flow, TransferSet
from tccl_py.statistics import holm

SMALLEST = 0.03
"""Relative changes up to this are not worth an alarm."""
FALSE_ALARM_RATE = 0.01
"""The chance, at most, of any alarm in a check of an unchanged machine."""
_FLOOR = 0.001**2
"""The smallest variance of a log rate: timers have steps."""
_MANY = 1e6
"""Degrees of freedom for equal spreads of all flows."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """The variance of log rates between measurements, and its degrees of freedom."""

    variance: float
    freedom: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One flow of a set then and now, GB/s.

    `p` is the chance of so large a change if the rate changed by `SMALLEST` at most, adjusted for
    all flows compared.
    """

    transfers: TransferSet
    flow: Flow
    was_gbps: float
    is_gbps: float
    p: float

    @property
    def ratio(self) -> float:
        """Now over then."""
        return self.is_gbps / self.was_gbps

    @property
    def alarming(self) -> bool:
        """Whether the rate changed beyond doubt."""
        return self.p <= FALSE_ALARM_RATE


def worst_of_each_set(rows: Iterable[Comparison]) -> list[Comparison]:
    """Return the flow of each set that fell most (or rose least), the worst set first."""
    worst: dict[TransferSet, Comparison] = {}
    for row in sorted(rows, key=lambda row: row.ratio):
        worst.setdefault(row.transfers, row)
    return list(worst.values())


def log_rates(measurements: Sequence[Measurement]) -> dict[Flow, list[float]]:
    """Return the logarithm of each different flow's rate in each measurement.

    Equal flows of a set share a rate, their mean.
    """
    found: dict[Flow, list[float]] = {}
    for measurement in measurements:
        logs = np.log(np.median(np.asarray(measurement.samples_gbps), axis=1)).tolist()
        for flow, equal in dealt(measurement.transfers.flows, logs).items():
            found.setdefault(flow, []).append(float(np.mean(equal)))
    return found


def common_spread(groups: Iterable[Sequence[float]]) -> Spread:
    """Return the spread of all flows; each group has one flow's log rates at different times.

    The logarithms of the groups' variances scatter by chance and by differences between flows;
    their moments give the degrees of freedom (Smyth 2004, section 6.2).
    """
    repeated = [group for group in groups if len(group) > 1]
    if not repeated:
        return Spread(variance=_FLOOR, freedom=0.0)
    freedom = np.array([len(group) - 1.0 for group in repeated])
    variances = np.maximum([np.var(group, ddof=1) for group in repeated], _FLOOR)
    half = freedom / 2
    logs = np.log(variances) - scipy.special.digamma(half) + np.log(half)
    beyond = 0.0
    if len(repeated) > 1:
        beyond = float(np.var(logs, ddof=1) - np.mean(scipy.special.polygamma(1, half)))
    if beyond <= 0:
        pooled = float(np.average(variances, weights=freedom))
        return Spread(variance=pooled, freedom=min(float(freedom.sum()), _MANY))
    prior = 2 * _inverse_trigamma(beyond)
    middle = float(np.mean(logs)) + scipy.special.digamma(prior / 2) - math.log(prior / 2)
    return Spread(variance=max(math.exp(middle), _FLOOR), freedom=min(prior, _MANY))


def _inverse_trigamma(value: float) -> float:
    """Solve trigamma(y) = value; 1 / y + 1 / (2 y^2) < trigamma(y) < 1 / y + 1 / y^2 bracket y."""

    def beyond(y: float) -> float:
        return float(scipy.special.polygamma(1, y)) - value

    low = (1 + math.sqrt(1 + 2 * value)) / (2 * value)
    high = (1 + math.sqrt(1 + 4 * value)) / (2 * value)
    return float(scipy.optimize.brentq(beyond, 0.99 * low, 1.01 * high))  # room for rounding


def compared(
    then: Mapping[TransferSet, Sequence[Measurement]],
    now: Mapping[TransferSet, Sequence[Measurement]],
    spread: Spread,
) -> list[Comparison]:
    """Compare each flow of the sets in `now` with its earlier rate, the least likely first.

    Holm's adjustment (1979) bounds the chance of any false alarm, whatever the dependence.
    """
    raw = []
    for transfers, found in now.items():
        before = log_rates(then[transfers])
        for flow, after in log_rates(found).items():
            p = _p(before[flow], after, spread)
            was, new = (math.exp(np.mean(logs)) for logs in (before[flow], after))
            row = Comparison(transfers=transfers, flow=flow, was_gbps=was, is_gbps=new, p=p)
            raw.append(row)
    adjusted = zip(raw, holm([row.p for row in raw]), strict=True)
    rows = [msgspec.structs.replace(row, p=p) for row, p in adjusted]
    return sorted(rows, key=lambda row: (row.p, str(row.transfers), str(row.flow)))


def _p(before: Sequence[float], after: Sequence[float], spread: Spread) -> float:
    """Return the chance of such a change where the true change is `SMALLEST` at most."""
    freedom = spread.freedom + len(before) + len(after) - 2
    if freedom <= 0:
        return 1.0
    own = sum(float(np.var(row)) * len(row) for row in (before, after))
    variance = max((spread.freedom * spread.variance + own) / freedom, _FLOOR)
    error = math.sqrt(variance * (1 / len(before) + 1 / len(after)))
    change = abs(float(np.mean(after) - np.mean(before)))
    smallest = math.log1p(SMALLEST)
    if change <= smallest:
        return 1.0
    tails = scipy.stats.t.sf([(change - smallest) / error, (change + smallest) / error], freedom)
    return float(min(1.0, tails.sum()))
