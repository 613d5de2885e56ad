"""The host agents as the controller sees them, and rank jobs over their hosts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from tccl_profiler.cluster import messages as say
from tccl_profiler.cluster.facts import HostFacts
from tccl_profiler.cluster.job import Job
from tccl_profiler.cluster.messages import Backoff, Message, Messenger
from tccl_profiler.linux import realtime
from tccl_profiler.messages import ConnectionClosed, Failed, WorkerLost
from tccl_profiler.rates import ClockReading, offset_from_pings
from tccl_profiler.workers import Answer
from tccl_py.errors import InputError, MeasurementError, SourceLostError
from tccl_py.rank_processes.rank import Rendezvous
from tccl_py.rank_processes.tasks import RankOutput, Task

_LOOK_S = 0.2
_PING_LIMIT_S = 0.1
_SPARE_S = 30.0  # time after the ranks' own timeout in which an agent reports it
_GRACE_S = 2.0
"""When one host's ranks have failed, those of others may have as well, and know the cause."""


class HostTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """How long the controller waits, in seconds: for a silent host, an answer, workers to start."""

    silence_s: float = 10.0
    answer_s: float = 90.0
    start_s: float = 180.0


class HostLost(SourceLostError):  # noqa: N818 - says what happened
    """A host has died or stalls: nothing can be measured any more."""


