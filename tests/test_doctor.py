"""Findings of the doctor on recorded hosts; no host can hurt it."""

import dataclasses
import os
import struct
from collections import Counter
from importlib import resources

import pytest

from tccl_profiler.watch import GpuConditions
from tccl_py.files import encode_json
from tccl_py.health.checks import acs_control
from tccl_py.health.doctor import examine
from tccl_py.health.host import DriverState, HostState, rules
from tccl_py.model.machine import PeerAccess
from tccl_py.nccl.settings import environment as environment_of
from tccl_py.nccl_library import InstalledNccl
from tccl_py.plan.directory import write_new_plan, write_plan
from tccl_py.readers.live import GpuFacts
from tests.cluster_plans import equal_hosts
from tests.planned import needing_a_graph, plan_of
from tests.recorded_hosts import config_space, link, pci, recorded, write

ROOT = "0000:00:01.1"
GPU = ("vendor=0x10de", "class=0x030000", "numa_node=0")


def found(host):
    """`severity check [where]` of each finding, with the measured value where there is one."""
    return [
        f"{one.severity} {one.check} [{one.where}]" + (f" {one.measured}" if one.measured else "")
        for one in examine(host).findings
    ]


def unseen(host):
    """The check of each fact that could not be read."""
    return [one.check for one in examine(host).unseen]


