"""Runs that end by SIGKILL at one of their changes of files, each in turn."""

import os
import signal
import sys
from collections.abc import Callable

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate"}


def killed_at(number: int, run: Callable[[], object]) -> bool:
    """Run in a child that is killed just before its `number`-th change of files, from 0 on.

    Return whether it was; a run with fewer changes ends by itself, and must not fail.
    """
    child = os.fork()
    if child == 0:
        left = number

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & 3
            if event in CHANGES or writes:
                if left <= 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

        sys.addaudithook(hook)
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


def killed_at_each(begin: Callable[[], object], run: Callable[[], object]):
    """Begin anew and have a run killed, at its first change, its second, until it is not."""
    number = 0
    while True:
        begin()
        if not killed_at(number, run):
            return
        yield number
        number += 1
