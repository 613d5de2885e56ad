"""A worker's process as the controller sees it: its start, requests and answers, and its end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from tccl_profiler import messages
from tccl_py.children import child_environment, child_with_socket, search_path
from tccl_py.errors import MeasurementError

_DROPPED = ("NCCL_GRAPH_FILE", "NCCL_IB_HCA", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS")
"""A graph file's NICs are counted among those that NCCL uses: it must use all."""
Answer = TypeVar("Answer", bound=msgspec.Struct)


@dataclass
class WorkerProcess:
    """A worker, a memfd of its stderr, and whether it `owes_answer` to a request."""

    spec: messages.DeviceSpec
    slot: int
    process: subprocess.Popen[bytes]
    connection: messages.Connection[messages.FromWorker]
    stderr_fd: int
    answer_s: float
    owes_answer: bool = False
    lanes_asked: int = 0

    @property
    def who(self) -> str:
        """The worker's name in messages."""
        return f"the worker of {self.spec.device}"

    def ask(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send a request, within `answer_s`."""
        # Before the send: an interruption just after it would leave an unexpected answer.
        self.owes_answer = True
        try:
            self.connection.send(message, fds, self.answer_s)
        except messages.ConnectionClosed as error:
            raise messages.WorkerLost(f"{self.who} {self._death()}") from error
        except messages.ConnectionTimeout as error:
            fault = f"{self.who} has not listened for {self.answer_s:g} s"
            raise messages.WorkerLost(fault) from error

    def receive(self, kind: type[Answer], limit_s: float) -> tuple[Answer, tuple[int, ...]]:
        """Return the answer, of this type, and its descriptors."""
        try:
            message, fds = self.connection.receive(max(0.0, limit_s))
        except messages.ConnectionClosed as error:
            raise messages.WorkerLost(f"{self.who} {self._death()}") from error
        except messages.ConnectionTimeout as error:
            raise messages.WorkerLost(f"{self.who} has not answered for {limit_s:.1f} s") from error
        except MeasurementError as error:
            # An invalid message; the error has the worker's name.
            raise messages.WorkerLost(str(error)) from error
        self.owes_answer = False
        if isinstance(message, messages.Failed):
            device, what = self.spec.device, message.what
            is_named = re.search(rf"\b({device}|GPU {device[1:]})\b", what)
            raise message.error(what if is_named else f"{device}: {what}")
        if not isinstance(message, kind):
            raise messages.WorkerLost(f"{self.who} answered {type(message).__name__} out of turn")
        return message, fds

    def free(self, limit_s: float) -> None:
        """Wait for the end of the process, and close the connection and its stderr."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(limit_s)
        self.connection.close()
        os.close(self.stderr_fd)

    def _death(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        code = self.process.returncode
        if code is None:
            return "closed its connection"
        end = os.fstat(self.stderr_fd).st_size
        text = os.pread(self.stderr_fd, 1 << 16, max(0, end - (1 << 16)))
        lines = text.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        names = {number.value: number.name for number in signal.Signals}  # none of real-time ones
        killed = f"was killed by {names.get(-code, f'signal {-code}')}"
        how = killed if code < 0 else f"ended with code {code}"
        return f"{how} ({last[:300]})" if last else how


def spawn_worker(
    slot: int, spec: messages.DeviceSpec, variables: Mapping[str, str], answer_s: float
) -> WorkerProcess:
    """Start a worker's process with these variables; it waits for Start."""
    stderr_fd = os.memfd_create(f"tccl-stderr-{spec.device}")
    try:
        process, sock = child_with_socket(
            "tccl_profiler.worker", environment=_environment(variables), stderr=stderr_fd
        )
    except BaseException:
        os.close(stderr_fd)
        raise
    connection: messages.Connection[messages.FromWorker] = messages.Connection(
        sock, receives=messages.FromWorker, peer=f"the worker of {spec.device}"
    )
    return WorkerProcess(spec, slot, process, connection, stderr_fd, answer_s)


def without_disturbance(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that contradict a worker's settings of NCCL."""
    return {name: value for name, value in environment.items() if name not in _DROPPED}


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    environment = dict(
        without_disturbance(os.environ),
        CUDA_DEVICE_ORDER="PCI_BUS_ID",
        # A queue for each stream: a waiting stream must not hold up another.
        CUDA_DEVICE_MAX_CONNECTIONS="32",
        # numpy would start a thread for every core, in every worker.
        OPENBLAS_NUM_THREADS="1",
    )
    # Devices are taken by bus id, and their peers must be visible too.
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    environment["PYTHONPATH"] = os.pathsep.join(search_path())
    return child_environment({**environment, **variables})
