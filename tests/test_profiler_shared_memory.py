"""Shared memory of the profiler, on the NUMA node asked for."""

import errno
import fcntl
import mmap
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tccl_profiler import linux as numa
from tccl_profiler.shared_memory import Segment, create_segment
from tccl_py.errors import MeasurementError
from tccl_py.readers.sysfs import HostFiles

PAGE = mmap.PAGESIZE


def open_fds():
    return {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}


def mappings_named(label):
    return Path("/proc/self/maps").read_text().count(f"memfd:tccl-{label}")


def refuse(code):
    def refused(*_):
        raise OSError(code, os.strerror(code), "mbind")

    return refused


@pytest.fixture
def two_nodes(monkeypatch):
    """Have nodes 0 and 1, whatever the machine has; only a CPU of the real node 0 is on either."""
    allowed = os.sched_getaffinity(0)
    try:
        cpus = sorted(allowed.intersection(numa.cpus_of_node(0)))
    except MeasurementError:  # a kernel without NUMA
        cpus = sorted(allowed)
    if not cpus:
        pytest.skip("no CPU of NUMA node 0 is open to the tests")
    monkeypatch.setattr(numa, "online_nodes", lambda: (0, 1))
    monkeypatch.setattr(numa, "available_bytes", lambda node: 1 << 40)
    monkeypatch.setattr(numa, "cpus_of_node", lambda node: (cpus[-1],))
    return allowed, {cpus[-1]}


@pytest.fixture
def kernel_tells():
    """Skip where a container hides where pages are."""
    with closing(create_segment(PAGE, numa_id=None, label="probe")) as segment:
        try:
            numa.pages_by_node(segment.address, segment.size)
        except MeasurementError as error:
            pytest.skip(str(error))


@pytest.fixture
def kernel_binds():
    """Skip where a container refuses mbind."""
    with closing(create_segment(PAGE, numa_id=None, label="probe")) as segment:
        try:
            numa.bind(segment.address, segment.size, 0)
        except OSError as error:
            pytest.skip(f"mbind: {error}")


CHILD = """
import socket, sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from tccl_profiler.shared_memory import Segment
sock = socket.socket(fileno=int(sys.argv[1]))
_, (fd,), _, _ = socket.recv_fds(sock, 1, 1)
with closing(Segment.attach(fd, "ring buffer")) as segment:
    words = segment.array("<u4", 4, 3)
    assert words.tolist() == [1, 2, 3], words
    words *= 10
    sock.send(b"k")
    sock.recv(1)  # killed while it waits here
"""


def test_another_process_sees_and_changes_the_same_bytes_and_leaves_nothing_when_killed():
    size = 5 * PAGE + 17
    ours, theirs = socket.socketpair()
    with ours, closing(create_segment(size, numa_id=None, label="ring buffer")) as segment:
        segment.array(np.uint32, 4, 3)[:] = 1, 2, 3
        command = [sys.executable, "-c", CHILD, str(theirs.fileno())]
        child = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        socket.send_fds(ours, [b"f"], [segment.fd])
        assert ours.recv(1) == b"k"
        child.kill()
        child.wait()
        assert segment.array("<u4", 0, 5).tolist() == [0, 10, 20, 30, 0]
        assert os.fstat(segment.fd).st_nlink == 0  # it has no name anywhere
        assert os.fstat(segment.fd).st_dev != Path("/dev/shm").stat().st_dev
    assert not mappings_named("ring")