def driver(count, *, pairs=(), name="NVIDIA L40S", complaints=(), persistence=True):
    return DriverState(
        gpus=tuple(
            GpuFacts(
                index=i,
                bus_id=f"0000:0{3 + i}:00.0",
                uuid=f"GPU-{i}",
                name=name,
                sm=89,
                links={},
                c2c_links=0,
            )
            for i in range(count)
        ),
        conditions=tuple(
            (GpuConditions(gpu=i, persistence=persistence), tuple(complaints) if i == 0 else ())
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
    assert found(host) == []
    assert unseen(host) == ["links"]


def test_a_box_as_it_came_has_everything_wrong(tmp_path):
    host = recorded("amd-as-it-came", tmp_path)
    assert found(host) == [
        "hang acs [bridges 0000:40:01.1, 0000:42:00.0, 0000:42:01.0] request redirect, completion "
        "redirect",
        "hang iommu [GPU 0 (0000:43:00.0), GPU 1 (0000:44:00.0)]",
        "hang limits [ulimit -l of this user] 64 MiB",
        "hang settings [/etc/nccl.conf:2]",
        "slow links [GPU 1 (0000:44:00.0), below 0000:42:01.0] x8",
        "slow links [the switch at 0000:41:00.0, below 0000:40:01.1] 16 GT/s",
        "slow peers [mlx5_0]",
        "slow settings [/etc/nccl.conf:3]",
        "slow settings [/etc/nccl.conf:4]",
        "slow settings [/etc/nccl.conf:5]",
        "note numa [2 socket(s), 8 NUMA nodes] 4 nodes a socket",
        "note numa [/proc/sys/kernel/numa_balancing] 1",
        "note settings [/etc/nccl.conf:4]",
        "note settings [/root/.nccl.conf:2]",
    ]


def test_the_fix_of_acs_names_every_bridge(tmp_path):
    finding = examine(recorded("amd-as-it-came", tmp_path)).findings[0]
    for bridge in ("0000:40:01.1", "0000:42:00.0", "0000:42:01.0"):
        assert f"setpci -s {bridge} ECAP_ACS+0x6.w=0000" in finding.fix
    assert "IOMMU" in finding.why


def test_a_virtual_machine_tells_what_it_hides(tmp_path):
    host = recorded("intel-vm", tmp_path)
    assert found(host) == [
        "note numa [GPU 0 (0000:00:06.0), GPU 1 (0000:00:07.0)]",
        "note limits [ulimit -l of this user] 8 MiB",
    ]
    assert examine(host).healthy
    assert unseen(host)[-1] == "virtual machine"


def test_gpus_have_nvmls_numbers_where_a_container_has_some_of_them(tmp_path):
    (one,) = driver(1).gpus
    seen = DriverState(gpus=(dataclasses.replace(one, bus_id="0000:00:07.0"),))
    host = recorded("intel-vm", tmp_path, driver=seen)
    assert found(host)[0] == (
        "note numa [a GPU that NVML does not show (0000:00:06.0), GPU 0 (0000:00:07.0)]"
    )


def test_a_container_as_docker_makes_it_is_too_small(tmp_path):
    host = recorded("container", tmp_path)
    assert found(host) == [
        "hang shared memory [/dev/shm] 64 MiB",
        "hang limits [ulimit -v of this user] 512 MiB",
        "note limits [ulimit -l of this user] 0.0625 MiB",
        "note container [a container with driver 570.86.15]",
    ]
    assert examine(host).findings[0].fix.startswith("docker run --shm-size=1g")
    assert unseen(host) == ["gpus", "container"]


def test_an_empty_directory_is_a_host_of_which_nothing_is_seen(tmp_path):
    host = HostState(root=tmp_path)
    assert found(host) == []
    assert unseen(host) == ["gpus", "numa", "shared memory", "limits"]


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
    return HostState(root=root)


@pytest.mark.parametrize(
    ("control", "severity"), [("0004", "slow"), ("0008", "slow"), ("0020", "slow"), ("0053", None)]
)
def test_only_redirecting_bits_count_and_an_idle_iommu_makes_them_slow(tmp_path, control, severity):
    findings = examine(two_gpus(tmp_path, control=control, group=1)).findings
    assert [one.severity for one in findings] == ([severity] if severity else [])


@pytest.mark.parametrize("slot", [(2.5, 16), (8.0, 16), (16.0, 16), (32.0, 16), (32.0, 8)])
@pytest.mark.parametrize("now", [16, 8, 4])
def test_a_slot_that_is_slower_or_narrower_than_its_gpu_is_found(tmp_path, slot, now):
    def link(name, speed, width):
        return f"{name}_link_speed={speed} GT/s PCIe", f"{name}_link_width={width}"

    speed, width = slot
    pci(tmp_path, ROOT, *link("max", speed, width), *link("current", 2.5, now))
    gpu = (*GPU, *link("max", 16.0, 16), *link("current", 2.5, now))
    pci(tmp_path, f"{ROOT}/0000:03:00.0", *gpu)
    expected = [f"{speed:g} GT/s"] * (speed < 16) + [f"x{now}"] * (now < min(16, width))
    links = [text for text in found(HostState(root=tmp_path)) if text.split()[1] == "links"]
    assert sorted(text.partition("] ")[2] for text in links) == sorted(expected)


def test_a_lone_gpu_has_nobody_to_be_kept_from(tmp_path):
    pci(tmp_path, ROOT, "acs=001d")
    pci(tmp_path, f"{ROOT}/0000:03:00.0", *GPU)
    assert found(HostState(root=tmp_path)) == []


@pytest.mark.parametrize(
    ("shown", "by_root", "why"),
    [
        (64, False, "only root"),
        (64, True, "this container or virtual machine shows root 64 bytes"),
        (0, False, "this system does not show"),
        (260, True, "this system does not show"),
    ],
)
def test_what_only_root_sees_is_said_and_what_nobody_sees_is_not_laid_on_the_user(
    tmp_path, shown, by_root, why
):
    host = dataclasses.replace(two_gpus(tmp_path, control="0000"), by_root=by_root)
    write(tmp_path, f"sys/devices/pci0000:00/{ROOT}/config", bytes(shown))
    hidden = examine(host).unseen[0]
    assert ROOT in hidden.what
    assert hidden.why.startswith(why)


# Translation, slots, BAR1, errors


def slots(root, *widths, speed="16.0 GT/s PCIe", kind="identity", card="16"):
    """GPUs whose slots have these numbers of lanes, below a root port each."""
    write(root, "sys/kernel/iommu_groups/1/type", f"{kind}\n")
    for i, width in enumerate(widths, start=1):
        port = f"0000:00:0{i}.1"
        names = ("max_link_width", "current_link_width", "max_link_speed", "current_link_speed")
        for path, best in ((port, width), (f"{port}/0000:0{i}:00.0", card)):
            lanes = (str(best), str(width), speed, speed)
            fields = [f"{name}={value}" for name, value in zip(names, lanes, strict=True)]
            pci(root, path, *(GPU if "/" in path else ("class=0x060400",)), "iommu=1", *fields)
    return HostState(root=root)


@pytest.mark.parametrize(
    ("kind", "names", "severity"),
    [("DMA", 2, "hang"), ("DMA-FQ", 2, "hang"), ("DMA", 1, "slow"), ("identity", 2, None)],
)
def test_translation_alone_hangs_what_gpus_send_each_other(tmp_path, kind, names, severity):
    host = slots(tmp_path, *[16] * names, kind=kind)
    assert [one.severity for one in examine(host).findings] == ([severity] if severity else [])


def test_translation_slows_alone_where_nvlinks_join_all_gpus(tmp_path):
    host = slots(tmp_path, 16, 16, kind="DMA")
    joined = driver(2)
    gpus = [
        dataclasses.replace(gpu, bus_id=f"0000:0{gpu.index + 1}:00.0", links={"": 18})
        for gpu in joined.gpus
    ]
    host = dataclasses.replace(host, driver=dataclasses.replace(joined, gpus=tuple(gpus)))
    assert [one.severity for one in examine(host).findings if one.check == "iommu"] == ["slow"]


@pytest.mark.parametrize(
    ("widths", "held"),
    [((16, 16, 4), ["GPU 2"]), ((8, 8), []), ((8, 8, 8, 8), []), ((16, 8), ["GPU 1"])],
)
def test_a_slot_below_its_siblings_is_named_and_a_board_of_x8_is_not(tmp_path, widths, held):
    findings = list(examine(slots(tmp_path, *widths)).findings)
    assert [(one.severity, one.check, one.where) for one in findings] == [
        ("slow", "hardware", where) for where in held
    ]
    if widths == (16, 16, 4):
        assert "has 4 lanes of 16 GT/s (7.9 GB/s)" in findings[0].what
        assert "GPUs 0, 1 alone get" in findings[0].what
        assert "CUDA_VISIBLE_DEVICES=0,1" in findings[0].fix


def test_gpus_at_the_chipset_are_named(tmp_path):
    pci(tmp_path, "0000:00:1c.4", "vendor=0x8086", "class=0x060400")
    pci(tmp_path, "0000:00:1c.4/0000:03:00.0", *GPU)
    assert found(HostState(root=tmp_path)) == ["slow hardware [GPU 0 (0000:03:00.0)]"]


@pytest.mark.parametrize(
    ("bar1", "options", "found"),
    [(28, "ForceP2P=0x11", 2), (28, "ForceP2P=0", 0), (28, "", 0), (35, "ForceP2P=0x11", 0)],
)
def test_a_small_bar1_hangs_p2p_that_goes_through_it(tmp_path, bar1, options, found):
    host = slots(tmp_path, 16, 16)
    text = f"0x{0xFA << 24:016x} 0x{0xFB << 24:016x} 0x40200\n"
    text += f"0x{1 << 40:016x} 0x{(1 << 40) + (1 << bar1) - 1:016x} 0x14220c\n"
    for i in (1, 2):
        write(tmp_path, f"sys/bus/pci/devices/0000:0{i}:00.0/resource", text)
    write(tmp_path, "proc/driver/nvidia/params", f'RegistryDwords: "{options}"\n')
    findings = [one for one in examine(host).findings if one.check == "BAR1"]
    assert [(one.severity, one.measured) for one in findings] == [("hang", "256 MiB")] * found


def test_errors_that_become_more_are_told_and_a_few_repeats_are_not(tmp_path):
    host = slots(tmp_path, 16, 16)
    place = "sys/bus/pci/devices/0000:02:00.0/aer_dev_correctable"
    write(tmp_path, place, "RxErr 7\nTOTAL_ERR_COR 7\n")
    assert found(host) == []
    earlier = {"0000:02:00.0": Counter({"correctable errors of PCIe": 5})}
    (finding,) = examine(dataclasses.replace(host, earlier_errors=earlier)).findings
    assert (finding.severity, finding.where) == ("slow", "GPU 1 (0000:02:00.0)")
    assert finding.measured == "correctable errors of PCIe: 7; 2 more while this ran"


@pytest.mark.parametrize(
    ("version", "sm", "count"),
    [
        ("2.26.2", 120, 1), ("2.26.2", 90, 0), ("2.25.1", 120, 2), ("2.25.1", 90, 1),
        ("2.21.5", 120, 1), ("2.26.5", 120, 0), ("2.28.9", 120, 0),
    ],
)  # fmt: skip
def test_releases_of_nccl_that_fail_on_a_gpu_are_named(tmp_path, version, sm, count):
    gpus = tuple(dataclasses.replace(gpu, sm=sm) for gpu in driver(1).gpus)
    nccl = (InstalledNccl(version=version, source="torch"),)
    host = HostState(root=tmp_path, driver=DriverState(gpus=gpus), nccl=nccl)
    assert [one.severity for one in examine(host).findings].count("hang") == count


# The driver


def test_pairs_without_peer_access_are_named(tmp_path):
    host = recorded("clean", tmp_path, driver=driver(2, pairs={(0, 1), (1, 0)}))
    assert found(host) == ["slow peers [pairs 0-1]"]


def test_geforce_cards_cannot_help_it(tmp_path):
    name = "NVIDIA GeForce RTX 4090"
    host = recorded("clean", tmp_path, driver=driver(2, pairs={(0, 1)}, name=name))
    (one,) = examine(host).findings
    assert (one.severity, one.fix) == ("note", "")
    assert "GeForce" in one.why


def test_a_clock_that_a_setting_holds_is_noted(tmp_path):
    held = GpuConditions(gpu=0, sm_set_mhz=1410, sm_max_mhz=1980)
    host = recorded("clean", tmp_path, driver=DriverState(conditions=((held, ()),)))
    assert found(host) == ["note gpus [GPU 0] 1410 MHz"]
    assert examine(host).findings[0].fix.startswith("nvidia-smi -i 0 -rac")


def test_what_the_driver_complains_of_is_passed_on(tmp_path):
    text = "GPU 0: its clocks are lowered by hw_slowdown; check its cooling"
    state = driver(2, complaints=(text,), persistence=False)
    host = recorded("clean", tmp_path, driver=state)
    assert found(host) == ["slow gpus [GPU 0]", "note gpus [GPU 0, GPU 1]"]
    lowered = examine(host).findings[0]
    assert (lowered.what, lowered.fix) == (
        "its clocks are lowered by hw_slowdown",
        "check its cooling",
    )


def test_a_full_dev_shm_is_found(tmp_path):
    host = recorded("clean", tmp_path, driver=driver(2), shm_free=1 << 20)
    (full,) = examine(host).findings
    assert (full.severity, full.where) == ("hang", "/dev/shm")
    assert full.measured.startswith("1 MiB of ")
    assert full.expected == f"at least {2 * 4 * 2 * 9_637_888 / (1 << 20):,.6g} MiB"


# NCCL's settings


def settings(tmp_path, text="", **environment):
    write(tmp_path, "etc/nccl.conf", text)
    host = HostState(root=tmp_path, environment=environment)
    return [(one.severity, one.what.split()[0], one.where) for one in examine(host).findings]


def test_the_environment_comes_before_the_file(tmp_path):
    assert settings(tmp_path, "NCCL_ALGO=Tree\n", NCCL_ALGO="Ring") == []
    ours = "# >>> tccl-py, made >>>\nNCCL_ALGO=Ring\n# <<< tccl-py <<<\n"
    assert settings(tmp_path, ours) == []
    assert len(settings(tmp_path, f"{ours}NCCL_BUFFSIZE=65536\n")) == 1
    assert settings(tmp_path, "NCCL_ALGO=Tree\n") == [
        ("slow", "NCCL_ALGO=Tree", "/etc/nccl.conf:1")
    ]


@pytest.mark.parametrize("level", ["LOC", "0"])
def test_a_level_that_disables_p2p_is_told_as_that(tmp_path, level):
    write(tmp_path, "etc/nccl.conf", f"NCCL_P2P_LEVEL={level}\n")
    (finding,) = examine(HostState(root=tmp_path)).findings
    assert (finding.severity, finding.what) == ("slow", f"NCCL_P2P_LEVEL={level} disables P2P")
    assert finding.fix.startswith("only if nobody set it against hangs")


@pytest.mark.parametrize(("name", "careful"), [("NCCL_P2P_DISABLE", True), ("NCCL_ALGO", False)])
def test_what_people_set_against_hangs_is_taken_out_on_a_condition_alone(tmp_path, name, careful):
    (finding,) = examine(HostState(root=tmp_path, environment={name: "1"})).findings
    assert finding.fix.startswith("only if nobody set it against hangs" if careful else "unset")
    assert finding.fix.endswith(f"unset {name}")


def test_a_graph_file_in_a_job_is_worth_a_note_only(tmp_path):
    write(tmp_path, "a.xml", "<graphs/>")
    assert settings(tmp_path, NCCL_GRAPH_FILE="/a.xml") == [
        ("note", "NCCL_GRAPH_FILE=/a.xml", "the environment")
    ]


@pytest.mark.parametrize(
    ("variable", "severity", "words"),
    [
        ("NCCL_GRAPH_FILE=", "hang", "with no file"),
        ("NCCL_GRAPH_FILE=/old/graph.xml", "hang", "not here"),
        ("NCCL_TOPO_FILE=/old/topo.xml", "note", "not here"),
        ("NCCL_TOPO_FILE=/opt/other.xml", "slow", "lacks GPU 1 (0000:04:00.0)"),
        ("NCCL_TOPO_FILE=/opt/own.xml", "slow", "is set"),
        ("NCCL_TOPO_FILE=own.xml", "slow", "is set"),
        ("NCCL_IB_HCA=mlx5_4:1", "slow", "names mlx5_4, and the RDMA NICs here are mlx5_0"),
        ("NCCL_IB_HCA==mlx5", "slow", "names mlx5,"),
        ("NCCL_IB_HCA=mlx5,ib", "note", "names ib,"),
        ("NCCL_IB_HCA=mlx5_0", None, ""),
        ("NCCL_IB_HCA=^mlx5_4", None, ""),
        ("NCCL_SOCKET_IFNAME=ens7", "hang", "names ens7, and the interfaces here are eth0, lo"),
        ("NCCL_SOCKET_IFNAME==eth", "hang", "names eth,"),
        ("NCCL_SOCKET_IFNAME=ens7,eth", "note", "names ens7,"),
        ("NCCL_SOCKET_IFNAME=eth", None, ""),
        ("NCCL_SOCKET_IFNAME=^docker", "hang", "leaves NCCL `lo`"),
        ("NCCL_SOCKET_IFNAME=^docker,lo", None, ""),
        ("NCCL_SOCKET_IFNAME=^=docker0,l", "hang", "leaves NCCL `lo`"),
        ("NCCL_PROTO=LL,LL128", "hang", "LL128"),
        ("NCCL_PROTO=allreduce:LL128;broadcast:LL", "hang", "LL128"),
        ("NCCL_PROTO=^LL128", "note", "is set"),
    ],
)
def test_values_that_do_not_fit_the_host_are_told_in_files_and_jobs(
    tmp_path, variable, severity, words
):
    host = recorded("clean", tmp_path, driver=driver(2))
    write(tmp_path, "sys/class/infiniband/mlx5_0/node_guid", "1")
    write(tmp_path, "sys/module/nvidia_peermem/version", "1")
    for interface in ("eth0", "lo"):
        write(tmp_path, f"sys/class/net/{interface}/mtu", "1500")
    ids = ("00000000:03:00.0", "0000:04:00.0")
    files = {"other": ids[:1], "own": ids}
    for name, bus_ids in files.items():
        text = "".join(f'<pci busid="{bus_id}"/>' for bus_id in bus_ids)
        write(tmp_path, f"opt/{name}.xml", text)
    name, _, value = variable.partition("=")
    in_job = examine(dataclasses.replace(host, environment={name: value})).findings
    write(tmp_path, "etc/nccl.conf", f"{variable}\n")
    for findings, fix in ((in_job, f"unset {name}"), (examine(host).findings, "remove the line")):
        assert [one.severity for one in findings] == [severity] * (severity is not None)
        assert all(words in one.what and one.fix == fix for one in findings)


@pytest.mark.parametrize(
    ("algorithm", "protocol", "version", "fails"),
    [
        ("allreduce:tree", "LL", "2.31.2", True),
        ("allreduce:tree", "LL", "2.30.7", False),
        ("allreduce:tree", "allreduce:LL", "2.31.2", False),
        ("ring;allreduce:tree", "LL", "2.31.2", False),
    ],
)
def test_algorithms_of_some_collectives_beside_protocols_of_all_are_told(
    tmp_path, algorithm, protocol, version, fails
):
    variables = {"NCCL_ALGO": algorithm, "NCCL_PROTO": protocol}
    nccl = (InstalledNccl(version=version, source="of a test"),)
    host = recorded("clean", tmp_path, environment=variables, nccl=nccl)
    severities = [one.severity for one in examine(host).findings if "beside" in one.what]
    assert severities == ["hang"] * fails


@pytest.mark.parametrize("gpus", [False, True])
def test_gpus_and_nics_are_not_proven_by_a_host_alone(tmp_path, gpus):
    host = recorded("clean", tmp_path, driver=driver(2)) if gpus else HostState(root=tmp_path)
    write(tmp_path, "sys/class/infiniband/mlx5_0/node_guid", "1")
    whys = {one.what: one.why for one in examine(host).unseen}
    named = [whys[what] for what in whys if "mlx5_0 carry data (GPU Direct RDMA)" in what]
    assert [why.startswith("not proven: ") for why in named] == [True] * bool(gpus)


def test_ll128_is_nccls_own_affair_where_nvlink_joins_all_gpus(tmp_path):
    state = driver(2)
    gpus = tuple(dataclasses.replace(gpu, links={"": 18}) for gpu in state.gpus)
    state = dataclasses.replace(state, gpus=gpus)
    host = recorded("clean", tmp_path, driver=state, environment={"NCCL_PROTO": "LL128"})
    assert [one.severity for one in examine(host).findings] == ["note"]


@pytest.mark.parametrize(
    ("options", "findings"),
    [
        ("", []),
        ("RMIntrLockingMode=1", []),
        ("RMForceP2PType=1;EnableResizableBar=1", ["note /RMForceP2PType=1"]),
        ("ForceP2P=0x11; RMPcieP2PType=2", ["note /ForceP2P=0x11; RMPcieP2PType=2"]),
        ("ForceP2P=0x1", ["slow /ForceP2P=0x1"]),
        ("ForceP2P=529", ["note /ForceP2P=529"]),
        (
            "RMForceStaticBar1=1;PeerMappingOverride=1",
            ["note /RMForceStaticBar1=1; PeerMappingOverride=1"],
        ),
    ],
)
def test_options_of_the_driver_that_decide_on_p2p_are_told(tmp_path, options, findings):
    host = recorded("clean", tmp_path, driver=driver(2))
    write(tmp_path, "proc/driver/nvidia/params", f'EnableMSI: 1\nRegistryDwords: "{options}"\n')
    found = examine(host).findings
    assert [f"{one.severity} /{one.measured}" for one in found] == findings
    assert all("NVreg_RegistryDwords" in one.fix for one in found)


@pytest.mark.parametrize(
    ("value", "more", "count"), [("N", "", 1), ("Y", "", 0), ("N", " nokaslr", 0)]
)
def test_hmm_is_noted_unless_it_or_address_randomisation_is_disabled(tmp_path, value, more, count):
    host = recorded("clean", tmp_path, driver=driver(2))
    write(tmp_path, "sys/module/nvidia_uvm/parameters/uvm_disable_hmm", f"{value}\n")
    write(tmp_path, "proc/cmdline", f"iommu=pt{more}\n")
    findings = examine(host).findings
    assert [one.severity for one in findings] == ["note"] * count
    assert all("uvm_disable_hmm=1" in one.fix for one in findings)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (" NCCL_DEBUG=INFO", "' NCCL_DEBUG' for the name"),
        ("NCCL_DEBUG=INFO\r", "'INFO\r' for the value"),
        ("NCCL_DEBUG=INFO # loud", "'INFO # loud' for the value"),
        ("NCCL_DEBUG=" + "x" * 2000, "after 1023 characters"),
        ("NCCL_P2P_LEVLE=SYS", "NCCL has no NCCL_P2P_LEVLE"),
    ],
)
def test_lines_that_nccl_reads_otherwise_are_told(tmp_path, line, what):
    write(tmp_path, "etc/nccl.conf", f"{line}\n")
    (misread,) = examine(HostState(root=tmp_path)).findings
    assert (misread.severity, misread.where) == ("slow", "/etc/nccl.conf:1")
    assert what in misread.what


