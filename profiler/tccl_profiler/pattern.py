"""What a check writes in place of data, and compares: the pattern of `pattern` in cuda/pump.cu, so
that one backend may compare what another wrote.

Each pack of 16 bytes is made of its seed, its slice's number and its place in the slice.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import numpy.typing as npt

PACK_BYTES = 16
_WORD = (1 << 64) - 1
_SLICE_LOW, _SLICE_HIGH = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_PACK_LOW, _PACK_HIGH = np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0xA0761D6478BD642F)
_MIX = np.uint32(0x85EBCA6B)


def write_pattern(address: int, size: int, seed: int, number: int) -> None:
    """Fill slice `number`, of `size` bytes, a multiple of 16."""
    _fill(_packs(address, size), seed, number)


def differing(address: int, size: int, seed: int, number: int) -> int:
    """How many packs of slice `number` differ from the pattern."""
    found = _packs(address, size)
    expected = np.empty_like(found)
    _fill(expected, seed, number)
    return int((found != expected).any(axis=1).sum())


def _packs(address: int, size: int) -> npt.NDArray[np.uint32]:
    memory = (ctypes.c_uint32 * (size // 4)).from_address(address)
    words: npt.NDArray[np.uint32] = np.ctypeslib.as_array(memory)
    return words.reshape(-1, PACK_BYTES // 4)


def _fill(packs: npt.NDArray[np.uint32], seed: int, number: int) -> None:
    low, high = _places(len(packs))
    first, second = packs[:, 0], packs[:, 1]
    first[:] = low ^ np.uint32((seed ^ number * _SLICE_LOW) & 0xFFFFFFFF)
    second[:] = (high + np.uint64((seed + number * _SLICE_HIGH) & _WORD)) >> np.uint64(17)
    np.multiply(second, _MIX, out=packs[:, 2])
    packs[:, 2] ^= first
    np.add(first, second, out=packs[:, 3])


@functools.lru_cache(maxsize=8)
def _places(packs: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
    """What each pack's place adds to its first and to its second word."""
    numbers = np.arange(packs, dtype=np.uint64)
    return (numbers * _PACK_LOW).astype(np.uint32), numbers * _PACK_HIGH
