"""The pools of several hosts as one: each host runs a share of a program, released together.

When all lanes are resident, the controller sets a time at which each host releases its lanes by its
own clock. (S. Hunold and A. Carpen-Amarie, Reproducible MPI Benchmarking, TPDS 2016.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from tccl_profiler.cluster import messages as say
from tccl_profiler.cluster.agents import Agents, checked
from tccl_profiler.execution import RunResult, RunSpec
from tccl_profiler.linux import realtime
from tccl_profiler.messages import Endpoint, LinkEnds, LinkLost, LinkStep, Ping, Pinged, WorkerLost
from tccl_profiler.nccl_links import process_variables
from tccl_profiler.program import Link, Program, host_of
from tccl_profiler.rates import Clock, ClockReading
from tccl_profiler.workers import Answer
from tccl_py.errors import SourceLostError

FIRST_PINGS, PINGS = 40, 12
_AHEAD_NS = 3_000_000
"""How far ahead the first release is agreed; then, twice what messages have taken and a little."""
_LITTLE_NS = 300_000
_FURTHEST_NS = 100_000_000
_LATE_SHARE = 0.02
"""A release that came later than this share of a window is void: the run is repeated."""
_ATTEMPTS = 3
JUMP_NS = 1_000_000
"""More than this beyond all errors is a jump; below, NTP may have corrected a clock's rate."""
_LOOSE = 2.0
_SLACK_NS = 10_000
_OFTEN_S = 0.05  # a clock that cannot be read any better is not read more often