LIBRARY_LINE = "NCCL_ENV_PLUGIN=/plan/nccl/libnccl-env-tccl.so\n"
INSTALLED = f"{LIBRARY_LINE}TCCL_INDEX=/plan/nccl/plugin.index\nNCCL_P2P_LEVEL=SYS\n"


@pytest.fixture
def installed(tmp_path):
    """The root of a host with a plan and its plugin, which nccl.conf loads."""
    (tmp_path / "plan").mkdir()
    write_plan(needing_a_graph(plan_of("amd-v100")), tmp_path / "plan")
    write(tmp_path, "plan/nccl/libnccl-env-tccl.so", "")
    write(tmp_path, "etc/nccl.conf", INSTALLED)
    return tmp_path


def of_plugin(root, **more):
    """What is found of the plugin."""
    findings = examine(HostState(root=root, **more)).findings
    return [one.what for one in findings if one.check == "plugin"]


def change(root, path, text):
    """Write a file, or take it out (None)."""
    write(root, path, text) if text is not None else (root / path).unlink()


@pytest.mark.parametrize(
    ("path", "text", "word"),
    [
        ("etc/hostname", "box", ""),
        ("plan/nccl/libnccl-env-tccl.so", None, "library"),
        ("plan/nccl/plugin.index", None, "missing"),
        ("plan/nccl/plugin.index", "tccl-index 1\n", "another version"),
        ("plan/nccl/plugin.index", "tccl-index 2\n", "damaged"),
        ("plan/nccl/graph.xml", "", "graph.xml"),
        ("plan/manifest.json", '{"files": {}}', "beside"),
        ("etc/nccl.conf", INSTALLED[:-19], "NCCL_P2P_LEVEL is not set"),
    ],
)
def test_an_installed_plugin_that_does_nothing_is_told(installed, path, text, word):
    change(installed, path, text)
    found = of_plugin(installed)
    assert len(found) == bool(word)
    assert all(word in what for what in found)


