"""Graph files: reading, judging and writing them as NCCL's versions do."""

import re
import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tccl_py.errors import InputError
from tccl_py.model.machine import Knowledge
from tccl_py.nccl.graph_file import Channel, GraphFaultError, parse_graph_file
from tccl_py.nccl.graph_writer import GraphRings, graph_xml
from tccl_py.nccl.validator import validate
from tccl_py.nccl.versions import known_versions
from tests.nccl_cases import (
    CASES,
    VERDICTS,
    case_name,
    graph_text,
    graph_verdicts,
    machine,
    read_graph_file,
)
from tests.toy import toy_machine

FOUR, V100 = "a_4gpu_2numa_pcie.xml", "b_epyc_nps4_v100.xml"
OK = graph_text("a_ok1.xml")


def judge(text, topology=FOUR, **options):
    return validate(text, machine(topology), Knowledge(), **options)


@pytest.mark.parametrize("case", graph_verdicts(), ids=case_name)
def test_verdict_and_rings_are_those_of_nccl(case):
    listed = case["communicator_gpus"]
    gpus = None if listed == "all" else [int(gpu) for gpu in listed.split(",")]
    found = judge(graph_text(case["graph"]), case["topology"], gpus=gpus, nodes=case["nodes"])
    assert found.verdict == case["verdict"]
    rings, expected = [list(ring) for ring in found.rings], case["channels"]
    if expected and expected[-1] == "...":
        rings, expected = rings[: len(expected) - 1], expected[:-1]
    assert rings == expected


@pytest.mark.parametrize("name", ["typeintra", "typeinter"])
def test_a_missing_type_is_a_crash(name):
    text = OK.replace(f' {name}="SYS"', "").replace(f' {name}="PIX"', "")
    found = judge(text)
    assert (found.verdict, found.rings) == ("crash", ())
    with pytest.raises(GraphFaultError, match=f"has no {name}") as error:
        parse_graph_file(text, where="graph.xml")
    assert error.value.crash


def cased(name):
    return (CASES / "nccl-cases" / f"{name}.xml").read_text()


def many_channels(count):
    channel = OK[OK.index("<channel>") : OK.index("</graph>")]
    return OK.replace('nchannels="1"', f'nchannels="{count}"').replace(channel, channel * count)


@pytest.mark.parametrize(("version", "most"), [("2.18", 16), ("2.28", 32), ("2.30", 32)])
def test_one_channel_too_many_is_a_crash(version, most):
    assert judge(many_channels(most), version=version).verdict in ("used", "clipped")
    assert judge(many_channels(most + 1), version=version).verdict == "crash"


def test_ring_channels_that_no_tree_can_match_are_clipped():
    # "8 ring channels ended as 2": the search finds no tree of 8 channels and falls back to one.
    found = judge(many_channels(8))
    assert (found.verdict, len(found.rings)) == ("clipped", 2)
    assert "the tree has 1 of 8 channels" in found.reason


def wide(gpus):
    devices = "".join(f'<gpu dev="{gpu:#x}"/>' for gpu in range(gpus))
    return OK[: OK.index("<gpu")] + devices + OK[OK.index("</channel>") :]


def test_more_than_32_children_corrupt_memory_in_2_18_only():
    node = toy_machine(gpus=33)
    old = validate(wide(33), node, Knowledge(), version="2.18")
    assert old.verdict == "crash"
    assert "one child too many of <channel>" in old.reason
    new = validate(wide(33), node, Knowledge(), version="2.30")
    assert (new.verdict, len(new.rings)) == ("used", 2)


def test_dev_is_hexadecimal_since_2_28_and_by_prefix_in_2_18():
    decimal, prefixed = graph_text("f_dec.xml"), graph_text("f_hex.xml")
    sixteen = "f_16gpu.xml"
    assert judge(decimal, sixteen, version="2.18").verdict == "used"
    assert judge(decimal, sixteen, version="2.28").verdict == "rejected"
    for version in known_versions():
        assert judge(prefixed, sixteen, version=version).verdict == "used"


