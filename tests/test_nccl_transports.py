"""Paths and transports against what NCCL's own graph code reported, and hop spaces of them."""

from itertools import pairwise, permutations

import msgspec
import pytest

from tccl_py.errors import InputError
from tccl_py.model.machine import Knowledge, Machine, Nic, NvLink, PciBridge, PciLink, PeerAccess
from tccl_py.model.rings import ring_like
from tccl_py.nccl import transport
from tccl_py.nccl.communicators import parse_log, transport_of
from tccl_py.nccl.paths import shortest_paths
from tccl_py.nccl.settings import Settings, settings_from_environment
from tccl_py.nccl.system import build_system
from tccl_py.nccl.transport import (
    final_channels,
    hop_space,
    mechanism_flow,
    pair_mechanism,
)
from tccl_py.nccl.view import view
from tests.nccl_cases import CASES, case_name, machine, stock_choices
from tests.tccl_databases import free_hop_space
from tests.toy import toy_machine

NO_ACCESS = Knowledge(peer_access_default=False, peer_access_provenance="reported")


@pytest.mark.parametrize("choice", stock_choices(), ids=case_name)
def test_every_hop_has_the_transport_path_and_bandwidth_nccl_reported(choice):
    settings = settings_from_environment(choice["environment"])
    seen = view(machine(choice["topology"]), Knowledge(), settings)
    for hop in choice["hops"]:
        way = pair_mechanism(seen, hop["src"], hop["dst"])
        way = f"SHM/bounce@{settings.shm_locality}" if way == "bounce" else f"P2P/{way}"
        path = seen.paths[f"G{hop['src']}", f"G{hop['dst']}"]
        found = (way, path.type.name, round(path.gbps, 3))
        assert found == (hop["transport"], hop["path"], hop["bw"])


def test_a_graph_files_hops_have_the_transports_that_nccl_logged():
    """Four GPUs of a machine of eight (virtual ones), in rings that leave and cross switches."""
    text = (CASES / "nccl-logs" / "asus-4-of-8-virtual-2.28.9.log").read_text()
    log = parse_log(text, where="log")
    assert log.communicators == (((0, 2, 1, 3), (0, 3, 2, 1)) * 8,)
    box = machine("asus-esc8000a-e13p.xml")
    seen = view(box, Knowledge(), Settings(version="2.28"), gpus=(0, 1, 2, 3))
    for hop in log.connections:
        bounces = pair_mechanism(seen, hop.source, hop.target) == "bounce"
        assert transport_of(hop.via) == ("SHM" if bounces else "P2P"), hop


def test_a_pair_that_nvml_calls_unsupported_bounces_at_any_level():
    way = pair_mechanism(
        view(machine("b_epyc_nps4_3090.xml"), NO_ACCESS, Settings(p2p_level="SYS")), 1, 2
    )
    assert way == "bounce"


def test_nvlinked_neighbours_stay_direct_where_the_default_is_no_access():
    node = machine("d_8x3090_nvl.xml")
    settings = Settings(p2p_level="SYS")
    assert pair_mechanism(view(node, NO_ACCESS, settings), 0, 1) == "write"
    assert pair_mechanism(view(node, NO_ACCESS, settings), 1, 2) == "bounce"


def test_two_gpus_on_an_amd_host_talk_directly_and_four_do_not():
    amd = toy_machine(gpus=4, numa_nodes=2)
    pair = view(amd, Knowledge(), Settings(), gpus=[0, 3])
    assert pair_mechanism(pair, 0, 3) == "write"
    assert pair_mechanism(view(amd, Knowledge(), Settings()), 0, 3) == "bounce"
    assert pair_mechanism(view(amd, Knowledge(), Settings(version="2.18")), 0, 3) == "write"


def test_two_a100_read_over_nvlink_unless_told_to_write():
    node = machine("x_fake_nvlink12_sm80.xml")
    assert pair_mechanism(view(node, Knowledge(), Settings()), 1, 2) == "read"
    assert pair_mechanism(view(node, Knowledge(), Settings(p2p_read=False)), 1, 2) == "write"


def test_a_way_over_another_gpu_needs_access_on_both_of_its_hops():
    node = machine("x_fake_nvchain.xml")
    assert view(node, Knowledge(), Settings()).farthest([(0, 2)]) == "NVB"
    blocked = PeerAccess(source=1, target=2, supported=False, provenance="reported")
    way = pair_mechanism(view(node, Knowledge(peer_access=(blocked,)), Settings()), 0, 2)
    assert way == "bounce"


