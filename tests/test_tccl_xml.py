"""The TCCL fork's XML: there and back, every rule of its parser, and hostile files."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tccl_py.errors import InputError
from tccl_py.model.transfer import parse_flow
from tccl_py.tccl_fork.database import index_bits, table_bytes, tccl_xml, typed_transfers
from tests.tccl_databases import databases, small_database
from tests.tccl_runtime import check_database, parse_tccl_xml, read_tccl_xml

TEXT = tccl_xml(small_database())


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
    assert [str(one) for one in typed_transfers(parse_flow(flow).transfers, {1: 7})] == types


@pytest.mark.parametrize("flow", ["G0->N0->N0", "h0.G0->h0.G0->h0.G1"])
def test_flows_that_leave_the_node_have_no_type(flow):
    with pytest.raises(InputError, match=r"that the TCCL fork has"):
        typed_transfers(parse_flow(flow).transfers, {})


# The rules of the fork's parser, and of what it does with what it parsed

READ_1 = '<transfer type="GPU_READ_CPUMEM_KERNEL" src_idx="1" dst_idx="1"/>'
WAY_BACK = '<transfer type="GPU_READ_GPUMEM_KERNEL" src_idx="1" dst_idx="0"/>'
TO_HOST = '<transfer type="GPU_WRITE_CPUMEM_KERNEL" src_idx="0" dst_idx="1"/>'


def test_bits_and_the_size_of_the_forks_table():
    assert [index_bits(*counts) for counts in [(1, 1), (2, 1), (4, 4), (4, 5), (8, 2)]] == [
        *(1, 1, 2, 3, 3)
    ]
    assert table_bytes(4, 2) < 16 * 2**20
    assert 3 * 2**30 < table_bytes(8, 3) < 5 * 2**30


# Hostile files
