"""The pools of several hosts as one: each host runs its share of a program, released together.

All hosts say that their lanes are there; then the controller agrees with them on a time, far enough
ahead for its slowest message, at which each releases its own lanes by its own clock. (Windows and
not a barrier: S. Hunold and A. Carpen-Amarie, Reproducible MPI Benchmarking, TPDS 2016.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import msgspec

from tccl_profiler.clock import Clock, ClockReading
from tccl_profiler.cluster import messages as say
from tccl_profiler.cluster.agents import Agents, LinkFailure, raise_failures
from tccl_profiler.execution import Outcome, Timing, joined
from tccl_profiler.linux import urgent
from tccl_profiler.messages import Pinged
from tccl_profiler.nccl_links import process_variables
from tccl_profiler.pool import Memory
from tccl_profiler.program import Link, Program, host_of
from tccl_profiler.workers import WorkerLost
from tccl_py.errors import SourceLostError

# The clocks of hosts against the controller's: CLOCK_MONOTONIC by CLOCK_MONOTONIC.


JUMP_NS = 1_000_000
"""More than this beyond all errors is a jump; below, NTP may have corrected a clock's rate."""
_LOOSE = 2.0
_SLACK_NS = 10_000
_OFTEN_S = 0.05
"""A clock that cannot be read any better is not read more often."""


