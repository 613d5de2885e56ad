"""Flows over the network, for real: pools that stand for hosts, TCP between loopback addresses."""

import contextlib
import gc
import os
import signal
import socket
import threading
import time

import msgspec
import pytest

from tccl_profiler.compiler import program_for
from tccl_profiler.messages import Endpoint, Run, Share, Start
from tccl_profiler.pool import RunSpec
from tccl_profiler.profiler import Profiler
from tccl_profiler.program import Link
from tccl_profiler.protocol import LinkLost, WorkerLost
from tccl_profiler.rates import sample_of
from tccl_profiler.shared_memory import Control
from tccl_profiler.tcp import NicDevice, NicLinks
from tccl_py.errors import MeasurementError
from tccl_py.model.measurement import faults
from tccl_py.model.transfer import parse_set
from tests.profiler_hosts import Hosts, host_pool, step
from tests.profiler_pools import REPEATS, descriptors, options, shared_mappings, until, workers_of
from tests.skips import needs_idle_cores

pytestmark = pytest.mark.timeout(120)

HOST_TO_HOST = "h0.C0->h0.N0->h1.N0->h1.N0->h1.C0{blocks=1,fifo=256K}"
GPU_TO_GPU = "h0.G0->h0.G0->h0.C0->h0.N0->h1.N0->h1.N0->h1.C0->h1.G0->h1.G0{blocks=1,fifo=256K}"
LINK = Link("h0.N0", "h1.N0", 0)


def hosts_of(gpus=1, nics=1):
    """Two hosts; the first one's NICs are 127.0.0.1 to .9, the second one's 127.0.0.11 to .19."""
    return Hosts(
        {
            f"h{i}": host_pool(gpus, [f"127.0.0.{10 * i + n + 1}" for n in range(nics)], f"h{i}")
            for i in range(2)
        }
    )


@pytest.fixture(scope="module")
def hosts():
    with hosts_of(nics=2) as made:
        yield made


@pytest.fixture(autouse=True)
def _as_it_was(request):
    made = request.node.fixturenames
    if "hosts" in made:
        yield request.getfixturevalue("hosts")
        return
    gc.collect()
    before = workers_of(), shared_mappings(), descriptors()
    yield
    gc.collect()
    assert (workers_of(), shared_mappings(), descriptors()) == before


def readings(hosts, text, *, check=False, repeats=3):
    """Run a set with longer and longer windows, until all its flows move."""
    program = hosts.program(parse_set(text))
    to_host = {device: lambda stamp: (int(stamp), 0) for device in program.devices}
    for window_us in (5e3, 50e3, 500e3, 2e6):
        timing = RunSpec(repeats=repeats, warm_us=window_us / 5, window_us=window_us, check=check)
        outcomes = hosts.run(program, timing)
        found = [sample_of(program, one, timing, to_host) for one in outcomes]
        if all(all(one.gbps) for one in found):
            return found
    needs_idle_cores()
    raise AssertionError(f"{text} does not move")


DIRECT = "h0.G0->h0.N0->h1.N0->h1.N0->h1.G0{blocks=1,fifo=256K}"
SETS = {
    "from host memory to host memory": HOST_TO_HOST,
    "from GPU to GPU": GPU_TO_GPU,
    "from a GPU to host memory": (
        "h0.G0->h0.G0->h0.C0->h0.N0->h1.N0->h1.N0->h1.C0{blocks=1,fifo=256K}"
    ),
    "from host memory to a GPU": (
        "h0.C0->h0.N1->h1.N0->h1.N0->h1.C0->h1.G0->h1.G0{blocks=1,fifo=256K}"
    ),
    "out of a GPU's own memory and into it": DIRECT,
    "by several links": HOST_TO_HOST.replace("blocks=1", "blocks=3"),
    "both ways and by both rails": (
        f"{HOST_TO_HOST} h1.C0->h1.N1->h0.N1->h0.N1->h0.C0{{blocks=2,fifo=64K}}"
    ),
    "round a ring of two hosts": (
        "h0.G0->h0.G0->h0.C0->h0.N0->h1.N1->h1.N1->h1.C0->h1.G0->h1.G0{blocks=1,fifo=64K} "
        "h1.G0->h1.N0->h0.N1->h0.N1->h0.C0->h0.G0->h0.G0{blocks=1,fifo=64K}"
    ),
}