def test_every_page_is_there_from_the_start_and_zero():
    with closing(create_segment(64 * PAGE + 1, numa_id=None, label="full")) as segment:
        assert os.fstat(segment.fd).st_blocks * 512 >= 65 * PAGE
        assert not segment.array(np.uint8, 0, segment.size).any()
        assert fcntl.fcntl(segment.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_an_older_kernel_that_cannot_populate_gives_every_page_as_well(monkeypatch):
    monkeypatch.setattr(numa, "MADV_POPULATE_WRITE", 9999)
    with closing(create_segment(64 * PAGE, numa_id=None, label="old")) as segment:
        assert os.fstat(segment.fd).st_blocks * 512 >= 64 * PAGE


def test_the_kernel_binds_to_node_0_and_says_that_all_pages_are_there(
    two_nodes, kernel_tells, kernel_binds
):
    with closing(create_segment(100 * PAGE, numa_id=0, label="bound")) as segment:
        assert numa.pages_by_node(segment.address, segment.size) == {0: 100}
        # numa_maps names the policy: this is mbind's doing, not chance.
        lines = numa.NUMA_MAPS.read_text().splitlines()
        assert any(f"{segment.address:x} bind:0" in line for line in lines)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_where_mbind_is_refused_a_thread_on_the_node_touches_the_pages(
    two_nodes, kernel_tells, monkeypatch, code
):
    ran_on = []
    fallocate = os.posix_fallocate
    monkeypatch.setattr(numa, "bind", refuse(code))
    monkeypatch.setattr(
        os, "posix_fallocate", lambda *a: (ran_on.append(os.sched_getaffinity(0)), fallocate(*a))
    )
    with closing(create_segment(10 * PAGE, numa_id=0, label="touched")) as segment:
        assert numa.pages_by_node(segment.address, segment.size) == {0: 10}
    allowed, on_node = two_nodes
    assert ran_on == [on_node]
    assert os.sched_getaffinity(0) == allowed


def test_first_touch_that_failed_gives_the_cpus_back_and_the_descriptor(two_nodes, monkeypatch):
    before = open_fds()
    monkeypatch.setattr(numa, "bind", refuse(errno.EPERM))
    monkeypatch.setattr(os, "posix_fallocate", refuse(errno.ENOSPC))
    with pytest.raises(MeasurementError, match=r"on NUMA node 1:"):
        create_segment(10 * PAGE, numa_id=1, label="touched")
    assert os.sched_getaffinity(0) == two_nodes[0]
    assert open_fds() == before
    assert not mappings_named("touched")


def test_first_touch_pins_the_calling_thread_only(two_nodes, kernel_tells, monkeypatch):
    others = []

    def look(*_):
        watcher.start()
        watcher.join()

    watcher = threading.Thread(
        target=lambda: others.append(os.sched_getaffinity(threading.main_thread().native_id))
    )
    monkeypatch.setattr(numa, "bind", refuse(errno.EPERM))
    monkeypatch.setattr(os, "posix_fallocate", look)
    made = threading.Thread(target=lambda: create_segment(PAGE, numa_id=0, label="t").close())
    made.start()
    made.join()
    assert others == [two_nodes[0]]


def test_pages_that_the_kernel_put_elsewhere_are_an_error(two_nodes, kernel_tells, monkeypatch):
    bind = numa.bind
    monkeypatch.setattr(numa, "bind", lambda address, size, _: bind(address, size, 0))
    with pytest.raises(MeasurementError) as caught:
        create_segment(7 * PAGE, numa_id=1, label="inbox of G2")
    assert "bytes on NUMA node" in str(caught.value)


@pytest.mark.parametrize(
    ("seen", "sentence"),
    [
        ({0: 9, 1: 1}, "of 10 pages .*: 1 on node 1"),
        ({0: 8, numa.NO_NODE: 2}, "of 10 pages .*: 2 on no node"),
        ({}, "of 0 pages .*: none seen"),
    ],
)
def test_a_single_page_elsewhere_is_enough(two_nodes, monkeypatch, seen, sentence):
    before = open_fds()
    monkeypatch.setattr(numa, "pages_by_node", lambda *_: seen)
    with pytest.raises(MeasurementError, match=sentence):
        create_segment(10 * PAGE, numa_id=0, label="x")
    assert open_fds() == before


def hide_numa_maps(monkeypatch, tmp_path):
    honest = numa.pages_by_node
    monkeypatch.setattr(numa, "pages_by_node", lambda *a: honest(*a, numa_maps=tmp_path / "none"))


def test_where_nothing_tells_the_node_the_segment_is_refused(two_nodes, monkeypatch, tmp_path):
    hide_numa_maps(monkeypatch, tmp_path)
    with pytest.raises(MeasurementError) as caught:
        create_segment(PAGE, numa_id=0, label="x")
    assert "bytes on NUMA node" in str(caught.value)


def test_with_one_node_only_there_is_nothing_to_check(monkeypatch, tmp_path):
    hide_numa_maps(monkeypatch, tmp_path)
    monkeypatch.setattr(numa, "online_nodes", lambda: (0,))
    create_segment(PAGE, numa_id=0, label="x").close()


def test_a_node_that_the_cpuset_forbids_is_named(two_nodes, monkeypatch):
    monkeypatch.setattr(numa, "bind", refuse(errno.EINVAL))
    with pytest.raises(MeasurementError, match=r"node 1: the node"):
        create_segment(PAGE, numa_id=1, label="x")


@pytest.mark.parametrize("size", [1 << 50, 1 << 70])
def test_more_than_the_machine_has_is_refused_before_it_is_tried(size):
    with pytest.raises(MeasurementError, match=r"on any NUMA node:"):
        create_segment(size, numa_id=None, label="x")


def test_more_than_the_node_has_is_refused_before_it_is_tried(two_nodes, monkeypatch):
    monkeypatch.setattr(numa, "available_bytes", lambda node: 1 << 30 if node is None else PAGE)
    with pytest.raises(MeasurementError, match=rf"node 1: the node has {PAGE} bytes"):
        create_segment(PAGE + 1, numa_id=1, label="x")


def test_a_limit_of_address_space_is_reported_and_leaves_no_descriptor(monkeypatch):
    before = open_fds()
    monkeypatch.setattr(mmap, "mmap", lambda *_, flags: refuse(errno.ENOMEM)())
    sentence = r"on any NUMA node: not enough memory \(Cannot allocate memory\)"
    with pytest.raises(MeasurementError, match=sentence):
        create_segment(4, numa_id=None, label="x")
    assert open_fds() == before


def test_attach_takes_the_descriptor_also_when_it_fails():
    before = open_fds()
    with pytest.raises(MeasurementError, match=r"memory x: cannot be mapped: a size of"):
        Segment.attach(os.memfd_create("empty"), "x")
    with pytest.raises(MeasurementError, match="Bad file descriptor"):
        Segment.attach(9999, "x")
    assert open_fds() == before


def test_closing_twice_is_closing_once_and_views_outlive_it():
    before = open_fds()
    segment = create_segment(PAGE, numa_id=None, label="viewed")
    view = segment.array(np.uint8, 0, 4)
    segment.close()
    segment.close()
    view[:] = 7
    assert view.sum() == 28
    assert mappings_named("viewed") == 1
    del view
    assert mappings_named("viewed") == 0
    assert open_fds() == before


def test_a_closed_segment_gives_no_address():
    segment = create_segment(PAGE, numa_id=None, label="gone")
    segment.close()
    for use in (
        lambda: segment.address,
        lambda: segment.fd,
        lambda: segment.array(np.uint8, 0, 1),
    ):
        with pytest.raises(MeasurementError, match=r"shared memory gone is"):
            use()


@pytest.mark.parametrize(("offset", "count"), [(0, 513), (8, 512), (-8, 1), (0, -1), (4096, 1)])
def test_a_view_outside_the_segment_is_refused(offset, count):
    with (
        closing(create_segment(4096, numa_id=None, label="x")) as segment,
        pytest.raises(MeasurementError, match=rf"{count} x float64 from byte {offset}"),
    ):
        segment.array(np.float64, offset, count)


def test_pages_not_faulted_in_are_on_no_node(kernel_tells):
    fd = os.memfd_create("sparse")
    os.ftruncate(fd, 3 * PAGE)
    with closing(Segment(fd, 3 * PAGE, "sparse")) as segment:
        segment.array(np.uint8, PAGE, 1)[:] = 1
        seen = numa.pages_by_node(segment.address, segment.size)
        assert seen.pop(numa.NO_NODE) == 2
        assert sum(seen.values()) == 1


NUMA_MAPS = """\
10000 default file=/usr/bin/N9=9 mapped=4 N0=4 kernelpagesize_kB=4
20000 bind:1 file=/memfd:tccl-a\\040b\\040(deleted) dirty=4 N0=1 N1=3 kernelpagesize_kB=4
90000 default
"""


def test_numa_maps_is_read_for_the_mapping_that_contains_the_address(tmp_path):
    path = tmp_path / "numa_maps"
    path.write_text(NUMA_MAPS)
    assert numa.pages_by_node(0x20000, 4 * PAGE, path) == {0: 1, 1: 3}
    assert numa.pages_by_node(0x21000, 6 * PAGE, path) == {0: 1, 1: 3, numa.NO_NODE: 2}
    assert numa.pages_by_node(0x10000, PAGE, path) == {0: 4}
    for address in (0x0, 0x90000):
        with pytest.raises(MeasurementError):
            numa.pages_by_node(address, PAGE, path)


def test_nodes_and_their_cpus_and_memory_are_read_from_sysfs(tmp_path):
    nodes, files = tmp_path / "sys/devices/system/node", HostFiles(root=tmp_path)
    (nodes / "node1").mkdir(parents=True)
    (nodes / "online").write_text("0-1,4\n")
    (nodes / "node1/cpulist").write_text("8-9,24\n")
    (nodes / "node1/meminfo").write_text(
        "Node 1 MemTotal:  900 kB\nNode 1 MemFree:  100 kB\nNode 1 Active(file):  20 kB\n"
        "Node 1 Inactive(file):  3 kB\nNode 1 Shmem:  500 kB\n"
    )
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemFree: 2 kB\nMemAvailable:  5 kB\n")
    assert numa.online_nodes(files) == (0, 1, 4)
    assert numa.cpus_of_node(1, files) == (8, 9, 24)
    assert numa.available_bytes(1, files) == 123 * 1024
    assert numa.available_bytes(None, files) == 5 * 1024
    assert numa.available_bytes(2, files) is None


def test_a_kernel_without_numa_has_node_0(tmp_path):
    assert numa.online_nodes(HostFiles(root=tmp_path)) == (0,)


def test_cpus_of_a_node_that_is_not_there_are_an_error(tmp_path):
    with pytest.raises(MeasurementError, match=r"node3/cpulist: is missing"):
        numa.cpus_of_node(3, HostFiles(root=tmp_path))


def test_memory_only_nodes_have_no_cpus_to_run_on():
    assert numa.parse_cpu_list("\n") == ()
    with pytest.raises(MeasurementError, match=r"cannot run on CPUs"):
        numa.pin_to_cpus(())


def test_an_architecture_without_numbers_is_answered_as_a_refusal(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "riscv128")
    with pytest.raises(OSError) as caught:
        numa.bind(0, PAGE, 0)
    assert caught.value.errno == errno.ENOSYS


def test_a_thread_that_asks_to_wake_up_promptly_keeps_its_policy_and_its_nice_value():
    def asked():
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 7)
        numa.wake_promptly()
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        return nice, os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(asked).result() == (7, os.SCHED_OTHER)
