"""Four hosts on one machine: network namespaces with links of known rates, and MPI across them.

    h0 --- 0.1 GB/s ----+
    h1 === 2 links =====+ rack a ---- uplink, 0.04 GB/s ---- rack b +--- h2
       of 0.1 GB/s                                                  +--- h3

Every host has a name, a clock and a sysfs of its own, a network that only MPI uses (`mgmt0`) and
the links that are measured (`eth0`, on h1 also `eth1`), shaped in both directions. A host has no
memory or cores of its own: all share this machine's.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.skips import needs

HOSTS = ("h0", "h1", "h2", "h3")
RACKS = {"h0": "rack-a", "h1": "rack-a", "h2": "rack-b", "h3": "rack-b"}
INTERFACES = {"h0": ("eth0",), "h1": ("eth0", "eth1"), "h2": ("eth0",), "h3": ("eth0",)}
LINK_GBPS = 0.1
UPLINK_GBPS = 0.04
"""So little that cores that are busy with other work do not slow it down."""
PAYLOAD = 1448 / 1514
"""What is left of a full frame without the headers of Ethernet, IP and TCP with time stamps."""
CLOCK_AHEAD_S = {"h0": 0, "h1": 1000, "h2": 50_000, "h3": 7}
"""By how much each host's CLOCK_MONOTONIC is ahead of this machine's."""
MANAGEMENT = "mgmt0"
_BURST = "96k"
"""More than a packet before it is cut: cutting takes a core more time than the link has."""
_QUEUE = "30ms"
_LAUNCHERS = (b"mpirun", b"prterun", b"prted")
_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How a command ended, and what it said."""

    code: int
    stdout: str
    stderr: str


