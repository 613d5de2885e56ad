"""The doctor on RDMA NICs and on what NCCL takes for its network, on hosts written as files."""

import pytest

from tccl_py.health.doctor import examine
from tccl_py.health.host import HostState
from tccl_py.readers.sysfs import rdma_ports
from tests.recorded_hosts import link, pci, write

ROCE, LOCAL = "::ffff:10.0.0.7", "fe80::1"
FAST = ("max_link_speed=32.0 GT/s PCIe", "max_link_width=16")


def slot(speed="32.0", width=16):
    return f"current_link_speed={speed} GT/s PCIe", f"current_link_width={width}"


def nic(root, number, *, state="ACTIVE", rate=400, ethernet=True, gids=(LOCAL, ROCE), links=None):
    """An RDMA NIC mlx5_N with one port below a root port of its own."""
    port, name = f"0000:{number:02x}:00.0", f"mlx5_{number}"
    pci(root, f"0000:00:0{number}.0", *FAST)
    pci(root, f"0000:00:0{number}.0/{port}", "vendor=0x15b3", *FAST, *(links or slot()))
    place = f"sys/class/infiniband/{name}"
    device = f"sys/devices/pci0000:00/0000:00:0{number}.0/{port}"
    link(root, f"{place}/device", device)
    write(root, f"{device}/net/eth{number}/mtu", "")
    write(root, f"sys/class/net/eth{number}/mtu", "9000")
    write(root, f"{place}/hca_type", "MT4129")
    write(root, f"{place}/ports/1/state", f"4: {state}")
    write(root, f"{place}/ports/1/rate", f"{rate} Gb/sec (4X NDR)")
    write(root, f"{place}/ports/1/link_layer", "Ethernet" if ethernet else "InfiniBand")
    for index, gid in enumerate(gids):
        write(root, f"{place}/ports/1/gids/{index}", gid)
        write(root, f"{place}/ports/1/gid_attrs/types/{index}", "RoCE v2")
    write(root, f"{place}/ports/1/gids/{len(gids)}", "0000:0000:0000:0000:0000:0000:0000:0000")
    return root


def host_of(root, *changes, files=(), **environment):
    """Four equal NICs, but for changes of each by its number."""
    for number in range(1, 5):
        nic(root, number, **dict(changes).get(number, {}))
    for path, text in files:
        write(root, path, text)
    return HostState(root=root, environment=environment)


def found(host):
    """`severity [where] measured < expected` of each finding on NICs and variables."""
    return [
        f"{one.severity} [{one.where}] {one.measured}<{one.expected}"
        for one in examine(host).findings
        if one.check in ("NICs", "settings")
    ]


def test_equal_nics_have_no_findings(tmp_path):
    assert found(host_of(tmp_path)) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"state": "DOWN"}, "slow [mlx5_2] DOWN<"),
        ({"state": "INIT", "ethernet": False}, "slow [mlx5_2] INIT<"),
        ({"rate": 100}, "slow [mlx5_2] 100 Gbit/s<400 Gbit/s"),
        ({"links": slot(width=8)}, "slow [mlx5_2, below 0000:00:02.0] x8<x16"),
        ({"links": slot("8.0")}, "slow [mlx5_2, below 0000:00:02.0] 8 GT/s<32 GT/s"),
    ],
)
def test_a_nic_below_its_siblings_is_named(tmp_path, changes, expected):
    assert expected in found(host_of(tmp_path, (2, changes)))


def test_a_nic_in_a_slot_of_fewer_lanes_than_its_siblings_have_is_named(tmp_path):
    host = host_of(tmp_path, (3, {"links": slot(width=4)}))
    write(tmp_path, "sys/bus/pci/devices/0000:00:03.0/max_link_width", "4")
    assert found(host) == ["slow [mlx5_3] 15.8 GB/s<63 GB/s"]


def test_of_cards_with_free_ports_a_port_that_is_down_is_a_note(tmp_path):
    down = {"state": "DOWN"}
    assert found(host_of(tmp_path, (2, down), (4, down))) == [
        "note [mlx5_2] DOWN<",
        "note [mlx5_4] DOWN<",
    ]


@pytest.mark.parametrize(("index", "count"), [("1", 0), ("0", 4), ("2", 4), ("9", 4), ("", 0)])
def test_an_index_without_an_address_that_others_reach_is_told_of_each_port(tmp_path, index, count):
    hangs = [one for one in found(host_of(tmp_path, NCCL_IB_GID_INDEX=index)) if "hang" in one]
    assert len(hangs) == count


def test_ports_of_infiniband_need_no_address_of_ip(tmp_path):
    fabric = {"ethernet": False, "gids": (LOCAL,)}
    host = host_of(tmp_path, *((n, fabric) for n in range(1, 5)), NCCL_IB_GID_INDEX="3")
    assert found(host) == []


