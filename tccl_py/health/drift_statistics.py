"""Comparison of flows' rates with earlier ones, and the part of a machine that changes point to.

A flow's rate in one measurement is one number, the median of its repeats: repeats are correlated,
and only measurements at different times show the spread. Few sets have many measurements, so the
spread of all flows moderates each flow's (Smyth, Statistical Applications in Genetics and
Molecular Biology 3, 2004). The null hypothesis is "changed by no more than `SMALLEST`", not
"unchanged": a small drift is no news.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import msgspec
import numpy as np
import scipy  # whose parts load when they are first used, so that commands start without them

from tccl_py.explanation.paths import Paths, device_words
from tccl_py.model.machine import Machine
from tccl_py.model.measurement import Measurement, deal_out
from tccl_py.model.transfer import Flow, TransferSet
from tccl_py.nccl.paths import path_types
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
    all flows compared. `hosts` is the class of hosts if there are several, which may have equal
    sets.
    """

    transfers: TransferSet
    flow: Flow
    hosts: str = ""
    was_gbps: float
    is_gbps: float
    p: float

    @property
    def name(self) -> str:
        """The flow, and the hosts it is on."""
        return f"{self.flow} on {self.hosts}" if self.hosts else str(self.flow)

    @property
    def ratio(self) -> float:
        """Now over then."""
        return self.is_gbps / self.was_gbps

    @property
    def alarming(self) -> bool:
        """True if the rate changed beyond doubt."""
        return self.p <= FALSE_ALARM_RATE


def worst_of_each_set(rows: Iterable[Comparison]) -> list[Comparison]:
    """Return the flow of each set that fell most (or rose least), the worst set first."""
    worst: dict[tuple[str, TransferSet], Comparison] = {}
    for row in sorted(rows, key=lambda row: row.ratio):
        worst.setdefault((row.hosts, row.transfers), row)
    return list(worst.values())


def log_rates(measurements: Sequence[Measurement]) -> dict[Flow, list[float]]:
    """Return the logarithm of each different flow's rate in each measurement.

    Equal flows of a set share a rate, their mean.
    """
    rates: dict[Flow, list[float]] = {}
    for measurement in measurements:
        logs = np.log(np.median(np.asarray(measurement.samples_gbps), axis=1)).tolist()
        for flow, equal in deal_out(measurement.transfers.flows, logs).items():
            rates.setdefault(flow, []).append(fmean(equal))
    return rates


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
    if beyond <= 1 / _MANY:
        pooled = float(np.average(variances, weights=freedom))
        return Spread(variance=pooled, freedom=min(float(freedom.sum()), _MANY))
    # Of equal variances beyond chance trigamma(freedom / 2) is the variance of the logarithms.
    prior = 2 * scipy.optimize.brentq(
        lambda y: scipy.special.polygamma(1, y) - beyond, 1 / _MANY, 2 * _MANY
    )
    middle = float(np.mean(logs)) + scipy.special.digamma(prior / 2) - math.log(prior / 2)
    return Spread(variance=max(math.exp(middle), _FLOOR), freedom=min(prior, _MANY))


def compare_sets(
    earlier: Mapping[TransferSet, Sequence[Measurement]],
    later: Mapping[TransferSet, Sequence[Measurement]],
    spread: Spread,
    *,
    families: int = 1,
) -> list[Comparison]:
    """Compare each flow of the sets in `later` with its earlier rate, the least likely first.

    Holm's adjustment (1979) bounds the chance of any false alarm, whatever the dependence; with
    several `families` of comparisons, over all of them.
    """
    raw = []
    for transfers, measurements in later.items():
        before = log_rates(earlier[transfers])
        for flow, after in log_rates(measurements).items():
            p = chance(before[flow], after, spread)
            was, new = (math.exp(fmean(logs)) for logs in (before[flow], after))
            row = Comparison(transfers=transfers, flow=flow, was_gbps=was, is_gbps=new, p=p)
            raw.append(row)
    adjusted = zip(raw, holm([row.p for row in raw]), strict=True)
    rows = [msgspec.structs.replace(row, p=min(1.0, families * p)) for row, p in adjusted]
    return sorted(rows, key=lambda row: (row.p, str(row.transfers), row.flow))


def chance(before: Sequence[float], after: Sequence[float], spread: Spread) -> float:
    """Return the chance of such a change of log rates if the true one is `SMALLEST` at most."""
    freedom = spread.freedom + len(before) + len(after) - 2
    if freedom <= 0:
        return 1.0
    squares = sum(float(np.var(row)) * len(row) for row in (before, after))
    variance = max((spread.freedom * spread.variance + squares) / freedom, _FLOOR)
    error = math.sqrt(variance * (1 / len(before) + 1 / len(after)))
    change = abs(fmean(after) - fmean(before))
    smallest = math.log1p(SMALLEST)
    if change <= smallest:
        return 1.0
    tails = scipy.stats.t.sf([(change - smallest) / error, (change + smallest) / error], freedom)
    return float(min(1.0, tails.sum()))


