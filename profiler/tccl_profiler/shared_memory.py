"""Shared memory: segments on NUMA nodes, the control segment, and the check pattern.

A segment is a memfd, so no memory outlives its processes. Records and pattern are those of
pump.cu.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tccl_profiler import linux
from tccl_profiler.messages import Pace
from tccl_profiler.program import MAX_REPEATS
from tccl_py.errors import MeasurementError, limit_reached

_NAME_BYTES = 200  # memfd_create takes up to 249


class Segment:
    """Shared memory mapped into this process; it owns the descriptor and the mapping."""

    def __init__(self, fd: int, size: int, label: str) -> None:
        self._fd = fd
        self.size = size
        self.label = label
        self._mapping: mmap.mmap | None = None
        try:
            if size < 1:  # mmap would take 0 for "all of the file"
                raise ValueError("a size of at least one byte is right")
            self._mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
        except BaseException:
            self.close()
            raise
        # The buffer dies at once: while it lived, the mapping could not be closed.
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    @classmethod
    def attach(cls, fd: int, label: str) -> Segment:
        """Map another process's segment; the descriptor belongs to the result, or is closed."""
        try:
            segment = cls(fd, os.fstat(fd).st_size, label)
        except (OSError, ValueError) as error:
            raise MeasurementError(f"shared memory {label}: cannot be mapped: {error}") from error
        # Reads map the pages now, not in the first timed transfer; contents stay.
        segment.array(np.uint8, 0, segment.size)[:: mmap.PAGESIZE].max()
        return segment

    @property
    def fd(self) -> int:
        """The descriptor, which stays the segment's own."""
        self._open()
        return self._fd

    @property
    def address(self) -> int:
        """The begin of the mapping in this process."""
        self._open()
        return self._address

    def array(self, dtype: npt.DTypeLike, offset: int, count: int) -> npt.NDArray[Any]:
        """Return a writable view of `count` elements from byte `offset`."""
        mapping, kind = self._open(), np.dtype(dtype)
        if offset < 0 or count < 0 or offset + count * kind.itemsize > self.size:
            raise MeasurementError(
                f"shared memory {self.label}: {count} x {kind} from byte {offset} is not inside "
                f"its {self.size} bytes"
            )
        return np.frombuffer(mapping, kind, count, offset)

    def close(self) -> None:
        """Give memory and descriptor back; live views keep the memory. Closing twice is allowed."""
        fd, self._fd = self._fd, -1
        mapping, self._mapping = self._mapping, None
        if fd >= 0:
            os.close(fd)
        if mapping is not None:
            # With views alive it cannot be unmapped under them; the last of them unmaps it.
            with contextlib.suppress(BufferError):
                mapping.close()

    def _open(self) -> mmap.mmap:
        if self._mapping is None:
            raise MeasurementError(f"shared memory {self.label} is closed")
        return self._mapping


def create_segment(size: int, *, numa_id: int | None, label: str) -> Segment:
    """Make zeroed memory, faulted in on a node (None: any), by touch where mbind is refused."""
    place = "any NUMA node" if numa_id is None else f"NUMA node {numa_id}"
    try:
        _check_available(size, numa_id)
        name = f"tccl-{label}".replace("\0", "?").encode()[:_NAME_BYTES]
        with contextlib.ExitStack() as undo:
            fd = os.memfd_create(os.fsdecode(name))
            undo.callback(os.close, fd)
            os.ftruncate(fd, size)
            undo.pop_all()
            segment = undo.enter_context(contextlib.closing(Segment(fd, size, label)))
            _fill_with_pages(segment, numa_id)
            undo.pop_all()
    except (OSError, MeasurementError) as error:
        reason = _reason(error)
        raise MeasurementError(
            f"shared memory {label}, {size} bytes on {place}: {reason}"
        ) from error
    return segment


def _check_available(size: int, numa_id: int | None) -> None:
    """Refuse in advance what cannot be had; faulting it in could end in the OOM killer."""
    for node in dict.fromkeys((None, numa_id)):
        available = linux.available_bytes(node)
        if available is not None and size > available:
            owner = "the machine" if node is None else "the node"
            raise MeasurementError(f"{owner} has {available} bytes available")