def test_a_folder_of_boards_that_the_plugin_cannot_use_is_told_with_the_remedy(tmp_path):
    write(tmp_path, "etc/nccl.conf", INSTALLED)
    me, other = os.geteuid(), os.geteuid() + 1
    for user in (me, other):
        (tmp_path / f"dev/shm/tccl-{user}").mkdir(parents=True, mode=0)
    write(tmp_path, f"dev/shm/tccl-{other + 1}", "no folder")
    host = HostState(root=tmp_path)
    found = {one.where: one for one in examine(host).findings if one.where.startswith("/dev/shm/")}
    assert found.keys() == {f"/dev/shm/tccl-{other}", f"/dev/shm/tccl-{other + 1}"}
    assert found[f"/dev/shm/tccl-{other}"].fix.startswith(f"rm -r /dev/shm/tccl-{other}, as user")


def test_findings_on_names_that_are_not_utf_8_can_be_written(tmp_path):
    environment = {"TCCL_INDEX": "/\udcff", "NCCL_ENV_PLUGIN": "/\udcff/libnccl-env-tccl.so"}
    found = examine(HostState(root=tmp_path, environment=environment))
    assert "/\ufffd/libnccl-env-tccl.so is missing" in encode_json(found)


@pytest.mark.parametrize(("place", "word"), [("/", "missing or was changed"), ("", "not absolute")])
def test_an_index_outside_of_a_plans_directory_is_judged_as_well(installed, place, word):
    (installed / "plan/nccl/plugin.index").rename(installed / "plugin.index")
    write(installed, "etc/nccl.conf", f"{LIBRARY_LINE}TCCL_INDEX={place}plugin.index\n")
    (what,) = of_plugin(installed)
    assert word in what


