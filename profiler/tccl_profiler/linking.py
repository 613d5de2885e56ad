"""What a pool asks of its workers, so that links to other hosts come to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from tccl_profiler.links import (
    Accept,
    AskLinks,
    Connect,
    Endpoint,
    Linked,
    Listen,
    Listening,
)
from tccl_profiler.messages import FromWorker
from tccl_profiler.program import Link, is_nic, local
from tccl_profiler.workers import WorkerLost, WorkerProcess
from tccl_py.errors import MeasurementError

Asked = tuple[WorkerProcess, msgspec.Struct]


class Linking:
    """Makes links over the workers of one pool.

    Args:
        workers: all of them.
        link_s: seconds that a link gets to be made.
        answer_s: seconds that a worker gets to answer, beyond those.
    """

    def __init__(self, workers: Sequence[WorkerProcess], *, link_s: float, answer_s: float) -> None:
        self._workers = {one.spec.device: one for one in workers}
        self._link_s, self._answer_s = link_s, answer_s

    def usable(self) -> frozenset[Link]:
        """The links that are there and clean."""
        answers = self._all([(worker, AskLinks()) for worker in self._workers.values()])
        found: set[Link] = set()
        for one in answers:
            assert isinstance(one, Linked)
            found.update(one.links)
        return frozenset(found)

    def listen(self, links: Sequence[Link]) -> dict[Link, Endpoint]:
        """Wait for links, and say where."""
        shares = self._shares(links, lambda link: link.receiver)
        answers = self._all([(worker, Listen(links=tuple(share))) for worker, share in shares])
        ends: dict[Link, Endpoint] = {}
        for (_, share), one in zip(shares, answers, strict=True):
            assert isinstance(one, Listening)
            ends.update(zip(share, one.endpoints, strict=True))
        return ends

    def connect(self, ends: Mapping[Link, Endpoint]) -> None:
        """Make links to where they are waited for."""
        self._all(
            [
                (
                    worker,
                    Connect(
                        links=tuple(share),
                        endpoints=tuple(ends[link] for link in share),
                        limit_s=self._link_s,
                    ),
                )
                for worker, share in self._shares(list(ends), lambda link: link.sender)
            ]
        )

    def accept(self, links: Sequence[Link]) -> None:
        """Take links that were listened for."""
        self._all(
            [
                (worker, Accept(links=tuple(share), limit_s=self._link_s))
                for worker, share in self._shares(links, lambda link: link.receiver)
            ]
        )

    def _shares(
        self, links: Sequence[Link], end: Callable[[Link], str]
    ) -> list[tuple[WorkerProcess, list[Link]]]:
        """Links by the NIC of this pool that has an end of them, or by the GPU that NCCL is on."""
        shares: dict[str, list[Link]] = {}
        for link in links:
            device = local(end(link))
            known = [one for one in self._workers if is_nic(one) != bool(link.carrier)]
            if device not in known:
                kind, others = "GPU" if link.carrier else "NIC", ", ".join(known) or "none"
                raise MeasurementError(
                    f"{link}: {device} is no {kind} of this pool; it has {others}"
                )
            shares.setdefault(device, []).append(link)
        return [(self._workers[device], share) for device, share in shares.items()]

    def _all(self, asked: Sequence[Asked]) -> list[FromWorker]:
        """Ask workers at once, and hear all of them, also where one refuses.

        Raises:
            WorkerLost: one died or hangs.
            LinkLost: a link could not be made.
            MeasurementError: one refuses.
        """
        for worker, message in asked:
            worker.ask(message, limit_s=self._answer_s)
        answers: list[FromWorker] = []
        refused: MeasurementError | None = None
        for worker, _ in asked:
            try:
                answers.append(worker.received(self._link_s + self._answer_s)[0])
            except WorkerLost:
                raise
            except MeasurementError as error:
                refused = refused or error
        if refused is not None:
            raise refused
        return answers