class HostClock:
    """One host's clock on the controller's.

    Args:
        host: its name.
        now_ns: the controller's CLOCK_MONOTONIC.
    """

    def __init__(self, host: str, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.host = host
        self._now_ns = now_ns
        self._clock = Clock(device=f"host {host}")
        self._best_ns = 0
        self._read_ns = 0

    def add(self, reading: ClockReading) -> None:
        """Take in a reading, host minus controller.

        Where it does not fit the others by a little, the clock's rate was corrected: from then on
        it is another clock.

        Raises:
            SourceLostError: the clock jumped.
        """
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
        """Whether its error has grown so much since it was read that it should be read again."""
        if not self._read_ns:
            return True
        if self._now_ns() - self._read_ns < _OFTEN_S * 1e9:
            return False
        return self.error_ns > _LOOSE * self._best_ns + _SLACK_NS

    @property
    def error_ns(self) -> int:
        """How far off its time may be now."""
        return self._clock.host_ns(self.there_ns(self._now_ns()))[1]

    @property
    def offset_ns(self) -> int:
        """Its clock minus the controller's, now."""
        now = self._now_ns()
        return self.there_ns(now) - now

    @property
    def drift_ppm(self) -> float:
        """How much faster it goes than the controller's."""
        return self._clock.drift_ppm

    def here_ns(self, there_ns: int) -> tuple[int, int]:
        """The controller's time at a time of the host, and how far off that may be."""
        return self._clock.host_ns(there_ns)

    def there_ns(self, here_ns: int) -> int:
        """The host's time at a time of the controller."""
        guess = here_ns
        # The first step takes the offset, the second what the clocks drift within it.
        for _ in range(3):
            guess += here_ns - self._clock.host_ns(guess)[0]
        return guess

    def here(self, pinged: Pinged) -> Pinged:
        """Pings of a device by its host, as if the controller had sent them, bounds included."""
        asked, seen = [], []
        for asked_ns, seen_ns in zip(pinged.asked_ns, pinged.seen_ns, strict=True):
            one, error = self.here_ns(asked_ns)
            asked.append(one - error)
            one, error = self.here_ns(seen_ns)
            seen.append(one + error)
        return Pinged(asked_ns=tuple(asked), device_ns=pinged.device_ns, seen_ns=tuple(seen))


class OwnClock(HostClock):
    """The clock of the controller's own host, which needs no comparison."""

    def __init__(self, host: str) -> None:
        super().__init__(host)
        self.add(ClockReading(at_ns=time.monotonic_ns(), offset_ns=0, error_ns=0))

    @property
    def is_due(self) -> bool:
        """Never."""
        return False

    @property
    def error_ns(self) -> int:
        """None."""
        return 0

    def here_ns(self, there_ns: int) -> tuple[int, int]:
        """It is the same."""
        return there_ns, 0

    def there_ns(self, here_ns: int) -> int:
        """It is the same."""
        return here_ns


Answer = TypeVar("Answer", bound=msgspec.Struct)

FIRST_PINGS, PINGS = 40, 12
_AHEAD_NS = 3_000_000
"""How far ahead the first release is agreed; then, twice what messages have taken and a little."""
_LITTLE_NS = 300_000
_FURTHEST_NS = 100_000_000
_LATE_SHARE = 0.02
"""A release that came later than this share of a window is not one: the run is repeated."""
_ATTEMPTS = 3


class ClusterPool:
    """What a Profiler measures several hosts by; see `runs.Runner`.

    Args:
        agents: of all hosts, which know what they are.
        clocks: of the hosts.
        devices: what to start by host; a host that is not there starts nothing.
        memory: what each device gives; None is what suits the backend.
        nccl_variables: what NCCL is told beside what a program asks of it.
    """

    def __init__(
        self,
        agents: Agents,
        clocks: Mapping[str, HostClock],
        devices: Mapping[str, Collection[str]],
        *,
        memory: Memory | None = None,
        nccl_variables: Mapping[str, str] | None = None,
    ) -> None:
        self._nccl_variables = nccl_variables or {}
        self._agents = agents
        self._clocks = dict(clocks)
        self._devices = {host: tuple(sorted(ids)) for host, ids in devices.items() if ids}
        self._memory = memory
        self._lanes: dict[str, int] = {}
        self._variables: Mapping[str, str] = {}
        self._ahead_ns = _AHEAD_NS
        self.complaints: list[str] = []
        self.late = 0

    @property
    def lanes(self) -> Mapping[str, int]:
        """How many blocks each device runs at once, by its name (`h1.G0`)."""
        return self._lanes

    def start(self) -> None:
        """Start all workers.

        Raises:
            MeasurementError: a device cannot be used; it names the host.
            HostLost: a host is gone.
        """
        questions = {
            host: say.Open(devices=ids, memory=self._memory) for host, ids in self._devices.items()
        }
        self._opened(self._agents.ask(questions, say.Opened, self._agents.patience.start_s))
        self.read_clocks(FIRST_PINGS)

    def restart(self) -> None:
        """Start all workers anew.

        Raises:
            MeasurementError: as `start`.
        """
        questions = dict.fromkeys(self._devices, say.Restart(variables=self._variables))
        self._opened(self._agents.ask(questions, say.Opened, self._agents.patience.start_s))

    def _opened(self, answers: Mapping[str, say.Opened]) -> None:
        for host, opened in answers.items():
            self._lanes |= {f"{host}.{name}": count for name, count in opened.lanes.items()}
            self.complaints += [f"host {host}: {text}" for text in opened.complaints]

    def read_clocks(self, count: int = PINGS) -> None:
        """Compare the hosts' clocks with this one's, where that is due.

        Raises:
            SourceLostError: a clock jumped; it names the host.
        """
        for host, clock in self._clocks.items():
            if host in self._devices and clock.is_due:
                clock.add(self._agents.reading(host, count))

    def ping(self, count: int = 16) -> Mapping[str, Pinged]:
        """Each device's clock against this host's, by its name: its host's lies between.

        Raises:
            WorkerLost: a worker died or hangs.
            SourceLostError: a host is gone, or its clock jumped.
        """
        self.read_clocks()
        questions = dict.fromkeys(self._devices, say.PingDevices(count=count))
        answers = self._agents.ask(questions, say.DevicesPinged)
        return {
            f"{host}.{name}": self._clocks[host].here(pinged)
            for host, answer in answers.items()
            for name, pinged in answer.pinged.items()
        }

    def run(self, program: Program, timing: Timing) -> list[Outcome]:
        """Run a program's repeats, each released on all hosts at the same time.

        Raises:
            WorkerLost: a worker died or hangs: start anew.
            MeasurementError: the devices refuse the program, or its links cannot be made.
            SourceLostError: a host is gone.
        """
        broken = ""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._connect(program)
                with urgent():
                    outcomes, late = self._attempt(program, timing)
            except LinkFailure as error:
                # It is made again; a second failure is no accident.
                if broken:
                    raise WorkerLost(f"{broken}; then, made again, {error}") from error
                broken = str(error)
                continue
            # On a machine that is too busy, the overlap decides which repeats count.
            if not late or attempt == _ATTEMPTS:
                return outcomes
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
                self._usable({host_of(link.sender)})

    def _usable(self, hosts: Collection[str]) -> dict[str, set[Link]]:
        there = self._agents.ask(dict.fromkeys(hosts, say.AskLinks()), say.Links)
        return {host: set(answer.links) for host, answer in there.items()}

    def _make(self, links: Collection[Link]) -> None:
        """Those that receive listen, those that send connect, those that receive accept."""
        coming = _by_host(links, receiving=True)
        listening = self._agents.ask(
            {host: say.Listen(links=some) for host, some in coming.items()}, say.Listening
        )
        where = {
            link: endpoint for answer in listening.values() for link, endpoint in answer.endpoints
        }
        going = {
            host: say.Connect(endpoints=tuple((link, where[link]) for link in some))
            for host, some in _by_host(links, receiving=False).items()
        }
        self._agents.ask(going, say.Done)
        self._agents.ask({host: say.Accept(links=some) for host, some in coming.items()}, say.Done)

    # One run

    def _attempt(self, program: Program, timing: Timing) -> tuple[list[Outcome], bool]:
        """All repeats, and whether a host was released too late for that to count."""
        number, hosts = self._agents.number(), program.hosts
        try:
            for host in hosts:
                begin = say.Begin(work=program.on(host), timing=timing.on(host))
                self._agents.tell(host, number, begin)
            for repeat in range(timing.repeats):
                self._answers(number, hosts, say.Resident, timing)
                self._release(number, hosts, repeat)
            ran = self._answers(number, hosts, say.Ran, timing)
        except SourceLostError:
            # The job ends here, and with it what the other hosts do.
            raise
        except BaseException:
            self._give_up(number, hosts)
            raise
        return self._judged(ran, timing)

    def _answers(
        self, number: int, hosts: Collection[str], kind: type[Answer], timing: Timing
    ) -> dict[str, Answer]:
        """An answer of each host.

        Raises:
            WorkerLost, MeasurementError: a host failed; what the others do is given up.
        """
        limit_s = self._agents.patience.answer_s + timing.lasting_s
        answers = self._agents.heard(number, hosts, limit_s)
        found: dict[str, Answer] = {}
        for host, answer in answers.items():
            if isinstance(answer, kind):
                found[host] = answer
        if len(found) < len(hosts):
            ended = {h: one for h, one in answers.items() if h not in found}
            ended |= self._give_up(number, [host for host in hosts if host not in ended])
            raise_failures(ended)
            raise WorkerLost(f"host {next(iter(ended))}: answered out of turn")
        return found

    def _give_up(self, number: int, hosts: Collection[str]) -> dict[str, say.Message]:
        """Stop a run on some hosts, and hear from each how it ended."""
        for host in hosts:
            self._agents.tell(host, number, say.Abort())
        ended: dict[str, say.Message] = {}
        while len(ended) < len(hosts):
            waiting = [host for host in hosts if host not in ended]
            answers = self._agents.heard(number, waiting, self._agents.patience.answer_s)
            # That lanes are there, or a repeat is done, may have been under way.
            ended |= {h: one for h, one in answers.items() if not isinstance(one, say.Resident)}
        return ended

    def _release(self, number: int, hosts: Collection[str], repeat: int) -> None:
        """Agree on a time, and tell each host what that is by its clock."""
        at_ns = time.monotonic_ns() + self._ahead_ns
        for host in hosts:
            there_ns = self._clocks[host].there_ns(at_ns)
            self._agents.tell(host, number, say.Release(repeat=repeat, at_ns=there_ns))

    def _judged(self, ran: Mapping[str, say.Ran], timing: Timing) -> tuple[list[Outcome], bool]:
        """The outcomes over all hosts; how far ahead to agree is learned from them."""
        earliest_ns = min(early for one in ran.values() for early in one.early_ns)
        took_ns = self._ahead_ns - earliest_ns
        self._ahead_ns = min(_FURTHEST_NS, max(2 * took_ns + _LITTLE_NS, self._ahead_ns // 2))
        outcomes = [
            joined({host: say.unpacked(one.outcomes[repeat]) for host, one in ran.items()})
            for repeat in range(timing.repeats)
        ]
        late = -earliest_ns > _LATE_SHARE * timing.window_us * 1e3
        self.late += late
        return outcomes, late


def _by_host(links: Collection[Link], *, receiving: bool) -> dict[str, tuple[Link, ...]]:
    found: dict[str, list[Link]] = {}
    for link in links:
        found.setdefault(host_of(link.receiver if receiving else link.sender), []).append(link)
    return {host: tuple(some) for host, some in found.items()}
