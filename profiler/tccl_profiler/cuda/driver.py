"""The few driver calls that cupy does not offer: stream memory operations, through libcuda."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from tccl_py.errors import MeasurementError

_WAIT_UNTIL_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ


@functools.cache
def _library() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise MeasurementError(f"the NVIDIA driver's library does not load ({error})") from error


def _call(name: str, stream: int, address: int, value: int, flags: int) -> None:
    library = _library()
    function = getattr(library, f"{name}_v2", None) or getattr(library, name)
    code = function(
        ctypes.c_void_p(stream),
        ctypes.c_uint64(address),
        ctypes.c_uint64(value),
        ctypes.c_uint(flags),
    )
    if code:
        raise MeasurementError(f"{name} failed with CUDA error {code}")


def stream_waits(stream: int, address: int, value: int) -> None:
    """Hold what is queued next on the stream until the 64-bit word is `value` or more.

    Raises:
        MeasurementError: the driver refuses.
    """
    _call("cuStreamWaitValue64", stream, address, value, _WAIT_UNTIL_AT_LEAST)


def stream_writes(stream: int, address: int, value: int) -> None:
    """Write a 64-bit word when all that is queued on the stream before has been done.

    Raises:
        MeasurementError: the driver refuses.
    """
    _call("cuStreamWriteValue64", stream, address, value, 0)