def test_ranks_of_a_dump_are_read():
    found = parse_graph_file(graph_text("a_rankattr.xml"), where="graph.xml")
    (channel,) = found[0].channels
    assert channel == Channel((0, 2, 1, 3), (), channel.ranks)
    assert set(channel.ranks) != {None}


def test_a_rank_of_another_gpu_is_rejected_by_the_version_that_believes_it():
    text = OK.replace('<gpu dev="0"/>', '<gpu dev="0" rank="77"/>')
    assert judge(text).verdict == "rejected"
    assert judge(text, version="2.28").verdict == "used"


def test_a_rank_counts_more_than_dev_where_the_version_believes_it():
    text = graph_text("a_rankattr.xml")
    assert judge(text, gpus=[3, 2, 1, 0]).rings == ((0, 2, 1, 3),) * 2
    assert judge(text, gpus=[3, 2, 1, 0], version="2.28").rings == ((0, 3, 1, 2),) * 2
    twice = OK.replace('<gpu dev="0"/>', '<gpu dev="0" rank="1"/>')
    assert judge(twice).verdict == "rejected"


def test_crossed_nics_are_ignored_where_the_job_forbids_them():
    text = OK.replace('crossnic="0"', 'crossnic="1"')
    assert judge(text).verdict == "used"
    found = judge(text, environment={"NCCL_CROSS_NIC": "0"})
    assert found.verdict == "ignored"
    assert found.rings == ((0, 1, 2, 3),) * 2


def test_a_limit_on_channels_clips_and_a_minimum_repeats():
    two = graph_text("a_ok_ring_tree.xml")
    clipped = judge(two, environment={"NCCL_MAX_NCHANNELS": "1"})
    assert (clipped.verdict, clipped.rings) == ("clipped", ((0, 2, 1, 3),))
    more = judge(two, environment={"NCCL_MIN_NCHANNELS": "5"})
    assert more.verdict == "used"
    assert more.rings == tuple([(0, 2, 1, 3), (0, 3, 1, 2)] * 3)[:5]


def test_nccls_own_dump_is_used_by_nccl():
    text = (CASES / "h200x4-vm" / "graph.xml").read_text()
    for version in ("2.28", "2.30"):
        found = judge(text, "h200x4-vm.xml", version=version)
        assert (found.verdict, len(found.rings)) == ("used", 24)


def test_the_graph_that_azure_ships_is_read():
    found = read_graph_file(CASES / "topologies" / "ncv4-graph.xml")
    assert [one.gpus for one in found[0].channels] == [(0, 1, 2, 3), (0, 3, 2, 1)]
    assert found[1].nchannels == 4