_EVEN = 0.1
"""Changes whose ratios differ by no more than this share are equal."""
_NEARLY_ALL = 0.8
_NAMED = 3
_FASTER = (
    "higher clocks, or the end of what slowed the machine when the plan was measured: all that "
    "changed became faster; plan again"
)
_EVERYTHING = (
    "clocks, a power limit, heat, or other work on this machine (`tccl doctor`, "
    "nvidia-smi -q -d PERFORMANCE): nearly everything changed alike"
)
_DOWNTRAINED, _HOT = " (downtrained?)", " (its clocks, power limit or heat?)"
_SEVERAL = "more than one cause: no single link or memory explains all changes"


class Suspect(NamedTuple):
    """A part on a flow's path, in words; of suspects alike those of the lowest `rank` are named.

    A link explains more than one direction of it, and both more than a whole GPU.
    """

    words: str
    rank: int = 0


def points_to(paths: Paths, rows: Sequence[Comparison]) -> str:
    """Return a noun for the cause of the changes among `rows`, and why; "" if nothing changed."""
    changed = [row for row in rows if row.alarming]
    if not changed:
        return ""
    ratios = [row.ratio for row in changed]
    if min(ratios) > 1:
        return _FASTER
    sets, hit = ({row.transfers for row in part} for part in (rows, changed))
    users = _sets_by_suspect(paths, rows)
    blamed = _sets_by_suspect(paths, changed)
    # The suspects: parts of all changed sets, and of the fewest unchanged sets.
    unharmed = {part: len(users[part] - hit) for part, used in blamed.items() if used == hit}
    fewest = min(unharmed.values(), default=len(sets))
    # A part of the changed sets alone explains more than "nearly everything".
    exact = fewest == 0 and len(hit) < len(sets)
    equal = max(ratios) <= min(ratios) * (1 + _EVEN)
    if not exact and len(hit) > 1 and len(hit) >= len(sets) * _NEARLY_ALL and equal:
        return _EVERYTHING
    if not unharmed:
        return _SEVERAL
    tied = [part for part in unharmed if unharmed[part] == fewest]
    rank = min(part.rank for part in tied)
    best = [part.words for part in tied if part.rank == rank]
    best.sort(key=lambda words: not words.startswith("GPU"))
    named = " or ".join(best[:_NAMED])
    used = len(hit) + fewest
    if used == 1:
        return f"{named}: the changed set uses it, and no other measured set does"
    share = f"{len(hit)} of the {used} that use it changed"
    return f"{named}: all sets that changed use it, and {share}"


def _sets_by_suspect(paths: Paths, rows: Sequence[Comparison]) -> dict[Suspect, set[TransferSet]]:
    sets_of: dict[Suspect, set[TransferSet]] = {}
    for row in rows:
        for suspect in _suspects(paths, row.flow):
            sets_of.setdefault(suspect, set()).add(row.transfers)
    return sets_of


def _suspects(paths: Paths, flow: Flow) -> Iterator[Suspect]:
    """Yield the parts on a flow's path, directions of links, and whole GPUs."""
    passes = paths.passes(flow)
    between = any(passing.part.kind in ("socket", "numa") for passing in passes)
    for passing in passes:
        kind, _, words = passing.part
        if kind == "cpu" and between:
            continue  # The link between CPUs says more than either CPU.
        yield Suspect(words + _DOWNTRAINED * (kind in ("own", "uplink")))
        if kind in ("own", "nvlink"):
            yield Suspect(passing.words, 1)
    for end in dict.fromkeys(place.device for place in flow.places):
        if end[0] == "G":
            yield Suspect(f"{device_words(end)} by any path{_HOT}", 2)


def link_class(machine: Machine, flow: Flow) -> str:
    """Return a flow's path type and mechanism: `PIX write`, `SYS bounce`."""
    mechanism: str = "bounce" if flow.is_bounce else flow.transfers[0].operation
    if flow.transfers[0].uses_copy_engine:
        mechanism += " by copy engine"
    return f"{path_types(machine)[str(flow.source), str(flow.destination)].name} {mechanism}"


def gpus_of(transfers: TransferSet) -> set[int]:
    """Return the indices of the GPUs at the ends of a set's flows."""
    ends = (place for flow in transfers.flows for place in (flow.source, flow.destination))
    return {place.index for place in ends if place.kind == "G"}
