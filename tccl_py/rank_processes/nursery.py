"""A process that has imported what ranks need and becomes each of them, by fork.

usage: tccl_py.rank_processes.nursery DESCRIPTOR MODULE...

Importing torch takes seconds, and a verification runs some thirty jobs. What is imported here is
not begun: no GPU is touched and no library set up before a rank does so, with the environment that
it is told. DESCRIPTOR is a socket, of which `starting.Nursery` has the other end.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import select
import socket
import sys
from pathlib import Path

import msgspec

from tccl_py.children import end_with

LOOK_S = 0.02
MESSAGE_BYTES = 4096
_MOST_DESCRIPTORS = 4


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is: a module that runs as a program, its arguments, its whole environment, and
    the file for what it writes.

    `inherits` are variables whose values are descriptors that a fork is given after its standard
    input, in order.
    """

    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    output: str
    inherits: tuple[str, ...] = ()


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A process that was born, or has ended with a code as subprocess has it."""

    pid: int
    code: int | None = None


def main() -> None:
    """Serve until the other end is closed; in a fork, be what was asked for."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        # The rank says better what is missing.
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    asked = _serve(control)
    if asked is not None:
        control.close()
        _become(*asked)


def _serve(control: socket.socket) -> tuple[Program, list[int]] | None:
    """Fork for whoever asks; in the fork, what was asked for. None when nobody is there any more.

    Forks end with this process, whenever that does.
    """
    own = os.getpid()
    children: set[int] = set()
    while True:
        readable, _, _ = select.select([control], [], [], LOOK_S if children else None)
        try:
            for pid in list(children):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    children.remove(pid)
                    code = os.waitstatus_to_exitcode(status)
                    control.send(msgspec.json.encode(Event(pid=pid, code=code)))
            if not readable:
                continue
            message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, _MOST_DESCRIPTORS)
            if not message:
                return None
            pid = os.fork()
            if pid == 0:
                end_with(own)
                told = Path(message.decode()).read_bytes()
                return msgspec.json.decode(told, type=Program), descriptors
            children.add(pid)
            # Whoever asked may end it with all that it starts from now on.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            for one in descriptors:
                os.close(one)
            control.send(msgspec.json.encode(Event(pid=pid)))
        except (BrokenPipeError, ConnectionResetError):
            return None


def _become(program: Program, descriptors: list[int]) -> None:
    """Run the program here, as a process that was started for it would."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    output = os.open(program.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for there, here in ((descriptors[0], 0), (output, 1), (output, 2)):
        os.dup2(there, here)
    os.close(descriptors[0])
    os.close(output)
    given = dict(zip(program.inherits, map(str, descriptors[1:]), strict=True))
    for one in descriptors[1:]:
        os.set_inheritable(one, True)
    os.environ.clear()
    os.environ.update({**program.environment, **given})
    sys.argv = [program.module, *program.arguments]
    runpy.run_module(program.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
