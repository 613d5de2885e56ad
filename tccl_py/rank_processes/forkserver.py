"""Fork server: imports the modules of ranks once, forks a process per rank, and waits for them.

usage: tccl_py.rank_processes.forkserver DESCRIPTOR MODULE...

Importing torch takes seconds, and a verification runs some thirty jobs. The server initialises no
library: a rank touches GPUs only in its own environment. multiprocessing's fork server has no
environment per process and searches the current directory.

Each rank leads a process group, so Ctrl-C reaches the caller alone. The server ends its ranks, and
itself, once the caller closes the connection. The kernel kills the server with the caller, and the
ranks with the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

from tccl_py.children import child_with_socket, end_with
from tccl_py.errors import MeasurementError
from tccl_py.rank_processes.rank import LISTENER, SPEC_FILE

_MODULE = "tccl_py.rank_processes.forkserver"
_PER_RANK = ("NCCL_", "CUDA_")
"""Variables read when NCCL or a GPU is first used: ranks of one server may differ in them."""
_POLL_S = 0.02
_START_S = 120.0
"""Importing takes seconds; from a busy file server it takes longer."""
_GRACE_S = 3.0
"""Time for other ranks to fail after the first failure, which is often not the cause."""
_END_S, _CLOSE_S = 5.0, 2.0
_MESSAGE_BYTES = 1 << 16
_MOST_LISTENERS = 16
_SEGMENT = re.compile(r"/dev/shm/nccl-\w+")


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank: the module `program`, run as `__main__` with FOLDER/spec.json and the rank's number.

    The rank inherits the listening socket of this number among those of the call, None for none.
    """

    program: str
    number: int
    folder: str
    environment: dict[str, str]
    listener: int | None

    @property
    def output(self) -> Path:
        """Return the file of standard output and standard error."""
        return Path(self.folder) / f"output-{self.number}"


class ForkServer:
    """Runs ranks as forks; a context manager that ends the server.

    The server process starts with the first ranks, and again where ranks need more imports or
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

    def run(
        self,
        ranks: Sequence[Rank],
        request: Path,
        *,
        timeout: float,
        imports: Sequence[str] = (),
        listeners: Sequence[socket.socket] = (),
        meanwhile: Callable[[], None] = lambda: None,
        together: bool = True,
    ) -> list[int | None]:
        """Run ranks to their end; return exit codes, minus the signal that ended a rank.

        The code of a rank that had to be ended is None: `timeout` passed, or another rank failed;
        without `together` only a rank of the same folder counts.
        `imports` are modules to import before the fork; missing modules are ignored, and ranks
        report them. `request` names a file to write. An exception from `meanwhile` ends the ranks.
        Raises MeasurementError: the server ended, or did not answer.
        """
        # The environments may be larger than a message.
        request.write_bytes(msgspec.json.encode(ranks))
        control = self._ready(tuple(imports), ranks[0].environment)
        until = time.monotonic() + _START_S + timeout + _END_S
        codes: list[int | None] = []
        try:
            descriptors = [listener.fileno() for listener in listeners]
            message = msgspec.json.encode((str(request), timeout, together))
            socket.send_fds(control, [message], descriptors)
            while not codes:
                with contextlib.suppress(TimeoutError):
                    answer = control.recv(_MESSAGE_BYTES)
                    codes = msgspec.json.decode(answer, type=list[int | None])
                if time.monotonic() > until:
                    raise ConnectionResetError
                meanwhile()
        except (ConnectionError, msgspec.DecodeError):
            fault = "the process that starts ranks has ended; run the command again"
            raise MeasurementError(fault) from None
        finally:
            if not codes:
                self.close()
        return codes

    def close(self) -> None:
        """End the server and, with the server, all ranks."""
        control, self._control = self._control, None
        process, self._process = self._process, None
        if control is not None:
            control.close()
        if process is not None:
            # It may be importing still, when there are no ranks.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_CLOSE_S)
            process.kill()
            process.wait()

    def _ready(self, imports: tuple[str, ...], variables: dict[str, str]) -> socket.socket:
        """Return the connection to a server with these imports and this environment."""
        environment = {k: v for k, v in variables.items() if not k.startswith(_PER_RANK)}
        imported, of_server = self._key
        suits = environment == of_server and set(imports) <= set(imported)
        if self._control and self._process and self._process.poll() is None and suits:
            return self._control
        self.close()
        self._process, self._control = child_with_socket(
            _MODULE, *imports, environment=environment, leads=True
        )
        self._control.settimeout(_POLL_S)
        self._key = imports, environment
        return self._control


def main() -> None:
    """Serve until the client closes the connection."""
    control = socket.socket(fileno=int(sys.argv[1]))
    # Of torch's modules nothing is garbage, and looking takes a tenth of their import.
    gc.disable()
    for module in sys.argv[2:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    # A fork shares memory until it is written, as the collector would do.
    gc.freeze()
    gc.enable()
    with contextlib.suppress(ConnectionError):
        while True:
            message, listeners, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, _MOST_LISTENERS)
            if not message:
                break
            request, timeout, together = msgspec.json.decode(message, type=tuple[str, float, bool])
            ranks = msgspec.json.decode(Path(request).read_bytes(), type=list[Rank])
            pids = [_fork(rank, control, listeners) for rank in ranks]
            for listener in listeners:
                os.close(listener)
            jobs = ["" if together else rank.folder for rank in ranks]
            control.send(msgspec.json.encode(_end(pids, jobs, timeout, control)))
    os._exit(0)


def _fork(rank: Rank, control: socket.socket, listeners: Sequence[int]) -> int:
    """Fork a rank; the kernel ends it with this process."""
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        end_with(server)
        control.close()
        _leave(partial(_run, rank, listeners))
    # The rank does so, too: whoever is first.
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    return pid


def _end(
    pids: Sequence[int], jobs: Sequence[str], timeout: float, control: socket.socket
) -> list[int | None]:
    """Wait for ranks, and kill those left after the timeout, or a failure in their job.

    Without a client all are killed. Return their exit codes, None of those killed. Of what ranks
    own, NCCL's files alone need cleanup.
    """
    codes: dict[int, int] = {}
    job_of = dict(zip(pids, jobs, strict=True))
    deadlines = dict.fromkeys(jobs, time.monotonic() + timeout)
    running, listening = set(pids), True
    while running:
        ended = _codes(running)
        codes |= ended
        running -= ended.keys()
        now = time.monotonic()
        for pid in (pid for pid, code in ended.items() if code):
            deadlines[job_of[pid]] = min(deadlines[job_of[pid]], now + _GRACE_S)
        late = {pid for pid in running if not listening or now > deadlines[job_of[pid]]}
        if late:
            _kill(late)
            running -= late
        # The client says nothing before the answer.
        listening = not select.select([control], [], [], _POLL_S)[0]
    return [codes.get(pid) for pid in pids]


def _kill(pids: Set[int]) -> None:
    """Kill ranks and remove NCCL's files of theirs; a process that does not end is left."""
    _signal(pids, signal.SIGSTOP)
    # At once: a client that closed the connection kills this process soon.
    for pid in pids:
        remove_segments(pid)
    _signal(pids, signal.SIGKILL)
    deadline = time.monotonic() + _END_S
    left = set(pids)
    while left and time.monotonic() < deadline:
        left -= _codes(left).keys()
        time.sleep(0.01)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to the process groups that ranks lead."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)


