"""The bench: one owner of measurements, with their memory, journal, samples and limits."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from typing import Any, get_args

from tccl_py.errors import (
    BrokenLinkError,
    BudgetSpentError,
    InputError,
    MeasurementError,
    TcclError,
    limit_reached,
    require,
)
from tccl_py.model.links import LinkFact, LinkVerdict
from tccl_py.model.machine import Fingerprint
from tccl_py.model.measurement import (
    BandwidthSource,
    JournalHeader,
    Measurement,
    Sets,
    StartedSource,
    answer_fault,
    check_source,
    listed_sets,
)
from tccl_py.model.rings import direct_write
from tccl_py.model.transfer import Flow, Place, Transfer, TransferSet, parse_flow, transfer_set
from tccl_py.simulator.model import MachineModel
from tccl_py.sources.journal import JournalContents, JournalFile, read_journal_of

_SPENT = "as many sets were measured, or as long, as is allowed"
MOST_FAILED = 8
"""Links that cannot be measured, after which no more of them are tried."""
Samples = Mapping[TransferSet, Sequence[Measurement]]


class UnsoundLinkError(TcclError):
    """A link carries no data, or cannot be measured: what is planned over it is planned anew."""


class Allowance:
    """Sets and seconds that may be spent, all at once or in parts; None is no limit.

    `spent` are sets; nothing more is allowed once it is `stopped`, as by an interruption.

    >>> allowance = Allowance(sets=9)
    >>> allowance.spent += 3
    >>> allowance.allot(parts=2)
    >>> allowance.covers(3), allowance.covers(4)
    (True, False)
    """

    def __init__(self, sets: int | None = None, seconds: float | None = None) -> None:
        self._sets = inf if sets is None else sets
        self._seconds = inf if seconds is None else seconds
        self._most, self._until = self._sets, self._seconds
        self._began = time.monotonic()
        self.spent, self.stopped = 0, False

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    @property
    def deadline(self) -> float:
        """The monotonic time at which all seconds are over."""
        return self._began + self._seconds

    @property
    def left(self) -> float:
        """Sets that are allowed now."""
        return self._most - self.spent

    def allot(self, *, parts: int) -> None:
        """Allow, from here on, one of `parts` equal parts of what is not spent."""
        self._most = self.spent + _whole((self._sets - self.spent) / parts)
        self._until = self.seconds + (self._seconds - self.seconds) / parts

    def allow(self, share: float) -> None:
        """Allow a share of the whole, one set at least."""
        self._most, self._until = max(1, _whole(share * self._sets)), share * self._seconds

    @property
    def out_of_time(self) -> bool:
        """Whether the allowed seconds are over, or an interruption came."""
        return self.stopped or self.seconds >= self._until

    def covers(self, sets: int = 1) -> bool:
        """Return whether so many more sets are allowed now."""
        return self.spent + sets <= self._most and not self.out_of_time

    def check(self) -> None:
        """Raise BudgetSpentError unless one more set is allowed now."""
        if not self.covers():
            raise BudgetSpentError(_SPENT)


def _whole(sets: float) -> float:
    return sets if sets == inf else int(sets)


def bench_of(source: BandwidthSource) -> Bench:
    """Return the bench of a source: `source` itself if it is one."""
    return source if isinstance(source, Bench) else Bench(source)


def bench_for(source: BandwidthSource, machine: str) -> Bench:
    """Return the bench of a source, for a machine of this name.

    Raises InputError: the source simulates another machine.
    """
    bench = bench_of(source)
    right = "give a source of the machine"
    simulated = machine if bench.model is None else bench.model.machine.name
    what = f"the source simulates {simulated}"
    require(simulated == machine, f"machine {machine}", what, right)
    return bench


class Bench:
    """A source with a memory, shared by several searches; a context manager.

    `source` measures sets that neither `stored` nor the open `journal` has, each by itself,
    hardware in random order, so that drift favours no place in a list. Without a source only the
    memory has answers. New samples are appended to the journal, which is closed with the bench.
    `times_measured` counts new samples, `sets_remembered` answers from memory.

    Any object with `simulated` and `measure(sets)` is a source. An answer that does not fit its
    set, and an exception of the source's own, are a MeasurementError of that set.

    `unsound` are the links that a BrokenLinkError named: nothing is measured over them any more.
    With `judges_links` also those of which no transfer alone can be measured, where a set fails;
    and each link more is an UnsoundLinkError.
    """

    def __init__(
        self,
        source: BandwidthSource | None = None,
        stored: Samples | None = None,
        *,
        journal: JournalFile | None = None,
    ) -> None:
        if source is not None:
            check_source(source)
        self._source = source
        self._hardware = source if isinstance(source, StartedSource) else None
        self._journal, self._journal_notices = journal, journal.notices if journal else ()
        self._stored: Samples = (stored or {}) if journal is None else journal.measurements
        self._new: dict[TransferSet, list[Measurement]] = {}
        self._random = random.Random(0)
        self._asked: set[TransferSet] = set()
        self.allowance, self._asked_before = Allowance(), 0
        self._measuring_s = 0.0
        self._on_set: Callable[[int], None] = lambda _: None
        self.unsound: dict[tuple[Place, Place], LinkFact] = {}
        self.cut_short = self._is_begun = self.judges_links = False
        self.times_measured = 0
        self.sets_remembered = 0

    # What is measured, and on what.

    def _of_source(self, name: str, default: Any) -> Any:
        return getattr(self._source, name, default)

    @property
    def simulated(self) -> bool:
        """Return whether the source simulates, or did."""
        if self._source is not None:
            return self._source.simulated
        return any(samples[0].simulated for samples in self._stored.values())

    @property
    def dry_run(self) -> bool:
        """Return whether host memory is measured in the place of GPUs."""
        return bool(self._of_source("dry_run", False))

    @property
    def bounds_hold(self) -> bool:
        """Return whether rates by parts and by images hold by construction of the source."""
        return bool(self._of_source("bounds_hold", False))

    @property
    def noise(self) -> float | None:
        """The relative standard deviation of a single sample, as the source states it."""
        noise: float | None = self._of_source("noise", None)
        return noise

    @property
    def model(self) -> MachineModel | None:
        """The model that the source simulates; None of hardware."""
        model = self._of_source("model", None)
        return model if isinstance(model, MachineModel) else None

    @property
    def fingerprint(self) -> Fingerprint | None:
        """The identity of the measured host; None of models and of several hosts."""
        fingerprint: Fingerprint | None = self._of_source("fingerprint", None)
        return fingerprint

    @property
    def header(self) -> JournalHeader:
        """Header of journals of these measurements."""
        header: JournalHeader | None = self._of_source("header", None)
        if header is None:
            raise InputError("the source", "has no journal header", "give the header of a journal")
        return header

    @property
    def notices(self) -> tuple[str, ...]:
        """Notices for the user on what is measured; closing may add some."""
        return (*self._of_source("notices", ()), *self._journal_notices)

    @property
    def conditions(self) -> str:
        """Clocks and links of the GPUs under load, or errors of the hosts' clocks.

        "" if nothing was measured.
        """
        return self._of_source("conditions", "") if self._new else ""

    @property
    def sets_measured(self) -> int:
        """Number of sets that the source measured, each once or several times."""
        return len(self._new)

    @property
    def sets(self) -> Iterator[TransferSet]:
        """All sets with samples."""
        return iter({**self._stored, **self._new})

    def recall(self, transfers: TransferSet) -> tuple[Measurement, ...]:
        """Return the samples of a set, without a measurement."""
        return (*self._stored.get(transfers, ()), *self._new.get(transfers, ()))

    def check(self, sets: Sequence[TransferSet]) -> None:
        """Refuse sets that the source cannot run, as far as it knows without a measurement."""
        self._of_source("check", lambda _: None)(sets)

    def prepare(self) -> None:
        """Let what measures start, not waited for, unless the memory may have all answers."""
        if not any(self.sets):
            self._of_source("prepare", lambda: None)()

    # Answers: the first sample of each set, further samples, and samples that are new.

    def measure(self, sets: Sets) -> Sequence[Measurement]:
        """Return the first sample of each set, from memory or by the source.

        A set may be a flow, or text as `0:4` or `G0->G0->G4 G4->G4->G0`. Raises MeasurementError:
        the source fails, or the flows of a set did not run together. BudgetSpentError: see
        `limited`. SourceLostError: a host is gone, or sets that were measured cannot be any more.
        """
        keys = listed_sets(sets)
        missing = self._ask(keys)
        if not self.simulated:
            self._random.shuffle(missing)
        for key in missing:
            self._refuse_unless(self.has_time())
            self.again(key)
        return [self.recall(key)[0] for key in keys]

    def sample(self, transfers: TransferSet, number: int) -> Measurement:
        """Return a set's sample of this number, from memory or, if it is the next, by the source.

        The set counts once for `limited`. Raises errors as `measure`.
        """
        self._ask([transfers], number)
        while number >= len(self.recall(transfers)):
            self._refuse_unless(self.has_time())
            self.again(transfers)
        return self.recall(transfers)[number]

    def samples(self, transfers: TransferSet, count: int) -> Sequence[Measurement]:
        """Return a set's first samples, as `sample` does, or fewer if the time is up."""
        samples = [self.sample(transfers, 0)]
        with suppress(BudgetSpentError):
            for number in range(1, count):
                samples.append(self.sample(transfers, number))
        return samples

    def again(self, transfers: TransferSet) -> Measurement:
        """Measure a set once more, whatever the memory has, and store the result."""
        hardware = self._hardware
        if hardware is not None:
            self._on_set(self.sets_measured)
            hardware.start()
            hardware.deadline = self.allowance.deadline if self._is_begun else inf
        begun = time.monotonic()
        try:
            measurement = self._measure(transfers)
        except BudgetSpentError:
            self.cut_short = True
            raise
        except MeasurementError as error:
            if self._judge(transfers, error) and self.judges_links:
                raise UnsoundLinkError(str(error)) from error
            raise
        self._measuring_s += time.monotonic() - begun
        self._keep(measurement)
        self._is_begun = True
        if hardware is not None:
            self._on_set(self.sets_measured)
        return measurement

    def _keep(self, measurement: Measurement) -> None:
        if self._journal is not None:
            self._journal.append(measurement)
        self._new.setdefault(measurement.transfers, []).append(measurement)
        self.times_measured += 1

    def _ask(self, keys: Sequence[TransferSet], number: int = 0) -> list[TransferSet]:
        """Count sets that are asked for; return those that lack the sample, each once."""
        # What a journal answers counts as well: a resumed run goes the same way.
        new = set(keys) - self._asked
        if len(self._asked) > self._asked_before and new:
            self._refuse_unless(self.allowance.covers(len(new)) and self.has_time())
        self._asked |= new
        self.allowance.spent += len(new)
        missing = [key for key in keys if number >= len(self.recall(key))]
        self.sets_remembered += len(keys) - len(missing)
        self._is_begun |= not new.issubset(missing)
        return list(dict.fromkeys(missing))

    def _measure(self, transfers: TransferSet) -> Measurement:
        if self._source is None:
            raise MeasurementError(f"{transfers} is not in the journal")
        for flow in transfers.flows if self.unsound else ():
            for fact in map(self.unsound.get, map(_link, flow.peer_transfers)):
                if fact is not None and fact.state == "broken":
                    raise BrokenLinkError([flow], fact.what, verdict=fact.verdict)
        where = f"{transfers}: {type(self._source).__name__}.measure"
        try:
            answers = self._source.measure([transfers])
            fault = answer_fault(answers, transfers, simulated=self.simulated)
        except TcclError:
            raise
        except Exception as error:
            if limit_reached(error):
                raise
            raise MeasurementError(f"{where} raised {type(error).__name__}: {error}") from error
        if fault:
            raise MeasurementError(f"{where} {fault}")
        (measurement,) = answers
        if not measurement.is_together:
            share = f"{measurement.overlap:.0%}"
            raise MeasurementError(f"{transfers}: its flows ran together for only {share} of it")
        return measurement

    # Links that carry no data.

    def try_links(self, links: Iterable[tuple[int, int]]) -> None:
        """Measure both directions of links between GPUs, each alone, unless they were measured.

        Those that fail are `unsound` then, and after MOST_FAILED of them all others.
        """
        with suppress(BudgetSpentError):
            for link in links:
                self._try(direct_write(*ends).transfers[0] for ends in (link, link[::-1]))

    def _judge(self, transfers: TransferSet, error: MeasurementError) -> bool:
        """Note the links for which a set may have failed; return whether one was not known."""
        known = len(self.unsound)
        if isinstance(error, BrokenLinkError):
            for part in (p for text in error.flows for p in parse_flow(text).peer_transfers):
                self._note(part, error)
        elif self.judges_links:
            # Copy engines between GPUs are no part of plans.
            parts = (part for flow in transfers.flows for part in flow.peer_transfers)
            self._try(part for part in parts if not part.uses_copy_engine)
        return len(self.unsound) > known

    def _try(self, parts: Iterable[Transfer]) -> None:
        measured = {p for known in self.sets for flow in known.flows for p in flow.peer_transfers}
        for part in dict.fromkeys(parts):
            if part in measured or _link(part) in self.unsound:
                continue
            failed = [fact for fact in self.unsound.values() if fact.state == "not measured"]
            try:
                if len(failed) >= MOST_FAILED:
                    raise MeasurementError(f"not tried, as {MOST_FAILED} others cannot be")
                self._keep(self._measure(transfer_set([Flow((part,), blocks=1)])))
            except BudgetSpentError:
                raise
            except MeasurementError as error:
                self._note(part, error)

    def _note(self, part: Transfer, error: MeasurementError) -> None:
        """Note that a transfer between GPUs cannot be measured, alone or in any set."""
        one, other = link = _link(part)
        ends: dict[str, Any] = {"one": one.index, "other": other.index}
        if isinstance(error, BrokenLinkError):
            known = error.verdict in get_args(LinkVerdict)
            ends["verdict"] = error.verdict if known else "fails"
            fact = LinkFact(state="broken", what=error.what, **ends)
        else:
            what = f"P2P between GPUs {one.index} and {other.index} cannot be measured"
            fact = LinkFact(state="not measured", what=f"{what} ({error})", **ends)
        self.unsound.setdefault(link, fact)

    # Limits.

    @contextmanager
    def limit(self, allowance: Allowance) -> Iterator[None]:
        """Limit new sets in a block by an allowance, which other benches may share.

        Beyond what is allowed, sets that were not asked for before are refused, and `cut_short`
        tells so, in the block around as well. The first new set is not refused. A set that runs
        when all seconds are over is cut, where its source can.
        """
        before, self.allowance, self._asked_before = self.allowance, allowance, len(self._asked)
        was_cut, self.cut_short, self._is_begun = self.cut_short, False, False
        try:
            yield
        finally:
            self.allowance = before
            self.cut_short |= was_cut

    def has_time(self) -> bool:
        """Return whether a set may be begun: the time is not up, and will not be up within it.

        The first set may always be, unless an interruption came.
        """
        if self.allowance.stopped:
            return False
        usual_s = self._measuring_s / max(1, self.times_measured)
        late = time.monotonic() + usual_s > self.allowance.deadline
        over = self._is_begun and (self.allowance.out_of_time or late)
        self.cut_short |= over
        return not over

    def _refuse_unless(self, allowed: bool) -> None:
        if not allowed:
            self.cut_short = True
            raise BudgetSpentError(_SPENT)

    # The journal, and what a user is told.

    def keep_in(
        self, path: Path | str, *, replace: bool = False, optional: bool = False
    ) -> tuple[str, ...]:
        """Answer from a journal file, and append new samples; return notices on the file.

        A missing file is made; `replace` puts a journal of another machine aside, as `PATH.old`. An
        `optional` journal of this machine that this user cannot write to is only read. Raises
        InputError: the file belongs to another machine, is damaged, or cannot be written.
        """
        path = Path(path)
        journal: JournalFile | JournalContents
        if optional and path.is_file() and not os.access(path, os.W_OK):
            journal = read_journal_of(self.header, path)
        else:
            journal = self._journal = JournalFile(path, self.header, replace=replace)
        self._stored = journal.measurements
        self._of_source("resume", lambda _: None)(lambda key: len(self.recall(key)))
        return journal.notices

    def watch(self, on_set: Callable[[int], None]) -> None:
        """Call `on_set` with the number of sets that hardware measured, before and after each."""
        self._on_set = on_set

    def summary(self, conditions: str) -> tuple[str, ...]:
        """Return notices for a plan of the measurements; `conditions` are from before closing."""
        return self._hardware.summary(self._new, conditions) if self._hardware else ()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()
        if self._hardware is not None:
            self._hardware.stop(*exception)

    def close(self) -> None:
        """Close the journal, if there is one; it already has every sample."""
        if self._journal is not None:
            self._journal.close()


def _link(part: Transfer) -> tuple[Place, Place]:
    """Return the two GPUs of a transfer between GPUs, in order."""
    return min(part.source, part.destination), max(part.source, part.destination)
