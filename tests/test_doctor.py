"""What the doctor finds on recorded hosts, by its whole sentences, and that no host can hurt it."""

import os
import struct

import pytest

from tccl_py.health.doctor import examine
from tccl_py.health.host import DriverState, GpuState, Host
from tccl_py.health.links import acs_control
from tccl_py.health.memory import shared_memory_needed
from tccl_py.model.knowledge import PeerAccess
from tests.recorded_hosts import config_space, link, pci, recorded, write

ROOT = "0000:00:01.1"
GPU = ("vendor=0x10de", "class=0x030000", "numa_node=0")


def said(host):
    """`severity: what [where]` of each finding."""
    return [f"{one.severity}: {one.what} [{one.where}]" for one in examine(host).findings]


def unseen(host):
    return [f"{one.what}: {one.why}" for one in examine(host).unseen]


def driver(count, *, pairs=(), name="NVIDIA L40S", complaints=(), persistence=True):
    return DriverState(
        gpus=tuple(
            GpuState(
                index=i,
                bus_id=f"0000:0{3 + i}:00.0",
                name=name,
                persistence=persistence,
                complaints=tuple(complaints) if i == 0 else (),
            )
            for i in range(count)
        ),
        peer_access=tuple(
            PeerAccess(source=i, target=j, supported=(i, j) not in pairs, provenance="reported")
            for i in range(count)
            for j in range(count)
            if i != j
        ),
    )


# Whole hosts


def test_a_clean_host_has_no_findings(tmp_path):
    host = recorded("clean", tmp_path, driver=driver(2), shm_free=10 << 30)
    assert said(host) == []
    assert unseen(host) == [
        "the PCIe generation that GPUs run at under load: at rest they lower it to save power; "
        "`tccl measure` says so if it stays low"
    ]


def test_a_box_as_it_came_has_everything_wrong(tmp_path):
    host = recorded("amd-as-it-came", tmp_path)
    assert said(host) == [
        "hang: ACS sends traffic between GPUs up to the CPU (request redirect, completion "
        "redirect) [bridges 0000:40:01.1, 0000:42:00.0, 0000:42:01.0]",
        "hang: a process may lock 64 MiB of memory only [ulimit -l of this user]",
        "hang: NCCL_GRAPH_FILE=/opt/graph.xml is set for all jobs of this host [/etc/nccl.conf:2]",
        "slow: the IOMMU translates what GPUs send [GPU 0 (0000:43:00.0), GPU 1 (0000:44:00.0)]",
        "slow: a PCIe link runs on 8 lanes, and both ends have 16 "
        "[GPU 1 (0000:44:00.0), below 0000:42:01.0]",
        "slow: a PCIe link runs at 16 GT/s, and both ends do 32 "
        "[the switch at 0000:41:00.0, below 0000:40:01.1]",
        "slow: RDMA cards cannot reach GPU memory: nvidia-peermem is not loaded [mlx5_0]",
        "slow: NCCL takes 'NCCL_P2P_LEVEL ' for the name, which it does not know "
        "[/etc/nccl.conf:3]",
        "slow: NCCL takes '\"1048576\"' for the value of NCCL_BUFFSIZE [/etc/nccl.conf:4]",
        "slow: NCCL takes 'export NCCL_ALGO' for the name, which it does not know "
        "[/etc/nccl.conf:5]",
        "note: sockets are split into 4 NUMA nodes each (NPS or SNC in the BIOS) "
        "[2 socket(s), 8 NUMA nodes]",
        "note: the kernel moves pages between NUMA nodes by itself (numa_balancing) "
        "[/proc/sys/kernel/numa_balancing]",
        'note: NCCL_BUFFSIZE="1048576" is set [/etc/nccl.conf:4]',
        "note: NCCL_PROTO=LL is set [/root/.nccl.conf:2]",
    ]


def test_what_mends_acs_names_every_bridge(tmp_path):
    finding = examine(recorded("amd-as-it-came", tmp_path)).findings[0]
    assert finding.mend.startswith(
        "setpci -s 0000:40:01.1 ECAP_ACS+0x6.w=0000; setpci -s 0000:42:00.0 ECAP_ACS+0x6.w=0000; "
    )
    assert finding.why == (
        "GPUs below one switch no longer talk through it but through the CPU, and any two of them "
        "through its IOMMU, which may stop them for good"
    )


def test_a_virtual_machine_tells_what_it_hides(tmp_path):
    host = recorded("intel-vm", tmp_path)
    assert said(host) == [
        "note: GPUs do not tell their NUMA node [GPU 0 (0000:00:06.0), GPU 1 (0000:00:07.0)]",
        "note: a process may lock 8 MiB of memory only [ulimit -l of this user]",
    ]
    assert examine(host).healthy
    assert unseen(host)[-1] == (
        "PCI switches, ACS and the IOMMU of the real machine: a virtual machine shows its own; run "
        "it on the hypervisor as well"
    )


