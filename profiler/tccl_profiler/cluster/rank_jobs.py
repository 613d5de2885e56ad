"""Jobs of fresh rank processes over the hosts of an MPI job: each host's agent starts its own."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from tccl_profiler.cluster import messages as say
from tccl_profiler.cluster.agents import Agents, Patience, raise_failures
from tccl_profiler.cluster.facts import HostFacts
from tccl_profiler.cluster.job import Job
from tccl_profiler.cluster.messages import Message
from tccl_py.errors import InputError
from tccl_py.rank_processes.rank import Meeting
from tccl_py.rank_processes.task import Left, Task

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

    def meetings(self, host: str, count: int) -> tuple[Meeting, ...]:
        """Where the ranks of the next jobs meet, which run at once: at this host, whose first rank
        is each job's."""
        found = self._agents.ask({host: say.OpenMeetings(count=count)}, say.MeetingsOpen)[host]
        return tuple(Meeting(addresses=found.addresses, port=port) for port in found.ports)

    def run(self, tasks: Mapping[str, Sequence[Task]]) -> dict[str, tuple[Left, ...]]:
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


def _left(host: str, answer: Message) -> tuple[Left, ...]:
    assert isinstance(answer, say.RanksLeft), f"host {host} answered {type(answer).__name__}"
    return answer.left