@pytest.mark.parametrize(
    ("host", "path", "text", "word"),
    [
        ("gpu0000", "etc/hostname", "box", ""),
        ("gpu0002", "etc/hostname", "box", "it is missing"),
        ("gpu0000", "job/manifest.json", '{"files": {}}', "beside"),
        ("gpu0000", "job/nccl/hosts/path-0.graph", "", "path-0.graph"),
    ],
)
def test_the_plugin_of_a_job_over_hosts_is_judged_by_the_index_of_this_host(
    tmp_path, host, path, text, word
):
    made = needing_a_graph(equal_hosts(2))
    write_new_plan(made, tmp_path / "job")
    write(tmp_path, "job/nccl/libnccl-env-tccl.so", "")
    change(tmp_path, path, text)
    loading = {"NCCL_ENV_PLUGIN": "/job/nccl/libnccl-env-tccl.so", "TCCL_JOB": "/job"}
    environment = {**environment_of(made.settings), **loading, "SLURMD_NODENAME": host}
    found = of_plugin(tmp_path, environment=environment)
    assert len(found) == bool(word)
    assert all(word in what for what in found)


def test_other_plugins_and_older_versions_are_told(tmp_path):
    write(tmp_path, "etc/nccl.conf", LIBRARY_LINE)
    nccl = (InstalledNccl(version="2.27.3", source="torch"),)
    env = {"NCCL_ENV_PLUGIN": "/their/plugin.so", "NCCL_TUNER_PLUGIN": "theirs"}
    host = HostState(root=tmp_path, environment=env, nccl=nccl)
    found = [one for one in examine(host).findings if one.check == "plugin"]
    words = ["another plugin", "TCCL_INDEX", "NCCL_TUNER_PLUGIN", "2.27.3"]
    assert all(word in one.what for word, one in zip(words, found, strict=True))
    assert [one.severity for one in found] == ["slow", "slow", "note", "note"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("2.33.1", []),
        ("2.34.0", []),
        ("2.33.0", ["newer than 2.33.0"]),
        ("", ["newer than 2.32"]),
        ("1", ["TCCL_NEWER_NCCL is '1'", "newer than 2.32"]),
    ],
)
def test_a_later_nccl_is_allowed_up_to_the_one_that_was_tried(installed, value, words):
    write(installed, "etc/nccl.conf", f"{INSTALLED}TCCL_NEWER_NCCL={value}\n")
    found = of_plugin(installed, nccl=(InstalledNccl(version="2.33.1", source="torch"),))
    assert len(found) == len(words)
    assert all(word in what for word, what in zip(words, found, strict=True))


