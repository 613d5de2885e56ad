"""The TCCL fork's XML: there and back, every rule of its parser, and hostile files."""

import re

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tccl_py.errors import InputError
from tccl_py.model.transfer import parse_flow
from tccl_py.tccl_fork import reader
from tccl_py.tccl_fork.checks import check_database, table_bytes
from tccl_py.tccl_fork.database import Database, TypedTransfer, index_bits, typed_transfers
from tccl_py.tccl_fork.reader import parse_tccl_xml, read_tccl_xml
from tccl_py.tccl_fork.xml import tccl_xml
from tests.effort import soon
from tests.tccl_databases import databases, small_database

TEXT = tccl_xml(small_database())


def refusal(text):
    with pytest.raises(InputError) as caught:
        parse_tccl_xml(text, where="db.xml")
    sentence = str(caught.value)
    assert "\n" not in sentence and len(sentence) < 400
    return sentence


def changed(*swaps):
    """The small database's text with each first `old` in it replaced by `new`."""
    text = TEXT
    for old, new in swaps:
        assert old in text
        text = text.replace(old, new, 1)
    return text


# There and back


@given(databases(), st.lists(st.text(max_size=40), max_size=3))
def test_what_is_written_is_read_again(database, notes):
    text = tccl_xml(database, notes=notes)
    assert parse_tccl_xml(text, where="db.xml") == database
    assert check_database(database) is database


@given(st.text(max_size=60))
def test_a_note_never_ends_its_comment(note):
    text = tccl_xml(small_database(), notes=[f"a{note}"])
    (line,) = [line for line in text.split("\n") if "<!--" in line]
    # The fork's parser stops at the first two hyphens, and wants the end of the comment there.
    assert re.fullmatch(r" *<!-- ((?!--).)* -->", line)
    assert parse_tccl_xml(text, where="db.xml") == small_database()


def test_the_text_is_as_the_forks_parser_wants_it():
    assert TEXT.splitlines()[:12] == [
        "<root>",
        '  <metadata num_gpus="2" num_numa="2" num_bits_idx="1"/>',
        "  <intra>",
        '    <subset gpus="3">',
        '      <transfers gbps="12.5">',
        '        <transfer type="GPU_WRITE_CPUMEM_KERNEL" src_idx="0" dst_idx="1"/>',
        '        <transfer type="GPU_READ_CPUMEM_KERNEL" src_idx="1" dst_idx="1"/>',
        '        <transfer type="GPU_READ_GPUMEM_KERNEL" src_idx="1" dst_idx="0"/>',
        "      </transfers>",
        "    </subset>",
        "  </intra>",
        "  <inter>",
    ]
    assert (
        '      <transfers gbps="3.0" head_type="GPU_CPU_INTER" head_src_idx="0" head_dst_idx="1" '
        'tail_type="GPU_CPU_INTER" tail_src_idx="0" tail_dst_idx="1">\n'
    ) in TEXT


def test_a_file_on_disk_is_read(tmp_path):
    (tmp_path / "db.xml").write_text(TEXT)
    assert read_tccl_xml(tmp_path / "db.xml") == small_database()


@pytest.mark.parametrize(
    "flow, types",
    [
        ("G0->G0->G1", ["GPU_WRITE_GPUMEM_KERNEL 0 to 1"]),
        ("G0->G1->G1", ["GPU_READ_GPUMEM_KERNEL 0 to 1"]),
        ("G0->D0->G1", ["GPU_WRITE_GPUMEM_MEMCPY 0 to 1"]),
        ("G0->D1->G1", ["GPU_READ_GPUMEM_MEMCPY 0 to 1"]),
        (
            "G0->G0->C1->G1->G1{blocks=4}",
            ["GPU_WRITE_CPUMEM_KERNEL 0 to 7", "GPU_READ_CPUMEM_KERNEL 7 to 1"],
        ),
        (
            "G0->D0->C1->D1->G1",
            ["GPU_WRITE_CPUMEM_MEMCPY 0 to 7", "GPU_READ_CPUMEM_MEMCPY 7 to 1"],
        ),
        ("C1->G0->G0", ["GPU_READ_CPUMEM_KERNEL 7 to 0"]),
    ],
)
def test_flows_become_typed_transfers(flow, types):
    assert [str(one) for one in typed_transfers(parse_flow(flow), {1: 7})] == types


