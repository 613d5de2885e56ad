"""Hosts in network namespaces: MPI runs across them, TCP transfers are measured for real."""

import contextlib
import itertools
import json
import os
import signal
import time

import pytest

from tests.namespaces import (
    CLOCK_AHEAD_S,
    LINK_GBPS,
    PAYLOAD,
    UPLINK_GBPS,
    ended,
    namespaces,  # noqa: F401 (a fixture)
)
from tests.skips import needs_idle_cores, unless_busy

pytestmark = pytest.mark.mpi

FAST = LINK_GBPS * PAYLOAD
SLOW = UPLINK_GBPS * PAYLOAD
TOLERANCE = 0.1
SKEW_US = 100
WITHIN_S = 150
"""A stopped host is noticed after 10 s; a busy machine takes a while for the rest."""


def over(sender, receiver, *, nics=(0, 0)):
    """Host memory to host memory, through these NICs."""
    out, into = nics
    return (
        f"{sender}.C0->{sender}.N{out}->{receiver}.N{into}->{receiver}.N{into}->{receiver}.C0"
        "{blocks=1,fifo=128K}"
    )


WORDS = ("measure", "--backend", "host", "--devices", "2", "--interfaces")
MEASURE = (*WORDS, "eth0,eth1")
ALONE = over("h0", "h1")
ACROSS = over("h0", "h2")
SHARED = f"{over('h0', 'h2')} {over('h1', 'h3')}"
BESIDE = f"{over('h0', 'h1')} {over('h2', 'h3')}"
TWO_LINKS = f"{over('h1', 'h0')} {over('h2', 'h1', nics=(0, 1))} {over('h0', 'h1')}"
GPUS = "h0.G0->h0.G0->h0.C0->h0.N0->h1.N1->h1.N1->h1.C0->h1.G1->h1.G1{blocks=1,fifo=128K}"


def measure(namespaces, *sets):  # noqa: F811
    """What sets have, by one command."""
    ran = namespaces.run(*MEASURE, "--target", "0.1", "--json", *sets, timeout_s=240)
    assert ran.code == 0, ran.stderr
    # Were it printed by every rank, it would not be one document.
    return {entry["set"]: entry for entry in json.loads(ran.stdout)}


@pytest.fixture(scope="module")
def measured(namespaces):  # noqa: F811
    """Sets over all hosts, by one command."""
    needs_idle_cores()
    with unless_busy(workers=4):
        return measure(namespaces, ALONE, ACROSS, SHARED, BESIDE, TWO_LINKS, GPUS)


def has(entry, *rates):
    """Check rates, within a tolerance and the widths of the intervals that were measured."""
    for gbps, wanted, width in zip(entry["gbps"], rates, entry["spread"], strict=True):
        assert gbps == pytest.approx(wanted, rel=TOLERANCE + width), entry


def test_a_link_has_the_rate_that_it_is_shaped_to(measured):
    with unless_busy(workers=4):
        has(measured[ALONE], FAST)
        has(measured[ACROSS], SLOW)


def test_hosts_behind_one_uplink_share_it(measured):
    together = measured[SHARED]
    # They take turns, and medians of what they have do not add up to what there is.
    within = 2 * TOLERANCE + max(together["spread"])
    with unless_busy(workers=4):
        assert together["total_gbps"] == pytest.approx(SLOW, rel=within)
        assert max(together["gbps"]) < 0.8 * SLOW
        has(measured[BESIDE], FAST, FAST)


def test_a_host_with_two_links_has_both(measured):
    with unless_busy(workers=4):
        has(measured[TWO_LINKS], FAST, SLOW, FAST)


def test_devices_pass_data_on_to_the_network(measured):
    # Six processes on two cores may be slower than the link, and nothing is quicker.
    (rate,) = measured[GPUS]["gbps"]
    assert 0 < rate < FAST * (1 + TOLERANCE)


def test_hosts_start_together_by_clocks_that_are_apart(measured, namespaces):  # noqa: F811
    apart = [abs(a - b) for a, b in itertools.combinations(CLOCK_AHEAD_S.values(), 2)]
    skews_s = [entry["skew_us"] / 1e6 for entry in measured.values()]
    errors_s = [entry["skew_error_us"] / 1e6 for entry in measured.values()]
    assert max(skews_s) < min(apart) / 10
    assert 0 < min(errors_s) <= max(errors_s) < min(apart) / 10


def test_most_starts_are_not_delayed(measured):
    for entry in (measured[ALONE], measured[ACROSS]):
        error = entry["skew_error_us"]
        with unless_busy(workers=4):
            assert error < 10 * SKEW_US
            assert entry["skew_us"] <= SKEW_US + error


