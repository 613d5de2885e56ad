"""Programs of sets that go from host to host, and each host's share of them."""

from collections import Counter
from contextlib import nullcontext

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tccl_profiler.compiler import NETWORK_BLOCKS, checkable, program_for
from tccl_profiler.program import COUNTER_AREA_BYTES, HostProgram, Link
from tccl_py.errors import MeasurementError
from tccl_py.model.rings import bounce, direct_write, entering, join_flows, leaving, on_host
from tccl_py.model.transfer import Fifo, Place, parse_set, place_named, transfer_set

HOSTS, GPUS, NICS = ("h0", "node-1.rack"), 3, 2
LANES = {
    f"{host}.{kind}{i}": 64
    for host in HOSTS
    for kind, n in (("G", GPUS), ("N", NICS))
    for i in range(n)
}


TCP = "tcp"


def program_of(text, **more):
    return program_for(parse_set(text), lanes=LANES, network=TCP, **more)


@st.composite
def flows(draw):
    blocks = draw(st.integers(1, 3))
    fifo = draw(st.sampled_from((Fifo(), Fifo(bytes=64 * 1024), Fifo(bytes=4096, slots=4))))
    more = {"blocks": blocks, "fifo": fifo}
    kind = draw(st.sampled_from(("network", "bounce", "write")))
    if kind != "network":
        source, target = draw(st.permutations(range(GPUS)))[:2]
        one = bounce(source, target, 0, **more)
        if kind == "write":
            one = direct_write(source, target, **more)
        return on_host(one, draw(st.sampled_from(HOSTS)))
    sender, receiver = draw(st.permutations(HOSTS))
    through = st.none() | st.integers(0, 1)
    out = leaving(draw(st.integers(0, 2)), draw(st.integers(0, 1)), through=draw(through), **more)
    into = entering(draw(st.integers(0, 1)), draw(st.integers(0, 2)), through=draw(through))
    return join_flows(out, into, sender=sender, receiver=receiver)


sets = st.lists(flows(), min_size=1, max_size=6).map(transfer_set)


@given(sets)
@settings(max_examples=100, deadline=None)
def test_hosts_shares_are_the_program_apart(transfers):
    program = program_for(transfers, lanes=LANES, network=TCP)
    devices, spaces = {}, {}
    for host in program.hosts:
        share = program.on(host)
        devices |= share.devices
        spaces |= share.space_bytes
        reached = {
            address.space
            for one in share.devices.values()
            for lane in one.lanes
            for end in (lane.incoming, lane.outgoing)
            if end is not None
            for address in (end.data, end.wait, end.post)
            if address is not None
        }
        # Nothing in a host's share is in another's memory.
        assert reached <= set(share.space_bytes)
        assert set(share.links) == {one.link for d in share.devices.values() for one in d.lanes} - {
            None
        }
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(share), type=HostProgram) == share
    assert (devices, spaces) == (program.devices, program.space_bytes)


@given(sets)
@settings(max_examples=100, deadline=None)
def test_every_link_has_one_sending_and_one_receiving_lane_that_agree(transfers):
    program = program_for(transfers, lanes=LANES, network=TCP)
    sends, receives = {}, {}
    for device, share in program.devices.items():
        for lane in share.lanes:
            assert (lane.link is not None) == (place_named(device).kind == "N")
            if lane.link is None:
                continue
            assert (lane.incoming is None) != (lane.outgoing is None)
            assert not lane.coupled
            side = sends if lane.incoming else receives
            assert lane.link not in side
            assert device == (lane.link.sender if lane.incoming else lane.link.receiver)
            side[lane.link] = (lane.slice_bytes, (lane.incoming or lane.outgoing).seed)
    assert sends == receives
    assert sorted(sends) == list(program.links)
    numbers = {}
    for link in program.links:
        numbers.setdefault((link.sender, link.receiver), []).append(link.number)
    assert all(found == list(range(len(found))) for found in numbers.values())


@given(sets)
@settings(max_examples=50, deadline=None)
def test_every_fifo_beside_a_nic_has_a_kernel_at_its_other_end(transfers):
    program = program_for(transfers, lanes=LANES, network=TCP)
    ends = Counter()
    for share in program.devices.values():
        for lane in share.lanes:
            ends.update(one.data for one in (lane.incoming, lane.outgoing) if one is not None)
    assert set(ends.values()) <= {2}


def test_a_flow_over_the_network_is_moved_by_four_and_counted_where_it_arrives():
    text = "h0.G2->h0.G2->h0.C0->h0.N0->node-1.rack.N1->node-1.rack.N1->node-1.rack.C1"
    text += "->node-1.rack.G0->node-1.rack.G0{blocks=2,fifo=1M}"
    program = program_of(text)
    (counted,), (others,) = program.counted, program.other
    assert [(part.device, part.incoming) for part in (*others, counted)] == [
        ("h0.G2", False),
        ("h0.N0", True),
        ("node-1.rack.N1", False),
        ("node-1.rack.G0", True),
    ]
    assert {(part.ends[0].slices, part.slice_bytes, part.piped) for part in (*others, counted)} == {
        (4, 256 * 1024, True)
    }
    assert set(program.space_bytes) == {"h0.C0", "node-1.rack.C1"}
    assert set(program.space_bytes.values()) == {COUNTER_AREA_BYTES + (2 << 20)}
    assert program.links == tuple(Link("h0.N0", "node-1.rack.N1", i) for i in range(2))
    assert "link 1 from h0.N0" in str(program.links[1])
    assert program.hosts == ("h0", "node-1.rack")


