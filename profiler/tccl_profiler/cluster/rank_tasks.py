"""What an agent does for jobs of fresh rank processes: environment, meeting, and the run."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Sequence

from tccl_profiler import numa
from tccl_profiler.cluster import messages as say
from tccl_profiler.cluster.interfaces import addresses, listening
from tccl_py.rank_processes.starting import Nursery, Start, interpreter
from tccl_py.rank_processes.task import Task, run_task


class RankTasks:
    """A host's part in such jobs, one after the other."""

    def __init__(self) -> None:
        self._meeting: socket.socket | None = None
        self._nursery: Nursery | None = None

    def surroundings(self, modules: Sequence[str] = ()) -> say.Surroundings:
        """The environment in which programs find what this one does; modules that it lacks."""
        paths = os.pathsep.join(filter(None, sys.path))
        return say.Surroundings(
            variables={**os.environ, "PYTHONPATH": paths},
            lacks=tuple(one for one in modules if importlib.util.find_spec(one) is None),
        )

    def open_meeting(self) -> say.MeetingOpen:
        """A socket that waits for the ranks of the next job."""
        self._leave_meeting()
        self._meeting = listening()
        return say.MeetingOpen(addresses=addresses(), port=self._meeting.getsockname()[1])

    def run(self, task: Task, meanwhile: Callable[[], None]) -> say.RanksLeft:
        """Run fresh processes until they have ended; what `meanwhile` raises ends them.

        Raises:
            RanksError: one failed, or the time was up.
        """
        numa.leave_binding()
        try:
            left = run_task(
                task, listener=self._meeting, meanwhile=meanwhile, start=self._start(task)
            )
            return say.RanksLeft(left=left)
        finally:
            self._leave_meeting()

    def close(self) -> None:
        """Give the socket back, and end what ranks are started from."""
        self._leave_meeting()
        nursery, self._nursery = self._nursery, None
        if nursery is not None:
            nursery.close()

    def _start(self, task: Task) -> Start:
        if not task.imports:
            return interpreter
        if self._nursery is None:
            self._nursery = Nursery(task.imports)
        return self._nursery

    def _leave_meeting(self) -> None:
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            meeting.close()
