"""Worker processes as the controller sees them: started, asked, heard, and how they ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tccl_profiler.messages import (
    Channel,
    ChannelClosed,
    ChannelTimeout,
    Done,
    Failed,
    FromWorker,
    LinkLost,
    Started,
)
from tccl_profiler.nccl_links import without_disturbance
from tccl_py.children import child_command, child_environment, search_path
from tccl_py.errors import MeasurementError


class WorkerLost(MeasurementError):  # noqa: N818 - says what happened
    """A worker died, hangs, or its device failed; the pool must be started anew."""


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A device to measure: its name in the machine (`G0`, `N0`) and CPUs to pin its worker to.

    A GPU is found by its bus id, a NIC by its IP address and the name of its interface.
    """

    device: str
    bus_id: str = ""
    cpus: tuple[int, ...] = ()
    address: str = ""
    interface: str = ""


@dataclass
class WorkerProcess:
    """One worker and the channel to it; `complaints` is a memfd that takes its stderr.

    `owes_answer` is whether something has been asked that was not answered yet.
    """

    spec: DeviceSpec
    slot: int
    process: subprocess.Popen[bytes]
    channel: Channel[FromWorker]
    complaints: int
    started: Started | None = None
    arena_fd: int = -1
    owes_answer: bool = False
    lanes_asked: int = 0

    @property
    def who(self) -> str:
        """Its name in sentences."""
        return f"the worker of {self.spec.device}"

    def ask(self, message: msgspec.Struct, fds: Sequence[int] = (), *, limit_s: float) -> None:
        """Send a message that will be answered.

        Raises:
            WorkerLost: it has died or does not listen.
        """
        # Before it is sent: an interruption just after would leave an answer that nobody expects.
        self.owes_answer = True
        try:
            self.channel.send(message, fds, limit_s)
        except ChannelClosed as error:
            raise WorkerLost(f"{self.who} {self._death()}") from error
        except ChannelTimeout as error:
            raise WorkerLost(f"{self.who} has not listened for {limit_s:g} s") from error

    def received(self, limit_s: float) -> tuple[FromWorker, tuple[int, ...]]:
        """The next message and its descriptors.

        Raises:
            WorkerLost: it has died, does not answer, sends what cannot be read, or says that its
                device is of no more use.
            LinkLost: it says that a link could not be made or has broken.
            MeasurementError: it says that it refuses.
        """
        try:
            message, fds = self.channel.receive(max(0.0, limit_s))
        except ChannelClosed as error:
            raise WorkerLost(f"{self.who} {self._death()}") from error
        except ChannelTimeout as error:
            raise WorkerLost(f"{self.who} has not answered for {limit_s:.1f} s") from error
        except MeasurementError as error:
            # What it sent cannot be read; the error has its name.
            raise WorkerLost(str(error)) from error
        self.owes_answer = False
        if isinstance(message, Failed):
            kind = WorkerLost if message.fatal else LinkLost if message.link else MeasurementError
            raise kind(_by_name(self.spec.device, message.what))
        return message, fds

    def done(self, limit_s: float) -> None:
        """Hear that what was asked has been done; raises as `received`."""
        message, _ = self.received(limit_s)
        if not isinstance(message, Done):
            raise self.out_of_turn(message)

    def out_of_turn(self, message: FromWorker) -> WorkerLost:
        """The error for an answer that was not to be expected."""
        return WorkerLost(f"{self.who} answered {type(message).__name__} out of turn")

    def free(self, limit_s: float) -> None:
        """Wait for its end, and give back its descriptors."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(limit_s)
        os.close(self.complaints)
        if self.arena_fd >= 0:
            os.close(self.arena_fd)

    def _death(self) -> str:
        """How it ended, with the last it said on stderr."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        code = self.process.returncode
        if code is None:
            return "closed its connection"
        end = os.fstat(self.complaints).st_size
        said = os.pread(self.complaints, 1 << 16, max(0, end - (1 << 16)))
        lines = said.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with code {code}"
        return f"{how} ({last[:300]})" if last else how


def spawned(slot: int, spec: DeviceSpec, variables: Mapping[str, str]) -> WorkerProcess:
    """Start a worker's process, with these in its environment; it waits to be told who it is.

    Raises:
        OSError: no process, descriptor or memory is to be had; nothing is left.
    """
    with contextlib.ExitStack() as undo:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        undo.enter_context(ours)
        complaints = os.memfd_create(f"tccl-stderr-{spec.device}")
        undo.callback(os.close, complaints)
        with theirs:
            process = subprocess.Popen(
                child_command("tccl_profiler.worker", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                env=_environment(variables),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
            )
        worker = WorkerProcess(
            spec=spec,
            slot=slot,
            process=process,
            complaints=complaints,
            channel=Channel(ours, receives=FromWorker, peer=f"the worker of {spec.device}"),
        )
        undo.pop_all()
    return worker


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    environment = dict(
        without_disturbance(os.environ),
        CUDA_DEVICE_ORDER="PCI_BUS_ID",
        # A queue for each stream: one that waits must not hold up another.
        CUDA_DEVICE_MAX_CONNECTIONS="32",
        # numpy would have a thread for every core, in every worker.
        OPENBLAS_NUM_THREADS="1",
        # Where the controller found this package, its workers do too.
        PYTHONPATH=os.pathsep.join(search_path()),
    )
    # Devices are taken by bus id, and their peers must be visible too.
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    return child_environment({**environment, **variables})


def _by_name(device: str, what: str) -> str:
    """What a worker says, with its device's name if that is not in it."""
    names = rf"\b({device}|GPU {device[1:]})\b"
    return what if re.search(names, what) else f"{device}: {what}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