def _fill_with_pages(segment: Segment, numa_id: int | None) -> None:
    """Fault the pages in on the node, and check where they lie."""
    if numa_id is None or len(linux.online_nodes()) == 1:
        _fault_in(segment)
        return
    before: frozenset[int] = frozenset()
    try:
        linux.bind(segment.address, segment.size, numa_id)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS):
            raise
        # The calling thread touches the pages first, from the node's CPUs.
        before = linux.pin_to_cpus(linux.cpus_of_node(numa_id))
    try:
        _fault_in(segment)
    finally:
        if before:
            linux.pin_to_cpus(before)
    seen = linux.pages_by_node(segment.address, segment.size)
    elsewhere = {node: pages for node, pages in sorted(seen.items()) if node != numa_id}
    if elsewhere or not seen:
        places = ", ".join(
            f"{pages} on {'no node' if node == linux.NO_NODE else f'node {node}'}"
            for node, pages in elsewhere.items()
        )
        raise MeasurementError(
            f"of {sum(seen.values())} pages looked at, these lie elsewhere: {places or 'none seen'}"
        )


def _fault_in(segment: Segment) -> None:
    """Have the kernel give every page, under the current policy and CPU; OSError if it cannot."""
    # In huge pages FIFOs that lie a power of two apart share cache sets: on 4x H200 a bounce ring
    # with much memory under way lost a quarter of its rate. NCCL's FIFOs lie unevenly.
    with contextlib.suppress(OSError):  # a kernel without huge pages
        segment._open().madvise(mmap.MADV_NOHUGEPAGE)
    try:
        # Before posix_fallocate, which knows no mapping, hence no such advice.
        linux.populate(segment.address, segment.size)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: an older kernel
            raise
    # Where populating is not known, this reports lack of memory; a touch would end in SIGBUS.
    os.posix_fallocate(segment.fd, 0, segment.size)
    segment.array(np.uint8, 0, segment.size)[:: mmap.PAGESIZE] = 0


def _reason(error: OSError | MeasurementError) -> str:
    if isinstance(error, MeasurementError):
        return str(error)
    if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFAULT):
        # EFAULT is what populating says where a touch would be a SIGBUS.
        return f"not enough memory ({error.strerror}); a smaller size may fit"
    if error.errno == errno.EINVAL and error.filename == "mbind":
        return "the node is not open to this process; see Mems_allowed_list in /proc/self/status"
    return str(limit_reached(error) or f"the kernel refuses it: {error.strerror}")


# The control segment: the flag that releases lanes, clock words, records and stamps by device.

RECORD = np.dtype(
    [
        (name, np.uint64)
        for name in (
            "resident",  # the epoch, once the lane runs and waits
            "start",  # released
            "end",  # its last slice done
            "in_first",  # the first slice done after the warm-up
            "in_last",
            "in_count",  # slices between the two
            "out_first",
            "out_last",
            "out_count",
            "errors",  # 16-byte packs that differ from the pattern
            "bytes",  # all it moved, warm-up included
            "finished",  # the epoch, written last
        )
    ]
)
"""A lane's record, times in the device's nanoseconds; written by the device alone."""

ABORT = 2**64 - 1  # in place of an epoch: every lane stops at once
MAX_DEVICES = 64
MAX_LANES = 256  # lanes and copies of one device
MAX_STAMPS = 2048  # stamps of all copies of one device in one repeat
FLAG_AT = 0  # offset of the flag: lanes of epoch e start when it is e or more
_WORDS_AT = 4096
_WORD_BYTES = 256
_RECORDS_AT = 64 * 1024
_RECORD_AREA = MAX_REPEATS * MAX_LANES * RECORD.itemsize
_DEVICE_AREA = _RECORD_AREA + MAX_REPEATS * MAX_STAMPS * 8


def question_at(slot: int) -> int:
    """Return the offset of the word by which device `slot` is asked for its time."""
    return _WORDS_AT + slot * _WORD_BYTES


def answer_at(slot: int) -> int:
    """Return the offset of the word in which device `slot` answers."""
    return question_at(slot) + _WORD_BYTES // 2


