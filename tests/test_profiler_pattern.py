"""The check pattern: as memory.cu writes it, and another for every pack."""

import ctypes
import re
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tccl_profiler.shared_memory import differing, write_pattern

KERNELS = Path(__file__).parents[1] / "profiler/tccl_profiler/memory.cu"
SIZE = 4096


def words_of(pack, seed, number):
    """`pattern` in memory.cu, by Python's integers."""
    u32, u64 = 2**32 - 1, 2**64 - 1
    a = (seed ^ number * 0x9E3779B97F4A7C15 ^ pack * 0xC2B2AE3D27D4EB4F) & u32
    b = ((seed + number * 0xD6E8FEB86659FD93 + pack * 0xA0761D6478BD642F & u64) >> 17) & u32
    return a, b, a ^ b * 0x85EBCA6B & u32, a + b & u32


def written(seed, number):
    memory = np.zeros(SIZE, np.uint8)
    write_pattern(memory.ctypes.data, SIZE, seed, number)
    return memory


@given(st.integers(1, 2**40), st.integers(0, 2**40))
@settings(max_examples=30, deadline=None)
def test_it_is_the_kernels(seed, number):
    packs = written(seed, number).view(np.uint32).reshape(-1, 4)
    for pack in (0, 1, 100, SIZE // 16 - 1):
        assert tuple(map(int, packs[pack])) == words_of(pack, seed, number)


def test_the_kernel_has_these_numbers():
    source = re.search(r"uint4 pattern\(.*?\n}", KERNELS.read_text(), re.DOTALL)[0]
    found = re.findall(r"0x[0-9A-F]+", source)
    assert [int(one, 16) for one in found] == [
        0x9E3779B97F4A7C15,
        0xC2B2AE3D27D4EB4F,
        0xD6E8FEB86659FD93,
        0xA0761D6478BD642F,
        0x85EBCA6B,
    ]
    assert ">> 17" in source


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(0, SIZE - 1))
@settings(max_examples=30, deadline=None)
def test_a_changed_byte_is_one_pack_and_another_slice_is_all(seed, number, at):
    memory = written(seed, number)
    assert differing(memory.ctypes.data, SIZE, seed, number) == 0
    assert differing(memory.ctypes.data, SIZE, seed, number + 1) == SIZE // 16
    assert differing(memory.ctypes.data, SIZE, seed + 1, number) == SIZE // 16
    ctypes.c_uint8.from_address(memory.ctypes.data + at).value ^= 1
    assert differing(memory.ctypes.data, SIZE, seed, number) == 1
