"""The agents as the controller sees them: asked together, heard as they answer, missed by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from tccl_profiler.clock import ClockReading, offset_from_pings
from tccl_profiler.cluster import messages as say
from tccl_profiler.cluster.facts import HostFacts
from tccl_profiler.cluster.job import Job
from tccl_profiler.cluster.messages import Envelope, Message, Messenger, Naps, PeerGone, has_died
from tccl_profiler.linux import urgent
from tccl_profiler.workers import WorkerLost
from tccl_py.errors import InputError, MeasurementError, SourceLostError
from tccl_py.rank_processes.rank import Rendezvous
from tccl_py.rank_processes.tasks import RankOutput, Task

Answer = TypeVar("Answer", bound=msgspec.Struct)
_LOOK_S = 0.2
_PING_LIMIT_S = 0.1


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long the controller waits, in seconds: for a host that says nothing at all, for an
    answer, and for workers to be started."""

    silence_s: float = 10.0
    answer_s: float = 90.0
    start_s: float = 180.0


class HostLost(SourceLostError):  # noqa: N818 - says what happened
    """A host has died or stalls: nothing can be measured any more."""


class Agents:
    """All agents of a job.

    Args:
        messengers: the connection to each host's agent.
        patience: how long to wait for what.
        lost: called with the host when one is lost, before that is raised.
    """

    def __init__(
        self,
        messengers: Mapping[str, Messenger],
        *,
        patience: Patience | None = None,
        lost: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._messengers = dict(messengers)
        self.patience = patience or Patience()
        self._lost = lost
        self._number = 0
        self._naps = Naps()

    @property
    def hosts(self) -> tuple[str, ...]:
        """Their names, in rank order."""
        return tuple(self._messengers)

    def number(self) -> int:
        """A number for a new question."""
        self._number += 1
        return self._number

    def tell(self, host: str, number: int, message: Message) -> None:
        """Send a message.

        Raises:
            HostLost: nobody is there.
        """
        try:
            self._messengers[host].send(Envelope(number, message))
        except PeerGone as error:
            raise self._died(host) from error

    def heard(self, number: int, hosts: Iterable[str], limit_s: float) -> dict[str, Message]:
        """One message of each of some hosts that carries a number; others are dropped.

        If one says that it failed, those that have not answered by then are left out.

        Raises:
            HostLost: one is gone, says nothing for long, or does not answer in time.
        """
        waiting, found = dict.fromkeys(hosts), dict[str, Message]()
        begun = looked = time.monotonic()
        self._naps.begin()
        while waiting:
            for host in list(waiting):
                message = self._polled(host, number)
                if message is not None:
                    found[host] = message
                    del waiting[host]
                    self._naps.begin()
            if any(isinstance(one, say.Failed) for one in found.values()):
                break
            now = time.monotonic()
            if waiting and now - looked > _LOOK_S:
                looked = now
                self._look(waiting, begun, limit_s)
            if waiting:
                self._naps.nap(1e-3)
        return found

    def _polled(self, host: str, number: int) -> Message | None:
        try:
            envelope = self._messengers[host].poll()
        except PeerGone as error:
            raise self._died(host) from error
        except MeasurementError as error:
            raise self._gone(host, str(error)) from error
        return None if envelope is None or envelope.number != number else envelope.message

    def _look(self, waiting: Iterable[str], begun: float, limit_s: float) -> None:
        now, silence_s = time.monotonic(), self.patience.silence_s
        for host in waiting:
            heard = max(self._messengers[host].heard_s, begun)
            if now - heard > silence_s:
                raise self._gone(host, f"has said nothing for {silence_s:g} s: it stalls or is cut")
            if now - begun > limit_s:
                raise self._gone(host, f"has not answered for {limit_s:g} s")

    def _died(self, host: str) -> BaseException:
        """What to raise where a host's agent is gone: it died, or the launcher ends the job."""
        for other, messenger in {host: self._messengers[host], **self._messengers}.items():
            if has_died(messenger):
                return self._gone(other, "its agent has died")
        self._lost(host)
        return KeyboardInterrupt()

    def _gone(self, host: str, what: str) -> HostLost:
        self._lost(host)
        return HostLost(f"host {host}: {what}; see what became of it, and start the job again")

    def ask(
        self, messages: Mapping[str, Message], kind: type[Answer], limit_s: float | None = None
    ) -> dict[str, Answer]:
        """Ask hosts, all at the same time, and hear all answers.

        Raises:
            HostLost: as `heard`.
            InputError, WorkerLost, MeasurementError: what an agent says that it cannot do.
        """
        number = self.number()
        for host, message in messages.items():
            self.tell(host, number, message)
        limit_s = self.patience.answer_s if limit_s is None else limit_s
        answers: dict[str, Message] = {}
        while len(answers) < len(messages):
            # All are heard, those that fail as well: no answer may come after the next question.
            answers |= self.heard(number, set(messages) - set(answers), limit_s)
        answers = {host: answers[host] for host in messages}
        raise_failures(answers)
        found: dict[str, Answer] = {}
        for host, answer in answers.items():
            if not isinstance(answer, kind):
                raise WorkerLost(f"host {host}: answered {type(answer).__name__} out of turn")
            found[host] = answer
        return found

    def reading(self, host: str, count: int) -> ClockReading:
        """A host's clock against this one's, by so many pings.

        Raises:
            HostLost: as `heard`.
        """
        asked, there, seen = [], [], []
        with urgent():
            for _ in range(count):
                number = self.number()
                asked.append(time.monotonic_ns())
                self.tell(host, number, say.PingHost())
                answer, seen_ns = self._pong(host, number)
                seen.append(seen_ns)
                there.append(answer)
        # It need not hurry any more.
        self.tell(host, 0, say.Rest())
        return offset_from_pings(asked, there, seen)

    def _pong(self, host: str, number: int) -> tuple[int, int]:
        """The time that a host answers, and when that was seen; looks without a pause at first."""
        until = time.monotonic() + _PING_LIMIT_S
        while time.monotonic() < until:
            message = self._polled(host, number)
            if isinstance(message, say.HostTime):
                return message.at_ns, time.monotonic_ns()
        message = self.heard(number, (host,), self.patience.answer_s)[host]
        if isinstance(message, say.HostTime):
            return message.at_ns, time.monotonic_ns()
        raise WorkerLost(f"host {host}: answered {type(message).__name__} out of turn")


class LinkFailure(MeasurementError):  # noqa: N818 - says what happened
    """A connection between two hosts broke; it can be made again."""


def raise_failures(answers: Mapping[str, Message]) -> None:
    """Raise what says most of why some hosts failed: bad input, then lost workers, then links.

    Raises:
        InputError, WorkerLost, LinkFailure, MeasurementError: it names the host.
    """
    failed = {h: a for h, a in answers.items() if isinstance(a, say.Failed)}
    for kind in ("input", "lost", "refused", "link"):
        for host, failure in failed.items():
            if failure.kind == kind:
                raise _failure(host, failure)


def _failure(host: str, failure: say.Failed) -> Exception:
    if failure.kind == "input":
        where, what, right = failure.what.split("\n", 2)
        return InputError(where, what, right)
    sentence = failure.what if host in failure.what else f"host {host}: {failure.what}"
    if failure.kind == "lost":
        return WorkerLost(sentence)
    return LinkFailure(sentence) if failure.kind == "link" else MeasurementError(sentence)


# Jobs of fresh rank processes over the hosts of an MPI job: each host's agent starts its own.


_SPARE_S = 30.0
"""How long after the time that ranks have an agent may need to say that it was up."""
_GRACE_S = 2.0
"""When one host's ranks have failed, those of others may have as well, and know the cause."""


class RankJobs:
    """The hosts of a job, asked by the rank that controls it.

    Args:
        job: the ranks of the launcher.
        patience: how long hosts are waited for.
    """

    def __init__(self, job: Job, *, patience: Patience | None = None) -> None:
        self._agents = Agents(
            {seat.host: job.messenger(seat.host) for seat in job.seats},
            patience=patience,
            lost=lambda _: setattr(job, "broken", True),
        )

    @property
    def hosts(self) -> tuple[str, ...]:
        """Their names, in the order of the launcher's ranks."""
        return self._agents.hosts

    def described(self, backend: str, *, interfaces: Sequence[str] = ()) -> dict[str, HostFacts]:
        """What the hosts are, by name; `interfaces` are those to use as NICs, if not their own.

        Raises:
            InputError: a host without GPUs or such interfaces.
            HostLost: one is gone.
        """
        question = say.Describe(backend=backend, devices=None, interfaces=tuple(interfaces))
        found = self._agents.ask(dict.fromkeys(self._agents.hosts, question), say.Described)
        return {host: one.facts for host, one in found.items()}

    def surroundings(self, *, modules: tuple[str, ...] = ()) -> dict[str, dict[str, str]]:
        """The environment of each host's agent, by its name.

        Args:
            modules: what the ranks' program imports, and not every host may have.

        Raises:
            InputError: a host lacks one of them.
            HostLost: one is gone.
        """
        questions = dict.fromkeys(self._agents.hosts, say.AskSurroundings(modules=modules))
        found = self._agents.ask(questions, say.Surroundings)
        for host, one in found.items():
            for module in one.lacks:
                raise InputError(f"host {host}", f"lacks {module}", "install it on all hosts")
        return {host: dict(one.variables) for host, one in found.items()}

    def rendezvous(self, host: str, count: int) -> tuple[Rendezvous, ...]:
        """Where the ranks of the next jobs meet, which run at once: at this host, whose first rank
        is each job's."""
        found = self._agents.ask({host: say.OpenMeetings(count=count)}, say.MeetingsOpen)[host]
        return tuple(Rendezvous(addresses=found.addresses, port=port) for port in found.ports)

    def run(self, tasks: Mapping[str, Sequence[Task]]) -> dict[str, tuple[RankOutput, ...]]:
        """Run each host's ranks, of one job or of several at once; where some fail, all are ended.

        Raises:
            MeasurementError: ranks failed, or the time was up; names the host.
            HostLost: a host is gone.
        """
        number = self._agents.number()
        for host, own in tasks.items():
            self._agents.tell(host, number, say.RunRanks(tasks=tuple(own)))
        limit_s = max(one.timeout for own in tasks.values() for one in own) + _SPARE_S
        answers = self._agents.heard(number, tasks, limit_s)
        late = [host for host in tasks if host not in answers]
        if late:
            time.sleep(_GRACE_S)
            for host in late:
                self._agents.tell(host, number, say.Abort())
        while len(answers) < len(tasks):
            left = [host for host in tasks if host not in answers]
            answers |= self._agents.heard(number, left, self._agents.patience.answer_s)
        raise_failures({host: answers[host] for host in tasks})
        return {host: _left(host, answers[host]) for host in tasks}


def _left(host: str, answer: Message) -> tuple[RankOutput, ...]:
    assert isinstance(answer, say.RanksLeft), f"host {host} answered {type(answer).__name__}"
    return answer.left
