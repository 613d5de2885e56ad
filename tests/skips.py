"""Why a test may be skipped, each reason once: a skip for another one fails (conftest.py)."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tccl_py.errors import MeasurementError

COMMANDS = (
    *("mpirun", "mpiexec.hydra", "unshare", "nsenter", "setpriv", "ip", "tc", "sysctl", "munged"),
    *("slurmctld", "slurmd", "srun", "sbatch", "sinfo", "objdump", "hadolint", "systemd-analyze"),
)
NEEDS = {
    "a C compiler": lambda: shutil.which(os.environ.get("CC") or "cc"),
    "root": lambda: os.geteuid() == 0,
    "a user who may not write everywhere": lambda: os.geteuid() != 0,
    **{name: lambda name=name: find_spec(name) for name in ("torch", "tomllib", "setuptools")},
    **{name: lambda name=name: shutil.which(name) for name in COMMANDS},
}
"""What is here or not, whatever the tested code does."""

SAID = (
    # What the tests were given.
    r"needs \d+ GPU\(s\), \d+ here",
    "needs 3 GPUs",
    "needs real GPUs: virtual ones share one",
    r"needs several hosts of virtual GPUs \(.*",
    "needs virtual GPUs with a fault",
    r"NCCL \S+ is not here: TCCL_TEST_NCCL names a folder of releases",
    r"NCCL \(.*\) has no environment plugins",
    "test_size_tuning_on_gpus.py does it on two",
    "an option of measure",
    # What the machine, or its container, has and allows.
    "needs a git checkout",
    "needs chromium, which is not here",
    "needs the command tccl beside this Python",
    "needs the mpirun of Open MPI 5",
    "needs 2 cores, to which the rankfile binds",
    "needs torch or cupy to hold a context",
    r"needs idle GPUs: .*",
    r"the compiler has no (address|thread) sanitizer",
    r"no NVRTC of CUDA \d+ here: .*",
    r"not installed: nvidia-cuda-nvrtc.*",
    "the loader finds (no NVRTC here|NVRTC, and what belongs to it)",
    "this host forbids memory policies",
    "no CPU of NUMA node 0 is open to the tests",
    r"NUMA nodes of pages: .*|\S+ does not tell the NUMA nodes of pages at .*",
    r"mbind: \[Errno (1|13|38)\] .*",
    "node 2 is there",
    r"no IPv6 here.*",
    r"namespaces: the kernel does not allow .*",
    "this user cannot make mount namespaces",
    "root may not mount here",
    "cannot mount a small disk here",
    "this file system has no attributes",
    r"SLURM here has no PMIx: .*",
    "one network interface: there is no other NIC to name",
    "NVLS works here, which the cost model does not have",
    r"needs idle cores: a process gets \d+ % of one",
    r"needs \d+ cores for as many workers, \d+ here",
)
"""What a test said when it was skipped."""


def lacking(*names):
    """Return why a test that needs these is skipped, or ""."""
    missing = [name for name in names if not NEEDS[name]()]
    return f"needs {', '.join(missing)}" if missing else ""


def needs(*names):
    """Skip the test that runs unless all of these are here."""
    if reason := lacking(*names):
        pytest.skip(reason)


def mark_needs(*names):
    """Return a mark that skips tests unless all of these are here."""
    return pytest.mark.skipif(bool(lacking(*names)), reason=lacking(*names) or "all is here")


def is_listed(reason):
    """Return whether a test may be skipped for this reason, here."""
    reason = reason.removeprefix("Skipped: ")
    names = reason.removeprefix("needs ").split(", ")
    if set(names) <= set(NEEDS):
        return not any(NEEDS[name]() for name in names)
    return any(re.fullmatch(said, reason, re.DOTALL) for said in SAID)


_SPIN_S = 0.2
_SPIN = f"""\
import time
end = time.monotonic() + {_SPIN_S}
begun = time.process_time()
while time.monotonic() < end:
    pass
print(time.process_time() - begun)
"""
_IDLE, _MOST_CORES = 0.8, 8


def share_of_a_core():
    """Return the least share of a core that processes get now, of which each core has one."""
    cores = min(len(os.sched_getaffinity(0)), _MOST_CORES)
    command = [sys.executable, "-SIc", _SPIN]
    spins = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(cores)]
    return min(float(one.communicate()[0]) for one in spins) / _SPIN_S


def needs_idle_cores():
    """Skip the test that runs if other work has the cores now: rates are then those of the work."""
    if (share := share_of_a_core()) < _IDLE:
        pytest.skip(f"needs idle cores: a process gets {share:.0%} of one".replace("%", " %"))


@contextlib.contextmanager
def unless_busy(workers=1):
    """Let what is measured in the block fail on idle cores alone, and skip the test on others.

    Where workers that copy together are more than cores, the scheduler may keep them apart.
    """
    try:
        yield
    except (AssertionError, MeasurementError):
        needs_idle_cores()
        if workers > (here := len(os.sched_getaffinity(0))):
            pytest.skip(f"needs {workers} cores for as many workers, {here} here")
        raise