def test_a_container_without_the_devices_of_its_nics_is_told(tmp_path):
    host = host_of(tmp_path, files=[("dev/null", "")])
    assert found(host) == ["slow [mlx5_1, mlx5_2, mlx5_3, mlx5_4] <"]
    write(tmp_path, "dev/infiniband/uverbs0", "")
    assert found(host) == []


def test_a_bond_names_its_real_members(tmp_path):
    members = [("sys/class/net/eth1/bonding/slaves", "ens1f0 ens1f1")]
    assert found(host_of(tmp_path, files=members)) == ["note [mlx5_1 of ens1f0, ens1f1] <"]


ROUTES = """Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT
eth1\t00000A0A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
eth2\t{}\t00000000\t0001\t0\t0\t{}\t00FFFFFF\t0\t0\t0
eth3\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0
"""


@pytest.mark.parametrize(
    ("subnet", "metric", "count"), [("00000A0A", 0, 1), ("00000B0A", 0, 0), ("00000A0A", 9, 0)]
)
def test_interfaces_with_equal_routes_are_told(tmp_path, subnet, metric, count):
    routes = [("proc/net/route", ROUTES.format(subnet, metric))]
    assert found(host_of(tmp_path, files=routes)) == ["note [eth1, eth2 to 10.10.0.0] <"] * count


@pytest.mark.parametrize(
    ("variable", "severity"),
    [
        ("NCCL_NET=IB", None),
        ("NCCL_NET=AWS Libfabric", "hang"),
        ("NCCL_NET=ofi", None),
        ("NCCL_NET_PLUGIN=ofi", None),
        ("NCCL_NET_PLUGIN=/opt/lib/libother.so", "slow"),
        ("NCCL_NET_PLUGIN=none", None),
        ("NCCL_NET_PLUGIN=spcx", "slow"),
        ("NCCL_IB_DISABLE=1", "slow"),
        ("NCCL_IB_DISABLE=0", None),
        ("NCCL_CROSS_NIC=0", "note"),
        ("NCCL_NET_GDR_LEVEL=SYS", "note"),
        ("NCCL_PXN_DISABLE=1", "note"),
        ("NCCL_IGNORE_NET_MISMATCH=0", "note"),
    ],
)
def test_variables_of_networks_are_told_where_they_do_not_fit(tmp_path, variable, severity):
    name, _, value = variable.partition("=")
    cache = [("etc/ld.so.cache", b"glibc-ld.so.cache1.1\0libnccl-net-ofi.so\0libnccl.so.2\0")]
    host = host_of(tmp_path, files=cache, **{name: value})
    assert [one.split()[0] for one in found(host)] == [severity] * (severity is not None)


def test_variables_of_rdma_say_nothing_where_no_nic_has_it(tmp_path):
    write(tmp_path, "sys/class/net/eth0/mtu", "1500")
    host = HostState(root=tmp_path, environment={"NCCL_IB_DISABLE": "1", "NCCL_CROSS_NIC": "0"})
    assert found(host) == []


def test_bridges_above_nics_that_redirect_are_named_where_gpus_are(tmp_path):
    nic(tmp_path, 1)
    write(tmp_path, "sys/kernel/iommu_groups/1/type", "identity\n")
    pci(tmp_path, "0000:00:08.0", "acs=0000")
    gpu = ("vendor=0x10de", "class=0x030000", "iommu=1")
    pci(tmp_path, "0000:00:08.0/0000:0a:00.0", *gpu)
    pci(tmp_path, "0000:00:09.0", "acs=001d")
    pci(tmp_path, "0000:00:09.0/0000:0b:00.0", *FAST, *slot())
    host = HostState(root=tmp_path)
    assert not [one for one in examine(host).findings if one.check == "acs"]
    link(tmp_path, "sys/class/infiniband/mlx5_9/device", "sys/bus/pci/devices/0000:0b:00.0")
    write(tmp_path, "sys/class/infiniband/mlx5_9/ports/1/state", "4: ACTIVE")
    (finding,) = [one for one in examine(host).findings if one.check == "acs"]
    assert finding.where == "bridges 0000:00:09.0"


def test_hostile_ports_do_no_harm(tmp_path):
    place = nic(tmp_path, 1) / "sys/class/infiniband/mlx5_1/ports"
    (place / "1/gids/7").write_bytes(b"\xff" * 4096)
    (place / "x").mkdir()
    (place / "1/gids/8").symlink_to("/etc/passwd")
    write(tmp_path, "proc/net/route", "a b\n\0" * 1000)
    assert [gid.index for gid in rdma_ports(HostState(root=tmp_path))[0].gids] == [0, 1]
    assert examine(HostState(root=tmp_path))
