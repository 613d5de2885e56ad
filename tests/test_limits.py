"""Limits of the system that are too low are named, with what they are and what is needed."""

import errno
import os
import resource
import subprocess
import sys

import pytest

from tccl_py.errors import limit_reached


def limited(number, soft, hard, *command):
    """Run a command line with a limit."""
    return subprocess.run(
        command,
        preexec_fn=lambda: resource.setrlimit(number, (soft, hard)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "command",
    ["doctor", "env DIR", "measure --backend host SET", "plan DIR", "verify DIR"],
)
def test_too_few_open_files_are_named(command, tmp_path):
    words = command.replace("DIR", str(tmp_path / "p")).split()
    done = limited(resource.RLIMIT_NOFILE, 12, 12, sys.executable, "-m", "tccl_py", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tccl: open files: the limit is 12,")
    assert "ulimit -n" in done.stderr
    assert not (tmp_path / "p").exists()


def test_a_limit_that_this_process_may_raise_is_raised():
    command = (sys.executable, "-m", "tccl_py", "--version")
    assert limited(resource.RLIMIT_NOFILE, 12, 4096, *command).returncode == 0


@pytest.mark.parametrize(
    ("number", "most", "sentence"),
    [
        (resource.RLIMIT_NPROC, 20, "processes and threads"),
        (resource.RLIMIT_AS, 1 << 29, "address space in KiB"),
    ],
)
def test_too_few_processes_and_too_little_memory_are_named(number, most, sentence):
    program = (
        "import os\nos.geteuid = lambda: 1000\n"
        "from tccl_py.errors import check_limits\ncheck_limits()"
    )
    done = limited(number, most, most, sys.executable, "-c", program)
    assert done.returncode == 1
    assert f"InputError: {sentence}" in done.stderr


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "open files"),
        (OSError(errno.ENFILE, os.strerror(errno.ENFILE)), "open files"),
        (OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "processes and threads"),
        (RuntimeError("can't start new thread"), "processes and threads"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "memory"),
        (MemoryError(), "memory"),
        (OSError(errno.ENOENT, os.strerror(errno.ENOENT)), None),
        (BlockingIOError(errno.EAGAIN, "write could not complete without blocking"), None),
        (RuntimeError("deque mutated during iteration"), None),
    ],
)
def test_errors_of_limits_are_told_from_others(error, where):
    reached = limit_reached(error)
    assert (reached and reached.where) == where