@pytest.mark.parametrize("flow", ["G0->N0->N0", "h0.G0->h0.G0->h0.G1"])
def test_flows_that_leave_the_node_have_no_type(flow):
    with pytest.raises(InputError, match="is none that the TCCL fork has a name for"):
        typed_transfers(parse_flow(flow), {})


# The rules of the fork's parser, and of what it does with what it parsed

READ_1 = '<transfer type="GPU_READ_CPUMEM_KERNEL" src_idx="1" dst_idx="1"/>'
WAY_BACK = '<transfer type="GPU_READ_GPUMEM_KERNEL" src_idx="1" dst_idx="0"/>'
TO_HOST = '<transfer type="GPU_WRITE_CPUMEM_KERNEL" src_idx="0" dst_idx="1"/>'


@pytest.mark.parametrize(
    "swaps, sentence",
    [
        ([(' num_gpus="2"', "")], 'db.xml:2 <metadata>: has no num_gpus; write num_gpus="..."'),
        (
            [('num_gpus="2"', 'num_gpus="0x2"')],
            'db.xml:2 <metadata>: has num_gpus="0x2"; a decimal number, 0 or above',
        ),
        (
            [('num_bits_idx="1"', 'num_bits_idx="0"')],
            "db.xml:2 <metadata>: has num_gpus, num_numa and num_bits_idx of (2, 2, 0); "
            "each of them is 1 or more",
        ),
        (
            [('num_gpus="2"', 'num_gpus="12"'), ('num_bits_idx="1"', 'num_bits_idx="4"')],
            "db.xml:2 <metadata>: makes a table for 12 GPUs and indices of 4 bits; "
            "the fork counts its cells in 32 bits: 10 GPUs with 4 bits, 16 with 2",
        ),
        ([('num_gpus="2"', 'num_gpus="65"')], "db.xml:2 <metadata>: has num_gpus=65; at most 64"),
        (
            [('<subset gpus="3">', '<subset gpus="4">')],
            "db.xml:4 <subset>: has gpus=4; 1 to 3, for 2 GPUs",
        ),
        (
            [('<subset gpus="3">', '<subset gpus="1">')],
            "db.xml:4 <subset>: has gpus=1, one GPU; a ring joins two or more",
        ),
        (
            [('<subset gpus="1">', '<subset gpus="3">')],
            "db.xml:18 <subset>: has gpus=3, as db.xml:13 <subset>; each set stands once",
        ),
        (
            [('gbps="12.5"', 'gbps="0"')],
            "db.xml:5 <transfers>: has gbps=0; GB/s above 0: the fork takes 0 for a missing one",
        ),
        (
            [('gbps="12.5"', 'gbps="nan"')],
            'db.xml:5 <transfers>: has gbps="nan"; GB/s as a decimal number',
        ),
        (
            [("GPU_READ_GPUMEM_KERNEL", "GPU_READS")],
            'db.xml:8 <transfer>: has type="GPU_READS"; one of GPU_WRITE_GPUMEM_KERNEL, '
            "GPU_READ_GPUMEM_KERNEL, GPU_WRITE_CPUMEM_KERNEL, GPU_READ_CPUMEM_KERNEL, "
            "GPU_WRITE_GPUMEM_MEMCPY, GPU_READ_GPUMEM_MEMCPY, GPU_WRITE_CPUMEM_MEMCPY, "
            "GPU_READ_CPUMEM_MEMCPY",
        ),
        (
            [("GPU_READ_GPUMEM_KERNEL", "GPU_READ_GPUMEM_MEMCPY")],
            "db.xml:5 <transfers>: has transfer 3 of GPU_READ_GPUMEM_MEMCPY, which the fork reads "
            "and then does not set up; GPU_READ_GPUMEM_KERNEL, or GPU_WRITE_GPUMEM_MEMCPY",
        ),
        (
            [(WAY_BACK, WAY_BACK.replace('dst_idx="0"', 'dst_idx="2"'))],
            "db.xml:5 <transfers>: has GPU 2 in transfer 3; 0 to 1",
        ),
        (
            [(READ_1, READ_1.replace('src_idx="1"', 'src_idx="0"'))],
            "db.xml:5 <transfers>: has transfer 2 (GPU_READ_CPUMEM_KERNEL 0 to 1) where the bytes "
            "are in NUMA node 1; each transfer takes them from where they were put",
        ),
        ([(WAY_BACK, "")], "db.xml:5 <transfers>: ends in GPU 1; it ends in GPU 0"),
        (
            [(WAY_BACK, WAY_BACK + TO_HOST + READ_1)],
            "db.xml:5 <transfers>: has 5 transfers; at most 4, 2 x num_gpus",
        ),
        (
            [
                ('<subset gpus="3">', '<subset gpus="7">'),
                ('num_gpus="2"', 'num_gpus="3"'),
            ],
            "db.xml:5 <transfers>: comes to GPUs 1, 0; to each of 0, 1, 2 once: "
            "every GPU has one way in and one out",
        ),
        (
            [('<transfers gbps="12.5">', '<transfers gbps="1"/><transfers gbps="12.5">')],
            "db.xml:4 <subset>: has 2 <transfers>; one: the fork takes the last of several",
        ),
        (
            [('head_type="GPU_CPU_INTER"', 'head_type="CPU"')],
            'db.xml:14 <transfers>: has head_type="CPU"; one of GPU_GPU_INTER, GPU_CPU_INTER, '
            "CPU_GPU_INTER, CPU_CPU_INTER",
        ),
        (
            [('head_src_idx="0"', 'head_src_idx="2"')],
            "db.xml:14 <transfers>: has head_src_idx=2; a GPU is 0 to 1 here",
        ),
        (
            [('head_dst_idx="1"', 'head_dst_idx="0"')],
            "db.xml:14 <transfers>: has transfer 1 (GPU_READ_CPUMEM_KERNEL 1 to 0) where the bytes "
            "are in NUMA node 0; each transfer takes them from where they were put",
        ),
        (
            [(' tail_src_idx="0"', ' tail_src_idx="1"')],
            "db.xml:14 <transfers>: ends in GPU 0; it ends in GPU 1",
        ),
        (
            [("<intra>", "<intra><ring/>")],
            "db.xml:3 <ring>: is unknown inside <intra>; <subset> can stand there",
        ),
        (
            [("</root>", "<inter/></root>")],
            "db.xml:1 <root>: has 2 <inter>; one <inter>",
        ),
        (
            [(TO_HOST, TO_HOST.replace("/>", "><x/></transfer>"))],
            "db.xml:6 <x>: is unknown inside <transfer>; nothing can stand there",
        ),
    ],
)
def test_what_the_fork_could_not_use_is_refused_by_its_line(swaps, sentence):
    assert refusal(changed(*swaps)) == sentence


