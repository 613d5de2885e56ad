"""The host agents as the controller sees them: their pools as one, and rank jobs over their hosts.

Each host runs a share of a program. When all lanes are resident, the controller sets a time at
which each host releases its lanes by its own clock. (S. Hunold and A. Carpen-Amarie, Reproducible
MPI Benchmarking, TPDS 2016.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress

import msgspec

from tccl_profiler import messages
from tccl_profiler.cluster import messages as say
from tccl_profiler.cluster.agent import PROOF_S, Agent, Ran
from tccl_profiler.cluster.clocks import HostClock
from tccl_profiler.cluster.facts import HostFacts
from tccl_profiler.cluster.job import Job
from tccl_profiler.cluster.messages import Backoff, Message
from tccl_profiler.compiler import links_of
from tccl_profiler.execution import RunResult, RunSpec
from tccl_profiler.linux import realtime
from tccl_profiler.messages import (
    MAKING,
    ConnectionClosed,
    ConnectionTimeout,
    Failed,
    LinkEnds,
    LinkLost,
    LinkStep,
    WorkerLost,
)
from tccl_profiler.nccl_links import process_variables
from tccl_profiler.program import Link, Program
from tccl_profiler.rates import ClockReading, offset_from_pings
from tccl_py.errors import InputError, MeasurementError, SourceLostError
from tccl_py.model.links import DoctorReport, Proof
from tccl_py.model.transfer import TransferSet, place_named
from tccl_py.rank_processes.rank import Rendezvous
from tccl_py.rank_processes.tasks import RankOutput, Task

_LOOK_S = 0.2
_PING_LIMIT_S = 0.1
_RELEASES, _LINKS = 3, 2  # attempts at a run, where hosts were late and where a link broke
_SPARE_S = 30.0  # time after the timeout of what an agent runs in which it reports it


FIRST_PINGS, _PINGS = 40, 12
_AHEAD_NS = 3_000_000
"""How far ahead the first release is agreed; then, twice what messages have taken and a little."""
_LITTLE_NS = 300_000
_FURTHEST_NS = 100_000_000
_LATE_SHARE = 0.02
"""A release that came later than this share of a window is void: the run is repeated."""


class HostTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """How long the controller waits, in seconds: for a silent host, an answer, workers to start."""

    silence_s: float = 10.0
    answer_s: float = 90.0
    start_s: float = 180.0


class HostLost(SourceLostError):  # noqa: N818 - says what happened
    """A host has died or stalls: nothing can be measured any more."""


class Agents:
    """All agents of a job. Methods raise HostLost, and break the job, if a host is gone."""

    grace_s = 0.0
    """Seconds between a host's failure and the end of what the rest do: they may know the cause."""

    def __init__(self, job: Job, *, timeouts: HostTimeouts | None = None) -> None:
        self._job = job
        self._messengers = {host: job.messenger(host) for host in job.hosts}
        self.hosts = tuple(self._messengers)
        self.timeouts = timeouts or HostTimeouts()
        self._number = 0
        self._backoff = Backoff()

    def number(self) -> int:
        """Return a number for a new question."""
        self._number += 1
        return self._number

    def tell(self, host: str, number: int, message: Message) -> None:
        """Send a message."""
        try:
            self._messengers[host].send(number, message)
        except ConnectionClosed as error:
            if isinstance(error.__cause__, ConnectionTimeout):
                raise self._gone(
                    host, "does not read what it is sent: it stalls or is cut"
                ) from error
            raise self._find_dead(host) from error

    def heard(
        self, number: int, hosts: Iterable[str], limit_s: float | None = None
    ) -> dict[str, Message]:
        """Return one message with this number of each host; fewer if one fails (see `grace_s`)."""
        limit_s = self.timeouts.answer_s if limit_s is None else limit_s
        waiting, answers = dict.fromkeys(hosts), dict[str, Message]()
        begun = looked = time.monotonic()
        ends = math.inf
        self._backoff.reset()
        while True:
            for host in list(waiting):
                message = self._poll(host, number)
                if message is not None:
                    answers[host] = message
                    del waiting[host]
                    self._backoff.reset()
                if isinstance(message, Failed):
                    ends = min(ends, time.monotonic() + self.grace_s)
            if not waiting or time.monotonic() >= ends:
                return answers
            if time.monotonic() - looked > _LOOK_S:
                looked = time.monotonic()
                self._look(waiting, begun, limit_s)
            self._backoff.nap(1e-3)

    def _poll(self, host: str, number: int) -> Message | None:
        try:
            envelope = self._messengers[host].poll()
        except ConnectionClosed as error:
            raise self._find_dead(host) from error
        except MeasurementError as error:
            raise self._gone(host, str(error)) from error
        return None if envelope is None or envelope.number != number else envelope.message

    def _look(self, waiting: Iterable[str], begun: float, limit_s: float) -> None:
        time_s, silence_s = time.monotonic(), self.timeouts.silence_s
        for host in waiting:
            heard = max(self._messengers[host].heard_s, begun)
            if time_s - heard > silence_s:
                raise self._gone(host, f"has said nothing for {silence_s:g} s: it stalls or is cut")
            if time_s - begun > limit_s:
                raise self._gone(host, f"has not answered for {limit_s:g} s")

    def _find_dead(self, host: str) -> BaseException:
        for peer, messenger in {host: self._messengers[host], **self._messengers}.items():
            if messenger.has_died():
                return self._gone(peer, "its agent has died")
        self._job.broken = True
        return KeyboardInterrupt()

    def _gone(self, host: str, what: str) -> HostLost:
        self._job.broken = True
        return HostLost(f"host {host}: {what}; see what became of it, and start the job again")

    def ask(
        self,
        method: Callable[..., say.Result],
        given: Mapping[str, tuple[object, ...]],
        limit_s: float | None = None,
    ) -> dict[str, say.Result]:
        """Call a method of agents, all at once, with arguments by host; raises as `answers`."""
        number = self.number()
        for host, arguments in given.items():
            self.tell(host, number, say.call_of(method, arguments))
        answers = self.answers(number, given, say.Returned, limit_s)
        return {host: say.result_of(method, host, answer) for host, answer in answers.items()}

    def answers(
        self,
        number: int,
        hosts: Collection[str],
        kind: type[say.Kind],
        limit_s: float | None = None,
    ) -> dict[str, say.Kind]:
        """Return an answer of this type of each host; a failure has the rest give up."""
        answers = self.heard(number, hosts, limit_s)
        if any(not isinstance(answer, kind) for answer in answers.values()):
            self.give_up(hosts)
        return say.check_answers({host: answers[host] for host in hosts if host in answers}, kind)

    def give_up(self, hosts: Iterable[str]) -> None:
        """Have hosts give up what they run; their late answers have another number."""
        for host in hosts:
            self.tell(host, self.number(), say.Abort())

    def describe(
        self, backend: str, *, devices: int | None = None, interfaces: Sequence[str] = ()
    ) -> dict[str, HostFacts]:
        """Return the hosts' facts by name; `interfaces` are their NICs, if not their own."""
        arguments = (backend, devices, tuple(interfaces))
        return self.ask(Agent.describe, dict.fromkeys(self.hosts, arguments))

    def examine(self, *options: str) -> dict[str, DoctorReport]:
        """Have `tccl doctor` with these options examine all hosts at once; return what it said."""
        asked = dict.fromkeys(self.hosts, (options,))
        return self.ask(Agent.examine, asked, PROOF_S + _SPARE_S)

    def proofs(self, *, force: bool) -> dict[str, Proof]:
        """Have all hosts prove their links at once, before workers start; return it by host.

        Hosts with fewer than two GPUs have none. `force` also tries P2P that may do harm.
        """
        reports = self.examine(*["--prove"] * force)
        return {host: report.links for host, report in reports.items() if report.links is not None}

    def reading(self, host: str, count: int) -> ClockReading:
        """Return a host's clock against this host's, by so many pings."""
        asked_ns, there_ns, seen = [], [], []
        with realtime():
            for remaining in reversed(range(count)):
                number, call = self.number(), say.call_of(Agent.clock, (remaining > 0,))
                asked_ns.append(time.monotonic_ns())
                self.tell(host, number, call)
                answer, seen_ns = self._pong(host, number)
                seen.append(seen_ns)
                there_ns.append(say.result_of(Agent.clock, host, answer))
        return offset_from_pings(asked_ns, there_ns, seen)

    def _pong(self, host: str, number: int) -> tuple[say.Returned, int]:
        """Return an answer, which is awaited without naps for a while, and when it came."""
        until = time.monotonic() + _PING_LIMIT_S
        while (message := self._poll(host, number)) is None and time.monotonic() < until:
            pass
        seen_ns = time.monotonic_ns()
        if message is None:
            message, seen_ns = self.heard(number, (host,))[host], time.monotonic_ns()
        return say.check_answers({host: message}, say.Returned)[host], seen_ns


