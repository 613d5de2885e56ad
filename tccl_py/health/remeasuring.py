"""A plan's sets measured again: by which source, the drift, and patterns that a journal lacks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from tccl_py.delivery.fit import check_same_machine
from tccl_py.errors import InputError, MeasurementError
from tccl_py.explanation.paths import collapse_patterns
from tccl_py.health.drift import (
    ROUNDS,
    Drift,
    Effort,
    Journal,
    TooShortError,
    find_drift,
    join_drifts,
)
from tccl_py.model.measurement import JOURNAL_FILE, BandwidthSource, JournalHeader
from tccl_py.model.transfer import TransferSet
from tccl_py.plan.plan import Plan
from tccl_py.planning.plan_sources import (
    class_sources,
    hosts_again,
    journal_by_class,
    known_model,
    measured_as,
)
from tccl_py.sources.bench import Bench
from tccl_py.sources.hosts import HostsSource
from tccl_py.sources.journal import JournalContents, JournalFile
from tccl_py.sources.opening import open_source
from tccl_py.sources.profiled import search_options

if TYPE_CHECKING:
    from tccl_py.sources.hosts import Job


class Remeasuring(NamedTuple):
    """A source that measures a plan's sets again, and the plan's journal by class of hosts.

    `extends` is whether the source may add to the journal: of one host, the one that it is of.
    """

    plan: Plan
    source: Bench
    journals: Sequence[Journal]
    notices: Sequence[str]
    extends: bool

    def drift(self, effort: Effort) -> Drift:
        """Return the drift of all classes of hosts, which share the time.

        Raises TooShortError, with the drift of the other classes: it did not suffice for one.
        """
        effort = replace(effort, seconds=effort.seconds / len(self.plan.cluster.classes))
        sources: Sequence[BandwidthSource] = [self.source]
        if isinstance(self.source, HostsSource):
            sources = class_sources(self.source, self.plan.cluster)
        drifts, errors = [], []
        for number, source in enumerate(sources):
            rates = self.journals[number]
            try:
                drifts.append(find_drift(self.plan, rates, source, number=number, effort=effort))
            except TooShortError as error:
                drifts.append(error.drift)
                errors.append(error)
        found = join_drifts(self.plan, drifts)
        if errors:
            errors[0].drift = found
            raise errors[0]
        return found

    def learn_patterns(self, directory: Path, until: float) -> list[str]:
        """Add collapse patterns that a machine's journal lacks to it; return notices.

        None is measured after `until`, by the monotonic clock.
        """
        rates = self.journals[0]
        patterns = collapse_patterns(self.plan, sorted(rates, key=len)) if self.extends else ()
        lacking = [pattern for pattern in patterns if pattern not in rates]
        if not lacking:
            return []
        learnt: set[TransferSet] = set()
        try:
            with closing(JournalFile(directory / JOURNAL_FILE, self.source.header)) as journal:
                for pattern in lacking * ROUNDS:
                    if time.monotonic() < until:
                        journal.append(self.source.again(pattern))
                        learnt.add(pattern)
        except (InputError, MeasurementError) as error:
            return [f"writes above {len(lacking)} switch(es) cannot be compared: {error}"]
        text = f"measured writes above {len(learnt)} switch(es): later preflights compare with them"
        return [text] if learnt else []


@contextmanager
def remeasuring(
    plan: Plan,
    directory: Path,
    journal: JournalContents,
    seed: int,
    *,
    job: Job | None = None,
    alike: bool = False,
) -> Iterator[Remeasuring]:
    """Open the source of a plan: the hosts of a job, this machine, or a model.

    With `alike` a machine with equal GPUs at the same places will do. Raises InputError: other
    hosts, or this machine has other GPUs, another driver or other NUMA nodes.
    """
    if job is not None:
        with hosts_again(plan, journal.header, job) as hosts:
            yield Remeasuring(plan, hosts, journal_by_class(plan, journal), (), extends=False)
        return
    source, notices = _machine_again(plan, directory, journal.header, seed, alike=alike)
    with source:
        # The journal is another host's where this one is only alike.
        extends = not alike or source.header == journal.header
        yield Remeasuring(plan, source, [journal.measurements], notices, extends)


def _machine_again(
    plan: Plan, directory: Path, journal: JournalHeader, seed: int, *, alike: bool
) -> tuple[Bench, tuple[str, ...]]:
    """Return the source of a plan's machine, or its model with noise of its own, and notices."""
    if plan.simulated:
        model, noise, used = known_model(plan, directory), journal.noise, journal.seed
        same_model = open_source(model, noise=noise, seed=used).header == journal
        text = (
            "the model, or this program's parameters, are not those that the plan was simulated "
            "with: differences for that reason are reported as changes"
        )
        # The journal's own seed would draw the journal's own samples again.
        return open_source(model, noise=noise, seed=used + 1 + seed), () if same_model else (text,)
    right = "check it where it was measured"
    try:
        place = measured_as(journal, plan.machine)
    except InputError as error:
        raise InputError(error.where, error.what, right) from error
    right = f"plan again here, or {right}"
    gpus = place.machine.gpus if alike else None
    notes = check_same_machine(plan, directory, place.fingerprint, right=right, present_gpus=gpus)
    source = open_source(place, gpus=plan.gpus, options=search_options(place.backend))
    return source, tuple(f"{text}: that may explain what changed" for text in notes)
