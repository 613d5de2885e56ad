"""Discovery of this machine, against a sysfs built for each test and a stand-in for NVML."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tccl_py.errors import InputError
from tccl_py.model.machine import Fingerprint, HiddenLink, Machine, Nic, NvLink, PciLink
from tccl_py.nccl.paths import path_types
from tccl_py.nccl.system import PathType
from tccl_py.readers.live import check_cupy, discover_machine
from tccl_py.readers.sysfs import HostFiles
from tests.recorded_hosts import write

GEN4 = PciLink(speed_gts=16.0, width=16)


class NvmlError(Exception):
    """Stands for pynvml.NVMLError: carries the number in `value`."""

    def __init__(self, value: int, text: str = "Not Supported") -> None:
        super().__init__(text)
        self.value = value


NOT_SUPPORTED, LIBRARY_NOT_FOUND, GPU_IS_LOST = 3, 12, 15


def supported(answer: Any) -> Any:
    """An answer; None is a question that does not apply."""
    if answer is None:
        raise NvmlError(NOT_SUPPORTED)
    return answer


@dataclass
class FakeGpu:
    bus_id: str
    name: str = "NVIDIA RTX 6000"
    links: list[tuple[str, int | None]] = field(default_factory=list)
    """Bus id and type (0 GPU, 2 switch, None not supported) at the other end of each link."""
    c2c: int = 0
    lost: bool = False

    def place(self) -> bytes:
        if self.lost:
            raise NvmlError(GPU_IS_LOST, "GPU is lost")
        return f"0000{self.bus_id.upper()}".encode()

    def link(self, number: int) -> tuple[str, int | None]:
        return supported(self.links[number] if number < len(self.links) else None)


class FakeNvml:
    """NVML of a host with these GPUs; `pairs` says what peer access it reports."""

    NVMLError = NvmlError
    NVML_NVLINK_MAX_LINKS = 18
    NVML_FI_DEV_C2C_LINK_COUNT = 170
    cuda = 12080

    def __init__(self, *gpus: FakeGpu, pairs: Any = lambda one, other: 0, broken: int = 0) -> None:
        self.gpus, self.pairs, self.broken, self.open = gpus, pairs, broken, False

    def nvmlInit(self) -> None:  # noqa: N802 (NVML's names)
        if self.broken:
            raise NvmlError(self.broken, "Driver Not Loaded")
        self.open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open = False

    def __getattr__(self, name: str) -> Any:
        """A question to NVML, which has its name."""
        answers = {
            "SystemGetDriverVersion": lambda: b"570.86.15",
            "SystemGetCudaDriverVersion": lambda: self.cuda,
            "DeviceGetCount": lambda: len(self.gpus),
            "DeviceGetHandleByIndex": lambda index: self.gpus[index],
            "DeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=gpu.place()),
            "DeviceGetCudaComputeCapability": lambda gpu: (8, 9),
            "DeviceGetUUID": lambda gpu: f"GPU-{gpu.bus_id}",
            "DeviceGetName": lambda gpu: gpu.name,
            "DeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=24 << 30),
            "DeviceGetPcieReplayCounter": lambda gpu: supported(None),
            "DeviceGetNvLinkErrorCounter": lambda gpu, n, kind: 2 * (gpu.link(n) and kind == 1),
            "DeviceGetNvLinkCapability": lambda gpu, n, what: bool(gpu.link(n)),
            "DeviceGetNvLinkState": lambda gpu, n: int(gpu.link(n)[0] != "down"),
            "DeviceGetNvLinkRemotePciInfo": lambda gpu, n: SimpleNamespace(
                busId=gpu.link(n)[0].upper()
            ),
            "DeviceGetNvLinkRemoteDeviceType": lambda gpu, n: supported(gpu.link(n)[1]),
            "DeviceGetFieldValues": lambda gpu, fields: [
                SimpleNamespace(
                    nvmlReturn=0 if gpu.c2c else NOT_SUPPORTED,
                    value=SimpleNamespace(uiVal=gpu.c2c),
                )
            ],
            "DeviceGetP2PStatus": lambda *ends: supported(
                self.pairs(*map(self.gpus.index, ends[:2]))
            ),
        }
        answer = answers[name.removeprefix("nvml")]
        answer.__name__ = name
        return answer


@dataclass
class FakeHost:
    """A sysfs and procfs in a directory."""

    root: Path

    @property
    def sysfs(self) -> Path:
        return self.root / "sys"

    def write(self, path: str, text: str) -> None:
        write(self.root, path, f"{text}\n")

    def link(self, path: str, target: Path) -> None:
        entry = self.root / path
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.symlink_to(target)

    def pci(self, *chain: str, numa: int = 0, speed: str = "16.0 GT/s PCIe") -> None:
        """Devices from the root bus down, each with a gen 4 x16 port."""
        place = self.sysfs / "devices" / "pci0000:00"
        for bus_id in chain:
            place = place / bus_id
            if place.exists():
                continue
            where = str(place.relative_to(self.root))
            for name, text in (
                ("numa_node", str(numa)), ("max_link_speed", speed), ("max_link_width", "16"),
                ("vendor", "0x1000"), ("device", "0xc030"), ("subsystem_vendor", "0x1000"),
                ("subsystem_device", "0x0000"),
            ):  # fmt: skip
                self.write(f"{where}/{name}", text)
            self.link(f"sys/bus/pci/devices/{bus_id}", place)

    def device(self, bus_id: str) -> Path:
        return (self.sysfs / "bus" / "pci" / "devices" / bus_id).resolve()

    def node(self, number: int, cpus: str, *, package: int, mask: str = "0000ffff") -> None:
        base = f"sys/devices/system/node/node{number}"
        self.write(f"{base}/cpulist", cpus)
        self.write(f"{base}/cpumap", mask)
        if cpus:
            first = cpus.partition("-")[0]
            path = f"sys/devices/system/cpu/cpu{first}/topology/physical_package_id"
            self.write(path, str(package))

    def infiniband(self, name: str, bus_id: str, *, state: str = "4: ACTIVE") -> None:
        base = f"sys/class/infiniband/{name}"
        self.write(f"{base}/ports/1/state", state)
        self.write(f"{base}/ports/1/rate", "400 Gb/sec (4X NDR)")
        self.write(f"{base}/node_guid", "b859:9f03:0007:053a")
        self.link(f"{base}/device", self.device(bus_id))

    def interface(self, name: str, device: Path | None, *, speed: str = "25000") -> None:
        self.write(f"sys/class/net/{name}/operstate", "up")
        self.write(f"sys/class/net/{name}/speed", speed)
        if device is not None:
            device.mkdir(parents=True, exist_ok=True)
            self.link(f"sys/class/net/{name}/device", device)

    def discover(self, nvml: FakeNvml) -> Machine:
        return discover_machine(HostFiles(root=self.root), nvml=nvml)[0]


CPUINFO = """\
processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17