def test_a_one_way_nvlink_is_refused_with_what_nccl_does():
    with pytest.raises(InputError) as error:
        build_system(machine("x_fake_nvlink_oneway.xml"))
    assert error.value.where == "machine x_fake_nvlink_oneway"
    assert "G1 to G2" in error.value.what


def with_fast_nics(gbps):
    """Two sockets, a GPU and a fast NIC below a switch on each."""
    node = toy_machine(gpus=2, numa_nodes=2, per_switch=1)
    nics = tuple(
        Nic(
            index=index,
            name=f"mlx5_{index}",
            parent=node.gpus[index].parent,
            bus_id=f"0000:9{index}:00.0",
            link=PciLink(speed_gts=32.0, width=16),
            speed_mbps=gbps * 1000,
            gdr=True,
            guid=f"0x{index}",
            port=1,
        )
        for index in range(2)
    )
    gpus = tuple(msgspec.structs.replace(gpu, gdr=True) for gpu in node.gpus)
    return msgspec.structs.replace(node, nics=nics, gpus=gpus)


def test_a_nic_that_is_nearer_and_faster_to_both_takes_the_hop():
    fast, slow = with_fast_nics(200), with_fast_nics(100)
    assert pair_mechanism(view(fast, Knowledge(), Settings()), 0, 1) == "network"
    assert pair_mechanism(view(slow, Knowledge(), Settings()), 0, 1) == "write"
    off = Settings(net_disable_intra=True)
    assert pair_mechanism(view(fast, Knowledge(), off), 0, 1) == "write"
    assert hop_space(view(fast, Knowledge(), Settings())).between(0, 1) == ()


def broadcom(level):
    part = {"vendor": "0x1000", "device": "0xc030", "subsystem_vendor": "0x1000"}
    return {**part, "subsystem_device": f"0x{level}000"}


def test_two_levels_of_one_broadcom_switch_count_as_one():
    node = toy_machine(gpus=4, per_switch=2)
    top = PciBridge(bus_id="0000:70:00.0", parent="C0", link=node.bridges[0].link, **broadcom(0))
    below = [
        msgspec.structs.replace(bridge, parent=top.id, **broadcom(1)) for bridge in node.bridges
    ]
    merged = msgspec.structs.replace(node, bridges=(top, *below))
    paths = shortest_paths(build_system(merged))
    assert paths["G0", "G2"].type.name == "PIX"
    plain = [msgspec.structs.replace(bridge, device="0xc040") for bridge in below]
    paths = shortest_paths(build_system(msgspec.structs.replace(merged, bridges=(top, *plain))))
    assert paths["G0", "G2"].type.name == "PXB"


def test_virtual_machines_without_link_widths_count_as_sixteen_lanes():
    system = build_system(machine("h200x4-vm.xml"))
    paths = shortest_paths(system)
    # "GPU/0-60 :... GPU/0-70 (2/370.8/NVL) ... CPU (1/48.0/PHB) NET/0-0 (3/1.2/PHB)" in NCCL's log
    assert (round(paths["G0", "G1"].gbps, 1), paths["G0", "G1"].type.name) == (370.8, "NVL")
    assert (paths["G0", "C0"].gbps, paths["G0", "C0"].type.name) == (48.0, "PHB")
    assert (paths["G0", "N0"].gbps, len(paths["G0", "N0"].links)) == (1.25, 3)


def test_a_bounce_lies_on_the_numa_node_of_the_gpu_that_allocates_it():
    node = toy_machine(gpus=4, numa_nodes=2)
    for side, host in (("receiver", "C1"), ("sender", "C0")):
        settings = Settings(p2p_level="LOC", shm_locality=side, buffsize=512 * 1024, channels=8)
        (hop,) = hop_space(view(node, Knowledge(), settings)).between(0, 3)
        assert f"->{host}->" in str(hop.flow)
        assert (hop.flow.blocks, hop.flow.fifo.bytes, hop.flow.fifo.side) == (16, 512 * 1024, side)


