"""`tccl verify` of a cluster's plan over hosts in network namespaces: real collectives by gloo."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tccl_py.experiments.record import Verification
from tccl_py.nccl.settings import Settings
from tccl_py.plan.directory import write_plan
from tests.cluster_plans import LOCAL, ONE, PAIR, cluster_plan
from tests.namespaces import ended, namespaces_in
from tests.processes import alive, children
from tests.skips import mark_needs

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.timeout(400),
    mark_needs("torch"),
]
HOSTS, ORDER = ("h0", "h1"), ("h1", "h0")
"""Ranks follow the plan's hosts, not the launcher's: h1 is not the controller's."""
QUICK = ("--backend", "host", "--sizes", "4K", "--rounds", "6", "--seconds", "0.2")


@pytest.fixture(scope="module")
def namespaces(tmp_path_factory):
    """Hosts whose links let checks of large messages pass without waiting."""
    folder = tmp_path_factory.mktemp("fast")
    with namespaces_in(folder, link_gbps=2.0, uplink_gbps=2.0) as made:
        yield made


@pytest.fixture
def directory(tmp_path):
    """The plan of two hosts, one with two GPUs."""
    machines = {"h0": PAIR, "h1": ONE}
    chains = {"h0": ((0, (1, 0), 1),), "h1": ((0, (0,), 0),)}
    plan = cluster_plan(
        list(machines.items()),
        chains,
        order=ORDER,
        settings=Settings(channels=2, socket_ifname=("eth0",), **LOCAL),
    )
    place = tmp_path / "plan"
    place.mkdir()
    write_plan(plan, place)
    return place


@pytest.fixture
def stuck(tmp_path):
    """Variables by which ranks import a torch at once, in which they stay: what becomes of them
    does not depend on it."""
    package = tmp_path / "stuck" / "torch"
    (package / "distributed").mkdir(parents=True)
    text = "import time\n\ndef __getattr__(name):\n    time.sleep(600)\n"
    for place in (package, package / "distributed"):
        (place / "__init__.py").write_text(text)
    return {"PYTHONPATH": str(package.parent)}


@contextlib.contextmanager
def under_way(hosts, directory, variables):
    """A verification whose ranks run."""
    words = ("verify", str(directory), "--backend", "host", "--seconds", "600", "--no-checks")
    process = hosts.start(*words, hosts=HOSTS, environment=variables)
    until = time.monotonic() + 120
    # Three ranks, and on each host what they are forks of.
    while len(ranks_alive(hosts)) < 5 and time.monotonic() < until:
        time.sleep(0.1)
    assert len(ranks_alive(hosts)) >= 5
    yield process
    until = time.monotonic() + 60
    while ranks_alive(hosts) and time.monotonic() < until:
        time.sleep(0.1)
    assert not ranks_alive(hosts)
    assert not (directory / "verify.json").exists()


def ranks_alive(hosts):
    """Rank processes of jobs on these hosts, and what they are forks of."""
    found, place = [], str(hosts.directory).encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            variables = path.with_name("environ").read_bytes()
        except OSError:
            continue
        # Their folders are where TMPDIR says.
        if b"tccl_py.rank_processes.forkserver" in words and place in variables:
            found.append(path.parent.name)
    return found


def test_collectives_of_all_hosts_are_checked_and_timed(namespaces, directory):
    ran = namespaces.run("verify", str(directory), *QUICK, "--json", hosts=HOSTS, timeout_s=300)
    assert ran.code in (0, 1), ran.stderr
    told = json.loads(ran.stdout)
    assert told["machine"].startswith("2 hosts")
    assert tuple(told["hosts"]) == ORDER
    default, graph = told["arms"]
    assert (graph["failure"], graph["wrong"], graph["rings"]) == ("", [], None)
    assert default["checked"] == graph["checked"] > 500
    assert [one["bytes"] for one in graph["sizes"]] == [4096]
    assert "a dry run over gloo" in ran.stderr
    kept = Verification.load(directory)
    # Three ranks, in each of whose batches something was timed, in every job.
    assert {len(sizes[0]) for sizes in kept.raw} == {3}
    assert kept.judged.environment["NCCL_GRAPH_FILE"].endswith("/nccl/hosts/HOST.xml")
    assert not ranks_alive(namespaces)


