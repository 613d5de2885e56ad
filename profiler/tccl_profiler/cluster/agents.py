"""The host agents as the controller sees them: their pools as one, and rank jobs over their hosts.

Each host runs a share of a program. When all lanes are resident, the controller sets a time at
which each host releases its lanes by its own clock. (S. Hunold and A. Carpen-Amarie, Reproducible
MPI Benchmarking, TPDS 2016.)
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from tccl_profiler.clocks import ClockReading, HostClock, offset_from_pings
from tccl_profiler.cluster.agent import PROOF_S, Agent, Ran
from tccl_profiler.cluster.facts import HostFacts
from tccl_profiler.cluster.job import Job
from tccl_profiler.compiler import links_of
from tccl_profiler.linux import realtime
from tccl_profiler.messages import MAKING, LinkEnds, LinkStep, Pinged
from tccl_profiler.nccl_links import process_variables
from tccl_profiler.pool import RunResult, RunSpec
from tccl_profiler.program import Link, Program
from tccl_profiler.protocol import (
    LinkLost,
    Peers,
    Question,
    Release,
    Sign,
    Timeouts,
    WorkerLost,
)
from tccl_py.errors import InputError, MeasurementError, SourceLostError
from tccl_py.model.links import DoctorReport, Proof
from tccl_py.model.transfer import TransferSet, place_named
from tccl_py.rank_processes.rank import Rendezvous
from tccl_py.rank_processes.tasks import RankOutput, Task

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


HOST_TIMEOUTS = Timeouts(start_s=180.0, answer_s=90.0, silence_s=10.0)


class HostLost(SourceLostError):  # noqa: N818 - says what happened
    """A host has died or stalls: nothing can be measured any more."""


class Agents(Peers):
    """All agents of a job. Methods raise HostLost, and break the job, if a host is gone."""

    def __init__(self, job: Job, *, timeouts: Timeouts = HOST_TIMEOUTS) -> None:
        super().__init__(timeouts)
        self._job = job
        self.connections = {host: job.agent(host) for host in job.hosts}
        self.hosts = tuple(self.connections)

    def label(self, name: str) -> tuple[str, str]:
        """Return a host in words, and an expression of the words by which it is named."""
        # By its places or as a host: a name as `node` or `h1` may be part of other words.
        host = re.escape(name)
        return f"host {name}", rf"host {host}(?![\w.-])|(?<![\w.-]){host}\.[GCDN]\d"

    def lost(self, name: str, what: str = "") -> BaseException:
        """Return the error for a host that is of no more use; without `what`, an agent is gone."""
        self._job.broken = True
        if not what:
            peers = {name: self.connections[name], **self.connections}
            dead = [host for host, connection in peers.items() if connection.has_died()]
            if not dead:
                return KeyboardInterrupt()
            name, what = dead[0], "its agent has died"
        advice = "see what became of it, and start the job again"
        return HostLost(f"host {name}: {what}; {advice}")

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
        asked_ns, there_ns, seen_ns = [], [], []
        with realtime():
            for remaining in reversed(range(count)):
                question = Question(self.number())
                asked_ns.append(time.monotonic_ns())
                self.begin(question, Agent.clock, {host: (remaining > 0,)})
                # Without naps for a while.
                until = time.monotonic() + _PING_LIMIT_S
                while question.waiting and time.monotonic() < until:
                    self.hear(question)
                self.heard(question, self.timeouts.answer_s)
                seen_ns.append(time.monotonic_ns())
                there_ns.append(self.results(question, Agent.clock)[host])
        return offset_from_pings(asked_ns, there_ns, seen_ns)


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
        self._devices = {
            host: tuple(f"{host}.{name}" for name in sorted(names))
            for host, names in devices.items()
            if names
        }
        self.lanes: dict[str, int] = {}
        names = [name for names in self._devices.values() for name in names]
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
        devices = {host: (names, *more) for host, names in self._devices.items()}
        answers = self._agents.ask(Agent.open, devices, self._agents.timeouts.start_s)
        self.warnings = [f"host {host}: {t}" for host, (_, notes) in answers.items() for t in notes]
        for lanes, _ in answers.values():
            self.lanes |= lanes
        self._broken = False

    def _ready(self) -> None:
        if self._broken:
            self.restart()

    def ping(self, count: int = 16) -> Mapping[str, Pinged]:
        """Compare each device's clock with this host's, through its own host's clock."""
        self._ready()
        for host, clock in self._clocks.items():
            if host in self._devices and clock.is_due:
                clock.add(self._agents.reading(host, _PINGS))
        answers = self._agents.ask(Agent.ping, dict.fromkeys(self._devices, (count,)))
        return {
            name: self._clocks[host].here(pings)
            for host, pinged in answers.items()
            for name, pings in pinged.items()
        }

    def run(self, program: Program, spec: RunSpec) -> list[RunResult]:
        """Run a program's repeats, each released on all hosts at the same time."""
        self._ready()
        broken: list[str] = []
        for attempt in range(1, _RELEASES + 1):
            try:
                self.connect(program)
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

    def connect(self, program: Program) -> None:
        """Make the links of a program that are not there."""
        if not program.links:
            return
        variables = self._variables_of(program.links)
        if variables and variables != self._variables:
            # NCCL reads them once in a process.
            self._variables = variables
            self.restart()
        missing = self.missing_links(program)
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

    def missing_links(self, program: Program) -> list[Link]:
        """Return the links of a program that are not there."""
        ends = {
            link: [place_named(end).host for end in (link.sender, link.receiver)]
            for link in program.links
        }
        have = self._usable({host for hosts in ends.values() for host in hosts})
        return [link for link, hosts in ends.items() if any(link not in have[h] for h in hosts)]

    def _variables_of(self, links: Collection[Link]) -> dict[str, str]:
        """Return the variables of NCCL in workers with these links; none without NCCL."""
        asked = process_variables(links)
        return {**asked, **self._nccl_variables} if asked else {}

    def _usable(self, hosts: Collection[str]) -> dict[str, set[Link]]:
        arguments = dict.fromkeys(hosts, (LinkStep(step="usable"),))
        answers = self._agents.ask(Agent.take, arguments)
        return {host: set(ends) for host, ends in answers.items()}

    def _make(self, links: list[Link]) -> None:
        """Open links in three phases: receivers listen, senders connect, receivers accept."""
        made: LinkEnds = dict.fromkeys(links)
        for step in MAKING:
            shares = LinkStep(step=step, ends=made).shares(lambda name: place_named(name).host)
            arguments = {host: (share,) for host, share in shares.items()}
            answers = self._agents.ask(Agent.take, arguments)
            made = {link: end for ends in answers.values() for link, end in ends.items()}

    # One run

    def _attempt(self, program: Program, spec: RunSpec) -> tuple[list[RunResult], bool]:
        agents, hosts = self._agents, program.hosts
        question = Question(agents.number())
        limit_s = agents.timeouts.answer_s + spec.lasting_s
        try:
            shares = {host: (program.on(host), spec) for host in hosts}
            agents.begin(question, Agent.run, shares)
            for _ in range(spec.repeats):
                agents.answers(question, Sign, limit_s)
                question = Question(question.number, hosts)
                # Agree on a time, and tell each host what that is by its clock.
                at_ns = time.monotonic_ns() + self.ahead_ns
                for host in hosts:
                    release = Release(at_ns=self._clocks[host].there_ns(at_ns))
                    agents.tell(host, question.number, release)
            ran = agents.results(question, Agent.run, limit_s)
        except SourceLostError:
            # The job ends here, and with it what the other hosts do.
            raise
        except BaseException:
            agents.give_up(hosts)
            raise
        return self.judge(ran, spec)

    def judge(self, ran: Mapping[str, Ran], spec: RunSpec) -> tuple[list[RunResult], bool]:
        """Return the results of all hosts and whether a release was late; adapt `ahead_ns`."""
        earliest_ns = min(early for host in ran.values() for early in host.early_ns)
        took_ns = self.ahead_ns - earliest_ns
        self.ahead_ns = min(_FURTHEST_NS, max(2 * took_ns + _LITTLE_NS, self.ahead_ns // 2))
        results = [
            RunResult.join([result.results[repeat] for result in ran.values()])
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
        ends = [connection.ends for connection in self.connections.values()]
        address = self.connections[host].ends[1] or max(own for own, _ in ends) or "127.0.0.1"
        return self.ask(Agent.open_rendezvous, {host: (count, address)})[host]

    def run(self, tasks: Mapping[str, Sequence[Task]]) -> dict[str, tuple[RankOutput, ...]]:
        """Run each host's ranks, of one job or of several at once; if some fail, end all."""
        limit_s = max(task.timeout for ranks in tasks.values() for task in ranks) + _SPARE_S
        return self.ask(Agent.run_ranks, {host: (ranks,) for host, ranks in tasks.items()}, limit_s)