def test_copy_engines_execute_where_the_settings_say():
    node = toy_machine(gpus=2)
    both = Settings(version="2.28", p2p_level="LOC", shm_copy_engine="both")
    (hop,) = hop_space(view(node, Knowledge(), both)).between(0, 1)
    assert str(hop.flow) == "G0->D0->C0->D1->G1{blocks=2}"
    direct = Settings(p2p_level="SYS", p2p_copy_engine=True)
    (hop,) = hop_space(view(node, Knowledge(), direct)).between(0, 1)
    assert str(hop.flow) == "G0->D0->G1{blocks=2}"


def test_direct_hops_have_fifos_of_the_size_the_settings_name():
    node = toy_machine(gpus=2)
    small = Settings(p2p_level="SYS", buffsize=512 * 1024)
    for settings, text in (
        (small, "G0->G0->G1{blocks=2,fifo=512K}"),
        (msgspec.structs.replace(small, p2p_read=True), "G0->G1->G1{blocks=2,fifo=512K}"),
        (msgspec.structs.replace(small, buffsize=4 << 20), "G0->G0->G1{blocks=2}"),
        (msgspec.structs.replace(small, p2p_copy_engine=True), "G0->D0->G1{blocks=2}"),
    ):
        (hop,) = hop_space(view(node, Knowledge(), settings)).between(0, 1)
        assert str(hop.flow) == text


def test_views_of_a_communicator_share_its_system_and_paths():
    node = toy_machine(gpus=4, numa_nodes=2)
    first = view(node, Knowledge(), gpus=[2, 0])
    for settings in (Settings(), Settings(p2p_level="SYS"), Settings(channels=8)):
        seen = view(node, NO_ACCESS, settings, gpus=[0, 2])
        assert seen.system is first.system
        assert seen.plain is first.plain
    assert view(node, Knowledge(), Settings(channels=8), gpus=[0, 2]).paths is first.paths
    assert view(node, Knowledge()).system is not first.system


def test_what_is_kept_does_not_mix_knowledge_levels_or_machines():
    node = toy_machine(gpus=2)
    direct, bounce = "write", "bounce"
    assert pair_mechanism(view(node, Knowledge(), Settings()), 0, 1) == direct
    assert pair_mechanism(view(node, NO_ACCESS, Settings()), 0, 1) == bounce
    assert pair_mechanism(view(node, Knowledge(), Settings(p2p_level="LOC")), 0, 1) == bounce
    assert pair_mechanism(view(node, Knowledge(), Settings()), 0, 1) == direct
    linked = msgspec.structs.replace(
        node,
        nvlinks=tuple(NvLink(source=a, target=b, count=4) for a, b in permutations(("G0", "G1"))),
    )
    assert view(linked, Knowledge(), Settings()).farthest([(0, 1)]) == "NVL"
    assert view(node, Knowledge(), Settings()).farthest([(0, 1)]) == "PHB"


def test_rings_of_a_set_share_the_channels():
    node = toy_machine(gpus=2)
    space = hop_space(view(node, Knowledge(), Settings(channels=4)), rings_in_set=2)
    assert [hop.flow.blocks for hop in space] == [4, 4]


def test_known_rings_build_the_hops_of_their_own_pairs_alone(monkeypatch):
    built = []

    def counted(topo, kind, *pair, **options):
        built.append(pair)
        return mechanism_flow(topo, kind, *pair, **options)

    monkeypatch.setattr(transport, "mechanism_flow", counted)
    space = hop_space(view(toy_machine(gpus=8), Knowledge()))
    ring, again = (ring_like(space, range(8)) for _ in range(2))
    assert ring == again
    assert sorted(built) == [*pairwise(range(8)), (7, 0)]
    assert len([*space]) == len(built) == 8 * 7
    own = space.only(lambda hop: hop.source == 0)
    assert [*own] == [hop for hop in space if hop.source == 0]


def test_a_hop_space_is_named_after_its_settings():
    space = hop_space(view(toy_machine(gpus=2), Knowledge(), Settings(p2p_level="PIX")))
    assert space.name == "nccl 2.30, 2 channels NCCL_P2P_LEVEL=PIX"


def test_the_free_runtime_has_every_mechanism_for_every_pair():
    node = toy_machine(gpus=2, numa_nodes=2)
    space = free_hop_space(node, Knowledge(), (0, 1), fifo_bytes=512 * 1024)
    assert [str(hop.flow) for hop in space.between(0, 1)] == [
        "G0->G0->G1{blocks=8,fifo=512K}",
        "G0->G1->G1{blocks=8,fifo=512K}",
        "G0->G0->C0->G1->G1{blocks=8,fifo=512K}",
        "G0->G0->C1->G1->G1{blocks=8,fifo=512K}",
    ]
    closed = free_hop_space(node, NO_ACCESS, (0, 1))
    assert [hop.flow.is_bounce for hop in closed.between(0, 1)] == [True, True]