def test_a_container_as_docker_makes_it_is_too_small(tmp_path):
    host = recorded("container", tmp_path)
    assert said(host) == [
        "hang: /dev/shm is small: 64 MiB [/dev/shm]",
        "hang: a process may map 512 MiB of virtual memory only [ulimit -v of this user]",
        "note: a process may lock 64 KiB of memory only [ulimit -l of this user]",
        "note: NCCL allocates host buffers through CUDA here, which needs NUMA calls "
        "[a container with driver 570.86.15]",
    ]
    assert examine(host).findings[0].mend == (
        "docker run --shm-size=1g ... (Kubernetes: an emptyDir of medium Memory)"
    )
    assert unseen(host) == [
        "GPUs: no NVIDIA GPU is here, or none is shown",
        "the PCI tree: this container has no /sys; mount the host's, or run it outside",
    ]


def test_an_empty_directory_is_a_host_of_which_nothing_is_seen(tmp_path):
    host = Host(root=tmp_path)
    assert said(host) == []
    assert unseen(host) == [
        "GPUs: no NVIDIA GPU is here, or none is shown",
        "NUMA nodes: /sys/devices/system/node has none",
        "the size of /dev/shm: /proc/mounts does not tell",
        "this user's limits: no /proc/self/limits",
    ]


# Access control


def test_acs_is_found_behind_other_capabilities():
    assert acs_control(config_space(0x1D)) == 0x1D


def test_without_root_or_with_nonsense_nothing_is_said_of_acs():
    endless = bytearray(4096)
    struct.pack_into("<I", endless, 0x100, 0x100 << 20 | 1)
    outside = bytearray(4096)
    struct.pack_into("<I", outside, 0x100, 0xFFC << 20 | 1)
    for config in (b"", bytes(64), b"\xff" * 4096, bytes(endless), bytes(outside), bytes(258)):
        assert acs_control(config) is None


def test_a_bridge_without_the_capability_redirects_nothing():
    assert acs_control(bytes(256)) == 0
    assert acs_control(bytes(4096)) == 0


def two_gpus(root, *, control, group=None):
    pci(root, ROOT, f"acs={control}")
    write(root, "sys/kernel/iommu_groups/1/type", "identity\n")
    more = () if group is None else (f"iommu={group}",)
    for i in (3, 4):
        pci(root, f"{ROOT}/0000:0{i}:00.0", *GPU, *more)
    return Host(root=root)


@pytest.mark.parametrize(
    ("control", "severity"), [("0004", "slow"), ("0008", "slow"), ("0020", "slow"), ("0053", None)]
)
def test_only_redirecting_bits_count_and_an_idle_iommu_makes_them_slow(tmp_path, control, severity):
    found = examine(two_gpus(tmp_path, control=control, group=1)).findings
    assert [one.severity for one in found] == ([severity] if severity else [])


def test_a_lone_gpu_has_nobody_to_be_kept_from(tmp_path):
    pci(tmp_path, ROOT, "acs=001d")
    pci(tmp_path, f"{ROOT}/0000:03:00.0", *GPU)
    assert said(Host(root=tmp_path)) == []


def test_what_only_root_sees_is_said(tmp_path):
    host = two_gpus(tmp_path, control="0000")
    write(tmp_path, f"sys/devices/pci0000:00/{ROOT}/config", bytes(64))
    assert unseen(host)[0] == (
        f"ACS of the bridges {ROOT}: only root may read all of a bridge's configuration; run it "
        "as root"
    )


# The driver


def test_pairs_without_peer_access_are_named(tmp_path):
    host = recorded("clean", tmp_path, driver=driver(2, pairs={(0, 1), (1, 0)}))
    assert said(host) == ["slow: the driver allows no P2P between some GPUs [pairs 0-1]"]


def test_geforce_cards_cannot_help_it(tmp_path):
    name = "NVIDIA GeForce RTX 4090"
    found = examine(recorded("clean", tmp_path, driver=driver(2, pairs={(0, 1)}, name=name)))
    (one,) = found.findings
    assert (one.severity, one.mend) == ("note", "")
    assert one.why == "NCCL moves their data through host memory, as on all GeForce cards"


def test_a_clock_that_a_setting_holds_is_noted(tmp_path):
    held = GpuState(index=0, bus_id="0000:03:00.0", clock_mhz=1410, clock_max_mhz=1980)
    host = recorded("clean", tmp_path, driver=DriverState(gpus=(held,)))
    assert said(host) == ["note: its clock is held at 1410 of 1980 MHz by a setting [GPU 0]"]
    assert examine(host).findings[0].mend == "nvidia-smi -i 0 -rac (as root)"