class ClusterPool:
    """Measures several hosts for a Profiler, as an `execution.Runner`.

    Workers are started for the sets that come `first`: others may need other variables of NCCL.
    Methods raise WorkerLost if a worker died or hangs, MeasurementError if devices refuse, and
    SourceLostError if a host is gone or a clock jumped.
    """

    def __init__(
        self,
        agents: Agents,
        clocks: Mapping[str, HostClock],
        devices: Mapping[str, Collection[str]],
        *,
        network: str = "tcp",
        nccl_variables: Mapping[str, str] | None = None,
        first: Sequence[TransferSet] = (),
    ) -> None:
        self._network = network
        self._nccl_variables = nccl_variables or {}
        self._agents = agents
        self._clocks = dict(clocks)
        self._devices = {host: tuple(sorted(ids)) for host, ids in devices.items() if ids}
        self.lanes: dict[str, int] = {}
        names = [f"{host}.{name}" for host, ids in self._devices.items() for name in ids]
        self._variables: Mapping[str, str] = {}
        with suppress(MeasurementError):
            self._variables = self._variables_of(links_of(first, names, network))
        self.ahead_ns = _AHEAD_NS
        self.warnings: list[str] = []
        self._broken = False

    def restart(self) -> None:
        """End all workers, and start new ones."""
        # Until all have started, the next use starts all anew.
        self._broken = True
        more = self._variables, self._network
        devices = {host: (ids, *more) for host, ids in self._devices.items()}
        answers = self._agents.ask(Agent.open, devices, self._agents.timeouts.start_s)
        self.warnings = [f"host {host}: {t}" for host, (_, notes) in answers.items() for t in notes]
        for host, (lanes, _) in answers.items():
            self.lanes |= {f"{host}.{name}": count for name, count in lanes.items()}
        self._broken = False

    def _ready(self) -> None:
        if self._broken:
            self.restart()

    def ping(self, count: int = 16) -> Mapping[str, messages.Pinged]:
        """Compare each device's clock with this host's, through its own host's clock."""
        self._ready()
        for host, clock in self._clocks.items():
            if host in self._devices and clock.is_due:
                clock.add(self._agents.reading(host, _PINGS))
        answers = self._agents.ask(Agent.ping, dict.fromkeys(self._devices, (count,)))
        return {
            f"{host}.{name}": self._clocks[host].here(pings)
            for host, pinged in answers.items()
            for name, pings in pinged.items()
        }

    def run(self, program: Program, spec: RunSpec) -> list[RunResult]:
        """Run a program's repeats, each released on all hosts at the same time."""
        self._ready()
        broken: list[str] = []
        for attempt in range(1, _RELEASES + 1):
            try:
                self._connect(program)
                with realtime():
                    results, late = self._attempt(program, spec)
            except LinkLost as error:
                broken.append(str(error))
                if len(broken) == _LINKS:
                    raise WorkerLost("; then, made again, ".join(broken)) from error
                continue
            # On a machine that is too busy, the overlap decides which repeats count.
            if not late or attempt == _RELEASES:
                return results
        raise WorkerLost("; then, made again, ".join(broken))

    # Links

    def _connect(self, program: Program) -> None:
        """Make the links of a program that are not there."""
        if not program.links:
            return
        variables = self._variables_of(program.links)
        if variables and variables != self._variables:
            # NCCL reads them once in a process.
            self._variables = variables
            self.restart()
        hosts = {
            place_named(end).host for link in program.links for end in (link.sender, link.receiver)
        }
        have = self._usable(hosts)
        missing = [
            link
            for link in program.links
            if any(link not in have[place_named(end).host] for end in (link.sender, link.receiver))
        ]
        by_nics = [link for link in missing if link.carrier is None]
        if by_nics:
            self._make(by_nics)
        for link in missing:
            if link.carrier is not None:
                sender = [place_named(link.sender).host]
                try:
                    self._make([link])
                except LinkLost:
                    # The next attempt would fail by what this one's sender has still to say.
                    with suppress(LinkLost):
                        self._usable(sender)
                    raise
                # Its sender has only begun.
                self._usable(sender)

    def _variables_of(self, links: Collection[Link]) -> dict[str, str]:
        """Return the variables of NCCL in workers with these links; none without NCCL."""
        asked = process_variables(links)
        return {**asked, **self._nccl_variables} if asked else {}

    def _usable(self, hosts: Collection[str]) -> dict[str, set[Link]]:
        arguments = dict.fromkeys(hosts, (LinkStep(step="usable"),))
        answers = self._agents.ask(Agent.take, arguments)
        return {host: set(answer.ends) for host, answer in answers.items()}

    def _make(self, links: list[Link]) -> None:
        """Open links in three phases: receivers listen, senders connect, receivers accept."""
        made = LinkEnds(ends=dict.fromkeys(links))
        for step in MAKING:
            shares = LinkStep(step=step, ends=made.ends).shares(lambda name: place_named(name).host)
            arguments = {host: (share,) for host, share in shares.items()}
            made = LinkEnds.join(self._agents.ask(Agent.take, arguments).values())

    # One run

    def _attempt(self, program: Program, spec: RunSpec) -> tuple[list[RunResult], bool]:
        number, hosts = self._agents.number(), program.hosts
        limit_s = self._agents.timeouts.answer_s + spec.lasting_s
        try:
            for host in hosts:
                call = say.call_of(Agent.run, (program.on(host), spec.on(host)))
                self._agents.tell(host, number, call)
            for _ in range(spec.repeats):
                self._agents.answers(number, hosts, say.Resident, limit_s)
                # Agree on a time, and tell each host what that is by its clock.
                at_ns = time.monotonic_ns() + self.ahead_ns
                for host in hosts:
                    release = say.Release(at_ns=self._clocks[host].there_ns(at_ns))
                    self._agents.tell(host, number, release)
            answers = self._agents.answers(number, hosts, say.Returned, limit_s)
        except SourceLostError:
            # The job ends here, and with it what the other hosts do.
            raise
        except BaseException:
            self._agents.give_up(hosts)
            raise
        ran = {host: say.result_of(Agent.run, host, answer) for host, answer in answers.items()}
        return self.judge(ran, spec)

    def judge(self, ran: Mapping[str, Ran], spec: RunSpec) -> tuple[list[RunResult], bool]:
        """Return the results of all hosts and whether a release was late; adapt `ahead_ns`."""
        earliest_ns = min(early for host in ran.values() for early in host.early_ns)
        took_ns = self.ahead_ns - earliest_ns
        self.ahead_ns = min(_FURTHEST_NS, max(2 * took_ns + _LITTLE_NS, self.ahead_ns // 2))
        results = [
            RunResult.join({host: result.results[repeat] for host, result in ran.items()})
            for repeat in range(spec.repeats)
        ]
        return results, -earliest_ns > _LATE_SHARE * spec.window_us * 1e3


class RankJobs(Agents):
    """Runs jobs of fresh rank processes over the hosts of an MPI job; each agent starts its own."""

    grace_s = 2.0  # when one host's ranks have failed, others may have as well, and know the cause

    def surroundings(self, *, modules: tuple[str, ...] = ()) -> dict[str, dict[str, str]]:
        """Return the environment of each host's agent."""
        environments = self.ask(Agent.environment, dict.fromkeys(self.hosts, (modules,)))
        for host, (_, lacks) in environments.items():
            for module in lacks:
                raise InputError(f"host {host}", f"lacks {module}", "install it on all hosts")
        return {host: variables for host, (variables, _) in environments.items()}

    def rendezvous(self, host: str, count: int) -> tuple[Rendezvous, ...]:
        """Return where the ranks of the next concurrent jobs meet: at this host, with rank 0.

        The address is that by which the agents of the job have reached each other.
        """
        ends = [messenger.ends for messenger in self._messengers.values()]
        address = self._messengers[host].ends[1] or max(own for own, _ in ends) or "127.0.0.1"
        return self.ask(Agent.open_rendezvous, {host: (count, address)})[host]

    def run(self, tasks: Mapping[str, Sequence[Task]]) -> dict[str, tuple[RankOutput, ...]]:
        """Run each host's ranks, of one job or of several at once; if some fail, end all."""
        limit_s = max(task.timeout for ranks in tasks.values() for task in ranks) + _SPARE_S
        return self.ask(Agent.run_ranks, {host: (ranks,) for host, ranks in tasks.items()}, limit_s)
