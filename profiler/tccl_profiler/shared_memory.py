"""Memory that several processes share, on the NUMA node asked for, and checked to be there.

A segment is a memfd: it has no name in any file system, so nothing of it outlives its processes,
however they end. Other processes get its file descriptor over a socket (`channel.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tccl_profiler import numa
from tccl_py.errors import MeasurementError
from tccl_py.limits import limit_reached

_NAME_BYTES = 200  # memfd_create takes up to 249


class Segment:
    """Shared memory mapped into this process; it owns the file descriptor and the mapping.

    Made by `create_segment`, or by `attach` from a descriptor that another process sent; both turn
    what the constructor raises into a MeasurementError. Python's mmap keeps a duplicate of the
    descriptor, so that a segment costs two.
    """

    def __init__(self, fd: int, size: int, label: str) -> None:
        self._fd = fd
        self._size = size
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
    def attach(cls, fd: int, size: int, label: str) -> Segment:
        """Map a segment of another process; the descriptor belongs to the result, or is closed.

        Raises:
            MeasurementError: it is no memory of that size.
        """
        try:
            segment = cls(fd, size, label)
        except (OSError, ValueError, OverflowError) as error:
            raise MeasurementError(
                f"shared memory {label}: cannot map {size} bytes: {error}"
            ) from error
        # Reads map the pages now, not in the first transfer that is timed; contents stay.
        segment.array(np.uint8, 0, size)[:: mmap.PAGESIZE].max()
        return segment

    @property
    def fd(self) -> int:
        """Descriptor to send to other processes; it stays the segment's own."""
        self._open()
        return self._fd

    @property
    def size(self) -> int:
        """Bytes, as asked for."""
        return self._size

    @property
    def address(self) -> int:
        """Where the mapping begins in this process."""
        self._open()
        return self._address

    def array(self, dtype: npt.DTypeLike, offset: int, count: int) -> npt.NDArray[Any]:
        """View of `count` elements that begin `offset` bytes into the segment, writable.

        Raises:
            MeasurementError: they are not inside the segment.
        """
        mapping, kind = self._open(), np.dtype(dtype)
        if offset < 0 or count < 0 or offset + count * kind.itemsize > self._size:
            raise MeasurementError(
                f"shared memory {self.label}: {count} x {kind} from byte {offset} is not inside "
                f"its {self._size} bytes"
            )
        return np.frombuffer(mapping, kind, count, offset)

    def close(self) -> None:
        """Give memory and descriptor back; views of it that still live keep the memory until then.

        Closing twice does nothing.
        """
        fd, self._fd = self._fd, -1
        mapping, self._mapping = self._mapping, None
        if fd >= 0:
            os.close(fd)
        if mapping is not None:
            # With views alive it cannot be unmapped under them; the last of them unmaps it.
            with contextlib.suppress(BufferError):
                mapping.close()

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self) -> mmap.mmap:
        if self._mapping is None:
            raise MeasurementError(f"shared memory {self.label} is closed")
        return self._mapping


def create_segment(size: int, *, numa_id: int | None, label: str) -> Segment:
    """Make zeroed shared memory, every page faulted in and on the node asked for (None: any).

    Where a container refuses mbind, a thread on the node's CPUs touches the pages first.

    Raises:
        MeasurementError: no such node, not enough memory, pages lie elsewhere, or none can tell.
    """
    place = "any NUMA node" if numa_id is None else f"NUMA node {numa_id}"
    try:
        _refuse_impossible(size, numa_id)
        segment = _empty_segment(size, label)
        try:
            _fill_with_pages(segment, numa_id)
        except BaseException:
            segment.close()
            raise
    except (OSError, MeasurementError) as error:
        reason = _reason(error)
        raise MeasurementError(
            f"shared memory {label}, {size} bytes on {place}: {reason}"
        ) from error
    return segment


def _refuse_impossible(size: int, numa_id: int | None) -> None:
    """Say before it is tried what cannot be had; faulting it in could end in the OOM killer."""
    if size < 1:
        raise MeasurementError("a size of at least one byte is right")
    nodes = numa.online_nodes()
    if numa_id is not None and numa_id not in nodes:
        raise MeasurementError(f"no such node; online are {', '.join(map(str, nodes))}")
    for node in dict.fromkeys((None, numa_id)):
        available = numa.available_bytes(node)
        if available is not None and size > available:
            owner = "the machine" if node is None else "the node"
            raise MeasurementError(f"{owner} has {available} bytes available")


def _empty_segment(size: int, label: str) -> Segment:
    """Map a new memfd that has its size, but no pages yet."""
    name = f"tccl-{label}".replace("\0", "?").encode()[:_NAME_BYTES]
    fd = os.memfd_create(os.fsdecode(name))
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return Segment(fd, size, label)


def _fill_with_pages(segment: Segment, numa_id: int | None) -> None:
    """Fault the pages in on the node, and look where they came to lie."""
    if numa_id is None or len(numa.online_nodes()) == 1:
        _fault_in(segment)
        return
    try:
        numa.bind(segment.address, segment.size, numa_id)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS):
            raise
        with _running_on(numa_id):
            _fault_in(segment)
    else:
        _fault_in(segment)
    _check_node(segment, numa_id)


def _fault_in(segment: Segment) -> None:
    """Have the kernel give every page, under the policy or CPU of now; OSError if it cannot."""
    # In huge pages FIFOs that lie a power of two apart share cache sets: on 4x H200 a bounce ring
    # with much memory under way lost a quarter of its rate. NCCL's FIFOs lie unevenly.
    with contextlib.suppress(OSError):  # a kernel without huge pages
        segment._open().madvise(mmap.MADV_NOHUGEPAGE)
    try:
        # Before posix_fallocate, which knows no mapping, hence no such advice.
        numa.populate(segment.address, segment.size)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: an older kernel
            raise
    # Where populating is not known, this reports lack of memory; a touch would end in SIGBUS.
    os.posix_fallocate(segment.fd, 0, segment.size)
    segment.array(np.uint8, 0, segment.size)[:: mmap.PAGESIZE] = 0


def _check_node(segment: Segment, numa_id: int) -> None:
    """Raise MeasurementError if pages lie on another node."""
    seen = numa.pages_by_node(segment.address, segment.size)
    elsewhere = {node: pages for node, pages in sorted(seen.items()) if node != numa_id}
    if elsewhere or not seen:
        places = ", ".join(
            f"{pages} on {'no node' if node == numa.NO_NODE else f'node {node}'}"
            for node, pages in elsewhere.items()
        )
        raise MeasurementError(
            f"of {sum(seen.values())} pages looked at, these lie elsewhere: {places or 'none seen'}"
        )


@contextlib.contextmanager
def _running_on(node: int) -> Iterator[None]:
    """Run the calling thread on a node's CPUs, whose memory it then touches first."""
    before = numa.pin_to_cpus(numa.cpus_of_node(node))
    try:
        yield
    finally:
        numa.pin_to_cpus(before)


def _reason(error: OSError | MeasurementError) -> str:
    """Say in a sentence why memory cannot be had there."""
    if isinstance(error, MeasurementError):
        return str(error)
    if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFAULT):
        # EFAULT is what populating says where a touch would be a SIGBUS.
        return f"not enough memory ({error.strerror}); a smaller size may fit"
    if error.errno == errno.EINVAL and error.filename == "mbind":
        return "the node is not open to this process; see Mems_allowed_list in /proc/self/status"
    return str(limit_reached(error) or f"the kernel refuses it: {error.strerror}")
