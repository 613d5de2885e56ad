"""Python child processes without imports from the current directory, ended with the parent.

usage: python CHILDREN.PY PARENT MODULE ARGUMENT...

`python -m` and `python -c` search the current directory first, so a file `signal.py` there would
replace the standard library's. A script's directory is searched instead; run as a script, this file
removes the directory from the path as well, and then becomes MODULE.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing takes long to load
if TYPE_CHECKING:
    import socket
    import subprocess
    from collections.abc import Mapping

_PACKAGE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 (nothing else is loaded)
_ROOT = os.path.dirname(_PACKAGE)  # noqa: PTH120
_SEARCHED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
_PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h
_ORPHANED = 3  # Exit code of a child whose parent ended before the kernel was told to watch it


def search_path() -> list[str]:
    """Return sys.path without the current directory, unless PYTHONPATH or this package is there."""
    try:
        here = os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        here = ""
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    wanted = {_ROOT, *(os.path.normpath(os.path.join(here, folder)) for folder in named)}  # noqa: PTH118
    return [folder for folder in sys.path if folder and (folder != here or folder in wanted)]


def child_command(module: str, *arguments: str) -> list[str]:
    """Return the command of a module as a child process; from the main thread, ended with it."""
    import threading  # noqa: PLC0415 (a child that only begins needs none of it)

    bound = threading.current_thread() is threading.main_thread()
    script = os.path.join(_PACKAGE, "children.py")  # noqa: PTH118
    return [sys.executable, script, str(os.getpid() if bound else 0), module, *arguments]


def child_environment(variables: dict[str, str]) -> dict[str, str]:
    """Return variables without empty entries in search paths, which mean the current directory."""
    return {
        name: os.pathsep.join(filter(None, value.split(os.pathsep))) if name in _SEARCHED else value
        for name, value in variables.items()
    }


def child_with_socket(
    module: str,
    *arguments: str,
    environment: Mapping[str, str],
    stderr: int | None = None,
    leads: bool = False,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a module as a child whose argument 1 is the descriptor of a connected socket.

    A child that `leads` a session of its own has a socket of packets, others one of a stream.
    """
    import socket  # noqa: PLC0415 (few processes have children)
    import subprocess  # noqa: PLC0415

    ours, remote = socket.socketpair(type=socket.SOCK_SEQPACKET if leads else socket.SOCK_STREAM)
    try:
        with remote:
            process = subprocess.Popen(
                child_command(module, str(remote.fileno()), *arguments),
                pass_fds=(remote.fileno(),),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if leads else stderr,
                start_new_session=leads,
            )
    except BaseException:
        ours.close()
        raise
    return process, ours


def end_with(parent: int) -> None:
    """Have the kernel kill this process at the end of `parent`; end at once after the end."""
    import ctypes  # noqa: PLC0415 (only when the path is clean)
    import signal  # noqa: PLC0415

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(_ORPHANED)


def _become() -> None:
    # At the end is the place from which a parent has this package, installed or not.
    sys.path[:] = [*(folder for folder in sys.path if folder != _PACKAGE), _ROOT]
    parent = int(sys.argv[1])
    if parent:
        end_with(parent)
    import runpy  # noqa: PLC0415

    module = sys.argv[2]
    sys.argv[:] = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _become()