class Agents:
    """All agents of a job. Methods raise HostLost if a host is gone or silent.

    `lost` is called with the host before.
    """

    def __init__(
        self,
        messengers: Mapping[str, Messenger],
        *,
        timeouts: HostTimeouts | None = None,
        lost: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._messengers, self.hosts = dict(messengers), tuple(messengers)
        self.timeouts = timeouts or HostTimeouts()
        self._lost = lost
        self._number = 0
        self._backoff = Backoff()

    @classmethod
    def of(cls, job: Job, timeouts: HostTimeouts | None) -> Agents:
        """Return the agents of a job, which is broken when a host is lost."""
        return cls(
            {seat.host: job.messenger(seat.host) for seat in job.seats},
            timeouts=timeouts,
            lost=lambda _: setattr(job, "broken", True),
        )

    def number(self) -> int:
        """Return a number for a new question."""
        self._number += 1
        return self._number

    def tell(self, host: str, number: int, message: Message) -> None:
        """Send a message."""
        try:
            self._messengers[host].send(number, message)
        except ConnectionClosed as error:
            raise self._died(host) from error

    def heard(self, number: int, hosts: Iterable[str], limit_s: float) -> dict[str, Message]:
        """Return one message with this number of each host, fewer after a failure of a host."""
        waiting, found = dict.fromkeys(hosts), dict[str, Message]()
        begun = looked = time.monotonic()
        self._backoff.reset()
        while waiting:
            for host in list(waiting):
                message = self._polled(host, number)
                if message is not None:
                    found[host] = message
                    del waiting[host]
                    self._backoff.reset()
            if any(isinstance(message, Failed) for message in found.values()):
                break
            now = time.monotonic()
            if waiting and now - looked > _LOOK_S:
                looked = now
                self._look(waiting, begun, limit_s)
            if waiting:
                self._backoff.nap(1e-3)
        return found

    def _polled(self, host: str, number: int) -> Message | None:
        try:
            envelope = self._messengers[host].poll()
        except ConnectionClosed as error:
            raise self._died(host) from error
        except MeasurementError as error:
            raise self._gone(host, str(error)) from error
        return None if envelope is None or envelope.number != number else envelope.message

    def _look(self, waiting: Iterable[str], begun: float, limit_s: float) -> None:
        now, silence_s = time.monotonic(), self.timeouts.silence_s
        for host in waiting:
            heard = max(self._messengers[host].heard_s, begun)
            if now - heard > silence_s:
                raise self._gone(host, f"has said nothing for {silence_s:g} s: it stalls or is cut")
            if now - begun > limit_s:
                raise self._gone(host, f"has not answered for {limit_s:g} s")

    def _died(self, host: str) -> BaseException:
        for peer, messenger in {host: self._messengers[host], **self._messengers}.items():
            if messenger.has_died():
                return self._gone(peer, "its agent has died")
        self._lost(host)
        return KeyboardInterrupt()

    def _gone(self, host: str, what: str) -> HostLost:
        self._lost(host)
        return HostLost(f"host {host}: {what}; see what became of it, and start the job again")

    def ask(
        self, messages: Mapping[str, Message], kind: type[Answer], limit_s: float | None = None
    ) -> dict[str, Answer]:
        """Ask hosts, all at the same time, and return all answers, of this type."""
        number = self.number()
        for host, message in messages.items():
            self.tell(host, number, message)
        limit_s = self.timeouts.answer_s if limit_s is None else limit_s
        answers: dict[str, Message] = {}
        while len(answers) < len(messages):
            # All are heard, those that fail as well: no answer may come after the next question.
            answers |= self.heard(number, set(messages) - set(answers), limit_s)
        return checked({host: answers[host] for host in messages}, kind)

    def reading(self, host: str, count: int) -> ClockReading:
        """Return a host's clock against this host's, by so many pings."""
        asked, there, seen = [], [], []
        with realtime():
            for left in reversed(range(count)):
                number = self.number()
                asked.append(time.monotonic_ns())
                self.tell(host, number, say.PingHost(more=left > 0))
                answer, seen_ns = self._pong(host, number)
                seen.append(seen_ns)
                there.append(answer)
        return offset_from_pings(asked, there, seen)

    def _pong(self, host: str, number: int) -> tuple[int, int]:
        until = time.monotonic() + _PING_LIMIT_S
        while time.monotonic() < until:
            message = self._polled(host, number)
            if isinstance(message, say.HostTime):
                return message.at_ns, time.monotonic_ns()
        answers = self.heard(number, (host,), self.timeouts.answer_s)
        return checked(answers, say.HostTime)[host].at_ns, time.monotonic_ns()


def checked(answers: Mapping[str, Message], kind: type[Answer]) -> dict[str, Answer]:
    """Return the answers, all of this type, or raise the failure that says most, with its host."""
    failed = {host: answer for host, answer in answers.items() if isinstance(answer, Failed)}
    for wanted in ("input", "lost", "refused", "link"):
        for host, failure in failed.items():
            if failure.kind == wanted:
                named = host in failure.what
                raise failure.error(failure.what if named else f"host {host}: {failure.what}")
    found: dict[str, Answer] = {}
    for host, answer in answers.items():
        if not isinstance(answer, kind):
            raise WorkerLost(f"host {host}: answered {type(answer).__name__} out of turn")
        found[host] = answer
    return found


class RankJobs:
    """Runs jobs of fresh rank processes over the hosts of an MPI job; each agent starts its own.

    Methods raise HostLost if a host is gone.
    """

    def __init__(self, job: Job, *, timeouts: HostTimeouts | None = None) -> None:
        self._agents = Agents.of(job, timeouts)
        self.hosts = self._agents.hosts

    def described(self, backend: str, *, interfaces: Sequence[str] = ()) -> dict[str, HostFacts]:
        """Return the hosts' facts by name; `interfaces` are their NICs, if not their own."""
        question = say.Describe(backend=backend, devices=None, interfaces=tuple(interfaces))
        return self._agents.ask(dict.fromkeys(self._agents.hosts, question), HostFacts)

    def surroundings(self, *, modules: tuple[str, ...] = ()) -> dict[str, dict[str, str]]:
        """Return the environment of each host's agent."""
        questions = dict.fromkeys(self._agents.hosts, say.AskEnvironment(modules=modules))
        found = self._agents.ask(questions, say.Environment)
        for host, environment in found.items():
            for module in environment.lacks:
                raise InputError(f"host {host}", f"lacks {module}", "install it on all hosts")
        return {host: dict(environment.variables) for host, environment in found.items()}

    def rendezvous(self, host: str, count: int) -> tuple[Rendezvous, ...]:
        """Return where the ranks of the next concurrent jobs meet: at this host, with rank 0."""
        question = {host: say.OpenRendezvous(count=count)}
        return self._agents.ask(question, say.RendezvousOpen)[host].meetings

    def run(self, tasks: Mapping[str, Sequence[Task]]) -> dict[str, tuple[RankOutput, ...]]:
        """Run each host's ranks, of one job or of several at once; if some fail, end all."""
        agents = self._agents
        number = agents.number()
        for host, own in tasks.items():
            agents.tell(host, number, say.RunRanks(tasks=tuple(own)))
        limit_s = max(task.timeout for own in tasks.values() for task in own) + _SPARE_S
        answers = agents.heard(number, tasks, limit_s)
        late = [host for host in tasks if host not in answers]
        if late:
            time.sleep(_GRACE_S)
            for host in late:
                agents.tell(host, number, say.Abort())
        while len(answers) < len(tasks):
            left = [host for host in tasks if host not in answers]
            answers |= agents.heard(number, left, agents.timeouts.answer_s)
        found = checked({host: answers[host] for host in tasks}, say.RanksLeft)
        return {host: ranks.left for host, ranks in found.items()}