def test_comments_and_other_lines_are_nothing(tmp_path):
    assert settings(tmp_path, "# NCCL_ALGO=Tree\n\nhello\nPATH=/bin\nNCCL_DEBUG=INFO\n") == []


def test_the_file_that_the_environment_names_replaces_that_of_the_user(tmp_path):
    write(tmp_path, "root/.nccl.conf", "NCCL_ALGO=Tree\n")
    write(tmp_path, "opt/my.conf", "NCCL_PROTO=LL\n")
    assert settings(tmp_path, NCCL_CONF_FILE="/opt/my.conf") == [
        ("note", "NCCL_PROTO=LL", "/opt/my.conf:1")
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
    assert found(HostState(root=root)) == []


def test_huge_and_binary_files_are_cut(tmp_path):
    noise = os.urandom(200_000)
    for path in (
        "etc/nccl.conf",
        *(f"proc/{name}" for name in ("self/limits", "mounts", "cpuinfo")),
    ):
        write(tmp_path, path, noise)
    write(tmp_path, "proc/meminfo", noise)
    write(tmp_path, "root/.nccl.conf", b"NCCL_ALGO=" + b"9" * 10_000_000)
    for name in ("vendor", "class", "config", "numa_node", "current_link_width"):
        write(tmp_path, f"sys/devices/pci0000:00/{ROOT}/{name}", noise)
    link(tmp_path, f"sys/bus/pci/devices/{ROOT}", f"sys/devices/pci0000:00/{ROOT}")
    diagnosis = examine(HostState(root=tmp_path))
    assert len(diagnosis.findings) < 500
    assert all(len(one.what) < 300 for one in diagnosis.findings)


def test_every_rule_is_used_and_says_who_says_so():
    folder = resources.files("tccl_py.health")
    sources = [path.read_text() for path in folder.iterdir() if path.name.endswith(".py")]
    for name, rule in rules().items():
        assert rule.source
        known = rule.releases or rule.facts or name.startswith("NCCL_")
        assert known or any(f'"{name}"' in text for text in sources), name


# Functions with a subnet for each

ADDRESSES = ("10.0.0.1", "10.0.1.1", "10.0.2.1", "10.0.3.1")


def small_host(root, *, mtu="9000", addresses=ADDRESSES):
    """A host of four RDMA functions; an address "" is none, and "down" a port without a link."""
    names = ("rocep1s0f0", "rocep1s0f1", "roceP2p1s0f0", "roceP2p1s0f1")
    for name, address in zip(names, addresses, strict=True):
        port, interface = f"sys/class/infiniband/{name}/ports/1", f"enp{name}"
        write(root, f"{port}/link_layer", "Ethernet\n")
        write(root, f"{port}/state", "1: DOWN\n" if address == "down" else "4: ACTIVE\n")
        write(root, f"{port}/gids/0", "fe80:0000:0000:0000:4a21:0bff:fe32:8b17\n")
        write(root, f"sys/class/infiniband/{name}/device/net/{interface}/mtu", "")
        write(root, f"sys/class/net/{interface}/mtu", f"{mtu}\n")
        if address not in ("", "down"):
            a, b, c, d = map(int, address.split("."))
            mapped = f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}\n"
            # RoCE v1 and v2
            write(root, f"{port}/gids/2", mapped)
            write(root, f"{port}/gids/3", mapped)
    return root