def test_messages_say_file_line_reason_and_remedy():
    with pytest.raises(GraphFaultError) as error:
        parse_graph_file(graph_text("a_tab.xml"), where="graph.xml")
    assert error.value.where == "graph.xml:2"
    assert "'\\t" in error.value.what
    assert "no tabs" in error.value.right


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('<?xml version="1.0"?>\n' + OK, "rejected"),
        (OK.replace("<channel>", "<!-- a=b --><channel>"), "used"),
        (OK.replace("<channel>", "<!--a=b--><channel>"), "rejected"),
        (OK.replace("<channel>", "<!-- a <!-- b --><channel>"), "used"),
        (OK.replace("<channel>", "<!--- a--b ---><channel>"), "used"),
        (OK.replace("<channel>", "<!--a--><channel>"), "used"),
        (OK.replace("<channel>", "<!-- never closed "), "rejected"),
        (OK.replace('id="0"', "id=0"), "rejected"),
        (OK.replace('id="0"', "id='0'"), "used"),
        (OK.replace("</graphs>", ""), "rejected"),
        (OK.replace("</channel>", "</chanel>"), "rejected"),
        (OK.replace('id="0"', f'id="0" note="{"x" * 253}"'), "used"),
        (OK.replace('id="0"', f'id="0" note="{"x" * 254}"'), "rejected"),
        (OK.replace("<channel>", "<a><b></b></a><channel>"), "used"),
        # Inside an element that NCCL skips, any closing tag ends one.
        (OK.replace("<channel>", "<a><b></c></a><channel>"), "used"),
        (OK.replace("<channel>", "<a><b></a><channel>"), "rejected"),
        (OK.replace("<channel>", "<graph><channel/></graph><channel>"), "used"),
        (OK.replace("<channel>", "<channel >"), "used"),
        (OK.replace(' id="0"', '  id="0"'), "used"),
        (OK.replace(' id="0"', ' id="0" id="1"'), "used"),
        (OK.replace(' id="0"', ' id="1" id="0"'), "ignored"),
        (OK.replace(' id="0"', '\nid="0"'), "rejected"),
        (OK.replace('<gpu dev="0"/>', '<gpu dev="0"/x>'), "used"),
        (OK.replace('<gpu dev="0"/>', '<gpu dev="0"/ >'), "rejected"),
        (OK.replace('<gpu dev="0"/>', '<gpu x="\u00e9\t<\n" dev=" +0x0z"></gpu>'), "used"),
        (OK.replace('nchannels="1"', 'nchannels="-1"'), "crash"),
        (OK.replace('nchannels="1"', 'nchannels="0"'), "ignored"),
        (OK.replace('nchannels="1"', 'nchannels="one"'), "ignored"),
        (OK.replace('nchannels="1"', 'nchannels="01 channel"'), "used"),
        (OK.replace('nchannels="1"', 'nchannels="4294967297"'), "used"),
        (OK.replace('pattern="4"', 'pattern="5"'), "used"),
        (OK.replace('crossnic="0"', 'crossnic="7"'), "used"),
        (OK.replace('speedinter="10"', 'speedinter="0"'), "used"),
        (OK.replace('speedintra="10"', 'speedintra="fast"'), "rejected"),
        (OK.replace('speedintra="', 'speedintra="-'), "rejected"),
        (OK.replace("</graphs>", OK[OK.index("<graph id") :]), "used"),
        (OK + OK, "used"),
        (OK + '<graphs version="2"/>', "rejected"),
        (OK + "<other><a>", "rejected"),
        (OK + "\n\n", "used"),
        ("", "ignored"),
        ("\0", "rejected"),
        ("<", "rejected"),
        ("</graphs>", "rejected"),
    ],
)
def test_the_verdict_is_on_what_nccls_reader_takes(text, verdict):
    assert judge(text).verdict == verdict


def test_the_channels_beyond_a_second_graph_of_an_id_are_the_firsts():
    found = judge(cased("ring-ok-then-fewer"))
    assert found.verdict == "used"
    assert found.rings[:2] == ((0, 3, 2, 1), (0, 2, 1, 3))


def test_of_many_ring_channels_and_few_of_the_tree_the_few_count():
    found = judge(cased("nchannels-34-tree-1"))
    assert (found.verdict, len(found.rings)) == ("clipped", 2)


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        (OK.replace('id="0"', "id='0'"), "rejected", "used"),
        (OK.replace('id="0"', "id='0\""), "used", "rejected"),
        (OK.replace('id="0"', f'id="0" note="{"x" * 255}"'), "used", "rejected"),
        (OK.replace('id="0"', f'id="0" note="{"x" * 256}"'), "crash", "rejected"),
        (OK.replace("</graph>", "<channel/>" * 128 + "</graph>"), "crash", "rejected"),
    ],
)
def test_releases_differ_in_quotes_and_limits(text, old, new):
    found = [judge(text, version=version).verdict for version in ("2.20.5", "2.28")]
    assert found == [old, new]


@pytest.mark.parametrize("version", ["2.20.5", "2.30"])
def test_leading_zeros_of_a_device_do_not_count(version):
    text = OK.replace('dev="1"', f'dev="0x{"0" * 60}1"')
    assert text != OK and judge(text, version=version) == judge(OK, version=version)


def test_attributes_that_nccl_drops_take_no_memory():
    text = f"<graphs{' ' * 500_000}>"
    tracemalloc.start()
    with pytest.raises(GraphFaultError):
        parse_graph_file(text, where="file")
    assert tracemalloc.get_traced_memory()[1] < 10 * len(text)
    tracemalloc.stop()


