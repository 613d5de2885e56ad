"""How a rank's process is started: as an interpreter of its own, or as a fork of a nursery.

Either is the leader of its own process group: Ctrl-C reaches this program alone, which ends them.
If this program is killed, the kernel kills them; their standard input ends as well.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec

from tccl_py.children import child_command, child_environment
from tccl_py.errors import TcclError
from tccl_py.rank_processes.nursery import MESSAGE_BYTES, Event, Program

TORCH = ("torch", "torch.distributed", "torch.nn.parallel")
"""What takes ranks of torch most of their start."""
_PROGRAM = "tccl_py.rank_processes.nursery"
_OWN = ("NCCL_", "CUDA_")
"""Variables that are read when NCCL or a GPU is first used, and so may differ from rank to rank."""
_START_S = 120.0
"""Importing takes seconds; from a busy file server it takes longer."""
_END_S = 5.0


class Running(Protocol):
    """A process that was started."""

    def poll(self) -> int | None:
        """Its exit code, minus the signal that ended it, or None while it runs."""

    def end(self) -> None:
        """Kill it and whatever it started; it holds nothing that it would have to put away."""


Start = Callable[[Program, Mapping[str, socket.socket]], Running]
"""Starts a program with sockets that it inherits, whose descriptors stand in variables by those
names."""


class _Interpreter:
    """A process of its own; implements `Running`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def poll(self) -> int | None:
        return self._process.poll()

    def end(self) -> None:
        if self._process.poll() is None:
            _kill(self._process.pid)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def interpreter(program: Program, inherits: Mapping[str, socket.socket]) -> Running:
    """Start an interpreter; see `Start`."""
    given = {name: one.fileno() for name, one in inherits.items()}
    numbers = {name: str(one) for name, one in given.items()}
    with Path(program.output).open("wb") as file:
        return _Interpreter(
            subprocess.Popen(
                child_command(program.module, *program.arguments),
                env=child_environment({**program.environment, **numbers}),
                pass_fds=tuple(given.values()),
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )


class Nursery:
    """Starts ranks by fork from a process that has imported their modules; a `Start`.

    The process is started with the first rank, and anew where one needs another environment than
    the one it was started in. It ends with the `with` block, or with this program.

    Args:
        modules: what to import; one that is missing is left to the rank to name.
    """

    def __init__(self, modules: Sequence[str] = TORCH) -> None:
        self._modules = tuple(modules)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._environment: dict[str, str] = {}
        self._ended: dict[int, int | None] = {}

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __call__(self, program: Program, inherits: Mapping[str, socket.socket]) -> Running:
        """Start a rank; see `Start`.

        Raises:
            TcclError: the fork server has ended, and another one as well.
        """
        try:
            return self._start(program, inherits)
        except _EndedError:
            # A server that was killed while idle may not be seen to have ended before it is used.
            return self._start(program, inherits)

    def _start(self, program: Program, inherits: Mapping[str, socket.socket]) -> Running:
        variables = child_environment(program.environment)
        self._ready({k: v for k, v in variables.items() if not k.startswith(_OWN)})
        assert self._control is not None
        # A message is too small for some environments.
        file = Path(f"{program.output}-program.json")
        whole = msgspec.structs.replace(program, environment=variables, inherits=tuple(inherits))
        file.write_bytes(msgspec.json.encode(whole))
        reading, writing = os.pipe()
        try:
            descriptors = [reading, *(one.fileno() for one in inherits.values())]
            socket.send_fds(self._control, [str(file).encode()], descriptors)
            born = self._born(time.monotonic() + _START_S)
        except OSError:
            os.close(writing)
            self.close()
            raise self._gone() from None
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)
        return _Forked(self, born, writing)

    def close(self) -> None:
        """End the process; ranks that still run end with it."""
        control, self._control = self._control, None
        process, self._process = self._process, None
        if control is not None:
            control.close()
        if process is not None:
            # It may be importing, and would not hear of it for long; it has nothing to put away.
            process.kill()
            process.wait()

    def code(self, pid: int) -> int | None:
        """The exit code of a rank, None while it runs; 1 if nobody is left who would know."""
        while pid not in self._ended and (event := self._event(0.0)) is not None:
            self._ended[event.pid] = event.code
        if pid not in self._ended and self._control is None:
            return 1
        return self._ended.get(pid)

    def _ready(self, environment: dict[str, str]) -> None:
        alive = self._process is not None and self._process.poll() is None
        if alive and environment == self._environment:
            return
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                child_command(_PROGRAM, str(theirs.fileno()), *self._modules),
                env=environment,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._control, self._environment = ours, environment
        self._ended = {}

    def _born(self, deadline: float) -> int:
        """The number of the process that was asked for."""
        while True:
            event = self._event(max(0.0, deadline - time.monotonic()))
            if event is None:
                raise self._gone()
            if event.code is None:
                return event.pid
            self._ended[event.pid] = event.code

    def _event(self, seconds: float) -> Event | None:
        """The next one; None if none comes in time, or none can come any more."""
        if self._control is None:
            return None
        readable, _, _ = select.select([self._control], [], [], seconds)
        if not readable:
            return None
        message = self._control.recv(MESSAGE_BYTES)
        if message:
            return msgspec.json.decode(message, type=Event)
        self._control.close()
        self._control = None
        return None

    def _gone(self) -> TcclError:
        ended = self._control is None
        self.close()
        kind = _EndedError if ended else TcclError
        return kind("the process that starts ranks has ended; run the command again")


class _EndedError(TcclError):
    """The fork server ended before it started a rank."""


class _Forked:
    """A fork of a nursery; implements `Running`."""

    def __init__(self, nursery: Nursery, pid: int, lifeline: int) -> None:
        self._nursery, self._pid, self._lifeline = nursery, pid, lifeline

    def poll(self) -> int | None:
        return self._nursery.code(self._pid)

    def end(self) -> None:
        if self.poll() is None:
            _kill(self._pid)
            until = time.monotonic() + _END_S
            while self.poll() is None and time.monotonic() < until:
                time.sleep(0.01)
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
