"""Devices of the host backend: real copies between shared memory, in threads of one process."""

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from tccl_profiler import host_device
from tccl_profiler.compiler import checkable, program_for
from tccl_profiler.host_device import HostDevice
from tccl_profiler.linux import cpus_of_devices, host_fingerprint, host_machine
from tccl_profiler.messages import Pace, Run, Share, Start
from tccl_profiler.program import COUNTER_AREA_BYTES
from tccl_profiler.shared_memory import ABORT, Control, Segment, create_segment
from tccl_py.errors import InputError, MeasurementError
from tccl_py.model.machine import check
from tccl_py.model.transfer import parse_set
from tccl_py.readers.sysfs import HostFiles

MIB = 1 << 20
MS = 1_000_000
LONG_S = 20.0
"""What a busy machine may take for anything."""


class Controller:
    """Some devices, and what the pool does with them: spaces, epochs, release, records."""

    def __init__(self, devices, *, arena_bytes=COUNTER_AREA_BYTES + 8 * MIB, user_bytes=4 * MIB):
        self.control = Control.create(devices)
        self.devices, self.running, self.threads = {}, {}, ThreadPoolExecutor()
        self.slots = {f"G{slot}": slot for slot in range(devices)}
        self.started = []
        fds = []
        for name in self.slots:
            start = Start(
                backend="host",
                slot=self.slots[name],
                device=name,
                bus_id="",
                cpus=(),
                arena_bytes=arena_bytes,
                user_bytes=user_bytes,
            )
            self.devices[name] = HostDevice(start, self.control)
            started, (fd,) = self.devices[name].open()
            self.started.append(started)
            fds.append(fd)
        for name, device in self.devices.items():
            for other, slot in self.slots.items():
                if other != name:
                    share = Share(space=other)
                    device.share(share, Segment.attach(os.dup(fds[slot]), other))
        self.arenas = [Segment.attach(os.dup(fd), f"arena {i}") for i, fd in enumerate(fds)]
        self.host = None
        self.epoch = 1

    def share(self, program):
        """Host memory for the program, its counters at zero."""
        size = program.space_bytes.get("C0")
        if self.host is not None:
            self.host.array(np.uint8, 0, COUNTER_AREA_BYTES)[:] = 0
        elif size is not None:
            self.host = create_segment(size, numa_id=None, label="C0")
            for device in self.devices.values():
                segment = Segment.attach(os.dup(self.host.fd), "C0")
                device.share(Share(space="C0"), segment)

    def queue(self, name, share, *, warm_ms=2, window_ms=60, patience_s=LONG_S, **more):
        run = Run(
            program=share,
            epoch=self.epoch,
            repeats=more.pop("repeats", 1),
            warm_ns=warm_ms * MS,
            window_ns=window_ms * MS,
            patience_ns=round(patience_s * 1e9),
            **more,
        )
        self.running[name] = self.threads.submit(self.devices[name].run, run)

    def records(self, name, share, repeat=0):
        return self.control.records(self.slots[name], repeat, len(share.lanes) + len(share.copies))

    def wait(self, program, field, epoch, repeat=0):
        views = [self.records(i, share, repeat) for i, share in program.devices.items()]
        until(lambda: all((view[field] == epoch).all() for view in views))

    def finish(self, program):
        for name in program.devices:
            self.running[name].result(LONG_S)

    def run_until_moving(self, program, **more):
        """Run with longer and longer windows, until each flow has a rate in each repeat."""
        for window_ms in (20, 80, 320, 1280, 5120):
            outcomes = self.run(program, window_ms=window_ms, **more)
            if all(rate(one, part) > 0 for one in outcomes for part in program.counted):
                return outcomes
        raise AssertionError("some flow does not move")

    def run(self, program, *, repeats=1, **more):
        """Run a program and return each repeat's records by device."""
        self.share(program)
        for name, share in program.devices.items():
            self.queue(name, share, repeats=repeats, **more)
        outcomes = []
        for repeat in range(repeats):
            epoch = self.epoch + repeat
            self.wait(program, "resident", epoch, repeat)
            self.control.release(epoch)
            self.wait(program, "finished", epoch, repeat)
            outcomes.append(
                {i: self.records(i, s, repeat).copy() for i, s in program.devices.items()}
            )
        self.finish(program)
        self.epoch += repeats
        return outcomes

    def refused(self, name, share):
        """Run a share that the device refuses."""
        self.queue(name, share)
        self.running[name].result(LONG_S)

    def close(self):
        self.control.abort()
        self.threads.shutdown()
        for device in self.devices.values():
            device.close()
        for segment in (*self.arenas, self.host):
            if segment is not None:
                segment.close()
        self.control.close()