@dataclass(kw_only=True)
class Namespaces:
    """The hosts; `run` runs a `tccl` command on some of them by mpirun."""

    prefix: str
    directory: Path
    hosts: tuple[str, ...] = HOSTS
    interfaces: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: dict(INTERFACES))
    link_gbps: float = LINK_GBPS
    uplink_gbps: float = UPLINK_GBPS
    cables: tuple[tuple[str, str, str, str], ...] = ()
    """In the place of racks: two hosts, each with its interface, a subnet for each cable."""

    def received(self, host, name):
        """The bytes that an interface of a host has received."""
        path = f"/sys/class/net/{name}/statistics/rx_bytes"
        return int(_do(*self.command(host, "cat", path)).stdout)

    def namespace(self, host):
        return f"{self.prefix}{host}"

    def command(self, host, *arguments):
        """A command line that runs another on a host."""
        return [str(self.directory / "enter"), host, *arguments]

    def tc(self, host, *arguments):
        """Change a host's shaping: `tc` in its namespace."""
        _do("tc", "-n", self.namespace(host), *arguments)

    def ip(self, host, *arguments):
        """Change a host's interfaces: `ip` in its namespace."""
        _do("ip", "-n", self.namespace(host), *arguments)

    @contextlib.contextmanager
    def other_rates(self, links, uplink_gbps):
        """Hosts' first links, by name, and the uplink have other rates, in both directions."""
        for rates, uplink in (
            (links, uplink_gbps),
            (dict.fromkeys(links, self.link_gbps), self.uplink_gbps),
        ):
            for host, gbps in rates.items():
                name = self.interfaces[host][0]
                self.tc(host, "qdisc", "replace", "dev", name, *_shaped(gbps))
                self.tc("net", "qdisc", "replace", "dev", f"{host}-{name}", *_shaped(gbps))
            for rack in "ab":
                self.tc("net", "qdisc", "replace", "dev", f"up-{rack}", *_shaped(uplink))
            if rates is links:
                yield

    @contextlib.contextmanager
    def renamed(self, host, name):
        """A host calls itself by another name than the launcher does."""
        file = self.directory / f"name-{host}"
        file.write_text(name)
        try:
            yield
        finally:
            file.unlink()

    def pids(self, host):
        """Processes that run on a host, the launcher's daemon among them."""
        done = _do("ip", "netns", "pids", self.namespace(host))
        return [int(pid) for pid in done.stdout.split()]

    def rank_pid(self, host):
        """The rank that runs on a host: the one whose parent is the launcher."""
        for pid in self.pids(host):
            with contextlib.suppress(OSError, ValueError, IndexError):
                parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
                launcher = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")[0]
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if launcher.rpartition(b"/")[2] in _LAUNCHERS and b"tccl_py" in command:
                    return pid
        return None

    def mpirun(self, *arguments, hosts=None, ranks=None, options=()):
        """The command line of mpirun for a `tccl` command, one rank a host unless said."""
        hosts = self.hosts if hosts is None else tuple(hosts)
        slots = 1 if ranks is None else -(-ranks // len(hosts))
        listed = ",".join(f"{host}:{slots}" for host in hosts)
        return self.command(
            hosts[0],
            shutil.which("mpirun"),
            "--allow-run-as-root",
            "--host",
            listed,
            "-n",
            str(ranks or len(hosts)),
            # Ranks are no jobs of their own cores: workers pin themselves.
            "--bind-to",
            "none",
            "--prtemca",
            "plm_ssh_agent",
            str(self.directory / "enter"),
            "--prtemca",
            "prte_if_include",
            MANAGEMENT,
            "--mca",
            "btl_tcp_if_include",
            MANAGEMENT,
            *options,
            sys.executable,
            "-m",
            "tccl_py",
            *arguments,
        )

    def start(self, *arguments, hosts=None, ranks=None, options=(), environment=None):
        """Start a `tccl` command under mpirun; the caller waits for it."""
        return subprocess.Popen(
            self.mpirun(*arguments, hosts=hosts, ranks=ranks, options=options),
            # What launchers leave where they are killed goes with the hosts.
            # A rank that a signal ends says where it was.
            env={
                **os.environ,
                "TMPDIR": str(self.directory),
                "PYTHONFAULTHANDLER": "1",
                **(environment or {}),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(
        self, *arguments, hosts=None, ranks=None, options=(), environment=None, timeout_s=150.0
    ):
        """Run a `tccl` command under mpirun on these hosts, or all, to its end."""
        process = self.start(
            *arguments, hosts=hosts, ranks=ranks, options=options, environment=environment
        )
        return ended(process, timeout_s)


def near(rate_gbps):
    """Rates that are this one, less what busy cores take; another order has half of it at most."""
    return pytest.approx(0.85 * rate_gbps, rel=0.35)


def ended(process, timeout_s=150.0):
    """Wait for a started command; one that hangs is ended with all it started."""
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(f"not within {timeout_s} s:\n{stdout}\n{stderr}") from None
    if process.returncode in (126, 127) or "Traceback (most recent call last)" in stderr:
        # No busy machine excuses this, as it may an AssertionError.
        raise RuntimeError(f"exit code {process.returncode}:\n{stderr}")
    return Ran(code=process.returncode, stdout=stdout, stderr=stderr)


def _do(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)


_ENTER = """#!/bin/bash
# {prefix}: run a command on a host; what mpirun takes for ssh.
host=$1; shift
declare -A ahead=({ahead})
exec nsenter --net=/run/netns/{prefix}$host unshare --uts --mount --time \
    --monotonic "${{ahead[$host]}}" --fork --kill-child=KILL \
    bash -c 'hostname "$(cat {directory}/name-$0 2>/dev/null || echo "$0")"
        mount -t sysfs sysfs /sys; {run}' "$host" "$@"
"""
# ssh hands its arguments to a shell as one text; everything else is run as it is.
_RUN = 'if [ "$#" = 1 ]; then eval "$1"; else case "$*" in *prted*) eval "$*";; *) "$@";; esac; fi'


def _shaped(rate_gbps):
    rate = f"{round(rate_gbps * 8e9)}bit"
    return ("root", "tbf", "rate", rate, "burst", _BURST, "latency", _QUEUE)


def _build(made):
    """Make the switches, the hosts and the links between them."""
    switch = made.namespace("net")
    _do("ip", "netns", "add", switch)
    racks = () if made.cables else ("rack-a", "rack-b")
    for bridge in ("mgmt", *racks):
        _do("ip", "-n", switch, "link", "add", bridge, "type", "bridge")
        _do("ip", "-n", switch, "link", "set", bridge, "up")
    # 1. The uplink between the racks, slow in both directions.
    if racks:
        _do("ip", "-n", switch, "link", "add", "up-a", "type", "veth", "peer", "name", "up-b")
    for rack in racks:
        up = rack.replace("rack", "up")
        _do("ip", "-n", switch, "link", "set", up, "master", rack, "up")
        _do("tc", "-n", switch, "qdisc", "add", "dev", up, *_shaped(made.uplink_gbps))
    # 2. The hosts.
    for number, host in enumerate(made.hosts):
        space = made.namespace(host)
        _do("ip", "netns", "add", space)
        made.ip(host, "link", "set", "lo", "up")
        for setting in ("arp_ignore=1", "arp_announce=2", "rp_filter=0"):
            # Two links in one network: each answers for its own address alone.
            name, value = setting.split("=")
            key = f"net.ipv4.conf.all.{name}={value}"
            _do("ip", "netns", "exec", space, "sysctl", "-qw", key)
        links = [(MANAGEMENT, "mgmt", f"10.99.0.{number + 1}/24", None)]
        links += [
            (name, RACKS[host], f"10.77.{index}.{number + 1}/16", made.link_gbps)
            for index, name in enumerate(() if made.cables else made.interfaces[host])
        ]
        for name, bridge, address, rate in links:
            port = f"{host}-{name}"
            _do(
                *("ip", "-n", switch, "link", "add", port, "type", "veth"),
                *("peer", "name", name, "netns", space),
            )
            _do("ip", "-n", switch, "link", "set", port, "master", bridge, "up")
            made.ip(host, "addr", "add", address, "dev", name)
            made.ip(host, "link", "set", name, "up")
            if rate is not None:
                _do("tc", "-n", switch, "qdisc", "add", "dev", port, *_shaped(rate))
                made.tc(host, "qdisc", "add", "dev", name, *_shaped(rate))
    # 3. Cables, each between two hosts.
    for number, (host, name, other, far) in enumerate(made.cables):
        ends = (host, name), (other, far)
        _do(
            *("ip", "link", "add", name, "netns", made.namespace(host), "type", "veth"),
            *("peer", "name", far, "netns", made.namespace(other)),
        )
        for at, (end, interface) in enumerate(ends):
            made.ip(end, "addr", "add", f"10.50.{number}.{at + 1}/24", "dev", interface)
            made.ip(end, "link", "set", interface, "up")
            made.tc(end, "qdisc", "add", "dev", interface, *_shaped(made.link_gbps))
    # The kernel tells of carriers once a second.
    until = time.monotonic() + 10
    for host in made.hosts if made.cables else ():
        show = ("ip", "-n", made.namespace(host), "-br", "link", "show", "type", "veth")
        while " DOWN " in _do(*show).stdout and time.monotonic() < until:
            time.sleep(0.05)


def _write_enter(made):
    ahead = " ".join(f"[{host}]={CLOCK_AHEAD_S.get(host, 0)}" for host in made.hosts)
    script = made.directory / "enter"
    script.write_text(
        _ENTER.format(prefix=made.prefix, ahead=ahead, directory=made.directory, run=_RUN)
    )
    script.chmod(0o755)


def _remove(made):
    for host in ("net", *made.hosts):
        subprocess.run(
            ["ip", "netns", "del", made.namespace(host)], check=False, capture_output=True
        )


@contextlib.contextmanager
def namespaces_in(directory, **more):
    """The hosts, while the context lasts; `more` are fields of theirs, as `link_gbps`.

    Raises:
        pytest.skip.Exception: the kernel, or what is installed, does not allow it.
    """
    needs("root", "ip", "tc", "nsenter", "unshare", "sysctl", "mpirun")
    made = Namespaces(
        prefix=f"tccl{os.getpid()}n{next(_numbers)}", directory=Path(directory), **more
    )
    try:
        try:
            _build(made)
            _write_enter(made)
            _do(*made.command(made.hosts[0], "true"))
        except subprocess.CalledProcessError as error:
            said = " ".join(error.stderr.split())
            pytest.skip(f"namespaces: the kernel does not allow {' '.join(error.cmd)}: {said}")
        yield made
    finally:
        _end_processes(made)
        _remove(made)


def _end_processes(made):
    """Nothing of a test that failed stays behind in the hosts."""
    for host in made.hosts:
        with contextlib.suppress(subprocess.CalledProcessError):
            for pid in made.pids(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 5
    while time.monotonic() < until:
        with contextlib.suppress(subprocess.CalledProcessError):
            if not any(made.pids(host) for host in made.hosts):
                return
        time.sleep(0.05)


@pytest.fixture(scope="session")
def namespaces(tmp_path_factory):
    """The hosts, shared by the tests of one process; who changes one, changes it back."""
    with namespaces_in(tmp_path_factory.mktemp("namespaces")) as made:
        yield made
