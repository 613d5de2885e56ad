"""The TCCL fork's XML: its text, the fork's types of transfers, and the size of its table."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tccl_py.errors import InputError
from tccl_py.model.transfer import parse_flow
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator
from tccl_py.tccl_fork.database import comment, index_bits, make_database, table_bytes, typed
from tests.planned import SMALL, plan_of


@given(st.text(max_size=60))
def test_a_note_never_ends_its_comment(note):
    # The fork's parser stops at the first two hyphens, and wants the end of the comment there.
    assert re.fullmatch(r"<!-- ((?!--).)* -->", f"<!-- {comment(f'a{note}')} -->")


def test_the_text_is_as_the_forks_parser_wants_it():
    lines = make_database(plan_of(SMALL), Simulator(load_bundled(SMALL))).text.splitlines()
    there = {re.sub(r'(idx|bits|numa|gpus|gbps)="[0-9.]+"', r'\1=""', line) for line in lines}
    assert {line for line in there if "<!--" not in line and "<transfer " not in line} == {
        *("<root>", "</root>", "  <intra>", "  </intra>", "  <inter>", "  </inter>"),
        '  <metadata num_gpus="" num_numa="" num_bits_idx=""/>',
        *('    <subset gpus="">', "    </subset>", "      </transfers>"),
        '      <transfers gbps="">',
        '      <transfers gbps="" '
        'head_type="CPU_CPU_INTER" head_src_idx="" head_dst_idx="" '
        'tail_type="CPU_CPU_INTER" tail_src_idx="" tail_dst_idx="">',
    }
    assert '        <transfer type="GPU_WRITE_GPUMEM_KERNEL" src_idx="" dst_idx=""/>' in there


@pytest.mark.parametrize(
    "flow, types",
    [
        ("G0->G0->G1", ["GPU_WRITE_GPUMEM_KERNEL"]),
        ("G0->G1->G1", ["GPU_READ_GPUMEM_KERNEL"]),
        ("G0->D0->G1", ["GPU_WRITE_GPUMEM_MEMCPY"]),
        ("G0->D1->G1", ["GPU_READ_GPUMEM_MEMCPY"]),
        (
            "G0->G0->C1->G1->G1{blocks=4}",
            ["GPU_WRITE_CPUMEM_KERNEL", "GPU_READ_CPUMEM_KERNEL"],
        ),
        (
            "G0->D0->C1->D1->G1",
            ["GPU_WRITE_CPUMEM_MEMCPY", "GPU_READ_CPUMEM_MEMCPY"],
        ),
        ("C1->G0->G0", ["GPU_READ_CPUMEM_KERNEL"]),
    ],
)
def test_flows_become_typed_transfers(flow, types):
    assert [typed(one) for one in parse_flow(flow).transfers] == types


@pytest.mark.parametrize("flow", ["G0->N0->N0", "h0.G0->h0.G0->h0.G1"])
def test_flows_that_leave_the_node_have_no_type(flow):
    with pytest.raises(InputError, match=r"that the TCCL fork has"):
        typed(parse_flow(flow).transfers[0])


def test_bits_and_the_size_of_the_forks_table():
    assert [index_bits(*counts) for counts in [(1, 1), (2, 1), (4, 4), (4, 5), (8, 2)]] == [
        *(1, 1, 2, 3, 3)
    ]
    assert table_bytes(4, 2) < 16 * 2**20
    assert 3 * 2**30 < table_bytes(8, 3) < 5 * 2**30