def until(satisfied):
    deadline = time.monotonic() + LONG_S
    while not satisfied():
        assert time.monotonic() < deadline, "not within the time of a busy machine"
        time.sleep(0.0005)


@pytest.fixture
def controller():
    with contextlib.ExitStack() as stack:

        def make(devices, **more):
            made = Controller(devices, **more)
            stack.callback(made.close)
            return made

        yield make


def program_of(text, devices, *, lanes=64, **more):
    return program_for(parse_set(text), lanes={f"G{i}": lanes for i in range(devices)}, **more)


def rate(records, part):
    """GB/s of a flow's counted end."""
    kind = "in" if part.incoming else "out"
    rows = records[part.device][list(part.numbers)]
    spans = rows[f"{kind}_last"] - rows[f"{kind}_first"]
    counts = rows[f"{kind}_count"]
    moving = counts > 0
    return float((counts[moving] * part.slice_bytes / spans[moving]).sum())


SETS = {
    "bounce": ("G0->G0->C0->G1->G1{blocks=2,fifo=256K}", 2),
    "bounce with as many blocks as it takes": ("G0->G0->C0->G1->G1{fifo=64K}", 2),
    "direct write": ("G0->G0->G1{blocks=1}", 2),
    "direct read": ("G0->G1->G1{blocks=1}", 2),
    "write to the host": ("G0->G0->C0{blocks=2}", 2),
    "read from the host": ("C0->G1->G1{blocks=2}", 2),
    "small buffers": ("G0->G0->C0{blocks=2,buffer=64K} C0->D1->G1{buffer=64K}", 2),
    "copy engines": ("G0->D0->C0->D1->G1{blocks=1,fifo=256K}", 2),
    "copy engine to lane": ("G0->D0->C0->G1->G1{blocks=1,fifo=256K}", 2),
    "ring of bounces": (
        "G0->G0->C0->G1->G1{blocks=1,fifo=64K} G1->G1->C0->G2->G2{blocks=1,fifo=64K} "
        "G2->G2->C0->G0->G0{blocks=1,fifo=64K}",
        3,
    ),
    "both ways": (
        "G0->G0->C0->G1->G1{blocks=2,fifo=64K} G1->G1->C0->G0->G0{blocks=2,fifo=64K}",
        2,
    ),
}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("check_data", [False, True], ids=["timed", "checked"])
def test_every_kind_of_flow_moves_and_its_data_arrive(controller, name, check_data):
    text, devices = SETS[name]
    program = program_of(text, devices)
    big = max([8 * MIB, *program.space_bytes.values()])
    made = controller(devices, arena_bytes=COUNTER_AREA_BYTES + big)
    (records,) = made.run_until_moving(program, check=check_data)
    for rows in records.values():
        assert (rows["errors"] == 0).all()
        assert (rows["bytes"] > 0).all()
        assert (rows["start"] > 0).all()
        assert (rows["end"] > rows["start"]).all()


@pytest.mark.parametrize("text", ["G0->G0->G1", "G0->G1->G1", "G0->D0->G1"])
def test_a_flow_that_nobody_waits_for_goes_through_the_other_arena(controller, text):
    program = program_of(text, 2, lanes=4)
    made = controller(2, arena_bytes=max(program.space_bytes.values()), user_bytes=64 * MIB)
    made.run_until_moving(program)
    moved = made.arenas[0 if text == "G0->G1->G1" else 1].array(np.uint8, COUNTER_AREA_BYTES, 4096)
    assert (moved == (0 if text == "G0->G1->G1" else 1)).all()


def test_host_memory_is_checked_by_reading_back_what_was_written(controller):
    transfers = checkable(parse_set("G0->D0->C0 C0->G1->G1"))
    program = program_for(transfers, lanes={"G0": 64, "G1": 64})
    for records in controller(2).run_until_moving(program, check=True):
        assert all((rows["errors"] == 0).all() for rows in records.values())


def test_flows_that_do_not_pass_on_each_have_their_own_pace(controller):
    text, devices = SETS["ring of bounces"]
    program = program_of(text, devices, meeting="independent")
    (records,) = controller(devices).run_until_moving(program, check=True)
    assert all((rows["errors"] == 0).all() for rows in records.values())


