"""Which flows run at another rate than they did, with few false alarms over all of them together.

A flow's rate in one measurement is one number, the median of its repeats: repeats are correlated,
and only measurements at different times tell how far a rate wanders by itself. Few sets have many
of those, so what is known of all flows' spread moderates each one's (Smyth, Statistical
Applications in Genetics and Molecular Biology 3, 2004). The hypothesis that has to be refuted is
"it changed by no more than `SMALLEST`", not "not at all": what drifts a little is no news.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
import scipy  # whose parts load when they are first used, so that commands start without them

from tccl_py.model.measurement import Measurement
from tccl_py.model.transfer import Flow, TransferSet

SMALLEST = 0.03
"""Relative changes up to this are not worth an alarm."""
FALSE_ALARM_RATE = 0.01
"""How often at most a check of an unchanged machine says that anything changed."""
_FLOOR = 0.001**2
"""Variance of a log rate that no measurement stays below: steps of timers."""
_SLOWEST = 1e-6
"""GB/s that stand for a flow that moved nothing."""
_MANY = 1e6
"""Degrees of freedom that stand for all flows having one spread."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How far log rates wander between measurements: a variance, and how many it is worth."""

    variance: float
    freedom: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One flow of a set then and now, GB/s; `p` is adjusted for all flows compared.

    `p` is how likely so large a change is if the rate changed by `SMALLEST` at most.
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
        """Whether it changed, as far as these measurements tell."""
        return self.p <= FALSE_ALARM_RATE


def log_rates(measurements: Sequence[Measurement]) -> dict[Flow, list[float]]:
    """For each different flow of a set the logarithm of its rate in each measurement.

    Flows that are alike share a rate, their mean.
    """
    found: dict[Flow, list[float]] = {}
    for one in measurements:
        alike: dict[Flow, list[float]] = {}
        medians = np.maximum(np.median(np.asarray(one.samples_gbps), axis=1), _SLOWEST)
        for flow, log in zip(one.transfers.flows, np.log(medians).tolist(), strict=True):
            alike.setdefault(flow, []).append(log)
        for flow, logs in alike.items():
            found.setdefault(flow, []).append(sum(logs) / len(logs))
    return found


def common_spread(groups: Iterable[Sequence[float]]) -> Spread:
    """The spread of all flows: each group has one flow's log rates at different times.

    The moments of the logarithms of the groups' variances tell how alike the flows are: what they
    scatter beyond chance is the flows' own (Smyth 2004, section 6.2).
    """
    kept = [np.asarray(group) for group in groups if len(group) > 1]
    if not kept:
        return Spread(variance=_FLOOR, freedom=0.0)
    freedom = np.array([len(group) - 1.0 for group in kept])
    variances = np.array([max(float(np.var(group, ddof=1)), _FLOOR) for group in kept])
    half = freedom / 2
    logs = np.log(variances) - scipy.special.digamma(half) + np.log(half)
    beyond = (
        float(np.var(logs, ddof=1) - np.mean(scipy.special.polygamma(1, half)))
        if len(kept) > 1
        else 0.0
    )
    if beyond <= 0:
        pooled = float(np.average(variances, weights=freedom))
        return Spread(variance=pooled, freedom=min(float(freedom.sum()), _MANY))
    prior = 2 * _inverse_trigamma(beyond)
    variance = math.exp(
        float(np.mean(logs)) + scipy.special.digamma(prior / 2) - math.log(prior / 2)
    )
    return Spread(variance=max(variance, _FLOOR), freedom=min(prior, _MANY))


def _inverse_trigamma(value: float) -> float:
    """Newton's method on 1 / trigamma, which is nearly straight (Smyth 2004, appendix)."""
    y = 0.5 + 1 / value
    for _ in range(50):
        trigamma = float(scipy.special.polygamma(1, y))
        step = trigamma * (1 - trigamma / value) / float(scipy.special.polygamma(2, y))
        y += step
        if -step / y < 1e-8:
            break
    return y


def compared(
    then: Mapping[TransferSet, Sequence[Measurement]],
    now: Mapping[TransferSet, Sequence[Measurement]],
    spread: Spread,
) -> list[Comparison]:
    """Compare each flow of the sets in `now` with what it was, the least likely first.

    The p of all are adjusted after Holm (1979), so that the chance of any false alarm among them
    is what `p` says, however they depend on each other.
    """
    raw = []
    for transfers, found in now.items():
        before = log_rates(then[transfers])
        for flow, after in log_rates(found).items():
            p = _p(before[flow], after, spread)
            raw.append((p, transfers, flow, _mean(before[flow]), _mean(after)))
    raw.sort(key=lambda row: (row[0], str(row[1]), str(row[2])))
    worst, rows = 0.0, []
    for rank, (p, transfers, flow, was, new) in enumerate(raw):
        worst = max(worst, min(1.0, p * (len(raw) - rank)))
        rows.append(
            Comparison(
                transfers=transfers, flow=flow, was_gbps=math.exp(was), is_gbps=math.exp(new),
                p=worst,
            )
        )  # fmt: skip
    return rows


def _p(before: Sequence[float], after: Sequence[float], spread: Spread) -> float:
    """How likely it is to see such a change where the true one is `SMALLEST` at most."""
    own = sum((value - _mean(row)) ** 2 for row in (before, after) for value in row)
    freedom = spread.freedom + len(before) + len(after) - 2
    if freedom <= 0:
        return 1.0
    variance = max((spread.freedom * spread.variance + own) / freedom, _FLOOR)
    error = math.sqrt(variance * (1 / len(before) + 1 / len(after)))
    change = abs(_mean(after) - _mean(before))
    smallest = math.log1p(SMALLEST)
    if change <= smallest:
        return 1.0
    tails = scipy.stats.t.sf([(change - smallest) / error, (change + smallest) / error], freedom)
    return float(min(1.0, tails.sum()))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
