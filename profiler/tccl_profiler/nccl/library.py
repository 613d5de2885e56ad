"""The NCCL library, by the few of its functions that are needed here."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

from tccl_py.errors import MeasurementError

NAME = "libnccl.so.2"
ID_BYTES = 128
_PIP_PLACE = Path("nvidia", "nccl", "lib")
_UINT8 = 1
_UNDEFINED = -(1 << 31)
_MAGIC = 0xCAFEBEEF
_CONFIG_VERSION = 21800
"""NCCL 2.18 and later read a configuration by the size and the version it says it has."""
_OLDEST = 21800


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.18, of which later ones are longer."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )


class Library:
    """NCCL as this process loads it; what it refuses is a MeasurementError with its own words.

    Raises:
        MeasurementError: it does not load, or is older than 2.18.
    """

    def __init__(self) -> None:
        self._library = _loaded()
        version = ctypes.c_int()
        self._call("ncclGetVersion", ctypes.byref(version))
        self.version = version.value
        if self.version < _OLDEST:
            raise MeasurementError(f"NCCL {self.version} is too old to carry bytes: 2.18 or later")

    def unique_id(self) -> bytes:
        """What the members of a new communicator meet by."""
        found = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(found))
        return ctypes.string_at(ctypes.addressof(found), ID_BYTES)

    def communicator(self, unique_id: bytes, *, rank: int, channels: int) -> int:
        """Member `rank` of a communicator of two, on the current GPU; waits for the other.

        Raises:
            MeasurementError: NCCL could not make it.
        """
        found = ctypes.c_void_p()
        config = _Config(
            size=ctypes.sizeof(_Config),
            magic=_MAGIC,
            version=_CONFIG_VERSION,
            blocking=1,
            cga_cluster_size=_UNDEFINED,
            min_ctas=channels,
            max_ctas=channels,
            net_name=None,
            split_share=_UNDEFINED,
        )
        self._call(
            "ncclCommInitRankConfig",
            ctypes.byref(found),
            ctypes.c_int(2),
            _UniqueId.from_buffer_copy(unique_id),
            ctypes.c_int(rank),
            ctypes.byref(config),
        )
        return int(found.value or 0)

    def broadcast(self, pointer: int, size: int, communicator: int, stream: int) -> None:
        """Queue `size` bytes from rank 0's `pointer` to rank 1's, in the order of the stream."""
        self._call(
            "ncclBroadcast",
            ctypes.c_void_p(pointer),
            ctypes.c_void_p(pointer),
            ctypes.c_size_t(size),
            ctypes.c_int(_UINT8),
            ctypes.c_int(0),
            ctypes.c_void_p(communicator),
            ctypes.c_void_p(stream),
        )

    def failure(self, communicator: int) -> str:
        """What has gone wrong in a communicator since, or ""."""
        state = ctypes.c_int()
        self._call("ncclCommGetAsyncError", ctypes.c_void_p(communicator), ctypes.byref(state))
        return self._words(state.value) if state.value else ""

    def abort(self, communicator: int) -> None:
        """End a communicator, whatever its other member does."""
        self._call("ncclCommAbort", ctypes.c_void_p(communicator))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise MeasurementError(f"{name}: {self._words(code)}")

    def _words(self, code: int) -> str:
        texts = []
        for name, argument in (("ncclGetErrorString", code), ("ncclGetLastError", None)):
            function = getattr(self._library, name)
            function.restype = ctypes.c_char_p
            texts.append((function(argument) or b"").decode(errors="replace").strip())
        return ": ".join(filter(None, texts)) or f"error {code}"


def _loaded() -> Any:
    """The library that a job would load: where the loader is told to look, then Python's package of
    it, which torch brings along, then the system's.

    Raises:
        MeasurementError: there is none.
    """
    told = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    places = [Path(one) for one in told] + [Path(one) / _PIP_PLACE for one in sys.path]
    found = (str(place / NAME) for place in places if (place / NAME).is_file())
    try:
        return ctypes.CDLL(next(found, NAME))
    except OSError as error:
        raise MeasurementError(
            f"NCCL's library does not load ({error}); install it, or measure the network by TCP: "
            "--network tcp"
        ) from error