def test_several_ranks_on_a_host_wait_for_its_agent(namespaces):  # noqa: F811
    words = (*MEASURE, "--target", "0.1", "--json", ALONE)
    with unless_busy(workers=4):
        ran = namespaces.run(*words, hosts=("h0", "h1"), ranks=4)
        assert ran.code == 0, ran.stderr
    assert len(json.loads(ran.stdout)) == 1


# What is refused


def refused(ran):
    """The sentences of a command that was refused: the launcher has its own."""
    assert ran.code == 2, ran.stderr
    assert ran.stdout == ""
    return [line for line in ran.stderr.splitlines() if line.startswith("tccl: ")]


@pytest.fixture(scope="module")
def both(namespaces, tmp_path_factory):  # noqa: F811
    """Two refused commands at a time: of a host without its link, and with a host's name twice."""
    journal = tmp_path_factory.mktemp("refused") / "journal.jsonl"
    namespaces.ip("h1", "link", "set", "eth1", "down")
    try:
        with namespaces.renamed("h2", "h1"):
            words = (*MEASURE, "--journal", str(journal), ALONE)
            down = namespaces.start(*words, hosts=("h0", "h1"))
            twice = namespaces.start(*MEASURE, ALONE, hosts=("h0", "h1", "h2"))
            return ended(down), ended(twice), journal
    finally:
        namespaces.ip("h1", "link", "set", "eth1", "up")


def test_an_interface_that_is_down_is_refused_by_its_host(both):
    ran, _, journal = both
    (said,) = refused(ran)
    assert said.startswith("tccl: host h1: interface eth1 is")
    assert not journal.exists()


def test_two_hosts_of_one_name_are_refused(both):
    _, ran, _ = both
    (said,) = refused(ran)
    assert said.startswith("tccl: host h1: ")
    assert "of ranks 1 and 2" in said


# What is lost


@contextlib.contextmanager
def under_way(namespaces, journal, hosts=("h0", "h1")):  # noqa: F811
    """A long measurement over two hosts, which has measured something."""
    # Other sets for a while: each has another FIFO.
    sets = [over(*hosts).replace("128K", f"{size}K") for size in range(64, 512, 4)]
    process = namespaces.start(*WORDS, "eth0", "--journal", str(journal), *sets, hosts=hosts)
    try:
        until = time.monotonic() + WITHIN_S
        while not journal.exists() or len(journal.read_bytes().splitlines()) < 2:
            assert time.monotonic() < until, "nothing is measured"
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def nothing_is_left(namespaces, hosts=("h0", "h1")):  # noqa: F811
    until = time.monotonic() + WITHIN_S
    while any(namespaces.pids(host) for host in hosts):
        assert time.monotonic() < until, "processes are left"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def stalled(namespaces, tmp_path_factory):  # noqa: F811
    """A measurement, and its journal, one of whose ranks stands still: that takes 10 s to tell."""
    journal = tmp_path_factory.mktemp("stalled") / "journal.jsonl"
    with under_way(namespaces, journal, ("h2", "h3")) as process:
        os.kill(namespaces.rank_pid("h3"), signal.SIGSTOP)
        yield process, journal


def named(ran, host, what):
    """A host is named, once, with what became of it."""
    # Which code it is where a rank was killed, the launcher says.
    assert ran.code != 0
    said = [line for line in ran.stderr.splitlines() if line.startswith("tccl: host ")]
    assert len(said) == 1, ran.stderr
    assert said[0].startswith(f"tccl: host {host}: ")
    assert what in said[0]


def keeps(journal, machine):
    """The journal has what was measured before."""
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert lines[0]["machine"] == machine
    assert len(lines) >= 2


def test_a_rank_that_dies_is_named(stalled, namespaces, tmp_path):  # noqa: F811
    journal = tmp_path / "journal.jsonl"
    with under_way(namespaces, journal) as process:
        os.kill(namespaces.rank_pid("h1"), signal.SIGKILL)
        ran = ended(process, WITHIN_S)
    named(ran, "h1", "has died")
    keeps(journal, "h0,h1")
    nothing_is_left(namespaces)


def test_an_interrupt_leaves_nothing(stalled, namespaces, tmp_path):  # noqa: F811
    with under_way(namespaces, tmp_path / "journal.jsonl") as process:
        os.killpg(process.pid, signal.SIGINT)
        ran = ended(process, WITHIN_S)
    assert ran.code != 0
    assert "has died" not in ran.stderr
    nothing_is_left(namespaces)


def test_a_rank_that_stalls_is_named(stalled, namespaces):  # noqa: F811
    process, journal = stalled
    named(ended(process, WITHIN_S), "h3", "has said nothing for 10 s")
    keeps(journal, "h2,h3")
    nothing_is_left(namespaces, ("h2", "h3"))