PIECES = st.sampled_from(
    [
        '<graphs version="1">', "</graphs>", "<graph", ' id="0"', ' id="1"', ' pattern="4"',
        ' crossnic="0"', ' crossnic="2"', ' nchannels="1"', ' nchannels="2"', ' nchannels="99"',
        ' speedintra="1"', ' speedintra="nan"', ' speedinter="1e999"', ' typeintra="SYS"',
        ' typeinter="?"', ' samechannels="1"', ">", "/>", "</graph>", "<channel>", "</channel>",
        '<gpu dev="0"/>', '<gpu dev="1"/>', '<gpu dev="0x2"/>', '<gpu dev="3" rank="-9"/>',
        '<gpu dev="1" rank="99999999999999999999"/>', '<net dev="0"/>', "<!-- -->", "<!--", "\t",
        "\n", " ", '"', "=", "\0", "\u00e9", "x" * 300, OK, OK[:-20],
    ]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=24).map("".join), st.sampled_from([*known_versions(), "3.1"]))
def test_no_file_makes_the_validator_fail(text, version):
    small = toy_machine(gpus=4)
    for nodes in (1, 2):
        found = validate(text, small, Knowledge(), nodes=nodes, version=version)
        assert found.verdict in ("used", "ignored", "clipped", "rejected", "crash")
        assert bool(found.rings) == (found.verdict in ("used", "ignored", "clipped"))


HEAD = (
    '<graphs version="1"><graph id="0" pattern="4" crossnic="2" nchannels="{}" speedintra="9" '
    'speedinter="9" latencyinter="0" typeintra="SYS" typeinter="PIX" samechannels="0">'
)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(-1, 5),
    st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(-2, 9)), max_size=6), max_size=4),
)
def test_no_order_makes_the_validator_fail(count, channels):
    body = "".join(
        "<channel>"
        + "".join(f'<gpu dev="{dev}"' + f' rank="{rank}"' * (rank > 5) + "/>" for dev, rank in one)
        + "</channel>"
        for one in channels
    )
    text = HEAD.format(count) + body + "</graph></graphs>"
    found = validate(text, toy_machine(gpus=4), Knowledge(), nodes=2)
    for ring in found.rings:
        assert sorted(ring) == list(range(8))


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text):
    try:
        parse_graph_file(text, where="x")
    except InputError:
        return


RINGS = GraphRings(orders=((0, 2, 1, 3), (3, 1, 2, 0)), speed_gbps=12.5, type_intra="PHB")


@pytest.mark.parametrize("version", known_versions())
def test_what_is_written_is_used_by_every_version(version):
    text = graph_xml(RINGS, version=version)
    found = judge(text, version=version)
    assert found.verdict == "used"
    assert found.rings == ((0, 2, 1, 3), (0, 3, 1, 2)) * 2
    read = parse_graph_file(text, where="graph.xml", version=version)
    ring, tree = read[0], read[1]
    assert (ring.pattern, tree.pattern, ring.channels) == (4, 1, tree.channels)
    assert (ring.speedintra, ring.typeintra) == (12.5, "PHB")


def test_what_is_written_has_no_rank_no_tab_and_no_prolog():
    text = graph_xml(RINGS)
    assert "rank" not in text
    assert "\t" not in text
    assert text.startswith('<graphs version="1">\n')
    assert '<gpu dev="0x2"/>' in text


def test_several_nodes_get_their_nics_and_none_is_replaced():
    rings = msgspec.structs.replace(RINGS, nets=((0, 0), (0, 0)))
    found = judge(graph_xml(rings), V100, nodes=2)
    assert found.verdict == "used"
    assert found.rings[0] == (0, 2, 1, 3, 4, 6, 5, 7)
    assert judge(graph_xml(RINGS), V100, nodes=2).verdict == "clipped"


