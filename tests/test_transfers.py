"""Transfers, flows, sets: text forms, canonical sets, hops and rings."""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tccl_py.errors import InputError, SearchError
from tccl_py.files import decode_json, encode_json
from tccl_py.model.rings import (
    Hop,
    bounce,
    direct_read,
    direct_write,
    entering,
    join_flows,
    leaving,
    ring,
    ring_like,
    ring_set,
)
from tccl_py.model.symmetry import automorphisms, relabel
from tccl_py.model.transfer import (
    Fifo,
    Flow,
    Place,
    Transfer,
    TransferSet,
    parse_flow,
    parse_set,
    transfer_set,
)
from tccl_py.search.problem import HopIndex
from tests.fakes import space_of
from tests.toy import toy_machine

indices = st.integers(0, 7)
blocks = st.none() | st.integers(1, 64)
buffers = st.none() | st.sampled_from([1, 1000, 512 * 1024, 4 << 20, 64 << 20, 1 << 30])
fifos = st.builds(
    Fifo,
    bytes=st.sampled_from([1, 1000, 128 * 1024, 512 * 1024, 4 << 20]),
    slots=st.sampled_from([1, 8, 16]),
    side=st.sampled_from(["sender", "receiver"]),
)


@st.composite
def flows(draw):
    source, target = draw(st.lists(indices, min_size=2, max_size=2, unique=True))
    kind = draw(st.sampled_from(["write", "read", "bounce", "copy", "to host", "from host"]))
    if kind == "bounce":
        numa = draw(st.integers(0, 3))
        return bounce(source, target, numa, blocks=draw(blocks), fifo=draw(fifos))
    if kind in ("write", "read"):
        make = direct_write if kind == "write" else direct_read
        return make(source, target, blocks=draw(blocks), fifo=draw(st.none() | fifos))
    one, other, host = Place("G", source), Place("G", target), Place("C", draw(st.integers(0, 3)))
    made = {
        "copy": Transfer(one, Place("D", source), other),
        "to host": Transfer(one, one, host),
        "from host": Transfer(host, other, other),
    }
    return Flow((made[kind],), draw(blocks), buffer=draw(buffers))


@st.composite
def network_flows(draw):
    sideless = fifos.map(lambda fifo: Fifo(bytes=fifo.bytes, slots=fifo.slots))
    how = {"blocks": draw(blocks), "fifo": draw(sideless)}
    by = draw(st.sampled_from([{}, {"through": 2}, {"relay": 8}]))
    out = leaving(draw(indices), draw(indices), **by, **how)
    into = entering(draw(indices), draw(indices), through=draw(st.none() | st.integers(0, 3)))
    whole = join_flows(out, into, sender="a.b", receiver="c-2")
    return draw(st.sampled_from([out, into, whole]))


@given(flows() | network_flows())
def test_a_flow_read_from_its_text_is_the_same_flow(flow):
    assert parse_flow(str(flow)) == flow


def test_a_flow_over_the_network_knows_its_hosts_and_is_no_bounce():
    flow = join_flows(leaving(3, 0, through=1), entering(2, 5), sender="h0", receiver="h1")
    assert str(flow) == "h0.G3->h0.G3->h0.C1->h0.N0->h1.N2->h1.N2->h1.G5"
    assert flow.hosts == ("h0", "h1")
    assert flow.is_network
    assert not flow.is_bounce
    assert [one.operation for one in flow.transfers] == ["write", "read", "write"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("G0->G0->N0", "is no way over"),
        ("N0->N0->N0", "is no way over"),
        ("G0->N0->N1", "changes NICs on its way"),
        ("N0->N1->G0", "changes NICs on its way"),
        ("G0->G1->C0->N0->N0", "changes GPUs on its way"),
        ("G0->G0->G0->N0->N0", "sends to itself"),
        ("N0->N0->G1->G0->G0", "is no way over"),
        ("h0.G0->h1.N0->h1.N0", "changes hosts without a NIC"),
        ("a.G0->a.N0->a.N1->a.N1->a.G1", "stays on its host"),
    ],
)
def test_what_is_no_way_over_the_network_is_refused(text, sentence):
    with pytest.raises(InputError, match=sentence):
        parse_flow(text)


@pytest.mark.parametrize("text", ["G0->G0->G1{blocks=2}", "G0->G1->G1{blocks=2}", "G0->G0->G1"])
def test_the_default_fifo_of_a_direct_flow_is_not_written(text):
    body = text.rstrip("}")
    if "blocks" in text:
        written = parse_flow(f"{body},fifo=4M,slots=8}}")
        assert written == parse_flow(text)
        assert written.fifo is None
        assert str(parse_flow(f"{body},slots=4,fifo=512K}}")) == f"{body},fifo=512K,slots=4}}"
    make = direct_write if "G0->G0" in text else direct_read
    count = 2 if "blocks" in text else None
    assert make(0, 1, blocks=count, fifo=Fifo(side="sender")) == parse_flow(text)