def records_at(slot: int, repeat: int) -> int:
    """Return the offset of the records of one repeat, MAX_LANES of them."""
    return _RECORDS_AT + slot * _DEVICE_AREA + repeat * MAX_LANES * RECORD.itemsize


def stamps_at(slot: int, repeat: int) -> int:
    """Return the offset of the stamps of one repeat's copies, MAX_STAMPS words."""
    return _RECORDS_AT + slot * _DEVICE_AREA + _RECORD_AREA + repeat * MAX_STAMPS * 8


class Control:
    """The control segment, as the controller and the workers see it."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._flag = segment.array(np.uint64, FLAG_AT, 1)

    @classmethod
    def create(cls, devices: int) -> Control:
        """Make the segment for so many devices."""
        size = _RECORDS_AT + devices * _DEVICE_AREA
        return cls(create_segment(size, numa_id=None, label="control"))

    def release(self, epoch: int) -> None:
        """Start every lane of this epoch and earlier ones by one store."""
        self._flag[0] = epoch

    def abort(self) -> None:
        """Stop every lane, also running ones."""
        self._flag[0] = ABORT

    def clear(self) -> None:
        """Reset the flag."""
        self._flag[0] = 0

    @property
    def flag(self) -> ctypes.c_uint64:
        """The flag in memory, for frequent polls."""
        return ctypes.c_uint64.from_address(self.segment.address + FLAG_AT)

    def records(self, slot: int, repeat: int, count: int) -> npt.NDArray[np.void]:
        """Return a view of `count` records of a device's repeat; it changes while lanes run."""
        return self.segment.array(RECORD, records_at(slot, repeat), count)

    def stamps(
        self, slot: int, repeat: int, paces: Sequence[Pace]
    ) -> tuple[npt.NDArray[np.uint64], ...]:
        """Return views of each copy's stamps: queued, released, and one for each group."""
        views, at = [], stamps_at(slot, repeat)
        for pace in paces:
            views.append(self.segment.array(np.uint64, at, pace.groups + 2))
            at += 8 * (pace.groups + 2)
        return tuple(views)

    def close(self) -> None:
        """Give the segment back."""
        self._flag = np.zeros(1, np.uint64)
        self.segment.close()


# The check pattern: each pack of 16 bytes is made of its seed, its slice's number and its place.

PACK_BYTES = 16
_WORD = (1 << 64) - 1
_SLICE_LOW, _SLICE_HIGH = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_PACK_LOW, _PACK_HIGH = np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0xA0761D6478BD642F)
_MIX = np.uint32(0x85EBCA6B)


def write_pattern(address: int, size: int, seed: int, number: int) -> None:
    """Fill slice `number`, of `size` bytes, a multiple of 16."""
    _fill(_packs(address, size), seed, number)


def differing(address: int, size: int, seed: int, number: int) -> int:
    """Return how many packs of slice `number` differ from the pattern."""
    packs = _packs(address, size)
    expected = np.empty_like(packs)
    _fill(expected, seed, number)
    return int((packs != expected).any(axis=1).sum())


def _packs(address: int, size: int) -> npt.NDArray[np.uint32]:
    memory = (ctypes.c_uint32 * (size // 4)).from_address(address)
    words: npt.NDArray[np.uint32] = np.ctypeslib.as_array(memory)
    return words.reshape(-1, PACK_BYTES // 4)


def _fill(packs: npt.NDArray[np.uint32], seed: int, number: int) -> None:
    low, high = _pack_words(len(packs))
    first, second = packs[:, 0], packs[:, 1]
    first[:] = low ^ np.uint32((seed ^ number * _SLICE_LOW) & 0xFFFFFFFF)
    second[:] = (high + np.uint64((seed + number * _SLICE_HIGH) & _WORD)) >> np.uint64(17)
    np.multiply(second, _MIX, out=packs[:, 2])
    packs[:, 2] ^= first
    np.add(first, second, out=packs[:, 3])


@functools.lru_cache(maxsize=8)
def _pack_words(packs: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
    numbers = np.arange(packs, dtype=np.uint64)
    return (numbers * _PACK_LOW).astype(np.uint32), numbers * _PACK_HIGH
