"""What an agent does for jobs of fresh rank processes: environment, meeting, and the run."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Callable, Sequence

from tccl_profiler import numa
from tccl_profiler.cluster import messages as say
from tccl_profiler.cluster.interfaces import addresses, listening
from tccl_py.children import search_path
from tccl_py.rank_processes.starting import Nursery, Start, interpreter
from tccl_py.rank_processes.task import Task, run_tasks


class RankTasks:
    """A host's part in such jobs."""

    def __init__(self) -> None:
        self._meetings: tuple[socket.socket, ...] = ()
        self._nursery: Nursery | None = None

    def surroundings(self, modules: Sequence[str] = ()) -> say.Surroundings:
        """The environment in which programs find what this one does; modules that it lacks."""
        return say.Surroundings(
            variables={**os.environ, "PYTHONPATH": os.pathsep.join(search_path())},
            lacks=tuple(one for one in modules if importlib.util.find_spec(one) is None),
        )

    def open_meetings(self, count: int) -> say.MeetingsOpen:
        """Sockets that wait for the ranks of the next jobs, which run at once."""
        self._leave_meetings()
        self._meetings = tuple(listening() for _ in range(count))
        ports = tuple(one.getsockname()[1] for one in self._meetings)
        return say.MeetingsOpen(addresses=addresses(), ports=ports)

    def run(self, tasks: Sequence[Task], meanwhile: Callable[[], None]) -> say.RanksLeft:
        """Run fresh processes until they have ended; what `meanwhile` raises ends them.

        Raises:
            RanksError: one failed, or the time was up.
        """
        numa.leave_binding()
        try:
            left = run_tasks(
                tasks,
                listeners=self._meetings,
                meanwhile=meanwhile,
                start=self._start(tasks[0].imports),
            )
            return say.RanksLeft(left=left)
        finally:
            self._leave_meetings()

    def close(self) -> None:
        """Give the socket back, and end what ranks are started from."""
        self._leave_meetings()
        nursery, self._nursery = self._nursery, None
        if nursery is not None:
            nursery.close()

    def _start(self, imports: tuple[str, ...]) -> Start:
        if not imports:
            return interpreter
        if self._nursery is None:
            self._nursery = Nursery(imports)
        return self._nursery

    def _leave_meetings(self) -> None:
        meetings, self._meetings = self._meetings, ()
        for one in meetings:
            one.close()
