"""The threads of one run of a NIC: one for each lane, and one that waits for the flag for all."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue

from tccl_profiler.control import ABORT, Control
from tccl_profiler.host.waiting import flag_of, nap_exactly, released
from tccl_profiler.messages import Run, Start
from tccl_profiler.network.lane import NicLane, Stopped
from tccl_profiler.network.sockets import Nic


class Crew:
    """Runs the repeats of a NIC's lanes, all lanes of a repeat at once.

    A lane that waits sleeps until it is woken: were all of them to look at the flag again and
    again, they would keep the cores, and the interpreter's lock, from each other.

    Args:
        start: whose they are.
        control: where they are released and report.
        nic: whose links are dropped if the run does not end well.
        run: the order.
    """

    def __init__(self, start: Start, control: Control, nic: Nic, run: Run) -> None:
        self._start, self._control, self._nic, self._run = start, control, nic, run
        self._flag = flag_of(control)
        self._stop = False
        self._failures: list[BaseException] = []
        self._thread: threading.Thread | None = None

    def begin(self, lanes: Sequence[Sequence[NicLane]]) -> None:
        """Start the threads; `lanes[i][r]` is lane i's repeat r."""
        # Daemons: a worker that is told to end must not wait for its lanes.
        self._thread = threading.Thread(
            target=self._lead, args=(lanes,), name=f"lanes of {self._start.device}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Have all lanes stop soon."""
        self._stop = True

    def stopping(self) -> bool:
        """Whether lanes are to stop."""
        return self._stop or self._flag.value == ABORT

    def ended(self) -> BaseException | None:
        """Wait for the end; what ended it early."""
        if self._thread is not None:
            self._thread.join()
        return self._failures[0] if self._failures else None

    def _lead(self, lanes: Sequence[Sequence[NicLane]]) -> None:
        """The body of the thread that waits for the flag."""
        nap_exactly()
        releases: list[SimpleQueue[int]] = [SimpleQueue() for _ in lanes]
        done: SimpleQueue[bool] = SimpleQueue()
        threads = [
            threading.Thread(
                target=self._follow,
                args=(number, repeats, releases[number], done),
                name=f"lane {number} of {self._start.device}",
                daemon=True,
            )
            for number, repeats in enumerate(lanes)
        ]
        well = False
        try:
            for thread in threads:
                thread.start()
            well = all(self._repeat(repeat, releases, done) for repeat in range(self._run.repeats))
        except BaseException as error:
            self._failures.append(error)
            self._stop = True
        finally:
            for one in releases:
                one.put(0)
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            if not well:
                # Something may be under way: the other end must not take it for the next repeat's.
                for repeats in lanes:
                    self._nic.drop(repeats[0].link)

    def _repeat(
        self, repeat: int, releases: Sequence[SimpleQueue[int]], done: SimpleQueue[bool]
    ) -> bool:
        """Say that all lanes are there, wait for the flag, wake them; whether all went well."""
        epoch, run = self._run.epoch + repeat, self._run
        records = self._control.records(self._start.slot, repeat, len(releases))
        records["resident"] = epoch
        released_at = released(self._flag, epoch, run.patience_ns, self.stopping)
        if not released_at:
            records["start"] = 0
            records["finished"] = epoch
            return False
        for one in releases:
            one.put(released_at)
        ends = [done.get() for _ in releases]
        return all(ends)

    def _follow(
        self,
        number: int,
        repeats: Sequence[NicLane],
        releases: SimpleQueue[int],
        done: SimpleQueue[bool],
    ) -> None:
        """The body of a lane's thread."""
        nap_exactly()
        for repeat, lane in enumerate(repeats):
            released_at = releases.get()
            if not released_at:
                return
            well = False
            try:
                self._move(number, repeat, lane, released_at)
                well = True
            except Stopped:
                pass
            except BaseException as error:
                self._failures.append(error)
                # The other lanes' links are of no use to this run any more; nor is this one's, and
                # its other end should know at once.
                self._stop = True
                self._nic.drop(lane.link)
            finally:
                done.put(well)

    def _move(self, number: int, repeat: int, lane: NicLane, released_at: int) -> None:
        """Run a lane's repeat, by the clock of its release, and report it."""
        run, epoch, start = self._run, self._run.epoch + repeat, time.monotonic_ns()
        warm_at = released_at + run.warm_ns
        stop_at = warm_at + run.window_ns
        # Sooner than the controller gives up, who could only say which NIC is late.
        lane.run(warm_at, stop_at, stop_at + run.patience_ns // 2)
        records = self._control.records(self._start.slot, repeat, number + 1)
        records[number] = lane.report(epoch, start)
        records["finished"][number] = epoch
