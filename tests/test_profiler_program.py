"""Programs: what each device does for a set, and where the bytes lie."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tccl_profiler.compiler import (
    FEW_BLOCKS,
    FREE_BLOCKS,
    LEAST_COUPLED_SLICES,
    checkable,
    program_for,
)
from tccl_profiler.program import (
    COUNTER_AREA_BYTES,
    COUNTER_BYTES,
    COUNTERS,
    MAX_COPIES,
    MAX_REPEATS,
)
from tccl_py.errors import MeasurementError
from tccl_py.model.rings import bounce, direct_read, direct_write
from tccl_py.model.transfer import Fifo, parse_flow, parse_set, transfer_set

GPUS = 4


def lanes_of(gpus, lanes):
    return {f"G{i}": lanes for i in range(gpus)}


def program_of(text, *, gpus=GPUS, lanes=128, **more):
    return program_for(parse_set(text), lanes=lanes_of(gpus, lanes), **more)


@st.composite
def flows(draw):
    source, target = draw(st.permutations(range(GPUS)))[:2]
    numa = draw(st.integers(0, 1))
    blocks = draw(st.none() | st.integers(1, 6))
    kind = draw(st.sampled_from(("write", "read", "bounce", "engines", "one engine", "host")))
    if kind == "write":
        return direct_write(source, target, blocks=blocks)
    if kind == "read":
        return direct_read(source, target, blocks=blocks)
    size = draw(st.sampled_from((16, 4096, 100_000, 1 << 20)))
    fifo = Fifo(bytes=size, slots=draw(st.sampled_from((1, 4, 8, 16))))
    if kind == "bounce":
        return bounce(source, target, numa, blocks=blocks, fifo=fifo)
    options = "{" + f"blocks={blocks or 1},fifo={size}" + "}"
    if kind == "engines":
        return parse_flow(f"G{source}->D{source}->C{numa}->D{target}->G{target}{options}")
    if kind == "one engine":
        return parse_flow(f"G{source}->G{source}->C{numa}->D{target}->G{target}{options}")
    executor = draw(st.sampled_from("GD"))
    if draw(st.booleans()):
        return parse_flow(f"C{numa}->{executor}{target}->G{target}")
    return parse_flow(f"G{source}->{executor}{source}->C{numa}")


def few_copies(transfers):
    """Whether no device has more copies than it may."""
    copies = Counter()
    for flow in transfers.flows:
        for one in flow.transfers:
            if one.uses_copy_engine:
                copies[one.executor.index] += (flow.blocks or FEW_BLOCKS) if flow.is_bounce else 1
    return max(copies.values(), default=0) <= MAX_COPIES


sets = st.lists(flows(), min_size=1, max_size=8).map(transfer_set).filter(few_copies)
meetings = st.sampled_from(("pass-on", "independent"))


def random_program(transfers, meeting="pass-on"):
    return program_for(transfers, lanes=lanes_of(GPUS, 512), meeting=meeting)


def ends_of(program):
    """Every end as (device, "in" or "out", slice bytes, end)."""
    for device, share in program.devices.items():
        for lane in (*share.lanes, *share.copies):
            if lane.incoming is not None:
                yield device, "in", lane.slice_bytes, lane.incoming
            if lane.outgoing is not None:
                yield device, "out", lane.slice_bytes, lane.outgoing


def end_of(program, part, number):
    share = program.devices[part.device]
    lane = (share.copies if part.engine else share.lanes)[number]
    return lane.incoming if part.incoming else lane.outgoing


@given(sets, meetings)
@settings(max_examples=150, deadline=None)
def test_fifos_and_counters_are_apart_and_inside_their_space(transfers, meeting):
    program = random_program(transfers, meeting)
    ranges = {}
    for _, _, slice_bytes, end in ends_of(program):
        spot = ranges.setdefault(end.data.space, set())
        spot.add((end.data.offset, end.data.offset + end.slices * slice_bytes, "data"))
        for counter in filter(None, (end.wait, end.post)):
            spot = ranges.setdefault(counter.space, set())
            spot.add((counter.offset, counter.offset + COUNTER_BYTES, "counter"))
    assert set(ranges) == set(program.space_bytes)
    for space, taken in ranges.items():
        ordered = sorted(taken)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ordered))
        for begin, end, kind in ordered:
            assert begin % COUNTER_BYTES == 0
            if kind == "counter":
                # Every repeat has counters of its own behind those of the one before.
                assert end <= COUNTERS * COUNTER_BYTES
                assert end + (MAX_REPEATS - 1) * COUNTERS * COUNTER_BYTES <= COUNTER_AREA_BYTES
            else:
                assert COUNTER_AREA_BYTES <= begin < end <= program.space_bytes[space]


@given(sets, meetings)
@settings(max_examples=150, deadline=None)
def test_every_fifo_has_one_writer_and_one_reader_that_agree(transfers, meeting):
    program = random_program(transfers, meeting)
    fifos = {}
    for _, side, slice_bytes, end in ends_of(program):
        assert slice_bytes % 16 == 0
        assert (end.wait is None) == (end.post is None)
        mine = fifos.setdefault(end.data, {})
        assert side not in mine
        mine[side] = (slice_bytes, end)
    for sides in fifos.values():
        if len(sides) == 1:
            ((_, end),) = sides.values()
            assert end.wait is None
            continue
        (in_bytes, reader), (out_bytes, writer) = sides["in"], sides["out"]
        assert in_bytes == out_bytes
        assert (reader.slices, reader.seed) == (writer.slices, writer.seed)
        assert (reader.wait, reader.post) == (writer.post, writer.wait)
        assert reader.wait != reader.post
    waited = Counter(end.wait for _, _, _, end in ends_of(program) if end.wait)
    assert set(waited.values()) <= {1}


@given(sets)
@settings(max_examples=100, deadline=None)
def test_seeds_are_the_fifos_own(transfers):
    seeds = {}
    for _, _, _, end in ends_of(random_program(transfers)):
        assert seeds.setdefault(end.seed, end.data) == end.data


@given(sets, meetings)
@settings(max_examples=150, deadline=None)
def test_each_flow_is_counted_where_it_arrives_and_nothing_twice(transfers, meeting):
    program = random_program(transfers, meeting)
    assert len(program.counted) == len(program.other) == len(transfers)
    seen = Counter()
    for flow, counted, others in zip(transfers.flows, program.counted, program.other, strict=True):
        for part in (counted, *others):
            for number in part.numbers:
                end = end_of(program, part, number)
                assert end is not None
                assert end.slices == part.ends[0].slices
                seen[part.device, part.engine, part.incoming, number] += 1
            share = program.devices[part.device]
            work = share.copies if part.engine else share.lanes
            assert {work[n].slice_bytes for n in part.numbers} == {part.slice_bytes}
        if others:
            assert counted.device == str(flow.destination)
            (other,) = others
            assert other.device == str(flow.source)
            assert len(other.numbers) == len(counted.numbers)
        else:
            assert counted.device == f"G{flow.transfers[0].executor.index}"
        assert len(counted.numbers) == (flow.blocks or len(counted.numbers))
    assert set(seen.values()) == {1}
    assert sum(seen.values()) == len(list(ends_of(program)))


@given(sets, meetings)
@settings(max_examples=150, deadline=None)
def test_only_flows_whose_slices_are_alike_share_blocks(transfers, meeting):
    program = random_program(transfers, meeting)
    parts = (*program.counted, *(part for others in program.other for part in others))
    for share_device, share in program.devices.items():
        for number, lane in enumerate(share.lanes):
            both = lane.incoming is not None and lane.outgoing is not None
            ends = [end for end in (lane.incoming, lane.outgoing) if end is not None]
            roomy = min(end.slices for end in ends) >= LEAST_COUPLED_SLICES
            assert lane.coupled is (both and meeting == "pass-on" and roomy)
            assert (lane.cycle > 0) is both
            if both:
                assert lane.cycle % 2 == 0
                into, out = (
                    part
                    for incoming in (True, False)
                    for part in parts
                    if part.device == share_device and part.incoming is incoming
                    if number in part.numbers and not part.engine
                )
                assert into.numbers == out.numbers
                assert into.slice_bytes == out.slice_bytes


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize("hop", [bounce, direct_write, direct_read])
def test_a_ring_passes_on_by_cycles_of_an_all_reduce(count, hop):
    numa = {"numa": 0} if hop is bounce else {}
    ring = [hop(i, (i + 1) % count, blocks=2, **numa) for i in range(count)]
    program = program_for(transfer_set(ring), lanes=lanes_of(count, 64))
    assert sorted(program.devices) == [f"G{i}" for i in range(count)]
    for share in program.devices.values():
        assert [(lane.coupled, lane.cycle) for lane in share.lanes] == [(True, 2 * count - 2)] * 2


def test_two_rings_over_the_same_gpus_have_the_cycle_of_one():
    one = "G0->G0->G1{blocks=1} G1->G1->G2{blocks=1} G2->G2->G0{blocks=1}"
    back = "G1->G1->G0{blocks=1} G2->G2->G1{blocks=1} G0->G0->G2{blocks=1}"
    program = program_of(f"{one} {back}")
    for share in program.devices.values():
        assert [(lane.coupled, lane.cycle) for lane in share.lanes] == [(True, 4)] * 2


def test_rings_apart_have_cycles_of_their_own():
    pair = "G0->G0->G1{blocks=1} G1->G1->G0{blocks=1}"
    other = "G2->G2->G3{blocks=1} G3->G3->G4{blocks=1} G4->G4->G2{blocks=1}"
    program = program_of(f"{pair} {other}", gpus=5)
    cycles = {device: share.lanes[0].cycle for device, share in program.devices.items()}
    assert cycles == {"G0": 2, "G1": 2, "G2": 4, "G3": 4, "G4": 4}


@pytest.mark.parametrize(
    "outgoing", ["G1->G1->C0->G2->G2{blocks=2,fifo=512K}", "G1->G1->C0->G2->G2{blocks=3,fifo=1M}"]
)
def test_other_slices_or_blocks_are_not_coupled(outgoing):
    program = program_of(f"G0->G0->C0->G1->G1{{blocks=2,fifo=1M}} {outgoing}")
    lanes = program.devices["G1"].lanes
    assert not any(lane.coupled or lane.cycle for lane in lanes)
    assert all((lane.incoming is None) != (lane.outgoing is None) for lane in lanes)


def test_fifos_lie_where_the_flow_says():
    def spaces(text):
        program = program_of(text)
        part = program.counted[0]
        end = end_of(program, part, 0)
        return end.data.space, end.wait.space, end.post.space

    assert spaces("G0->G0->C1->G2->G2{blocks=1}") == ("C1", "C1", "C1")
    # A receiver looks for what is filled, a sender for what is taken: each in its own memory.
    assert spaces("G0->G0->G2{blocks=1}") == ("G2", "G2", "G0")
    assert spaces("G0->G2->G2{blocks=1}") == ("G0", "G2", "G0")


def test_a_flow_without_blocks_to_another_gpu_has_no_fifo():
    program = program_of("G0->G0->G1")
    (part,) = program.counted
    assert (part.device, part.incoming, len(part.numbers)) == ("G0", False, FREE_BLOCKS)
    end = end_of(program, part, 0)
    assert (end.data.space, end.wait, end.post) == ("G1", None, None)


def test_a_plain_write_and_a_plain_read_of_equal_buffers_share_one():
    text = "C0->D1->G1{buffer=1M} C0->G2->G2{buffer=1M} G0->D0->C0{buffer=1M} G1->G1->C0{buffer=2M}"
    program = program_of(text)
    data = {
        (device, side): end.data.offset - COUNTER_AREA_BYTES
        for device, side, _, end in reversed(list(ends_of(program)))
    }
    assert data == {
        ("G1", "in"): 0,
        ("G2", "in"): 1 << 20,
        ("G0", "out"): 0,
        ("G1", "out"): 2 << 20,
    }
    assert program.space_bytes["C0"] == COUNTER_AREA_BYTES + (4 << 20)


@given(
    st.integers(1, 64), st.sampled_from((1, 1000, 4096, 1 << 20, 3 << 20)), st.sampled_from("GD")
)
def test_a_buffer_is_as_large_as_asked_and_its_blocks_are_apart(blocks, size, executor):
    program = program_of(f"G0->{executor}0->C0{{blocks={blocks},buffer={size}}}")
    ends = [(end.data.offset, end.slices * length) for _, _, length, end in ends_of(program)]
    assert len(ends) == (1 if executor == "D" else blocks)
    assert all(offset % 128 == 0 for offset, _ in ends)
    assert all(a + length <= b for (a, length), (b, _) in itertools.pairwise(sorted(ends)))
    assert sum(length for _, length in ends) <= max(size, 128 * blocks)
    assert max(a + length for a, length in ends) <= program.space_bytes["C0"]


def test_a_fifo_is_four_slices_of_two_slots():
    (part,) = program_of("G0->G0->C0->G1->G1{blocks=1,fifo=4M}").counted
    assert (part.ends[0].slices, part.slice_bytes) == (4, 1 << 20)


def blocks_on(flow):
    """The GPUs that run blocks of a flow: both ends where its slices go through a FIFO."""
    executors = {one.executor.index for one in flow.transfers if not one.uses_copy_engine}
    ends = {place.index for place in (flow.source, flow.destination) if place.kind == "G"}
    return executors | ends if executors and flow.kind == "direct" and flow.blocks else executors


@given(st.lists(flows(), min_size=1, max_size=6), st.integers(1, 64))
@settings(max_examples=150, deadline=None)
def test_flows_with_and_without_blocks_fit_their_gpus_together(drawn, lanes):
    """Flows without a number take what the others leave, one block at least."""
    transfers = transfer_set(drawn)
    fixed, free = Counter(), Counter()
    for flow in drawn:
        gpus = blocks_on(flow)
        fixed.update(dict.fromkeys(gpus, flow.blocks or 0))
        free.update(dict.fromkeys(gpus, not flow.blocks))
    try:
        program = program_for(transfers, lanes=lanes_of(GPUS, lanes))
    except MeasurementError as error:
        assert any(fixed[gpu] + free[gpu] > lanes for gpu in fixed) or "it can run" not in str(
            error
        )
        return
    assert all(len(share.lanes) <= lanes for share in program.devices.values())
    for flow, part in zip(transfers.flows, program.counted, strict=True):
        if flow.blocks is None and not any(one.uses_copy_engine for one in flow.transfers):
            gpus = blocks_on(flow)
            rest = min((lanes - fixed[gpu]) // free[gpu] for gpu in gpus)
            assert len(part.numbers) == max(1, min(FREE_BLOCKS, rest))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("G0->N0->N0", "G0->N0->N0: N0 is not measured here"),
        ("G0->G0->h2.G1", "G0->G0->h2.G1: h2.G1 is not measured here"),
        ("G0->G0->G9", "G0->G0->G9: G9 is not measured here"),
        ("C0->D7->G7", "C0->D7->G7: D7 is not measured here"),
        (
            "G0->G0->C0->G1->G1{blocks=9}",
            "G0 would run 9 blocks",
        ),
        (
            " ".join(["G0->G0->C0"] * 9),
            "G0 would run 9 blocks",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(text, sentence):
    with pytest.raises(MeasurementError) as caught:
        program_of(text, gpus=2, lanes=8)
    assert str(caught.value).startswith(sentence)


def test_more_counters_than_a_space_holds_are_refused():
    text = " ".join(["G0->G0->C0->G1->G1{blocks=64,fifo=4K}"] * 33)
    with pytest.raises(MeasurementError, match=r"^C0 would hold more"):
        program_of(text, gpus=2, lanes=10_000)


# Sets whose data can be compared.


@given(sets)
@settings(max_examples=100, deadline=None)
def test_what_is_checked_has_a_reader_for_every_writer_and_no_engine(transfers):
    checked = checkable(transfers)
    assert len(checked) == len(transfers)
    program = program_for(checked, lanes=lanes_of(GPUS, 512))
    assert not any(share.copies for share in program.devices.values())
    sides = Counter((side, end.data) for _, side, _, end in ends_of(program))
    assert set(sides.values()) == {1}
    for _, _, _, end in ends_of(program):
        assert ("in", end.data) in sides
        assert ("out", end.data) in sides
        assert end.wait is not None


def test_checking_keeps_paths_and_options():
    def checked(text):
        return str(checkable(parse_set(text)))

    assert checked("G0->D0->C1->D2->G2{blocks=3,fifo=1M}") == (
        "G0->G0->C1->G2->G2{blocks=3,fifo=1M}"
    )
    assert checked("C1->D2->G2") == "G2->G2->C1->G2->G2{blocks=4}"
    assert checked("G0->G0->G1{blocks=2}") == "G0->G0->G1{blocks=2}"
    assert FEW_BLOCKS == 4