def test_a_chain_without_a_transfer_is_refused_as_the_fork_sets_up_no_gpu_by_it():
    text = re.sub(
        r'<transfer type="GPU_READ_CPUMEM_KERNEL" src_idx="1" dst_idx="0"/>\n *', "", TEXT
    )
    assert refusal(text) == (
        "db.xml:14 <transfers>: has no transfer; "
        "the fork sets up a GPU by the transfers that name it"
    )


def test_two_chains_of_one_head_and_tail_are_refused():
    line = next(line for line in TEXT.splitlines() if 'gbps="2.0"' in line)
    start = TEXT.index(line)
    block = TEXT[start : TEXT.index("</transfers>", start) + len("</transfers>")]
    assert refusal(TEXT.replace(block, f"{block}\n{block}")) == (
        "db.xml:23 <transfers>: has a head and a tail that gpus=3 has a chain for; "
        "one chain for each: the fork takes the last of several"
    )


def test_the_emitter_refuses_what_the_reader_would():
    database = small_database()
    (ring,) = database.intra
    backwards = (TypedTransfer("GPU_READ_GPUMEM_KERNEL", 0, 1),)
    bad = msgspec.structs.replace(ring, transfers=(*ring.transfers[:-1], *backwards))
    with pytest.raises(InputError) as caught:
        tccl_xml(msgspec.structs.replace(database, intra=(bad,)))
    assert str(caught.value) == (
        "TCCL database, ring of gpus=3: has transfer 3 (GPU_READ_GPUMEM_KERNEL 0 to 1) where the "
        "bytes are in GPU 1; each transfer takes them from where they were put"
    )
    with pytest.raises(InputError, match="ring of gpus=3: are there twice; one of each set"):
        tccl_xml(msgspec.structs.replace(database, intra=(ring, ring)))
    (part, *_) = database.inter
    twice = msgspec.structs.replace(part, chains=part.chains * 2)
    with pytest.raises(InputError, match="is there twice; one for each head and tail"):
        tccl_xml(msgspec.structs.replace(database, inter=(twice,)))