def test_groups_of_ranks_over_hosts_are_checked_and_timed(namespaces, directory, tmp_path):
    rows = [
        {"collective": name, "dtype": "float32", "bytes": 4096, "groups": groups, "calls": 2}
        for name in ("all_reduce", "send", "all_to_all")
        for groups in ([[2, 0]], [[0, 1, 2]])
        if (name, len(groups[0])) != ("send", 3)
    ]
    workload = {"name": "all", "source": "a test", "ranks": 3, "rows": rows, "format_version": 1}
    file = tmp_path / "job.json"
    file.write_text(json.dumps(workload))
    words = ("verify", str(directory), *QUICK, "--workload", str(file), "--json")
    ran = namespaces.run(*words, hosts=HOSTS, timeout_s=300)
    assert ran.code in (0, 1), ran.stderr
    told = json.loads(ran.stdout)["workload"]
    timed = {(row["collective"], len(row["groups"])): row["seconds"] for row in told["rows"]}
    # A graph file fails communicators over fewer GPUs.
    assert set(told["choices"]) == {"default"}
    assert len(timed) == 5 and all(seconds["default"] > 0 for seconds in timed.values())
    assert not any(arm["wrong"] for arm in json.loads(ran.stdout)["arms"])


def test_hosts_that_are_not_the_plans_are_refused(namespaces, directory):
    ran = namespaces.run("verify", str(directory), *QUICK, hosts=("h0", "h2"), timeout_s=120)
    assert (ran.code, ran.stdout) == (2, "")
    assert "host h1: is in the plan" in ran.stderr
    assert not (directory / "verify.json").exists()


def test_an_interrupt_leaves_no_rank_and_no_file(namespaces, directory, stuck):
    with under_way(namespaces, directory, stuck) as process:
        os.killpg(process.pid, signal.SIGINT)
        ran = ended(process, 120)
        assert ran.code != 0
        assert ran.stdout == ""


def test_a_killed_launcher_leaves_no_process(directory, stuck, tmp_path):
    # Without a second machine's daemon, nobody but the controller can notice.
    wrapper = tmp_path / "rank.sh"
    wrapper.write_text(
        """#!/bin/sh
exec unshare --uts sh -c 'hostname h'$OMPI_COMM_WORLD_RANK'; exec "$@"' rank "$@"
"""
    )
    wrapper.chmod(0o755)
    launcher = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", str(wrapper))
    words = ("verify", str(directory), "--backend", "host", "--seconds", "600", "--no-checks")
    process = subprocess.Popen(
        [*launcher, sys.executable, "-m", "tccl_py", *words],
        env={**os.environ, **stuck},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    ranks = []
    until = time.monotonic() + 60
    # Each rank has started something: MPI has ended, and hosts work.
    while (len(ranks) < 2 or not all(map(children, ranks))) and time.monotonic() < until:
        time.sleep(0.1)
        ranks = children(process.pid)
    process.kill()
    process.wait()
    until = time.monotonic() + 30
    while any(map(alive, ranks)) and time.monotonic() < until:
        time.sleep(0.1)
    left = [rank for rank in ranks if alive(rank)]
    for rank in left:
        os.kill(rank, signal.SIGKILL)
    assert (len(ranks), left) == (2, [])


def test_a_host_that_dies_is_named_and_leaves_no_rank(namespaces, directory, stuck):
    with under_way(namespaces, directory, stuck) as process:
        os.kill(namespaces.rank_pid("h1"), signal.SIGKILL)
        ran = ended(process, 120)
        assert ran.code != 0
        assert "host h1" in ran.stderr