@pytest.mark.parametrize(
    ("gpus", "text"), [([], r"are \(\)"), ([0, 0], "each once"), ([7], "is not in machine toy")]
)
def test_a_communicator_has_known_gpus_each_once(gpus, text):
    with pytest.raises(InputError, match=text):
        build_system(toy_machine(gpus=2), gpus=gpus)


def test_nvlinks_of_gpus_outside_the_communicator_do_not_count():
    node = toy_machine(gpus=3)
    links = tuple(
        NvLink(source=f"G{one}", target=f"G{other}", count=4)
        for one, other in ((0, 1), (1, 0), (1, 2), (2, 1))
    )
    linked: Machine = msgspec.structs.replace(node, nvlinks=links)
    assert shortest_paths(build_system(linked))["G0", "G2"].type.name == "NVB"
    assert shortest_paths(build_system(linked, gpus=[0, 2]))["G0", "G2"].type.name == "PHB"


@pytest.mark.parametrize("sms", [(80, 80), (80, 90), (90, 80), (90, 90), (86, 86)])
@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("nvlink", [True, False])
def test_reads_are_unasked_over_nvlink_between_two_gpus_of_sm_80_alone(sms, asked, nvlink):
    node = toy_machine(gpus=2, per_switch=2)
    links = tuple(NvLink(source=a, target=b, count=4) for a, b in permutations(("G0", "G1")))
    gpus = [msgspec.structs.replace(gpu, sm=sm) for gpu, sm in zip(node.gpus, sms, strict=True)]
    node = msgspec.structs.replace(node, gpus=tuple(gpus), nvlinks=links if nvlink else ())
    reads = (nvlink and sms == (80, 80)) if asked is None else asked
    for engine in (False, True):
        settings = Settings(version="2.28", p2p_read=asked, p2p_copy_engine=engine)
        for pair in ((0, 1), (1, 0)):
            way = pair_mechanism(view(node, Knowledge(), settings), *pair)
            assert way == ("read" if reads and not engine else "write")


@pytest.mark.parametrize("side", ["sender", "receiver"])
@pytest.mark.parametrize("engines", [None, "sender", "receiver", "both"])
def test_the_buffer_of_a_bounce_lies_with_the_side_that_settings_name(side, engines):
    node = toy_machine(gpus=4, numa_nodes=2)
    settings = Settings(version="2.28", p2p_level="LOC", shm_locality=side, shm_copy_engine=engines)
    space = hop_space(view(node, Knowledge(), settings))
    for source, target in permutations(range(4), 2):
        (hop,) = space.between(source, target)
        assert hop.flow.through == (source if side == "sender" else target) // 2
        uses = [part.uses_copy_engine for part in hop.flow.transfers]
        assert uses == [engines in ("sender", "both"), engines in ("receiver", "both")]


@pytest.mark.parametrize("speed", [20.0, 45.0, 45.1, 60.0])
@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("sm", [None, 89, 90, 100])
@pytest.mark.parametrize("channels", [1, 4, 7, 8, 16, 40])
def test_channels_double_and_few_quick_ones_between_hosts_once_more(speed, nodes, sm, channels):
    count = min(2 * channels, 64)
    if sm in (90, 100) and nodes > 1 and speed > 45 and count < 16:
        count *= 2
    for low, high in ((None, None), (20, None), (None, 6), (12, 6), (70, None)):
        settings = Settings(version="2.28", min_channels=low, max_channels=high)
        right = min(max(min(count, high or 64), low or 0), 64)
        found = final_channels(settings, sm=sm, channels=channels, nodes=nodes, speed_intra=speed)
        assert found == right


def test_access_in_one_direction_gives_a_hop_in_that_direction_alone():
    node, settings = machine("x_fake_nvchain.xml"), Settings()
    for one, other in ((0, 2), (2, 0)):
        fact = PeerAccess(source=one, target=other, supported=False, provenance="reported")
        space = hop_space(view(node, Knowledge(peer_access=(fact,)), settings))
        assert (space.between(one, other), len(space.between(other, one))) == ((), 1)