@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
@pytest.mark.parametrize("field", ["speedintra", "speedinter"])
def test_a_ring_needs_the_speed_that_so_many_nodes_go_by(nodes, field):
    text = graph_xml(msgspec.structs.replace(RINGS, nets=((0, 0), (0, 0))))
    found = judge(re.sub(rf'{field}="[^"]*"', f'{field}="0"', text), V100, nodes=nodes)
    # Two nodes have one link: there NCCL goes by the speed inside a node.
    needed = "speedintra" if nodes <= 2 else "speedinter"
    assert (found.verdict == "rejected") == (field == needed), found.reason


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("more", [0, 1, 2, 3, 8])
def test_gpus_beyond_a_communicators_number_are_told_also_beside_nics(nodes, more):
    text = graph_xml(msgspec.structs.replace(RINGS, nets=((0, 0), (0, 0))))
    gpu = re.search(r"<gpu [^>]*>", text)[0]
    found = judge(text.replace("</channel>", gpu * more + "</channel>"), V100, nodes=nodes)
    assert (found.verdict, "beyond" in found.reason) == ("clipped" if more else "used", more > 0)


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (r'(<channel>.*?<gpu dev="0x)0(".*?<gpu dev="0x)1"', r'\g<1>0\g<2>0"', "rejected"),
        (r'<net dev="0x0"', '<net dev="0x7"', "rejected"),
        (r'nchannels="2"', 'nchannels="3"', "rejected"),
        (r'nchannels="2"', 'nchannels="1"', "clipped"),
    ],
)
def test_a_file_that_names_too_few_is_not_used_on_two_nodes(old, new, verdict):
    text = graph_xml(msgspec.structs.replace(RINGS, nets=((0, 0), (0, 0))))
    changed = re.sub(old, new, text, flags=re.DOTALL)
    assert changed != text and judge(text, V100, nodes=2).verdict == "used"
    assert judge(changed, V100, nodes=2).verdict == verdict


orders = st.permutations(range(4))


@settings(max_examples=50, deadline=None)
@given(st.lists(orders, min_size=1, max_size=16), st.sampled_from(known_versions()))
def test_every_order_survives_the_file(found, version):
    rings = GraphRings(orders=tuple(map(tuple, found)), speed_gbps=1.0, type_intra="SYS")
    verdict = judge(graph_xml(rings, version=version), version=version)
    assert verdict.verdict == "used"
    for order, ring in zip(found, verdict.rings, strict=False):
        start = order.index(0)
        assert ring == (*order[start:], *order[:start])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"orders": ((0, 1),) * 33}, "would have 33 channels"),
        ({"orders": ()}, "would have 0 channels"),
        ({"orders": ((0, 1), (0, 2))}, r"channel \[0, 2\] does not visit each"),
        ({"orders": ((0, 0),)}, "does not visit each GPU"),
        ({"nets": ((0, 0),)}, "has NICs for 1 of 2 channels"),
        ({"speed_gbps": float("nan")}, "has a speed of"),
        ({"type_intra": 'SYS" x="'}, "path type"),
        ({"tree_type_inter": "C2C"}, "path type"),
        ({"orders": ((0,), (0,)), "nets": ((0, 1), (0, 0))}, "leaves a node of one"),
        ({"orders": ((0, 1, -1),)}, "names devices"),
    ],
)
def test_what_nccl_could_not_use_is_not_written(change, text):
    with pytest.raises(InputError, match=text):
        graph_xml(msgspec.structs.replace(RINGS, **change))


def test_2_18_gets_no_more_than_16_channels():
    rings = GraphRings(orders=((0, 1),) * 17, speed_gbps=1.0, type_intra="SYS")
    with pytest.raises(InputError) as error:
        graph_xml(rings, version="2.18")
    assert (error.value.where, error.value.what) == ("graph file", "would have 17 channels")
    assert "1 to 16" in error.value.right


def test_every_graph_file_has_a_verdict():
    named = {case["graph"] for case in graph_verdicts()}
    assert named == {path.name for path in (VERDICTS / "graphs").iterdir()}


def test_a_thousand_nodes_are_judged_quickly():
    found = judge(graph_xml(RINGS), "b_epyc_nps4_v100.xml", nodes=1000)
    assert found.verdict == "clipped"
    assert [len(ring) for ring in found.rings] == [4000] * 4