def network(root, **environment):
    host = HostState(root=root, environment=environment)
    return [one for one in examine(host).findings if one.check == "network"]


def test_functions_with_a_subnet_each_have_no_findings(tmp_path):
    assert network(small_host(tmp_path)) == []


def test_hosts_with_all_functions_in_one_subnet_are_at_a_switch(tmp_path):
    at_switch = tuple(f"10.0.0.{n}" for n in range(4))
    assert network(small_host(tmp_path, mtu="1500", addresses=at_switch)) == []


@pytest.mark.parametrize(
    ("number", "address", "severity", "where", "part"),
    [
        (2, "10.0.0.2", "slow", "roceP2p1s0f0, rocep1s0f0 in 10.0.0.0/24", "a subnet of its own"),
        (1, "down", "note", "rocep1s0f1 (enprocep1s0f1)", "down"),
        (2, "", "slow", "roceP2p1s0f0 (enproceP2p1s0f0)", "no IPv4 address"),
    ],
)
def test_what_keeps_rings_from_a_function_is_named_with_its_port_and_remedy(
    tmp_path, number, address, severity, where, part
):
    addresses = (*ADDRESSES[:number], address, *ADDRESSES[number + 1 :])
    findings = network(small_host(tmp_path, addresses=addresses))
    finding = next(one for one in findings if one.where == where)
    assert finding.severity == severity
    assert finding.fix
    assert part in str(finding)


