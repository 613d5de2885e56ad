"""The NCCL installed here: its library, with versions and functions.

torch's wheels need a package with the library, or contain NCCL. A separate process asks a library
for its version, so that neither torch nor CUDA is loaded here.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tccl_py.children import child_command, child_environment
from tccl_py.errors import MeasurementError, limit_reached

if TYPE_CHECKING:
    from importlib import metadata

NAME = "libnccl.so.2"
ID_BYTES = 128
_PACKAGE_PLACE = Path("nvidia", "nccl", "lib")  # below site-packages
_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_NEEDED = re.compile(r"nvidia[-_]nccl[-_]cu[0-9]{1,3}", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,3}\.[0-9]{1,3}(?:\.[0-9]{1,3})?", re.ASCII)
_TIMEOUT_S = 60.0  # To import torch from a cold network file system takes long
_TORCH = "torch"  # Stands for torch's NCCL in place of a library
_UINT8 = 1
_SUM_OR_ROOT = {
    "ncclBroadcast": 1,
    "ncclReduce": 2,
    "ncclAllGather": 0,
    "ncclReduceScatter": 1,
    "ncclAllReduce": 1,
}
"""The operation and root of each collective, how many of them it has."""
_NOT_READY = 600
_UNDEFINED = -(1 << 31)
_MAGIC = 0xCAFEBEEF
_CONFIG_VERSION = 21800  # NCCL 2.18 and later read a configuration by its own size and version
_OLDEST = 21800


Message = tuple[int, int, int]
"""Address, bytes and the other rank of a send or receive."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.18; later structures are longer."""

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
    """NCCL in this process, 2.18 or later; errors are MeasurementErrors with NCCL's words."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(find_library())
        except OSError as error:
            raise MeasurementError(f"NCCL's library does not load ({error}); install it") from error
        version = ctypes.c_int()
        self._call("ncclGetVersion", ctypes.byref(version))
        self.version = version.value
        if self.version < _OLDEST:
            name = version_text(self.version)
            raise MeasurementError(f"NCCL {name} is too old; install 2.18 or later")

    def use_gpu(self, number: int) -> None:
        """Make a GPU (CUDA's number) current in this thread, by NCCL's runtime or the driver."""
        runtime = getattr(self._library, "cudaSetDevice", None)
        if runtime is not None:
            check_cuda("cudaSetDevice", runtime(ctypes.c_int(number)))
            return
        driver = cuda_driver()
        device, context = ctypes.c_int(), ctypes.c_void_p()
        check_cuda("cuInit", driver.cuInit(0))
        check_cuda("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), number))
        retained = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        check_cuda("cuDevicePrimaryCtxRetain", retained)
        check_cuda("cuCtxSetCurrent", driver.cuCtxSetCurrent(context))

    def unique_id(self) -> bytes:
        """Return the id by which the ranks of a new communicator meet."""
        unique_id = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(unique_id))
        return ctypes.string_at(ctypes.addressof(unique_id), ID_BYTES)

    def communicator(
        self, unique_id: bytes, *, rank: int, ranks: int = 2, channels: int | None = None
    ) -> int:
        """Become a rank of a communicator, on the current GPU; waits for the other ranks."""
        communicator = ctypes.c_void_p()
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
            ctypes.byref(communicator),
            ctypes.c_int(ranks),
            _UniqueId.from_buffer_copy(unique_id),
            ctypes.c_int(rank),
            ctypes.byref(config),
        )
        return int(communicator.value or 0)

    def collective(
        self, name: str, pointer: int, count: int, communicator: int, stream: int | None = None
    ) -> None:
        """Queue a collective of `count` bytes in place: a sum, and root 0."""
        self._call(
            name,
            ctypes.c_void_p(pointer),
            ctypes.c_void_p(pointer),
            ctypes.c_size_t(count),
            ctypes.c_int(_UINT8),
            *[ctypes.c_int(0)] * _SUM_OR_ROOT[name],
            ctypes.c_void_p(communicator),
            ctypes.c_void_p(stream),
        )

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], communicator: int
    ) -> None:
        """Queue sends and receives of bytes at once."""
        self._call("ncclGroupStart")
        for name, messages in (("ncclSend", sends), ("ncclRecv", receives)):
            for pointer, count, peer in messages:
                self._call(
                    name,
                    ctypes.c_void_p(pointer),
                    ctypes.c_size_t(count),
                    ctypes.c_int(_UINT8),
                    ctypes.c_int(peer),
                    ctypes.c_void_p(communicator),
                    ctypes.c_void_p(),
                )
        self._call("ncclGroupEnd")

    def allocate(self, size: int) -> int:
        """Return memory of the current GPU, which the end of the process frees."""
        pointer = ctypes.c_void_p()
        self._call("ncclMemAlloc", ctypes.byref(pointer), ctypes.c_size_t(size))
        return int(pointer.value or 0)

    def is_busy(self) -> bool:
        """Return whether the current GPU has yet to end what was queued."""
        query = getattr(self._library, "cudaStreamQuery", None) or cuda_driver().cuStreamQuery
        code = query(ctypes.c_void_p())
        if code != _NOT_READY:
            check_cuda("cuStreamQuery", code)
        return bool(code)

    def failure(self, communicator: int) -> str:
        """Return a communicator's asynchronous error, or ""."""
        state = ctypes.c_int()
        self._call("ncclCommGetAsyncError", ctypes.c_void_p(communicator), ctypes.byref(state))
        return self._words(state.value) if state.value else ""

    def abort(self, communicator: int) -> None:
        """End a communicator without waiting for the peer."""
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


@cache
def cuda_driver() -> ctypes.CDLL:
    """Return the NVIDIA driver's library."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise MeasurementError(f"the NVIDIA driver does not load ({error})") from error


def check_cuda(name: str, code: int) -> None:
    """Raise MeasurementError: a function of CUDA failed."""
    if code:
        raise MeasurementError(f"{name} failed with CUDA error {code}")


def find_library() -> str:
    """Return a job's library: of LD_LIBRARY_PATH, this Python's packages, or the loader's name."""
    folders = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    places = [Path(folder) / NAME for folder in folders]
    places += [Path(folder) / _PACKAGE_PLACE / NAME for folder in sys.path]
    return next((str(place) for place in places if place.is_file()), NAME)


def version_text(number: int) -> str:
    """Return the version of ncclGetVersion's number (NCCL_VERSION in nccl.h).

    >>> version_text(22809), version_text(2708)
    ('2.28.9', '2.7.8')
    """
    unit = 10000 if number >= 10000 else 1000
    return f"{number // unit}.{number % unit // 100}.{number % 100}"


def loaded_nccl(torch: Any) -> str:
    """Return the version of the NCCL that torch loaded in this process.

    torch itself knows only the version that it was built with, also where another one is installed.
    """
    number = ctypes.c_int()
    try:
        library = ctypes.CDLL(NAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return ".".join(map(str, torch.cuda.nccl.version()))
    library.ncclGetVersion(ctypes.byref(number))
    return version_text(number.value)


class InstalledNccl(msgspec.Struct, frozen=True, kw_only=True):
    """A version of NCCL in NVIDIA's form, and the place, as part of a sentence."""

    version: str
    source: str

    @property
    def minor(self) -> str:
        """The first two numbers, which decide the rules of NCCL."""
        return ".".join(self.version.split(".")[:2])


def installed_nccl() -> InstalledNccl | None:
    """Return the most likely NCCL of a job of this Python, or None."""
    return next(installed_nccls(), None)


def installed_nccls() -> Iterator[InstalledNccl]:
    """Yield the installed versions, torch's first; each is searched when it is asked for."""
    torch = _distribution("torch")
    of_torch = _of_torch(torch) if torch is not None else None
    if packaged := of_torch or _of_packages(_PACKAGES):
        yield packaged
    if version := _asked_version(NAME):
        yield InstalledNccl(version=version, source=f"{NAME} as the system finds it")


def _of_torch(torch: metadata.Distribution) -> InstalledNccl | None:
    """Return torch's NCCL; None where torch is built without NCCL, or does not say."""
    name = f"torch {torch.version}"
    matches = filter(None, map(_NEEDED.match, torch.requires or ()))
    package = _of_packages([match[0].replace("_", "-") for match in matches])
    if package is not None:
        return msgspec.structs.replace(package, source=f"{package.source}, which {name} loads")
    if not Path(str(torch.locate_file("torch/lib/libtorch_cuda.so"))).exists():
        return None
    version = _asked_version(_TORCH)
    return InstalledNccl(version=version, source=f"in {name}") if version else None


def _of_packages(names: Sequence[str]) -> InstalledNccl | None:
    for name in names:
        if (package := _distribution(name)) is None:
            continue
        # Packages put the library in one place, and users another one: it says itself which it is.
        library = Path(str(package.locate_file(_PACKAGE_PLACE / NAME)))
        version = _asked_version(str(library)) if library.is_file() else ""
        if match := _NUMBER.match(version or package.version):
            return InstalledNccl(version=match[0], source=f"of the package {name}")
    return None


def _distribution(name: str) -> metadata.Distribution | None:
    from importlib import metadata  # noqa: PLC0415 (slow to import: workers need none)

    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def _asked_version(library: str) -> str:
    """Return the version of a library or torch's NCCL, by a separate process; "" if unknown."""
    try:
        done = subprocess.run(
            child_command("tccl_py.nccl_library", library),
            env=child_environment(dict(os.environ)),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        reached = limit_reached(error)
        if reached is not None:
            raise reached from error
        return ""
    match = _NUMBER.fullmatch(done.stdout.strip())
    return match[0] if match is not None and done.returncode == 0 else ""


def _version_of(library: str) -> str:
    if library == _TORCH:
        import torch  # noqa: PLC0415 (only in a process of its own)

        return ".".join(map(str, torch.cuda.nccl.version()))
    number = ctypes.c_int()
    if ctypes.CDLL(library).ncclGetVersion(ctypes.byref(number)):
        return ""
    return version_text(number.value)


if __name__ == "__main__":
    print(_version_of(sys.argv[1]))
