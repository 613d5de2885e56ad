"""The agents as the controller sees them: asked together, heard as they answer, missed by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import msgspec

from tccl_profiler.clock import ClockReading, offset_from_pings
from tccl_profiler.cluster import messages as say
from tccl_profiler.cluster.messages import Envelope, Message
from tccl_profiler.cluster.messenger import Messenger, Naps, PeerGone
from tccl_profiler.cluster.urgency import urgent
from tccl_profiler.workers import WorkerLost
from tccl_py.errors import InputError, MeasurementError, SourceLostError

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


def has_died(messenger: Messenger) -> bool:
    """Whether a peer is gone without a word; what it has still said is dropped."""
    while True:
        try:
            if messenger.poll() is None:
                return False
        except PeerGone:
            return not messenger.leaving
        except MeasurementError:
            # What cannot be read is dropped as well.
            continue


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