def test_small_packets_and_functions_that_a_variable_leaves_out_are_named(tmp_path):
    of_last = [
        one for one in network(small_host(tmp_path, mtu="1500")) if "enproceP2p1s0f1" in one.fix
    ]
    assert [(one.severity, one.measured) for one in of_last] == [("slow", "1500")]
    assert "mtu 9000" in of_last[0].fix
    (left_out,) = network(small_host(tmp_path), NCCL_IB_HCA="rocep1")
    assert (left_out.where, left_out.measured) == (
        "roceP2p1s0f0, roceP2p1s0f1",
        "NCCL_IB_HCA=rocep1",
    )
    assert left_out.fix and "half of the port" in left_out.why


@pytest.mark.parametrize(
    ("variable", "count"),
    [
        ("NCCL_IB_MERGE_NICS=1", 1),
        ("NCCL_IB_MERGE_NICS=0", 0),
        ("NCCL_IB_SUBNET_AWARE_ROUTING=0", 1),
        ("NCCL_RUNTIME_CONNECT=0", 1),
        ("NCCL_CUMEM_ENABLE=0", 1),
        ("NCCL_IB_GID_INDEX=3", 1),
    ],
)
def test_variables_that_rings_along_cables_cannot_have_are_told(tmp_path, variable, count):
    name, _, value = variable.partition("=")
    found = [one for one in network(small_host(tmp_path), **{name: value}) if name in one.what]
    assert len(found) == count
    at_switch = small_host(tmp_path / "other", addresses=[f"10.0.0.{n}" for n in range(4)])
    assert not network(at_switch, **{name: value})


def test_an_nccl_that_vllm_alone_loads_is_told(tmp_path):
    nccl = (InstalledNccl(version="2.28.9", source="/lib/libnccl.so.2"),)
    for path, count in (("/opt/libnccl.so.2.27.3", 1), ("/lib/libnccl.so.2", 0)):
        host = HostState(root=tmp_path, nccl=nccl, environment={"VLLM_NCCL_SO_PATH": path})
        assert sum("VLLM" in one.what for one in examine(host).findings) == count


def test_on_hosts_of_several_gpus_which_may_be_at_switches_all_is_a_note(tmp_path):
    pci(tmp_path, ROOT, *GPU)
    pci(tmp_path, "0000:00:01.2", *GPU)
    assert {one.severity for one in network(small_host(tmp_path, mtu="1500"))} == {"note"}


def test_subnets_are_compared_by_the_bits_that_nccl_compares(tmp_path):
    close = ("10.0.0.1", "10.0.0.5", "10.0.0.9", "10.0.1.13")
    small_host(tmp_path, addresses=close)
    assert [one.where for one in network(tmp_path)] == [
        "roceP2p1s0f0, rocep1s0f0, rocep1s0f1 in 10.0.0.0/24"
    ]
    assert network(tmp_path, NCCL_IB_SUBNET_PREFIX_LEN="30") == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("etc/ufw/ufw.conf", "ENABLED=yes\n"),
        ("etc/systemd/system/multi-user.target.wants/firewalld.service", ""),
    ],
)
def test_a_firewall_on_the_subnets_is_named(tmp_path, path, text):
    write(small_host(tmp_path), path, text)
    (finding,) = network(tmp_path)
    assert "10.0.0.0/24" in finding.where
    assert finding.severity == "note"


def lldp_frame(port, *, system="spark2"):
    """A neighbour's frame as systemd-networkd saves it: port and system by their TLVs."""
    parts = [(1, b"\4\0\0\0\0\0\1"), (2, port), (5, system.encode()), (4, b"enp1s0f1np1"), (0, b"")]
    fields = b"".join((kind << 9 | len(one)).to_bytes(2, "big") + one for kind, one in parts)
    frame = bytes(14) + fields
    return len(frame).to_bytes(8, "little") + frame


@pytest.mark.parametrize(
    ("data", "ends"),
    [
        (lldp_frame(b"\5enp1s0f0np0"), ["enp1s0f0np0 of spark2"]),
        (lldp_frame(b"\5enp1s0f1np1") * 2 + lldp_frame(b"\5np0", system="b"), ["np0 of b"]),
        (lldp_frame(b"\3\0\0\0\0\0\1"), []),
        (lldp_frame(b"\5enp1s0f0np0")[:-30], []),
        (lldp_frame(b"\5eth0"), []),
        (b"\xff" * 100, []),
        (b"", []),
    ],
)
def test_a_cable_between_ports_of_one_number_is_named_where_lldp_tells_its_ends(
    tmp_path, data, ends
):
    root, name = small_host(tmp_path), "enp1s0f0np0"
    (root / "sys/class/infiniband/rocep1s0f0/device/net/enprocep1s0f0").rename(
        root / f"sys/class/infiniband/rocep1s0f0/device/net/{name}"
    )
    write(root, f"sys/class/net/{name}/ifindex", "7")
    (root / "run/systemd/netif/lldp").mkdir(parents=True)
    (root / "run/systemd/netif/lldp/7").write_bytes(data)
    found = network(root)
    assert [one.where for one in found] == [f"rocep1s0f0 ({name}) and {end}" for end in ends]
    assert all("other port" in one.fix for one in found)