def test_host_memory_at_the_end_of_a_flow_is_nobodys_fifo():
    text = "h0.C0->h0.N0->h1.N1->h1.N1->h1.C1{fifo=1M}"
    program = program_for(parse_set(text), lanes={"h0.N0": 64, "h1.N1": 64}, network=TCP)
    (counted,), ((other,),) = program.counted, program.other
    assert (counted.device, counted.incoming) == ("h1.N1", False)
    assert (other.device, other.incoming) == ("h0.N0", True)
    assert len(counted.numbers) == NETWORK_BLOCKS
    assert not counted.piped
    for share in program.devices.values():
        for lane in share.lanes:
            end = lane.incoming or lane.outgoing
            assert (end.wait, end.post, end.slices) == (None, None, 4)


def test_a_nic_that_reaches_a_gpu_takes_from_a_fifo_in_its_memory():
    program = program_of("h0.G2->h0.N0->node-1.rack.N1->node-1.rack.N1->node-1.rack.G0{blocks=1}")
    assert set(program.space_bytes) == {"h0.G2", "node-1.rack.G0"}
    (lane,) = program.devices["h0.G2"].lanes
    (nic,) = program.devices["h0.N0"].lanes
    assert nic.incoming == msgspec.structs.replace(
        lane.outgoing, wait=lane.outgoing.post, post=lane.outgoing.wait
    )


@pytest.mark.parametrize("through", [None, 0])
def test_a_ring_over_hosts_passes_on_by_cycles_of_its_gpus(through):
    hosts, ring = ("h0", "h1", "h2"), []
    for i, host in enumerate(hosts):
        ring.append(on_host(direct_write(0, 1, blocks=2), host))
        out = leaving(1, 0, through=through, blocks=2)
        into = entering(0, 0, through=through)
        ring.append(join_flows(out, into, sender=host, receiver=hosts[(i + 1) % 3]))
    lanes = {f"{host}.{name}": 64 for host in hosts for name in ("G0", "G1", "N0")}
    program = program_for(transfer_set(ring), lanes=lanes, network=TCP)
    for device, share in program.devices.items():
        if place_named(device).kind == "N":
            assert [lane.cycle for lane in share.lanes] == [0] * 4
            # Two lanes send, two receive.
            assert Counter(lane.incoming is None for lane in share.lanes) == {True: 2, False: 2}
        else:
            assert [(lane.coupled, lane.cycle) for lane in share.lanes] == [(True, 10)] * 2


def test_what_goes_over_the_network_is_checked_as_it_is():
    text = "h0.C0->h0.N0->h1.N0->h1.N0->h1.C0 h0.G0->h0.D0->h0.G1"
    assert str(checkable(parse_set(text))) == (
        "h0.C0->h0.N0->h1.N0->h1.N0->h1.C0 h0.G0->h0.G0->h0.G1{blocks=4}"
    )
    assert str(checkable(parse_set("h0.G0->h0.D0->h0.C1"))) == (
        "h0.G0->h0.G0->h0.C1->h0.G0->h0.G0{blocks=4}"
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("h0.G0->h0.N0->h0.N0", "only one end"),
        ("h0.N0->h0.N0->h0.C0", "only one end"),
        ("h0.G0->h0.N7->h0.N7", "h0.N7 is not measured here"),
        ("G0->G0->G1", "G0 is not measured here"),
        ("h9.G0->h9.G0->h9.G1", "h9.G0 is not measured here"),
        ("h0.G0->h0.G0->node-1.rack.G1", "goes from host to host"),
        ("h0.G0->h0.G0->node-1.rack.C0", "goes from host to host"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(text, sentence):
    with pytest.raises(MeasurementError) as caught:
        program_of(text)
    assert str(caught.value).startswith(f"{text}: {sentence}")


def test_a_nic_with_too_many_lanes_is_refused():
    text = "h0.C0->h0.N0->h1.N0->h1.N0->h1.C0{blocks=9}"
    with pytest.raises(MeasurementError, match=r"^h0\.N0 would run 9"):
        program_for(parse_set(text), lanes={"h0.N0": 8, "h1.N0": 64}, network=TCP)


@pytest.mark.parametrize(("blocks", "own"), [(8, 0), (9, 0), (5, 3), (5, 4), (8, 1)])
def test_blocks_of_nccls_own_carriers_count_beside_a_sets_others(blocks, own):
    text = f"h0.G0->h0.N0->h1.N0->h1.N0->h1.G0{{blocks={blocks}}}"
    text += f" h0.G0->h0.G0->h0.G1{{blocks={own}}}" if own else ""
    lanes = {f"h{host}.G{gpu}": 8 for host in (0, 1) for gpu in (0, 1)}
    fits = blocks + own <= 8
    refusal = pytest.raises(MeasurementError, match=rf"^h0\.G0 would run {blocks + own} blocks")
    with nullcontext() if fits else refusal:
        program_for(parse_set(text), lanes=lanes, network="nccl")


def test_names_have_a_host_and_a_local_part():
    assert place_named("a.b-c.N0") == Place("N", 0, "a.b-c")
    assert place_named("N0") == Place("N", 0)
    assert [place_named(name).kind for name in ("N0", "N.G0", "h.N3", "C1")] == [*"NGNC"]
