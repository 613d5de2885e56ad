"""NCCL's library: where it lies, and the few of its functions that are needed here."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

from tccl_py.errors import MeasurementError

NAME = "libnccl.so.2"
ID_BYTES = 128
PACKAGE_PLACE = Path("nvidia", "nccl", "lib")
"""Folder of the library in NVIDIA's Python packages, below site-packages."""
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

    Args:
        path: the library's file; None is what `find_library` finds.

    Raises:
        MeasurementError: it does not load, or is older than 2.18.
    """

    def __init__(self, path: str | None = None) -> None:
        try:
            self._library = ctypes.CDLL(find_library() if path is None else path)
        except OSError as error:
            raise MeasurementError(f"NCCL's library does not load ({error}); install it") from error
        version = ctypes.c_int()
        self._call("ncclGetVersion", ctypes.byref(version))
        self.version = version.value
        if self.version < _OLDEST:
            name = version_text(self.version)
            raise MeasurementError(f"NCCL {name} is too old; install 2.18 or later")

    def use_gpu(self, number: int) -> None:
        """Make a GPU, as CUDA counts them, the current one of this thread.

        NCCL's functions act on it. NVIDIA's packages have a CUDA runtime of their own inside NCCL,
        which takes the driver's current context; a shared runtime is told itself.

        Raises:
            MeasurementError: there is no driver, or it refuses.
        """
        runtime = getattr(self._library, "cudaSetDevice", None)
        if runtime is not None:
            _check_cuda("cudaSetDevice", runtime(ctypes.c_int(number)))
            return
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise MeasurementError(f"the NVIDIA driver does not load ({error})") from error
        device, context = ctypes.c_int(), ctypes.c_void_p()
        _check_cuda("cuInit", driver.cuInit(0))
        _check_cuda("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), number))
        retained = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        _check_cuda("cuDevicePrimaryCtxRetain", retained)
        _check_cuda("cuCtxSetCurrent", driver.cuCtxSetCurrent(context))

    def unique_id(self) -> bytes:
        """What the members of a new communicator meet by."""
        found = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(found))
        return ctypes.string_at(ctypes.addressof(found), ID_BYTES)

    def communicator(
        self, unique_id: bytes, *, rank: int, ranks: int = 2, channels: int | None = None
    ) -> int:
        """Become a rank of a communicator, on the current GPU; waits for the others.

        Args:
            unique_id: what all ranks were told.
            rank: this one's number.
            ranks: how many there are.
            channels: how many to use; None leaves that to NCCL.

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
            min_ctas=_UNDEFINED if channels is None else channels,
            max_ctas=_UNDEFINED if channels is None else channels,
            net_name=None,
            split_share=_UNDEFINED,
        )
        self._call(
            "ncclCommInitRankConfig",
            ctypes.byref(found),
            ctypes.c_int(ranks),
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


def _check_cuda(name: str, code: int) -> None:
    if code:
        raise MeasurementError(f"{name} failed with CUDA error {code}")


def find_library() -> str:
    """Return the library that a job would load, as a path or as a name for the loader.

    The folders of LD_LIBRARY_PATH come first, then the package of this Python that torch brings
    along, then what the system has.
    """
    told = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    places = [Path(one) for one in told] + [Path(one) / PACKAGE_PLACE for one in sys.path]
    return next((str(place / NAME) for place in places if (place / NAME).is_file()), NAME)


def version_text(number: int) -> str:
    """Return the version that ncclGetVersion's number stands for.

    NCCL_VERSION(X, Y, Z) in nccl.h is X * 10000 + Y * 100 + Z since 2.9, X * 1000 + ... before.

    >>> version_text(22809), version_text(2708)
    ('2.28.9', '2.7.8')
    """
    unit = 10000 if number >= 10000 else 1000
    return f"{number // unit}.{number % unit // 100}.{number % 100}"
