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
import ctypes
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

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


class ForkServer:
    """Starts ranks by fork; a context manager that ends the server and every rank left.

    The server process starts with the first rank, and again where a rank needs more imports or
    another environment than the server's.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._key: tuple[tuple[str, ...], dict[str, str]] = ((), {})

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, program: Program, listener: socket.socket | None = None) -> ForkedRank:
        """Start a rank that inherits `listener`."""
        environment = child_environment(program.environment)
        program = msgspec.structs.replace(program, environment=environment)
        # The environment may be larger than a message.
        file = Path(f"{program.output}-program.json")
        file.write_bytes(msgspec.json.encode(program))
        server, control = self._ready(program)
        reading, lifeline = os.pipe()
        try:
            descriptors = [reading, *([listener.fileno()] if listener is not None else [])]
            socket.send_fds(control, [str(file).encode()], descriptors)
            if not (pid := control.recv(_MESSAGE_BYTES)):
                raise ConnectionResetError
        except BaseException as error:
            os.close(lifeline)
            if not isinstance(error, OSError):
                raise
            self.close()
            what = "the process that starts ranks has ended; run the command again"
            raise TcclError(what) from None
        finally:
            os.close(reading)
        return ForkedRank(server, int(pid), lifeline, _code_file(file))

    def close(self) -> None:
        """Kill the server and, with the server, all ranks."""
        control, self._control = self._control, None
        process, self._process = self._process, None
        if control is not None:
            control.close()
        if process is not None:
            process.kill()
            process.wait()

    def _ready(self, program: Program) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Return a server with the program's imports and environment, and the connection to it."""
        environment = {k: v for k, v in program.environment.items() if not k.startswith(_PER_RANK)}
        imported, of_server = self._key
        suits = environment == of_server and set(program.imports) <= set(imported)
        process, control = self._process, self._control
        if process and control and process.poll() is None and suits:
            return process, control
        self.close()
        ours, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_START_S)
        with remote:
            process = subprocess.Popen(
                child_command(_MODULE, str(remote.fileno()), *program.imports),
                env=environment,
                pass_fds=(remote.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._process, self._control = process, ours
        self._key = (program.imports, environment)
        return process, ours


class ForkedRank:
    """A rank started by a fork server, which writes the exit code to a file."""

    def __init__(
        self, server: subprocess.Popen[bytes], pid: int, lifeline: int, code: Path
    ) -> None:
        self._server, self._pid, self._lifeline, self._code = server, pid, lifeline, code

    def poll(self) -> int | None:
        """Return the exit code, minus the signal that ended the rank, or None while it runs.

        The code is 1 if the server died first.
        """
        ended = self._server.poll() is not None
        text = self._code.read_text() if self._code.exists() else ""
        return int(text) if text else 1 if ended else None

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


def _code_file(program: Path) -> Path:
    return program.with_name(f"{program.name}-code")


def main() -> None:
    """Serve until the client closes the connection; in a fork, run the requested program."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    # A fork shares memory until it is written, as the collector would do.
    gc.freeze()
    request = _serve(control)
    if request is not None:
        control.close()
        _leave(partial(_run, *request))


def _serve(control: socket.socket) -> tuple[Program, list[int]] | None:
    """Fork on request and return the request in the fork; return None when the client is gone."""
    server = os.getpid()
    children: dict[int, Path] = {}
    while True:
        readable, _, _ = select.select([control], [], [], _POLL_S if children else None)
        # 1. Write the codes of the ranks that have ended; a folder may be gone.
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with contextlib.suppress(OSError):
                    children[pid].write_text(str(os.waitstatus_to_exitcode(status)))
                del children[pid]
        if not readable:
            continue
        # 2. Fork for the next request: the kernel ends the fork with this process.
        try:
            message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 2)
            if not message:
                return None
            file = Path(message.decode())
            pid = os.fork()
            if pid == 0:
                end_with(server)
                return msgspec.json.decode(file.read_bytes(), type=Program), descriptors
            children[pid] = _code_file(file)
            # The client may kill the group as soon as it knows the pid.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            for descriptor in descriptors:
                os.close(descriptor)
            control.send(str(pid).encode())
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


def _leave(run: Callable[[], None]) -> NoReturn:
    """Run in this fork and end it; taking torch's modules apart would copy all their memory."""
    code = 1
    try:
        run()
        code = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        else:
            code = error.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # NCCL's log, and what else C has buffered.
        ctypes.CDLL(None).fflush(None)
        os._exit(code)


if __name__ == "__main__":
    main()