@given(st.lists(flows(), min_size=1, max_size=6), st.randoms())
def test_the_order_of_flows_has_no_meaning(some, rng):
    shuffled = list(some)
    rng.shuffle(shuffled)
    assert transfer_set(some) == transfer_set(shuffled) == parse_set(str(transfer_set(shuffled)))


@pytest.mark.parametrize(
    ("text", "operation"),
    [
        ("G0->G0->G4", "write"),
        ("G0->G4->G4", "read"),
        ("G0->D0->C1", "write"),
        ("C1->D0->G0", "read"),
        ("C1->G0->G0", "read"),
        ("G0->D4->G4", "read"),
    ],
)
def test_the_executor_makes_the_operation(text, operation):
    assert parse_flow(text).transfers[0].operation == operation


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("G0->G4", "flow 'G0->G4': has 2 places"),
        ("G0", "flow 'G0': has 1 place"),
        ("G0->G1->G4", "G1 cannot move it"),
        ("G0->G0->G0", "G0 sends to itself"),
        ("X0->G0->G1", "'X0' names no place"),
        ("G0-G1", "a flow is G0->G0->G1, or 0:1"),
        ("G01->G01->G1", "'G01' names no place"),
        ("G0->G0->D1", "D1 holds no bytes"),
        ("G0->G0->C1->G0->G0", "returns to its source"),
        ("G0->G0->G1->G2->G2", "is no bounce; a bounce goes"),
        ("G0->G0->G1{blocks=0}", "blocks=0 is out of range"),
        ("G0->G0->G1{blocks=2,blocks=3}", "names option blocks twice"),
        ("G0->G0->G1{fifo=x}", "fifo=x is no number"),
        ("G0->G0->G1{fifo=1M}", "has a FIFO but"),
        ("G0->G0->G1{blocks=2,side=sender}", "option 'side=sender' is not known"),
        ("G0->D0->G1{fifo=1M}", "option 'fifo=1M' is not known"),
        ("G0->G0->C1{blocks=2,fifo=1M}", "option 'fifo=1M' is not known"),
        ("C1->G0->G0{blocks=2,slots=4}", "option 'slots=4' is not known"),
        ("G0->G0->G1{blocks=2", "the options do not end"),
        ("G0->G0->C1{buffer=2048M}", "buffer=2048M is out of range"),
        ("G0->G0->G1{buffer=1M}", "option 'buffer=1M' is not known"),
        ("G0->G0->C1->G4->G4{buffer=1M}", "option 'buffer=1M' is not known"),
        ("G0->G0->C1->G4->G4{side=middle}", "option 'side=middle' is not known"),
    ],
)
def test_what_is_no_flow_is_refused_with_a_sentence(text, sentence):
    with pytest.raises(InputError) as refusal:
        parse_flow(text)
    assert sentence in str(refusal.value)


@settings(max_examples=300)
@given(st.text(alphabet="GCDN0123456789->{}=,blocksfifo .h", max_size=60) | st.text(max_size=40))
def test_any_text_is_a_set_or_refused(text):
    try:
        parsed = parse_set(text)
    except InputError:
        return
    assert parse_set(str(parsed)) == parsed


NUMBERS = st.sampled_from(["0", "1", "11", "01", "64", "65", "99999", "100000", ""])
SIZES = st.sampled_from(["1", "1024", "1K", "999K", "1024K", "4M", "4096K", "5M", "16M", "0K"])
OPTIONS = st.just("") | st.builds("{{blocks={},fifo={}}}".format, NUMBERS, SIZES)
ALIKE = st.builds(
    "G{}->G{}->{}{}{}".format,
    NUMBERS,
    NUMBERS,
    st.sampled_from("GC"),
    NUMBERS,
    st.just("") | st.builds("->G{}->G{}".format, NUMBERS, NUMBERS),
)


@settings(max_examples=500)
@given(
    st.lists(st.builds("{}{}".format, ALIKE, OPTIONS) | flows().map(str), min_size=1, max_size=2),
    st.sampled_from([" ", "  ", "\t"]),
)
@example(["G1->G1->G11"], " ")
@example(["G11->G1->G1"], " ")
@example(["G1->G1->C0->G11->G11{blocks=64,fifo=999K}"], " ")
@example(["G0->G0->G1{blocks=1,fifo=4M}"], " ")
def test_files_hold_canonical_texts_only(parts, between):
    text = between.join(parts)
    try:
        canonical = str(parse_set(text)) == text
    except InputError:
        canonical = False
    written = encode_json(text)
    if canonical:
        read = decode_json(written, TransferSet, where="file")
        assert read == parse_set(text)
        assert encode_json(read) == written
    else:
        with pytest.raises(InputError, match=r"^file: does not fit the transfer set format"):
            decode_json(written, TransferSet, where="file")


