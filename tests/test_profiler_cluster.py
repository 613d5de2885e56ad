import contextlib
import errno
import itertools
import os
import queue
import signal
import socket
import struct
import sys
import threading
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from tccl_profiler import protocol
from tccl_profiler.clocks import ClockReading, HostClock
from tccl_profiler.cluster import facts
from tccl_profiler.cluster.agent import Agent, Ran
from tccl_profiler.cluster.agents import Agents, ClusterPool, HostLost
from tccl_profiler.cluster.facts import (
    HostFacts,
    Interface,
    check_hosts,
    host_facts,
    interfaces_here,
    with_interfaces,
)
from tccl_profiler.cluster.job import Job, PeerInfo, own_info, rendezvous
from tccl_profiler.cluster.session import ClusterSession
from tccl_profiler.messages import Endpoint, LinkStep
from tccl_profiler.pool import RunResult, RunSpec
from tccl_profiler.precision import Stopping, WindowLimits
from tccl_profiler.profiler import Options
from tccl_profiler.protocol import (
    Connection,
    ConnectionClosed,
    Envelope,
    Failed,
    LinkLost,
    Question,
    Returned,
    Sign,
    Timeouts,
    WorkerLost,
    answer_call,
    call_of,
    result_of,
)
from tccl_profiler.shared_memory import RECORD
from tccl_py.errors import InputError, MeasurementError, SourceLostError
from tccl_py.files import encode_json
from tccl_py.health.doctor import Diagnosis
from tccl_py.launchers import in_job, only_serves
from tccl_py.model.links import LinkFact, PairProof, Proof
from tccl_py.model.machine import Fingerprint, Knowledge, Nic
from tccl_py.model.transfer import parse_set
from tests.processes import children
from tests.profiler_clusters import Checked, FakeJob, agent_in_thread, agents_in_processes, pair
from tests.profiler_pools import measured_or_failed, stopping, workers_of
from tests.skips import unless_busy
from tests.toy import toy_machine

# Whether this is a job


@pytest.mark.parametrize(
    ("environment", "answer"),
    [
        ({}, False),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"PMI_SIZE": "8"}, True),
        ({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}, False),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0"}, True),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, False),
        ({"PMIX_RANK": "0"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "many"}, False),
    ],
)
def test_launchers_are_known_by_what_they_set(environment, answer):
    assert in_job(environment) is answer