def test_a_coupled_ring_moves_as_much_on_each_hop(controller):
    text, devices = SETS["ring of bounces"]
    program = program_of(text, devices)
    assert all(lane.coupled for share in program.devices.values() for lane in share.lanes)
    (records,) = controller(devices).run_until_moving(program)
    moved = [rows["bytes"][0] // program.counted[0].slice_bytes for rows in records.values()]
    # A lane counts both its ends, and the ends of a FIFO are at most its four slices apart.
    assert max(moved) - min(moved) <= 2 * (4 + 4)


def test_lanes_start_when_released_and_stop_by_the_clock(controller):
    program = program_of("G0->G0->C0{blocks=3}", 1)
    made = controller(1)
    made.share(program)
    # A window in which every lane has its turn, though others keep the cores for a while.
    made.queue("G0", program.devices["G0"], warm_ms=10, window_ms=1500)
    made.wait(program, "resident", 1)
    time.sleep(0.02)
    rows = made.records("G0", program.devices["G0"])
    assert not rows["start"].any()
    released = time.monotonic_ns()
    made.control.release(1)
    made.wait(program, "finished", 1)
    assert (rows["start"] >= released).all()
    assert (rows["out_first"] >= rows["start"] + 10 * MS).all()
    assert (rows["end"] == rows["out_last"]).all()
    assert time.monotonic_ns() - released >= 1510 * MS
    assert (rows["bytes"] >= (rows["out_count"] + 1) * program.counted[0].slice_bytes).all()


def test_a_pack_that_was_spoilt_in_the_fifo_is_counted(controller):
    program = program_of("G0->G0->C0->G1->G1{blocks=1,fifo=256K}", 2)
    made = controller(2)
    made.share(program)
    end = program.devices["G0"].lanes[0].outgoing

    def until_counted(index, counter):
        made.control.release(1)
        made.queue(index, program.devices[index], check=True, window_ms=60_000)
        word = made.host.array(np.uint64, counter.offset, 1)
        until(lambda: word[0] == end.slices)
        made.control.abort()
        made.running[index].result(LONG_S)

    until_counted("G0", end.post)
    made.host.array(np.uint8, end.data.offset + 16 * 100 + 5, 1)[0] ^= 1
    made.host.array(np.uint8, end.data.offset + 2 * 65536, 40)[:] ^= 255
    until_counted("G1", end.wait)
    row = made.records("G1", program.devices["G1"])[0]
    assert row["bytes"] == end.slices * 65536
    assert row["errors"] == 1 + 3


def test_slices_in_the_wrong_order_are_counted(controller):
    program = program_of("G0->G0->C0->G1->G1{blocks=1,fifo=64K}", 2)
    lane = program.devices["G1"].lanes[0]
    wrong = msgspec.structs.replace(lane.incoming, seed=lane.incoming.seed + 1)
    share = msgspec.structs.replace(
        program.devices["G1"], lanes=(msgspec.structs.replace(lane, incoming=wrong),)
    )
    program = msgspec.structs.replace(program, devices={"G0": program.devices["G0"], "G1": share})
    (records,) = controller(2).run_until_moving(program, check=True)
    assert records["G1"]["errors"][0] == records["G1"]["bytes"][0] // 16


def test_abort_ends_lanes_that_move_and_lanes_that_wait(controller):
    program = program_of("G0->G0->C0{blocks=1} G0->G0->C0->G1->G1{blocks=1,fifo=64K}", 2)
    made = controller(2)
    made.share(program)
    for index, share in program.devices.items():
        made.queue(index, share, window_ms=60_000, repeats=2)
    made.wait(program, "resident", 1)
    made.control.release(1)
    until(lambda: made.host.array(np.uint8, COUNTER_AREA_BYTES, 1)[0] == 1)
    begun = time.monotonic()
    made.control.abort()
    made.finish(program)
    assert made.control.flag.value == ABORT
    assert time.monotonic() - begun < LONG_S
    for index, share in program.devices.items():
        assert (made.records(index, share)["finished"] == 1).all()
        late = made.records(index, share, 1)
        assert (late["finished"] == 2).all()
        assert not late["start"].any()


def test_patience_bounds_the_wait_for_a_release(controller):
    program = program_of("G0->G0->C0{blocks=1}", 1)
    made = controller(1)
    made.share(program)
    begun = time.monotonic()
    made.queue("G0", program.devices["G0"], patience_s=0.05)
    made.running["G0"].result(LONG_S)
    assert 0.05 <= time.monotonic() - begun < LONG_S
    (row,) = made.records("G0", program.devices["G0"])
    assert (row["resident"], row["start"], row["bytes"], row["finished"]) == (1, 0, 0, 1)


def test_a_lane_without_its_peer_stops_by_the_clock(controller):
    program = program_of("G0->G0->C0->G1->G1{blocks=1,fifo=64K}", 2)
    made = controller(2)
    made.share(program)
    made.control.release(1)
    made.queue("G1", program.devices["G1"], window_ms=20)
    made.running["G1"].result(LONG_S)
    (row,) = made.records("G1", program.devices["G1"])
    assert (row["bytes"], row["in_count"], row["end"], row["finished"]) == (0, 0, 0, 1)


def test_a_copy_moves_what_its_pace_says_and_stamps_each_group(controller):
    program = program_of("G0->D0->C0->D1->G1{blocks=2,fifo=64K}", 2)
    made = controller(2)
    paces = (Pace(groups=30), Pace(groups=5, slices=4))
    (records,) = made.run(program, paces=paces, window_ms=1)
    for name, kind in (("G0", "out"), ("G1", "in")):
        assert list(records[name]["bytes"]) == [30 * 16384, 20 * 16384]
        stamps = made.control.stamps(made.slots[name], 0, paces)
        for part, row in zip(stamps, records[name], strict=True):
            assert part.all()
            assert (np.diff(part.astype(np.int64)) >= 0).all()
            assert part[0] <= row["start"] <= part[1]
            assert part[-1] >= row[f"{kind}_last"]


def test_a_copy_whose_peer_has_stopped_goes_on_when_it_is_let_go(controller):
    program = program_of("G0->D0->C0->G1->G1{blocks=1,fifo=64K}", 2)
    made = controller(2)
    made.share(program)
    made.control.release(1)
    made.queue("G0", program.devices["G0"], paces=(Pace(groups=30),), window_ms=1)
    (stamps,) = made.control.stamps(0, 0, [Pace(groups=30)])
    until(lambda: stamps[5] > 0)
    time.sleep(0.02)
    assert not stamps[6:].any()
    made.host.array(np.uint64, 0, COUNTER_AREA_BYTES // 8)[:] = 1 << 62
    made.running["G0"].result(LONG_S)
    assert stamps.all()
    assert made.records("G0", program.devices["G0"])["bytes"][0] == 30 * 16384


def test_patience_bounds_the_wait_of_a_copy(controller):
    program = program_of("G0->D0->C0->G1->G1{blocks=1,fifo=64K}", 2)
    made = controller(2)
    made.share(program)
    made.control.release(1)
    made.queue("G0", program.devices["G0"], paces=(Pace(groups=30),), window_ms=1, patience_s=0.02)
    made.running["G0"].result(LONG_S)
    assert made.records("G0", program.devices["G0"])["bytes"][0] <= 4 * 16384
    assert not made.control.stamps(0, 0, [Pace(groups=30)])[0][6:].any()


def test_what_cannot_be_reached_is_refused_when_it_is_queued(controller):
    program = program_of("G0->G0->C0{blocks=1}", 1)
    made = controller(1)
    share = program.devices["G0"]
    with pytest.raises(MeasurementError, match=r"^G0 cannot reach C0:"):
        made.refused("G0", share)


def test_slices_larger_than_user_memory_are_refused(controller):
    program = program_of("G0->G0->C0{blocks=1}", 1)
    made = controller(1, user_bytes=65536)
    made.share(program)
    with pytest.raises(MeasurementError, match=r"^G0: slices of 262144"):
        made.refused("G0", program.devices["G0"])


def test_an_error_in_the_lanes_ends_the_run(controller, monkeypatch):
    program = program_of("G0->G0->C0{blocks=1}", 1)
    made = controller(1)
    made.share(program)

    def spoilt(self, *_):
        raise OSError("no memory")

    monkeypatch.setattr(host_device.HostLane, "turns", spoilt)
    made.control.release(1)
    with pytest.raises(OSError, match=r"^no memory"):
        made.refused("G0", program.devices["G0"])


def test_an_arena_counts_from_zero_in_every_run(controller):
    program = program_of("G0->G0->G1{blocks=1}", 2)
    made = controller(2, arena_bytes=max(program.space_bytes.values()))
    for _ in range(2):
        (records,) = made.run_until_moving(program, check=True)
        assert not records["G1"]["errors"].any()


def test_a_device_says_what_it_is_and_its_clock_is_the_hosts(controller):
    made = controller(1, arena_bytes=2 * COUNTER_AREA_BYTES, user_bytes=MIB)
    (started,) = made.started
    assert (started.lanes, started.handle) == (64, b"")
    before = time.monotonic_ns()
    pings = made.devices["G0"].ping(5)
    stamps = [
        before,
        *(
            t
            for one in zip(pings.asked_ns, pings.device_ns, pings.seen_ns, strict=True)
            for t in one
        ),
        time.monotonic_ns(),
    ]
    assert stamps == sorted(stamps)
    assert len(stamps) == 17


def test_a_device_pins_the_process_to_its_cores(monkeypatch):
    pinned = []
    monkeypatch.setattr(host_device.linux, "pin_to_cpus", pinned.append)
    control = Control.create(1)
    start = Start(
        backend="host",
        slot=0,
        device="G0",
        bus_id="",
        cpus=(1,),
        arena_bytes=COUNTER_AREA_BYTES,
        user_bytes=4096,
    )
    HostDevice(start, control).close()
    control.close()
    assert pinned == [(1,)]


# The machine that stands for a host.


@pytest.fixture
def two_sockets(tmp_path):
    """Nodes 0 and 2 of four cores each."""
    nodes = tmp_path / "sys" / "devices" / "system" / "node"
    for node, cpus in ((0, "0-3"), (2, "4-7")):
        (nodes / f"node{node}").mkdir(parents=True)
        (nodes / f"node{node}" / "cpulist").write_text(cpus + "\n")
    (nodes / "online").write_text("0,2\n")
    return HostFiles(root=tmp_path)


def test_devices_are_spread_over_cores_and_nodes(two_sockets):
    machine = host_machine(4, cpus=range(8), files=two_sockets)
    assert check(machine, where="test") is machine
    assert machine.name == "host-4"
    assert [node.numa_id for node in machine.numa_nodes] == [0, 2]
    assert [gpu.parent for gpu in machine.gpus] == ["C0", "C0", "C1", "C1"]
    assert cpus_of_devices(machine) == {0: (0,), 1: (2,), 2: (4,), 3: (6,)}
    assert len({(gpu.name, gpu.sm, gpu.link) for gpu in machine.gpus}) == 1


def test_devices_share_cores_where_there_are_fewer(two_sockets):
    machine = host_machine(cpus=[5], files=two_sockets)
    assert cpus_of_devices(machine) == {0: (5,), 1: (5,)}
    assert [gpu.parent for gpu in machine.gpus] == ["C1", "C1"]


def test_this_host_is_a_machine():
    machine = host_machine()
    usable = os.sched_getaffinity(0)
    assert len(machine.gpus) == max(2, min(len(usable), 8))
    assert {core for cores in cpus_of_devices(machine).values() for core in cores} <= usable


def test_a_kernel_without_numa_is_one_node(tmp_path):
    machine = host_machine(2, cpus=[0], files=HostFiles(root=tmp_path))
    assert [gpu.parent for gpu in machine.gpus] == ["C0", "C0"]


@pytest.mark.parametrize(
    ("devices", "cpus", "sentence"),
    [
        (1, [0], "host machine: has 1 device; 2 to 64 are right"),
        (65, [0], "host machine: has 65 devices; 2 to 64 are right"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(two_sockets, devices, cpus, sentence):
    with pytest.raises(InputError) as caught:
        host_machine(devices, cpus=cpus, files=two_sockets)
    assert str(caught.value).startswith(sentence)


def test_a_fingerprint_tells_hosts_and_cores_apart_and_hides_the_machine_id(two_sockets, tmp_path):
    machine = host_machine(2, cpus=range(8), files=two_sockets)
    prints = []
    for name, where, text in (
        ("a", "etc/machine-id", "11"),
        ("b", "etc/machine-id", "22"),
        ("c", "proc/sys/kernel/random/boot_id", "11"),
    ):
        root = tmp_path / name
        (root / "proc").mkdir(parents=True)
        (root / "proc" / "cpuinfo").write_text("processor : 0\nmodel name\t: Made Up 9000\n")
        (root / where).parent.mkdir(parents=True, exist_ok=True)
        (root / where).write_text(text + "\n")
        prints.append(host_fingerprint(machine, HostFiles(root=root)))
    first = prints[0]
    assert first.gpu_uuids[0].startswith("host:Made Up 9000:")
    assert [uuid.rsplit(":", 1)[1] for uuid in first.gpu_uuids] == ["core0", "core4"]
    assert ":11:" not in first.gpu_uuids[0]
    assert (first.driver, first.numa_count) == ("none", 2)
    assert first != prints[1]
    assert first == prints[2]
    assert first == host_fingerprint(machine, HostFiles(root=tmp_path / "a"))
