"""NCCL without a graph file: by default, and with the best environment variables.

Both run the rings of NCCL's own search. Variables change the mechanisms of hops (P2P level, reads,
the host of a bounce), the number of channels and the size of FIFOs, for every communicator of a
process alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec

from tccl_py.errors import MeasurementError, SearchError
from tccl_py.model.measurement import Measurement
from tccl_py.nccl.graph_search import DefaultChoice, default_choice
from tccl_py.nccl.settings import Settings, environment
from tccl_py.nccl.view import view
from tccl_py.plan.plan import Plan, PlanChoice
from tccl_py.plan.settings_search import BUFFSIZES, WORTH, mechanisms
from tccl_py.plan.tasks import (
    Stock,
    Task,
    condensed,
    measured_well,
    orders_under,
    stock,
)

MOST_CHANNELS = 32
"""Final channels that variables ask for at most."""
COMPARED_CHANNELS = 16
"""Final channels with which mechanisms are compared, if NCCL picks no more by itself."""
FINALISTS = 2
"""Mechanisms for which numbers of channels and FIFO sizes are tried."""


def own_rings(task: Task | Plan, settings: Settings) -> DefaultChoice:
    """Return the rings of NCCL's search; only settings of transports change them.

    A task may ask the installed NCCL.
    """
    plain = Settings(
        version=settings.version,
        p2p_level=settings.p2p_level,
        net_disable_intra=settings.net_disable_intra,
    )
    if isinstance(task, Task) and task.own_rings is not None:
        return task.own_rings(plain)
    return default_choice(view(task.machine, task.knowledge, plain, gpus=task.gpus))


class OwnChoices(msgspec.Struct, frozen=True, kw_only=True):
    """The choices without a graph file; `rated` has the best first, then default NCCL if rated."""

    default: PlanChoice
    variables: PlanChoice
    rated: tuple[Stock, ...]
    cancelled: bool = False


def own_choices(task: Task) -> OwnChoices:
    """Rate default NCCL, and the best of NCCL under environment variables alone.

    KeyboardInterrupt ends the search with the best so far, if anything is rated.

    Raises:
        SearchError: no setting gives every hop a mechanism that can be rated.
        MeasurementError: the source cannot measure a needed set.
    """
    settings = task.default_settings
    found = own_rings(task, settings)
    # An installed NCCL is asked now: later the source may have the GPUs to itself.
    for one in mechanisms(task) if task.own_rings is not None else ():
        own_rings(task, one)
    default, note = _default(task, settings, found)
    unrated = PlanChoice(settings=settings, rings=found.rings, rate_gbps=None, note=note)
    tried = [] if default is None else [default]
    cancelled = False
    try:
        _try_variables(task, tried)
    except KeyboardInterrupt:
        if not tried:
            raise
        cancelled = True
    if not tried:
        raise SearchError("no settings of NCCL give every GPU a hop that can be measured")
    best = _least(tried)
    if best is not default and not cancelled:
        best = stock(best.nccl, best.settings, best.rings, measured_well(task.source, best.rings))
    return OwnChoices(
        default=unrated if default is None else _plan_choice(default, note),
        variables=_plan_choice(best),
        rated=(best,) if default is None or default is best else (best, default),
        cancelled=cancelled,
    )


def _plan_choice(found: Stock, note: str = "") -> PlanChoice:
    return PlanChoice(
        settings=found.settings,
        rings=found.nccl.rings,
        rate_gbps=found.rate_gbps,
        error=interval(found.measurement),
        assumed=found.measurement.assumed,
        note=note,
    )


def interval(measurement: Measurement) -> float:
    """Return half the 95 % interval of a set's slowest flow, relative to its rate."""
    return 1.96 * measurement.relative_error


def _default(task: Task, settings: Settings, found: DefaultChoice) -> tuple[Stock | None, str]:
    """Rate NCCL as it runs without this project, with a note on anything special."""
    by_network = task.view(settings).by_network
    if by_network:
        one, other = min(by_network)
        return None, f"NCCL joins {one} and {other} over their NICs, at a rate that is not known"
    note = "NCCL's search finds no rings and takes its simple order" if found.fallback else ""
    try:
        return _rated(task, settings, found, well=True), note
    except SearchError as error:
        return None, f"not rated: {error}"


def _try_variables(task: Task, tried: list[Stock]) -> None:
    """Rate NCCL's own rings under environment variables, and add them to `tried`."""
    # 1. Compare mechanisms, each with NCCL's own number of channels and with many.
    compared: list[tuple[float, int, Settings]] = []
    for settings in mechanisms(task):
        plain = msgspec.structs.replace(settings, channels=1)
        found = own_rings(task, plain)
        counts = [one for one in _counts(found) if one <= COMPARED_CHANNELS]
        before = len(tried)
        _rate_all(task, plain, found, counts[:1] + counts[1:][-1:], tried)
        if tried[before:]:
            compared.append((max(one.rate_gbps for one in tried[before:]), before, plain))
    # 2. Try all numbers of channels and FIFO sizes with the best mechanisms.
    compared.sort(key=lambda one: -one[0])
    for _, place, plain in compared[:FINALISTS]:
        bounces = any(hop.flow.is_bounce for ring in tried[place].rings.rings for hop in ring.hops)
        found = own_rings(task, plain)
        for size in BUFFSIZES if bounces else BUFFSIZES[:1]:
            sized = msgspec.structs.replace(plain, buffsize=size)
            _rate_all(task, sized, found, _counts(found), tried)


def _least(tried: Sequence[Stock]) -> Stock:
    """Return the choice within 1 % of the best that sets the fewest variables."""
    best = max(one.rate_gbps for one in tried)
    near = [one for one in tried if one.rate_gbps * (1 + WORTH) >= best]
    return min(near, key=lambda one: (len(environment(one.settings)), one.nccl.channels))


def _counts(found: DefaultChoice) -> list[int]:
    """Return NCCL's own number of final channels, and doubles of it up to `MOST_CHANNELS`."""
    counts = [found.channels]
    while counts[-1] * 2 <= MOST_CHANNELS:
        counts.append(counts[-1] * 2)
    return counts


def _rate_all(
    task: Task, settings: Settings, found: DefaultChoice, counts: Sequence[int], tried: list[Stock]
) -> None:
    """Rate NCCL's own rings with these numbers of final channels, as far as that is possible."""
    for count in counts:
        with suppress(SearchError, MeasurementError):
            tried.append(_rated(task, settings, found, channels=count))


def _rated(
    task: Task,
    settings: Settings,
    found: DefaultChoice,
    *,
    channels: int | None = None,
    well: bool = False,
) -> Stock:
    """Rate NCCL's own rings, `found` under the settings.

    `channels` are final channels, by NCCL_MIN_NCHANNELS; None is NCCL's own number. With `well` a
    measurement whose samples spread is repeated.
    """
    more = channels is not None and channels > found.channels
    # A graph file's channels are doubled, and so are those of NCCL's search.
    settings = msgspec.structs.replace(
        settings, channels=max(1, found.channels // 2), min_channels=channels if more else None
    )
    rings = orders_under(task, settings, condensed(found.rings))
    measurement = (
        measured_well(task.source, rings) if well else task.source.measure([rings.flows])[0]
    )
    return stock(found, settings, rings, measurement)


def as_graph(own: Stock) -> Stock:
    """Return NCCL's own rings for a graph file with as many final channels."""
    settings = own.settings
    if settings.min_channels is None:
        return own
    channels = settings.min_channels // 2
    settings = msgspec.structs.replace(settings, channels=channels, min_channels=None)
    return msgspec.structs.replace(own, settings=settings)