processor\t: 1
cpu family\t: 99
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHost]:
    """Two sockets with one NUMA node each, and one of CXL memory."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    host = FakeHost(tmp_path)
    host.node(0, "0-15", package=0)
    host.node(1, "16-31", package=1, mask="ffff0000")
    host.node(2, "", package=1)
    host.write("proc/cpuinfo", CPUINFO)
    host.write("proc/sys/kernel/osrelease", "6.8.0-45-generic")
    yield host


ROOT = "0000:00:01.0"
UP, DOWN_A, DOWN_B = "0000:10:00.0", "0000:11:00.0", "0000:11:01.0"
GPU_A, GPU_B, GPU_C = "0000:12:00.0", "0000:13:00.0", "0000:81:00.0"
CARD = "0000:14:00.0"


def switched(host: FakeHost) -> FakeNvml:
    """GPUs A and B and a network card below one switch, GPU C on the other socket."""
    host.pci(ROOT, UP, DOWN_A, GPU_A)
    host.pci(ROOT, UP, DOWN_B, GPU_B)
    host.pci(ROOT, UP, "0000:11:02.0", CARD)
    host.pci("0000:80:01.0", GPU_C, numa=1)
    return FakeNvml(FakeGpu(GPU_A), FakeGpu(GPU_B), FakeGpu(GPU_C))


def test_the_pci_tree_is_what_nccl_shows_ports_and_root_ports_left_out(host):
    machine = host.discover(switched(host))
    (bridge,) = machine.bridges
    assert (bridge.bus_id, bridge.parent, bridge.link) == (UP, "C0", GEN4)
    assert (bridge.vendor, bridge.device, bridge.subsystem_device) == ("0x1000", "0xc030", "0x0000")
    assert [gpu.parent for gpu in machine.gpus] == [UP, UP, "C1"]
    assert [gpu.link for gpu in machine.gpus] == [GEN4] * 3
    assert path_types(machine)["G0", "G1"] is PathType.PIX
    assert path_types(machine)["G0", "G2"] is PathType.SYS


def test_gpus_are_described_by_nvml(host):
    machine = host.discover(switched(host))
    gpu = machine.gpu(1)
    assert (gpu.bus_id, gpu.sm, gpu.name, gpu.gdr) == (GPU_B, 89, "NVIDIA RTX 6000", True)
    assert machine.name == "3x-nvidia-rtx-6000"


def test_numa_nodes_with_cpus_are_kept_with_socket_and_model(host):
    machine = host.discover(switched(host))
    assert [(n.numa_id, n.socket, n.affinity) for n in machine.numa_nodes] == [
        (0, 0, "0000ffff"),
        (1, 1, "ffff0000"),
    ]
    node = machine.numa_nodes[0]
    assert (node.arch, node.vendor, node.family, node.model) == ("x86_64", "AuthenticAMD", 25, 17)


def test_a_virtual_machine_with_gpus_on_the_root_bus_and_no_numa_works(host):
    host.node(1, "", package=0)
    host.pci("0000:00:06.0", numa=-1)
    host.pci("0000:00:07.0", numa=-1)
    hidden = [("fffffff:ff:ff.0", None)] * 18
    nvml = FakeNvml(FakeGpu("0000:00:06.0", links=hidden), FakeGpu("0000:00:07.0", links=hidden))
    machine = host.discover(nvml)
    assert [(node.id, node.numa_id) for node in machine.numa_nodes] == [("C0", -1)]
    assert machine.numa_nodes[0].socket == 0
    # Above a device on the root bus there is no port to tell a width, so NCCL has none.
    assert machine.gpu(0).link == PciLink(speed_gts=16.0)
    assert machine.nvlinks == tuple(NvLink(source=f"G{i}", target="S0", count=18) for i in range(2))
    assert path_types(machine)["G0", "G1"] is PathType.NVL


def test_devices_without_a_node_stand_beside_the_nodes_of_a_larger_system(host):
    host.pci(ROOT, GPU_A, numa=-1)
    machine = host.discover(FakeNvml(FakeGpu(GPU_A)))
    assert [node.numa_id for node in machine.numa_nodes] == [-1, 0, 1]
    assert machine.gpu(0).parent == "C0"


def test_a_gpu_that_sysfs_hides_hangs_from_an_unknown_node(host):
    machine = host.discover(FakeNvml(FakeGpu(GPU_A)))
    assert machine.gpu(0).parent == "C0"
    assert machine.numa_nodes[0].numa_id == -1
    assert machine.gpu(0).link == PciLink()


def test_a_link_is_as_fast_as_its_slower_end(host):
    host.pci("0000:00:02.0", speed="8.0 GT/s PCIe")
    host.pci("0000:00:02.0", GPU_A)
    assert host.discover(FakeNvml(FakeGpu(GPU_A))).gpu(0).link == PciLink(speed_gts=8.0, width=16)


@pytest.mark.parametrize(("speed", "width"), [("Unknown", "256"), ("Unknown speed", "0"), ("", "")])
def test_unknown_links_stay_unknown(host, speed, width):
    host.pci(ROOT, GPU_A, speed=speed)
    for end in (host.device(ROOT), host.device(GPU_A)):
        (end / "max_link_width").write_text(width)
    assert host.discover(FakeNvml(FakeGpu(GPU_A))).gpu(0).link == PciLink()


def test_a_width_that_one_end_does_not_know_is_the_width_of_the_end_that_does(host):
    host.pci(ROOT, GPU_A)
    (host.device(ROOT) / "max_link_width").write_text("255")
    assert host.discover(FakeNvml(FakeGpu(GPU_A))).gpu(0).link.width == 16
    (host.device(GPU_A) / "max_link_width").write_text("255")
    link = host.discover(FakeNvml(FakeGpu(GPU_A))).gpu(0).link
    assert (link.width, link.lanes) == (255, None)


def test_nvlinks_are_counted_by_gpu_and_by_switch_and_inactive_ones_left_out(host):
    nvml = switched(host)
    nvml.gpus[0].links = [(GPU_B, 0), (GPU_B, 0), ("down", 0)]
    nvml.gpus[1].links = [(GPU_A, None), ("0000:05:00.0", 2), ("0000:06:00.0", 2)]
    assert host.discover(nvml).nvlinks == (
        NvLink(source="G0", target="G1", count=2),
        NvLink(source="G1", target="G0", count=1),
        NvLink(source="G1", target="S0", count=2),
    )


def test_c2c_links_lead_to_the_gpus_cpu(host):
    host.pci("0000:80:01.0", GPU_C, numa=1)
    machine = host.discover(FakeNvml(FakeGpu(GPU_C, c2c=10)))
    assert machine.nvlinks == (NvLink(source="G0", target="C1", count=10, kind="c2c"),)


def test_active_rdma_ports_come_first_and_their_interfaces_are_not_counted_twice(host):
    nvml = switched(host)
    host.pci("0000:80:02.0", "0000:82:00.0", numa=1)
    host.infiniband("mlx5_10", CARD)
    host.infiniband("mlx5_2", CARD)
    host.infiniband("mlx5_0", CARD, state="1: DOWN")
    host.interface("ib0", host.device(CARD))
    host.interface("enp130s0", host.device("0000:82:00.0"))
    host.interface("lo", None)
    host.interface("docker0", None)
    host.write("sys/module/nvidia_peermem/version", "570")
    machine = host.discover(nvml)
    assert [nic.name for nic in machine.nics] == ["mlx5_2", "mlx5_10", "enp130s0"]
    assert machine.nics[0] == Nic(
        index=0, name="mlx5_2", parent=UP, bus_id=CARD, link=GEN4, speed_mbps=400000, gdr=True,
        guid="0xb8599f030007053a", port=1,
    )  # fmt: skip
    assert (machine.nics[2].parent, machine.nics[2].speed_mbps) == ("C1", 25000)
    assert machine.nics[2].gdr is False
    assert path_types(machine)["G0", "N0"] is PathType.PIX


def test_a_virtio_card_hangs_from_the_first_cpu_as_in_nccl(host):
    nvml = switched(host)
    host.interface("eth0", host.sysfs / "devices" / "pci0000:00" / "virtio2", speed="-1")
    assert host.discover(nvml).nics == (Nic(index=0, name="eth0", parent="C0"),)


@pytest.mark.parametrize(
    ("version", "kernel", "gdr"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64", "6.8.0", True),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64", "5.4.0", False),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module", "6.8.0", False),
    ],
)
def test_dma_buf_needs_the_open_driver_and_a_recent_kernel(host, version, kernel, gdr):
    nvml = switched(host)
    host.infiniband("mlx5_0", CARD)
    host.write("proc/driver/nvidia/version", version)
    host.write("proc/sys/kernel/osrelease", kernel)
    assert host.discover(nvml).nics[0].gdr is gdr


def test_geforce_cards_are_known_to_lack_gpu_direct(host):
    host.pci(ROOT, GPU_A)
    nvml = FakeNvml(FakeGpu(GPU_A, name="NVIDIA GeForce RTX 4090"))
    assert host.discover(nvml).gpu(0).gdr is False


def test_peer_access_is_what_nvml_reports_and_silence_is_left_out(host):
    nvml = switched(host)
    nvml.pairs = lambda one, other: {(0, 1): 0, (1, 0): 0, (0, 2): 1}.get((one, other))
    machine, knowledge, _ = discover_machine(HostFiles(root=host.root), nvml=nvml)
    facts = [(f.source, f.target, f.supported, f.provenance) for f in knowledge.peer_access]
    assert facts == [
        (0, 1, True, "reported"),
        (0, 2, False, "reported"),
        (1, 0, True, "reported"),
    ]
    assert not knowledge.can_access(machine, 0, 2)


def test_virtual_switches_of_one_chip_are_a_hidden_link(host):
    nvml = switched(host)
    other = "0000:90:00.0"
    host.pci("0000:80:03.0", other, "0000:91:00.0", "0000:92:00.0")
    nvml.gpus = (*nvml.gpus, FakeGpu("0000:92:00.0"))
    for one, peer in ((UP, other), (other, UP)):
        host.write(f"sys/kernel/pci_switch_link/virtual_switch_links/{one}/{peer}", "")
    knowledge = discover_machine(HostFiles(root=host.root), nvml=nvml)[1]
    assert knowledge.hidden_links == (
        HiddenLink(one=UP, other=other, provenance="reported", note="one PCIe switch chip"),
    )


def test_the_fingerprint_names_gpus_driver_and_kernel(host):
    nvml = switched(host)
    assert discover_machine(HostFiles(root=host.root), nvml=nvml)[2] == Fingerprint(
        gpu_uuids=tuple(f"GPU-{bus}" for bus in (GPU_A, GPU_B, GPU_C)),
        driver="570.86.15",
        numa_count=2,
        kernel="6.8.0-45-generic",
    )
    assert not nvml.open


INSTEAD = "`tccl discover --nccl-topology FILE`"


def test_without_a_driver_the_sentence_says_what_to_use_instead(host):
    with pytest.raises(InputError) as caught:
        host.discover(FakeNvml(broken=LIBRARY_NOT_FOUND))
    assert caught.value.where == "this machine"
    assert "Driver Not Loaded" in caught.value.what
    assert caught.value.right.startswith(INSTEAD)


def test_without_pynvml_the_sentence_is_the_same(host, monkeypatch):
    real = builtins.__import__

    def without_pynvml(name: str, *rest: Any, **more: Any) -> Any:
        if name == "pynvml":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_pynvml)
    with pytest.raises(InputError) as caught:
        discover_machine(HostFiles(root=host.root))
    assert "pynvml" in caught.value.what
    assert caught.value.right.startswith(INSTEAD)


def test_a_driver_without_gpus_is_refused(host):
    with pytest.raises(InputError) as caught:
        host.discover(FakeNvml())
    assert "no NVIDIA GPU" in caught.value.what
    assert caught.value.right.startswith(INSTEAD)


def test_a_lost_gpu_stops_discovery_by_name_and_closes_nvml(host):
    nvml = switched(host)
    nvml.gpus[1].lost = True
    with pytest.raises(InputError) as caught:
        host.discover(nvml)
    assert caught.value.where == "GPU 1"
    assert "nvmlDeviceGetPciInfo" in caught.value.what
    assert not nvml.open


@pytest.mark.parametrize(
    ("cuda", "extra"), [(11040, "cuda12"), (12080, "cuda12"), (13000, "cuda13"), (14010, "cuda13")]
)
def test_missing_cupy_is_named_as_the_driver_needs_it(monkeypatch, cuda, extra):
    nvml = FakeNvml(FakeGpu("0000:01:00.0"))
    nvml.cuda = cuda
    monkeypatch.setattr("tccl_py.readers.live.find_spec", lambda _: None)
    said = rf"^cupy-{extra}x: is not installed, .*; `pip install '\.\[{extra}\]'`"
    with pytest.raises(InputError, match=said):
        check_cupy(nvml=nvml)
    monkeypatch.setattr("tccl_py.readers.live.find_spec", lambda name: name)
    check_cupy(nvml=nvml)