def test_bits_and_the_size_of_the_forks_table():
    assert [index_bits(*counts) for counts in [(1, 1), (2, 1), (4, 4), (4, 5), (8, 2)]] == [
        *(1, 1, 2, 3, 3)
    ]
    assert table_bytes(4, 2) < 16 * 2**20
    assert 3 * 2**30 < table_bytes(8, 3) < 5 * 2**30


# Hostile files


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("", "db.xml:1: is not well-formed XML"),
        ("<root>", "db.xml:1: is not well-formed XML"),
        ("<graphs version='1'/>", "db.xml:1 <graphs>: is no database of the TCCL fork; give the"),
        ("<root/>", "db.xml:1 <root>: has 0 <metadata>; one <metadata>"),
        ("<root>text</root>", 'has the text "text" between its elements'),
        ("<root>two\r\nlines</root>", 'has the text "two lines" between its elements'),
        (
            '<!DOCTYPE r [<!ENTITY a "aaaa">]><root>&a;</root>',
            "db.xml:1: has a document type or entities",
        ),
        (
            '<!DOCTYPE r [<!ENTITY a SYSTEM "file:///etc/passwd">]><root>&a;</root>',
            "db.xml:1: has a document type or entities",
        ),
        ("<root>" * 100, "is nested too deep; at most 64 levels"),
    ],
)
def test_what_is_no_such_file_is_refused(text, sentence):
    assert sentence in refusal(text)


def test_too_many_elements_and_too_much_text_are_refused_soon(monkeypatch):
    monkeypatch.setattr(reader, "MAX_ELEMENTS", 100)
    with soon(5):
        said = refusal("<root>" + "<intra/>" * 200_000)
    assert "is element number 101; one machine has at most 100" in said
    monkeypatch.setattr(reader, "MAX_INPUT_BYTES", 50)
    assert refusal(TEXT).endswith("characters; at most 50")


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_damaged_file_is_read_or_refused_in_one_sentence(data):
    start = data.draw(st.integers(0, len(TEXT) - 1))
    end = data.draw(st.integers(start, min(len(TEXT), start + 30)))
    text = TEXT[:start] + data.draw(st.text(max_size=8)) + TEXT[end:]
    try:
        assert isinstance(parse_tccl_xml(text, where="db.xml"), Database)
    except InputError as error:
        assert "\n" not in str(error)