def test_what_the_driver_complains_of_is_passed_on(tmp_path):
    text = "GPU 0: its clocks are lowered by hw_slowdown; check its cooling"
    state = driver(2, complaints=(text,), persistence=False)
    host = recorded("clean", tmp_path, driver=state)
    assert said(host) == [
        "slow: its clocks are lowered by hw_slowdown [GPU 0]",
        "note: persistence mode is off [GPU 0, GPU 1]",
    ]
    assert examine(host).findings[0].mend == "check its cooling"


def test_a_full_dev_shm_is_found(tmp_path):
    host = recorded("clean", tmp_path, driver=driver(2), shm_free=1 << 20)
    assert said(host) == ["hang: /dev/shm is nearly full: 1 MiB of 503 GiB are free [/dev/shm]"]
    assert shared_memory_needed(8) == 8 * 4 * 2 * 9_637_888


# NCCL's settings


def settings(tmp_path, text="", **environment):
    write(tmp_path, "etc/nccl.conf", text)
    host = Host(root=tmp_path, environment=environment)
    return [f"{one.severity}: {one.what} [{one.where}]" for one in examine(host).findings]


def test_the_environment_comes_before_the_file(tmp_path):
    assert settings(tmp_path, "NCCL_ALGO=Tree\n", NCCL_ALGO="Ring") == []
    assert settings(tmp_path, "NCCL_ALGO=Tree\n") == [
        "slow: NCCL_ALGO=Tree is set [/etc/nccl.conf:1]"
    ]


def test_a_graph_file_in_a_job_is_worth_a_note_only(tmp_path):
    assert settings(tmp_path, NCCL_GRAPH_FILE="/a.xml") == [
        "note: NCCL_GRAPH_FILE=/a.xml is set [the environment]"
    ]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (" NCCL_DEBUG=INFO", "NCCL takes ' NCCL_DEBUG' for the name, which it does not know"),
        ("NCCL_DEBUG=INFO\r", "NCCL takes 'INFO\r' for the value of NCCL_DEBUG"),
        ("NCCL_DEBUG=INFO # loud", "NCCL takes 'INFO # loud' for the value of NCCL_DEBUG"),
        ("NCCL_DEBUG=" + "x" * 2000, "the value of NCCL_DEBUG is cut after 1023 characters"),
    ],
)
def test_lines_that_nccl_reads_otherwise_are_told(tmp_path, line, what):
    assert settings(tmp_path, f"{line}\n") == [f"slow: {what} [/etc/nccl.conf:1]"]


def test_comments_and_other_lines_are_nothing(tmp_path):
    assert settings(tmp_path, "# NCCL_ALGO=Tree\n\nhello\nPATH=/bin\nNCCL_DEBUG=INFO\n") == []


def test_the_file_that_the_environment_names_replaces_that_of_the_user(tmp_path):
    write(tmp_path, "root/.nccl.conf", "NCCL_ALGO=Tree\n")
    write(tmp_path, "opt/my.conf", "NCCL_PROTO=LL\n")
    assert settings(tmp_path, NCCL_CONF_FILE="/opt/my.conf") == [
        "note: NCCL_PROTO=LL is set [/opt/my.conf:1]"
    ]


# Hostile hosts


def test_a_fifo_a_loop_and_a_way_out_are_not_read(tmp_path):
    root = tmp_path / "root"
    (tmp_path / "secret").write_text("NCCL_ALGO=Tree\n")
    for folder in ("etc", "proc/self", "sys/bus/pci/devices", "root"):
        (root / folder).mkdir(parents=True)
    os.mkfifo(root / "etc" / "nccl.conf")
    os.mkfifo(root / "proc" / "self" / "limits")
    (root / "root" / ".nccl.conf").symlink_to(tmp_path / "secret")
    (root / "proc" / "mounts").symlink_to("mounts")
    link(root, "sys/bus/pci/devices/0000:03:00.0", "../../../etc")
    assert said(Host(root=root)) == []


def test_huge_and_binary_files_are_cut(tmp_path):
    noise = os.urandom(200_000)
    for path in (
        "etc/nccl.conf",
        "proc/self/limits",
        "proc/mounts",
        "proc/cpuinfo",
        "proc/meminfo",
    ):
        write(tmp_path, path, noise)
    write(tmp_path, "root/.nccl.conf", b"NCCL_ALGO=" + b"9" * 10_000_000)
    for name in ("vendor", "class", "config", "numa_node", "current_link_width"):
        write(tmp_path, f"sys/devices/pci0000:00/{ROOT}/{name}", noise)
    link(tmp_path, f"sys/bus/pci/devices/{ROOT}", f"sys/devices/pci0000:00/{ROOT}")
    diagnosis = examine(Host(root=tmp_path))
    assert len(diagnosis.findings) < 500
    assert all(len(one.what) < 300 for one in diagnosis.findings)
