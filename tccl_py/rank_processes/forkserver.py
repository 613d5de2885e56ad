"""Fork server: imports the modules of ranks once, then forks one process per rank.

usage: tccl_py.rank_processes.forkserver DESCRIPTOR MODULE...

Importing torch takes seconds, and a verification runs some thirty jobs. The server initialises no
library: a rank touches GPUs only in its own environment. multiprocessing's fork server has no
environment per process and searches the current directory.

Each rank leads a process group, so Ctrl-C reaches the caller alone, which ends the ranks. If the
caller is killed, the kernel kills the server and the ranks; their standard input ends as well.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from tccl_py.children import child_command, child_environment, end_with
from tccl_py.errors import TcclError

LISTENER = "TCCL_RENDEZVOUS_DESCRIPTOR"
"""Variable that tells a rank the descriptor of the listening socket it inherits."""
_MODULE = "tccl_py.rank_processes.forkserver"
_PER_RANK = ("NCCL_", "CUDA_")
"""Variables read when NCCL or a GPU is first used: ranks of one server may differ in them."""
_POLL_S = 0.02
_START_S = 120.0
"""Importing takes seconds; from a busy file server it takes longer."""
_END_S = 5.0
_MESSAGE_BYTES = 4096


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's program: a module run as `__main__`, with arguments, environment and output file.

    `imports` are modules for the server to import before the fork; missing modules are ignored,
    and the rank reports them.
    """

    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    output: str
    imports: tuple[str, ...] = ()


_Event = tuple[int, int | None]
"""A forked process's number, and None, or the code of one that ended, as in subprocess."""


class ForkServer:
    """Starts ranks by fork; a context manager that ends the server and every rank left.

    The server process starts with the first rank, and again where a rank needs other imports or
    another environment than the server's.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._key: tuple[tuple[str, ...], dict[str, str]] = ((), {})
        self._codes: dict[int, int | None] = {}

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, program: Program, listener: socket.socket | None = None) -> ForkedRank:
        """Start a rank that inherits `listener`."""
        environment = child_environment(program.environment)
        program = msgspec.structs.replace(program, environment=environment)
        control = self._ready(program)
        # The environment may be larger than a message.
        file = Path(f"{program.output}-program.json")
        file.write_bytes(msgspec.json.encode(program))
        reading, lifeline = os.pipe()
        try:
            descriptors = [reading, *([listener.fileno()] if listener is not None else [])]
            socket.send_fds(control, [str(file).encode()], descriptors)
            pid = self._forked(time.monotonic() + _START_S)
        except BaseException as error:
            os.close(lifeline)
            if not isinstance(error, OSError):
                raise
            raise self._gone() from None
        finally:
            os.close(reading)
        return ForkedRank(self, pid, lifeline)

    def close(self) -> None:
        """Kill the server and, with the server, all ranks."""
        control, self._control = self._control, None
        process, self._process = self._process, None
        if control is not None:
            control.close()
        if process is not None:
            process.kill()
            process.wait()

    def code(self, pid: int) -> int | None:
        """Return a rank's exit code; None while the rank runs, 1 if the server died first."""
        self._drain()
        if pid not in self._codes and self._control is None:
            return 1
        return self._codes.get(pid)

    def _ready(self, program: Program) -> socket.socket:
        """Return the connection to a server with the program's imports and environment."""
        environment = {k: v for k, v in program.environment.items() if not k.startswith(_PER_RANK)}
        key = (program.imports, environment)
        # A server that was killed while idle has closed the connection.
        self._drain()
        if self._control is not None and key == self._key:
            return self._control
        self.close()
        ours, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with remote:
            self._process = subprocess.Popen(
                child_command(_MODULE, str(remote.fileno()), *program.imports),
                env=environment,
                pass_fds=(remote.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._control, self._key, self._codes = ours, key, {}
        return ours

    def _forked(self, deadline: float) -> int:
        while (event := self._event(max(0.0, deadline - time.monotonic()))) is not None:
            pid, code = event
            if code is None:
                return pid
            self._codes[pid] = code
        raise self._gone()

    def _drain(self) -> None:
        while (event := self._event(0.0)) is not None:
            self._codes.update([event])

    def _event(self, seconds: float) -> _Event | None:
        """Return the next event; None on timeout or if the server has ended."""
        if self._control is None:
            return None
        if not select.select([self._control], [], [], seconds)[0]:
            return None
        with contextlib.suppress(ConnectionResetError):
            message = self._control.recv(_MESSAGE_BYTES)
            if message:
                return msgspec.json.decode(message, type=tuple[int, int | None])
        self._control.close()
        self._control = None
        return None

    def _gone(self) -> TcclError:
        self.close()
        return TcclError("the process that starts ranks has ended; run the command again")


class ForkedRank:
    """A rank started by a fork server."""

    def __init__(self, server: ForkServer, pid: int, lifeline: int) -> None:
        self._server, self._pid, self._lifeline = server, pid, lifeline

    def poll(self) -> int | None:
        """Return the exit code, minus the signal that ended the rank, or None while it runs."""
        return self._server.code(self._pid)

    def end(self) -> None:
        """Kill the rank's process group; ranks own nothing that needs cleanup."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            until = time.monotonic() + _END_S
            while self.poll() is None and time.monotonic() < until:
                time.sleep(0.01)
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


def main() -> None:
    """Serve until the client closes the connection; in a fork, run the requested program."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    request = _serve(control)
    if request is not None:
        control.close()
        _run(*request)


def _serve(control: socket.socket) -> tuple[Program, list[int]] | None:
    """Fork on request and return the request in the fork; return None when the client is gone."""
    server = os.getpid()
    children: set[int] = set()
    while True:
        readable, _, _ = select.select([control], [], [], _POLL_S if children else None)
        try:
            # 1. Report the ranks that have ended.
            for pid in list(children):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    children.remove(pid)
                    control.send(msgspec.json.encode((pid, os.waitstatus_to_exitcode(status))))
            if not readable:
                continue
            # 2. Fork for the next request: the kernel ends the fork with this process.
            message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 2)
            if not message:
                return None
            pid = os.fork()
            if pid == 0:
                end_with(server)
                request = Path(message.decode()).read_bytes()
                return msgspec.json.decode(request, type=Program), descriptors
            children.add(pid)
            # The client may kill the group as soon as it knows the pid.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            for descriptor in descriptors:
                os.close(descriptor)
            control.send(msgspec.json.encode((pid, None)))
        except (BrokenPipeError, ConnectionResetError):
            return None


def _run(program: Program, descriptors: list[int]) -> None:
    """Run the program in this fork, as a process started for it would."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    output = os.open(program.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for source, target in ((descriptors[0], 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(descriptors[0])
    os.close(output)
    os.environ.clear()
    os.environ.update(program.environment)
    for listener in descriptors[1:]:
        os.set_inheritable(listener, True)
        os.environ[LISTENER] = str(listener)
    sys.argv = [program.module, *program.arguments]
    runpy.run_module(program.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