def remove_segments(pid: int) -> None:
    """Remove NCCL's files in shared memory that a rank maps and that still have a name.

    NCCL takes the name away once both ranks have the file; of ranks that end before, it stays.
    """
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            if _SEGMENT.fullmatch(path := line.split(maxsplit=5)[-1]):
                with contextlib.suppress(OSError):
                    Path(path).unlink()


def remove_unused_segments(since: float) -> None:
    """Remove NCCL's files that this user made after `since` and no process has any more.

    They stay of communicators that could not be made, as where /dev/shm is too small.
    """
    made = {
        str(path)
        for path in Path("/dev/shm").glob("nccl-*")
        if (state := path.lstat()).st_uid == os.geteuid() and state.st_ctime >= since
    }
    for maps in Path("/proc").glob("[0-9]*/maps") if made else ():
        with contextlib.suppress(OSError):
            made -= set(re.findall(r"/dev/shm/nccl-\w+", maps.read_text(errors="replace")))
            made -= {str(entry.readlink()) for entry in (maps.parent / "fd").iterdir()}
    for name in made:
        with contextlib.suppress(OSError):
            Path(name).unlink()


def _codes(pids: Iterable[int]) -> dict[int, int]:
    """Return the exit codes of the processes that have ended."""
    ended = (os.waitpid(pid, os.WNOHANG) for pid in pids)
    return {pid: os.waitstatus_to_exitcode(status) for pid, status in ended if pid}


def _run(rank: Rank, listeners: Sequence[int]) -> None:
    """Run the rank in this fork, as a process started for it would."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    output = os.open(rank.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for target in (1, 2):
        os.dup2(output, target)
    os.close(output)
    os.environ.clear()
    os.environ.update(rank.environment)
    for number, listener in enumerate(listeners):
        if number == rank.listener:
            os.set_inheritable(listener, True)
            os.environ[LISTENER] = str(listener)
        else:
            os.close(listener)
    sys.argv = [rank.program, str(Path(rank.folder) / SPEC_FILE), str(rank.number)]
    runpy.run_module(rank.program, run_name="__main__", alter_sys=True)


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