@pytest.mark.parametrize("check", [False, True], ids=["rated", "checked"])
@pytest.mark.parametrize("name", SETS)
def test_flows_over_the_network_move_and_arrive_as_they_were_sent(hosts, name, check):
    found = readings(hosts, SETS[name], check=check)
    assert len(found) == 3
    for one in found:
        assert all(one.gbps)
        assert not any(one.wrong)
        assert 0 <= one.overlap <= 1


def test_a_flow_through_the_memory_of_a_gpu_that_moves_nothing_is_sound_in_every_run():
    text = "h0.G1->h0.G1->h0.G0->h0.N0->h1.N0->h1.N0->h1.C0{blocks=1,fifo=64K}"
    with hosts_of(gpus=2) as hosts:
        for _ in range(3):
            assert not any(any(one.wrong) for one in readings(hosts, text, check=True))


def test_links_are_made_once_and_found_again_by_later_sets(hosts):
    readings(hosts, HOST_TO_HOST.replace("blocks=1", "blocks=2"))
    made = len(hosts.made)
    program = hosts.program(parse_set(GPU_TO_GPU))
    assert hosts.missing(program) == []
    for _ in range(3):
        readings(hosts, GPU_TO_GPU)
        readings(hosts, HOST_TO_HOST)
    assert len(hosts.made) == made


def test_a_link_is_clean_after_a_repeat_that_ended_amid_a_slice(hosts):
    """Slices of 1 MiB and windows of 0.2 ms: nearly every repeat ends amid one."""
    program = hosts.program(parse_set(GPU_TO_GPU.replace("fifo=256K", "fifo=2M,slots=4")))
    timing = RunSpec(repeats=12, warm_us=0.0, window_us=200.0, check=True)
    before = len(hosts.made)
    hosts.cluster.connect(program)
    for _ in range(3):
        for outcome in hosts.run(program, timing):
            assert not any(rows["errors"].any() for rows in outcome.records.values())
    assert len(hosts.made) - before <= 1
    assert hosts.missing(program) == []


