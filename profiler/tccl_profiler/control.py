"""The control segment: the words through which the controller and all devices meet.

One flag releases every lane of a set; each lane says there when it waits and what it did. The
layout of a record is the one of `Record` in cuda/pump.cu.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tccl_profiler.program import MAX_REPEATS
from tccl_profiler.shared_memory import Segment, create_segment

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
"""What a lane reports, times in the device's nanoseconds; written by the device alone."""

ABORT = 2**64 - 1
"""In place of an epoch: every lane stops at once."""
MAX_DEVICES = 64
MAX_LANES = 256
"""Lanes and copies of one device."""
MAX_STAMPS = 2048
"""Stamps of all copies of one device in one repeat."""
_WORDS_AT = 4096
_WORD_BYTES = 256
_RECORDS_AT = 64 * 1024
_RECORD_AREA = MAX_REPEATS * MAX_LANES * RECORD.itemsize
_STAMP_AREA = MAX_REPEATS * MAX_STAMPS * 8
_DEVICE_AREA = _RECORD_AREA + _STAMP_AREA

FLAG_AT = 0
"""Offset of the flag: lanes of epoch e start when it is e or more."""


def control_bytes(devices: int) -> int:
    """How large the segment is for so many devices."""
    return _RECORDS_AT + devices * _DEVICE_AREA


def question_at(slot: int) -> int:
    """Offset of the word by which device `slot` is asked for its time."""
    return _WORDS_AT + slot * _WORD_BYTES


def answer_at(slot: int) -> int:
    """Offset of the word in which device `slot` answers."""
    return question_at(slot) + _WORD_BYTES // 2


def records_at(slot: int, repeat: int) -> int:
    """Offset of the records of one repeat, MAX_LANES of them."""
    return _RECORDS_AT + slot * _DEVICE_AREA + repeat * MAX_LANES * RECORD.itemsize


def stamps_at(slot: int, repeat: int) -> int:
    """Offset of the stamps of one repeat's copies, MAX_STAMPS words."""
    return _RECORDS_AT + slot * _DEVICE_AREA + _RECORD_AREA + repeat * MAX_STAMPS * 8


class Control:
    """The controller's and the workers' view of the control segment."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._flag = segment.array(np.uint64, FLAG_AT, 1)

    @classmethod
    def create(cls, devices: int) -> Control:
        """Make the segment for so many devices.

        Raises:
            MeasurementError: no memory.
        """
        segment = create_segment(control_bytes(devices), numa_id=None, label="control")
        return cls(segment)

    def release(self, epoch: int) -> None:
        """Let every lane of this epoch and the earlier ones start: one store."""
        self._flag[0] = epoch

    def abort(self) -> None:
        """Stop every lane, those that run too."""
        self._flag[0] = ABORT

    def clear(self) -> None:
        """Take the flag back."""
        self._flag[0] = 0

    @property
    def flag(self) -> int:
        """The flag as it is now."""
        return int(self._flag[0])

    def records(self, slot: int, repeat: int, count: int) -> npt.NDArray[np.void]:
        """A view of `count` records of a device's repeat; it changes while lanes run."""
        return self.segment.array(RECORD, records_at(slot, repeat), count)

    def stamps(self, slot: int, repeat: int, count: int) -> npt.NDArray[np.uint64]:
        """A view of a repeat's first `count` stamps."""
        return self.segment.array(np.uint64, stamps_at(slot, repeat), count)

    def close(self) -> None:
        """Give the segment back."""
        self._flag = np.zeros(1, np.uint64)
        self.segment.close()