def test_an_empty_set_is_refused():
    with pytest.raises(InputError, match=r"transfer set: is empty"):
        parse_set("  ")


def canonical(transfers, symmetry):
    """The image of the set under the symmetry's elements that comes first as text."""
    names = [
        {symmetry.points[i]: symmetry.points[to] for i, to in enumerate(row)}
        for row in symmetry.elements.tolist()
    ]
    images = (transfer_set(relabel(f, named) for f in transfers.flows) for named in names)
    return min(images, key=lambda image: [str(flow) for flow in image.flows])


@settings(max_examples=60, deadline=None)
@given(st.lists(flows(), min_size=1, max_size=4), st.integers(0, 10**6))
def test_a_set_and_its_images_have_one_canonical_set(some, seed):
    machine = toy_machine(gpus=8, numa_nodes=4, per_switch=2)
    symmetry = automorphisms(machine)
    row = random.Random(seed).choice(symmetry.elements.tolist())
    names = {symmetry.points[i]: symmetry.points[to] for i, to in enumerate(row)}
    image = transfer_set(relabel(flow, names) for flow in some)
    assert canonical(image, symmetry) == canonical(transfer_set(some), symmetry)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_numbered_hops_have_the_same_canonical_set(seed):
    symmetry = automorphisms(toy_machine(gpus=6, per_switch=3))
    index = HopIndex(space_of(range(6), mechanisms=3), symmetry)
    hops = random.Random(seed).choices(range(len(index.hops)), k=3)
    found = index.transfer_set(index.canonical(hops))
    assert found == canonical(index.transfer_set(hops), symmetry)


@pytest.mark.parametrize("gpus", [5, 9])
def test_the_images_of_two_hops_among_even_gpus_join_their_gpus_in_the_same_way(gpus):
    # All orders of nine GPUs are more than are listed.
    index = HopIndex(space_of(range(gpus)), automorphisms(toy_machine(gpus=gpus)))
    ends = [(hop.source, hop.target) for hop in index.hops]

    def form(pair):
        first = [[*ends[a], *ends[b]] for a, b in (pair, pair[::-1])]
        return min([gpus.index(gpu) for gpu in gpus] for gpus in first)

    pairs = [(a, b) for a in range(len(ends)) for b in range(a, len(ends))]
    for pair in random.Random(gpus).sample(pairs, 12):
        alike = [other for other in pairs if form(other) == form(pair)]
        assert [tuple(row) for row in index.orbit(pair).tolist()] == alike


def test_a_ring_begins_at_its_lowest_gpu():
    hops = [
        Hop(2, 0, direct_write(2, 0)),
        Hop(0, 1, direct_read(0, 1)),
        Hop(1, 2, direct_write(1, 2)),
    ]
    assert ring(hops).gpus == (0, 1, 2)


@pytest.mark.parametrize("order", [(0, 1, 0, 2), (0, 0, 1)])
def test_what_visits_a_gpu_twice_is_no_ring(order):
    pairs = zip(order, (*order[1:], order[0]), strict=True)
    with pytest.raises(SearchError, match="do not form one ring"):
        ring([Hop(i, j, direct_write(i, j)) for i, j in pairs])


def test_a_ring_set_runs_all_its_flows_together():
    space = space_of(range(3))
    rings = ring_set([ring_like(space, (0, 1, 2)), ring_like(space, (0, 1, 2))])
    assert str(rings.flows).count("G0->G0->G1") == 2


def test_a_missing_hop_is_named():
    space = space_of(range(3), missing=[(1, 2)])
    with pytest.raises(SearchError, match=r"test has no hop"):
        ring_like(space, (0, 1, 2))


@pytest.mark.parametrize(
    "short, long",
    [
        ("0:4", "G0->G0->G4"),
        ("0:4,blocks=8,fifo=512K", "G0->G0->G4{blocks=8,fifo=512K}"),
        ("10:4{blocks=8}", "G10->G10->G4{blocks=8}"),
        ("0<4", "G4->G0->G0"),
        ("0:C1:4,side=sender", "G0->G0->C1->G4->G4{side=sender}"),
        ("(G0->G0->G4)", "G0->G0->G4"),
        ("(G0->D0->C1){buffer=1M}", "G0->D0->C1{buffer=1M}"),
    ],
)
def test_a_short_form_is_the_flow_of_the_long_form(short, long):
    assert parse_flow(short) == parse_flow(long)


def test_plus_and_spaces_join_the_flows_of_a_set():
    assert parse_set("0:1+1:0 2:3") == parse_set("G0->G0->G1 G1->G1->G0 G2->G2->G3")


@pytest.mark.parametrize(
    "text", ["0:0", "0:", ":4", "0:x", "0:C1", "0:N1:4", "0:4,", "0:4,blocks", "(0:4)", "(", "-1:2"]
)
def test_what_is_no_short_form_is_refused(text):
    with pytest.raises(InputError):
        parse_flow(text)
