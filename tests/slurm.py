"""A SLURM of several nodes on this machine: real munged, slurmctld, slurmd and srun.

Each node's slurmd has a UTS namespace, and so a host name, of its own; all reach the controller
over the loopback interface. Debian has it as slurmctld, slurmd, slurm-client and munge; Open MPI's
ranks meet by PMIx, for which SLURM loads the file libpmix.so of libpmix-dev.
"""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.namespaces import Ran, ended
from tests.skips import needs

NODES = ("gpu01", "gpu02")
TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo", "unshare")
CPUS = 8
"""More than there may be: tasks share them."""
START_S = 60
CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/tmp.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/linear
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
PropagateResourceLimits=NONE
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""
CGROUPS = "CgroupPlugin=cgroup/v1\n"
"""Nothing above uses any. A slurmd that looks which are mounted does not start where none is."""
NODE = "NodeName={0} NodeHostname={0} NodeAddr=127.0.0.1 Port={1} CPUs={2} State=UNKNOWN\n"


@dataclass(frozen=True)
class Slurm:
    """The cluster; its files are in `folder`."""

    folder: Path

    @property
    def environment(self):
        bin_folder = str(Path(sys.executable).parent)
        return {
            **os.environ,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": os.pathsep.join((bin_folder, os.environ["PATH"])),
        }

    def begin(self, *words, environment=None, program="srun"):
        """Start srun, or another program, with these words."""
        return subprocess.Popen(
            [program, *map(str, words)],
            env={**self.environment, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *words, environment=None, timeout_s=120.0) -> Ran:
        """What srun prints with these words."""
        return ended(self.begin(*words, environment=environment), timeout_s)

    def batch(self, *words, timeout_s=120.0) -> str:
        """Run a batch script with these words of sbatch to its end; return its state and code.

        `sbatch --wait` looks after 2 s, 6 s, 14 s.
        """
        job = ended(self.begin("--parsable", *words, program="sbatch"), timeout_s).stdout.strip()
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            shown = ended(self.begin("show", "job", job, program="scontrol"), timeout_s).stdout
            found = re.search(r"JobState=(\w+) [\s\S]* ExitCode=(\S+)", shown)
            if found and found[1] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                return f"{found[1]} {found[2]}"
            time.sleep(0.1)
        raise AssertionError(f"job {job} did not end within {timeout_s} s")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """SLURM, running, with a host name for each node."""
    own_name = 'hostname "$0"; exec "$@"'
    nodes = {name: ("unshare", "--uts", "sh", "-c", own_name, name) for name in NODES}
    with running(tmp_path_factory.mktemp("slurm"), nodes) as made:
        yield made


@contextlib.contextmanager
def running(folder, nodes):
    """SLURM of nodes by name, each with the words before the command of its slurmd.

    Skips by name where SLURM is not to be had.
    """
    needs("root", *TOOLS)  # root gives nodes host names
    made = Slurm(folder)
    for name in ("state", *(f"{kind}.{node}" for kind in ("spool", "tmp") for node in nodes)):
        (folder / name).mkdir()
    controller, *ports = free_ports(1 + len(nodes))
    text = CONFIGURATION.format(folder=folder, port=controller, names=",".join(nodes))
    text += "".join(NODE.format(*node, CPUS) for node in zip(nodes, ports, strict=True))
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text(CGROUPS)
    with contextlib.ExitStack() as stack:
        for name, command in daemons(folder, nodes).items():
            log = stack.enter_context((folder / f"{name}.out").open("a"))
            one = subprocess.Popen(command, env=made.environment, stdout=log, stderr=log)
            stack.callback(stop, one)
            if name == "munged":
                until((folder / "munge.sock").exists, name, folder)
        until(lambda: idle(made) == len(nodes), "SLURM", folder)
        yield made


def daemons(folder, nodes):
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    names = {"key-file": key, "seed-file": folder / "munged.seed"}
    names |= {"socket": folder / "munge.sock", "pid-file": folder / "munged.pid"}
    options = [f"--{name}={path}" for name, path in names.items()]
    conf = ("-D", "-f", str(folder / "slurm.conf"))
    return {
        "munged": ("munged", "--foreground", "--force", *options),
        "slurmctld": ("slurmctld", *conf),
        **{name: (*before, "slurmd", *conf, "-N", name) for name, before in nodes.items()},
    }


def idle(made):
    command = ["sinfo", "--noheader", "--states=idle", "--Node", "--format=%N"]
    told = subprocess.run(
        command, env=made.environment, capture_output=True, text=True, timeout=30, check=False
    )
    return len(told.stdout.split())


def until(holds, what, folder):
    end = time.monotonic() + START_S
    while not holds():
        if time.monotonic() > end:
            logs = [path.read_text()[-1500:] for path in sorted(folder.glob("*.log"))]
            raise AssertionError(f"{what} did not start within {START_S} s:\n" + "\n".join(logs))
        time.sleep(0.2)


def stop(process):
    process.terminate()
    try:
        process.wait(3)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_ports(count):
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in socks]