class ClusterPool:
    """Measures several hosts for a Profiler; see `execution.Runner`.

    Methods raise WorkerLost if a worker died or hangs, MeasurementError if devices refuse, and
    SourceLostError if a host is gone or a clock jumped.
    """

    def __init__(
        self,
        agents: Agents,
        clocks: Mapping[str, HostClock],
        devices: Mapping[str, Collection[str]],
        *,
        nccl_variables: Mapping[str, str] | None = None,
    ) -> None:
        self._nccl_variables = nccl_variables or {}
        self._agents = agents
        self._clocks = dict(clocks)
        self._devices = {host: tuple(sorted(ids)) for host, ids in devices.items() if ids}
        self.lanes: dict[str, int] = {}
        self._variables: Mapping[str, str] = {}
        self.ahead_ns = _AHEAD_NS
        self.warnings: list[str] = []
        self.late = 0

    def start(self) -> None:
        """Start all workers."""
        self.restart()
        self.read_clocks(FIRST_PINGS)

    def restart(self) -> None:
        """End all workers, and start new ones; raises as `start`."""
        questions = {
            host: say.Open(devices=ids, variables=self._variables)
            for host, ids in self._devices.items()
        }
        answers = self._agents.ask(questions, say.Opened, self._agents.timeouts.start_s)
        self.warnings = [f"host {host}: {t}" for host, own in answers.items() for t in own.warnings]
        for host, opened in answers.items():
            self.lanes |= {f"{host}.{name}": count for name, count in opened.lanes.items()}

    def read_clocks(self, count: int = PINGS) -> None:
        """Compare the hosts' clocks with this host's, where that is due."""
        for host, clock in self._clocks.items():
            if host in self._devices and clock.is_due:
                clock.add(self._agents.reading(host, count))

    def ping(self, count: int = 16) -> Mapping[str, Pinged]:
        """Compare each device's clock with this host's, through its own host's clock."""
        self.read_clocks()
        questions = dict.fromkeys(self._devices, Ping(count=count))
        answers = self._agents.ask(questions, say.DevicesPinged)
        return {
            f"{host}.{name}": self._clocks[host].here(pinged)
            for host, answer in answers.items()
            for name, pinged in answer.pinged.items()
        }

    def run(self, program: Program, spec: RunSpec) -> list[RunResult]:
        """Run a program's repeats, each released on all hosts at the same time."""
        broken = ""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._connect(program)
                with realtime():
                    results, late = self._attempt(program, spec)
            except LinkLost as error:
                # It is made again; a second failure is no accident.
                if broken:
                    raise WorkerLost(f"{broken}; then, made again, {error}") from error
                broken = str(error)
                continue
            # On a machine that is too busy, the overlap decides which repeats count.
            if not late or attempt == _ATTEMPTS:
                return results
        raise WorkerLost(broken)

    # Links

    def _connect(self, program: Program) -> None:
        """Make the links of a program that are not there."""
        if not program.links:
            return
        asked = process_variables(program.links)
        variables = {**asked, **self._nccl_variables}
        if asked and variables != self._variables:
            # NCCL reads them once in a process.
            self._variables = variables
            self.restart()
        hosts = {host_of(end) for link in program.links for end in (link.sender, link.receiver)}
        have = self._usable(hosts)
        missing = [
            link
            for link in program.links
            if link not in have[host_of(link.sender)] or link not in have[host_of(link.receiver)]
        ]
        by_nics = [link for link in missing if link.carrier is None]
        if by_nics:
            self._make(by_nics)
        for link in missing:
            if link.carrier is not None:
                self._make([link])
                # Its sender has only begun.
                self._usable([host_of(link.sender)])

    def _usable(self, hosts: Collection[str]) -> dict[str, set[Link]]:
        answers = self._agents.ask(dict.fromkeys(hosts, LinkStep(step="usable")), LinkEnds)
        return {host: set(answer.links) for host, answer in answers.items()}

    def _make(self, links: list[Link]) -> None:
        """Open links in three phases: receivers listen, senders connect, receivers accept."""
        endpoints: tuple[Endpoint, ...] = ()
        steps: tuple[Literal["listen", "connect", "accept"], ...] = ("listen", "connect", "accept")
        for name in steps:
            step = LinkStep(step=name, links=tuple(links), endpoints=endpoints)
            shares = step.shares(lambda _, device: host_of(device))
            endpoints = step.joined(self._agents.ask(shares, LinkEnds).values()).endpoints

    # One run

    def _attempt(self, program: Program, spec: RunSpec) -> tuple[list[RunResult], bool]:
        number, hosts = self._agents.number(), program.hosts
        try:
            for host in hosts:
                begin = say.Begin(program=program.on(host), spec=spec.on(host))
                self._agents.tell(host, number, begin)
            for repeat in range(spec.repeats):
                self._answers(number, hosts, say.Resident, spec)
                # Agree on a time, and tell each host what that is by its clock.
                at_ns = time.monotonic_ns() + self.ahead_ns
                for host in hosts:
                    there_ns = self._clocks[host].there_ns(at_ns)
                    self._agents.tell(host, number, say.Release(repeat=repeat, at_ns=there_ns))
            ran = self._answers(number, hosts, say.Ran, spec)
        except SourceLostError:
            # The job ends here, and with it what the other hosts do.
            raise
        except BaseException:
            self._give_up(number, hosts)
            raise
        return self.judged(ran, spec)

    def _answers(
        self, number: int, hosts: Collection[str], kind: type[Answer], spec: RunSpec
    ) -> dict[str, Answer]:
        limit_s = self._agents.timeouts.answer_s + spec.lasting_s
        answers = self._agents.heard(number, hosts, limit_s)
        ended = {host: a for host, a in answers.items() if not isinstance(a, kind)}
        if ended or len(answers) < len(hosts):
            answers = ended | self._give_up(number, [host for host in hosts if host not in ended])
        return checked(answers, kind)

    def _give_up(self, number: int, hosts: Collection[str]) -> dict[str, say.Message]:
        for host in hosts:
            self._agents.tell(host, number, say.Abort())
        ended: dict[str, say.Message] = {}
        while len(ended) < len(hosts):
            waiting = [host for host in hosts if host not in ended]
            answers = self._agents.heard(number, waiting, self._agents.timeouts.answer_s)
            # A Resident, or the end of a repeat, may have been under way.
            ended |= {h: a for h, a in answers.items() if not isinstance(a, say.Resident)}
        return ended

    def judged(self, ran: Mapping[str, say.Ran], spec: RunSpec) -> tuple[list[RunResult], bool]:
        """Return the results of all hosts and whether a release was late; adapt `ahead_ns`."""
        earliest_ns = min(early for host in ran.values() for early in host.early_ns)
        took_ns = self.ahead_ns - earliest_ns
        self.ahead_ns = min(_FURTHEST_NS, max(2 * took_ns + _LITTLE_NS, self.ahead_ns // 2))
        results = [
            joined({host: own.results[repeat] for host, own in ran.items()})
            for repeat in range(spec.repeats)
        ]
        late = -earliest_ns > _LATE_SHARE * spec.window_us * 1e3
        self.late += late
        return results, late


def joined(results: Mapping[str, RunResult]) -> RunResult:
    """Return one repeat's result over several hosts, from each host's own."""

    def named(field: str) -> dict[str, Any]:
        return {
            f"{host}.{device}": rows
            for host, result in results.items()
            for device, rows in getattr(result, field).items()
        }

    return RunResult(records=named("records"), stamps=named("stamps"))


class HostClock:
    """One host's CLOCK_MONOTONIC on the controller's, as `rates.Clock` fits a device's."""

    def __init__(self, host: str, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.host = host
        self._now_ns = now_ns
        self._clock = Clock(device=f"host {host}")
        self._best_ns = 0
        self._read_ns = 0

    def add(self, reading: ClockReading) -> None:
        """Add a reading, host minus controller; begin a new fit if the rate was corrected."""
        if self._read_ns:
            at_ns, error_ns = self._clock.host_ns(reading.at_ns + reading.offset_ns)
            off_ns, allowed_ns = at_ns - reading.at_ns, error_ns + reading.error_ns
            if abs(off_ns) > allowed_ns + JUMP_NS:
                raise SourceLostError(
                    f"host {self.host}: its clock jumped by {off_ns / 1e6:+,.1f} ms, of which "
                    f"{allowed_ns / 1e6:,.1f} ms are explained; find out what sets or suspends it, "
                    "and measure again"
                )
            if self._clock.jumped(reading) is not None:
                self._clock = Clock(device=f"host {self.host}")
        self._clock.add(reading)
        self._best_ns, self._read_ns = reading.error_ns, reading.at_ns

    @property
    def is_due(self) -> bool:
        """Whether the error has grown so much that the clock should be read again."""
        if not self._read_ns:
            return True
        if self._now_ns() - self._read_ns < _OFTEN_S * 1e9:
            return False
        return self.error_ns > _LOOSE * self._best_ns + _SLACK_NS

    @property
    def error_ns(self) -> int:
        """The error bound of the host's time now."""
        return self._clock.host_ns(self.there_ns(self._now_ns()))[1]

    def here_ns(self, there_ns: int) -> tuple[int, int]:
        """Return the controller's time at a time of the host, and its error bound."""
        return self._clock.host_ns(there_ns)

    def there_ns(self, here_ns: int) -> int:
        """Return the host's time at a time of the controller."""
        guess = here_ns
        # The first step takes the offset, the second what the clocks drift within it.
        for _ in range(3):
            guess += here_ns - self._clock.host_ns(guess)[0]
        return guess

    def here(self, pinged: Pinged) -> Pinged:
        """Return pings of a device as if the controller had sent them, bounds included."""
        asked = [self.here_ns(at_ns) for at_ns in pinged.asked_ns]
        seen = [self.here_ns(at_ns) for at_ns in pinged.seen_ns]
        return Pinged(
            asked_ns=tuple(at_ns - error_ns for at_ns, error_ns in asked),
            device_ns=pinged.device_ns,
            seen_ns=tuple(at_ns + error_ns for at_ns, error_ns in seen),
        )


class OwnClock(HostClock):
    """The clock of the controller's own host, which needs no comparison."""

    is_due = False
    error_ns = 0

    def here_ns(self, there_ns: int) -> tuple[int, int]:
        """Return the same time."""
        return there_ns, 0

    def there_ns(self, here_ns: int) -> int:
        """Return the same time."""
        return here_ns