@pytest.mark.parametrize(
    ("arguments", "environment", "answer"),
    [
        (["measure", "SET"], {"PMI_SIZE": "2", "PMI_RANK": "1"}, True),
        (["plan", "DIR"], {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, True),
        (["plan", "DIR"], {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, False),
        (["measure", "SET"], {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, True),
        (["measure", "SET"], {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, False),
        (["measure", "SET"], {}, False),
        (["measure", "SET", "--simulate=M"], {"PMI_SIZE": "2", "PMI_RANK": "1"}, False),
        (["measure", "--help"], {"PMI_SIZE": "2", "PMI_RANK": "1"}, False),
        (["show", "DIR"], {"PMI_SIZE": "2", "PMI_RANK": "1"}, False),
        ([], {"PMI_SIZE": "2", "PMI_RANK": "1"}, False),
    ],
)
def test_other_ranks_of_a_job_do_not_look_at_the_command(arguments, environment, answer):
    assert only_serves(arguments, environment) is answer


# How ranks meet


class _Post:
    """Ranks of one process: a queue for each pair."""

    def __init__(self, rank, size, queues):
        self.rank, self.size, self._queues = rank, size, queues
        self.finished = False

    def send(self, rank, data):
        self._queues[self.rank, rank].put(data)

    def poll(self, rank):
        try:
            return self._queues[rank, self.rank].get_nowait()
        except queue.Empty:
            return None

    def finish(self):
        self.finished = True


def _posts(size):
    queues = {pair: queue.Queue() for pair in itertools.product(range(size), repeat=2)}
    return [_Post(rank, size, queues) for rank in range(size)]


def _met_together(posts):
    found = {}
    threads = [
        threading.Thread(target=lambda post=post: found.update({post.rank: rendezvous(post)}))
        for post in posts[1:]
    ]
    for thread in threads:
        thread.start()
    found[0] = rendezvous(posts[0])
    for thread in threads:
        thread.join(10)
    return found


def test_ranks_meet_and_end_what_carried_their_messages(monkeypatch):
    monkeypatch.setattr("tccl_profiler.cluster.job.addresses", lambda: ("127.0.0.1",))
    posts = _posts(3)
    found = _met_together(posts)
    assert [post.finished for post in posts] == [True] * 3
    assert found[0].peers == {rank: own_info() for rank in range(3)}
    found[0].connections[2].tell(7, Sign.STOP)
    while (envelope := found[2].connections[0].poll()) is None:
        time.sleep(0.01)
    assert envelope == Envelope(7, Sign.STOP)
    for meeting in found.values():
        for connection in meeting.connections.values():
            connection.close()


def test_a_rank_that_says_nothing_is_named():
    post, _ = _posts(2)
    with pytest.raises(InputError) as caught:
        rendezvous(post, join_s=0.05)
    assert "this MPI job: rank" in str(caught.value)


def test_a_caller_without_the_word_is_not_let_in(monkeypatch):
    monkeypatch.setattr("tccl_profiler.cluster.job.addresses", lambda: ("127.0.0.1",))
    posts = _posts(2)
    posts[1].send(0, msgspec.msgpack.encode(PeerInfo(host="h1", machine="m")))
    found = []
    thread = threading.Thread(target=lambda: found.append(rendezvous(posts[0])))
    thread.start()
    while (data := posts[1].poll(0)) is None:
        time.sleep(0.01)
    invitation = msgspec.msgpack.decode(data, type=Endpoint)
    with contextlib.ExitStack() as stack:
        *silent, stranger, friend = (
            stack.enter_context(socket.create_connection(invitation.addresses[0]))
            for _ in range(60)
        )
        stranger.sendall(b"x" * 16)
        friend.sendall(invitation.token)
        # With a second for each silent caller the controller would give up before.
        thread.join(20)
        assert stranger.recv(1) == silent[0].recv(1) == b""
        (meeting,) = found
        assert list(meeting.connections) == [1]
        meeting.connections[1].close()


def test_a_rank_that_cannot_connect_is_named_by_host(monkeypatch):
    monkeypatch.setattr("tccl_profiler.cluster.job.CONNECT_S", 0.2)
    monkeypatch.setattr("tccl_profiler.cluster.job.addresses", lambda: ("127.0.0.1",))
    posts = _posts(2)
    posts[1].send(0, msgspec.msgpack.encode(PeerInfo(host="far", machine="m")))
    with pytest.raises(InputError, match=r"host far: its rank"):
        rendezvous(posts[0])


# Who sits where


def _seats(*hellos):
    found = dict(enumerate(PeerInfo(host=host, machine=machine) for host, machine in hellos))
    return Job(0, found, {}).hosts


def test_the_lowest_rank_of_each_host_is_its_first():
    seats = _seats(("a", "1"), ("b", "2"), ("a", "1"), ("b", "2"))
    assert list(seats.items()) == [("a", [0, 2]), ("b", [1, 3])]


def test_two_machines_of_one_name_are_refused():
    with pytest.raises(InputError) as caught:
        _seats(("a", "1"), ("b", "2"), ("b", "3"))
    assert "host b: is the" in str(caught.value)


def test_a_name_that_no_file_could_have_is_refused():
    with pytest.raises(InputError, match=r"host 'a/b', rank 1: 'a/b' cannot be a"):
        _seats(("a", "1"), ("a/b", "2"))


# What hosts have in common


PRINT = Fingerprint(gpu_uuids=("u",), driver="570.1", numa_count=1, kernel="6")


def _host(name, **more):
    machine = msgspec.structs.replace(
        toy_machine(gpus=2), nics=(Nic(index=0, name="eth0", parent="C0"),)
    )
    fields = {
        "machine": machine,
        "knowledge": Knowledge(),
        "fingerprint": PRINT,
        "tccl_py": "0.1.0",
        "nccl": "2.27.3",
        "addresses": {0: Interface(name="eth0", address="10.0.0.1", up=True)},
    }
    return HostFacts(name=name, **{**fields, **more})


OLD_DRIVER = msgspec.structs.replace(PRINT, driver="550.2")
REFUSED = {
    # What host b has, and what was asked for.
    "host b: has tccl-py 0.2.0": ({"tccl_py": "0.2.0"}, {}),
    "host b: has the NVIDIA driver 550.2": ({"fingerprint": OLD_DRIVER}, {}),
    "host b: has NCCL none": ({"nccl": "none"}, {}),
    "host c: is in the list": ({}, {"expected": ("a", "b", "c")}),
    "host b: runs a rank": ({}, {"expected": ("a",)}),
    "host b: interface eth0 is down": ({"addresses": {}, "down": ("eth0",)}, {}),
    "host b: interface eth7 is down": ({"down": ("eth7",)}, {"interfaces": ("eth0", "eth7")}),
    "interface eth9: is on no host": ({}, {"interfaces": ("eth0", "eth9")}),
    "host b: has no NIC": ({"addresses": {}}, {}),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_hosts_that_are_no_cluster_are_refused_by_name(sentence):
    other, options = REFUSED[sentence]
    with pytest.raises(InputError) as caught:
        check_hosts([_host("a"), _host("b", **other)], **options)
    assert str(caught.value).startswith(sentence)


def test_one_host_is_no_cluster():
    with pytest.raises(InputError, match="this MPI job: has"):
        check_hosts([_host("a")])


def test_equal_hosts_are_a_cluster_and_an_unused_interface_may_be_down():
    check_hosts([_host("a", down=("wlan0",)), _host("b")], expected=("b", "a"))


def test_an_interface_has_its_address_and_state():
    found = interfaces_here()["lo"]
    assert (found.address, found.up) == ("127.0.0.1", True)


def test_an_address_that_is_another_hosts_too_is_none(monkeypatch, tmp_path):
    rows = (
        "05 03 40 00 c8 eth0",
        "06 04 40 00 c0 eth1",
        "07 04 40 00 c4 eth1",
        "08 05 40 20 80 lo",
    )
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "if_inet6").write_text(
        "".join(f"20010db8{'0' * 22}{row}\n" for row in rows)
    )
    monkeypatch.setattr(facts, "PROC", tmp_path)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(3, "eth0"), (4, "eth1"), (5, "lo")])
    monkeypatch.setattr(facts, "_ioctl", lambda question, name: b"")
    found = {name: interface.address for name, interface in interfaces_here().items()}
    assert found == {"eth0": "", "eth1": "2001:db8::7", "lo": ""}


def test_interfaces_that_are_named_are_the_nics_in_their_order():
    machine = with_interfaces(toy_machine(gpus=2), ("nosuch0", "lo"), host="h0")
    assert [(nic.index, nic.name, nic.parent) for nic in machine.nics] == [(0, "lo", "C0")]


def test_a_host_without_any_of_the_interfaces_is_refused():
    with pytest.raises(InputError, match=r"^host h0: has no"):
        with_interfaces(toy_machine(gpus=2), ("nosuch0",), host="h0")


def test_a_host_says_what_it_is():
    facts = host_facts("h0", backend="host", devices=2, interfaces=("lo",))
    assert facts.devices == ("G0", "G1", "N0")
    assert (facts.addresses[0].name, facts.addresses[0].address) == ("lo", "127.0.0.1")
    assert facts.tccl_py


def test_a_host_without_gpus_says_what_a_job_can_do(monkeypatch):
    def none_here():
        raise InputError("this machine", "no NVIDIA driver answers", "use --nccl-topology FILE")

    monkeypatch.setattr("tccl_py.readers.live.discover_machine", none_here)
    said = r"^host h0: this machine: no NVIDIA driver answers; .* `backend` host for a dry run"
    with pytest.raises(InputError, match=said):
        host_facts("h0", backend="cuda", devices=None, interfaces=())


def test_a_host_without_cupy_says_so_before_its_workers_start(monkeypatch):
    facts = host_facts("h1", backend="host", devices=2, interfaces=("lo",))
    monkeypatch.setattr("tccl_profiler.cluster.agent.host_facts", lambda *_, **__: facts)
    monkeypatch.setattr("tccl_py.readers.live.find_spec", lambda _: None)
    nvml = contextlib.nullcontext(SimpleNamespace(nvmlSystemGetCudaDriverVersion=lambda: 12040))
    monkeypatch.setattr("tccl_py.readers.live.opened_nvml", lambda _: nvml)
    agent = Agent(None, name="h1")
    agent.describe("cuda", None, ())
    with pytest.raises(InputError, match=r"^host h1: cupy-cuda12x: .*`pip install '.\[cuda12\]'`"):
        agent.open(("h1.G0", "h1.G1"), {}, "tcp")


# Clocks


def _reading(at_ms, offset_us, error_us=20):
    return ClockReading(
        at_ns=round(at_ms * 1e6), offset_ns=round(offset_us * 1e3), error_ns=error_us * 1000
    )


def test_a_hosts_time_is_told_both_ways():
    clock = HostClock("h1", now_ns=lambda: 5_000_000_000)
    for at_ms in (0, 1000, 2000, 3000):
        clock.add(_reading(at_ms, 7e6 + at_ms * 0.01))  # 10 ppm fast
    there = clock.there_ns(2_500_000_000)
    here, error = clock.here_ns(there)
    assert abs(here - 2_500_000_000) < 10
    assert abs(there - 2_500_000_000 - 7_000_025_000) < error < 100_000


def test_a_clock_that_jumps_is_named():
    clock = HostClock("h1")
    clock.add(_reading(0, 0))
    clock.add(_reading(1000, 1))
    with pytest.raises(SourceLostError) as caught:
        clock.add(_reading(2000, 5000))
    assert str(caught.value).startswith("host h1: its clock jumped")


def test_a_clock_whose_rate_is_corrected_begins_anew():
    clock = HostClock("h1")
    for at_ms in range(0, 10_000, 500):
        clock.add(_reading(at_ms, 0, error_us=5))
    clock.add(_reading(10_000, 300, error_us=5))
    assert clock.here_ns(10_000_000_000 + 300_000)[0] == pytest.approx(10_000_000_000, abs=10)


# What agents answer, and do not


def _agents(connection, **more):
    job = FakeJob({"h1": connection})
    patience = Timeouts(**{"silence_s": 0.4, "answer_s": 5.0, **more})
    return Agents(job, timeouts=patience), job


def test_a_host_that_says_nothing_is_named():
    ours, _theirs = pair()
    agents, job = _agents(ours, answer_s=60.0)
    begun = time.monotonic()
    with pytest.raises(HostLost) as caught:
        agents.ask(Agent.take, {"h1": (LinkStep(step="usable"),)})
    assert job.broken
    assert "host h1: has said" in str(caught.value)
    assert time.monotonic() - begun < 60.0


def test_a_host_that_lives_and_does_not_answer_is_named():
    ours, theirs = pair()
    agents, _ = _agents(ours, silence_s=0.7, answer_s=1.0)
    stop = threading.Event()

    def beat():
        while not stop.wait(0.05):
            theirs.tell(0, Sign.HEARTBEAT)

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(HostLost, match=r"host h1: has not"):
        agents.ask(Agent.take, {"h1": (LinkStep(step="usable"),)})
    stop.set()
    thread.join()


def test_a_host_that_is_gone_is_named_at_once():
    ours, theirs = pair()
    # Not for its silence, which would be named as such, much later.
    agents, _ = _agents(ours, silence_s=100.0, answer_s=100.0)
    theirs.close()
    with pytest.raises(HostLost, match=r"host h1: its agent"):
        agents.ask(Agent.take, {"h1": (LinkStep(step="usable"),)})


def test_a_host_that_does_not_read_is_not_said_to_have_died(monkeypatch):
    monkeypatch.setattr(protocol, "SEND_S", 0.1)
    ours, _theirs = pair()
    agents, _ = _agents(ours)
    with pytest.raises(HostLost, match=r"^host h1: does not read"):
        agents.tell("h1", 1, Failed(kind="lost", what="x" * (1 << 24)))


def checked(answers, kind):
    return Agents(FakeJob({})).check(answers, kind)


@pytest.mark.parametrize(
    ("kind", "error"),
    [("lost", WorkerLost), ("link", LinkLost), ("refused", MeasurementError)],
)
def test_what_fails_on_a_host_is_said_with_its_name(kind, error):
    with pytest.raises(error, match=r"^host h1: G0 is on fire$"):
        checked({"h0": Sign.DONE, "h1": Failed(kind=kind, what="G0 is on fire")}, Sign)


@pytest.mark.parametrize(
    ("host", "what"),
    [
        ("node", "C7 is no NUMA node of this machine; there are C0"),
        ("h1", "link 0 from h10.N0 to rack-h1.N0 was lost"),
    ],
)
def test_a_host_whose_name_is_part_of_other_words_is_named(host, what):
    with pytest.raises(MeasurementError, match=rf"^host {host}: {what}$"):
        checked({host: Failed(kind="refused", what=what)}, Sign)


def test_bad_input_of_a_host_is_said_with_its_name():
    failed = Failed.of(InputError("temporary folder /tmp", "failed (No space left)", "make room"))
    with pytest.raises(InputError, match=r"^host h1: temporary folder /tmp: failed"):
        checked({"h0": Sign.DONE, "h1": failed}, Sign)


@pytest.mark.parametrize("what", ["link 0 from h1.N0 to h2.N0 was lost", "host h1: not told"])
def test_a_host_that_is_named_is_not_named_twice(what):
    with pytest.raises(MeasurementError, match=rf"^{what}$"):
        checked({"h1": Failed(kind="refused", what=what)}, Sign)


def test_a_limit_that_a_host_reaches_is_said_with_its_name(monkeypatch):
    def refused(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("tccl_profiler.cluster.agent.host_facts", refused)
    with agent_in_thread("h1") as connection:
        agents, _ = _agents(connection, silence_s=10)
        with pytest.raises(WorkerLost, match=r"^host h1: open files: the limit"):
            agents.describe("host")


def test_a_late_answer_is_not_taken_for_the_next_one():
    ours, theirs = pair()
    agents, _ = _agents(ours)
    number = agents.number()
    theirs.tell(number, Sign.DONE)

    class Clock:
        def clock(self, more):
            return 5

    def answer():
        while (envelope := theirs.poll()) is None:
            time.sleep(0.01)
        theirs.tell(envelope.number, answer_call(Agent.called, Clock(), envelope.message))

    thread = threading.Thread(target=answer)
    thread.start()
    assert agents.ask(Agent.clock, {"h1": (False,)}) == {"h1": 5}
    thread.join()


def test_an_outcome_crosses_as_bytes():
    rows = np.zeros(3, RECORD)
    rows["start"] = [5, 6, 7]
    outcome = RunResult(records={"G0": rows}, stamps={"G0": (np.array([1, 2], np.uint64),)})
    ours, theirs = pair()

    class Host:
        def run(self) -> Ran:
            return Ran(results=(outcome,), early_ns=(5,))

    ours.tell(1, answer_call([Host.run], Host(), call_of(Host.run, ())))
    (back,) = result_of(Agent.run, "h1", theirs.poll().message).results
    assert (back.records["G0"] == rows).all()
    assert back.stamps["G0"][0].tolist() == [1, 2]


def test_how_far_ahead_to_agree_follows_what_messages_take():
    pool = ClusterPool(Agents(FakeJob({})), {}, {})
    timing = RunSpec(repeats=0, warm_us=100, window_us=10_000)

    def judged(early_us):
        early_ns = tuple(round(one * 1e3) for one in early_us)
        ran = Ran(results=(), early_ns=early_ns)
        return pool.judge({"h1": ran}, timing)[1]

    ahead = [pool.ahead_ns]
    # 1. A message took 5 ms: the release was 2 ms late, which is a fifth of the window.
    assert judged([1000, -2000]) is True
    ahead.append(pool.ahead_ns)
    assert ahead[-1] > 2 * 5_000_000
    # 2. From then on messages take 200 us.
    for _ in range(20):
        assert judged([pool.ahead_ns / 1e3 - 200]) is False
        ahead.append(pool.ahead_ns)
    assert 2 * 200_000 < ahead[-1] < 1_000_000


# Sessions over agents in threads


LIMITS = WindowLimits(minimum_ms=5, maximum_ms=50, start_error_share=0.1)
QUICK = Options(stopping=Stopping(minimum=3, limit=3), limits=LIMITS)
ACROSS = "h0.C0->h0.N0->h1.N0->h1.N0->h1.C0{blocks=1,fifo=64K}"
INSIDE = "h0.G0->h0.G0->h0.C0->h0.G1->h0.G1{blocks=1,fifo=256K}"


def _session(job, **more):
    return ClusterSession(
        job, **{"backend": "host", "devices": 2, "interfaces": ("lo",), "options": QUICK, **more}
    )


@pytest.fixture(scope="module")
def session():
    with agents_in_processes(("h0", "h1")) as job, _session(job) as opened:
        yield opened


def test_sets_that_span_hosts_are_measured(session):
    (measurement,) = Checked(session).measure([parse_set(ACROSS)])
    assert measurement.gbps[0] > 0
    assert measurement.skew_error_us > 0
    assert str(measurement.transfers) == str(parse_set(ACROSS))


def measured_unless_busy(session, text):
    """A set of both hosts, each with a worker for each of its two GPUs."""
    try:
        with unless_busy(workers=4):
            (measurement,) = Checked(session).measure([parse_set(text)])
    except BaseException:
        session.notices.clear()
        raise
    return measurement


def test_sets_of_different_hosts_run_together(session):
    text = f"{INSIDE} {INSIDE.replace('h0', 'h1')}"
    measurement = measured_unless_busy(session, text)
    assert all(measurement.gbps)
    assert len(measurement.gbps) == 2


def test_direct_flows_of_many_lanes_are_measured_over_hosts_as_on_one(session, monkeypatch):
    run, texts = ClusterPool.run, []

    def watched(self, program, timing):
        texts.append(str(program.transfers))
        return run(self, program, timing)

    monkeypatch.setattr(ClusterPool, "run", watched)
    # Of the host that the controller reaches by messages alone.
    text = "h1.G0->h1.G0->h1.G1{blocks=6,fifo=64K}"
    measurement = measured_unless_busy(session, text)
    assert str(measurement.transfers) == text
    assert set(texts) == {text, text.replace("blocks=6", "blocks=4")}
    # On busy cores the set with few lanes may fail, by name.
    assert all("blocks=4" in notice for notice in session.notices)
    session.notices.clear()


def test_a_host_knows_its_clock_to_be_this_ones(session):
    for clock in session.clocks.values():
        now = time.monotonic_ns()
        assert abs(clock.there_ns(now) - now) <= clock.error_ns


def test_a_session_says_whose_its_measurements_are(session):
    header = session.header
    assert header.machine == "h0,h1"
    assert header.hosts["h0"].startswith("GPUs host:")
    assert "host backend" in header.identity


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("G0->G0->G1", "G0 is not measured here; name its host, of h0, h1"),
        ("h7.G0->h7.G0->h7.G1", "h7.G0 is not measured here; no device of host h7"),
        ("h0.G0->h0.G0->h0.G5", "h0.G5 is not measured here; there are"),
        ("h0.G0->h0.G0->h0.C9", "h0.C9 is not measured here; there are"),
    ],
)
def test_places_that_are_not_there_are_refused(session, text, sentence):
    with pytest.raises(MeasurementError, match=sentence):
        Checked(session).measure([parse_set(text)])


def test_what_one_host_refuses_is_given_up_on_the_others(session):
    huge = "h0.G0->h0.G0->h0.G1{blocks=2,fifo=512M}"
    with pytest.raises(MeasurementError, match=r"^h0\.G1 would"):
        Checked(session).measure([parse_set(f"{huge} {INSIDE.replace('h0', 'h1')}")])
    (measurement,) = Checked(session).measure([parse_set(ACROSS)])
    assert measurement.gbps[0] > 0


def test_a_lost_worker_is_replaced_and_its_set_measured_again(session):
    (before,) = Checked(session).measure([parse_set(ACROSS)])
    victim = next(pid for agent in children(os.getpid()) for pid in children(agent))
    timer = threading.Timer(0.05, os.kill, (victim, signal.SIGKILL))
    timer.start()
    # New and several, so that they take long enough for the worker to die in the midst of them.
    sizes = ("128K", "160K", "192K", "224K", "256K", "320K")
    after = Checked(session).measure([parse_set(ACROSS.replace("64K", size)) for size in sizes])
    timer.join()
    assert all(before.gbps) and all(rate for found in after for rate in found.gbps)
    assert any("all workers were started" in text for text in session.notices)
    session.notices.clear()


@pytest.mark.parametrize("for_s, times", [(0.8, 1), (0.1, 12)])
def test_a_host_that_stands_still_in_the_middle_of_a_set_makes_no_answer(
    session, for_s, times, tmp_path
):
    transfers = parse_set(ACROSS.replace("64K", "96K"))
    (before,) = Checked(session).measure([parse_set(ACROSS)])
    agent = children(os.getpid())[-1]
    with stopping([agent, *children(agent)], for_s=for_s, times=times):
        measured_or_failed(Checked(session), transfers, tmp_path / "journal.jsonl")
    (after,) = Checked(session).measure([parse_set(ACROSS)])
    assert min(*before.gbps, *after.gbps) > 0
    session.notices.clear()


def test_workers_that_were_ended_start_again_with_the_next_set(session):
    Checked(session).measure([parse_set(ACROSS)])
    session.end_workers()
    assert not [pid for agent in children(os.getpid()) for pid in children(agent)]
    (measurement,) = Checked(session).measure([parse_set(ACROSS)])
    assert measurement.gbps[0] > 0


def test_workers_that_could_not_start_anew_start_with_the_next_set(monkeypatch):
    with (
        agent_in_thread("h0") as one,
        agent_in_thread("h1") as other,
        _session(FakeJob({"h0": one, "h1": other})) as session,
    ):
        measured_unless_busy(session, INSIDE)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/bin/false")
            for pid in workers_of():
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(MeasurementError, match=r"started anew, the worker of h[01]\."):
                Checked(session).measure([parse_set(INSIDE)])
        assert min(measured_unless_busy(session, INSIDE).gbps) > 0


def test_a_host_that_cannot_be_described_is_refused_by_name():
    with (
        agents_in_processes(("h0", "h1")) as job,
        pytest.raises(InputError, match=r"^host h[01]: has no"),
    ):
        _session(job, interfaces=("nosuch0",)).__enter__()


# One agent


def test_a_host_whose_clock_jumps_is_named():
    ahead_ns = [7_000_000_000]
    with agent_in_thread("h1", now_ns=lambda: time.monotonic_ns() + ahead_ns[0]) as connection:
        agents, _ = _agents(connection, silence_s=10)
        clock = HostClock("h1")
        clock.add(agents.reading("h1", 20))
        now = time.monotonic_ns()
        assert abs(clock.there_ns(now) - now - 7_000_000_000) <= clock.error_ns
        ahead_ns[0] += 50_000_000
        with pytest.raises(SourceLostError, match=r"^host h1: its clock"):
            clock.add(agents.reading("h1", 20))


def test_an_agent_ends_when_the_controller_is_gone_or_says_nothing_any_more():
    with agent_in_thread("h1", silence_s=0.3) as connection, pytest.raises(ConnectionClosed):
        while True:
            connection.poll()


def test_a_host_whose_message_cannot_be_read_is_named():
    here, there = socket.socketpair()
    ours = Connection(here, peer="the agent")
    agents, _ = _agents(ours, silence_s=10)
    body = msgspec.msgpack.encode(Envelope(1, Failed(kind="lost", what="xyz")))
    body = body.replace(b"xyz", b"\xff\xfe\xfd")
    there.sendall(struct.pack("!IH", len(body), 0) + body)
    with pytest.raises(SourceLostError, match=r"^host h1: sent a message"):
        agents.heard(Question(1, ["h1"]), 5.0)
    ours.close()
    there.close()


def test_a_call_or_a_result_of_another_version_is_a_sentence():
    ours, theirs = pair()
    ours.tell(1, call_of(Agent.clock, ("soon",)))
    with pytest.raises(MeasurementError, match=r"^a call of clock"):
        answer_call(Agent.called, None, theirs.poll().message)
    answer = Returned(call_of(Agent.clock, ("soon",)).arguments)
    with pytest.raises(MeasurementError, match=r"^host h1: its result of clock"):
        result_of(Agent.clock, "host h1", answer)


def test_an_agent_refuses_what_makes_no_sense():
    with agent_in_thread("h1") as connection:
        agents, _ = _agents(connection, silence_s=10)
        with pytest.raises(MeasurementError, match=r"^host h1: its workers"):
            agents.ask(Agent.take, {"h1": (LinkStep(step="usable"),)})
        with pytest.raises(MeasurementError, match=r"^host h1: asked for close$"):
            agents.ask(Agent.close, {"h1": ()})


# Proofs of links

_BROKEN = Proof(
    verdict="hangs",
    common="GPU 1",
    what="nothing that GPU 1 writes arrives",
    pairs=(PairProof(source=1, target=0, mapping="cumem", verdict="hangs"),),
    facts=(LinkFact(one=0, other=1, state="broken"),),
)


def _doctors(monkeypatch, program):
    """Have agents run this program as their doctor."""
    command = [sys.executable, "-c", program]
    monkeypatch.setattr("tccl_profiler.cluster.agent.child_command", lambda *_: command)


def test_all_hosts_prove_their_links_at_once(monkeypatch, tmp_path):
    met = tmp_path / "met"
    met.mkdir()
    found = encode_json(Diagnosis(findings=(), unseen=(), links=_BROKEN))
    # Each waits until both run; it ends by 1, as a doctor does that finds something.
    program = f"""
import os, pathlib, sys, time
(met := pathlib.Path({str(met)!r})).joinpath(str(os.getpid())).touch()
while len(list(met.iterdir())) < 2:
    time.sleep(0.01)
print({found!r})
sys.exit(1)
"""
    _doctors(monkeypatch, program)
    with agent_in_thread("h0") as one, agent_in_thread("h1") as other:
        proofs = Agents(FakeJob({"h0": one, "h1": other})).proofs(force=False)
    assert proofs == {"h0": _BROKEN, "h1": _BROKEN}


def test_hosts_without_two_gpus_have_no_proof_by_the_doctor_itself():
    with agents_in_processes(["h0", "h1"]) as job:
        assert Agents(job).proofs(force=False) == {}


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import sys; sys.exit('cupy is broken')", "ended with code 1: cupy is broken"),
        ("print('{}')", "ended with code 0: no output"),
        ("import time; time.sleep(60)", "did not end within 0.3 s"),
    ],
)
def test_a_doctor_that_fails_or_is_late_proves_nothing(monkeypatch, program, why):
    _doctors(monkeypatch, program)
    late = "sleep" in program
    monkeypatch.setattr("tccl_profiler.cluster.agent.PROOF_S", 0.3 if late else 60.0)
    with agent_in_thread("h0") as connection:
        proof = Agents(FakeJob({"h0": connection})).proofs(force=True)["h0"]
    assert proof == Proof(verdict="inconclusive", what=f"`tccl doctor` {why}")


def test_a_proof_that_is_called_off_leaves_no_process(monkeypatch, tmp_path):
    path = tmp_path / "pid"
    program = f"import os, time; print(os.getpid(), file=open({str(path)!r}, 'w')); time.sleep(60)"
    _doctors(monkeypatch, program)
    with agent_in_thread("h0") as connection:
        agents = Agents(FakeJob({"h0": connection}))
        question = Question(agents.number())
        agents.begin(question, Agent.examine, {"h0": ((),)})
        while not (path.exists() and path.read_text()):
            time.sleep(0.01)
        agents.give_up(["h0"])
        assert agents.answers(question, Sign) == {"h0": Sign.DONE}
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)