def test_data_that_were_damaged_on_the_way_are_counted(hosts):
    """The receiver compares with another seed than the sender wrote by."""
    program = hosts.program(parse_set(HOST_TO_HOST))
    share = program.devices["h1.N0"]
    (lane,) = share.lanes
    wrong = msgspec.structs.replace(lane.outgoing, seed=lane.outgoing.seed + 1)
    share = msgspec.structs.replace(share, lanes=(msgspec.structs.replace(lane, outgoing=wrong),))
    program = msgspec.structs.replace(program, devices={**program.devices, "h1.N0": share})
    timing = RunSpec(repeats=1, warm_us=0.0, window_us=0.2e6, check=True)
    (outcome,) = hosts.run(program, timing)
    to_host = {device: lambda stamp: (int(stamp), 0) for device in program.devices}
    (packs,) = sample_of(program, outcome, timing, to_host).wrong
    assert packs > 0
    assert packs % (lane.slice_bytes // 16) == 0


def test_a_nic_counts_what_it_moves(hosts):
    program = hosts.program(parse_set(GPU_TO_GPU))
    timing = RunSpec(repeats=1, warm_us=1e3, window_us=0.2e6)
    (outcome,) = hosts.run(program, timing)
    rows = {device: records[0] for device, records in outcome.records.items()}
    slices = {device: int(row["bytes"]) // (64 * 1024) for device, row in rows.items()}
    # What was under way when the time was over arrives no more at the kernel.
    assert slices["h0.G0"] >= slices["h0.N0"] >= slices["h1.N0"] - 1 >= slices["h1.G0"] - 1 > 0
    for device, side in (("h0.N0", "in"), ("h1.N0", "out")):
        row, other = rows[device], "out" if side == "in" else "in"
        assert row["start"] < row[f"{side}_first"] <= row[f"{side}_last"]
        assert row["end"] == row[f"{side}_last"]
        assert row["end"] <= row["start"] + 0.3e9  # on a busy core
        assert row[f"{other}_count"] == 0


def test_a_profiler_measures_over_hosts_as_on_one(hosts):
    profiler = Profiler(
        hosts,
        options=options(check=True),
        source="host backend",
    )
    sets = [
        parse_set(text) for text in (HOST_TO_HOST, GPU_TO_GPU, SETS["round a ring of two hosts"])
    ]
    for asked, found in zip(sets, profiler.measure(sets), strict=True):
        assert str(found.transfers) == str(asked)
        assert list(faults(found)) == []
        assert {len(row) for row in found.samples_gbps} == {REPEATS}
        assert len(found.samples_gbps) == len(asked)
    assert profiler.notices == []
    profiler.exercise(sets[0])


def test_pools_tell_of_their_nics(hosts):
    pool = hosts.pools["h1"]
    assert pool.lanes == {"h1.G0": 64, "h1.N0": 64, "h1.N1": 64}
    pinged = pool.ping(3)["h1.N0"]
    assert pinged.asked_ns <= pinged.device_ns <= pinged.seen_ns


# What goes wrong.


def test_a_nic_whose_worker_is_killed_amid_a_flow_is_named():
    with hosts_of() as hosts:
        program = hosts.program(parse_set(GPU_TO_GPU))
        for name, victim in hosts.pools.items():

            def kill(stage, repeat, pool=victim, name=name):
                worker = pool.workers.processes[f"{name}.N0"]
                os.kill(worker.process.pid, signal.SIGKILL)
                until(lambda: worker.process.poll() is not None)

            hosts.between = kill
            with pytest.raises((WorkerLost, LinkLost)) as caught:
                hosts.run(program, RunSpec(repeats=2, warm_us=0.0, window_us=60e6))
            # The first host is asked first: it has lost its worker, or else its link.
            if victim is hosts.pools["h0"]:
                assert "the worker of h0.N0" in str(caught.value)
            else:
                assert str(caught.value).startswith(f"{LINK} was lost: ")
            hosts.between = lambda stage, repeat: None
            assert readings(hosts, GPU_TO_GPU, check=True)


def test_a_link_to_where_nobody_listens_is_named_with_both_ends(hosts):
    with socket.socket() as idle:
        idle.bind(("127.0.0.13", 0))
        port = idle.getsockname()[1]
        end = Endpoint(addresses=(("127.0.0.13", port),), token=b"x" * 16)
        with pytest.raises(LinkLost) as caught:
            step(hosts.pools["h0"], "connect", {Link("h0.N0", "h7.N3", 2): end})
    assert "cannot be reached from" in str(caught.value)
    assert readings(hosts, HOST_TO_HOST)


def test_a_sender_that_never_comes_is_named_and_no_port_stays_open(hosts):
    missing, pool = Link("h9.N0", "h1.N0", 0), hosts.pools["h1"]
    end = step(pool, "listen", [missing])[missing]
    begun = time.monotonic()
    with pytest.raises(LinkLost) as caught:
        step(pool, "accept", [missing], limit_s=0.5)
    assert "link 0 from h9.N0" in str(caught.value)
    assert time.monotonic() - begun > 0.4
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(end.addresses[0], timeout=50)
    assert readings(hosts, HOST_TO_HOST)


def test_strangers_are_not_taken_for_a_link_and_keep_it_not_waiting(hosts):
    link = Link("h0.N1", "h1.N1", 40)
    end = step(hosts.pools["h1"], "listen", [link])[link]
    with contextlib.ExitStack() as stack:
        stranger, *_ = (
            stack.enter_context(socket.create_connection(end.addresses[0], timeout=50))
            for _ in range(30)
        )
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        step(hosts.pools["h0"], "connect", {link: end})
        step(hosts.pools["h1"], "accept", [link])
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert all(link in step(pool, "usable") for pool in hosts.pools.values())


class Relay:
    """A wire between two NICs that can be cut, or stop to carry anything."""

    def __init__(self, end):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.there = socket.create_connection(end.addresses[0])
        self.end = Endpoint(addresses=(self.listener.getsockname(),), token=end.token)
        self.stalled, self.carried = False, 0
        self.thread = threading.Thread(target=self._carry)
        self.thread.start()

    def _carry(self):
        self.here, _ = self.listener.accept()
        while not self.stalled:
            try:
                data = self.here.recv(1 << 16)
                self.there.sendall(data)
            except OSError:
                return
            if not data:
                return
            self.carried += len(data)

    def close(self):
        for sock in (self.listener, self.here, self.there):
            sock.close()

    def cut(self):
        for sock in (self.here, self.there):
            sock.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("how", ["cut", "stalled"])
def test_a_link_that_breaks_amid_a_flow_is_named_and_made_again(hosts, how):
    relays = []

    def relay(link, end):
        relays.append(Relay(end))
        return relays[-1].end

    def harm(stage, repeat):
        until(lambda: relays[0].carried > 10_000)
        if how == "cut":
            relays[0].cut()
        else:
            relays[0].stalled = True

    pids = {pid for pool in hosts.pools.values() for pid in pool.pids}
    step(hosts.pools["h1"], "listen", [LINK])  # so that it is made anew, through the relay
    hosts.relay, hosts.between = relay, harm
    program = hosts.program(parse_set(GPU_TO_GPU))
    window_us = 60e6 if how == "cut" else 0.1e6
    try:
        with pytest.raises(LinkLost) as caught:
            hosts.run(program, RunSpec(repeats=1, warm_us=0.0, window_us=window_us))
    finally:
        hosts.relay, hosts.between = lambda link, end: end, lambda stage, repeat: None
    assert str(caught.value).startswith(f"{LINK} was lost: ")
    for one in relays:
        one.thread.join()
        one.close()
    assert hosts.missing(program) == [LINK]
    assert readings(hosts, GPU_TO_GPU, check=True)
    assert {pid for pool in hosts.pools.values() for pid in pool.pids} == pids


def test_a_run_that_is_left_drops_its_links_and_keeps_the_others(hosts):
    readings(hosts, HOST_TO_HOST)
    other = hosts.program(parse_set(HOST_TO_HOST.replace("N0", "N1")))
    hosts.cluster.connect(other)
    program = hosts.program(parse_set(HOST_TO_HOST))
    timing = RunSpec(repeats=2, warm_us=0.0, window_us=60e6)
    with hosts.pools["h0"].begin(program.on("h0"), timing) as running:
        running.wait_resident(0)
        running.release(0)
    assert hosts.missing(program) == [LINK]
    assert hosts.missing(other) == []
    assert readings(hosts, HOST_TO_HOST, check=True)


def test_a_program_whose_links_were_not_made_is_refused(hosts):
    program = hosts.program(parse_set(HOST_TO_HOST.replace("blocks=1", "blocks=9")))
    timing = RunSpec(repeats=1, warm_us=0.0, window_us=1e3)
    with (
        pytest.raises(LinkLost, match=r"^link \d from h0\.N0"),
        hosts.pools["h0"].begin(program.on("h0"), timing) as running,
    ):
        running.wait_resident(0)
    assert readings(hosts, HOST_TO_HOST)


@pytest.mark.parametrize(
    ("address", "interface", "sentence"),
    [
        ("192.0.2.1", "", r"^N0: 192\.0\.2\.1 cannot be used: Cannot assign requested address$"),
        ("127.0.0.1", "nic9", r"^N0: nic9 127\.0\.0\.1 cannot be used: No such device$"),
        ("example", "", r"^N0: example cannot be used: "),
    ],
)
def test_a_nic_that_is_not_there_is_refused(address, interface, sentence):
    with pytest.raises(MeasurementError, match=sentence):
        NicLinks("N0", address, interface)


def test_a_pool_with_a_nic_that_is_not_there_does_not_start():
    before = workers_of()
    with pytest.raises(MeasurementError, match=r"^h0.N0: lo 192\.0\.2\.1 cannot"):
        host_pool(1, ["192.0.2.1"]).start()
    assert workers_of() == before


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_links_are_made_over_ipv6_too():
    try:
        one, other = NicLinks("N0", "::1", "lo"), NicLinks("N0", "::1", "")
    except MeasurementError as error:
        pytest.skip(f"no IPv6 here: {error}")
    (end,) = one.listen([LINK])
    other.connect({LINK: end}, 5.0)
    one.accept([LINK], 5.0)
    assert one.usable() == other.usable() == (LINK,)
    one.drop(LINK)
    assert other.usable() == ()
    one.close()
    other.close()


def test_a_gpu_whose_memory_a_nic_does_not_map_is_refused_with_what_to_do():
    """As a CUDA GPU's, which TCP does not reach."""
    program = program_for(
        parse_set(DIRECT),
        lanes=dict.fromkeys(("h0.G0", "h0.N0", "h1.N0", "h1.G0"), 64),
    )
    control = Control.create(1)
    start = Start(
        backend="network",
        slot=0,
        device="h0.N0",
        bus_id="",
        cpus=(),
        arena_bytes=0,
        user_bytes=0,
        address="127.0.0.1",
    )
    device = NicDevice(start, control)
    device.open()
    device.share(Share(space="h0.G0", handle=b"cuda"))
    share = program.on("h0").devices["h0.N0"]
    order = Run(program=share, epoch=1, repeats=1, warm_ns=0, window_ns=10**6, patience_ns=10**9)
    with pytest.raises(MeasurementError, match=r"^h0.N0 cannot reach h0.G0's"):
        device.run(order)
    device.close()
    control.close()
